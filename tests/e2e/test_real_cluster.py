"""What only a real API server can tell: it admits the overlays, and its RBAC gives the agent these rights, no others.

`make e2e` with KUBECONFIG of an administrator of a cluster that may be changed; what is made is taken away again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_client import eventually

from agent.admission import KUEUE, Controller, Policy
from agent.doors import AUDIENCE, Doors
from agent.kube import ApiError, Client, path_of
from agent.kube_access import find
from agent.nodes import NodeRecord
from agent.problem import ProblemError
from agent.publish import Publisher

ROOT = Path(__file__).parent.parent.parent
OVERLAYS = sorted(path.name for path in (ROOT / "deploy/daemonset/overlays").iterdir())
pytestmark = [
    pytest.mark.kube,
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no API server"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]


def kubectl(*words: str, check: bool = True, stdin: str | None = None) -> str:
    done = subprocess.run(["kubectl", *words], input=stdin, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout.strip() or done.stderr.strip()


@pytest.fixture(scope="module", autouse=True)
def base() -> Iterator[None]:
    """The CRD, the namespace and the rights: what the tests need of the base."""
    folder = str(ROOT / "deploy/daemonset/overlays/kubernetes")
    kubectl("apply", "-k", folder)
    kubectl("wait", "--for=condition=Established", "crd/nodetopologies.topoflight.io", "--timeout=60s")
    yield
    kubectl("delete", "-k", folder, "--ignore-not-found", "--wait=false")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_admits_every_overlay(overlay: str) -> None:
    """Strictly; kinds whose CRD this cluster lacks (OpenShift's, Prometheus', Kueue's) are named, and nothing else."""
    folder = str(ROOT / "deploy/daemonset/overlays" / overlay)
    done = subprocess.run(["kubectl", "apply", "-k", folder, "--dry-run=server", "--validate=strict"],
                          capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    wrong = [
        line for line in done.stderr.splitlines()
        if "no matches for kind" not in line and "ensure CRDs are installed first" not in line
        and "Warning:" not in line and 'namespaces "topoflight-bench" not found' not in line
    ]  # fmt: skip
    assert wrong == [], done.stderr


CAN = [
    # verb, resource, subresource or "", namespace or "" -> may the agent
    ("create", "tokenreviews.authentication.k8s.io", "", True),
    ("create", "subjectaccessreviews.authorization.k8s.io", "", True),
    ("patch", "nodetopologies.topoflight.io", "", True),
    ("patch", "nodetopologies.topoflight.io/status", "", True),
    ("watch", "nodetopologies.topoflight.io", "", True),
    ("delete", "nodetopologies.topoflight.io", "", False),
    ("get", "secrets", "topoflight", False),
    ("list", "pods", "topoflight", False),
    ("create", "pods", "topoflight", False),
    ("patch", "nodes", "", False),
    ("get", "nodes", "", False),
    ("create", "pods/exec", "topoflight", False),
    ("patch", "nodefeatures.nfd.k8s-sigs.io", "topoflight", True),
    ("patch", "nodefeatures.nfd.k8s-sigs.io", "kube-system", False),
    ("create", "serviceaccounts/token", "topoflight", False),
]


@pytest.mark.parametrize(("verb", "resource", "namespace", "may"), CAN)
def test_the_table_of_rights(verb: str, resource: str, namespace: str, may: bool) -> None:
    """As `kubectl auth can-i` has it."""
    words = ["auth", "can-i", verb, resource, "--as=system:serviceaccount:topoflight:topoflight"]
    answer = kubectl(*words, *(["-n", namespace] if namespace else []), check=False)
    assert answer.splitlines()[-1].startswith("yes" if may else "no"), answer


def test_a_real_token_is_refused_then_granted() -> None:
    """TokenReview with audience, then SubjectAccessReview; the refusal's own words grant it."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    kubectl("create", "serviceaccount", name, "-n", "topoflight")
    try:
        token = kubectl("create", "token", name, "-n", "topoflight", "--audience", AUDIENCE)
        other = kubectl("create", "token", name, "-n", "topoflight")
        client = Client(find())
        with pytest.raises(ProblemError) as wrong:
            Doors(client=client).check(f"Bearer {other}", path="/preflight", verb="post")
        assert wrong.value.status == 401
        with pytest.raises(ProblemError) as refused:
            Doors(client=client).check(f"Bearer {token}", path="/preflight", verb="post")
        assert refused.value.status == 403
        for line in refused.value.more["grant"].split(" && "):
            kubectl(*line.replace("topoflight-load", name).split()[1:])
        user = f"system:serviceaccount:topoflight:{name}"

        def granted() -> bool:
            try:
                return Doors(client=client).check(f"Bearer {token}", path="/preflight", verb="post") == user
            except ProblemError:
                return False

        eventually(granted, "the grant takes effect")
    finally:
        kubectl("delete", f"clusterrolebinding/{name}", f"clusterrole/{name}", "--ignore-not-found")
        kubectl("delete", "serviceaccount", name, "-n", "topoflight", "--ignore-not-found")


def test_kubectl_shows_the_cluster_at_a_glance() -> None:
    """The printer columns of a published node."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    record = NodeRecord(name=name, host=name, verdict="pass", scanned_at_seconds=time.time(), gpus=8,
                        links="NV18 x 28", hcas=8, rdma="8/8 active", memlock="unlimited")  # fmt: skip
    client = Client(find())
    try:
        Publisher(client, lambda: record, namespace="topoflight", labels=False).write(record)
        header, line = kubectl("get", "nodetopologies", name).splitlines()
        assert header.split() == ["NAME", "GPUS", "LINKS", "HCAS", "RDMA", "MEMLOCK", "VERDICT", "SCANNED"]
        assert "NV18 x 28" in line and "unlimited" in line and "pass" in line
    finally:
        kubectl("delete", "nodetopology", name, "--ignore-not-found")


def test_the_life_of_an_admission_check() -> None:
    """Kueue's CRDs without Kueue: we play its part, the controller answers."""
    client, name = Client(find()), f"e2e-{uuid.uuid4().hex[:8]}"
    try:
        client.get(path_of(KUEUE, "admissionchecks"))
    except ApiError as error:
        pytest.skip(f"Kueue's v1beta2 CRDs are not installed: {error}")
    controller_name = f"topoflight.io/{name}"
    workloads, checks = path_of(KUEUE, "workloads", name, namespace="default"), path_of(KUEUE, "admissionchecks", name)
    pod = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "registry.example/c"}]}}
    client.apply(checks, {"apiVersion": KUEUE, "kind": "AdmissionCheck", "metadata": {"name": name},
                          "spec": {"controllerName": controller_name}})  # fmt: skip
    about = {"name": name, "namespace": "default"}
    pod_sets = [{"name": "main", "count": 1, "template": pod}]
    client.apply(workloads, {"apiVersion": KUEUE, "kind": "Workload", "metadata": about,
                             "spec": {"queueName": "q", "podSets": pod_sets}})  # fmt: skip
    running = Controller(Client(find()), Policy(requeue_seconds=7), controller=controller_name)
    thread = threading.Thread(target=running.run, kwargs={"tick_seconds": 0.2}, daemon=True)
    thread.start()
    now = "2026-01-01T00:00:00Z"
    record = NodeRecord(name=name, host=name, verdict="pass", scanned_at_seconds=time.time())

    def state() -> str:
        return str(client.get(workloads)["status"]["admissionChecks"][0]["state"])

    try:
        eventually(lambda: (client.get(checks).get("status") or {}).get("conditions"), "the check is active")
        Publisher(client, lambda: record, namespace="default", labels=False).write(record)
        client.request("PATCH", workloads + "/status", content_type="application/merge-patch+json", body={"status": {
            "conditions": [{"type": "QuotaReserved", "status": "True", "reason": "QuotaReserved", "message": "e2e",
                            "lastTransitionTime": now}],
            "admissionChecks": [{"name": name, "state": "Pending", "message": "", "lastTransitionTime": now}],
        }})  # fmt: skip
        eventually(lambda: state() == "Ready", "the answer")
    finally:
        running.stop()
        kubectl("delete", f"workloads.kueue.x-k8s.io/{name}", "-n", "default", "--ignore-not-found")
        kubectl("delete", f"admissionchecks.kueue.x-k8s.io/{name}", f"nodetopologies/{name}", "--ignore-not-found")
