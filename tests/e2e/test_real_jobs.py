"""Jobs against the real API server: every object of every kind admitted strictly, and its pods as pods too.

A definition does not judge the pod inside a job (requests without limits of a device pass it): the server does, as Pod.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from real_cluster import MACHINES, ROOT, RUN, Document, admin, installed, kubectl, need, pod_of, real, text
from test_launch_cluster import GIVEN

from agent.advice.advise import answer
from agent.advice.request import Request
from agent.base.hosts import snapshots
from agent.cli.launch import launch
from agent.cluster.client import ApiError, path_of
from agent.jobs import cluster_job
from planner.kubernetes import manifests
from planner.kubernetes import networks as network_manifests
from planner.kubernetes.job import JobError, JobSpec

pytestmark = real()
SPACE = f"{RUN}-jobs"
NEEDS = {
    "trainjob": [("trainer.kubeflow.org/v1alpha1", "TrainJob"), ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")],
    "pytorchjob": [("kubeflow.org/v1", "PyTorchJob")],
    "job": [],
}
WHOLE = JobSpec(  # every field that a manifest can carry
    name="sft-roce", namespace=SPACE, image="registry.example/finetune:1", nodes=2, processes_per_node=2,
    command=("torchrun", "-m", "finetune.train", "--config", "/etc/config/config.yaml"),
    environment={"NCCL_SOCKET_IFNAME": "net1", "NCCL_IB_HCA": "=mlx5_1", "HOSTILE": "$(id)\n'\"---\nkind: Secret"},
    limits={"cpu": "4", "memory": "96Gi", "nvidia.com/gpu": "2", "rdma/rdma_shared_device_eth": "1"},
    networks=("rdmashared-net",), shm_bytes=2 << 30, ipc_lock=True, config_map="sft", claim="shared", queue="team",
    topology_label="cloud.example/rack", service_account="trainer", node_selector={"nvidia.com/gpu.product": "A40"},
    tolerate=("nvidia.com/gpu",), preflight_image="registry.example/topoflight:1",
    preflight_require=("rdma.port.down",), agent="http://topoflight-node.topoflight:9402",
    resource_claim_template="gpu-nic", active_deadline_seconds=86400,
)  # fmt: skip


@pytest.fixture(scope="module")
def space(definition: None) -> Iterator[str]:
    """A namespace whose pods may have IPC_LOCK, and the account that jobs name."""
    label = {"pod-security.kubernetes.io/enforce": "privileged"}
    made = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE, "labels": label}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer", "namespace": SPACE}},
    ]  # fmt: skip
    with installed(made):
        yield SPACE


def pods_in(documents: tuple[Document, ...]) -> Iterator[Document]:
    """Every pod that the objects would make, complete as their controllers complete it."""
    trainer = next((d["spec"]["trainer"] for d in documents if d["kind"] == "TrainJob"), {})

    def walk(node: Any) -> Iterator[Document]:
        if isinstance(node, dict):
            if "containers" in (node.get("spec") or {}):
                yield node
            else:
                for value in node.values():
                    yield from walk(value)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    for document in documents:
        for found in walk({k: v for k, v in document.items() if k not in ("metadata",)}):
            template = copy.deepcopy(found)
            template["spec"].setdefault("serviceAccountName", "trainer")  # the default one may not be there yet
            for container in template["spec"]["containers"]:
                container.setdefault("image", trainer.get("image"))
                if container["name"] == "node" and "resourcesPerNode" in trainer:
                    container["resources"] = trainer["resourcesPerNode"]
            yield pod_of(template, namespace=SPACE, name=f"e2e-{uuid.uuid4().hex[:8]}")


def admitted(documents: tuple[Document, ...]) -> None:
    """By our client, by kubectl, and the pods as pods."""
    lines = list(cluster_job.create(admin(), documents, dry_run=True))
    assert len(lines) == len(documents) and all(line.endswith("admitted (dry run)") for line in lines)
    pods = list(pods_in(documents))
    assert pods, "a job without pods"
    for pod in pods:
        pod["spec"].setdefault("restartPolicy", "Never")
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text([*documents, *pods]))


@pytest.mark.parametrize("api", sorted(NEEDS))
def test_every_field_is_admitted(space: str, api: str) -> None:
    """The fullest job there is, with a value that would like to be more than data."""
    for version, kind in NEEDS[api]:
        need(version, kind)
    spec = replace(WHOLE, name=f"{RUN}-{api}"[:40])
    admitted((manifests.config_map(spec, {"config.yaml": "a: 1\n"}), *manifests.APIS[api](spec)))


@pytest.mark.parametrize("machine", sorted(p.stem for p in MACHINES.glob("*.json") if not p.stem.startswith("sick-")))
@pytest.mark.parametrize("api", sorted(NEEDS))
def test_what_launch_prints_is_admitted(space: str, api: str, machine: str) -> None:
    """For each machine, what its recommendation makes of the job."""
    for version, kind in NEEDS[api]:
        need(version, kind)
    host = MACHINES / f"{machine}.json"
    advice = answer(Request.of(hosts=(host,), model="Llama-3.1-8B", nodes=2), snapshots([host]))
    if advice.chosen is None:
        return  # no layout fits: `launch` says so and prints nothing
    given = {**GIVEN, "namespace": SPACE, "name": f"{RUN}-{api}"[:40], "resources": ("rdma/shared=1",)}
    admitted(cluster_job.documents(advice, cluster_job.spec_of(advice, given), api, None))


@pytest.mark.parametrize("api", sorted(NEEDS))
def test_launch_creates_once_and_never_overwrites(space: str, api: str, tmp_path: Path) -> None:
    """The verb, for real; the second launch is refused and says that nothing was made."""
    for version, kind in NEEDS[api]:
        need(version, kind)
    words = ["--host", str(next(MACHINES.glob("hgx-h100*.json"))), "--model", "Llama-3.1-8B", "--nodes", "2",
             "--image", "registry.example/f:1", "--namespace", SPACE, "--api", api, "--name", f"sft-{api}",
             "--storage-class", "none", "--wait", "0",
             "--set", "dataset_name=openai/gsm8k", "--set", "dataset_config=main"]  # fmt: skip
    printed = CliRunner().invoke(launch, [*words, "--dry-run"]).stdout
    try:
        done = CliRunner().invoke(launch, words)
        assert done.exit_code == 0, done.output
        again = CliRunner().invoke(launch, words)
        assert again.exit_code == 1 and "409" in again.output and "nothing was made" in again.output, again.output
    finally:
        kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=printed)


def test_a_job_that_the_server_refuses_is_told_in_its_words(space: str) -> None:
    """A device's quota in place of a device."""
    spec = replace(WHOLE, name="bad", limits={"requests.nvidia.com/gpu": "1"})
    with pytest.raises(JobError, match=r"job/bad: the API server says 422: .*nvidia\.com/gpu.*nothing was made"):
        list(cluster_job.create(admin(), tuple(manifests.APIS["job"](spec))))
    with pytest.raises(ApiError) as missing:
        admin().get(path_of("batch/v1", "jobs", "bad", namespace=SPACE))
    assert missing.value.status == 404


