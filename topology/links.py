"""Links between two devices of a node: NVLinks from NVML's link information, and PCIe paths from PCI ancestry alone.

An NVLink ends at a GPU, at an NVSwitch (and then reaches every GPU of the switch) or, in a virtual machine, at a hidden
end. NCCL plans with a link's maximum speed; its current speed is kept separately, for expectations and reports.

Specification: NVML nvmlDeviceGetNvLinkState, nvmlDeviceGetNvLinkRemotePciInfo, nvmlDeviceGetP2PStatus,
nvmlGpuTopologyLevel_t; the legend of `nvidia-smi topo -m`; PCI Express Base Specification 1.3 (a switch is an upstream
port with downstream ports below it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

from contracts.tables import read_texts
from probes.gpu.facts import MAX_LINKS, UNREAD, Gpu, GpuFacts, GpuPair, NvLink
from probes.pci.facts import PciDevice, ancestors, is_bridge, is_network
from topology.graph import (
    INTEL_P2P_OVERHEAD,
    UNKNOWN,
    Cpu,
    Device,
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

T = TypeVar("T", int, float)
_text = read_texts(__file__, "texts.toml")


def count_targets(gpu: Gpu) -> tuple[tuple[tuple[str, str | None], int], ...]:
    """Count a GPU's active links by end, ((kind, bus id), count), in order of first appearance."""
    ends = ((link.remote_kind, link.remote_bus_id) for link in gpu.nvlinks if link.active)
    targets = (("unknown" if kind in (None, UNREAD) else kind, None if end == UNREAD else end) for kind, end in ends)
    return tuple(Counter(targets).items())


def join_by_nvlink(a: GpuNode, b: GpuNode, count: int, evidence: str, *, unread: int = 0) -> Pair:
    """Return the pair of two GPUs with `count` NVLinks, plus up to `unread`; the slower generation sets the rate."""
    speeds = [nvlink_bytes_per_second(gpu.compute_capability) for gpu in (a, b)]
    return Pair(
        a=a.name,
        b=b.name,
        label=f"NV{count}",
        path=PathClass.NVL,
        nvlinks=count,
        nvlinks_unread=unread,
        bytes_per_second=None if None in speeds else count * min(speed or 0.0 for speed in speeds),
        evidence=evidence,
    )


class NvLinks:
    """NVLink counts of every pair; inconsistencies are collected in `warnings`."""

    def __init__(self, facts: GpuFacts | None) -> None:
        self._gpus = {gpu.index: gpu for gpu in facts.gpus} if facts else {}
        self._pairs = {(pair.a, pair.b): pair for pair in facts.pairs} if facts else {}
        self.warnings: list[str] = []

    def pair(self, a: int, b: int) -> GpuPair | None:
        """Return what NVML reports of two GPUs, None if unknown."""
        return self._pairs.get((min(a, b), max(a, b)))

    def between(self, a: int, b: int) -> tuple[int | None, str]:
        """Return (number of links that work in both directions, evidence); None if the driver did not report enough.

        A link whose state or end was not read counts neither as present nor as missing.
        """
        first, second = self._gpus.get(a), self._gpus.get(b)
        if first is None or second is None:
            return None, "nvml does not answer"
        if first.broken or second.broken:
            return None, f"nvml has lost GPU{a if first.broken else b}"
        direct = _count_direct(first, second), _count_direct(second, first)
        if any(direct):
            short = first if direct[0] < direct[1] else second
            if direct[0] != direct[1] and self.unread(short.index) >= abs(direct[0] - direct[1]):
                return max(direct), f"nvml: remote ends of the links, as GPU{b if short is first else a} reports them"
            return self._choose_lower(a, b, *direct), "nvml: remote ends of the links"
        unread = self.unread(a) or self.unread(b)
        switched = _count_ending_at(first, "nvswitch"), _count_ending_at(second, "nvswitch")
        if all(switched):
            if not unread:
                self._note_short(a, b, *switched)
            return min(switched), "nvml: links to NVSwitch"
        hidden = _count_ending_at(first, None), _count_ending_at(second, None)
        if all(hidden):
            return self._count_hidden(a, b, *hidden)
        pair = self.pair(a, b)
        is_possible = pair is None or pair.p2p_nvlink in (None, "ok", "unknown")
        if unread and is_possible and self._may_link(first) and self._may_link(second):
            return None, "nvml did not report all NVLinks"
        return 0, ""

    def unread(self, index: int) -> int:
        """Return how many links of a GPU may be up although the driver did not report their state or end."""
        gpu = self._gpus.get(index)
        if gpu is None or gpu.broken:
            return 0
        if gpu.error is not None or not gpu.nvlinks_known:
            return MAX_LINKS
        return sum(_is_unread(link) for link in gpu.nvlinks)

    def _may_link(self, gpu: Gpu) -> bool:
        """Whether some link of the GPU may lead to a device other than the reported ones."""
        return bool(self.unread(gpu.index) or _count_ending_at(gpu, "nvswitch") or _count_ending_at(gpu, None))

    def _choose_lower(self, a: int, b: int, first: int, second: int) -> int:
        if first != second:
            self.warnings.append(_text("unequal_links", a=a, b=b, first=first, second=second))
        return min(first, second)

    def _note_short(self, a: int, b: int, first: int, second: int) -> None:
        """Warn once per GPU with fewer links to the switch than another GPU."""
        if first != second:
            short, other = (a, b) if first < second else (b, a)
            prefix = f"GPU{short} has {min(first, second)} NVLinks to the NVSwitch, "
            if not any(warning.startswith(prefix) for warning in self.warnings):
                counts = f"a pair of GPUs counts as many links as the GPU with fewer, here {min(first, second)}"
                self.warnings.append(f"{prefix}GPU{other} has {max(first, second)}: {counts}")

    def _count_hidden(self, a: int, b: int, first: int, second: int) -> tuple[int, str]:
        """Count links whose ends a hypervisor hides: the P2P status shows whether two GPUs are connected by NVLink."""
        if not self._are_joined(a, b):
            return 0, ""
        others = [gpu.index for gpu in self._gpus.values() if gpu.index != a and not gpu.broken]
        peers = [other for other in others if self._are_joined(a, other)]
        if len(peers) == len(others) or len(peers) == 1:
            how = "a switch, or all links to the one peer"
            return self._choose_lower(a, b, first, second), f"nvml: far ends hidden, P2P over NVLink is ok: {how}"
        share = min(first, second) // len(peers)
        self.warnings.append(_text("even_share", a=a, b=b, peers=len(peers), share=share))
        return share, "nvml: far ends hidden, even share of the links"

    def peer_access(self, a: int, b: int) -> bool | None:
        """Whether the driver allows one GPU to read the other's memory; None if unknown."""
        pair = self.pair(a, b)
        status = pair.p2p_read if pair else None
        return None if status in (None, "unknown") else status == "ok"

    def _are_joined(self, a: int, b: int) -> bool:
        pair = self.pair(a, b)
        if pair and pair.p2p_nvlink is not None:
            return pair.p2p_nvlink == "ok"
        first, second = self._gpus[a], self._gpus[b]
        return first.fabric_clique is not None and first.fabric_clique == second.fabric_clique


