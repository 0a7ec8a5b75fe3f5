"""The cluster's network resources, from what was probed: operators' policies, secondary network, memlock, storage.

Specifications: mellanox.com/v1alpha1 (NVIDIA network operator), k8s.cni.cncf.io/v1 (Multus), nvidia.com/v1 (GPU
operator), machineconfiguration.openshift.io/v1 with Ignition 3.2 (which has no `contents.inline`: a file's content is
a `data:` URL), CRI-O crio.conf(5) default_ulimits.
Several RoCE interfaces are rails: planner/kubernetes/rails.py.
"""

from __future__ import annotations

import ipaddress
import json
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.kubernetes import rails as network_rails
from planner.kubernetes.job import JobError
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts

Document = dict[str, Any]

# Linux: an interface's name has at most 15 bytes, and no slash or white space.
_INTERFACE = re.compile(r"[^\s/]{1,15}")
# NVIDIA's image of the NIC driver; its version goes with the operator's release and the nodes' kernel.
_OFED_DRIVER = {"repository": "nvcr.io/nvidia/mellanox", "image": "doca-driver"}
_RDMA_SHARES = 63  # pods that may share one HCA: the network operator's own example


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The devices to share, and the secondary network to make over them."""

    interfaces: tuple[str, ...]  # RoCE netdevs of the nodes: ("ens8f0np0",)
    mtu_bytes: int = 1500  # of the interfaces: Ethernet's own
    infiniband: bool = False  # the nodes have active InfiniBand ports: verbs need no second network in the pod
    ports: tuple[str, ...] = ()  # netdevs of the PCI functions below them: a bond's members. Default: the interfaces
    name: str = "rdmashared-net"
    namespace: str = "default"
    resource_name: str = "rdma_shared_device_eth"
    infiniband_name: str = "rdma_shared_device_ib"
    range: str = "192.168.2.0/24"  # addresses that whereabouts hands out; of several interfaces, on the first
    # Who brings the NIC's driver: the nodes themselves, or the network operator's ofedDriver; None: not known
    host_mofed: bool | None = True
    gateway: str | None = None  # within the range; each further interface has its own, at the same place

    def __post_init__(self) -> None:
        if not (self.interfaces or self.infiniband):
            raise JobError("interfaces: none; the network needs the name of at least one RDMA netdev of the nodes")
        for name in (*self.interfaces, *self.ports):
            if not _INTERFACE.fullmatch(name):
                raise JobError(f"interface {name!r}: not the name of a Linux interface")
        try:
            ipaddress.ip_network(self.range)
            if self.gateway:
                ipaddress.ip_address(self.gateway)
        except ValueError as error:
            raise JobError(f"range={self.range!r} gateway={self.gateway!r}: {error}") from None
        self.rails()

    def rails(self) -> tuple[NetworkSpec, ...]:
        """One network for each interface, in their order: this one where there is one interface alone."""
        if len(self.interfaces) < 2:
            return (self,) if self.interfaces else ()
        addresses = network_rails.ranges(self.range, self.gateway, len(self.interfaces))
        return tuple(
            replace(self, interfaces=(interface,), name=f"{self.name}-{i + 1}", range=given, gateway=gateway)
            for i, (interface, (given, gateway)) in enumerate(zip(self.interfaces, addresses, strict=True))
        )


def from_snapshots(snapshots: Sequence[Snapshot], **settings: Any) -> NetworkSpec:
    """Interfaces and MTU of the active RoCE ports that every one of these nodes has, and whether each has InfiniBand.

    RoCE must be scanned where the nodes' own interfaces are visible (host network): a pod sees only its macvlan.
    Rails are told apart by their names: the interface of one name is on one rail on every node.
    """
    common: dict[str, int] | None = None
    for snapshot in snapshots:
        found = _roce(snapshot)
        here = {name: found[name] for name in network_rails.fit(snapshot, found)}
        common = (
            here if common is None else {name: min(mtu, here[name]) for name, mtu in common.items() if name in here}
        )
    infiniband = bool(snapshots) and all(_infiniband(snapshot) for snapshot in snapshots)
    if not (common or infiniband):
        raise JobError(
            "no active InfiniBand port, and no active RoCE port with a netdev, is on every one of these nodes; scan "
            "them on the host network (EFA needs none of these resources: AWS' device plugin is all)"
        )
    # nvidia_peermem loads against the peer memory interface of NVIDIA's NIC driver alone (CUDA's GPUDirect RDMA guide):
    # where it is loaded that driver is on the node already
    loaded = [facts.peermem_loaded for snapshot in snapshots if (facts := snapshot.facts(PciFacts))]
    there = True if loaded and len(loaded) == len(snapshots) and all(loaded) else None
    given: dict[str, Any] = {"interfaces": (), "infiniband": infiniband, "host_mofed": there}
    if common:
        ports = {port for snapshot in snapshots for name in common for port in _ports(snapshot, name)}
        given |= {
            "interfaces": tuple(sorted(common)), "ports": tuple(sorted(ports)), "mtu_bytes": min(common.values()),
        }  # fmt: skip
    return NetworkSpec(**{**given, **settings})


def seen_from_a_pod(snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """RoCE netdevs that bear a name of a pod, not of the node: what is rendered for them fits no node as it stands."""
    names = set()
    for snapshot in snapshots:
        links = snapshot.facts(InterfacesFacts)
        known = links.interfaces if links else ()
        inside = {link.name for link in known if link.role == "secondary" or link.parent_elsewhere}
        names |= inside & _roce(snapshot).keys()
    return tuple(sorted(names))


def _ports(snapshot: Snapshot, name: str) -> tuple[str, ...]:
    """The netdevs that the device plugin looks up, by PCI device: those below a bond or a VLAN, else the one itself."""
    links = snapshot.facts(InterfacesFacts)
    known = links.interfaces if links else ()
    if members := tuple(link.name for link in known if link.master == name):
        return members
    return tuple(link.parent for link in known if link.name == name and link.kind == "vlan" and link.parent) or (name,)


def _roce(snapshot: Snapshot) -> dict[str, int]:
    rdma, links = snapshot.facts(RdmaFacts), snapshot.facts(InterfacesFacts)
    mtus = {link.name: link.mtu_bytes for link in links.interfaces} if links else {}
    found: dict[str, int] = {}
    for device in rdma.devices if rdma else ():
        for port in device.ports:
            if port.state == "ACTIVE" and port.link_layer == "Ethernet" and port.netdev:
                name = device.bond or port.netdev  # no macvlan stands on a bond's member
                known = port.netdev_mtu_bytes if name == port.netdev else None
                found[name] = known or mtus.get(name) or 1500
    return found


def _infiniband(snapshot: Snapshot) -> bool:
    rdma = snapshot.facts(RdmaFacts)
    ports = [port for device in (rdma.devices if rdma else ()) for port in device.ports]
    return any(port.state == "ACTIVE" and port.link_layer == "InfiniBand" for port in ports)


def nic_cluster_policy(spec: NetworkSpec) -> Document:
    """NVIDIA network operator: the shared RDMA device plugin for the probed interfaces, and the NIC driver if asked.

    The image is that of the operator's releases 24.10 and 25.1; later releases start it by the same command.
    """
    shared: list[tuple[str, Document]] = []
    if spec.interfaces:
        shared.append((spec.resource_name, {"ifNames": list(spec.ports or spec.interfaces)}))
    if spec.infiniband:  # whatever a node calls its ports; they are found by their IPoIB netdevs (module ib_ipoib)
        shared.append((spec.infiniband_name, {"linkTypes": ["infiniband"]}))
    config = {
        "configList": [
            {"resourceName": name, "rdmaHcaMax": _RDMA_SHARES, "selectors": selectors} for name, selectors in shared
        ]
    }
    return {
        "apiVersion": "mellanox.com/v1alpha1",
        "kind": "NicClusterPolicy",
        "metadata": {"name": "nic-cluster-policy"},  # the operator accepts this name alone
        "spec": {
            **({"ofedDriver": dict(_OFED_DRIVER)} if spec.host_mofed is False else {}),
            "rdmaSharedDevicePlugin": {
                "image": "k8s-rdma-shared-dev-plugin",
                "repository": "ghcr.io/mellanox",
                "version": "v1.5.2",
                "config": json.dumps(config, indent=2),
            },
        },
    }


def macvlan_network(spec: NetworkSpec) -> Document:
    """A macvlan over the interface, made by the network operator; of several interfaces, one for each of `rails()`."""
    return {
        "apiVersion": "mellanox.com/v1alpha1",
        "kind": "MacvlanNetwork",
        "metadata": {"name": spec.name},
        "spec": {
            "networkNamespace": spec.namespace,
            "master": spec.interfaces[0],
            "mode": "bridge",
            "mtu": spec.mtu_bytes,
            "ipam": json.dumps(_ipam(spec)),
        },
    }


def network_attachment(spec: NetworkSpec) -> Document:
    """The same network as Multus reads it, for clusters without the operator."""
    config = {
        "cniVersion": "0.3.1",
        "name": spec.name,
        "type": "macvlan",
        "master": spec.interfaces[0],
        "mode": "bridge",
        "mtu": spec.mtu_bytes,
        "ipam": _ipam(spec),
    }
    return {
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": spec.name, "namespace": spec.namespace},
        "spec": {"config": json.dumps(config)},
    }


def cluster_policy_rdma(spec: NetworkSpec) -> Document:
    """The GPU operator's ClusterPolicy: its driver loads nvidia_peermem; a patch, to be merged.

    The GPU driver waits for the network operator's driver container (ofedDriver) unless it is told that the host brings
    the NIC's driver (gpu-operator, validator/main.go, USE_HOST_MOFED). Where that is not known it is left out.
    """
    rdma: Document = {"enabled": True, **({"useHostMofed": True} if spec.host_mofed else {})}
    return {
        "apiVersion": "nvidia.com/v1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "gpu-cluster-policy"},
        "spec": {"driver": {"rdma": rdma}},
    }


def memlock_machine_config(*, role: str = "worker", memlock: str = "-1:-1") -> Document:
    """CRI-O's default memlock for every container of a role's nodes; they restart to take it."""
    if not re.fullmatch(r"-1:-1|[0-9]{1,15}:[0-9]{1,15}", memlock):
        raise JobError(f"memlock={memlock!r}: must be soft:hard in bytes, or -1:-1")
    content = f'[crio.runtime]\ndefault_ulimits = [\n  "memlock={memlock}"\n]\n'
    file = {
        "path": "/etc/crio/crio.conf.d/10-custom",
        "mode": 420,
        "overwrite": True,
        "contents": {"source": "data:," + urllib.parse.quote(content)},
    }
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {
            "name": f"02-{role}-container-runtime",
            "labels": {"machineconfiguration.openshift.io/role": role},
        },
        "spec": {"config": {"ignition": {"version": "3.2.0"}, "storage": {"files": [file]}}},
    }


def shared_claim(
    *, name: str = "shared", namespace: str = "default", size: str = "500Gi", storage_class: str
) -> Document:
    """A claim that every pod of the job may write: model, cache, checkpoints."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": size}},
            "storageClassName": storage_class,
        },
    }


def network(spec: NetworkSpec) -> tuple[Document, ...]:
    """Everything that a cluster needs for RDMA in pods, in the order to apply it."""
    rails = spec.rails()
    second = (*map(macvlan_network, rails), *map(network_attachment, rails))
    return (memlock_machine_config(), nic_cluster_policy(spec), cluster_policy_rdma(spec), *second)


def _ipam(spec: NetworkSpec) -> dict[str, str]:
    ipam = {"type": "whereabouts", "range": spec.range}
    if spec.gateway:
        ipam["gateway"] = spec.gateway
    return ipam
