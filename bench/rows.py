"""Rows of published training runs: from the corpus's columns to what the planner is asked.

Surface: the columns of published.csv (one training run per row; empty means not published). Every rule that fills a
column is here and named, so that one sees what was given and what was filled.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from stacks import Stack, stack_matching

from contracts.layout import Checkpointing, Layout, LayoutError, Offload, Precision, Sharding
from hardware.gpus import Gpu, gpu_named
from hardware.units import GIGA
from planner.forecast.links import NETWORK_SHARE, Links, Speed
from planner.forecast.models import ModelError, model_named
from planner.forecast.specs import ModelSpec, TrainSpec, weights

Raw = dict[str, str]


class SkipRowError(Exception):
    """A row that cannot be asked: the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run as a question to the planner, and the published answers."""

    row_id: str
    source: str
    framework: str
    gpu: Gpu
    precision: Precision
    model: ModelSpec
    train: TrainSpec
    layout: Layout
    links: Links
    stack: Stack
    recompute_share: float | None  # share of the forward pass run again, where MFU and HFU were both published
    seconds: float | None  # of one step with `layout`
    exact_seconds: bool  # False: from published FLOP/s
    memory_bytes: float | None
    memory_kind: str
    out_of_memory: bool
    doubtful: bool  # its time is not scored
    raw: Raw


def number(raw: Raw, name: str) -> float | None:
    """A column as a number; None where it is empty or words."""
    try:
        return float(raw.get(name) or "")
    except ValueError:
        return None


def whole(raw: Raw, name: str, default: int | None = None) -> int:
    """A column as a whole number of at least 1."""
    value = number(raw, name)
    if value is None or value < 1 or value != int(value):
        if default is None:
            raise SkipRowError(f"{name} is not given")
        return default
    return int(value)


_GATED = re.compile(r"llama|mistral|mixtral|qwen|gemma|yi-|internlm|phi-3|deepseek|olmo|granite|baichuan|smollm", re.I)


def read_model(raw: Raw) -> ModelSpec:
    """The shape of the row's model."""
    layers, hidden, heads = whole(raw, "layers"), whole(raw, "hidden"), whole(raw, "heads")
    kv_heads = whole(raw, "kv_heads", heads)
    name = raw.get("model", "")
    try:
        known = model_named(name)
    except ModelError:
        known = None
    if known and (known.layers, known.hidden, known.heads) == (layers, hidden, heads):
        return known
    if "moe" in (raw.get("arch") or "").lower() and not re.search(r"8x\d+b", name, re.I):
        raise SkipRowError("a mixture of experts whose experts no column gives")
    gated = bool(_GATED.search(name))
    ffn = whole(raw, "ffn", 4 * hidden)
    head_dim = 128 if re.search(r"qwen3|nemo-12b|gemma-?2-27b", name, re.I) else hidden // heads
    if re.search(r"gemma", name, re.I) and "27b" not in name.lower():
        head_dim = 256
    experts = 8 if re.search(r"mixtral|8x\d+b", name, re.I) else 0
    return ModelSpec(
        name=name, family="llama" if gated else "gpt", layers=layers, hidden=hidden, heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads, head_dim=head_dim, ffn=ffn,
        vocab=whole(raw, "vocab", 32000), tied_embeddings=not gated, gated_mlp=gated,
        experts=experts, experts_per_token=2 if experts else 0, expert_ffn=ffn if experts else 0,
    )  # fmt: skip


def read_precision(raw: Raw) -> Precision:
    """bf16 where the column is empty: what every row of such a GPU ran."""
    text = (raw.get("precision") or "").lower()
    if "fp4" in text:
        raise SkipRowError("fp4 multiplications are not modelled")
    if "fp8" in text or "mxfp8" in text or "float8" in text:
        return "fp8"
    if "fp16" in text or ("float16" in text and "bfloat16" not in text):
        return "fp16"
    if "32" in text and "bf16" not in text:
        return "fp32"
    return "bf16"


