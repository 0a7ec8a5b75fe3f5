"""The layout to run, the plan's or what the settings ask for, and which ones cannot run."""

from __future__ import annotations

import math
import os
from typing import Any

from contracts import trl
from contracts.job_config import ConfigError, resolve_layout
from contracts.job_plan import JobPlan, parse_layout
from contracts.layout import EIGHT_BITS, WHOLE_ROPE, Layout, most_ranks


def settle_layout(plan: JobPlan, world_size: int, has_gpu: bool) -> Layout:
    """The layout to run: the plan's, or what its settings ask for; a contradiction between the two is refused."""
    settings = plan.config.layout if plan.config else {}
    node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if plan.layout is not None:
        if plan.layout.world_size != world_size:
            raise ConfigError(f"the plan's world_size is {plan.layout.world_size}, {world_size} ranks were started")
        for name, value in resolve_layout(settings, world_size, node).items():
            planned = getattr(plan.layout, name)
            if planned != value:
                raise ConfigError(f"the config says {trl.spelled(name, value)}, the plan {trl.spelled(name, planned)}")
        return plan.layout
    wanted = resolve_layout(settings, world_size, node)
    wanted = {"precision": "bf16" if has_gpu else "fp32", "micro_batch": 8, **wanted, "world_size": world_size}
    degrees = [wanted.get(name, 1) for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard")]
    rest = world_size // math.prod(degrees)
    spread = "dp_replicate" if wanted.get("sharding") == "ddp" else "dp_shard"
    if rest > 1 and spread not in wanted:
        wanted[spread] = rest
    if wanted.get("dp_shard", 1) == wanted.get("cp", 1) == 1 and "sharding" not in wanted:
        wanted["sharding"] = "ddp"
    if wanted.get("pp", 1) > 1:
        wanted.setdefault("gradient_accumulation", wanted["pp"] * wanted.get("virtual_stages", 1))
    return parse_layout(wanted, "layout")


def experts_of(shape: Any) -> int:
    """Experts of each layer by this transformers config; 0: it has none."""
    return int(getattr(shape, "num_experts", 0) or getattr(shape, "num_local_experts", 0) or 0)


def refusals(layout: Layout, shape: Any, lora: bool) -> list[str]:
    """Why this job cannot run the layout on a model of this transformers config; empty where it can."""
    why = []
    if layout.cp > 1:
        why += _context_parallel(layout, shape)
    if layout.ep > 1:
        why.append(f"ep={layout.ep}: expert parallelism is not implemented; FSDP shards the experts' weights")
    if layout.sharding == "zero1" and layout.dp_shard > 1:
        why.append("sharding='zero1': fully_shard always shards gradients and weights too; use zero2 or zero3")
    if layout.precision in ("fp16", *EIGHT_BITS):
        why.append(f"precision={layout.precision!r}: fp32 and bf16 are implemented")
    if layout.offload == "optimizer":
        why.append("offload='optimizer': fully_shard offloads weights, gradients and optimizer together; use 'all'")
    if layout.offload == "all" and layout.data_parallel * layout.tp * layout.pp > 1 and layout.dp_shard == 1:
        why.append("offload='all': needs dp_shard > 1")
    if layout.tp > 1 and experts_of(shape):
        why.append(f"tp={layout.tp}: experts are stacked in one tensor, which is sharded by FSDP and not split over TP")
    elif layout.tp > 1:
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


def _context_parallel(layout: Layout, shape: Any) -> list[str]:
    why = []
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if layout.tp > 1 or layout.pp > 1:
        why.append(f"cp={layout.cp} with tp={layout.tp}, pp={layout.pp}: runs beside data parallelism alone")
    if heads % layout.cp or kv_heads % layout.cp:
        why.append(
            f"cp={layout.cp}: must divide {heads} heads and {kv_heads} key/value heads, which its ranks share out; "
            f"cp={most_ranks(layout.cp, heads, kv_heads)} runs"
        )
    kernel = getattr(shape, "_attn_implementation", None)
    if kernel in ("eager", "flash_attention_2"):
        why.append(f"cp={layout.cp} with attn_implementation={kernel!r}: sdpa's has the exchange of heads")
    if layout.compile:
        why.append(f"cp={layout.cp} with compile=true: the exchange of heads is not compiled")
    if getattr(shape, "quantization_config", None) is not None:
        why.append(f"cp={layout.cp} with load_in_4bit: runs with LoRA and in full")
    rope = (getattr(shape, "rope_parameters", None) or {}).get("rope_type")
    if rope in WHOLE_ROPE:
        why.append(f"cp={layout.cp} with rope_type={rope!r}: its angles follow from the whole sequence's length")
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
