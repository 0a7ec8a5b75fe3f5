"""Diagnose a run: read its folder, its logs and answers of NCCL's RAS, and apply the rules to them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from agent.base import raise_as, units
from agent.base.options import InputError
from agent.why.ranks import find_newest_call, mark_unwritten, read_settled_run
from collectives.nccl_log import evidence
from collectives.nccl_log.reader import LogFileError, Unpacked, split_line
from collectives.nccl_log.transport import Evidence, LogProblem
from collectives.traces import rank_files, ras, watchdog
from collectives.traces.watchdog import LogFacts
from contracts import bounded, run_record
from contracts.bounded import utf8_chunks
from contracts.redaction import without_secrets
from contracts.run_record import RESUMABLE, RunRecord
from contracts.tables import read_table
from planner import why
from planner.why import Cause, RunFacts, Unknown, Verdict, limits, words
from planner.why.facts import make_cause

_CODES = read_table(__file__, "diagnosis.toml")
_STOP_REQUESTS = frozenset(_CODES["stop_requests"])
_MAX_LOG_LINES = 20_000_000
_MAX_END, _MAX_END_LINES = 1 << 16, 2000
_OF_RANK = re.compile(r"rank[-_.]?(\d{1,7})")
# torchrun ends the other ranks of its node, and its table of newer releases (2.13) lists them, too.
_SENT = re.compile(r"Sending process (\d{1,9}) closing signal")
# Printed by the batch script of `topoflight launch --api slurm` before it ends with RESUMABLE.
_REQUEUED = re.compile(r"^The ranks saved a checkpoint\. The job (is queued again.{1,60}\))", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhySources:
    """The sources of a diagnosis, as the command line names them."""

    logs: tuple[str, ...] = ()
    run: Path | None = None
    ras: tuple[str, ...] = ()  # files, or HOST:PORT
    recorder: Path | None = None
    limit: float = limits.BUSY_SECONDS  # longest time that ranks may wait for a busy rank
    again: str | None = None  # what a requeued job does; "": it has ended; None: unknown


def answer(sources: WhySources) -> Verdict:
    """Return the verdict from all sources. Raises InputError or LogFileError."""
    saved = tuple(filter(_is_saved_ras, sources.logs))
    sources = replace(sources, logs=tuple(log for log in sources.logs if log not in saved), ras=(*sources.ras, *saved))
    facts, found, ends, wrong = _read_facts(sources)
    verdict = why.judge(facts)
    reports = [_read_ras(source) for source in sources.ras]
    for report in reports[-1:]:
        verdict = with_ras(verdict, report, reports[0] if len(reports) > 1 else None)
    if found is not None:
        verdict = with_log(verdict, found, facts)
    record = None
    if sources.run is not None:
        with suppress(run_record.RecordError):
            record = run_record.read(sources.run / "run.json")
            verdict = with_record(verdict, record)
    unknown = tuple(Unknown(what=text, command="give a file that can be read") for text in wrong[:8])
    done = record is not None and record.status == "complete"
    if verdict.state == "fine" and not (done or [one for one in verdict.sources if not one.startswith("record:")]):
        seen = f"{verdict.causes[0].message}; " if verdict.causes else "the logs show no fault, but " * bool(found)
        verdict = mark_unwritten(verdict, sources.run, seen)
    again = sources.again
    if again is None and (requeued := next(filter(None, map(_REQUEUED.search, ends.values())), None)):
        again = f"it {requeued[1]}"
    verdict = with_end_of_job(verdict, facts.ages)
    verdict = with_gate(with_restart(verdict, record, again), _read_last_log(sources, ends))
    verdict = replace(verdict, nodes=tuple(sorted({*verdict.nodes, *(n for one in verdict.causes for n in one.nodes)})))
    run = f"--run {sources.run or 'DIR'}"
    questions = (replace(one, command=one.command.replace("--run DIR", run)) for one in verdict.unknown)
    redacted: Verdict = without_secrets(replace(verdict, unknown=(*questions, *unknown)))  # it contains log lines
    return redacted


def _read_facts(sources: WhySources) -> tuple[RunFacts, Evidence | None, dict[str, str], list[str]]:
    """Read the run's folder, dumps and logs; return facts, evidence of the logs, their ends, and what is unreadable."""
    facts, wrong = _read_rank_files(sources)
    try:
        found = evidence.read_files(sources.logs) if sources.logs else None
        logs = _Logs(sources.logs, {state.pid: rank for rank, state in facts.states.items() if state.pid})
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None
    log, texts = logs.report, [*logs.ends.values()]
    survived = {"rendezvous_timeout", "python_traceback"} & {note.code for note in found.notes} if found else set()
    if found and (found.outcome == "finished" or (survived and found.outcome == "unknown")):  # it did not end the job
        log, texts = replace(log, errors={}, rendezvous={}), []
    rows = {row.rank: row for text in texts for row in run_record.failed_ranks(text)}
    log = replace(log, errors={**{rank: row.error for rank, row in rows.items() if row.error}, **log.errors})
    facts = replace(
        facts, log=log, first=_find_first_ended(texts, facts.first), limit=sources.limit,
        in_order=len(sources.logs) == 1 and not Path(sources.logs[0]).is_dir(), failed={**facts.failed, **rows},
        hosts=found.rank_hosts if found else {}, world=_find_world(facts, log, found, rows), stacks=logs.stacks,
    )  # fmt: skip
    return facts, found, logs.ends, wrong


