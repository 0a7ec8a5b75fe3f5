"""Seconds of one optimizer step of a layout, by component.

Composition: for each micro-batch the layers of the largest stage, tensor-parallel traffic, and weight gathering hidden
by compute; then the pipeline bubble (p - 1)/v, the gradient reduction not hidden by the last backward pass, and the
optimizer. Traffic: arXiv 1910.02054 (ZeRO), 2304.11277 (FSDP), 2104.04473 (pipeline), 2205.05198 (sequence parallelism,
recomputation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from contracts.layout import Layout
from planner.forecast.compute import Job, LayerCost, head_cost
from planner.forecast.engine import NF4_BYTES, Share, last_stage, share_of
from planner.forecast.specs import ModelSpec, Weights, weights

COMMUNICATION = ("tensor_parallel", "context_parallel", "expert_parallel", "gather", "reduce", "pipeline_send")


class StepParts(NamedTuple):
    """Seconds of one optimizer step by activity; only exposed communication is counted."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    dequantize: float = 0.0  # of 4-bit weights, in each pass
    recompute: float = 0.0
    host: float = 0.0  # time in which the GPU waits for kernel launches
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
        """Duration of the step."""
        return sum(self)

    @property
    def communication(self) -> float:
        """All exposed communication."""
        return float(sum(getattr(self, name) for name in COMMUNICATION))


def _expose(seconds: float, hiding: float, loss: float) -> float:
    """Return by how much `seconds` of a task prolong the `hiding` seconds of another one, as both need the hardware."""
    return max(0.0, seconds - hiding) + loss * min(seconds, hiding)


def find_strides(layout: Layout) -> dict[str, int]:
    """Return the rank distance of neighbours in the groups of each kind; for tp it is 1.

    Ranks that shard together form one group of cp and dp_shard, with cp's distance.
    """
    replicate = layout.tp * layout.cp * layout.dp_shard
    return {"cp": layout.tp, "dp_replicate": replicate, "pp": replicate * layout.dp_replicate}


def _time_over_groups(
    collective: Callable[[float, int, int, float], float], step: StepInputs, each: float, count: float, routed: float,
    messages: float, *, ranks: int,
) -> float:  # fmt: skip
    """Return the seconds of a collective over `ranks` data-parallel ranks, `each` bytes per weight.

    Weights of experts use smaller groups: ranks with the same experts are `ep` apart.
    """
    layout = step.layout
    seconds = collective(each * (count - routed), ranks, layout.tp, messages)
    holders = ranks * layout.tp // layout.ep
    if routed and holders > 1:
        seconds += collective(each * routed, holders, layout.ep, messages)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs from which the components of one layout's step are computed."""

    job: Job
    layout: Layout  # as run by the engine
    count: Weights
    share: Share  # of the largest stage
    tokens: float  # per micro-batch and rank
    cost: LayerCost
    on_cpu: bool  # launching and running an operator share one thread, so launches are not hidden

    def overlap_loss(self, size: int, stride: int) -> float:
        """Return the exposed fraction of the shorter of two tasks, if one is a collective of a group of ranks."""
        links, constants = self.job.links, self.job.constants
        return constants["overlap_loss_network" if links.crosses(size, stride) is links.network else "overlap_loss"]

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the full hidden states of a micro-batch."""
        return self.share.element * self.tokens * self.job.model.hidden

    @property
    def gathered_bytes(self) -> float:
        """Bytes of the largest stage's weights when gathered; adapters in addition to frozen weights."""
        share, qlora = self.share, self.job.train.method == "qlora"
        layers = (NF4_BYTES if qlora else self.share.element) * (share.local - share.ends)
        return layers + self.share.element * (share.ends + (share.trained if share.adapters else 0.0))

    @property
    def stored_bytes(self) -> float:
        """Part of gathered_bytes that a backward pass does not gather again: FSDP2's last unit (with the head) remains.

        A frozen embedding also remains from the second micro-batch on: FSDP gathers it for a backward pass that it does
        not have, so nothing frees it.
        """
        if not self.job.engine.ends_apart or self.layout.pp > 1:
            return 0.0
        total = self.head_bytes
        if self.share.adapters and self.count.head:
            embedding = self.share.element * self.count.embedding / self.layout.tp
            total += embedding * (1 - 1 / self.layout.gradient_accumulation)
        return total

    @property
    def head_bytes(self) -> float:
        """Bytes of the gathered weight of the head."""
        return self.share.element * (self.count.head or self.count.embedding) / self.layout.tp

    @property
    def message_bytes(self) -> float:
        """Bytes that a pipeline stage sends to the next."""
        split = self.layout.sequence_parallel or self.job.engine.sends_parts
        return self.hidden_bytes / (self.layout.tp if split else 1)

    @property
    def ends(self) -> float:
        """FSDP units in addition to the layers."""
        return (2.0 if self.job.engine.ends_apart else 1.0) if self.share.sharded else 0.0

    @property
    def accumulation(self) -> float:
        """Seconds per micro-batch to accumulate gradients: two reads and one write."""
        engine, share = self.job.engine, self.share
        micro_batches = self.layout.gradient_accumulation
        if engine.adds_in_products:
            return 0.0
        here = share.part(share.trained, share.routed_trained, sharded=engine.shards_gradients(share))
        moved = 3.0 * engine.state_bytes(share).gradients * here
        return moved / self.job.rates.hbm * (micro_batches - 1) / micro_batches

    @property
    def hooks(self) -> float:
        """Seconds of the hooks of one unit and pass."""
        hooked = self.share.sharded or (self.job.engine.hooks_one_rank and self.layout.sharding == "zero3")
        return self.job.constants["unit_kernels"] * self.job.rates.launch_seconds if hooked else 0.0


