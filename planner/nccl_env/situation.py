"""The input of the rules of the NCCL environment, and the types of their answers.

The input is the nodes with their probed facts and topology, the known facts about the job, and NCCL's release. This
module decides nothing. A fact that no probe read is None or empty, and the rule reports it. Answers are settings, needs
of a pod and notes, with texts from data/advice.toml.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from contracts.tables import read_table
from hardware.gpus import find_gpu
from hardware.machines import catalogue
from planner.nccl_env import Platform, Version, platforms
from probes.api import F, Failed, Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.pci.facts import HABANA, PciFacts, is_cassini, list_other_gpus
from probes.rdma.facts import Gid, RdmaDevice, RdmaFacts, RdmaPort
from topology.graph import ClusterTopology, NicNode, NodeTopology, PathClass

# Kinds of RDMA devices that NCCL's IB transport uses: src/transport/net_ib/init.cc uses every verbs device with an
# ACTIVE port of link layer InfiniBand or Ethernet. EFA reports neither, so only its plugin can use it.
VERBS_KINDS = ("hca", "rxe", "siw", "other")
RDMA_KINDS = ("hca", "efa")  # kinds of NICs in a topology
_HSN = re.compile(r"hsn\d+")  # Slingshot interface names, given by HPE's host software


@dataclass(frozen=True, slots=True, kw_only=True)
class PortView:
    """A port together with its host and its device."""

    hostname: str
    device: RdmaDevice
    port: RdmaPort

    @property
    def name(self) -> str:
        """Name of the port as NCCL prints it: "mlx5_0:1"."""
        return f"{self.device.name}:{self.port.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node: probed and derived facts."""

    hostname: str
    snapshot: Snapshot | None
    topology: NodeTopology | None
    sockets: bool = False  # the job uses TCP, so RDMA devices are ignored

    def facts(self, kind: type[F]) -> F | None:
        """Return the facts of this type; None if they were not read."""
        return self.snapshot.facts(kind) if self.snapshot else None

    @property
    def nics(self) -> tuple[NicNode, ...]:
        """The NICs of the topology that the job may use."""
        nics = self.topology.nics if self.topology else ()
        return tuple(nic for nic in nics if nic.kind not in RDMA_KINDS) if self.sockets else nics

    @property
    def links(self) -> tuple[Interface, ...]:
        """All network interfaces, as far as they are known."""
        facts = self.facts(InterfacesFacts)
        return facts.interfaces if facts else ()

    def gpu_count(self) -> int:
        """Return the number of GPUs on the node that NCCL supports."""
        facts = self.facts(GpuFacts)
        if facts is not None:
            return len(facts.gpus)
        return len(self.topology.gpus) - len(self.amd_of_catalogue()) if self.topology else 0

    def gpu_names(self) -> tuple[str, ...]:
        """Return the known models of the node's GPUs."""
        facts = self.facts(GpuFacts)
        if facts is not None:
            return tuple(gpu.name for gpu in facts.gpus if gpu.name)
        return tuple(gpu.model for gpu in self.topology.gpus if gpu.model) if self.topology else ()

    def unsupported_gpus(self) -> tuple[str, ...]:
        """Return bus ids of AMD GPUs and Gaudi accelerators, without the CPU's graphics next to NVIDIA GPUs."""
        facts = self.facts(PciFacts)
        return tuple(gpu.bus_id for gpu in list_other_gpus(facts)) if facts is not None else self.amd_of_catalogue()

    def amd_of_catalogue(self) -> tuple[str, ...]:
        """Return the names of AMD GPUs in the topology; they can only come from the catalogue."""
        gpus = [(gpu.name, find_gpu(gpu.model)) for gpu in self.topology.gpus] if self.topology else []
        return tuple(name for name, gpu in gpus if gpu is not None and gpu.maker == "AMD")

    def cxi(self) -> tuple[str, ...]:
        """Return Slingshot NICs (Cassini) by interface or bus id; they have no verbs device and use libfabric cxi."""
        if self.sockets:
            return ()
        facts = self.facts(PciFacts)
        on_bus = {device.bus_id for device in facts.devices if is_cassini(device)} if facts else set()
        by_bus = {each.bus_id: each.name for each in self.links if each.bus_id in on_bus}
        nics = [by_bus.get(bus_id, bus_id) for bus_id in sorted(on_bus)]
        nics += [each.name for each in self.links if (each.driver or "").startswith("cxi") and each.name not in nics]
        if not nics and not self.verbs_ports():
            # Slingshot 10 uses the same names for ConnectX cards with verbs devices; without a verbs device it is 11.
            nics = [each.name for each in self.links if _HSN.fullmatch(each.name) and not each.driver]
        return tuple(nics)

    def efa_count(self) -> int:
        """Return the number of EFA devices that the job may use."""
        facts = self.facts(RdmaFacts)
        if facts is not None and not self.sockets:
            return sum(device.kind == "efa" for device in facts.in_reach)
        return sum(nic.kind == "efa" for nic in self.nics)

    def verbs_ports(self) -> tuple[PortView, ...]:
        """Return every port of a device that NCCL's IB transport could use, up or down; none for a job over TCP."""
        facts = None if self.sockets else self.facts(RdmaFacts)
        devices = [device for device in facts.accessible if device.kind in VERBS_KINDS] if facts else []
        return tuple(PortView(hostname=self.hostname, device=d, port=port) for d in devices for port in d.ports)

    def default_ports(self) -> tuple[PortView, ...]:
        """Return the ports that NCCL uses without NCCL_IB_HCA: ACTIVE, InfiniBand or Ethernet."""
        active = (view for view in self.verbs_ports() if view.port.state == "ACTIVE")
        return tuple(view for view in active if view.port.link_layer in ("InfiniBand", "Ethernet"))


