"""Recommends environment and layout, with forecast and rejected layouts, for one job on one cluster.

A sweep has the best layout of a job for each machine, number of nodes and network.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from contracts.job_config import resolve_layout
from contracts.layout import Layout, LayoutError, Precision
from contracts.tables import read_texts
from contracts.trl import spelled
from hardware.gpus import Gpu, find_gpu, gpus, scale_to_board
from hardware.machines import catalogue
from hardware.units import GIB, GIGA
from planner.advice import ExportRequest, FrontierPoint, RankedLayout, Recommendation, Rejected
from planner.explain import explain_loss, forecast_of, helps_most
from planner.forecast import machines
from planner.forecast.calibration import Calibration, apply_calibration, check_device
from planner.forecast.compute import CPU, DEFAULT, Job, Rates, cpu_rates, gpu_rates
from planner.forecast.engine import Engine, share_of, uneven_stages
from planner.forecast.faults import Findings, apply_findings, cut_domains, find_healthy_links, pick_costly, slowed
from planner.forecast.links import NETWORK_SHARE, TCP_CEILING_BYTES_PER_SECOND, Links, Speed, make_links
from planner.forecast.memory import checkpoint_bytes, memory_of
from planner.forecast.specs import ModelSpec, PlanError, TrainSpec, active_weights, longest_row
from planner.nccl_env import Version, environment as nccl_env, newest_read, version_text
from planner.nccl_env.situation import Note, find_plugin, make_situation
from planner.search import Candidate, Planned, Ranking, difference_sigma, fit_memory, list_broken, search, usual_options
from planner.stacks import find_engine
from planner.stacks.exports import list_unwritten
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.gpu.health import count_held_bytes
from probes.hostinfo.probe import HostinfoFacts
from topology.graph import ClusterTopology

if TYPE_CHECKING:  # not imported for a question without measurements
    from collectives.bench.results import Measurement

_RUNNERS_UP = 4
_OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit", "sgd", "adafactor")  # optimizers whose state the forecast knows
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Default batches: the usual one for fine-tuning, and for pre-training the tokens per step by the number of active
# weights (GPT-3 up to 2.7 B: 1 M, arXiv 2005.14165; Llama 2: 4 M, 2307.09288; Llama 3 405B: 16 M, 2407.21783).
_FINETUNE_BATCH = 64
_FINETUNE_RANKS = 32  # full training on more ranks is assumed to be pre-training
_TOKENS_PER_STEP = ((5e9, 1 << 20), (200e9, 1 << 22), (math.inf, 1 << 24))

_LONGEST_STEP_MINUTES = 5.0  # of the published runs: MPT-30B on 8 A100 (llm-foundry)
AS_REQUESTED = "the requested settings"  # rejected if the job's own settings cannot run
ROWS = "the rows "  # start of every unknown about row lengths in the data set
_text = read_texts(__file__, "recommend.toml")
MeasuredStep = tuple[Mapping[str, Any], float]  # (fields of its layout, seconds)


def rank(planned: Planned, candidate: Candidate, winner: Candidate | None = None) -> RankedLayout:
    """Return a layout with its forecast, compared with the winner."""
    reason = explain_loss(planned.job, winner, candidate) if winner is not None else ""
    return RankedLayout(layout=candidate.layout, forecast=forecast_of(planned, candidate), why=reason)


def _find_rates(
    cluster: ClusterTopology, snapshots: Sequence[Snapshot], train: TrainSpec, ranks_per_node: int, precision: str,
    unknowns: list[str],
) -> Rates:  # fmt: skip
    node, engine = cluster.nodes[0], find_engine(train.engine)
    if node.gpus:
        models = dict.fromkeys(gpu.model for each in cluster.nodes for gpu in each.gpus if gpu.usable)
        rated = [gpu for name in models if (gpu := find_gpu(name))]
        if rated and find_gpu(node.gpus[0].model):  # every rank waits for the slowest GPU model
            return min((_board_rates(gpu, snapshots, train, precision) for gpu in rated), key=lambda rates: rates.gemm)
        model, memory = node.gpus[0].model, node.gpus[0].memory_bytes
        other = next(gpu for gpu in gpus() if gpu.is_fallback)
        unknowns.append(_text("unknown_gpu", model=model, name=other.name))
        rates = gpu_rates(other, train, engine, precision)
        return replace(
            rates, memory_bytes=float(memory) if memory else None, how="assumed", device=model or "unknown GPU",
            inputs=(f"GEMM {rates.gemm / 1e12:.4g} TFLOP/s: assumed",),
        )  # fmt: skip
    host = snapshots[0].facts(HostinfoFacts) if snapshots else None
    cores = (host.cores if host else None) or node.cpu_count
    if cores is None:
        unknowns.append(_text("unknown_cores"))
    bytes_per_rank = float(host.memory_bytes) / ranks_per_node if host and host.memory_bytes else None
    return cpu_rates((cores or ranks_per_node) / ranks_per_node, bytes_per_rank)


def _board_rates(gpu: Gpu, snapshots: Sequence[Snapshot], train: TrainSpec, precision: str) -> Rates:
    """Return the rates of a GPU at the lowest default power limit that was probed; limits below it are findings."""
    probed = [slot for s in snapshots if (f := s.facts(GpuFacts)) for slot in f.gpus if find_gpu(slot.name) == gpu]
    watts = min((slot.power_limit_default_watts for slot in probed if slot.power_limit_default_watts), default=None)
    board = scale_to_board(gpu, watts)
    rates = gpu_rates(board, train, find_engine(train.engine), precision)
    if board is gpu:
        return rates
    note = _text("small_board", watts=watts, usual=gpu.watts, share=board.matmul_bf16 / gpu.matmul_bf16)
    return replace(rates, inputs=(*rates.inputs, note))


def explain_unsupported(cluster: ClusterTopology) -> str:
    """Return why catalogue machines with GPUs that NCCL does not support get no forecast; else ""."""
    gpus = (find_gpu(gpu.model) for node in cluster.nodes[:1] for gpu in node.gpus[:1])
    gpu = next((known_gpu for known_gpu in gpus if known_gpu is not None and known_gpu.maker != "NVIDIA"), None)
    return _text("unjudged", gpu=gpu.name) if gpu else ""


def _get_capability(cluster: ClusterTopology) -> tuple[int, int] | None:
    gpus_found = {(gpu.model, gpu.compute_capability) for node in cluster.nodes for gpu in node.gpus}
    found = {probed or getattr(find_gpu(model), "compute_capability", None) for model, probed in gpus_found}
    return min((each for each in found if each), default=None)  # all ranks run what the oldest GPU can


def _get_host_memory(cluster: ClusterTopology, snapshots: Sequence[Snapshot]) -> float | None:
    """Return the host memory of the smallest probed node, else of the catalogue."""
    probed = [f.memory_bytes for s in snapshots if (f := s.facts(HostinfoFacts)) and f.memory_bytes]
    if probed:
        return float(min(probed))
    gib = next((row.host_gib for row in catalogue() if row.name == cluster.nodes[0].sku), None)
    return gib * GIB if gib else None


def _list_free_memory(cluster: ClusterTopology, snapshots: Sequence[Snapshot], unknowns: list[str]) -> list[int]:
    """Return the bytes of each GPU available to a job: its memory minus that in use at the time of the scan."""
    probed = {s.hostname: {gpu.index: gpu for gpu in f.gpus} for s in snapshots if (f := s.facts(GpuFacts))}
    sizes, held = [], []
    for node in cluster.nodes:
        for slot in (gpu for gpu in node.gpus if gpu.memory_bytes):
            gpu = probed.get(node.hostname, {}).get(slot.index)
            used = (count_held_bytes(gpu) or 0) if gpu is not None and gpu.uuid == slot.uuid else 0
            sizes.append((slot.memory_bytes or 0) - used)
            if gpu is not None and used:
                pids = ", ".join(str(process.pid) for process in (gpu.processes or ())[:4])
                held.append(f"{used / GIB:.1f} GiB of {slot.name} on {node.hostname}" + (f" (pid {pids})" * bool(pids)))
    if held:
        further = f" and of {len(held) - 4} more GPUs" if len(held) > 4 else ""
        unknowns.append(_text("held_memory", held=", ".join(held[:4]), more=further))
    return sizes


def _choose_batch(model: ModelSpec, train: TrainSpec, engine: Engine, world: int, requested: Mapping[str, Any]) -> int:
    if train.global_batch is not None:
        return train.global_batch
    ranks = world // math.prod(requested.get(name, 1) for name in ("tp", "pp", "cp"))
    stages = requested.get("pp", 1) * requested.get("virtual_stages", 1)
    times = requested.get("gradient_accumulation", stages)
    if "micro_batch" in requested:  # as in trainers: each rank has its own rows
        return int(requested["micro_batch"] * times * ranks)
    target, multiple = _FINETUNE_BATCH, ranks * times if "gradient_accumulation" in requested else world
    if train.method == "full" and world > _FINETUNE_RANKS:
        each = active_weights(model)
        tokens = next(tokens for limit, tokens in _TOKENS_PER_STEP if each <= limit)
        target = max(1, tokens // train.sequence_length)
        if not requested and engine.can & {"tp", "pp", "cp"}:  # ranks can share a sequence
            multiple = max(d for d in range(1, min(world, target) + 1) if world % d == 0)
    return math.ceil(target / multiple) * multiple


def _check_request(train: TrainSpec) -> Precision:
    """Return the requested precision. Raises PlanError if planning is impossible."""
    for name, allowed in (("precision", _PRECISIONS), ("optimizer", _OPTIMIZERS)):
        if (value := getattr(train, name)) not in allowed:
            raise PlanError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
    return next(p for p in _PRECISIONS if p == train.precision)


def plan(
    cluster: ClusterTopology, snapshots: Sequence[Snapshot], model: ModelSpec, train: TrainSpec,
    measurements: Sequence[Measurement] = (), calibration: Calibration | None = None, *,
    ranks_per_node: int | None = None, links: Links | None = None, findings: Findings | None = None,
    interface: str | None = None,
) -> Planned:  # fmt: skip
    """Collect the inputs; `links` overrides bandwidths (what-if), and `findings` slow the nodes down.

    `interface` is the job's NCCL_SOCKET_IFNAME.
    """
    precision = _check_request(train)
    cluster = cut_domains(cluster, findings or {})
    unknowns: list[str] = []
    has_gpu, engine = bool(cluster.nodes[0].gpus), find_engine(train.engine)
    links = links or make_links(cluster, measurements, ranks_per_node=ranks_per_node)
    world = links.ranks_per_node * links.nodes
    requested = resolve_layout(dict(train.fixed_layout), world, links.ranks_per_node)
    precision = requested.get("precision", precision)
    forecast = precision  # precision of the forecast
    if not has_gpu and precision != "fp32":
        unknowns.append(_text("no_gpu", precision=precision))
        forecast = "fp32"
        precision = precision if "precision" in requested else "fp32"
    if model.max_positions and train.sequence_length > model.max_positions:  # rules check a learned position table
        text = _text("positions", tokens=train.sequence_length, model=model.name, positions=model.max_positions)
        unknowns.append(text)
    rates = _find_rates(cluster, snapshots, train, links.ranks_per_node, forecast, unknowns)
    now = apply_findings(links, findings or {}, snapshots, interface=interface)
    links, gpu = now.links, find_gpu(rates.device)
    rates = slowed(rates, gpu.matmul_bf16 if gpu and precision == "bf16" else None, now)
    capacity = rates.memory_bytes
    if has_gpu:
        sizes = _list_free_memory(cluster, snapshots, unknowns)
        capacity = float(min(sizes)) if sizes else capacity
    if capacity is None:
        unknowns.append(_text("unknown_memory"))
    job = Job(
        model=model, train=train, links=links, engine=engine, has_gpu=has_gpu, rates=rates,
        compute_capability=_get_capability(cluster), host_memory_bytes=_get_host_memory(cluster, snapshots),
        constants=DEFAULT if has_gpu else CPU, host_adam_bytes_per_second=DEFAULT["adam_thread_bytes_per_second"],
    )  # fmt: skip
    unknowns += _list_unknowns(job, precision, cluster, snapshots)
    if calibration is not None:
        check_device(calibration, rates.device, forecast)
        job = apply_calibration(calibration, job)
    return Planned(
        job=job,
        world=world,
        global_batch=_choose_batch(model, train, engine, world, requested),
        precision=precision,
        capacity=capacity,
        unknowns=tuple(dict.fromkeys(unknowns)),
        calibrated=job.rates.how == "measured",
        slowed=tuple(dict.fromkeys(now.words)),
        requested=requested,
    )  # fmt: skip


def _list_unknowns(job: Job, precision: str, cluster: ClusterTopology, snapshots: Sequence[Snapshot]) -> Iterator[str]:
    """Yield what the forecast assumes, or does not include, about GPUs, links, model and rows."""
    links, model, train = job.links, job.model, job.train
    if lost := [gpu.name for node in cluster.nodes for gpu in node.gpus if not gpu.usable]:
        yield _text("lost_gpus", names=", ".join(lost[:8]))
    if precision == "bf16" and job.compute_capability is not None and job.compute_capability < (8, 0):
        yield _text("no_bf16", device=job.rates.device)
    used = (links.node if links.ranks_per_node > 1 else None, links.network)
    yield from (_describe_unmeasured(speed) for speed in used if speed is not None and speed.how == "assumed")
    yield from _list_plugins(cluster, links.network, snapshots)
    models = dict.fromkeys(gpu.model for node in cluster.nodes for gpu in node.gpus if gpu.usable)
    if len(models) > 1:
        yield _text("mixed_gpus", models=", ".join(map(str, models)))
    counts = [sum(gpu.usable for gpu in node.gpus) for node in cluster.nodes]  # a catalogue's: of the job
    counts += [row.gpus for row in catalogue() if row.name == cluster.nodes[0].sku and not snapshots]
    if job.has_gpu and links.ranks_per_node < max(counts):
        yield _text("fewer_ranks", ranks=links.ranks_per_node, most=max(counts))
    if model.towers:
        yield _text("towers", model=model.name, towers=" and ".join(model.towers))
    if longer := sum(rows for length, rows in train.length_histogram if length > train.sequence_length):
        rows = sum(rows for _, rows in train.length_histogram)
        yield _text("cut_rows", longer=longer, rows=rows, tokens=train.sequence_length)


def _list_plugins(cluster: ClusterTopology, network: Speed | None, snapshots: Sequence[Snapshot]) -> Iterator[str]:
    """Yield whether the forecast assumes the plugin that carries GPU traffic over the vendor's NICs, and why."""
    if network is None or network.how != "derived":
        return
    rate = network.bytes_per_second / GIGA
    for node in make_situation(snapshots, cluster).nodes:
        name, file = find_plugin(node) or ("", "")
        if name and network.link == name:
            reason = f"{file} is on {node.hostname}" if file else f"{node.hostname} of the catalogue has it"
            yield _text("plugin", name=name, rate=rate, why=reason, sockets=TCP_CEILING_BYTES_PER_SECOND / GIGA)
            return
        if name and not file and network.link == "TCP":
            nics = (cluster.inter_node_bytes_per_second or 0.0) * NETWORK_SHARE / GIGA
            yield _text("no_plugin", name=name, rate=rate, host=node.hostname, nics=nics)
            return


