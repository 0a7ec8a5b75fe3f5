"""The answer to a request: the planner's recommendation, its exports, and comparisons across machines."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent.advice.request import Request, read_prices
from agent.base import raise_as, units
from agent.base.options import RequestError, parse_version
from contracts.finding import Finding
from contracts.job_config import ConfigError
from contracts.layout import LayoutError
from contracts.tables import read_table, read_texts
from planner import stacks
from planner.advice import ExportError, FrontierPoint, RankedLayout, Recommendation, request_of
from planner.forecast import machines
from planner.forecast.calibration import Calibration, load_calibration
from planner.forecast.faults import ENDS, RULES
from planner.forecast.specs import PlanError, TrainSpec, mean_length
from planner.nccl_env import environment as nccl_env
from planner.nccl_env.situation import make_situation
from planner.recommend import best_layout, frontier, plan, recommend
from planner.stacks import exports
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from topology.graph import ClusterTopology

if TYPE_CHECKING:  # the gate and the view are imported only if a host was scanned, not for a catalogue machine
    from agent.checks.view import View
    from collectives.bench.results import Measurement

ENVIRONMENTS = nccl_env.FORMATS  # formats that do not need a layout
EXPORTS: tuple[str, ...] = (*ENVIRONMENTS, *exports.FORMATS)
FORMATS: tuple[str, ...] = ("json", "yaml", *EXPORTS)
FORMAT_TEXTS: dict[str, str] = read_table(__file__, "formats.toml")  # what each format is for
texts = read_texts(__file__, "texts.toml")
PLAN_ERRORS = (PlanError, LayoutError, ConfigError)  # of a request that the planner cannot answer
# The job's default (contracts/default.yaml): a Llama model small enough for any host, on generated data.
EMBEDDED_MODEL = "tiny-llama"
MAX_POINTS = 64  # rows of a table of alternatives
ASSUMED_TOKENS = 1e9  # of a run without a budget
WHAT_IF_FIELDS = ("model", "method", "machine", "nodes", "sequence_length", "global_batch", "network", "transport",
                  "steps", "price")  # fmt: skip
"""The fields of a question that the what-if page asks for."""
_SHORTEST = 512  # tokens: a run with shorter sequences is a different job
_TIMES = (2, 4, 8, 16, 32, 64)  # factors by which the number of nodes is increased
_Changes = list[dict[str, Any]]  # of one setting, the smallest first
_WIDER = {"mxfp8": ("fp8", "bf16"), "fp8": ("bf16",)}  # precisions of products with more bits
_ROUNDING = 1e-9  # tolerance for floating-point error: a whole number of steps is not rounded up
_MAX_FAULTS = 4  # number of faults printed with a recommendation; `topoflight scan` prints all of them


def with_budget(advice: Recommendation, request: Request, nodes: int) -> Recommendation:
    """Add the duration and cost of the whole run on `nodes` nodes, if the request has a budget."""
    budgets = {"steps": request.train.steps, **{name: getattr(request, name) for name in ("tokens", "hours", "epochs")}}
    budget_names = [name for name, value in budgets.items() if value is not None]
    if len(budget_names) > 1:
        raise RequestError(f"{' and '.join(budget_names)}: give only one of them")
    price = request.node_hour_price()
    is_assumed = request.rows is not None and not (request.unmeasured or request.train.length_histogram)
    rows = texts("assumed_rows", length=request.train.sequence_length) if is_assumed else request.unmeasured
    unknowns = (*advice.unknowns, rows) if rows else advice.unknowns
    advice = replace(advice, rows=request.count_rows(), node_hour_price=price, unknowns=unknowns)
    steps = _count_steps(request, advice.chosen) if advice.chosen else None
    if advice.chosen is None or steps is None:
        return advice
    duration = advice.chosen.forecast.step_seconds.scaled(steps)
    cost = None if price is None else duration.scaled(price * nodes / 3600.0)
    return replace(advice, total_steps=steps, total_seconds=duration, total_cost=cost)


def _count_steps(request: Request, ranked: RankedLayout) -> int | None:
    """Return the optimizer steps of the whole run; None without a budget, or if the rows could not be measured."""
    forecast, train, rows = ranked.forecast, request.train, request.count_rows()
    if request.hours is not None:
        return int(request.hours * 3600 / forecast.step_seconds.mid * (1.0 + _ROUNDING))
    if request.tokens is not None:
        steps = request.tokens / (forecast.tokens_per_second * forecast.step_seconds.mid)
        return max(1, math.ceil(steps * (1.0 - _ROUNDING)))
    if request.epochs is None or (rows is None and request.unmeasured):
        return train.steps
    if rows is None:
        hint = "give rows or lengths, or a data set in the file of --config"
        raise RequestError(f"epochs: the number of rows is unknown; {hint}")
    if train.packing and train.length_histogram:  # several rows are packed into one sequence
        rows = math.ceil(rows * mean_length(train.length_histogram, train.sequence_length) / train.sequence_length)
    per_epoch = max(1, math.ceil(rows / ranked.layout.global_batch))  # the last batch contains the remaining rows
    return max(1, math.ceil(request.epochs * per_epoch))


def advise(
    request: Request, snapshots: Sequence[Snapshot], *, measurements: Sequence[Measurement] | None = None,
    calibration: Calibration | None = None, checks: Sequence[Finding] | None = None,
) -> Recommendation:  # fmt: skip
    """Answer a request about the hosts in `snapshots`, or about the machine of the catalogue that it names.

    `measurements` and `calibration` override the values of the request. `checks` are the known findings of the hosts;
    if None, the hosts are checked here.
    """
    snapshots = () if request.machine else snapshots
    if request.machine or request.model is None:
        checks = ()
    elif checks is None:
        from agent.checks.view import build_view

        checks = build_view(snapshots).checks
    measurements = request.measurements() if measurements is None else measurements
    with raise_as(RequestError, PLAN_ERRORS):
        if request.calibration and calibration is None:
            calibration = load_calibration(request.calibration)
        return advise_cluster(
            request, request.cluster(snapshots), snapshots, measurements=measurements, calibration=calibration,
            checks=checks,
        )  # fmt: skip


def advise_view(view: View, request: Request) -> Recommendation:
    """Answer a request from the agent's current view."""
    verified = tuple(m for m in view.bench.measurements if m.verified) if view.bench else ()
    return advise(request, view.snapshots, measurements=verified, checks=view.checks)


