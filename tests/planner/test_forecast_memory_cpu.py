"""Memory on a CPU: what a layer keeps as torch counts it, and real runs inside their forecast."""

import dataclasses
import json
import os

import pytest
from rigs.command import TORCHRUN, interpreter
from rigs.tables import each_row

from contracts.layout import Layout
from planner.forecast.engine import share_of
from planner.forecast.models import model_from_config, model_named
from planner.forecast.specs import Method, TrainSpec, weights
from planner.recommend import forecast_layout, plan
from planner.stacks import TOPOFLIGHT, engine_named
from topology.graph import ClusterTopology, NodeTopology

# Five times the embedded model.
SHAPE = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
ROW_TOKENS = 52  # the longest row of the embedded data set
MICRO_BATCH = 16


def saved_bytes(layers: int, method: Method, targets: tuple[str, ...] = TrainSpec().lora_targets, *, half: bool) -> int:
    """Count the bytes that autograd saves in a forward pass, without the weights; `half`: under autocast in bf16."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    given = {name: value for name, value in SHAPE.items() if name != "model_type"}
    config = transformers.LlamaConfig(**{**given, "num_hidden_layers": layers, "use_cache": False})
    net = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if half else torch.float32)
    if method == "lora":
        peft = pytest.importorskip("peft", reason="peft is not installed")
        net = peft.get_peft_model(net, peft.LoraConfig(r=8, target_modules=list(targets)))
    held = {p.untyped_storage().data_ptr() for p in net.parameters()}
    sizes: dict[int, int] = {}

    def see(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros((MICRO_BATCH, ROW_TOKENS), dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
        graph = net(input_ids=tokens).logits.sum()
    assert graph.requires_grad
    return sum(sizes.values())


@pytest.mark.long
@each_row("method", ["full", "lora"])
def test_a_layer_keeps_in_fp32_what_autograd_keeps(method: Method) -> None:
    """Two more layers of transformers' Llama keep twice what is forecast for one."""
    counted = (saved_bytes(3, method, half=False) - saved_bytes(1, method, half=False)) / 2
    train = TrainSpec(method=method, sequence_length=ROW_TOKENS, lora_rank=8, precision="fp32")
    shape = model_from_config({**SHAPE})
    layout = Layout(world_size=1, micro_batch=MICRO_BATCH, precision="fp32")
    said = TOPOFLIGHT.layer_activations(share_of(shape, train, layout, on_cpu=True))
    assert said == pytest.approx(counted, rel=0.05)


@pytest.mark.long
@each_row("targets", [("q_proj", "v_proj"), TrainSpec().lora_targets])
def test_each_adapter_of_trl_keeps_its_own_input(targets: tuple[str, ...]) -> None:
    """And the mask of its dropout, which torch has in one byte on a GPU: TRL's lora_dropout is 0.05, PEFT's 0."""
    counted = (saved_bytes(3, "lora", targets, half=True) - saved_bytes(1, "lora", targets, half=True)) / 2
    columns = sum(1376 if target == "down_proj" else 512 for target in targets)
    shape = model_from_config({**SHAPE})
    train = TrainSpec(method="lora", sequence_length=ROW_TOKENS, lora_rank=8, lora_targets=targets)
    said = engine_named("trl").layer_activations(share_of(shape, train, Layout(world_size=1, micro_batch=MICRO_BATCH)))
    assert said == pytest.approx(counted + MICRO_BATCH * ROW_TOKENS * columns, rel=0.05)


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("method", "degrees"),
    [pytest.param("lora", {"world_size": 1}, marks=pytest.mark.nightly), ("full", {"world_size": 2, "dp_shard": 2})],
    ids=["LoRA, one rank", "full, FSDP"],
)
def test_a_run_of_a_larger_model_needs_what_was_forecast(tmp_path, method, degrees):
    """The peak of the fullest rank lies inside the interval; the model is not the one the constants were counted on."""
    shape = model_from_config({**SHAPE})
    assert weights(shape).total > 5 * weights(model_named("tiny-llama")).total
    layout = Layout(micro_batch=MICRO_BATCH, precision="fp32", **degrees)
    train = TrainSpec(
        method=method, sequence_length=ROW_TOKENS, lora_rank=8, global_batch=layout.global_batch, precision="fp32"
    )
    host = NodeTopology(hostname="here", gpus=(), nics=(), pairs=(), cpu_count=os.cpu_count())
    planned = plan(ClusterTopology(nodes=(host,)), (), shape, train, ranks_per_node=layout.world_size)
    said = forecast_layout(planned, layout).forecast
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**SHAPE, "architectures": ["LlamaForCausalLM"]}))
    document = {"layout": dataclasses.asdict(layout), "environment": {}, "forecast": dataclasses.asdict(said)}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    settings = [
        f"model_name_or_path=random:{tmp_path / 'model'}", f"output_dir={tmp_path / 'out'}", "max_steps=3",
        "dataset_rows=64", "profile_steps=0", "eval_strategy=no", "save_strategy=no", "lora_r=8",
        "lora_modules_to_save=[]", f"use_peft={'true' if method == 'lora' else 'false'}",
    ]  # fmt: skip
    argv = [f"--nproc-per-node={layout.world_size}", "-m", "finetune.train", "--plan", tmp_path / "plan.json"]
    done = interpreter(*TORCHRUN, *argv, *settings, seconds=800, without=("MALLOC_", "GLIBC_TUNABLES"))
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads((tmp_path / "out" / "run.json").read_text())["measured"]
    assert said.memory_bytes.low < measured["memory_bytes"] < said.memory_bytes.high
