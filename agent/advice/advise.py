"""A request to the planner (hosts or machine, model, and run), its answer, exports, and comparisons across machines."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base import units
from agent.base.options import RequestError, parse_version, read_snapshots
from contracts.finding import Finding
from contracts.job_config import ConfigError, parse_layout_text, read_mapping
from contracts.layout import LayoutError
from contracts.tables import read_texts
from planner import stacks
from planner.advice import ExportError, FrontierPoint, RankedLayout, Recommendation, request_of
from planner.forecast import machines, models
from planner.forecast.calibration import Calibration, load_calibration
from planner.forecast.faults import ENDS, RULES
from planner.forecast.specs import ModelSpec, PlanError, TrainSpec, check_histogram, mean_length
from planner.nccl_env import environment as nccl_env
from planner.nccl_env.situation import make_situation, with_plugin
from planner.recommend import MeasuredStep, best_layout, frontier, plan, recommend
from planner.stacks import exports
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.registry import ALL
from topology.build import build
from topology.cluster import join
from topology.graph import ClusterTopology

if TYPE_CHECKING:  # the gate and the view are imported only if a host was scanned, not for a catalogue machine
    from agent.checks.view import View
    from collectives.bench.results import Measurement

ENVIRONMENTS = nccl_env.FORMATS  # formats that do not need a layout
EXPORTS: tuple[str, ...] = (*ENVIRONMENTS, *exports.FORMATS)
FORMATS: tuple[str, ...] = ("json", "yaml", *EXPORTS)
texts = read_texts(__file__, "texts.toml")
PLAN_ERRORS = (PlanError, LayoutError, ConfigError)  # of a request that the planner cannot answer
# The job's default (contracts/default.yaml): a Llama model small enough for any host, on generated data.
EMBEDDED_MODEL = "tiny-llama"
_MAX_FAULTS = 4  # number of faults printed with a recommendation; `topoflight scan` prints all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: the machine, the run and the job's settings. Without a model, only the environment is recommended.

    User options are declared in agent/base/question.toml; its fields are members of this class or of TrainSpec.
    """

    hosts: tuple[Path, ...] = ()
    root: str = "/"
    machine: str | None = None
    nodes: int | None = None
    network: str | None = None  # "100G": rate of the network between nodes, overrides their own
    transport: str | None = None  # "rdma" or "tcp", for that network
    model: str | None = None
    train: TrainSpec = field(default_factory=TrainSpec)  # `steps` is the number of steps of the whole run
    tokens: int | None = None  # of the whole run, alternative to steps
    epochs: float | None = None  # of the whole run, alternative to steps: passes over the rows
    rows: int | None = None  # in the data set
    unmeasured: str = ""  # reason that the data set's rows were not measured; empty if they were
    price: str | None = None  # per node-hour: a number, or a YAML file with a number for each machine
    hours: float | None = None  # duration of the whole run; gives the number of steps
    ranks_per_node: int | None = None
    nccl_version: str | None = None
    bench_file: Path | None = None
    calibration: Path | None = None
    measured_step: tuple[str, float] | None = None  # layout as text, seconds
    shape: ModelSpec | None = None  # of the model, if read from its hub
    allow_files: bool = True  # whether `model` may be a file name; False over HTTP
    config: Path | None = None  # YAML file with settings of the job
    overrides: tuple[str, ...] = ()  # NAME=VALUE: settings of the job that replace those of the file

    @classmethod
    def of(cls, **options: Any) -> Request:
        """Create a request from options named like members here or in TrainSpec, and `lengths`; ignore others."""
        return cls().changed(**options)

    def changed(self, **options: Any) -> Request:
        """Return a copy with these options; None leaves a TrainSpec member that cannot be None unchanged.

        Raises RequestError if `lengths` cannot be parsed.
        """
        run = {name: value for name, value in options.items()
               if name in _OF_RUN and (value is not None or _OF_RUN[name] is None)}  # fmt: skip
        if "lengths" in options:
            run["length_histogram"] = parse_histogram(options["lengths"])
        members = {field.name for field in fields(self)} & options.keys()
        return replace(self, train=replace(self.train, **run), **{name: options[name] for name in members - {"train"}})

    def with_settings(self, *settings: str) -> Request:
        """Return a copy with more settings of the job, which replace those before them."""
        return replace(self, overrides=(*self.overrides, *settings))

    def read_hosts(self) -> tuple[Snapshot, ...]:
        """Scan this host, or read the recordings of the hosts; empty for a machine of the catalogue."""
        return () if self.machine else read_snapshots(self.hosts, ALL, root=self.root)

    def model_spec(self) -> ModelSpec | None:
        """Return the requested model: a known name, or a config.json if files are allowed. Raises ModelError."""
        if self.model is None or self.shape is not None:
            return self.shape
        path = Path(self.model)
        if self.allow_files and (path.suffix == ".json" or os.path.isdir(path)):
            try:
                return models.read_model_file(path)
            except models.ModelError as error:
                raise RequestError(f"--model {error}") from None
        return models.model_named(self.model)

    def required_model(self) -> ModelSpec:
        """Return the requested model. Raises RequestError if none is requested."""
        if (model := self.model_spec()) is None:
            raise RequestError("--model: name the model")
        return model

    def count_rows(self) -> int | None:
        """Return the number of rows in the data: the given number, else the sum of the length histogram."""
        if self.rows is not None:
            return self.rows
        return sum(count for _, count in self.train.length_histogram) or None

    def node_hour_price(self) -> float | None:
        """Return the price of a node-hour: the given number, or this machine's price in the given file; else None."""
        if self.price is None:
            return None
        prices = read_prices(self.price, files=self.allow_files)
        if isinstance(prices, float):
            return prices
        name = machines.machine(self.machine).name if self.machine else ""
        if name and name not in prices:
            raise RequestError(f"--price {self.price}: no price of {name}; it has {', '.join(prices) or 'none'}")
        return prices.get(name)

    def measurements(self) -> tuple[Measurement, ...]:
        """Return the measurements of the benchmark result that the request names; empty if it names none."""
        if self.bench_file is None:
            return ()
        from collectives.bench.results import read_result

        try:
            return read_result(self.bench_file).measurements
        except (OSError, ValueError) as error:
            raise RequestError(f"--bench {self.bench_file}: {error}") from None

    def measured_layout(self) -> MeasuredStep | None:
        """Return the measured step given in the request. Raises ConfigError if its layout is invalid."""
        if self.measured_step is None:
            return None
        text, seconds = self.measured_step
        return parse_layout_text(text), seconds

    def ranks(self, cluster: ClusterTopology) -> int | None:
        """Return the requested ranks per node, else two gloo ranks for a host without GPUs, else None: one per GPU."""
        has_gpus = self.machine or any(node.gpus for node in cluster.nodes)
        return self.ranks_per_node or (None if has_gpus else 2)

    def cluster(self, snapshots: Sequence[Snapshot]) -> ClusterTopology:
        """Return the requested cluster, with the named network."""
        cluster = self._build_nodes(snapshots)
        if self.network is not None:
            return machines.over_network(cluster, self.network, self.transport)
        if self.transport is not None:
            raise RequestError(f"transport {self.transport}: requires the rate of the network too, for example 100G")
        return cluster

    def _build_nodes(self, snapshots: Sequence[Snapshot]) -> ClusterTopology:
        """Return the nodes: a catalogue machine, one host repeated, or the given hosts.

        Raises MachineError if a node has fewer GPUs than the ranks to run on it.
        """
        ranks = self.ranks_per_node
        if self.machine:
            return machines.cluster(self.machine, self.nodes or 1, gpus_per_node=ranks)
        nodes = [build(snapshot) for snapshot in snapshots]
        if ranks is not None:
            nodes = [machines.with_gpus(node, ranks) if node.gpus else node for node in nodes]
        if self.nodes and self.nodes != len(nodes):
            if len(nodes) != 1:
                raise RequestError(f"--nodes {self.nodes} with {len(nodes)} hosts: give one host, or as many as nodes")
            nodes = [replace(nodes[0], hostname=f"{nodes[0].hostname}-{i}") for i in range(self.nodes)]
        return with_plugin(join(nodes), snapshots)


