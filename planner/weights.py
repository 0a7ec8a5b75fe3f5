"""Counts that follow from a model's shape: weights per part, and which of them are trained.

Specification: the module definitions of transformers' Llama, Qwen, Gemma, GPT-2 and Mixtral classes; LoRA adds
r x (in + out) weights to each targeted matrix (arXiv 2106.09685).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.specs import ModelSpec, TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a model by part."""

    attention_per_layer: int
    mlp_per_layer: int  # all experts of a mixture
    active_mlp_per_layer: int  # what one token passes through
    small_per_layer: int  # norms and biases
    embedding: int  # with position table
    head: int  # 0 where tied
    layers: int

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return self.attention_per_layer + self.mlp_per_layer + self.small_per_layer

    @property
    def total(self) -> int:
        """Weights of the model."""
        return self.layers * self.layer + self.embedding + self.head


@lru_cache(maxsize=256)
def weights(model: ModelSpec) -> Weights:
    """Count the weights."""
    h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = h * q + 2 * h * kv + q * h
    matrices = 3 if model.gated_mlp else 2
    if model.experts:
        one = matrices * h * model.expert_ffn
        mlp, active = model.experts * one + h * model.experts, model.experts_per_token * one + h * model.experts
    else:
        mlp = active = matrices * h * model.ffn
    small = 2 * h * (2 if model.family == "gemma2" else 1)
    if model.family == "qwen3":
        small += 2 * model.head_dim
    if model.attention_bias:
        small += q + 2 * kv + (0 if model.family in ("gpt2", "qwen2") else h)  # Qwen 2's o_proj has none
    if model.family == "gpt2":
        small += 2 * h + h + model.ffn + h  # norm biases, projection and MLP biases
    positions = (model.max_positions or 0) * h if model.family == "gpt2" else 0
    return Weights(
        attention_per_layer=attention,
        mlp_per_layer=mlp,
        active_mlp_per_layer=active,
        small_per_layer=small,
        embedding=model.vocab * h + positions + h * (2 if model.family == "gpt2" else 1),  # and the final norm
        head=0 if model.tied_embeddings else model.vocab * h,
        layers=model.layers,
    )


@lru_cache(maxsize=256)
def lora_weights(model: ModelSpec, train: TrainSpec) -> int:
    """Trained weights of the adapters over all layers."""
    h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    ffn = model.expert_ffn if model.experts else model.ffn
    copies = model.experts or 1
    sides = {
        "q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h,
        "gate_proj": (h + ffn) * copies, "up_proj": (h + ffn) * copies, "down_proj": (ffn + h) * copies,
        "c_attn": h + q + 2 * kv, "c_proj": q + h + ffn + h, "c_fc": h + ffn,
    }  # fmt: skip
    if not model.gated_mlp:
        sides["gate_proj"] = 0
    return model.layers * train.lora_rank * sum(sides.get(target, 0) for target in train.lora_targets)


def trained_weights(model: ModelSpec, train: TrainSpec) -> int:
    """Weights that get a gradient."""
    if train.method == "full":
        return weights(model).total
    whole = {"embed_tokens": model.vocab * model.hidden, "lm_head": model.vocab * model.hidden}
    unknown = [name for name in train.saved_modules if name not in whole]
    if unknown:
        raise ValueError(f"saved_modules={unknown[0]!r}: allowed are {', '.join(whole)}")
    return lora_weights(model, train) + sum(whole[name] for name in train.saved_modules)
