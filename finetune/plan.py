"""The layout to run, from the plan or the settings, and which layouts cannot run."""

from __future__ import annotations

import math
import os
from typing import Any

from contracts import trl
from contracts.job_config import ConfigError, parse_layout, resolve_layout
from contracts.job_plan import JobPlan
from contracts.layout import EIGHT_BITS, Layout


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


def refusals(layout: Layout, shape: Any, lora: bool) -> list[str]:
    """Why this job cannot run the layout on a model of this transformers config; empty where it can."""
    heads, kv_heads, inner = shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size
    kernel, layers = getattr(shape, "_attn_implementation", None), shape.num_hidden_layers
    is_quantised = getattr(shape, "quantization_config", None) is not None
    tp, pp, times = layout.tp, layout.pp, layout.gradient_accumulation
    stages, given = pp * layout.virtual_stages, sum(layout.stage_layers)
    why = {
        f"ep={layout.ep}: this job trains no experts": layout.ep > 1,
        f"cp={layout.cp}: this job has no context parallelism; TRL's trainer has it": layout.cp > 1,
        "sharding='zero1': fully_shard always shards gradients and weights too; use zero2 or zero3":
            layout.sharding == "zero1" and layout.dp_shard > 1,
        f"precision={layout.precision!r}: fp32 and bf16 are implemented": layout.precision in ("fp16", *EIGHT_BITS),
        "offload='optimizer': fully_shard offloads weights, gradients and optimizer together; use 'all'":
            layout.offload == "optimizer",
        "offload='all': needs dp_shard > 1":
            layout.offload == "all" and layout.data_parallel * tp * pp > 1 and layout.dp_shard == 1,
        f"tp={tp}: must divide {heads} heads, {kv_heads} key/value heads and intermediate size {inner}":
            any(size % tp for size in (heads, kv_heads, inner)),
        f"tp={tp} with load_in_4bit: 4-bit weights are packed blocks, not matrices that split": tp > 1 and is_quantised,
        "sequence_parallel with LoRA: adapters of row-parallel projections would need gathered tokens":
            tp > 1 and layout.sequence_parallel and lora,
        "sequence_parallel with attn_implementation='eager': its mask would be built for one rank's part of the "
        "sequence": tp > 1 and layout.sequence_parallel and kernel == "eager",
        f"stage_layers={layout.stage_layers}: add up to {given}, the model has {layers}":
            pp > 1 and bool(layout.stage_layers) and given != layers,
        f"{stages} pipeline stages: the model has {layers} layers, each stage needs one":
            pp > 1 and (stages > layers or 0 in layout.stage_layers),
        f"gradient_accumulation={times}: a pipeline needs at least pp={pp}": pp > 1 and times < pp,
        f"gradient_accumulation={times}: interleaved needs a multiple of pp={pp}":
            pp > 1 and layout.schedule == "interleaved" and times % pp > 0,
        "pp with tied embeddings: first and last stage would each train their own copy":
            pp > 1 and bool(getattr(shape, "tie_word_embeddings", False)),
    }  # fmt: skip
    return [text for text, holds in why.items() if holds]
