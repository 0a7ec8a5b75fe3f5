"""Read a run's folder: the ranks' files, their calls and processes; and write the verdict into it.

Surface: DIR/ranks (finetune.rank_monitor), /proc of this host, DIR/run.json. Only `request_dumps` affects a rank.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from collectives.traces import rank_files
from collectives.traces.rank_files import ASK, FIRST, MAX_STATE_BYTES, NAME, NODE, RANKS_FOLDER, RankState, read_state
from contracts import bounded, plain, run_record
from contracts.redaction import without_secrets
from planner import why
from planner.why import RunFacts, Verdict, limits

WATCH_SECONDS = 5.0  # between two reads by --watch
ASK_SECONDS = 30.0  # between two dumps requested by --watch
MAX_ASK_SECONDS = 480.0  # doubled while the verdict stays the same: a dump costs the job about 0.1 s
SUSPICION_SECONDS, MAX_SUSPICION_SECONDS = 10.0, 300.0  # between two dumps while something looks wrong, and how long
SETTLED_SECONDS = 4.0  # time in which ranks notice the loss of another rank and write it
WRITES_SECONDS = 12.0  # a working rank writes within this time: its monitor writes every ten seconds
MAX_NAMED = 16  # ranks or nodes of one cause in the metrics
COPIED_SECONDS = 300.0  # larger than any clock error of a cluster that can still train

# variables that are the same for all ranks of one start
_START = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def read_process_states(states: Mapping[int, RankState], proc: Path = Path("/proc")) -> dict[int, str]:
    """Return the state of ranks' processes that started since this host's boot: "runs", "stopped", "gone"."""
    boot = numbers = ""
    with suppress(OSError):
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        numbers = str((proc / "self/ns/pid").readlink())
    process_states: dict[int, str] = {}
    for rank, state in states.items():
        if not state.pid or not state.boot or state.boot != boot or state.started is None:
            continue
        try:
            fields = (proc / str(state.pid) / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            fields = []
        except OSError:
            continue
        if len(fields) > 19 and int(fields[19]) == state.started:
            process_states[rank] = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(fields[0], "runs")
        elif state.pid_namespace == numbers:  # a pod has its own process numbers, even with the host's name
            process_states[rank] = "gone"
    return process_states


def find_starting_ranks(states: Mapping[int, RankState], alive: Mapping[int, str]) -> dict[int, int]:
    """Return the pids of ranks that run on this host, as their environment shows, and have not come to the rendezvous.

    Environments of other users' processes cannot be read.
    """
    import psutil

    waiting = [pid for rank, one in states.items() if one.asked and alive.get(rank) == "runs" and (pid := one.pid)]
    if not waiting or len(states) >= max(state.world_size or 0 for state in states.values()):
        return {}
    environments = {process.pid: process.info["environ"] or {} for process in psutil.process_iter(["environ"])}
    start = [environments.get(waiting[0], {}).get(name) for name in _START]
    starting: dict[int, int] = {}
    for pid, variables in sorted(environments.items()):
        rank = variables.get("RANK", "")
        if rank.isdecimal() and int(rank) not in states and [variables.get(name) for name in _START] == start:
            starting.setdefault(int(rank), pid)  # the first: a worker of the rank has the same variables
    return starting


class Heartbeats:
    """When each rank last wrote, by the clock of this process, which reads the files again: no other clock counts."""

    def __init__(self) -> None:
        self.heard: dict[int, tuple[float, float]] = {}  # by rank: the time in its file, and when it was first seen
        self.changed = False  # whether any file changed since the first read

    def ages(self, states: Mapping[int, RankState], by_files: Mapping[int, float]) -> dict[int, float]:
        """Return how many seconds each rank's last write is older than the newest; at the first read, by file times."""
        now = time.monotonic()
        for rank, state in states.items():
            written, heard_at = self.heard.get(rank, (state.written, now - by_files.get(rank, 0.0)))
            self.changed = self.changed or state.written != written
            self.heard[rank] = (state.written, heard_at if state.written == written else now)
        newest_of_all = max((self.heard[rank][1] for rank in states), default=0.0)
        return {rank: newest_of_all - self.heard[rank][1] for rank in states}


def read_settled_run(folder: Path) -> tuple[RunFacts, list[str]]:
    """Read a run's folder; return its facts, and what could not be read.

    If a rank, or all, seem to have stopped writing, the folder is read again, because file clocks may differ. If some
    ranks have just failed, it is read again, because others may be about to write how they ended.
    """
    beats = Heartbeats()
    facts, wrong = read_run(folder, beats)
    silence = facts.silence or 0.0
    is_mute = any(
        age > limits.STALE_SECONDS and not facts.states[rank].ended and rank not in facts.processes
        for rank, age in facts.ages.items()
    )
    states = facts.states.values()
    is_ending = any(state.error for state in states) and not all(state.ended for state in states)
    pause = 0.0
    if silence < COPIED_SECONDS and (is_mute or silence >= limits.SILENT_RUN_SECONDS):
        pause = WRITES_SECONDS
    elif is_ending and silence < SETTLED_SECONDS:
        pause = SETTLED_SECONDS
    if not pause or facts.copied:
        return facts, wrong
    time.sleep(pause)
    return read_run(folder, beats)


