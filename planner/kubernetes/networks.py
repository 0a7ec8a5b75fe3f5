"""The cluster's network resources, from what was probed: operators' policies, secondary network, memlock, storage.

Specifications: mellanox.com/v1alpha1 (NVIDIA network operator), k8s.cni.cncf.io/v1 (Multus), nvidia.com/v1 (GPU
operator), machineconfiguration.openshift.io/v1 with Ignition 3.2 (which has no `contents.inline`: a file's content is
a `data:` URL), CRI-O crio.conf(5) default_ulimits.

Several RoCE interfaces are rails, and a job's pods get a network for each, as NVIDIA's operator documents several NICs
(Network Operator documentation, Kubernetes Launch Kit: profile "MacVLAN with RDMA Shared", `--multirail`): a
MacvlanNetwork for each, and subnets counted up from a first one. In one subnet the kernel would answer ARP for any rail
on any other and send by one of them alone (Linux Documentation/networking/ip-sysctl.rst: arp_ignore, rp_filter). In the
pod Multus names them net1 to netN, in the annotation's order.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.advice import Recommendation
from planner.kubernetes.job import JobError, check_form
from planner.kubernetes.manifests import Document, from_template
from planner.nccl_env.hcas import PortChoice, choose_ports
from planner.nccl_env.interfaces import exact_if_needed
from planner.nccl_env.nodes import NodeView, PortView
from planner.nccl_env.nodes import networks as subnets
from planner.nccl_env.rdma import hca_list
from planner.nccl_env.situation import PodNeed, Reason, Setting
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts

# Addresses that are nobody's on the Internet: RFC 1918, RFC 6598, RFC 4193. Nobody chose the ranges after the first,
# so they must not run into addresses that belong to someone.
PRIVATE = tuple(
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)

_MULTUS = "Multus annotation k8s.v1.cni.cncf.io/networks"


def ranges(cidr: str, gateway: str | None, count: int) -> list[tuple[str, str | None]]:
    """Range and gateway of each of `count` rails: networks of one size, from the given one on."""
    first = ipaddress.ip_network(cidr)
    home = next((block for block in PRIVATE if first[0] in block and first[-1] in block), None)
    if home is None or int(first[0]) + count * first.num_addresses - 1 > int(home[-1]):
        blocks = ", ".join(str(block) for block in PRIVATE)
        raise JobError(
            f"range={cidr!r}: {count} interfaces need {count} networks of its size, one after the other, and these "
            f"{f'leave {home}' if home else 'are not private'}; all of them must lie within one of {blocks}"
        )
    first_hop = ipaddress.ip_address(gateway) if gateway else None
    if first_hop and first_hop not in first:
        raise JobError(f"gateway={gateway!r}: must be within range={cidr!r}: each of {count} interfaces has its own")
    steps = [index * first.num_addresses for index in range(count)]
    return [(f"{first[0] + step}/{first.prefixlen}", str(first_hop + step) if first_hop else None) for step in steps]


def fit(snapshot: Snapshot, names: Iterable[str]) -> set[str]:
    """Those of a node's RoCE interfaces that training is for, or all: a pod starts only if each network can be made.

    Left out are ports that the recommendation keeps NCCL from (management, software), and members of a bridge or of
    Open vSwitch, on which the kernel makes no macvlan (drivers/net/macvlan.c: EBUSY).
    """
    left = set(names)
    facts = snapshot.facts(InterfacesFacts)
    known = {link.name: link for link in facts.interfaces} if facts else {}
    masters = {name: known[name].master for name in left if name in known}
    routed = {link.name for link in known.values() if link.kind == "vrf"}  # takes no packets from its members
    free = {name for name in left if masters.get(name) is None or masters[name] in routed}
    for wanted in (free, {name for name, _ in _ports(snapshot)}):
        left = left & wanted or left
    return left


def in_use(networks: Sequence[str], snapshots: Sequence[Snapshot]) -> str:
    """The ranges that overlap a network these nodes are on, and which; empty: none does."""
    found = []
    for snapshot in snapshots:
        facts = snapshot.facts(InterfacesFacts)
        for link in facts.interfaces if facts else ():
            found += [
                f"{network} ({link.name} of {snapshot.hostname} has {there})"
                for network in networks
                for there in subnets(link)
                if ipaddress.ip_network(network).overlaps(there)
            ]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def attached(
    advice: Recommendation,
    snapshots: Sequence[Snapshot],
    *,
    networks: Sequence[str],
    interfaces: Sequence[str],
    resource: str | None,
) -> Recommendation:
    """The same recommendation for pods on these networks, which stand on these interfaces of the nodes, in order.

    As it would be from a record of such a pod: bootstrap by net1, all HCAs behind the networks, no ring across rails.
    `resource` is what the device plugin calls the HCAs, None where the user named them. Nodes that train over another
    fabric than these interfaces, InfiniBand, leave it as it is.
    """
    rails = [[view for name, view in _ports(snapshot) if name in interfaces] for snapshot in snapshots]
    if not all(rails):
        return advice
    seen = f"net1 to net{len(networks)}: {', '.join(interfaces)}"
    where = Reason(rule="A pod has GIDs only of the rails to which it has a network", evidence=seen, source=_MULTUS)
    needs = [PodNeed(name="network", value=name, reason=where) for name in networks]
    if resource:
        needs.append(PodNeed(name="resource", value=f"{resource}: 1", reason=where))
    pod_settings = _settings(advice.backend, snapshots, rails, seen, len(networks))
    named = {setting.name for setting in pod_settings}
    return replace(
        advice,
        needs=(*advice.needs, *needs),
        settings=(*pod_settings, *(setting for setting in advice.settings if setting.name not in named)),
        notes=tuple(note for note in advice.notes if note.topic not in named),
    )


def _settings(
    backend: str, snapshots: Sequence[Snapshot], rails: Sequence[Sequence[PortView]], seen: str, count: int
) -> list[Setting]:
    first = Reason(rule="The first rail's network is every pod's net1", evidence=seen, source=_MULTUS)
    if backend != "nccl":
        return [Setting(name="GLOO_SOCKET_IFNAME", value="net1", reason=first)]
    name = exact_if_needed(["net1"], [f"net{number + 1}" for number in range(count)])  # net1 is a prefix of net10
    made = [Setting(name="NCCL_SOCKET_IFNAME", value=name, reason=first)]
    pairs = list(zip(snapshots, rails, strict=True))
    values = {_hcas(snapshot, ports) for snapshot, ports in pairs}
    # Several values: the HCAs have other names on each node, and no list fits all.
    if len(values) == 1 and any(_left_out(snapshot, ports) for snapshot, ports in pairs):
        rule = "A pod may see every HCA of the node, but only those behind its networks have a GID it can use"
        known = Reason(rule=rule, evidence=seen, source="NCCL src/transport/net_ib/init.cc")
        made.append(Setting(name="NCCL_IB_HCA", value=values.pop(), reason=known))
    rule = "Each rail is a subnet of its own, and nothing in the pod routes from one to another"
    apart = Reason(rule=rule, evidence=seen, source="NCCL docs/userguide/source/env.rst")
    return [*made, Setting(name="NCCL_CROSS_NIC", value="0", reason=apart)]


def _left_out(snapshot: Snapshot, ports: Sequence[PortView]) -> bool:
    """Whether NCCL would take a port besides the rails': only then a list of names is worth what it may break."""
    return bool({view.name for view in _node(snapshot).default_ports()} - {view.name for view in ports})


