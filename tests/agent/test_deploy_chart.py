"""The Helm chart says what the Kustomize overlays say, takes what its values promise, and is packed whole."""

import difflib
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml
from kustomization import LOADER, helm, render
from rigs.tables import ROOT, each_row, rows_of
from test_deploy_manifests import CUSTOM, OVERLAYS

from agent.checks.expect import KEYS, read_file
from agent.checks.verdict import GateError

CHART = ROOT / "deploy/chart"
Document = dict
CHANGED_BY_VALUES = ("ConfigMap", "DaemonSet", "NetworkPolicy", "PodMonitor")
VALUES = rows_of(__file__)("overlays")()


def template(*words: str, chart: str | Path = CHART) -> list[Document]:
    """What the chart renders."""
    said = helm("template", "topoflight", str(chart), "--namespace", "topoflight", *words).stdout
    return [document for document in yaml.load_all(said, Loader=LOADER) if document]


def by_name(documents: list[Document]) -> dict[tuple[str, str, str], Document]:
    found = {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]): d for d in documents}
    assert len(found) == len(documents), "an object twice"
    return found


@each_row("overlay", [path.name for path in OVERLAYS])
def test_the_chart_renders_what_the_overlay_renders(overlay: str) -> None:
    """Object by object; with the Namespace, which Helm's own --create-namespace would make."""
    files, settings = VALUES[overlay]
    words = [word for name in files for word in ("--values", str(CHART / f"values-{name}.yaml"))]
    words += [word for one in ("namespace.create=true", *settings) for word in ("--set", one)]
    made, wanted = by_name(template(*words)), by_name(render(ROOT / "deploy/daemonset/overlays" / overlay))
    assert made.keys() == wanted.keys()
    for key, document in wanted.items():
        assert made[key] == document, key


def test_golden_values_that_no_overlay_sets_arrive_and_are_valid(golden):
    """Every other value, in a namespace of another name: the golden is what chart_values.yaml changes."""
    values = Path(__file__).with_name("chart_values.yaml")
    documents = template("--values", str(values), "--namespace", "elsewhere")
    for document in documents:
        if not document["apiVersion"].startswith(CUSTOM):
            kubernetes_validate.validate(document, "1.35", strict=True)
    assert {d["metadata"].get("namespace", "elsewhere") for d in documents} == {"elsewhere"}
    usual, made = (
        yaml.safe_dump_all(d for d in rendered if d["kind"] in CHANGED_BY_VALUES).splitlines()
        for rendered in (
            template("--namespace", "elsewhere", "--set", "monitoring.enabled=true,expect.gpus=1"),
            documents,
        )
    )
    difference = difflib.unified_diff(usual, made, "usual", "with the values", n=1, lineterm="")
    golden("chart_values.diff", "".join(re.sub("^@@.*", "@@", line) + "\n" for line in difference))
    (alerts,) = (d for d in documents if d["kind"] == "PrometheusRule")
    assert alerts["metadata"]["labels"] == {"app.kubernetes.io/name": "topoflight", "release": "prom"}
    for rule in alerts["spec"]["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"].startswith("https://d.test/x/reference/alerts/#")
        assert rule["annotations"]["dashboard_url"].startswith("https://g.test/d/topoflight-node?")
        # as dashboards/generate.py
        page = "https://p.test/fleet/cluster{{with $labels.node}}?node={{.|urlquery}}{{end}}"
        assert rule["annotations"]["page_url"] == page


def test_lint_finds_nothing_and_a_value_that_is_none_is_named() -> None:
    """A misspelt value is refused, and said which."""
    assert not re.search(r"WARNING|ERROR", helm("lint", "--strict", str(CHART)).stdout)
    both = "node.mountPropagation=HostToContainer,node.recursiveReadOnly=Enabled"
    for setting, named in (("runtimeClas=nvidia", "runtimeClas"), ("hostNetwork=maybe", "hostNetwork"),
                           ("expect.gpus=x", "gpus"), ("apiServerPorts={0}", "apiServerPorts"),
                           ("node.mountPropagation=Both", "Propagation"),
                           ("expect.rate=mlx5_[0-7]:0", "rate"),
                           ("expect.interface=net 1", "interface"), (both, "/node")):  # fmt: skip
        done = helm("template", str(CHART), "--set", setting, check=False)
        assert done.returncode and named in done.stderr, setting


