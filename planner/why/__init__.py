"""Why a run is stuck, slow or failed: the rules that turn facts about its ranks into one verdict.

The readers supply the facts. These show which ranks wait in which call, what the ranks they wait for are doing
(facts.py) and which of these is the cause (blocked.py), or that the run moves and is only slow (pace.py). What ranks
and launchers wrote as they ended, or before they met, is in reports.py. A waiting rank is never named. The rank that is
missing from the collective is named, and its last known position explains the cause. Each accusation has a margin;
within it the answer is "not distinguishable yet". A question that no source answers stays unknown, with the command
that would answer it.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace

from planner.why import reports
from planner.why.blocked import BlockedCalls, judge_odd_size
from planner.why.facts import Cause, RunFacts, Unknown, Verdict, make_open_verdict, ranks_of
from planner.why.pace import find_late_rank, find_lower_pace

__all__ = ["Cause", "RunFacts", "Unknown", "Verdict", "judge", "ranks_of"]


def judge(facts: RunFacts) -> Verdict:
    """Return the verdict: from the flight recorder first, because it is exact, then other sources, then rank states."""
    if facts.end_from_outside:
        before = judge(facts.before_end)
        verdict = before if before.state in ("stuck", "failed") else reports.judge_end(facts)
        return replace(verdict or before, sources=_list_sources(facts))
    by_source = {"flight recorder": facts.traces, "watchdog": facts.log.traces}
    calls = [verdict for name, traces in by_source.items() if (verdict := BlockedCalls(facts, traces, name).verdict())]
    # gloo ends the rank that is sent too much, which may be the one that is right
    sizes = facts.named("sizes", evidence=(facts.log.cut_short,)) if facts.log.cut_short else None
    verdict = (
        reports.judge_meeting(facts)
        or reports.judge_clash(facts)
        or reports.judge_models(facts)
        or reports.judge_errors(facts)
        or reports.judge_uneven_ends(facts)
        or next((verdict for verdict in calls if not verdict.names_nobody), None)
        or reports.judge_joins(facts)
        or reports.judge_states(facts)
        or next(iter(calls), None)
        or reports.judge_rendezvous(facts)
        or sizes
        or reports.judge_torchrun(facts)
        or reports.judge_other_lines(facts)
        or find_late_rank(facts)
        or find_lower_pace(facts)
    )
    if sizes and verdict and verdict.causes and verdict.causes[0].code in ("rank.gone", "rank.lost", "ranks.gone"):
        verdict = replace(judge_odd_size(facts, verdict.ranks) or sizes, waiting=verdict.waiting)
    if verdict is None or verdict.state == "fine":
        verdict = reports.judge_end(facts) or verdict or reports.judge_stacks(facts) or _report_no_fault(facts)
        if ipv6 := facts.log.rendezvous.get("ipv6"):
            verdict = verdict.with_question("ipv6", name=ipv6[0])
    return replace(verdict, sources=_list_sources(facts))


def _report_no_fault(facts: RunFacts) -> Verdict:
    """Return the verdict if no fault was found, with the open questions."""
    if facts.full:
        return Verdict(state="unknown", line="").with_question("full", folder=facts.full)
    line = "no fault found: no rank is missing, late or dead, and no call waits for long"
    if not facts.traces and not facts.states:
        line = "no fault found in what was read"
    verdict = Verdict(state="fine", line=line)
    if mute := [(rank, one) for rank in facts.states if (one := facts.activity(rank)).kind == "silent"]:
        verdict = make_open_verdict([f"rank {rank} {activity.words}" for rank, activity in mute], mute[0][1].grace)
    questions = {"calls": not facts.traces, "states": not facts.states, "process": mute}
    for key in filter(questions.get, questions):
        verdict = verdict.with_question(key)
    return verdict


def _list_sources(facts: RunFacts) -> tuple[str, ...]:
    counts: dict[str, tuple[str, Sized]] = {
        "flight recorder": ("rank", facts.traces), "rank states": ("rank", facts.states),
        "processes": ("rank", facts.processes), "stacks": ("rank", facts.stacks),
        "watchdog": ("rank", facts.log.traces), "torchrun": ("node", facts.nodes),
    }  # fmt: skip
    return tuple(f"{name}: {len(rows)} {kind}{'s' * (len(rows) > 1)}" for name, (kind, rows) in counts.items() if rows)