def _is_unread(link: NvLink) -> bool:
    """Whether the end of a link is unknown. For a link to a switch it does not matter which switch."""
    if not link.active:
        return link.active is None
    return link.remote_kind == UNREAD or (link.remote_bus_id == UNREAD and link.remote_kind != "nvswitch")


def _count_direct(gpu: Gpu, other: Gpu) -> int:
    return sum(1 for link in gpu.nvlinks if link.active and link.remote_bus_id and link.remote_bus_id == other.bus_id)


def _count_ending_at(gpu: Gpu, kind: str | None) -> int:
    return sum(1 for link in gpu.nvlinks if link.active and link.remote_kind == kind)


class PciTree:
    """PCI devices by bus id, with the bridges above each."""

    def __init__(self, devices: Iterable[PciDevice], *, own_links: bool = False) -> None:
        """`own_links`: a device's link describes both ends, as in NCCL's XML, where ports are not elements."""
        self._own_links = own_links
        self.devices = {device.bus_id: device for device in devices}
        self._parents = {device.bus_id: device.parent for device in self.devices.values()}
        self._above: dict[str, tuple[str, ...]] = {}  # computed once per device
        self._links: dict[str | None, tuple[float | None, float | None, str | None]] = {}

    def above(self, bus_id: str) -> tuple[str, ...]:
        """Return the bridges from the root port down to the device's own port."""
        if bus_id not in self._above:
            self._above[bus_id] = tuple(reversed(ancestors(self._parents, bus_id)))
        return self._above[bus_id]

    def label(self, first: str | None, second: str | None) -> str | None:
        """Return nvidia-smi's label for the path between two devices, None if one is not in the tree."""
        a, b = self.devices.get(first or ""), self.devices.get(second or "")
        if a is None or b is None:
            return None
        above_a, above_b = self.above(a.bus_id), self.above(b.bus_id)
        if above_a[:1] and above_a[:1] == above_b[:1]:
            common = sum(1 for a, b in zip(above_a, above_b, strict=False) if a == b)
            # at most one switch is crossed: each device has one port below the common bridge
            return "PIX" if max(len(above_a), len(above_b)) - common <= 1 else "PXB"
        if a.root is not None and a.root == b.root:
            return "PHB"
        if a.numa_node is None or b.numa_node is None:
            # With at most one NUMA node, two host bridges belong to the same node: NODE.
            nodes = {device.numa_node for device in self.devices.values()} - {None}
            return "NODE" if not nodes else "SYS"
        return "NODE" if a.numa_node == b.numa_node else "SYS"

    def link(self, bus_id: str | None) -> tuple[float | None, float | None, str | None]:
        """Return NCCL's planned rate of the device's link, its current rate, and a description: "Gen4 x4 of x16".

        The planned rate is the maximum that device and port support, as NCCL reads it. The current rate is None if it
        is not lower.
        """
        if bus_id not in self._links:
            self._links[bus_id] = self._read_link(self.devices.get(bus_id or ""))
        return self._links[bus_id]

    def _read_link(self, device: PciDevice | None) -> tuple[float | None, float | None, str | None]:
        """Read the values of `link`.

        GPUs, and switches above them, lower their link speed when idle, so only their width is used. Ports inside a
        switch have no link. Below a root port both ends of one link are known. A virtual function has no link.
        """
        if device is None:
            return None, None, None
        fastest, widest = _get_maximum(device)
        port = self.devices.get(device.parent or "")
        if port is not None and not self._own_links:
            port_speed, port_width = _get_maximum(port)
            fastest, widest = _lower(fastest, port_speed), _lower(widest, port_width)
        speed, width = fastest, widest
        inside_switch = is_bridge(device.class_code) and (port is None or port.parent is not None)
        if device.physical_function is None and not inside_switch:
            speed = _lower(fastest, device.link_transfers_per_second) if is_network(device.class_code) else fastest
            width = _lower(widest, device.link_width)
        slot, now = pcie_bytes_per_second(fastest, widest), pcie_bytes_per_second(speed, width)
        text = None
        running, best = pcie_generation(speed), pcie_generation(fastest)
        if running and best and width and widest:
            text = f"Gen{running}" + f" of Gen{best}" * (running != best)
            text += f" x{width}" + f" of x{widest}" * (width != widest)
        return slot, now if now and slot and now < slot else None, text

    def links_of(self, bus_id: str | None) -> dict[str, Any]:
        """Return the fields of a GPU or NIC that describe its own link."""
        fields = ("pcie_bytes_per_second", "pcie_running_bytes_per_second", "pcie_link")
        return dict(zip(fields, self.link(bus_id), strict=True))

    def path_bytes_per_second(self, first: str, second: str, *, running: bool = False) -> float | None:
        """Return the slowest link between two devices, planned or (`running`) current; None if an end is unknown."""
        above = [*self.above(first), first], [*self.above(second), second]
        common = sum(1 for a, b in zip(*above, strict=False) if a == b)
        between = [bus_id for chain in above for bus_id in chain[common:]]
        links = [(running and now) or slot for slot, now, _ in map(self.link, between)]
        is_known = self.link(first)[0] is not None and self.link(second)[0] is not None
        return min((link for link in links if link is not None), default=None) if is_known else None


