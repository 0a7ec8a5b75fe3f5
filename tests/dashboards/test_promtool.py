"""What the shipped agent exports of recorded nodes, by promtool: valid metrics, and no alert on a healthy node."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from agent_pod import healthy, in_pod
from alerts import ALERTS
from prometheus_client.parser import text_string_to_metric_families
from rigs.recorded import NAMES, snapshot
from rigs.tables import each_row
from test_real_prometheus import bench
from test_real_prometheus import run as run_of

from agent import metrics
from agent.checks.measured import with_bench
from agent.checks.verdict import View, build_view

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


def judged(programs: dict[str, str], folder: Path, views: dict[str, View], names: list[str]) -> tuple[int, str]:
    """Exit code and words of `promtool test rules`: that none of these alerts is on, of each view."""
    quiet = [{"eval_time": "100m", "alertname": name, "exp_alerts": []} for name in names]
    tests = [{"name": name, "interval": "1m", "input_series": series(view), "alert_rule_test": quiet}
             for name, view in views.items()]  # fmt: skip
    whole = {"rule_files": [str(ROOT / "dashboards/rules.yaml")], "evaluation_interval": "1m", "tests": tests}
    (folder / "t.yaml").write_text(yaml.safe_dump(whole))
    done = subprocess.run([programs["promtool"], "test", "rules", folder / "t.yaml"], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.prometheus
def test_no_alert_fires_on_healthy_nodes_and_some_on_a_sick_one(programs: dict[str, str], tmp_path: Path) -> None:
    """Every rule over what the agent exports from inside its pod; of one without peermem, so that it can fail."""
    views = {name: in_pod(name) for name in healthy()}
    assert views
    code, said = judged(programs, tmp_path, views, [alert.name for alert in ALERTS])
    assert code == 0, said
    sick = {"sick": in_pod("sick-h100-no-peermem")}
    code, said = judged(programs, tmp_path, sick, ["TopoflightGdrdmaImpossible"])
    assert code and "TopoflightGdrdmaImpossible" in said


@pytest.mark.prometheus
@each_row("name", NAMES)
def test_promtool_accepts_the_metrics(name: str, programs: dict[str, str]) -> None:
    """`promtool check metrics` reads the exposition and has no word against it."""
    view = with_bench(build_view((snapshot(name),), runs=(run_of(name),)), bench(name))
    body, _ = metrics.exposition(view, "")
    assert b"topoflight_bench_busbw" in body and b"topoflight_run_step_seconds" in body
    done = subprocess.run([programs["promtool"], "check", "metrics"], input=body, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()
