"""Debian's Prometheus scrapes agents on recorded machines; every expression of every panel is run through its API.

The healthy machine fills every panel that may not be empty, and each sick one visibly differs from its healthy twin on
the panels that claim to show it. No Grafana is needed: a panel draws what its expressions return.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boards
import pytest
import uvicorn
import yaml
from panels import Panel
from rigs.faults import FAULTS, Fault

from agent.server import create
from agent.state import State
from collectives.results import BenchResult, Latency, Measurement, Straggler
from collectives.transport import ChannelCount, Evidence, LogProblem
from collectives.wire import result_to_json
from probes.recording import load
from probes.scan import scan

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).parent.parent.parent
MACHINES = ROOT / "tests" / "machines"
HEALTHY, PCIE, ROCE = "hgx-h100-8xH100-8hca", "l40s-4x-pcie", "r760xa-2xA40-bf3"
SICK = sorted({machine for _, panel in boards.panels() for machine in panel.shows})
AGENTS = tuple(dict.fromkeys((HEALTHY, PCIE, ROCE, *SICK, *(fault.machine for fault in FAULTS))))


def twin(machine: str) -> str:
    return PCIE if "l40s" in machine else HEALTHY


def bench(machine: str) -> BenchResult:
    """What two nodes of that kind would have measured: GPUDirect RDMA, or what its fault makes of it."""
    staged, slow = machine == boards.NO_PEERMEM, machine == boards.HOT
    busbw = 4.4e11 * (0.3 if staged else 0.7 if slow else 1.0)
    measured = Measurement(
        op="all_gather", backend="nccl", ranks=tuple(range(16)), hosts=("a",) * 8 + ("b",) * 8, bytes=1 << 30,
        iteration_seconds=(0.0023,) * 20, median_seconds=0.0023, spread_ratio=0.01,
        algbw_bytes_per_second=busbw * 16 / 15, busbw_bytes_per_second=busbw,
        expected_busbw_bytes_per_second=4.8e11, verified=True,
    )  # fmt: skip
    channels = ChannelCount(total=32, gdrdma=0 if staged else 32)
    problem = LogProblem(code="ib_without_gdrdma", message="", action="", severity="fail", count=64)
    return BenchResult(
        measurements=(measured,), world_size=16, backend="nccl", hosts=("a", "b"), environment={}, versions={},
        started_at_seconds=time.time(), seconds=12.0,
        latencies=(Latency(op="all_gather", alpha_seconds=3e-5, beta_bytes_per_second=4e11, points=9),),
        stragglers=(Straggler(rank=3, host="a", late_seconds=0.004, iterations=20, share=0.95),) if slow else (),
        evidence=Evidence(
            inter_node_transport="IB", intra_node_transport="P2P/CUMEM", gdrdma="off" if staged else "on",
            send=channels, receive=channels, problems=(problem,) if staged else (),
            transports={"NET/IB" if staged else "NET/IB/GDRDMA": 64, "P2P/CUMEM": 448},
        ),
    )  # fmt: skip


def flight(machine: str) -> dict[str, Any]:
    """The record of a fine-tune; a hot GPU makes its steps slower than the forecast allows."""
    slow = 3.0 if machine == boards.HOT else 1.0
    return {
        "status": "complete", "ended_at": "2026-11-20T12:00:00Z", "steps_done": 200,
        "measured": {"step_seconds": slow, "memory_bytes": 4.1e10, "tokens_per_second": 9e4 / slow, "mfu": 0.4 / slow},
        "forecast": {"step_seconds": {"low": 0.8, "mid": 1.0, "high": 1.3},
                     "memory_bytes": {"low": 3.5e10, "mid": 4e10, "high": 4.5e10}},
        "loss": {"first": 1.9, "last": 1.1},
        "communication": {"share": 0.2 * slow, "exposed_share": 0.05 * slow,
                          "seconds_by_kind": {"all_gather": 0.1, "reduce_scatter": 0.08}},
    }  # fmt: skip


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclasses.dataclass
class Prometheus:
    """The running server, and where each machine's agent answers."""

    port: int
    ports: dict[str, int]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector of an expression."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/api/v1/query?" + urllib.parse.urlencode({"query": expr}))
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert answer["status"] == "success", f"{expr}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def shown(self, expr: str, machine: str) -> dict[tuple[tuple[str, str], ...], str]:
        """What a panel draws of one machine: label sets without the instance, and values."""
        address = f"127\\\\.0\\\\.0\\\\.1:{self.ports[machine]}"
        filled = expr.replace("$__rate_interval", "1m").replace("$job", "topoflight").replace("$instance", address)
        return {
            tuple(sorted((k, v) for k, v in row["metric"].items() if k != "instance")): row["value"][1]
            for row in self.query(filled)
        }


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "TZ": "UTC"}
        )


