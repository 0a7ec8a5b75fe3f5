"""Medians, intervals, fits, settings, late ranks, and what ranks wrote down as a result."""

import random
from statistics import median

import pytest
from rigs.tables import each_row, rows_of

from collectives.bench import results
from collectives.bench.plan import BenchSpec, Case, SpecError
from collectives.bench.rank import predict_seconds
from collectives.bench.results import spread_ratio
from collectives.bench.run import assemble, find_stragglers
from collectives.bench.watch import Outcome


@each_row(("values", "ratio"), [([], None), ([1.0] * 5, None), ([1.0] * 6, 0), ([1, 2, 3, 4, 5, 6], 5 / 2 / 3.5)])
def test_the_interval_needs_six_values_and_is_the_whole_range_of_them(values, ratio):
    assert spread_ratio(values) == (ratio and pytest.approx(ratio))


@each_row("n", [6, 10, 25, 100])
def test_the_interval_holds_the_true_median_in_95_of_100_cases(n):
    draw = random.Random(n)
    held = 0
    for _ in range(2000):
        values = [draw.lognormvariate(0, 0.5) for _ in range(n)]
        # From the ratio back to the interval is not possible; count by the same order statistics instead.
        half = spread_ratio(values) * median(values)
        ordered = sorted(values)
        low = next(i for i in range(n) if (ordered[n - 1 - i] - ordered[i]) / 2 == pytest.approx(half))
        held += ordered[low] <= 1.0 <= ordered[n - 1 - low]
    assert held / 2000 >= 0.95 - 3 * (0.95 * 0.05 / 2000) ** 0.5


@each_row(("settings", "named"), rows_of(__file__)("refused"))
def test_an_impossible_setting_is_refused_with_its_name_and_value(settings, named):
    with pytest.raises(SpecError) as error:
        BenchSpec(**settings)
    assert named in str(error.value)
    assert ": must be " in str(error.value)


@each_row("endpoint", ["host-0.job.space.svc:29500", "10.0.0.1:1", "[fd00::1]:29500"])
def test_names_and_addresses_are_rendezvous(endpoint):
    assert BenchSpec(hosts=2, rendezvous=endpoint).world_size == 4


@each_row("data", [None, [], {}, {"schema_version": 2}, {"schema_version": 1, "measurements": 5}])
def test_what_is_no_result_is_refused(data):
    with pytest.raises(results.ResultError):
        results.read_as(data, results.BenchResult)


# What ranks wrote down becomes a result: who differs, who is short of what, and nothing that was not said.


def hello(**changes):
    """What four ranks of two nodes say as they join; `changes` by rank."""
    usual = {"versions": {"torch": "2.13.0", "nccl": "2.27.5"}, "environment": {"NCCL_IB_HCA": "mlx5_0"}}
    rows = [{"rank": rank, "host": f"node-{rank // 2}", **usual, **{key: each[rank] for key, each in changes.items()}}
            for rank in range(4)]  # fmt: skip
    return {"event": "joined", "ranks": rows}


def measured(**changes):
    event = {"event": "measured", "op": "all_gather", "bytes": 4096, "rounds": 2, "wrong": []}
    event |= {"iteration_seconds": [1e-3] * 10, "wait_seconds": [[1e-4] * 10] * 4}
    return event | changes


def result(*events, problems=(), backend="nccl"):
    outcome = Outcome(events=list(events), problems=list(problems))
    return assemble(BenchSpec(ranks_per_host=4, backend=backend), outcome, 0.0, 1.0, None)


def test_ranks_that_are_alike_leave_no_problem():
    found = result(hello(), measured())
    assert found.complete and found.problems == ()
    assert found.hosts == ("node-0", "node-0", "node-1", "node-1")
    assert found.environment == {"NCCL_IB_HCA": "mlx5_0"}
    assert found.measurements[0].busbw_bytes_per_second == 4096 / 1e-3 * 3 / 4


def test_a_wrong_sum_that_nobody_owns_up_to_is_told_so():
    found = result(hello(), measured(wrong=[[0, -1], [1, -1]]))
    assert not found.complete and not found.measurements[0].verified
    assert found.problems == (
        "all_gather of 4096 bytes is not verified: the sum is wrong on ranks 0 to 1; "
        "all_gather shows which rank's data is wrong",
    )


def test_what_was_not_measured_or_compared_is_neither_verified_nor_whole():
    assert not result(hello(), measured(rounds=0)).measurements[0].verified
    found = result(problems=["the ranks did not join within 5 s"])
    assert not found.complete and found.measurements == () and found.hosts == ()


# Who the others wait for is named; ranks that are alike are not.


def meetings(arrivals):
    """What each rank waits at each meeting, from when each came."""
    waits = [[max(moment) - came for came in moment] for moment in arrivals]
    return [list(row) for row in zip(*waits, strict=True)]


def jitter(ranks, iterations, late, seed=0):
    """Ranks that come at random within a millisecond, some of them late."""
    draw = random.Random(seed)
    return [[draw.uniform(0, 1e-3) + late.get(rank, 0.0) for rank in range(ranks)] for _ in range(iterations)]


def named(ranks, iterations, late, seed=0):
    waits = meetings(jitter(ranks, iterations, late, seed))
    hosts = [f"host-{rank}" for rank in range(ranks)]
    return find_stragglers(hosts, waits)


@each_row("ranks", [2, 3, 8, 64])
def test_a_rank_that_is_always_late_is_named_with_its_host_and_lateness(ranks):
    (found,) = named(ranks, 40, {1: 0.010})
    assert (found.rank, found.host, found.iterations) == (1, "host-1", 40)
    assert found.late_seconds == pytest.approx(0.010, abs=0.001)
    assert found.share == 1.0
    assert "arrived last in 40 of 40 collectives" in found.why


@each_row("ranks", [2, 8, 64])
def test_ranks_that_are_alike_are_not_named(ranks):
    """One-sided at 0.001 for a whole group: two names in 100 groups would be a one in 200 draw."""
    assert sum(bool(named(ranks, 40, {}, seed)) for seed in range(100)) <= 1


def test_two_late_ranks_of_many_are_both_named_the_later_one_first():
    found = named(16, 200, {3: 0.0102, 9: 0.010})
    assert [straggler.rank for straggler in found] == [3, 9]


def test_too_few_meetings_lone_ranks_and_a_rank_late_once_name_nobody():
    assert named(4, 4, {1: 0.1}) == ()
    assert find_stragglers(["a"], [[0.1] * 50]) == ()
    arrivals = jitter(4, 50, {})
    arrivals[7][2] += 5.0
    assert find_stragglers(list("abcd"), meetings(arrivals)) == ()


def test_the_time_of_a_size_is_predicted_from_a_large_enough_one():
    """From the largest alike; not from one that is all latency."""
    small, middle = Case(op="all_gather", bytes=1 << 20), Case(op="all_gather", bytes=16 << 20)
    large = Case(op="all_gather", bytes=256 << 20)
    assert predict_seconds(large, {small: 0.2}) is None
    assert predict_seconds(large, {small: 0.2, middle: 2.0}) == 32.0
    assert predict_seconds(Case(op="reduce_scatter", bytes=16 << 20), {middle: 2.0}) == 2.0