def read_run(folder: Path, beats: Heartbeats) -> tuple[RunFacts, list[str]]:
    """Read a run's folder once."""
    ranks = folder / RANKS_FOLDER if (folder / RANKS_FOLDER).is_dir() else folder
    # before the files are read: a file that is replaced meanwhile must not count as old content with a new time
    began, files = time.time(), {path: _get_modified(path) for path in ranks.glob("state_rank_*.json")}
    states, wrong = rank_files.read_ranks(files, read_state)
    traces, bad = rank_files.read_ranks(ranks.glob("*trace_rank_*"), rank_files.read_file)
    # file times come from one clock, that of the file system; in a copied folder they are not write times
    modified = {rank: files.get(ranks / NAME.format(rank=rank), 0.0) for rank in states}
    written = {rank: state.written for rank, state in states.items()}
    copied = any(abs(modified[rank] - when) > COPIED_SECONDS for rank, when in written.items())
    times = written if copied else modified
    last = max(times.values(), default=0.0)
    ages = beats.ages(states, {rank: last - when for rank, when in times.items()})
    alive, silence = read_process_states(states), None
    is_running = any(kind != "gone" for kind in alive.values())
    if states and not is_running:
        silence = time.monotonic() - max(when for _, when in beats.heard.values()) if beats.changed else began - last
        is_running = silence < limits.SILENT_RUN_SECONDS
    full = ""
    with suppress(OSError):
        disk = os.statvfs(ranks)  # of zeros where a FUSE file system has no statfs
        full = str(folder) if states and disk.f_bavail == 0 < disk.f_blocks else ""
    if full and began - last > limits.STALE_SECONDS:  # a rank that runs cannot write either
        silence, ages = None, {}
    failed, stopped = _end_by_torchrun(ranks / FIRST)
    newest_state = max(states.values(), key=lambda state: state.written, default=RankState())
    facts = RunFacts(
        traces=traces, states=states, nodes=_read_nodes(ranks, states), processes=alive, ages=ages, copied=copied,
        full=full, starting=find_starting_ranks(states, alive), failed=failed, stopped=stopped, silence=silence,
        first=next((rank for rank, one in failed.items() if one.is_own), None), world=newest_state.world_size or None,
        now=time.time() if is_running else newest_state.written or find_newest_call(traces),
    )  # fmt: skip
    return facts, wrong + bad


def _read_nodes(ranks: Path, states: Mapping[int, RankState]) -> dict[int, RankState]:
    """Read the files of torchrun's agents that are newer than every rank: their ranks have not started yet."""
    since = max((_get_modified(ranks / NAME.format(rank=rank)) for rank in states), default=0.0)
    read, _ = rank_files.read_ranks(ranks.glob("state_node_*.json"), read_state)
    nodes = {node: state for node, state in read.items() if _get_modified(ranks / NODE.format(rank=node)) > since}
    gone = {node for node, kind in read_process_states(nodes).items() if kind == "gone"}
    return {node: replace(state, ended=True) if node in gone else state for node, state in nodes.items()}


def _end_by_torchrun(path: Path) -> tuple[dict[int, run_record.FailedRank], str]:
    """Return the rank that torchrun saw fail first, or the signal that torchrun received: "SIGTERM at 04:03:03 UTC"."""
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        end = plain.loads(bounded.read_text(path, MAX_STATE_BYTES))
        if "signal" in end:
            name = signal.Signals(int(end["signal"])).name
            return {}, f"{name} at {time.strftime('%H:%M:%S', time.gmtime(end['at']))} UTC"
        failed = run_record.FailedRank(int(end["rank"]), int(end["exit_code"]))
        return {failed.rank: failed}, ""
    return {}, ""


def _get_modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def find_newest_call(traces: Mapping[int, rank_files.RankTrace]) -> float:
    """Return the time of the newest call in Unix seconds; 0 if no dump contains it."""
    return max((call.created or 0.0 for trace in traces.values() for call in trace.calls), default=0.0)


def request_dumps(folder: Path, warn: Callable[[str], None] | None = None) -> None:
    """Ask every rank of a run to dump its calls; warn if the request cannot be written."""
    try:
        (folder / RANKS_FOLDER / ASK).touch()
    except OSError:
        if warn is not None:
            warn(f"cannot write into {folder}: the ranks dump their calls only when they stall")


