"""Build the alert rules, their promtool tests and the PrometheusRule from alerts.yaml.

Each alert is a row of alerts.yaml, with series that fire it and series that do not.

Conventions: kubernetes-mixin (severity, summary, description, runbook_url). An alert for a finding
uses the status of the finding, so page, preflight and alert agree. The other alerts need values over time, which only
metrics have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent.cluster.nodes import MIN_SILENT_SECONDS, SILENT_INTERVALS

# The operator sets the addresses of documentation, Grafana and fleet page: `generate.py --docs URL --grafana URL
# --page URL`, or the chart's values.
DOCS, GRAFANA = "https://docs.example/topoflight", "https://grafana.example"
AGENT = "http://{{$labels.instance}}"  # address of the node's agent within the cluster; its start page is /
NODE_PAGE = "/cluster{{with $labels.node}}?node={{.|urlquery}}{{end}}"  # on any agent: the fleet, or the named node
# The label `node` is set by the scraper (PodMonitor). Without it, the node is named by the agent's address.
NODE = "{{ with $labels.node }}{{ . }}{{ else }}{{ $labels.instance }}{{ end }}"
HOST = {"instance": "10.0.0.7:9402", "job": "topoflight", "node": "node-a"}  # labels of the host in the promtool tests
JOB_RUNS = "on (cluster, job, instance, node, gpu) topoflight_gpu_processes > 0"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert rule with series that fire it and series that do not."""

    name: str
    expr: str
    severity: str  # "critical": jobs fail or are very slow; "warning": act today; "info": act when convenient
    summary: str
    description: str
    hold: str = "5m"  # `for:` of ten scans at the default interval, so that one scan fires no alert
    firing: dict[str, str]  # series: values, one per minute
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)  # labels of the fired alert, besides HOST and severity
    fired_description: str  # description with the values of `firing`
    after: int = 0  # minutes until the expression of the firing case is true
    where: str = NODE  # subject of the alert, at the start of the summary; `place`: its text in the tests
    place: str = "node-a"

    @property
    def rule(self) -> dict[str, Any]:
        """Return the rule in the format of a Prometheus rule file."""
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
        """Return annotations with links: section of the runbook, dashboard of the node, page of the node."""
        return {
            "runbook_url": f"{DOCS}/reference/alerts/#{self.name.lower()}",
            "dashboard_url": f"{GRAFANA}/d/topoflight-node?var-job={job}&var-instance={instance}",
            "page_url": page,
        }


def series(text: str) -> str:
    """Return a series, `name` or `name{label="value"}`, with the labels of the tests' host."""
    name, _, labels = text.rstrip("}").partition("{")
    host = ", ".join(f'{label}="{value}"' for label, value in HOST.items())
    return f"{name}{{{labels}{labels and ', '}{host}}}"


def make_finding_alert(
    *, name: str, codes: str, severities: str, severity: str, summary: str, what: str, case: str, subject: str = "",
    as_severity: str = "fail", hold: str = "5m", unlike: str = "",
) -> Alert:  # fmt: skip
    """Return an alert that fires while a finding exists whose code matches `codes` (a regular expression).

    With `unlike`, one of these codes, it fires for all codes that `codes` does not match. `case` and `subject` are code
    and subject of the test's finding: a GPU, a port, an interface; empty: the node.
    """
    where, place = (
        "{{ with $labels.subject }}{{ . }} of {{ end }}" + NODE,
        f"{subject} of node-a" if subject else "node-a",
    )
    finding = "topoflight_findings"
    return Alert(
        name=name,
        # The label `severity` of the finding would overwrite that of the alert, so it is renamed to `outcome`.
        expr="max by (cluster, job, instance, node, code, outcome, subject) "
        f'(label_replace({finding}{{code{"!~" if unlike else "=~"}"{codes}",severity=~"{severities}"}}, '
        '"outcome", "$1", "severity", "(.*)")) > 0',
        severity=severity,
        summary=summary,
        description=f"{what} Finding {{{{ $labels.code }}}} ({{{{ $labels.outcome }}}}): {where}.",
        hold=hold,
        where=where,
        place=place,
        firing={series(f'{finding}{{code="{case}", severity="{as_severity}", subject="{subject}"}}'): "1x120"},
        quiet={
            series(f'{finding}{{code="{case}", severity="unknown"}}'): "1x120",
            series(f'{finding}{{code="{unlike or f"other.{case}"}", severity="fail"}}'): "1x120",
        },
        labels={"code": case, "outcome": as_severity} | ({"subject": subject} if subject else {}),
        fired_description=f"{what} Finding {case} ({as_severity}): {place}.",
    )