def read_sharding(raw: Raw, stack: Stack, dp: int) -> tuple[Sharding, int]:
    """What is sharded, and over how many ranks."""
    text = (raw.get("sharding") or "").lower()
    group = whole(raw, "shard_group", dp)
    if dp % group:
        group = dp
    if "hsdp" in text or "hybrid" in text:
        return "zero3", group if group < dp else min(dp, whole(raw, "gpus_per_node", 8))
    if "zero-3" in text or "zero3" in text or "full" in text or "fsdp" in text:
        return "zero3", group
    if "zero-2" in text or "shard_grad_op" in text or "zero2" in text:
        return "zero2", dp
    if "zero-1" in text or "distributed optimizer" in text or "zero1" in text:
        return "zero1", dp
    if "none" in text or "ddp" in text or "zero-0" in text:
        return "ddp", 1
    if stack.default_sharding == "zero3":
        return "zero3", dp
    return (stack.default_sharding, dp) if stack.default_sharding != "ddp" else ("ddp", 1)


def read_checkpointing(raw: Raw) -> Checkpointing | None:
    """None where the column is empty: the lightest that fits is then taken."""
    text = (raw.get("act_recompute") or "").lower()
    if not text:
        return None
    if text.startswith(("full", "yes", "true")):
        return "full"
    if text.startswith(("sel", "op")):
        return "selective"
    return "none"


def read_offload(raw: Raw) -> Offload:
    """What lives in host memory."""
    text = (raw.get("offload") or "").lower()
    if not text or text in ("none", "no"):
        return "none"
    return "all" if "param" in text else "optimizer"


def fused_loss(raw: Raw, stack: Stack) -> bool:
    """Whether the logits of all tokens never exist at once."""
    note = (raw.get("note") or "").lower()
    if "without liger" in (raw.get("mem_kind") or "").lower():
        return False
    if note.startswith("+") and "chunked" not in note:  # a table that adds one technique per row, this one not yet
        return False
    return (
        "liger" in note
        or "chunked" in note
        or (stack.engine.fused_cross_entropy and stack.engine.name not in ("deepspeed", "trl"))
    )


def read_optimizer(raw: Raw, method: str) -> str:
    """AdamW, or what the row or its note names for a single GPU."""
    text = f"{raw.get('optimizer') or ''} {raw.get('note') or ''}".lower()
    if method == "full" and whole(raw, "world", 1) == 1:
        if "paged" in text:
            return "paged_adamw8bit"
        if "8bit" in text or "8-bit" in text:
            return "adamw8bit"
    return "adamw"


def read_memory(raw: Raw) -> tuple[float | None, str]:
    """Bytes, and what they count: "tensors" (allocated), "reserved", "device"."""
    value, kind = number(raw, "mem_gib"), (raw.get("mem_kind") or "").lower()
    if value is None or not raw.get("seq") or not raw.get("mbs") or "real length" in (raw.get("note") or ""):
        return None, ""  # without the tokens of a micro-batch there is nothing to compare
    unit = 1e9 if kind.startswith("gb ") else 1024.0**3
    if "torchtune" in (raw.get("framework") or ""):  # logs torch.cuda.max_memory_allocated
        return value * unit, "tensors"
    if "model:" in kind or "active" in kind or "alloc" in kind or "max over run" in kind:
        return value * unit, "tensors"
    if "smi" in kind or ("printed" in kind and "deepspeed" in (raw.get("framework") or "").lower()):
        return value * unit, "device"  # Megatron-DeepSpeed prints no peak: such tables are read off nvidia-smi
    return value * unit, "reserved"


