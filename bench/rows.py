"""Read published training runs: from the columns of the corpus to a question to the planner.

Columns: those of published.csv (one training run in each row; an empty cell is not published). Values that a column
lacks are searched in the note and in the names of framework and system. This module has all rules that fill a gap, and
`Row.assumed` names the settings for which the row has no text at all. A row that cannot be read is an `Unread` with a
reason, and counts as an error of this reader ("not placed").
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busbw_rows import INFINIBAND_GBPS, is_of_a_rack
from shapes import ShapeError, is_mixture, shape_of
from stacks import Stack, stack_matching

from contracts.layout import Checkpointing, Layout, LayoutError, Offload, Precision, Sharding
from contracts.tables import read_table
from hardware.gpus import Gpu, find_gpu
from hardware.machines import Known, catalogue
from hardware.units import GIGA
from planner.forecast.links import (
    ASSUMED_PCIE_BYTES_PER_SECOND,
    NETWORK_SHARE,
    Links,
    Speed,
    unknown_network,
)
from planner.forecast.specs import ModelSpec, TrainSpec, weights
from topology.expected import FACTORS

Raw = dict[str, str]


class UnreadError(Exception):
    """A row that cannot be read; the message names what is missing or not understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A row that could not be read."""

    source: str
    why: str
    timed: bool  # it has a time, which was therefore not forecast
    mixture: bool  # its model is a mixture of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run as a question to the planner, and the published answers."""

    row_id: str
    source: str
    framework: str
    gpu: Gpu
    precisions: tuple[Precision, ...]  # several if the row does not state one
    four_bits: bool  # its matrix products are in FP4, for which no table has rates
    model: ModelSpec
    train: TrainSpec
    layout: Layout
    links: Links
    stack: Stack
    checkpointing: Checkpointing | None  # None: not published
    assumed: tuple[str, ...]  # settings without any text: "precision", "layout", "model", "network"
    seconds: float | None  # time of one step with `layout`
    memory_bytes: float | None
    memory_kind: str  # "tensors", "reserved", "device"
    first_stage: bool  # the memory is a log line of rank 0
    out_of_memory: bool
    set_aside: str  # reason why its time is not scored; empty if it is scored
    raw: Raw

    @property
    def name(self) -> str:
        """A name that is unique among all files."""
        return f"{self.source} {self.row_id}"

    @property
    def precision(self) -> Precision:
        """The most likely precision."""
        return self.precisions[0]

    @property
    def assumed_much(self) -> bool:
        """Whether assumed settings decide its time. Such a row is scored, but nothing is fitted to it."""
        return bool({"model", "precision", "layout"} & set(self.assumed))


def number(raw: Raw, name: str) -> float | None:
    """Read a column as a number, also "8,192", "16k" and "~3.5"; None if it is empty or has other text."""
    match = re.fullmatch(r"[~≈<>]?\s*(\d[\d,]*\.?\d*(?:e[+-]?\d+)?)\s*([km])?", (raw.get(name) or "").strip().lower())
    if not match:
        return None
    value = float(match[1].replace(",", ""))
    if match[2]:
        value *= 1024.0 if name == "seq" and match[2] == "k" else {"k": 1e3, "m": 1e6}[match[2]]
    return value


def integer(raw: Raw, name: str, default: int | None = None) -> int:
    """Read a column as an integer of at least 1."""
    value = number(raw, name)
    if value is None or value < 1 or value != int(value):
        if default is None:
            raise UnreadError(f"{name} is not given")
        return default
    return int(value)


def text_of(raw: Raw, *names: str) -> str:
    """Join columns to one text in lower case."""
    return " ; ".join(raw.get(name) or "" for name in names).lower()


# --- Numbers in a note that belong to a column: "TP=4, PP=8, VP=12, MBS=1, GA=64", "EP8".

_TABLE = read_table(__file__, "rows.toml")


