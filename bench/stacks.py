"""Training stacks by their names in published tables: their engines, and what they do where a row is silent."""

from __future__ import annotations

import re
from dataclasses import dataclass

from contracts.layout import Checkpointing, Sharding
from hardware.gpus import Gpu
from planner.forecast.engine import Engine, Fsdp, Share, StateBytes
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


_MEGATRON = Stack(engine=ENGINES["megatron"], pattern=r"megatron|nemo|mcore", default_sharding="zero1")

# First match wins: those that no planner asks for before the engines that it knows.
STACKS: tuple[Stack, ...] = (
    Stack(
        engine=Engine(
            name="megatron-2022", fused=True, attention="unfused", states=_DEEPSPEED_STATES, gradient_buffer=True,
            selective_attention=True, dp_overlap=False, fused_cross_entropy=False,
            bucket_bytes=2e9,  # two buckets of 5e8 half-precision values
        ),
        pattern=r"megatron.?deepspeed", default_sharding="ddp", sequence_parallel=False,
    ),
    Stack(
        engine=Engine(
            name="megatron-2022", fused=True, attention="unfused", states=StateBytes(2.0, 4.0, 12.0, copy=4.0),
            gradient_buffer=True, selective_attention=True, dp_overlap=False, gradient_bytes=4,
            fused_cross_entropy=False,
        ),
        pattern=r"megatron.?lm|megatron.?llama", default_sharding="ddp", sequence_parallel=False,
    ),
    Stack(
        engine=Fsdp(name="llm-foundry", attention="flash1", reduce_every_micro_batch=True, fused_cross_entropy=False),
        pattern=r"llm.?foundry|composer",
    ),
    Stack(
        engine=Engine(
            name="nanotron", states=StateBytes(2.0, 4.0, 12.0, copy=4.0), gradient_buffer=True,
            selective_attention=True, gradient_bytes=4, logits_bytes=8.0, fused_cross_entropy=False,
        ),
        pattern=r"nanotron", default_sharding="zero1",
    ),
    Stack(engine=Fsdp(name="maxtext", fused=True), pattern=r"maxtext|jax", default_checkpointing="full"),
    Stack(
        engine=Fsdp(name="automodel", attention="flash3", fused=True, fused_cross_entropy=False), pattern=r"automodel"
    ),
    Stack(
        engine=Engine(name="torchtune", adapter_bytes=2.0, logits_bytes=10.0, ends_apart=True), pattern=r"torchtune",
        default_checkpointing="full",
    ),
    Stack(engine=LitGpt(name="litgpt", adapter_bytes=2.0, fused_cross_entropy=False), pattern=r"litgpt|lit-gpt"),
    Stack(
        engine=Engine(name="peft", adapter_bytes=2.0, fused_cross_entropy=False, logits_bytes=20.0), pattern=r"peft"
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
    Stack(engine=Fsdp(name="fsdp", fused_cross_entropy=False), pattern=r"fsdp"),
    Stack(engine=ENGINES["trl"], pattern=r"trl|accelerate|hf peft|transformers|axolotl|llama.?factory|swift"),
    Stack(engine=ENGINES["deepspeed"], pattern=r"deepspeed"),
    Stack(engine=ENGINES["torchtitan"], pattern=r"torchtitan"),
    _MEGATRON,
)  # fmt: skip


def stack_matching(framework: str, gpu: Gpu | None = None) -> Stack:
    """The stack of a framework by the name a published table gives it; an unknown one is plain PyTorch."""
    text = framework.lower()
    if (
        gpu is not None
        and (gpu.compute_capability or (0, 0)) >= (9, 0)
        and re.search(r"megatron.?(core|lm|bridge)", text)
    ):
        return _MEGATRON  # the Hopper years of Megatron are Transformer Engine's
    for stack in STACKS:
        if re.search(stack.pattern, text):
            return stack
    return Stack(engine=Fsdp(name="pytorch"), pattern="")
