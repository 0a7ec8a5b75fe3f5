"""The training task: shape of the model, settings of the run, and the counts derived from both.

Weights: the module definitions of transformers' Llama, Mistral, Qwen, Gemma, GPT-2, Phi3, Mixtral and Qwen-MoE classes;
LoRA adds r x (in + out) weights to each adapted matrix (arXiv 2106.09685). Lengths: number of tokens that a micro-batch
computes when it is padded to its longest sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a model, by component."""

    mixer_per_layer: int  # of attention; the mean if some layers have Mamba-2 instead
    mlp_per_layer: int  # of a mixture: all experts, router and shared expert
    active_mlp_per_layer: int  # weights used by one token
    routed_per_layer: int  # part of mlp_per_layer that expert parallelism divides
    dense_mlp_per_layer: int  # per layer without experts, in a mixture that has such layers
    dense_layers: int  # 0 if all layers are alike
    small_per_layer: int  # norms and biases
    embedding: int  # including the position table
    head: int  # 0 if tied to the embedding
    layers: int

    @property
    def layer(self) -> int:
        """Weights of one layer (in a mixture, of one with experts)."""
        return self.mixer_per_layer + self.mlp_per_layer + self.small_per_layer

    @property
    def all_layers(self) -> int:
        """Weights of all layers."""
        return self.layers * self.layer - self.dense_layers * (self.mlp_per_layer - self.dense_mlp_per_layer)

    @property
    def total(self) -> int:
        """Weights of the model."""
        return self.all_layers + self.embedding + self.head


def attention_products(model: ModelSpec, tp: int = 1) -> tuple[tuple[float, float], ...]:
    """Return (input, output) columns of attention's projections on one of `tp` ranks; q, k and v count as one.

    Every rank has at least one head of keys and values. Multi-head latent attention (arXiv 2405.04434) uses low ranks
    that are not split; its value heads may be narrower than `head_dim`.
    """
    h, heads = float(model.hidden), model.heads / tp
    q, values = heads * model.head_dim, heads * (model.value_dim or model.head_dim)
    if model.kv_rank:
        into_q = ((h, float(model.q_rank)), (float(model.q_rank), q)) if model.q_rank else ((h, q),)
        down, up = float(model.kv_rank + model.rope_dim), heads * (model.head_dim - model.rope_dim) + values
        return (*into_q, (h, down), (float(model.kv_rank), up), (values, h))
    kv = model.kv_heads * model.head_dim / min(tp, model.kv_heads)
    return (h, q + 2.0 * kv), (q, h)


def mamba_products(model: ModelSpec, tp: int = 1) -> tuple[tuple[float, float], ...]:
    """Return (input, output) columns of the projections of a Mamba-2 layer on one of `tp` ranks (arXiv 2405.21060)."""
    h, inner = float(model.hidden), model.mamba_columns / tp
    return (h, 2.0 * inner + model.mamba_inputs / tp), (inner, h)


def mixer_columns(model: ModelSpec) -> float:
    """Return the columns per token of queries, keys, values and attention output; the mean with those of Mamba-2.

    The columns of Mamba-2 are the outputs of its first projection, of its scan, and of the norm after it.
    """
    heads, values, share = model.heads, model.value_dim or model.head_dim, model.mamba_layers / model.layers
    kv_heads = heads if model.kv_rank else model.kv_heads  # latent attention expands its keys for every head
    attention = float(heads * model.head_dim + kv_heads * (model.head_dim + values) + heads * values)
    return (1.0 - share) * attention + share * (4.0 * model.mamba_columns + model.mamba_inputs)


_BIASED_BUT_OUTPUT = ("gpt2", "qwen2", "qwen2_moe", "glm", "glm4", "glm4_moe")


def _count_small(model: ModelSpec) -> int:
    """Return the norm and bias weights of a layer."""
    h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = 2 * h * (2 if model.family in ("gemma2", "gemma3", "glm4") else 1)
    small = norms + model.q_rank + model.kv_rank
    if model.qk_norm or model.family in ("qwen3", "qwen3_moe", "gemma3"):
        small += 2 * model.head_dim
    if model.family in ("minimax_m2", "olmo2", "olmo3"):  # one norm over all heads
        small += q + kv
    if model.family == "gpt_oss":  # attention sinks
        small += model.heads
    if model.attention_bias and model.kv_rank:  # of the low-rank inputs, and of the output
        small += model.q_rank + model.kv_rank + model.rope_dim + h
    elif model.attention_bias:
        small += q + 2 * kv + (0 if model.family in _BIASED_BUT_OUTPUT else h)
    if model.mlp_bias:
        small += 2 * model.ffn + h
    if model.family == "gpt2":
        small += 2 * h + h + model.ffn + h  # norm biases, projection and MLP biases
    return small