def _read_rank_files(sources: WhySources) -> tuple[RunFacts, list[str]]:
    """Read the run's folder and the dumps of the flight recorder; return also what could not be read."""
    facts, wrong = read_settled_run(sources.run) if sources.run else (RunFacts(now=time.time()), [])
    if sources.recorder is not None:
        monitor_files = rank_files.NAME.format(rank="*")  # of the ranks' monitors
        dumps = (path for path in sources.recorder.glob("*") if not path.match(monitor_files))
        traces, bad = rank_files.read_ranks(dumps, rank_files.read_file)
        facts, wrong = replace(facts, traces={**facts.traces, **traces}), wrong + bad
    if not facts.states and facts.traces:
        facts = replace(facts, now=find_newest_call(facts.traces))
    return facts, wrong


def _find_world(
    facts: RunFacts, log: LogFacts, found: Evidence | None, rows: Mapping[int, run_record.FailedRank]
) -> int | None:
    """Return the number of ranks that the sources show; None if none of them shows it."""
    # torchrun lists every rank of its node that it ended; a table with only its root cause is not such a list
    listed = len(rows) if len(rows) > 1 and set(rows) == set(range(len(rows))) else 0
    groups = [max(ranks) + 1 for trace in facts.traces.values() for ranks in trace.groups.values() if ranks]
    worlds = [*filter(None, (facts.world, listed, found.ranks if found else None)), *groups]
    seen = [max(ranks) + 1 for ranks in (facts.traces, facts.states, log.traces) if ranks]
    return max([*worlds, *seen]) if worlds else None


# Other sources --------------------------------------------------------------------------------------------------------


def _read_lines(path: Any) -> Iterator[str]:
    """Read the logical lines of a log, compressed or not, as `_split` does. Raises OSError and LogFileError."""
    with bounded.open_regular(path) as stream:
        tail = b""
        for block in chain(utf8_chunks(Unpacked(stream)), [b"\n"]):
            *rows, tail = (tail[-65536:] + block).split(b"\n")
            yield from chain.from_iterable(map(_split, rows))


def _split(line: bytes) -> list[str]:
    """Split a line at the carriage returns of progress bars; remove its colours."""
    return [part.decode("utf-8", errors="replace") for part in split_line(line)]


def _is_saved_ras(log: str) -> bool:
    """Whether a log contains only a saved answer of RAS."""
    with suppress(OSError, LogFileError), bounded.open_regular(log) as stream:
        start = Unpacked(stream).read(1 << 20)
        return ras.looks_like_report(start) and b"ProcessGroup" not in start and b"NCCL INFO" not in start
    return False


