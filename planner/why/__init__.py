"""Why a run is stuck, slow or failed: the rules that turn the facts on its ranks into one verdict.

Facts come from the readers. They show which ranks wait in which call (calls.py), what the ranks that are waited for do
(facts.py), and so which of them is the cause (stuck.py), or whether the run moves and is only slow (pace.py). A rank
that waits is never named: the rank that is missing from the collective is, and its last known position explains the
cause. Each accusation has a margin; within it the answer is "not distinguishable yet". A question that no source
answers stays unknown, with the command that would answer it.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace

from planner.why import reports
from planner.why.facts import (
    ACTIONS,
    CODES,
    Cause,
    RunFacts,
    Unknown,
    Verdict,
    activity,
    is_open,
    left_open,
    not_yet,
    ranks_of,
    verdict_named,
)  # fmt: skip
from planner.why.pace import slow
from planner.why.stuck import stuck

__all__ = ["ACTIONS", "CODES", "Cause", "RunFacts", "Unknown", "Verdict", "is_open", "judge", "left_open", "ranks_of",
           "verdict_named"]  # fmt: skip


def judge(facts: RunFacts) -> Verdict:
    """The verdict on the ranks: the flight recorder first, as it is exact; then the others; then the ranks' states."""
    by_source = {"flight recorder": facts.traces, "watchdog": facts.log.traces}
    found = [one for name, traces in by_source.items() if traces and (one := stuck(facts, traces, name))]
    known = [verdict for verdict in found if not is_open(verdict)]
    verdict = (
        reports.by_clash(facts)
        or reports.by_models(facts)
        or reports.by_errors(facts)
        or next(iter(known), None)
        or reports.by_joins(facts)
        or reports.by_states(facts)
        or next(iter(found), None)
        or reports.by_rendezvous(facts)
        or reports.by_torchrun(facts)
        or reports.by_hang(facts)
        or reports.by_peer(facts)
        or reports.by_timeouts(facts)
        or slow(facts)
    )
    if verdict is None or verdict.state == "fine":
        verdict = reports.by_silence(facts) or verdict or reports.by_stacks(facts) or _nothing(facts)
    return replace(verdict, sources=_sources(facts))


def _nothing(facts: RunFacts) -> Verdict:
    """The verdict where no fault was found, with the questions that stay open."""
    unknown = []
    if not facts.traces:
        unknown.append(Unknown(what="which collectives the ranks are in", command="topoflight why --run DIR --watch"))
    if not facts.states:
        unknown.append(Unknown(what="what each rank does", command="py-spy dump --pid PID on each node"))
    mute = [(rank, one) for rank in facts.states if (one := activity(rank, facts)).kind == "silent"]
    if mute:
        hint = Unknown(what="whether it runs: its host's process table was not read", command="ps on its host")
        found = not_yet([f"rank {rank} {one.words}" for rank, one in mute], mute[0][1].grace)
        return replace(found, unknown=(*unknown, hint))
    line = "no fault found: no rank is missing, late or dead, and no call waits for long"
    if not facts.traces and not facts.states:
        line = "no fault found in what was read"
    return Verdict(state="fine", line=line, unknown=tuple(unknown))


def _sources(facts: RunFacts) -> tuple[str, ...]:
    counts: dict[str, Sized] = {
        "flight recorder": facts.traces, "rank states": facts.states, "processes": facts.processes,
        "stacks": (*facts.stacks, *facts.unranked), "watchdog": facts.log.traces,
    }  # fmt: skip
    return tuple(f"{name}: {len(rows)} rank{'s' * (len(rows) > 1)}" for name, rows in counts.items() if rows)
