"""A real cluster that may be changed: this run's own names, and nodes and pods that need no kubelet.

Everything is made under names with RUN in them, so that runs do not meet and an installed Topoflight is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomization import CLUSTER_SCOPED, render

from agent.cluster.client import ApiError, connect, path_of

ROOT = Path(__file__).parent.parent.parent
Document = dict[str, Any]
RUN = f"e2e-{uuid.uuid4().hex[:8]}"
NAMESPACES = ("topoflight", "topoflight-bench")
MACHINES = ROOT / "tests/machines"
CONTROLLER_SECONDS = 30.0  # a namespace controller that has not moved by then is not there


def real() -> list[pytest.MarkDecorator]:
    """Marks of a module that needs the server of KUBECONFIG; without it the module is skipped, once."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no API server", allow_module_level=True)
    if shutil.which("kubectl") is None:
        pytest.skip("KUBECONFIG is set, but kubectl is not installed", allow_module_level=True)
    return [pytest.mark.kube]


def kubectl(*words: str, stdin: str | None = None, check: bool = True) -> str:
    """What it prints; its errors where `check` is off and it printed nothing else."""
    done = subprocess.run(["kubectl", *words], input=stdin, capture_output=True, text=True, check=False, timeout=240)
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("Warning:"))
    assert done.returncode == 0 or not check, f"kubectl {' '.join(words)}: {said}"
    return done.stdout.strip() or said


def served(api_version: str, kind: str) -> bool:
    """Whether the API server knows the kind."""
    try:
        found = connect().get("/api/v1" if api_version == "v1" else f"/apis/{api_version}")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return any(resource["kind"] == kind for resource in found["resources"])


def overlay(name: str, run: str) -> list[Document]:
    """The overlay's objects with `run` in cluster-wide names and namespaces, and a separate runtime class."""
    made = render(ROOT / "deploy/daemonset/overlays" / name)
    spaces = {name: run + name.removeprefix("topoflight") for name in NAMESPACES}
    whole = {
        d["metadata"]["name"] for d in made
        if d["kind"] in CLUSTER_SCOPED and d["kind"] not in ("Namespace", "CustomResourceDefinition")
    }  # fmt: skip

    def walk(node: Any, key: str = "") -> Any:
        if isinstance(node, dict):
            return {k: walk(v, f"{key}.{k}") for k, v in node.items()}
        if isinstance(node, list):
            return [walk(v, key) for v in node]
        word = key.rsplit(".", 1)[-1]
        if word == "namespace" and node in spaces:
            return spaces[node]
        if (word in ("priorityClassName", "policyName") or key.endswith("roleRef.name")) and node in whole:
            return f"{node}-{run}"
        return f"{run}-nvidia" if word == "runtimeClassName" else node

    made = [walk(document) for document in made]
    for document in made:
        about = document["metadata"]
        if document["kind"] == "Namespace":
            about["name"] = spaces[about["name"]]
        elif about["name"] in whole and document["kind"] in CLUSTER_SCOPED:
            about["name"] += f"-{run}"
    if "runtimeClassName" in json.dumps(made):
        made.append({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia",
                     "metadata": {"name": f"{run}-nvidia"}})  # fmt: skip
    return made


def of_kind(documents: Iterable[Document], kind: str) -> Document:
    return next(d for d in documents if d["kind"] == kind)


def text(documents: Iterable[Document]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False)


@contextmanager
def installed(documents: list[Document]) -> Iterator[list[Document]]:
    """Apply what the server knows, as a user would; take it away again. The NodeTopology definition is not ours."""
    known = [d for d in documents if served(d["apiVersion"], d["kind"])]
    theirs = [d for d in known if d["kind"] == "CustomResourceDefinition"]
    ours = [d for d in known if d not in theirs]
    first = [d for d in ours if d["kind"] == "Namespace"]
    try:
        kubectl("apply", "--validate=strict", "-f", "-", stdin=text([*first, *(d for d in ours if d not in first)]))
        yield ours
    finally:
        remove(ours)


