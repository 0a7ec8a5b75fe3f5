"""Reads NCCL's topology XML, which NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads.

Specification: NCCL src/graph/xml.cc. Static files of cloud providers contain only ``<pci>`` elements; dumps also
contain ``<gpu>``, ``<nvlink>``, ``<nic>`` and ``<net>``. NCCL does not distinguish PHB and NODE: both are one CPU
element. A PCI element is a GPU by its class or by a ``<gpu>`` child, a NIC by its class or by a ``<nic>`` child. A
``<nic>`` directly below ``<cpu>`` is a socket interface without its own hardware. The text is untrusted: document types
and entities are rejected, and size, depth and number of elements are limited. expat reports declarations before it
expands anything.
"""

from __future__ import annotations

import re
import xml.parsers.expat as expat
from dataclasses import dataclass, field, replace
from itertools import combinations

from contracts.tables import read_texts
from hardware.gpus import find_model
from hardware.nics import AMAZON, MELLANOX
from probes.pci.facts import PciDevice
from topology.derive import complete
from topology.formats import TopologyFileError
from topology.graph import Cpu, Device, GpuNode, NicNode, NodeTopology, NvLinkTarget, Pair
from topology.links import PciTree, join_by_nvlink, pair_by_pcie

SOURCE = "NCCL XML"
SAME_CPU = "PHB/NODE"
"""Label of a nearest NIC on the GPU's own CPU: the format does not distinguish PHB and NODE."""

_text = read_texts(__file__, "texts.toml")


def parse(text: str, source: str = "xml") -> NodeTopology:
    """Parse a topology file. Raises TopologyFileError."""
    root = read_tree(text, source)
    if root.tag != "system":
        key = "graphs" if root.tag == "graphs" else "root"
        raise TopologyFileError(source, root.line, _text(key, tag=root.tag[:40]))
    if root.attributes.get("version") == "2":
        raise TopologyFileError(source, root.line, _text("rccl_version"))
    cpus = root.named("cpu")
    if not cpus:
        raise TopologyFileError(source, root.line, _text("no_cpu"))
    warnings = [_text("further_system")] if "<system" in text.partition("</system>")[2] else []
    hosts = {cpu.attributes.get("host_hash") for cpu in cpus}
    if len(hosts) > 1:
        warnings.append(_text("hosts", count=len(hosts)))
        cpus = [cpu for cpu in cpus if cpu.attributes.get("host_hash") == cpus[0].attributes.get("host_hash")]
    parts = CollectedElements(source=source)
    for position, cpu in enumerate(cpus):
        attributes = cpu.attributes
        family, model, numa = (_parse_number(attributes.get(name)) for name in ("familyid", "modelid", "numaid"))
        parts.cpus.append(Cpu(arch=attributes.get("arch"), vendor=attributes.get("vendor"), family=family, model=model))
        parts.numa_nodes.append(position if numa is None else numa)  # position, if numaid is missing
        collect_elements(cpu, position, None, parts)
    tree = PciTree(parts.pci.values(), own_links=True)
    gpus = tuple(replace(gpu, **tree.links_of(gpu.bus_id)) for gpu in number_gpus(parts.gpus))
    ordered = sorted(parts.nics, key=lambda item: item[0])
    nics = tuple(replace(nic, **tree.links_of(nic.bus_id)) for _, nic in ordered)
    warnings += _list_warnings(parts, gpus)
    devices: tuple[Device, ...] = (*gpus, *nics)
    hidden = parts.dumped and all(d.numa_node == -1 and not d.link_transfers_per_second for d in parts.pci.values())
    node = complete(
        NodeTopology(
            hostname=source,
            gpus=gpus,
            nics=nics,
            pairs=tuple(_build_pair(a, b, parts, tree) for a, b in combinations(devices, 2)),
            numa_nodes=len(cpus),
            source=SOURCE,
            nvlink_known=parts.dumped,
            virtual="no PCI device has a NUMA node or a link speed: a hypervisor hides both" if hidden else None,
            warnings=tuple(warnings),
        )
    )
    nearest = tuple(replace(near, label=SAME_CPU) if near.label == "PHB" else near for near in node.nearest_nic)
    return replace(node, nearest_nic=nearest)


