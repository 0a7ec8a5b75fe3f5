"""Build the cluster's network resources from probed facts: operator policies, secondary networks, memlock, storage.

Specifications: mellanox.com/v1alpha1 (NVIDIA network operator), k8s.cni.cncf.io/v1 (Multus), nvidia.com/v1 (GPU
operator), machineconfiguration.openshift.io/v1 with Ignition 3.2 (which has no `contents.inline`: a file's content is
a `data:` URL), CRI-O crio.conf(5) default_ulimits.

Several RoCE interfaces are rails, and the pods get one network per rail, as NVIDIA documents it for several NICs
(Network Operator documentation, Kubernetes Launch Kit: profile "MacVLAN with RDMA Shared", `--multirail`): one
MacvlanNetwork per rail, with consecutive subnets. In a common subnet the kernel would answer ARP requests for every
rail on every other rail and send over only one of them (Linux Documentation/networking/ip-sysctl.rst: arp_ignore,
rp_filter). In the pod Multus names the interfaces net1 to netN, in the order of the annotation.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner.advice import Recommendation
from planner.kubernetes.manifests import Document, JobError, check_form, from_template
from planner.nccl_env.devices import PortChoice, choose_ports, make_exact_list
from planner.nccl_env.rdma import hca_list
from planner.nccl_env.situation import NodeView, PortView, Reason, Setting, networks as subnets, setting, some
from probes.api import Snapshot
from probes.pci.facts import PciFacts

RESOURCE = "rdma_shared_device_eth"  # name of the RoCE devices that the device plugin shares, after "rdma/"
NICS = ("rdma/", "openshift.io/", "vpc.amazonaws.com/efa")  # resources of device plugins: shared, by SR-IOV, of EFA
_OF_RDMA = ("NCCL_IB_", "NCCL_NET", "NCCL_CROSS_NIC", "NCCL_P2P_NET", "FI_", "OFI_")  # variables that only RDMA needs
_MAX_RAILS = 254  # the networks from 192.168.2.0/24 to the end of this private block (RFC 1918)


def _fit(node: NodeView, names: Iterable[str]) -> set[str]:
    """Return the RoCE interfaces among `names` that are suitable for training on a node; all if none is.

    A pod starts only if each of its networks can be created. So these are excluded: ports that the recommendation
    excludes (management, software RDMA), and members of a bridge or of Open vSwitch, on which the kernel creates no
    macvlan (drivers/net/macvlan.c: EBUSY).
    """
    left = set(names)
    routed = {link.name for link in node.links if link.kind == "vrf"}  # allows a macvlan on its members
    joined = {link.name for link in node.links if link.master is not None and link.master not in routed}
    for candidates in (left - joined, {name for name, _ in _list_ports(node)}):
        left = left & candidates or left
    return left


def find_overlaps(networks: Sequence[str], snapshots: Sequence[Snapshot]) -> str:
    """Return the ranges that overlap a subnet of these nodes, as text with the interface; empty if none does."""
    attached = [
        f"{network} ({link.name} of {node.hostname} has {there})"
        for node in map(_make_view, snapshots) for link in node.links for network in networks for there in subnets(link)
        if ipaddress.ip_network(network).overlaps(there)
    ]  # fmt: skip
    return some(attached)


def attach(
    advice: Recommendation, snapshots: Sequence[Snapshot], *, networks: Sequence[str], interfaces: Sequence[str],
    resource: str | None,
) -> Recommendation:  # fmt: skip
    """Return the recommendation for pods with these secondary networks, which use these node interfaces in this order.

    The result is the one that a recording of such a pod would give: bootstrap over net1, all HCAs behind the networks,
    no ring across rails. `resource` is the device plugin's name of the HCAs; None if the user named them. The
    recommendation is unchanged if a node does not train over these interfaces (but over InfiniBand).
    """
    nodes = [_make_view(snapshot) for snapshot in snapshots]
    rails = [[port for name, port in _list_ports(node) if name in interfaces] for node in nodes]
    if not all(rails):
        return advice
    evidence = f"net1 to net{len(networks)}: {', '.join(interfaces)}"
    needs = [setting("rails.network", name, evidence) for name in networks]
    if resource:
        needs.append(setting("rails.resource", f"{resource}: 1", evidence))
    pod_settings = _make_settings(advice.backend, nodes, rails, evidence, len(networks))
    set_here = {each.name for each in pod_settings}
    others = [each for each in advice.settings if each.name not in set_here]
    notes = tuple(note for note in advice.notes if note.topic not in set_here)
    return replace(advice, needs=(*advice.needs, *needs), settings=(*pod_settings, *others), notes=notes)


def use_tcp(advice: Recommendation, interface: str) -> Recommendation:
    """Return the same plan over TCP on this interface, without settings that only RDMA needs."""
    reason = Reason(rule="the job runs over TCP on this interface", evidence=f"--over {interface}", source="the user")
    others = [s for s in advice.settings if not (s.name.startswith(_OF_RDMA) or s.name.endswith("_SOCKET_IFNAME"))]
    backend = "NCCL" if advice.backend == "nccl" else "GLOO"
    variables = [(f"{backend}_SOCKET_IFNAME", interface), *([("NCCL_IB_DISABLE", "1")] if backend == "NCCL" else [])]
    if any(setting.name == "NCCL_NET" for setting in advice.settings):  # a plugin that NCCL would otherwise load
        variables.append(("NCCL_NET", "Socket"))
    added = (Setting(name=name, value=value, reason=reason) for name, value in variables)
    needs = tuple(n for n in advice.needs if n.name not in ("memlock", "capability") and not n.value.startswith(NICS))
    return replace(advice, settings=(*others, *added), needs=needs)


def _make_settings(
    backend: str, nodes: Sequence[NodeView], rails: Sequence[Sequence[PortView]], evidence: str, count: int
) -> list[Setting]:
    if backend != "nccl":
        return [setting("rails.gloo", "net1", evidence)]
    name = make_exact_list(["net1"], [f"net{number + 1}" for number in range(count)])  # net1 is a prefix of net10
    settings = [setting("rails.first", name, evidence)]
    values, has_others = set(), False
    for node, ports in zip(nodes, rails, strict=True):
        choice = PortChoice(chosen=tuple(ports), secondary={port.device.name: "net1" for port in ports})
        values.add(hca_list(node, choice))
        has_others |= bool({port.name for port in node.default_ports()} - {port.name for port in ports})
    # With several values the nodes name their HCAs differently, so no single list is correct. Without other ports
    # NCCL chooses these by itself, and a list of names can become wrong.
    if len(values) == 1 and has_others:
        settings.append(setting("rails.hcas", values.pop(), evidence))
    return [*settings, setting("rails.apart", "0", evidence)]


def _list_ports(node: NodeView) -> list[tuple[str, PortView]]:
    """Return the RoCE ports recommended for NCCL, each with the interface on which a macvlan can be created."""
    ports = [view for view in choose_ports(node).chosen if view.port.link_layer == "Ethernet"]
    return [(name, view) for view in ports if (name := view.device.bond or view.port.netdev)]


def _make_view(snapshot: Snapshot) -> NodeView:
    return NodeView(hostname=snapshot.hostname, snapshot=snapshot, topology=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The RDMA devices to share, and the secondary network to create on them."""

    interfaces: tuple[str, ...]  # RoCE netdevs of the nodes: ("ens8f0np0",)
    mtu_bytes: int = 1500  # of the interfaces; the default of Ethernet
    infiniband: bool = False  # the nodes have active InfiniBand ports, which need no secondary network
    ports: tuple[str, ...] = ()  # netdevs of the PCI functions, such as a bond's members; default: the interfaces
    name: str = "rdmashared-net"
    namespace: str = "default"
    range: str = "192.168.2.0/24"  # addresses that whereabouts assigns
    # Whether the nodes have the NIC driver (False: the network operator's ofedDriver installs it); None: unknown
    host_mofed: bool | None = True

    def rails(self) -> tuple[NetworkSpec, ...]:
        """Return one network per interface, with consecutive ranges; the network itself if there is one interface."""
        if len(self.interfaces) < 2:
            return (self,) if self.interfaces else ()
        return tuple(
            replace(self, interfaces=(interface,), name=f"{self.name}-{i + 1}", range=f"192.168.{2 + i}.0/24")
            for i, interface in enumerate(self.interfaces)
        )


