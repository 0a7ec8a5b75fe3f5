"""Write NCCL's topology XML from a node.

Specification: NCCL src/graph/xml.cc (ncclTopoGetXmlFromSys): one ``<pci>`` for every PCIe switch, not for each of its
ports, below the ``<cpu>`` of its NUMA node. A text matrix holds no bus ids: then they are placeholders, and a comment
says so.
"""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

from topology.formats.xml_place import place
from topology.graph import CpuNode, GpuNode, NicNode, NodeTopology, PciNode

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
    return quoteattr("".join(letter if letter.isprintable() else "?" for letter in str(value)))


def _cpu(numa: int, cpu: CpuNode | None) -> str:
    said: dict[str, object] = {"numaid": numa}
    if cpu:
        said |= {"affinity": cpu.affinity, "arch": cpu.arch, "vendor": cpu.vendor}
        said |= {"familyid": cpu.family, "modelid": cpu.model}
    return _attributes(said)


def _pci(
    pci: PciNode,
    below: dict[str | None, list[PciNode]],
    devices: dict[str, list[GpuNode | NicNode]],
    links: dict[str, tuple[tuple[str, int, str], ...]],
    devs: dict[str, int],
    indent: str,
) -> Lines:
    here = devices.get(pci.bus_id, [])
    said: dict[str, object] = {"busid": pci.bus_id, "class": _hex(pci.class_code, 6)}
    said |= {"vendor": _hex(pci.vendor_id, 4), "device": _hex(pci.device_id, 4)}
    if pci.link_transfers_per_second:
        said["link_speed"] = f"{pci.link_transfers_per_second / 1e9:.1f} GT/s PCIe"
    said["link_width"] = pci.link_width
    inside: Lines = []
    for device in here:
        inside += (
            _gpu(device, links, indent) if isinstance(device, GpuNode) else _nic(device, devs[device.name], indent)
        )
    for child in below.get(pci.bus_id, []):
        inside += _pci(child, below, devices, links, devs, indent + "  ")
    head = f"{indent}<pci{_attributes(said)}"
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
