"""Training stacks by their names in published tables, with their engines and defaults.

stacks.toml also has engines that the planner does not offer, with traits from the code and documentation of the stacks.
If only one source has rows of a stack, leaving out the source gives its rows the stack of `unknown_stack`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from contracts.layout import Checkpointing, Layout, Sharding
from contracts.tables import read_table
from hardware.gpus import Gpu
from planner.forecast.engine import Engine, Exchanges, Fsdp, Share, StateBytes
from planner.forecast.memory import count_states
from planner.forecast.specs import TrainSpec
from planner.stacks import ENGINES, Trl, make_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training stack of published tables."""

    engine: Engine
    pattern: str  # regular expression for the name of the framework
    release: str = ""  # regular expression for the row's note, which names the release
    default_sharding: Sharding = "zero3"
    default_checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True  # used with TP unless the row states otherwise
    known: bool = True  # False: no pattern matched its name
    loads_whole: bool = False  # every rank holds all weights on its GPU while a sharded model is loaded
    before_hopper: bool = False  # only for rows on Ampere and older; newer rows of this name have another engine
    lora_targets: tuple[str, ...] = TrainSpec().lora_targets  # the default of the stack
    steps_by_torch: bool = False  # PyTorch's AdamW, whose default (foreach) stores roots of all second moments

    def bytes_outside_passes(self, share: Share) -> float:
        """Return the bytes besides the weights at two times without activations, or 0 if neither sets the peak.

        These are the loading of a model (`loads_whole`) and the step of PyTorch's AdamW (`steps_by_torch`).
        """
        train = share.train
        if self.loads_whole and share.sharded:
            return 2.0 * share.local
        in_passes = train.optimizer_in_backward or share.layout.offload != "none"
        if not self.steps_by_torch or share.adapters or train.optimizer != "adamw" or in_passes:
            return 0.0
        stored, (_, gradients, optimizer) = self.engine.state_bytes(share), count_states(self.engine, share)
        root = 2.0 if stored.weights == stored.gradients == 2.0 and not stored.copy else 4.0
        return gradients + optimizer + root * share.part(share.trained, share.routed_trained, sharded=share.zero > 0)


class MegatronDeepSpeed(Engine):
    """DeepSpeed's pipeline engine: BF16_Optimizer accumulates gradients in fp32, in addition to the bf16 gradients."""

    def state_bytes(self, share: Share) -> StateBytes:
        """Bytes per weight. In bf16 the gradients take 6 bytes, which ZeRO-1 does not shard."""
        stored = super().state_bytes(share)
        return stored._replace(gradients=6.0) if share.layout.precision == "bf16" else stored


class TrlOfFsdp1(Trl):
    """TRL before 1.16, over FSDP1: it keeps every layer's input, and its gradient, until the backward pass is over.

    Accelerate's no_sync, the Trainer's default, reduces gradients after the last micro-batch, and holds all until then.
    The hook that frees frozen weights (`_register_post_backward_reshard_only_hook`) holds the inputs of its block,
    which reentrant checkpointing makes separate leaves. Counted on two gloo ranks: 13 hidden-sized tensors at the
    end of six blocks, 3 without reentrant checkpointing, with FSDP2, or if the weights are trained.
    """

    def shards_gradients(self, share: Share) -> bool:
        """Whether gradients are sharded; they are not before the last micro-batch."""
        return share.layout.gradient_accumulation == 1 and super().shards_gradients(share)

    def count_exchanges(self, train: TrainSpec, layout: Layout) -> Exchanges:
        """Gradients are reduced after the last micro-batch."""
        return super().count_exchanges(train, layout)._replace(scatters=1)

    def logits(self, share: Share) -> float:
        """Return the bytes of the loss, or those of the gradients of all inputs and of one recomputed layer."""
        loss = super().logits(share)
        if not (share.sharded and share.adapters and share.layout.checkpointing == "full"):
            return loss
        inputs = share.layers * share.element * share.tokens * share.model.hidden
        return max(loss, inputs + self.layer_activations(share))


