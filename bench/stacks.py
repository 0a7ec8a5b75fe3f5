"""Training stacks by their names in published tables: their engines, and what they do where a row is silent.

The engines of stacks.toml are traits read off the code and documents of stacks that no planner asks for. Where only one
source has rows of a stack, its traits are tied to that source: left out, its rows are those of `unknown_stack`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from contracts.layout import Checkpointing, Sharding
from contracts.tables import read_table
from hardware.gpus import Gpu
from planner.forecast.engine import Engine, Fsdp, Share, StateBytes
from planner.forecast.specs import TrainSpec
from planner.stacks import ENGINES, make_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training stack of published tables."""

    engine: Engine
    pattern: str  # of the framework's name
    default_sharding: Sharding = "zero3"
    default_checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True  # used with TP where nothing else is said
    known: bool = True  # False: no pattern matched its name
    loads_whole: bool = False  # every rank holds all weights on its GPU while a sharded model is loaded
    before_hopper: bool = False  # of Ampere and older only: since then it is another
    lora_targets: tuple[str, ...] = TrainSpec().lora_targets  # by default


class MegatronDeepSpeed(Engine):
    """DeepSpeed's pipeline engine: in bf16 (BF16_Optimizer) gradients add up in fp32 beside the bf16 ones."""

    def state_bytes(self, share: Share) -> StateBytes:
        """Four bytes more per weight in bf16, which ZeRO-1 does not shard."""
        stored = super().state_bytes(share)
        return stored._replace(gradients=6.0) if share.layout.precision == "bf16" else stored


def _stack(row: dict[str, Any]) -> Stack:
    """One row of stacks.toml."""
    engine, traits = row["engine"], dict(row.get("traits", {}))
    if isinstance(states := traits.get("states"), str):
        traits["states"] = ENGINES[states].states
    kinds = {kind.__name__: kind for kind in (Engine, Fsdp, MegatronDeepSpeed)}
    made = make_engine(kinds[engine](name=engine) if engine in kinds else ENGINES[engine], traits)
    rest = {key: tuple(each) if isinstance(each, list) else each for key, each in row.items() if key != "traits"}
    return Stack(**rest | {"engine": made})


STACKS = tuple(map(_stack, read_table(__file__, "stacks.toml")["stack"]))


def _at_step(engine: Engine, share: Share) -> float:
    """Bytes beside the weights while torch's own AdamW steps: foreach, its default, takes roots of all second moments.

    By then no activations are left.
    """
    train = share.train
    if share.adapters or train.optimizer != "adamw" or train.optimizer_in_backward or share.layout.offload != "none":
        return 0.0
    stored = engine.state_bytes(share)
    root = 2.0 if stored.weights == stored.gradients == 2.0 and not stored.copy else 4.0
    gradients = share.part(share.trained, share.routed_trained, sharded=engine.shards_gradients(share))
    states = share.part(share.trained, share.routed_trained, sharded=share.zero > 0)
    return stored.gradients * gradients + (stored.optimizer + root) * states


class Plain(Engine):
    """What nobody knows is taken to be PyTorch's: its optimizer, its kernels."""

    load = _at_step


class PlainFsdp(Fsdp):
    """The same with fully_shard."""

    load = _at_step


# Of one GPU, or said to be so: weights, gradients and states in the type that is computed with.
_UNKNOWN_PLAIN = Stack(engine=Plain(name="unknown"), pattern="", known=False)
_UNKNOWN = Stack(engine=PlainFsdp(name="unknown"), pattern="", known=False)
# What no FSDP stack does: model-parallel ranks, experts spread out. It shards as Megatron does, under whatever name,
# with gradients that add up in fp32. Products in eight bits are Transformer Engine's, and so are the other kernels.
_MEGATRON = ENGINES["megatron"]
_UNKNOWN_PARALLEL = Stack(
    engine=Plain(name="unknown, model-parallel", can=_MEGATRON.can, eight_bits=_MEGATRON.eight_bits, logits_bytes=8.0,
                 states=StateBytes(2.0, 4.0, 12.0, copy=4.0), gradient_buffer=True),
    pattern="", default_sharding="zero1", known=False,
)  # fmt: skip
_UNKNOWN_FUSED = replace(_UNKNOWN_PARALLEL, engine=replace(_MEGATRON, name="unknown, model-parallel"))
_PURE = r"\b(bf16|bfloat16|16)[- ]true|pure[- _]?(bf16|bfloat16)|(bf16|bfloat16) (param|weight)s?"
_MIXED = r"\bamp\b|amp_|autocast|mixed|fp32 (param|weight|master)"


def unknown_stack(raw: Mapping[str, str]) -> Stack:
    """The stack of a row whose framework nobody knows: FSDP, or where the degrees say so Megatron's way."""
    degrees = [raw.get(name) or "" for name in ("tp", "pp", "cp", "ep", "vpp")]
    parallel = any(degree.isdecimal() and int(degree) > 1 for degree in degrees)
    sharded = re.search(r"fsdp|zero[-_ ]?3|full_shard", (raw.get("sharding") or "").lower())
    if parallel and not sharded:
        return _UNKNOWN_FUSED if "fp8" in (raw.get("precision") or "").lower() else _UNKNOWN_PARALLEL
    text = f"{raw.get('precision') or ''} ; {raw.get('note') or ''}".lower()
    plain = re.search(_PURE, text) or raw.get("world") == "1"
    return _UNKNOWN_PLAIN if plain and not re.search(_MIXED, text) else _UNKNOWN


def stack_matching(raw: Mapping[str, str], gpu: Gpu | None = None) -> Stack:
    """The stack of a row, by the names of its framework and else of its system."""
    hopper = gpu is not None and (gpu.compute_capability or (0, 0)) >= (9, 0)
    for text in ((raw.get("framework") or "").lower(), (raw.get("system") or "").lower()):
        for stack in STACKS:
            if re.search(stack.pattern, text) and not (stack.before_hopper and hopper):
                return stack
    return unknown_stack(raw)