@lru_cache(maxsize=256)
def weights(model: ModelSpec) -> Weights:
    """Count the weights of a model."""
    h = model.hidden
    matrices = 3 if model.gated_mlp else 2
    mlp = active = dense = matrices * h * model.ffn
    routed = 0
    if model.experts:
        expert, every = matrices * h * model.expert_ffn, h * model.experts
        if model.family == "gpt_oss":  # biases of the experts and the router
            expert, every = expert + (matrices - 1) * model.expert_ffn + h, every + model.experts
        if model.shared_expert_ffn:  # Qwen's has a gate with one column
            gate = h if model.family == "qwen2_moe" else 0
            every += matrices * h * model.shared_expert_ffn + gate
        routed = model.experts * expert
        mlp, active = routed + every, model.experts_per_token * expert + every
    positions = (model.max_positions or 0) * h if model.family == "gpt2" else 0
    mamba = model.mamba_layers
    mixers = ((attention_products(model), model.layers - mamba), (mamba_products(model), mamba))
    return Weights(
        mixer_per_layer=round(sum(into * out * n for shapes, n in mixers for into, out in shapes) / model.layers),
        mlp_per_layer=mlp,
        active_mlp_per_layer=active,
        routed_per_layer=routed,
        dense_mlp_per_layer=dense,
        dense_layers=model.dense_layers,
        small_per_layer=_count_small(model),
        embedding=model.vocab * h + positions + h * (2 if model.family == "gpt2" else 1),  # and the final norm
        head=0 if model.tied_embeddings else model.vocab * h,
        layers=model.layers,
    )


def active_weights(model: ModelSpec) -> int:
    """Return the weights used by one token: of a mixture, only its selected experts."""
    count = weights(model)
    idle = count.mlp_per_layer - count.active_mlp_per_layer
    return count.total - idle * (count.layers - count.dense_layers)


def mlp_width(model: ModelSpec) -> float:
    """Return the MLP columns used by one token per layer; the mean if some layers are dense."""
    if not model.experts:
        return float(model.ffn)
    sparse = model.expert_ffn * model.experts_per_token + model.shared_expert_ffn
    return sparse + (model.ffn - sparse) * model.dense_layers / model.layers


