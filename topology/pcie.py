"""Path labels and planning bandwidth from PCI ancestry alone, with no vendor tool.

NCCL plans by what a link could do; what it really runs at is told apart, for expectations and for people.

Specification: the legend of `nvidia-smi topo -m`; NVML nvmlGpuTopologyLevel_t;
PCI Express Base Specification 1.3 (a switch is an upstream port with downstream ports below it).
"""

from __future__ import annotations

from collections.abc import Iterable

from probes.pci.facts import PciDevice, is_bridge, is_network
from topology.graph import CpuNode
from topology.nccl import INTEL_P2P_OVERHEAD, cpu_bytes_per_second, pcie_bytes_per_second, pcie_generation

_DEEPEST = 64  # bridges above a device; the specification's 256 buses cannot nest deeper in practice


class PciTree:
    """Devices by bus id, and the bridges above each."""

    def __init__(self, devices: Iterable[PciDevice]) -> None:
        self.devices = {device.bus_id: device for device in devices}
        self._above: dict[str, tuple[str, ...]] = {}  # asked once for every pair of a device
        self._slots: dict[str, float | None] = {}

    def above(self, bus_id: str) -> tuple[str, ...]:
        """Bridges from the root port down to the device's own port."""
        if bus_id not in self._above:
            self._above[bus_id] = self._chain(bus_id)
        return self._above[bus_id]

    def _chain(self, bus_id: str) -> tuple[str, ...]:
        chain: list[str] = []
        device = self.devices.get(bus_id)
        while device and device.parent and device.parent not in chain and len(chain) < _DEEPEST:
            chain.append(device.parent)
            device = self.devices.get(device.parent)
        return tuple(reversed(chain))

    def label(self, first: str | None, second: str | None) -> str | None:
        """nvidia-smi's word for the path between two devices, None where one is not in the tree."""
        if not first or not second:
            return None
        a, b = self.devices.get(first), self.devices.get(second)
        if a is None or b is None:
            return None
        above_a, above_b = self.above(first), self.above(second)
        if above_a[:1] and above_a[:1] == above_b[:1]:
            return _below_one_root_port(above_a, above_b)
        if a.root is not None and a.root == b.root:
            return "PHB"
        if a.numa_node is None or b.numa_node is None:
            # One memory node at most is known: two host bridges are NODE apart where no other node exists.
            nodes = {device.numa_node for device in self.devices.values()} - {None}
            return "NODE" if not nodes else "SYS"
        return "NODE" if a.numa_node == b.numa_node else "SYS"

    def slot_bytes_per_second(self, bus_id: str | None) -> float | None:
        """NCCL's plan of the device's own link: the most that device and port can do together, as NCCL reads it."""
        if bus_id is None:
            return None
        if bus_id not in self._slots:
            self._slots[bus_id] = self._slot(bus_id)
        return self._slots[bus_id]

    def _slot(self, bus_id: str) -> float | None:
        return pcie_bytes_per_second(*self._possible(bus_id))

    def _possible(self, bus_id: str) -> tuple[float | None, int | None]:
        """Speed and width that the device and the port above it can both do."""
        device = self.devices.get(bus_id)
        if device is None:
            return None, None
        speed, width = _most(device)
        port = self.devices.get(device.parent or "")
        if port is not None:
            port_speed, port_width = _most(port)
            speed = min(filter(None, (speed, port_speed)), default=None)
            width = min(filter(None, (width, port_width)), default=None)
        return speed, width

    def _running(self, bus_id: str) -> tuple[float | None, int | None]:
        """Speed and width as the link runs now, never more than possible.

        GPUs, and the switches above them, lower their link's speed when idle: of theirs only the width counts. Ports
        inside a switch are no links; below a root port both ends of one link are known. A virtual function has none.
        """
        speed, width = self._possible(bus_id)
        device = self.devices.get(bus_id)
        if device is None or device.physical_function is not None:
            return speed, width
        port = self.devices.get(device.parent or "")
        if is_bridge(device.class_code) and (port is None or port.parent is not None):
            return speed, width
        if is_network(device.class_code):
            speed = min(filter(None, (speed, device.link_transfers_per_second)), default=None)
        return speed, min(filter(None, (width, device.link_width)), default=None)

    def running_bytes_per_second(self, bus_id: str | None) -> float | None:
        """The plan of the device's own link as it runs; None where that is not less than its slot."""
        slot = self.slot_bytes_per_second(bus_id)
        now = pcie_bytes_per_second(*self._running(bus_id)) if bus_id else None
        return now if now and slot and now < slot else None

    def link(self, bus_id: str | None) -> str | None:
        """The device's own link in words, and of what where it runs below that: "Gen4 x4 of x16"."""
        (speed, width), (fastest, widest) = self._running(bus_id or ""), self._possible(bus_id or "")
        now, best = pcie_generation(speed), pcie_generation(fastest)
        if now is None or best is None or not width or not widest:
            return None
        generation = f"Gen{now}" if now == best else f"Gen{now} of Gen{best}"
        return f"{generation} x{width}" if width == widest else f"{generation} x{width} of x{widest}"

    def path_bytes_per_second(self, first: str, second: str, *, running: bool = False) -> float | None:
        """The narrowest planned PCIe link between two devices, or as the links run; None where an end is unknown."""
        above = [*self.above(first), first], [*self.above(second), second]
        common = sum(1 for a, b in zip(*above, strict=False) if a == b)
        between = [bus_id for chain in above for bus_id in chain[common:]]
        links = [(running and self.running_bytes_per_second(b)) or self.slot_bytes_per_second(b) for b in between]
        ends = self.slot_bytes_per_second(first), self.slot_bytes_per_second(second)
        return None if None in ends else min((link for link in links if link is not None), default=None)


def _most(device: PciDevice) -> tuple[float | None, int | None]:
    """A link's best speed and width, or what it runs at where the best is not readable (a virtual function)."""
    return (
        device.link_transfers_per_second_max or device.link_transfers_per_second,
        device.link_width_max or device.link_width,
    )


def _below_one_root_port(above_a: tuple[str, ...], above_b: tuple[str, ...]) -> str:
    """PIX where one switch at most is crossed: each device has one port of its own below the common bridge."""
    common = sum(1 for a, b in zip(above_a, above_b, strict=False) if a == b)
    own = len(above_a) - common, len(above_b) - common
    return "PIX" if max(own) <= 1 else "PXB"


def plan(
    tree: PciTree, a: str, b: str, label: str, cpu: CpuNode | None, *, gpu_to_gpu: bool, running: bool = False
) -> float | None:
    """What NCCL plans for a pair without NVLink: the narrowest PCIe link, and the CPUs where they are crossed.

    With `running` by the links as they run now, which NCCL does not look at.
    """
    value = tree.path_bytes_per_second(a, b, running=running)
    if value is None:
        return None
    if gpu_to_gpu and label in ("PHB", "NODE", "SYS") and cpu and cpu.vendor == "GenuineIntel":
        value /= INTEL_P2P_OVERHEAD
    if label != "SYS":
        return value
    between = cpu_bytes_per_second(cpu.vendor, cpu.family, cpu.model, cpu.arch) if cpu else None
    return min(value, between) if between is not None else None
