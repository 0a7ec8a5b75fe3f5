"""What is to be trained: the model's shape and the training run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["full", "lora", "qlora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer, as a Hugging Face config.json gives it."""

    name: str
    family: str  # "llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "mixtral", ...: planner.forecast.models
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    gated_mlp: bool = True  # SwiGLU: three matrices
    attention_bias: bool = False
    mlp_bias: bool = False  # of Llama's three MLP matrices
    experts: int = 0  # MoE; 0 dense
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0  # of the expert that every token passes through beside the routed ones; 0: none
    dense_layers: int = 0  # of a mixture's layers, how many have one MLP of `ffn` in place of experts
    max_positions: int | None = None
    sliding_window: int | None = None
    sliding_layers: int | None = None  # how many of the layers slide; None: all, of Gemma 2's every other


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The run that was asked for."""

    method: Method = "lora"
    sequence_length: int = 2048  # tokens per sequence, padded or packed
    mean_tokens: float | None = None  # real tokens per sequence where padding is to the longest; None: all
    global_batch: int | None = None  # sequences per optimizer step; None: the planner chooses
    precision: str = "bf16"  # asked for; Layout.precision is what runs, and what forecasts go by: fp32 on any CPU
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False  # each gradient is used as soon as it is there, and freed
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    saved_modules: tuple[str, ...] = ()  # trained whole beside the adapters: "embed_tokens", "lm_head"
    length_histogram: tuple[tuple[int, int], ...] = ()  # (tokens, samples): padding follows from the micro-batch
    packing: bool = False
    steps: int | None = None
    engine: str = (
        "topoflight"  # "topoflight", "trl", "deepspeed", "torchtitan", "megatron": what must be able to run it
    )
    attention: str = "sdpa"  # "eager", "sdpa", "flash"
    fused_cross_entropy: bool | None = None  # None: the planner chooses what the engine has
    host_threads: int = 1  # OMP threads per rank, for an optimizer on the CPU; torchrun sets OMP_NUM_THREADS=1
