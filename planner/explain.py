"""Explains a forecast: its components, the dominant one, why the runner-up lost, and what would help most."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from contracts.finding import Interval
from contracts.layout import EIGHT_BITS, Layout
from contracts.tables import read_table
from hardware.gpus import find_gpu
from hardware.units import GIB, GIGA
from planner.advice import Forecast, Part
from planner.forecast.calibration import SIGMAS, base_sigma, bytes_that_fit, interval, memory_interval
from planner.forecast.compute import Job, gpu_rates
from planner.forecast.links import Links, Speed
from planner.forecast.memory import memory_of
from planner.forecast.specs import active_weights, trained_weights, weights
from planner.forecast.step_time import COMMUNICATION, StepParts, find_strides, forecast_step, prepare_step
from planner.search import Candidate, Planned, difference_sigma, list_broken_by_degrees

_WORDS, _MEMORY, _HELPS = (read_table(__file__, "explain.toml")[part] for part in ("parts", "memory", "helps"))
_COMPUTE = ("gemm", "attention", "elementwise", "dequantize", "recompute", "host")

SLOWEST_OFFERED = 1.25 * GIGA  # 10 Gb/s; hosts with GPUs are not sold with slower networks


def link_of(links: Links, layout: Layout, part: str) -> Speed | None:
    """Return the link that one component of the traffic uses; for offloading, only if its rate is known."""
    if part == "offload":
        return links.host if links.host.how != "assumed" else None
    strides, is_hybrid = find_strides(layout), layout.dp_replicate > 1 and layout.dp_shard > 1
    all_replicas = (layout.data_parallel * layout.cp, strides["cp"])
    groups = {  # size and stride
        "tensor_parallel": (layout.tp, 1), "expert_parallel": (layout.ep, 1),
        "context_parallel": (layout.cp, strides["cp"]), "pipeline_send": (layout.pp, strides["pp"]),
        "gather": (layout.dp_shard * layout.cp, strides["cp"]),
        "reduce": (layout.dp_replicate, strides["dp_replicate"]) if is_hybrid else all_replicas,
    }  # fmt: skip
    return links.crosses(*groups[part]) if part in groups else None


def sent_bytes(job: Job, layout: Layout, part: str) -> float:
    """Return the bytes that a rank sends per step to gather weights or to reduce gradients; 0 for other components."""
    step, engine = prepare_step(job, job.engine.as_run(layout)), job.engine
    layout, share, total = step.layout, step.share, 0.0
    gathers, again, scatters = engine.count_exchanges(job.train, layout)
    if part == "gather" and share.sharded:
        total = (gathers + again) * step.gathered_bytes - again * step.stored_bytes
    elif part == "reduce" and share.sharded:
        total = scatters * engine.reduced_bytes(job.train, layout) * share.trained
    total *= (share.group - 1) / share.group
    if part == "reduce":
        copies = layout.dp_replicate if share.sharded else layout.data_parallel * layout.cp
        here = share.part(share.trained, share.routed_trained, sharded=share.sharded)
        times = scatters if engine.reduce_every_micro_batch and layout.sharding in {"zero2", "zero3"} else 1
        total += 2 * (copies - 1) / copies * engine.reduced_bytes(job.train, layout) * here * times
    return total


def _describe(links: Links, layout: Layout, part: str) -> str:
    link = link_of(links, layout, part) if part in COMMUNICATION else None
    over = f" over {link.link} at {link.bytes_per_second / GIGA:.3g} GB/s" if link else ""
    return f"{_WORDS[part]}{over}"


def sigmas_of_rates(job: Job, layout: Layout, parts: StepParts, *, host_measured: bool = False) -> tuple[float, float]:
    """Return how much faster and slower the step may be if assumed rates of links and the host differ by one sigma.

    Traffic or launches that are hidden at the assumed rate may be exposed at a lower one. Links of
    `over_unknown_network` are excluded.
    """

    def moved(other: Job) -> float:
        return math.log(forecast_step(other, layout).total / parts.total)

    variance = faster = slower = 0.0
    for name in ("node", "network"):
        link = getattr(job.links, name)
        if parts.communication <= 0 or link is None or link.how != "assumed" or link.within is not None:
            continue
        sigma, largest = SIGMAS["pcie_assumed" if link.link == "PCIe" else "link_assumed"], 0.0
        for factor in (math.exp(-sigma), math.exp(sigma)):
            other = replace(link, bytes_per_second=link.bytes_per_second * factor)
            links = replace(job.links, **{name: other}, **({"island": other} if job.links.island is link else {}))
            largest = max(largest, abs(moved(replace(job, links=links))))
        variance += largest**2
    if job.has_gpu and not host_measured:
        launches = [job.rates.launch_seconds * math.exp(sign * SIGMAS["launch"]) for sign in (-1, 1)]
        rates = (replace(job.rates, launch_seconds=seconds) for seconds in launches)
        faster, slower = (moved(replace(job, rates=each)) for each in rates)
    return math.sqrt(variance + faster**2), math.sqrt(variance + slower**2)


def over_unknown_network(job: Job, layout: Layout, around: Interval) -> Interval:
    """Extend the step's interval to the slowest and the fastest rate that an unknown network may have."""
    network = job.links.network
    if network is None or network.within is None or (parts := forecast_step(job, layout)).communication <= 0:
        return around
    others = (replace(job.links, network=replace(network, bytes_per_second=rate)) for rate in network.within)
    slow, fast = (forecast_step(replace(job, links=links), layout).total / parts.total for links in others)
    return Interval(low=around.low * min(1.0, fast), mid=around.mid, high=around.high * max(1.0, slow))


