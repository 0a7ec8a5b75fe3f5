"""Hard rules: each forbids exactly what it names, and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rigs.tables import each_row, rows_of

from contracts.layout import Layout, LayoutError
from planner.forecast import machines
from planner.forecast.compute import cpu_rates
from planner.forecast.engine import uneven_stages
from planner.forecast.links import Links, Speed
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.forecast.step_time import Job
from planner.recommend import plan, recommend
from planner.rules import RULES, first_broken
from planner.search import search
from planner.stacks import ENGINES, engine_named

rows = rows_of(__file__)

FAST = Speed(bytes_per_second=336e9, how="derived", link="NVLink")
EFA = Speed(bytes_per_second=50e9, how="derived", link="EFA")
LINKS = Links(ranks_per_node=8, nodes=4, island_size=8, island=FAST, node=FAST, network=EFA)


def job(
    engine: str = "megatron", model: str = "Llama-3.1-70B", *, has_gpu: bool = True, quantised: str = "",
    **train: Any,
) -> Job:  # fmt: skip
    """A job on four 8-GPU nodes."""
    named = model_named(model)
    return Job(
        model=replace(named, quantised=quantised or named.quantised),
        train=TrainSpec(**{"method": "full", "sequence_length": 8192, "engine": engine, **train}),
        links=LINKS,
        engine=engine_named(engine),
        rates=cpu_rates(8.0, None),
        has_gpu=has_gpu,
        compute_capability=(9, 0),
    )


SEQUENCE_PARALLEL = Layout(world_size=8, tp=8, sequence_parallel=True)
SLIDING = replace(
    job("topoflight", "Mistral-7B"), model=replace(model_named("Mistral-7B"), sliding_window=4096)
)  # fmt: skip


@each_row(("rule", "engine", "settings", "layout", "says"), rows("forbids"))
def test_each_rule_forbids_what_it_names(
    rule: str, engine: str, settings: dict[str, Any], layout: dict[str, Any], says: str
) -> None:
    """The named rule is the one that answers, with the number in question."""
    reason = dict(RULES)[rule](job(engine, **settings), Layout(**layout))
    assert reason is not None
    assert says in reason


@each_row(("experts", "ranks"), [(2, 8), (4, 8), (16, 16), (32, 32)])
def test_every_degree_that_divides_the_experts_is_tried(experts: int, ranks: int) -> None:
    """Inside the fast domain or not: what is named is found."""
    train = TrainSpec(method="full", sequence_length=4096, global_batch=64, engine="megatron")
    planned = plan(machines.cluster("p5.48xlarge", ranks // 8), (), model_named("gpt-oss-20b"), train)
    assert search(planned, {"ep": experts}).best


@each_row(
    ("model", "settings", "says"),
    [
        ("gpt-oss-20b", {"engine": "topoflight"}, "trains llama, mistral"),
        ("Llama-3.1-8B", {"engine": "topoflight", "precision": "fp8"}, "does not support fp8"),
        ("Llama-3.1-8B", {"engine": "megatron", "method": "qlora"}, "does not support qlora"),
    ],
)
def test_what_no_degree_changes_is_said_of_every_layout(model: str, settings: dict[str, Any], says: str) -> None:
    """One reason, and not the same one for each degree."""
    train = TrainSpec(**{"method": "full", **settings})
    found = search(plan(machines.cluster("p5.48xlarge", 2), (), model_named(model), train))
    assert ([row.what for row in found.rejected], found.best) == (["every layout"], [])
    assert says in found.rejected[0].reason


FP8 = Layout(world_size=8, tp=8, precision="fp8", sequence_parallel=True)
MXFP8 = Layout(world_size=8, dp_shard=8, sharding="zero1", precision="mxfp8")
DDP = Layout(world_size=8, dp_replicate=8, sharding="ddp")


def on(capability: tuple[int, int], engine: str = "megatron") -> Job:
    """The job on GPUs of this compute capability."""
    return replace(job(engine), compute_capability=capability)


@each_row(
    ("given", "layout", "says"),
    [
        # EP=32 with TP=2, PP=8 on 256 GPUs is published for Qwen3-235B: 16 data-parallel ranks of two
        (job(model="Qwen3-235B-A22B"), Layout(world_size=256, tp=2, pp=8, ep=32, dp_shard=16, sharding="zero1",
                                                   gradient_accumulation=8), ()),
        # an A100 has no fp8, an H100 has
        (job(), FP8, ()),
        (on((8, 0)), FP8, ("precision-exists", "8.0")),
        # scales of 32 values are multiplied by B200's and B300's tensor cores; Megatron-LM names the recipe
        (on((10, 3)), MXFP8, ()),
        (on((9, 0)), MXFP8, ("10.0",)),
        (on((12, 0)), MXFP8, ("10.0 or 10.3",)),
        (on((10, 0), "torchtitan"), replace(MXFP8, sharding="zero3"), ("support mxfp8",)),
        (SLIDING, DDP, ("engine-runs", "sliding window")),
        (replace(SLIDING, train=replace(SLIDING.train, sequence_length=4096)), SEQUENCE_PARALLEL, ()),
        (replace(SLIDING, train=replace(SLIDING.train, attention="eager")), SEQUENCE_PARALLEL, ("engine-runs",)),
        (job("deepspeed"), Layout(world_size=8, dp_shard=8, checkpointing="full", offload="all"),
         ("host-memory-holds", "the memory of the nodes is unknown")),
        *((job(engine.name, "Llama-3.1-8B"), DDP, ()) for engine in ENGINES.values()),
    ],
)  # fmt: skip
def test_the_first_rule_that_a_layout_breaks(given: Job, layout: Layout, says: tuple[str, ...]) -> None:
    """Its name and reason; none where the layout is allowed."""
    broken = first_broken(given, layout)
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
