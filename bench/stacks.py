"""Training stacks by their names in published tables: their engines, and what they do where a row is silent.

The engines made here are traits read off the code and documents of stacks that no planner asks for. Where only one
source has rows of a stack, its traits are tied to that source: left out, its rows are those of `unknown_stack`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from contracts.layout import Checkpointing, Sharding
from hardware.gpus import Gpu
from planner.forecast.engine import Engine, Fsdp, Share, StateBytes
from planner.forecast.specs import TrainSpec
from planner.stacks import ENGINES

_DEEPSPEED_STATES = ENGINES["deepspeed"].states


class LitGpt(Engine):
    """Everything in half precision; every rank holds all weights on its GPU while a sharded model is loaded."""

    def load(self, share: Share) -> float:
        """The whole model in half precision."""
        return 2.0 * share.local if share.sharded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training stack of published tables."""

    engine: Engine
    pattern: str  # of the framework's name
    default_sharding: Sharding = "zero3"
    default_checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True  # used with TP where nothing else is said
    known: bool = True  # False: no pattern matched its name
    lora_targets: tuple[str, ...] = TrainSpec().lora_targets  # by default


class MegatronDeepSpeed(Engine):
    """DeepSpeed's pipeline engine: in bf16 (BF16_Optimizer) gradients add up in fp32 beside the bf16 ones."""

    def state_bytes(self, share: Share) -> StateBytes:
        """Four bytes more per weight in bf16, which ZeRO-1 does not shard."""
        stored = super().state_bytes(share)
        return stored._replace(gradients=6.0) if share.layout.precision == "bf16" else stored


# "PyTorch NVIDIA Release 24.04" and "NGC PyTorch 24.09" are the containers that NeMo and Megatron come in.
# NVIDIA's performance recipes reduce gradients in bf16 (ddp.grad_reduce_in_fp32=False), Megatron-LM by itself in fp32.
_MEGATRON_FP32 = Stack(engine=ENGINES["megatron"], default_sharding="zero1", pattern=r"megatron.?(core|lm)")
_MEGATRON = Stack(
    engine=replace(
        ENGINES["megatron"], states=StateBytes(2.0, 2.0, 12.0, copy=4.0), gradient_bytes=2, replica_gradient_bytes=2,
        sends_tokens_once=True,  # moe_flex_dispatcher_backend: deepep, hybridep
    ),
    default_sharding="zero1",
    lora_targets=("q_proj", "k_proj", "v_proj"),  # NeMo's default
    pattern=r"megatron|nemo\b|nemo[_ ]|nemo/|mcore|nvidia release|nvidia pytorch|ngc pytorch|transformer.?engine",
)  # fmt: skip