def _hcas(snapshot: Snapshot, ports: Sequence[PortView]) -> str:
    choice = PortChoice(chosen=tuple(ports), secondary={view.device.name: "net1" for view in ports})
    return hca_list(_node(snapshot), choice)


def _ports(snapshot: Snapshot) -> list[tuple[str, PortView]]:
    """The RoCE ports that are recommended to NCCL, by the interface that a macvlan can stand on."""
    ports = [view for view in choose_ports(_node(snapshot)).chosen if view.port.link_layer == "Ethernet"]
    return [(name, view) for view in ports if (name := view.device.bond or view.port.netdev)]


def _node(snapshot: Snapshot) -> NodeView:
    return NodeView(hostname=snapshot.hostname, snapshot=snapshot, topology=None)


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
            check_form("interface", "interface ", name)
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
        addresses = ranges(self.range, self.gateway, len(self.interfaces))
        return tuple(
            replace(self, interfaces=(interface,), name=f"{self.name}-{i + 1}", range=cidr, gateway=gateway)
            for i, (interface, (cidr, gateway)) in enumerate(zip(self.interfaces, addresses, strict=True))
        )


def from_snapshots(snapshots: Sequence[Snapshot], **settings: Any) -> NetworkSpec:
    """Interfaces and MTU of the active RoCE ports that every one of these nodes has, and whether each has InfiniBand.

    RoCE must be scanned where the nodes' own interfaces are visible (host network): a pod sees only its macvlan.
    Rails are told apart by their names: the interface of one name is on one rail on every node.
    """
    common: dict[str, int] | None = None
    for snapshot in snapshots:
        found = _roce(snapshot)
        here = {name: found[name] for name in fit(snapshot, found)}
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
    defaults: dict[str, Any] = {"interfaces": (), "infiniband": infiniband, "host_mofed": there}
    if common:
        ports = {port for snapshot in snapshots for name in common for port in _names_of_ports(snapshot, name)}
        defaults |= {
            "interfaces": tuple(sorted(common)), "ports": tuple(sorted(ports)), "mtu_bytes": min(common.values()),
        }  # fmt: skip
    return NetworkSpec(**{**defaults, **settings})


def seen_from_a_pod(snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """RoCE netdevs that bear a name of a pod, not of the node: what is rendered for them fits no node as it stands."""
    names = set()
    for snapshot in snapshots:
        links = snapshot.facts(InterfacesFacts)
        known = links.interfaces if links else ()
        inside = {link.name for link in known if link.role == "secondary" or link.parent_elsewhere}
        names |= inside & _roce(snapshot).keys()
    return tuple(sorted(names))


def _names_of_ports(snapshot: Snapshot, name: str) -> tuple[str, ...]:
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


def shared_claim(
    *, name: str = "shared", namespace: str = "default", size: str = "500Gi", storage_class: str
) -> Document:
    """A claim that every pod of the job may write: model, cache, checkpoints."""
    (claim,) = from_template("claim", name=name, namespace=namespace, size=size, storage_class=storage_class)
    return claim


def network(spec: NetworkSpec) -> tuple[Document, ...]:
    """Everything that a cluster needs for RDMA in pods, in the order to apply it."""
    return from_template("network", spec=spec)