def from_snapshots(
    snapshots: Sequence[Snapshot], *, namespace: str = "default", host_mofed: bool | None = None
) -> NetworkSpec:
    """Return the network for the active RoCE ports that all nodes have, and whether all nodes have InfiniBand.

    RoCE must be scanned with the host network, because a pod sees only its macvlan. Interfaces with the same name on
    different nodes are taken to be on the same rail. `host_mofed` None: as the nodes show it. Raises JobError if the
    nodes have no such port in common.
    """
    nodes = [_make_view(snapshot) for snapshot in snapshots]
    node_mtus = [_list_roce_mtus(node) for node in nodes]
    suitable = [_fit(node, mtus) for node, mtus in zip(nodes, node_mtus, strict=True)]
    common = sorted(set.intersection(*suitable)) if suitable else []
    layers = [{view.port.link_layer for view in node.default_ports()} for node in nodes]
    infiniband = bool(layers) and all("InfiniBand" in of_node for of_node in layers)
    if not (common or infiniband):
        raise JobError(
            "no active InfiniBand port, and no active RoCE port with a netdev, is on every one of these nodes; scan "
            "them on the host network (EFA needs none of these resources: AWS' device plugin is all)"
        )
    if len(common) > _MAX_RAILS:
        raise JobError(f"{len(common)} RoCE interfaces: at most {_MAX_RAILS} get a network each")
    ports = {port for node in nodes for name in common for port in _list_netdevs(node, name)}
    for name in ports.union(common):
        check_form("interface", "interface ", name)
    # nvidia_peermem requires the peer memory interface of NVIDIA's NIC driver (CUDA's GPUDirect RDMA guide). If the
    # module is loaded, the driver is already installed on the node.
    if host_mofed is None and all((facts := node.facts(PciFacts)) and facts.peermem_loaded for node in nodes):
        host_mofed = True
    return NetworkSpec(
        interfaces=tuple(common), ports=tuple(sorted(ports)), infiniband=infiniband, namespace=namespace,
        mtu_bytes=min((mtus[name] for mtus in node_mtus for name in common), default=1500), host_mofed=host_mofed,
    )  # fmt: skip


