"""The planner's answer, the layout to run (the plan's, or what the settings ask for), and which ones cannot run.

Surface: plan.json `{"layout": {...}, "forecast": {...}, "environment": {...}}`; layout members: `contracts.layout`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts import bounded, trl
from contracts.job_config import MAX_FILE_BYTES, ConfigError, JobConfig, layout_asked
from contracts.layout import Layout, LayoutError
from contracts.plain import loads as plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the planner asked for: the layout, its forecast and the environment to run in."""

    layout: Layout
    forecast: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)  # settings that the forecast is for
    transport: dict[str, Any] = field(default_factory=dict)  # network: what NCCL is to take between hosts; gdrdma


def read_plan(path: Path) -> Plan:
    """Read plan.json as the planner's consumers write it."""
    try:
        data = plain(bounded.read(path, MAX_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan {path}: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("layout"), dict):
        raise ConfigError(f"plan {path}: must hold a mapping with a layout")
    forecast, environment = data.get("forecast") or {}, data.get("environment") or {}
    job, transport = data.get("job") or {}, data.get("transport") or {}
    if not all(isinstance(part, dict) for part in (forecast, environment, job, transport)):
        raise ConfigError(f"plan {path}: forecast, environment, job and transport must be mappings")
    return Plan(
        layout=parse_layout(data["layout"], f"plan {path}: layout"),
        forecast=forecast,
        environment={str(name): str(value) for name, value in environment.items()},
        job=job,
        transport=transport,
    )


def parse_layout(raw: dict[str, Any], where: str) -> Layout:
    """A Layout from a mapping; unknown members are an error that lists close names."""
    known = [one.name for one in dataclasses.fields(Layout)]
    for name in raw:
        if name not in known:
            raise ConfigError(f"{where}: unknown {name!r}{trl.hint(str(name), known)}")
    try:
        return Layout(**{**raw, "stage_layers": tuple(raw.get("stage_layers") or ())})
    except (LayoutError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def as_planned(config: JobConfig, said: Mapping[str, Any], plan: Plan) -> JobConfig:
    """The job that was planned: what the settings leave open is the plan's, what they say otherwise is refused.

    The forecast of time and memory is for that job. `said` holds the settings that were given.
    """
    names = {one.name for one in dataclasses.fields(JobConfig)}
    for name, planned in plan.job.items():
        if name not in names:
            raise ConfigError(f"plan: job.{name}: no such setting")
        if name in said and getattr(config, name) != planned:
            asked = getattr(config, name)
            raise ConfigError(f"{name}: the config says {asked!r}, the plan says {planned!r}; plan for this job anew")
    return dataclasses.replace(config, **plan.job)


def settle_layout(config: JobConfig, plan: Plan | None, world_size: int, has_gpu: bool) -> Layout:
    """The layout to run: the plan's, or the config's; a contradiction between the two is refused."""
    node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if plan is not None:
        if plan.layout.world_size != world_size:
            raise ConfigError(f"the plan's world_size is {plan.layout.world_size}, {world_size} ranks were started")
        for name, value in layout_asked(config.layout, world_size, node).items():
            planned = getattr(plan.layout, name)
            if planned != value:
                raise ConfigError(f"the config says {trl.spelled(name, value)}, the plan {trl.spelled(name, planned)}")
        return plan.layout
    wanted = layout_asked(config.layout, world_size, node)
    wanted = {"precision": "bf16" if has_gpu else "fp32", "micro_batch": 8, **wanted, "world_size": world_size}
    degrees = [wanted.get(name, 1) for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard")]
    rest = world_size // math.prod(degrees)
    spread = "dp_replicate" if wanted.get("sharding") == "ddp" else "dp_shard"
    if rest > 1 and spread not in wanted:
        wanted[spread] = rest
    if wanted.get("dp_shard", 1) == 1 and "sharding" not in wanted:
        wanted["sharding"] = "ddp"
    if wanted.get("pp", 1) > 1:
        wanted.setdefault("gradient_accumulation", wanted["pp"] * wanted.get("virtual_stages", 1))
    return parse_layout(wanted, "layout")


def refusals(layout: Layout, shape: Any, lora: bool) -> list[str]:
    """Why this job cannot run the layout on a model of this transformers config; empty where it can."""
    why = []
    if layout.cp > 1:
        why.append(f"cp={layout.cp}: context parallelism is not implemented")
    if layout.ep > 1:
        why.append(f"ep={layout.ep}: the models of this job have no experts")
    if layout.sharding == "zero1" and layout.dp_shard > 1:
        why.append("sharding='zero1': fully_shard always shards gradients and weights too; use zero2 or zero3")
    if layout.precision in ("fp16", "fp8"):
        why.append(f"precision={layout.precision!r}: fp32 and bf16 are implemented")
    if layout.offload == "optimizer":
        why.append("offload='optimizer': fully_shard offloads weights, gradients and optimizer together; use 'all'")
    if layout.offload == "all" and layout.data_parallel * layout.tp * layout.pp > 1 and layout.dp_shard == 1:
        why.append("offload='all': needs dp_shard > 1")
    if layout.tp > 1:
        why += _tensor_parallel(layout, shape, lora)
    if layout.pp > 1:
        why += _pipeline(layout, shape)
    return why


def _tensor_parallel(layout: Layout, shape: Any, lora: bool) -> list[str]:
    why = []
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if heads % layout.tp or kv_heads % layout.tp or shape.intermediate_size % layout.tp:
        why.append(
            f"tp={layout.tp}: must divide {heads} heads, {kv_heads} key/value heads and "
            f"intermediate size {shape.intermediate_size}"
        )
    if getattr(shape, "quantization_config", None) is not None:
        why.append(f"tp={layout.tp} with load_in_4bit: 4-bit weights are packed blocks, not matrices that split")
    if layout.sequence_parallel and lora:
        why.append("sequence_parallel with LoRA: adapters of row-parallel projections would need gathered tokens")
    if layout.sequence_parallel and getattr(shape, "_attn_implementation", None) == "eager":
        why.append(
            "sequence_parallel with attn_implementation='eager': its mask would be built for one rank's part of the "
            "sequence"
        )
    return why


def _pipeline(layout: Layout, shape: Any) -> list[str]:
    why = []
    stages, layers = layout.pp * layout.virtual_stages, shape.num_hidden_layers
    if layout.stage_layers and sum(layout.stage_layers) != layers:
        why.append(f"stage_layers={layout.stage_layers}: add up to {sum(layout.stage_layers)}, the model has {layers}")
    if stages > layers or 0 in layout.stage_layers:
        why.append(f"{stages} pipeline stages: the model has {layers} layers, each stage needs one")
    if layout.gradient_accumulation < layout.pp:
        why.append(f"gradient_accumulation={layout.gradient_accumulation}: a pipeline needs at least pp={layout.pp}")
    if layout.schedule == "interleaved" and layout.gradient_accumulation % layout.pp:
        why.append(
            f"gradient_accumulation={layout.gradient_accumulation}: interleaved needs a multiple of pp={layout.pp}"
        )
    if getattr(shape, "tie_word_embeddings", False):
        why.append("pp with tied embeddings: first and last stage would each train their own copy")
    return why