def _lower(*values: T | None) -> T | None:
    """Return the lowest known value; None if there is none."""
    return min(filter(None, values), default=None)


def _get_maximum(device: PciDevice) -> tuple[float | None, int | None]:
    """Return a link's maximum speed and width, or the current ones if the maximum is unreadable (virtual function)."""
    return (
        device.link_transfers_per_second_max or device.link_transfers_per_second,
        device.link_width_max or device.link_width,
    )


def pair_by_pcie(
    a: Device, b: Device, label: str, tree: PciTree, cpu: Cpu | None, *, evidence: str, peer_access: bool | None = None
) -> Pair:
    """Return the pair of two devices without NVLink, with NCCL's planned rate and the current rate of its links."""
    path = path_class(label, c2c=isinstance(a, GpuNode) and bool(a.c2c) and isinstance(b, NicNode))
    gpu_to_gpu = isinstance(a, GpuNode) and isinstance(b, GpuNode)
    is_known = label != UNKNOWN and a.bus_id and b.bus_id
    planned, now = (
        _plan_pcie(tree.path_bytes_per_second(a.bus_id or "", b.bus_id or "", running=running), label, cpu, gpu_to_gpu)
        if is_known
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


def _plan_pcie(pcie: float | None, label: str, cpu: Cpu | None, gpu_to_gpu: bool) -> float | None:
    """Return the slowest PCIe link between two devices, also limited by the CPUs if the path crosses them."""
    if pcie is None or cpu is None:
        return pcie
    if gpu_to_gpu and label in ("PHB", "NODE", "SYS") and cpu.vendor == "GenuineIntel":
        pcie /= INTEL_P2P_OVERHEAD
    between = cpu_bytes_per_second(cpu.vendor, cpu.family, cpu.model, cpu.arch) if label == "SYS" else None
    return pcie if between is None else min(pcie, between)
