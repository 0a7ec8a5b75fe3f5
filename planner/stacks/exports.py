"""Layouts in the configuration formats of the training stacks.

Surfaces: contracts.job_config (names in the YAML of the fine-tune job); accelerate 1.15 ClusterConfig,
FullyShardedDataParallelPlugin (FSDP2) and ParallelismConfig; transformers 5 TrainingArguments; DeepSpeed's JSON through
transformers; torchtitan's ParallelDims and config (sections training, parallelism, activation_checkpoint, compile);
Megatron-LM megatron/training/arguments.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from contracts.layout import EIGHT_BITS, Layout
from planner.advice import ExportError, ExportRequest, render
from planner.forecast.models import hub_id
from planner.rules import engine_lacks
from planner.stacks import ENGINES, TOPOFLIGHT, is_sharded, is_wrapped


def _refuse(framework: str, refusals: Mapping[str, object]) -> None:
    """Raise ExportError with all reasons that apply, if there are any."""
    if reasons := [reason for reason, holds in refusals.items() if holds]:
        raise ExportError(f"{framework} cannot run this layout: {'; '.join(reasons)}")


def _render(name: str, request: ExportRequest, **values: Any) -> str:
    """Render a template with the request's layout, model and train."""
    return render(name, request=request, layout=request.layout, model=request.model, train=request.train, **values)


def _render_yaml(name: str, request: ExportRequest, **values: Any) -> str:
    """Render a YAML template, and format the result with PyYAML."""
    import yaml

    return yaml.safe_dump(yaml.safe_load(_render(name, request, **values)), sort_keys=False)


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Layout)}
# Have other names in the job's YAML, or follow from the number of started ranks.
_NAMED = ("micro_batch", "gradient_accumulation", "fused_cross_entropy", "compile", "world_size")


def finetune_yaml(request: ExportRequest) -> str:
    """Export the job's YAML; the user adds data set and output folder."""
    layout, train, name = request.layout, request.train, request.model.name
    broken = engine_lacks(TOPOFLIGHT, request.model, train, layout, has_gpu=request.on_gpu)
    _refuse("the fine-tune job", {broken: True} if broken else {})
    members = {n: v for n, v in dataclasses.asdict(layout).items() if n not in _NAMED and v != _DEFAULTS[n]}
    members |= {"precision": layout.precision, "sharding": layout.sharding, "dp_shard": layout.dp_shard}
    hub = "random:tiny-llama" if name == "tiny-llama" else hub_id(name) or name
    return _render_yaml("finetune.yaml", request, model_name=hub, members=members)


def _list_refusals(request: ExportRequest) -> dict[str, bool]:
    layout = request.layout
    return {
        f"PP={layout.pp}: accelerate has no pipeline parallelism for training": layout.pp > 1,
        f"EP={layout.ep}: accelerate has no expert parallelism": layout.ep > 1,
        f"{layout.sharding}: FSDP2 shards weights too; use the deepspeed format":
            layout.sharding in ("zero1", "zero2") and layout.dp_shard > 1,
        "TP or CP with replication and no sharding: ParallelismConfig refuses it":
            (layout.tp > 1 or layout.cp > 1) and layout.dp_replicate > 1 and layout.dp_shard == 1,
        "offload=optimizer: FSDP2 offloads weights, gradients and optimizer together": layout.offload == "optimizer",
        f"{layout.precision} needs a recipe (te, ao or msamp) that this export does not choose":
            layout.precision in EIGHT_BITS,
        "FSDP without a GPU: accelerate silently runs DDP there": not request.on_gpu and is_sharded(layout),
    }  # fmt: skip


def _get_dtype(request: ExportRequest) -> str:
    train, precision = request.train, request.layout.precision
    if train.dtype == "float32" or (train.method == "full" and precision == "fp16"):
        return "float32"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")


def accelerate_yaml(request: ExportRequest) -> str:
    """Export accelerate's default_config.yaml for one machine; machine_rank differs per machine."""
    _refuse("accelerate", _list_refusals(request))
    return _render_yaml("accelerate.yaml", request, wrapped=is_wrapped(request.layout))


def trl_yaml(request: ExportRequest) -> str:
    """Export arguments for TRL's SFT script; launch it with the accelerate file if not only FSDP is used."""
    _refuse("TRL", _list_refusals(request))
    name = hub_id(request.model.name) or request.model.name
    sharded = is_sharded(request.layout)
    return _render_yaml("trl.yaml", request, model_name=name, dtype=_get_dtype(request), sharded=sharded)