class _Logs:
    """The results of one pass over the logs: facts about the ranks, Python stacks, and the end of each file."""

    def __init__(self, logs: Iterable[str], by_pid: Mapping[int | None, int]) -> None:
        self.by_pid = by_pid
        self.ends: dict[str, str] = {}  # by file: its last lines, where torchrun and batch scripts write how it ended
        self.stacks: dict[int | str, tuple[str, ...]] = {}  # by rank; if it is unknown, by process or file
        lines = chain.from_iterable(map(self._read, map(str, evidence.list_files(logs))))
        self.report = watchdog.read(islice(lines, _MAX_LOG_LINES))
        deque(lines, maxlen=0)  # the rest, for its end

    def _read(self, log: str) -> Iterator[str]:
        """Return the lines of a file, and store its stacks and its end."""
        name = Path(log).name
        match, end = _OF_RANK.search(name), deque[str](maxlen=_MAX_END_LINES)
        stacks = watchdog.StackReader(int(match[1]) if match else None)
        for line in _read_lines(log):
            stacks.line(line)
            end.append(line)
            yield line
        stacks.end_process()
        for (rank, pid), frames in stacks.found.items():
            unranked = f"process {pid}" if pid else f"the process of {name}"
            self.stacks[self.by_pid.get(pid, unranked) if rank is None else rank] = frames
        self.ends[log] = "\n".join(end)[-_MAX_END:]


def _read_last_log(sources: WhySources, ends: Mapping[str, str]) -> str:
    """Return the end of the newest log; without logs, of the batch scripts' logs in the run's folder."""
    scripts = sources.run.glob("slurm-*.log") if sources.run and not ends else ()
    logs = [*map(Path, ends), *(path for path in scripts if re.fullmatch(r"slurm-\d+\.log", path.name))]
    newest = max(filter(Path.is_file, logs), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or str(newest) in ends:
        return ends.get(str(newest), "")
    with suppress(OSError), bounded.open_regular(newest) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _MAX_END))
        return "\n".join(chain.from_iterable(map(_split, stream.read().split(b"\n"))))
    return ""


def _find_first_ended(texts: Iterable[str], by_file: int | None) -> int | None:
    """Return the rank that ended first by torchrun's tables at the ends of logs, else by the run's folder."""
    ranks: dict[str, int | None] = {}  # by time, in whole seconds; None: several ranks may have been the first
    for text in texts:
        first = run_record.find_first_failed(text)
        if first is None or not first.is_own:
            continue
        sent = set(map(int, _SENT.findall(text)))  # of this host, since process numbers of pods are alike
        codes = [row.exit_code for row in set(run_record.failed_ranks(text))
                 if row.at == first.at and (row.host != first.host or row.pid not in sent or row == first)]  # fmt: skip
        # in a report that is cut before the code of the first, the others show whether waiting ranks were aborted;
        # the order of ranks that fail alike within one second is torchrun's, not theirs
        alike = first.at and codes.count(first.exit_code) > 1
        is_clear = not (alike or (first.exit_code is None and -signal.SIGABRT in codes))
        ranks[first.at] = first.rank if is_clear and ranks.get(first.at, first.rank) == first.rank else None
    first_rank = ranks[min(ranks)] if len(ranks) == 1 or (ranks and "" not in ranks) else None
    return by_file if first_rank is None else first_rank


def _read_ras(source: str) -> ras.RasReport:
    """Read a RAS report from a file or a socket."""
    host, colon, port = source.rpartition(":")
    option = f"--ras {source} (must be a file, or HOST:PORT as localhost:28028): "
    with raise_as(InputError, (OSError, bounded.TooLargeError, ras.RasError), option):
        if not os.path.exists(source) and colon and port.isdecimal() and 0 < int(port[:6]) < 65536:
            return ras.read(ras.ask(host, int(port)))
        return ras.read(bounded.read(source, ras.MAX_BYTES))


