"""Hard rules: each forbids exactly what it names, and says why."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from rigs.tables import each_row, rows_of

from contracts.layout import Layout, LayoutError
from planner.forecast import machines
from planner.forecast.compute import Job, cpu_rates
from planner.forecast.engine import uneven_stages
from planner.forecast.links import Links, Speed
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan, recommend
from planner.search import first_broken, list_broken, search
from planner.stacks import ENGINES, engine_named

rows = rows_of(__file__)

FAST = Speed(bytes_per_second=336e9, how="derived", link="NVLink")
EFA = Speed(bytes_per_second=50e9, how="derived", link="EFA")
LINKS = Links(ranks_per_node=8, nodes=4, island_size=8, island=FAST, node=FAST, network=EFA)


def job(
    engine: str = "megatron", model: str = "Llama-3.1-70B", *, has_gpu: bool = True, quantised: str = "",
    window: int | None = None, capability: Sequence[int] = (9, 0), **train,
) -> Job:  # fmt: skip
    """A job on four 8-GPU nodes."""
    named = model_named(model)
    return Job(
        model=replace(named, quantised=quantised or named.quantised, sliding_window=window or named.sliding_window),
        train=TrainSpec(**{"method": "full", "sequence_length": 8192, "engine": engine, **train}),
        links=LINKS, engine=engine_named(engine), rates=cpu_rates(8.0, None), has_gpu=has_gpu,
        compute_capability=tuple(capability),
    )  # fmt: skip


@each_row(("rule", "engine", "settings", "layout", "says"), rows("forbids"))
def test_each_rule_forbids_what_it_names(rule, engine, settings, layout, says):
    """The named rule is the one that answers, with the number in question."""
    reason = dict(list_broken(job(engine, **settings), Layout(**layout))).get(rule)
    assert says in reason


@each_row(("experts", "ranks"), [(2, 8), (4, 8), (16, 16), (32, 32)])
def test_every_degree_that_divides_the_experts_is_tried(experts: int, ranks: int) -> None:
    """Inside the fast domain or not: what is named is found."""
    train = TrainSpec(method="full", sequence_length=4096, global_batch=64, engine="megatron")
    planned = plan(machines.cluster("p5.48xlarge", ranks // 8), (), model_named("gpt-oss-20b"), train)
    assert search(planned, {"ep": experts}).best


@each_row(("model", "settings", "says"), rows("said_of_all"))
def test_what_no_degree_changes_is_said_of_every_layout(model: str, settings: dict, says: str) -> None:
    """One reason, and not the same one for each degree."""
    train = TrainSpec(**{"method": "full", **settings})
    found = search(plan(machines.cluster("p5.48xlarge", 2), (), model_named(model), train))
    assert ([row.what for row in found.rejected], found.best) == (["every layout"], [])
    assert says in found.rejected[0].reason


def test_no_reason_is_about_a_layout_that_the_settings_exclude() -> None:
    """Under DDP each rank would load 405B; with `sharding=zero3` that is no answer."""
    train = TrainSpec(method="lora", sequence_length=4096, engine="deepspeed", global_batch=64)
    planned = plan(machines.cluster("a2-highgpu-8g", 2), (), model_named("Llama-3.1-405B"), train)
    reasons = [{row.what for row in search(planned, named).rejected} for named in ({}, {"sharding": "zero3"})]
    assert ["DDP" in each for each in reasons] == [True, False]


DDP = {"world_size": 8, "dp_replicate": 8, "sharding": "ddp"}


@each_row(
    ("engine", "settings", "layout", "says"),
    lambda: [*rows("first")(), *((engine, {"model": "Llama-3.1-8B"}, DDP, ()) for engine in ENGINES)],
)
def test_the_first_rule_that_a_layout_breaks(engine, settings, layout, says):
    """Its name and reason; none where the layout is allowed."""
    broken = first_broken(job(engine, **settings), Layout(**layout))
    assert bool(broken) == bool(says), broken
    assert [words for words in says if words not in ": ".join(broken or ())] == [], broken


@each_row(("layers", "pp"), [(126, 8), (126, 16), (62, 4), (30, 4), (7, 4), (80, 8)])
def test_uneven_stages_hold_every_layer_once(layers: int, pp: int) -> None:
    """No stage is empty, none is fuller than an even split needs, and all layers are there."""
    stages = uneven_stages(layers, pp)
    if layers % pp == 0:
        assert stages == ()
        return
    assert (len(stages), sum(stages), max(stages)) == (pp, layers, -(-layers // pp))
    assert min(stages) >= 1


def test_megatron_may_leave_the_first_and_the_last_chunk_without_layers() -> None:
    """Llama 3 405B (arXiv 2407.21783, 3.3.2): 126 layers in 16 x 8 chunks, one of them the embedding, one the head."""
    stages = uneven_stages(126, 128)
    assert stages == (0, *(1,) * 126, 0)
    given = job("megatron", "Llama-3.1-405B")
    layout = Layout(world_size=16, pp=16, virtual_stages=8, schedule="interleaved", stage_layers=stages,
                    gradient_accumulation=16)  # fmt: skip
    assert first_broken(given, layout) is None
    assert first_broken(replace(given, engine=ENGINES["torchtitan"]), layout) == (
        "enough-layers", "PP=16 x 8 chunks need more layers than the model's 126"
    )  # fmt: skip


def test_a_layout_that_cannot_exist_is_never_built() -> None:
    """Degrees that do not multiply to the world size are an error that names them."""
    with pytest.raises(LayoutError, match=r"world_size is 8$"):
        Layout(world_size=8, tp=3)
    with pytest.raises(LayoutError, match="ep is no factor, its groups lie inside dp_shard x cp x tp: name dp_shard=4"):
        Layout(world_size=8, tp=2, ep=8)


def test_offloading_needs_host_memory_that_is_known_and_enough() -> None:
    """A 70B full fine-tune on 8 GPUs goes to the host of a p5, and nowhere where the host is too small."""
    train = TrainSpec(method="full", sequence_length=2048, global_batch=8, engine="deepspeed")
    model = model_named("Llama-3.1-70B")
    large = recommend(machines.cluster("p5.48xlarge"), (), model, train)
    assert large.chosen.layout.offload != "none"
    assert any("OMP_NUM_THREADS" in text for text in large.helps_most)
    assert not any("recomputation" in text for text in large.helps_most), "no GPU has that much memory"
    assert recommend(machines.cluster("p4d.24xlarge"), (), model, train).chosen is None
