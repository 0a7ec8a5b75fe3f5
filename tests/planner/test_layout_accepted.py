"""What the search recommends to the fine-tune job on the recorded machines, the job itself accepts."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace

import pytest
from rigs.recorded import H100, snapshot
from rigs.tables import each_row

from contracts.layout import TRAINED, Layout
from hardware.gpus import gpu_named
from hardware.machines import catalogue
from planner.forecast import machines
from planner.forecast.engine import Question
from planner.forecast.links import links_of
from planner.forecast.memory import memory_parts
from planner.forecast.models import KNOWN, model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan, search_planned
from planner.rules import first_broken
from planner.stacks.topoflight import ENGINE as TOPOFLIGHT
from probes.api import Snapshot
from topology.build import build
from topology.graph import ClusterTopology, NodeTopology

NVIDIA = [row.name for row in catalogue() if (gpu := gpu_named(row.gpu)) and gpu.maker == "NVIDIA"]
TRAINS = (
    TrainSpec(method="lora", sequence_length=2048, global_batch=64),
    TrainSpec(method="full", sequence_length=2048, global_batch=64),
    TrainSpec(method="full", sequence_length=2048, global_batch=64, packing=True),
    TrainSpec(method="qlora", sequence_length=2048, global_batch=64),
)


@cache
def machine(name: str) -> tuple[Snapshot, NodeTopology]:
    """One recording, and its topology."""
    return snapshot(name), build(snapshot(name))


def shape(name: str, method: str = "lora") -> SimpleNamespace:
    """The fields of a transformers config that the job asks for."""
    model = model_named(name)
    return SimpleNamespace(
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, num_hidden_layers=model.layers,
        intermediate_size=model.ffn, tie_word_embeddings=model.tied_embeddings,
        quantization_config={} if method == "qlora" else None, sliding_window=model.sliding_window,
        num_experts=model.experts,
    )  # fmt: skip


@pytest.mark.long
@each_row("nodes", [1, 2])
@each_row("name", ["cpu-only-vm", "titan-rtx-2x-nv2", "sick-h100-gpu-lost", "r760xa-2xA40-bf3"])
def test_every_recommended_layout_is_accepted(name: str, nodes: int) -> None:
    """The best of every family, on one machine and on two like it; those of the catalogue are drawn below."""
    pytest.importorskip("torch", reason="the fine-tune extra is not installed")
    from finetune.plan import refusals

    found, node = machine(name)
    for model in ("Llama-3.1-8B", "tiny-llama"):
        for train in TRAINS:
            planned = plan(ClusterTopology(nodes=(node,) * nodes), (found,) * nodes, model_named(model), train)
            for candidate in search_planned(planned).best:
                lora = train.method != "full"
                why = refusals(candidate.layout, shape(model, train.method), lora=lora)
                assert why == [], candidate.layout


def questions(count: int) -> list[tuple[str, str, int, TrainSpec]]:
    """Model, machine, nodes and run, drawn the same each time from all that the tables have."""
    draw = random.Random("models x machines x methods")
    return [
        (draw.choice(KNOWN).name, draw.choice(NVIDIA), draw.choice((1, 1, 2, 3, 4, 16, 64)), TrainSpec(
            method=draw.choice(("full", "lora", "qlora")), sequence_length=draw.choice((512, 2048, 8192, 32768)),
            packing=draw.choice((True, False)), attention=draw.choice(("sdpa", "flash", "eager")),
            global_batch=draw.choice((None, None, 48, 256)), precision=draw.choice(("bf16", "bf16", "fp32", "fp8")),
        ))
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.long
def test_whatever_is_recommended_for_the_job_it_accepts() -> None:
    """A model that it does not train has no layout; every family ranked for one that it trains, it would run."""
    pytest.importorskip("torch", reason="the fine-tune extra is not installed")
    from finetune.plan import refusals

    ranked = 0
    for model, name, nodes, train in questions(300):
        asked = model, name, nodes, train
        best = search_planned(plan(machines.cluster(name, nodes), (), model_named(model), train)).best
        if model_named(model).family not in TRAINED:
            assert not best, asked
        for candidate in best:
            lora = train.method != "full"
            config = shape(model, train.method)
            config._attn_implementation = {"flash": "flash_attention_2"}.get(train.attention, train.attention)
            assert refusals(candidate.layout, config, lora=lora) == [], (asked, candidate.layout)
            ranked += 1
    assert ranked > 300


COMBINED = [
    Layout(world_size=4, pp=2, tp=2, gradient_accumulation=2),
    Layout(world_size=8, pp=2, tp=2, dp_shard=2, gradient_accumulation=2),
    Layout(world_size=4, tp=2, dp_replicate=2, sharding="ddp"),
    Layout(world_size=8, tp=2, dp_replicate=2, dp_shard=2),
    Layout(world_size=4, pp=2, dp_replicate=2, sharding="ddp", gradient_accumulation=2),
    Layout(world_size=8, pp=2, dp_replicate=2, dp_shard=2, gradient_accumulation=2),
    Layout(world_size=2, dp_shard=2, sharding="zero2"),
    Layout(world_size=2, dp_shard=2, offload="all"),
]


@pytest.mark.long
@each_row("layout", COMBINED, ids=lambda at: f"{at.family} {at.offload}")
def test_planner_and_job_allow_the_same_combinations(layout: Layout) -> None:
    """Combinations that the job's equivalence tests cover break no rule of the planner."""
    pytest.importorskip("torch", reason="the fine-tune extra is not installed")
    from finetune.plan import refusals

    _, node = machine(H100)
    asked = Question(
        model=model_named("Llama-3.1-8B"), train=TrainSpec(), engine=TOPOFLIGHT, host_memory_bytes=2e12,
        links=links_of(ClusterTopology(nodes=(node,)), ()),
    )  # fmt: skip
    assert refusals(layout, shape("Llama-3.1-8B"), lora=True) == []
    assert first_broken(asked, layout) is None


def test_the_search_reaches_the_combinations() -> None:
    """On two 8-GPU machines the families with TP and PP over replicas are among those ranked."""
    found, node = machine(H100)
    train = TrainSpec(method="lora", sequence_length=2048, global_batch=64)
    planned = plan(ClusterTopology(nodes=(node,) * 2), (found,) * 2, model_named("Llama-3.1-8B"), train)
    layouts = [candidate.layout for candidate in search_planned(planned).best]
    assert any(at.pp > 1 and at.tp > 1 and at.dp_shard > 1 for at in layouts)
    assert any(at.tp > 1 and at.dp_replicate > 1 and at.dp_shard == 1 for at in layouts)
    assert any(at.tp > 1 and at.dp_replicate > 1 and at.dp_shard > 1 for at in layouts)
    assert any(at.pp > 1 and at.dp_replicate > 1 and at.dp_shard == 1 for at in layouts)


def test_zero2_of_fsdp_is_fsdp_that_keeps_its_weights_gathered() -> None:
    """The same job under two names is forecast the same."""
    model, train = model_named("Llama-3.1-8B"), TrainSpec(method="full")
    zero2 = Layout(world_size=8, dp_shard=8, sharding="zero2")
    kept = Layout(world_size=8, dp_shard=8, reshard_after_forward=False)
    assert memory_parts(model, train, zero2, TOPOFLIGHT) == memory_parts(model, train, kept, TOPOFLIGHT)
    resharded = Layout(world_size=8, dp_shard=8)
    assert memory_parts(model, train, resharded, TOPOFLIGHT).total < memory_parts(model, train, kept, TOPOFLIGHT).total