_OF_RUN = {one.name: one.default for one in fields(TrainSpec)}


def parse_histogram(text: str | None) -> tuple[tuple[int, int], ...]:
    """Parse "64:900,512:100" as a length histogram. Raises RequestError that names the invalid part."""
    if not text:
        return ()
    rows = []
    for word in text.split(","):
        length, _, count = word.partition(":")
        if not (length.isdecimal() and count.isdecimal() and len(length) < 8 and len(count) < 12):
            raise RequestError(f"lengths={word!r}: must be TOKENS:ROWS, both whole numbers")
        rows.append((int(length), int(count)))
    try:
        return check_histogram(tuple(sorted(rows)))
    except PlanError as error:
        raise RequestError(str(error)) from None


_MAX_PRICE = 1e9


def read_prices(text: str, *, files: bool) -> float | dict[str, float]:
    """Parse "98.32" as a number, and a YAML file as one price for each catalogue machine that it names."""
    with contextlib.suppress(ValueError):
        return _check_price("price", float(text))
    if not files:
        raise RequestError(f"price={text[:40]!r}: must be a number, of a node-hour")
    try:
        raw = read_mapping(Path(text), once=True)
    except ConfigError as error:
        raise RequestError(f"--price {error}") from None
    prices = {}
    for name, value in raw.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"--price {text}: {name}: must be a number, of a node-hour")
        try:
            prices[machines.machine(str(name)).name] = _check_price(str(name), float(value))
        except machines.MachineError as error:
            raise RequestError(f"--price {text}: {error}") from None
    return prices


