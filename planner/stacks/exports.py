"""Layouts in the configuration formats of the training stacks.

Surfaces: contracts.job_config (names in the YAML of the fine-tune job); accelerate 1.15 ClusterConfig,
FullyShardedDataParallelPlugin (FSDP2) and ParallelismConfig; transformers 5 TrainingArguments; DeepSpeed's JSON through
transformers; torchtitan's ParallelDims and config (sections training, parallelism, activation_checkpoint, compile);
Megatron-LM megatron/training/arguments.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from contracts.layout import Layout
from contracts.tables import read_table
from planner.advice import ExportError, ExportRequest, render
from planner.forecast.models import hub_id
from planner.rules import engine_lacks
from planner.stacks import ENGINES, TOPOFLIGHT, is_sharded, is_wrapped


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
    layout, name = request.layout, request.model.name
    members = {n: v for n, v in dataclasses.asdict(layout).items() if n not in _NAMED and v != _DEFAULTS[n]}
    members |= {"precision": layout.precision, "sharding": layout.sharding, "dp_shard": layout.dp_shard}
    hub = "random:tiny-llama" if name == "tiny-llama" else hub_id(name) or name
    return _render_yaml("finetune.yaml", request, model_name=hub, members=members)


def _get_dtype(request: ExportRequest) -> str:
    train, precision = request.train, request.layout.precision
    if train.dtype == "float32" or (train.method == "full" and precision == "fp16"):
        return "float32"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")


def accelerate_yaml(request: ExportRequest) -> str:
    """Export accelerate's default_config.yaml for one machine; machine_rank differs per machine."""
    return _render_yaml("accelerate.yaml", request, wrapped=is_wrapped(request.layout))


def trl_yaml(request: ExportRequest) -> str:
    """Export arguments for TRL's SFT script; launch it with the accelerate file if not only FSDP is used."""
    name = hub_id(request.model.name) or request.model.name
    sharded = is_sharded(request.layout)
    return _render_yaml("trl.yaml", request, model_name=name, dtype=_get_dtype(request), sharded=sharded)


def deepspeed_json(request: ExportRequest) -> str:
    """Export DeepSpeed's JSON; batch sizes are "auto", so that transformers inserts its own arguments."""
    layout = request.layout
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[layout.sharding] if layout.dp_shard > 1 else 0
    return _render("deepspeed.json", request, stage=stage)


def torchtitan_toml(request: ExportRequest) -> str:
    """Export the configuration; the user adds tokenizer, data set and checkpoints."""
    return _render("torchtitan.toml", request, names={"llama": "llama3", "qwen3": "qwen3"})


def megatron_arguments(request: ExportRequest) -> str:
    """Export one argument per line; the user adds data, tokenizer, learning rate and checkpoints."""
    return _render("megatron.txt", request, engine=ENGINES["megatron"])


class _Format(NamedTuple):
    stack: str  # engine of the stack that reads it
    framework: str  # its name in an error
    exporter: Callable[[ExportRequest], str]


_FORMATS = {
    "finetune": _Format("topoflight", "the fine-tune job", finetune_yaml),
    "accelerate": _Format("trl", "accelerate", accelerate_yaml),
    "trl": _Format("trl", "TRL", trl_yaml),
    "deepspeed": _Format("deepspeed", "DeepSpeed", deepspeed_json),
    "torchtitan": _Format("torchtitan", "torchtitan", torchtitan_toml),
    "megatron": _Format("megatron", "Megatron-LM", megatron_arguments),
}
FORMATS = tuple(_FORMATS)


def export(name: str, request: ExportRequest) -> str:
    """Export the layout in one format. Raises ExportError with all reasons why the framework cannot run it."""
    if name not in FORMATS:
        raise ExportError(f"format={name!r}: allowed are {', '.join(FORMATS)}")
    stack, framework, exporter = _FORMATS[name]
    if reasons := "; ".join(_list_refusals(name, request)):
        method = request.train.method
        change = "" if method in ENGINES[stack].methods and f"{method}:" not in reasons else " --method full"
        hint = (
            "" if stack == request.train.engine else f". Add --engine {stack}{change} to get a layout that it can run"
        )
        raise ExportError(f"{framework} cannot run this layout: {reasons}{hint}")
    return exporter(request)


def _list_refusals(name: str, request: ExportRequest) -> Iterator[str]:
    """Yield the reasons why a format's framework cannot run the layout: rows of refusals.toml, and more."""
    layout, model, train = request.layout, request.model, request.train
    if name == "finetune" and (lacks := engine_lacks(TOPOFLIGHT, model, train, layout, has_gpu=request.on_gpu)):
        yield lacks
    for row in read_table(__file__, "refusals.toml")["refusal"]:
        excepted = "unless" in row and _matches(request, row["unless"])
        if name in row["formats"] and _matches(request, row.get("when", {})) and not excepted:
            yield row["why"].format(layout=layout, model=model, train=train)
    if name == "torchtitan" and len(set(layout.stage_layers)) > 2:
        yield f"stages of {layout.stage_layers}: it makes first and last stage lighter, no other"


def _matches(request: ExportRequest, conditions: Mapping[str, Any]) -> bool:
    """Whether all attributes have the values of a row of refusals.toml."""
    return all(_is_among(attrgetter(name)(request), wanted) for name, wanted in conditions.items())


def _is_among(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return bool(value) is wanted
    if isinstance(value, str):
        return value in wanted
    least, most = wanted
    return bool(least <= value <= most)
