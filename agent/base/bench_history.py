"""The benchmarks of before: a line each in the state folder, so that a page can say whether it was ever better.

The whole result is kept of the last one only (agent/base/result_store.py); of the others what a person compares: the
bus bandwidth of each collective at the largest size that was measured and verified.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.base import units
from agent.base.documents import write_atomic
from collectives.bench.results import BenchResult
from contracts import bounded
from contracts.plain import loads as plain

FILE = "benches.json"
KEPT = 50
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """One collective at the largest size of its benchmark."""

    op: str
    size_bytes: int
    busbw_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One benchmark of the history."""

    started_at_seconds: float
    ranks: int
    backend: str
    hosts: int
    complete: bool
    gdrdma: str | None  # what NCCL's log proved; None where there was none
    largest: tuple[Largest, ...]

    @property
    def job(self) -> str:
        """What must be alike for two lines to be compared: "8 nccl ranks on 1 host"."""
        return f"{self.ranks} {self.backend} ranks on {units.count(self.hosts, 'host')}"


def line_of(result: BenchResult) -> Line:
    """The line of a result."""
    best: dict[str, Largest] = {}
    for m in result.measurements:
        if m.verified and m.bytes >= (best[m.op].size_bytes if m.op in best else 0):
            best[m.op] = Largest(op=m.op, size_bytes=m.bytes, busbw_bytes_per_second=m.busbw_bytes_per_second)
    return Line(
        started_at_seconds=result.started_at_seconds, ranks=result.world_size, backend=result.backend,
        hosts=len(set(result.hosts)) or 1, complete=result.complete,
        gdrdma=result.evidence.gdrdma if result.evidence else None, largest=tuple(best.values()),
    )  # fmt: skip


def remember(folder: Path, result: BenchResult) -> None:
    """Add a result to the history, once; raises OSError."""
    new = line_of(result)
    lines = [new, *(old for old in read(folder) if old.started_at_seconds != new.started_at_seconds)]
    lines.sort(key=lambda line: -line.started_at_seconds)
    write_atomic(folder / FILE, json.dumps([asdict(line) for line in lines[:KEPT]], indent=1) + "\n")


def read(folder: Path) -> tuple[Line, ...]:
    """The history, newest first; what cannot be read is left out."""
    try:
        found = plain(bounded.read(folder / FILE, _MOST_BYTES))
    except (OSError, ValueError):
        return ()
    lines = [_line(each) for each in found[:KEPT]] if isinstance(found, list) else []
    return tuple(sorted((line for line in lines if line), key=lambda line: -line.started_at_seconds))


def _line(made: Any) -> Line | None:
    try:
        largest = [
            Largest(op=str(each["op"])[:64], size_bytes=int(each["size_bytes"]),
                    busbw_bytes_per_second=float(each["busbw_bytes_per_second"]))
            for each in made["largest"][:16]
        ]  # fmt: skip
        gdrdma = made.get("gdrdma")
        return Line(
            started_at_seconds=float(made["started_at_seconds"]), ranks=int(made["ranks"]), hosts=int(made["hosts"]),
            backend=str(made["backend"])[:32], complete=made["complete"] is True,
            gdrdma=str(gdrdma)[:32] if gdrdma is not None else None, largest=tuple(largest),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