def _describe_unmeasured(speed: Speed) -> str:
    """Describe the effect of a link that was not measured, and how to measure it."""
    reason = f" ({speed.why})" if speed.why else ""
    text = _text("unmeasured", link=speed.link, rate=speed.bytes_per_second / GIGA, why=reason)
    if speed.within:
        low, high = (rate / GIGA for rate in speed.within)
        text += _text("unknown_network", least=low, most=high)
    return text


def rescale(planned: Planned, measured: MeasuredStep) -> Planned:
    """Return the plan with all step times scaled by the ratio of this measured step to its forecast.

    Raises LayoutError, as `forecast_named` does.
    """
    layout, seconds = measured
    row = forecast_named(planned, layout)
    ratio = seconds / row.forecast.step_seconds.mid
    rates = planned.job.rates
    note = _text("scaled", family=row.layout.family, seconds=seconds, ratio=ratio)
    job = replace(planned.job, rates=replace(rates, inputs=(*rates.inputs, note)))
    return replace(planned, job=job, scale=planned.scale * ratio, calibrated=True)


def forecast_named(planned: Planned, members: Mapping[str, Any]) -> RankedLayout:
    """Return the best layout with these values, as `recommend` would; degrees that are not named are 1.

    If rules or memory allow none, return the given layout at the plan's global batch, with the reason in `why`. Raises
    LayoutError for impossible values.
    """
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "offload": "none", **members}
    degrees.setdefault("precision", planned.precision)
    if degrees.get("virtual_stages", 1) > 1:
        degrees.setdefault("schedule", "interleaved")
    zeros = ("zero3", "zero2", "zero1") if degrees["dp_shard"] > 1 else ()
    sharding = next((zero for zero in zeros if zero in planned.job.engine.can), "ddp")  # if no layout fits
    usual = usual_options(planned.job, degrees["tp"], degrees["precision"])
    shape = Layout(world_size=planned.world, **{"sharding": sharding, **usual, **degrees})
    if shape.data_parallel == 1:
        degrees.pop("sharding", None)  # with one rank all kinds of sharding are the same
    if {"micro_batch", "gradient_accumulation"} <= set(members):
        planned = replace(planned, global_batch=shape.global_batch)
    for surely in (True, False):
        if best := search(planned, degrees, surely=surely).best:
            ranked = rank(planned, best[0])
            return ranked if surely else replace(ranked, why=may_not_fit(planned, ranked))
    accumulation, left = divmod(planned.global_batch, shape.data_parallel * shape.micro_batch)
    if "gradient_accumulation" not in members:
        if left:
            batch, ranks = planned.global_batch, shape.data_parallel
            raise LayoutError(_text("indivisible_batch", batch=batch, ranks=ranks, micro_batch=shape.micro_batch))
        shape = replace(shape, gradient_accumulation=accumulation)
    shape = replace(shape, stage_layers=uneven_stages(planned.job.model.layers, shape.pp * shape.virtual_stages))
    fit = fit_memory(planned.job, shape, planned.budget, fixed=members)
    return forecast_layout(planned, shape if isinstance(fit, float) else fit[0])


