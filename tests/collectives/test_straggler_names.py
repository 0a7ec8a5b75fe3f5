"""Who the others wait for is named; ranks that are alike are not."""

import random

import pytest
from rigs.tables import each_row

from collectives.bench.run import name_stragglers


def meetings(arrivals):
    """What each rank waits, from when each came to each meeting; by rank, then by meeting."""
    waits = [[max(moment) - came for came in moment] for moment in arrivals]
    return [list(row) for row in zip(*waits, strict=True)]


def jitter(ranks, iterations, late, seed=0):
    """Ranks that come at random within a millisecond, some of them late."""
    draw = random.Random(seed)
    return [[draw.uniform(0, 1e-3) + late.get(rank, 0.0) for rank in range(ranks)] for _ in range(iterations)]


def named(ranks, iterations, late, seed=0):
    waits = meetings(jitter(ranks, iterations, late, seed))
    hosts = [f"host-{rank}" for rank in range(ranks)]
    return name_stragglers(tuple(range(ranks)), hosts, waits)


@each_row("ranks", [2, 3, 8, 64])
def test_a_rank_that_is_always_late_is_named_with_its_host_and_lateness(ranks):
    (found,) = named(ranks, 40, {1: 0.010})
    assert (found.rank, found.host, found.iterations) == (1, "host-1", 40)
    assert found.late_seconds == pytest.approx(0.010, abs=0.001)
    assert found.share == 1.0
    assert "came last in 40 of 40 meetings" in found.why


@each_row("ranks", [2, 8, 64])
def test_ranks_that_are_alike_are_not_named(ranks):
    """One-sided at 0.001 for a whole group: a name in 200 groups would be a one in five draw."""
    assert sum(bool(named(ranks, 40, {}, seed)) for seed in range(200)) <= 2


def test_two_late_ranks_of_many_are_both_named_the_later_one_first():
    found = named(16, 200, {3: 0.0102, 9: 0.010})
    assert [straggler.rank for straggler in found] == [3, 9]


def test_too_few_meetings_and_lone_ranks_name_nobody():
    assert named(4, 4, {1: 0.1}) == ()
    assert name_stragglers((0,), ["a"], [[0.1] * 50]) == ()


def test_a_rank_late_once_is_not_a_straggler():
    arrivals = jitter(4, 50, {})
    arrivals[7][2] += 5.0
    assert name_stragglers(range(4), list("abcd"), meetings(arrivals)) == ()
