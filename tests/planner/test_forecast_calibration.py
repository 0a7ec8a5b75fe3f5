"""Measured numbers: a calibration narrows the interval; memory on a CPU is as torch counts it and real runs take it."""

import dataclasses
import json
import math
import os
from dataclasses import replace

import pytest
from rigs.command import TORCHRUN, interpreter
from rigs.tables import each_row, rows_of

from collectives.bench.calibrate import CalibrationFailedError, CalibrationRequest, calibrate
from collectives.bench.results import Measurement
from contracts import plain
from contracts.layout import Layout
from planner.forecast import calibration, machines
from planner.forecast.calibration import Calibration, CalibrationError, LayerTiming, parse_calibration, widths
from planner.forecast.engine import share_of
from planner.forecast.links import make_links
from planner.forecast.models import model_named, read_model
from planner.forecast.specs import Method, TrainSpec, weights
from planner.recommend import forecast_layout, forecast_named, plan, recommend
from planner.stacks import TOPOFLIGHT, find_engine
from topology.graph import ClusterTopology, NodeTopology

TRAIN = TrainSpec(global_batch=8, sequence_length=128)
TIMING = LayerTiming(
    hidden=256, ffn=688, heads=8, kv_heads=4, tokens=512, sequence=128, forward_seconds=0.004, backward_seconds=0.006
)
CPU = Calibration(device="CPU", precision="fp32", gemm_flops_per_second=60e9, layer=TIMING)


def cluster() -> ClusterTopology:
    """A node without GPUs."""
    return ClusterTopology(nodes=(NodeTopology(hostname="cpu", gpus=(), nics=(), pairs=(), cpu_count=2),))


def test_measured_numbers_narrow_the_interval_and_are_named() -> None:
    """The interval shrinks, and the inputs say what was measured."""
    model = model_named("tiny")
    plain = recommend(cluster(), (), model, TRAIN, ranks_per_node=2).chosen
    better = recommend(cluster(), (), model, TRAIN, calibration=CPU, ranks_per_node=2).chosen
    wide, narrow = plain.forecast.step_seconds, better.forecast.step_seconds
    assert narrow.high / narrow.low < 0.6 * wide.high / wide.low
    assert any("measured" in line and "layer forward" in line for line in better.forecast.inputs)


def test_a_slower_layer_is_a_slower_step() -> None:
    """Half the speed of a layer is nearly twice the step."""
    half = replace(TIMING, forward_seconds=0.008, backward_seconds=0.012)
    fast, slow = (
        recommend(cluster(), (), model_named("tiny"), TRAIN, calibration=each, ranks_per_node=2).chosen.forecast
        for each in (CPU, replace(CPU, layer=half))
    )
    assert 1.6 < slow.step_seconds.mid / fast.step_seconds.mid < 2.1


def test_a_measured_step_moves_every_forecast_as_far() -> None:
    """A step that took 1.3 times its forecast: so do the others, whatever is chosen; and the interval narrows."""
    model, train = model_named("Llama-3.1-8B"), TrainSpec(global_batch=64)
    box = machines.cluster("dgx-h100")
    before = recommend(box, (), model, train).chosen
    forecast = before.forecast.step_seconds.mid
    named = {"dp_shard": 8, "micro_batch": 1, "checkpointing": "full"}
    other = forecast_named(plan(box, (), model, train), named).forecast.step_seconds.mid
    after = recommend(box, (), model, train, measured_step=(named, 1.3 * other)).chosen
    assert after is not None and after.layout == before.layout
    assert any("1.30 x its forecast" in line for line in after.forecast.inputs)
    assert after.forecast.step_seconds.mid == pytest.approx(1.3 * forecast, rel=1e-6)
    seconds, wide = after.forecast.step_seconds, before.forecast.step_seconds
    assert seconds.high / seconds.low == pytest.approx(math.exp(2 * calibration.Z80 * widths().calibrated))
    assert seconds.high / seconds.low < wide.high / wide.low
    long = replace(train, sequence_length=calibration.LONG_CONTEXT_TOKENS)  # of which least is known
    wide, seconds = (
        recommend(box, (), model, long, measured_step=step).chosen.forecast.step_seconds
        for step in (None, (named, 9.0))
    )
    assert seconds.high / seconds.low < 0.9 * wide.high / wide.low