def may_not_fit(planned: Planned, ranked: RankedLayout) -> str:
    """Report that the upper end of a layout's memory interval exceeds the device."""
    needs = ranked.forecast.memory_bytes
    return _text("may_not_fit", low=needs.low / GIB, high=needs.high / GIB, capacity=(planned.capacity or 0.0) / GIB)


def _list_limits(job: Job, ranked: RankedLayout) -> Iterator[str]:
    """Yield what the forecast assumes of engine and data, a step that is very long, and what no export contains."""
    engine, layout, minutes = job.engine, ranked.layout, ranked.forecast.step_seconds.mid / 60.0
    if engine.uses_cuda_graph(job.model, layout):
        yield _text("cuda_graph", settings=" ".join(engine.cuda_graph_arguments))
    share = share_of(job.model, job.train, layout)
    # Without this setting no gradient is sharded before the last micro-batch.
    if engine.sync_setting and share.sharded and not share.adapters and layout.gradient_accumulation > 1:
        held = engine.reduced_bytes(job.train, layout) * share.trained / GIB
        yield _text("sync_setting", setting=engine.sync_setting, held=held)
    if layout.ep > 1:
        yield _text("balanced_experts")
    if job.model.experts and engine.merges_expert_adapters:
        yield _text("experts_of_transformers")
    if minutes > _LONGEST_STEP_MINUTES:
        yield _text("long_step", minutes=minutes, longest=_LONGEST_STEP_MINUTES)
    yield from list_unwritten(ExportRequest(layout=layout, model=job.model, train=job.train, on_gpu=job.has_gpu))


