"""Write NCCL's topology XML from a node.

Specification: NCCL src/graph/xml.cc (ncclTopoGetXmlFromSys): one ``<pci>`` for every PCIe switch, not for each of its
ports, below the ``<cpu>`` of its NUMA node. Where each device stands comes from the PCIe tree where it is known, else
from the labels of the matrix. A text matrix holds no bus ids: then they are placeholders, and a comment says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from topology.graph import CpuNode, GpuNode, NicNode, NodeTopology, Pairs, PciNode, level, nvlinks

Lines = list[str]


def write(node: NodeTopology) -> str:
    """The XML, ready for NCCL_TOPO_FILE where the bus ids are real."""
    placed = place(node)
    lines = ['<system version="1">']
    if placed.placeholders:
        lines.insert(0, "<!-- Bus ids are placeholders: the source names none. Do not give this to NCCL as it is. -->")
    devices: dict[str, list[GpuNode | NicNode]] = {}
    devs = _net_devs(node)
    for device in node.devices:
        if device.name in placed.bus_ids:
            devices.setdefault(placed.bus_ids[device.name], []).append(device)
    below: dict[str | None, list[PciNode]] = {}
    for pci in placed.pci:
        below.setdefault(pci.parent, []).append(pci)
    cpus = {cpu.numa_node: cpu for cpu in node.cpus}
    numas = {pci.numa_node if pci.numa_node is not None else -1: None for pci in below.get(None, [])}
    for numa in [*numas, *(numa for numa in cpus if numa not in numas)]:
        lines.append(f"  <cpu{_cpu(numa, cpus.get(numa))}>")
        for pci in below.get(None, []):
            if (pci.numa_node if pci.numa_node is not None else -1) == numa:
                lines += _pci(pci, below, devices, placed.links, devs, "    ")
        lines.append("  </cpu>")
    return "\n".join([*lines, "</system>"]) + "\n"


def _net_devs(node: NodeTopology) -> dict[str, int]:
    """The number of each NIC's first net, as NCCL counts nets."""
    devs, number = {}, 0
    for nic in node.nics:
        devs[nic.name] = number
        number += max(1, len(nic.nets))
    return devs


def _attributes(pairs: dict[str, object]) -> str:
    return "".join(f" {name}={_quoted(value)}" for name, value in pairs.items() if value is not None)


def _quoted(value: object) -> str:
    """An attribute's value without the control characters that XML forbids."""
    from xml.sax.saxutils import quoteattr  # brings urllib along

    return quoteattr("".join(letter if letter.isprintable() else "?" for letter in str(value)))


def _cpu(numa: int, cpu: CpuNode | None) -> str:
    attributes: dict[str, object] = {"numaid": numa}
    if cpu:
        attributes |= {"affinity": cpu.affinity, "arch": cpu.arch, "vendor": cpu.vendor}
        attributes |= {"familyid": cpu.family, "modelid": cpu.model}
    return _attributes(attributes)


def _pci(
    pci: PciNode,
    below: dict[str | None, list[PciNode]],
    devices: dict[str, list[GpuNode | NicNode]],
    links: dict[str, tuple[tuple[str, int, str], ...]],
    devs: dict[str, int],
    indent: str,
) -> Lines:
    here = devices.get(pci.bus_id, [])
    attributes: dict[str, object] = {"busid": pci.bus_id, "class": _hex(pci.class_code, 6)}
    attributes |= {"vendor": _hex(pci.vendor_id, 4), "device": _hex(pci.device_id, 4)}
    if pci.link_transfers_per_second:
        attributes["link_speed"] = f"{pci.link_transfers_per_second / 1e9:.1f} GT/s PCIe"
    attributes["link_width"] = pci.link_width
    inside: Lines = []
    for device in here:
        inside += (
            _gpu(device, links, indent) if isinstance(device, GpuNode) else _nic(device, devs[device.name], indent)
        )
    for child in below.get(pci.bus_id, []):
        inside += _pci(child, below, devices, links, devs, indent + "  ")
    head = f"{indent}<pci{_attributes(attributes)}"
    return [f"{head}>", *inside, f"{indent}</pci>"] if inside else [f"{head}/>"]


def _hex(value: int | None, digits: int) -> str | None:
    return f"0x{value:0{digits}x}" if value is not None else None


