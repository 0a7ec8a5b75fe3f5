"""Dashboards and alerts: one source, codes and metrics that exist, a runbook section each, promtool's own judgement.

The rules of dashboards are those of https://github.com/grafana/dashboard-linter/tree/main/docs (each is named at its
test).
"""

import json
import re
import subprocess
from collections.abc import Iterator

import generate
import promql_parser
import pytest
import yaml
from alerts import ALERTS, DOCS
from rigs.tables import ROOT, data_of, each_row

from agent.checks.findings import read_entries
from agent.checks.host_checks import ALL_CODES
from agent.metrics import CATALOGUE, OWN

FILES = sorted((ROOT / "dashboards").glob("*.json"))
DECLARED = {family.exposed: family for family in CATALOGUE}
NEED_UNITS = ("stat", "timeseries", "table", "gauge", "bargauge")


def panels_of(document: dict) -> list[dict]:
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for path in FILES:
        for each in json.loads(path.read_text())["annotations"]["list"]:
            yield f"{path.stem}: {each['name']}", each["expr"]
        for panel in panels_of(json.loads(path.read_text())):
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}: {target['refId']}", target["expr"]


EXPRESSIONS = dict(expressions())


every_board = each_row("document", lambda: (json.loads(path.read_text()) for path in FILES), ids=lambda d: d["uid"])


def test_there_are_three_with_stable_names() -> None:
    """A link to a dashboard stays good: uid and title are part of the surface."""
    found = {(d["uid"], d["title"]) for d in (json.loads(path.read_text()) for path in FILES)}
    assert found == {
        ("topoflight-cluster", "Topoflight / Cluster"),
        ("topoflight-node", "Topoflight / Node"),
        ("topoflight-runs", "Topoflight / Preflight and Runs"),
    }


@every_board
def test_model_is_classic(document: dict) -> None:
    """Classic JSON, which Grafana 10 to 13 loads, and no server's own id in it (rule uneditable-dashboard too)."""
    assert document["schemaVersion"] <= 42 and "apiVersion" not in document and "spec" not in document
    assert document.get("id") is None and document["editable"] is False
    assert document["tags"] == ["topoflight"] and document["description"]