def forecast_layout(planned: Planned, layout: Layout) -> RankedLayout:
    """Forecast one given layout, even if it would not be chosen.

    The result's `why` names the first violated rule, or how much memory is missing.
    """
    candidate, budget = planned.candidate(layout), planned.budget
    needs = candidate.memory.total
    broken = next(list_broken(planned.job, layout), None)
    reason = f"breaks {broken.rule}: {broken.reason}" if broken else ""
    if not reason and budget is not None and needs > budget:
        reason = _text("does_not_fit", missing=(needs - budget) / GIB, budget=budget / GIB)
    return replace(rank(planned, candidate), why=reason)


def estimate_difference(planned: Planned, first: RankedLayout, second: RankedLayout) -> float:
    """Return the error of the ratio of two steps, as a share: errors that both forecasts have in common cancel."""
    left, other = planned.candidate(first.layout), planned.candidate(second.layout)
    return math.expm1(difference_sigma(planned.job, left, other))


def recommend(
    cluster: ClusterTopology, snapshots: Sequence[Snapshot], model: ModelSpec, train: TrainSpec,
    measurements: Sequence[Measurement] = (), calibration: Calibration | None = None,
    nccl_version: Version | None = None, *,
    ranks_per_node: int | None = None, multi_node: bool | None = None, findings: Findings | None = None,
    measured_step: MeasuredStep | None = None,
) -> Recommendation:  # fmt: skip
    """Answer for one job on one cluster in its current state; `multi_node` None: it may use several nodes later.

    `findings`: known faults of the nodes, by host name. If the graph does not show them, the answer also has the best
    layout of the same nodes without them.
    """
    case = make_situation(
        snapshots, cluster, nccl_version=nccl_version, multi_node=multi_node, ranks_per_node=ranks_per_node
    )
    answer = replace(nccl_env.settings(case), model=model, train=train)
    if answer.unsupported:
        seen = f"{answer.unsupported} seen (PCI class and vendor), {answer.backend.upper()} is not supported yet"
        reason = explain_unsupported(cluster) or seen
        unsupported = Rejected(what="every layout", rule=answer.backend, reason=reason)
        return replace(answer, rejected=(unsupported,), unknowns=(reason,))
    set_to = {setting.name: setting.value for setting in answer.settings}
    against = pick_costly(findings or {}, set_to)
    planned = plan(
        cluster, snapshots, model, train, measurements, calibration, ranks_per_node=ranks_per_node, findings=against,
        interface=set_to.get("NCCL_SOCKET_IFNAME"),
    )  # fmt: skip
    if measured_step:
        planned = rescale(planned, measured_step)
    healthy = None
    if planned.slowed:
        links = make_links(cluster, ranks_per_node=ranks_per_node)
        if without := find_healthy_links(cluster, links, against, snapshots):
            again = plan(cluster, snapshots, model, train, calibration=calibration, links=without)
            healthy = best_layout(replace(
                again, scale=planned.scale, calibrated=planned.calibrated, global_batch=planned.global_batch,
            ))  # fmt: skip
    return _choose_layout(planned, replace(answer, slowed=planned.slowed, healthy=healthy), nccl_version)


