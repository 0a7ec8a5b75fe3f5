"""Readers of `nvidia-smi topo -m` output and of NCCL topology XML."""

from __future__ import annotations


class TopologyFileError(ValueError):
    """The text has no readable topology, or is rejected as unsafe; the message names the line and the reason."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.source = source
        self.line = line
