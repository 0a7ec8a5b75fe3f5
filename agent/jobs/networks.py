"""Run one fine-tune over each network, on this host or a cluster, and compare the measured and forecast times.

Before each run, all-gathers and reduce-scatters over the network and the compute rate of the ranks are measured; the
forecast uses both. A run counts for a network only if its own sockets or NCCL's log prove that it used it. A network
without a run has no bar.

On a cluster there is one job per network, one after another. Its pods are attached to the network and configured to use
it. Pod 0 writes a short record as its container's termination message (finetune.post). Surface: the job APIs of
`launch`, and pods of core/v1.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent.advice.advise import EMBEDDED_MODEL, adapt_to_pods, advise, advise_cluster, with_fsdp
from agent.advice.job_plan import (
    build_job_plan,
    build_job_request,
    complete_request,
    plan_transport,
    read_settings,
    require_layout,
)
from agent.advice.request import Request
from agent.base import units
from agent.base.options import InputError, read_snapshots
from agent.base.output import Progress, print_notes, print_text, render_template, write_atomic
from agent.base.result_store import store_run
from agent.cluster.client import Client, connect
from agent.jobs import benchmark, cluster_job
from agent.jobs.launch import LaunchOptions
from agent.jobs.namespaces import HOSTS, NamespaceError, NamespaceHosts, create_hosts, why_unavailable
from collectives.bench import processes, watch
from collectives.bench.plan import BenchSpec, Case, write as write_plan
from collectives.bench.results import BenchResult, Measurement
from collectives.bench.run import assemble
from contracts import run_record
from contracts.finding import Interval
from contracts.job_config import RunForecast, dump_plan
from contracts.layout import Layout
from contracts.redaction import redact
from contracts.tables import read_table
from planner.advice import Recommendation
from planner.forecast.calibration import Calibration
from planner.forecast.machines import network_bytes_per_second
from planner.kubernetes.manifests import Document, JobError, render as render_documents
from planner.kubernetes.networks import use_tcp
from planner.recommend import forecast_layout, plan
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL
from topology.cluster import join
from topology.graph import NodeTopology

BENCH_BYTES = 1 << 20  # similar to what FSDP gathers per layer; larger sizes only take longer on a slow network
BENCH_SECONDS = 2.0
POLL_SECONDS = 2.0
MAX_NETWORKS = 8
_RATE = r"[1-9][0-9]{0,5}(?:\.[0-9]{1,3})?[GM]"
_WORD = re.compile(rf"([a-z][a-z0-9]{{0,14}})(?:=((?:[a-z0-9.-]{{1,63}}/)?[a-z0-9.-]{{1,63}}))?(?:,({_RATE}))?")
_TABLE = read_table(__file__, "networks.toml")
DEFAULT_NETWORKS = ("eth0,200M", "net1,500M")
STEPS = 8  # enough for a median without the first and the profiled ones (finetune/recorder.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network to run over: one that is made on this host, the pods' default network, or one that Multus attaches."""

    name: str  # of the interface in the hosts or pods; "rdma" for RDMA
    attachment: str | None = None  # NetworkAttachmentDefinition: "net" or "namespace/net"
    rate: str | None = None  # "25G" for each node, in bits per second

    @property
    def rdma(self) -> bool:
        """Return whether the network is used with RDMA instead of TCP."""
        return self.name == "rdma"

    @property
    def bytes_per_second(self) -> float:
        """Return the rate, which a network of this host has."""
        return network_bytes_per_second(self.rate or "")


def parse(arguments: Sequence[str], *, here: bool) -> tuple[Network, ...]:
    """Read the arguments of --over, for networks of this host or of pods. InputError names what is wrong."""
    networks = []
    for word in arguments:
        match = _WORD.fullmatch(word)
        if not match or match[1] == "lo" or (here and (match[2] or not match[3])):
            raise InputError(f"--over {word!r}: must be {_TABLE['here' if here else 'pods']}")
        networks.append(Network(name=match[1], attachment=match[2], rate=match[3]))
    if not networks or len({network.name for network in networks}) < len(networks) or len(networks) > MAX_NETWORKS:
        raise InputError(f"--over: name 1 to {MAX_NETWORKS} networks, each once")
    return tuple(networks)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkBar:
    """One network. Without seconds there is no bar, and `why` says what is missing."""

    network: str  # "eth0", "net1", "RDMA"
    description: str = ""  # known properties: "shaped to 200 Mbit/s", "default/net1"
    status: str = "unknown"  # "measured", "not available", "failed", "unproven", "unknown"
    why: str = ""
    proof: tuple[str, ...] = ()  # quotes from the sockets or NCCL's log
    busbw_bytes_per_second: float | None = None  # of the all-gather over it, measured before the run
    step_seconds: float | None = None
    forecast: Interval | None = None  # of a step
    within: bool | None = None  # whether the measured step lies within the forecast
    run_seconds: float | None = None  # of the whole run
    run_forecast: Interval | None = None
    cost: float | None = None
    record: str = ""  # path of the run record run.json


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkBars:
    """The comparison, in the order of the networks."""

    title: str
    where: str
    nodes: int
    steps: int  # of the whole run
    node_hour_price: float | None
    bars: tuple[NetworkBar, ...]

    @property
    def exit_code(self) -> int:
        """Return 0; 3 if a run failed; 5 if one is unproven or unknown. A network that no node has is neither."""
        statuses = {bar.status for bar in self.bars}
        return 3 if "failed" in statuses else 5 if statuses & {"unproven", "unknown"} else 0