def _list_warnings(parts: CollectedElements, gpus: tuple[GpuNode, ...]) -> list[str]:
    warnings = parts.strays[:1]
    if parts.without_class:
        warnings.append(_text("without_class", count=parts.without_class))
    self_linked = [gpu.name for gpu in gpus if any(link.bus_id == gpu.bus_id for link in gpu.nvlinks)]
    for a, b in combinations(gpus, 2):
        there, back = a.count_nvlinks("gpu", b.bus_id), b.count_nvlinks("gpu", a.bus_id)
        if there and back and there != back:
            warnings.append(_text("unequal_nvlinks", a=a.name, b=b.name, there=there, back=back))
    if self_linked:
        warnings.append(_text("own_nvlinks", gpus=", ".join(self_linked)))
    if not gpus or not parts.dumped:
        warnings.append(_text("no_nvlink" if gpus else "no_gpu"))
    if parts.merged_nets:
        warnings.append(_text("merged_nets", names=", ".join(parts.merged_nets[:4])))
    if parts.virtual_nets:
        warnings.append(_text("virtual_nets", count=parts.virtual_nets))
    return warnings


def _build_pair(a: Device, b: Device, parts: CollectedElements, tree: PciTree) -> Pair:
    if isinstance(a, GpuNode) and isinstance(b, GpuNode) and (count := _count_nvlinks(a, b)):
        return join_by_nvlink(a, b, count, "<nvlink>")
    first, second = a.bus_id or "", b.bus_id or ""
    label = _find_label(first, second, parts, tree)
    return pair_by_pcie(a, b, label, tree, parts.cpus[parts.cpu_of[first]], evidence="<pci> ancestry")


def _count_nvlinks(a: GpuNode, b: GpuNode) -> int:
    direct = min(a.count_nvlinks("gpu", b.bus_id), b.count_nvlinks("gpu", a.bus_id))
    return max(direct, min(a.count_nvlinks("nvswitch"), b.count_nvlinks("nvswitch")))


def _find_label(first: str, second: str, parts: CollectedElements, tree: PciTree) -> str:
    """Apply NCCL's rule: PIX for one PCI element in between, PXB for more, PHB for one CPU element, SYS for two."""
    if parts.cpu_of[first] != parts.cpu_of[second]:
        return "SYS"
    if first == second:
        return "PIX"
    above_first, above_second = tree.above(first), tree.above(second)
    if not set(above_first) & set(above_second):
        return "PHB"
    return "PIX" if above_first[-1] == above_second[-1] else "PXB"


_LAST = 1 << 30  # NICs without `dev` follow those with one, in file order
_RDMA_NAME = re.compile(r"(mlx|bnxt_re|roce|ib|irdma|hfi|ionic|rdmap|efa|erdma|mana_|hns_|qedr)", re.I)


@dataclass(slots=True)
class CollectedElements:
    """Elements collected by `collect_elements`."""

    source: str
    gpus: list[tuple[GpuNode, str]] = field(default_factory=list)
    nics: list[tuple[int, NicNode]] = field(default_factory=list)  # with the smallest `dev` of its nets
    pci: dict[str, PciDevice] = field(default_factory=dict)
    cpus: list[Cpu] = field(default_factory=list)
    numa_nodes: list[int] = field(default_factory=list)  # of each CPU
    virtual_nets: int = 0
    merged_nets: list[str] = field(default_factory=list)  # several ports merged by NCCL, below `<cpu>`
    without_class: int = 0
    strays: list[str] = field(default_factory=list)  # warnings about elements that NCCL does not read
    dumped: bool = False  # True after a `<gpu>`: NCCL wrote this file, so it includes NVLinks
    cpu_of: dict[str, int] = field(default_factory=dict)  # bus id -> position of its <cpu>


def _parse_number(text: str | None) -> int | None:
    """Parse a decimal or hexadecimal number, None if the attribute is missing, no number, or too long."""
    match = re.fullmatch(r"\s*(-?\d{1,9}|0x[0-9a-f]{1,8})\s*", text or "", re.I)
    return int(match[1], 16 if "x" in match[1].lower() else 10) if match else None


def normalise_bus_id(text: str) -> str:
    """Convert to the form of sysfs: lower case, with a domain of four digits if possible."""
    text = text.strip().lower()
    match = re.fullmatch(r"([0-9a-f]{1,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", text)
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}" if match else text[:64]


def collect_elements(element: Element, cpu: int, parent: str | None, parts: CollectedElements) -> None:
    """Collect the elements below a `<cpu>` or `<pci>`."""
    for child in element.children:
        if child.tag == "pci":
            _collect_pci(child, cpu, parent, parts)
        elif child.tag == "nic" and parent is None:
            names = [net.attributes.get("name", "")[:64] for net in child.named("net")]
            merged = [name for name in names if "+" in name and _RDMA_NAME.match(name)]
            parts.merged_nets += merged
            parts.virtual_nets += len(names) - len(merged)