def find_cloud(info: HostinfoFacts) -> tuple[str, str, str] | None:
    """Return name and title of a machine's cloud, and the fact that identifies it; None if there is none."""
    of_dmi = f"DMI vendor {info.vendor or ''}, product {info.product or ''}"
    facts = {"chassis_asset_tag": f"chassis asset tag {info.chassis_asset_tag}",
             "cloud_id": f"/run/cloud-init/cloud-id: {info.cloud_id}", "vendor": of_dmi, "product": of_dmi}  # fmt: skip
    for fact, text in facts.items():
        for name, row in read_table(__file__, "data/platforms.toml")["cloud"].items():
            if fact in row and re.fullmatch(row[fact], getattr(info, fact) or ""):
                return name, row["title"], text
    return None


def count_fabrics(node: NodeView) -> dict[str, int]:
    """Count the ports of each possible network between nodes: "efa", "cxi", "infiniband", "roce", "ethernet"."""
    counts = {"efa": node.efa_count(), "cxi": len(node.cxi())}
    for view in node.verbs_ports():
        layer = {"InfiniBand": "infiniband", "Ethernet": "roce"}.get(view.port.link_layer or "")
        if layer and view.device.kind == "hca":
            counts[layer] = counts.get(layer, 0) + 1
    if not any(counts.values()):
        plain = [each for each in node.links if each.role in ("host", "secondary", "pod-default")]
        counts["ethernet"] = sum(each.master is None and each.running is not False for each in plain)
    return {name: count for name, count in counts.items() if count}


def recognise(node: NodeView) -> Platform | None:
    """Return the platform whose facts all match a probed node, or of a catalogue machine; None if there is none."""
    info = node.facts(HostinfoFacts)
    if info is None:
        sku = node.topology.sku if node.topology and not node.snapshot else None
        return next((row for row in platforms() if sku in row.catalogue), None)
    cloud, names = find_cloud(info), " ".join(node.gpu_names())
    there, is_amd = count_fabrics(node), bool(node.unsupported_gpus() and not node.gpu_count())
    for row in platforms():
        conditions = (
            row.recognised and row.cloud in (None, cloud[0] if cloud else None),
            re.search(row.product or "", info.product or ""),
            row.amd == is_amd,
            re.search(row.gpu or "", names),
            not row.fabric or there.get(row.fabric, 0) >= max(1, row.nics),
        )
        if all(conditions):
            return row
    return None


def find_plugin(node: NodeView) -> tuple[str, str] | None:
    """Return the vendor's plugin that carries GPU traffic over a node's Ethernet NICs, and its file ("": not found).

    Return None on other machines.
    """
    row, info = recognise(node), node.facts(HostinfoFacts)
    of_platform = (each for each in catalogue() if row is not None and each.name in row.catalogue)
    name = next((each.network_plugin for each in of_platform if each.network_plugin), None)
    if row is None or name is None:
        return None
    return name, next((path for path in (*row.script, *row.library) if info and path in info.vendor_files), "")