@lru_cache(maxsize=256)
def lora_weights(model: ModelSpec, train: TrainSpec, tp: int = 1) -> int:
    """Return the adapter weights over all layers, on one of `tp` tensor-parallel ranks.

    Of an adapter's two factors, the one on the split side of its matrix is split; the other is replicated.
    """
    h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    ffn, layers = model.ffn, model.layers

    def mlp(in_features: int, split: int) -> int:
        """One MLP matrix over all layers; in a mixture, only the parts outside the routed experts."""
        if not model.experts:
            return layers * (in_features + ffn // split)
        shared = in_features + model.shared_expert_ffn // split if model.shared_expert_ffn else 0
        return (layers - model.dense_layers) * shared + model.dense_layers * (in_features + ffn // split)

    sides = {
        "q_proj": layers * (h + q // tp), "k_proj": layers * (h + kv // tp), "v_proj": layers * (h + kv // tp),
        "o_proj": layers * (q // tp + h), "gate_proj": mlp(h, tp) if model.gated_mlp else 0, "up_proj": mlp(h, tp),
        "down_proj": mlp(h, tp), "c_attn": layers * (h + q + 2 * kv),
        "c_proj": layers * (q + h + ffn + h), "c_fc": layers * (h + ffn),
    }  # fmt: skip
    dense = train.lora_rank * sum(sides.get(target, 0) for target in train.lora_targets)
    return dense + expert_adapters(model, train) // tp


def expert_adapters(model: ModelSpec, train: TrainSpec) -> int:
    """Return the adapter weights of routed experts: one adapter per matrix of each expert.

    PEFT 0.21 adapts gate and up, which transformers 5 stacks in one matrix, with one adapter of twice the rank.
    """
    if not model.experts:
        return 0
    h, ffn, targets = model.hidden, model.expert_ffn, set(train.lora_targets)
    sides = len({"gate_proj", "up_proj", "down_proj"} & targets) * (h + ffn)
    if {"gate_proj", "up_proj"} <= targets:
        sides += 2 * (h + 2 * ffn) - 2 * (h + ffn)
    return train.lora_rank * model.experts * sides * (model.layers - model.dense_layers)


def trained_weights(model: ModelSpec, train: TrainSpec) -> int:
    """Return the weights with a gradient."""
    if train.method == "full":
        return weights(model).total
    sizes = {"embed_tokens": model.vocab * model.hidden, "lm_head": model.vocab * model.hidden}
    unknown = [name for name in train.saved_modules if name not in sizes]
    if unknown:
        raise PlanError(f"saved_modules={unknown[0]!r}: allowed are {', '.join(sizes)}")
    return lora_weights(model, train) + sum(sizes[name] for name in train.saved_modules)


Histogram = tuple[tuple[int, int], ...]

_MAX_BINS = 100_000


class PlanError(ValueError):
    """What is to be planned is invalid: cluster, model, run or calibration. The message gives the reason."""


def check_histogram(histogram: Histogram) -> Histogram:
    """Return the histogram if every length and count is a positive integer, else raise PlanError."""
    if len(histogram) > _MAX_BINS:
        raise PlanError(f"length_histogram has {len(histogram)} bins, {_MAX_BINS} at most are read")
    for row in histogram:
        if len(row) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in row):
            raise PlanError(f"length_histogram: {row!r}: must be (tokens, samples), both at least 1")
    return tuple(sorted(histogram))


@lru_cache(maxsize=1024)
def expected_longest(histogram: Histogram, samples: int, limit: int) -> float:
    """Return the mean length of the longest of `samples` samples, each truncated to `limit` tokens."""
    total = sum(count for _, count in histogram)
    below, mean, previous = 0, 0.0, 0.0
    for length, count in histogram:
        below += count
        share = (below / total) ** samples  # probability that the longest is at most this long
        mean += min(length, limit) * (share - previous)
        previous = share
    return mean


@lru_cache(maxsize=256)
def mean_length(histogram: Histogram, limit: int) -> float:
    """Return the mean length of a sample truncated to `limit`: its length after packing."""
    return expected_longest(histogram, 1, limit)


@lru_cache(maxsize=256)
def document_length(histogram: Histogram, limit: int) -> float:
    """Return the mean sample length of a token, truncated to `limit`: attention's length if samples share rows.

    In a sample of length L, a token attends to L / 2 keys on average, so the mean is sum of L^2 / sum of L.
    """
    cut = [(min(length, limit), count) for length, count in histogram]
    return sum(count * length**2 for length, count in cut) / sum(count * length for length, count in cut)


def longest_row(train: TrainSpec) -> int:
    """Return the tokens of the longest row that a micro-batch can hold, after rows are cut at `sequence_length`.

    A micro-batch is padded to its longest row, so the memory of the fullest micro-batch follows from this length.
    Packed rows fill the sequence. Rows of unknown length are assumed to have `sequence_length` tokens.
    """
    if train.packing or not train.length_histogram:
        return train.sequence_length
    return min(train.sequence_length, max(length for length, _ in train.length_histogram))


Method = Literal["full", "lora", "qlora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer, as in a Hugging Face config.json."""

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
    attention_bias: bool = False  # biases of queries, keys and values
    qk_norm: bool = False  # norms of each head's queries and keys, if the family does not determine it
    q_rank: int = 0  # multi-head latent attention: rank of the queries, 0 for full queries
    kv_rank: int = 0  # rank of keys and values together; 0: no latent attention
    rope_dim: int = 0  # columns of head_dim with positions; keys share them among all heads
    value_dim: int = 0  # columns of a value head; 0: head_dim
    mlp_bias: bool = False  # biases of Llama's three MLP matrices
    experts: int = 0  # MoE; 0 dense
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0  # shared expert that every token uses in addition to routed ones; 0: none
    expert_groups: float = 1.0  # fraction of expert groups that may contain one token's experts
    dense_layers: int = 0  # layers of a mixture with one MLP of `ffn` instead of experts
    mamba_layers: int = 0  # of `layers`, which are one per mixer, those with Mamba-2 instead of attention
    mamba_columns: int = 0  # of its values x, and of their gates z
    mamba_inputs: int = 0  # columns of B and C, and one time step per head
    max_positions: int | None = None
    rope_types: tuple[str, ...] = ("default",)  # RoPE types, as in config.json
    sliding_window: int | None = None
    quantised: str = ""  # quantisation method of the weights, such as "gptq"; "": none
    towers: tuple[str, ...] = ()  # parts of a multi-modal model that are not in this shape: "vision", "audio"
    sliding_layers: int | None = None  # number of sliding layers; None: all, in Gemma 2 every other


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The requested run."""

    method: Method = "lora"
    sequence_length: int = 2048  # tokens per sequence, padded or packed
    global_batch: int | None = None  # sequences per optimizer step; None: the planner chooses
    precision: str = "bf16"  # requested; forecasts use Layout.precision, which is fp32 on any CPU
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False  # each gradient is applied and freed as soon as it is computed
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    saved_modules: tuple[str, ...] = ()  # fully trained next to the adapters: "embed_tokens", "lm_head"
    length_histogram: tuple[tuple[int, int], ...] = ()  # (tokens, samples): determines padding of micro-batches
    packing: bool = False
    steps: int | None = None
    engine: str = "topoflight"  # stack that must support the layout: a name in planner.stacks
    attention: str = "sdpa"  # "eager", "sdpa", "flash"
    dtype: str = "auto"  # type in which TRL's trainer loads the model; auto: type of computation
    fused_cross_entropy: bool | None = None  # None: the planner chooses what the engine supports
    fixed_layout: tuple[tuple[str, Any], ...] = ()  # fields of contracts.layout.Layout that the job's settings fix
