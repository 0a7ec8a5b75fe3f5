"""Every layout that the planner would recommend to this job is one that the job accepts, and one that is tested."""

import random
import re
from dataclasses import replace
from itertools import product

import pytest
from rigs.recorded import H100, snapshot
from rigs.tables import each_row, rows_of
from test_finetune_equivalence import LAYOUTS, cases_of

from contracts.layout import TRAINED, Layout
from hardware.gpus import find_gpu
from hardware.machines import catalogue
from planner.forecast import machines
from planner.forecast.compute import Job, cpu_rates
from planner.forecast.links import make_links
from planner.forecast.memory import memory_parts
from planner.forecast.models import KNOWN, model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan
from planner.search import list_broken, search
from planner.stacks import TOPOFLIGHT
from planner.stacks.limits import list_limits
from topology.build import build
from topology.graph import ClusterTopology

pytestmark = pytest.mark.long  # the job imports torch

rows = rows_of(__file__)
NVIDIA = [row.name for row in catalogue() if (gpu := find_gpu(row.gpu)) and gpu.maker == "NVIDIA"]
MACHINES = [("p5.48xlarge", 1), ("p5.48xlarge", 2), ("p5.48xlarge", 4), ("2xa40-roce", 2), ("4xl40s", 1)]
MODELS = {
    **{name: model_named(name) for name in ("Llama-3.1-8B", "Llama-3.1-70B", "tiny-llama")},
    "Mistral with a window": replace(model_named("Mistral-7B"), sliding_window=4096),
}
JOBS = [(method, packing) for method in ("lora", "qlora", "full") for packing in (False, True)]


def questions(count):
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


def test_whatever_is_recommended_for_the_job_it_accepts():
    """A model that it does not train has no layout; every family ranked for one that it trains, it would run."""
    ranked = 0
    for name, machine, nodes, train in questions(300):
        model, asked = model_named(name), (name, machine, nodes, train)
        found = search(plan(machines.cluster(machine, nodes), (), model, train)).best
        if model.family not in TRAINED:
            assert not found, asked
        for candidate in found:
            assert list_limits(TOPOFLIGHT, model, train, candidate.layout) == [], (asked, candidate.layout)
            ranked += 1
    assert ranked > 300


def combinations(layout, method, packing):
    """The family, whatever its degrees, with the schedule and method, and with each single option."""
    replicas = "HSDP" if layout.dp_replicate > 1 else "FSDP"
    family = re.sub(r"(?<=[CTP]P)\d+", "", layout.family).replace("ZeRO-2", replicas)
    keeps = layout.dp_shard > 1 and not (layout.reshard_after_forward and layout.sharding == "zero3")
    yield family, method, layout.schedule if layout.pp > 1 else ""
    for name in ("checkpointing", "offload", "sequence_parallel", "fused_cross_entropy"):
        yield family, name, getattr(layout, name)
    yield family, "no reshard", keeps
    yield family, "packing", packing
    yield family, "accumulating", layout.gradient_accumulation > 1


def test_recommended_combinations_are_accepted_and_among_those_compared_with_one_process():
    """Each family with each schedule, method and option that the search comes up with is in the equivalence lists."""
    compared = {
        one
        for tier, worlds in LAYOUTS.items()
        for world in worlds
        for case in cases_of(world, tier)
        if "precision" not in case["layout"]
        for one in combinations(Layout(world_size=world, **case["layout"]), case["method"], case["packing"])
    }
    wanted = set()
    for (machine, nodes), name, (method, packing) in product(MACHINES, MODELS, JOBS):
        train = TrainSpec(method=method, packing=packing, sequence_length=2048, global_batch=64, engine="topoflight")
        found = search(plan(machines.cluster(machine, nodes), (), MODELS[name], train))
        assert found.forecast_count
        for candidate in found.best:  # of each family, not only the winner
            wanted |= set(combinations(candidate.layout, method, packing))
    families = {family for family, *_ in wanted}
    assert len(families) > 10  # the search is as wide as it was
    assert families >= {"PP x TP x FSDP", "TP x DDP", "TP x HSDP", "PP x DDP"}
    assert wanted <= compared, sorted(map(str, wanted - compared))
    assert {family for family, *_ in compared} >= {"PP x HSDP", "TP x HSDP"}


@each_row("settings", rows("alike"))
def test_what_the_job_is_tested_with_breaks_no_rule(settings):
    """Combinations that the job's equivalence tests cover break no rule of the planner."""
    layout = Layout(**settings)
    asked = Job(
        model=MODELS["Llama-3.1-8B"], train=TrainSpec(), engine=TOPOFLIGHT, host_memory_bytes=2e12,
        rates=cpu_rates(8.0, None),
        links=make_links(ClusterTopology(nodes=(build(snapshot(H100)),)), ()),
    )  # fmt: skip
    assert not any(list_broken(asked, layout))


def test_zero2_of_fsdp_is_fsdp_that_keeps_its_weights_gathered():
    """The same job under two names is forecast the same."""
    model, train = MODELS["Llama-3.1-8B"], TrainSpec(method="full")
    zero2 = Layout(world_size=8, dp_shard=8, sharding="zero2")
    unresharded = Layout(world_size=8, dp_shard=8, reshard_after_forward=False)
    whole = memory_parts(model, train, unresharded, TOPOFLIGHT)
    assert memory_parts(model, train, zero2, TOPOFLIGHT) == whole
    resharded = Layout(world_size=8, dp_shard=8)
    assert memory_parts(model, train, resharded, TOPOFLIGHT).total < whole.total
