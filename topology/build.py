"""Builds the topology of one host from its snapshot.

The path between two GPUs comes from NVML (common ancestor, NVLinks). The path between GPU and NIC, and every path on
hosts without a vendor tool, comes from PCI ancestry in sysfs. Every pair names its source. A GPU uses Ethernet
interfaces only on hosts without RDMA devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from contracts.tables import read_texts
from hardware.gpus import NVIDIA, find_gpu, find_model
from probes.api import Snapshot, Source
from probes.gpu import facts as gpu_facts
from probes.gpu.facts import Gpu, GpuFacts
from probes.hostinfo import probe as hostinfo
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces import facts as interface_facts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.pci import facts as pci_facts
from probes.pci.facts import PciFacts
from probes.rdma import facts as rdma_facts
from probes.rdma.facts import RdmaDevice, RdmaFacts
from topology.derive import complete
from topology.graph import UNKNOWN, Cpu, Device, GpuNode, NicNode, NodeTopology, NvLinkTarget, Pair
from topology.links import NvLinks, PciTree, count_targets, join_by_nvlink, pair_by_pcie

SOURCES: tuple[Source[Any], ...] = (
    hostinfo.SOURCE, pci_facts.SOURCE, gpu_facts.SOURCE, rdma_facts.SOURCE, interface_facts.SOURCE,
)  # fmt: skip
"""Types of facts that `build` reads from a snapshot."""

_text = read_texts(__file__, "texts.toml")
_GPU_CLASSES = (0x0300, 0x0302)  # VGA and 3D controller


def build(snapshot: Snapshot) -> NodeTopology:
    """Build the graph of a node from the probes that answered. A missing fact is unknown or a warning, not a guess."""
    pci = snapshot.facts(PciFacts)
    tree = PciTree(pci.devices if pci else ())
    facts = snapshot.facts(GpuFacts)
    host = snapshot.facts(HostinfoFacts)
    warnings: list[str] = []
    gpus = _build_gpus(facts, tree, warnings)
    nics = list_nics(snapshot.facts(RdmaFacts), snapshot.facts(InterfacesFacts), tree)
    links = NvLinks(facts)
    pairs = tuple(_build_pairs((*gpus, *nics), links, tree, _build_cpu(host)))  # adds to the warnings of `links`
    return complete(
        NodeTopology(
            hostname=snapshot.hostname,
            gpus=gpus,
            nics=nics,
            pairs=pairs,
            cpu_count=host.threads if host else None,
            numa_nodes=(len(host.numa) or None) if host else None,
            virtual=pci.virtual_tree if pci else None,
            warnings=(*warnings, *links.warnings),
            nvlink_known=facts is not None and any(gpu.nvlinks_known for gpu in facts.gpus),
            product=host.product if host else None,
        ),
        # the processor shows a hypervisor on x86 only
        is_physical=bool(pci and pci.hypervisor is None and host and host.architecture == "x86_64"),
    )


def _build_gpus(facts: GpuFacts | None, tree: PciTree, warnings: list[str]) -> tuple[GpuNode, ...]:
    if facts is not None and (facts.gpus or not facts.driver_error):
        return tuple(_build_gpu(gpu, tree) for gpu in facts.gpus)
    on_bus = (d for d in tree.devices.values() if d.vendor_id == NVIDIA and d.class_code >> 8 in _GPU_CLASSES)
    listed = sorted(on_bus, key=lambda device: device.bus_id)
    if listed:
        reason = f" ({facts.driver_error})" if facts is not None else ""
        warnings.append(_text("pci_alone", why=reason, gpus=len(listed)))
    return tuple(
        GpuNode(
            name=f"GPU{index}",
            index=index,
            bus_id=device.bus_id,
            model=find_model(NVIDIA, device.device_id)[0],
            compute_capability=find_model(NVIDIA, device.device_id)[1],
            numa_node=device.numa_node,
            **tree.links_of(device.bus_id),
        )
        for index, device in enumerate(listed)
    )


def _build_gpu(gpu: Gpu, tree: PciTree) -> GpuNode:
    device = tree.devices.get(gpu.bus_id or "")
    numa = gpu.numa_node if gpu.numa_node is not None else (device.numa_node if device else None)
    return GpuNode(
        name=f"GPU{gpu.index}",
        index=gpu.index,
        bus_id=gpu.bus_id,
        uuid=gpu.uuid,
        model=gpu.name,
        memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
        numa_node=numa,
        cpu_affinity=gpu.cpu_affinity,
        numa_affinity=str(numa) if numa is not None else UNKNOWN,
        gpu_numa_id=str(gpu.gpu_numa_node) if gpu.gpu_numa_node is not None else UNKNOWN,
        nvlink_domain=gpu.fabric_clique if gpu.fabric_state == "completed" else None,
        c2c=gpu.c2c_enabled if gpu.c2c_links is None else bool(gpu.c2c_links) and gpu.c2c_enabled is not False,
        usable=gpu.error is None,
        nvlinks=tuple(
            NvLinkTarget(bus_id=bus_id, count=count, kind=kind) for (kind, bus_id), count in count_targets(gpu)
        ),
        **tree.links_of(gpu.bus_id),
    )


def _build_pairs(devices: tuple[Device, ...], links: NvLinks, tree: PciTree, cpu: Cpu | None) -> Iterator[Pair]:
    for a, b in combinations(devices, 2):
        if isinstance(a, GpuNode) and isinstance(b, GpuNode):
            yield _build_gpu_pair(a, b, links, tree, cpu)
        else:
            label = tree.label(a.bus_id, b.bus_id) or UNKNOWN
            evidence = "sysfs" if label != UNKNOWN else "not in the PCIe tree"
            yield pair_by_pcie(a, b, label, tree, cpu, evidence=evidence)


def _build_gpu_pair(a: GpuNode, b: GpuNode, links: NvLinks, tree: PciTree, cpu: Cpu | None) -> Pair:
    count, evidence = links.between(a.index, b.index)
    if count:
        return join_by_nvlink(a, b, count, evidence, unread=max(links.unread(a.index), links.unread(b.index)))
    if count is None and not (_has_no_nvlink(a.model) and _has_no_nvlink(b.model)):
        return Pair(a=a.name, b=b.name, label=UNKNOWN, path=None, evidence=evidence)
    pair = links.pair(a.index, b.index)
    ancestor = pair.ancestor if pair else None
    if ancestor == "INTERNAL":  # both GPUs are on one board, so the path crosses at most the bridge between them
        ancestor = "PIX"
    label = ancestor or tree.label(a.bus_id, b.bus_id) or UNKNOWN
    evidence = "nvml" if ancestor else ("sysfs" if label != UNKNOWN else "no probe answered")
    return pair_by_pcie(a, b, label, tree, cpu, evidence=evidence, peer_access=links.peer_access(a.index, b.index))


def _has_no_nvlink(model: str | None) -> bool:
    """Whether GPUs of this model have no NVLink, so that PCIe shows their path even if NVML does not answer."""
    gpu = find_gpu(model)
    return gpu is not None and not gpu.links


def _build_cpu(host: HostinfoFacts | None) -> Cpu | None:
    if host is None or not host.numa:
        return None
    return Cpu(
        arch={"aarch64": "arm64", "ppc64le": "ppc64"}.get(host.architecture or "", host.architecture),
        vendor=host.cpu_vendor,
        family=host.cpu_family,
        model=host.cpu_model,
    )


_NEVER = ("loopback", "docker", "bridge")


def list_nics(rdma: RdmaFacts | None, interfaces: InterfacesFacts | None, tree: PciTree) -> tuple[NicNode, ...]:
    """Return RDMA devices in reach, including EFA; without any, Ethernet interfaces that NCCL's sockets could use."""
    links = interfaces.interfaces if interfaces else ()
    if rdma and rdma.devices:
        return tuple(_build_rdma_nic(device, links, tree) for device in rdma.in_reach)
    plain = [interface for interface in links if interface.role not in _NEVER and interface.master is None]
    on_pci = [interface for interface in plain if interface.bus_id]
    fallback = [interface for interface in plain if interfaces and interface.name == interfaces.default_route]
    return tuple(_build_ethernet_nic(interface, tree) for interface in on_pci or fallback)


def _build_rdma_nic(device: RdmaDevice, interfaces: tuple[Interface, ...], tree: PciTree) -> NicNode:
    active = [port for port in device.ports if port.state == "ACTIVE"]
    is_known = bool(device.ports) and all(port.state is not None for port in device.ports)
    netdev = next((port.netdev for port in device.ports if port.netdev), None)
    # A Soft-RoCE or bond device has no PCI function of its own; its place is that of its network interface.
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
        active=bool(active) if is_known else None,
        ports=len(device.ports) or None,
        **tree.links_of(bus_id),
    )


def _build_ethernet_nic(interface: Interface, tree: PciTree) -> NicNode:
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
        **tree.links_of(interface.bus_id),
    )
