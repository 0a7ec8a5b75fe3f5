"""NCCL's RAS: which ranks of a communicator answered, and how many collectives each has launched.

Specification: NCCL user guide, troubleshooting/ras (text since 2.24, counts by kind since 2.26, JSON since 2.28.7),
and src/ras/client_support.cc of 2.24 to 2.30; by the texts in libnccl.so.2 of the wheels nvidia-nccl-cu13 2.31.2 and
2.32.3 these answer the same. The text lists the members of a group only if they are outliers. The other ranks of the
communicator are not listed, and these are often the ranks that are behind.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from collectives.traces.rank_files import read_whole
from contracts import plain
from contracts.tables import read_patterns

_TEXTS = read_patterns(__file__, "texts.toml", "ras", str)
MAX_BYTES = 256 << 20  # JSON takes some 600 bytes a rank and communicator
MAX_RANKS = 1 << 20
ANSWER_SECONDS = 10.0  # for which the socket may be silent


class RasError(ValueError):
    """The text is not an answer of RAS, or is in a form that is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasRank:
    """One rank of a communicator."""

    rank: int
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # launched, by kind; text of 2.24 and 2.25: "all"
    missing: str = ""  # "dead", "unresponsive", "no answer"; empty if it answered


@dataclass(frozen=True, slots=True, kw_only=True)
class RasComm:
    """One communicator. `ranks` has only the ranks that the answer names."""

    id: str
    size: int
    ranks: dict[int, RasRank] = field(default_factory=dict)
    spread: dict[str, dict[int, int]] = field(default_factory=dict)  # kind -> count -> how many ranks, from text


@dataclass(frozen=True, slots=True, kw_only=True)
class RasReport:
    """One answer of RAS."""

    comms: tuple[RasComm, ...] = ()
    dead: tuple[RasRank, ...] = ()  # processes, whose rank the text does not give: rank -1
    timeouts: int = 0
    total: int = 0  # communicators that RAS knows; the text lists those without a fault in a table only


def looks_like_report(start: bytes) -> bool:
    """Whether a text that begins like this is an answer of RAS."""
    return _TEXTS["start"].search(start.decode("utf-8", errors="replace")) is not None


def read(raw: bytes) -> RasReport:
    """Read a report, in JSON or text. Raises RasError."""
    text = raw.decode("utf-8", errors="replace")
    start = text.find("{")
    if start >= 0 and '"communicators"' in text[start : start + 4096]:
        return _read_json(text[start:])
    if '"PEER_' in text:
        raise RasError("events of its monitor in JSON: give them as text")
    if "NCCL DIAG" in text or "=== RAS Diagnostics ===" in text:
        raise RasError("these are its diagnostics: give the file as LOG")
    if not _TEXTS["said"].search(text):
        raise RasError("no answer of NCCL's RAS: neither its JSON nor its text")
    return _read_text(text)


def _read_json(text: str) -> RasReport:
    try:
        report = plain.loads(_TEXTS["no_comma"].sub(r"\1,", text[: text.rindex("}") + 1]))
    except (plain.PlainError, ValueError) as error:
        raise RasError(f"no answer of NCCL's RAS: {error}") from None
    rows = report.get("communicators") if isinstance(report, dict) else None
    if not isinstance(rows, list):
        raise RasError("no answer of NCCL's RAS: must hold `communicators`")
    comms = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        ranks = {rank.rank: rank for rank in (_rank(r, here=True) for r in _read_rows(row, "ranks")) if rank}
        ranks |= {rank.rank: rank for rank in (_rank(r, here=False) for r in _read_rows(row, "missing_ranks")) if rank}
        identity = f"{row.get('hash')}/{row.get('secondary_hash')}"[:100]
        comms.append(RasComm(id=identity, size=read_whole(row.get("size")) or len(ranks), ranks=ranks))
    ras = report.get("ras")
    timeouts = read_whole(ras.get("timeouts_count")) if isinstance(ras, dict) else 0
    return RasReport(comms=tuple(comms), timeouts=timeouts or 0, total=len(comms))