class _MicroBatchTimes(NamedTuple):
    """Seconds of one micro-batch on the slowest stage: the largest, or the last, which has the head."""

    each: StepParts  # of one layer, all passes: what is not a product, attention or an element-wise pass
    layers: float
    forward: float
    backward: float  # including both passes of the head
    head: float = 0.0
    head_gemm: float = 0.0
    head_loss: float = 0.0


class _ExchangeTimes(NamedTuple):
    """Time that data parallelism adds to a step: exposed seconds, and seconds of copies per micro-batch."""

    gather: float = 0.0
    reduce: float = 0.0
    copied: float = 0.0


def forecast_step(job: Job, layout: Layout) -> StepParts:
    """Forecast the step time of one layout."""
    step = prepare_step(job, job.engine.as_run(layout))
    layout, cost = step.layout, step.cost
    micro = _time_micro_batch(step)
    exchange = _time_sharded(step, micro) if step.share.sharded else _time_replicated(step, micro)
    bubble, send = _time_pipeline(step, micro, exchange.gather)
    optimizer, offload = _time_optimizer(step, micro)
    m, layers, each = layout.gradient_accumulation, micro.layers, micro.each
    passes = 2.0 if step.share.adapters else 3.0  # of a product: forward, input gradient, weight gradient if trained
    host_ends = 2.0 * step.ends * step.hooks if step.on_cpu else 0.0  # on a GPU, the head's product hides them
    return StepParts(
        gemm=m * (layers * (cost.gemm * passes + cost.merged) + micro.head_gemm * passes),
        attention=m * layers * cost.attention * 3.5,
        elementwise=m * (layers * cost.elementwise * 3.0 + micro.head_loss + step.accumulation + exchange.copied),
        dequantize=m * layers * each.dequantize,
        recompute=m * layers * each.recompute,
        host=m * (layers * each.host + host_ends),
        tensor_parallel=m * (layers * each.tensor_parallel + _time_tensor_parallel(step, ends=True)),
        context_parallel=m * layers * each.context_parallel,
        expert_parallel=m * layers * each.expert_parallel,
        gather=exchange.gather,
        reduce=exchange.reduce,
        pipeline_send=send,
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
    )


def prepare_step(job: Job, layout: Layout) -> StepInputs:
    """Compute the inputs of the components of a step; `layout` is as the engine runs it."""
    tokens = layout.micro_batch * job.sequence(layout.micro_batch) / layout.cp
    on_cpu = job.rates.device == "CPU"
    return StepInputs(
        job=job, layout=layout, count=weights(job.model), on_cpu=on_cpu, tokens=tokens, cost=job.layer(layout, tokens),
        share=share_of(job.model, job.train, layout, on_cpu=on_cpu),
    )  # fmt: skip


