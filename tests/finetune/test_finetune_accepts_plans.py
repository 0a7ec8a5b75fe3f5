"""Every layout that the planner would recommend to this job is one that the job accepts."""

from types import SimpleNamespace

import pytest

from finetune.plan import refusals
from planner import machines
from planner.models import model_named
from planner.recommend import plan, search_planned
from planner.specs import TrainSpec

MACHINES = [("p5.48xlarge", 1), ("p5.48xlarge", 4), ("2xa40-roce", 2), ("4xl40s", 1)]


@pytest.mark.parametrize(("machine", "nodes"), MACHINES)
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-3.1-70B", "tiny-llama"])
@pytest.mark.parametrize(("method", "packing"), [("lora", False), ("lora", True), ("full", False), ("full", True)])
def test_recommended_layouts_are_accepted(machine, nodes, name, method, packing):
    """The best of each family, not only the winner."""
    model = model_named(name)
    shape = SimpleNamespace(
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, num_hidden_layers=model.layers,
        intermediate_size=model.ffn, tie_word_embeddings=model.tied_embeddings,
    )  # fmt: skip
    train = TrainSpec(method=method, packing=packing, sequence_length=2048, global_batch=64, engine="topoflight")
    found = search_planned(plan(machines.cluster(machine, nodes), (), model, train))
    assert found.tried
    for candidate in found.best:
        assert refusals(candidate.layout, shape, lora=method == "lora", packing=packing) == []