def read_links(raw: Raw, gpu: Gpu, world: int) -> Links:
    """Bandwidths: the table's for the GPU, the row's for the network; a fast fabric where the row is silent."""
    per_node = min(world, whole(raw, "gpus_per_node", 8))
    nodes = max(1, -(-world // per_node))
    nvlink = gpu.interconnect != "PCIe"
    busbw = gpu.busbw_of(per_node)
    inside = Speed(bytes_per_second=busbw or 10 * GIGA, how="derived" if busbw else "assumed", link=gpu.interconnect)
    rate = number(raw, "inter_gbps_per_node")
    # Built for training: one 200 Gb/s (Ampere) or 400 Gb/s (Hopper and later) port per GPU.
    port = 50.0 if (gpu.compute_capability or (0, 0)) >= (9, 0) else 25.0
    network = None
    if nodes > 1:
        gbytes = rate / 8.0 if rate else port * per_node
        network = Speed(
            bytes_per_second=gbytes * GIGA * NETWORK_SHARE, how="derived" if rate else "assumed",
            link=raw.get("inter_link") or "network",
        )  # fmt: skip
    island = per_node if nvlink else 1
    if "domain of 72" in (raw.get("intra_link") or "") or gpu.of_a_rack:
        island = min(world, 64)  # NVL72; 64 is the largest power of two in it
    return Links(ranks_per_node=per_node, nodes=nodes, island_size=max(1, island), island=inside, node=inside,
                 network=network)  # fmt: skip


def _train(raw: Raw, sequence: int, precision: Precision) -> TrainSpec:
    kind = (raw.get("kind") or "pretrain").lower()
    method = (
        "qlora" if "qlora" in kind or "nf4" in (raw.get("precision") or "") else "lora" if "lora" in kind else "full"
    )
    rank = whole(raw, "lora_rank", 16)
    note = (raw.get("note") or "").lower() if whole(raw, "world", 1) == 1 else ""
    return TrainSpec(
        optimizer=read_optimizer(raw, method),
        # torchtune's recipe for one GPU with paged states steps each weight in the backward pass.
        optimizer_in_backward=method == "full" and ("optimizer in backward" in note or "paged" in note),
        method=method, sequence_length=sequence, precision=precision, lora_rank=rank,  # type: ignore[arg-type]
        lora_targets=("q_proj", "k_proj", "v_proj"),
    )  # fmt: skip


def _tokens_of_note(raw: Raw) -> float | None:
    match = re.search(r"batch size per DP (\d+)", raw.get("note") or "")
    return float(match.group(1)) if match else None


def read_seconds(raw: Raw, model: ModelSpec, world: int, sequence: int, batch: int) -> tuple[float | None, bool]:
    """Seconds of one step of `batch` sequences, and whether they were published as time or throughput."""
    given = number(raw, "step_time_s") or number(raw, "step_time_s_derived")
    published = number(raw, "gbs")
    if given and published:
        return given * batch / published, True
    if given:
        return given, True
    tokens = number(raw, "tokens_s_gpu") or number(raw, "tokens_s_gpu_derived")
    if tokens:
        return batch * sequence / (tokens * world), True
    samples = number(raw, "samples_s")
    if samples:
        return batch / samples, True
    flops = number(raw, "tflops_gpu")
    if not flops:
        return None, False
    kind = raw.get("flops_kind") or "model"
    count = weights(model)
    matmul = count.layers * (count.attention_per_layer + count.active_mlp_per_layer) + model.vocab * model.hidden
    attention = 12.0 * model.layers * model.heads * model.head_dim * sequence
    if "causal" in kind:
        attention /= 2.0
    per_token = 6.0 * matmul + attention
    if "hardware" in kind:
        per_token *= 4.0 / 3.0
    return per_token * batch * sequence / (flops * 1e12 * world), False


_DOUBT = re.compile(r"unclear|unpadded|mislabel|impossible|not speed|columns swapped|typo|unpacked", re.I)


def doubtful(raw: Raw) -> bool:
    """The row's own note or columns say that its time does not belong to its settings."""
    if _DOUBT.search(raw.get("note") or "") or "(sic)" in (raw.get("sharding") or ""):
        return True
    return not raw.get("mbs") and not raw.get("gbs") and bool(raw.get("samples_s"))


def too_fast(
    gpu: Gpu, model: ModelSpec, precision: Precision, seconds: float | None, layout: Layout, sequence: int
) -> bool:
    """The time would need more FLOP/s than the GPU's best multiplication: it belongs to other settings."""
    if not seconds:
        return False
    count = weights(model)
    active = count.layers * (count.attention_per_layer + count.active_mlp_per_layer)
    flops = 4.0 * active * layout.global_batch * sequence  # forward and input gradients: the least any method does
    best = max(gpu.matmul_bf16, gpu.matmul_fp8 or 0.0 if precision == "fp8" else 0.0)
    return flops / (seconds * layout.world_size) > best


def read_sequence(raw: Raw, batch: int | None) -> int:
    """The given length, or the mean one that throughput and step time imply."""
    given = number(raw, "seq")
    if given:
        return int(given)
    tokens, seconds = number(raw, "tokens_s_gpu"), number(raw, "step_time_s")
    if tokens and seconds and batch:
        return max(1, round(tokens * whole(raw, "world", 1) * seconds / batch))
    raise SkipRowError("seq is not given")


def read_row(raw: Raw) -> Row:
    """Build the question; `SkipRowError` says why it cannot be asked."""
    gpu = gpu_named(raw.get("gpu"))
    if gpu is None:
        raise SkipRowError(f"GPU {raw.get('gpu')!r} is in no table")
    stack = stack_matching(raw.get("framework") or "", gpu)
    model = read_model(raw)
    world = whole(raw, "world", whole(raw, "nodes", 1) * whole(raw, "gpus_per_node", 1))
    sequence = read_sequence(raw, int(number(raw, "gbs") or 0) or None)
    tp, pp, cp = whole(raw, "tp", 1), whole(raw, "pp", 1), whole(raw, "cp", 1)
    if world % (tp * pp * cp):
        raise SkipRowError(f"tp {tp} x pp {pp} x cp {cp} does not divide {world} GPUs")
    dp = world // (tp * pp * cp)
    micro = whole(raw, "mbs", 1)
    batch = whole(raw, "gbs", micro * dp * whole(raw, "grad_accum", 1))
    if not raw.get("mbs"):
        per_rank = max(1, batch // dp)
        micro = per_rank // whole(raw, "grad_accum", per_rank) or 1
    accumulation = max(1, round(batch / (micro * dp)))
    precision = read_precision(raw)
    sharding, shard = read_sharding(raw, stack, dp)
    ep = whole(raw, "ep", 1)
    ep = ep if model.experts and model.experts % ep == 0 and (dp * cp) % ep == 0 else 1
    virtual = whole(raw, "vpp", 1) if pp > 1 else 1
    sp = (raw.get("seq_parallel") or "").lower()
    checkpointing = read_checkpointing(raw)
    mfu, hfu = number(raw, "mfu_pct"), number(raw, "hfu_pct")
    share = None
    if checkpointing == "selective" and mfu and hfu and hfu >= mfu and "megatron" not in stack.engine.name:
        share = min(1.0, 3.0 * (hfu / mfu - 1.0))
    try:
        layout = Layout(
            world_size=world, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep,
            sharding=sharding,
            sequence_parallel=tp > 1 and (sp == "yes" or (sp != "no" and stack.sequence_parallel)),
            schedule="interleaved" if virtual > 1 else "1f1b", virtual_stages=virtual, micro_batch=micro,
            gradient_accumulation=accumulation, checkpointing=checkpointing or "none", precision=precision,
            offload=read_offload(raw),
            compile=(raw.get("compile") or "").lower() == "yes" or (stack.engine.compile and not raw.get("compile")),
            fused_cross_entropy=fused_loss(raw, stack),
        )  # fmt: skip
    except LayoutError as error:
        raise SkipRowError(str(error)) from error
    seconds, exact = read_seconds(raw, model, world, sequence, layout.global_batch)
    memory, memory_kind = read_memory(raw)
    return Row(
        row_id=raw.get("row_id") or "?", source=raw.get("source") or "?", framework=raw.get("framework") or "?",
        gpu=gpu,
        precision=precision, model=model, train=_train(raw, sequence, precision), layout=layout,
        links=read_links(raw, gpu, world), stack=stack, recompute_share=share, seconds=seconds, exact_seconds=exact,
        memory_bytes=memory, memory_kind=memory_kind, out_of_memory=(raw.get("mem_gib") or "") == "OOM", raw=raw,
        doubtful=doubtful(raw) or too_fast(gpu, model, precision, seconds, layout, sequence),
    )  # fmt: skip


def read_rows(path: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows that can be asked, and how many could not, by reason."""
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    added = ""  # in a table that adds one technique per row, what the rows above have added
    with path.open(newline="", encoding="utf-8") as file:
        for raw in csv.DictReader(file):
            try:
                given = {k: (v or "").strip() for k, v in raw.items() if isinstance(k, str)}
                added = f"{added} {given.get('note', '')}".strip() if given.get("note", "").startswith("+") else ""
                given["note"] = added or given.get("note", "")
                rows.append(read_row(given))
            except SkipRowError as why:
                reason = re.sub(r"\b\d+\b", "N", str(why))
                skipped[reason] = skipped.get(reason, 0) + 1
    return rows, skipped
