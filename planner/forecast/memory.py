"""Bytes on the fullest GPU, by part.

Specification: mixed-precision state of 18 bytes per weight (arXiv 1910.02054), activations s b h (18 + 4 f/h) / t per
layer with flash attention and sequence parallelism (arXiv 2205.05198 and Megatron-LM theoretical_memory_usage.py),
NF4 at 0.53 bytes per weight with double quantisation (arXiv 2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from contracts.layout import Layout
from planner.forecast.hardware import GIB
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.forecast.stacks import Stack, as_run
from planner.forecast.weights import mlp_width, trained_weights, weights

NF4_BYTES = 0.53


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """What the allocator and the libraries take beyond the tensors; docs/model.md."""

    fragmentation: float = 1.05  # memory the caching allocator reserves over what it hands out
    reserved_bytes: float = 1.3 * GIB  # cuBLAS workspaces, communication buffers of the framework
    context_bytes: float = 1.2 * GIB  # CUDA context, kernels, NCCL: outside the allocator
    # What the fine-tune job loads after torch on a CPU, counted with a model of no size; docs/measurements/flights.md.
    cpu_bytes: float = 0.04 * GIB  # transformers' model code, tokenizer, rows
    cpu_peft_bytes: float = 0.06 * GIB  # PEFT and what it imports
    safe_share: float = 0.92  # of the card: above it, a run that fits today fails tomorrow


DEFAULT_MEMORY = MemoryConstants()


class MemoryParts(NamedTuple):
    """Bytes by what holds them, at the moment of the peak."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0  # full weights of the layers in flight, and their gradients
    activations: float = 0.0
    logits: float = 0.0
    fragmentation: float = 0.0
    reserved: float = 0.0  # workspaces
    context: float = 0.0

    @property
    def total(self) -> float:
        """Peak on the device."""
        return sum(self)

    @property
    def tensors(self) -> float:
        """What torch.cuda.max_memory_allocated would say."""
        return self.total - self.fragmentation - self.reserved - self.context


def computes_in_fp32(layout: Layout, *, on_cpu: bool) -> bool:
    """Whether everything is four bytes wide: asked for, or on a CPU."""
    return on_cpu or layout.precision == "fp32"


def activation_bytes_per_layer(
    model: ModelSpec, train: TrainSpec, tokens: float, layout: Layout, stack: Stack, *, on_cpu: bool = False
) -> float:
    """Bytes one layer keeps for the backward pass, without recomputation; flash attention stores no scores.

    Counted in tensors: residual inputs and outputs of the norms (fp32 copies where not fused), q, k, v and the
    attention's output, and the MLP's inner tensors. In fp32 they are twice the bytes, and there are no copies.
    """
    h, q = float(model.hidden), float(model.heads * model.head_dim)
    kv = float(model.kv_heads * model.head_dim)
    ffn = mlp_width(model)
    fused = stack.fused or layout.compile
    hidden = 5.0 if fused else 9.0
    in_fp32 = computes_in_fp32(layout, on_cpu=on_cpu)
    if in_fp32 and not fused:
        # What transformers' Llama layer hands to torch.autograd.graph.saved_tensors_hooks: two residual sums, and of
        # each norm its output and, where its weight trains, what that is multiplied with.
        hidden = 6.0 if train.method == "full" else 4.0
    inner = (3.0 if fused else 4.0) if model.gated_mlp else (2.0 if fused else 3.0)
    if train.method == "lora":  # a frozen product keeps its input only where an adapter needs it
        inner -= 0.0 if "down_proj" in train.lora_targets else 1.0
        hidden -= 0.0 if "up_proj" in train.lora_targets else 1.0
    split = layout.tp if layout.sequence_parallel else 1
    scores = 0.0
    if train.attention == "eager" or (stack.attention == "unfused" and layout.checkpointing != "selective"):
        # Softmax's result, what dropout makes of it, and the mask of a byte.
        scores = (9.0 if in_fp32 else 5.0) * model.heads * train.sequence_length / layout.tp
    wide = 4.0 if in_fp32 else 2.0
    return tokens * wide * (hidden * h / split + (2.0 * q + 2.0 * kv + inner * ffn) / layout.tp) + tokens * scores


