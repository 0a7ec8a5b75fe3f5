"""Diagnose a run: read its folder, its logs, NCCL RAS answers and scans of its nodes, and apply the rules to them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from agent.base.options import InputError
from agent.base.options import snapshots as replay
from agent.checks.host_checks import checks_of_scans
from agent.why.job import with_end_of_job, with_gate, with_nodes, with_record, with_restart
from agent.why.ranks import newest, of_run
from collectives.nccl_log import evidence
from collectives.nccl_log.reader import LogFileError, Unpacked
from collectives.nccl_log.transport import Evidence, LogProblem
from collectives.traces import calls, ras, states, watchdog
from contracts import bounded, run_record
from contracts.finding import Finding
from contracts.redaction import without_secrets
from contracts.run_record import RunRecord
from planner import why
from planner.why import Cause, RunFacts, Unknown, Verdict
from planner.why.facts import BUSY_SECONDS
from probes.gpu import health
from probes.registry import ALL

_MOST_LOG_LINES = 20_000_000
# Printed by the batch script of `topoflight launch --api slurm` before it ends with RESUMABLE.
_REQUEUED = re.compile(r"^The ranks saved a checkpoint\. The job (is queued again.{1,60}\))", re.MULTILINE)
_MONITOR = ("this command again, after the ranks have called init_process_group. Only a job with the monitor writes "
            "there (topoflight launch, wrap or run)")  # fmt: skip


class WhyError(InputError):
    """A source cannot be read; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhySources:
    """The sources of a diagnosis, as the command line names them."""

    logs: tuple[str, ...] = ()
    run: Path | None = None
    ras: tuple[str, ...] = ()  # files, or HOST:PORT
    recorder: Path | None = None
    hosts: tuple[Path, ...] = ()  # recordings of nodes
    checks: tuple[Finding, ...] = ()  # of nodes, as published by their agents
    limit: float = BUSY_SECONDS  # longest time that ranks may wait for a busy rank
    again: str | None = None  # what a requeued job does; "": it has ended; None: unknown


def answer(sources: WhySources) -> Verdict:
    """Return the verdict from all sources. Raises WhyError."""
    sources = _with_saved_ras(sources)
    seen, found, wrong = _facts(sources)
    verdict = why.judge(seen)
    reports = [_ras(source) for source in sources.ras]
    for report in reports[-1:]:
        verdict = with_ras(verdict, report, reports[0] if len(reports) > 1 else None)
    if found is not None:
        verdict = with_log(verdict, found, seen)
    if sources.hosts or sources.checks:
        checks = checks_of_scans(replay(sources.hosts, ALL)) if sources.hosts else ()
        verdict = with_nodes(verdict, (*sources.checks, *checks))
    record = _record(sources.run)
    if record is not None:
        verdict = with_record(verdict, record)
    unknown = tuple(Unknown(what=text, command="give a file that can be read") for text in wrong[:8])
    done = record is not None and record.status == "complete"
    if verdict.state == "fine" and not (done or [one for one in verdict.sources if not one.startswith("record:")]):
        verdict = replace(verdict, state="unknown", line="unknown: no source shows the state of the run")
        if sources.run is not None:
            hint = Unknown(what=f"what the ranks do: no rank has written into {sources.run}/ranks yet",
                           command=_MONITOR)  # fmt: skip
            verdict = replace(verdict, unknown=(hint,))
    again = sources.again
    if again is None and (found_again := next(filter(None, map(_REQUEUED.search, _tails(sources.logs))), None)):
        again = f"it {found_again[1]}"
    verdict = with_end_of_job(verdict, seen.ages)
    verdict = with_gate(with_restart(verdict, record, again), _last_log(sources))
    folder = sources.run or "DIR"
    asked = (replace(one, command=one.command.replace("--run DIR", f"--run {folder}")) for one in verdict.unknown)
    whole: Verdict = without_secrets(replace(verdict, unknown=(*asked, *unknown)))  # it contains log lines
    return whole


