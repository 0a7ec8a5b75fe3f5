"""A question to the planner: which hosts or machine, which model, which run; and the answer in any format."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base.inputs import RequestError, parse_version
from contracts import bounded
from contracts.interval import Interval
from contracts.job_config import ConfigError, read_mapping
from contracts.layout import LayoutError, values_of
from planner import stacks
from planner.advice import ExportError, Note, RankedLayout, Recommendation, request_of
from planner.forecast import machines, models
from planner.forecast.calibration import Calibration, CalibrationError, load_calibration
from planner.forecast.faults import ENDS, RULES, Findings
from planner.forecast.specs import LengthsError, ModelSpec, TrainSpec, check_histogram, mean_length
from planner.nccl_env import environment as nccl_env
from planner.nccl_env.environment import render_env, render_k8s, render_shell
from planner.recommend import MeasuredStep, recommend
from probes.api import Finding, Severity, Snapshot
from topology.build import build
from topology.cluster import join
from topology.derive import with_gpus
from topology.graph import ClusterTopology

if TYPE_CHECKING:  # the gate and the view are loaded where a host was scanned: a catalogue machine needs neither
    from agent.checks.verdict import Check
    from agent.checks.view import Group, View
    from collectives.bench.results import Measurement

ENVIRONMENTS = ("env", "shell", "k8s")  # formats that need no layout
EXPORTS: tuple[str, ...] = (*ENVIRONMENTS, *stacks.FORMATS)
FORMATS: tuple[str, ...] = ("json", "yaml", *EXPORTS)
_FAULTS_SAID = 4  # beside an advice; all of them are what `topoflight scan` prints


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question: where, and which run. Without a model only the environment is advised."""

    hosts: tuple[Path, ...] = ()
    root: str = "/"
    machine: str | None = None
    nodes: int | None = None
    network: str | None = None  # "100G": what joins the nodes, in place of what they have
    transport: str | None = None  # "rdma", "tcp": of that network
    model: str | None = None
    train: TrainSpec = field(default_factory=TrainSpec)  # its `steps` are those of the whole run
    tokens: int | None = None  # of the whole run, in place of steps
    epochs: float | None = None  # of the whole run, in place of steps: passes over the rows
    rows: int | None = None  # of the data set
    tokenizer: str | None = None  # that measures the data set's rows; None: the model's
    unmeasured: str = ""  # why the data set's rows were not measured
    price: str | None = None  # of a node-hour: a number, or a YAML file of numbers by machine
    hours: float | None = None  # of the whole run, in place of both: how many steps fit
    ranks_per_node: int | None = None
    nccl_version: str | None = None
    bench_file: Path | None = None
    calibration: Path | None = None
    measured_step: tuple[str, float] | None = None  # its layout as text, seconds
    shape: ModelSpec | None = None  # of the model, where its hub was asked
    allow_files: bool = True  # whether `model` may name a file: not over HTTP

    @classmethod
    def of(cls, **options: Any) -> Request:
        """From options named as the members here and in TrainSpec, and `lengths`; others are passed over."""
        return cls().changed(**options)

    def changed(self, **options: Any) -> Request:
        """The same question with these options. Raises RequestError where `lengths` cannot be read."""
        run = {name: value for name, value in options.items() if name in _OF_RUN}
        if "lengths" in options:
            run["length_histogram"] = histogram_of(options["lengths"])
        own = {one.name for one in fields(self)} & options.keys()
        return replace(self, train=replace(self.train, **run), **{name: options[name] for name in own - {"train"}})


_OF_RUN = {one.name for one in fields(TrainSpec)}


def model_of(request: Request) -> ModelSpec | None:
    """The model asked for: a known name, or a config.json where files are allowed."""
    if request.model is None or request.shape is not None:
        return request.shape
    path = Path(request.model)
    if request.allow_files and (path.suffix == ".json" or bounded.is_folder(path)):
        try:
            return models.model_from_file(path)
        except models.ModelError as error:
            raise RequestError(f"--model {error}") from None
    try:
        return models.model_named(request.model)
    except models.ModelError as error:
        raise RequestError(str(error)) from None


def histogram_of(text: str | None) -> tuple[tuple[int, int], ...]:
    """ "64:900,512:100" as a length histogram; RequestError names the word that is wrong."""
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
    except LengthsError as error:
        raise RequestError(str(error)) from None


