"""Every alert over what the shipped agent exports of a healthy node, by Prometheus' own program: silence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from agent_pod import healthy, in_pod
from alerts import ALERTS
from prometheus_client.parser import text_string_to_metric_families
from rigs.tables import each_row

from agent import metrics
from agent.checks.view import View

ROOT = Path(__file__).parent.parent.parent


def series(view: View) -> list[dict[str, str]]:
    """The view's exposition as promtool's input: every sample stays as it is for two hours, ages are those of now."""
    body, _ = metrics.exposition(view, "")
    found = []
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = {**sample.labels, "instance": "n1:9402", "job": "topoflight"}
            told = ", ".join(f'{key}="{yaml_text(value)}"' for key, value in labels.items())
            value = "0+60x120" if sample.name.endswith("_timestamp_seconds") else f"{min(sample.value, 1e300)!r}x120"
            found.append({"series": f"{sample.name}{{{told}}}", "values": value})  # promtool reads no +Inf
    return found


def yaml_text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def cases(view: View, names: list[str]) -> dict[str, object]:
    quiet = [{"eval_time": "100m", "alertname": name, "exp_alerts": []} for name in names]
    return {
        "rule_files": [str(ROOT / "dashboards/rules.yaml")], "evaluation_interval": "1m",
        "tests": [{"name": "silence", "interval": "1m", "input_series": series(view), "alert_rule_test": quiet}],
    }  # fmt: skip


@pytest.mark.prometheus
@each_row("name", healthy)
def test_no_alert_stands_on_a_healthy_node(name: str, programs: dict[str, str], tmp_path: Path) -> None:
    """Every rule over what the agent exports from inside its pod, by Prometheus' own program."""
    names = [alert.name for alert in ALERTS]
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(cases(in_pod(name), names)))
    done = subprocess.run([programs["promtool"], "test", "rules", str(tmp_path / "t.yaml")],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
def test_an_alert_would_be_seen(programs: dict[str, str], tmp_path: Path) -> None:
    """The test above can fail: a node with a dead HCA, from inside the pod."""
    sick = cases(in_pod("sick-h100-no-peermem"), ["TopoflightGdrdmaImpossible"])
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(sick))
    done = subprocess.run([programs["promtool"], "test", "rules", str(tmp_path / "t.yaml")],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode != 0 and "TopoflightGdrdmaImpossible" in done.stdout + done.stderr
