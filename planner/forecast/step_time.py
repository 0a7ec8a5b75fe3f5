"""Seconds of one optimizer step, by part, for one layout.

Composition: per micro-batch the layers of the fullest stage, tensor-parallel traffic, gathered weights under the
compute; then the pipeline's bubble (p - 1)/v, the gradient reduction that the last backward pass cannot hide, and the
optimizer. Specification of the traffic: arXiv 1910.02054 (ZeRO), 2304.11277 (FSDP), 2104.04473 (pipeline), 2205.05198
(sequence parallelism, recomputation).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from contracts.layout import Layout
from planner.forecast.compute import DEFAULT, Constants, LayerCost, Rates, head_cost, layer_cost
from planner.forecast.lengths import expected_longest, mean_length
from planner.forecast.links import Links
from planner.forecast.memory import NF4_BYTES
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.forecast.stacks import Stack, as_run
from planner.forecast.weights import trained_weights, weights


class StepParts(NamedTuple):
    """Seconds of one optimizer step by what they are spent on; communication counts only where it is exposed."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    host: float = 0.0  # the GPU waits for kernels to be started
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    gather: float = 0.0  # FSDP / ZeRO-3 weights
    reduce: float = 0.0  # gradients
    pipeline_send: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return sum(self)

    @property
    def communication(self) -> float:
        """All exposed communication."""
        return (
            self.tensor_parallel + self.context_parallel + self.expert_parallel + self.gather + self.reduce
            + self.pipeline_send
        )  # fmt: skip


# DRAM traffic that a CPU optimizer reaches: one core streams about 5.5 GB/s through AdamW's 28 bytes per weight, and
# eight ranks share the 150-300 GB/s of a two-socket server.
ADAM_THREAD_BYTES_PER_SECOND = 5.5e9
ADAM_RANK_BYTES_PER_SECOND = 20e9


@dataclass(slots=True, kw_only=True)
class Job:
    """What a step's time follows from; layer costs are cached over the layouts tried.

    `rules.Question` holds what the rules ask of the same run; a job on Kubernetes is `planner.kubernetes.job.JobSpec`.
    """

    model: ModelSpec
    train: TrainSpec
    links: Links
    rates: Rates
    stack: Stack
    constants: Constants = DEFAULT
    host_adam_bytes_per_second: float = ADAM_RANK_BYTES_PER_SECOND
    _layers: dict[tuple[float, ...], LayerCost] = field(default_factory=dict)
    _heads: dict[tuple[float, int, bool], tuple[float, float]] = field(default_factory=dict)

    def sequence(self, micro_batch: int) -> float:
        """Tokens per sequence that are computed: packed to the full length, or padded to a micro-batch's longest."""
        if not self.train.packing:
            if self.train.mean_tokens is not None:
                return self.train.mean_tokens
            if self.train.length_histogram:
                return expected_longest(self.train.length_histogram, micro_batch, self.train.sequence_length)
        return float(self.train.sequence_length)

    def real_tokens(self, micro_batch: int) -> float:
        """Tokens per sequence that are not padding."""
        if self.train.length_histogram and not self.train.packing and self.train.mean_tokens is None:
            return mean_length(self.train.length_histogram, self.train.sequence_length)
        return self.sequence(micro_batch)

    def layer(self, layout: Layout, tokens: float) -> LayerCost:
        """Cached `layer_cost`."""
        key = (tokens, layout.micro_batch, layout.tp, layout.sequence_parallel, layout.ep, layout.cp, layout.compile)
        cost = self._layers.get(key)
        if cost is None:
            adapters = self.train.lora_targets if self.train.method != "full" else ()
            cost = self._layers[key] = layer_cost(
                self.model, tokens, self.sequence(layout.micro_batch), layout.tp, layout.sequence_parallel, self.rates,
                self.stack, ep=layout.ep, lora_targets=adapters, compiled=layout.compile, constants=self.constants,
            )  # fmt: skip
        return cost

    def head(self, layout: Layout, tokens: float) -> tuple[float, float]:
        """Cached `head_cost`."""
        key = (tokens, layout.tp, layout.fused_cross_entropy)
        cost = self._heads.get(key)
        if cost is None:
            cost = self._heads[key] = head_cost(
                self.model, tokens, layout.tp, self.rates, fused=layout.fused_cross_entropy, constants=self.constants
            )
        return cost


def _overlap(first: float, second: float, loss: float) -> float:
    """Seconds of two things that run at once and share the machine."""
    return max(first, second) + loss * min(first, second)


def strides(layout: Layout) -> tuple[int, int, int, int]:
    """Rank distance of neighbours in the cp, dp_shard, dp_replicate and pp groups; tp's is 1."""
    cp = layout.tp
    shard = cp * layout.cp
    replicate = shard * layout.dp_shard
    return cp, shard, replicate, replicate * layout.dp_replicate


def scatters(job: Job, layout: Layout) -> int:
    """How often one step reduces sharded gradients.

    The fine-tune job scatters a whole model's after each micro-batch, adapters' and a pipeline's after the last.
    """
    once = job.stack.name == "topoflight" and (job.train.method != "full" or layout.pp > 1)
    every = layout.reshard_after_forward or layout.pp == 1
    return layout.gradient_accumulation if every and not once else 1


