"""What joins two devices of a node: NVLinks, from what NVML says of each GPU's links, and PCIe, from PCI ancestry
alone.

A link ends at a GPU, at an NVSwitch (then it reaches every GPU of the switch) or, in a virtual machine, at an end
that is hidden. NCCL plans by what a link could do; its present speed is separate, for expectations and for
people.

Specification: NVML nvmlDeviceGetNvLinkState, nvmlDeviceGetNvLinkRemotePciInfo, nvmlDeviceGetP2PStatus,
nvmlGpuTopologyLevel_t; the legend of `nvidia-smi topo -m`; PCI Express Base Specification 1.3 (a switch is an
upstream port with downstream ports below it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from probes.gpu.facts import LINKS_MAX, UNREAD, Gpu, GpuFacts, GpuPair, NvLink
from probes.pci.facts import PciDevice, ancestors, is_bridge, is_network
from topology.graph import (
    INTEL_P2P_OVERHEAD,
    UNKNOWN,
    Cpu,
    GpuNode,
    NicNode,
    Pair,
    PathClass,
    cpu_bytes_per_second,
    nvlink_bytes_per_second,
    path_class,
    pcie_bytes_per_second,
    pcie_generation,
)


def active_targets(gpu: Gpu) -> tuple[tuple[tuple[str, str | None], int], ...]:
    """((kind, bus id), count) of the ends of a GPU's active links, in order of first appearance."""
    ends = Counter(
        (_known_end(link.remote_kind) or "unknown", _known_end(link.remote_bus_id))
        for link in gpu.nvlinks
        if link.active
    )
    return tuple(ends.items())


def _known_end(end: str | None) -> str | None:
    return None if end == UNREAD else end


def joined(a: GpuNode, b: GpuNode, count: int, evidence: str, *, unread: int = 0) -> Pair:
    """The pair of two GPUs with so many NVLinks between them, or `unread` more; the slower generation sets the rate."""
    speeds = [nvlink_bytes_per_second(gpu.compute_capability) for gpu in (a, b)]
    known = [speed for speed in speeds if speed is not None]
    return Pair(
        a=a.name,
        b=b.name,
        label=f"NV{count}",
        path=PathClass.NVL,
        nvlinks=count,
        nvlinks_unread=unread,
        bytes_per_second=count * min(known) if len(known) == len(speeds) else None,
        evidence=evidence,
    )