def with_ras(verdict: Verdict, report: ras.RasReport, earlier: ras.RasReport | None) -> Verdict:
    """Add RAS to the verdict: it decides if no other source does; otherwise agreement or conflict is shown."""
    sources = [f"RAS: {units.count(report.total, 'communicator')}"] * bool(report.total or report.dead)
    report, unheard = _split_silent_ranks(report, earlier)
    verdict = _ask_about_silence(replace(verdict, sources=(*verdict.sources, *sources)), report, unheard)
    rows = _list_behind(report)
    causes = [_make_rank_cause(row, state, place) for row, state, place in rows]
    if verdict.causes and not (verdict.names_nobody and causes):
        return _compare_with_ras(verdict, report, causes)
    is_moving = earlier is not None and _list_counts(earlier) != _list_counts(report)
    is_proven = any(row.missing for row, *_ in rows) or (earlier is not None and not is_moving)
    if not verdict.causes and not (rows and is_proven):
        return _judge_counts(verdict, report, is_first=earlier is None, is_moving=is_moving)
    state = "failed" if any(cause.code == "rank.gone" for cause in causes) else "stuck"
    return verdict.with_causes(
        state, *causes, *verdict.causes, ranks=tuple(rank for cause in causes for rank in cause.ranks),
        gpus=tuple(f"{row.host} GPU {row.gpu}" for row, *_ in rows if row.host and row.rank >= 0),
        nodes=tuple(sorted({node for cause in causes for node in cause.nodes})),
    )  # fmt: skip


def _ask_about_silence(verdict: Verdict, report: ras.RasReport, unheard: list[int]) -> Verdict:
    """Add the question whether ranks or processes that RAS did not hear are lost."""
    if unheard:
        return verdict.with_question("ras_unheard", names=why.ranks_of(unheard))
    dead = {(row.host, row.pid) for row in report.dead if row.missing == "dead"}
    silent = [row for row in report.dead if (row.host, row.pid) not in dead]
    if not silent or verdict.state != "fine":
        return verdict
    names = ", ".join(f"process {row.pid} on {row.host}, GPU {row.gpu}" for row in silent[:4])
    return verdict.with_question("ras_silent", names=names)


def _list_behind(report: ras.RasReport) -> list[tuple[ras.RasRank, str, str]]:
    """Return what does not answer; if all do, the ranks that are behind, unless they are most of a communicator.

    Each is what RAS lists of it, what is wrong with it, and where RAS says so. Processes that are dead, and whose ranks
    RAS does not give, come first. Ranks that are behind may wait for a rank or process that does not answer.
    """
    dead = {(row.host, row.pid): (row, "is dead for RAS", "RAS") for row in report.dead if row.missing == "dead"}
    is_gone = bool(dead) or any(row.missing for comm in report.comms for row in comm.ranks.values())
    found: dict[int, tuple[ras.RasRank, str, str]] = {}
    for comm in report.comms:
        behind, _ = ras.find_laggards(comm)
        for rank, state in behind.items() if is_gone or len(behind) <= comm.size / 2 else ():
            row = comm.ranks.get(rank, ras.RasRank(rank=rank))
            if row.missing or not is_gone:
                found[rank] = row, state, f"RAS, communicator {comm.id}"
                dead.pop((row.host, row.pid), None)
    return [*dead.values(), *(found[rank] for rank in sorted(found))]


def _compare_with_ras(verdict: Verdict, report: ras.RasReport, causes: list[Cause]) -> Verdict:
    """Add that RAS names other ranks than the verdict, if it does."""
    ranks = [rank for cause in causes for rank in cause.ranks]
    nodes = [] if ranks else [node for cause in causes for node in cause.nodes]  # of dead processes without a rank
    if set(verdict.ranks) == set(ranks) or not (causes or report.total) or {*nodes} & {*verdict.nodes}:
        return verdict
    who = why.ranks_of(ranks) if ranks else f"a dead process on {nodes[0]}" if nodes else "no rank"
    text = (f"RAS names {who}, the verdict "
            f"{why.ranks_of(verdict.ranks) if verdict.ranks else 'no rank'}: RAS counts launched calls, and lists "
            "outliers rather than the ranks that are behind, so what lists each call is believed")  # fmt: skip
    return replace(verdict, disagree=(*verdict.disagree, text))


def _make_rank_cause(rank: ras.RasRank, state: str, source: str) -> Cause:
    """Return RAS's statement about a rank, or about a process whose rank it does not give."""
    kind = {"dead": "gone", "": "unknown"}.get(rank.missing, "silent")
    place = f" (GPU {rank.gpu} of process {rank.pid} on {rank.host})" if rank.host else ""
    who = f"rank {rank.rank}{place}" if rank.rank >= 0 else f"process {rank.pid} on {rank.host}, GPU {rank.gpu},"
    return Cause(code=words.KINDS[kind].code, message=f"{who} {state}", evidence=(source,),
                 ranks=(rank.rank,) if rank.rank >= 0 else (), nodes=(rank.host,) if rank.host else (),
                 action=words.KINDS[kind].action)  # fmt: skip