def deepspeed_json(request: ExportRequest) -> str:
    """Export DeepSpeed's JSON; batch sizes are "auto", so that transformers inserts its own arguments."""
    layout = request.layout
    degrees = (("TP", layout.tp), ("PP", layout.pp), ("CP", layout.cp), ("EP", layout.ep))
    _refuse("DeepSpeed", {
        **{f"{word}={degree}: ZeRO through transformers is data parallelism only": degree > 1
           for word, degree in degrees},
        f"HSDP {layout.dp_replicate} x {layout.dp_shard}: ZeRO shards over all ranks":
            layout.dp_replicate > 1 and layout.dp_shard > 1,
        f"{layout.precision} is not among its precisions": layout.precision in EIGHT_BITS,
        "reshard_after_forward=false: ZeRO-3 releases weights by its reuse distance":
            layout.sharding == "zero3" and not layout.reshard_after_forward and layout.dp_shard > 1,
    })  # fmt: skip
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[layout.sharding] if layout.dp_shard > 1 else 0
    return _render("deepspeed.json", request, stage=stage)


_MODELS = {"llama": "llama3", "qwen3": "qwen3"}


def torchtitan_toml(request: ExportRequest) -> str:
    """Export the configuration; the user adds tokenizer, data set and checkpoints."""
    layout, train, model = request.layout, request.train, request.model
    _refuse("torchtitan", {
        f"{layout.sharding}: its FSDP2 shards weights, gradients and optimizer":
            layout.sharding in ("zero1", "zero2") and layout.dp_shard > 1,
        f"{train.method}: its LoRA is a converter in code, not in the TOML": train.method != "full",
        "offload=optimizer: it offloads weights, gradients and optimizer together": layout.offload == "optimizer",
        "TP without sequence parallelism: its plans always shard the sequence":
            layout.tp > 1 and not layout.sequence_parallel,
        f"{model.family} models: the TOML names {', '.join(sorted(_MODELS.values()))} only":
            model.family not in _MODELS,
        f"stages of {layout.stage_layers}: it makes first and last stage lighter, no other":
            len(set(layout.stage_layers)) > 2,
    })  # fmt: skip
    return _render("torchtitan.toml", request, names=_MODELS)


def megatron_arguments(request: ExportRequest) -> str:
    """Export one argument per line; the user adds data, tokenizer, learning rate and checkpoints."""
    layout, train, model = request.layout, request.train, request.model
    own_biases = ("gpt2", "qwen2", "qwen2_moe")
    _refuse("Megatron-LM", {
        f"{train.method}: it has no adapters (Megatron-Bridge has)": train.method != "full",
        f"{layout.family}: the distributed optimizer shards optimizer states only (zero1)":
            layout.sharding in ("zero2", "zero3") and layout.dp_shard > 1,
        "ZeRO-1 over part of the data-parallel ranks is not exported":
            layout.sharding == "zero1" and layout.dp_shard > 1 and layout.dp_replicate > 1,
        "offload=all: weights stay on the GPU": layout.offload == "all",
        "GPipe: its schedules are 1F1B and interleaved 1F1B": layout.schedule == "gpipe" and layout.pp > 1,
        "gemma2: alternating windows and soft-capped logits are not arguments of pretrain_gpt.py":
            model.family == "gemma2",
        "gemma: its MLPs are GeGLU, and what is exported is SwiGLU": model.family == "gemma",
        "biases of single matrices: Megatron has them in all, in none, or in queries, keys and values":
            model.mlp_bias or (model.attention_bias and model.family not in own_biases),
        "a gated shared expert, or experts in some of the layers only, are not exported":
            model.shared_expert_ffn or model.dense_layers,
    })  # fmt: skip
    return _render("megatron.txt", request, engine=ENGINES["megatron"])


# Format -> the stack that reads it, and the exporter.
_EXPORTERS: dict[str, tuple[str, Callable[[ExportRequest], str]]] = {
    "finetune": ("topoflight", finetune_yaml), "accelerate": ("trl", accelerate_yaml), "trl": ("trl", trl_yaml),
    "deepspeed": ("deepspeed", deepspeed_json), "torchtitan": ("torchtitan", torchtitan_toml),
    "megatron": ("megatron", megatron_arguments),
}  # fmt: skip
FORMATS = tuple(_EXPORTERS)


def export(name: str, request: ExportRequest) -> str:
    """Export the layout in one format."""
    if name not in FORMATS:
        raise ExportError(f"format={name!r}: allowed are {', '.join(FORMATS)}")
    stack, exporter = _EXPORTERS[name]
    try:
        return exporter(request)
    except ExportError as error:
        engine, train = ENGINES[stack], request.train
        if engine.name == train.engine:
            raise
        can = train.method in engine.methods and f"{train.method}:" not in str(error)
        method = "" if can else " --method full"
        raise ExportError(f"{error}. Add --engine {engine.name}{method} to get a layout that it can run") from None
