"""One node as input for the rules of the NCCL environment: its probed facts together with its topology.

This module decides nothing. A fact that no probe read is None or empty, and the rule reports it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from contracts.tables import read_table
from hardware.gpus import gpu_named
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.pci.facts import PciFacts, amd_gpus, is_cassini
from probes.rdma.facts import Gid, RdmaDevice, RdmaFacts, RdmaPort
from topology.graph import NodeTopology, PathClass

# Kinds of RDMA devices that NCCL's IB transport uses: src/transport/net_ib/init.cc uses every verbs device with an
# ACTIVE port of link layer InfiniBand or Ethernet. EFA reports neither, so only its plugin can use it.
VERBS_KINDS = ("hca", "rxe", "siw", "other")
RDMA_KINDS = ("hca", "efa")  # kinds of NICs in a topology
_HSN = re.compile(r"hsn\d+")  # Slingshot interface names, given by HPE's host software


@dataclass(frozen=True, slots=True, kw_only=True)
class PortView:
    """A port together with its device."""

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

    def gpu(self) -> GpuFacts | None:
        """Return the facts from NVML."""
        return self.snapshot.facts(GpuFacts) if self.snapshot else None

    def rdma(self) -> RdmaFacts | None:
        """Return the RDMA devices that the job may use."""
        facts = self.snapshot.facts(RdmaFacts) if self.snapshot else None
        return replace(facts, devices=()) if facts and self.sockets else facts

    def interfaces(self) -> InterfacesFacts | None:
        """Return the network interfaces."""
        return self.snapshot.facts(InterfacesFacts) if self.snapshot else None

    def hostinfo(self) -> HostinfoFacts | None:
        """Return the facts about the machine."""
        return self.snapshot.facts(HostinfoFacts) if self.snapshot else None

    def pci(self) -> PciFacts | None:
        """Return the PCIe tree."""
        return self.snapshot.facts(PciFacts) if self.snapshot else None

    def gpu_count(self) -> int:
        """Return the number of GPUs on the node that NCCL supports."""
        facts = self.gpu()
        if facts is not None:
            return len(facts.gpus)
        return len(self.topology.gpus) - len(self.amd_of_catalogue()) if self.topology else 0

    def gpu_names(self) -> tuple[str, ...]:
        """Return the known models of the node's GPUs."""
        facts = self.gpu()
        if facts is not None:
            return tuple(gpu.name for gpu in facts.gpus if gpu.name)
        return tuple(gpu.model for gpu in self.topology.gpus if gpu.model) if self.topology else ()

    def amd_gpus(self) -> tuple[str, ...]:
        """Return bus ids of AMD GPUs, by PCI class and vendor, without the CPU's graphics next to NVIDIA GPUs."""
        facts = self.pci()
        return tuple(device.bus_id for device in amd_gpus(facts)) if facts is not None else self.amd_of_catalogue()

    def amd_of_catalogue(self) -> tuple[str, ...]:
        """Return the names of AMD GPUs in the topology; they can only come from the catalogue."""
        named = [(gpu.name, gpu_named(gpu.model)) for gpu in self.topology.gpus] if self.topology else []
        return tuple(name for name, gpu in named if gpu is not None and gpu.maker == "AMD")

    def cxi(self) -> tuple[str, ...]:
        """Return Slingshot NICs (Cassini) by interface or bus id; they have no verbs device and use libfabric cxi."""
        if self.sockets:
            return ()
        facts, links = self.pci(), self.interfaces()
        known = links.interfaces if links else ()
        on_bus = {device.bus_id for device in facts.devices if is_cassini(device)} if facts else set()
        named = {each.bus_id: each.name for each in known if each.bus_id in on_bus}
        found = [named.get(bus_id, bus_id) for bus_id in sorted(on_bus)]
        by_driver = [each.name for each in known if (each.driver or "").startswith("cxi") and each.name not in found]
        if not found and not by_driver and not self.verbs_ports():
            # Slingshot 10 uses the same names for ConnectX cards with verbs devices; without a verbs device it is 11.
            by_driver = [each.name for each in known if _HSN.fullmatch(each.name) and not each.driver]
        return tuple(found + by_driver)

    def efa_count(self) -> int:
        """Return the number of EFA devices."""
        facts = self.rdma()
        if facts is not None:
            return sum(device.kind == "efa" for device in facts.devices)
        return sum(nic.kind == "efa" for nic in self.topology.nics) if self.topology else 0

    def verbs_ports(self) -> tuple[PortView, ...]:
        """Return every port of a device that NCCL's IB transport could use, up or down."""
        facts = self.rdma()
        devices = facts.devices if facts else ()
        return tuple(
            PortView(device=device, port=port)
            for device in devices
            if device.kind in VERBS_KINDS
            for port in device.ports
        )

    def default_ports(self) -> tuple[PortView, ...]:
        """Return the ports that NCCL uses without NCCL_IB_HCA: ACTIVE, InfiniBand or Ethernet."""
        return tuple(
            view
            for view in self.verbs_ports()
            if view.port.state == "ACTIVE" and view.port.link_layer in ("InfiniBand", "Ethernet")
        )


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
    found = [a for a in entries if a is not None and not (a.version == 6 and a.is_link_local)]
    return tuple(sorted(found, key=lambda address: address.version))


