"""Replays a training step's communication on one rank: part after part, each in its own process groups."""

from __future__ import annotations

from typing import Any

from collectives import measure, ops
from collectives.measure import Rank, Times
from collectives.plan import Part, StepPlan


def run(me: Rank, step: StepPlan) -> None:
    """Replay the step; one rank of each host writes the times of all."""
    for part in step.parts:
        times, wrong = _replay_part(me, part, step)
        if measure.speaks():
            size = ops.moved_bytes(ops.OPS[part.op], part.bytes, len(part.groups[0]))
            me.journal.write(
                "replayed",
                name=part.name,
                op=part.op,
                bytes=size,
                times=part.times,
                group_ranks=len(part.groups[0]),
                iteration_seconds=measure.slowest_of_iteration(times, tuple(range(me.world)))[step.warmup :],
                wrong=sorted(wrong),
            )


def _replay_part(me: Rank, part: Part, step: StepPlan) -> tuple[Times, set[tuple[int, int]]]:
    op = ops.OPS[part.op]
    side = measure.side_of(me, op, part.bytes, part.groups)
    times = measure.no_times(me)
    wrong = measure.verified_round(me, op, side, part.name)
    seconds = [_one_step(me, op, side, part) for _ in range(step.warmup + step.iterations)]
    measure.share(me, times, seconds, [0.0] * len(seconds), wrong)
    measure.name_liars(me, op, side, times)
    return times, times.wrong


def _one_step(me: Rank, op: ops.Op, side: Any, part: Part) -> float:
    measure.arrive(me, part.name)
    if side is None:
        return 0.0
    measure.meet(me, side)
    began = measure.mark(me)
    for _ in range(part.times):
        op.run(side)
    return measure.between(me, began, measure.mark(me))
