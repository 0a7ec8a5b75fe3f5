"""Debian's Prometheus scrapes agents on recorded machines; every expression of every panel is run through its API.

The healthy machine fills every panel that may not be empty, and each sick one visibly differs from its healthy twin on
the panels that claim to show it. No Grafana is needed: a panel draws what its expressions return.
"""

import dataclasses
import http.client
import json
import sys
import time
import urllib.parse
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import boards
import pytest
import resident
import yaml
from rigs.agents import agent
from rigs.faults import FAULTS, Fault
from rigs.recorded import path_of
from rigs.results import benchmark, measurement
from rigs.serving import START_SECONDS, port_of, serving
from rigs.tables import ROOT, each_row
from rigs.waiting import eventually

from collectives.bench.results import Bar, BenchResult, Straggler
from collectives.nccl_log.transport import ChannelCount, Evidence, LogProblem
from contracts import plain
from contracts.run_record import RunRecord, dumps, record_of

pytestmark = pytest.mark.prometheus

HEALTHY, PCIE, ROCE = "hgx-h100-8xH100-8hca", "l40s-4x-pcie", "r760xa-2xA40-bf3"
HOT, NO_PEERMEM = "sick-h100-thermal", "sick-h100-no-peermem"
SICK = sorted({machine for _, panel in boards.list_panels() for machine in panel.shows})
SCRAPE_SECONDS = 2  # also how long a scrape may take: that of a twelve-fold process, on a busy machine
AGENTS = tuple(dict.fromkeys((HEALTHY, PCIE, ROCE, *SICK, *(fault.machine for fault in FAULTS))))


def twin(machine: str) -> str:
    return PCIE if "l40s" in machine else HEALTHY


def bench(machine: str) -> BenchResult:
    """What two nodes of that kind would have measured: GPUDirect RDMA, or what its fault makes of it."""
    staged, slow = machine == NO_PEERMEM, machine == HOT
    busbw = 4.4e11 * (0.3 if staged else 0.7 if slow else 1.0)
    measured = measurement(
        busbw=busbw, ranks=16, backend="nccl", hosts=("a",) * 8 + ("b",) * 8, bytes=1 << 30,
        algbw_bytes_per_second=busbw * 16 / 15, expected_busbw_bytes_per_second=4.8e11,
        bars=(Bar(name="when healthy", low=3.6e11, typical=4.4e11, high=4.8e11),),
    )  # fmt: skip
    channels = ChannelCount(total=32, gdrdma=0 if staged else 32)
    problem = LogProblem(code="ib_without_gdrdma", message="", action="", severity="fail", count=64)
    return benchmark(
        measured, hosts=("a", "b"), started_at_seconds=time.time(), seconds=12.0,
        stragglers=(Straggler(rank=3, host="a", late_seconds=0.004, iterations=20, share=0.95),) if slow else (),
        evidence=Evidence(
            inter_node_transport="IB", intra_node_transport="P2P/CUMEM", gdrdma="off" if staged else "on",
            send=channels, receive=channels, problems=(problem,) if staged else (),
            transports={"NET/IB" if staged else "NET/IB/GDRDMA": 64, "P2P/CUMEM": 448},
        ),
    )  # fmt: skip


def run(machine: str) -> RunRecord:
    """The record of a fine-tune; a hot GPU makes its steps slower than the forecast allows."""
    slow = 3.0 if machine == HOT else 1.0
    return record_of({
        "status": "complete", "ended_at": "2026-11-20T12:00:00Z", "steps_done": 200,
        "measured": {"step_seconds": slow, "memory_bytes": 4.1e10, "tokens_per_second": 9e4 / slow, "mfu": 0.4 / slow},
        "plan": {"forecast": {"step_seconds": {"low": 0.8, "mid": 1.0, "high": 1.3},
                              "memory_bytes": {"low": 3.5e10, "mid": 4e10, "high": 4.5e10}}},
        "loss": {"first": 1.9, "last": 1.1},
        "communication": {"share": 0.2 * slow, "exposed_share": 0.05 * slow,
                          "seconds_by_kind": {"all_gather": 0.1, "reduce_scatter": 0.08}},
    })  # fmt: skip


