"""Bytes on the fullest GPU, by part.

Specification: mixed-precision state of 18 bytes per weight (arXiv 1910.02054), activations s b h (18 + 4 f/h) / t per
layer with flash attention and sequence parallelism (arXiv 2205.05198 and Megatron-LM theoretical_memory_usage.py),
NF4 at 0.53 bytes per weight with double quantisation (arXiv 2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.hardware import GIB
from planner.layout import Layout
from planner.specs import ModelSpec, TrainSpec
from planner.stacks import Stack
from planner.weights import trained_weights, weights

NF4_BYTES = 0.53


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """What the allocator and the libraries take beyond the tensors; docs/model.md."""

    fragmentation: float = 1.10  # of everything the caching allocator holds
    fixed_bytes: float = 2.0 * GIB  # CUDA context, cuBLAS workspaces, NCCL buffers
    safe_share: float = 0.92  # of the card: above it, a run that fits today fails tomorrow


DEFAULT_MEMORY = MemoryConstants()


class MemoryParts(NamedTuple):
    """Bytes by what holds them."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0  # full weights of the layers in flight, and their gradients
    activations: float = 0.0
    logits: float = 0.0
    fragmentation: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        """Peak."""
        return sum(self)


def activation_bytes_per_layer(model: ModelSpec, tokens: float, layout: Layout, stack: Stack, *, lora: bool) -> float:
    """Bytes one layer keeps for the backward pass, without recomputation."""
    h, q = float(model.hidden), float(model.heads * model.head_dim)
    kv = float(model.kv_heads * model.head_dim)
    ffn = float(model.expert_ffn * model.experts_per_token if model.experts else model.ffn)
    tp = layout.tp
    # two residual inputs, two norm outputs, attention in and out: hidden-sized; flash attention stores no scores.
    hidden = 2.0 * h * (6.0 if stack.fused or layout.compile else 9.0)
    inner = 2.0 * (q + 2.0 * kv + q) + 2.0 * ffn * ((4.0 if model.gated_mlp else 2.5) - (1.0 if stack.fused else 0.0))
    if lora:
        inner *= 1.0
    return tokens * (hidden / (tp if layout.sequence_parallel else 1) + inner / tp)


def memory_parts(
    model: ModelSpec, train: TrainSpec, layout: Layout, stack: Stack, constants: MemoryConstants = DEFAULT_MEMORY,
    *, on_cpu: bool = False,
) -> MemoryParts:  # fmt: skip
    """Forecast the fullest rank's memory for one layout."""
    count = weights(model)
    lora = train.method != "full"
    sequence = train.mean_tokens if train.mean_tokens is not None and not train.packing else train.sequence_length
    # Memory is set by the longest micro-batch, not the mean one.
    sequence = max(float(sequence), float(train.sequence_length)) if not train.packing else float(train.sequence_length)
    tokens = layout.micro_batch * sequence / layout.cp
    layers = float(-(-model.layers // layout.pp))
    if layout.stage_layers:
        layers = float(max(sum(layout.stage_layers[i :: layout.pp]) for i in range(layout.pp)))
    ends = count.embedding + count.head if layout.pp == 1 else max(count.embedding, count.head or count.embedding)
    expert_share = layout.ep if model.experts else 1
    layer_weights = (count.layer - count.mlp_per_layer) + count.mlp_per_layer / expert_share
    local = (layers * layer_weights + ends) / layout.tp
    trained = local if not lora else trained_weights(model, train) / (layout.tp * layout.pp)
    shard3 = layout.dp_shard if layout.sharding == "zero3" else 1
    shard2 = layout.dp_shard if layout.sharding in ("zero2", "zero3") else 1
    shard1 = layout.dp_shard if layout.sharding != "ddp" else 1

    if lora:
        base = (
            NF4_BYTES * layers * layer_weights / layout.tp + 2.0 * ends / layout.tp
            if train.method == "qlora"
            else 2.0 * local
        )
        if on_cpu or train.precision == "fp32":
            base = 4.0 * local
        held = base / shard3
        weights_bytes, gradients, optimizer = held + 4.0 * trained, 4.0 * trained, 8.0 * trained
    elif train.precision == "fp32" or on_cpu or stack.states == "fsdp_fp32":
        weights_bytes, gradients, optimizer = 4.0 * local / shard3, 4.0 * local / shard2, 8.0 * local / shard1
    elif stack.states == "pure":
        weights_bytes, gradients, optimizer = 2.0 * local / shard3, 2.0 * local / shard2, 4.0 * local / shard1
    else:
        weights_bytes, gradients, optimizer = 2.0 * local / shard3, 4.0 * local / shard2, 12.0 * local / shard1
    if layout.offload != "none":
        optimizer = 0.0
    if layout.offload == "all":
        weights_bytes, gradients = 0.0, gradients / 2.0
    gathered = 0.0
    if shard3 > 1:
        in_flight = 2.0 * max(layer_weights, ends / 2.0) / layout.tp * 2.0  # this layer and the one prefetched
        if not layout.reshard_after_forward:
            in_flight = 2.0 * local
        gathered = in_flight + (2.0 * max(layer_weights, ends / 2.0) / layout.tp if not lora else 0.0)

    per_layer = activation_bytes_per_layer(model, tokens, layout, stack, lora=lora)
    boundary = 2.0 * tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    in_flight_batches = 1.0
    if layout.pp > 1:
        in_flight_batches = float(layout.gradient_accumulation)
        if layout.schedule != "gpipe":
            extra = 1.0 + (layout.pp - 1) / (layout.pp * layout.virtual_stages) if layout.virtual_stages > 1 else 1.0
            in_flight_batches = min(in_flight_batches, layout.pp * extra)
    if layout.checkpointing == "full":
        activations = in_flight_batches * layers * boundary + per_layer
    else:
        activations = in_flight_batches * layers * per_layer
    logits_rate = 2.0 if layout.fused_cross_entropy else stack.logits_bytes
    last_stage_logits = tokens * model.vocab / layout.tp * logits_rate
    if layout.fused_cross_entropy:
        last_stage_logits = min(last_stage_logits, 1024.0 * model.vocab / layout.tp * 8.0)  # chunks
    first_stage_is_fuller = layout.pp > 1 and activations > last_stage_logits
    logits = 0.0 if first_stage_is_fuller else last_stage_logits
    if layout.pp > 1 and not first_stage_is_fuller:
        activations = activations / in_flight_batches
    held = weights_bytes + gradients + optimizer + gathered + activations + logits
    fixed = 0.3 * GIB if on_cpu else constants.fixed_bytes
    return MemoryParts(
        weights=weights_bytes,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        activations=activations,
        logits=logits,
        fragmentation=held * (constants.fragmentation - 1.0),
        fixed=fixed,
    )
