"""A benchmark of real ranks: verified, bounded, read back whole."""

import json

import pytest
from rigs.benchmarks import measured
from rigs.command import python

from collectives.bench import results, run as bench
from collectives.bench.ops import OPS
from collectives.bench.results import Bar
from contracts import plain

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def bar_of(op, size_bytes, hello):
    """1 GB/s after a millisecond, for all-gather only."""
    if op != "all_gather":
        return ()
    moved = size_bytes / 2
    value = moved / (1e-3 + moved / 1e9)
    told = {row["links"]["told"] for row in hello}
    why = (f"{len(hello)} ranks, {', '.join(told)}",)
    return (Bar(name="with current links", low=value / 2, typical=value, high=value * 2, why=why),)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A benchmark whose ranks are started; those of the tests below are forked."""
    events = []
    spec = bench.BenchSpec(
        ops=tuple(OPS), sizes_bytes=(100_000, 1_000_000), max_iterations=20, budget_seconds=240, startup_seconds=240,
        lock_path=str(tmp_path_factory.mktemp("lock") / "lock"), backend="gloo", expect=bar_of,
        links={"told": "by the host"},
    )  # fmt: skip
    return bench.run(spec, on_event=events.append), events


def test_every_op_is_measured_and_verified_by_two_ranks(result):
    """Sizes are those that were run, after rounding to a grain."""
    found, _ = result
    assert found.complete, found.problems
    assert [m.op for m in found.measurements] == [op for op in OPS for _ in range(2)]
    for m in found.measurements:
        assert m.verified and m.ranks == (0, 1) and len(m.hosts) == 2
        assert 10 <= len(m.iteration_seconds) <= 20
        assert m.algbw_bytes_per_second == pytest.approx(m.bytes / m.median_seconds)
        assert m.busbw_bytes_per_second == pytest.approx(m.algbw_bytes_per_second * OPS[m.op].factor(2))
    sizes = {m.op: m.bytes for m in found.measurements[::2]}
    assert sizes["all_gather"] == 2 * (50_000 // 16) * 16
    assert sizes["all_reduce"] == 100_000 // 16 * 16


def test_versions_and_a_bar_of_its_own_for_each_size(result):
    """The ranks told each other what their hosts' links are before anything was measured."""
    found, _ = result
    assert found.versions["torch"] and found.versions["python"]
    small, large = [m for m in found.measurements if m.op == "all_gather"]
    assert small.expected_busbw_bytes_per_second < large.expected_busbw_bytes_per_second < 1e9
    assert large.bars[0].why == ("2 ranks, by the host",)
    assert found.measurements[-1].expected_busbw_bytes_per_second is None


def test_the_result_comes_back_from_json_and_progress_was_told_while_it_happened(result):
    found, events = result
    assert results.read_as(json.loads(json.dumps(plain.write(found))), results.BenchResult) == found
    kinds = [event["event"] for event in events]
    assert kinds.count("start") == kinds.count("end") == 2 and "progress" in kinds
    assert kinds.count("measured") == len(found.measurements)


@pytest.mark.usefixtures("forked_ranks")
def test_a_spent_budget_leaves_a_partial_result_that_says_what_is_missing(tmp_path):
    sizes = tuple(range(1 << 20, 1 << 21, 1 << 16))
    found = measured(tmp_path, sizes_bytes=sizes, budget_seconds=0.2, max_iterations=10_000, precision=None)
    assert not found.complete
    assert found.measurements and all(m.verified for m in found.measurements)
    assert any("time budget of 0.2 s was spent" in problem for problem in found.problems)


def test_the_starting_process_imports_no_torch():
    python("import sys, collectives.bench.run, collectives.bench.results; sys.exit('torch' in sys.modules)")


@pytest.mark.usefixtures("forked_ranks")
def test_a_size_that_is_slow_costs_no_more_than_its_budget(tmp_path):
    """64 MiB of each rank on a slow wire: fewer iterations and warm-ups, a result all the same."""
    found = measured(tmp_path, ops=("all_reduce",), sizes_bytes=(64 << 20,), warmup=1000, min_iterations=1000,
                     max_iterations=1000, budget_seconds=2)  # fmt: skip
    assert found.complete, found.problems
    (only,) = found.measurements
    assert 1 <= len(only.iteration_seconds) < 1000
    assert sum(only.iteration_seconds) < 20
