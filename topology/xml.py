"""NCCL's topology XML, as NCCL_TOPO_DUMP_FILE writes it and NCCL_TOPO_FILE reads it.

Specification: NCCL src/graph/xml.cc. Static files that cloud makers ship hold only ``<pci>`` elements; dumps also hold
``<gpu>``, ``<nvlink>``, ``<nic>`` and ``<net>``. NCCL does not tell PHB from NODE: both are one CPU element.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import combinations

from probes.pci import PciDevice
from topology.complete import complete
from topology.graph import CpuNode, GpuNode, NicNode, NodeTopology, NvLinkTarget, Pair, PathClass, PciNode
from topology.labels import path_class
from topology.nccl import nvlink_bytes_per_second
from topology.pcie import PciTree, plan
from topology.xml_tree import Element, TopologyXmlError, read_tree
from topology.xml_write import write

__all__ = ["SOURCE", "TopologyXmlError", "parse", "write"]

SOURCE = "NCCL XML"
SAME_CPU = "PHB/NODE"
"""Level of a nearest NIC on the GPU's own CPU: the format does not say which of the two."""

_LAST = 1 << 30  # a NIC without `dev` keeps its place in the file, after those with one
_EFA_VENDOR = 0x1D0F
_MELLANOX = 0x15B3
_RDMA_NAME = re.compile(r"(mlx|bnxt_re|roce|ib|irdma|hfi|ionic|rdmap|efa)", re.I)


@dataclass(slots=True)
class _Found:
    """What a walk of the tree collects."""

    source: str
    gpus: list[tuple[GpuNode, str]] = field(default_factory=list)
    nics: list[tuple[int, NicNode]] = field(default_factory=list)  # with the first `dev` of its nets
    pci: dict[str, PciNode] = field(default_factory=dict)
    cpus: list[CpuNode] = field(default_factory=list)
    virtual_nets: int = 0
    without_class: int = 0
    cpu_of: dict[str, int] = field(default_factory=dict)  # bus id -> position of its <cpu>


def parse(text: str, source: str = "xml") -> NodeTopology:
    """The topology a file describes. Raises TopologyXmlError."""
    root = read_tree(text, source)
    if root.tag != "system":
        raise TopologyXmlError(source, root.line, f"the root is <{root.tag[:40]}>, expected <system>")
    cpus = root.named("cpu")
    if not cpus:
        raise TopologyXmlError(source, root.line, "<system> holds no <cpu>, expected one for each NUMA node")
    warnings: list[str] = []
    hosts = {cpu.attributes.get("host_hash") for cpu in cpus}
    if len(hosts) > 1:
        warnings.append(f"the file covers {len(hosts)} hosts (host_hash); the first is read")
        cpus = [cpu for cpu in cpus if cpu.attributes.get("host_hash") == cpus[0].attributes.get("host_hash")]
    found = _Found(source=source)
    for position, cpu in enumerate(cpus):
        found.cpus.append(_cpu(cpu, position))
        _walk(cpu, position, None, found)
    gpus = _numbered(found.gpus)
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
            warnings=tuple(warnings),
            cpus=tuple(found.cpus),
            pci=tuple(found.pci.values()),
        )
    )
    nearest = tuple(replace(near, label=SAME_CPU) if near.label == "PHB" else near for near in node.nearest_nic)
    return replace(node, nearest_nic=nearest)


def _warnings(found: _Found, gpus: tuple[GpuNode, ...]) -> list[str]:
    warnings = []
    if found.without_class:
        warnings.append(
            f"{found.without_class} PCI devices have no class: a static file that NCCL completes on the host; "
            "which of them are GPUs or NICs is not known"
        )
    if not gpus:
        warnings.append("the file names no GPU")
    elif not any(gpu.nvlinks for gpu in gpus):
        warnings.append("the file says nothing about NVLink")
    if found.virtual_nets:
        warnings.append(f"{found.virtual_nets} <net> without a PCI device (bridges, veth, tunnels) are no NICs")
    return warnings