def _facts(sources: WhySources) -> tuple[RunFacts, Evidence | None, list[str]]:
    """Read the run's folder, dumps and logs; return facts, evidence of the logs, and what could not be read."""
    seen, wrong = of_run(sources.run) if sources.run else (RunFacts(now=time.time()), [])
    if sources.recorder is not None:
        beside = states.NAME.format(rank="*")  # of the ranks' monitors
        dumps = (path for path in sources.recorder.glob("*") if not path.match(beside))
        traces, bad = calls.read_ranks(dumps, calls.read_file)
        seen, wrong = replace(seen, traces={**seen.traces, **traces}), wrong + bad
    if not seen.states and seen.traces:
        seen = replace(seen, now=newest(seen.traces))
    try:
        found = evidence.read_files(sources.logs) if sources.logs else None
        log = watchdog.read(_lines(sources.logs))
        stacks, unranked = _stacks(sources.logs, seen)
    except OSError as error:
        raise WhyError(f"{error.filename}: {error.strerror}") from None
    except LogFileError as error:
        raise WhyError(str(error)) from None
    if found is not None and found.outcome == "finished":  # what ranks wrote before did not end the job
        log = replace(log, errors={}, rendezvous={})
    tails = list(_tails(sources.logs))
    hosts = {int(row[2]): row[1] for text in tails for row in _FAILED.finditer(text)}
    # torchrun lists every rank of its node that it ended; a table with only its root cause is not such a list
    listed = len(hosts) if len(hosts) > 1 and set(hosts) == set(range(len(hosts))) else 0
    members = [max(ranks) + 1 for trace in seen.traces.values() for ranks in trace.groups.values() if ranks]
    worlds = [*filter(None, (seen.world, listed, found.ranks if found else None)), *members]
    reached = [max(rows) + 1 for rows in (seen.traces, seen.states, log.traces) if rows]
    seen = replace(
        seen, log=log, first=_first_ended(tails, seen.first), hosts=hosts, limit=sources.limit, stacks=stacks,
        unranked=unranked, in_order=len(sources.logs) == 1 and not Path(sources.logs[0]).is_dir(),
        world=max([*worlds, *reached]) if worlds else None,
    )  # fmt: skip
    return seen, found, wrong


def _record(folder: Path | None) -> RunRecord | None:
    if folder is None:
        return None
    try:
        return run_record.read(folder / "run.json")
    except run_record.RecordError:
        return None


# Other sources --------------------------------------------------------------------------------------------------------


def _lines(sources: Sequence[str]) -> Iterator[str]:
    """Read lines of logs, compressed or not, and of the logs in folders. Raises OSError and LogFileError."""
    return islice((line for path in evidence.files_of(sources) for line in _lines_of(path)), _MOST_LOG_LINES)


def _lines_of(path: Any) -> Iterator[str]:
    with bounded.open_regular(path) as stream:
        rest, unpacked = b"", Unpacked(stream)
        while block := unpacked.read(1 << 20):
            *whole, rest = (rest[-65536:] + block).split(b"\n")
            yield from (line[:8192].decode("utf-8", errors="replace") for line in whole)
        yield rest.decode("utf-8", errors="replace")


def _with_saved_ras(sources: WhySources) -> WhySources:
    """Treat a log that contains only a saved RAS answer as a source of --ras."""

    def is_ras(log: str) -> bool:
        with suppress(OSError, LogFileError), Path(log).open("rb") as stream:
            start = Unpacked(stream).read(1 << 20)
            return ras.looks_like_report(start) and b"ProcessGroup" not in start and b"NCCL INFO" not in start
        return False

    saved = tuple(log for log in sources.logs if Path(log).is_file() and is_ras(log))
    return replace(sources, logs=tuple(log for log in sources.logs if log not in saved), ras=(*sources.ras, *saved))


def _tails(logs: Sequence[str]) -> Iterator[str]:
    """Return the ends of logs, where torchrun writes its table."""
    for log in logs:
        with suppress(OSError), bounded.open_regular(log) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - (1 << 16)))
            yield stream.read().decode("utf-8", errors="replace")


def _last_log(sources: WhySources) -> str:
    """Return the end of the newest log; without logs, of the batch scripts' logs in the run's folder."""
    logs = [Path(path) for path in evidence.files_of(sources.logs) if isinstance(path, str | Path)]
    if not logs and sources.run is not None:
        logs = [path for path in sources.run.glob("slurm-*.log") if re.fullmatch(r"slurm-\d+\.log", path.name)]
    written = {path: path.stat().st_mtime for path in logs if os.path.isfile(path)}
    return next(_tails([str(max(written, key=written.__getitem__))]), "") if written else ""