@every_board
def test_variables(document: dict) -> None:
    """Rules template-datasource, template-job, template-instance, template-label-promql, template-on-time-change."""
    variables = {v["name"]: v for v in document["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert variables["datasource"]["label"] == "Data source" and variables["datasource"]["query"] == "prometheus"
    for name in ("job", "instance"):
        variable = variables[name]
        assert variable["type"] == "query" and variable["multi"] and variable["allValue"] == ".+"
        assert variable["label"] == name and variable["datasource"]["uid"] == "$datasource"
        assert variable["refresh"] == 2  # when the time range changes
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert match and match[2] == name
        promql_parser.parse(match[1].replace("$job", "x"))


@every_board
def test_panels(document: dict) -> None:
    """Rules panel-datasource, panel-title-description, panel-units, panel-no-targets; and no two in one place."""
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in panels_of(document):
        name = panel["title"]
        assert name and panel["description"].endswith("."), name
        assert panel["datasource"]["uid"] == "$datasource", name
        assert panel["targets"], name
        if panel["type"] in NEED_UNITS:
            assert panel["fieldConfig"]["defaults"]["unit"], name
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, name
        taken |= cells


@every_board
def test_changes_are_marked_at_their_time(document: dict) -> None:
    """A finding and a change are annotations where they came: a Unix time, which Grafana takes in milliseconds."""
    marked = {each["name"]: each for each in document["annotations"]["list"]}
    times = {"Findings": "topoflight_finding_since_seconds", "Changes": "topoflight_change_timestamp_seconds"}
    assert set(marked) == set(times)
    for name, metric in times.items():
        found = marked[name]
        assert found["enable"] and found["datasource"]["uid"] == "$datasource" and found["useValueForTime"] == "on"
        assert metric in found["expr"] and found["expr"].endswith(" * 1000")
        shown = set(re.findall(r"{{(\w+)}}", found["titleFormat"] + found["textFormat"])) | {found["tagKeys"]}
        by = re.search(r"max by \((.*?)\)", found["expr"])
        assert by and shown <= set(by[1].split(", ")), "a format names a label that the query drops"


@every_board
def test_dashboards_link_to_each_other(document: dict) -> None:
    """One menu leads from each to the others and takes variables and time along."""
    (link,) = document["links"]
    assert link["type"] == "dashboards" and link["tags"] == ["topoflight"]
    assert link["includeVars"] and link["keepTime"]


@each_row("name", sorted(EXPRESSIONS))
def test_expression(name: str) -> None:
    """Rules target-promql, target-job, target-instance, target-rate-interval, target-counter-agg; known names only."""
    expr = EXPRESSIONS[name]
    promql_parser.parse(expr.replace("$__rate_interval", "5m").replace("$job", "x").replace("$instance", "x"))
    selectors = re.findall(r"\b(topoflight_\w+|up)\{(.*?)\}(?=[\s)\[*/]|$)", expr)
    assert len(selectors) == len(re.findall(r"\btopoflight_\w+|\bup\b", expr)), f"{expr}: a metric without selector"
    for metric, inner in selectors:
        assert 'job=~"$job"' in inner and 'instance=~"$instance"' in inner, expr
        if metric == "up":
            continue
        assert metric in DECLARED, f"nothing exports {metric}"
        for label in re.findall(r"(\w+)(?:=~|!~|!=|=)\"", inner):
            assert label in {"job", "instance", *DECLARED[metric].labels}, f"{metric} has no label {label}"
        if DECLARED[metric].kind == "counter":
            assert re.search(r"(sum|max) by \(.*\) \((rate|increase)\(", expr), f"{expr}: a counter without a rate"
    known = {"instance", "job", "node"}.union(
        *(DECLARED[metric].labels for metric in re.findall(r"\btopoflight_\w+", expr))
    )
    for group in re.findall(r"by \(([^)]*)\)", expr):
        assert {label.strip() for label in group.split(",")} <= known, f"{expr}: what differs would be merged"
    for window in re.findall(r"\[(.*?)\]", re.sub(r'"[^"]*"', "", expr)):
        assert window == "$__rate_interval", expr


def test_every_family_that_a_person_would_look_at_is_drawn() -> None:
    """Families on no panel are named in undrawn.toml, with the reason: a new family is drawn or joins that list."""
    undrawn = data_of(__file__, "undrawn.toml")
    drawn = set(re.findall(r"\btopoflight_\w+", " ".join(EXPRESSIONS.values())))
    assert {family.exposed for family in OWN} - drawn == set(undrawn)


def test_config_maps_carry_the_same_dashboards() -> None:
    """What Grafana's sidecar loads is what is committed; each is small enough for a ConfigMap (1 MiB)."""
    text = (ROOT / "deploy" / "monitoring" / "dashboards.yaml").read_text()
    maps = list(yaml.safe_load_all(text))
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
    carried = {name: body for each in maps for name, body in each["data"].items()}
    assert carried == {f"topoflight-{path.name}": path.read_text() for path in FILES}
    assert max(map(len, carried.values())) < 1 << 20
    listed = yaml.safe_load((ROOT / "deploy" / "monitoring" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == ["dashboards.yaml", "prometheusrule.yaml"]


def test_making_again_gives_no_difference() -> None:
    """`python dashboards/generate.py` after a change of a source, and commit what it writes."""
    for name, text in generate.generate_files().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: run python dashboards/generate.py"


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
    assert anchor == alert.name.lower()  # of the heading on the site; tests/agent/test_docs_commands.py looks there
    severity = dict(re.findall(r"^- \*\*(\w+):\*\* (.+)$", read_entries()[alert.name], flags=re.MULTILINE))["Severity"]
    assert severity.startswith(f"{alert.severity} (") and f" {alert.hold.removesuffix('m')} minute" in severity


@each_row("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_asks_for_what_exists(alert) -> None:  # type: ignore[no-untyped-def]
    """Every metric and label of the expression is exported, and every pattern of codes matches a real code."""
    for name in re.findall(r"\btopoflight_\w+", alert.expr):
        assert name in DECLARED, f"{alert.name}: nothing exports {name}"
    for name, selector in re.findall(r"\b(topoflight_\w+)\{([^}]*)\}", alert.expr):
        for label in re.findall(r"(\w+)(?:=~|!~|!=|=)\"", selector):
            assert label in DECLARED[name].labels, f"{alert.name}: {name} has no label {label}"
    for pattern in re.findall(r'code=~"([^"]*)"', alert.expr):
        for part in pattern.replace("\\\\", "\\").split("|") if "(" not in pattern else [pattern.replace("\\\\", "\\")]:
            assert any(re.fullmatch(part, code) for code in ALL_CODES), f"{alert.name}: no code matches {part}"


def test_the_runbook_speaks_of_what_exists() -> None:
    """Metrics and codes that the runbook names are exported and known."""
    text = RUNBOOK.read_text(encoding="utf-8")
    assert set(re.findall(r"\btopoflight_\w+", text)) <= DECLARED.keys()
    firsts = "|".join(sorted({code.split(".")[0] for code in ALL_CODES}))
    named = set(re.findall(rf"\b(?:{firsts})\.[a-z_]+\.[a-z_0-9]+\b", text))
    assert named and named <= set(ALL_CODES)


def test_faults_that_an_operator_must_hear_of_have_an_alert() -> None:
    """Each kind of fault is matched by some expression."""
    for code in (
        "pci.peermem.missing", "rdma.port.down", "rdma.port.rate", "limits.memlock.low", "interfaces.choice.wrong",
        "pci.link.width", "gpu.nvlink.missing", "topology.nvlink.asymmetric", "gpu.xid.hardware", "gpu.device.lost",
        "gpu.device.missing",
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
    made, plain = (
        generate.generate_files("https://d.test/x/", "https://g.test", "https://p.test/fleet/"),
        generate.generate_files(),
    )
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
    made = generate.generate_files(page="https://p.test/fleet/")
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


def test_clusters_with_equal_node_names_stay_apart() -> None:
    """Where one ruler evaluates many clusters, an expression that matches by node needs the cluster as well."""
    assert [alert.name for alert in ALERTS if "(job" in alert.expr] == []


@pytest.mark.prometheus
def test_promtool_sees_each_alert_fire_and_stay_quiet(programs: dict[str, str]) -> None:
    """rules_test.yaml: a firing case, the wait before it, and a quiet case for every alert."""
    path = ROOT / "dashboards" / "rules_test.yaml"
    cases = yaml.safe_load(path.read_text())["tests"]
    assert {case["name"] for case in cases} == {f"{a.name} {does}" for a in ALERTS for does in ("fires", "is quiet")}
    done = subprocess.run([programs["promtool"], "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr
