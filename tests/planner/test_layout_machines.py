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


def test_what_a_machine_cannot_is_refused_or_said() -> None:
    """Four L40S on PCIe: TP is refused by name and link. Turing has no bf16 tensor cores. A lost GPU is left out."""
    said = answer("l40s-4x-pcie")
    assert said.chosen.layout.tp == 1
    assert any(row.rule == "tp-inside-island" and "PCIe" in row.reason for row in said.rejected)
    assert any("no bf16 tensor cores" in text for text in answer("titan-rtx-2x-nv2").unknowns)
    lost = answer("sick-h100-gpu-lost", train=TrainSpec(method="lora", sequence_length=2048))
    assert any("repair it first" in text for text in lost.unknowns)
    assert lost.chosen is None or lost.chosen.layout.world_size < 8


def test_the_cpu_machine_replicates_the_small_model() -> None:
    """No GPU: gloo, fp32, two ranks; gathers, which nothing hides there, only pay where memory asks for them."""
    said = answer("cpu-only-vm", "tiny-llama", TrainSpec(global_batch=16, sequence_length=128))
    assert (said.backend, said.chosen.layout.family, said.chosen.layout.precision) == ("gloo", "DDP", "fp32")
    sharded = next(r for r in said.runners_up if r.layout.family == "FSDP")
    assert sharded.forecast.step_seconds.mid > said.chosen.forecast.step_seconds.mid