# First match wins: those that no planner asks for before the engines that it knows.
STACKS: tuple[Stack, ...] = (
    Stack(
        engine=MegatronDeepSpeed(
            name="megatron-2022", fused=True, attention="unfused", states=_DEEPSPEED_STATES, gradient_buffer=True,
            selective_attention=True, dp_overlap=False, fused_cross_entropy=False,
            bucket_bytes=2e9,  # two buckets of 5e8 half-precision values
        ),
        pattern=r"megatron.?deepspeed|gpt-?neox", default_sharding="ddp", sequence_parallel=False,
    ),
    Stack(
        engine=Engine(
            name="megatron-2022", fused=True, attention="unfused", states=StateBytes(2.0, 4.0, 12.0, copy=4.0),
            gradient_buffer=True, selective_attention=True, dp_overlap=False, gradient_bytes=4,
            replica_gradient_bytes=4, fused_cross_entropy=False,
        ),
        pattern=r"megatron.?lm|megatron.?llama", default_sharding="ddp", sequence_parallel=False,
    ),
    Stack(
        engine=Fsdp(
            name="llm-foundry", attention="flash1", reduce_every_micro_batch=True, fused_cross_entropy=False,
            gradient_bytes=2,  # its benchmarks' mixed_precision: PURE
            logits_bytes=4.0,  # loss_fn: fused_crossentropy (flash-attn's): logits and their gradient in bf16
        ),
        pattern=r"llm.?foundry|composer|mosaic",
    ),
    Stack(
        engine=Engine(
            name="nanotron", states=StateBytes(2.0, 4.0, 12.0, copy=4.0), gradient_buffer=True,
            selective_attention=True, gradient_bytes=4, replica_gradient_bytes=4, logits_bytes=8.0,
            fused_cross_entropy=False,
        ),
        pattern=r"nanotron", default_sharding="zero1",
    ),
    Stack(
        engine=Fsdp(name="maxtext", fused=True, gradient_bytes=2), pattern=r"maxtext|\bjax|levanter|easylm|paxml",
        default_checkpointing="full",
    ),
    Stack(
        engine=Fsdp(
            name="automodel", attention="flash3", fused=True, fused_cross_entropy=False,
            sends_tokens_once=True,  # dispatcher: deepep (examples/llm_benchmark)
        ),
        pattern=r"automodel",
    ),
    Stack(
        engine=Engine(name="torchtune", adapter_bytes=2.0, logits_bytes=10.0, ends_apart=True), pattern=r"torchtune",
        default_checkpointing="full",
    ),
    Stack(
        engine=LitGpt(name="litgpt", adapter_bytes=2.0, fused_cross_entropy=False), pattern=r"lit-?gpt",
        lora_targets=("q_proj", "v_proj"),
    ),
    Stack(
        engine=Engine(name="peft", adapter_bytes=2.0, fused_cross_entropy=False, logits_bytes=20.0),
        pattern=r"^(?!.*deepspeed).*peft", lora_targets=("q_proj", "v_proj"),
    ),
    Stack(
        engine=Engine(
            name="xtuner", states=_DEEPSPEED_STATES, gradient_buffer=True, selective_attention=True,
            fused_cross_entropy=False, logits_bytes=20.0,
        ),
        pattern=r"xtuner|llama.?factory", default_checkpointing="full",
    ),
    Stack(
        engine=Engine(
            name="colossalai", fused=True, states=_DEEPSPEED_STATES, gradient_buffer=True, selective_attention=True
        ),
        pattern=r"coloss", default_sharding="zero1",
    ),
    Stack(  # its step makes two copies of the gradients, one in fp32, and AdamW of one flat tensor two of the states
        engine=Engine(
            name="internevo", fused=True, states=StateBytes(2.0, 2.0, 26.0, copy=4.0), gradient_buffer=True,
            fused_cross_entropy=False,
        ),
        pattern=r"intern-?(evo|lm)", default_sharding="zero1",
    ),
    Stack(
        engine=Fsdp(name="fsdp", fused_cross_entropy=False, gradient_bytes=2),  # bfSixteen of fms-fsdp, llama-recipes
        pattern=r"^(?!.*torchtitan).*(fsdp|llama.?(recipes|cookbook)|olmo)",
    ),
    Stack(
        engine=ENGINES["trl"],
        pattern=r"^(?!.*(deepspeed|megatron))"
        r".*(\btrl|accelerate|transformers|hf trainer|hugging ?face|axolotl|swift|unsloth)",
    ),
    Stack(  # Qwen's own code computes the loss in bf16: logits, their shifted copy, log-softmax, two gradients
        engine=replace(ENGINES["deepspeed"], logits_bytes=10.0), pattern=r"finetune\.py",
    ),
    Stack(engine=ENGINES["deepspeed"], pattern=r"deepspeed"),
    Stack(engine=ENGINES["torchtitan"], pattern=r"torchtitan"),
    _MEGATRON,
)  # fmt: skip


# Of one GPU, or said to be so, plain PyTorch: weights, gradients and states in the type that is computed with.
_UNKNOWN_PLAIN = Stack(engine=Engine(name="unknown"), pattern="", known=False)
_UNKNOWN = Stack(engine=Fsdp(name="unknown"), pattern="", known=False)
# What no FSDP stack does: model-parallel ranks, experts spread out. It is Megatron's way under whatever name, with
# gradients in fp32 as Megatron-LM has them by itself.
_UNKNOWN_PARALLEL = replace(_MEGATRON_FP32, engine=replace(
    _MEGATRON_FP32.engine, name="unknown, model-parallel", sends_tokens_once=True), known=False)  # fmt: skip
_PURE = r"\b(bf16|bfloat16|16)[- ]true|pure[- _]?(bf16|bfloat16)|(bf16|bfloat16) (param|weight)s?"
_MIXED = r"\bamp\b|amp_|autocast|mixed|fp32 (param|weight|master)"


def _degree(raw: Mapping[str, str], name: str) -> int:
    text = raw.get(name) or ""
    return int(text) if text.isdecimal() else 1


def unknown_stack(raw: Mapping[str, str]) -> Stack:
    """The stack of a row whose framework nobody knows: FSDP, or where the degrees say so Megatron's way."""
    parallel = any(_degree(raw, name) > 1 for name in ("tp", "pp", "cp", "ep", "vpp"))
    sharded = re.search(r"fsdp|zero[-_ ]?3|full_shard", (raw.get("sharding") or "").lower())
    if parallel and not sharded:
        return _UNKNOWN_PARALLEL
    text = f"{raw.get('precision') or ''} ; {raw.get('note') or ''}".lower()
    plain = re.search(_PURE, text) or (_degree(raw, "world") == 1 and (raw.get("world") or "") == "1")
    return _UNKNOWN_PLAIN if plain and not re.search(_MIXED, text) else _UNKNOWN


def stack_matching(raw: Mapping[str, str], gpu: Gpu | None = None) -> Stack:
    """The stack of a row, by the names of its framework and else of its system."""
    for text in ((raw.get("framework") or "").lower(), (raw.get("system") or "").lower()):
        if (
            gpu is not None
            and (gpu.compute_capability or (0, 0)) >= (9, 0)
            and re.search(r"megatron.?(core|lm|bridge)", text)
        ):
            # The Hopper years of Megatron are Transformer Engine's.
            return _MEGATRON_FP32 if re.search(_MEGATRON_FP32.pattern, text) else _MEGATRON
        for stack in STACKS:
            if re.search(stack.pattern, text):
                return stack
    return unknown_stack(raw)
