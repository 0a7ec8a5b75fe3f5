"""Every layout that the planner would recommend to this job is one that the job accepts, and one that is tested."""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
from rigs.tables import each_row
from test_finetune_equivalence import LAYOUTS, cases_of

from contracts.layout import Layout
from finetune.plan import refusals
from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan, search_planned

MACHINES = [("p5.48xlarge", 1), ("p5.48xlarge", 2), ("p5.48xlarge", 4), ("2xa40-roce", 2), ("4xl40s", 1)]
MODELS = {
    **{name: model_named(name) for name in ("Llama-3.1-8B", "Llama-3.1-70B", "tiny-llama")},
    "Mistral with a window": replace(model_named("Mistral-7B"), sliding_window=4096),
}
JOBS = [(method, packing) for method in ("lora", "qlora", "full") for packing in (False, True)]


@cache
def best(machine, nodes, name, method, packing):
    """The best of each family, not only the winner."""
    train = TrainSpec(method=method, packing=packing, sequence_length=2048, global_batch=64, engine="topoflight")
    found = search_planned(plan(machines.cluster(machine, nodes), (), MODELS[name], train))
    assert found.tried
    return [candidate.layout for candidate in found.best]


@pytest.mark.long
@each_row(("machine", "nodes"), MACHINES)
@each_row("name", MODELS)
@each_row(("method", "packing"), JOBS)
def test_recommended_layouts_are_accepted(machine, nodes, name, method, packing):
    """The job gives no reason against any of them."""
    model = MODELS[name]
    shape = SimpleNamespace(
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, num_hidden_layers=model.layers,
        intermediate_size=model.ffn, tie_word_embeddings=model.tied_embeddings, sliding_window=model.sliding_window,
        quantization_config={} if method == "qlora" else None, num_experts=model.experts,
    )  # fmt: skip
    for layout in best(machine, nodes, name, method, packing):
        assert refusals(layout, shape, lora=method != "full") == []


@each_row(
    ("shape", "says"),
    [
        ({"_attn_implementation": "eager"}, "attn_implementation='eager'"),
        ({"_attn_implementation": "by_document", "sliding_window": 4096}, None),
        ({"_attn_implementation": "flash_attention_2", "sliding_window": 4096}, None),
    ],
)
def test_sequence_parallelism_is_refused_where_a_mask_is_built(shape, says):
    """The reason names the setting; without sequence parallelism there is none."""
    given = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=4, intermediate_size=128, **shape
    )
    why = refusals(Layout(world_size=2, tp=2, sequence_parallel=True), given, lora=False)
    assert [says in one for one in why] == ([True] if says else []), why
    assert refusals(Layout(world_size=2, tp=2), given, lora=False) == []


def combinations(layout, method, packing):
    """The family, whatever its degrees, with the schedule and method, and with each single option."""
    replicas = "HSDP" if layout.dp_replicate > 1 else "FSDP"
    family = re.sub(r"(?<=[CTP]P)\d+", "", layout.family).replace("ZeRO-2", replicas)
    keeps = layout.dp_shard > 1 and not (layout.reshard_after_forward and layout.sharding == "zero3")
    yield family, method, layout.schedule if layout.pp > 1 else ""
    for name in ("checkpointing", "offload", "sequence_parallel", "fused_cross_entropy", "compile"):
        yield family, name, getattr(layout, name)
    yield family, "kept gathered", keeps
    yield family, "packing", packing
    yield family, "accumulating", layout.gradient_accumulation > 1


def test_recommended_combinations_are_among_those_compared_with_one_process():
    """Each family with each schedule, method and option that the search comes up with is in the equivalence lists."""
    compared = {
        one
        for tier, worlds in LAYOUTS.items()
        for world in worlds
        for case in cases_of(world, tier)
        if "precision" not in case["layout"]
        for one in combinations(Layout(world_size=world, **case["layout"]), case["method"], case["packing"])
    }
    wanted = {
        one
        for (machine, nodes), name, (method, packing) in product(MACHINES, MODELS, JOBS)
        for layout in best(machine, nodes, name, method, packing)
        for one in combinations(layout, method, packing)
    }
    assert len({family for family, *_ in wanted}) > 10  # the search is as wide as it was
    assert wanted <= compared, sorted(map(str, wanted - compared))
    assert {family for family, *_ in compared} >= {"PP x HSDP", "TP x HSDP"}
