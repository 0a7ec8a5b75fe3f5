"""Benchmarks of this host, for the preflight and for the verb bench, and the expected bandwidth of each result."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from agent.advice.request import Request
from agent.base import raise_as, units
from agent.base.options import read_snapshots
from agent.base.output import Progress
from agent.base.result_store import save_benchmark_result
from agent.checks import measured
from agent.checks.baseline import make_baseline_bar
from agent.checks.findings import ORDER
from agent.checks.host_checks import RDMA_BENCH_CODES, make_finding
from agent.checks.measured import BARS, format_bar
from agent.checks.verdict import GateError
from collectives.bench.calibrate import CalibrationRequest, calibrate
from collectives.bench.perftest import Port
from collectives.bench.plan import BenchSpec, Case, Expect, SpecError
from collectives.bench.results import Bar, BenchResult, RdmaResult, RdmaWrite
from collectives.bench.run import detect_backend, run
from contracts import plain
from contracts.finding import Finding, Status
from planner.forecast.calibration import Calibration, parse_calibration
from planner.nccl_env import environment as nccl_env
from planner.nccl_env.situation import make_situation
from probes.api import Snapshot
from probes.gpu.facts import Gpu, GpuFacts
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort
from probes.rdma.probe import find_nccl_gid_index
from probes.registry import ALL
from topology.build import build
from topology.cluster import join
from topology.expected import OPS as JUDGED_OPS, ExpectedBandwidth, Paths, expect_bandwidth
from topology.graph import NicNode
from topology.paths import CURRENT, HEALTHY, RAW_OVER_PLAN, BarName, RequiredLinks, host_links, join_hosts

_NVLS_SINCE = (2, 17)  # release of NCCL
BENCH_SECONDS, QUICK_SECONDS = 20.0, 6.0
SWEEP_BYTES = (64 << 10, 1 << 20, 16 << 20)  # for the curve: latency, and the beginning of bandwidth-bound sizes
STARTUP_SECONDS, HOSTS_SECONDS = 120.0, 900.0  # for the rendezvous of the ranks; a pod may first have to pull its image
ALONE_SECONDS = 60.0  # budget of the verb bench
CALIBRATION_SECONDS = 120.0
CALIBRATION_TOKENS = 8192  # a GEMM with this many rows reaches its full rate; more rows only take longer


@contextlib.contextmanager
def stop_on_signals(
    *numbers: signal.Signals, stop: threading.Event | None = None
) -> Iterator[tuple[threading.Event, list[str]]]:
    """Set an event on these signals instead of ending, so that the results so far are saved.

    Yields the event, which is `stop` if given, and the names of the received signals. A second Ctrl-C raises
    KeyboardInterrupt.
    """
    stop, received = stop or threading.Event(), list[str]()

    def handle(number: int, _frame: object) -> None:
        received.append(signal.Signals(number).name)
        stop.set()
        if received.count(signal.SIGINT.name) > 1:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    former = {number: signal.signal(number, handle) for number in numbers if is_main}
    try:
        yield stop, received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def list_gpus(snapshots: Sequence[Snapshot]) -> list[Gpu]:
    """Return the GPUs of these hosts."""
    return [gpu for snapshot in snapshots if (facts := snapshot.facts(GpuFacts)) for gpu in facts.gpus]


def list_gpu_processes(snapshots: Sequence[Snapshot]) -> tuple[int, ...]:
    """Return the ids of processes that use this host's GPUs."""
    return tuple(process.pid for gpu in list_gpus(snapshots) for process in gpu.processes or ())


def count_default_ranks(snapshots: Sequence[Snapshot]) -> int:
    """Return one rank per usable GPU of this host; 2 if there is none."""
    for snapshot in snapshots:
        if gpus := list_gpus((snapshot,)):
            return max(1, sum(not gpu.error for gpu in gpus))
    return 2