def _judge_counts(verdict: Verdict, report: ras.RasReport, *, is_first: bool, is_moving: bool) -> Verdict:
    """Judge counts that name no rank: they move, or are equal (which may be one call for ever), or most are behind."""
    counts = next(filter(None, (ras.find_laggards(comm)[1] for comm in report.comms)), "")
    if is_moving:
        sentence = f"the counts moved between two answers of RAS{f', at last {counts}' * bool(counts)}"
        return replace(verdict, line=f"fine: {sentence}" if verdict.state == "fine" else verdict.line)
    if counts and not is_first:  # most ranks are behind, so none of them is the cause
        majority = RunFacts().named("ras_majority", counts=counts)
        return replace(majority, sources=verdict.sources, unknown=(*verdict.unknown, *majority.unknown))
    if counts:
        return verdict.with_question("ras_once", counts=counts)
    if is_first or not any(rank.counts for comm in report.comms for rank in comm.ranks.values()):
        return verdict.with_question("ras_alike") if report.total else verdict
    return verdict.with_question("ras_standing")


def _split_silent_ranks(report: ras.RasReport, earlier: ras.RasReport | None) -> tuple[ras.RasReport, list[int]]:
    """Split off the ranks that only lack data; return the report without them, and these ranks.

    A process that creates or destroys a communicator also lacks data. A missing answer counts if RAS timed out waiting,
    calls a process unresponsive or dead, or two reports lack the same rank.
    """
    if report.timeouts or any(rank.missing == "dead" for rank in report.dead):
        return report, []
    rows = [(comm.id, row) for comm in report.comms for row in comm.ranks.values() if row.missing == "no answer"]
    before = earlier.comms if earlier else ()
    lacking = {(comm.id, rank) for comm in before for rank, row in comm.ranks.items() if row.missing}
    quiet = {(comm, row.rank) for comm, row in rows} - lacking
    answered = (replace(comm, ranks={rank: row for rank, row in comm.ranks.items() if (comm.id, rank) not in quiet})
             for comm in report.comms)  # fmt: skip
    return replace(report, comms=tuple(answered)), sorted({rank for _, rank in quiet})


def _list_counts(report: ras.RasReport) -> list[tuple[str, object, object]]:
    return [(comm.id, comm.spread, {rank: row.counts for rank, row in comm.ranks.items()}) for comm in report.comms]


def _make_cause(problem: LogProblem) -> Cause:
    """Return the cause for a log problem, with its hosts if one of them is at fault."""
    lines = tuple(f"{line.place}: {line.text}" for line in problem.lines)
    message = f"{problem.place}: {problem.message}" if problem.place else problem.message
    if problem.place and problem.code in _CODES["of_waiting"]:
        message = f"{problem.message} (reported by {problem.place})"
    if problem.code == "python_traceback" and problem.lines:
        message += f": {problem.lines[0].text}"
    return Cause(code=problem.code, message=message, evidence=lines, action=problem.action,
                 nodes=problem.hosts if problem.code in _CODES["of_hosts"] else ())  # fmt: skip


