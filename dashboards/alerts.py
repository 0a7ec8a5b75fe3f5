"""The alerts: one source for the rules, their tests and the PrometheusRule; docs/runbook.md has a section for each.

Conventions: kubernetes-mixin (severity, summary, description, runbook_url). Alerts on a finding follow the finding's
own judgement, so that page, gate and alert never disagree; the others compare what only the metrics know over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.cluster.nodes import LEAST_SILENT_SECONDS, SILENT_INTERVALS

# Where documents, Grafana and the page of the fleet are is the operator's: `generate.py --docs URL --grafana URL
# --page URL`, or the chart's values.
DOCS, GRAFANA = "https://docs.example/topoflight", "https://grafana.example"
AGENT = "http://{{$labels.instance}}"  # within the cluster: the node's own agent; its page is /
NODE_PAGE = (
    "/cluster{{with $labels.node}}?node={{.|urlquery}}{{end}}"  # of any agent: the fleet, or the node by its name
)
# the scraper's label (PodMonitor); an address where nobody names the node
NODE = "{{ with $labels.node }}{{ . }}{{ else }}{{ $labels.instance }}{{ end }}"
HOST = {"instance": "10.0.0.7:9402", "job": "topoflight", "node": "node-a"}  # of the tests
JOB_RUNS = "on (job, instance, node, gpu) topoflight_gpu_processes > 0"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One rule with what makes it fire and what does not."""

    name: str
    expr: str
    severity: str  # "critical": jobs fail or crawl now; "warning": look today; "info": look some day
    summary: str
    description: str
    hold: str = "5m"  # `for:` ten scans of the agent's default interval, so that one odd scan wakes nobody
    firing: dict[str, str]  # series: values, one per minute
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)  # of the fired alert, beside HOST's and severity
    says: str  # the description as it fires
    after: int = 0  # minutes until the firing case is one
    where: str = NODE  # what the alert is about, first in the summary; `place` is the same as it fires
    place: str = "node-a"

    @property
    def rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": f"{self.where}: {self.summary}",
                "description": self.description,
                **self.links("{{$labels.instance|urlquery}}", "{{$labels.job|urlquery}}", f"{AGENT}/"),
            },
        }

    def links(self, instance: str, job: str, page: str) -> dict[str, str]:
        """Annotations that lead on: the section of the runbook, the node's board, the node's page."""
        return {
            "runbook_url": f"{DOCS}/runbook.md#alert-name-{self.name.lower()}",
            "dashboard_url": f"{GRAFANA}/d/topoflight-node?var-job={job}&var-instance={instance}",
            "page_url": page,
        }


def series(name: str, **labels: str) -> str:
    """A series of the host that the tests speak of."""
    inner = ", ".join(f'{k}="{v}"' for k, v in {**labels, **HOST}.items())
    return f"{name}{{{inner}}}"


def on_finding(
    name: str, codes: str, severities: str, severity: str, summary: str, what: str, *,
    case: str, subject: str = "", as_severity: str = "fail", hold: str = "5m",
) -> Alert:  # fmt: skip
    """An alert that holds while a finding of one of `codes` (a regular expression) stands; `case` is one of them, about
    `subject`: a GPU, a port, an interface, or the node where it is empty.
    """
    where, place = (
        "{{ with $labels.subject }}{{ . }} of {{ end }}" + NODE,
        f"{subject} of node-a" if subject else "node-a",
    )
    return Alert(
        name=name,
        # the finding's own severity would overwrite the alert's: it is renamed to outcome
        expr="max by (job, instance, node, code, outcome, subject) "
        f'(label_replace(topoflight_findings{{code=~"{codes}",severity=~"{severities}"}}, '
        '"outcome", "$1", "severity", "(.*)")) > 0',
        severity=severity,
        summary=summary,
        description=f"{what} Finding {{{{ $labels.code }}}} ({{{{ $labels.outcome }}}}): {where}.",
        hold=hold,
        where=where,
        place=place,
        firing={series("topoflight_findings", code=case, severity=as_severity, subject=subject): "1x120"},
        quiet={
            series("topoflight_findings", code=case, severity="unknown"): "1x120",
            series("topoflight_findings", code=f"other.{case}", severity="fail"): "1x120",
        },
        labels={"code": case, "outcome": as_severity} | ({"subject": subject} if subject else {}),
        says=f"{what} Finding {case} ({as_severity}): {place}.",
    )