def _stack(row: dict[str, Any]) -> Stack:
    """Build the stack of one row of stacks.toml."""
    engine, traits = row["engine"], dict(row.get("traits", {}))
    if isinstance(states := traits.get("states"), str):
        traits["states"] = ENGINES[states].states
    kinds = {kind.__name__: kind for kind in (Engine, Fsdp, MegatronDeepSpeed)}
    base = kinds[engine](name=engine) if engine in kinds else ENGINES[engine]
    if engine == "trl" and traits:
        base = TrlOfFsdp1(**{each.name: getattr(base, each.name) for each in fields(base)})
    built = make_engine(base, traits)
    members = {key: tuple(each) if isinstance(each, list) else each for key, each in row.items() if key != "traits"}
    return Stack(**members | {"engine": built})


STACKS = tuple(map(_stack, read_table(__file__, "stacks.toml")["stack"]))


# On one GPU, or if the row states it: weights, gradients and optimizer states in the precision of the computation.
_UNKNOWN_PLAIN = Stack(engine=Engine(name="unknown"), pattern="", known=False, steps_by_torch=True)
_UNKNOWN = Stack(engine=Fsdp(name="unknown"), pattern="", known=False, steps_by_torch=True)
# Model or expert parallelism without FSDP: sharded as in Megatron, with gradients that are accumulated in fp32. With
# FP8, matrix products and the other kernels are those of Transformer Engine.
_MEGATRON = ENGINES["megatron"]
_UNKNOWN_PARALLEL = Stack(
    engine=Engine(name="unknown, model-parallel", can=_MEGATRON.can, eight_bits=_MEGATRON.eight_bits, logits_bytes=8.0,
                  states=StateBytes(2.0, 4.0, 12.0, copy=4.0), gradient_buffer=True),
    pattern="", default_sharding="zero1", known=False, steps_by_torch=True,
)  # fmt: skip
_UNKNOWN_FUSED = replace(
    _UNKNOWN_PARALLEL,
    engine=replace(_MEGATRON, name="unknown, model-parallel", cuda_graph_arguments=(), overlaps_without_pipeline=False),
    steps_by_torch=False,
)
_PURE = r"\b(bf16|bfloat16|16)[- ]true|pure[- _]?(bf16|bfloat16)|(bf16|bfloat16) (param|weight)s?"
_MIXED = r"\bamp\b|amp_|autocast|mixed|fp32 (param|weight|master)"


def unknown_stack(raw: Mapping[str, str]) -> Stack:
    """Return the stack for an unknown framework: FSDP, or Megatron's sharding if the row has model parallelism."""
    degrees = [raw.get(name) or "" for name in ("tp", "pp", "cp", "ep", "vpp")]
    parallel = any(degree.isdecimal() and int(degree) > 1 for degree in degrees)
    sharded = re.search(r"fsdp|zero[-_ ]?3|full_shard", (raw.get("sharding") or "").lower())
    if parallel and not sharded:
        return _UNKNOWN_FUSED if "fp8" in (raw.get("precision") or "").lower() else _UNKNOWN_PARALLEL
    text = f"{raw.get('precision') or ''} ; {raw.get('note') or ''}".lower()
    plain = re.search(_PURE, text) or raw.get("world") == "1"
    return _UNKNOWN_PLAIN if plain and not re.search(_MIXED, text) else _UNKNOWN


def stack_matching(raw: Mapping[str, str], gpu: Gpu | None = None) -> Stack:
    """Return the stack of a row by the name of its framework, or else of its system."""
    hopper = gpu is not None and (gpu.compute_capability or (0, 0)) >= (9, 0)
    for text in ((raw.get("framework") or "").lower(), (raw.get("system") or "").lower()):
        for stack in STACKS:
            released = re.search(stack.release, raw.get("note") or "")
            if re.search(stack.pattern, text) and released and not (stack.before_hopper and hopper):
                return stack
    return unknown_stack(raw)