def _choose_layout(planned: Planned, answer: Recommendation, nccl_version: Version | None) -> Recommendation:
    """Add to the answer the best layout, the next ones and the rejected ones, what is unknown, and what would help."""
    planned, result = _search_batches(planned)
    job, train = planned.job, planned.job.train
    is_certain = bool(result.best)
    if not is_certain:
        result = replace(result, best=search(planned, surely=False).best[:1])
    unknowns, assumed = list(planned.unknowns), ""
    if planned.batch_is_assumed:
        batch = planned.global_batch
        unknowns.append(_text("batch", batch=batch, tokens=batch * train.sequence_length))
    if nccl_version and nccl_version > (newest := newest_read()):
        unknowns.append(_text("unread_release", version=version_text(nccl_version), newest=version_text(newest)))
    too_large = any(row.rule == "memory-fits" for row in result.rejected)
    knows_rows = train.packing or train.length_histogram  # else `longest_row` is only an upper bound
    if not result.best and too_large and planned.requested and not knows_rows:
        result, assumed = _choose_for_shorter_rows(planned, result)
        unknowns.append(assumed)
    helps, rejected = tuple[str, ...](), tuple(result.rejected)
    best = result.best[: 1 + _RUNNERS_UP]
    winner = rank(planned, best[0]) if best else None
    if winner is not None:
        helps = (*_suggest_batch(planned, best[0]), *helps_most(job, best[0], planned.capacity))
        unknowns += _list_limits(planned.job, winner)
        if not is_certain and not assumed:
            unknowns.append(may_not_fit(planned, winner))
            helps = (*suggest_nearest(planned), *helps) if planned.requested else helps
        elif is_certain and best[0].may_be_tight:
            high, capacity = winner.forecast.memory_bytes.high, planned.capacity or 0.0
            unknowns.append(_text("tight_memory", high=high / GIB, capacity=capacity / GIB))
    elif planned.requested:
        rejected = (_explain_refusal(planned, result), *rejected)
        helps = suggest_nearest(planned)
    else:
        unknowns.append("no layout of this engine fits")
    text = f"{result.forecast_count} layouts forecast, {len(result.best)} combinations of parallelism fit"
    return replace(
        answer, notes=(*answer.notes, Note(topic="search", text=text)), backend="nccl" if job.has_gpu else "gloo",
        chosen=winner, runners_up=tuple(rank(planned, other, best[0]) for other in best[1:]), rejected=rejected,
        helps_most=helps, unknowns=tuple(unknowns),
    )  # fmt: skip


