"""Draws a node: NICs at the top, GPUs below, the PCIe of the CPUs in between, and NVLink at the bottom.

Devices behind one PCIe switch form a column. The CSS class of each line is its `nvidia-smi topo -m` class, so that a
page can colour it for light and dark mode; a standalone picture has its own colours. A device with a finding shows the
glyph of its status. NICs on the PCIe bus without an RDMA device, which NCCL cannot use, are dashed.

Specification: SVG 1.1. All text from a host is escaped; there are no scripts, and no external fonts or links.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from itertools import combinations, pairwise

from hardware.units import bits, rate
from probes.pci.facts import PciFacts, ancestors
from topology.graph import COLOURS, Island, NicNode, NodeTopology, Pairs, level, rank
from topology.render import columns, printable

_STYLE = """
.drawing { font-family: sans-serif; background: #fff; } .drawing text { fill: #1f2937; font-size: 12px; }
.drawing path { fill: none; stroke-width: 2.5; stroke: #8b93a1; } .drawing .d-frame { fill: #f6f7f9; stroke: #c5cad1; }
.drawing .d-bus { fill: #8b93a1; } .drawing .d-switch { fill: #fff; stroke: #6b7280; }
.drawing .d-gpu { fill: #e3f1df; stroke: #6b7280; } .drawing .d-nic { fill: #e1ebf7; stroke: #6b7280; }
.drawing .d-ghost { fill: none; stroke-dasharray: 5 4; } .drawing rect.d-fail, .drawing rect.d-warn { stroke: #c0392b; }
.drawing .d-small { font-size: 10.5px; } .drawing .d-tiny { font-size: 10px; } .drawing .l-wide { stroke-width: 6; }
.drawing .l-cpus { stroke-width: 5; } .drawing .l-gone { stroke: #c0392b; stroke-dasharray: 3 5; }
""" + "\n".join(f".drawing .l-{label.lower()} {{ stroke: {colour}; }}" for label, colour in COLOURS.items())

Status = Callable[[Iterable[str | None]], str]
"""Returns the worst status of the findings about a device, given its names: "fail", "warn" or ""."""


def _no_status(_: Iterable[str | None]) -> str:
    return ""


def escape(text: str) -> str:
    """Escape XML text, without the control characters that XML forbids."""
    return escape_html(printable(text), quote=False)


CELL, BOX, HIGH, GAP = 100, 94, 46, 20
NIC_Y, BUS_Y, GPU_Y = 24, 122, 196
BUS_HIGH, SWITCH_HIGH = 14, 26
LINK_Y = GPU_Y + HIGH + 26
WIDE = 900  # a wider drawing may shrink slightly to fit the page; a smaller one keeps its size
_ETHERNET, _INFINIBAND = 0x0200, 0x0207  # PCI class codes without programming interface
_MARKS = {"fail": "✗", "warn": "!"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One box: a GPU, a NIC, or a NIC that NCCL cannot use."""

    name: str
    label: str
    lines: tuple[str, ...]
    about: str
    kind: str  # "gpu", "nic", "ghost"
    numa: int | None
    status: str  # worst of its findings: "fail", "warn", ""
    bandwidth: float | None  # rate of its PCIe slot in NCCL's plan
    link: str | None = None  # current PCIe link: "Gen4 x4 of x16"
    running: float | None = None  # current rate, if lower than the slot's


def svg(node: NodeTopology) -> str:
    """Return the node as a standalone `<svg>` document."""
    drawn = picture(node) or '<svg viewBox="0 0 340 40" width="340" height="40" role="img">' + "</svg>"
    return drawn.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace(
        ">", f"><title>{escape(summary(node))}</title><style>{_STYLE}</style>", 1
    ) + "\n"  # fmt: skip


def picture(
    node: NodeTopology, *, pci: PciFacts | None = None, status: Status = _no_status,
    measured: Mapping[tuple[str, ...], str] | None = None, more: str = "",
) -> str:  # fmt: skip
    """Return the node as an inline `<svg>`, coloured by the page; empty if there is nothing to connect.

    `pci` adds NICs that NCCL cannot use. `measured` has benchmark results of islands, by their GPUs. `more` is added to
    the summary for screen readers.
    """
    devices = [*_list_devices(node, status), *_list_ghosts(node, pci, status)]
    if not devices:
        return ""
    blocks = _group_blocks(node, devices, pci)
    drawn: list[str] = []
    spots: dict[str, float] = {}
    left, buses = float(GAP), []
    for numa in sorted({_get_numa(block) for block in blocks}, key=lambda n: (n is None, n or 0)):
        start = left
        inside: list[str] = []
        for block in (b for b in blocks if _get_numa(b) == numa):
            inside += _draw_block(node, block, left + GAP / 2, spots)
            left += _measure_block(block)
        left += GAP
        drawn += [_draw_frame(numa, start, left - start, virtual=node.virtual is not None), *inside]
        buses.append((start, left))
        left += GAP
    drawn += [_draw_between(a[1], b[0]) for a, b in pairwise(buses)]
    words = {island.gpus: _bandwidth(node, island, (measured or {}).get(island.gpus, "")) for island in node.islands}
    below, height = _draw_nvlink(node, spots, words)
    width = max(left, 340.0, *(2 * GAP + 7.5 * len(text) for text in words.values()), 0.0)
    name = "drawing wide" if width > WIDE else "drawing"
    return (
        f'<svg class="{name}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape_html(printable(summary(node) + more))}">{"".join((*below, *drawn))}</svg>'
    )


def summary(node: NodeTopology) -> str:
    """Return a one-sentence description of the picture for screen readers."""
    parts = [f"{len(node.gpus)} GPUs and {len(node.nics)} network devices of {node.hostname}"]
    for island in node.islands:
        links = " or ".join(island.nvlinks_per_pair)
        parts.append(f"{len(island.gpus)} GPUs joined by NVLink ({links})")
    for near in (near for near in node.nearest_nic if near.nics):
        parts.append(f"{near.gpu} is nearest to {' and '.join(near.nics)} ({near.label})")
    return "; ".join(parts) + "."


def _list_devices(node: NodeTopology, worst: Status) -> list[Device]:
    labels, made = columns(node), []
    for gpu in node.gpus:
        model = re.sub(r"^(NVIDIA|Tesla|GeForce|AMD)\s+|\s+HBM\w*$", "", gpu.model or "GPU")
        names = (gpu.name, gpu.bus_id, gpu.uuid)
        status = "fail" if not gpu.usable else worst(names)
        about = f"{gpu.name}: {gpu.model or 'model unknown'} at {gpu.bus_id or 'an unknown address'}"
        made.append(Device(name=gpu.name, label=gpu.name, lines=(_cut(model),), about=about, kind="gpu",
                           numa=gpu.numa_node, status=status, bandwidth=gpu.pcie_bytes_per_second, link=gpu.pcie_link,
                           running=gpu.pcie_running_bytes_per_second))  # fmt: skip
    places = _guess_nic_numa(node)
    for nic in node.nics:
        status = worst((nic.name, nic.netdev, nic.bus_id)) or ("warn" if nic.active is False else "")
        speed = "down" if nic.active is False else bits(nic.rate_bytes_per_second)
        about = f"{nic.name} ({labels[nic.name]}): {nic.kind} {nic.link_layer or ''} at {nic.bus_id or '?'}, {speed}"
        made.append(Device(name=nic.name, label=_cut(nic.name), lines=(_nic_line(nic, speed),), about=about, kind="nic",
                           numa=places[nic.name], status=status, bandwidth=nic.pcie_bytes_per_second,
                           link=nic.pcie_link, running=nic.pcie_running_bytes_per_second))  # fmt: skip
    return made


def _nic_line(nic: NicNode, speed: str) -> str:
    layer = {"InfiniBand": "IB", "Ethernet": "RoCE" if nic.kind == "hca" else ""}.get(nic.link_layer or "", "")
    return f"{layer or {'ethernet': 'eth'}.get(nic.kind, nic.kind)} {speed}"[:17]


def _guess_nic_numa(node: NodeTopology) -> dict[str, int | None]:
    """Guess the NUMA node of NICs from a text matrix: that of a GPU with a path shorter than SYS."""
    known = Pairs(node.pairs)
    found = {}
    for nic in node.nics:
        near = [g.numa_node for g in node.gpus if rank(known.label(g.name, nic.name)) < rank("SYS")]
        found[nic.name] = nic.numa_node if nic.numa_node is not None or not near else near[0]
    return found


def _list_ghosts(node: NodeTopology, pci: PciFacts | None, worst: Status) -> list[Device]:
    """Return network functions that have a finding and that NCCL cannot use."""
    if pci is None:
        return []
    known = {nic.bus_id for nic in node.nics}
    made = []
    for device in pci.devices:
        network = device.class_code >> 8 in (_ETHERNET, _INFINIBAND) and device.rdma is False
        status = worst((device.bus_id,))
        if network and status and device.bus_id not in known:
            about = f"{device.bus_id}: a NIC without an RDMA device, driver {device.driver or 'none'}"
            label = device.bus_id.removeprefix("0000:")
            made.append(Device(name=device.bus_id, label=label, lines=("no RDMA",), about=about, kind="ghost",
                               numa=device.numa_node, status=status, bandwidth=None))  # fmt: skip
    return made


def _group_blocks(node: NodeTopology, devices: Sequence[Device], pci: PciFacts | None) -> list[list[Device]]:
    """Group devices that share a PCIe switch, in matrix order; other devices are alone."""
    known, groups = Pairs(node.pairs), {device.name: [device] for device in devices}
    tops = _find_roots(node, pci)

    def together(a: Device, b: Device) -> bool:
        if {a.kind, b.kind} == {"gpu", "ghost"}:
            return tops.get(a.name, a.name) == tops.get(b.name, b.name)
        return known.label(a.name, b.name) in ("PIX", "PXB")

    for i, a in enumerate(devices):
        for b in devices[i + 1 :]:
            if groups[a.name] is not groups[b.name] and together(a, b):
                joined = groups[a.name] + groups[b.name]
                for device in joined:
                    groups[device.name] = joined
    found: list[list[Device]] = []
    for device in devices:
        if not any(device in block for block in found):
            found.append(groups[device.name])
    return found


def _find_roots(node: NodeTopology, pci: PciFacts | None) -> dict[str, str]:
    """Return the root port above each device, by device name, if there is a switch in between."""
    if pci is None:
        return {}
    parents = {device.bus_id: device.parent for device in pci.devices}
    found = {}
    for name, bus_id in [(gpu.name, gpu.bus_id) for gpu in node.gpus] + [(b, b) for b in parents]:
        above = [bridge for bridge in ancestors(parents, bus_id or "") if bridge in parents]
        if len(above) > 1:  # a root port and at least one switch port
            found[name] = above[-1]
    return found


def _get_numa(block: Sequence[Device]) -> int | None:
    return next((device.numa for device in block if device.numa is not None), None)


def _split_rows(block: Sequence[Device]) -> tuple[list[Device], list[Device]]:
    gpus = sorted((d for d in block if d.kind == "gpu"), key=lambda d: (len(d.name), d.name))  # GPU2 before GPU10
    return [d for d in block if d.kind != "gpu"], gpus


def _measure_block(block: Sequence[Device]) -> float:
    nics, gpus = _split_rows(block)
    return max(len(nics), len(gpus), 1) * CELL


def _draw_block(node: NodeTopology, block: Sequence[Device], left: float, spots: dict[str, float]) -> list[str]:
    """Draw the lines and boxes of one column; single devices are attached to the CPU's PCIe directly."""
    known, wide = Pairs(node.pairs), _measure_block(block)
    nics, gpus = _split_rows(block)
    shared = len(block) > 1
    middle, lines, boxes = left + wide / 2, [], []
    for row, y in ((nics, NIC_Y), (gpus, GPU_Y)):
        for index, device in enumerate(row):
            x = left + wide / len(row) * (index + 0.5)
            spots[device.name] = x
            pairs = (known.get(device.name, other.name) for other in block if other is not device)
            others = [pair.label for pair in pairs if pair and not pair.nvlinks]  # a line shows PCIe, not NVLink
            kind = "gone" if device.kind == "ghost" else _kind(min(others, key=rank)) if others and shared else "host"
            end = middle if shared else x
            lines.append(_draw_line(x, y, end, kind, device))
            boxes += [_draw_box(device, x, y), _draw_link_label(device, x, y)]
    if shared:
        words = {known.label(a.name, b.name) for a in nics for b in gpus}
        name = "switches" if words == {"PXB"} else "switch"
        boxes.append(
            f'<g><title>PCIe {name}</title><rect class="d-switch" x="{middle - 34:.1f}" y="{BUS_Y - 6}" width="68" '
            f'height="{SWITCH_HIGH}" rx="4"/>{_draw_text(middle, BUS_Y + 11, name, "d-small")}</g>'
        )
    return [*lines, *boxes]


def _draw_line(x: float, y: float, end: float, kind: str, device: Device) -> str:
    start, stop = (y + HIGH, BUS_Y) if y < BUS_Y else (y, BUS_Y + BUS_HIGH)
    bend = (start + stop) / 2
    return (
        f'<g><title>{escape(device.name)}: {escape(_format_speed(device))}</title><path class="l-{kind}" '
        f'd="M{x:.1f} {start:.1f}C{x:.1f} {bend:.1f} {end:.1f} {bend:.1f} {end:.1f} {stop:.1f}"/></g>'
    )


def _draw_link_label(device: Device, x: float, y: float) -> str:
    """Label a line with its PCIe link: for each GPU, and for a NIC that runs below its slot's rate."""
    slow = device.running is not None
    if device.link is None or not (device.kind == "gpu" or slow):
        return ""
    place = GPU_Y - 8 if device.kind == "gpu" else y + HIGH + 12
    words, kind = (f"! {device.link}", "d-tiny d-warn") if slow else (device.link, "d-tiny")
    return _draw_text(x + 5, place, words, kind, anchor="start")


def _format_speed(device: Device) -> str:
    """Describe a PCIe link: its current state, and the slot's rate, which NCCL plans with."""
    if not device.bandwidth:
        return "bandwidth unknown"
    planned = f"{rate(device.bandwidth)} planned each way"
    if device.running:
        return f"{device.link}, {rate(device.running)} each way as it runs, {planned}"
    return f"{device.link}, {planned}" if device.link else planned


def _draw_box(device: Device, x: float, y: float) -> str:
    worst = f" d-{device.status}" if device.status else ""
    mark = _MARKS.get(device.status, "")
    label = f"{mark} {device.label}" if mark else device.label
    return (
        f'<g><title>{escape(device.about)}</title><rect class="d-{device.kind}{worst}" x="{x - BOX / 2:.1f}" y="{y}" '
        f'width="{BOX}" height="{HIGH}" rx="6"/>{_draw_text(x, y + 19, label, f"d-name{worst}", fits=9)}'
        + "".join(_draw_text(x, y + 36, line, "d-small", fits=13) for line in device.lines[:1])
        + "</g>"
    )


def _draw_frame(numa: int | None, left: float, wide: float, *, virtual: bool) -> str:
    title = "NUMA node unknown" if numa is None else f"NUMA {numa}"
    bus = "virtual PCIe" if virtual else "PCIe of the CPU"
    return (
        f'<rect class="d-frame" x="{left:.1f}" y="6" width="{wide:.1f}" height="{GPU_Y + HIGH + 4}" rx="10"/>'
        f'<g><title>{escape(f"{bus}, {title}")}</title><rect class="d-bus" x="{left:.1f}" y="{BUS_Y}" '
        f'width="{wide:.1f}" height="{BUS_HIGH}"/></g>'
        + _draw_text(left + 8, NIC_Y + HIGH + 16, title, "d-tiny", anchor="start")
    )


def _draw_between(start: float, end: float) -> str:
    y = BUS_Y + BUS_HIGH / 2
    return f'<g><title>SYS: from CPU to CPU</title><path class="l-cpus" d="M{start:.1f} {y}H{end:.1f}"/></g>'


def _draw_nvlink(
    node: NodeTopology, spots: dict[str, float], words: Mapping[tuple[str, ...], str]
) -> tuple[list[str], float]:
    """Draw a bar for an island with all pairs linked, else arcs; with planned and measured bandwidth."""
    drawn: list[str] = []
    y = float(LINK_Y)
    for island in node.islands:
        pairs = [p for p in node.pairs if p.a in island.gpus and p.b in island.gpus and p.nvlinks]
        if island.all_to_all and len(island.gpus) > 2:
            drawn += _draw_bar(island, Pairs(pairs), spots, y)
        else:
            drawn += [_draw_arc(spots[p.a], spots[p.b], p.label) for p in pairs]
            y += 14 + max((abs(spots[p.a] - spots[p.b]) / 14 for p in pairs), default=0)
        first = min(spots[name] for name in island.gpus)
        drawn.append(_draw_text(first - BOX / 2, y + 20, words[island.gpus], "d-words", anchor="start"))
        y += 34
    return drawn, y + (8 if node.islands else -6)


def _draw_bar(island: Island, known: Pairs, spots: dict[str, float], y: float) -> list[str]:
    """Draw one bar with a stub per GPU; a GPU with fewer links than the others shows its count."""
    most = max(known.nvlinks(a, b) for a, b in combinations(island.gpus, 2))
    xs = [spots[name] for name in island.gpus]
    drawn = [f'<path class="l-nv l-wide" d="M{min(xs):.1f} {y:.1f}H{max(xs):.1f}"/>']
    for name in island.gpus:
        mine = max(known.nvlinks(name, other) for other in island.gpus if other != name)
        drawn.append(f'<path class="l-nv" d="M{spots[name]:.1f} {GPU_Y + HIGH}V{y:.1f}"/>')
        if mine < most:
            drawn.append(_draw_text(spots[name] + 6, y - 5, f"! NV{mine}", "d-name d-warn", anchor="start"))
    return drawn


def _bandwidth(node: NodeTopology, island: Island, measured: str) -> str:
    known = [p.bytes_per_second for p in node.pairs if p.a in island.gpus and p.b in island.gpus and p.bytes_per_second]
    words = f"NVLink {' and '.join(island.nvlinks_per_pair)}"
    of = f" of {len(island.gpus)} of {len(node.gpus)} GPUs" if len(island.gpus) < len(node.gpus) else ""
    words += f" on every pair{of}" if island.all_to_all else f", not on every pair{of}"
    if known:
        spread = rate(max(known)) if min(known) == max(known) else f"{rate(min(known))} at the least"
        words += f" · {spread} planned each way"
    return f"{words} · {measured}" if measured else words


def _draw_arc(a: float, b: float, label: str) -> str:
    y = GPU_Y + HIGH
    curve = f"M{a:.1f} {y}Q{(a + b) / 2:.1f} {y + 18 + abs(a - b) / 7:.1f} {b:.1f} {y}"
    return f'<g><title>{escape(label)}</title><path class="l-nv" d="{curve}"/></g>'


def _kind(label: str) -> str:
    word = level(label).lower()
    return word if word in ("pix", "pxb", "phb", "node", "sys") else "host"


def _draw_text(x: float, y: float, text: str, kind: str, *, anchor: str = "middle", fits: int = 99) -> str:
    """Draw a text; text longer than `fits` characters is condensed to the width of its box."""
    narrow = f' textLength="{BOX - 10}" lengthAdjust="spacingAndGlyphs"' if len(text) > fits else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{narrow}>{escape(text)}</text>'


def _cut(text: str, most: int = 14) -> str:
    """Truncate a name to fit its box; the box's title has the full name."""
    return text if len(text) <= most else text[: most - 1] + "…"