def _gpu(gpu: GpuNode, links: dict[str, tuple[tuple[str, int, str], ...]], indent: str) -> Lines:
    sm = gpu.compute_capability[0] * 10 + gpu.compute_capability[1] if gpu.compute_capability else None
    inside = [
        f"{indent}    <nvlink{_attributes({'target': target, 'count': count, 'tclass': tclass})}/>"
        for target, count, tclass in links.get(gpu.name, ())
    ]
    if gpu.c2c:
        inside.append(f"{indent}    <c2c/>")
    head = f"{indent}  <gpu{_attributes({'dev': gpu.index, 'sm': sm})}"
    return [f"{head}>", *inside, f"{indent}  </gpu>"] if inside else [f"{head}/>"]


def _nic(nic: NicNode, first: int, indent: str) -> Lines:
    if nic.bus_id is not None and nic.name == nic.bus_id:
        return []  # a static file that names no <net> gets none
    names = nic.nets or (nic.name,)
    rate = nic.rate_bytes_per_second
    speed = round(rate * 8 / 1e6 / len(names)) if rate is not None else None
    nets = [
        f"{indent}    <net{_attributes({'name': name, 'dev': first + index, 'speed': speed, 'port': index + 1})}/>"
        for index, name in enumerate(names)
    ]
    return [f"{indent}  <nic>", *nets, f"{indent}  </nic>"]


_SWITCH_CLASS = "0x068000"
_GPU_CLASS = "0x030200"
_HIDDEN_SWITCH = "fffffff:ffff:ff"  # as NCCL writes it where a hypervisor hides the switch
_MOST_DIRECT_LINKS = 18  # no GPU up to Blackwell has more NVLinks: a larger sum means a switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The tree to write: nodes parents first, each device's bus id, each GPU's (target, count, class)."""

    pci: tuple[PciNode, ...]
    bus_ids: dict[str, str]
    links: dict[str, tuple[tuple[str, int, str], ...]]
    placeholders: bool = False


def place(node: NodeTopology) -> Placed:
    """The node's own tree, or one that gives back the same labels."""
    if node.pci:
        # NCCL leaves out NICs without an active port.
        down = {nic.name for nic in node.nics if nic.active is False}
        bus_ids = {device.name: device.bus_id for device in node.devices if device.bus_id and device.name not in down}
        known = {pci.bus_id for pci in node.pci}
        bus_ids = {name: bus_id for name, bus_id in bus_ids.items() if bus_id in known}
        pci = node.pci if node.source == "NCCL XML" else _switches_only(node.pci, set(bus_ids.values()))
        return Placed(pci=pci, bus_ids=bus_ids, links=_known_links(node, bus_ids))
    return _from_labels(node)


def _switches_only(nodes: tuple[PciNode, ...], endpoints: set[str]) -> tuple[PciNode, ...]:
    """NCCL keeps every second bridge above a device: a switch is its upstream port, root ports are left out.

    A bridge that two devices meet at is kept as well where no kept one joins them, as below a guest's root port.
    """
    by_id = {node.bus_id: node for node in nodes}
    above = {bus_id: _above(bus_id, by_id) for bus_id in endpoints}
    kept = {bridge for chain in above.values() for bridge in chain[1::2]}
    for first, second in combinations(sorted(endpoints), 2):
        common = [bridge for bridge in above[first] if bridge in above[second]]
        if common and not kept & set(common):
            kept.add(common[0])
    made = []
    for node in nodes:
        if node.bus_id in kept or node.bus_id in endpoints:
            parent = next((bridge for bridge in _above(node.bus_id, by_id) if bridge in kept), None)
            made.append(replace(node, parent=parent, numa_node=_numa(node, nodes, above)))
    return tuple(made)


def _above(bus_id: str, by_id: dict[str, PciNode]) -> list[str]:
    """Bridges above a node, nearest first."""
    chain: list[str] = []
    node = by_id.get(bus_id)
    while node and node.parent in by_id and node.parent not in chain:
        chain.append(str(node.parent))
        node = by_id.get(str(node.parent))
    return chain


def _numa(node: PciNode, nodes: tuple[PciNode, ...], above: dict[str, list[str]]) -> int | None:
    """A bridge's NUMA node is that of a device below it: firmware often leaves bridges without one."""
    below = (other.numa_node for other in nodes if node.bus_id in above.get(other.bus_id, ()))
    return node.numa_node if node.numa_node is not None else next((numa for numa in below if numa is not None), None)