def _search_batches(planned: Planned) -> tuple[Planned, Ranking]:
    """Search with the planned batch and, until a layout fits, with other batches. Return the plan with the last one."""
    result = search(planned)
    for batch in _list_other_batches(planned):
        if result.best:
            break
        planned = replace(planned, global_batch=batch)
        result = search(planned)
    return planned, result


def _choose_for_shorter_rows(planned: Planned, result: Ranking) -> tuple[Ranking, str]:
    """Choose the layout that the settings name, although it does not fit rows of the assumed length.

    Rows are assumed to have `sequence_length` tokens, which real rows may never reach, so this length alone is no
    reason to reject a layout. The layout is the one that fits the longest rows among halvings of that length. Its
    forecast is still for the assumed length. If even rows of one token do not fit, weights and states are too large and
    `result` is returned unchanged. The second value explains the assumption to the user.
    """
    train, budget = planned.job.train, planned.budget or 0.0
    tokens = train.sequence_length

    def job_of(longest: int) -> Job:
        return replace(planned.job, train=replace(train, length_histogram=((longest, 1),)))

    halvings = (tokens >> n for n in range(1, tokens.bit_length()))
    fits = ((longest, best[0].layout) for longest in halvings
            if (best := search(replace(planned, job=job_of(longest))).best))  # fmt: skip
    if (first := next(fits, None)) is None:
        return result, _text("assumed_rows", tokens=tokens, consequence=_text("assumed_rows_hopeless"))
    longest, layout = first
    longest_fit = bisect_right(range(tokens), budget, lo=longest, key=lambda n: memory_of(job_of(n), layout).total) - 1
    candidate = planned.candidate(layout)
    missing = (candidate.memory.total - budget) / GIB
    text = _text("assumed_rows_longest", needed=candidate.memory.total / GIB, missing=missing, most=longest_fit)
    return replace(result, best=[candidate]), _text("assumed_rows", tokens=tokens, consequence=text)


