"""nvidia-smi topo -m and NCCL topology XML."""

from __future__ import annotations


class TopologyFileError(ValueError):
    """The text holds no topology that can be read, or is refused as unsafe; says in which line and why."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.source = source
        self.line = line
        self.message = message
