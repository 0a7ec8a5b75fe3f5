"""The model's pieces: chunks put together are the model; schedules are transformers'; refusals have reasons; attention.

Attention inside documents is equal to a dense mask in values and gradients, in memory that grows with the tokens.
Liger's fused cross-entropy through Triton's interpreter has the loss and the gradients of the plain path.
"""

import contextlib
import copy
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from filled import filled_model
from rigs.command import python
from rigs.tables import ROOT, data_of, each_row
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from contracts.job_config import ConfigError, JobConfig
from contracts.layout import ROPE_TYPES, Layout
from finetune import train
from finetune.checkpoint import training_state
from finetune.loop import build_schedule, clip_gradients
from finetune.model import attend, build_model, causal_lm, cut, find_documents
from finetune.parallel import parallelize, stage_bounds
from finetune.recorder import measure_communication
from finetune.rows import IGNORED, collate, load_tokenizer, pack, prepare
from planner.forecast.engine import share_of
from planner.forecast.memory import checkpoint_bytes
from planner.forecast.models import read_model
from planner.forecast.specs import TrainSpec
from planner.stacks import TOPOFLIGHT

pytestmark = pytest.mark.long
ROWS = data_of(__file__, "jobs/rows.yaml")
SMALL = ROWS["small"]
FAMILIES = {
    "llama": None,
    "mistral": MistralConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
}


def job(tmp_path, family, **settings):
    """A random model of the family."""
    name = "random:micro-llama"
    if FAMILIES[family] is not None:
        FAMILIES[family].save_pretrained(tmp_path)
        name = f"random:{tmp_path}"
    return JobConfig(
        model_name_or_path=name, tokenizer_name="builtin:bytes", max_length=64, dataset_rows=40, **settings
    )


def batch_of(config, packed):
    """Four sequences."""
    rows, _ = prepare(config, "train", load_tokenizer(config))
    rows = pack(rows, 64) if packed else rows
    return collate(rows[:4], 4, 64, 2)


def total(chunks, batch):
    """The summed loss through all chunks."""
    x = batch.tokens
    for chunk in chunks:
        x = chunk(x, batch.positions, batch.labels, batch.packed)
    return x.sum()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True])
