"""Bytes on the fullest GPU, by component: the terms of an engine, summed up at the time of the peak."""

from __future__ import annotations

import math
from typing import NamedTuple

from contracts.layout import Layout
from hardware.units import GIB
from planner.forecast.compute import Job
from planner.forecast.engine import NF4_SCALES, Engine, Share, share_of
from planner.forecast.specs import ModelSpec, TrainSpec, lora_weights, trained_weights

# Memory of the allocator and of libraries in addition to tensors; docs/explanation/forecast.md.
FRAGMENTATION = 1.05  # reserved by the caching allocator, relative to allocated memory
_RESERVED_BYTES = 0.9 * GIB  # cuBLAS workspaces
RESERVED_RANKS_BYTES = 0.4 * GIB  # communication buffers of the framework, with more than one rank
_CONTEXT_BYTES = 0.6 * GIB  # CUDA context and kernels, outside the allocator
NCCL_BYTES = 0.6 * GIB  # NCCL's channels and their buffers, with more than one rank
_CPU_BYTES = 0.02 * GIB  # of the fine-tune job on a CPU: threads, modules imported in the steps; docs/decisions/0139
SAFE_SHARE = 0.92  # of host memory and the job's measured use; a run above it may fail


class MemoryParts(NamedTuple):
    """Bytes by purpose, at the time of the peak."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0  # full weights of the active layers, and their gradients
    activations: float = 0.0
    logits: float = 0.0
    fragmentation: float = 0.0
    reserved: float = 0.0  # workspaces
    context: float = 0.0
    loading: float = 0.0  # complete 4-bit weights, before they are sharded

    @property
    def total(self) -> float:
        """Peak on the device."""
        return sum(self)


def memory_of(job: Job, layout: Layout) -> MemoryParts:
    """Return the memory of one layout of a job."""
    return memory_parts(job.model, job.train, layout, job.engine, on_cpu=not job.has_gpu)


def memory_parts(
    model: ModelSpec, train: TrainSpec, layout: Layout, engine: Engine, *,
    on_cpu: bool = False, first_stage: bool = False,
) -> MemoryParts:  # fmt: skip
    """Forecast the memory of the fullest rank, or of the first pipeline stage, for one layout."""
    share = share_of(model, train, engine.as_run(layout), on_cpu=on_cpu)
    in_weights, gradients, optimizer = count_states(engine, share)
    gathered = engine.gathered(share)
    layer, activations, logits = _count_stored(engine, share, first_stage=first_stage)
    gradients, activations, logits = _count_backward(engine, share, gradients, layer, activations, logits)
    live = (in_weights, gradients, optimizer, gathered, activations, logits)
    several = layout.world_size > 1
    buckets = engine.bucket_bytes if layout.data_parallel > 1 else 0.0
    parts = MemoryParts(
        *live,
        # CUDA's caching allocator; on a CPU the job counts allocations (finetune/recorder.py, return_freed)
        fragmentation=0.0 if on_cpu else sum(live) * (FRAGMENTATION - 1.0),
        reserved=0.0 if on_cpu else _RESERVED_BYTES + several * RESERVED_RANKS_BYTES + buckets,
        context=_CPU_BYTES if on_cpu else _CONTEXT_BYTES + several * NCCL_BYTES,
    )
    if not (engine.quantises_whole and share.sharded and train.method == "qlora"):
        return parts
    loading = MemoryParts(loading=_count_frozen(engine, share, sharded=False), context=parts.context)
    return max(parts, loading, key=lambda each: each.total)


def count_states(engine: Engine, share: Share) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer states between steps."""
    layout = share.layout

    def trained(sharded: bool) -> float:
        return share.part(share.trained, share.routed_trained, sharded=sharded)

    gradients, optimizer = trained(engine.shards_gradients(share)), trained(share.zero > 0)
    if share.adapters:
        is_half = engine.halves_adapters and share.train.method == "qlora" and not share.sharded
        adapter = 4.0 if share.in_fp32 else 2.0 if is_half else engine.adapter_bytes
        # Modules that PEFT copies to train them fully stay in the model's type, and so do their states.
        mean = adapter + (engine.loaded_bytes(share) - adapter) * share.whole / max(1.0, share.trained)
        in_weights = _count_frozen(engine, share, sharded=share.zero == 3) + mean * trained(share.zero == 3)
        gradients, optimizer = mean * gradients, 2.0 * mean * optimizer
    else:
        each = engine.state_bytes(share)
        in_weights, gradients = each.weights * trained(share.zero == 3), each.gradients * gradients
        optimizer = each.optimizer * optimizer
    if layout.offload != "none":
        optimizer = 0.0
    if layout.offload == "all":
        in_weights, gradients = _count_scales(share), 0.0
    return in_weights, gradients, optimizer


def _count_scales(share: Share) -> float:
    return NF4_SCALES * (share.local - share.ends) if share.train.method == "qlora" else 0.0