def list_pod_netdevs(snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """Return the RoCE netdevs whose names exist only inside a pod, so a network for them is not valid on the node."""
    inside = {
        link.name for node in map(_make_view, snapshots) for link in node.links
        if (link.role == "secondary" or link.parent_elsewhere) and link.name in _list_roce_mtus(node)
    }  # fmt: skip
    return tuple(sorted(inside))


def _list_netdevs(node: NodeView, name: str) -> tuple[str, ...]:
    """Return the netdevs by which the device plugin finds an interface: a bond's members, a VLAN's parent, itself."""
    members = tuple(link.name for link in node.links if link.master == name)
    parents = (link.parent for link in node.links if link.name == name and link.kind == "vlan" and link.parent)
    return members or tuple(parents) or (name,)


def _list_roce_mtus(node: NodeView) -> dict[str, int]:
    mtus = {link.name: link.mtu_bytes for link in node.links}
    devices: dict[str, int] = {}
    for view in node.default_ports():
        if view.port.link_layer == "Ethernet" and view.port.netdev:
            name = view.device.bond or view.port.netdev  # the kernel creates no macvlan on a member of a bond
            mtu = view.port.netdev_mtu_bytes if name == view.port.netdev else None
            devices[name] = mtu or mtus.get(name) or 1500
    return devices


def network(spec: NetworkSpec) -> tuple[Document, ...]:
    """Return all objects that a cluster needs for RDMA in pods, in the order in which to apply them."""
    return from_template("network", spec=spec, resource=RESOURCE)