def _collect_pci(element: Element, cpu: int, parent: str | None, parts: CollectedElements) -> None:
    attributes = element.attributes
    if "busid" not in attributes:
        raise TopologyFileError(parts.source, element.line, _text("no_busid"))
    bus_id = normalise_bus_id(attributes["busid"])
    if bus_id in parts.pci:
        raise TopologyFileError(parts.source, element.line, _text("busid_twice", bus_id=bus_id))
    numa = parts.numa_nodes[cpu]
    speed = re.match(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*GT/s", attributes.get("link_speed", ""))
    class_code = _parse_number(attributes.get("class"))
    node = PciDevice(
        bus_id=bus_id,
        parent=parent,
        numa_node=numa,
        class_code=class_code or 0,
        vendor_id=_parse_number(attributes.get("vendor")) or 0,
        device_id=_parse_number(attributes.get("device")) or 0,
        link_transfers_per_second=float(speed[1]) * 1e9 if speed else None,
        link_width=_parse_number(attributes.get("link_width")),
    )
    parts.pci[bus_id] = node
    parts.cpu_of[bus_id] = cpu
    gpus, nets = element.named("gpu"), [net for nic in element.named("nic") for net in nic.named("net")]
    if stray := element.named("net"):
        parts.strays.append(_text("stray_net", line=stray[0].line))
        nets = nets or stray
    parts.strays += [_text("empty_nic", line=nic.line) for nic in element.named("nic") if not nic.children]
    if any("gcn" in gpu.attributes or gpu.named("xgmi") for gpu in gpus):
        raise TopologyFileError(parts.source, gpus[0].line, _text("rccl"))
    base = class_code >> 8 if class_code is not None else None
    parts.dumped = parts.dumped or bool(gpus)
    if gpus or base in (0x0300, 0x0302):
        parts.gpus += [
            (_build_gpu(gpu, node, parts), gpu.attributes.get("dev", ""))
            for gpu in gpus or [Element("gpu", {}, element.line)]
        ]
    if nets or (base is not None and base >> 8 == 0x02):
        devs = [dev for net in nets if (dev := _parse_number(net.attributes.get("dev"))) is not None]
        parts.nics.append((min(devs, default=_LAST), _build_nic(node, nets, numa)))
    if class_code is None and not gpus and not nets and not element.named("pci"):
        parts.without_class += 1
    collect_elements(element, cpu, bus_id, parts)


def _build_gpu(element: Element, node: PciDevice, parts: CollectedElements) -> GpuNode:
    sm = _parse_number(element.attributes.get("sm"))
    reported = divmod(sm, 10) if sm is not None and sm >= 10 else None
    model, capability = find_model(node.vendor_id, node.device_id, reported)
    links = tuple(_parse_link(link, parts) for link in element.named("nvlink"))
    above = parts.pci.get(node.parent or "")
    return GpuNode(
        name="",
        index=-1,
        bus_id=node.bus_id,
        model=model,
        compute_capability=reported or capability,
        numa_node=node.numa_node if node.numa_node is not None and node.numa_node >= 0 else None,
        c2c=True if element.named("c2c") else None,
        nvlinks=links,
        pcie_lanes=node.link_width,
        bridge_lanes=(above.bus_id, above.link_width) if above is not None and above.link_width else None,
        gdr_refused=_find_gdr_refused([element]),
    )


def _find_gdr_refused(elements: list[Element]) -> str:
    """Return the first element that shows missing GPUDirect RDMA support, if all elements do; else empty."""
    gdr_values = [(each, each.attributes.get("gdr", "").strip()) for each in elements]
    if not gdr_values or any(gdr != "0" for _, gdr in gdr_values):
        return ""
    first = gdr_values[0][0]
    name = first.attributes.get("name") or first.attributes.get("dev", "")
    return f'line {first.line}: <{first.tag} {"name" if first.tag == "net" else "dev"}="{name[:64]}" gdr="0">'


def _parse_link(element: Element, parts: CollectedElements) -> NvLinkTarget:
    attributes = element.attributes
    count = _parse_number(attributes.get("count"))
    if count is None or count < 0:
        raise TopologyFileError(parts.source, element.line, _text("nvlink_count", count=attributes.get("count")))
    kinds = {0x068000: "nvswitch", 0x068001: "cpu", 0x030000: "gpu", 0x030200: "gpu"}
    target = normalise_bus_id(attributes.get("target", ""))
    # NCCL writes a target of all f's if a hypervisor hides the switch.
    hidden = re.fullmatch(r"f+:f+:f+(\.f)?", target) is not None
    kind = kinds.get(_parse_number(attributes.get("tclass")) or -1, "nvswitch" if hidden else "unknown")
    return NvLinkTarget(bus_id=None if hidden else target, count=count, kind=kind)


def number_gpus(gpus: list[tuple[GpuNode, str]]) -> tuple[GpuNode, ...]:
    """Number GPUs by `dev` if every GPU has its own, else by bus id as CUDA does."""
    devs = [dev for _, dev in gpus]
    by_bus_id = {gpu.bus_id for gpu, _ in gpus}
    if all(re.fullmatch(r"\d{1,4}", dev) for dev in devs) and len(set(devs)) == len(devs):
        ordered = sorted(((int(dev), gpu) for gpu, dev in gpus), key=lambda item: item[0])
    else:
        ordered = list(enumerate(sorted((gpu for gpu, _ in gpus), key=lambda gpu: gpu.bus_id or "")))
    return tuple(
        replace(
            gpu,
            name=f"GPU{index}",
            index=index,
            nvlinks=tuple(replace(link, kind="gpu") if link.bus_id in by_bus_id else link for link in gpu.nvlinks),
        )
        for index, gpu in ordered
    )


def _build_nic(node: PciDevice, nets: list[Element], numa: int) -> NicNode:
    names = tuple(net.attributes.get("name", "")[:64] for net in nets if net.attributes.get("name"))
    speeds = [_parse_number(net.attributes.get("speed")) for net in nets]
    valid = [speed for speed in speeds if speed is not None and speed > 0]
    infiniband = node.class_code >> 8 == 0x0207
    name = names[0] if names else node.bus_id
    if node.vendor_id == AMAZON:
        kind = "efa"
    elif infiniband or node.vendor_id == MELLANOX or (names and _RDMA_NAME.match(name)):
        kind = "hca"
    else:
        # RoCE cards have the class of Ethernet: without vendor and name they look like other Ethernet cards.
        identified = bool(node.class_code) and bool(node.vendor_id or names)
        kind = "ethernet" if identified else "unknown"
    return NicNode(
        name=name,
        kind=kind,
        bus_id=node.bus_id,
        netdev=name if kind == "ethernet" and names else None,
        numa_node=numa if numa >= 0 else None,
        rate_bytes_per_second=sum(valid) * 1e6 / 8 if valid and len(valid) == len(nets) else None,
        link_layer="InfiniBand" if infiniband else None,
        active=True if nets else None,  # a dump only lists ports that NCCL found active
        ports=len(nets) or None,
        nets=names,
        gdr_refused=_find_gdr_refused(nets),
    )


MAX_CHARACTERS = 16 * 2**20
_DEEPEST = 64  # real PCIe trees have fewer than ten levels
_MAX_ELEMENTS = 200_000


@dataclass(slots=True)
class Element:
    """One element with its attributes, start line and children; text is not kept."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def named(self, *tags: str) -> list[Element]:
        """Return the children with one of these tags."""
        return [child for child in self.children if child.tag in tags]


def read_tree(text: str, source: str) -> Element:
    """Parse the XML and return the root element. Raises TopologyFileError."""
    if len(text) > MAX_CHARACTERS:
        raise TopologyFileError(source, 1, _text("characters", count=len(text), most=MAX_CHARACTERS))
    text = text.removeprefix("\ufeff")
    head, end, _ = text.partition("</system>")
    if (copies := text.count("</system>")) > 1:
        raise TopologyFileError(source, 1, _text("several", count=copies))
    if end:  # a page or a script may surround it
        before, tag, body = head.partition("<system")
        lines = "\n" * before.count("\n")  # within the tag, so that a line keeps its number
        text = (before + tag if before.lstrip().startswith("<") else tag + lines) + body + end
    parser = expat.ParserCreate(encoding="utf-8")
    document = Element("", {}, 1)
    above, count = [document], 0

    def refuse(*_arguments: object) -> None:
        raise TopologyFileError(source, parser.CurrentLineNumber, _text("declaration"))

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        line = parser.CurrentLineNumber
        if len(above) > _DEEPEST or count > _MAX_ELEMENTS:
            raise TopologyFileError(source, line, _text("deep", levels=_DEEPEST, elements=_MAX_ELEMENTS))
        above.append(Element(tag, attributes, line))
        above[-2].children.append(above[-1])

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _tag: above.pop()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        # The text is already decoded, so an encoding declaration is ignored.
        parser.Parse(text.lstrip().encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        skipped = text[: len(text) - len(text.lstrip())].count("\n")
        raise TopologyFileError(source, error.lineno + skipped, _text("malformed", error=error)) from None
    return document.children[0]