def on_limit(name: str, reasons: str, what: str, *, case: str) -> tuple[Alert, Alert]:
    """A GPU held back: look today; with a job on it look now. The software's power cap is full load, and no fault."""
    throttling = f'topoflight_gpu_throttling{{reason=~"{reasons}"}} == 1'
    held = series("topoflight_gpu_throttling", gpu="3", reason=case)
    processes = series("topoflight_gpu_processes", gpu="3")
    other = {series("topoflight_gpu_throttling", gpu="3", reason="sw_power_cap"): "1x120"}
    where, place = "GPU {{ $labels.gpu }} of " + NODE, "GPU 3 of node-a"
    gpu = where + " is held down by {{ $labels.reason }}"
    idle = Alert(
        name=name, expr=f"{throttling} unless {JOB_RUNS}", severity="warning", summary=f"{what}.", where=where,
        place=place,
        description=f"{gpu}; no job is known to run on it.",
        firing={held: "1x120"},  # processes that are unknown are no job
        quiet={held: "1x120", processes: "1x120", **other},
        labels={"gpu": "3", "reason": case},
        says=f"GPU 3 of node-a is held down by {case}; no job is known to run on it.",
    )  # fmt: skip
    busy = Alert(
        name=f"{name}UnderJob", expr=f"{throttling} and {JOB_RUNS}", severity="critical",
        summary=f"{what} while a job runs on it.", where=where, place=place,
        description=f"{gpu}: every rank of its job waits for it.",
        firing={held: "1x120", processes: "1x120"},
        quiet={held: "1x120", processes: "0x120", **other},
        labels={"gpu": "3", "reason": case},
        says=f"GPU 3 of node-a is held down by {case}: every rank of its job waits for it.",
    )  # fmt: skip
    return idle, busy


def rules(alerts: Sequence[Alert]) -> dict[str, Any]:
    """The rule file."""
    return {"groups": [{"name": "topoflight", "rules": [alert.rule for alert in alerts]}]}