def with_log(verdict: Verdict, log: Evidence, facts: RunFacts) -> Verdict:
    """Add the log's problems: reasons of a failure, and of a transport that is slower than possible."""
    verdict = _add_lines(verdict, log)
    rows = _select_problems(verdict, log, facts)
    causes = tuple(_make_cause(p) for p in rows[:8] if p.severity == "fail" or not verdict.causes)
    diagnosed = any(p.code.startswith("diag_") for p in rows)  # these do not need a channel
    if evidence.exit_code(log) == 5 and log.outcome == "unknown" and not diagnosed:  # no channel, and no end
        return replace(verdict, causes=(*verdict.causes, *causes))
    none_of = f", none of {why.ranks_of(log.missing_ranks)}" if log.missing_ranks else ""
    source = f"NCCL log: {units.count(log.lines_read, 'line')}{none_of}"
    verdict = replace(verdict, sources=(*verdict.sources, source))
    if verdict.names_nobody and _precedes_timeouts(rows, log):  # ranks wait since then
        return verdict.with_causes("failed", *causes, *verdict.causes)
    if verdict.state in ("fine", "unknown") and log.outcome == "failed" and (causes or not facts.is_over):
        ended = tuple(_make_cause(p) for p in log.problems if p.severity == "fail")[:1]
        if not causes or any(cause.code in _CODES["ends_of_job"] for cause in ended):  # what remains are slow paths
            causes = (*ended, *causes)
        if causes and facts.stacks and verdict.state == "unknown":
            seen = verdict.line.removeprefix("unknown: ")
            causes = (replace(causes[0], evidence=(*causes[0].evidence, seen)), *causes[1:])
        line = f"failed: {causes[0].message if causes else 'the log says so'}"
        return replace(verdict, state="failed", line=line, causes=causes, unknown=())
    if verdict.state == "fine" and rows and rows[0].severity == "fail":
        return verdict.with_causes("slow", *causes)
    if verdict.state == "fine" and log.outcome == "finished":
        verdict = replace(verdict, line="fine: the log shows that the job finished", unknown=())
    elif verdict.state == "fine" and causes:
        verdict = replace(verdict, line=f"fine except for a problem in the log: {causes[0].message}")
    return replace(verdict, causes=(*verdict.causes, *causes))


def _add_lines(verdict: Verdict, log: Evidence) -> Verdict:
    """Add the log's lines of the same problem to causes that have no evidence."""
    lines = {code: _make_cause(p).evidence for p in log.problems if p.code != "job_failed"
             for code in (p.code, *_CODES["less_exact"].get(p.code, ()))}  # fmt: skip
    causes = tuple(replace(cause, evidence=cause.evidence or lines.get(cause.code, ())) for cause in verdict.causes)
    return replace(verdict, causes=causes)


def _select_problems(verdict: Verdict, log: Evidence, facts: RunFacts) -> list[LogProblem]:
    """Return the log's failures and warnings without those that the verdict has, or that say only that the job ended.

    torchrun ends the other ranks with a signal when one has failed. Ranks that have saved and ended by themselves
    after a signal have not failed.
    """
    known = {cause.code for cause in verdict.causes}
    codes = {*known, *_CODES["ends_of_job"], *(p for p, more in _CODES["less_exact"].items() if known & {*more})}
    if facts.is_over or (facts.log.terminated and not facts.log.stopped):
        codes.add("job_stopped")
    rows = [p for p in log.problems if p.severity in ("fail", "warn") and p.code not in codes]
    return [p for p in rows if not any(p.action == one.action and {*p.hosts} <= {*one.nodes} for one in verdict.causes)]


def _precedes_timeouts(rows: list[LogProblem], log: Evidence) -> bool:
    """Return whether the worst problem is a failure, and was logged before every timeout, in the same file."""
    timeouts = [line for p in log.problems if p.code == "watchdog_timeout" for line in p.lines]
    if not (rows and timeouts and rows[0] == log.problems[0] and rows[0].severity == "fail" and rows[0].lines):
        return False
    first = rows[0].lines[0]
    return all(first.file == line.file and first.line < line.line for line in timeouts)


# The run record, the scheduler and the gate before the job ------------------------------------------------------------


def with_record(verdict: Verdict, record: RunRecord) -> Verdict:
    """Add how the run ended and how its step times compare with the forecast, from the run record."""
    restart = f", restart {record.restarts}" if record.restarts else ""
    source = f"record: {record.status}, {len(record.step_seconds)} steps{restart}"
    verdict = replace(verdict, sources=(*verdict.sources, source))
    if record.status not in ("running", "complete", "interrupted", "unknown") and verdict.state == "fine":
        cause = Cause(code=f"job.{record.status}", message=(record.reason or record.status)[:500])
        return verdict.with_causes("failed", cause)
    measured, forecast = record.measured.step_seconds, record.plan.forecast.step_seconds
    if measured and forecast and forecast.high and measured > forecast.high and verdict.state in ("fine", "slow"):
        times = measured / (forecast.mid or forecast.high)
        sentence = f"a step takes {measured:.3g} s; the forecast was {forecast.low:.3g} to {forecast.high:.3g} s"
        exposed = record.communication.exposed_share if record.communication else None
        waiting = (f"collectives not overlapped with computation take {exposed:.0%} of the step",) if exposed else ()
        cause = make_cause("step_slow", times=f"{times:.1f}", evidence=(sentence, *waiting))
        return verdict.with_causes("slow", *verdict.causes, cause)
    return verdict