class NvLinks:
    """NVLink counts of every pair; collects what looks wrong in `warnings`."""

    def __init__(self, facts: GpuFacts | None) -> None:
        self._gpus = {gpu.index: gpu for gpu in facts.gpus} if facts else {}
        self._pairs = {(pair.a, pair.b): pair for pair in facts.pairs} if facts else {}
        self.warnings: list[str] = []

    def _pair(self, a: int, b: int) -> GpuPair | None:
        return self._pairs.get((min(a, b), max(a, b)))

    def ancestor(self, a: int, b: int) -> str | None:
        """NVML's common ancestor of two GPUs in nvidia-smi's words, None where NVML does not say."""
        pair = self._pair(a, b)
        return pair.ancestor if pair else None

    def between(self, a: int, b: int) -> tuple[int | None, str]:
        """(links that work both ways, what that rests on); None where the driver did not tell enough to say.

        A link whose state or end was not read is neither there nor missing: what is known of the others stands.
        """
        first, second = self._gpus.get(a), self._gpus.get(b)
        if first is None or second is None:
            return None, "nvml does not answer"
        if first.broken or second.broken:
            return None, f"nvml has lost GPU{a if first.broken else b}"
        direct = _direct(first, second), _direct(second, first)
        if any(direct):
            short = first if direct[0] < direct[1] else second
            if direct[0] != direct[1] and self.unread(short.index) >= abs(direct[0] - direct[1]):
                return max(direct), f"nvml: remote ends of the links, as GPU{b if short is first else a} reports them"
            return self._lower(a, b, *direct), "nvml: remote ends of the links"
        switched = _ending_at(first, "nvswitch"), _ending_at(second, "nvswitch")
        if all(switched):
            if not (self.unread(a) or self.unread(b)):
                self._note_short(a, b, *switched)
            return min(switched), "nvml: links to NVSwitch"
        hidden = _ending_at(first, None), _ending_at(second, None)
        if all(hidden):
            return self._hidden(a, b, *hidden)
        if (self.unread(a) or self.unread(b)) and self._may_link(first) and self._may_link(second):
            pair = self._pair(a, b)
            if pair is None or pair.p2p_nvlink in (None, "ok", "unknown"):
                return None, "nvml did not report all NVLinks"
        return 0, ""

    def unread(self, index: int) -> int:
        """Links of a GPU that may be up and of which the driver did not tell the state or the end."""
        gpu = self._gpus.get(index)
        if gpu is None or gpu.broken:
            return 0
        if gpu.error is not None or not gpu.nvlinks_known:
            return LINKS_MAX
        return sum(_is_unread(link) for link in gpu.nvlinks)

    def unread_between(self, a: int, b: int) -> int:
        """By how many links the count of a pair may be too low."""
        return max(self.unread(a), self.unread(b))

    def _may_link(self, gpu: Gpu) -> bool:
        """Whether some link of the GPU may lead to a device other than the reported ones."""
        return bool(self.unread(gpu.index) or _ending_at(gpu, "nvswitch") or _ending_at(gpu, None))

    def _lower(self, a: int, b: int, first: int, second: int) -> int:
        if first != second:
            self.warnings.append(
                f"GPU{a} has {first} NVLinks towards GPU{b}, GPU{b} has {second} back: the lower number counts"
            )
        return min(first, second)

    def _note_short(self, a: int, b: int, first: int, second: int) -> None:
        """Once for each GPU with fewer links to the switch than another has."""
        if first != second:
            short, other = (a, b) if first < second else (b, a)
            prefix = f"GPU{short} has {min(first, second)} NVLinks to the NVSwitch, "
            if not any(warning.startswith(prefix) for warning in self.warnings):
                counts = f"a pair of GPUs counts as many links as the GPU with fewer, here {min(first, second)}"
                self.warnings.append(f"{prefix}GPU{other} has {max(first, second)}: {counts}")

    def _hidden(self, a: int, b: int, first: int, second: int) -> tuple[int, str]:
        """A hypervisor hides where links end: the P2P status says whether these two are joined by them."""
        if not self._joined(a, b):
            return 0, ""
        peers = [other for other in self._gpus if other != a and self._joined(a, other)]
        if len(peers) == len(self._gpus) - 1 or len(peers) == 1:
            how = "a switch, or all links to the one peer"
            return self._lower(a, b, first, second), f"nvml: far ends hidden, P2P over NVLink is ok: {how}"
        share = min(first, second) // len(peers)
        self.warnings.append(
            f"GPU{a} to GPU{b}: far ends of the NVLinks are hidden and GPU{a} has {len(peers)} peers: "
            f"the count of {share} is an even share, not a reading"
        )
        return share, "nvml: far ends hidden, even share of the links"

    def peer_access(self, a: int, b: int) -> bool | None:
        """Whether the driver lets one GPU read the other's memory; None where it does not say."""
        pair = self._pair(a, b)
        status = pair.p2p_read if pair else None
        return None if status in (None, "unknown") else status == "ok"

    def _joined(self, a: int, b: int) -> bool:
        pair = self._pair(a, b)
        if pair and pair.p2p_nvlink is not None:
            return pair.p2p_nvlink == "ok"
        first, second = self._gpus[a], self._gpus[b]
        return first.fabric_clique is not None and first.fabric_clique == second.fabric_clique


def _is_unread(link: NvLink) -> bool:
    """Whether it is open where the link leads; of a link to a switch it does not matter to which."""
    if not link.active:
        return link.active is None
    return link.remote_kind == UNREAD or (link.remote_bus_id == UNREAD and link.remote_kind != "nvswitch")


def _direct(gpu: Gpu, other: Gpu) -> int:
    return sum(1 for link in gpu.nvlinks if link.active and link.remote_bus_id and link.remote_bus_id == other.bus_id)


def _ending_at(gpu: Gpu, kind: str | None) -> int:
    return sum(1 for link in gpu.nvlinks if link.active and link.remote_kind == kind)


