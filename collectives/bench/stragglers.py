"""Who is slow: named from how long each rank waits for the others to arrive.

Every iteration starts with a meeting of the group. The rank that comes last waits least, so no two clocks are
ever compared: a rank's lateness is what the median rank waits more than it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from collectives.bench.results import Straggler

# Ranks that are alike come last in 1 / n of the iterations each. A rank is named when it comes last in more than
# chance explains at this level (one-sided binomial, divided by the number of ranks asked about) ...
SIGNIFICANCE = 0.001
# ... and when its lateness is no less than what a healthy meeting itself takes to the same median rank: below that
# it costs the job nothing that one could see.
MIN_ITERATIONS = 5


def name(ranks: Sequence[int], hosts: Sequence[str], wait_seconds: Sequence[Sequence[float]]) -> tuple[Straggler, ...]:
    """Name the ranks that the others wait for; `wait_seconds` is by rank, then by iteration."""
    iterations = len(wait_seconds[0]) if wait_seconds else 0
    if len(ranks) < 2 or iterations < MIN_ITERATIONS:
        return ()
    columns = list(zip(*wait_seconds, strict=True))
    late = [[median(column) - column[place] for column in columns] for place in range(len(ranks))]
    if len(ranks) == 2:  # the median of two is their mean: the later of a pair is late by the whole difference
        late = [[2 * seconds for seconds in row] for row in late]
    last = [column.index(min(column)) for column in columns]
    found = []
    for place, rank in enumerate(ranks):
        times = last.count(place)
        lateness, floor = median(late[place]), min(median(row) for row in wait_seconds)
        if lateness <= floor or _by_chance(times, iterations, 1 / len(ranks)) * len(ranks) > SIGNIFICANCE:
            continue
        found.append(
            Straggler(
                rank=rank,
                host=hosts[place],
                late_seconds=lateness,
                iterations=iterations,
                share=times / iterations,
                why=f"came last in {times} of {iterations} meetings; the others waited {lateness:.6f} s for it",
            )
        )
    return tuple(sorted(found, key=lambda straggler: -straggler.late_seconds))


def _by_chance(times: int, of: int, probability: float) -> float:
    """P(Binomial(of, probability) >= times)."""
    import math

    return math.fsum(math.comb(of, k) * probability**k * (1 - probability) ** (of - k) for k in range(times, of + 1))
