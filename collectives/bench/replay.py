"""Replays a training step's communication on one rank: part after part, each in its own process groups.

The replay ends within its own budget. Every part gets an equal share of what is left; where one step's calls do not
fit into it, fewer are run and their time is scaled up, and where a call alone is longer, it is timed once.
"""

from __future__ import annotations

import time
from typing import Any

from collectives.bench import measure, ops
from collectives.bench.measure import Rank, Times
from collectives.bench.plan import Part, StepPlan


def run(me: Rank, step: StepPlan) -> None:
    """Replay the step; one rank of each host writes the times of all."""
    started = time.monotonic()
    for index, part in enumerate(step.parts):
        left = step.budget_seconds - measure.slowest(me, time.monotonic() - started)
        times, wrong, calls, warmup = _replay_part(me, part, step, max(0.0, left) / (len(step.parts) - index))
        if measure.speaks():
            size = ops.moved_bytes(ops.OPS[part.op], part.bytes, len(part.groups[0]))
            me.journal.write(
                "replayed",
                name=part.name,
                op=part.op,
                bytes=size,
                times=part.times,
                group_ranks=len(part.groups[0]),
                iteration_seconds=measure.slowest_of_iteration(times, tuple(range(me.world)))[warmup:],
                run_times=calls,
                wrong=sorted(wrong),
            )


def _replay_part(
    me: Rank, part: Part, step: StepPlan, share_seconds: float
) -> tuple[Times, set[tuple[int, int]], int, int]:
    """Give the times, the wrong data, the calls of an iteration, and how many iterations were warm-up."""
    started = time.monotonic()
    op = ops.OPS[part.op]
    side = measure.side_of(me, op, part.bytes, part.groups)
    times = measure.no_times(me)
    wrong = measure.verified_round(me, op, side, part.name)
    one = measure.slowest(me, _calls(me, op, side, part.name, 1))
    left = share_seconds - measure.slowest(me, time.monotonic() - started)
    calls = _fitting(part.times, one, left / (step.warmup + step.iterations))
    seconds: list[float] = []
    # A budget spent by the first calls leaves one timed iteration: they were the warm-up.
    warmup = step.warmup if left > 0 else 0
    while len(seconds) < warmup + step.iterations:
        seconds.append(_calls(me, op, side, part.name, calls) * part.times / calls)
        spent = measure.slowest(me, time.monotonic() - started)
        if spent >= share_seconds and len(seconds) > warmup:
            break
    measure.share(me, times, seconds, [0.0] * len(seconds), wrong)
    measure.name_liars(me, op, side, times)
    return times, times.wrong, calls, warmup


def _fitting(wanted: int, one_seconds: float, seconds: float) -> int:
    """How many calls fit into the seconds, at least one."""
    if seconds <= 0:
        return 1
    return wanted if wanted * one_seconds <= seconds else max(1, int(seconds / one_seconds))


def _calls(me: Rank, op: ops.Op, side: Any, name: str, count: int) -> float:
    """Run the collective `count` times in a row; seconds of this rank."""
    measure.arrive(me, name)
    if side is None:
        return 0.0
    measure.meet(me, side)
    began = measure.mark(me)
    for _ in range(count):
        op.run(side)
    return measure.between(me, began, measure.mark(me))
