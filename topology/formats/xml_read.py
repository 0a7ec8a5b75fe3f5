"""Walk NCCL's topology XML: CPUs, PCI elements, and which of them are GPUs and NICs.

Specification: NCCL src/graph/xml.cc. A PCI element is a GPU by its class or a ``<gpu>`` below it, a NIC by its class or
a ``<nic>`` below it; a ``<nic>`` directly below ``<cpu>`` is a socket interface without hardware of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from hardware.gpus import model_of
from hardware.nics import AMAZON, MELLANOX
from topology.formats.xml_tree import Element, TopologyXmlError
from topology.graph import CpuNode, GpuNode, NicNode, NvLinkTarget, PciNode

_LAST = 1 << 30  # a NIC without `dev` keeps its place in the file, after those with one
_RDMA_NAME = re.compile(r"(mlx|bnxt_re|roce|ib|irdma|hfi|ionic|rdmap|efa)", re.I)


@dataclass(slots=True)
class Found:
    """What a walk of the tree collects."""

    source: str
    gpus: list[tuple[GpuNode, str]] = field(default_factory=list)
    nics: list[tuple[int, NicNode]] = field(default_factory=list)  # with the first `dev` of its nets
    pci: dict[str, PciNode] = field(default_factory=dict)
    cpus: list[CpuNode] = field(default_factory=list)
    virtual_nets: int = 0
    merged_nets: list[str] = field(default_factory=list)  # several ports as one, which NCCL puts below `<cpu>`
    without_class: int = 0
    stray_net_lines: list[int] = field(default_factory=list)  # of `<net>` directly below `<pci>`
    dumped: bool = False  # a `<gpu>` was seen: NCCL wrote the file, and would have written the NVLinks too
    cpu_of: dict[str, int] = field(default_factory=dict)  # bus id -> position of its <cpu>


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


def cpu_of_element(element: Element, position: int) -> CpuNode:
    """A `<cpu>`; without numaid its position stands in."""
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


def walk(element: Element, cpu: int, parent: str | None, found: Found) -> None:
    """Collect what hangs from a `<cpu>` or `<pci>`."""
    for child in element.children:
        if child.tag == "pci":
            _pci(child, cpu, parent, found)
        elif child.tag == "nic" and parent is None:
            names = [net.attributes.get("name", "")[:64] for net in child.named("net")]
            merged = [name for name in names if "+" in name and _RDMA_NAME.match(name)]
            found.merged_nets += merged
            found.virtual_nets += len(names) - len(merged)


def _pci(element: Element, cpu: int, parent: str | None, found: Found) -> None:
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
    if stray := element.named("net"):
        found.stray_net_lines.append(stray[0].line)
        nets = nets or stray
    if any("gcn" in gpu.attributes or gpu.named("xgmi") for gpu in gpus):
        raise TopologyXmlError(
            found.source, gpus[0].line, "a file of AMD's RCCL (gcn, xgmi), expected one of NCCL: NVIDIA GPUs only"
        )
    base = class_code >> 8 if class_code is not None else None
    found.dumped = found.dumped or bool(gpus)
    if gpus or base in (0x0300, 0x0302):
        found.gpus += [(_gpu(gpu, node, found), _dev(gpu)) for gpu in gpus or [Element("gpu", {}, element.line)]]
    if nets or (base is not None and base >> 8 == 0x02):
        found.nics.append((min(map(_net_dev, nets), default=_LAST), _nic(node, nets, numa)))
    if class_code is None and not gpus and not nets and not element.named("pci"):
        found.without_class += 1
    walk(element, cpu, bus_id, found)


def _speed(text: str | None) -> float | None:
    match = re.match(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*GT/s", text or "")
    return float(match[1]) * 1e9 if match else None


def _net_dev(net: Element) -> int:
    dev = _decimal(net.attributes.get("dev"))
    return dev if dev is not None else _LAST


def _dev(gpu: Element) -> str:
    return gpu.attributes.get("dev", "")


def _gpu(element: Element, node: PciNode, found: Found) -> GpuNode:
    sm = _decimal(element.attributes.get("sm"))
    model, capability = model_of(node.vendor_id, node.device_id)
    links = tuple(_link(link, found) for link in element.named("nvlink"))
    return GpuNode(
        name="",
        index=-1,
        bus_id=node.bus_id,
        model=model,
        compute_capability=divmod(sm, 10) if sm is not None and sm >= 10 else capability,
        numa_node=node.numa_node if node.numa_node is not None and node.numa_node >= 0 else None,
        c2c=True if element.named("c2c") else None,
        nvlinks=links,
    )


def _link(element: Element, found: Found) -> NvLinkTarget:
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


def numbered(found: list[tuple[GpuNode, str]]) -> tuple[GpuNode, ...]:
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
    if node.vendor_id == AMAZON:
        kind = "efa"
    elif infiniband or node.vendor_id == MELLANOX or (names and _RDMA_NAME.match(name)):
        kind = "hca"
    else:
        # RoCE cards have Ethernet's class too: without vendor and name nothing tells them from others.
        told = node.class_code is not None and (node.vendor_id is not None or bool(names))
        kind = "ethernet" if told else "unknown"
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