def make_limit_alerts(*, name: str, reasons: str, what: str, case: str) -> tuple[Alert, Alert]:
    """Return a warning for reduced clocks of a GPU, and a critical alert if a job runs on it.

    The software power cap also reduces clocks, but it is not a fault.
    """
    throttling = f'topoflight_gpu_throttling{{reason=~"{reasons}"}} == 1'
    throttled = series(f'topoflight_gpu_throttling{{gpu="3", reason="{case}"}}')
    processes = series('topoflight_gpu_processes{gpu="3"}')
    other = {series('topoflight_gpu_throttling{gpu="3", reason="sw_power_cap"}'): "1x120"}
    template, place = "GPU{{ $labels.gpu }} of " + NODE, "GPU3 of node-a"
    gpu = template + " runs at reduced clocks ({{ $labels.reason }})"
    idle = Alert(
        name=name, expr=f"{throttling} unless {JOB_RUNS}", severity="warning", summary=f"{what}.", where=template,
        place=place,
        description=f"{gpu}. No job is known to run on it.",
        firing={throttled: "1x120"},  # an unknown number of processes counts as no job
        quiet={throttled: "1x120", processes: "1x120", **other},
        labels={"gpu": "3", "reason": case},
        fired_description=f"GPU3 of node-a runs at reduced clocks ({case}). No job is known to run on it.",
    )  # fmt: skip
    busy = Alert(
        name=f"{name}UnderJob", expr=f"{throttling} and {JOB_RUNS}", severity="critical",
        summary=f"{what} while a job runs on it.", where=template, place=place,
        description=f"{gpu}. Every rank of its job waits for it.",
        firing={throttled: "1x120", processes: "1x120"},
        quiet={throttled: "1x120", processes: "0x120", **other},
        labels={"gpu": "3", "reason": case},
        fired_description=f"GPU3 of node-a runs at reduced clocks ({case}). Every rank of its job waits for it.",
    )  # fmt: skip
    return idle, busy


def rules(alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the content of the Prometheus rule file."""
    return {"groups": [{"name": "topoflight", "rules": [alert.rule for alert in alerts]}]}


def make_prometheus_rule(alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the same rule groups as a PrometheusRule, the object of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "topoflight", "labels": {"app.kubernetes.io/name": "topoflight"}},
        "spec": rules(alerts),
    }


def make_rule_tests(alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return promtool's unit tests: each alert fires when its `for:` has passed, not earlier, and not otherwise."""
    tests: list[dict[str, Any]] = []
    for alert in alerts:
        expected = {
            "exp_labels": {
                **alert.labels, **HOST, "severity": alert.severity
            },
            "exp_annotations": {
                "summary": f"{alert.place}: {alert.summary}",
                "description": alert.fired_description,
                **alert.links("10.0.0.7%3A9402", "topoflight", f"http://{HOST['instance']}/"),
            },
        }  # fmt: skip
        fires = alert.after + int(alert.hold.removesuffix("m"))
        moments = [(f"{fires}m", [expected]), (f"{fires - 1}m", [])]
        tests.append(_make_case(f"{alert.name} fires", alert.firing, alert.name, moments))
        tests.append(_make_case(f"{alert.name} is quiet", alert.quiet, alert.name, [(f"{fires + 5}m", [])]))
    return {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}


def _make_case(name: str, values: dict[str, str], alert: str, moments: list[tuple[str, list[Any]]]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in values.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected} for at, expected in moments],
    }


def _read(row: dict[str, Any]) -> tuple[Alert, ...]:
    """Return the alerts of a row of alerts.yaml: for findings (`codes`), reduced clocks (`reasons`), or others."""
    if "codes" in row:
        return (make_finding_alert(**row),)
    if "reasons" in row:
        return make_limit_alerts(**row)
    tests = {name: {series(key): values for key, values in row[name].items()} for name in ("firing", "quiet")}
    return (Alert(**{**row, **tests}),)


def _read_table() -> list[dict[str, Any]]:
    text = Path(__file__).with_name("alerts.yaml").read_text(encoding="utf-8")
    silent = {"SILENT_INTERVALS": SILENT_INTERVALS, "MIN_SILENT_SECONDS": round(MIN_SILENT_SECONDS)}
    codes = "|".join(row["codes"] for row in yaml.safe_load(text) if "codes" in row and "unlike" not in row)
    for name, value in {"NODE": NODE, "CODES": codes, **silent}.items():
        text = text.replace(f"{{{name}}}", str(value))
    return list(yaml.safe_load(text))


ALERTS: tuple[Alert, ...] = tuple(alert for row in _read_table() for alert in _read(row))