def build_preflight_spec(
    snapshots: Sequence[Snapshot], ranks: int, budget_seconds: float | None = None, *, force: bool = False,
    hosts: int = 1, quick: bool = False, backend: str | None = None, required: RequiredLinks | None = None,
) -> BenchSpec:  # fmt: skip
    """Return a benchmark of a short sweep and of the size that is judged, 64 MiB or more of every rank.

    `quick` omits the sweep. Without a bar (no GPU, gloo) there is only the sweep, because no other size is judged.
    """
    expect = make_expect(snapshots) if (backend or detect_backend()) == "nccl" else None
    large = (measured.choose_bytes(ranks * hosts),) if expect and ranks * hosts > 1 else ()
    sizes = large if quick and large else SWEEP_BYTES[:2] if quick else (*SWEEP_BYTES, *large)
    cases = tuple(Case(op=op, bytes=size) for size in sizes for op in JUDGED_OPS)
    return BenchSpec(
        ops=JUDGED_OPS, cases=cases, backend=backend, ranks_per_host=ranks, force=force, expect=expect,
        budget_seconds=budget_seconds or (QUICK_SECONDS if quick else BENCH_SECONDS),
        gpu_pids=list_gpu_processes(snapshots), links=describe_links(snapshots, ranks, required),
        host_name=snapshots[0].hostname if snapshots and hosts == 1 else None,
    )  # fmt: skip


class BenchmarkError(click.ClickException):
    """This host could not be measured; the message is the reason."""


def measure(spec: BenchSpec, progress: Progress, stop: threading.Event) -> BenchResult:
    """Benchmark collectives on this host, show progress, and store the result. Raises BenchmarkError.

    SIGTERM and Ctrl-C stop the benchmark, and the result is what was measured by then.
    """
    ranks, seconds = units.count(spec.ranks_per_host, "rank"), units.seconds(spec.budget_seconds)
    progress.step(f"measure: {', '.join(spec.ops)} with {ranks}, up to {seconds}")
    stopping = stop_on_signals(signal.SIGTERM, signal.SIGINT, stop=stop)
    with raise_as(BenchmarkError, (RuntimeError, OSError)), stopping as (_, signals):
        result = run(spec, make_event_printer(progress.note), stop)
    if signals:  # also a signal received after the last measurement
        result = replace(result, stopped_by=signals[0])
    save_benchmark_result(result)
    return result


