"""Alerts: one source, a runbook section each, codes and metrics that exist, and promtool's own judgement."""

import re
import subprocess

import generate
import pytest
import yaml
from alerts import ALERTS, DOCS
from rigs.tables import ROOT, each_row

from agent.checks.findings import read_entries
from agent.checks.measured import ALL_CODES
from agent.metrics import CATALOGUE

RULES = ROOT / "dashboards" / "rules.yaml"
RUNBOOK = ROOT / "docs/reference/alerts.md"


@each_row("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_is_whole(alert) -> None:  # type: ignore[no-untyped-def]
    """A hold time, a severity of the three, words for the reader, and a runbook section with its parts."""
    assert re.fullmatch(r"Topoflight([A-Z][a-z0-9]+)+", alert.name)
    rule = alert.rule
    assert re.fullmatch(r"[1-9]\d*m", rule["for"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url", "dashboard_url", "page_url"}
    node = "{{ with $labels.node }}{{ . }}{{ else }}{{ $labels.instance }}{{ end }}: "
    assert node in rule["annotations"]["summary"] and rule["annotations"]["summary"].endswith(".")
    for label in {"gpu", "subject"} & {*re.findall(r"\w+", " ".join(re.findall(r"(?:on|by) \(.*?\)", alert.expr)))}:
        assert all(f"$labels.{label} }}" in rule["annotations"][text] for text in ("summary", "description")), label
    assert (
        "{{ with $labels.node }}{{ . }}{{ else }}{{ $labels.instance }}{{ end }}" in rule["annotations"]["description"]
    )
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == f"{DOCS}/reference/alerts/"
    assert anchor == alert.name.lower()  # of the heading on the site; tests/agent/test_docs_site.py looks there
    severity = dict(re.findall(r"^- \*\*(\w+):\*\* (.+)$", read_entries()[alert.name], flags=re.MULTILINE))["Severity"]
    assert severity.startswith(f"{alert.severity} (") and f" {alert.hold.removesuffix('m')} minute" in severity


@each_row("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_asks_for_what_exists(alert) -> None:  # type: ignore[no-untyped-def]
    """Every metric and label of the expression is exported, and every pattern of codes matches a real code."""
    declared = {family.exposed: family for family in CATALOGUE}
    for name in re.findall(r"\btopoflight_\w+", alert.expr):
        assert name in declared, f"{alert.name}: nothing exports {name}"
    for name, selector in re.findall(r"\b(topoflight_\w+)\{([^}]*)\}", alert.expr):
        for label in re.findall(r"(\w+)(?:=~|!~|!=|=)\"", selector):
            assert label in declared[name].labels, f"{alert.name}: {name} has no label {label}"
    for pattern in re.findall(r'code=~"([^"]*)"', alert.expr):
        for part in pattern.replace("\\\\", "\\").split("|") if "(" not in pattern else [pattern.replace("\\\\", "\\")]:
            assert any(re.fullmatch(part, code) for code in ALL_CODES), f"{alert.name}: no code matches {part}"


def test_the_runbook_speaks_of_what_exists() -> None:
    """Metrics and codes that the runbook names are exported and known."""
    text = RUNBOOK.read_text(encoding="utf-8")
    assert set(re.findall(r"\btopoflight_\w+", text)) <= {family.exposed for family in CATALOGUE}
    firsts = "|".join(sorted({code.split(".")[0] for code in ALL_CODES}))
    named = set(re.findall(rf"\b(?:{firsts})\.[a-z_]+\.[a-z_0-9]+\b", text))
    assert named and named <= set(ALL_CODES)


def test_faults_that_an_operator_must_hear_of_have_an_alert() -> None:
    """Each kind of fault is matched by some expression."""
    for code in (
        "pci.peermem.missing", "rdma.port.down", "rdma.port.rate", "limits.memlock.low", "interfaces.choice.wrong",
        "pci.link.width", "gpu.nvlink.missing", "topology.nvlink.asymmetric", "gpu.xid.hardware", "gpu.device.lost",
    ):  # fmt: skip
        patterns = [p for alert in ALERTS for p in re.findall(r'code=~"([^"]*)"', alert.expr)]
        assert any(re.fullmatch(pattern.replace("\\\\", "\\"), code) for pattern in patterns), code


def test_heat_and_the_power_brake_are_critical_under_a_job() -> None:
    """Each has a warning for a GPU without a known job, and a critical alert for one with processes."""
    for name in ("TopoflightThermalThrottling", "TopoflightPowerBrake"):
        found = {alert.name: alert for alert in ALERTS if alert.name.startswith(name)}
        assert {each: alert.severity for each, alert in found.items()} == {
            name: "warning",
            f"{name}UnderJob": "critical",
        }
        assert all("topoflight_gpu_processes > 0" in alert.expr for alert in found.values())


def test_links_lead_where_the_operator_says() -> None:
    """Other addresses change the links of every rule and nothing else."""
    made, plain = generate.made("https://d.test/x/", "https://g.test", "https://p.test/fleet/"), generate.made()
    for name in ("dashboards/rules.yaml", "dashboards/rules_test.yaml", "deploy/monitoring/prometheusrule.yaml"):
        assert made[name].count("https://d.test/x/reference/alerts/#") == plain[name].count("https://docs.example/") > 0
        assert (
            made[name].count("https://g.test/d/topoflight-node?") == plain[name].count("https://grafana.example/") > 0
        )
        assert made[name].count("page_url: https://p.test/fleet/cluster") == plain[name].count("page_url: http://") > 0
        assert ".example" not in made[name] and "page_url: http://" not in made[name]


@pytest.mark.prometheus
def test_promtool_sees_the_page_of_the_node_by_its_name(programs, tmp_path):
    """With an address from outside the link names the node, and without a node's name it leads to the fleet."""
    made = generate.made(page="https://p.test/fleet/")
    whole = yaml.safe_load(made["dashboards/rules_test.yaml"])
    (named,) = [case for case in whole["tests"] if case["name"] == "TopoflightFactTooOld fires"]
    text = yaml.safe_dump(named)
    assert "page_url: https://p.test/fleet/cluster?node=node-a\n" in text
    odd = yaml.safe_load(text.replace("node-a", "a&b c").replace("?node=a&b c", "?node=a%26b+c"))
    bare = yaml.safe_load(
        text.replace(', node="node-a"', "").replace("?node=node-a", "").replace("node-a", "10.0.0.7:9402")
    )
    del bare["alert_rule_test"][0]["exp_alerts"][0]["exp_labels"]["node"]
    (tmp_path / "rules.yaml").write_text(made["dashboards/rules.yaml"])
    (tmp_path / "rules_test.yaml").write_text(yaml.safe_dump({**whole, "tests": [*whole["tests"], odd, bare]}))
    words = [programs["promtool"], "test", "rules", str(tmp_path / "rules_test.yaml")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


@pytest.mark.prometheus
def test_promtool_sees_each_alert_fire_and_stay_quiet(programs: dict[str, str]) -> None:
    """rules_test.yaml: a firing case, the wait before it, and a quiet case for every alert."""
    path = ROOT / "dashboards" / "rules_test.yaml"
    cases = yaml.safe_load(path.read_text())["tests"]
    assert {case["name"] for case in cases} == {f"{a.name} {does}" for a in ALERTS for does in ("fires", "is quiet")}
    done = subprocess.run([programs["promtool"], "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr
