"""What the operators do with our manifests beyond their schemas: names, claims, topology, drivers, interfaces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nccl_env_hosts import host
from rigs.pods import launched, templates
from rigs.tables import each_row

from agent.base.hosts import snapshots
from planner.kubernetes import manifests
from planner.kubernetes import networks as network_manifests
from planner.kubernetes.manifests import JobError, JobSpec
from probes.api import Snapshot
from probes.interfaces.facts import Interface
from probes.rdma.facts import RdmaDevice, RdmaPort
from probes.registry import ALL

MACHINES = Path(__file__).parents[1] / "machines"

SPEC = JobSpec(
    name="sft", namespace="training", image="registry.example/finetune:1", nodes=3, processes_per_node=2,
    command=("torchrun", "-m", "finetune.train"), limits={"cpu": "4", "nvidia.com/gpu": "2"},
)  # fmt: skip
REQUIRED = "kueue.x-k8s.io/podset-required-topology"
GROUP = "kueue.x-k8s.io/podset-group-name"
RACK = "cloud.example/rack"


def test_a_trainjobs_claims_are_where_the_trainer_carries_them_to_the_pod() -> None:
    """resourcesPerNode loses its claims on the way, and replaces all that the runtime says; without them it is used."""
    runtime, job = manifests.APIS["trainjob"](replace(SPEC, resource_claim_template="sft-gpu-nic"))[-2:]
    (container,) = next(templates(runtime))["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu-nic"}]
    assert container["resources"]["limits"] == SPEC.limits
    assert "resourcesPerNode" not in job["spec"]["trainer"]
    runtime, job = manifests.APIS["trainjob"](SPEC)
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == SPEC.limits
    assert "resources" not in next(templates(runtime))["spec"]["containers"][0]


def test_kueue_finds_all_pods_of_a_trainjob_in_its_runtime() -> None:
    """Kueue 0.15.0 takes the quota of the runtime's Job, which without these two is one pod's."""
    runtime, job = manifests.APIS["trainjob"](replace(SPEC, queue="team"))
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    said = replicated["template"]["spec"]
    assert said["parallelism"] == said["completions"] == job["spec"]["trainer"]["numNodes"] == 3


@each_row(
    ("changes", "annotations"),
    [
        ({"queue": "team", "topology_label": RACK}, {REQUIRED: RACK, GROUP: "sft"}),
        ({"queue": "team", "topology_label": RACK, "nodes": 1}, {REQUIRED: RACK}),
        ({"queue": "team"}, {}),
    ],
)
def test_master_and_workers_of_a_pytorchjob_share_one_topology_domain(
    changes: dict[str, Any], annotations: dict[str, str]
) -> None:
    """Two pod sets of the same required level may still land in two domains, unless they are a group.

    Kueue's webhook refuses a group of one pod set, or without a topology; of two, one must have one pod.
    """
    (job,) = manifests.APIS["pytorchjob"](replace(SPEC, **changes))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    said = [replica["template"].get("metadata", {}).get("annotations", {}) for replica in replicas.values()]
    assert said == [annotations] * len(replicas)
    assert replicas["Master"]["replicas"] == 1


def test_a_jobs_name_begins_with_a_letter() -> None:
    """TrainJob, PyTorchJob, JobSet and the Job's Service take RFC 1035 labels; a namespace may begin with a digit."""
    with pytest.raises(JobError, match=r"name='7b-sft'.*a letter first"):
        replace(SPEC, name="7b-sft")
    assert replace(SPEC, namespace="7b").namespace == "7b"


@each_row(("nodes", "allowed"), [(1, 54), (10, 54), (11, 53), (64, 53), (1000, 52)])
def test_a_jobs_name_leaves_room_for_its_pods_names(nodes: int, allowed: int) -> None:
    """PyTorchJob's NAME-worker-62 and JobSet's NAME-node-0-63 are labels of a host name."""
    assert replace(SPEC, nodes=nodes, name="x" * allowed).nodes == nodes
    with pytest.raises(JobError, match=f"{allowed} characters at most"):
        replace(SPEC, nodes=nodes, name="x" * (allowed + 1))


def roce(*links: Interface, netdev: str, bond: str | None = None) -> Snapshot:
    """A node with one active RoCE port, whose interfaces are `links`."""
    port = RdmaPort(port=1, state="ACTIVE", link_layer="Ethernet", netdev=netdev, netdev_mtu_bytes=9000)
    return host("n", rdma=[RdmaDevice(name="mlx5_0", kind="hca", bond=bond, ports=(port,))], interfaces=links)


