"""Texts that users give in place of a log: NCCL's RAS, ibstat, rdma link and the kernel's log.

Formats: NCCL's RAS (collectives/traces/ras.py); ``ibstat`` of infiniband-diags (src/ibstat.c); ``rdma link`` of
iproute2 (rdma/link.c), as text; ``dmesg`` and ``journalctl -k``. Messages of the kernel that name a fault are rows of
messages.toml; here the text is only recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from collectives.nccl_log.codes import problem_of
from collectives.nccl_log.transport import LogProblem, ProofLine
from contracts.tables import read_patterns

MAX_TEXT_BYTES = 64 << 20
_KINDS = read_patterns(__file__, "facts.toml", "kinds", str.encode)
_TEXTS = read_patterns(__file__, "facts.toml", "others", str)
_SHOWN = 8  # ports that a message names


class _Port(NamedTuple):
    """The state of an RDMA port, and the line that shows it."""

    name: str
    state: str
    physical: str
    line: int
    text: str


def kind_of(start: bytes) -> str | None:
    """Recognise a text by its beginning: "RAS", "ibstat", "rdma link" or "kernel"; None if it may be a log."""
    for name, kind in (("ras", "RAS"), ("ibstat", "ibstat"), ("rdma_link", "rdma link")):
        if _KINDS[name].search(start):
            return kind
    lines = start[:65_536].count(b"\n") or 1
    return "kernel" if b"NCCL" not in start and len(_KINDS["kernel"].findall(start[:65_536])) * 2 > lines else None


def problem_of_text(kind: str, text: bytes, file: str = "") -> LogProblem:
    """Return the ports that are down in such a text, or a problem that says what the text is."""
    if kind == "kernel":  # its faults are found as in every log
        return problem_of("other_text", "the kernel's log")
    if kind == "RAS":
        return problem_of("other_text", "a report of NCCL's RAS, which `topoflight why FILE` reads")
    ports = list((_ibstat if kind == "ibstat" else _rdma_link)(text.decode("utf-8", "replace")))
    down = [port for port in ports if port.state.lower() != "active"]
    if not down:
        return problem_of("other_text", f"the output of {kind}: all {len(ports)} ports are active")
    words = [
        f"{port.name}: state {port.state}{', physical state ' * bool(port.physical)}{port.physical}" for port in down
    ]
    more = f"; and {len(down) - _SHOWN} more" if len(down) > _SHOWN else ""
    lines = tuple(ProofLine(line=port.line, text=port.text[:300], proves=port.name, file=file) for port in down[:3])
    return problem_of("port_down", "; ".join(words[:_SHOWN]) + more, lines=lines, count=len(down))


def _ibstat(text: str) -> Iterator[_Port]:
    device, port, state = "", "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TEXTS["ca"].match(line):
            device, port = found[1], ""
        elif field := _TEXTS["field"].match(line):
            port = field[2] or port
            state = field[3] or state
            if field[4] and port:
                yield _Port(f"{device} port {port}", state.strip(), field[4].strip(), number, line.strip())


def _rdma_link(text: str) -> Iterator[_Port]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TEXTS["link"].match(line):
            yield _Port(found[1], found[2], found[3] or "", number, line.strip())