def _time_micro_batch(step: StepInputs) -> _MicroBatchTimes:
    cost, adapters = step.cost, step.share.adapters
    forward = cost.gemm + cost.attention + cost.elementwise
    # Frozen weights have no gradient, unless they are merged with their adapters.
    backward = cost.gemm * (1.0 if adapters else 2.0) + cost.merged
    backward += cost.attention * 2.5 + cost.elementwise * 2.0
    parts = cost.experts, cost.gemm - cost.experts, cost.attention, cost.elementwise
    recompute = sum(a * b for a, b in zip(parts, step.job.engine.recomputed(step.layout.checkpointing), strict=True))
    dequantize = cost.dequantize * (3.0 if step.layout.checkpointing == "full" else 2.0)
    host = _time_launches(step, forward, recompute, backward)
    tp, cp = _time_tensor_parallel(step), _time_context_parallel(step)
    ep = _time_expert_parallel(step, forward + backward)
    each = StepParts(dequantize=dequantize, recompute=recompute, host=host, tensor_parallel=tp, context_parallel=cp,
                     expert_parallel=ep)  # fmt: skip
    forward = forward + cost.dequantize + tp / 2.0 + cp / 3.0 + ep / 2.0
    again = recompute + dequantize - cost.dequantize
    backward = backward + again + tp / 2.0 + cp * 2.0 / 3.0 + ep / 2.0 + host
    head_gemm, head_loss = head_cost(step.job, step.layout, step.tokens)
    head = head_gemm * (2.0 if adapters else 3.0) + head_loss
    layers, last, added = step.share.layers, last_stage(step.job.model, step.layout), step.accumulation
    if layers * (forward + backward) > last * (forward + backward) + head:
        return _MicroBatchTimes(each, layers, layers * forward, layers * backward + added)
    backward = last * backward + head + added
    return _MicroBatchTimes(each, last, last * forward, backward, head, head_gemm, head_loss)


def _time_launches(step: StepInputs, forward: float, recompute: float, backward: float) -> float:
    """Return the seconds of kernel launches that are not hidden by the kernels themselves."""
    if step.job.engine.uses_cuda_graph(step.job.model, step.layout):
        return 0.0
    full = step.layout.checkpointing == "full"
    forward_host, backward_host = step.cost.host + step.hooks, 1.7 * step.cost.host + step.hooks
    again = forward_host if full else 0.0
    if not step.on_cpu:
        # After a unit's hooks, the host launches nothing until the GPU has sent it the token counts per expert.
        waits = min(step.hooks, forward) if step.job.model.experts and step.layout.ep > 1 else forward
        again = max(0.0, again - (waits if full else recompute))
        forward_host, backward_host = max(0.0, forward_host - waits), max(0.0, backward_host - backward)
    return forward_host + again + backward_host


def _time_tensor_parallel(step: StepInputs, *, ends: bool = False) -> float:
    """Return the exposed seconds of all-reduces after attention and MLP, both passes; or of those outside layers."""
    layout, job = step.layout, step.job
    if layout.tp == 1:
        return 0.0
    rounds = job.engine.tensor_parallel_rounds(layout)
    if ends:
        rounds = max(job.engine.tensor_parallel_ends(job.train, layout, last=last) for last in (False, True))
    exposed = 1.0 - job.constants["tp_hidden"] if job.engine.hides_tensor_parallel(layout) else 1.0
    return rounds * exposed * job.links.all_reduce_seconds(step.hidden_bytes, layout.tp, 1)


def _time_context_parallel(step: StepInputs) -> float:
    """Return the exposed seconds of context parallelism. A ring overlaps with attention; a gather with the own part."""
    layout, model, attention = step.layout, step.job.model, step.cost.attention
    if layout.cp == 1:
        return 0.0
    heads = model.kv_heads / min(layout.tp, model.kv_heads)
    kv = 2.0 * step.share.element * step.tokens * layout.cp * heads * model.head_dim
    ring = step.job.links.ring_seconds(kv, layout.cp, find_strides(layout)["cp"])
    hidden = attention / layout.cp if step.job.engine.gathers_context else attention
    return max(0.0, ring - hidden) + max(0.0, 2.0 * ring - 2.5 * hidden) + 0.3 * ring


