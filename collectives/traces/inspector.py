"""NCCL's Inspector plugin: how long each collective took on each rank, and the bandwidth it reached.

Specification: plugins/profiler/inspector of NCCL 2.28 on, README and inspector_json.cc (JSON lines of format v4.0, and
what older releases wrote without `comm_name` and `coll_timing_source`) and inspector_prom.cc (Prometheus text).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from collectives.nccl_log.reader import BLOCK_BYTES, LogFileError, Unpacked
from contracts import plain

MOST_LINES = 2_000_000  # of all files; 300 bytes each
MOST_LINE_BYTES = 1 << 16
MOST_FILES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Performed:
    """One collective on one rank, or with Prometheus the newest of its kind on one GPU."""

    comm: str
    rank: int | None
    host: str
    op: str
    number: int | None = None
    peer: int | None = None
    bytes: int | None = None
    size: str = ""  # Prometheus: "4-5GB"
    gpu: str = ""
    seconds: float | None = None
    busbw: float | None = None  # bytes per second


def read_line(line: str) -> Performed | None:
    """One JSON line, or one Prometheus sample of bus bandwidth; None for anything else."""
    if line.startswith("{"):
        try:
            found = plain.loads(line, unknown_numbers=True)
        except plain.PlainError:
            return None
        return _json(found) if isinstance(found, dict) else None
    return _sample(line)


def _json(found: Mapping[str, Any]) -> Performed | None:
    header, about = found.get("header"), found.get("metadata")
    kind = "coll" if isinstance(found.get("coll_perf"), dict) else "p2p"
    perf = found.get(f"{kind}_perf")
    if not isinstance(header, dict) or not isinstance(perf, dict):
        return None
    micro, rate = _number(perf.get(f"{kind}_exec_time_us")), _number(perf.get(f"{kind}_busbw_gbs"))
    host = about.get("hostname") if isinstance(about, dict) else None
    return Performed(
        comm=str(header.get("id"))[:80], rank=_whole(header.get("rank")), host=str(host or "?")[:253],
        op=str(perf.get(kind))[:40], number=_whole(perf.get(f"{kind}_sn")), peer=_whole(perf.get("p2p_peer")),
        bytes=_whole(perf.get(f"{kind}_msg_size_bytes")), seconds=micro / 1e6 if micro is not None else None,
        busbw=rate * 1e9 if rate is not None else None,
    )  # fmt: skip


_SAMPLE = re.compile(r"^nccl_(?:p2p_)?bus_bandwidth_gbs\{([^{}]{0,2000})\} ([\d.eE+-]{1,40})")
_LABEL = re.compile(r'(\w{1,40})="([^"]{0,253})"')


def _sample(line: str) -> Performed | None:
    row = _SAMPLE.match(line)
    if row is None:
        return None
    labels = dict(_LABEL.findall(row[1]))
    try:
        rate = float(row[2])
    except ValueError:
        return None
    return Performed(
        comm=labels.get("comm_name", "?"), rank=None, host=labels.get("node", "?"), gpu=labels.get("gpu", ""),
        op=labels.get("collective") or labels.get("p2p_operation", "?"), size=labels.get("message_size", ""),
        busbw=rate * 1e9 if 0 <= rate < 1e6 else None,
    )  # fmt: skip


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


_KINDS = {".log", ".json", ".jsonl", ".prom", ".txt"}


def lines_of(folder: Path) -> Iterator[str]:
    """The lines of all files of a dump folder, packed or not. Raises OSError, LogFileError."""
    left = MOST_LINES
    for path in sorted(p for p in folder.rglob("*") if _KINDS & {suffix.lower() for suffix in p.suffixes[-2:]})[
        :MOST_FILES
    ]:
        with path.open("rb") as stream:
            rest = b""
            try:
                unpacked = Unpacked(stream)
                while left > 0 and (block := unpacked.read(BLOCK_BYTES)):
                    *whole, rest = (rest[-MOST_LINE_BYTES:] + block).split(b"\n")
                    left -= len(whole)
                    yield from (line[:MOST_LINE_BYTES].decode("utf-8", errors="replace").strip() for line in whole)
            except LogFileError as error:
                raise LogFileError(f"{path}: {error}") from None
            yield rest.decode("utf-8", errors="replace").strip()


def slow_members(rows: Iterable[Performed], outlier: float) -> list[tuple[str, str, float]]:
    """(host or rank, evidence, share of the median) of members whose own rate is below the median of all by `outlier`.

    Collectives end together, so a slow one shows everywhere; what differs between members of one communicator is who
    spends less time within: whoever comes last waits for nobody. That member's own time is the shortest.
    """
    groups: dict[tuple[str, str, int | str | None], dict[str, list[float]]] = {}
    for row in rows:
        if row.seconds is None or row.peer is not None:
            continue
        name = f"rank {row.rank} on {row.host}" if row.rank is not None else f"{row.host} {row.gpu}"
        groups.setdefault((row.comm, row.op, row.bytes), {}).setdefault(name, []).append(row.seconds)
    found: dict[str, tuple[str, float]] = {}
    for (comm, op, size), members in groups.items():
        times = {name: median(seconds) for name, seconds in members.items() if len(seconds) >= 8}
        if len(times) < 3:
            continue
        usual = median(times.values())
        name = min(times, key=lambda one: times[one])
        if usual > outlier * times[name]:
            evidence = (
                f"{op} of {size} bytes in {comm}: {name} is within for {times[name] * 1e3:.3g} ms, the others for "
                f"{usual * 1e3:.3g} ms: they wait for it"
            )
            found.setdefault(name, (evidence, usual / times[name]))
    return [(name, evidence, times) for name, (evidence, times) in found.items()]
