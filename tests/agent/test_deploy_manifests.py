"""What is shipped: overlays, chart, images, wheel."""

import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import man_page
import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from kustomization import CLUSTER_SCOPED, LOADER, helm, render
from rigs import crds
from rigs.command import parse
from rigs.tables import PYPROJECT, ROOT, each_row, hold_file, rows_of

from agent.checks.expect import KEYS, read_file
from agent.checks.findings import PAGES
from agent.checks.verdict import GateError

OVERLAYS = sorted((ROOT / "deploy/daemonset/overlays").iterdir())
ADDITIONS = [ROOT / "deploy/daemonset/overlays/prometheus-operator/monitoring"]
BENCH = [ROOT / "deploy/bench/job", ROOT / "deploy/bench/openshift", ROOT / "deploy/bench/search"]
FOLDERS = [ROOT / "deploy/daemonset/base", *OVERLAYS, *ADDITIONS, *BENCH]
CUSTOM = ("monitoring.coreos.com", "security.openshift.io")
Document = dict

every_folder = each_row("folder", FOLDERS, ids=lambda p: p.name)
every_overlay = each_row("folder", OVERLAYS, ids=lambda p: p.name)


def daemonset(folder: Path) -> Document:
    return next(d for d in render(folder) if d["kind"] == "DaemonSet")


@every_folder
def test_rendered_objects_are_strictly_valid(folder: Path) -> None:
    """As the API server with strict field validation would judge them."""
    documents = render(folder)
    seen = {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents}
    assert len(seen) == len(documents), "an object twice"
    for document in documents:
        if not document["apiVersion"].startswith(CUSTOM):
            kubernetes_validate.validate(document, "1.35", strict=True)


def objects() -> list[Document]:
    return [document for folder in FOLDERS for document in render(folder)]


@pytest.mark.corpus
@each_row("document", lambda: [d for d in objects() if d["apiVersion"].startswith(CUSTOM[0])])
def test_custom_objects_hold_no_field_their_api_would_drop(document: Document, corpus: Path) -> None:
    """The CRDs' own schemas, unknown fields refused."""
    crds.validate(corpus, document)


