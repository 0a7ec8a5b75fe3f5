"""A benchmark of real ranks: verified, bounded, read back whole; and the groups and parts of one training step."""

import json

import pytest
from rigs.benchmarks import measured
from rigs.command import python
from rigs.tables import each_row

from agent.jobs.benchmark import parse_degrees
from collectives.bench import results
from collectives.bench import run as bench
from collectives.bench.ops import OPS
from collectives.bench.plan import Case, SpecError, StepShape, groups, parts
from collectives.bench.results import Bar

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def bar_of(op, size_bytes, ranks, hello):
    """1 GB/s after a millisecond, for all-gather only."""
    if op != "all_gather":
        return ()
    moved = size_bytes / 2
    value = moved / (1e-3 + moved / 1e9)
    told = {row["links"]["told"] for row in hello}
    why = (f"{len(ranks)} ranks, {', '.join(told)}",)
    return (Bar(name="as it is", low=value / 2, typical=value, high=value * 2, why=why),)


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
    found, _ = result
    assert found.complete, found.problems
    assert [m.op for m in found.measurements] == [op for op in OPS for _ in range(2)]
    for m in found.measurements:
        assert m.verified and m.ranks == (0, 1) and len(m.hosts) == 2
        assert 10 <= len(m.iteration_seconds) <= 20 and len(m.rank_median_seconds) == 2
        assert m.algbw_bytes_per_second == pytest.approx(m.bytes / m.median_seconds)
        assert m.busbw_bytes_per_second == pytest.approx(m.algbw_bytes_per_second * OPS[m.op].factor(2))


def test_sizes_are_those_that_were_run_after_rounding_to_a_grain(result):
    found, _ = result
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
    assert results.result_from_json(json.loads(json.dumps(results.result_to_json(found)))) == found
    kinds = [event["event"] for event in events]
    assert kinds.count("start") == kinds.count("end") == 2 and "progress" in kinds
    assert kinds.count("measured") == len(found.measurements)


@pytest.mark.usefixtures("forked_ranks")
def test_groups_are_measured_at_the_same_time_and_told_apart(tmp_path):
    cases = tuple(bench.Case(op=op, bytes=65536) for op in ("all_gather", "reduce_scatter"))
    cases += (bench.Case(op="all_reduce", bytes=4096, groups=((0, 2), (1, 3))),)
    found = measured(tmp_path, cases=cases, ranks_per_host=4, max_iterations=10)
    assert found.complete, found.problems
    whole = [(op, (0, 1, 2, 3)) for op in ("all_gather", "reduce_scatter")]
    assert [(m.op, m.ranks) for m in found.measurements] == [*whole, ("all_reduce", (0, 2)), ("all_reduce", (1, 3))]


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


SHAPE = StepShape(dp_shard=2, tp=2, layers=3, fsdp_layer_bytes=200_000, tp_activation_bytes=40_000, micro_batches=2)


def test_ranks_of_the_innermost_axis_lie_beside_each_other():
    """And context-parallel ranks share the sharding group."""
    shape = StepShape(pp=2, dp_shard=2, tp=2)
    assert groups(shape, "tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups(shape, "dp_shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups(shape, "pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups(StepShape(dp_shard=2, cp=2, tp=2), "dp_shard", "cp") == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_groups_are_those_of_a_device_mesh():
    torch = pytest.importorskip("torch")
    shape = StepShape(pp=2, dp_replicate=2, dp_shard=3, cp=1, tp=2)
    mesh = torch.arange(shape.world_size).reshape(2, 2, 3, 1, 2)
    for place, axis in enumerate(("pp", "dp_replicate", "dp_shard", "cp", "tp")):
        rows = mesh.movedim(place, -1).reshape(-1, mesh.shape[place]).tolist()
        assert sorted(groups(shape, axis)) == sorted(tuple(row) for row in rows)


def test_each_part_is_counted_as_often_as_a_step_makes_it():
    counted = {part.part: (part.op, part.bytes, part.times) for part in parts(SHAPE)}
    assert counted == {
        "fsdp_gather": ("all_gather", 200_000, 6),
        "fsdp_scatter": ("reduce_scatter", 200_000, 3),
        "tp_reduce": ("all_reduce", 40_000, 24),
    }
    assert parts(StepShape(fsdp_layer_bytes=100, tp_activation_bytes=100, pp_activation_bytes=100)) == (), "of one rank"


@each_row("word", ["tp=0", "layers=2", "pp=-1", "dp_shard"])
def test_an_impossible_layout_is_refused_by_name(word):
    with pytest.raises(SpecError, match=f"'{word}' is not allowed"):
        parse_degrees(f"cp=2,{word}")


@pytest.mark.usefixtures("forked_ranks")
def test_four_ranks_measure_a_step_in_its_groups(tmp_path):
    found = measured(tmp_path, cases=parts(SHAPE), min_iterations=6, max_iterations=6, ranks_per_host=4)
    assert found.complete, found.problems
    assert found.measurements == ()
    assert [(part.name, part.times, part.group_ranks) for part in found.step.parts] == [
        ("fsdp_gather", 6, 2),
        ("fsdp_scatter", 3, 2),
        ("tp_reduce", 24, 2),
    ]
    assert all(part.verified and len(part.iteration_seconds) >= 6 for part in found.step.parts)
    assert found.step.median_seconds == pytest.approx(sum(part.median_seconds for part in found.step.parts))


@pytest.mark.usefixtures("forked_ranks")
def test_a_lying_rank_spoils_the_step_and_is_named(tmp_path):
    cases = parts(StepShape(dp_shard=3, fsdp_layer_bytes=30_000))
    found = measured(tmp_path, cases=cases, ranks_per_host=3, environment={"TOPOFLIGHT_FAULT": "rank=2:lie"})
    assert not found.complete
    assert found.step, found.problems
    assert not any(part.verified for part in found.step.parts)
    assert all("rank 2 on" in problem for problem in found.problems)


@pytest.mark.usefixtures("forked_ranks")
def test_a_step_of_thousands_of_calls_fits_a_short_budget(tmp_path):
    """One call is timed, so many times as the step makes it; what does not fit leaves the step unknown."""
    shape = StepShape(dp_shard=2, layers=20_000, fsdp_layer_bytes=200_000)
    found = measured(tmp_path, cases=(*parts(shape), Case(op="all_gather", bytes=4096)), budget_seconds=5)
    assert found.complete, found.problems
    assert [m.bytes for m in found.measurements] == [4096]
    assert all(part.median_seconds > 0.5 for part in found.step.parts)  # 40,000 calls take longer than the budget
    cut = measured(tmp_path, cases=parts(shape), budget_seconds=1e-6)
    assert cut.step is None and not cut.complete