def with_budget(advice: Recommendation, request: Request, nodes: int) -> Recommendation:
    """The same advice with length and cost of the whole run on so many nodes, where a budget was given."""
    budgets = {"steps": request.train.steps, **{name: getattr(request, name) for name in ("tokens", "hours", "epochs")}}
    budget_names = [name for name, value in budgets.items() if value is not None]
    if len(budget_names) > 1:
        raise RequestError(f"{' and '.join(budget_names)}: give one budget")
    price = price_of(request)
    unknowns = (*advice.unknowns, request.unmeasured) if request.unmeasured else advice.unknowns
    advice = replace(advice, rows=rows_of(request), node_hour_price=price, unknowns=unknowns)
    if advice.chosen is None or not budget_names:
        return advice
    step = advice.chosen.forecast.step_seconds
    if request.epochs is not None and request.unmeasured and rows_of(request) is None:
        return advice
    steps = steps_of(request, advice.chosen)
    whole = Interval(low=step.low * steps, mid=step.mid * steps, high=step.high * steps)
    cost = None
    if price is not None:
        each = price * nodes / 3600.0
        cost = Interval(low=whole.low * each, mid=whole.mid * each, high=whole.high * each)
    return replace(advice, total_steps=steps, total_seconds=whole, total_cost=cost)