def with_faults(advice: Recommendation, checks: Sequence[Finding]) -> Recommendation:
    """Add failures that the forecast does not include because no number bounds them or because they end the job."""
    if not checks:
        return advice
    from agent.checks.findings import group_findings

    counted = {*RULES, *("interfaces.choice.wrong" for s in advice.settings if s.name == "NCCL_SOCKET_IFNAME")}
    groups = [group for group in group_findings(checks) if group.status == "fail" and set(group.codes) - counted]
    ends, left_out = "this fault ends the job", "the forecast does not count this fault"
    rows = []
    for group in groups[:_MAX_FAULTS]:
        on = group.place if len(group.subjects) == 1 else group.places
        effect = ends if ENDS & set(group.codes) else left_out
        rows.append(f"{effect}: {group.id}{on and ' '}{on}: {group.message}")
    hidden = len(groups) - len(rows)
    summary = (f"{hidden} more findings of failed checks: topoflight scan",) if hidden else ()
    return replace(advice, unknowns=(*advice.unknowns, *rows, *summary)) if advice.chosen else advice


def advise_cluster(
    request: Request, cluster: ClusterTopology, snapshots: Sequence[Snapshot], *,
    measurements: Sequence[Measurement] = (), calibration: Calibration | None = None, checks: Sequence[Finding] = (),
) -> Recommendation:  # fmt: skip
    """Ask the planner about these nodes; without a model, only about the NCCL environment.

    Raises RequestError or one of PLAN_ERRORS if the request does not fit.
    """
    model, version = request.model_spec(), parse_version(request.nccl_version)
    # one node without a requested number: more can be added later
    multi_node = len(cluster.nodes) > 1 or (None if request.nodes is None else False)
    if model is None:
        case = make_situation(
            snapshots, cluster, nccl_version=version, multi_node=multi_node, ranks_per_node=request.ranks_per_node
        )
        recommendation = nccl_env.settings(case)
        backend = "nccl" if any(node.gpus for node in cluster.nodes) else "gloo"
        return recommendation if recommendation.unsupported else replace(recommendation, backend=backend)
    findings: dict[str, tuple[Finding, ...]] = {}  # failures and warnings by node, as the planner reads them
    for check in checks:
        if check.status in ("fail", "warn"):
            findings[check.node] = (*findings.get(check.node, ()), check)
    if len(snapshots) == 1 and len(findings) == 1:  # one host, used for all nodes of the cluster
        findings = {node.hostname: of_host for node in cluster.nodes for of_host in findings.values()}
    advice = recommend(
        cluster, snapshots, model, request.train, measurements=measurements, calibration=calibration,
        nccl_version=version, ranks_per_node=request.ranks(cluster),
        multi_node=multi_node, findings=findings, measured_step=request.measured_layout(),
    )  # fmt: skip
    if advice.chosen is None and not advice.unsupported and not advice.helps_most:
        advice = replace(advice, helps_most=suggest_changes(request, snapshots))
    return with_faults(with_budget(advice, request, len(cluster.nodes)), checks)