def prove_network(record: run_record.RunRecord, interface: str, *, rdma: bool = False) -> tuple[bool, tuple[str, ...]]:
    """Return whether the run's log or sockets prove that it used this network between hosts, with the quotes."""
    nccl, transports = record.nccl, tuple(record.transports)
    if rdma:
        between = [name for name in transports if name.startswith(("NET/IB", "NET/AWS Libfabric"))]
        return bool(between) and not any(name.startswith("NET/Socket") for name in transports), transports
    if nccl is not None:
        interfaces = tuple(f"NCCL: NET/Socket over {name}" for name in nccl.interfaces)
        only_sockets = all(name.startswith("NET/Socket") for name in transports if name.startswith("NET"))
        return nccl.interfaces == [interface] and only_sockets, interfaces or transports
    gloo = [name for name in transports if name.startswith("gloo:")]
    return bool(gloo) and all(f" over {interface} (" in name for name in gloo), transports


def add_run(bar: NetworkBar, record: run_record.RunRecord | None, interface: str, *, rdma: bool = False) -> NetworkBar:
    """Add the results of the run record to the network."""
    if record is None:
        return replace(bar, status="failed", why=bar.why or "the job left no record of its run")
    if record.status != "complete":
        return replace(bar, status="failed", why=record.reason or f"the run has the status {record.status}")
    proven, proof = prove_network(record, interface, rdma=rdma)
    if not proven:
        transports = "; ".join(proof) or "the record names no transport"
        return replace(bar, status="unproven", proof=proof, why=f"no proof that it used {bar.network}: {transports}")
    step, _memory = run_record.compare(record)
    if step.measured is None:
        return replace(bar, proof=proof, why="its record has no step time")
    return replace(
        bar, status="measured", proof=proof, step_seconds=step.measured, forecast=step.forecast, within=step.within
    )


def add_cost(comparison: NetworkBars) -> NetworkBars:
    """Add time and cost of the whole run."""

    def add(bar: NetworkBar) -> NetworkBar:
        if bar.step_seconds is None:
            return bar
        seconds, price = bar.step_seconds * comparison.steps, comparison.node_hour_price
        cost = None if price is None else seconds / 3600 * comparison.nodes * price
        forecast = bar.forecast and bar.forecast.scaled(comparison.steps)
        return replace(bar, run_seconds=seconds, cost=cost, run_forecast=forecast)

    return replace(comparison, bars=tuple(map(add, comparison.bars)))


