"""What the operators do with our manifests beyond their schemas: names, claims, topology, drivers, interfaces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from nccl_env_hosts import host
from rigs.pods import templates
from rigs.tables import each_row

from agent.base.hosts import snapshots
from agent.cli.launch import launch
from planner.kubernetes import manifests
from planner.kubernetes import networks as network_manifests
from planner.kubernetes.job import JobError, JobSpec
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


def test_a_trainjobs_claims_are_where_the_trainer_carries_them_to_the_pod() -> None:
    """A TrainJob's resourcesPerNode loses its claims on the way, and replaces all that the runtime says."""
    runtime, job = manifests.APIS["trainjob"](replace(SPEC, resource_claim_template="sft-gpu-nic"))[-2:]
    (container,) = next(templates(runtime))["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu-nic"}]
    assert container["resources"]["limits"] == SPEC.limits
    assert "resourcesPerNode" not in job["spec"]["trainer"]


def test_without_claims_the_trainjob_says_what_a_node_takes() -> None:
    """As Kubeflow documents it; the runtime then says nothing of it."""
    runtime, job = manifests.APIS["trainjob"](SPEC)
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == SPEC.limits
    assert "resources" not in next(templates(runtime))["spec"]["containers"][0]


def test_kueue_finds_all_pods_of_a_trainjob_in_its_runtime() -> None:
    """Kueue 0.15.0 takes the quota of the runtime's Job, which without these two is one pod's."""
    runtime, job = manifests.APIS["trainjob"](replace(SPEC, queue="team"))
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    said = replicated["template"]["spec"]
    assert said["parallelism"] == said["completions"] == job["spec"]["trainer"]["numNodes"] == 3


def test_master_and_workers_of_a_pytorchjob_share_one_topology_domain() -> None:
    """Two pod sets of the same required level may still land in two domains, unless they are a group."""
    (job,) = manifests.APIS["pytorchjob"](replace(SPEC, queue="team", topology_label="cloud.example/rack"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    said = [replicas[role]["template"]["metadata"]["annotations"] for role in ("Master", "Worker")]
    assert said[0] == said[1] == {REQUIRED: "cloud.example/rack", GROUP: "sft"}
    assert replicas["Master"]["replicas"] == 1, "Kueue takes a group of two pod sets of which one has one pod"


@each_row(
    "spec",
    [replace(SPEC, nodes=1, queue="team", topology_label="cloud.example/rack"), replace(SPEC, queue="team")],
    ids=["one pod set", "no topology"],
)
def test_no_group_where_kueue_refuses_one(spec: JobSpec) -> None:
    """A group of one pod set, or without a topology, is an error to Kueue's webhook."""
    (job,) = manifests.APIS["pytorchjob"](spec)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert GROUP not in replica["template"].get("metadata", {}).get("annotations", {})


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
    ("found", "ports", "master"),
    [
        (roce(Interface(name="ens8f0np0", role="host"), netdev="ens8f0np0"), ["ens8f0np0"], "ens8f0np0"),
        (roce(*MEMBERS, netdev="bond0"), ["ens8f0np0", "ens8f1np1"], "bond0"),
        (roce(*MEMBERS, netdev="ens8f0np0", bond="bond0"), ["ens8f0np0", "ens8f1np1"], "bond0"),
        (roce(*VLAN, netdev="ens8f0np0.7"), ["ens8f0np0"], "ens8f0np0.7"),
    ],
    ids=["port", "bond", "member of a bond", "vlan"],
)
def test_the_device_plugin_looks_for_pci_netdevs(found: Snapshot, ports: list[str], master: str) -> None:
    """It finds HCAs by the netdevs of their PCI functions, where no bond and no VLAN is; a macvlan stands on those."""
    documents = network_manifests.network(network_manifests.from_snapshots([found]))
    assert selected(documents) == (ports, master)
    assert network_manifests.seen_from_a_pod([found]) == ()


def test_a_bonds_mtu_is_its_own() -> None:
    """Not its member's, which the kernel keeps equal but a recording may not."""
    found = [roce(*MEMBERS, netdev="ens8f0np0", bond="bond0")]
    assert network_manifests.from_snapshots(found).mtu_bytes == 4200


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
    words = [
        "--host", str(MACHINES / "r760xa-2xA40-bf3.json"), "--api", "job", "--network", "--dry-run", "--no-preflight",
        "--image", "registry.example/f:1", "--model", "Qwen/Qwen2.5-0.5B", "--set",
        "dataset_name=synthetic:arithmetic",
        "--resource", "rdma/rdma_shared_device_eth=1",
    ]  # fmt: skip
    done = CliRunner().invoke(launch, words)
    assert done.exit_code == 0, done.output
    assert "warning: net1: so a pod calls it, not the node" in done.stderr


def test_the_gpu_driver_waits_for_no_driver_container_that_nobody_makes() -> None:
    """rdma.enabled alone holds the GPU driver back until the network operator's ofedDriver is ready."""
    spec = network_manifests.NetworkSpec(interfaces=("ens8f0np0",), mtu_bytes=9000)
    kinds = {document["kind"]: document["spec"] for document in network_manifests.network(spec)}
    assert "ofedDriver" not in kinds["NicClusterPolicy"]
    assert kinds["ClusterPolicy"]["driver"]["rdma"] == {"enabled": True, "useHostMofed": True}


def test_the_network_operator_is_asked_for_nothing_that_the_network_does_not_use() -> None:
    """The macvlan's addresses are whereabouts'; each further part would be another image of one release."""
    spec = network_manifests.NetworkSpec(interfaces=("ens8f0np0",), mtu_bytes=9000)
    kinds = {document["kind"]: document["spec"] for document in network_manifests.network(spec)}
    assert set(kinds["NicClusterPolicy"]) == {"rdmaSharedDevicePlugin"}
    assert json.loads(kinds["MacvlanNetwork"]["ipam"])["type"] == "whereabouts"