def gathers(job: Job, layout: Layout) -> int:
    """How often one step gathers what it keeps gathered until the backward pass, or until the step is over."""
    kept = not layout.reshard_after_forward and (layout.pp > 1 or job.stack.name == "topoflight")
    return 1 if kept else layout.gradient_accumulation


def step_parts(job: Job, layout: Layout) -> StepParts:
    """Forecast one layout."""
    model, train, stack, links, k = job.model, job.train, job.stack, job.links, job.constants
    layout = as_run(layout, stack)
    count = weights(model)
    full = train.method == "full"
    tokens = layout.micro_batch * job.sequence(layout.micro_batch) / layout.cp
    micro_batches = layout.gradient_accumulation
    per_rank = model.layers / layout.pp
    if layout.stage_layers:
        per_rank = float(max(sum(layout.stage_layers[i :: layout.pp]) for i in range(layout.pp)))
    elif model.layers % layout.pp:
        per_rank = float(-(-model.layers // layout.pp))

    cost = job.layer(layout, tokens)
    forward_layer = cost.gemm + cost.attention + cost.elementwise
    gemm_back = 2.0 if full else 1.0  # frozen weights get no gradient
    backward_layer = cost.gemm * gemm_back + cost.attention * 2.5 + cost.elementwise * 2.0
    recompute_layer = forward_layer if layout.checkpointing == "full" else 0.0
    if layout.checkpointing == "selective":
        # Megatron runs the core of attention again; FSDP stacks every second product and what lies between.
        core = stack.states in ("megatron", "deepspeed")
        recompute_layer = cost.attention if core else 0.5 * cost.gemm + cost.elementwise
    on_cpu = job.rates.device == "CPU"  # where starting an operator and running it share one thread: nothing hides it
    sharded = layout.sharding == "zero3" and layout.dp_shard > 1
    ends = (2.0 if stack.ends_apart else 1.0) if sharded else 0.0  # FSDP units beside the layers
    hooks = k.unit_kernels * job.rates.launch_seconds if sharded else 0.0
    forward_host, backward_host = cost.host + hooks, 1.7 * cost.host + hooks
    forward_host = forward_host if on_cpu else max(0.0, forward_host - forward_layer)
    backward_host = backward_host if on_cpu else max(0.0, backward_host - backward_layer)
    host_layer = forward_host * (2.0 if layout.checkpointing == "full" else 1.0) + backward_host
    host_ends = 2.0 * ends * hooks if on_cpu else 0.0  # beside a GPU, the head's product hides them

    head_gemm, head_loss = job.head(layout, tokens)
    head = head_gemm * (2.0 + (1.0 if full else 0.0)) + head_loss

    wide = 4.0 if layout.precision == "fp32" else 2.0  # bytes of an activation or a gathered weight
    # Tensor parallelism: an all-reduce (or its two halves) after attention and after the MLP, forward and backward.
    tp_layer = 0.0
    if layout.tp > 1:
        rounds = 4.0 + (2.0 if layout.checkpointing == "full" else 0.0)
        exposed = 1.0 - k.tp_hidden if stack.tp_overlap and layout.sequence_parallel else 1.0
        tp_layer = rounds * exposed * links.all_reduce_seconds(wide * tokens * model.hidden, layout.tp, 1)
    cp_stride, shard_stride, replicate_stride, pp_stride = strides(layout)
    cp_layer = 0.0
    if layout.cp > 1:
        kv = 2.0 * wide * tokens * layout.cp * model.kv_heads * model.head_dim / min(layout.tp, model.kv_heads)
        ring = links.ring_seconds(kv, layout.cp, cp_stride)
        cp_layer = max(0.0, ring - cost.attention) + max(0.0, 2.0 * ring - 2.5 * cost.attention) + 0.3 * ring
    ep_layer = 0.0
    if layout.ep > 1:
        sent = wide * tokens * model.experts_per_token * model.hidden
        ep_layer = 4.0 * links.all_to_all_seconds(sent, layout.ep, layout.tp)

    # One micro-batch on the fullest stage, forward and backward.
    forward = per_rank * (forward_layer + tp_layer / 2.0 + cp_layer / 3.0 + ep_layer / 2.0)
    backward = per_rank * (
        backward_layer + recompute_layer + tp_layer / 2.0 + cp_layer * 2.0 / 3.0 + ep_layer / 2.0 + host_layer
    )
    backward += head
    compute_micro = forward + backward

    local = (count.total / (layout.tp * layout.pp)) if layout.pp == 1 else (
        (count.all_layers / layout.pp + max(count.embedding, count.head)) / layout.tp
    )  # fmt: skip
    gradient_bytes = 4.0 if layout.precision == "fp32" else float(stack.gradient_bytes)
    gather = reduce = 0.0
    gathered_bytes = (NF4_BYTES if train.method == "qlora" else wide) * local
    copied = 0.0
    if sharded:
        gather_once = links.ring_seconds(gathered_bytes, layout.dp_shard, shard_stride, per_rank + ends)
        again = gather_once if layout.reshard_after_forward else 0.0
        reduced = gradient_bytes * (local if full else trained_weights(model, train) / (layout.tp * layout.pp))
        scatter = links.scatter_seconds(reduced, layout.dp_shard, shard_stride, per_rank + ends)
        if on_cpu:  # fully_shard waits for gloo's collectives where it starts them (torch _fsdp_collectives.py)
            ahead, behind, late = gather_once, again, scatter
            # A gather copies the shard in and everything out again; so does a scatter.
            once_copied = (2.0 + 2.0 / layout.dp_shard) / job.rates.hbm
            passes = gathers(job, layout) * (2.0 if layout.reshard_after_forward else 1.0)
            copied = once_copied * (gathered_bytes * passes + reduced * scatters(job, layout)) / micro_batches
        else:
            ahead = _overlap(forward, gather_once, k.overlap_loss) - forward + gather_once / max(1.0, per_rank)
            shown = _overlap(backward, again + scatter, k.overlap_loss) - backward
            late = shown * scatter / (again + scatter) if scatter else 0.0
            behind = shown - late
            late += scatter / max(1.0, per_rank)
        gather, reduce = gathers(job, layout) * (ahead + behind), scatters(job, layout) * late
        if layout.dp_replicate > 1:
            across = links.all_reduce_seconds(
                gradient_bytes * trained_weights(model, train) / (layout.tp * layout.pp * layout.dp_shard),
                layout.dp_replicate, replicate_stride,
            )  # fmt: skip
            reduce += _overlap(backward, across, k.overlap_loss) - backward + across / max(1.0, per_rank)
    elif layout.data_parallel > 1:
        trained = local if full else trained_weights(model, train) / (layout.tp * layout.pp)
        group, stride = layout.data_parallel, shard_stride
        one_way = links.ring_seconds(gradient_bytes * trained, group, stride, per_rank)
        back_way = one_way
        if layout.sharding in ("zero1", "zero2"):
            back_way = links.ring_seconds(wide * trained, group, stride, per_rank)  # updated weights, as computed with
        if stack.dp_overlap:
            # gloo's threads and the compute share the cores of one host; what waits for a network is hidden
            loss = 1.0 if on_cpu and links.network is None else k.overlap_loss
            last = one_way / max(2.0, per_rank)
            if layout.pp == 1 and full:  # the embedding's gradient comes last and is one bucket
                last = max(last, one_way * count.embedding / count.total)
            if layout.sharding == "ddp":
                reduce = _overlap(backward, 2.0 * (one_way - last), loss) - backward + 2.0 * last
            else:  # updated weights are gathered under the next forward pass
                reduce = _overlap(backward, one_way - last, loss) - backward + last
                reduce += _overlap(forward, back_way, loss) - forward
        else:
            reduce = one_way + back_way
        if stack.reduce_every_micro_batch and layout.sharding == "zero2":
            reduce *= micro_batches

    gathered_micro = gather / micro_batches
    bubble = send = 0.0
    if layout.pp > 1:
        bubble = (layout.pp - 1) / layout.virtual_stages * (compute_micro - head + gathered_micro)
        message = wide * tokens * model.hidden / layout.tp
        one = links.send_seconds(message, pp_stride)
        # Each boundary: activations forward, gradients back; sends run under the compute of other micro-batches,
        # but a stage waits for its neighbour once per chunk.
        send = 2.0 * one * (layout.pp - 1) + 0.5 * one * layout.virtual_stages * micro_batches
    trained_here = (local if full else trained_weights(model, train) / (layout.tp * layout.pp)) / (
        layout.dp_shard if layout.sharding != "ddp" else 1
    )
    if layout.sharding in ("zero1", "zero2") and layout.dp_shard == 1:
        trained_here /= layout.dp_replicate
    optimizer = k.optimizer_bytes * trained_here / job.rates.hbm
    offload = 0.0
    if layout.offload != "none":
        optimizer = 0.0
        offload = 28.0 * trained_here / job.host_adam_bytes_per_second
        offload += (wide + 4.0) * trained_here / links.host.bytes_per_second
        if layout.offload == "all":
            shard = local / layout.dp_shard  # weights in for both passes, gradients out, each micro-batch
            offload += (2.0 * wide + wide) * shard * micro_batches / links.host.bytes_per_second
    m, layers = micro_batches, per_rank
    return StepParts(
        gemm=m * (layers * cost.gemm * (1.0 + gemm_back) + head_gemm * (2.0 + (1.0 if full else 0.0))),
        attention=m * layers * cost.attention * 3.5,
        elementwise=m * (layers * cost.elementwise * 3.0 + head_loss + copied),
        recompute=m * layers * recompute_layer,
        host=m * (layers * host_layer + host_ends),
        tensor_parallel=m * layers * tp_layer,
        context_parallel=m * layers * cp_layer,
        expert_parallel=m * layers * ep_layer,
        gather=gather,
        reduce=reduce,
        pipeline_send=send,
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
    )