@every_overlay
def test_the_agent_has_no_privilege(folder: Path) -> None:
    """Non-root, no capability, read-only root, no host namespace but in the overlay that is named for it."""
    spec = daemonset(folder)["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert "privileged" not in context
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz", "liveness must not touch a driver"
        assert not [name for name in container["resources"]["limits"] if "/" in name], "the agent takes no device"
    assert {"hostPID", "hostIPC"}.isdisjoint(spec)
    assert spec.get("hostNetwork", False) is folder.name.endswith("host-network")
    paths = {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert paths == ({"/", "/dev/null"} if folder.name == "plain" else set())
    mounts = {mount["name"]: mount for container in spec["containers"] for mount in container["volumeMounts"]}
    assert "host" not in mounts or mounts["host"]["readOnly"]
    assert "mountPropagation" not in mounts.get("host", {}), "refused where the node's root is a private mount"


@every_overlay
def test_namespace_label_fits_the_pods(folder: Path) -> None:
    """Restricted, but where the host's network or its files are asked for, which only privileged allows."""
    (own,) = [d for d in render(folder) if d["kind"] == "Namespace" and d["metadata"]["name"] == "topoflight"]
    wanted = "privileged" if folder.name.endswith("host-network") or folder.name == "plain" else "restricted"
    assert {own["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "warn")} == {wanted}
    if folder.name == "plain":  # it asks nothing of a cluster: no operator's class, no label of a node
        assert not {"runtimeClassName", "affinity", "nodeSelector"} & set(daemonset(folder)["spec"]["template"]["spec"])


def test_a_second_apply_changes_nothing() -> None:
    """What the API server completes inside a list that it compares as one, the manifest says itself.

    Else kubectl sends the list at each apply, and says "configured". Seen with kube-apiserver 1.36, where all overlays
    are now "unchanged"; Kubernetes API reference: DownwardAPIVolumeSource.items,
    RuleWithOperations.scope; prometheus-operator's RelabelConfig.action.
    """
    specs = [document.get("spec", {}) for document in objects()]
    volumes = [one for spec in specs for one in spec.get("template", {}).get("spec", {}).get("volumes", ())]
    items = [item for volume in volumes for item in volume.get("downwardAPI", {}).get("items", ())]
    rules = [rule for spec in specs for rule in spec.get("matchConstraints", {}).get("resourceRules", ())]
    changes = [rule for spec in specs for one in spec.get("podMetricsEndpoints", ()) for rule in one["relabelings"]]
    assert items and {item["fieldRef"].get("apiVersion") for item in items} == {"v1"}
    assert rules and {rule["scope"] for rule in rules} == {"*"}
    assert changes and all(rule["action"] for rule in changes)


def admits(policy: Document, namespace: str, labels: dict[str, str] | None = None) -> bool:
    """Whether a policy of this shape lets pods of a namespace in (NetworkPolicy v1, namespaceSelector)."""
    told = {"kubernetes.io/metadata.name": namespace, **(labels or {})}

    def fits(selector: Document) -> bool:
        wanted = selector.get("matchLabels", {}).items()
        return all(told.get(key) == value for key, value in wanted) and all(
            one["operator"] == "In" and told.get(one["key"]) in one["values"]
            for one in selector.get("matchExpressions", ())
        )

    sources = [source for rule in policy["spec"].get("ingress", ()) for source in rule["from"]]
    assert all(set(source) == {"namespaceSelector"} for source in sources)
    return any(fits(source["namespaceSelector"]) for source in sources)


@every_overlay
def test_monitoring_reaches_the_agents(folder: Path) -> None:
    """Other namespaces only where an administrator has labelled them; every pod that we run has a policy."""
    documents = render(folder)
    policies = {d["metadata"]["name"]: d for d in documents if d["kind"] == "NetworkPolicy"}
    for kind in ("DaemonSet", "Deployment"):
        for made in (d for d in documents if d["kind"] == kind):
            policy = policies[made["metadata"]["name"]]
            assert policy["metadata"]["namespace"] == made["metadata"]["namespace"]
            selected = policy["spec"]["podSelector"]["matchLabels"]
            assert selected and selected.items() <= made["spec"]["template"]["metadata"]["labels"].items()
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
            assert not any(admits(policy, name) for name in ("default", "training", "topoflight", "kube-system"))
    agents = policies["topoflight"]
    openshift = ("openshift-monitoring", "openshift-user-workload-monitoring")
    for name in openshift if "openshift" in folder.name else ("monitoring",):
        assert admits(agents, name)
    assert admits(agents, "training", {"topoflight.io/access": "true"})


@each_row("name", ["plain", "kubernetes", "prometheus-operator"])
def test_an_overlay_of_ones_own_moves_the_agents(name: str, tmp_path: Path) -> None:
    """The kustomization of the Kubernetes page, in another namespace: rights, image and Secret arrive there."""
    page = (ROOT / "docs/how-to/deploy-kubernetes.md").read_text(encoding="utf-8")
    (text,) = re.findall(r" *```yaml\n *# mine/kustomization.yaml\n(.*?) *```", page, re.S)
    own = yaml.safe_load(text)
    place = (ROOT / "deploy/daemonset/overlays" / name).relative_to(ROOT)
    (more,) = re.findall(r" *```yaml\n *# more of mine/kustomization.yaml[^\n]*\n(.*?) *```", page, re.S)
    own |= yaml.safe_load(more.replace("NAME", "elsewhere")) | {"resources": [f"checkout/{place}"]}
    (tmp_path / "checkout").mkdir()
    shutil.copytree(ROOT / "deploy", tmp_path / "checkout/deploy", symlinks=True)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
    documents = render(tmp_path)
    assert not [d for d in documents if d["kind"] in CLUSTER_SCOPED and "namespace" in d["metadata"]]
    places = {d["metadata"].get("namespace") for d in documents}
    places |= {one.get("namespace") for d in documents for one in d.get("subjects", ())}
    assert places - {None} == {"elsewhere"}
    assert [d["metadata"]["name"] for d in documents if d["kind"] == "Namespace"] == ["elsewhere"]
    (account,) = [d for d in documents if d["kind"] == "ServiceAccount"]
    assert account["imagePullSecrets"] == [{"name": "YOUR-SECRET"}]
    assert "your.registry/topoflight" in str(documents) and "registry.example/topoflight:" not in str(documents)


def test_daemonset_arguments_are_understood() -> None:
    """The arguments in the manifests are options that exist."""
    for folder in (ROOT / "deploy/daemonset/overlays/kubernetes", ROOT / "deploy/bench/job", BENCH[-1]):
        for document in render(folder):
            template = document.get("spec", {}).get("template")
            for container in template["spec"]["containers"] if template else ():
                parse(container["args"])


def test_bench_pods_ask_for_what_they_use_and_meet_by_name() -> None:
    """IPC_LOCK and nothing else, one pod per node, a headless Service named as the rendezvous."""
    documents = {d["kind"]: d for d in render(ROOT / "deploy/bench/job")}
    job, service = documents["Job"], documents["Service"]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == container["resources"]["requests"]["nvidia.com/gpu"]
    assert service["spec"]["clusterIP"] == "None" and spec["subdomain"] == service["metadata"]["name"]
    assert f"--rendezvous={job['metadata']['name']}-0.{spec['subdomain']}:29400" in container["args"]
    assert f"--nodes={job['spec']['completions']}" in container["args"]
    assert documents["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


@each_row("name", ["openshift", "openshift-host-network"])
def test_openshift_picks_the_users(name: str) -> None:
    """restricted-v2 and hostnetwork-v2 refuse a fixed user: neither the overlay nor what is applied with it has one.

    Nor have the benchmark's pods, which the overlay's own SCC admits.
    """
    overlay, job = render(ROOT / "deploy/daemonset/overlays" / name), render(ROOT / "deploy/bench/openshift")
    (scc,) = [d for d in overlay if d["kind"] == "SecurityContextConstraints"]
    (pod,) = [d["spec"]["template"]["spec"] for d in job if d["kind"] == "Job"]
    assert scc["runAsUser"] == {"type": "MustRunAsRange"} and set(scc["volumes"]) >= {"emptyDir", "downwardAPI"}
    assert pod["containers"][0]["securityContext"]["capabilities"]["add"] == scc["allowedCapabilities"]
    additions = [d for f in ADDITIONS for d in render(f)]
    for document in (*overlay, *job, *additions):
        fixed = re.search("runAs(User|Group)", str(document.get("spec", {}).get("template")))
        assert not fixed, document["metadata"]["name"]
    here, there = ({(d["kind"], d["metadata"]["name"]) for d in documents} for documents in (additions, overlay))
    assert not here & there, "what is applied with an overlay brings no second agent"
    assert {d["metadata"].get("namespace", "topoflight") for d in additions} == {"topoflight"}


CHART = ROOT / "deploy/chart"
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
    version = PYPROJECT["project"]["version"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (version, version)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs/examples").iterdir()]
    pages += [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and "chart" not in path.parts]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        told = re.findall(r"(?:topoflight(?:-finetune)?:|image\.version=\"|newTag: )(\d+\.\d+\.\d+)", text)
        assert set(told) <= {version}, path


IMAGES = ROOT / "deploy/images"


@each_row("name", ["Containerfile.agent", "Containerfile.finetune"])
def test_one_digest_pins_every_stage_and_the_user_is_a_number_that_is_not_root(name: str) -> None:
    """What --build-arg PYTHON_IMAGE names is all that comes from a registry; runAsNonRoot can check only a number.

    Group 0 is what OpenShift's arbitrary users have.
    """
    lines = (IMAGES / name).read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    copied = [line for line in lines if line.startswith("COPY --from=")]
    assert set(bases) == {"${PYTHON_IMAGE}", "packages"} and copied
    assert all(line.split()[1] in ("--from=packages", "--from=project") for line in copied)
    assert sum(line.startswith("ARG PYTHON_IMAGE=") for line in lines) == 1
    last = (IMAGES / name).read_text().split("\nFROM ")[-1]
    (user,) = [line.split()[1] for line in last.splitlines() if line.startswith("USER ")]
    uid, gid = user.split(":")
    assert int(uid) > 0 and gid == "0"


def test_the_build_context_is_what_the_images_copy() -> None:
    """The context holds the sources of the COPY lines alone: no history, environment, test or secret."""
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    let_in = {line.removeprefix("!") for line in rest if line.startswith("!")}
    copied = {source for path in IMAGES.glob("Containerfile.*") for line in path.read_text().splitlines()
              if line.startswith("COPY ") and "--from" not in line for source in shlex.split(line)[1:-1]}  # fmt: skip
    assert first == "*" and "**/__pycache__" in rest
    assert all(any(source == one or source.startswith(f"{one}/") for one in let_in) for source in copied), copied
    assert not [one for one in let_in if one.split("/")[0] in (".git", ".venv", ".cache", "tests", "reports")]


def test_both_images_are_built_from_every_package(tmp_path: Path) -> None:
    """A package, or a file next to the packages, that is added to the wheel is added to the images."""
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in ("agent", "finetune"):
        copied = (IMAGES / f"Containerfile.{name}").read_text()
        assert [p for p in packages["packages"] if f"COPY {p} /src/{p}\n" not in copied] == []
        words = {word for line in copied.splitlines() if line.startswith("COPY ") for word in line.split()}
        assert set(packages["force-include"]) - words == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is."""
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))))


def test_what_the_wheel_carries(wheel: Path) -> None:
    """Of each package the mark that it is typed; the definition; what a shell and man(1) look for below the prefix."""
    with zipfile.ZipFile(wheel) as inside:
        names = set(inside.namelist())
        definition = yaml.safe_load(inside.read("agent/data/nodetopology-crd.yaml"))
        values = json.loads(inside.read("agent/data/chart-values.schema.json"))
        pages = {name: inside.read(f"agent/checks/pages/{name}.md") for name in PAGES}
    assert definition["kind"] == "CustomResourceDefinition" and values["type"] == "object"
    assert pages == {name: (ROOT / f"docs/reference/{name}.md").read_bytes() for name in pages}, "what `explain` reads"
    for package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"{package}/py.typed" in names
    shared = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}
    assert shared == {
        "share/man/man1/topoflight.1", "share/bash-completion/completions/topoflight",
        "share/zsh/site-functions/_topoflight", "share/fish/vendor_completions.d/topoflight.fish",
    }  # fmt: skip
    version = PYPROJECT["project"]["version"]
    assert wheel.name == f"topoflight-{version}-py3-none-any.whl"


@pytest.mark.long
def test_the_wheel_starts_by_name_from_a_file(wheel: Path, tmp_path: Path) -> None:
    """As `uvx --from FILE topoflight` has it: in a separate environment, which sees the packages of this one."""
    venv.create(tmp_path / "own", symlinks=True)
    python = tmp_path / "own/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=300)
    packages = "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
    (next((tmp_path / "own/lib").glob("python*/site-packages")) / "these.pth").write_text(packages)
    command = str(tmp_path / "own/bin/topoflight")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for words, said in ((["--version"], f"version {PYPROJECT['project']['version']}"),
                        (["explain", "rdma.port.down"], "rdma.port.down")):  # fmt: skip
        done = subprocess.run([command, *words], capture_output=True, text=True, cwd=tmp_path, env=clean, check=True)
        assert said in done.stdout
    asked = {**clean, "_TOPOFLIGHT_COMPLETE": "bash_complete", "COMP_WORDS": "topoflight rec", "COMP_CWORD": "1"}
    done = subprocess.run([command], capture_output=True, text=True, cwd=tmp_path, env=asked, check=False)
    assert done.stdout.split() == ["plain,recommend"]
    assert (tmp_path / "own/share/man/man1/topoflight.1").exists()


def test_golden_man_page() -> None:
    """What `make golden` writes anew from the verbs."""
    text = man_page.page()
    hold_file(ROOT / "agent/data/topoflight.1", text)
    known = (r"TH|SH|SS|TP|PP", r"\\&", r"\\fB")
    for line in text.splitlines():
        assert not line.startswith((".", "'")) or re.match(rf"\.({known[0]})\b", line), f"roff would take it: {line}"