def test_file_round_trip_and_errors(tmp_path):
    """What is written is read; a wrong file is refused by the field's name."""
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(plain.write(CPU)))
    assert calibration.load_calibration(file) == CPU
    good = json.loads(json.dumps(plain.write(CPU)))
    for change, says in rows_of(__file__)("wrong")():
        with pytest.raises(CalibrationError, match=says):
            parse_calibration({**good, **change})


def test_another_device_or_precision_is_refused() -> None:
    """A CPU's numbers are not a GPU's."""
    with pytest.raises(CalibrationError, match="'CPU'"):
        recommend(machines.cluster("dgx-h100"), (), model_named("GPT-2"), TrainSpec(), calibration=CPU)
    other = Calibration(device="NVIDIA H100 80GB HBM3", precision="fp16")
    with pytest.raises(CalibrationError, match="fp16"):
        recommend(machines.cluster("dgx-h100"), (), model_named("GPT-2"), TrainSpec(), calibration=other)


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
def test_this_host_is_measured_for_real() -> None:
    """Two copies time a small layer at once; the answer is a calibration that the planner takes."""
    request = CalibrationRequest(
        hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=32, tokens=256, sequence=64, copies=2, threads=1
    )
    answer = parse_calibration(calibrate(request))
    assert answer.gemm_flops_per_second > 1e8
    assert answer.layer.backward_seconds > 0
    chosen = recommend(cluster(), (), model_named("tiny"), TRAIN, calibration=answer, ranks_per_node=2).chosen
    assert chosen.forecast.step_seconds.mid > 0


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
def test_a_device_that_is_not_there_is_an_error_with_its_words() -> None:
    """No invented numbers."""
    request = CalibrationRequest(
        hidden=64, ffn=64, heads=1, kv_heads=1, head_dim=64, tokens=64, sequence=64, device="cuda", precision="bf16"
    )
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("this host has a CUDA device")
    with pytest.raises(CalibrationFailedError, match="cuda"):
        calibrate(request)


def test_a_reduce_scatter_has_its_own_bandwidth() -> None:
    """Measured half as fast as the all-gather, it takes so much longer; gathers keep theirs."""
    measured = tuple(
        Measurement(
            op=op, backend="gloo", bytes=1 << 24, ranks=(0, 1), hosts=("cpu", "cpu"), median_seconds=seconds,
            iteration_seconds=(seconds,), spread_ratio=None, algbw_bytes_per_second=2 * rate,
            busbw_bytes_per_second=rate, verified=True,
        )
        for op, seconds, rate in (("all_gather", 0.01, 0.8e9), ("reduce_scatter", 0.02, 0.4e9))
    )  # fmt: skip
    for rows in (measured, measured[::-1]):
        links = make_links(cluster(), rows, ranks_per_node=2)
        assert (links.node.bytes_per_second, links.scatter_share) == (0.8e9, 0.5)
        assert links.scatter_seconds(1e9, 2, 1) == pytest.approx(2 * links.ring_seconds(1e9, 2, 1), rel=1e-3)
    assert make_links(cluster(), measured[1:], ranks_per_node=2).node.bytes_per_second == 0.4e9


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
    shape = read_model({**SHAPE})
    layout = Layout(world_size=1, micro_batch=MICRO_BATCH, precision="fp32")
    said = TOPOFLIGHT.layer_activations(share_of(shape, train, layout, on_cpu=True))
    assert said == pytest.approx(counted, rel=0.05)


@pytest.mark.long
@each_row("targets", [("q_proj", "v_proj"), TrainSpec().lora_targets])
def test_each_adapter_of_trl_keeps_its_own_input(targets: tuple[str, ...]) -> None:
    """And the mask of its dropout, which torch has in one byte on a GPU: TRL's lora_dropout is 0.05, PEFT's 0."""
    counted = (saved_bytes(3, "lora", targets, half=True) - saved_bytes(1, "lora", targets, half=True)) / 2
    columns = sum(1376 if target == "down_proj" else 512 for target in targets)
    shape = read_model({**SHAPE})
    train = TrainSpec(method="lora", sequence_length=ROW_TOKENS, lora_rank=8, lora_targets=targets)
    said = find_engine("trl").layer_activations(share_of(shape, train, Layout(world_size=1, micro_batch=MICRO_BATCH)))
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
    shape = read_model({**SHAPE})
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
