"""The Helm chart says what the Kustomize overlays say, takes what its values promise, and is packed whole."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubectl_layer import helm
from kustomization import LOADER, render
from rigs.tables import each_row
from test_deploy_manifests import CUSTOM, OVERLAYS

from agent.checks.expect import KEYS, read_file
from agent.checks.verdict import GateError

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy/chart"
Document = dict[str, Any]
# overlay -> values files and settings
VALUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((), ()),
    "kubernetes": (("kubernetes",), ()),
    "host-network": (("kubernetes", "host-network"), ()),
    "openshift": (("openshift",), ()),
    "openshift-host-network": (("openshift", "host-network"), ()),
    "eks-efa": (("eks-efa",), ()),
    "prometheus-operator": (("kubernetes",), ("monitoring.enabled=true",)),
}


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


def test_what_no_overlay_sets_arrives_and_is_strictly_valid() -> None:
    """Every other value, in a namespace of another name."""
    values = {
        "image": {"repository": "your.registry/topoflight", "tag": "9"}, "privileged": True,
        "driverPaths": ["/host/opt/nvidia", "/opt/x"], "networks": "default/rail-1,default/rail-2",
        "imagePullSecrets": [{"name": "mine"}], "resources": {"limits": {"memory": "1Gi"}},
        "nodeSelector": {"pool": "a"},
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "nodeAffinity": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}], "priorityClassName": "theirs",
        "podLabels": {"team": "x", "app.kubernetes.io/name": "another"}, "podAnnotations": {"note": "y"},
        "node": {"root": True, "devices": False, "mountPropagation": "HostToContainer"},
        "expect": {"gpus": 8}, "prices": {"p5.48xlarge": 55.04}, "ownNode": True,
        "tolerations": [{"key": "mine", "operator": "Equal", "value": "x", "effect": "NoSchedule"}],
        "monitoring": {"enabled": True, "namespaces": ["watch"], "labels": {"release": "prom"}, "docsUrl": "https://d.test/x/",
                       "grafanaUrl": "https://g.test", "pageUrl": "https://p.test/fleet/"},
    }  # fmt: skip
    words = [w for key, value in values.items() for w in ("--set-json", f"{key}={json.dumps(value)}")]
    documents = template(*words, "--namespace", "elsewhere")
    for document in documents:
        if not document["apiVersion"].startswith(CUSTOM):
            kubernetes_validate.validate(document, "1.35", strict=True)
    assert {d["metadata"].get("namespace", "elsewhere") for d in documents} == {"elsewhere"}
    assert "registry.example" not in json.dumps([d for d in documents if d["kind"] in ("DaemonSet", "Deployment")])
    found = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    pod = found["DaemonSet", "topoflight"]["spec"]["template"]
    (agent,) = pod["spec"]["containers"]
    assert agent["image"] == "your.registry/topoflight:9" and pod["spec"]["tolerations"] == values["tolerations"]
    spec = pod["spec"]
    assert {key: spec[key] for key in ("imagePullSecrets", "nodeSelector", "priorityClassName")} == {
        key: values[key] for key in ("imagePullSecrets", "nodeSelector", "priorityClassName")
    }
    assert set(spec["affinity"]) == {"nodeAffinity", "podAntiAffinity"} and agent["resources"] == values["resources"]
    for kind in ("PodMonitor", "PrometheusRule"):
        labels = found[kind, "topoflight"]["metadata"]["labels"]
        assert labels == {"app.kubernetes.io/name": "topoflight", "release": "prom"}, kind
    assert pod["metadata"]["labels"] == {"team": "x", "app.kubernetes.io/name": "topoflight"}, "the selector's"
    assert pod["metadata"]["annotations"]["note"] == "y"
    (mount,) = [one for one in agent["volumeMounts"] if one["name"] == "host"]
    assert mount["mountPropagation"] == "HostToContainer"
    assert agent["securityContext"]["privileged"] and "allowPrivilegeEscalation" not in agent["securityContext"]
    assert {"name": "TOPOFLIGHT_DRIVER_PATHS", "value": "/host/opt/nvidia:/opt/x"} in agent["env"]
    assert agent["args"][-2:] == ["--allowed-host", "p.test"], "or reads under the name in the alerts are refused"
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == values["networks"]
    data = found["ConfigMap", "topoflight-expect"]["data"]
    assert {name: yaml.safe_load(text) for name, text in data.items()} == {
        "expect.yaml": values["expect"], "prices.yaml": values["prices"],
    }  # fmt: skip
    binding = found["ValidatingAdmissionPolicyBinding", "topoflight-own-labels"]["spec"]["matchResources"]
    assert binding["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "elsewhere"}
    policy = found["NetworkPolicy", "topoflight"]["spec"]["ingress"][0]["from"][0]["namespaceSelector"]
    assert policy["matchExpressions"][0]["values"] == ["watch"]
    for rule in found["PrometheusRule", "topoflight"]["spec"]["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"].startswith("https://d.test/x/reference/alerts/#")
        assert rule["annotations"]["dashboard_url"].startswith("https://g.test/d/topoflight-node?")
        wanted = (
            "https://p.test/fleet/cluster{{with $labels.node}}?node={{.|urlquery}}{{end}}"  # as dashboards/generate.py
        )
        assert rule["annotations"]["page_url"] == wanted


def test_lint_finds_nothing_and_a_value_that_is_none_is_named() -> None:
    """A misspelt value is refused, and said which."""
    assert not re.search(r"WARNING|ERROR", helm("lint", "--strict", str(CHART)).stdout)
    both = "node.mountPropagation=HostToContainer,node.recursiveReadOnly=Enabled"
    for setting, named in (("runtimeClas=nvidia", "runtimeClas"), ("hostNetwork=maybe", "hostNetwork"),
                           ("expect.gpus=x", "gpus"), ("node.mountPropagation=Both", "Propagation"),
                           ("expect.shm=16X", "shm"), ("expect.rate=mlx5_[0-7]:0", "rate"),
                           ("expect.interface=net 1", "interface"), (both, "/node")):  # fmt: skip
        done = helm("template", str(CHART), "--set", setting, check=False)
        assert done.returncode and named in done.stderr, setting


# key -> values that the agent takes, values that it refuses
EXPECTATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "gpus": ([0, 8, 1024, "8", "008"], [-1, 1025, 8.5, "x", "-1", "1025", "8.0", "", "٨", True, None, [8], {}]),
    "gpu": (["H100", "A100-SXM4-80GB", "x" * 64], ["", "100", "x" * 65, "H\n1", "é1", 100, True, None, ["H100"]]),
    "nvlink": ([1, 18, 99, "NV18", "nv04", "18"], [0, -3, 100, 999, "SYS", "NV0", "NV", "NV 18", "0", None, ["NV18"]]),
    "hcas": ([0, 8, "8", "mlx5_[0-3]:4", [], [8], ["mlx5_[0-3]:4", "mlx5_9:1"], [1] * 64],
             [-1, 1025, "x9", "mlx5_0", ":8", "mlx5_0:", "a:b:4", "a" * 65 + ":1", None, True, [None], [[8]], [-1],
              [1] * 65]),
    "rate": ([1, 400, 99999, "400", "200Gb/s", "200 gbps", "0400G", "mlx5_[0-7]:400", "a:100Gbit/s", [400, "a:200"]],
             [0, -5, 100000, 0.5, "0", "abc5", "mlx5_[0-7]:0", "400 Mb/s", "a:b", "400Gbs", None, ["x"], [0]]),
    "gdr": ([True, "on", "ON", "oN"], [False, "off", "yes", "true", 1, None, [True]]),
    "memlock": (["unlimited", "Unlimited", "8Mi", "8 mib", 65536, 0],
                ["8much", "much", "unlimited ", -1, "-1", "1e9", True, None]),
    "shm": (["64GiB", "16 G", " 1.5T ", "65536", "7B", 0, 10**12, 1.5],
            ["16X", "16 parsecs", -4, "-4", "", "G", "1,5G", "1e9", "9" * 19, 10**19, "16Pi", "iB", None, ["64G"]]),
    "interface": (["net1", "net*", "eth0.100", "a:1", "10g", [], ["net1", "rail-?"], ["a"] * 64],
                  ["", "net 1", "1", "net/1", "a" * 65, "é", 1, 1.5, True, None, [1], [""], [None], ["a"] * 65]),
    "driver": ([570, 570.86, 0, "570", "570.86", "570.86.15", "1.2.3.4"],
               [-1, -570.5, 1000000, "...", "5.", ".5", "new", "1.2.3.4.5", "1234567", "", "570-open", True, None,
                [570]]),
}  # fmt: skip


def test_the_chart_takes_the_expectations_that_the_agent_takes(tmp_path: Path) -> None:
    """Each value is put to the chart's schema and, as the release's ConfigMap has it, to the agent."""
    schema = jsonschema.Draft202012Validator(json.loads((CHART / "values.schema.json").read_text()))
    assert set(schema.schema["properties"]["expect"]["properties"]) == set(EXPECTATIONS) == set(KEYS)
    rows = [({key: value}, right) for key, columns in EXPECTATIONS.items()
            for right, values in zip((True, False), columns, strict=True) for value in values]  # fmt: skip
    file, wrong = tmp_path / "expect.yaml", []
    for value, right in [
        *rows,
        ({"gpuz": 8}, False),
        ({key: taken[0] for key, (taken, _) in EXPECTATIONS.items()}, True),
    ]:
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
    assert {kind for kind, place, _ in more if not place} == {"ClusterRoleBinding", "ValidatingAdmissionPolicyBinding"}
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


def test_each_values_file_is_complete_by_itself() -> None:
    """As the head comment of values.yaml installs it: a restricted namespace has no pod that mounts its node."""
    for path in sorted(CHART.glob("values-*.yaml")):
        values = yaml.safe_load(path.read_text())
        documents = template("--values", str(path), "--set", "namespace.create=true")
        (own,) = [d for d in documents if d["kind"] == "Namespace" and d["metadata"]["name"] == "topoflight"]
        (daemonset,) = [d for d in documents if d["kind"] == "DaemonSet"]
        paths = [v["hostPath"] for v in daemonset["spec"]["template"]["spec"]["volumes"] if "hostPath" in v]
        level = own["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        assert (level == "restricted") is not (bool(paths) or bool(values.get("hostNetwork"))), path.name


def test_the_packed_chart_renders_as_the_checkout_does(tmp_path: Path) -> None:
    """`helm package` follows the links into deploy/, so that whoever pulls the chart has all of it."""
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
