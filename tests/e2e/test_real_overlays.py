"""What only a real API server can tell of the manifests: it admits each, twice the same, and its controllers act."""

from __future__ import annotations

import pytest
import yaml
from real_cluster import (
    CONTROLLER_SECONDS,
    ROOT,
    RUN,
    Document,
    admin,
    installed,
    kubectl,
    need,
    need_controllers,
    node,
    of_kind,
    overlay,
    play_kubelet,
    pod_of,
    real,
    renamed,
    render,
    served,
    text,
    within,
)

from agent.cluster.client import path_of

OVERLAYS = sorted(path.name for path in (ROOT / "deploy/daemonset/overlays").iterdir())
pytestmark = real()


def kinds() -> list[tuple[str, str]]:
    """Those of the overlays that no API server has by itself."""
    found = {
        (d["apiVersion"], d["kind"])
        for name in OVERLAYS
        for d in render(ROOT / "deploy/daemonset/overlays" / name)
        if "." in d["apiVersion"] and not d["apiVersion"].split("/")[0].endswith("k8s.io")
    }
    return sorted({*found, ("nfd.k8s-sigs.io/v1alpha1", "NodeFeature")})


@pytest.mark.parametrize(("version", "kind"), kinds())
def test_the_server_has_the_kind(definition: None, version: str, kind: str) -> None:
    """Where it has not, objects of that kind are left out below: the skip says so."""
    need(version, kind)


def generations(documents: list[Document]) -> dict[str, int]:
    """How often the server has seen another wish for each object; without the kinds that have no such number, by
    their version, which nobody else moves.
    """
    listed = yaml.safe_load(kubectl("get", "-o", "yaml", "-f", "-", stdin=text(documents)))["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}":
            int(item["metadata"].get("generation") or item["metadata"]["resourceVersion"])
        for item in listed
    }  # fmt: skip


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_admits_every_overlay(definition: None, name: str) -> None:
    """Strictly, for real; applied again nothing changes: no default and no controller argues with a manifest."""
    run = f"{RUN}-{name}"
    with installed(overlay(name, run)) as documents:
        assert {"DaemonSet", "ClusterRole", "NetworkPolicy", "Namespace"} <= {d["kind"] for d in documents}
        before = generations(documents)
        said = kubectl("apply", "--validate=strict", "-f", "-", stdin=text(documents))
        assert not [line for line in said.splitlines() if not line.endswith(" unchanged")]
        assert generations(documents) == before
        # server-side apply by another hand finds nothing to argue about either
        kubectl("apply", "--server-side", "--validate=strict", "--dry-run=server", "--force-conflicts",
                "--field-manager=e2e", "-f", "-", stdin=text(documents))  # fmt: skip
    left = kubectl("get", "clusterroles,clusterrolebindings,priorityclasses,runtimeclasses,namespaces", "-o", "name")
    assert run not in left, "something stayed behind"


def test_the_definition_is_structural_and_its_columns_are_shown(definition: None) -> None:
    """The server says itself that nothing is wrong with the schema."""
    found = admin().get(path_of("apiextensions.k8s.io/v1", "customresourcedefinitions", "nodetopologies.topoflight.io"))
    wrong = [c for c in found["status"]["conditions"] if c["type"] == "NonStructuralSchema" and c["status"] == "True"]
    assert wrong == []


def test_the_daemonset_gets_its_pods(cluster: list[Document], gpu_node: str) -> None:
    """One on the node with GPUs, by the real controller: Pod Security and every admission plugin let it be."""
    need_controllers()
    name = of_kind(cluster, "DaemonSet")["metadata"]["name"]
    client, selector = admin(), {"labelSelector": f"app.kubernetes.io/name={name}"}

    def pods() -> list[Document]:
        found = client.get(path_of("v1", "pods", namespace=RUN), selector)["items"]
        return [p for p in found if "affinity" in p["spec"] and gpu_node in str(p["spec"]["affinity"])]

    assert within(pods), kubectl("describe", "daemonset", name, "-n", RUN)
    (pod,) = pods()
    if not within(lambda: pods()[0]["spec"].get("nodeName") == gpu_node):
        pytest.skip(f"the pod was made but not bound within {CONTROLLER_SECONDS:.0f} s: does a kube-scheduler run?")
    play_kubelet(RUN, pod["metadata"]["name"], "Running")
    path = path_of("apps/v1", "daemonsets", name, namespace=RUN)
    assert within(lambda: client.get(path)["status"].get("numberReady", 0) >= 1)


def test_the_benchmark_job_gets_a_pod_per_node_and_ends(definition: None) -> None:
    """Indexed Job and headless Service: one pod per node, with index and name; Complete when both have ended."""
    need_controllers()
    run, client = f"{RUN}-job", admin()
    documents = renamed(render(ROOT / "deploy/bench/job"), run)
    job = of_kind(documents, "Job")
    space, name = job["metadata"]["namespace"], job["metadata"]["name"]
    with node(f"{run}-a"), node(f"{run}-b"), installed(documents):
        path = path_of("batch/v1", "jobs", name, namespace=space)

        def pods() -> list[Document]:
            found: list[Document] = client.get(path_of("v1", "pods", namespace=space))["items"]
            return sorted(
                found, key=lambda p: str(p["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
            )

        assert within(lambda: len(pods()) == 2), kubectl("describe", "job", name, "-n", space)
        assert [p["spec"]["hostname"] for p in pods()] == [f"{name}-0", f"{name}-1"]
        assert {p["spec"]["subdomain"] for p in pods()} == {of_kind(documents, "Service")["metadata"]["name"]}
        if not within(lambda: all(p["spec"].get("nodeName") for p in pods())):
            pytest.skip(f"the pods were not bound within {CONTROLLER_SECONDS:.0f} s: does a kube-scheduler run?")
        assert len({p["spec"]["nodeName"] for p in pods()}) == 2, "two pods on one node measure no network"
        for pod in pods():
            play_kubelet(space, pod["metadata"]["name"], "Succeeded")

        def complete() -> bool:
            conditions = client.get(path)["status"].get("conditions", [])
            return any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)

        assert within(complete), client.get(path)["status"]


def test_the_init_container_example_is_admitted(cluster: list[Document]) -> None:
    """As a job, and as the pod that the job would make."""
    job = yaml.safe_load((ROOT / "docs/examples/init-container.yaml").read_text())
    pod = pod_of(job["spec"]["template"], namespace="default", name=f"{RUN}-example")
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text([job, pod]))


def test_tekton_takes_the_task(definition: None) -> None:
    """Where Tekton is installed."""
    if not served("tekton.dev/v1", "Task"):
        pytest.skip("the API server has no Task of tekton.dev/v1: install Tekton to run this test")
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(ROOT / "docs/examples/tekton-task.yaml"))