def with_words_of_note(raw: Raw) -> Raw:
    """Return the row with empty columns filled from its note."""
    note = text_of(raw, "note")
    filled = dict(raw)
    for name, word in _TABLE["note"].items():
        if not raw.get(name):
            match = re.search(rf"(?<![a-z0-9]){word}\s*[=:]?\s*(\d+k?)\b", note)
            if match:
                filled[name] = match[1]
    return filled


# --- The parts of a question.


def read_gpu(raw: Raw) -> Gpu:
    """Find the GPU by its name or its machine's: "8x H100-SXM5-80GB", "DGX A100", "GB200 NVL72", "p5.48xlarge"."""
    for name in ("gpu", "system", "gpus"):
        text = raw.get(name) or ""
        machine = _machine(text)
        for named in (text, text.replace("_", " "), machine.gpu if machine else None):
            if (gpu := find_gpu(named)) is not None:
                return gpu
    raise UnreadError(f"GPU {raw.get('gpu') or raw.get('system') or ''!r} is unknown")


def _machine(text: str) -> Known | None:
    """Return the machine of the catalogue whose name is in the text. Aliases that are names of GPUs do not count."""
    lower = text.lower().replace(" ", "-").replace("_", "-")
    for row in catalogue():
        names = [row.name.lower().replace("_", "-"), *(a for a in row.aliases if "-" in a or not find_gpu(a))]
        if any(re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", lower) for name in names):
            return row
    return None


def read_per_node(raw: Raw, gpu: Gpu, world: int) -> int:
    """Return the GPUs of one host: the column, "8x" before a name, those of the machine, or 8 (racks: 4)."""
    per_node = number(raw, "gpus_per_node")
    if per_node:
        return min(world, int(per_node))
    text = text_of(raw, "gpu", "system")
    match = re.search(r"(?<![a-z0-9.])(\d{1,2})\s?x\s?(?=[a-z])", text)
    if match:
        return min(world, int(match[1]))
    machine = _machine(raw.get("system") or "")
    return min(world, machine.gpus if machine else 4 if is_of_a_rack(gpu) else 8)


def _match(table: str, text: str) -> Any:
    """Return the first name of a table in rows.toml whose pattern is in the text; None if there is none."""
    return next((name for name, pattern in _TABLE[table].items() if re.search(pattern, text)), None)


_FOUR_BITS = re.compile(r"(?<!b)(?:nv|mx)?fp4")


def read_precisions(raw: Raw, gpu: Gpu, stack: Stack) -> tuple[tuple[Precision, ...], bool]:
    """Return the possible precisions of matrix products, most likely first, and whether the row states one.

    If it states none and both GPU and stack support FP8, it is bf16 or fp8.
    """
    for text in (text_of(raw, "precision"), text_of(raw, "note", "model")):
        if _FOUR_BITS.search(text):
            return (("fp8",) if gpu.matmul_fp8 else ("bf16",)), False
        precision = _match("precision", text)
        if precision == "fp8":
            # "FP8-CS (FP8-MX)" is in two rows of a table. Their notes show which row has which precision.
            text = text.split("(")["(" in text and "alternative #2" in text_of(raw, "note")]
            return ("mxfp8" if re.search(r"mxfp8|fp8-mx", text) and gpu.matmul_fp8 else "fp8",), True
        if precision:
            return ("fp16" if precision == "bf16" and not gpu.bf16 else precision,), True
    if not gpu.bf16:
        return ("fp16",), False
    return ("bf16", "fp8") if gpu.matmul_fp8 and (stack.engine.eight_bits or not stack.known) else ("bf16",), False


def read_sharding(raw: Raw, stack: Stack, dp: int, per_node: int, *, full: bool) -> tuple[Sharding, int]:
    """Return the kind of sharding, and the number of ranks of a shard group."""
    if dp == 1:
        return (stack.default_sharding if full and stack.default_sharding in ("zero1", "zero3") else "ddp"), 1
    shard_group = number(raw, "shard_group")
    group = int(shard_group) if shard_group and dp % int(shard_group) == 0 else dp
    for text in (text_of(raw, "sharding"), text_of(raw, "framework", "note", "system")):
        kind = _match("sharding", text)
        if kind == "hsdp":
            return "zero3", group if group < dp else math.gcd(dp, per_node)
        if kind == "zero23":
            return ("zero3" if full else "zero2"), dp
        if kind:
            return kind, {"zero3": group, "ddp": 1}.get(kind, dp)
    return (stack.default_sharding, dp) if stack.default_sharding != "ddp" else ("ddp", 1)


_CHECKPOINTING = r"(?:re-?comput\w*|(?:gradient|grad|activation|act)[-_ ]?checkpoint\w*|\bcheckpointing|\bac\b)"


def read_checkpointing(raw: Raw) -> Checkpointing | None:
    """Read the activation recomputation; None if neither column nor note states it."""
    text = text_of(raw, "act_recompute").strip()
    if text:
        if re.match(r"none|no\b|off|false|0\b|without|disabled", text):
            return "none"
        return "selective" if re.search(r"sel|\bop\b|core|partial|mlp|norm|moe", text) else "full"
    note = text_of(raw, "note", "framework")
    match = re.search(_CHECKPOINTING, note)
    if not match:
        return None
    around = note[max(0, match.start() - 24) : match.end() + 24]
    if re.search(rf"\b(no|without|w/o|non?e?|disabl\w*)\s+(\w+\s+)?{_CHECKPOINTING}", around) or re.search(
        rf"{_CHECKPOINTING}\s*[:=]?\s*(is\s+|was\s+)?(off|false|none|disabled)\b", around
    ):
        return "none"
    return "selective" if "selective" in around else "full"


def read_offload(raw: Raw) -> Offload:
    """Read what is offloaded to host memory."""
    text = text_of(raw, "offload")
    if not text:
        match = re.search(r"([\w+/ ]{0,30})\boffload\w*([\w+/ ]{0,20})", text_of(raw, "note", "sharding"))
        text = match[0] if match and not re.search(r"activation|\bno\b|without|w/o", match[0]) else ""
    if not text or re.match(r"(none|no|false|off)\b", text):
        return "none"
    return (
        "optimizer" if re.search(r"optim|adam", text) and not re.search(r"param|weight|full|\ball\b", text) else "all"
    )


def fused_loss(raw: Raw, stack: Stack) -> bool:
    """Whether the loss is computed in parts, so that the logits of all tokens are never in memory at once."""
    note = text_of(raw, "note")
    if re.search(r"(without|no|w/o) liger", text_of(raw, "mem_kind", "note")):
        return False
    if note.startswith("+") and "chunked" not in note:  # in tables that add one technique per row: not added yet
        return False
    return bool(re.search(r"liger|chunked|fused (linear )?cross|cut cross|unsloth", note)) or (
        stack.engine.fused_cross_entropy and stack.engine.name not in ("deepspeed", "trl")
    )


def read_optimizer(raw: Raw, method: str) -> str:
    """Return AdamW, or for a single GPU the optimizer that the row or its note names."""
    text = text_of(raw, "optimizer", "note")
    if method == "full" and integer(raw, "world", 1) == 1:
        if "paged" in text:
            return "paged_adamw8bit"
        if re.search(r"8[- ]?bit", text):
            return "adamw8bit"
    return "adamw"


def read_memory(raw: Raw, gpu: Gpu, world: int) -> tuple[float | None, str]:
    """Return the bytes on one GPU, and what they include: "tensors" (allocated), "reserved" or "device"."""
    value, kind = number(raw, "mem_gib"), text_of(raw, "mem_kind")
    if value is None or not raw.get("seq") or not raw.get("mbs") or "real length" in text_of(raw, "note"):
        return None, ""  # not comparable without the tokens of a micro-batch
    value *= 1e9 if re.match(r"gb\b", kind) else 1024.0**3
    if world > 1 and (
        re.search(r"total|sum (over|of)|all gpus", kind) or value > 1.05 * gpu.memory_bytes >= value / world
    ):
        value /= world
    framework = text_of(raw, "framework")
    allocated = "torchtune" in framework  # logs torch.cuda.max_memory_allocated
    if "reserved" not in kind and (allocated or re.search(r"model:|active|alloc|max over run", kind)):
        return value, "tensors"
    if re.search(r"smi|nvml|device", kind) or ("printed" in kind and "deepspeed" in framework):
        return value, "device"  # DeepSpeed prints no peak, so such tables have the values of nvidia-smi
    return value, "reserved"


_RATE = re.compile(
    r"(?:(\d{1,2})\s?x\s?)?((?:[a-z][\w-]*\s+){0,3}?)(\d{2,4})\s?(g(?:b|bit)(?:/s(?:ec)?|ps|it/s|e)?|gbe|g)\b"
)
# NCCL over the verbs interface of Omni-Path: a ring of 32 A100 on four nodes ran at 40.5 Gb/s over a port of 100 Gb/s
# (bigscience-workshop/bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt, NCCL 2.10.3).
OMNI_PATH_SHARE = 0.405


def read_network(raw: Raw, gpu: Gpu, per_node: int) -> tuple[Speed, bool]:
    """Return the network bandwidth of one node in one direction, and whether the row states the rate.

    If a row lists several networks, only the compute fabric counts, not those for management and storage.
    """
    in_bits = {name: re.sub(r"\d+\s*GB(/s|ps)?\b", "", raw.get(name) or "") for name in ("inter_link", "intra_link")}
    description = text_of(in_bits, "inter_link")
    if re.search(r"\d+\s?x?\s?\d*g\w*\s*ethernet|roce|infiniband", text_of(in_bits, "intra_link")) and (
        "nvl" not in text_of(raw, "intra_link")
    ):
        description = text_of(in_bits, "intra_link")  # the network is in the wrong column
    parts = [p for p in re.split(r"[,;]| and ", description) if not re.search(r"manage|storage|\bns\b|host net|oob", p)]
    fabric = [p for p in parts if re.search(r"compute|\bew\b|east|fabric|\bgpu net", p)]
    text = " ; ".join(fabric or parts)
    rdma = re.search(
        r"roce|rdma|infiniband|\bib\b|efa|connectx|cx-?\d|bf-?3|bluefield|omni|slingshot|mlx|[xnhe]dr\b", text
    )
    tcp = bool(re.search(r"\btcp\b|socket|ipoib|virtio|\bovn?\b|vxlan", f"{text} ; {text_of(raw, 'note', 'row_kind')}"))
    rate = number(raw, "inter_gbps_per_node") or _rate(text)
    slow = rate is not None and "ethernet" in text and rate < 100
    machine = _machine(raw.get("system") or "")
    if rate is None and machine:
        rate = machine.nics * machine.nic_gbps
        tcp = tcp or (machine.nic_kind == "ethernet" and not rdma)
    if (tcp and not re.search(r"tcpx", text)) or (slow and not rdma):
        if rate is None:
            return unknown_network("TCP"), False
        share, streams = FACTORS.sockets[1]
        carried = 1.0 / (1.0 / (share * rate / 8.0 * GIGA) + 1.0 / streams)
        return Speed(bytes_per_second=carried, how="derived", link="TCP"), True
    # Clusters for training have one port of 200 Gb/s (Ampere) or 400 Gb/s (Hopper and later) per GPU.
    port = 50.0 if (gpu.compute_capability or (0, 0)) >= (9, 0) else 25.0
    gbytes = rate / 8.0 if rate else port * per_node
    share = OMNI_PATH_SHARE if "omni" in text else NETWORK_SHARE
    speed = Speed(bytes_per_second=gbytes * GIGA * share, how="derived" if rate else "assumed",
                  link=raw.get("inter_link") or "network")  # fmt: skip
    return speed, rate is not None


def _rate(text: str) -> float | None:
    """Return the Gb/s of all ports in a text: "8x ConnectX-7 IB NDR 400Gb/s", "Omni-Path 4x100Gb", "4x HDR"."""
    rates = [float(match[1] or 1) * float(match[3]) for match in _RATE.finditer(text)]
    if not rates and (found := re.search(r"(?:(\d{1,2})\s?x\s?)?\b([xnhef]dr)\b", text)):
        rates = [float(found[1] or 1) * INFINIBAND_GBPS[found[2]]]
    return max(rates, default=None)


def read_links(raw: Raw, gpu: Gpu, world: int) -> tuple[Links, bool]:
    """Return the bandwidths (GPU links from hardware/, network from the row), and whether the row states the rate."""
    per_node = read_per_node(raw, gpu, world)
    nodes = max(1, -(-world // per_node))
    intra = text_of(raw, "intra_link")
    nvlink = gpu.interconnect != "PCIe" and not ("pcie" in intra and "nvl" not in intra)
    busbw = gpu.busbw_of(per_node)
    if not nvlink and gpu.interconnect != "PCIe":
        busbw = None
    # As in planner.forecast.links: PCIe differs between machines with the same GPU, so its bandwidth is assumed.
    how = "derived" if nvlink and busbw else "assumed"
    inside = Speed(bytes_per_second=busbw or ASSUMED_PCIE_BYTES_PER_SECOND, how=how,
                   link=gpu.interconnect if nvlink else "PCIe")  # fmt: skip
    network, is_known = read_network(raw, gpu, per_node) if nodes > 1 else (None, True)
    island = per_node if nvlink else 1
    if re.search(r"domain of 72|nvl-?72", f"{intra} ; {text_of(raw, 'gpu', 'system')}") or is_of_a_rack(gpu):
        island = min(world, 64)  # NVL72: 64 is the largest power of two up to 72
    links = Links(ranks_per_node=per_node, nodes=nodes, island_size=max(1, island), island=inside, node=inside,
                  network=network)  # fmt: skip
    return links, is_known


def read_method(raw: Raw) -> str:
    """Return the method: full, LoRA, or QLoRA (LoRA with base weights in 4 bits)."""
    kind, precision = text_of(raw, "kind"), text_of(raw, "precision")
    if re.search(r"q-?lora", kind) or ("lora" in kind and re.search(r"nf4|int4|4[- ]?bit|gptq", precision)):
        return "qlora"
    return "lora" if re.search(r"lora|peft|adapter", kind) else "full"


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read_train(raw: Raw, stack: Stack, sequence: int, precision: Precision) -> TrainSpec:
    """Read method, sequence length and optimizer."""
    method, note = read_method(raw), text_of(raw, "note")
    projections = tuple(p for p in _PROJECTIONS if re.search(rf"\b{p}\b", note))
    if re.search(r"all[- ]linear|attention and mlp|attn ?\+ ?mlp|all modules", note):
        projections = _PROJECTIONS
    # MLPerf's benchmark adapts qkv_proj and o_proj, whatever the framework.
    targets = _PROJECTIONS[:4] if "mlperf" in text_of(raw, "source") else stack.lora_targets
    single_note = note if integer(raw, "world", 1) == 1 else ""
    return TrainSpec(
        optimizer=read_optimizer(raw, method),
        # torchtune's recipe for one GPU with paged states updates each weight in the backward pass.
        optimizer_in_backward=method == "full" and ("optimizer in backward" in single_note or "paged" in single_note),
        method=method, sequence_length=sequence, precision=precision,  # type: ignore[arg-type]
        attention="flash" if re.search(r"flash[-_ ]?att\w*[-_ ]?2|\bfa2\b", note) else "sdpa",
        lora_rank=integer(raw, "lora_rank", 16), lora_targets=projections or targets,
        saved_modules=("embed_tokens", "lm_head") if method != "full" and re.search(r"\(emb\w*\)", note) else (),
    )  # fmt: skip


def read_seconds(raw: Raw, model: ModelSpec, world: int, sequence: int, batch: int) -> float | None:
    """Return the seconds of one step of `batch` sequences, from the published time, throughput or FLOP/s."""
    step_time = number(raw, "step_time_s") or number(raw, "step_time_s_derived")
    published = number(raw, "gbs")
    if step_time:
        return step_time * batch / published if published else step_time
    tokens = number(raw, "tokens_s_gpu") or number(raw, "tokens_s_gpu_derived")
    if tokens:
        return batch * sequence / (tokens * world)
    samples = number(raw, "samples_s")
    if samples:
        return batch / samples
    flops = number(raw, "tflops_gpu")
    if not flops:
        return None
    kind = raw.get("flops_kind") or "model"
    count = weights(model)
    matmul = count.layers * (count.mixer_per_layer + count.active_mlp_per_layer) + model.vocab * model.hidden
    attention = 12.0 * model.layers * model.heads * model.head_dim * sequence
    if "causal" in kind:
        attention /= 2.0
    per_token = 6.0 * matmul + attention
    if "hardware" in kind:
        per_token *= 4.0 / 3.0
    return per_token * batch * sequence / (flops * 1e12 * world)


_DOUBT = re.compile(
    r"unclear|unpadded|mislabel|impossible|not speed|columns swapped|unpacked|suspect|inconsistent|disagree", re.I
)


def doubt(raw: Raw) -> str:
    """Return the reason why the time of a row may not belong to its settings; empty if there is none."""
    if _DOUBT.search(raw.get("note") or "") or "(sic)" in (raw.get("sharding") or ""):
        return "its own note doubts the time or the settings"
    if not raw.get("mbs") and not raw.get("gbs") and raw.get("samples_s"):
        return "samples per second of an unknown batch"
    return ""


def read_sequence(raw: Raw, batch: int | None) -> int:
    """Return the sequence length, or the mean length that throughput and step time imply."""
    length = number(raw, "seq")
    if length:
        return int(length)
    tokens, seconds = number(raw, "tokens_s_gpu"), number(raw, "step_time_s")
    if tokens and seconds and batch:
        return max(1, round(tokens * integer(raw, "world", 1) * seconds / batch))
    raise UnreadError("seq is not given")


def read_world(raw: Raw) -> int:
    """Return the number of GPUs of the job."""
    world = number(raw, "world")
    if world:
        return int(world)
    nodes, per_node = number(raw, "nodes"), number(raw, "gpus_per_node")
    if nodes and per_node:
        return int(nodes * per_node)
    degrees = [number(raw, name) for name in ("tp", "pp", "cp", "dp")]
    if degrees[-1]:
        return int(math.prod(d or 1 for d in degrees))
    text = text_of(raw, "gpu", "system")
    match = re.match(r"(\d+)\s?x\s?[a-z]", text)
    machine = _machine(raw.get("system") or "")
    if match:
        return int(match[1]) * int(nodes or 1)
    if machine and nodes:
        return machine.gpus * int(nodes)
    raise UnreadError("world is not given")


def read_layout(raw: Raw, stack: Stack, model: ModelSpec, world: int, per_node: int, precision: Precision) -> Layout:
    """Read degrees and batch sizes. The defaults of the stack fill gaps."""
    tp, pp, cp = integer(raw, "tp", 1), integer(raw, "pp", 1), integer(raw, "cp", 1)
    if world % (tp * pp * cp):
        raise UnreadError(f"tp {tp} x pp {pp} x cp {cp} does not divide {world} GPUs")
    dp = world // (tp * pp * cp)
    micro = integer(raw, "mbs", 1)
    batch = integer(raw, "gbs", micro * dp * integer(raw, "grad_accum", 1))
    if not raw.get("mbs"):
        per_rank = max(1, batch // dp)
        micro = per_rank // integer(raw, "grad_accum", per_rank) or 1
    accumulation = max(1, round(batch / (micro * dp)))
    sharding, shard = read_sharding(raw, stack, dp, per_node, full=read_method(raw) == "full")
    ep = math.gcd(integer(raw, "ep", 1), tp * cp * dp)
    ep = ep if model.experts and model.experts % ep == 0 else 1
    virtual = integer(raw, "vpp", 1) if pp > 1 else 1
    sp, compiled = text_of(raw, "seq_parallel"), text_of(raw, "compile")
    return Layout(
        world_size=world, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep,
        sharding=sharding,
        sequence_parallel=tp > 1 and (sp in ("yes", "true", "1") or (sp not in ("no", "false", "0")
                                                                     and stack.sequence_parallel)),
        schedule="interleaved" if virtual > 1 else "1f1b", virtual_stages=virtual, micro_batch=micro,
        gradient_accumulation=accumulation, checkpointing=read_checkpointing(raw) or "none", precision=precision,
        offload=read_offload(raw),
        compile=compiled in ("yes", "true", "1") or "torch.compile" in text_of(raw, "note")
        or (stack.engine.compile and not compiled),
        fused_cross_entropy=fused_loss(raw, stack),
    )  # fmt: skip


def read_row(columns: Raw) -> Row:
    """Build the row from its columns. Raises UnreadError, ShapeError or LayoutError if they do not suffice."""
    raw = with_words_of_note(columns)
    gpu = read_gpu(raw)
    stack = stack_matching(raw, gpu)
    model, sure = shape_of(raw, number)
    world = read_world(raw)
    sequence = read_sequence(raw, int(number(raw, "gbs") or 0) or None)
    precisions, stated = read_precisions(raw, gpu, stack)
    links, is_known = read_links(raw, gpu, world)
    layout = read_layout(raw, stack, model, world, links.ranks_per_node, precisions[0])
    # No degree is published, and the stack does not shard a model by default: the layout is not known.
    unpublished = not any(raw.get(name) for name in ("tp", "pp", "dp", "sharding"))
    unknown = unpublished and world > 1 and stack.default_sharding != "zero3"
    gaps = {"model": not sure, "precision": not stated, "network": not is_known, "layout": unknown}
    checkpointing = read_checkpointing(raw)
    seconds = read_seconds(raw, model, world, sequence, layout.global_batch)
    memory, memory_kind = read_memory(raw, gpu, world)
    printed = text_of(raw, "mem_kind")
    return Row(
        row_id=raw.get("row_id") or "?", source=raw.get("source") or "?", framework=raw.get("framework") or "?",
        gpu=gpu, precisions=precisions, four_bits=bool(_FOUR_BITS.search(text_of(raw, "precision"))),
         model=model, train=read_train(raw, stack, sequence, precisions[0]),
        layout=layout, links=links, stack=stack, checkpointing=checkpointing,
        assumed=tuple(name for name, gap in gaps.items() if gap),
        seconds=seconds, memory_bytes=memory, memory_kind=memory_kind,
        first_stage="as printed" in printed and not re.search(r"max|last|total|worst|peak", printed),
        out_of_memory=bool(re.search(r"\boom\b|out of memory", text_of(raw, "mem_gib"))
                           or (not seconds and re.search(r"\boom\b|out of memory", text_of(raw, "note")))),
        set_aside=doubt(raw), raw=raw,
    )  # fmt: skip


_TIMES = ("step_time_s", "step_time_s_derived", "tokens_s_gpu", "tokens_s_gpu_derived", "samples_s", "tflops_gpu")


def read_rows(paths: Iterable[Path]) -> tuple[list[Row], list[Unread]]:
    """Read the rows of several files. Return the rows, and those that could not be read with their reasons."""
    rows: list[Row] = []
    unread: list[Unread] = []
    for path in paths:
        added = ""  # techniques of the rows above, in a table that adds one technique per row
        with path.open(newline="", encoding="utf-8") as file:
            for raw in csv.DictReader(file):
                columns = {k: (v or "").strip() for k, v in raw.items() if isinstance(k, str)}
                added = f"{added} {columns.get('note', '')}".strip() if columns.get("note", "").startswith("+") else ""
                columns["note"] = added or columns.get("note", "")
                try:
                    rows.append(read_row(columns))
                except (UnreadError, ShapeError, LayoutError) as error:
                    unread.append(Unread(
                        source=columns.get("source") or "?", why=str(error),
                        timed=any(number(columns, name) for name in _TIMES), mixture=is_mixture(columns),
                    ))  # fmt: skip
    return rows, unread
