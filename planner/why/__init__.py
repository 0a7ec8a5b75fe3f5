"""Why a run is stuck, slow or failed: the rules that turn facts about its ranks into one verdict.

The readers supply the facts. These show which ranks wait in which call (calls.py), what the ranks they wait for are
doing (facts.py), which of these is the cause (stuck.py), or that the run moves and is only slow (pace.py). A waiting
rank is never named. The rank that is missing from the collective is named, and its last known position explains the
cause. Each accusation has a margin; within it the answer is "not distinguishable yet". A question that no source
answers stays unknown, with the command that would answer it.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace

from planner.why import reports
from planner.why.calls import odd_of_all
from planner.why.facts import (
    ACTIONS,
    CODES,
    Cause,
    RunFacts,
    Unknown,
    Verdict,
    is_open,
    left_open,
    not_yet,
    ranks_of,
)  # fmt: skip
from planner.why.pace import slow
from planner.why.stuck import stuck

__all__ = ["ACTIONS", "CODES", "Cause", "RunFacts", "Unknown", "Verdict", "is_open", "judge", "left_open", "ranks_of"]

_ENDED = ("rank.gone", "rank.lost", "ranks.gone")


def judge(facts: RunFacts) -> Verdict:
    """Return the verdict: from the flight recorder first, because it is exact, then other sources, then rank states."""
    if facts.end_from_outside:
        before = judge(facts.before_end)
        verdict = before if before.state in ("stuck", "failed") else reports.by_end(facts)
        return replace(verdict or before, sources=_sources(facts))
    by_source = {"flight recorder": facts.traces, "watchdog": facts.log.traces}
    sizes = facts.named("sizes", evidence=(facts.log.cut_short,)) if facts.log.cut_short else None
    found = [one for name, traces in by_source.items() if traces and (one := stuck(facts, traces, name))]
    known = [verdict for verdict in found if not is_open(verdict)]
    verdict = (
        reports.by_meeting(facts)
        or reports.by_clash(facts)
        or reports.by_models(facts)
        or reports.by_errors(facts)
        or next(iter(known), None)
        or reports.by_joins(facts)
        or reports.by_states(facts)
        or next(iter(found), None)
        or reports.by_rendezvous(facts)
        or sizes
        or reports.by_torchrun(facts)
        or reports.by_hang(facts)
        or reports.by_peer(facts)
        or reports.by_timeouts(facts)
        or slow(facts)
    )
    # gloo ends the rank that is sent too much, which may be the one that is right
    if sizes and verdict and verdict.causes and verdict.causes[0].code in _ENDED:
        odd = odd_of_all(facts, verdict.ranks)
        verdict = replace(sizes, waiting=verdict.waiting) if odd is None else facts.verdict(
            "failed", odd, waiting=verdict.waiting)  # fmt: skip
    if verdict is None or verdict.state == "fine":
        verdict = (
            reports.by_end(facts) or reports.by_silence(facts) or verdict or reports.by_stacks(facts) or _nothing(facts)
        )
    return replace(verdict, sources=_sources(facts))


def _nothing(facts: RunFacts) -> Verdict:
    """Return the verdict if no fault was found, with the open questions."""
    line = "no fault found: no rank is missing, late or dead, and no call waits for long"
    if not facts.traces and not facts.states:
        line = "no fault found in what was read"
    found = Verdict(state="fine", line=line)
    mute = [(rank, one) for rank in facts.states if (one := facts.activity(rank)).kind == "silent"]
    if mute:
        found = not_yet([f"rank {rank} {one.words}" for rank, one in mute], mute[0][1].grace)
    questions = {"calls": not facts.traces, "states": not facts.states, "process": mute}
    for key in filter(questions.get, questions):
        found = left_open(found, key)
    return found


def _sources(facts: RunFacts) -> tuple[str, ...]:
    counts: dict[str, Sized] = {
        "flight recorder": facts.traces, "rank states": facts.states, "processes": facts.processes,
        "stacks": (*facts.stacks, *facts.unranked), "watchdog": facts.log.traces,
    }  # fmt: skip
    found = [f"{name}: {len(rows)} rank{'s' * (len(rows) > 1)}" for name, rows in counts.items() if rows]
    return (*found, *([f"torchrun: {len(facts.nodes)} node{'s' * (len(facts.nodes) > 1)}"] if facts.nodes else []))