@dataclass(slots=True, kw_only=True)
class _LocalComparison:
    """One comparison over namespaces of this host."""

    request: Request
    options: LaunchOptions
    folder: Path
    layout: Layout | None = None  # of the first network; the others run the same layout

    def bar(self, hosts: NamespaceHosts, network: Network, result: BenchResult, timed: Calibration) -> NetworkBar:
        """Forecast and run the job over one network."""
        bar = NetworkBar(network=network.name, description=f"shaped to {units.bits(network.bytes_per_second)}")
        measured = tuple(m for m in result.measurements if m.verified)
        gather = next((m for m in measured if m.op == "all_gather"), None)
        if gather is None:
            return replace(bar, status="failed", why="not measured: " + "; ".join(result.problems)[:500])
        bar = replace(bar, busbw_bytes_per_second=gather.busbw_bytes_per_second)
        advice = self._advice(measured, timed)
        output = self.folder / network.name
        output.mkdir(parents=True, exist_ok=True)
        plan = build_job_plan(advice, self.request.with_settings(f"output_dir={output}"))
        environment = {"GLOO_SOCKET_IFNAME": network.name}
        write_atomic(output / "plan.json", dump_plan(replace(plan, environment=environment)))
        codes = hosts.run(
            network.name, "finetune.train", [["--plan", str(output / "plan.json")]] * HOSTS, output,
            seconds=self.options.timeout,
        )  # fmt: skip
        path = output / "run.json"
        record = run_record.read(path) if path.exists() else None
        if any(codes) and (record is None or record.status in ("running", "complete")):
            reason = f"{_describe_exits(codes, output)}; the logs of the ranks are in {output}"
            return replace(bar, status="failed", why=reason)
        return replace(add_run(bar, record, network.name), record=str(path))

    def _advice(self, measured: tuple[Measurement, ...], timed: Calibration) -> Recommendation:
        """Return the job's plan from the measurements; the layout is that of the first network."""
        # model of the namespaces for the planner: they share this machine's CPUs and have no GPU
        cores = max(1, (os.cpu_count() or HOSTS) // HOSTS)
        cluster = join([NodeTopology(hostname=f"host-{n}", gpus=(), nics=(), pairs=(), cpu_count=cores)
                        for n in range(HOSTS)])  # fmt: skip
        model = self.request.required_model()
        advice = with_fsdp(advise_cluster(self.request, cluster, (), measurements=measured, calibration=timed))
        self.layout = self.layout or require_layout(advice).layout
        planned = plan(
            cluster, (), model, self.request.train, measurements=measured, calibration=timed, ranks_per_node=1
        )
        return replace(advice, settings=(), chosen=forecast_layout(planned, self.layout))


def measure(hosts: NamespaceHosts, network: str) -> BenchResult:
    """Measure all-gathers and reduce-scatters of two ranks over one network."""
    spec = BenchSpec(
        cases=tuple(Case(op=op, bytes=BENCH_BYTES) for op in ("all_gather", "reduce_scatter")), backend="gloo",
        ranks_per_host=1, hosts=HOSTS, node_rank=0, rendezvous=f"{hosts.address(network, 0)}:29511",
        budget_seconds=BENCH_SECONDS, warmup=1, min_iterations=3, max_iterations=20,
    )  # fmt: skip
    started, clock = time.time(), time.monotonic()
    with processes.run_folder() as folder:
        write_plan(spec, folder / "plan.json")
        watcher = watch.Watch(spec, folder, lambda _event: None)
        codes = hosts.run(
            network, "collectives.bench.rank", [str(folder / "plan.json")] * HOSTS, folder, seconds=spec.limit_seconds
        )
        watcher.read_events()
        if any(codes):
            watcher.outcome.problems.append(_describe_exits(codes, folder))
        return assemble(spec, watcher.outcome, started, time.monotonic() - clock, None)


def _describe_exits(codes: Sequence[int], folder: Path) -> str:
    """Return the exit codes of the ranks, and the last output of the one that failed first; others lose connections."""
    rank, code = max(enumerate(codes), key=lambda each: (each[1] > 1, each[1] < 0, each[1] != 0, -each[0]))
    log = (folder / f"rank{rank}.log").read_text(errors="replace")
    error = run_record.raised(log) or " ".join(log.strip().splitlines()[-1:])
    how = f"rank {rank} was ended by {signal.Signals(-code).name}" if code < 0 else f"rank {rank} failed"
    return f"the ranks ended with {', '.join(map(str, codes))}; {how}: {redact(error)[:300] or 'it printed nothing'}"


def compare_here(options: LaunchOptions, folder: Path) -> NetworkBars:
    """Measure and run over each network in turn. Raises NamespaceError if no namespace can be created."""
    over = parse(options.networks or DEFAULT_NETWORKS, here=True)
    explicit = read_settings(options.request).explicit
    defaults = {"max_steps": STEPS, "save_strategy": "no", "eval_strategy": "no"}
    unset = (f"{name}={value}" for name, value in defaults.items() if name not in explicit)
    batch = options.request.train.global_batch or HOSTS
    request = options.request.changed(global_batch=batch, nodes=HOSTS, ranks_per_node=1)
    request = build_job_request(request.with_settings(*unset))
    if reason := why_unavailable():
        raise NamespaceError(reason)
    scans = read_snapshots((), ALL)
    place = folder / "networks" / time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    job = _LocalComparison(request=request, options=options, folder=place.absolute())
    job.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    progress.step("networks: load torch")
    with (
        benchmark.stop_on_signals(signal.SIGTERM) as (stop, _),
        processes.lock_host(),
        create_hosts({one.name: one.bytes_per_second for one in over}, stop) as hosts,
    ):
        results = []
        for network in over:
            progress.step(f"networks: measure {network.name}, {network.rate}: all-gather and reduce-scatter")
            results.append(measure(hosts, network.name))
        progress.step("networks: measure GEMMs and a layer")
        timed = benchmark.calibrate_host(request, HOSTS, threads=1, stop=stop)  # as many threads as a rank has
        bars = []
        for network, result in zip(over, results, strict=True):
            progress.step(f"networks: run over {network.name}, {network.rate}")
            bars.append(job.bar(hosts, network, result, timed))
    devices = [device.name for scan in scans if (facts := scan.facts(RdmaFacts)) for device in facts.devices]
    reason = f"{', '.join(devices[:4])} cannot be shared by two namespaces of one host; on a cluster: --api"
    rdma = NetworkBar(network="RDMA", status="not available", why=reason if devices else "no RDMA device on this host")
    records = [run_record.read(Path(bar.record)) for bar in bars if bar.record]
    for record in records:
        store_run(record)
    done = max((record.steps_done or 0 for record in records), default=0)
    return add_cost(NetworkBars(
        title=_make_title(request.model, job.layout.family if job.layout else "", HOSTS),
        where="two network namespaces of this host, one rank each on the CPU; networks shaped by tc tbf",
        nodes=HOSTS, steps=options.steps or done, node_hour_price=options.price, bars=(*bars, rdma),
    ))  # fmt: skip


def _make_title(model: str | None, family: str, ranks: int) -> str:
    name = "a tiny Llama" if model == EMBEDDED_MODEL else model
    return f"One fine-tune of {name}, {family} over {ranks} ranks, by network"


# On a cluster.


def compare_in_cluster(options: LaunchOptions) -> NetworkBars | None:
    """Run one cluster job per network, one after another; with --dry-run print the jobs instead, and return None."""
    nodes = options.nodes or 2
    options, networks = replace(options, nodes=nodes), parse(options.networks, here=False)
    request = complete_request(replace(options.request, nodes=nodes))
    snapshots = request.read_hosts()
    advice = with_fsdp(advise(request, snapshots))
    layout = require_layout(advice).layout
    cluster_job.refuse_untrainable(advice, options)
    advice, left_out = adapt_to_pods(advice, snapshots, here=not request.hosts)
    has_rdma = bool(plan_transport(advice, snapshots))
    jobs = {
        network: build_documents(plan_on(advice, network, request, snapshots), network, options, snapshots)
        for network in networks if has_rdma or not network.rdma
    }  # fmt: skip
    without = NetworkBar(network="rdma", status="not available", why="no RDMA device was seen on the recorded hosts")
    print_notes(left_out)
    claim = cluster_job.build_claim(options)
    if options.dry_run:
        if len(jobs) < len(networks):
            print_text(f"{without.network}: {without.status}: {without.why}", err=True)
        print_text(render_documents([*claim, *(each for of_network in jobs.values() for each in of_network)]), nl=False)
        return None
    client, bars = connect(options.context), []
    for network in networks:
        if network not in jobs:
            bars.append(without)
            continue
        bars.append(run(client, [*claim, *jobs[network]], network, options.api, seconds=options.timeout))
        claim = ()  # the first job has created it
    return add_cost(NetworkBars(
        title=_make_title(request.model, layout.family, layout.world_size),
        where=f"{nodes} pods of namespace {options.namespace}, by {options.api}",
        nodes=nodes, steps=options.steps or advice.total_steps or request.train.steps or 1,
        node_hour_price=options.price, bars=tuple(bars),
    ))  # fmt: skip


def plan_on(
    advice: Recommendation, network: Network, request: Request, snapshots: Sequence[Snapshot]
) -> Recommendation:
    """Return the same plan over this network, and if its rate is given, the forecast of the same layout."""
    ranked = require_layout(advice)
    if not (network.rdma or network.attachment) and request.hosts:
        pods = [snapshot for snapshot in snapshots if (facts := snapshot.facts(InterfacesFacts))
                and any(link.role == "pod-default" for link in facts.interfaces)]  # fmt: skip
        if wrong := explain_no_interface(network.name, pods):  # of a host; a pod has its own interfaces
            raise InputError(f"--over {network.name}: {wrong}")
    if network.rate:
        on_network = replace(request, network=network.rate, transport="rdma" if network.rdma else "tcp")
        same = {"dp_replicate", "dp_shard", "tp", "pp", "cp", "micro_batch", "gradient_accumulation", "sharding"}
        fixed = tuple((name, getattr(ranked.layout, name)) for name in sorted(same))
        there = advise(replace(on_network, train=replace(request.train, fixed_layout=fixed)), snapshots)
        if there.chosen is None:
            raise JobError(f"--over {network.name},{network.rate}: no forecast: {there.rejected[0].reason}")
        ranked = replace(ranked, forecast=there.chosen.forecast)
    needs = tuple(need for need in advice.needs if need.name != "network")
    advice = replace(advice, chosen=ranked, needs=needs)
    return advice if network.rdma else use_tcp(advice, network.name)


def explain_no_interface(name: str, snapshots: Sequence[Snapshot]) -> str:
    """Return which recorded node lacks a usable interface of this name, and what it has; "" if none is known to."""
    for snapshot in snapshots:
        if facts := snapshot.facts(InterfacesFacts):
            usable = [link.name for link in facts.interfaces if link.addresses and link.up is not False]
            if name not in usable:
                has = ", ".join(usable) or "none"
                return f"{snapshot.hostname} has no such interface that is up and has an address; it has: {has}"
    return ""


def build_documents(
    advice: Recommendation, network: Network, options: LaunchOptions, snapshots: Sequence[Snapshot]
) -> tuple[Document, ...]:
    """Return the job of one network; its name and output folder end with the network's name."""
    options = replace(options, name=f"{options.name}-{network.name}")
    spec = cluster_job.build_spec(advice, options)
    if network.attachment:
        inside = "" if network.rdma else f"@{network.name}"
        spec = replace(spec, networks=(f"{network.attachment}{inside}",))
    if not network.rdma:
        spec = replace(spec, preflight_skip=tuple(_TABLE["rdma_checks"]))
    plan = cluster_job.build_plan(advice, options, snapshots)
    if not (network.rate or network.rdma):  # without a known rate there is no forecast to compare with
        plan = replace(plan, forecast=RunForecast())
    return cluster_job.build_documents(spec, options.api, plan)


def run(client: Client, documents: Sequence[Document], network: Network, api: str, *, seconds: float) -> NetworkBar:
    """Create the job of one network, wait for its end, and read its record. Raises ApiError if it cannot be created."""
    bar = NetworkBar(network=network.name, description=network.attachment or "the pods' own network")
    for line in cluster_job.create(client, documents):
        print_text(line, err=True)
    job, until = documents[-1], time.monotonic() + seconds
    path = cluster_job.make_object_path(client, job, job["metadata"]["name"])
    while not (state := cluster_job.read_job_state(now := client.get(path))) and time.monotonic() <= until:
        time.sleep(POLL_SECONDS)
    pods = cluster_job.list_pods(client, job, api)
    if not state:
        waiting = [text for pod in pods if (text := cluster_job.explain_waiting(pod))]
        waiting = waiting or cluster_job.list_condition_reasons(now, "Suspended")
        why = f"{cluster_job.name_object(job)} was not done within {seconds:.0f} s; it continues"
        return replace(bar, why="; ".join([why, *waiting]))
    record = next((short for pod in pods if (short := cluster_job.read_short_record(pod))), None)
    if record is None:
        reasons = [text for pod in pods if (text := cluster_job.describe_failure(pod))]
        reasons = reasons or cluster_job.list_condition_reasons(now, "Failed")
        reason = "; ".join([*reasons, "no pod left a record"])
        return replace(bar, status="failed" if state == "failed" else "unknown", why=f"{state}: {reason}")
    return add_run(bar, record, network.name, rdma=network.rdma)


def draw_bars(networks: NetworkBars) -> str:
    """Draw the bars as a self-contained SVG: step time, the forecast's interval, time and cost of the whole run."""
    full = max([1e-9, *(max(b.step_seconds or 0.0, b.forecast.high if b.forecast else 0.0) for b in networks.bars)])
    best = min((b.step_seconds for b in networks.bars if b.step_seconds), default=0.0)
    return render_template(__file__, "networks.svg.j2", networks=networks, full=full, best=best, label_bar=label_bar)


def label_bar(bar: NetworkBar, best: float) -> tuple[str, str]:
    """Return the two labels of a bar: the step and the whole run, then the forecast."""
    step = bar.step_seconds or 0.0
    factor = f" ({step / best:.2f} x)" if best and step > best else ""
    cost = f", cost {bar.cost:,.2f}" if bar.cost is not None else ""
    total = f", {units.duration(bar.run_seconds)} in all{cost}" if bar.run_seconds is not None else ""
    place = {True: "inside", False: "outside", None: ""}[bar.within]
    return f"{units.seconds(step)} a step{factor}{total}", f"forecast {units.interval(bar.forecast, 's')}: {place}"