# If no layout fits: the closest requests for which a layout fits.


def suggest_changes(request: Request, snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """Return, per setting, the smallest change that makes a layout fit; if none does, changes of two settings.

    The settings are adapters, sequence length, 8-bit optimizer states, precision of products, nodes and engine.
    """
    train, nodes, batch = request.train, request.nodes or max(1, len(snapshots)), request.train.global_batch or 0
    ranks = sum(len(node.gpus) for node in request.cluster(snapshots).nodes) if batch else 0
    adapters = {"full": ("lora", "qlora"), "lora": ("full", "qlora"), "qlora": ("lora", "full")}[train.method]
    halves = [train.sequence_length >> n for n in range(1, 16)]
    batches: _Changes = [{"global_batch": batch << n} for n in range(1, 24) if batch << n <= ranks]
    methods: _Changes = [{"method": method} for method in adapters]
    lengths: _Changes = [{"sequence_length": length} for length in halves if length >= _SHORTEST]
    optimizers: _Changes = [{"optimizer": "adamw8bit"}] if (train.method, train.optimizer) == ("full", "adamw") else []
    precisions: _Changes = [{"precision": wider} for wider in _WIDER.get(train.precision, ())]
    sizes: _Changes = [{"nodes": nodes * times} for times in _TIMES] if len(snapshots) < 2 else []
    engines: _Changes = [{"engine": engine} for engine in stacks.ENGINES if engine != train.engine]
    settings = (batches, methods, lengths, optimizers, precisions, sizes, engines)
    lines = [_find_fitting(request, changes, snapshots) for changes in settings]
    if not any(lines):
        both = [{**method, **size} for method in methods[-1:] for size in sizes]
        both += [{**engine, **length} for engine in engines for length in lengths]
        lines = [_find_fitting(request, both, snapshots)]
    return tuple(filter(None, lines))


def _find_fitting(request: Request, changes: _Changes, snapshots: Sequence[Snapshot]) -> str:
    """Return the first change that makes a layout fit, with its step time; "" if none does."""
    for changed in changes:
        other = request.changed(**changed)
        model = other.model_spec()
        try:
            cluster = other.cluster(snapshots)
            ranks = other.ranks(cluster)
            best = best_layout(plan(cluster, snapshots, model, other.train, ranks_per_node=ranks)) if model else None
        except PLAN_ERRORS:
            continue
        if best is not None:
            words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items())
            step = units.seconds(best.forecast.step_seconds.mid)
            how = best.layout.family + (", offloading" if best.layout.offload != "none" else "")
            return f"With {words} a layout fits ({how}, {step} a step)"
    return ""


# The embedded job, and exports.


def with_fsdp(advice: Recommendation) -> Recommendation:
    """For the embedded job, choose the best FSDP layout, add the reason, and compare every other layout with it.

    It fits any layout. It runs under FSDP because users train that way, and because FSDP uses the collectives that were
    measured: all-gather and reduce-scatter.
    """
    if advice.model is None or advice.model.name != EMBEDDED_MODEL:
        return advice
    fitting = [r for r in (advice.chosen, *advice.runners_up) if r is not None]
    sharded = next((r for r in fitting if r.layout.family in ("FSDP", "HSDP")), None)
    if sharded is None or sharded is advice.chosen:
        return advice
    step, best = sharded.forecast.step_seconds.mid, fitting[0].forecast.step_seconds.mid
    reason = texts(
        "small_run", family=sharded.layout.family, step=units.seconds(step), best_family=fitting[0].layout.family,
        best=units.seconds(best),
    )  # fmt: skip

    def compared(other: RankedLayout) -> RankedLayout:
        more = other.forecast.step_seconds.mid / step - 1.0
        return replace(other, why=f"{abs(more):.1%} {'slower' if more > 0 else 'faster'} than {sharded.layout.family}")

    others = tuple(compared(r) for r in fitting if r is not sharded)
    return replace(advice, chosen=replace(sharded, why=reason), runners_up=others)