NETWORK = network_manifests.NetworkSpec(interfaces=("ens8f0np0",), mtu_bytes=9000, gateway="192.168.2.1")


def network_documents() -> list[Document]:
    """As `launch --network` prints them, of machines with RoCE."""
    found = list(network_manifests.network(replace(NETWORK, namespace=SPACE)))
    for machine in ("l40s-4x-pcie",):
        found += cluster_job.network(snapshots([MACHINES / f"{machine}.json"]), SPACE)
    return found


@pytest.mark.parametrize("document", network_documents(), ids=lambda d: d["kind"])
def test_the_operators_resources_are_admitted(space: str, document: Document) -> None:
    """MachineConfig, NicClusterPolicy, MacvlanNetwork, NetworkAttachmentDefinition; ClusterPolicy as a patch."""
    need(document["apiVersion"], document["kind"])
    named = {**document, "metadata": {**document["metadata"], "name": f"{RUN}-{document['metadata']['name']}"}}
    if document["kind"] != "ClusterPolicy":
        kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text([named]))
        return
    needed = ("operator", "daemonsets", "dcgm", "dcgmExporter", "devicePlugin", "gfd", "nodeStatusExporter", "toolkit")
    theirs = {**named, "spec": {**{word: {} for word in needed}, "operator": {"defaultRuntime": "crio"}, "driver": {}}}
    kubectl("create", "-f", "-", stdin=text([theirs]))
    try:
        kubectl("apply", "--server-side", "--validate=strict", "-f", "-", stdin=text([named]))
        kubectl("apply", "--validate=strict", "-f", "-", stdin=text([named]))
        merged = yaml.safe_load(kubectl("get", "-o", "yaml", "-f", "-", stdin=text([named])))["items"][0]["spec"]
        assert merged["driver"]["rdma"]["enabled"] is True and set(needed) <= set(merged)
    finally:
        kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text([named]))


def test_a_claim_of_gpu_and_nic_is_admitted(space: str) -> None:
    """DRA."""
    need("resource.k8s.io/v1", "ResourceClaimTemplate")
    made = tuple(d for d in manifests.APIS["job"](replace(WHOLE, resource_claim_template=f"{RUN}-gpu-nic"))
                 if d["kind"] == "ResourceClaimTemplate")  # fmt: skip
    assert made
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text(made))


def test_the_bench_job_is_admitted_as_pods(space: str) -> None:
    """deploy/bench/job, under Pod Security of its own namespace."""
    from real_cluster import of_kind, render

    job = of_kind(render(ROOT / "deploy/bench/job"), "Job")
    pod = pod_of(job["spec"]["template"], namespace=SPACE, name=f"{RUN}-bench")
    pod["spec"]["serviceAccountName"] = "trainer"
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text([pod]))
