"""What the operators do with our manifests beyond their schemas: names, claims, topology, drivers, interfaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner import manifests
from planner.job import JobError, JobSpec

SPEC = JobSpec(
    name="sft", namespace="training", image="registry.example/finetune:1", nodes=3, processes_per_node=2,
    command=("torchrun", "-m", "finetune.train"), limits={"cpu": "4", "nvidia.com/gpu": "2"},
)  # fmt: skip
REQUIRED = "kueue.x-k8s.io/podset-required-topology"
GROUP = "kueue.x-k8s.io/podset-group-name"


def containers(node: Any) -> list[dict[str, Any]]:
    """The main containers of every pod template below `node`."""
    if isinstance(node, dict):
        return [*node.get("containers", []), *(c for value in node.values() for c in containers(value))]
    return [c for value in node for c in containers(value)] if isinstance(node, list) else []


def test_a_trainjobs_claims_are_where_the_trainer_carries_them_to_the_pod() -> None:
    """A TrainJob's resourcesPerNode loses its claims on the way, and replaces all that the runtime says."""
    runtime, job = manifests.trainjob(replace(SPEC, resource_claim_template="sft-gpu-nic"))[-2:]
    (container,) = containers(runtime)
    assert container["resources"]["claims"] == [{"name": "gpu-nic"}]
    assert container["resources"]["limits"] == SPEC.limits
    assert "resourcesPerNode" not in job["spec"]["trainer"]


def test_without_claims_the_trainjob_says_what_a_node_takes() -> None:
    """As Kubeflow documents it; the runtime then says nothing of it."""
    runtime, job = manifests.trainjob(SPEC)
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == SPEC.limits
    assert "resources" not in containers(runtime)[0]


def test_master_and_workers_of_a_pytorchjob_share_one_topology_domain() -> None:
    """Two pod sets of the same required level may still land in two domains, unless they are a group."""
    (job,) = manifests.pytorchjob(replace(SPEC, queue="team", topology_label="cloud.example/rack"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    said = [replicas[role]["template"]["metadata"]["annotations"] for role in ("Master", "Worker")]
    assert said[0] == said[1] == {REQUIRED: "cloud.example/rack", GROUP: "sft"}
    assert replicas["Master"]["replicas"] == 1, "Kueue takes a group of two pod sets of which one has one pod"


@pytest.mark.parametrize(
    "spec",
    [replace(SPEC, nodes=1, queue="team", topology_label="cloud.example/rack"), replace(SPEC, queue="team")],
    ids=["one pod set", "no topology"],
)
def test_no_group_where_kueue_refuses_one(spec: JobSpec) -> None:
    """A group of one pod set, or without a topology, is an error to Kueue's webhook."""
    (job,) = manifests.pytorchjob(spec)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert GROUP not in replica["template"].get("metadata", {}).get("annotations", {})


def test_a_jobs_name_begins_with_a_letter() -> None:
    """TrainJob, PyTorchJob, JobSet and the Job's Service take RFC 1035 labels; a namespace may begin with a digit."""
    with pytest.raises(JobError, match=r"name='7b-sft'.*a letter first"):
        replace(SPEC, name="7b-sft")
    assert replace(SPEC, namespace="7b").namespace == "7b"


@pytest.mark.parametrize(("nodes", "allowed"), [(1, 54), (10, 54), (11, 53), (64, 53), (1000, 52)])
def test_a_jobs_name_leaves_room_for_its_pods_names(nodes: int, allowed: int) -> None:
    """PyTorchJob's NAME-worker-62 and JobSet's NAME-node-0-63 are labels of a host name."""
    assert replace(SPEC, nodes=nodes, name="x" * allowed).nodes == nodes
    with pytest.raises(JobError, match=f"{allowed} characters at most"):
        replace(SPEC, nodes=nodes, name="x" * (allowed + 1))