def test_the_chart_takes_the_expectations_that_the_agent_takes(tmp_path: Path) -> None:
    """Each value is put to the chart's schema and, as the release's ConfigMap has it, to the agent."""
    schema = jsonschema.Draft202012Validator(json.loads((CHART / "values.schema.json").read_text()))
    known = yaml.safe_load((ROOT / "tests/agent/expectations.yaml").read_text(encoding="utf-8"))["values"]
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    places = {
        "deploy/chart/values.schema.json": schema.schema["properties"]["expect"]["properties"],
        "tests/agent/expectations.yaml, values": known,
        "docs/reference/configuration.md": re.findall(r"^\| `([a-z]+)` \| `", page, re.MULTILINE),
    }
    wrong = [f"{where}: {key}" for where, keys in places.items() for key in sorted(KEYS.keys() ^ {*keys})]
    assert not wrong, f"not the keys of agent/checks/expect.py: {wrong}"
    rows = [({key: value}, column == "taken") for key, columns in known.items() for column in columns
            for value in columns[column]]  # fmt: skip
    rows += [({key: [one] * many}, many == 64) for key, one in (("hcas", 1), ("interface", "a")) for many in (64, 65)]
    rows += [({"gpuz": 8}, False), ({key: columns["taken"][0] for key, columns in known.items()}, True)]
    file, wrong = tmp_path / "expect.yaml", []
    for value, right in rows:
        file.write_text(yaml.safe_dump(value), encoding="utf-8")
        try:
            read_file(file)
            understood = True
        except GateError:
            understood = False
        if not (schema.is_valid({"expect": value}) is understood is right):
            wrong.append((value, schema.is_valid({"expect": value}), understood))
    assert not wrong, wrong


def test_no_release_contains_an_expectation_that_is_not_its_own() -> None:
    """The ConfigMap has one owner: the release only where its values say what to expect."""
    for words, contained in (((), False), (("expect.gpus=8",), True), (("prices.a=1",), True)):
        made = template(*(word for one in words for word in ("--set", one)))
        assert (("ConfigMap", "topoflight", "topoflight-expect") in by_name(made)) is contained, words


@each_row("files", [(), ("kubernetes",), ("openshift",), ("eks-efa",), ("openshift", "host-network")])
def test_a_further_release_shares_nothing_with_the_first(files: tuple[str, ...]) -> None:
    """Helm refuses an object that another release has; its agents have the rights that the first one's have."""
    words = [word for name in files for word in ("--values", str(CHART / f"values-{name}.yaml"))]
    words += ["--set", "monitoring.enabled=true"]
    first = by_name(template(*words, "--set", "priorityClassName=its-own"))
    more = by_name(template(*words, "--namespace", "pool-b", "--set", "clusterObjects=false"))
    assert not first.keys() & more.keys()
    assert {kind for kind, place, _ in more if not place} == {"ClusterRoleBinding"}
    for (kind, _, name), document in more.items():
        if kind == "DaemonSet":
            priority = document["spec"]["template"]["spec"]["priorityClassName"]
            assert ("PriorityClass", "", priority) in first, "no pod is admitted without its class"
        if kind == "ClusterRoleBinding":
            assert document["subjects"][0]["namespace"] == "pool-b" and document["roleRef"]["name"] in {
                role for kind_of, _, role in first if kind_of == "ClusterRole"
            }, name


def test_the_notes_and_the_mount_follow_the_values() -> None:
    """What restricts the agents to nodes is named; mounts below the node's root are read-only where a value says so."""
    for settings, named in (((), "tolerations."), (("nodeSelector.pool=a",), "tolerations, nodeSelector.")):
        words = [word for one in settings for word in ("--set", one)]
        printed = helm("install", "topoflight", str(CHART), "--dry-run=client", *words).stdout.partition("NOTES:")[2]
        assert f"every node that these values allow: {named}" in printed, settings
    (agents,) = [d for d in template("--set", "node.recursiveReadOnly=IfPossible") if d["kind"] == "DaemonSet"]
    (mount,) = [
        one for one in agents["spec"]["template"]["spec"]["containers"][0]["volumeMounts"] if one["name"] == "host"
    ]
    assert mount == {"name": "host", "mountPath": "/host", "readOnly": True, "recursiveReadOnly": "IfPossible"}
    kubernetes_validate.validate(agents, "1.35", strict=True)


@each_row("path", sorted(CHART.glob("values-*.yaml")))
def test_each_values_file_is_complete_by_itself(path: Path) -> None:
    """As the head comment of values.yaml installs it: a restricted namespace has no pod that mounts its node."""
    documents = template("--values", str(path), "--set", "namespace.create=true")
    (own,) = [d for d in documents if d["kind"] == "Namespace" and d["metadata"]["name"] == "topoflight"]
    (daemonset,) = [d for d in documents if d["kind"] == "DaemonSet"]
    paths = [v["hostPath"] for v in daemonset["spec"]["template"]["spec"]["volumes"] if "hostPath" in v]
    level = own["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert (level == "restricted") is not bool(paths or yaml.safe_load(path.read_text()).get("hostNetwork"))


def test_the_packed_chart_renders_as_the_checkout_does(tmp_path: Path) -> None:
    """`helm package` follows the links into deploy/, so that a user who pulls the chart has all of it."""
    helm("package", str(CHART), "--destination", str(tmp_path))
    (packed,) = tmp_path.glob("*.tgz")
    assert template(chart=packed) == template()


def test_every_version_is_that_of_pyproject() -> None:
    """One place to change; this names the others."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (version, version)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs/examples").iterdir()]
    pages += [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and "chart" not in path.parts]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        told = re.findall(r"(?:topoflight(?:-finetune)?:|image\.version=\"|newTag: )(\d+\.\d+\.\d+)", text)
        assert set(told) <= {version}, path