def _number(text: str | None) -> int | None:
    try:
        return int(text or "", 0)
    except ValueError:
        return None


def _decimal(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"-?\d{1,9}", text.strip()) else None


def bus_id_of(text: str) -> str:
    """sysfs form: lower case, a domain of four digits where it fits."""
    text = text.strip().lower()
    match = re.fullmatch(r"([0-9a-f]{1,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", text)
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}" if match else text[:64]


def _cpu(element: Element, position: int) -> CpuNode:
    said = element.attributes
    numa = _decimal(said.get("numaid"))
    return CpuNode(
        numa_node=numa if numa is not None else position,
        affinity=said.get("affinity"),
        arch=said.get("arch"),
        vendor=said.get("vendor"),
        family=_decimal(said.get("familyid")),
        model=_decimal(said.get("modelid")),
    )


def _walk(element: Element, cpu: int, parent: str | None, found: _Found) -> None:
    for child in element.children:
        if child.tag == "pci":
            _pci(child, cpu, parent, found)
        elif child.tag == "nic" and parent is None:
            found.virtual_nets += len(child.named("net"))


def _pci(element: Element, cpu: int, parent: str | None, found: _Found) -> None:
    said = element.attributes
    if "busid" not in said:
        raise TopologyXmlError(found.source, element.line, "<pci> without busid")
    bus_id = bus_id_of(said["busid"])
    if bus_id in found.pci:
        raise TopologyXmlError(found.source, element.line, f"busid {bus_id} stands twice in the file")
    numa = found.cpus[cpu].numa_node
    class_code = _number(said.get("class"))
    node = PciNode(
        bus_id=bus_id,
        parent=parent,
        numa_node=numa,
        class_code=class_code,
        vendor_id=_number(said.get("vendor")),
        device_id=_number(said.get("device")),
        link_transfers_per_second=_speed(said.get("link_speed")),
        link_width=_decimal(said.get("link_width")),
    )
    found.pci[bus_id] = node
    found.cpu_of[bus_id] = cpu
    gpus, nets = element.named("gpu"), [net for nic in element.named("nic") for net in nic.named("net")]
    base = class_code >> 8 if class_code is not None else None
    if gpus or base in (0x0300, 0x0302):
        found.gpus += [(_gpu(gpu, node, found), _dev(gpu)) for gpu in gpus or [Element("gpu", {}, element.line)]]
    if nets or (base is not None and base >> 8 == 0x02):
        found.nics.append((min(map(_net_dev, nets), default=_LAST), _nic(node, nets, numa)))
    if class_code is None and not gpus and not nets and not element.named("pci"):
        found.without_class += 1
    _walk(element, cpu, bus_id, found)