def _time_expert_parallel(step: StepInputs, compute: float) -> float:
    """Return the exposed seconds to send tokens to their experts and back, both passes; mean over the layers.

    One forward and one backward pass have no other micro-batch, whose `compute` seconds could hide them (Megatron-LM,
    combined_1f1b.py).
    """
    layout, model = step.layout, step.job.model
    if layout.ep == 1 or not model.experts:
        return 0.0
    engine, links, copies, spread = step.job.engine, step.job.links, float(model.experts_per_token), None
    if engine.sends_tokens_once:
        domains = layout.ep / links.domain_size
        copies = each = _count_receivers(model, float(layout.ep))
        if domains > 1:
            copies = _count_receivers(model, domains)
            spread = each / copies
    sent = step.share.element * step.tokens / layout.tp * copies * model.hidden
    rounds = 4.0 + (2.0 if layout.checkpointing == "full" else 0.0)
    mixtures = 1.0 - model.dense_layers / model.layers
    seconds = mixtures * rounds * links.all_to_all_seconds(sent, layout.ep, 1, spread)
    alone = seconds / layout.gradient_accumulation if engine.overlaps_experts(layout) else seconds
    if not engine.uses_cuda_graph(model, layout):
        return alone + (seconds - alone) * (1.0 - engine.hidden_experts)
    return alone + _expose(seconds - alone, compute, step.overlap_loss(layout.ep, 1))


def _count_receivers(model: ModelSpec, of: float) -> float:
    """Return the expected number, out of `of` receivers, that have at least one of a token's k experts.

    A model may restrict a token's experts to some groups (node-limited routing, arXiv 2412.19437).
    """
    among = max(1.0, of * model.expert_groups)
    return float(among * (1.0 - (1.0 - 1.0 / among) ** model.experts_per_token))


def _time_sharded(step: StepInputs, micro: _MicroBatchTimes) -> _ExchangeTimes:
    """Return the time to gather weights before each unit, scatter gradients after it, and all-reduce over replicas."""
    job, layout, links, share, units = step.job, step.layout, step.job.links, step.share, step.share.layers + step.ends
    loss = step.overlap_loss(share.group, layout.tp)
    each_reduced = job.engine.reduced_bytes(job.train, layout)
    gathered, reduced = step.gathered_bytes, each_reduced * share.trained
    each = gathered / share.local  # mean
    gather_once = _time_over_groups(links.ring_seconds, step, each, share.local, share.routed, units, ranks=share.group)
    again = gather_once * (1.0 - step.stored_bytes / gathered) if layout.reshard_after_forward else 0.0
    scatter = _time_over_groups(
        links.scatter_seconds, step, each_reduced, share.trained, share.routed_trained, units, ranks=share.group
    )
    gathers, regathers, scatters = job.engine.count_exchanges(job.train, layout)
    copied = 0.0
    if step.on_cpu:  # fully_shard waits for each gloo collective where it launches it (torch _fsdp_collectives.py)
        ahead, behind, scattering = gather_once, again, scatter
        # A gather copies the shard into a buffer and the result out again; a scatter does the same.
        once_copied = (2.0 + 2.0 / share.group) / job.rates.hbm
        copied = once_copied * (gathered * (gathers + regathers) + reduced * scatters) / layout.gradient_accumulation
    else:
        ahead = _expose(gather_once, micro.forward, loss) + gather_once / max(1.0, share.layers)
        exposed = _expose(again + scatter, micro.backward, loss)
        scattering = exposed * scatter / (again + scatter) if scatter else 0.0
        behind = exposed - scattering
        scattering += scatter / max(1.0, share.layers)
    reduce = scatters * scattering
    if layout.dp_replicate > 1:
        trained = share.part(share.trained, share.routed_trained, sharded=True)
        stride = find_strides(layout)["dp_replicate"]
        across = links.all_reduce_seconds(each_reduced * trained, layout.dp_replicate, stride)
        loss = step.overlap_loss(layout.dp_replicate, stride)
        exposed = _expose(across, micro.backward, loss) + across / max(1.0, share.layers)
        reduce += exposed * (scatters if job.engine.reduce_every_micro_batch else 1)
    return _ExchangeTimes(gathers * ahead + regathers * behind, reduce, copied)