def export(advice: Recommendation, form: str, *, nodes: int = 1) -> str:
    """Export the advice in the input format of another tool; `nodes` is the number of hosts that the ranks run on."""
    if form in ENVIRONMENTS:
        return nccl_env.render_settings(advice.settings, form, advice.notes)
    if advice.model is None:
        raise RequestError(f"model: is required by the format {form}, which exports a layout")
    world = advice.chosen.layout.world_size if advice.chosen else nodes
    with raise_as(RequestError, ExportError):
        return exports.export(form, request_of(advice, ranks_per_node=max(1, world // nodes)))


def adapt_to_pods(
    advice: Recommendation, snapshots: Sequence[Snapshot], *, here: bool
) -> tuple[Recommendation, list[str]]:
    """Adapt the settings to a pod's network namespace: use its interface names and GIDs, or omit the setting.

    An interface is named only if the record of an agent in the pod network shows it under that name. A GID index refers
    to the GID table that the pod sees. `here` means that the only snapshot is of the machine this process runs on.
    """
    roles: dict[str, set[str]] = {}
    if not here or os.environ.get("KUBERNETES_SERVICE_HOST"):
        for snapshot in snapshots:
            facts = snapshot.facts(InterfacesFacts)
            for link in facts.interfaces if facts else ():
                roles.setdefault(link.name, set()).add(link.role)
    inside = {name for name, its_roles in roles.items() if its_roles <= {"pod-default", "secondary", "loopback"}}
    secondary = any("secondary" in roles[name] for name in inside)
    source = "this machine" if here else ", ".join(snapshot.hostname for snapshot in snapshots[:2])
    settings, notes = [], []
    for setting in advice.settings:
        wrong = ""
        if setting.name.endswith("_SOCKET_IFNAME"):
            names = [name for name in setting.value.lstrip("^=").split(",") if name not in inside]
            wrong = f"{', '.join(names)} is an interface of {source}, and pods have their own" if names else ""
        elif setting.name == "NCCL_IB_GID_INDEX" and not secondary:
            wrong = f"it is an index into the GID table of {source}, and a pod sees another table"
        elif setting.name.endswith("_FILE") and setting.value.startswith("/"):
            needed = "is a file of the node's image; the pod's image must have it too"
            notes.append(f"{setting.name}={setting.value} {needed}")
        if wrong:
            remedy = "a capture in a pod on the job's networks shows it"
            notes.append(f"{setting.name}={setting.value} is left out: {wrong}; {remedy}")
        else:
            settings.append(setting)
    return replace(advice, settings=tuple(settings)), notes


# The same job on other machines, node counts and networks.


def forecast_frontier(request: Request, nodes: Sequence[int]) -> tuple[FrontierPoint, ...]:
    """Forecast the request for several machines, node counts and networks, with the same batch and number of tokens.

    If the request has no budget, the run has one billion tokens. Raises RequestError.
    """
    model, train = request.required_model(), request.train
    prices = read_prices(request.price, files=request.allow_files) if request.price else None
    machine_names = [word for word in (request.machine or "").split(",") if word]
    names = machine_names or list(prices if isinstance(prices, dict) else ())
    if not names:
        raise RequestError("sweep: name the machines (--machine A,B,...), or give their prices in a file")
    networks = [None, *(word for word in (request.network or "").split(",") if word)]
    if len(names) * len(nodes) * len(networks) > MAX_POINTS:
        count = f"{len(names)} machines x {len(nodes)} numbers of nodes x {len(networks)} networks"
        raise RequestError(f"sweep: {count} are more than {MAX_POINTS} points")
    with raise_as(RequestError, PLAN_ERRORS):
        if train.global_batch is None:  # all points need the same batch, otherwise they would be different jobs
            sizes = [machines.cluster(name, max(nodes), gpus_per_node=request.ranks_per_node) for name in names]
            largest = max(sizes, key=lambda cluster: cluster.world_size)
            train = replace(train, global_batch=plan(largest, (), model, train).global_batch)
        return frontier(
            names, nodes, networks, model, train, tokens=count_tokens(request, train), prices=prices,
            transport=request.transport, gpus_per_node=request.ranks_per_node,
        )  # fmt: skip


def count_tokens(request: Request, train: TrainSpec) -> float:
    """Return the number of tokens of the whole run without padding; one billion if the request has no budget."""
    histogram = train.length_histogram
    mean = mean_length(histogram, train.sequence_length) if histogram else float(train.sequence_length)
    if request.tokens is not None:
        return float(request.tokens)
    if request.epochs is not None and (rows := request.count_rows()):
        return request.epochs * rows * mean
    if train.steps is not None:
        return train.steps * (train.global_batch or 1) * mean
    return ASSUMED_TOKENS
