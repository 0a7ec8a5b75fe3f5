"""Which network devices a GPU may send through: RDMA devices, and Ethernet interfaces only where there are none."""

from __future__ import annotations

from probes.interfaces.facts import Interface, InterfacesFacts
from probes.rdma.facts import RdmaDevice, RdmaFacts
from topology.graph import NicNode
from topology.pcie import PciTree

_NEVER = ("loopback", "docker", "bridge")


def nics_of(rdma: RdmaFacts | None, interfaces: InterfacesFacts | None, tree: PciTree) -> tuple[NicNode, ...]:
    """RDMA devices, EFA included; else the Ethernet interfaces NCCL's socket transport could take."""
    found = interfaces.interfaces if interfaces else ()
    if rdma and rdma.devices:
        return tuple(_rdma(device, found, tree) for device in rdma.devices)
    plain = [interface for interface in found if interface.role not in _NEVER and interface.master is None]
    on_pci = [interface for interface in plain if interface.bus_id]
    fallback = [interface for interface in plain if interfaces and interface.name == interfaces.default_route]
    return tuple(_ethernet(interface, tree) for interface in on_pci or fallback)


def _rdma(device: RdmaDevice, interfaces: tuple[Interface, ...], tree: PciTree) -> NicNode:
    active = [port for port in device.ports if port.state == "ACTIVE"]
    known = bool(device.ports) and all(port.state is not None for port in device.ports)
    netdev = next((port.netdev for port in device.ports if port.netdev), None)
    # A Soft-RoCE or bond device has no PCI function of its own: it sits where its interface sits.
    lower = next((interface for interface in interfaces if netdev and interface.name == netdev), None)
    bus_id = device.bus_id or (lower.bus_id if lower else None)
    numa = device.numa_node if device.numa_node is not None else (lower.numa_node if lower else None)
    rates = [port.rate_bytes_per_second for port in active]
    layers = {port.link_layer for port in active or device.ports if port.link_layer}
    return NicNode(
        name=device.name,
        kind=device.kind,
        bus_id=bus_id,
        netdev=netdev,
        numa_node=numa,
        rate_bytes_per_second=sum(rate for rate in rates if rate) if rates and None not in rates else None,
        link_layer=layers.pop() if len(layers) == 1 else None,
        active=bool(active) if known else None,
        ports=len(device.ports) or None,
        pcie_bytes_per_second=tree.slot_bytes_per_second(bus_id),
        pcie_running_bytes_per_second=tree.running_bytes_per_second(bus_id),
        pcie_link=tree.link(bus_id),
    )


def _ethernet(interface: Interface, tree: PciTree) -> NicNode:
    return NicNode(
        name=interface.name,
        kind="ethernet",
        bus_id=interface.bus_id,
        netdev=interface.name,
        numa_node=interface.numa_node,
        rate_bytes_per_second=interface.speed_bytes_per_second,
        link_layer="Ethernet",
        active=interface.running,
        ports=1,
        pcie_bytes_per_second=tree.slot_bytes_per_second(interface.bus_id),
        pcie_running_bytes_per_second=tree.running_bytes_per_second(interface.bus_id),
        pcie_link=tree.link(interface.bus_id),
    )