def prometheus_rule(alerts: Sequence[Alert]) -> dict[str, Any]:
    """The same groups as an object of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "topoflight", "labels": {"app.kubernetes.io/name": "topoflight"}},
        "spec": rules(alerts),
    }


def rule_tests(alerts: Sequence[Alert]) -> dict[str, Any]:
    """Unit tests for promtool: each alert fires when its `for:` is over, no minute before, and is silent otherwise."""
    tests: list[dict[str, Any]] = []
    for alert in alerts:
        told = {
            "exp_labels": {
                **alert.labels, **HOST, "severity": alert.severity
            },
            "exp_annotations": {
                "summary": f"{alert.place}: {alert.summary}",
                "description": alert.says,
                **alert.links("10.0.0.7%3A9402", "topoflight", f"http://{HOST['instance']}/"),
            },
        }  # fmt: skip
        fires = alert.after + int(alert.hold.removesuffix("m"))
        moments = [(f"{fires}m", [told]), (f"{fires - 1}m", [])]
        tests.append(_case(f"{alert.name} fires", alert.firing, alert.name, moments))
        tests.append(_case(f"{alert.name} is quiet", alert.quiet, alert.name, [(f"{fires + 5}m", [])]))
    return {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}


def _case(name: str, values: dict[str, str], alert: str, moments: list[tuple[str, list[Any]]]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in values.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": told} for at, told in moments],
    }


RATIO = "topoflight_gdrdma_channels_ratio"
PUBLISHED = "topoflight_publish_success_timestamp_seconds"
INTERVAL = "topoflight_publish_interval_seconds"
ATTEMPTS = "topoflight_publish_attempts_total"
MONTH_SECONDS = 30 * 86400  # the operator's choice: about as often as drivers and firmware change

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="TopoflightGdrdmaOff",
        expr=f"{RATIO} < 1 and on (job, instance, node) topoflight_gdrdma_possible == 1",
        severity="critical",
        summary="Network channels run without GPUDirect RDMA although this node could.",
        description="Only {{ $value | humanizePercentage }} of the {{ $labels.direction }} channels of the last run on "
        f"{NODE} use GPUDirect RDMA; modules and ports would allow all.",
        firing={
            series(RATIO, direction="send"): "0.75x120",
            series(RATIO, direction="receive"): "1x120",
            series("topoflight_gdrdma_possible"): "1x120",
        },
        quiet={series(RATIO, direction="send"): "0x120", series("topoflight_gdrdma_possible"): "0x120"},
        labels={"direction": "send"},
        says="Only 75% of the send channels of the last run on node-a use GPUDirect RDMA; modules and ports "
        "would allow all.",
    ),
    on_finding(
        "TopoflightGdrdmaImpossible",
        r"pci\\.peermem\\.missing",
        "fail",
        "critical",
        "NICs cannot reach GPU memory: every message is copied through the host.",
        "No peer memory module and no DMA-BUF.",
        case="pci.peermem.missing",
    ),
    Alert(
        name="TopoflightTcpBetweenNodes",
        expr='topoflight_transport_info{inter_node="Socket"} '
        "and on (job, instance, node) topoflight_gdrdma_possible == 1",
        severity="critical",
        summary="The last run sent its data over TCP on a node with RDMA.",
        description=f"The log of the last run on {NODE} proves TCP sockets between nodes; RDMA ports are ACTIVE.",
        firing={
            series("topoflight_transport_info", inter_node="Socket", intra_node="SHM", gdrdma="off"): "1x120",
            series("topoflight_gdrdma_possible"): "1x120",
        },
        quiet={
            series("topoflight_transport_info", inter_node="IB", intra_node="SHM", gdrdma="on"): "1x120",
            series("topoflight_gdrdma_possible"): "1x120",
        },
        labels={"inter_node": "Socket", "intra_node": "SHM", "gdrdma": "off"},
        says="The log of the last run on node-a proves TCP sockets between nodes; RDMA ports are ACTIVE.",
    ),
    on_finding(
        "TopoflightRdmaGone",
        r"rdma\\.port\\.none_active|pci\\.nic\\.no_rdma|topology\\.gpu_nic\\.down",
        "fail",
        "critical",
        "A GPU has lost its RDMA rail, or the node all of them.",
        "RDMA is not there where it was built in.",
        case="topology.gpu_nic.down",
        subject="GPU3",
    ),
    on_finding(
        "TopoflightRdmaPortDown",
        r"rdma\\.port\\.down",
        "warn|fail",
        "warning",
        "An RDMA port is not ACTIVE.",
        "NCCL leaves a port that is not ACTIVE out without a word.",
        case="rdma.port.down",
        subject="mlx5_3:1",
        as_severity="warn",
    ),
    on_finding(
        "TopoflightRdmaPortSlow",
        r"rdma\\.port\\.rate",
        "warn|fail",
        "warning",
        "An RDMA port runs below the rate of its sisters.",
        "The slowest rail bounds every ring.",
        case="rdma.port.rate",
        subject="mlx5_3:1",
        as_severity="warn",
    ),
    on_finding(
        "TopoflightMemlockTooSmall",
        r"limits\\.memlock\\.low|rdma\\.memlock\\.registration",
        "fail",
        "critical",
        "RDMA memory cannot be registered: the memlock limit is too small.",
        "RDMA connections of NCCL do not fit into the memlock limit.",
        case="limits.memlock.low",
    ),
    on_finding(
        "TopoflightShmTooSmall",
        r"limits\\.shm\\.(small|full)",
        "warn|fail",
        "warning",
        "The shared memory file system (/dev/shm) is too small or full.",
        "Ranks that talk through shared memory fail.",
        case="limits.shm.full",
    ),
    on_finding(
        "TopoflightWrongInterface",
        r"interfaces\\.choice\\.(wrong|none|setting)",
        "warn|fail",
        "warning",
        "NCCL would take the wrong network interface.",
        "Start-up hangs, or TCP traffic takes the slow way.",
        case="interfaces.choice.wrong",
        subject="eno1",
        as_severity="warn",
    ),
    Alert(
        name="TopoflightBusbwLow",
        # only results that are judged have a least value (docs/busbw.md)
        expr="topoflight_bench_busbw_bytes_per_second / topoflight_bench_least_busbw_bytes_per_second < 1",
        severity="warning",
        summary="Measured bus bandwidth is below what healthy links carry.",
        description="{{ $labels.op }} at {{ $labels.size_bytes }} bytes reaches {{ $value | humanizePercentage }} of "
        f"the least of healthy links on {NODE}.",
        firing={
            series("topoflight_bench_busbw_bytes_per_second", op="all_gather", size_bytes="1073741824"): "2e11x120",
            series(
                "topoflight_bench_least_busbw_bytes_per_second", op="all_gather", size_bytes="1073741824"
            ): "4e11x120",
        },
        quiet={
            series("topoflight_bench_busbw_bytes_per_second", op="all_gather", size_bytes="1073741824"): "4.1e11x120",
            series(
                "topoflight_bench_least_busbw_bytes_per_second", op="all_gather", size_bytes="1073741824"
            ): "4e11x120",
            series("topoflight_bench_busbw_bytes_per_second", op="all_gather", size_bytes="1048576"): "1e10x120",
        },
        labels={"op": "all_gather", "size_bytes": "1073741824"},
        says="all_gather at 1073741824 bytes reaches 50% of the least of healthy links on node-a.",
    ),
    on_finding(
        "TopoflightWrongData",
        r"bench\\.result\\.unverified",
        "fail",
        "critical",
        "A collective returned wrong data.",
        "Training would go on with corrupted gradients.",
        case="bench.result.unverified",
        hold="1m",
    ),
    Alert(
        name="TopoflightSlowRank",
        expr="topoflight_bench_rank_late_seconds > 0",
        severity="warning",
        summary="The others wait for one rank.",
        description=f"Rank {{{{ $labels.rank }}}} of the last benchmark on {NODE} comes "
        "{{ $value | humanizeDuration }} late in most iterations.",
        firing={series("topoflight_bench_rank_late_seconds", rank="3"): "0.002x120"},
        quiet={series("topoflight_bench_slow_ranks"): "0x120"},
        labels={"rank": "3"},
        says="Rank 3 of the last benchmark on node-a comes 2ms late in most iterations.",
    ),
    on_finding(
        "TopoflightPcieLinkDegraded",
        r"pci\\.link\\.(width|speed)|gpu\\.pcie\\.(width|generation)",
        "warn|fail",
        "warning",
        "A PCIe link runs below what device and slot can do.",
        "A link trained down, such as x16 at x4.",
        case="pci.link.width",
        subject="GPU3",
    ),
    on_finding(
        "TopoflightNvlinkDegraded",
        r"gpu\\.nvlink\\.(missing|none)|topology\\.nvlink\\..+|gpu\\.fabric\\..+",
        "warn|fail",
        "critical",
        "NVLinks are missing.",
        "A GPU has fewer NVLinks than its twins, such as NV11 among NV12.",
        case="topology.nvlink.asymmetric",
        subject="GPU0-GPU3",
    ),
    *on_limit(
        "TopoflightThermalThrottling",
        ".*thermal",
        "Heat holds a GPU's clocks down",
        case="hw_thermal",
    ),
    *on_limit(
        "TopoflightPowerBrake",
        "hw_power_brake",
        "The power supply slows a GPU down",
        case="hw_power_brake",
    ),
    on_finding(
        "TopoflightXid",
        r"gpu\\.xid\\.hardware",
        "warn|fail",
        "warning",
        "The driver logged an Xid of the GPU, its memory or its links.",
        "Results may be wrong or the job may end.",
        case="gpu.xid.hardware",
        subject="GPU3",
        as_severity="warn",
        hold="1m",
    ),
    on_finding(
        "TopoflightGpuLost",
        r"gpu\\.device\\.lost|gpu\\.driver\\.unusable|pci\\.device\\.lost",
        "fail",
        "critical",
        "A GPU or its driver no longer answers.",
        "Jobs on this node fail or hang.",
        case="gpu.device.lost",
        subject="GPU3",
        hold="1m",
    ),
    Alert(
        name="TopoflightFactTooOld",
        expr='time() - topoflight_fact_timestamp_seconds{fact!~"bench|flight"} > 600',
        severity="warning",
        summary="The agent shows facts of long ago.",
        description=f"The facts of the {{{{ $labels.fact }}}} probe on {NODE} are "
        "{{ $value | humanizeDuration }} old; the default is a scan every 30 s.",
        firing={series("topoflight_fact_timestamp_seconds", fact="gpu"): "0x120"},
        after=11,
        quiet={
            series("topoflight_fact_timestamp_seconds", fact="gpu"): "0+60x120",
            series("topoflight_fact_timestamp_seconds", fact="bench"): "0x120",
        },
        labels={"fact": "gpu"},
        says="The facts of the gpu probe on node-a are 16m 0s old; the default is a scan every 30 s.",
    ),
    Alert(
        name="TopoflightBenchTooOld",
        expr=f'time() - topoflight_fact_timestamp_seconds{{fact="bench"}} > {MONTH_SECONDS}',
        severity="info",
        summary="The last benchmark is more than a month old.",
        description=f"The last benchmark on {NODE} is {{{{ $value | humanizeDuration }}}} old.",
        firing={series("topoflight_fact_timestamp_seconds", fact="bench"): f"{-MONTH_SECONDS}x120"},
        after=1,
        quiet={series("topoflight_fact_timestamp_seconds", fact="bench"): "0x120"},
        labels={"fact": "bench"},
        says="The last benchmark on node-a is 30d 0h 6m 0s old.",
    ),
    Alert(
        name="TopoflightProbeFailing",
        expr="topoflight_probe_success == 0",
        severity="warning",
        summary="A probe fails: what it reads is unknown.",
        description=f"The {{{{ $labels.probe }}}} probe fails on {NODE}.",
        firing={series("topoflight_probe_success", probe="rdma"): "0x120"},
        quiet={series("topoflight_probe_success", probe="rdma"): "1x120"},
        labels={"probe": "rdma"},
        says="The rdma probe fails on node-a.",
    ),
    Alert(
        name="TopoflightAgentDown",
        expr='up{job=~".*topoflight.*"} == 0',
        severity="warning",
        summary="The agent of a node does not answer.",
        description=f"Nothing is known about {NODE}: its agent does not answer.",
        firing={series("up"): "0x120"},
        quiet={series("up"): "1x120"},
        says="Nothing is known about node-a: its agent does not answer.",
    ),
    Alert(
        name="TopoflightRecordTooOld",
        expr=f"time() - {PUBLISHED} > clamp_min({SILENT_INTERVALS} * {INTERVAL}, {LEAST_SILENT_SECONDS:.0f})",
        severity="warning",
        summary="A node's record in the cluster is no longer renewed.",
        description=f"The agent of {NODE} wrote its node's record {{{{ $value | humanizeDuration }}}} ago: "
        "others call the node silent, and the gate over nodes fails there.",
        firing={series(PUBLISHED): "0x120", series(INTERVAL): "300x120"},
        after=16,
        quiet={series(PUBLISHED): "0x120", series(INTERVAL): "3600x120"},
        says="The agent of node-a wrote its node's record 21m 0s ago: others call the node silent, and the gate "
        "over nodes fails there.",
    ),
    Alert(
        name="TopoflightRecordNeverWritten",
        expr=f"{ATTEMPTS} > 0 unless on (job, instance, node) {PUBLISHED}",
        severity="warning",
        summary="An agent cannot write its node's record into the cluster.",
        description=f"The agent of {NODE} has tried {{{{ $value }}}} times to write its node's record, and "
        "never could.",
        hold="15m",  # three writes of the default interval
        firing={series(ATTEMPTS): "4x120"},
        quiet={series(ATTEMPTS): "4x120", series(PUBLISHED): "0x120"},
        says="The agent of node-a has tried 4 times to write its node's record, and never could.",
    ),
    Alert(
        name="TopoflightFlightFarFromForecast",
        expr="topoflight_flight_step_seconds / on (job, instance, node) "
        'topoflight_flight_forecast_step_seconds{bound="high"} > 1',
        severity="warning",
        summary="The last flight was slower than its forecast allows.",
        description=f"The step time on {NODE} is {{{{ $value | humanizePercentage }}}} of the forecast's upper bound.",
        hold="1m",
        firing={
            series("topoflight_flight_step_seconds"): "3x120",
            series("topoflight_flight_forecast_step_seconds", bound="high"): "2x120",
            series("topoflight_flight_forecast_step_seconds", bound="low"): "1x120",
        },
        quiet={
            series("topoflight_flight_step_seconds"): "1.5x120",
            series("topoflight_flight_forecast_step_seconds", bound="high"): "2x120",
            series("topoflight_flight_forecast_step_seconds", bound="low"): "1x120",
        },
        says="The step time on node-a is 150% of the forecast's upper bound.",
    ),
    Alert(
        name="TopoflightFlightMemoryFarFromForecast",
        expr='topoflight_flight_within_forecast{quantity="memory_bytes"} == 0',
        severity="info",
        summary="The last flight's memory lies outside its forecast.",
        description=f"Peak memory on {NODE} lies outside the forecast's interval.",
        hold="1m",
        firing={series("topoflight_flight_within_forecast", quantity="memory_bytes"): "0x120"},
        quiet={
            series("topoflight_flight_within_forecast", quantity="memory_bytes"): "1x120",
            series("topoflight_flight_within_forecast", quantity="step_seconds"): "0x120",
        },
        labels={"quantity": "memory_bytes"},
        says="Peak memory on node-a lies outside the forecast's interval.",
    ),
    Alert(
        name="TopoflightFlightFailed",
        expr="topoflight_flight_success == 0",
        severity="warning",
        summary="The last flight did not end well.",
        description=f"The last fine-tune that {NODE} launched did not end as complete.",
        hold="1m",
        firing={series("topoflight_flight_success"): "0x120"},
        quiet={series("topoflight_flight_success"): "1x120"},
        says="The last fine-tune that node-a launched did not end as complete.",
    ),
)