class PciTree:
    """Devices by bus id, and the bridges above each."""

    def __init__(self, devices: Iterable[PciDevice], *, own_links: bool = False) -> None:
        """`own_links`: a device's link is that of both its ends, as NCCL's XML has it, where ports are no elements."""
        self._own_links = own_links
        self.devices = {device.bus_id: device for device in devices}
        self._parents = {device.bus_id: device.parent for device in self.devices.values()}
        self._above: dict[str, tuple[str, ...]] = {}  # asked once for every pair of a device
        self._links: dict[str | None, tuple[float | None, float | None, str | None]] = {}

    def above(self, bus_id: str) -> tuple[str, ...]:
        """Bridges from the root port down to the device's own port."""
        if bus_id not in self._above:
            self._above[bus_id] = tuple(reversed(ancestors(self._parents, bus_id)))
        return self._above[bus_id]

    def label(self, first: str | None, second: str | None) -> str | None:
        """nvidia-smi's word for the path between two devices, None where one is not in the tree."""
        if not first or not second:
            return None
        a, b = self.devices.get(first), self.devices.get(second)
        if a is None or b is None:
            return None
        above_a, above_b = self.above(first), self.above(second)
        if above_a[:1] and above_a[:1] == above_b[:1]:
            common = sum(1 for a, b in zip(above_a, above_b, strict=False) if a == b)
            # one switch at most is crossed: each device has one port of its own below the common bridge
            return "PIX" if max(len(above_a), len(above_b)) - common <= 1 else "PXB"
        if a.root is not None and a.root == b.root:
            return "PHB"
        if a.numa_node is None or b.numa_node is None:
            # One memory node at most is known: two host bridges are NODE apart where no other node exists.
            nodes = {device.numa_node for device in self.devices.values()} - {None}
            return "NODE" if not nodes else "SYS"
        return "NODE" if a.numa_node == b.numa_node else "SYS"

    def _possible(self, bus_id: str) -> tuple[float | None, int | None]:
        """Speed and width that the device and the port above it can both do."""
        device = self.devices.get(bus_id)
        if device is None:
            return None, None
        speed, width = _most(device)
        port = self.devices.get(device.parent or "")
        if port is not None and not self._own_links:
            port_speed, port_width = _most(port)
            speed = min(filter(None, (speed, port_speed)), default=None)
            width = min(filter(None, (width, port_width)), default=None)
        return speed, width

    def _running(self, bus_id: str) -> tuple[float | None, int | None]:
        """Speed and width as the link runs now, never more than possible.

        GPUs, and the switches above them, lower the speed of their link when idle: only its width counts. Ports
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

    def link(self, bus_id: str | None) -> tuple[float | None, float | None, str | None]:
        """NCCL's plan of the device's own link, and the same in words: "Gen4 x4 of x16".

        The first is the most that device and port can do together, as NCCL reads it; the second what the link does as
        it runs, None where that is not less.
        """
        if bus_id not in self._links:
            (speed, width), (fastest, widest) = self._running(bus_id or ""), self._possible(bus_id or "")
            slot, now = pcie_bytes_per_second(fastest, widest), pcie_bytes_per_second(speed, width)
            words = None
            running, best = pcie_generation(speed), pcie_generation(fastest)
            if running and best and width and widest:
                words = f"Gen{running}" + f" of Gen{best}" * (running != best)
                words += f" x{width}" + f" of x{widest}" * (width != widest)
            self._links[bus_id] = slot, now if now and slot and now < slot else None, words
        return self._links[bus_id]

    def links_of(self, bus_id: str | None) -> dict[str, Any]:
        """The fields of a GPU or NIC that say what its own link is."""
        fields = ("pcie_bytes_per_second", "pcie_running_bytes_per_second", "pcie_link")
        return dict(zip(fields, self.link(bus_id), strict=True))

    def path_bytes_per_second(self, first: str, second: str, *, running: bool = False) -> float | None:
        """The narrowest planned PCIe link between two devices, or as the links run; None where an end is unknown."""
        above = [*self.above(first), first], [*self.above(second), second]
        common = sum(1 for a, b in zip(*above, strict=False) if a == b)
        between = [bus_id for chain in above for bus_id in chain[common:]]
        links = [(running and now) or slot for slot, now, _ in map(self.link, between)]
        known = self.link(first)[0] is not None and self.link(second)[0] is not None
        return min((link for link in links if link is not None), default=None) if known else None


def _most(device: PciDevice) -> tuple[float | None, int | None]:
    """A link's best speed and width, or what it runs at where the best is not readable (a virtual function)."""
    return (
        device.link_transfers_per_second_max or device.link_transfers_per_second,
        device.link_width_max or device.link_width,
    )


def pcie_pair(
    a: GpuNode | NicNode,
    b: GpuNode | NicNode,
    label: str,
    tree: PciTree,
    cpu: Cpu | None,
    *,
    evidence: str,
    peer_access: bool | None = None,
) -> Pair:
    """The pair of two devices without NVLink: what NCCL plans for it, and what its links carry as they run now."""
    path = path_class(label)
    if isinstance(a, GpuNode) and a.c2c and isinstance(b, NicNode) and label in ("PHB", "NODE"):
        path = PathClass.P2C  # GPU, C2C, Grace, PCIe, NIC
    gpu_to_gpu = isinstance(a, GpuNode) and isinstance(b, GpuNode)
    known = label != UNKNOWN and a.bus_id and b.bus_id
    planned, now = (
        _plan(tree.path_bytes_per_second(a.bus_id or "", b.bus_id or "", running=running), label, cpu, gpu_to_gpu)
        if known
        else None
        for running in (False, True)
    )
    return Pair(
        a=a.name,
        b=b.name,
        label=label,
        path=path,
        bytes_per_second=planned,
        running_bytes_per_second=now if now is not None and planned is not None and now < planned else None,
        peer_access=peer_access,
        evidence=evidence,
    )


def _plan(pcie: float | None, label: str, cpu: Cpu | None, gpu_to_gpu: bool) -> float | None:
    """The narrowest PCIe link between two devices, and the CPUs where they are crossed."""
    if pcie is None or cpu is None:
        return pcie
    if gpu_to_gpu and label in ("PHB", "NODE", "SYS") and cpu.vendor == "GenuineIntel":
        pcie /= INTEL_P2P_OVERHEAD
    between = cpu_bytes_per_second(cpu.vendor, cpu.family, cpu.model, cpu.arch) if label == "SYS" else None
    return pcie if between is None else min(pcie, between)
