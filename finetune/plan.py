"""The layout to run, from the plan or the settings; which layouts cannot run, and which one would have fitted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from contracts import trl
from contracts.job_config import ConfigError, JobConfig, resolve_layout
from contracts.job_plan import JobPlan, parse_layout
from contracts.layout import EIGHT_BITS, WHOLE_ROPE, Layout, LayoutError, most_ranks
from hardware.units import GIB


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
    ranks = layout.data_parallel * layout.tp * layout.pp
    why = {
        f"ep={layout.ep}: expert parallelism is not implemented; FSDP shards the experts' weights": layout.ep > 1,
        "sharding='zero1': fully_shard always shards gradients and weights too; use zero2 or zero3":
            layout.sharding == "zero1" and layout.dp_shard > 1,
        f"precision={layout.precision!r}: fp32 and bf16 are implemented": layout.precision in ("fp16", *EIGHT_BITS),
        "offload='optimizer': fully_shard offloads weights, gradients and optimizer together; use 'all'":
            layout.offload == "optimizer",
        "offload='all': needs dp_shard > 1": layout.offload == "all" and ranks > 1 and layout.dp_shard == 1,
    }  # fmt: skip
    if layout.cp > 1:
        why = {**_context_parallel(layout, shape), **why}
    if layout.tp > 1:
        why |= _tensor_parallel(layout, shape, lora)
    if layout.pp > 1:
        why |= _pipeline(layout, shape)
    return [text for text, holds in why.items() if holds]


def _tensor_parallel(layout: Layout, shape: Any, lora: bool) -> dict[str, bool]:
    name = f"tp={layout.tp}"
    if experts_of(shape):
        return {f"{name}: experts are stacked in one tensor, which is sharded by FSDP and not split over TP": True}
    heads, kv_heads, inner = shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size
    sequence, kernel = layout.sequence_parallel, getattr(shape, "_attn_implementation", None)
    return {
        f"{name}: must divide {heads} heads, {kv_heads} key/value heads and intermediate size {inner}":
            any(size % layout.tp for size in (heads, kv_heads, inner)),
        f"{name} with load_in_4bit: 4-bit weights are packed blocks, not matrices that split": _is_quantised(shape),
        "sequence_parallel with LoRA: adapters of row-parallel projections would need gathered tokens":
            sequence and lora,
        "sequence_parallel with attn_implementation='eager': its mask would be built for one rank's part of the "
        "sequence": sequence and kernel == "eager",
    }  # fmt: skip


def _is_quantised(shape: Any) -> bool:
    return getattr(shape, "quantization_config", None) is not None


def _context_parallel(layout: Layout, shape: Any) -> dict[str, bool]:
    name, heads, kv_heads = f"cp={layout.cp}", shape.num_attention_heads, shape.num_key_value_heads
    kernel = getattr(shape, "_attn_implementation", None)
    rope = (getattr(shape, "rope_parameters", None) or {}).get("rope_type")
    return {
        f"{name} with tp={layout.tp}, pp={layout.pp}: CP runs only with data parallelism":
            layout.tp > 1 or layout.pp > 1,
        f"{name}: must divide {heads} heads and {kv_heads} key/value heads, which its ranks share out; "
        f"cp={most_ranks(layout.cp, heads, kv_heads)} runs": bool(heads % layout.cp or kv_heads % layout.cp),
        f"{name} with attn_implementation={kernel!r}: sdpa's has the exchange of heads":
            kernel in ("eager", "flash_attention_2"),
        f"{name} with compile=true: the exchange of heads is not compiled": layout.compile,
        f"{name} with load_in_4bit: runs with LoRA and in full": _is_quantised(shape),
        f"{name} with rope_type={rope!r}: its angles follow from the whole sequence's length": rope in WHOLE_ROPE,
    }  # fmt: skip


def _pipeline(layout: Layout, shape: Any) -> dict[str, bool]:
    stages, layers, times = layout.pp * layout.virtual_stages, shape.num_hidden_layers, layout.gradient_accumulation
    given = sum(layout.stage_layers)
    return {
        f"stage_layers={layout.stage_layers}: add up to {given}, the model has {layers}":
            bool(layout.stage_layers) and given != layers,
        f"{stages} pipeline stages: the model has {layers} layers, each stage needs one":
            stages > layers or 0 in layout.stage_layers,
        f"gradient_accumulation={times}: a pipeline needs at least pp={layout.pp}": times < layout.pp,
        f"gradient_accumulation={times}: interleaved needs a multiple of pp={layout.pp}":
            layout.schedule == "interleaved" and times % layout.pp > 0,
        "pp with tied embeddings: first and last stage would each train their own copy":
            bool(getattr(shape, "tie_word_embeddings", False)),
    }  # fmt: skip


HEAVIER = {"none": ("none", "selective", "full"), "selective": ("selective", "full"), "full": ("full",)}


def nearest(config: JobConfig, layout: Layout, shape: Any, *, length: int, on_cpu: bool, capacity: int) -> str:
    """The layout with the fewest changes that fits by the forecast, as settings; the global batch stays.

    `shape` is the model's transformers config, `length` the tokens of the longest row, `capacity` bytes. This layout
    did not fit: if its forecast is below the capacity, the forecasts of all layouts are scaled up by that ratio.
    """
    from planner.forecast.memory import DEFAULT_MEMORY, memory_parts
    from planner.forecast.models import ModelError, model_from_config
    from planner.forecast.specs import TrainSpec
    from planner.stacks.topoflight import ENGINE

    try:
        model = model_from_config(shape.to_dict())
    except ModelError as error:
        return f"no layout is forecast: {error}"
    train = TrainSpec(
        method="qlora" if config.load_in_4bit else "lora" if config.use_peft else "full", sequence_length=length,
        lora_rank=config.lora_r, lora_targets=config.lora_target_modules, saved_modules=config.lora_modules_to_save,
        packing=config.packing, precision=layout.precision,
        attention={"flash_attention_2": "flash"}.get(config.attn_implementation, config.attn_implementation),
    )  # fmt: skip

    def bytes_of(one: Layout) -> float:
        return memory_parts(model, train, one, ENGINE, on_cpu=on_cpu).total

    scale = max(1.0, capacity / bytes_of(layout))
    for one in lighter(layout):
        needs = bytes_of(one) * scale
        if needs <= capacity * DEFAULT_MEMORY.safe_share and not refusals(one, shape, config.use_peft):
            differs = [name for name in Layout.__dataclass_fields__ if getattr(one, name) != getattr(layout, name)]
            words = "; ".join(trl.spelled(name, getattr(one, name)) for name in differs)
            return f"nearest layout that fits: {words} ({needs / GIB:.2f} GiB)"
    return f"no layout of {layout.world_size} ranks is forecast to fit"


def lighter(layout: Layout) -> Iterator[Layout]:
    """Layouts that take less memory for the same ranks and global batch, those with the fewest changes first."""
    fusings = dict.fromkeys((layout.fused_cross_entropy, True))
    halvings = [n for n in range(layout.micro_batch.bit_length()) if layout.micro_batch % (1 << n) == 0]
    whole = layout.dp_shard < layout.data_parallel or layout.sharding != "zero3"
    shardings = (False, True) if whole and layout.data_parallel > 1 else (False,)
    offloads = dict.fromkeys((layout.offload, "all")) if layout.data_parallel > 1 else (layout.offload,)
    choices = product(fusings, HEAVIER[layout.checkpointing], halvings, shardings, offloads)

    def changes(choice: tuple[bool, str, int, bool, str]) -> tuple[int, ...]:
        """How many; among as many those that cost a step the least time."""
        fused, again, times, sharded, offload = choice
        deeper, offloaded = HEAVIER[layout.checkpointing].index(again), offload != layout.offload
        count = (fused != layout.fused_cross_entropy) + deeper + times + sharded + 2 * offloaded
        return count, offloaded, sharded, deeper, times

    for choice in sorted(choices, key=changes)[1:]:
        fused, again, times, sharded, offload = choice
        degrees: dict[str, Any] = {"dp_shard": layout.data_parallel, "dp_replicate": 1, "sharding": "zero3"}
        try:
            yield replace(
                layout, fused_cross_entropy=fused, checkpointing=again, micro_batch=layout.micro_batch >> times,
                gradient_accumulation=layout.gradient_accumulation << times, offload=offload,
                **(degrees if sharded else {}),
            )  # fmt: skip
        except LayoutError:
            continue