def _list_other_batches(planned: Planned) -> Iterator[int]:
    """Yield other batches to try if the assumed batch fits no layout.

    They are smaller ones if the settings name the accumulation, then larger ones up to one sequence per rank.
    """
    batch, members = planned.global_batch, planned.requested
    if not planned.batch_is_assumed:
        return
    while "gradient_accumulation" in members and batch % (2 * planned.world) == 0:
        batch //= 2
        yield batch
    while batch < planned.world:
        batch *= 2
        yield batch


def _suggest_batch(planned: Planned, winner: Candidate) -> Iterator[str]:
    """Yield the next global batch that all ranks divide, if the same tokens take less time with it."""
    batch = math.ceil(planned.global_batch / planned.world) * planned.world
    if planned.global_batch < batch <= 2 * planned.global_batch:
        job = replace(planned.job, train=replace(planned.job.train, global_batch=batch))
        for best in search(replace(planned, job=job, global_batch=batch)).best[:1]:
            gain = 1.0 - best.seconds / batch * planned.global_batch / winner.seconds
            if best.layout.data_parallel == planned.world and gain >= 0.02:  # as in helps_most
                yield _text("divisible_batch", batch=batch, ranks=planned.world, family=best.layout.family, gain=gain)


def _explain_refusal(planned: Planned, result: Ranking) -> Rejected:
    """Return, from all rejected layouts, the row about the requested settings."""
    short = [row for row in result.rejected_families if row.rule == "memory-fits"]
    rows = short or result.rejected_families or result.rejected
    row = next(iter(rows), Rejected(what="", rule="fixed", reason="no layout has them"))
    settings = ", ".join(spelled(name, value) for name, value in planned.requested.items()
                         if name in _TELLING and value != 1 and (name, value) != ("offload", "none"))  # fmt: skip
    train = planned.job.train
    longest = longest_row(train)
    length = f"at max_length: {longest}" if longest == train.sequence_length else f"with rows of up to {longest} tokens"
    subject = f"{settings} {length}" if settings else "the layout"
    verb = "does not fit" if row.rule == "memory-fits" else "cannot run"
    budget = f": a rank may fill {planned.budget / GIB:.1f} GiB" if short and planned.budget else ""
    return Rejected(what=AS_REQUESTED, rule=row.rule, reason=f"{subject} {verb}: {row.reason}{budget}")


_TELLING = ("micro_batch", "sharding", "checkpointing", "offload", "precision", "tp", "pp", "cp")
_FREED = ("gradient_accumulation", "reshard_after_forward", "fused_cross_entropy")


def suggest_nearest(planned: Planned) -> tuple[str, ...]:
    """Return the changes to the job's settings with which it can run with the same batch; empty if nothing helps.

    A smaller micro-batch with more accumulation is preferred; else every setting but the precision may change.
    """
    requested = {"gradient_accumulation": 1, **planned.requested}
    fixed = {name: value for name, value in planned.requested.items() if name != "gradient_accumulation"}
    micro = requested.get("micro_batch", 1)
    smaller = [{**fixed, "micro_batch": n} for n in range(micro - 1, 0, -1) if micro % n == 0]
    free = {name: value for name, value in fixed.items() if name == "precision"}
    layouts = (best for fixed_values in (*smaller, free) for best in search(planned, fixed_values).best[:1])
    for layout in (best.layout for best in layouts):
        members = {name: getattr(layout, name) for name in (*_TELLING, *_FREED)}
        other = [spelled(name, value) for name, value in members.items() if value != requested.get(name, value)]
        return (f"{', '.join(other)} ({layout.family}), for the same batch of {planned.global_batch}",)
    return ()