def test_chunks_together_are_the_model(tmp_path, family, lora):
    """Cut in uneven thirds, with or without adapters, the loss is transformers' own."""
    config = job(tmp_path, family, use_peft=lora)
    batch = batch_of(config, packed=False)
    whole = filled_model(config).eval()
    with torch.no_grad():
        logits = causal_lm(whole)(batch.tokens).logits.flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(
            logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        chunks = cut(copy.deepcopy(whole), [(0, 1), (1, 3), (3, 4)], [0, 1, 2], fused_loss=False)
        assert float(total(chunks, batch)) == pytest.approx(float(expected), rel=1e-5)
        fused = cut(copy.deepcopy(whole), [(0, 4)], [0], fused_loss=True)
        assert float(total(fused, batch)) == pytest.approx(float(expected), rel=1e-5)
    names = {n.removeprefix("net.") for chunk in chunks for n, _ in chunk.named_parameters()}
    assert names == {n for n, _ in whole.named_parameters()}


@each_row(("lora", "kernel"), [(True, "sdpa"), (False, "sdpa"), (True, "eager")])
def test_a_layer_keeps_in_bf16_what_the_planner_counts(tmp_path, lora, kernel):
    """What autograd keeps of a layer more for more tokens; the softmax of eager attention in both types."""
    shape = {**SMALL, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "model_type": "llama"}
    saved, said = [], []
    for layers, length in ((1, 64), (1, 128), (3, 64), (3, 128)):
        shape["num_hidden_layers"] = layers
        (tmp_path / "config.json").write_text(json.dumps(shape))
        config = JobConfig(model_name_or_path=f"random:{tmp_path}", use_peft=lora, lora_r=1, attn_implementation=kernel)
        layout = Layout(world_size=1, micro_batch=4, precision="bf16")
        (chunk,) = cut(filled_model(config, "bf16"), [(0, layers)], [0], fused_loss=False)
        parallelize(chunk, layout, None, torch.device("cpu"))
        held = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
        seen = {}

        def see(tensor, held=held, seen=seen):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens = torch.zeros((4, length), dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            loss = chunk(tokens, torch.arange(length).expand(4, -1), tokens)
        assert loss.requires_grad
        saved.append(sum(seen.values()))
        train_spec = TrainSpec(method="lora" if lora else "full", sequence_length=length, attention=kernel)
        said.append(TOPOFLIGHT.layer_activations(share_of(read_model(shape), train_spec, layout)))
    assert (saved[3] - saved[1]) - (saved[2] - saved[0]) == pytest.approx(2 * (said[3] - said[2]), rel=0.05)


def test_adapters_take_16_bits_as_they_come(tmp_path):
    """Under autocast PEFT's own cast to fp32 and back changes no bit; on an H100 it was a tenth of a LoRA step."""
    config = job(tmp_path, "llama", use_peft=True)
    batch, losses = batch_of(config, packed=False), []
    for cast in (False, True):
        model = filled_model(config).to(torch.bfloat16)
        adapters = [module for module in model.modules() if hasattr(module, "lora_A")]
        for adapter in adapters:
            adapter.lora_A.float(), adapter.lora_B.float()
        (chunk,) = cut(model, [(0, 4)], [0], fused_loss=False)
        parallelize(chunk, Layout(world_size=1, precision="bf16"), None, torch.device("cpu"))
        assert adapters and not any(adapter.cast_input_dtype_enabled for adapter in adapters)
        for adapter in adapters:
            adapter.cast_input_dtype_enabled = cast
        losses.append(float(total([chunk], batch)))
    assert losses[0] == losses[1]


class Passed(TorchDispatchMode):
    """Bytes that operators read and write of tensors with so many columns, products apart; views move none."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.bytes = columns, 0

    def __torch_dispatch__(self, op, _types, args=(), kwargs=None):
        """Run it and count."""
        out = op(*args, **(kwargs or {}))
        name = op._schema.name
        if not op.is_view and not any(word in name for word in ("mm", "empty", "detach", "_unsafe_view", "aten::t")):
            seen = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in seen if t.ndim and t.shape[-1] == self.columns)
        return out


@pytest.mark.parametrize("fused", [True, False])
def test_the_bytes_of_the_loss_are_those_that_the_forecast_counts(tmp_path, fused):
    """Forward and backward, per logit; under autocast the head's product comes in 16 bits."""
    config = job(tmp_path, "llama")
    model = filled_model(config)
    (chunk,) = cut(model, [(0, 4)], [0], fused_loss=fused)
    chunk.autocast = torch.bfloat16
    head, tokens = causal_lm(model).lm_head, 128
    head.weight = torch.nn.Parameter(torch.randn(4096, head.weight.shape[1]).to(torch.bfloat16))
    hidden = torch.randn(tokens, head.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 4096, (tokens,))
    with Passed(4096) as passed, torch.autocast("cpu", torch.bfloat16):
        (chunk._fused_loss if fused else chunk._loss)(hidden, labels).backward()
    assert passed.bytes / (tokens * 4096) == pytest.approx(TOPOFLIGHT.loss_bytes[0 if fused else 1], rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_do_not_see_each_other(tmp_path, family):
    """Packing gives the loss of the rows by themselves."""
    config = job(tmp_path, family)
    rows, _ = prepare(config, "train", load_tokenizer(config))
    batch, alone = collate(pack(rows[:6], 128), 3, 128, 2), collate(rows[:6], 6, 64, 2)
    (chunk,) = cut(filled_model(config).eval(), [(0, 4)], [0], fused_loss=False)
    with torch.no_grad():
        expected = float(total([chunk], alone))
        assert float(total([chunk], batch)) == pytest.approx(expected, rel=1e-5)


@each_row("family", ["gpt2", "falcon", "gpt_neox", "bloom", "phi"])
def test_other_families_are_refused(tmp_path, family):
    """A model that the job cannot cut is named, also one whose code does not take this job's attention."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ConfigError, match=f"topoflight trains llama, .*, not {family}"):
        build_model(JobConfig(model_name_or_path=f"random:{tmp_path}"), "fp32")


def test_an_output_folder_that_cannot_be_made_is_refused_before_anything_loads(tmp_path, capsys):
    """Exit code 2 and one line."""
    (tmp_path / "file").touch()
    place = tmp_path / "file/run"
    assert train.main([f"output_dir={place}"]) == ConfigError.code
    assert f"output_dir='{place}': the folder cannot be made: Not a directory" in capsys.readouterr().err


def test_warm_up_below_one_is_a_share():
    """warmup_steps: 0.1 of 50 steps are five, and of 41 too: transformers rounds up. The first step's rate is 0."""
    config = JobConfig(lr_scheduler_type="constant_with_warmup", warmup_steps=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    for steps in (50, 41):
        share_at = build_schedule(optimizer, config, steps)
        assert [share_at(step) for step in (0, 4, 5)] == pytest.approx([0.0, 0.8, 1.0])


@each_row("limit", [0.0, 0.5, 1e9])
def test_clipping_is_torch_s(limit):
    """The same norm and the same gradients as torch's own, and 0 only measures."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    for w in weights:
        w.grad = torch.randn_like(w)
    twins = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    for twin, w in zip(twins, weights, strict=True):
        twin.grad = w.grad.clone()
    norm = clip_gradients(weights, limit, None)
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(twins, limit or math.inf)))
    for twin, w in zip(twins, weights, strict=True):
        torch.testing.assert_close(w.grad, twin.grad)


@each_row(("members", "settings", "word"), ROWS["refused_layouts"])
def test_layouts_that_cannot_run_have_a_reason(members, settings, word):
    """Refused by the planner's rules before anything is built; None: this job runs it."""
    world = math.prod(members.get(n, 1) for n in ("dp_replicate", "dp_shard", "tp", "pp", "cp"))
    layout = Layout(**{"world_size": world, "precision": "fp32", **members})
    config = JobConfig(model_name_or_path="random:micro-llama", **settings)
    with contextlib.nullcontext() if word is None else pytest.raises(ConfigError, match=word):
        build_model(config, "fp32", layout=layout)


def test_stage_bounds_cover_every_layer_once():
    """Even, uneven by arithmetic, uneven by request."""
    piped = {"world_size": 4, "pp": 4, "gradient_accumulation": 4}
    assert stage_bounds(Layout(**piped), 10) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert stage_bounds(Layout(**piped, stage_layers=(1, 4, 4, 1)), 10) == [(0, 1), (1, 5), (5, 9), (9, 10)]


class Event:
    """A span as torch's profiler gives it, microseconds."""

    def __init__(self, name, start, end, thread=1, device="CPU", shapes=()):
        self.name, self.thread, self.input_shapes = name, thread, shapes
        self.device_type = f"DeviceType.{device}"
        self.time_range = type("Range", (), {"start": start * 1e6, "end": end * 1e6})


def test_communication_that_work_hides_is_not_exposed():
    """Two steps of five seconds, four of the ten collectives, of which one runs alone.

    On a device only what runs there counts: starting a kernel hides nothing, the kernel does.
    """
    events = [Event(**row) for row in ROWS["events"]["ranks"]]
    found = measure_communication(events, 10.0)
    assert found.share == pytest.approx(0.4)
    assert found.exposed_share == pytest.approx(0.1)
    assert found.seconds_by_kind == pytest.approx({"all_gather": 4.0, "all_reduce": 1.0})
    assert measure_communication([Event("aten::mm", 0, 1)], 1.0) is None
    events = [Event(**row) for row in ROWS["events"]["device"]]
    found = measure_communication(events, 10.0)
    assert (found.share, found.exposed_share) == (pytest.approx(0.4), pytest.approx(0.3))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama"}))
@pytest.mark.parametrize("lora", [{}, {"lora_modules_to_save": ("embed_tokens",)}, None])
def test_the_planner_knows_the_bytes_of_a_checkpoint(tmp_path, family, lora):
    """What trains with both moments, as the store is given it; the time that pods have to save is counted from it."""
    config = job(tmp_path, family, use_peft=lora is not None, dtype="bfloat16", **(lora or {}))
    net = build_model(config, "bf16")
    named = dict(net.named_parameters())
    optimizer = torch.optim.AdamW([p for p in named.values() if p.requires_grad])
    stored = sum(t.numel() * t.itemsize for t in training_state(named, optimizer).values())
    train = TrainSpec(method="full" if lora is None else "lora", lora_rank=config.lora_r,
                      lora_targets=config.lora_target_modules, saved_modules=config.lora_modules_to_save)  # fmt: skip
    spec = read_model(FAMILIES[family].to_dict())
    assert checkpoint_bytes(spec, train, in_fp32=False) == stored


def test_a_window_that_is_shorter_than_the_rows_is_refused_by_name(tmp_path):
    """By the job, and before it by the plan; transformers' eager attention has windows."""
    shape = {**FAMILIES["mistral"].to_dict(), "sliding_window": 48}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    given = JobConfig(model_name_or_path=f"random:{tmp_path}", tokenizer_name="builtin:bytes", max_length=64)
    with pytest.raises(ConfigError, match=r"sliding window \(48 tokens\) only with eager attention"):
        build_model(given, "fp32")
    build_model(replace(given, attn_implementation="eager"), "fp32")
    build_model(replace(given, max_length=48), "fp32")
    qwen = {**SMALL, "use_sliding_window": True, "sliding_window": 48}  # its first `max_window_layers` have no window
    (tmp_path / "config.json").write_text(json.dumps(Qwen2Config(**qwen, max_window_layers=10).to_dict()))
    build_model(given, "fp32")
    (tmp_path / "config.json").write_text(json.dumps(Qwen2Config(**qwen, max_window_layers=1).to_dict()))
    with pytest.raises(ConfigError, match=r"sliding window \(48 tokens\)"):
        build_model(given, "fp32")
    for length, attention, refused in ((64, "sdpa", True), (64, "eager", False), (48, "sdpa", False)):
        train = TrainSpec(sequence_length=length, attention=attention)
        why = TOPOFLIGHT.refuses(read_model(shape), train, Layout(world_size=1))
        assert (why is not None and "sliding window (48 tokens)" in why) == refused


def test_rotary_positions_that_nobody_knows_are_refused_by_name(tmp_path):
    """By the job, and before it by the plan; those that are named are transformers' own."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}
    shape = {
        **FAMILIES["qwen3"].to_dict(),
        "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ConfigError, match="supports rope_type default, dynamic, "):
        build_model(JobConfig(model_name_or_path=f"random:{tmp_path}", tokenizer_name="builtin:bytes"), "fp32")
    older = {**shape, "rope_parameters": None, "rope_scaling": {"type": "spiral", "factor": 2.0}}
    for said in (shape, older):
        assert TOPOFLIGHT.refuses(read_model(said), TrainSpec(), Layout(world_size=1)) == (
            f"topoflight supports rope_type {', '.join(ROPE_TYPES)}, not 'spiral'"
        )


LENGTH = 70
DOCUMENTS = {  # the lengths of the documents of each row
    "plain": None,
    "packed": [[10, 23, LENGTH - 33], [LENGTH]],
    "documents of one token": [[1, 1, LENGTH - 2], [LENGTH - 1, 1]],
}


def dense(rows):
    """[rows, tokens, tokens]: who sees whom."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, -1, -1)
    if rows is None:
        return seen
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    return seen & (number[:, :, None] == number[:, None])


@each_row("name", DOCUMENTS)
def test_documents_equal_a_dense_mask(name):
    """Results and gradients of grouped heads."""
    draw, rows = torch.Generator().manual_seed(1), DOCUMENTS[name]
    shapes = ((2, 8, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 16))
    given = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    at = None if rows is None else torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    documents = None if at is None else find_documents(at)
    got, _ = attend(None, *given, None, documents=documents)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *given, attn_mask=dense(rows)[:, None], enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    back = torch.randn(wanted.shape, generator=draw)
    for one, other in zip(torch.autograd.grad(got, given, back), torch.autograd.grad(wanted, given, back), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_packed_row_trains_as_under_the_mask_of_transformers():
    """The whole model: loss and every gradient, against transformers' own mask for packed rows."""
    config = JobConfig(
        model_name_or_path="random:micro-llama", tokenizer_name="builtin:bytes", use_peft=False, dataset_rows=12
    )
    rows, _ = prepare(config, "train", load_tokenizer(config))
    batch = collate(pack(rows, 160)[:2], 2, 160, 2)
    assert batch.packed
    results = []
    for kernel in ("by_document", "sdpa"):
        model = filled_model(config)
        model.set_attn_implementation(kernel)
        (chunk,) = cut(model, [(0, 4)], [0], fused_loss=False)
        loss = chunk(batch.tokens, batch.positions, batch.labels, packed=kernel == "by_document").sum()
        loss.backward()
        results.append((loss.detach(), [p.grad for p in chunk.parameters()]))
    (loss, grads), (wanted, others) = results
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    for one, other in zip(grads, others, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


LONG = 128 * 1024
SCRIPT = f"""
import torch
from finetune.model import attend, find_documents
from finetune.recorder import rss_bytes  # unlike ru_maxrss not that of the process that started this one
torch.set_num_threads(1)
positions = torch.arange({LONG})[None] % 1024
q, k, v = (torch.randn(1, heads, {LONG}, 16, requires_grad=True) for heads in (4, 2, 2))
before = rss_bytes("VmHWM")
attend(None, q, k, v, None, documents=find_documents(positions))[0].sum().backward()
print(rss_bytes("VmHWM") - before)
"""


def test_a_row_of_128k_tokens_takes_no_memory_of_its_square():
    """Forward and backward: a mask of one byte would be 16 GiB; what is stored has the row's length."""
    done = python(SCRIPT)
    row = LONG * (4 + 2 + 2) * 16 * 4  # queries, keys and values
    assert int(done.stdout) < 12 * row < LONG**2 / 16


CODE = """
import json, sys, torch
from filled import filled_model

from contracts.job_config import JobConfig
from finetune.model import cut
from finetune.rows import collate, load_tokenizer, prepare

torch.set_num_threads(1)
told = []
for kind in ("fp32", "lora", "bf16", "autocast"):
    for fused in (False, True):
        config = JobConfig(
            model_name_or_path="random:micro-llama", dataset_rows=4, max_length=32, use_peft=kind == "lora", lora_r=4
        )
        rows, _ = prepare(config, "train", load_tokenizer(config))
        batch = collate(rows, 4, 32, 2)
        (chunk,) = cut(filled_model(config), [(0, 4)], [0], fused_loss=fused)
        if kind == "bf16":
            chunk = chunk.to(torch.bfloat16)
        if kind == "autocast":
            chunk.autocast = torch.bfloat16
        loss = chunk(batch.tokens, batch.positions, batch.labels).sum()
        loss.backward()
        grads = [p.grad.float().flatten() for p in chunk.parameters() if p.grad is not None]
        told.append((float(loss.detach()), torch.cat(grads)))
    (plain, left), (fused, right) = told[-2:]
    print("TOLD " + json.dumps([kind, plain, fused, float((left - right).norm() / left.norm())]))
print("USED " + json.dumps("liger_kernel.ops.fused_linear_cross_entropy" in sys.modules))
"""


@pytest.mark.triton
@pytest.mark.timeout(300)
def test_liger_s_loss_and_gradients_are_those_of_the_plain_path():
    """In fp32 to rounding; in bf16 within what its gradients of the head, rounded per chunk, allow."""
    absent = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)} (pip install triton liger-kernel, 290 MB; no GPU needed)")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/finetune"), *sys.path[1:]])
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, env=env, timeout=280)
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert [kind for kind, *_ in lines] == ["fp32", "lora", "bf16", "autocast"], done.stderr[-3000:]
    assert "USED true" in done.stdout
    for kind, plain, fused, apart in lines:
        rounded = kind in ("bf16", "autocast")
        assert fused == pytest.approx(plain, rel=1e-2 if rounded else 1e-5), kind
        assert apart < (2e-2 if rounded else 1e-5), kind
