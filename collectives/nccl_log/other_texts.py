"""Texts that people give in place of a log: NCCL's RAS, ibstat, rdma link and the kernel's log.

Formats: NCCL's RAS in collectives/traces/ras.py; ``ibstat`` of infiniband-diags (src/ibstat.c); ``rdma link`` of
iproute2 (rdma/link.c), as text; ``dmesg`` and ``journalctl -k``. Messages of the kernel that name a fault are rows of
messages.toml as all others; here the text is only recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collectives.nccl_log.codes import problem_of
from collectives.nccl_log.transport import LogProblem, ProofLine, rank_words
from contracts.tables import read_patterns

MAX_TEXT_BYTES = 64 << 20
_KINDS = read_patterns(__file__, "facts.toml", "kinds", str.encode)
_TEXTS = read_patterns(__file__, "facts.toml", "others", str)
_SHOWN = 8  # ranks, processes or ports that a message names


def kind_of(start: bytes) -> str | None:
    """What the text is by its beginning: "RAS", "ibstat", "rdma link" or "kernel"; None where it may be a log."""
    if _KINDS["ras"].search(start):
        return "RAS"
    if _KINDS["ibstat"].search(start):
        return "ibstat"
    if _KINDS["rdma_link"].search(start):
        return "rdma link"
    lines = start[:65_536].count(b"\n") or 1
    return "kernel" if b"NCCL" not in start and len(_KINDS["kernel"].findall(start[:65_536])) * 2 > lines else None


def problems_of(kind: str, text: bytes, file: str = "") -> list[LogProblem]:
    """What the text says: its problems, or one that says that there is none."""
    if kind == "kernel":  # what it says of faults is found as in every log
        return [problem_of("other_text", "the kernel's log")]
    readers = {"RAS": _ras, "ibstat": _ibstat, "rdma link": _rdma_link}
    return list(readers[kind](text.decode("utf-8", "replace"), file))


def _some(words: list[str]) -> str:
    rest = len(words) - _SHOWN
    return "; ".join(words[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _ras(text: str, file: str) -> Iterator[LogProblem]:
    from collectives.traces import ras  # only such a text needs it

    try:
        report = ras.read(text.encode())
    except ras.RasError as error:
        yield problem_of("other_text", f"RAS, not understood: {error}")
        return

    def named(one: ras.RasRank) -> str:
        rank = f"rank {one.rank}" if one.rank >= 0 else "a process"
        process = f"process {one.pid}" + (f" on node {one.host}" if one.host else "") if one.pid is not None else ""
        gpu = f"GPU {one.gpu}" if one.gpu is not None else ""
        return f"{rank} ({', '.join(filter(None, (process, gpu)))})" if process or gpu else rank

    gone = {(one.host, one.pid, one.rank): one for comm in report.comms for one in comm.ranks.values() if one.missing}
    placed = {(host, pid) for host, pid, _ in gone}
    gone |= {(one.host, one.pid, -1): one for one in report.dead if (one.host, one.pid) not in placed}
    failed = {one.rank: one for comm in report.comms for one in comm.ranks.values() if one.error and not one.missing}
    late: dict[int, str] = {}
    for comm in report.comms:
        rows, _ = ras.behind(comm)
        for rank, words in rows.items():
            if not (comm.ranks.get(rank) and comm.ranks[rank].missing):
                late[rank] = f"{named(comm.ranks.get(rank) or ras.RasRank(rank=rank))} {words}"
    for code, found, each in (
        ("ras_rank_missing", list(gone.values()), [f"{named(one)}: {one.missing}" for one in gone.values()]),
        ("ras_rank_failed", list(failed.values()), [f"{named(one)}: error {one.error}" for one in failed.values()]),
    ):
        if found:
            hosts = tuple(dict.fromkeys(one.host for one in found if one.host))
            ranks = tuple(sorted({one.rank for one in found if one.rank >= 0}))
            problem = problem_of(
                code, _some(each), lines=_lines(text, file, hosts), hosts=hosts, ranks=ranks, count=len(found)
            )
            # one answer without data may also be of a rank that begins or has ended as it should
            proven = code != "ras_rank_missing" or any(one.missing != "no answer" for one in found)
            yield problem if proven else replace(problem, severity="warn")
    if late:
        behind = list(late.values()) if len(late) <= _SHOWN else [f"{rank_words(late)}: {next(iter(late.values()))}"]
        yield problem_of("ras_rank_behind", _some(behind), ranks=tuple(sorted(late)), count=len(late))
    if not (gone or failed or late):
        yield problem_of("other_text", f"a report of NCCL's RAS on {report.most or 'unknown'} ranks without a fault")


def _lines(text: str, file: str, words: tuple[str, ...]) -> tuple[ProofLine, ...]:
    """The first lines that hold one of the words."""
    rows = (
        ProofLine(line=number, text=line.strip()[:300], proves="RAS", file=file)
        for number, line in enumerate(text.splitlines(), 1) if any(word in line for word in words)
    )  # fmt: skip
    return tuple(row for row, _ in zip(rows, range(3), strict=False))


def _ibstat(text: str, file: str) -> Iterator[LogProblem]:
    device, port, state = "", "", ""
    ports: list[tuple[str, str, str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TEXTS["ca"].match(line):
            device, port = found[1], ""
        elif field := _TEXTS["field"].match(line):
            port = field[2] or port
            state = field[3] or state
            if field[4] and port:
                ports.append((f"{device} port {port}", state.strip(), field[4].strip(), number))
    yield from _ports("ibstat", ports, text, file)


def _rdma_link(text: str, file: str) -> Iterator[LogProblem]:
    found = ((number, _TEXTS["link"].match(line)) for number, line in enumerate(text.splitlines(), 1))
    ports = [(m[1], m[2], m[3] or "", number) for number, m in found if m]
    yield from _ports("rdma link", ports, text, file)


def _ports(tool: str, ports: list[tuple[str, str, str, int]], text: str, file: str) -> Iterator[LogProblem]:
    down = [row for row in ports if row[1].lower() != "active"]
    if down:
        rows = text.splitlines()
        lines = tuple(ProofLine(line=n, text=rows[n - 1].strip()[:300], proves=name, file=file) for name, *_, n in down)
        words = [f"{name}: state {state}" + (f", physical state {physical}" if physical else "")
                 for name, state, physical, _ in down]  # fmt: skip
        yield problem_of("port_down", _some(words), lines=lines[:3], count=len(down))
    else:
        yield problem_of("other_text", f"the output of {tool}: all {len(ports)} ports are active")
