"""Runs the search by pairs on one rank: every rank holds the same schedule and sees the same times."""

from __future__ import annotations

import time
from statistics import median, median_low

from collectives.bench import measure, ops
from collectives.bench.measure import Rank
from collectives.bench.pairing import Pair, Search
from collectives.bench.plan import SearchPlan


def run(me: Rank, plan: SearchPlan) -> None:
    """Search until all ranks are decided or the time budget is spent; one rank of each host writes what was found."""
    schedule = Search(me.world, seed=plan.seed)
    everyone = tuple(range(me.world))
    world = measure.side_of(me, ops.OPS["all_reduce"], 4, (everyone,))
    assert world is not None  # noqa: S101 - every rank is in the group of all
    measure.meet(me, world)  # NCCL asks that all ranks open a group before two of them use it alone
    best, seen = [float("inf")] * me.world, list[float]()
    started = time.monotonic()
    while measure.slowest(me, time.monotonic() - started) < me.plan.budget_seconds and (pairs := schedule.next_round()):
        seconds = _round(me, plan, pairs)
        for pair, taken in seconds.items():
            seen.append(taken)
            for rank in pair:
                best[rank] = min(best[rank], taken)
        # The lower middle: of two pairs the faster one says what is normal.
        schedule.report([pair for pair, taken in seconds.items() if taken > plan.slower_than * median_low(seen)])
    found = schedule.verdict()
    if measure.speaks():
        me.journal.write(
            "searched",
            slow_ranks=found.slow_nodes,
            slow_links=found.slow_links,
            undecided=found.undecided,
            rounds=found.rounds,
            tests=found.tests,
            bytes=ops.moved_bytes(ops.OPS["send_recv"], plan.bytes, 2),
            pair_seconds=median_low(seen),
            rank_seconds=[seconds if seconds < float("inf") else 0.0 for seconds in best],
        )


def _round(me: Rank, plan: SearchPlan, pairs: tuple[Pair, ...]) -> dict[Pair, float]:
    """Test all pairs at once; gives the seconds of each pair's slower side."""
    op, mine = ops.OPS["send_recv"], next((pair for pair in pairs if me.rank in pair), None)
    measure.arrive(me, f"pairs of {plan.bytes} bytes")
    taken: list[float] = [0.0] * plan.iterations
    if mine is not None:
        group = measure.group_of(me, tuple(range(me.world)))
        side = ops.allocate(op, plan.bytes, group, mine, me.rank, me.device)
        op.run(side)
        for index in range(plan.iterations):
            began = measure.mark(me)
            op.run(side)
            taken[index] = measure.between(me, began, measure.mark(me))
    times = measure.no_times(me)
    measure.share(me, times, taken, [0.0] * plan.iterations, ())
    return {pair: max(median(times.runs[rank]) for rank in pair) for pair in pairs}
