"""The layout on recorded machines: what an expert would say about it, and that it says so for a reason."""

from __future__ import annotations

from rigs.recorded import snapshot

from planner.advice import Recommendation
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import recommend
from topology.build import build
from topology.graph import ClusterTopology

TRAIN = TrainSpec(method="lora", sequence_length=2048, global_batch=32)


def answer(name: str, model: str = "Llama-3.1-8B", train: TrainSpec = TRAIN) -> Recommendation:
    """What is recommended on one recording."""
    found = snapshot(name)
    node = build(found)
    ranks = None if node.gpus else 2
    return recommend(ClusterTopology(nodes=(node,)), (found,), model_named(model), train, ranks_per_node=ranks)


def test_no_tensor_parallelism_without_nvlink() -> None:
    """Four L40S on PCIe: TP is refused by name and link."""
    said = answer("l40s-4x-pcie")
    assert said.chosen is not None
    assert said.chosen.layout.tp == 1
    assert any(row.rule == "tp-inside-island" and "PCIe" in row.reason for row in said.rejected)


def test_two_titans_hear_that_they_have_no_bf16() -> None:
    """Turing has no bf16 tensor cores; the advice says so before a day is lost."""
    assert any("no bf16 tensor cores" in text for text in answer("titan-rtx-2x-nv2").unknowns)


def test_a_lost_gpu_is_left_out_and_named() -> None:
    """The layout is for the GPUs that are left."""
    said = answer("sick-h100-gpu-lost", train=TrainSpec(method="lora", sequence_length=2048))
    assert any("repair it first" in text for text in said.unknowns)
    assert said.chosen is None or said.chosen.layout.world_size < 8


def test_the_cpu_machine_replicates_the_small_model() -> None:
    """No GPU: gloo, fp32, two ranks; gathers, which nothing hides there, only pay where memory asks for them."""
    said = answer("cpu-only-vm", "tiny-llama", TrainSpec(global_batch=16, sequence_length=128))
    assert said.backend == "gloo"
    assert said.chosen is not None
    assert said.chosen.layout.family == "DDP"
    assert said.chosen.layout.precision == "fp32"
    sharded = next(r for r in said.runners_up if r.layout.family == "FSDP")
    assert sharded.forecast.step_seconds.mid > said.chosen.forecast.step_seconds.mid
