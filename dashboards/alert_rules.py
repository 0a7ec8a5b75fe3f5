"""What an alert is, and what is made of all of them: plain rules, a PrometheusRule, and promtool's unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

RUNBOOK = "docs/runbook.md"


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
    labels: dict[str, str] = field(default_factory=dict)  # of the fired alert, beside instance, job and severity
    says: str  # the description as it fires
    after: int = 0  # minutes until the firing case is one

    @property
    def rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOK}#alert-name-{self.name.lower()}",
            },
        }


def series(name: str, **labels: str) -> str:
    """A series of the host that the tests speak of."""
    inner = ", ".join(f'{k}="{v}"' for k, v in {**labels, "instance": "node-a:9402", "job": "topoflight"}.items())
    return f"{name}{{{inner}}}"


def on_finding(
    name: str, codes: str, severities: str, severity: str, summary: str, what: str, *,
    case: str, as_severity: str = "fail", hold: str = "5m",
) -> Alert:  # fmt: skip
    """An alert that holds while a finding of one of `codes` (a regular expression) stands; `case` is one of them."""
    return Alert(
        name=name,
        # the finding's own severity would overwrite the alert's: it is renamed to outcome
        expr=f'max by (job, instance, code, outcome) (label_replace(topoflight_findings{{code=~"{codes}",'
        f'severity=~"{severities}"}}, "outcome", "$1", "severity", "(.*)")) > 0',
        severity=severity,
        summary=summary,
        description=f"{what} Finding {{{{ $labels.code }}}} ({{{{ $labels.outcome }}}}) on {{{{ $labels.instance }}}}.",
        hold=hold,
        firing={series("topoflight_findings", code=case, severity=as_severity): "1x120"},
        quiet={
            series("topoflight_findings", code=case, severity="unknown"): "1x120",
            series("topoflight_findings", code=f"other.{case}", severity="fail"): "1x120",
        },
        labels={"code": case, "outcome": as_severity},
        says=f"{what} Finding {case} ({as_severity}) on node-a:9402.",
    )


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
                **alert.labels, "instance": "node-a:9402", "job": "topoflight", "severity": alert.severity
            },
            "exp_annotations": {
                "summary": alert.summary,
                "description": alert.says,
                "runbook_url": alert.rule["annotations"]["runbook_url"],
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