def with_plugin(cluster: ClusterTopology, snapshots: Sequence[Snapshot]) -> ClusterTopology:
    """Return the cluster with a vendor's plugin as its network, if the scans of all nodes show the plugin's file."""
    plugins = [find_plugin(NodeView(hostname=each.hostname, snapshot=each, topology=None)) for each in snapshots]
    if cluster.inter_node_transport != "tcp" or not all(each and each[1] for each in plugins):
        return cluster
    return replace(cluster, inter_node_transport=next((each[0] for each in plugins if each), "tcp"))


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def gid_address(gid: Gid) -> Address | None:
    """Return the IP address of a GID, as IPv4 if it is mapped; None if the text is not a GID."""
    try:
        address = ipaddress.IPv6Address(gid.gid)
    except ValueError:
        return None
    return address.ipv4_mapped or address


def gid_addresses(view: PortView, kind: str | None = "RoCE v2") -> tuple[Address, ...]:
    """Return addresses of a port's GIDs of one type (None: any type), without link-local IPv6 addresses (fe80::).

    IPv4 comes first, otherwise in table order, as in NCCL's search (src/transport/net_ib/connect.cc,
    ncclIbGetGidIndex). Its validGid rejects fe80::, but accepts 169.254.0.0/16, which directly connected hosts use.
    """
    entries = (gid_address(gid) for gid in view.port.gids if kind is None or gid.type == kind)
    gids = [a for a in entries if a is not None and not (a.version == 6 and a.is_link_local)]
    return tuple(sorted(gids, key=lambda address: address.version))


def port_subnet(node: NodeView, view: PortView) -> Network | None:
    """Return the IP subnet of a RoCE port's traffic: that of its GID's address, else of its interface.

    The address may belong to a VLAN or macvlan on the port's interface, or to the bond that contains the interface.
    """
    subnets = [subnet for each in node.links for subnet in networks(each)]
    for address in gid_addresses(view):
        if (match := next((subnet for subnet in subnets if address in subnet), None)) is not None:
            return match
    by_name = {each.name: each for each in node.links}
    interfaces = [each for name in (view.port.netdev, view.device.bond) if name and (each := by_name.get(name))]
    interfaces += [each for below in tuple(interfaces) if below.master and (each := by_name.get(below.master))]
    names = {each.name for each in interfaces}
    interfaces += [each for each in node.links if each.parent in names or each.rdma_device == view.device.name]
    return next((subnet for each in interfaces for subnet in networks(each)), None)