@contextmanager
def serving(machine: str, folder: Path, port: int) -> Iterator[None]:
    """An agent on a recording, in a thread of this process: a dozen of their own would take a dozen start-ups."""
    snapshot = scan(load(MACHINES / f"{machine}.json"))
    state = State(lambda: (snapshot,), interval_seconds=3600, folder=folder)
    state.refresh()
    server = uvicorn.Server(uvicorn.Config(create(state), port=port, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def prometheus(programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Agents on loopback, each with what benchmark and flight left, and a Prometheus that scrapes them every second.

    The healthy machine's is `topoflight serve` itself, a process of its own.
    """
    folder = tmp_path_factory.mktemp("prometheus")
    own, *ports = free_ports(1 + len(AGENTS))
    where = dict(zip(AGENTS, ports, strict=True))
    running: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        stack.callback(end, running)
        for machine, port in where.items():
            state = folder / machine
            (state / "flights").mkdir(parents=True)
            (state / "bench.json").write_text(json.dumps(result_to_json(bench(machine))))
            (state / "flights" / "1.json").write_text(json.dumps(flight(machine)))
            if machine == HEALTHY:
                command = [str(Path(sys.executable).with_name("topoflight")), "serve"]
                command += ["--host", str(MACHINES / f"{machine}.json"), "--port", str(port)]
                command += ["--interval", "3600", "--state", str(state)]
                running[machine] = start(command, folder / f"{machine}.log")
        for machine, port in where.items():
            if machine != HEALTHY:
                stack.enter_context(serving(machine, folder / machine, port))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "dashboards" / "rules.yaml")],
            "scrape_configs": [
                {"job_name": "topoflight", "static_configs": [{"targets": [f"127.0.0.1:{p}" for p in ports]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [programs["prometheus"], f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{own}"]
        running["prometheus"] = start(command, folder / "prometheus.log")
        server = Prometheus(port=own, ports=where)
        wait_for(server, folder, running)
        yield server


def end(running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Ask every process to end, then see to it."""
    for process in running.values():
        process.send_signal(signal.SIGTERM)
    for process in running.values():
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(server: Prometheus, folder: Path, running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Until every agent was scraped twice (a rate needs two samples) and the rules were evaluated."""
    deadline = time.monotonic() + 120
    seen: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        for name, process in running.items():
            assert process.poll() is None, (folder / f"{name}.log").read_text()[-2000:]
        try:
            seen = server.query("count_over_time(topoflight_build_info[1m]) >= 2")
            if len(seen) == len(AGENTS) and server.query('ALERTS{alertname="TopoflightFactTooOld"}'):
                return
        except (OSError, ValueError):
            pass  # not listening yet, or "Service Unavailable" in place of JSON while it starts
        time.sleep(0.5)
    raise AssertionError(f"{len(seen)} of {len(AGENTS)} agents were scraped: {folder}")


PANELS = [pytest.param(panel, id=f"{name}: {panel.title}") for name, panel in boards.panels()]


@pytest.mark.parametrize("panel", PANELS)
def test_panel_has_something_to_draw(prometheus: Prometheus, panel: Panel) -> None:
    """On the healthy machine every expression answers, unless the panel may be empty there; then another fills it."""
    for target in panel.targets:
        if not panel.quiet:
            assert prometheus.shown(target.expr, HEALTHY), target.expr
        assert any(prometheus.shown(target.expr, machine) for machine in AGENTS), f"nothing ever fills {target.expr}"


SHOWN = [
    pytest.param(panel, machine, id=f"{name}: {panel.title}: {machine}")
    for name, panel in boards.panels()
    for machine in panel.shows
]


@pytest.mark.parametrize(("panel", "machine"), SHOWN)
def test_sick_machine_differs_from_its_healthy_twin(prometheus: Prometheus, panel: Panel, machine: str) -> None:
    """What the panel draws is not what it draws of the same machine in health; the healthy one agrees with itself."""
    healthy = [prometheus.shown(target.expr, twin(machine)) for target in panel.targets]
    sick = [prometheus.shown(target.expr, machine) for target in panel.targets]
    assert sick != healthy
    assert healthy == [prometheus.shown(target.expr, twin(machine)) for target in panel.targets]


@pytest.mark.parametrize(
    ("machine", "alerts"),
    [
        (boards.NO_PEERMEM, {"TopoflightGdrdmaImpossible", "TopoflightBusbwLow"}),
        (boards.NO_RDMA, {"TopoflightRdmaGone"}),
        (boards.MEMLOCK, {"TopoflightMemlockTooSmall"}),
        (boards.HOT, {"TopoflightThermalThrottling", "TopoflightPowerBrake", "TopoflightSlowRank",
                      "TopoflightBusbwLow", "TopoflightFlightFarFromForecast"}),
        (boards.DEAD_HCA, {"TopoflightRdmaGone", "TopoflightRdmaPortDown"}),
        (boards.NVLINK, {"TopoflightNvlinkDegraded"}),
        (boards.LOST, {"TopoflightGpuLost"}),
        (boards.NARROW, {"TopoflightPcieLinkDegraded"}),
        (HEALTHY, set()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_alerts_are_those_of_the_fault(prometheus: Prometheus, machine: str, alerts: set[str]) -> None:
    """The server itself has the sick machine's alerts under way, and none for the healthy one but its age."""
    found = prometheus.query(f'ALERTS{{instance="127.0.0.1:{prometheus.ports[machine]}"}}')
    names = {row["metric"]["alertname"] for row in found} - {"TopoflightFactTooOld"}  # a recording is old by nature
    if machine == HEALTHY:
        assert names == set()
    assert alerts <= names, names


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.machine)
def test_the_fault_is_found_from_the_dashboards_alone(prometheus: Prometheus, fault: Fault) -> None:
    """Cluster and Node name the finding of this very machine, a panel draws the fault itself, and its alert is on."""
    named = {(name, panel.title): panel for name, panel in boards.panels()}
    for board in ("cluster", "node"):
        rows = prometheus.shown(named[board, "What is wrong"].targets[0].expr, fault.machine)
        assert {("code", fault.code), ("severity", fault.severity)} in [set(labels) for labels in rows], board
        healthy = prometheus.shown(named[board, "What is wrong"].targets[0].expr, HEALTHY)
        assert all(("code", fault.code) not in labels for labels in healthy)
    drawn = [prometheus.shown(target.expr, fault.machine) for target in named["node", fault.panel].targets]
    texts = {text for each in drawn for labels, value in each.items() for text in (value, *dict(labels).values())}
    assert fault.drawn in texts, (fault.panel, texts)
    if fault.alert is not None:
        instance = f"127.0.0.1:{prometheus.ports[fault.machine]}"
        assert prometheus.query(f'ALERTS{{alertname="{fault.alert}", instance="{instance}"}}')


def test_a_dead_agent_is_seen(prometheus: Prometheus) -> None:
    """`up` tells of every agent that it answers: the panel of silent agents shows zero, and could show more."""
    silent = next(panel for _, panel in boards.panels() if panel.title == "Agents that do not answer")
    filled = silent.targets[0].expr.replace("$job", "topoflight").replace("$instance", ".+")
    assert [row["value"][1] for row in prometheus.query(filled)] == ["0"]