def _state_bytes(train: TrainSpec, stack: Stack, *, in_fp32: bool) -> tuple[float, float, float]:
    """Bytes per trained weight: weights, gradients, optimizer."""
    # The optimizer of half-precision weights has their fp32 copy.
    copy = 4.0 if stack.states in ("megatron", "deepspeed") and not in_fp32 else 0.0
    if in_fp32 or stack.states == "fsdp_fp32":
        state = (4.0, 4.0, 8.0)
    elif stack.states == "pure":
        state = (2.0, 2.0, 4.0)
    elif stack.states == "deepspeed":  # half-precision gradients; the fp32 copy is the optimizer's
        state = (2.0, 2.0, 16.0)
    else:
        state = (2.0, float(stack.gradient_bytes), 12.0)
    if train.optimizer == "paged_adamw8bit":  # states live in host memory
        return state[0], state[1], 0.0
    if "8bit" in train.optimizer:
        return state[0], state[1], 2.0 + copy
    if train.optimizer in ("sgd", "adafactor"):
        return state[0], state[1], copy
    return state


def memory_parts(
    model: ModelSpec, train: TrainSpec, layout: Layout, stack: Stack, constants: MemoryConstants = DEFAULT_MEMORY,
    *, on_cpu: bool = False, first_stage: bool = False,
) -> MemoryParts:  # fmt: skip
    """Forecast the fullest rank's memory for one layout, or the first pipeline stage's."""
    layout = as_run(layout, stack)
    count = weights(model)
    lora = train.method != "full"
    tokens = layout.micro_batch * float(train.sequence_length) / layout.cp  # the longest micro-batch sets the peak
    layers = float(-(-model.layers // layout.pp))
    if layout.stage_layers:
        layers = float(max(sum(layout.stage_layers[i :: layout.pp]) for i in range(layout.pp)))
    ends = float(count.embedding + count.head) if layout.pp == 1 else float(count.embedding)
    elsewhere = count.routed_per_layer * (1.0 - 1.0 / layout.ep)  # experts of a layer that other ranks hold
    largest = count.layer - elsewhere
    if count.dense_layers:
        largest = max(largest, count.layer - count.mlp_per_layer + count.dense_mlp_per_layer)
    layer = (count.all_layers - elsewhere * (count.layers - count.dense_layers)) / count.layers  # the mean
    local = (layers * layer + ends) / layout.tp
    trained = local if not lora else trained_weights(model, train) / (layout.tp * layout.pp)
    zero = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[layout.sharding]
    by = float(layout.dp_shard)
    of_weights, of_gradients, of_optimizer = by if zero == 3 else 1.0, by if zero >= 2 else 1.0, by if zero else 1.0
    # The fine-tune job's pipelines keep a unit's weights and unreduced fp32 gradients whole until the schedule is over
    # (torch.distributed.pipelining, stage.backward_maybe_with_nosync); so it does an adapter's when it accumulates.
    kept_whole = stack.name == "topoflight" and zero == 3 and by > 1 and layout.pp > 1
    if kept_whole or (stack.name == "topoflight" and lora and layout.gradient_accumulation > 1):
        of_gradients = 1.0

    in_fp32 = computes_in_fp32(layout, on_cpu=on_cpu)
    element = 4.0 if in_fp32 else 2.0  # bytes of what is computed with
    w, g, o = _state_bytes(train, stack, in_fp32=in_fp32)
    if lora:
        base = element * local
        if train.method == "qlora":
            base = (NF4_BYTES * layers * layer + element * ends) / layout.tp
        adapter = 2.0 if stack.states == "pure" and not in_fp32 else 4.0
        in_weights = (base + adapter * trained) / of_weights
        gradients, optimizer = adapter * trained / of_gradients, 2.0 * adapter * trained / of_optimizer
    else:
        in_weights, gradients = w * local / of_weights, g * local / of_gradients
        optimizer = o * local / of_optimizer
    if layout.offload != "none":
        optimizer = 0.0
    if layout.offload == "all":
        in_weights, gradients = 0.0, 0.0

    gathered = copies = 0.0  # copies: autocast's, in half precision, of fp32 weights that no FSDP unit casts
    # The fine-tune job replicates beside TP and PP by FSDP units over one rank.
    one_rank_units = stack.name == "topoflight" and layout.dp_replicate > 1 and layout.tp * layout.pp > 1
    if (zero == 3 and by > 1) or one_rank_units:
        wide = NF4_BYTES if train.method == "qlora" else element  # frozen 4-bit weights travel as they are
        unit = max(wide * largest, element * ends / 2.0) / layout.tp  # the ends are two units
        # This unit and the one prefetched; the unit's whole gradient and, in FSDP2, its copy in the order of the ranks
        # (in fp32 where gradients are reduced so).
        after = wide * largest / layout.tp if stack.ends_apart else unit  # the head's neighbour is a layer
        whole = wide * layers * layer + element * ends
        gathered = unit + after if layout.reshard_after_forward and not kept_whole else whole / layout.tp
        copy = 0.0 if not stack.ends_apart else 2.0 if stack.states == "fsdp_fp32" and not in_fp32 else 1.0
        gathered += 0.0 if lora else (1.0 + copy) * unit
    elif stack.states == "fsdp_fp32" and not lora and not in_fp32:
        copies = 2.0 * local
        if stack.name == "topoflight" and layout.checkpointing == "full":
            # The fine-tune job runs without autocast's cache, and nothing else keeps them: what one layer, or the head,
            # casts (measured on a CPU: 2.0 bytes per weight less than with the cache).
            copies = 2.0 * max(largest, float(count.head)) / layout.tp

    per_layer = activation_bytes_per_layer(model, train, tokens, layout, stack, on_cpu=on_cpu)
    boundary = element * tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    if layout.checkpointing == "selective" and stack.states not in ("megatron", "deepspeed"):
        per_layer = (per_layer + boundary) / 2.0
    flights = 1.0
    if layout.pp > 1:
        flights = float(layout.gradient_accumulation)
        if layout.schedule != "gpipe":
            extra = 1.0 + (layout.pp - 1) / (layout.pp * layout.virtual_stages) if layout.virtual_stages > 1 else 1.0
            flights = min(flights, layout.pp * extra)
    kept = layers * (boundary if layout.checkpointing == "full" else per_layer)
    if layout.checkpointing == "none":  # the graph of each micro-batch in flight holds the weights it was made with
        kept, copies = kept + copies, 0.0
    again = per_layer if layout.checkpointing == "full" else 0.0

    rate = 2.0 if layout.fused_cross_entropy else stack.logits_bytes
    logits = tokens * model.vocab / layout.tp * rate
    if layout.fused_cross_entropy:  # in chunks of a thousand tokens
        logits = min(logits, 1024.0 * model.vocab / layout.tp * stack.logits_bytes)
    # The loss, and with it the forward pass, is over before a layer is made again.
    first, last = flights * kept + max(again, copies), kept + max(again, copies + logits)
    if layout.pp > 1 and (first_stage or first > last):
        activations, logits = first, 0.0
    else:
        activations = last - logits
    # Gradients appear as the backward pass frees activations, unless a buffer holds them throughout.
    persistent = lora or stack.states in ("megatron", "deepspeed") or layout.gradient_accumulation > 1 or zero in (1, 2)
    # So do DDP's: torch's Reducer keeps its buckets, which together hold all gradients, from step to step.
    ddp = zero == 0 and layout.data_parallel > 1 and not one_rank_units
    buckets = gradients if ddp and stack.ddp_bucket_copies else 0.0
    persistent |= ddp and not buckets
    head = min(gradients, g * model.vocab * model.hidden / layout.tp / of_gradients)  # the first of them, and largest
    if train.optimizer_in_backward:
        gradients = head
    elif not persistent:
        if activations + logits + head >= gradients + per_layer:
            gradients = head
        else:
            activations, logits = min(activations, per_layer), 0.0
    gradients += buckets
    held = in_weights + gradients + optimizer + gathered + activations + logits
    load = 2.0 * local if stack.loads_whole and zero == 3 and by > 1 else 0.0
    if in_weights + load + gathered > held:  # the peak is the load, before the first step
        in_weights, gradients, optimizer, activations, logits = in_weights + load, 0.0, 0.0, 0.0, 0.0
        held = in_weights + gathered
    loaded = constants.cpu_bytes + (constants.cpu_peft_bytes if lora else 0.0)
    return MemoryParts(
        weights=in_weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        activations=activations,
        logits=logits,
        # CUDA's caching allocator; on a CPU the flight counts what is allocated (finetune/flight.py, return_freed)
        fragmentation=0.0 if on_cpu else held * (constants.fragmentation - 1.0),
        reserved=0.0 if on_cpu else constants.reserved_bytes + stack.bucket_bytes,
        context=loaded if on_cpu else constants.context_bytes,
    )