def describe_dominant(parts: StepParts, links: Links, layout: Layout) -> str:
    """Describe in one sentence how the step's time is spent."""
    by_name, total = parts._asdict(), parts.total
    kinds = ("communication-bound: ", COMMUNICATION, 0.33), ("compute-bound: ", _COMPUTE, 0.6), ("", by_name, 0.0)
    reached = ((bound, names) for bound, names, share in kinds if sum(by_name[name] for name in names) >= share * total)
    bound, names = next(reached)
    longest = max(names, key=lambda name: by_name[name])
    return f"{bound}{_describe(links, layout, longest)}: {by_name[longest] / total:.0%} of the step"


def forecast_of(planned: Planned, candidate: Candidate) -> Forecast:
    """Return the forecast with every component explained."""
    job, layout, parts, memory = planned.job, candidate.layout, candidate.parts, candidate.memory
    time_parts, used = [], set[str]()
    for name, seconds in parts._asdict().items():
        if seconds <= 0:
            continue
        detail = _WORDS[name]
        if link := link_of(job.links, layout, name):
            used.add(str(link))
            sent = sent_bytes(job, layout, name)
            volume = f", {sent / GIGA:.3g} GB per rank and step" if sent else ""
            detail += f"; {'exposed, ' if name in COMMUNICATION else ''}over {link}{volume}"
        time_parts.append(Part(name=name, value=seconds * planned.scale, detail=detail))
    nonzero = ((name, value) for name, value in memory._asdict().items() if value > 0)
    tokens = layout.global_batch * job.real_tokens(layout.micro_batch)
    sigma = base_sigma(job, calibrated=planned.calibrated)
    sigmas = sigmas_of_rates(job, layout, parts, host_measured=planned.calibrated)
    faster, slower = (math.hypot(sigma, other) for other in sigmas)
    return Forecast(
        step_seconds=over_unknown_network(job, layout, interval(candidate.seconds, faster, slower)),
        memory_bytes=memory_interval(job, memory.total),
        time_parts=tuple(time_parts),
        memory_parts=tuple(Part(name=name, value=value, detail=_MEMORY[name]) for name, value in nonzero),
        dominant=describe_dominant(parts, job.links, layout),
        tokens_per_second=tokens / candidate.seconds,
        tokens_per_second_per_rank=tokens / candidate.seconds / layout.world_size,
        mfu=_compute_mfu(job, layout, tokens / candidate.seconds),
        capacity_bytes=planned.capacity,
        inputs=(*job.rates.inputs, *sorted(used)),
    )


def _compute_mfu(job: Job, layout: Layout, tokens_per_second: float) -> float | None:
    """Return model FLOPs divided by the GPUs' bf16 peak. The MFU of a finished run is this at its measured rate.

    Each token takes 6 FLOPs per weight of its matrix products, or 4 if the weight is frozen, because its gradient is
    not computed. The embedding is a lookup, as in torchtitan's count. Attention takes 2 x layers x heads x head size x
    length FLOPs in the forward pass, and twice that in the backward pass.
    """
    gpu = find_gpu(job.rates.device)
    if gpu is None or not gpu.bf16:
        return None
    model, count = job.model, weights(job.model)
    multiplied = active_weights(model) - (count.embedding if count.head else 0)
    trained = multiplied if job.train.method == "full" else trained_weights(model, job.train)
    attention = 6.0 * model.layers * model.heads * model.head_dim * job.sequence(layout.micro_batch)
    flops = 4.0 * multiplied + 2.0 * trained + attention
    return flops * tokens_per_second / (gpu.peak_bf16 * layout.world_size)