def _known_links(node: NodeTopology, bus_ids: dict[str, str]) -> dict[str, tuple[tuple[str, int, str], ...]]:
    if any(gpu.nvlinks for gpu in node.gpus):
        classes = {"nvswitch": _SWITCH_CLASS, "gpu": _GPU_CLASS, "cpu": "0x068001"}
        return {
            gpu.name: tuple(
                (link.bus_id or _HIDDEN_SWITCH, link.count, classes.get(link.kind, _SWITCH_CLASS))
                for link in gpu.nvlinks
            )
            for gpu in node.gpus
        }
    return _links_from_labels(node, bus_ids)


def _links_from_labels(node: NodeTopology, bus_ids: dict[str, str]) -> dict[str, tuple[tuple[str, int, str], ...]]:
    """Direct links to each peer, or one bundle to a switch where no GPU could have that many direct ones.

    To NCCL all switches of a node are one: with several islands the links are written as direct ones.
    """
    known = Pairs(node.pairs)
    whole = len(node.islands) == 1 and node.islands[0].all_to_all and len(node.islands[0].nvlinks_per_pair) == 1
    links: dict[str, tuple[tuple[str, int, str], ...]] = {}
    for gpu in node.gpus:
        peers = [(other.name, nvlinks(known.label(gpu.name, other.name))) for other in node.gpus if other is not gpu]
        peers = [(name, count) for name, count in peers if count and name in bus_ids]
        if whole and sum(count for _, count in peers) > _MOST_DIRECT_LINKS:
            links[gpu.name] = ((_HIDDEN_SWITCH, peers[0][1], _SWITCH_CLASS),)
        else:
            links[gpu.name] = tuple((bus_ids[name], count, _GPU_CLASS) for name, count in peers)
    return links


def _groups(names: list[str], known: Pairs, labels: set[str], also: list[set[str]] | None = None) -> list[list[str]]:
    """Names joined by any pair with one of these labels, in order of first appearance."""
    groups: list[list[str]] = []
    left = list(names)
    while left:
        group, waiting = {left[0]}, [left[0]]
        while waiting:
            here = waiting.pop()
            beside = [set_ for set_ in also or [] if here in set_]
            for name in left:
                joined = level(known.label(here, name)) in labels or any(name in set_ for set_ in beside)
                if name not in group and joined:
                    group.add(name)
                    waiting.append(name)
        groups.append([name for name in names if name in group])
        left = [name for name in left if name not in group]
    return groups


def _from_labels(node: NodeTopology) -> Placed:
    known = Pairs(node.pairs)
    devices = node.devices
    names = [device.name for device in devices]
    bus_ids = {name: f"0000:{number + 1:02x}:00.0" for number, name in enumerate(names)}
    gpu_names = {gpu.name for gpu in node.gpus}
    pci: list[PciNode] = []
    for number, cpu in enumerate(_groups(names, known, {"PIX", "PXB", "PHB", "NODE"}, _linked_by_numa(node, known))):
        for outer in _groups(cpu, known, {"PIX", "PXB"}):
            inner = _groups(outer, known, {"PIX"})
            top = _bridge(pci, number, None) if len(inner) > 1 else None
            for group in inner:
                parent = _bridge(pci, number, top) if len(group) > 1 or top else None
                pci += [
                    PciNode(
                        bus_id=bus_ids[name],
                        parent=parent,
                        numa_node=number,
                        class_code=0x030200 if name in gpu_names else 0x020700,
                    )
                    for name in group
                ]
    return Placed(pci=tuple(pci), bus_ids=bus_ids, links=_links_from_labels(node, bus_ids), placeholders=True)


def _bridge(pci: list[PciNode], numa: int, parent: str | None) -> str:
    number = sum(1 for node in pci if node.bus_id.startswith("ffff:")) + 1
    bus_id = f"ffff:ff:{number % 0x1F:02x}.{number // 0x1F}"
    pci.append(PciNode(bus_id=bus_id, parent=parent, numa_node=numa, class_code=0x060400))
    return bus_id


def _linked_by_numa(node: NodeTopology, known: Pairs) -> list[set[str]]:
    """GPUs whose PCIe relation an NV# label hides, and which print the same NUMA node."""
    sets: dict[str, set[str]] = {}
    for gpu in node.gpus:
        if (gpu.numa_affinity or "").isdigit() and _only_nvlink(gpu, node, known):
            sets.setdefault(str(gpu.numa_affinity), set()).add(gpu.name)
    return list(sets.values())


def _only_nvlink(gpu: GpuNode, node: NodeTopology, known: Pairs) -> bool:
    return all(nvlinks(known.label(gpu.name, other.name)) for other in node.gpus if other is not gpu)