def _check_price(name: str, value: float) -> float:
    if not 0.0 <= value <= _MAX_PRICE:
        raise RequestError(f"{name}={value:g}: must be from 0 to {_MAX_PRICE:g}")
    return value


# The answer.


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


_ROUNDING = 1e-9  # tolerance for floating-point error: a whole number of steps is not rounded up


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
    try:
        if request.calibration and calibration is None:
            calibration = load_calibration(request.calibration)
        return advise_cluster(
            request, request.cluster(snapshots), snapshots, measurements=measurements, calibration=calibration,
            checks=checks,
        )  # fmt: skip
    except PLAN_ERRORS as error:
        raise RequestError(str(error)) from None


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

_SHORTEST = 512  # tokens: a run with shorter sequences is a different job
_TIMES = (2, 4, 8, 16, 32, 64)  # factors by which the number of nodes is increased
_WIDER = {"mxfp8": ("fp8", "bf16"), "fp8": ("bf16",)}


def suggest_changes(request: Request, snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """Return, per setting, the smallest change that makes a layout fit; if none does, changes of two settings.

    The settings are adapters, sequence length, 8-bit optimizer states, precision of products, nodes and engine.
    """
    nodes = request.nodes or max(1, len(snapshots))
    several = [{"nodes": nodes * times} for times in _TIMES] if len(snapshots) < 2 else []
    train = request.train
    methods = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[train.method]
    lengths = [train.sequence_length >> n for n in range(1, 16) if train.sequence_length >> n >= _SHORTEST]
    batch = train.global_batch or 0
    ranks = sum(len(node.gpus) for node in request.cluster(snapshots).nodes) if batch else 0
    kinds: list[list[dict[str, Any]]] = [
        [{"global_batch": batch << n} for n in range(1, 24) if batch << n <= ranks],
        [{"method": method} for method in methods],
        [{"sequence_length": length} for length in lengths],
        [{"optimizer": "adamw8bit"}] if (train.method, train.optimizer) == ("full", "adamw") else [],
        [{"precision": wider} for wider in _WIDER.get(train.precision, ())],
        several,
        [{"engine": engine} for engine in stacks.ENGINES if engine != train.engine],
    ]
    lines = [line for kind in kinds if (line := _find_fitting(request, kind, snapshots))]
    if not lines:
        both = [{**method, **change} for method in kinds[1][-1:] for change in several]
        both += [{**engine, **shorter} for engine in kinds[-1] for shorter in kinds[2]]
        lines = [line for line in (_find_fitting(request, both, snapshots),) if line]
    return tuple(lines)


def _find_fitting(request: Request, changes: Sequence[dict[str, Any]], snapshots: Sequence[Snapshot]) -> str:
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
            changed_names = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changed.items())
            step = units.seconds(best.forecast.step_seconds.mid)
            how = best.layout.family + (", offloading" if best.layout.offload != "none" else "")
            return f"{changed_names} fits ({how}, {step} a step)"
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
        raise RequestError(f"format {form}: requires a model, because it exports a layout")
    world = advice.chosen.layout.world_size if advice.chosen else nodes
    try:
        return exports.export(form, request_of(advice, ranks_per_node=max(1, world // nodes)))
    except ExportError as error:
        raise RequestError(str(error)) from None


POD_ROLES = {"pod-default", "secondary", "loopback"}  # roles of interfaces in a pod's network namespace


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
    inside = {name for name, its_roles in roles.items() if its_roles <= POD_ROLES}
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

MAX_POINTS = 64
ASSUMED_TOKENS = 1e9  # of a run without a budget
WHAT_IF_FIELDS = ("model", "method", "machine", "nodes", "sequence_length", "global_batch", "network", "transport",
                  "steps", "price")  # fmt: skip
"""The fields of a question that the what-if page asks for."""


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
    try:
        if train.global_batch is None:  # all points need the same batch, otherwise they would be different jobs
            sizes = [machines.cluster(name, max(nodes), gpus_per_node=request.ranks_per_node) for name in names]
            largest = max(sizes, key=lambda cluster: cluster.world_size)
            train = replace(train, global_batch=plan(largest, (), model, train).global_batch)
        return frontier(
            names, nodes, networks, model, train, tokens=count_tokens(request, train), prices=prices,
            transport=request.transport, gpus_per_node=request.ranks_per_node,
        )  # fmt: skip
    except PLAN_ERRORS as error:
        raise RequestError(str(error)) from None


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
