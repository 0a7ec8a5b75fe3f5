"""Medians, intervals, fits, settings and the JSON of a result."""

import random
from statistics import median

import pytest
from rigs.tables import each_row

from collectives.bench import results
from collectives.bench.results import BenchResult, Measurement, fit_latency, spread_ratio
from collectives.bench.run import BenchSpec, Case, SpecError, sweep


def measurement(size, seconds, op="all_gather", verified=True):
    return Measurement(
        op=op,
        backend="gloo",
        ranks=(0, 1),
        hosts=("a", "b"),
        bytes=size,
        iteration_seconds=(seconds,),
        median_seconds=seconds,
        spread_ratio=None,
        algbw_bytes_per_second=size / seconds,
        busbw_bytes_per_second=size / seconds / 2,
        verified=verified,
    )


def test_five_values_or_fewer_have_no_95_percent_interval():
    assert spread_ratio([]) is None
    assert spread_ratio([1.0] * 5) is None
    assert spread_ratio([1.0] * 6) == 0


def test_the_interval_of_six_values_is_their_whole_range():
    assert spread_ratio([1, 2, 3, 4, 5, 6]) == pytest.approx((6 - 1) / 2 / 3.5)


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


def test_more_iterations_make_the_interval_tighter():
    draw = random.Random(1)
    values = [draw.gauss(1, 0.1) for _ in range(400)]
    assert spread_ratio(values) < spread_ratio(values[:20])


def test_the_fit_finds_latency_and_bandwidth():
    points = [measurement(size, 50e-6 + size / 2e9) for size in (1_000, 100_000, 10_000_000, 1_000_000_000)]
    fit = fit_latency("all_gather", points)
    assert fit.alpha_seconds == pytest.approx(50e-6, rel=1e-6)
    assert fit.beta_bytes_per_second == pytest.approx(2e9, rel=1e-6)
    assert fit.points == 4


def test_unverified_sizes_and_other_ops_have_no_part_in_the_fit():
    points = [measurement(1_000, 1e-3), measurement(2_000, 2e-3, verified=False), measurement(3_000, 1, op="broadcast")]
    assert fit_latency("all_gather", points) is None


def test_a_sweep_keeps_within_its_bounds():
    assert sweep(8, 100, 4) == (8, 32)
    assert sweep(8, 8, 2) == (8,)


@each_row(
    ("settings", "named"),
    [
        ({"ops": ("gather",)}, "op: 'gather' is not allowed; allowed: one of all_gather"),
        ({"backend": "mpi"}, "backend: 'mpi'"),
        ({"ranks_per_host": 0}, "ranks_per_host: 0"),
        ({"budget_seconds": -1}, "budget_seconds: -1"),
        ({"budget_seconds": float("nan")}, "budget_seconds: nan"),
        ({"silence_seconds": float("inf")}, "silence_seconds: inf"),
        ({"min_iterations": 20, "max_iterations": 10}, "max_iterations: 10"),
        ({"max_bytes": 10}, "max_bytes: 10"),
        ({"step_factor": 1}, "step_factor: 1"),
        ({"precision": 5}, "precision: 5"),
        ({"sizes_bytes": (0,)}, "size in bytes: 0"),
        ({"hosts": 2}, "rendezvous: None"),
        ({"hosts": 2, "rendezvous": "here"}, "rendezvous: 'here'"),
        ({"hosts": 2, "rendezvous": "here:99999"}, "rendezvous: 'here:99999'"),
        ({"hosts": 2, "rendezvous": "here:29500", "node_rank": 2}, "node_rank: 2"),
        ({"cases": (Case(op="all_gather", bytes=8, groups=((0, 1), (1,))),)}, "groups: "),
        ({"cases": (Case(op="all_gather", bytes=8, groups=((0, 5),)),)}, "ranks 0 to 1"),
    ],
)
def test_an_impossible_setting_is_refused_with_its_name_and_value(settings, named):
    with pytest.raises(SpecError) as error:
        BenchSpec(**settings)
    assert named in str(error.value)
    assert "allowed:" in str(error.value)


@each_row("endpoint", ["host-0.job.space.svc:29500", "10.0.0.1:1", "[fd00::1]:29500"])
def test_names_and_addresses_are_rendezvous(endpoint):
    assert BenchSpec(hosts=2, rendezvous=endpoint).world_size == 4


def test_a_result_comes_back_from_json():
    result = BenchResult(
        measurements=(measurement(1000, 1e-3),),
        world_size=2,
        backend="gloo",
        hosts=("a", "b"),
        environment={"GLOO_SOCKET_IFNAME": "net1"},
        versions={"torch": "2"},
        started_at_seconds=1.5,
        seconds=2.0,
        problems=("rank 1 on b: no answer",),
        complete=False,
    )
    assert results.result_from_json(results.result_to_json(result)) == result


@each_row("data", [None, [], {}, {"schema_version": 2}, {"schema_version": 1, "measurements": 5}])
def test_what_is_no_result_is_refused(data):
    with pytest.raises(results.ResultError):
        results.result_from_json(data)