def steps_of(request: Request, chosen: RankedLayout) -> int:
    """Optimizer steps of the whole run, at least one. RequestError where epochs are of nobody knows how many rows."""
    forecast = chosen.forecast
    if request.train.steps is not None:
        return request.train.steps
    if request.hours is not None:
        return int(request.hours * 3600 / forecast.step_seconds.mid)
    if request.tokens is not None:
        return max(1, math.ceil(request.tokens / (forecast.tokens_per_second * forecast.step_seconds.mid)))
    rows = rows_of(request)
    if rows is None:
        raise RequestError("epochs: how many rows the data has is not known; give rows, lengths or dataset")
    train = request.train
    if train.packing and train.length_histogram:  # rows are packed into sequences
        rows = math.ceil(rows * mean_length(train.length_histogram, train.sequence_length) / train.sequence_length)
    return max(1, int((request.epochs or 1.0) * max(1, rows // chosen.layout.global_batch)))


def rows_of(request: Request) -> int | None:
    """Rows of the data: as given, else those of the lengths."""
    if request.rows is not None:
        return request.rows
    return sum(count for _, count in request.train.length_histogram) or None


_MOST_PRICE = 1e9


def price_of(request: Request) -> float | None:
    """Of a node-hour: the number given, or this machine's in the file given; None where none is."""
    if request.price is None:
        return None
    prices = prices_of(request.price, files=request.allow_files)
    if isinstance(prices, float):
        return prices
    name = machines.machine(request.machine).name if request.machine else ""
    if name and name not in prices:
        raise RequestError(f"--price {request.price}: no price of {name}; it has {', '.join(prices) or 'none'}")
    return prices.get(name)


def prices_of(text: str, *, files: bool) -> float | dict[str, float]:
    """ "98.32" as a number; a YAML file as a price for each machine of the catalogue that it names."""
    number = None
    with contextlib.suppress(ValueError):
        number = float(text)
    if number is not None:
        return _price("price", number)
    if not files:
        raise RequestError(f"price={text[:40]!r}: must be a number, of a node-hour")
    try:
        raw = read_mapping(Path(text))
    except ConfigError as error:
        raise RequestError(f"--price {error}") from None
    found = {}
    for name, value in raw.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"--price {text}: {name}: must be a number, of a node-hour")
        try:
            found[machines.machine(str(name)).name] = _price(str(name), float(value))
        except machines.MachineError as error:
            raise RequestError(f"--price {text}: {error}") from None
    return found


def _price(name: str, value: float) -> float:
    if not 0.0 <= value <= _MOST_PRICE:
        raise RequestError(f"{name}={value:g}: must be from 0 to {_MOST_PRICE:g}")
    return value


def advise(request: Request, scan: Callable[[], Sequence[Snapshot]]) -> Recommendation:
    """Answer from a fresh scan, recordings, or the catalogue."""
    if request.machine == "list":
        raise RequestError("--machine: one of " + ", ".join(machines.names()))
    snapshots = () if request.machine else tuple(scan())
    return answer(request, snapshots, measured=measurements_of(request))


def measurements_of(request: Request) -> tuple[Measurement, ...]:
    """Of the benchmark's result that the question names; none where it names none."""
    if request.bench_file is None:
        return ()
    from agent.base import result_store
    from collectives.bench.results import result_from_json

    try:
        return result_from_json(result_store.read(request.bench_file)).measurements
    except (OSError, ValueError) as error:
        raise RequestError(f"--bench {request.bench_file}: {error}") from None


def for_view(view: View, request: Request) -> Recommendation:
    """Answer from what the agent knows."""
    snapshots = () if request.machine else view.snapshots
    measured = tuple(m for m in view.bench.measurements if m.verified) if view.bench else ()
    return answer(request, snapshots, measured=measured, checks=view.checks)


def with_faults(advice: Recommendation, checks: Sequence[Check]) -> Recommendation:
    """The advice, with the failures that its forecast does not count: no figure bounds them, or they end the job."""
    if not checks:
        return advice
    from agent.checks.view import grouped

    counted = {*RULES, *("interfaces.choice.wrong" for s in advice.settings if s.name == "NCCL_SOCKET_IFNAME")}
    groups = [
        group for group in grouped(checks) if {check.id for check in group.checks if check.status == "fail"} - counted
    ]
    said = tuple(
        f"{'as it is the job ends' if ENDS & set(group.codes) else 'not in the forecast'}: {_fault(group)}"
        for group in groups[:_FAULTS_SAID]
    )
    more = len(groups) - len(said)
    rest = (f"{more} more findings of failed checks: topoflight scan",) if more else ()
    return replace(advice, unknowns=(*advice.unknowns, *said, *rest)) if advice.chosen else advice


def findings_of(checks: Iterable[Check]) -> Findings:
    """Failures and warnings by node, as the planner reads them."""
    found: dict[str, list[Finding]] = {}
    for check in checks:
        if check.status in ("fail", "warn"):
            found.setdefault(check.node, []).append(
                Finding(code=check.id, severity=Severity(check.status), subject=check.subject, message=check.message)
            )
    return {node: tuple(of_node) for node, of_node in found.items()}


def _fault(group: Group) -> str:
    on = f"on {group.subjects[0]}" if len(group.subjects) == 1 else group.places
    said = "; ".join(dict.fromkeys(check.message for check in group.checks)) if group.trouble else group.message
    return f"{', '.join(group.codes)}{on and ' '}{on}: {said}"


def answer(
    request: Request,
    snapshots: Sequence[Snapshot],
    *,
    measured: Sequence[Measurement] = (),
    calibrated: Calibration | None = None,
    ranks: int | None = None,
    checks: Sequence[Check] | None = None,
) -> Recommendation:
    """Ask the planner; `ranks` and `calibrated` stand above what the request names.

    `checks` are what is known of the snapshots' hosts; None: they are judged here.
    """
    if request.machine or request.model is None:
        checks = ()
    elif checks is None:
        from agent.checks.view import look

        checks = look(snapshots).checks
    calibration = calibrated
    try:
        if calibration is None and request.calibration is not None:
            calibration = load_calibration(request.calibration)
        ranks = ranks or request.ranks_per_node
        cluster = cluster_of(request, snapshots, ranks)
        return of_cluster(
            request, cluster, snapshots, measured=measured, calibration=calibration, ranks=ranks, checks=checks
        )
    except (LayoutError, machines.MachineError, CalibrationError, ValueError) as error:
        raise RequestError(str(error)) from None


def of_cluster(
    request: Request, cluster: ClusterTopology, snapshots: Sequence[Snapshot], *,
    measured: Sequence[Measurement] = (), calibration: Calibration | None = None, ranks: int | None = None,
    checks: Sequence[Check] = (),
) -> Recommendation:  # fmt: skip
    """Ask the planner of these nodes. Raises RequestError, ValueError, LayoutError where the question does not fit."""
    model = model_of(request)
    if model is None:
        return environment_only(request, cluster, snapshots)
    findings = findings_of(checks)
    if len(snapshots) == 1 and len(findings) == 1:  # one host, perhaps several times over
        findings = {node.hostname: found for node in cluster.nodes for found in findings.values()}
    advice = recommend(
        cluster, snapshots, model, request.train, measurements=measured, calibration=calibration,
        nccl_version=parse_version(request.nccl_version), ranks_per_node=ranks or default_ranks(request, cluster),
        multi_node=spans_nodes(request, cluster), findings=findings, measured_step=measured_step(request),
    )  # fmt: skip
    if advice.chosen is None and advice.backend != "rccl" and not advice.helps_most:
        from agent.advice import nearest  # which asks on its part

        advice = replace(advice, helps_most=nearest.questions(request, snapshots))
    return with_faults(with_budget(advice, request, len(cluster.nodes)), checks)


def measured_step(request: Request) -> MeasuredStep | None:
    """The step that the question says was measured. Raises LayoutError where its layout's text is wrong."""
    if request.measured_step is None:
        return None
    text, seconds = request.measured_step
    return values_of(text), seconds


def spans_nodes(request: Request, cluster: ClusterTopology) -> bool | None:
    """Whether the job spans nodes; None for one node where no number was requested: it may come to span more."""
    return len(cluster.nodes) > 1 or (None if request.nodes is None else False)


def environment_only(request: Request, cluster: ClusterTopology, snapshots: Sequence[Snapshot]) -> Recommendation:
    """The NCCL environment alone, where no model was named."""
    found = nccl_env.settings(
        snapshots,
        cluster,
        nccl_version=parse_version(request.nccl_version),
        multi_node=spans_nodes(request, cluster),
        ranks_per_node=request.ranks_per_node,
    )
    seen = "nccl" if any(node.gpus for node in cluster.nodes) else "gloo"
    backend = "rccl" if found.backend == "rccl" else seen
    return Recommendation(settings=found.settings, notes=found.notes, needs=found.needs, backend=backend)


def default_ranks(request: Request, cluster: ClusterTopology) -> int | None:
    """Two gloo ranks on a host without GPUs, so that there is something to lay out; else one per GPU."""
    return None if request.machine or any(node.gpus for node in cluster.nodes) else 2


def cluster_of(request: Request, snapshots: Sequence[Snapshot], ranks: int | None = None) -> ClusterTopology:
    """The cluster meant, over the network that was named."""
    found = _nodes_of(request, snapshots, ranks)
    if request.network is not None:
        return machines.over_network(found, request.network, request.transport)
    if request.transport is not None:
        raise RequestError(f"transport {request.transport}: of which network; name its speed too, as 100G")
    return found


def _nodes_of(request: Request, snapshots: Sequence[Snapshot], ranks: int | None) -> ClusterTopology:
    """The nodes: a catalogue machine, one host several times over, or the hosts given.

    `ranks` per node, where named, use so many of a node's GPUs. ValueError where it has fewer.
    """
    if request.machine:
        return machines.cluster(request.machine, request.nodes or 1, gpus_per_node=ranks)
    nodes = [build(snapshot) for snapshot in snapshots]
    if ranks is not None:
        nodes = [with_gpus(node, ranks) if node.gpus else node for node in nodes]
    if request.nodes and request.nodes != len(nodes):
        if len(nodes) != 1:
            raise RequestError(f"--nodes {request.nodes} with {len(nodes)} hosts: give one host, or as many as nodes")
        nodes = [replace(nodes[0], hostname=f"{nodes[0].hostname}-{i}") for i in range(request.nodes)]
    return join(nodes)


def with_fsdp(advice: Recommendation) -> Recommendation:
    """The same advice with the best FSDP layout chosen.

    The embedded job is small enough for any layout; it flies FSDP because that is the job users ship, and what the
    measured all-gather and reduce-scatter stand for.
    """
    fitting = [r for r in (advice.chosen, *advice.runners_up) if r is not None]
    sharded = next((r for r in fitting if r.layout.family in ("FSDP", "HSDP")), None)
    if sharded is None or sharded is advice.chosen:
        return advice
    note = Note(
        topic="embedded job",
        text=f"flies {sharded.layout.family}, the layout of the shipped fine-tune, although "
        f"{fitting[0].layout.family} would be faster for a model this small",
    )
    others = tuple(r for r in fitting if r is not sharded)
    return replace(advice, chosen=sharded, runners_up=others, notes=(*advice.notes, note))


def export(advice: Recommendation, form: str, *, nodes: int = 1) -> str:
    """The advice as another tool's input; `nodes` is how many hosts the layout's ranks are spread over."""
    if form == "env":
        return render_env(advice.settings)
    if form == "shell":
        return render_shell(advice.settings)
    if form == "k8s":
        return render_k8s(advice.settings)
    if advice.model is None:
        raise RequestError(f"format {form}: name a model, this is a format for layouts")
    world = advice.chosen.layout.world_size if advice.chosen else nodes
    try:
        return stacks.export(form, request_of(advice, ranks_per_node=max(1, world // nodes)))
    except ExportError as error:
        raise RequestError(str(error)) from None