def calibrate_host(
    request: Request, ranks: int, *, tokens: int | None = None, gpu: bool = False,
    budget_seconds: float = CALIBRATION_SECONDS, threads: int | None = None, stop: threading.Event | None = None,
) -> Calibration:  # fmt: skip
    """Measure GEMMs and a layer of the model with `ranks` processes at once on this host. Raises BenchmarkError.

    `tokens` is one micro-batch, by default that of a job with as many ranks; `threads` is the number of CPU threads of
    a rank, by default its share of the cores.
    """
    model, train = request.required_model(), request.train
    batch = train.sequence_length * max(1, (train.global_batch or ranks) // ranks)
    tokens = tokens or min(batch, CALIBRATION_TOKENS)
    spec = CalibrationRequest(
        hidden=model.hidden, ffn=model.ffn, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
        tokens=tokens, sequence=min(train.sequence_length, tokens), precision="bf16" if gpu else "fp32",
        device="cuda" if gpu else "cpu", copies=ranks, method="full" if train.method == "full" else "lora",
        threads=threads, budget_seconds=budget_seconds,
    )  # fmt: skip
    with raise_as(BenchmarkError, (RuntimeError, OSError)):
        return parse_calibration(calibrate(spec, stop=stop))


# The expected bandwidth of a result: the bars of agent.checks.measured, from the links that the ranks report.


def describe_links(snapshots: Sequence[Snapshot], ranks: int, required: RequiredLinks | None = None) -> dict[str, Any]:
    """Return this host's links as plain values for the ranks of other hosts; empty without a GPU."""
    if not snapshots:
        return {}
    node = build(snapshots[0])
    if not node.gpus:
        return {}
    links = {name: host_links(node, range(ranks), name, required) for name in BARS}
    return {name: asdict(each) for name, each in links.items()} | {"nvlink_domain": links[CURRENT].domain}


def make_expect(snapshots: Sequence[Snapshot]) -> Expect | None:
    """Return the function that gives the bars of each result of a run; None if this host shows no GPU."""
    if not snapshots or not build(snapshots[0]).gpus:
        return None

    def bars(op: str, size_bytes: int, hello: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
        uses_nccl = bool(hello) and "nccl" in (hello[0].get("versions") or {})  # the speed of gloo depends on the CPU
        if op not in JUDGED_OPS or len(hello) < 2 or not uses_nccl:
            return ()
        return tuple(_make_bar(name, op, size_bytes, hello) for name in BARS)

    return bars


def _make_bar(name: BarName, op: str, size_bytes: int, hello: Sequence[Mapping[str, Any]]) -> Bar:
    nvls, notes = detect_nvls(hello[0])
    first = {str(row["host"]): row for row in reversed(hello)}
    hosts = [_read_links(name, row) for row in reversed(first.values())]
    if any(each is None for each in hosts):
        return Bar(name=name, why=("the links of a host are not known: its ranks did not report them",))
    paths = join_hosts([each for each in hosts if each is not None], len(hello), nvls=nvls)
    expected = expect_bandwidth(paths, op, size_bytes, len(hello))
    if not isinstance(expected, ExpectedBandwidth):
        return Bar(name=name, why=tuple(dict.fromkeys((expected.describe(), *paths.sources))))
    ring = expect_bandwidth(paths, op, size_bytes, len(hello), ring=True) if expected.algorithm == "NVLS" else None
    other = ring.interval.high if isinstance(ring, ExpectedBandwidth) else None
    return Bar(
        name=name, low=expected.interval.low, typical=expected.interval.mid, high=expected.interval.high,
        ring_high=other, algorithm=expected.algorithm, why=(*notes, *expected.derivation),
    )  # fmt: skip


def _read_links(name: BarName, row: Mapping[str, Any]) -> Paths | None:
    """Return the links that a host's first rank reported."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return plain.read((row.get("links") or {})[name], Paths)
    return None


def detect_nvls(row: Mapping[str, Any]) -> tuple[bool | None, tuple[str, ...]]:
    """Return whether the ranks' NCCL version may use NVLS, and why not; None if the version is unknown."""
    environment = row.get("environment") or {}
    if environment.get("NCCL_NVLS_ENABLE") == "0":
        return False, ("NCCL_NVLS_ENABLE=0 in the environment: NVLS is off by a setting",)
    algorithms = environment.get("NCCL_ALGO", "")  # "ring,tree", "^nvls", "allreduce:nvls;allgather:ring"
    of_all_reduce = [part for part in algorithms.lower().split(";") if ":" not in part or part.startswith("allreduce:")]
    if any(bool(re.search(r"\bnvls\b", part)) is ("^" in part) for part in of_all_reduce if part):
        return False, (f"NCCL_ALGO={algorithms} in the environment: NVLS is off by a setting",)
    version = re.match(r"(\d+)\.(\d+)", str((row.get("versions") or {}).get("nccl", "")))
    if version is None:
        return None, ()
    return (int(version[1]), int(version[2])) >= _NVLS_SINCE, ()


# The verb bench.


def build_spec(
    *, ops: tuple[str, ...], sizes: tuple[int, ...], precision: str, budget: float | None, quick: bool, force: bool,
    ranks: int | None, hosts: int, node_rank: int | None, rendezvous: str | None, host_name: str | None,
    startup: float | None, no_advice: bool,
) -> BenchSpec:  # fmt: skip
    """Return the benchmark that the command line describes, on this host."""
    snapshots = read_snapshots((), ALL)
    budget = budget or (QUICK_SECONDS if quick else ALONE_SECONDS)
    ranks = ranks or count_default_ranks(snapshots)
    spec = build_preflight_spec(snapshots, ranks, budget, force=force, hosts=hosts, quick=quick)
    all_ops, all_sizes = ops or spec.ops, sizes or tuple(dict.fromkeys(case.bytes for case in spec.cases))
    return replace(
        spec, ops=all_ops, cases=tuple(Case(op=op, bytes=size) for size in all_sizes for op in all_ops),
        sizes_bytes=sizes, precision=parse_percent(precision), hosts=hosts, rendezvous=rendezvous,
        host_name=host_name, node_rank=node_rank if hosts > 1 else None,
        startup_seconds=startup or (STARTUP_SECONDS if hosts == 1 else HOSTS_SECONDS),
        environment=advise_network_environment(snapshots) if hosts > 1 and not no_advice else {},
    )  # fmt: skip


def advise_network_environment(snapshots: Sequence[Snapshot]) -> dict[str, str]:
    """Return the advised environment of a multi-node job without variables already set: its network is measured.

    In a pod with a secondary network this names the interface; otherwise the ranks would use the default network.
    """
    cluster = join([build(snapshot) for snapshot in snapshots])
    advised = nccl_env.settings(make_situation(snapshots, cluster, multi_node=True)).settings
    return {s.name: s.value for s in advised if s.name.startswith(("NCCL_", "GLOO_")) and s.name not in os.environ}


def parse_percent(text: str) -> float:
    """Parse "5%" or "0.05" as a ratio."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise SpecError(f"precision={text!r}: must be a percentage such as 5%, or a ratio") from None


def make_event_printer(note: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Report the progress of the ranks through `note`."""

    def event(happened: dict[str, Any]) -> None:
        if happened.get("event") == "measured" and happened.get("rank") in (0, None):
            note(f"{happened.get('op')} {units.size(happened.get('bytes'))} done")

    return event


# RDMA writes between two hosts, compared with the wire rate of the port.

(LOW_BANDWIDTH,) = RDMA_BENCH_CODES
# Payload fraction of the wire rate. Azure's node health checks (Azure/azurehpc-health-checks, ib_write_bw) require 380
# of 400 Gb/s and 170 to 180 of 200. They report 393 for a healthy node and 351 for one that was taken out.
LEAST, USUAL = 0.90, 0.97
# Bytes per packet in addition to the payload. RoCE v2 over Ethernet: preamble, gap, header and FCS (38), IPv4 and UDP
# (28), BTH and ICRC (16). InfiniBand: LRH, BTH, both CRCs and delimiters (IBTA vol. 1, 5.2; annex A17).
HEADER_BYTES = {"Ethernet": 82, "InfiniBand": 28}


def select_ports(snapshot: Snapshot, names: Sequence[str]) -> list[Port]:
    """Return the ACTIVE ports of this host in order, or those in `names` ("mlx5_0", "mlx5_0:1"). Raises GateError."""
    every = [(device, port) for device, port in _list_ports(snapshot) if port.state == "ACTIVE"]
    ports = [Port(device=d.name, port=p.port, gid_index=find_nccl_gid_index(p)) for d, p in every]
    for name in names:
        if not any(name in (port.device, str(port)) for port in ports):
            have = ", ".join(map(str, ports)) or "none"
            raise GateError(f"--device {name}: no ACTIVE RDMA port of that name; ACTIVE here: {have}")
    return [port for port in ports if not names or port.device in names or str(port) in names]


def _list_ports(snapshot: Snapshot) -> list[tuple[RdmaDevice, RdmaPort]]:
    facts = snapshot.facts(RdmaFacts)
    return [(device, port) for device in facts.in_reach for port in device.ports] if facts else []


def with_bars(result: RdmaResult, snapshot: Snapshot, before: Mapping[str, RdmaWrite]) -> RdmaResult:
    """Add to each port its rate and the bars for its writes."""
    by_name = {f"{device.name}:{port.port}": (device, port) for device, port in _list_ports(snapshot)}
    nics = {nic.name: nic for nic in build(snapshot).nics}
    writes = []
    for write in result.writes:
        device, port = by_name[write.port]
        equals = [p for d, p in by_name.values() if (d.kind, d.model) == (device.kind, device.model)]
        bars = _make_port_bars(write, device, port, equals, nics.get(device.name))
        then = before.get(write.port)
        if then is not None:
            mtu = (f"in packets of {then.mtu_bytes} bytes",) if then.mtu_bytes else ()
            bars = (make_baseline_bar(then.bytes_per_second, *mtu), *bars)
        writes.append(replace(write, rate_bytes_per_second=port.rate_bytes_per_second, bars=bars))
    return replace(result, writes=tuple(writes))


def _make_port_bars(
    write: RdmaWrite, device: RdmaDevice, port: RdmaPort, equals: Sequence[RdmaPort], nic: NicNode | None
) -> tuple[Bar, ...]:
    """Return both bars: HEALTHY (rate of the fastest equal port here, PCIe slot) and CURRENT (own rate, PCIe link)."""
    if device.kind == "rxe":
        reasons = ("Soft-RoCE moves data through the CPU, so its rate is no reference; use --baseline",)
        return (Bar(name=HEALTHY, why=reasons), Bar(name=CURRENT, why=reasons))
    slot = nic.pcie_bytes_per_second if nic else None
    running = (nic.pcie_running_bytes_per_second or slot) if nic else None
    best = max((max(p.rate_bytes_per_second or 0.0, p.rate_max_bytes_per_second or 0.0) for p in equals), default=0.0)
    return (
        _make_port_bar(HEALTHY, write, port, best, slot),
        _make_port_bar(CURRENT, write, port, port.rate_bytes_per_second, running),
    )


def _make_port_bar(name: str, write: RdmaWrite, port: RdmaPort, rate: float | None, pcie: float | None) -> Bar:
    if not rate:
        return Bar(name=name, why=("the port's rate is not known",))
    header, mtu = HEADER_BYTES.get(port.link_layer or "", 0), write.mtu_bytes or port.active_mtu_bytes or 4096
    payload = mtu / (mtu + header)
    reasons = [f"the port carries {units.bits(rate)}, {payload:.1%} of it as payload in packets of {mtu} bytes"]
    wire = rate * payload
    if pcie is not None and pcie * RAW_OVER_PLAN < wire:
        wire = pcie * RAW_OVER_PLAN
        reasons.append(f"its PCIe link carries {units.rate(wire)}")
    return Bar(name=name, low=LEAST * wire, typical=USUAL * wire, high=wire, why=tuple(reasons))


def check_writes(result: RdmaResult, before: Mapping[str, RdmaWrite]) -> list[Finding]:
    """Return one check per measured port."""
    return [_check_write(write, result, before.get(write.port)) for write in result.writes]


def _check_write(write: RdmaWrite, result: RdmaResult, then: RdmaWrite | None) -> Finding:
    value = write.bytes_per_second
    bars = [bar for bar in write.bars if bar.low is not None]
    evidence = tuple(f"{bar.name}: {format_bar(bar)}" for bar in write.bars) + tuple(
        dict.fromkeys(reason for bar in write.bars for reason in bar.why)
    )
    listed = "; ".join(f"{format_bar(bar)} {bar.name}" for bar in bars)
    message = f"{units.rate(value)} to {result.peer}" + (f" of {listed}" if listed else "")
    status = min((measured.judge_bandwidth(value, bar) for bar in bars), key=ORDER.index, default=Status.UNKNOWN)
    if status == "unknown":
        message += f": {write.bars[0].why[0]}" if write.bars else ""
    now = next((bar for bar in bars if bar.name == CURRENT), None)
    if status in ("unknown", "pass"):
        key = f"{LOW_BANDWIDTH} pass"
    elif now is not None and now.low is not None and value >= now.low:
        key = f"{LOW_BANDWIDTH} port"
    else:
        key = f"{LOW_BANDWIDTH} baseline" if then else LOW_BANDWIDTH
    return make_finding(
        key, result.host, status, subject=write.port, evidence=evidence, measured=message, host=result.host,
        peer=result.peer, why="; ".join(now.why) if now else "",
    )  # fmt: skip
