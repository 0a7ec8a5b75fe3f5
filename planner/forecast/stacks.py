"""Training stacks: what each one can run, and the traits of its kernels that the forecast needs.

Capabilities: documentation and source of each project (torchtitan ParallelDims, accelerate ParallelismConfig,
DeepSpeed ZeRO, Megatron-LM arguments). Traits are properties of the code, never fitted to one published table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from contracts.layout import Checkpointing, Layout, Offload, Sharding
from hardware.gpus import Gpu

AttentionKernel = Literal["unfused", "flash1", "flash2", "flash3"]
States = Literal["megatron", "deepspeed", "fsdp_fp32", "pure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training stack."""

    name: str
    pattern: str = ""  # of the framework's name in published tables
    fused: bool = False  # norms, activations, rope and bias fused (Transformer Engine, compile, Megatron's own kernels)
    attention: AttentionKernel = "flash2"
    tp_overlap: bool = False  # userbuffers or async-TP hide part of the tensor-parallel traffic
    dp_overlap: bool = True  # gradient reduction runs under the backward pass
    gradient_bytes: int = 2  # of what data parallelism reduces
    reduce_every_micro_batch: bool = False  # no no_sync under gradient accumulation
    states: States = "megatron"
    logits_bytes: float = 12.0  # live bytes per token and vocabulary entry around the loss
    can: frozenset[str] = frozenset({"ddp", "zero3", "hsdp", "tp", "pp", "cp", "ep", "zero1", "zero2", "sp"})
    methods: frozenset[str] = frozenset({"full", "lora", "qlora"})
    checkpointing: tuple[str, ...] = ("none", "selective", "full")
    fused_cross_entropy: bool = True
    compile: bool = False
    offloads: tuple[Offload, ...] = ()
    fp8: bool = False
    interleaved: bool = True
    together: frozenset[str] = frozenset({"tp+dp", "pp+dp", "tp+pp", "tp+pp+dp"})
    reshard: bool = True  # can keep the gathered weights between forward and backward
    loads_whole: bool = False  # every rank holds all weights on its GPU while a sharded model is loaded
    ends_apart: bool = False  # FSDP2 with the embedding and the head as units by themselves
    bucket_bytes: float = 0.0  # flat communication buffers outside the parts
    ddp_bucket_copies: bool = False  # DDP's gradients are tensors beside its buckets, not views of them
    default_sharding: Sharding = "zero3"
    default_checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True  # used with TP where nothing else is said


TOPOFLIGHT = Stack(
    name="topoflight",
    attention="flash2",
    ends_apart=True,
    states="fsdp_fp32",
    can=frozenset({"ddp", "zero2", "zero3", "hsdp", "tp", "sp", "pp"}),
    fused_cross_entropy=True,
    offloads=("all",),
)

STACKS: tuple[Stack, ...] = (
    TOPOFLIGHT,
    Stack(name="trl", pattern=r"trl|accelerate|hf peft|transformers|axolotl|llama.?factory|swift", states="fsdp_fp32",
          can=frozenset({"ddp", "zero3", "hsdp", "tp", "cp"}), together=frozenset({"tp+dp"}),
          checkpointing=("none", "full"), interleaved=False, logits_bytes=20.0, offloads=("all",),
          ddp_bucket_copies=True),  # accelerate leaves gradient_as_bucket_view at torch's default, which is off
    Stack(name="deepspeed", pattern=r"deepspeed", states="deepspeed", reduce_every_micro_batch=True,
          can=frozenset({"ddp", "zero1", "zero2", "zero3"}), together=frozenset(), checkpointing=("none", "full"),
          offloads=("optimizer", "all"), interleaved=False, reshard=False, logits_bytes=20.0,
          bucket_bytes=1e9),  # reduce_bucket_size, 5e8 half-precision values by default
    Stack(name="torchtitan", pattern=r"torchtitan", states="fsdp_fp32", tp_overlap=True, compile=True,
          fused_cross_entropy=False, logits_bytes=10.0, ends_apart=True,
          can=frozenset({"ddp", "zero3", "hsdp", "tp", "sp", "pp", "cp", "ep"}), fp8=True,
          methods=frozenset({"full"})),
    Stack(name="megatron", pattern=r"megatron|nemo|mcore", fused=True, states="megatron", tp_overlap=True, fp8=True,
          attention="flash3", gradient_bytes=2, logits_bytes=8.0, default_sharding="zero1",
          can=frozenset({"ddp", "zero1", "tp", "sp", "pp", "cp", "ep"}), methods=frozenset({"full"})),
)  # fmt: skip