def _time_replicated(step: StepInputs, micro: _MicroBatchTimes) -> _ExchangeTimes:
    """Return the time to reduce gradients over ranks with all weights; ZeRO-1 and 2 also gather updated weights."""
    job, layout, share = step.job, step.layout, step.share
    ranks = layout.data_parallel * layout.cp  # context-parallel ranks process other tokens of the same sequences
    if ranks == 1:
        return _ExchangeTimes()

    reduced = share.trained * job.engine.reduced_bytes(job.train, layout)
    bucket = max(job.engine.reduce_bucket, job.engine.reduce_bucket_per_rank * ranks)
    messages = min(step.share.layers, max(1.0, reduced / bucket))

    def one(each: float) -> float:
        ring = job.links.ring_seconds
        return _time_over_groups(ring, step, each, share.trained, share.routed_trained, messages, ranks=ranks)

    back_way = one_way = one(job.engine.reduced_bytes(job.train, layout))
    if layout.sharding in ("zero1", "zero2"):
        back_way = one(step.share.element)  # in the type of computation
    reduce = _time_reduction(step, micro, one_way, back_way) if job.engine.dp_overlap else one_way + back_way
    if job.engine.reduce_every_micro_batch and layout.sharding == "zero2":
        reduce *= layout.gradient_accumulation
    return _ExchangeTimes(reduce=reduce)


def _time_reduction(step: StepInputs, micro: _MicroBatchTimes, one_way: float, back_way: float) -> float:
    """Return the seconds of a reduction that the backward pass does not hide."""
    layout, count = step.layout, step.count
    # gloo's threads share the cores of a host with compute; waiting for a network is hidden
    loss = 1.0 if step.on_cpu and step.job.links.network is None else step.job.constants["overlap_loss"]
    last = one_way / max(2.0, step.share.layers)
    if layout.pp == 1 and not step.share.adapters:  # the embedding's gradient comes last, in one bucket
        last = max(last, one_way * count.embedding / count.total)
    if layout.sharding == "ddp":
        return _expose(2.0 * (one_way - last), micro.backward, loss) + 2.0 * last
    # Updated weights are gathered during the next forward pass.
    return _expose(one_way - last, micro.backward, loss) + last + _expose(back_way, micro.forward, loss)


def _time_pipeline(step: StepInputs, micro: _MicroBatchTimes, gather: float) -> tuple[float, float]:
    """Return the seconds of the schedule's bubble, and of its sends.

    Each stage boundary carries activations forward and gradients back. In 1F1B a stage waits for both exchanges
    (Megatron-LM's send_forward_recv_backward and its mirror, torch's Schedule1F1B). In an interleaved schedule they
    overlap with the compute of other chunks, except for one per chunk and what takes longer than this compute.
    """
    layout = step.layout
    if layout.pp == 1:
        return 0.0, 0.0
    gathered_micro = gather / layout.gradient_accumulation
    bubble = (layout.pp - 1) / layout.virtual_stages * (micro.forward + micro.backward - micro.head + gathered_micro)
    message = step.job.links.send_seconds(step.message_bytes, find_strides(layout)["pp"], layout.pp)
    waits = 2.0 if layout.virtual_stages == 1 else 0.5 * layout.virtual_stages
    send = message * (2.0 * (layout.pp - 1) + waits * layout.gradient_accumulation)
    hiding = micro.forward + micro.backward  # all chunks of a micro-batch; a slow network is busy for longer
    return bubble, max(send, (2.0 * layout.virtual_stages * message - hiding) * layout.gradient_accumulation)


def _time_optimizer(step: StepInputs, micro: _MicroBatchTimes) -> tuple[float, float]:
    """Return the seconds of the optimizer on the device, or of an offloaded optimizer and what moves with it."""
    job, layout, share, wide = step.job, step.layout, step.share, step.share.element
    trained = share.part(share.trained, share.routed_trained, sharded=layout.sharding != "ddp")
    if layout.sharding in ("zero1", "zero2") and layout.dp_shard == 1:
        trained /= layout.dp_replicate
    if layout.offload == "none":
        return job.engine.step_bytes(share) * trained / job.rates.hbm, 0.0
    offload = job.engine.step_bytes(share) * trained / job.host_adam_bytes_per_second
    offload += (wide + 4.0) * trained / job.links.host.bytes_per_second
    if layout.offload == "all":  # per micro-batch: load weights for both passes, store gradients
        moved = 2.0 * share.part(step.gathered_bytes, step.gathered_bytes / share.local * share.routed, sharded=True)
        moved += wide * share.part(share.trained, share.routed_trained, sharded=True)
        hiding = (micro.forward + micro.backward) * job.engine.hides_offload
        each = _expose(moved / job.links.host.bytes_per_second, hiding, job.constants["overlap_loss"])
        offload += each * layout.gradient_accumulation
    return 0.0, offload