def _speed(text: str | None) -> float | None:
    match = re.match(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*GT/s", text or "")
    return float(match[1]) * 1e9 if match else None


def _net_dev(net: Element) -> int:
    dev = _decimal(net.attributes.get("dev"))
    return dev if dev is not None else _LAST


def _dev(gpu: Element) -> str:
    return gpu.attributes.get("dev", "")


def _gpu(element: Element, node: PciNode, found: _Found) -> GpuNode:
    sm = _decimal(element.attributes.get("sm"))
    links = tuple(_link(link, found) for link in element.named("nvlink"))
    return GpuNode(
        name="",
        index=-1,
        bus_id=node.bus_id,
        compute_capability=divmod(sm, 10) if sm is not None and sm >= 10 else None,
        numa_node=node.numa_node if node.numa_node is not None and node.numa_node >= 0 else None,
        c2c=True if element.named("c2c") else None,
        nvlinks=links,
    )


def _link(element: Element, found: _Found) -> NvLinkTarget:
    said = element.attributes
    count = _decimal(said.get("count"))
    if count is None or count < 0:
        raise TopologyXmlError(found.source, element.line, f"<nvlink> count is {said.get('count')!r}, not a number")
    kinds = {0x068000: "nvswitch", 0x068001: "cpu", 0x030000: "gpu", 0x030200: "gpu"}
    target = bus_id_of(said.get("target", ""))
    # NCCL writes a target of f's where a hypervisor hides the switch.
    hidden = re.fullmatch(r"f+:f+:f+(\.f)?", target) is not None
    kind = kinds.get(_number(said.get("tclass")) or -1, "nvswitch" if hidden else "unknown")
    return NvLinkTarget(bus_id=None if hidden else target, count=count, kind=kind)


def _numbered(found: list[tuple[GpuNode, str]]) -> tuple[GpuNode, ...]:
    """GPUs by `dev` where the file gives each its own, else by bus id, as CUDA numbers them."""
    devs = [dev for _, dev in found]
    by_bus_id = {gpu.bus_id for gpu, _ in found}
    if all(re.fullmatch(r"\d{1,4}", dev) for dev in devs) and len(set(devs)) == len(devs):
        ordered = sorted(((int(dev), gpu) for gpu, dev in found), key=lambda item: item[0])
    else:
        ordered = list(enumerate(sorted((gpu for gpu, _ in found), key=lambda gpu: gpu.bus_id or "")))
    return tuple(
        replace(
            gpu,
            name=f"GPU{index}",
            index=index,
            nvlinks=tuple(replace(link, kind="gpu") if link.bus_id in by_bus_id else link for link in gpu.nvlinks),
        )
        for index, gpu in ordered
    )


def _nic(node: PciNode, nets: list[Element], numa: int) -> NicNode:
    names = tuple(net.attributes.get("name", "")[:64] for net in nets if net.attributes.get("name"))
    speeds = [_decimal(net.attributes.get("speed")) for net in nets]
    known = [speed for speed in speeds if speed is not None and speed > 0]
    infiniband = node.class_code is not None and node.class_code >> 8 == 0x0207
    name = names[0] if names else node.bus_id
    if node.vendor_id == _EFA_VENDOR:
        kind = "efa"
    elif infiniband or node.vendor_id == _MELLANOX or (names and _RDMA_NAME.match(name)):
        kind = "hca"
    else:
        kind = "ethernet" if node.class_code is not None else "unknown"
    return NicNode(
        name=name,
        kind=kind,
        bus_id=node.bus_id,
        netdev=name if kind == "ethernet" and names else None,
        numa_node=numa if numa >= 0 else None,
        rate_bytes_per_second=sum(known) * 1e6 / 8 if known and len(known) == len(nets) else None,
        link_layer="InfiniBand" if infiniband else None,
        active=True if nets else None,  # a dump lists only ports that NCCL found active
        ports=len(nets) or None,
        nets=names,
    )


def _pair(a: GpuNode | NicNode, b: GpuNode | NicNode, found: _Found) -> Pair:
    if isinstance(a, GpuNode) and isinstance(b, GpuNode):
        count = _nvlinks(a, b)
        if count:
            speeds = [nvlink_bytes_per_second(gpu.compute_capability) for gpu in (a, b)]
            value = None if None in speeds else count * min(speed for speed in speeds if speed is not None)
            return Pair(
                a=a.name,
                b=b.name,
                label=f"NV{count}",
                path=PathClass.NVL,
                nvlinks=count,
                bytes_per_second=value,
                evidence="<nvlink>",
            )
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


def _above(bus_id: str, found: _Found) -> list[str]:
    chain = []
    node = found.pci.get(bus_id)
    while node and node.parent:
        chain.append(node.parent)
        node = found.pci.get(node.parent)
    return chain


def _label(first: str, second: str, found: _Found) -> str:
    """NCCL's rule: one PCI element between is PIX, more are PXB, a CPU element is PHB, two are SYS."""
    if found.cpu_of[first] != found.cpu_of[second]:
        return "SYS"
    if first == second:
        return "PIX"
    above_first, above_second = _above(first, found), _above(second, found)
    if not set(above_first) & set(above_second):
        return "PHB"
    return "PIX" if above_first[0] == above_second[0] else "PXB"


def _tree(found: _Found) -> PciTree:
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