# torchrun's table of failures (torch/distributed/elastic/multiprocessing/errors)
_FAILED = re.compile(r"^ *host +: (\S{1,253})\n *rank +: (\d{1,7}) ", re.MULTILINE)
_OF_RANK = re.compile(r"rank[-_.]?(\d{1,7})")


def _stacks(logs: Sequence[str], seen: RunFacts) -> tuple[dict[int, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return Python stacks in the logs by rank, which the text, the file name or the process number identifies.

    Stacks of unknown ranks are returned second, by process or file.
    """
    by_pid: dict[int | None, int] = {state.pid: rank for rank, state in seen.states.items() if state.pid}
    found: dict[int, tuple[str, ...]] = {}
    unranked: dict[str, tuple[str, ...]] = {}
    for log in map(str, evidence.files_of(logs)):
        name = Path(log).name
        named = _OF_RANK.search(name)
        for stack in states.read_stacks(_lines_of(log), rank=int(named[1]) if named else None):
            rank = by_pid.get(stack.pid) if stack.rank is None else stack.rank
            if rank is not None:
                found[rank] = stack.frames
            else:
                unranked[f"process {stack.pid}" if stack.pid else f"the process of {name}"] = stack.frames
    return found, unranked


def _first_ended(tails: Sequence[str], by_file: int | None) -> int | None:
    """Return the rank that ended first according to torchrun, from the ends of logs, else from the run's folder."""
    for text in tails:
        first = run_record.first_failed_rank(text)
        # in a report that is cut before the code of the first, the others show whether waiting ranks were aborted
        aborted = any(one.exit_code == -signal.SIGABRT for one in run_record.failed_ranks(text))
        unclear = first is not None and first.exit_code is None and aborted
        if first and not unclear and first.is_own:
            return first.rank
    return by_file


def _ras(source: str) -> ras.RasReport:
    """Read a RAS report from a file or a socket."""
    host, colon, port = source.rpartition(":")
    try:
        if not os.path.exists(source) and colon and port.isdecimal() and 0 < int(port[:6]) < 65536:
            return ras.read(ras.ask(host, int(port)))
        return ras.read(bounded.read(source, ras.MOST_BYTES))
    except (OSError, bounded.TooLargeError, ras.RasError) as error:
        raise WhyError(f"--ras {source}: {error}; must be a file, or HOST:PORT as localhost:28028") from None


def with_ras(verdict: Verdict, report: ras.RasReport, earlier: ras.RasReport | None) -> Verdict:
    """Add RAS to the verdict: it decides if no other source does; otherwise agreement or conflict is shown."""
    source = f"RAS: {report.total} communicators of up to {report.most} ranks"
    verdict = replace(verdict, sources=(*verdict.sources, source))
    report, unheard = _heard(report, earlier)
    gone = {rank for comm in report.comms for rank, one in comm.ranks.items() if one.missing}
    late, counts = {}, ""
    for comm in report.comms:
        behind, sentence = ras.behind(comm)
        counts = counts or sentence
        for rank in gone & set(behind) if gone else behind if len(behind) <= comm.size / 2 else ():
            late[rank] = comm.ranks.get(rank, ras.RasRank(rank=rank)), behind[rank], f"RAS, communicator {comm.id}"
    dead = [(one, "is dead for RAS", "RAS") for one in report.dead if one.missing == "dead"]
    if unheard:
        verdict = why.left_open(verdict, "ras_unheard", names=why.ranks_of(unheard))
    elif silent := [one for one in report.dead if one.missing != "dead" and verdict.state == "fine"]:
        names = ", ".join(f"process {one.pid} on {one.host}, GPU {one.gpu}" for one in silent[:4])
        verdict = why.left_open(verdict, "ras_silent", names=names)
    if verdict.causes and not (why.is_open(verdict) and (late or dead)):
        if set(verdict.ranks) == set(late) or not (late or dead or report.total):
            return verdict
        text = (f"RAS names {why.ranks_of(sorted(late)) if late else 'no rank'}, the verdict "
                f"{why.ranks_of(verdict.ranks) if verdict.ranks else 'no rank'}: RAS counts launched calls, and lists "
                "outliers rather than the ranks that are behind, so what lists each call is believed")  # fmt: skip
        return replace(verdict, disagree=(*verdict.disagree, text))
    is_moving = earlier is not None and _counts(earlier) != _counts(report)
    if not (gone or dead or verdict.causes) and (is_moving or not counts or earlier is None or not late):
        return _by_counts(verdict, report, counts, is_first=earlier is None, is_moving=is_moving)
    rows = [late[rank] for rank in sorted(late)] or dead
    causes = tuple(_cause_of_rank(*row) for row in rows)
    ranks = tuple(rank for cause in causes for rank in cause.ranks)
    state = "failed" if any(cause.code == "rank.gone" for cause in causes) else "stuck"
    return replace(
        verdict, state=state, line=f"{state}: {causes[0].message}", causes=(*causes, *verdict.causes), ranks=ranks,
        gpus=tuple(f"{one.host} GPU {one.gpu}" for one, *_ in rows if one.host and one.rank >= 0),
        nodes=tuple(sorted({node for cause in causes for node in cause.nodes})),
    )  # fmt: skip


def _cause_of_rank(one: ras.RasRank, words: str, source: str) -> Cause:
    """Return RAS's statement about a rank, or about a process whose rank it does not give."""
    kind = {"dead": "gone", "": "unknown"}.get(one.missing, "silent")
    where = f" (GPU {one.gpu} of process {one.pid} on {one.host})" if one.host else ""
    who = f"rank {one.rank}{where}" if one.rank >= 0 else f"process {one.pid} on {one.host}, GPU {one.gpu},"
    return Cause(code=why.CODES.get(kind, "rank.behind"), message=f"{who} {words}", evidence=(source,),
                 ranks=(one.rank,) if one.rank >= 0 else (), nodes=(one.host,) if one.host else (),
                 action=why.ACTIONS[kind])  # fmt: skip


def _by_counts(
    verdict: Verdict, report: ras.RasReport, counts: str, *, is_first: bool, is_moving: bool
) -> Verdict:  # fmt: skip
    """Counts that name nobody: they move, or are equal (which may be one call for ever), or most ranks are behind."""
    if is_moving:
        sentence = f"the counts moved between two answers of RAS{f', at last {counts}' * bool(counts)}"
        return replace(verdict, line=f"fine: {sentence}" if verdict.state == "fine" else verdict.line)
    if counts and not is_first:  # most ranks are behind, so none of them is the cause
        found = RunFacts().named("ras_majority", counts=counts)
        return replace(found, sources=verdict.sources, unknown=(*verdict.unknown, *found.unknown))
    if counts:
        return why.left_open(verdict, "ras_once", counts=counts)
    if is_first or not any(one.counts for comm in report.comms for one in comm.ranks.values()):
        return why.left_open(verdict, "ras_alike") if report.total else verdict
    return why.left_open(verdict, "ras_standing")


def _heard(report: ras.RasReport, earlier: ras.RasReport | None) -> tuple[ras.RasReport, list[int]]:
    """Split off the ranks that only lack data; return the report without them, and these ranks.

    A process that creates or destroys a communicator also lacks data. A missing answer counts if RAS timed out waiting,
    calls a process unresponsive or dead, or two reports lack the same rank.
    """
    if report.timeouts or any(one.missing == "dead" for one in report.dead):
        return report, []
    lacking = {(comm.id, rank) for comm in earlier.comms for rank, one in comm.ranks.items() if one.missing} if (
        earlier) else set()  # fmt: skip
    quiet: set[int] = set()
    comms = []
    for comm in report.comms:
        once = {rank for rank, one in comm.ranks.items()
                if one.missing == "no answer" and (comm.id, rank) not in lacking}  # fmt: skip
        quiet |= once
        comms.append(replace(comm, ranks={rank: one for rank, one in comm.ranks.items() if rank not in once}))
    return replace(report, comms=tuple(comms)), sorted(quiet)


def _counts(report: ras.RasReport) -> list[tuple[str, object, object]]:
    return [(comm.id, comm.spread, {rank: one.counts for rank, one in comm.ranks.items()}) for comm in report.comms]


_ENDS = ("watchdog_timeout", "job_failed", "python_traceback", "process_aborted", "connection_closed_by_peer")

# A cause of `why`, and the problem of the log that says less about the same lines.
_MORE_EXACT = {"rendezvous.name": "socket_connect_failed", "model.differs": "collective_mismatch"}


# The driver's line, and that of NCCL's diagnostics (2.32)
_XID = re.compile(
    r"Xid (?:\(([^)]{1,60})\): (?:45\b.{1,200}previous Xid )?(\d{1,4})\b|"
    r"(\d{1,4}) detected .{1,40}? on host (\S{1,253})\. )"
)


def _cause_of(problem: LogProblem) -> Cause:
    """Return the cause for a log problem; an Xid gets its number and the GPU's address.

    After an Xid of the GPU itself, the node must be taken out of the pool.
    """
    lines = tuple(f"{line.place}: {line.text}" for line in problem.lines)
    at = f"{problem.place}: " if problem.place else ""
    cause = Cause(code=problem.code, message=at + problem.message, evidence=lines, action=problem.action)
    rows = [found for line in lines for found in _XID.finditer(line)]
    if problem.code != "gpu_xid" or not rows:
        return cause
    numbers = [int(found[2] or found[3]) for found in rows]
    of = next(kind for kind in health.XID_CAUSES if any(health.xid_cause(xid) == kind for xid in numbers))
    drain = "drain the node, reset or reseat the GPU, and look at it with topoflight scan"
    action = drain if of == "gpu" else cause.action
    places = dict.fromkeys(found[1].removeprefix("PCI:") if found[1] else f"of {found[4]}" for found in rows)
    message = f"GPU{'s' * (len(places) > 1)} {', '.join(places)}: {health.named_xids(numbers, of)}"
    return replace(cause, message=message, action=action)


def with_log(verdict: Verdict, found: Evidence, facts: RunFacts) -> Verdict:
    """Add the log's problems: reasons of a failure, and of a transport that is slower than possible.

    torchrun ends the other ranks with a signal when one has failed. Ranks that have saved and ended by themselves
    after a signal have not failed. The codes of `_ENDS` say that the job ended, not why.
    """
    lines = {p.code: tuple(f"{line.place}: {line.text}" for line in p.lines) for p in found.problems}
    verdict = replace(
        verdict, causes=tuple(replace(one, evidence=one.evidence or lines.get(one.code, ())) for one in verdict.causes)
    )
    known = (*_ENDS, *(cause.code for cause in verdict.causes))
    known = (*known, *(code for cause, code in _MORE_EXACT.items() if cause in known))
    if facts.is_over or (facts.log.terminated and not facts.log.stopped):
        known = (*known, "job_stopped")
    rows = [p for p in found.problems if p.severity in ("fail", "warn") and p.code not in known]
    diagnosed = any(p.code.startswith("diag_") for p in rows)
    rows = [p for p in rows if not diagnosed or p.code != "no_transport_evidence"]  # these do not need a channel
    rows.sort(key=lambda p: p.severity != "fail")
    fails = {p.code for p in rows if p.severity == "fail"}
    causes = tuple(_cause_of(p) for p in rows[:8] if p.severity == "fail" or not verdict.causes)
    if evidence.exit_code(found) == 5 and found.outcome == "unknown" and not diagnosed:  # no channel, and no end
        shown = tuple(cause for cause in causes if cause.code != "no_transport_evidence")
        return replace(verdict, causes=(*verdict.causes, *shown))
    none_of = f", none of {why.ranks_of(found.missing_ranks)}" if found.missing_ranks else ""
    read = f"NCCL log: {found.lines_read} line{'s' * (found.lines_read != 1)}{none_of}"
    verdict = replace(verdict, sources=(*verdict.sources, read))
    if verdict.state == "fine" and found.outcome == "failed" and (causes or not facts.is_over):
        causes = causes or tuple(_cause_of(p) for p in found.problems if p.code in known)[:1]
        first = causes[0].message if causes else "the log says so"
        return replace(verdict, state="failed", line=f"failed: {first}", causes=causes)
    slow = next((cause for cause in causes if cause.code in fails), None)
    if verdict.state == "fine" and slow:
        return replace(verdict, state="slow", line=f"slow: {slow.message}", causes=causes)
    if verdict.state == "fine" and found.outcome == "finished":
        verdict = replace(verdict, line="fine: the log shows that the job finished")
    elif verdict.state == "fine" and causes:
        verdict = replace(verdict, line=f"fine except for a problem in the log: {causes[0].message}")
    return replace(verdict, causes=(*verdict.causes, *causes))