def best_layout(planned: Planned) -> RankedLayout | None:
    """Return only the best layout."""
    return next((rank(planned, candidate) for candidate in search(planned).best[:1]), None)


def compare(first: RankedLayout, second: RankedLayout) -> tuple[tuple[str, float, float], ...]:
    """Compare two forecasts by component: (name, seconds of the first, seconds of the second)."""
    left, right = ({part.name: part.value for part in each.forecast.time_parts} for each in (first, second))
    rows = [(name, left.get(name, 0.0), right.get(name, 0.0)) for name in dict.fromkeys([*left, *right])]
    return (*rows, ("step", first.forecast.step_seconds.mid, second.forecast.step_seconds.mid))


def frontier(
    names: Sequence[str], nodes: Sequence[int], networks: Sequence[str | None], model: ModelSpec,
    train: TrainSpec, *, tokens: float, prices: float | Mapping[str, float] | None = None,
    transport: str | None = None, gpus_per_node: int | None = None,
) -> tuple[FrontierPoint, ...]:  # fmt: skip
    """Return the best layout for every machine, number of nodes and network; `tokens` are those of the whole run.

    `prices` are per node-hour, for all machines or by machine; `networks` as for `machines.over_network`, None: the
    machine's own network. Single nodes have no network and appear once. Raises MachineError for an invalid network.
    """
    for network in filter(None, networks):
        machines.network_bytes_per_second(network)
    cases = [(name, n, network) for name in names for n in nodes for network in (networks if n > 1 else networks[:1])]
    points = [
        _make_point(machines.cluster(name, count, gpus_per_node=gpus_per_node), machines.machine(name).name,
                    (network, transport), model, train, tokens, prices) for name, count, network in cases
    ]  # fmt: skip
    fits = {id(p): (p.seconds.mid, p.cost.mid if p.cost else p.gpu_hours or math.inf) for p in points if p.seconds}
    beaten = {
        key for key, values in fits.items()
        if any(other != values and other[0] <= values[0] and other[1] <= values[1] for other in fits.values())
    }  # fmt: skip
    comparable = len({p.cost is None for p in points if p.seconds}) < 2
    return tuple(replace(p, best=comparable and id(p) in fits and id(p) not in beaten) for p in points)


def _make_point(
    cluster: ClusterTopology, name: str, network: tuple[str | None, str | None], model: ModelSpec, train: TrainSpec,
    tokens: float, prices: float | Mapping[str, float] | None,
) -> FrontierPoint:  # fmt: skip
    count, (speed, transport) = len(cluster.nodes), network
    over = "-" if count == 1 else " ".join(filter(None, network)) if speed else "catalogue"
    here = FrontierPoint(machine=name, nodes=count, network=over, ranks=cluster.world_size)
    if speed and count > 1:
        try:
            cluster = machines.over_network(cluster, speed, transport)
        except machines.MachineError as error:
            return replace(here, reason=str(error))
    if reason := explain_unsupported(cluster):
        return replace(here, reason=reason)
    planned = plan(cluster, (), model, train)
    result = search(planned)
    if not result.best:
        misses = (row.reason for row in result.rejected if row.rule == "memory-fits")
        return replace(here, reason=next(misses, "no layout is allowed"))  # the smallest excess comes first
    best = result.best[0]
    forecast = forecast_of(planned, best)
    step = forecast.step_seconds
    mid = tokens / forecast.tokens_per_second
    seconds = step.scaled(mid / step.mid)
    price = prices.get(name) if isinstance(prices, Mapping) else prices
    cost = None if price is None else seconds.scaled(price * count / 3600.0)
    return replace(
        here, layout=best.layout.family + ", offloading" * (best.layout.offload != "none"),
        global_batch=planned.global_batch, tokens_per_second=forecast.tokens_per_second, mfu=forecast.mfu,
        memory_bytes=forecast.memory_bytes.mid, seconds=seconds, gpu_hours=mid / 3600.0 * cluster.world_size,
        cost=cost,
    )  # fmt: skip


def checkpoint_to_save(advice: Recommendation) -> tuple[float, float]:
    """Return the bytes of a checkpoint and the seconds of the step that may have to finish first; 0 if unknown."""
    if advice.chosen is None or advice.model is None or advice.train is None:
        return 0.0, 0.0
    in_fp32 = advice.backend != "nccl" or advice.chosen.layout.precision == "fp32"
    step = advice.chosen.forecast.step_seconds.high
    return checkpoint_bytes(advice.model, advice.train, in_fp32=in_fp32), step