def explain_loss(job: Job, winner: Candidate, other: Candidate) -> str:
    """Explain what the runner-up loses against the winner, or why its gain is not sufficient."""
    slower = other.seconds / winner.seconds - 1.0
    extra = other.memory.total - winner.memory.total
    if slower < 0:
        before = winner.list_complications(job.links)
        adds = ", ".join(name for name in other.list_complications(job.links) if name not in before)
        error = math.expm1(difference_sigma(job, other, winner))
        adds = adds or f"{extra / GIB:+.2f} GiB"
        return f"{-slower:.1%} faster by forecast, within the error of {error:.0%}, but adds {adds}"
    deltas = {n: getattr(other.parts, n) - getattr(winner.parts, n) for n in other.parts._fields}
    worst = max(deltas, key=lambda n: deltas[n])
    if deltas[worst] <= 0.005 * winner.seconds:
        return f"{slower:.1%} slower; {extra / GIB:+.2f} GiB per rank"
    return f"{slower:.1%} slower: {deltas[worst] * 1000:,.1f} ms more for {_describe(job.links, other.layout, worst)}"


def helps_most(job: Job, winner: Candidate, capacity: float | None) -> tuple[str, ...]:
    """Return changes that would shorten the run for the same tokens, largest gain first, from the same model."""
    layout = winner.layout
    per_sequence = winner.parts.total / layout.global_batch
    ideas: list[tuple[float, str]] = []

    def gain_of(variant: Layout = layout, **changed: Any) -> float:
        """Return the fraction of the step that another layout, or other properties of the job, would save."""
        other = replace(job, **changed) if changed else job
        return 1.0 - forecast_step(other, variant).total / variant.global_batch / per_sequence

    def add(idea: str, gain: float, **values: object) -> None:
        ideas.append((gain, _HELPS[idea].format(gain=gain, **values)))

    double = replace(layout, micro_batch=layout.micro_batch * 2)
    if capacity is None or memory_of(job, double).total <= bytes_that_fit(job, capacity):
        add("micro_batch", gain_of(double), batch=double.global_batch)
    network = job.links.network
    if network is not None and winner.parts.communication > 0:
        quadruple = max(4 * network.bytes_per_second, SLOWEST_OFFERED)
        faster = replace(job.links, network=replace(network, bytes_per_second=quadruple))
        parts = forecast_step(replace(job, links=faster), layout)
        rate = quadruple / GIGA
        add(
            "network", 1.0 - parts.total / winner.parts.total, link=network.link, now=network.bytes_per_second / GIGA,
            name="RDMA" if network.link in ("TCP", "network") else "a network",
            rate=f"{rate:{',.0f' if rate >= 100 else '.3g'}}",
            bound="; then it is compute-bound" if parts.communication < 0.1 * parts.total else "",
        )  # fmt: skip
    gpu = find_gpu(job.rates.device)
    apart = job.links.island_size < job.links.ranks_per_node and (gpu is None or gpu.links > 0)
    if job.has_gpu and apart and winner.parts.communication > 0:
        add("nvlink", gain_of(links=replace(job.links, node=replace(job.links.node, bytes_per_second=100 * GIGA))))
    narrower = (replace(layout, precision=each) for each in reversed(EIGHT_BITS) if layout.precision == "bf16")
    allowed = next((each for each in narrower if not any(list_broken_by_degrees(job, each))), None)
    if gpu and gpu.matmul_fp8 and allowed:
        rates = gpu_rates(gpu, job.train, job.engine, allowed.precision, job.constants)
        add("eight_bits", gain_of(allowed, rates=rates), precision=allowed.precision)
    if layout.offload != "none":
        add("threads", gain_of(host_adam_bytes_per_second=job.constants["adam_rank_bytes_per_second"]))
    if layout.checkpointing != "none" and capacity is not None:
        stored = replace(layout, checkpointing="none")
        missing = (memory_of(job, stored).total - bytes_that_fit(job, capacity)) / GIB
        if missing * GIB <= capacity:  # no available GPU has much more than twice the memory of another
            device = "GPU" if job.has_gpu else "rank"
            add("memory" if missing > 0 else "recompute", gain_of(stored), more=math.ceil(missing), device=device)
    if winner.parts.bubble > 0:
        add("accumulation", gain_of(replace(layout, gradient_accumulation=layout.gradient_accumulation * 2)))
    ideas.sort(key=lambda idea: -idea[0])
    return tuple(text for gain, text in ideas if gain >= 0.02)
