"""What a run's folder tells of its ranks: their own files, their calls and their processes; and the verdict beside it.

Surface: DIR/ranks (finetune.beside), /proc of this host, DIR/run.json. Nothing is asked of a rank but by `ask`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from collectives.traces import calls
from contracts import rank_state, run_record
from contracts.rank_state import RankState
from planner import why
from planner.why import Seen, Verdict

ASK_SECONDS = 30.0  # between two dumps that a watcher asks for
MOST_ASK_SECONDS = 480.0  # twice as long after each look that found the run fine: a dump costs the job some 0.1 s
SETTLED_SECONDS = 4.0  # ranks that lose another notice, and write, within
_MOST_FILES = 8192


def states_of(folder: Path) -> tuple[dict[int, RankState], list[str]]:
    """The ranks' own files in a run's folder, and what could not be read."""
    found: dict[int, RankState] = {}
    wrong = []
    for path in sorted(folder.glob("state_rank_*.json"))[:_MOST_FILES]:
        try:
            state = rank_state.read(path)
        except rank_state.StateError as error:
            wrong.append(str(error))
            continue
        found[state.rank] = state
    return found, wrong


def processes(states: Mapping[int, RankState], proc: Path = Path("/proc")) -> dict[int, str]:
    """What became of the ranks' processes, of those that started since this host's boot: "runs", "stopped", "gone"."""
    boot, name = "", os.uname().nodename
    with suppress(OSError):
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    found: dict[int, str] = {}
    for rank, state in states.items():
        if not state.pid or not state.boot or state.boot != boot or state.started is None:
            continue
        here = state.host == name  # another pod or namespace of this kernel may number its processes by itself
        try:
            words = (proc / str(state.pid) / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            words = ["X"] if here else []
        except OSError:
            words = []
        if words and words != ["X"] and (len(words) < 20 or int(words[19]) != state.started):
            words = ["X"] if here else []
        if words:
            found[rank] = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(words[0], "runs")
    return found


def of_run(folder: Path, *, now: float | None = None) -> tuple[Seen, list[str]]:
    """What a run's folder holds of its ranks, and what could not be read."""
    ranks = folder / rank_state.RANKS_FOLDER if (folder / rank_state.RANKS_FOLDER).is_dir() else folder
    states, wrong = states_of(ranks)
    traces, bad = calls.read_files(sorted(ranks.glob("*trace_rank_*"))[:_MOST_FILES])
    newest_state = max(states.values(), key=lambda state: state.written, default=None)
    world = (newest_state.world_size or 0) if newest_state else 0
    if world:  # an earlier start of more ranks may have left its files
        states = {rank: state for rank, state in states.items() if rank < world}
        traces = {rank: trace for rank, trace in traces.items() if rank < world}
    alive = processes(states)
    # of a run that is over, the end is when its ranks last wrote; of one that goes on, it is now
    last = max((state.written for state in states.values()), default=0.0)
    running = any(kind != "gone" for kind in alive.values())
    at = now or (time.time() if running else last) or newest(traces)
    return Seen(traces=traces, states=states, processes=alive, world=world or None, now=at), wrong + bad


def newest(traces: Mapping[int, calls.RankTrace]) -> float:
    """When the newest call was made, Unix seconds; 0 where no dump says."""
    return max((call.created or 0.0 for trace in traces.values() for call in trace.calls), default=0.0)


def look(folder: Path) -> Verdict:
    """The verdict on a run's folder."""
    return why.judge(of_run(folder)[0])


def ask(folder: Path) -> None:
    """Have every rank of a run dump its calls at its next look."""
    with suppress(OSError):
        (folder / rank_state.RANKS_FOLDER / rank_state.ASK).touch()


def watch(
    folder: Path, tell: Callable[[Verdict], None], *, seconds: float = 5.0, until: float | None = None
) -> Verdict:
    """Look at a run until it ends, or until `until`; each new verdict is told and kept beside the record."""
    last_line, asked_at, pause = "", 0.0, 0.0
    while True:
        verdict = look(folder)
        if verdict.state == "failed":  # the others are still to tell how they ended
            time.sleep(SETTLED_SECONDS)
            verdict = look(folder)
        if verdict.line != last_line:
            last_line = verdict.line
            tell(verdict)
            keep(folder, verdict)
        seen = of_run(folder)[0]
        over = bool(seen.states) and all(state.ended for state in seen.states.values())
        if over or verdict.state == "failed" or (until is not None and time.time() >= until):
            return verdict
        if verdict.state != "fine":
            pause = min(pause, ASK_SECONDS)
        if time.monotonic() - asked_at >= pause:
            ask(folder)
            asked_at, pause = time.monotonic(), min(max(2 * pause, ASK_SECONDS), MOST_ASK_SECONDS)
        time.sleep(seconds)


def keep(folder: Path, verdict: Verdict) -> None:
    """Write the verdict beside the run's record, and where it names a fault as a note into the record."""
    from agent.base.documents import render

    draft = folder / ".why.json.draft"
    with suppress(OSError):
        draft.write_text(render(verdict, "json"), encoding="utf-8")
        draft.replace(folder / run_record.WHY)
    with suppress(OSError, run_record.RecordError):
        record = run_record.read(folder / "run.json")
        if (note := run_record.watched(folder)) and note not in record.notes:
            run_record.save(folder / "run.json", replace(record, notes=[*record.notes, note]))