@dataclasses.dataclass
class Prometheus:
    """The running server, where each machine's agent answers, and two moments when it knew all of them.

    Every question is about these moments: a scrape that a busy machine misses later changes no answer.
    """

    port: int
    ports: dict[str, int]
    first: float = 0.0
    last: float = 0.0

    def ask(self, path: str, **query: str):
        """The data of an answer of its API."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", f"/api/v1/{path}?{urllib.parse.urlencode(query)}")
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert answer["status"] == "success", f"{query}: {answer}"
        return answer["data"]

    def query(self, expr: str, at: float = 0.0) -> list[dict]:
        """The instant vector of an expression, of the last moment where no other is given."""
        found: list[dict] = self.ask("query", query=expr, time=f"{at or self.last:.3f}")["result"]
        return found

    def shown(self, expr: str, machine: str, at: float = 0.0) -> dict[tuple[tuple[str, str], ...], str]:
        """What a panel draws of one machine: label sets without the instance, and values."""
        address = f"127\\\\.0\\\\.0\\\\.1:{self.ports[machine]}"
        filled = expr.replace("$__rate_interval", "1m").replace("$job", "topoflight").replace("$instance", address)
        return {
            tuple(sorted((k, v) for k, v in row["metric"].items() if k != "instance")): row["value"][1]
            for row in self.query(filled, at)
        }


def start(stack: ExitStack, command: list[str], log: Path) -> int:
    """The port on which the process listens; if it ends before that, the error has its log."""
    process = stack.enter_context(resident.process(command, {"TZ": "UTC"}, log))
    eventually(lambda: process.poll() is not None or port_of(process), f"{command[0]} listens", START_SECONDS)
    port = port_of(process)
    assert port is not None, log.read_text()[-2000:]
    return port


@pytest.fixture(scope="module")
def prometheus(programs, tmp_path_factory):
    """Agents on loopback, each with what benchmark and run left, and a Prometheus that scrapes them all the time.

    The healthy machine's is `topoflight serve` itself, a separate process.
    """
    folder = tmp_path_factory.mktemp("prometheus")
    ports: dict[str, int] = {}
    with ExitStack() as stack:
        for machine in AGENTS:
            state = folder / machine
            (state / "runs").mkdir(parents=True)
            (state / "bench.json").write_text(json.dumps(plain.write(bench(machine))))
            (state / "runs" / "1.json").write_text(dumps(run(machine)))
        command = [str(Path(sys.executable).with_name("topoflight")), "serve", "--port", "0"]
        command += ["--host", str(path_of(HEALTHY)), "--interval", "3600", "--state", str(folder / HEALTHY)]
        ports[HEALTHY] = start(stack, command, folder / f"{HEALTHY}.log")
        for machine in AGENTS:
            if machine != HEALTHY:
                ports[machine] = stack.enter_context(serving(agent(machine, folder / machine).app))
        every = f"{SCRAPE_SECONDS}s"
        targets = [{"targets": [f"127.0.0.1:{port}" for port in ports.values()]}]
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "dashboards" / "rules.yaml")],
            "scrape_configs": [{"job_name": "topoflight", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [programs["prometheus"], f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"]
        server = Prometheus(port=start(stack, command, folder / "prometheus.log"), ports=ports)
        wait_for(server, folder)
        yield server


# Every agent has answered every scrape of the last rounds, and at least two: a rate needs two samples.
KNOWN = f"""min_over_time(up[{3 * SCRAPE_SECONDS}s]) == 1
    and on (instance) count_over_time(topoflight_build_info[1m]) >= 2"""


def wait_for(server: Prometheus, folder: Path) -> None:
    """Find a moment when every agent was known, and one after every rule was then evaluated."""
    deadline = time.monotonic() + START_SECONDS
    seen: list[dict] = []
    evaluated = 0.0  # a moment by which each rule was evaluated on all agents
    while time.monotonic() < deadline:
        settled = time.time() - SCRAPE_SECONDS - 1  # what is asked of an earlier moment no scrape under way changes
        try:
            seen = server.query(KNOWN, settled)
            if len(seen) < len(AGENTS):
                server.first = evaluated = 0.0
            elif not server.first:
                server.first = settled
            elif not evaluated:
                groups = server.ask("rules")["groups"]
                oldest = min(datetime.fromisoformat(group["lastEvaluation"]).timestamp() for group in groups)
                evaluated = time.time() if oldest > server.first else 0.0
            elif settled > evaluated:
                server.last = settled
                return
        except (OSError, ValueError):
            pass  # "Service Unavailable" instead of JSON while it starts
        time.sleep(0.5)
    raise AssertionError(f"{len(seen)} of {len(AGENTS)} agents were scraped: {folder}")


@pytest.mark.real
@each_row("panel", lambda: (panel for _, panel in boards.list_panels()), ids=lambda panel: panel.title)
def test_panel_has_something_to_draw(prometheus, panel):
    """On the healthy machine every expression answers, unless the panel may be empty there; then another fills it."""
    for target in panel.targets:
        if not panel.quiet:
            assert prometheus.shown(target.expr, HEALTHY), target.expr
        assert any(prometheus.shown(target.expr, machine) for machine in AGENTS), f"nothing ever fills {target.expr}"


@each_row(
    ("panel", "machine"), lambda: ((panel, machine) for _, panel in boards.list_panels() for machine in panel.shows)
)
def test_sick_machine_differs_from_its_healthy_twin(prometheus, panel, machine):
    """What the panel draws is not what it draws of the same machine in health, which agrees with itself a while ago."""
    healthy = [prometheus.shown(target.expr, twin(machine)) for target in panel.targets]
    sick = [prometheus.shown(target.expr, machine) for target in panel.targets]
    assert sick != healthy
    assert healthy == [prometheus.shown(target.expr, twin(machine), prometheus.first) for target in panel.targets]


def test_a_slow_job_has_its_alerts_and_a_healthy_machine_none(prometheus: Prometheus) -> None:
    """Those of a benchmark and a run; the others are in FAULTS. A recording is old by nature."""
    names = {}
    for machine in (HEALTHY, HOT, NO_PEERMEM):
        found = prometheus.query(f'ALERTS{{instance="127.0.0.1:{prometheus.ports[machine]}"}}')
        names[machine] = {row["metric"]["alertname"] for row in found} - {"TopoflightFactTooOld"}
    assert names[HEALTHY] == set()
    assert "TopoflightBusbwLow" in names[NO_PEERMEM]
    assert {"TopoflightSlowRank", "TopoflightBusbwLow", "TopoflightRunFarFromForecast"} <= names[HOT]


@each_row("fault", FAULTS, ids=lambda fault: fault.machine)
def test_the_fault_is_found_from_the_dashboards_alone(prometheus: Prometheus, fault: Fault) -> None:
    """Cluster and Node name the finding of this very machine, a panel draws the fault itself, and its alert is on."""
    named = {(name, panel.title): panel for name, panel in boards.list_panels()}
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
    silent = next(panel for _, panel in boards.list_panels() if panel.title == "Agents that do not answer")
    filled = silent.targets[0].expr.replace("$job", "topoflight").replace("$instance", ".+")
    assert [row["value"][1] for row in prometheus.query(filled)] == ["0"]
