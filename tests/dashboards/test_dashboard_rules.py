"""The committed dashboards keep the rules of grafana/dashboard-linter, and ask only for what is exported.

Specification: https://github.com/grafana/dashboard-linter/tree/main/docs (each rule is named at its test).
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import generate
import promql_parser
import yaml
from rigs.tables import ROOT, each_row

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
    undrawn = tomllib.loads(Path(__file__).with_name("undrawn.toml").read_text())
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
    for name, text in generate.made().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: run python dashboards/generate.py"