def _read_rows(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = row.get(name)
    return [item for item in rows[:MAX_RANKS] if isinstance(item, dict)] if isinstance(rows, list) else []


def _rank(row: Mapping[str, Any], *, here: bool) -> RasRank | None:
    number, status = read_whole(row.get("rank")), row.get("status")
    if number is None:
        return None
    state = status if isinstance(status, dict) else {}
    marks = {"considered_dead": "dead", "unresponsive": "unresponsive"}
    missing = "" if here else next((word for mark, word in marks.items() if state.get(mark) is True), "no answer")
    counts = row.get("collective_counts")
    return RasRank(
        rank=number, host=str(row["host"])[:253] if isinstance(row.get("host"), str) else None,
        pid=read_whole(row.get("pid")), gpu=read_whole(row.get("nvml_dev")), missing=missing,
        counts={str(k)[:40]: n for k, v in counts.items() if (n := read_whole(v)) is not None}
        if isinstance(counts, dict) else {},
    )  # fmt: skip


# Text -----------------------------------------------------------------------------------------------------------------


class _Text:
    """Reads the lines of a report in text."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.comms: dict[str, RasComm] = {}
        self.dead: list[RasRank] = []
        self.comm: RasComm | None = None
        self.section, self.kind = "", "all"
        self.count: int | None = None
        self.total = 0

    def line(self, line: str) -> None:
        if not self.comm and (row := _TEXTS["group"].match(line)) and self.section == "":
            self.sizes[int(row[1])] = int(row[4])
            self.total += int(row[2])
        elif head := _TEXTS["head"].match(line):
            self.comm = self.comms.setdefault(head[2], RasComm(id=head[2], size=self.sizes.get(int(head[1]), 0)))
            self.section, self.kind, self.count = head[3], "all", None
        elif line.rstrip() in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            self.comm, self.section = None, line.strip()
        elif (process := _TEXTS["process"].search(line)) and (process[1] or not self.comm):
            state = "dead" if process[1] or self.section == "DEAD" else "no answer"
            gpu = int(process[4].split(",")[0] or 0)
            self.dead.append(RasRank(rank=-1, host=process[3], pid=int(process[2]), gpu=gpu, missing=state))
        elif self.comm:
            self.within(line, self.comm)

    def within(self, line: str, comm: RasComm) -> None:
        if kind := _TEXTS["kind"].search(line):
            self.kind, self.count = kind[1] or "all", None
        elif count := _TEXTS["count"].match(line):
            self.count = int(count[2] or 0)
            comm.spread.setdefault(self.kind, {})[self.count] = int(count[1])
        elif missing := _TEXTS["missing"].match(line):
            numbers = [int(word) for word in missing[1].split(",") if word.strip().isdecimal()]
            comm.ranks.update({number: RasRank(rank=number, missing="no answer") for number in numbers})
        elif match := _TEXTS["one"].match(line):
            self.one(match, comm)

    def one(self, match: re.Match[str], comm: RasComm) -> None:
        group = int(match[2]) if match[2] else 0 if match[3] else None
        if group is not None:
            spread = comm.spread.setdefault(self.kind, {})
            spread[group] = spread.get(group, 0) + 1
        count = group if group is not None else self.count
        before = comm.ranks.get(int(match[1]), RasRank(rank=-1))
        added = {self.kind: count} if self.section == "MISMATCH" and count is not None else {}
        gpu = int(match[4].split(",")[0]) if match[4] and match[4].split(",")[0] else None
        comm.ranks[int(match[1])] = RasRank(
            rank=int(match[1]), host=match[6], pid=int(match[5]) if match[5] else None, gpu=gpu,
            counts={**before.counts, **added},
            missing="no answer" if self.section == "INCOMPLETE" else before.missing,
        )  # fmt: skip


def _read_text(text: str) -> RasReport:
    reader = _Text()
    for line in text.splitlines():
        reader.line(line[:4096])
    match = re.search(r"Encountered (\d{1,9}) communication timeout", text)
    return RasReport(comms=_place(tuple(reader.comms.values()), reader.dead), dead=tuple(reader.dead),
                     timeouts=int(match[1]) if match else 0, total=max(reader.total, len(reader.comms)))  # fmt: skip


def _place(comms: tuple[RasComm, ...], processes: list[RasRank]) -> tuple[RasComm, ...]:
    """Add the process that RAS calls missing or dead to the missing rank, if there is exactly one of each."""
    unique = {(one.host, one.pid): one for one in sorted(processes, key=lambda one: one.missing == "dead")}
    missing = {rank for comm in comms for rank, member in comm.ranks.items() if member.missing}
    if len(unique) != 1 or len(missing) != 1:
        return comms
    (process,), (rank,) = unique.values(), missing
    placed = replace(process, rank=rank)
    return tuple(replace(comm, ranks={**comm.ranks, rank: placed}) if rank in comm.ranks else comm for comm in comms)


def find_laggards(comm: RasComm) -> tuple[dict[int, str], str]:
    """Return the ranks that launched the fewest collectives, each with the evidence, and one sentence about all.

    Both are empty if all ranks launched the same number. There are no ranks if the report does not identify them.
    """
    gone = {rank: member.missing for rank, member in comm.ranks.items() if member.missing}
    kinds = {kind for member in comm.ranks.values() for kind in member.counts} | set(comm.spread)
    laggards: dict[int, str] = {}
    text = ""
    for kind in sorted(kinds):
        counts = {rank: member.counts[kind] for rank, member in comm.ranks.items() if kind in member.counts}
        levels = comm.spread.get(kind) or Counter(counts.values())
        if len(levels) < 2:
            continue
        lowest, most = min(levels), max(levels)
        ranks = {rank for rank, n in counts.items() if n == lowest}
        if len(ranks) < levels[lowest] and comm.size <= MAX_RANKS:  # the text lists the others: these are the rest
            others = set(range(comm.size)) - {rank for rank, n in counts.items() if n != lowest} - set(gone)
            ranks = others if len(others) == levels[lowest] else ranks
        laggards |= dict.fromkeys(ranks, f"has launched {lowest} {kind} where others have {most}")
        text = text or f"{levels[lowest]} of {comm.size} ranks have launched {lowest} {kind}, the others up to {most}"
    laggards |= {rank: f"is {word} for RAS" if word != "no answer" else "gives no answer to RAS"
             for rank, word in gone.items()}  # fmt: skip
    return laggards, text


def ask(host: str, port: int) -> bytes:
    """Return the answer of RAS at its socket: JSON if this NCCL supports it, else text. Raises OSError."""
    answer = bytearray()
    for command in (b"SET FORMAT json\nVERBOSE STATUS\n", b"VERBOSE STATUS\n"):
        if b"{" in answer:
            break
        answer.clear()
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(command)
            while len(answer) < MAX_BYTES and (block := connection.recv(1 << 16)):
                answer += block
    return bytes(answer)