def _count_frozen(engine: Engine, share: Share, *, sharded: bool) -> float:
    loaded = engine.loaded_bytes(share)
    each = share.frozen_bytes if share.train.method == "qlora" else loaded
    layers = each * share.part(share.local - share.ends, share.routed, sharded=sharded)
    return layers + loaded * share.part(share.ends, 0.0, sharded=sharded) + _count_scales(share)


def checkpoint_bytes(model: ModelSpec, train: TrainSpec, *, in_fp32: bool) -> float:
    """Return the bytes of one fine-tune checkpoint, for all ranks together: trained weights and AdamW's two moments.

    A full fine-tune stores weights in fp32, PEFT its adapters; modules that PEFT trains fully keep the model's type.
    """
    trained = trained_weights(model, train)
    saved = 0 if train.method == "full" else trained - lora_weights(model, train)
    return 3.0 * (4.0 * (trained - saved) + (4.0 if in_fp32 else 2.0) * saved)


STORAGE_BYTES_PER_SECOND = 125.0 * 2**20  # if unknown: default throughput of a gp3 volume (AWS, EBS volumes)


def save_seconds(checkpoint_bytes: float, step_seconds: float, bytes_per_second: float | None, shortest: int) -> int:
    """Return the seconds that saving may take after SIGTERM: the current step, plus the time to write to storage.

    If a checkpoint is being written when the signal arrives, it is completed first, so two checkpoints are counted.
    """
    needed = math.ceil(step_seconds + 2 * checkpoint_bytes / (bytes_per_second or STORAGE_BYTES_PER_SECOND))
    return max(shortest, needed)


def micro_batches_held(layout: Layout, *, last: bool = False) -> float:
    """Return how many micro-batches' activations the first, or the last, stage holds at the same time."""
    if layout.pp > 1 and layout.schedule == "gpipe":
        return float(layout.gradient_accumulation)
    chunks = (layout.pp - 1) / layout.virtual_stages  # that each stage starts ahead of the next, as micro-batches
    held = layout.pp - chunks if last else layout.pp + (chunks if layout.virtual_stages > 1 else 0.0)
    return min(float(layout.gradient_accumulation), held)


def _count_stored(engine: Engine, share: Share, *, first_stage: bool) -> tuple[float, float, float]:
    """Return the bytes that the backward pass needs: per layer, and of activations and logits of the fullest stage."""
    layout = share.layout
    layer = per_layer = engine.layer_activations(share)
    copies = engine.casts(share)
    # Under autocast, hidden states between the layers are fp32, as the embedding's weights are.
    boundary = (4.0 if copies else share.element) * share.tokens * share.model.hidden
    boundary /= layout.tp if layout.sequence_parallel else 1
    if layout.checkpointing == "selective" and not engine.selective_attention:
        per_layer = engine.selective_activations(share, boundary)
    full = layout.checkpointing == "full"
    total = share.layers * (boundary if full else per_layer)
    if layout.checkpointing == "none":  # the graph of each active micro-batch contains the weights it used
        total, copies = total + copies, 0.0
    # Gradients at the start of the backward pass of a layer's experts, counted with a TorchDispatchMode.
    working = boundary * share.model.experts_per_token * engine.weighs_in_fp32 * (2.0 if layout.compile else 6.0)
    again = working + (layer + (2.0 * share.largest if copies else 0.0) if full else layer - per_layer)
    logits = engine.logits(share)
    # The loss, and so the forward pass, is complete before a layer is recomputed.
    first = micro_batches_held(layout) * total + max(again, copies)
    last = micro_batches_held(layout, last=True) * total + max(again, copies + logits)
    if layout.pp > 1 and (first_stage or first > last):
        return per_layer + working, first, 0.0
    return per_layer + working, last - logits, logits


def _count_backward(
    engine: Engine, share: Share, gradients: float, per_layer: float, activations: float, logits: float
) -> tuple[float, float, float]:
    """Return gradients, activations and logits at the peak: gradients grow as the backward pass frees activations."""
    layout = share.layout
    ddp = share.zero == 0 and layout.data_parallel > 1 and not engine.in_units(share)
    buckets = gradients if ddp and engine.ddp_bucket_copies else 0.0
    # This does not apply if a buffer holds all gradients throughout, as with DDP: torch's Reducer keeps its buckets
    # between steps.
    buffered = share.adapters or engine.gradient_buffer or layout.gradient_accumulation > 1 or share.zero in (1, 2)
    persistent = buffered or (ddp and not buckets)
    each = engine.state_bytes(share).gradients * share.model.vocab * share.model.hidden
    by = share.group if engine.shards_gradients(share) else 1.0
    head = min(gradients, each / layout.tp / by)  # the first and largest of them
    at_first = not persistent and activations + logits + head >= gradients + per_layer
    if share.train.optimizer_in_backward or at_first:
        gradients = head
    elif not persistent:
        activations, logits = min(activations + logits, per_layer), 0.0
    return gradients + buckets, activations, logits
