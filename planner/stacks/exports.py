"""Layouts in the configuration formats of the training stacks, and the layout that the fine-tune job reads back.

Surfaces: contracts.job_config (names in the YAML of the fine-tune job); accelerate 1.15 ClusterConfig,
FullyShardedDataParallelPlugin (FSDP2) and ParallelismConfig; transformers 5 TrainingArguments; DeepSpeed's JSON through
transformers; torchtitan 0.3 Trainer.Config; Megatron-LM megatron/training/arguments.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from contracts import trl
from contracts.job_config import ConfigError, JobPlan, parse_layout, resolve_layout
from contracts.layout import Layout
from contracts.tables import read_table
from planner.advice import ExportError, ExportRequest, render
from planner.forecast.engine import ZERO_STAGES
from planner.forecast.models import hub_id
from planner.stacks import ENGINES, TOPOFLIGHT, is_sharded, is_wrapped
from planner.stacks.limits import explain_lack

_TABLE = read_table(__file__, "exports.toml")
FORMATS = tuple(_TABLE["format"])
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Layout)}
# Have other names in the job's YAML, or follow from the number of started ranks.
_NAMED = ("micro_batch", "gradient_accumulation", "fused_cross_entropy", "compile", "world_size")


def _make_values(request: ExportRequest) -> dict[str, Any]:
    """Return the values of all templates."""
    layout, name = request.layout, request.model.name
    members = {n: v for n, v in dataclasses.asdict(layout).items() if n not in _NAMED and v != _DEFAULTS[n]}
    members |= {"precision": layout.precision, "sharding": layout.sharding, "dp_shard": layout.dp_shard}
    in_fp32 = request.train.dtype == "float32" or (request.train.method == "full" and layout.precision == "fp16")
    dtype = "float32" if in_fp32 else {"bf16": "bfloat16", "fp16": "float16"}.get(layout.precision, "float32")
    return {
        "request": request, "layout": layout, "model": request.model, "train": request.train, "members": members,
        "model_name": hub_id(name) or name, "dtype": dtype,
        "wrapped": is_wrapped(layout), "sharded": is_sharded(layout), "engine": ENGINES["megatron"],
        "stage": ZERO_STAGES[layout.sharding] if layout.dp_shard > 1 else 0,
    }  # fmt: skip


def export(name: str, request: ExportRequest) -> str:
    """Export the layout in one format. Raises ExportError with all reasons why the framework cannot run it."""
    if name not in FORMATS:
        raise ExportError(f"format={name!r}: allowed are {', '.join(FORMATS)}")
    stack, framework, template = (_TABLE["format"][name][key] for key in ("stack", "framework", "template"))
    if reasons := "; ".join(_list_refusals(name, request)):
        method = request.train.method
        change = "" if method in ENGINES[stack].methods and f"{method}:" not in reasons else " --method full"
        hint = (
            "" if stack == request.train.engine else f". Add --engine {stack}{change} to get a layout that it can run"
        )
        raise ExportError(f"{framework} cannot run this layout: {reasons}{hint}")
    text = render(template, **_make_values(request))
    if not template.endswith(".yaml"):
        return text
    import yaml

    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return comments + yaml.safe_dump(yaml.safe_load(text), sort_keys=False)  # in PyYAML's format


def make_trl_settings(layout: Layout) -> dict[str, Any]:
    """Return the settings of TRL's trainer that a layout decides, by name; the fine-tune job sets them too."""
    import yaml

    text = render("trl_layout.yaml", layout=layout, sharded=is_sharded(layout), four_bit=True)
    settings: dict[str, Any] = yaml.safe_load(text)
    return settings


def list_unwritten(request: ExportRequest) -> list[str]:
    """Say why formats of the layout's own engine cannot express it."""
    formats = (name for name in FORMATS if _TABLE["format"][name]["stack"] == request.train.engine)
    reasons = ((name, "; ".join(_list_refusals(name, request))) for name in formats)
    return [f"-o {name} cannot write this layout: {reason}" for name, reason in reasons if reason]


def _list_refusals(name: str, request: ExportRequest) -> Iterator[str]:
    """Yield the reasons why a format's framework cannot run the layout: rows of exports.toml, and more."""
    layout, model, train = request.layout, request.model, request.train
    if name == "finetune" and (lacks := explain_lack(TOPOFLIGHT, model, train, layout, has_gpu=request.on_gpu)):
        yield lacks
    for row in _TABLE["refusal"]:
        excepted = "unless" in row and _matches(request, row["unless"])
        if name in row["formats"] and _matches(request, row.get("when", {})) and not excepted:
            yield row["why"].format(layout=layout, model=model, train=train)


def _matches(request: ExportRequest, conditions: Mapping[str, Any]) -> bool:
    """Whether all attributes have the values of a row of exports.toml."""
    return all(_is_among(attrgetter(name)(request), condition) for name, condition in conditions.items())


def _is_among(value: Any, condition: Any) -> bool:
    if isinstance(condition, bool):
        return bool(value) is condition
    if isinstance(value, str):
        return value in condition
    return bool(condition[0] <= value <= condition[1])


def settle_layout(plan: JobPlan, world_size: int, has_gpu: bool, ranks_per_node: int | None = None) -> Layout:
    """Return the layout that the fine-tune job runs: the plan's, or the one that its settings, as exported, describe.

    Raises ConfigError if the two contradict each other.
    """
    settings, node = plan.config.layout if plan.config else {}, ranks_per_node or world_size
    if plan.layout is not None:
        if plan.layout.world_size != world_size:
            raise ConfigError(f"the plan's world_size is {plan.layout.world_size}, {world_size} ranks were started")
        for name, value in resolve_layout(settings, world_size, node).items():
            planned = getattr(plan.layout, name)
            if planned != value:
                raise ConfigError(f"the config says {trl.spelled(name, value)}, the plan {trl.spelled(name, planned)}")
        return plan.layout
    # without a plan one degree of data parallelism follows from the number of ranks: with hybrid_shard the replicas
    is_hybrid = {"sharding", "dp_shard"} <= settings.keys()
    spread = {"dp_shard": 1} if settings.get("sharding") == "ddp" else {} if is_hybrid else {"dp_replicate": 1}
    resolved = resolve_layout({"tp": 1, "pp": 1, "cp": 1, "sharding": "zero3", **spread, **settings}, world_size, node)
    resolved = {"precision": "bf16" if has_gpu else "fp32", "micro_batch": 8, **resolved, "world_size": world_size}
    if "sharding" not in settings.keys() & resolved.keys() and resolved["dp_shard"] == resolved["cp"] == 1:
        resolved["sharding"] = "ddp"
    if resolved["pp"] > 1:
        resolved.setdefault("gradient_accumulation", resolved["pp"] * resolved.get("virtual_stages", 1))
    return parse_layout(resolved, "layout")