def selected(documents: tuple[dict[str, Any], ...]) -> tuple[list[str], str]:
    """What the device plugin looks for, and on what the macvlan stands."""
    kinds = {document["kind"]: document["spec"] for document in documents}
    config = json.loads(kinds["NicClusterPolicy"]["rdmaSharedDevicePlugin"]["config"])
    return config["configList"][0]["selectors"]["ifNames"], kinds["MacvlanNetwork"]["master"]


MEMBERS = (
    Interface(name="bond0", role="host", kind="bond", mtu_bytes=4200),
    Interface(name="ens8f1np1", role="host", master="bond0"),
    Interface(name="ens8f0np0", role="host", master="bond0"),
)
VLAN = (
    Interface(name="ens8f0np0.7", role="host", kind="vlan", parent="ens8f0np0"),
    Interface(name="ens8f0np0", role="host"),
)


@each_row(
    ("found", "ports", "master", "mtu_bytes"),
    [
        (roce(Interface(name="ens8f0np0", role="host"), netdev="ens8f0np0"), ["ens8f0np0"], "ens8f0np0", 9000),
        (roce(*MEMBERS, netdev="bond0"), ["ens8f0np0", "ens8f1np1"], "bond0", 9000),
        (roce(*MEMBERS, netdev="ens8f0np0", bond="bond0"), ["ens8f0np0", "ens8f1np1"], "bond0", 4200),
        (roce(*VLAN, netdev="ens8f0np0.7"), ["ens8f0np0"], "ens8f0np0.7", 9000),
    ],
    ids=["port", "bond", "member of a bond", "vlan"],
)
def test_the_device_plugin_looks_for_pci_netdevs(
    found: Snapshot, ports: list[str], master: str, mtu_bytes: int
) -> None:
    """It finds HCAs by the netdevs of their PCI functions, where no bond and no VLAN is; a macvlan stands on those."""
    documents = network_manifests.network(network_manifests.from_snapshots([found]))
    assert selected(documents) == (ports, master)
    assert network_manifests.seen_from_a_pod([found]) == ()
    assert network_manifests.from_snapshots([found]).mtu_bytes == mtu_bytes, "a bond's own, not its member's"


@each_row("machine", ["hgx-h100-8xH100-8hca", "azure-nd-a100-flat-vm", "polaris-4xA100-nv4"])
def test_infiniband_is_shared_and_needs_no_second_network(machine: str) -> None:
    """Verbs go by the device alone, and a port's netdev need not be known: the link type finds it on every node."""
    found = snapshots([MACHINES / f"{machine}.json"], ALL)
    documents = network_manifests.network(network_manifests.from_snapshots(found))
    assert [d["kind"] for d in documents] == ["MachineConfig", "NicClusterPolicy", "ClusterPolicy"]
    (shared,) = json.loads(documents[1]["spec"]["rdmaSharedDevicePlugin"]["config"])["configList"]
    assert shared["resourceName"] == "rdma_shared_device_ib"
    assert shared["selectors"] == {"linkTypes": ["infiniband"]}


def test_a_node_with_both_shares_both() -> None:
    """Storage over RoCE and compute over InfiniBand are two resources; the pod asks for one by name."""
    ports = (
        RdmaPort(port=1, state="ACTIVE", link_layer="Ethernet", netdev="ens8f0np0"),
        RdmaPort(port=2, state="ACTIVE", link_layer="InfiniBand"),
    )
    both = host("n", rdma=[RdmaDevice(name="mlx5_0", kind="hca", ports=ports)])
    documents = network_manifests.network(network_manifests.from_snapshots([both]))
    config = json.loads(documents[1]["spec"]["rdmaSharedDevicePlugin"]["config"])
    assert [each["selectors"] for each in config["configList"]] == [
        {"ifNames": ["ens8f0np0"]},
        {"linkTypes": ["infiniband"]},
    ]
    assert "MacvlanNetwork" in [d["kind"] for d in documents]


def test_efa_needs_none_of_it() -> None:
    """And the error says so."""
    with pytest.raises(JobError, match="EFA needs none"):
        network_manifests.from_snapshots(snapshots([MACHINES / "aws-p4d-8xA100-4efa.json"], ALL))


def test_a_name_from_inside_a_pod_is_told() -> None:
    """No node has an interface net1: what is printed for it wants another name."""
    inside = snapshots([MACHINES / "r760xa-2xA40-bf3.json"], ALL)
    assert network_manifests.seen_from_a_pod(inside) == ("net1",)
    assert network_manifests.seen_from_a_pod(snapshots([MACHINES / "l40s-4x-pcie.json"], ALL)) == ()
    words = (
        "--network",
        "--no-preflight",
        "--model",
        "Qwen/Qwen2.5-0.5B",
        "--resource",
        "rdma/rdma_shared_device_eth=1",
    )
    _, told = launched("--host", MACHINES / "r760xa-2xA40-bf3.json", *words)
    assert "warning: net1: these are names inside a pod;" in told