def addresses(interface: Interface) -> Iterator[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Yield the addresses of an interface, without link-local ones."""
    for text in interface.addresses:
        try:
            parsed = ipaddress.ip_interface(text)
        except ValueError:
            continue
        if not parsed.ip.is_link_local:
            yield parsed


def networks(interface: Interface) -> tuple[Network, ...]:
    """Return the subnets of an interface's addresses, without link-local ones."""
    return tuple(each.network for each in addresses(interface))


def rdma_device_of(interface: Interface, ports: Sequence[PortView]) -> str | None:
    """Return the RDMA device of an interface.

    In a pod, the parent of a macvlan is not visible. Then the GID table with the interface's address shows the device.
    """
    if interface.rdma_device:
        return interface.rdma_device
    ips = {each.ip for each in addresses(interface)}
    for view in ports:
        if view.port.netdev and view.port.netdev in (interface.name, interface.parent):
            return view.device.name
        for gid in view.port.gids:
            if gid.netdev == interface.name or gid_address(gid) in ips:
                return view.device.name
    return None


def p2p_level_effect(level: str, node: NodeView) -> str:
    """Describe the effect of NCCL_P2P_LEVEL on this node."""
    key = "p2p_level.other"
    if level == "NVL":
        key = "p2p_level.all_nvlink" if all_nvlink(node) else "p2p_level.some_nvlink"
    return str(read_table(__file__, "data/advice.toml")[key]["text"])


def all_nvlink(node: NodeView) -> bool:
    """Whether NVLink connects every pair of usable GPUs on the node; False if unknown."""
    if node.topology is None:
        return False
    names = {gpu.name for gpu in node.topology.gpus if gpu.usable}
    pairs = [pair for pair in node.topology.pairs if pair.a in names and pair.b in names]
    return bool(pairs) and all(pair.path == PathClass.NVL for pair in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All input of one recommendation."""

    nodes: tuple[NodeView, ...]
    cluster: ClusterTopology
    nccl_version: Version | None
    multi_node: bool | None  # None: unknown; the job may use several nodes
    ranks_per_node: int | None = None  # None: one per GPU, or two without GPUs

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return max(sum(node.gpu_count() for node in self.nodes), 0 if self.unsupported else self.cluster.world_size)

    @property
    def unsupported(self) -> bool:
        """Whether the GPUs are from AMD, which RCCL supports, or Gaudi accelerators, which HCCL supports."""
        has_supported = any(node.gpu_count() for node in self.nodes if node.snapshot)
        return not has_supported and any(node.unsupported_gpus() for node in self.nodes)

    @property
    def cxi(self) -> bool:
        """Whether any node has HPE Slingshot NICs."""
        return any(node.cxi() for node in self.nodes)

    @property
    def backend(self) -> str:
        """Collective library: "nccl", "rccl" and "hccl" (not checked), or "gloo" without GPUs."""
        if self.unsupported:
            gpus = (gpu for node in self.nodes if (facts := node.facts(PciFacts)) for gpu in list_other_gpus(facts))
            return "hccl" if any(gpu.vendor_id == HABANA for gpu in gpus) else "rccl"
        return "nccl" if self.gpus or self.unread("gpu") else "gloo"

    def unread_nodes(self, kind: type[object]) -> tuple[str, ...]:
        """Return the nodes of which these facts are unknown, for any reason."""
        return tuple(node.hostname for node in self.nodes if node.facts(kind) is None)

    def unread(self, probe: str) -> str:
        """Return why a probe failed on some node; empty if it succeeded or found nothing to read."""
        for node in self.nodes:
            outcome = node.snapshot.outcomes.get(probe) if node.snapshot else None
            if isinstance(outcome, Failed):
                return f"{node.hostname}: {probe} probe failed: {outcome.error}"
        return ""

    @property
    def efa(self) -> bool:
        """Whether any node has EFA."""
        return any(node.efa_count() for node in self.nodes)

    @property
    def sockets(self) -> bool:
        """Whether the job must use TCP although nodes have RDMA."""
        return any(node.sockets for node in self.nodes)

    @property
    def rdma_ports(self) -> bool:
        """Whether any node has a port that NCCL's IB transport would use."""
        return any(node.default_ports() for node in self.nodes)

    def ranks_on(self, node: NodeView) -> int:
        """Return the number of ranks on this node; without GPUs two, the minimum for a collective."""
        return self.ranks_per_node or node.gpu_count() or len(node.unsupported_gpus()) or 2

    @property
    def one_node(self) -> bool:
        """Whether the job certainly runs on a single node."""
        return self.multi_node is False

    def older_than(self, release: Version) -> bool | None:
        """Whether the NCCL in use is older than `release`; None if its version is unknown."""
        return None if self.nccl_version is None else self.nccl_version < release


def make_situation(
    snapshots: Sequence[Snapshot], cluster: ClusterTopology, *, nccl_version: Version | None = None,
    multi_node: bool | None = None, ranks_per_node: int | None = None,
) -> Situation:  # fmt: skip
    """Join snapshots and topology by host name. Several nodes mean a multi-node job, unless `multi_node` is False.

    If `multi_node` is None with one snapshot, the job may use several nodes, so network settings are included.
    `ranks_per_node` None: one per GPU, or two without GPUs.
    """
    nodes = tuple(_list_nodes(snapshots, cluster))
    if multi_node is None and max(len(nodes), len(cluster.nodes)) > 1:
        multi_node = True
    offers_rdma = any(  # NCCL, or its EFA plugin, would use RDMA by default
        node.efa_count() or node.default_ports() if node.snapshot else any(nic.kind in RDMA_KINDS for nic in node.nics)
        for node in nodes
    )
    if multi_node is not False and cluster.inter_node_transport == "tcp" and offers_rdma:
        nodes = tuple(replace(node, sockets=True) for node in nodes)
    return Situation(
        nodes=nodes, cluster=cluster, nccl_version=nccl_version, multi_node=multi_node, ranks_per_node=ranks_per_node
    )


def _list_nodes(snapshots: Sequence[Snapshot], cluster: ClusterTopology) -> Iterator[NodeView]:
    """Yield every probed node, and one node of each kind that was not probed: others would give equal answers.

    Nodes are of one kind if they share their parts; the facts of a probed node apply to all nodes of its kind.
    """
    topologies = {node.hostname: node for node in cluster.nodes}
    probed = {snapshot.hostname for snapshot in snapshots}
    if len(snapshots) == 1 and topologies and not probed & set(topologies):
        # one host planned several times, under generated names
        yield NodeView(hostname=snapshots[0].hostname, snapshot=snapshots[0], topology=cluster.nodes[0])
        return
    for snapshot in snapshots:
        yield NodeView(hostname=snapshot.hostname, snapshot=snapshot, topology=topologies.get(snapshot.hostname))
    probed_hardware = {(id(node.gpus), id(node.nics)) for node in cluster.nodes if node.hostname in probed}
    left = [node for node in cluster.nodes if (id(node.gpus), id(node.nics)) not in probed_hardware]
    kinds = {(id(node.gpus), id(node.nics)): node for node in reversed(left)}
    for node in reversed(kinds.values()):
        yield NodeView(hostname=node.hostname, snapshot=None, topology=node)


def by_host(texts: Iterable[tuple[str, str]]) -> str:
    """Format (host, text) pairs: the texts of each host in one list, hosts with equal lists together."""
    lists: dict[str, list[str]] = {}
    for host, text in texts:
        lists.setdefault(host, []).append(text)
    hosts: dict[str, list[str]] = {}
    for host, items in lists.items():
        hosts.setdefault(", ".join(items), []).append(host)
    return "; ".join(f"{some(names)}: {text}" for text, names in hosts.items())


def some(names: Sequence[str]) -> str:
    """Return the first three names, and the number of further ones."""
    further = len(names) - 3
    return ", ".join(names[:3]) + (f" and {further} more" if further > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason of an answer: the rule, the probed fact, and the source of the rule."""

    rule: str
    evidence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable, or another need of a job's pods, with its reason."""

    name: str  # of needs: "shm_bytes", "memlock", "resource", "network", "capability", "compute_domain"
    value: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Information about a variable that is not set on purpose, or about a risk."""

    topic: str
    text: str
    evidence: str = ""


def note(key: str, evidence: str = "", /, *extra_keys: str, **fields: object) -> Note:
    """Create a note with its text filled in; `extra_keys` are keys of texts to append."""
    row, text = _read_advice(key, *extra_keys, **fields)
    return Note(topic=row["name"], text=text, evidence=evidence)


def setting(key: str, value: str, evidence: str, /, *extra_keys: str, **fields: object) -> Setting:
    """Create a setting or a need with its reason filled in; `extra_keys` are keys of texts to append to its rule."""
    row, text = _read_advice(key, *extra_keys, **fields)
    return Setting(name=row["name"], value=value, reason=Reason(rule=text, evidence=evidence, source=row["source"]))


def _read_advice(key: str, *extra_keys: str, **fields: object) -> tuple[Mapping[str, str], str]:
    """Return a row of advice.toml ("name", "text", and "source" of settings and needs), and the filled-in texts."""
    table = read_table(__file__, "data/advice.toml")
    return table[key], "".join(table[each]["text"].format(**fields) for each in (key, *extra_keys))


# Settings that a platform publishes.


def list_published(case: Situation) -> dict[str, Setting]:
    """Return the published values that are recommended without change, if all nodes have one platform.

    Variables that the machine's configuration file sets, possibly differently, are left out.
    """
    probed = [node for node in case.nodes if node.snapshot] or list(case.nodes)
    rows = [recognise(node) for node in probed]
    row = rows[0] if rows and all(each == rows[0] for each in rows) else None
    if row is None or row.amd:
        return {}
    configured = {name for node in probed if (info := node.facts(HostinfoFacts)) for name in info.nccl_conf or ()}
    evidence = "; ".join(dict.fromkeys(_describe_evidence(node, row) for node in probed))
    rule = f"Published for {row.name}. Nothing that a probe reads on a node can confirm the value"
    return {
        name: Setting(name=name, value=value, reason=Reason(rule=rule, evidence=evidence, source=recipe.source))
        for name, (value, recipe) in sorted(row.values().items()) if name in recipe.set and name not in configured
    }  # fmt: skip


def _describe_evidence(node: NodeView, row: Platform) -> str:
    info = node.facts(HostinfoFacts)
    if info is None:
        return f"{node.hostname} is a machine of the catalogue; no node was probed"
    cloud = find_cloud(info)
    parts = [cloud[2]] if cloud and row.cloud else []
    if row.product:
        parts.append(f"product {info.product}")
    if row.gpu:
        parts.append(", ".join(sorted(set(node.gpu_names()))))
    if row.fabric:
        count = count_fabrics(node).get(row.fabric, 0)
        parts.append(f"{count} {row.fabric} port{'' if count == 1 else 's'}")
    return f"{node.hostname}: {'; '.join(dict.fromkeys(parts))}"