ENGINES: tuple[str, ...] = tuple(stack.name for stack in STACKS)

# Stacks that appear in published tables only: their traits, first match wins, before the engines above.
OBSERVED: tuple[Stack, ...] = (
    Stack(name="megatron-2022", pattern=r"megatron.?deepspeed", fused=True, attention="unfused", states="deepspeed",
          dp_overlap=False, gradient_bytes=2, default_sharding="ddp", sequence_parallel=False,
          fused_cross_entropy=False, bucket_bytes=2e9),  # two buckets of 5e8 half-precision values
    Stack(name="megatron-2022", pattern=r"megatron.?lm|megatron.?llama", fused=True, attention="unfused",
          states="megatron", dp_overlap=False, gradient_bytes=4, default_sharding="ddp", sequence_parallel=False,
          fused_cross_entropy=False),
    Stack(name="llm-foundry", pattern=r"llm.?foundry|composer", attention="flash1", states="fsdp_fp32", fused=False,
          reduce_every_micro_batch=True, fused_cross_entropy=False),
    Stack(name="nanotron", pattern=r"nanotron", fused=False, states="megatron", gradient_bytes=4, logits_bytes=8.0,
          default_sharding="zero1", fused_cross_entropy=False),
    Stack(name="maxtext", pattern=r"maxtext|jax", fused=True, states="fsdp_fp32", fused_cross_entropy=True,
          default_checkpointing="full"),
    Stack(name="automodel", pattern=r"automodel", attention="flash3", states="fsdp_fp32", fused=True,
          fused_cross_entropy=False),
    Stack(name="torchtune", pattern=r"torchtune", states="pure", default_checkpointing="full", logits_bytes=10.0,
          default_sharding="zero3", ends_apart=True),
    Stack(name="litgpt", pattern=r"litgpt|lit-gpt", states="pure", fused_cross_entropy=False, loads_whole=True,
          default_sharding="zero3"),
    Stack(name="peft", pattern=r"peft", states="pure", fused_cross_entropy=False, logits_bytes=20.0),
    Stack(name="xtuner", pattern=r"xtuner|llama.?factory", states="deepspeed", default_checkpointing="full",
          fused_cross_entropy=False, logits_bytes=20.0),
    Stack(name="colossalai", pattern=r"coloss", fused=True, states="deepspeed", default_sharding="zero1"),
    Stack(name="fsdp", pattern=r"fsdp", states="fsdp_fp32", fused_cross_entropy=False),
)  # fmt: skip


def as_run(layout: Layout, stack: Stack) -> Layout:
    """FSDP has no ZeRO-2 of its own: it shards the weights too, and keeps them gathered until the backward pass."""
    if layout.sharding == "zero2" and layout.dp_shard > 1 and stack.states == "fsdp_fp32":
        return replace(layout, sharding="zero3", reshard_after_forward=False)
    return layout


def engine_named(name: str) -> Stack:
    """The stack of a `TrainSpec.engine`; an unknown name is an error that lists the known ones."""
    for stack in STACKS:
        if stack.name == name:
            return stack
    raise ValueError(f"engine={name!r}: allowed are {', '.join(ENGINES)}")


def stack_matching(framework: str, gpu: Gpu | None = None) -> Stack:
    """The traits of a framework by the name a published table gives it; an unknown one is plain PyTorch."""
    text = framework.lower()
    capability = (gpu.compute_capability if gpu else None) or (0, 0)
    if capability >= (9, 0) and re.search(r"megatron.?(core|lm|bridge)", text):
        return engine_named("megatron")  # the Hopper years of Megatron are Transformer Engine's
    for stack in (*OBSERVED, *STACKS):
        if stack.pattern and re.search(stack.pattern, text):
            return stack
    return Stack(name="pytorch", states="fsdp_fp32")