def with_end_of_job(verdict: Verdict, ages: Mapping[int, float]) -> Verdict:
    """Name the end of the whole Slurm job as the cause, if the ranks that are gone wrote their files until then.

    `ages` are the seconds by which the file of a rank is older than the newest one. A rank that was gone before stays
    the cause, and so does a rank whose loss ended a step of the job (`*** STEP` in the log).
    """
    ends = [one for one in verdict.causes if one.code in _STOP_REQUESTS and "*** JOB " in " ".join(one.evidence)]
    gone = [cause for cause in verdict.causes if cause not in ends]
    early = any(ages.get(rank, 0.0) > limits.STALE_SECONDS for cause in gone for rank in cause.ranks or ages)
    if not (ends and gone) or early or {cause.code for cause in gone} - {"rank.gone", "ranks.gone"}:
        return verdict
    return verdict.with_causes("failed", *ends, ranks=(), nodes=(), gpus=(), unknown=())


def with_restart(verdict: Verdict, record: RunRecord | None, again: str | None) -> Verdict:
    """Add that the run can be resumed, or that the scheduler has requeued it.

    `again` says what a requeued job is doing now. "" means that the job has ended for good, None that this is unknown.
    """
    stopped = verdict.state == "failed" and verdict.causes and {one.code for one in verdict.causes} <= _STOP_REQUESTS
    if not stopped and verdict.state not in ("fine", "unknown"):
        return verdict
    saved = ""
    if record is not None and record.status == "interrupted" and record.exit_code == RESUMABLE:
        reason = f": {record.reason}" if record.reason else ""
        saved = f"the run ended so that it can resume (run.json: interrupted, exit code {RESUMABLE}{reason})"
    notes = "; ".join(filter(None, (saved, again)))
    if not stopped:
        line = notes if saved else "; ".join(filter(None, (verdict.line, again)))
        return replace(verdict, state="fine" if saved else verdict.state, line=line)
    if again and not saved and "COMPLETED" not in again:
        line = f"unknown: {again}; no source shows whether its ranks had saved a checkpoint"
        return replace(verdict, state="unknown", line=line)
    first, *others = verdict.causes
    if again:
        line = f"the log has: {first.message}. Slurm writes this of each job that it signals; run.json is believed"
        return replace(verdict, state="fine", line=notes, causes=(), disagree=(*verdict.disagree, line))
    if saved:
        action = "Start it again with the same command: it resumes from its checkpoint."
        verdict = replace(verdict, causes=(replace(first, evidence=(*first.evidence, saved), action=action), *others))
    return verdict


# Printed by the batch scripts of `launch --api slurm` and `wrap` if the gate stops the job.
_GATE = re.compile(r"^The job is not started: ([^(\n]{1,80}) \(exit code (\d{1,3})\)\..*$", re.MULTILINE)
_OF_GATE = re.compile(r"^(?!srun: |slurmstepd)([\w.-]{1,253}): \S.*$", re.MULTILINE)  # a line of `-o reason`


def with_gate(verdict: Verdict, log: str) -> Verdict:
    """Add the cause if the gate stopped the job before any rank started, as shown at the end of the batch script's log.

    Findings of other readers are removed in this case, because they come from the gate's own output.
    """
    stops = list(_GATE.finditer(log))
    if not stops:
        return verdict
    stop = stops[-1]
    lines = list(_OF_GATE.finditer(log, 0, stop.start()))[-4:]
    nodes = tuple(dict.fromkeys(line[1] for line in lines))
    evidence = (*(line[0] for line in lines), stop[0])
    key = _CODES["gate"].get(stop[2], "gate_unfinished")
    stopped = RunFacts().named(key, nodes=nodes, evidence=evidence, reason=stop[1], code=stop[2])
    return replace(stopped, nodes=nodes, sources=verdict.sources)