def remove(documents: list[Document]) -> None:
    """Delete, without a kubelet's help, and without a namespace controller's."""
    spaces = [d["metadata"]["name"] for d in documents if d["kind"] == "Namespace"]
    rest = [d for d in documents if d["kind"] != "Namespace"]
    if rest:
        kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=text(rest))
    for space in spaces:
        end_pods(space)
        kubectl("delete", "namespace", space, "--ignore-not-found", "--wait=false")
        until = time.monotonic() + CONTROLLER_SECONDS
        while "NotFound" not in kubectl("get", "namespace", space, check=False):
            end_pods(space)
            if time.monotonic() > until:
                finalize(space)
                until += CONTROLLER_SECONDS
            time.sleep(0.2)


def end_pods(namespace: str) -> None:
    """As a kubelet would after the containers have ended; pods here have none."""
    kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait=false", check=False)


@contextmanager
def node(name: str, *, gpus: int = 8, labels: dict[str, str] | None = None) -> Iterator[str]:
    """A Node that says it is ready and has GPUs."""
    client, path = connect(), path_of("v1", "nodes", name)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    marks = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
             "topoflight.io/e2e": RUN, **(labels or {})}  # fmt: skip
    client.create(path_of("v1", "nodes"), {"apiVersion": "v1", "kind": "Node",
                                           "metadata": {"name": name, "labels": marks}})  # fmt: skip
    size = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti", "nvidia.com/gpu": str(gpus),
            "rdma/rdma_shared_device_a": "1000"}  # fmt: skip
    ready = {"type": "Ready", "status": "True", "reason": "EndToEndTest", "message": "no kubelet",
             "lastHeartbeatTime": now, "lastTransitionTime": now}  # fmt: skip
    try:
        client.request("PATCH", path + "/status", content_type="application/merge-patch+json", body={
            "status": {"capacity": size, "allocatable": size, "conditions": [ready]}})  # fmt: skip
        # set at birth by an admission plugin, lifted by a controller that does not run everywhere
        client.request("PATCH", path, content_type="application/merge-patch+json", body={"spec": {"taints": None}})
        yield name
    finally:
        kubectl("delete", "node", name, "--ignore-not-found", "--wait=false")


def pod_of(template: Document, *, namespace: str, name: str, on: str | None = None) -> Document:
    """A pod from a template, bound to a node where one is given."""
    about = {**template.get("metadata", {}), "namespace": namespace, "name": name}
    spec = {**template["spec"], **({"nodeName": on} if on else {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def token(account: str, namespace: str, *, audience: str | None = None, pod: str | None = None) -> str:
    """A service account's, for an hour; of a pod where one is named, as the kubelet asks for it."""
    words = ["create", "token", account, "-n", namespace, "--duration=3600s"]
    words += ["--audience", audience] if audience else []
    words += ["--bound-object-kind=Pod", "--bound-object-name", pod] if pod else []
    return kubectl(*words)


def config_of(folder: Path, bearer: str) -> Path:
    """The kubeconfig of the user who holds this token: the administrator's server, and nothing else of theirs."""
    whole = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    path = folder / f"{uuid.uuid4().hex[:8]}.kubeconfig"
    path.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": whole["clusters"],
        "users": [{"name": "u", "user": {"token": bearer}}],
        "contexts": [{"name": "c", "context": {"cluster": whole["clusters"][0]["name"], "user": "u"}}],
    }))  # fmt: skip
    path.chmod(0o600)
    return path


def finalize(namespace: str) -> None:
    """What the namespace controller does last, where there is none; nothing is left in it."""
    connect().request("PUT", path_of("v1", "namespaces", namespace) + "/finalize", body={
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}, "spec": {"finalizers": []},
    })  # fmt: skip
