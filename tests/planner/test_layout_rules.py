"""Hard rules: each forbids exactly what it names, and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rigs.tables import each_row

from contracts.layout import Layout, LayoutError
from planner.forecast import machines
from planner.forecast.engine import Question, uneven_stages
from planner.forecast.links import Links, Speed
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan, recommend, search_planned
from planner.rules import RULES, first_broken
from planner.stacks import ENGINES, engine_named

FAST = Speed(bytes_per_second=336e9, how="derived", link="NVLink")
EFA = Speed(bytes_per_second=50e9, how="derived", link="EFA")
LINKS = Links(ranks_per_node=8, nodes=4, island_size=8, island=FAST, node=FAST, network=EFA)


def question(engine: str = "megatron", model: str = "Llama-3.1-70B", *, has_gpu: bool = True, **train: Any) -> Question:
    """A question about four 8-GPU nodes."""
    return Question(
        model=model_named(model),
        train=TrainSpec(**{"method": "full", "sequence_length": 8192, "engine": engine, **train}),
        links=LINKS,
        engine=engine_named(engine),
        has_gpu=has_gpu,
        compute_capability=(9, 0),
    )


SEQUENCE_PARALLEL = Layout(world_size=8, tp=8, sequence_parallel=True)
SLIDING = replace(
    question("topoflight", "Mistral-7B"), model=replace(model_named("Mistral-7B"), sliding_window=4096)
)  # fmt: skip


@each_row(
    ("rule", "asked", "layout", "says"),
    [
        ("heads-divide", question(model="Qwen2.5-7B"), Layout(world_size=8, tp=8), "28 attention heads"),
        ("kv-heads-divide", question("torchtitan", "Qwen2.5-3B"), Layout(world_size=4, tp=4), "2 key/value heads"),
        ("tp-inside-island", question(), Layout(world_size=16, tp=16), "TP=16 crosses the 50 GB/s EFA"),
        ("enough-layers", question(model="GPT-2"), Layout(world_size=16, pp=16, gradient_accumulation=16), "12"),
        ("chunks-divide", question(), Layout(world_size=4, pp=4, schedule="interleaved", virtual_stages=3,
                                             gradient_accumulation=4), "80 layers do not divide into 4 x 3"),
        ("enough-micro-batches", question(), Layout(world_size=4, pp=4, gradient_accumulation=2), "2 micro-batches"),
        ("stages-sum", question(), Layout(world_size=2, pp=2, stage_layers=(40, 41), gradient_accumulation=2), "81"),
        ("sequence-divides", question(sequence_length=1000), Layout(world_size=16, cp=16), "1000"),
        ("experts-divide", question(), Layout(world_size=2, dp_replicate=2, sharding="ddp", ep=2), "no experts"),
        ("experts-divide", question(model="Qwen3-235B-A22B"),
         Layout(world_size=8, dp_replicate=8, sharding="ddp", ep=16), "the 8 ranks of a pipeline stage"),
        ("weights-can-train", replace(question(), model=replace(model_named("Llama-3.1-70B"), quantised="gptq")),
         Layout(world_size=1), "quantised (gptq)"),
        ("weights-can-train", replace(question("topoflight", method="lora"),
                                      model=replace(model_named("Llama-3.1-70B"), quantised="gptq")),
         Layout(world_size=1), "name the model that they were made from"),
        ("batch-divides", question(global_batch=12), Layout(world_size=8, dp_replicate=8, sharding="ddp"), "12"),
        ("positions-reach", question(model="GPT-2"), Layout(world_size=1), "1024 positions"),
        ("engine-runs", question("deepspeed"), Layout(world_size=2, tp=2), "deepspeed has no TP"),
        ("engine-runs", question("topoflight"), Layout(world_size=8, dp_shard=8, sharding="zero1"), "no zero1"),
        ("engine-runs", question("trl", method="lora"), Layout(world_size=2, pp=2, gradient_accumulation=2), "no PP"),
        ("engine-runs", question("topoflight", attention="eager"), SEQUENCE_PARALLEL, "eager attention"),
        ("engine-runs", question("topoflight", "GPT-2"), Layout(world_size=1), "not gpt2"),
        ("engine-runs", question("topoflight", "Mixtral-8x7B"), Layout(world_size=2, tp=2), "TP over experts"),
        ("engine-runs", question("topoflight", "Mixtral-8x7B"), Layout(world_size=2, dp_shard=2, ep=2), "no EP"),
        ("engine-runs", question("topoflight", "Mixtral-8x7B", method="qlora"), Layout(world_size=1), "4-bit"),
        ("method-runs", question("torchtitan", method="qlora"), Layout(world_size=1), "torchtitan has no qlora"),
        ("method-runs", question("topoflight", method="qlora", has_gpu=False), Layout(world_size=1), "for GPUs"),
        ("method-runs", question("topoflight", method="qlora"), Layout(world_size=2, tp=2), "split over TP"),
    ],
)  # fmt: skip
def test_each_rule_forbids_what_it_names(rule: str, asked: Question, layout: Layout, says: str) -> None:
    """The named rule is the one that answers, with the number in question."""
    reason = dict(RULES)[rule](asked, layout)
    assert reason is not None
    assert says in reason


def test_experts_are_spread_over_tensor_parallel_ranks_too() -> None:
    """EP=32 with TP=2, PP=8 on 256 GPUs is published for Qwen3-235B: 16 data-parallel ranks of two."""
    asked = question(model="Qwen3-235B-A22B")
    at = Layout(world_size=256, tp=2, pp=8, ep=32, dp_shard=16, sharding="zero1", gradient_accumulation=8)
    assert first_broken(asked, at) is None


@each_row(("experts", "ranks"), [(2, 8), (4, 8), (16, 16), (32, 32)])
def test_every_degree_that_divides_the_experts_is_tried(experts: int, ranks: int) -> None:
    """Inside the fast domain or not: what is named is found."""
    train = TrainSpec(method="full", sequence_length=4096, global_batch=64, engine="megatron")
    planned = plan(machines.cluster("p5.48xlarge", ranks // 8), (), model_named("gpt-oss-20b"), train)
    assert search_planned(planned, {"ep": experts}).best


def test_fp8_needs_the_gpu_for_it() -> None:
    """An A100 has no fp8, an H100 has."""
    layout = Layout(world_size=8, tp=8, precision="fp8", sequence_parallel=True)
    asked = question()
    assert first_broken(asked, layout) is None
    broken = first_broken(replace(asked, compute_capability=(8, 0)), layout)
    assert broken is not None
    assert broken[0] == "precision-exists"
    assert "8.0" in broken[1]


@each_row(
    ("capability", "engine", "says"),
    [((9, 0), "megatron", "10.0"), ((12, 0), "megatron", "data centre"), ((10, 0), "torchtitan", "no mxfp8")],
)
def test_mxfp8_needs_a_data_centres_blackwell_and_an_engine_that_has_it(
    capability: tuple[int, int], engine: str, says: str
) -> None:
    """Scales of 32 values are multiplied by B200's and B300's tensor cores; Megatron-LM names the recipe."""
    layout = Layout(world_size=8, dp_shard=8, sharding="zero1" if engine == "megatron" else "zero3", precision="mxfp8")
    broken = first_broken(replace(question(engine), compute_capability=capability), layout)
    assert broken is not None
    assert says in broken[1]
    if engine == "megatron":
        assert first_broken(replace(question(engine), compute_capability=(10, 3)), layout) is None


def test_every_engine_runs_something() -> None:
    """Plain data parallelism breaks no rule of any engine."""
    for engine in ENGINES.values():
        asked = question(engine.name, "Llama-3.1-8B")
        assert first_broken(asked, Layout(world_size=8, dp_replicate=8, sharding="ddp")) is None


@each_row(("layers", "pp"), [(126, 8), (126, 16), (62, 4), (30, 4), (7, 4), (80, 8)])
def test_uneven_stages_hold_every_layer_once(layers: int, pp: int) -> None:
    """No stage is empty, none is fuller than an even split needs, and all layers are there."""
    stages = uneven_stages(layers, pp)
    if layers % pp == 0:
        assert stages == ()
        return
    assert len(stages) == pp
    assert sum(stages) == layers
    assert min(stages) >= 1
    assert max(stages) == -(-layers // pp)


def test_a_layout_that_cannot_exist_is_never_built() -> None:
    """Degrees that do not multiply to the world size are an error that names them."""
    with pytest.raises(LayoutError, match="world_size is 8"):
        Layout(world_size=8, tp=3)


def test_offloading_needs_host_memory_that_is_known_and_enough() -> None:
    """A 70B full fine-tune on 8 GPUs goes to the host of a p5, and nowhere where the host is unknown or too small."""
    train = TrainSpec(method="full", sequence_length=2048, global_batch=8, engine="deepspeed")
    model = model_named("Llama-3.1-70B")
    large = recommend(machines.cluster("p5.48xlarge"), (), model, train)
    assert large.chosen is not None
    assert large.chosen.layout.offload != "none"
    assert any("OMP_NUM_THREADS" in text for text in large.helps_most)
    assert recommend(machines.cluster("p4d.24xlarge"), (), model, train).chosen is None
    layout = Layout(world_size=8, dp_shard=8, checkpointing="full", offload="all")
    broken = first_broken(question("deepspeed"), layout)
    assert broken == ("host-memory-holds", "offloading needs host memory, and how much the nodes have is unknown")


def test_a_window_needs_no_mask_under_sequence_parallelism() -> None:
    """Windows are attended to without a mask of the whole sequence; eager attention builds one."""
    assert first_broken(SLIDING, SEQUENCE_PARALLEL) is None
    eager = replace(SLIDING, train=replace(SLIDING.train, attention="eager"))
    assert first_broken(eager, SEQUENCE_PARALLEL) is not None
