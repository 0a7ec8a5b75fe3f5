"""A job's own shape: the groups and parts of one training step, measured by real ranks."""

import pytest
from rigs.benchmarks import measured
from rigs.tables import each_row

from agent.jobs.benchmark import parse_degrees
from collectives.bench.plan import Case, SpecError, StepShape, groups, parts

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


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(600)
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


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(600)
def test_a_lying_rank_spoils_the_step_and_is_named(tmp_path):
    cases = parts(StepShape(dp_shard=3, fsdp_layer_bytes=30_000))
    found = measured(tmp_path, cases=cases, ranks_per_host=3, environment={"TOPOFLIGHT_FAULT": "rank=2:lie"})
    assert not found.complete
    assert found.step, found.problems
    assert not any(part.verified for part in found.step.parts)
    assert all("rank 2 on" in problem for problem in found.problems)


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(600)
def test_a_step_of_thousands_of_calls_fits_a_short_budget(tmp_path):
    """One call is timed, so many times as the step makes it; what does not fit leaves the step unknown."""
    shape = StepShape(dp_shard=2, layers=20_000, fsdp_layer_bytes=200_000)
    found = measured(tmp_path, cases=(*parts(shape), Case(op="all_gather", bytes=4096)), budget_seconds=5)
    assert found.complete, found.problems
    assert [m.bytes for m in found.measurements] == [4096]
    assert all(part.median_seconds > 0.5 for part in found.step.parts)  # 40,000 calls take longer than the budget
    cut = measured(tmp_path, cases=parts(shape), budget_seconds=1e-6)
    assert cut.step is None and not cut.complete