def watch(
    folder: Path, report: Callable[[Verdict], None], warn: Callable[[str], None], *, limit: float = limits.BUSY_SECONDS,
    metrics: Path | None = None,
) -> Verdict:  # fmt: skip
    """Diagnose a run again and again until it ends. Report and save each change of the verdict, also to `metrics`.

    A failure ends it unless torchrun starts the ranks again within `limit` seconds.
    """
    beats, last = Heartbeats(), object()
    failed_at: float | None = None
    changed_at, requested_at = time.monotonic(), -MAX_ASK_SECONDS
    while True:
        verdict, facts = _judge_run(folder, beats, limit)
        over = bool(facts.states) and all(state.ended for state in facts.states.values())
        if (change := (verdict.state, verdict.ranks, [cause.code for cause in verdict.causes], over)) != last:
            last = change
            report(verdict)
            if not save_verdict(folder, verdict):
                warn(f"cannot write {run_record.WHY} into {folder}")
            if metrics is not None:
                save_metrics(metrics, verdict, folder.resolve().name, warn)
            changed_at = time.monotonic()
        if verdict.state == "failed":
            may_restart = any(one.restarts_left for one in facts.states.values())
            if facts.first is not None or facts.stopped or not may_restart:
                return verdict  # torchrun has ended, or has no restarts left
            if failed_at is None:
                failed_at = time.monotonic()
                warn(f"torchrun may start the ranks again: --watch ends if it has not within {limit:.0f} s")
            elif time.monotonic() - failed_at > limit:
                return verdict
        elif over:
            return verdict
        else:
            failed_at = None
        now = time.monotonic()
        if verdict.sources and now - requested_at >= _find_pause(verdict, now - changed_at, requested_at - changed_at):
            request_dumps(folder, warn if requested_at < changed_at else None)
            requested_at = now
        time.sleep(WATCH_SECONDS)


def _judge_run(folder: Path, beats: Heartbeats, limit: float) -> tuple[Verdict, RunFacts]:
    """Read the run and judge it; a failed one twice, because the other ranks still write how they ended."""
    for pause in (SETTLED_SECONDS, 0.0):
        facts = replace(read_run(folder, beats)[0], limit=limit)
        verdict: Verdict = without_secrets(why.judge(facts))  # it contains errors of the ranks
        if verdict.state != "failed":
            break
        time.sleep(pause)
    if verdict.state == "fine" and not verdict.sources:
        verdict = mark_unwritten(verdict, folder)
    unknown = tuple(one for one in verdict.unknown if "--watch" not in one.command)  # --watch is already running
    return replace(verdict, unknown=unknown), facts


def mark_unwritten(verdict: Verdict, folder: Path | None, seen: str = "") -> Verdict:
    """Return the verdict if no source shows the state of the run; with a folder, also what would show it there."""
    verdict = replace(verdict, state="unknown", line=f"unknown: {seen}no source shows the state of the run")
    return verdict if folder is None else replace(verdict, unknown=()).with_question("unwritten", folder=folder)


def _find_pause(verdict: Verdict, unchanged: float, requested: float) -> float:
    """Return the seconds until the next request for dumps. A few, for some minutes, while something looks wrong.

    Otherwise each pause is as long as the verdict had been the same at the last request, so that it doubles.
    `unchanged` and `requested` are the seconds from the last change of the verdict until now, and until that request.
    """
    is_suspicious = verdict.state != "fine" or verdict.line.startswith(("not ", "nothing is stuck yet"))
    if is_suspicious and unchanged < MAX_SUSPICION_SECONDS:
        return SUSPICION_SECONDS
    return min(max(requested, ASK_SECONDS), MAX_ASK_SECONDS)


def save_metrics(path: Path, verdict: Verdict, run: str, warn: Callable[[str], None]) -> None:
    """Write the verdict as a text file for node_exporter's textfile collector, every series with the label `run`."""
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()
    gauge = Gauge("topoflight_why", "1 for each cause that the verdict on a run names.",
                  ("run", "state", "code", "rank", "node"), registry=registry)  # fmt: skip
    rows = [(cause.code, str(rank), node) for cause in verdict.causes
            for rank in cause.ranks[:MAX_NAMED] or ("",) for node in cause.nodes[:MAX_NAMED] or ("",)]  # fmt: skip
    for row in rows or [("", "", "")]:
        gauge.labels(run, verdict.state, *row).set(1.0)
    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        warn(f"--metrics {path}: {error.strerror}")


def save_verdict(folder: Path, verdict: Verdict) -> bool:
    """Write the verdict into the run's folder, and a fault as a note into its record. False: not written."""
    from agent.base.output import render, write_atomic

    written = False
    with suppress(OSError):
        written = bool(write_atomic(folder / run_record.WHY, render(verdict, "json")))
    with suppress(OSError, run_record.RecordError):
        record = run_record.read(folder / "run.json")
        if (note := run_record.watched(folder)) and note not in record.notes:
            run_record.save(folder / "run.json", replace(record, notes=[*record.notes, note]))
    return written
