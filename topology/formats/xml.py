"""NCCL's topology XML, as NCCL_TOPO_DUMP_FILE writes it and NCCL_TOPO_FILE reads it.

Specification: NCCL src/graph/xml.cc. Static files that cloud makers ship hold only ``<pci>`` elements; dumps also hold
``<gpu>``, ``<nvlink>``, ``<nic>`` and ``<net>``. NCCL does not tell PHB from NODE: both are one CPU element.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from probes.pci.facts import PciDevice
from topology.complete import complete
from topology.formats.xml_read import Found, cpu_of_element, numbered, walk
from topology.formats.xml_tree import TopologyXmlError, read_tree
from topology.formats.xml_write import write
from topology.graph import GpuNode, NicNode, NodeTopology, Pair, PathClass
from topology.labels import path_class
from topology.nvlink import joined
from topology.pcie import PciTree, plan
from topology.reference import recognise

__all__ = ["SOURCE", "TopologyXmlError", "parse", "write"]

SOURCE = "NCCL XML"
SAME_CPU = "PHB/NODE"
"""Level of a nearest NIC on the GPU's own CPU: the format does not say which of the two."""


def parse(text: str, source: str = "xml") -> NodeTopology:
    """The topology a file describes. Raises TopologyXmlError."""
    root = read_tree(text, source)
    if root.tag == "graphs":
        raise TopologyXmlError(
            source,
            root.line,
            "these are rings and trees (NCCL_GRAPH_DUMP_FILE), expected <system> (NCCL_TOPO_DUMP_FILE)",
        )
    if root.tag != "system":
        raise TopologyXmlError(source, root.line, f"the root is <{root.tag[:40]}>, expected <system>")
    if root.attributes.get("version") == "2":
        raise TopologyXmlError(
            source, root.line, "version 2 is a file of AMD's RCCL, expected version 1 of NCCL: NVIDIA GPUs only"
        )
    cpus = root.named("cpu")
    if not cpus:
        raise TopologyXmlError(source, root.line, "<system> holds no <cpu>, expected one for each NUMA node")
    warnings: list[str] = []
    hosts = {cpu.attributes.get("host_hash") for cpu in cpus}
    if len(hosts) > 1:
        warnings.append(f"the file covers {len(hosts)} hosts (host_hash); the first is read")
        cpus = [cpu for cpu in cpus if cpu.attributes.get("host_hash") == cpus[0].attributes.get("host_hash")]
    found = Found(source=source)
    for position, cpu in enumerate(cpus):
        found.cpus.append(cpu_of_element(cpu, position))
        walk(cpu, position, None, found)
    gpus = numbered(found.gpus)
    nics = tuple(nic for _, nic in sorted(found.nics, key=lambda item: item[0]))
    warnings += _warnings(found, gpus)
    devices: tuple[GpuNode | NicNode, ...] = (*gpus, *nics)
    node = complete(
        NodeTopology(
            hostname=source,
            gpus=gpus,
            nics=nics,
            pairs=tuple(_pair(a, b, found) for a, b in combinations(devices, 2)),
            numa_nodes=len(cpus),
            source=SOURCE,
            nvlink_known=found.dumped,
            warnings=tuple(warnings),
            cpus=tuple(found.cpus),
            pci=tuple(found.pci.values()),
        )
    )
    nearest = tuple(replace(near, label=SAME_CPU) if near.label == "PHB" else near for near in node.nearest_nic)
    return recognise(replace(node, nearest_nic=nearest))


def _warnings(found: Found, gpus: tuple[GpuNode, ...]) -> list[str]:
    warnings = []
    if lines := found.stray_net_lines:
        warnings.append(f"line {lines[0]}: <net> stands directly below <pci>: NCCL reads it below <nic> only")
    if found.without_class:
        warnings.append(
            f"{found.without_class} PCI devices have no class: a static file that NCCL completes on the host; "
            "which of them are GPUs or NICs is not known"
        )
    own = [gpu.name for gpu in gpus if any(link.bus_id == gpu.bus_id for link in gpu.nvlinks)]
    if own:
        warnings.append(f"NVLinks of {', '.join(own)} lead to the same GPU: which GPUs they join is not known")
    if not gpus:
        warnings.append("the file names no GPU")
    elif not found.dumped:
        warnings.append("the file says nothing about NVLink")
    if found.merged_nets:
        warnings.append(
            f"{', '.join(found.merged_nets[:4])}: ports that NCCL joined into one device; it has no place in the PCI "
            "tree, and is left out"
        )
    if found.virtual_nets:
        warnings.append(f"{found.virtual_nets} <net> without a PCI device (bridges, veth, tunnels) are no NICs")
    return warnings


def _pair(a: GpuNode | NicNode, b: GpuNode | NicNode, found: Found) -> Pair:
    if isinstance(a, GpuNode) and isinstance(b, GpuNode):
        count = _nvlinks(a, b)
        if count:
            return joined(a, b, count, "<nvlink>")
    first, second = a.bus_id or "", b.bus_id or ""
    label = _label(first, second, found)
    path = path_class(label)
    if isinstance(a, GpuNode) and a.c2c and label == "PHB" and isinstance(b, NicNode):
        path = PathClass.P2C
    to_gpu = isinstance(b, GpuNode)
    value = plan(_tree(found), first, second, label, found.cpus[found.cpu_of[first]], gpu_to_gpu=to_gpu)
    return Pair(a=a.name, b=b.name, label=label, path=path, bytes_per_second=value, evidence="<pci> ancestry")


def _nvlinks(a: GpuNode, b: GpuNode) -> int:
    def towards(gpu: GpuNode, other: GpuNode) -> int:
        return sum(link.count for link in gpu.nvlinks if link.kind == "gpu" and link.bus_id == other.bus_id)

    def switched(gpu: GpuNode) -> int:
        return sum(link.count for link in gpu.nvlinks if link.kind == "nvswitch")

    return max(min(towards(a, b), towards(b, a)), min(switched(a), switched(b)))


def _above(bus_id: str, found: Found) -> list[str]:
    chain = []
    node = found.pci.get(bus_id)
    while node and node.parent:
        chain.append(node.parent)
        node = found.pci.get(node.parent)
    return chain


def _label(first: str, second: str, found: Found) -> str:
    """NCCL's rule: one PCI element between is PIX, more are PXB, a CPU element is PHB, two are SYS."""
    if found.cpu_of[first] != found.cpu_of[second]:
        return "SYS"
    if first == second:
        return "PIX"
    above_first, above_second = _above(first, found), _above(second, found)
    if not set(above_first) & set(above_second):
        return "PHB"
    return "PIX" if above_first[0] == above_second[0] else "PXB"


def _tree(found: Found) -> PciTree:
    return PciTree(
        PciDevice(
            bus_id=node.bus_id,
            class_code=node.class_code or 0,
            vendor_id=node.vendor_id or 0,
            device_id=node.device_id or 0,
            parent=node.parent,
            numa_node=node.numa_node,
            link_transfers_per_second=node.link_transfers_per_second,
            link_width=node.link_width,
        )
        for node in found.pci.values()
    )