def port_subnet(node: NodeView, view: PortView) -> Network | None:
    """Return the IP subnet of a RoCE port's traffic: that of its GID's address, else of its interface.

    The address may belong to a VLAN or macvlan on the port's interface, or to the bond that contains the interface.
    """
    facts = node.interfaces()
    if facts is None:
        return None
    subnets = [subnet for each in facts.interfaces for subnet in networks(each)]
    for address in gid_addresses(view):
        if (found := next((subnet for subnet in subnets if address in subnet), None)) is not None:
            return found
    by_name = {each.name: each for each in facts.interfaces}
    own = [each for name in (view.port.netdev, view.device.bond) if name and (each := by_name.get(name))]
    own += [each for below in tuple(own) if below.master and (each := by_name.get(below.master))]
    names = {each.name for each in own}
    own += [each for each in facts.interfaces if each.parent in names or each.rdma_device == view.device.name]
    return next((subnet for each in own for subnet in networks(each)), None)


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
    own = {each.ip for each in addresses(interface)}
    for view in ports:
        if view.port.netdev and view.port.netdev in (interface.name, interface.parent):
            return view.device.name
        for gid in view.port.gids:
            if gid.netdev == interface.name or gid_address(gid) in own:
                return view.device.name
    return None


UNFIT_ROLES = ("loopback", "docker", "bridge", "virtual")
"""Roles of interfaces that do not lead to other nodes."""


def running_interfaces(facts: InterfacesFacts) -> list[Interface]:
    """Return the interfaces among which NCCL selects: running interfaces with an address."""
    return [each for each in facts.interfaces if runs(each) and each.addresses]


def runs(interface: Interface) -> bool:
    """Whether the interface is up and has a carrier; unknown values count as yes."""
    return interface.running is not False and interface.up is not False


def is_usable(interface: Interface) -> bool:
    """Whether the interface may lead to other nodes."""
    fit = interface.role not in UNFIT_ROLES and interface.master is None
    return fit and runs(interface) and bool(networks(interface))


def rank_interface(node: NodeView, facts: InterfacesFacts, interface: Interface) -> tuple[float, ...]:
    """Return a sort key that puts the interfaces with the best connection to other nodes first."""
    secondary = interface.role == "secondary"
    behind_hca = secondary and rdma_device_of(interface, node.default_ports()) is not None
    overlay = interface.role == "pod-default"
    speed = interface.speed_bytes_per_second or 0.0
    return (not behind_hca, not secondary, overlay, -speed, interface.name != facts.default_route)


def best_interface(node: NodeView) -> Interface | None:
    """Return the interface with the best connection to other nodes; None if there is none or if unknown."""
    facts = node.interfaces()
    usable = [each for each in facts.interfaces if is_usable(each)] if facts else []
    return min(usable, key=lambda each: rank_interface(node, facts, each), default=None) if facts else None


def p2p_level_effect(level: str, node: NodeView) -> str:
    """Describe the effect of NCCL_P2P_LEVEL on this node."""
    gpus = node.gpu_count()
    if gpus == 1:
        key = "p2p_level.one_gpu"
    elif level != "NVL":
        key = "p2p_level.other"
    else:
        key = "p2p_level.all_nvlink" if gpus and all_nvlink(node) else "p2p_level.some_nvlink"
    return str(read_table(__file__, "data/advice.toml")[key]["text"])


def all_nvlink(node: NodeView) -> bool:
    """Whether NVLink connects every pair of usable GPUs on the node; False if unknown."""
    if node.topology is None:
        return False
    names = {gpu.name for gpu in node.topology.gpus if gpu.usable}
    pairs = [pair for pair in node.topology.pairs if pair.a in names and pair.b in names]
    return bool(pairs) and all(pair.path == PathClass.NVL for pair in pairs)
