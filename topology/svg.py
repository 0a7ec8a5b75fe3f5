"""Draw a node as one self-contained SVG: NUMA nodes, GPUs, PCIe switches, NICs, links coloured by path class.

Specification: SVG 1.1. Every text that comes from a host is escaped; no script, no font and no link from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape as escape_xml

from topology.formats.matrix import columns
from topology.graph import GpuNode, NicNode, NodeTopology, Pairs, level, nvlinks, rank

COLOURS = {
    "NV": "#3b8132",
    "PIX": "#1f77b4",
    "PXB": "#17a2b8",
    "PHB": "#b8860b",
    "NODE": "#d9822b",
    "SYS": "#c0392b",
}
"""Of a label, best to worst; NV stands for every NV#."""
_UNKNOWN_COLOUR = "#777777"

_CELL, _BOX, _HIGH, _GAP, _TOP = 104, 92, 46, 24, 96
_GPU_Y, _SWITCH_Y, _NIC_Y, _HEIGHT = _TOP + 20, _TOP + 140, _TOP + 230, _TOP + 310


def escape(text: str) -> str:
    """XML text without the control characters that XML forbids."""
    return escape_xml("".join(letter if letter.isprintable() else "?" for letter in text))


def colour(label: str) -> str:
    """The colour of a label."""
    return COLOURS["NV"] if nvlinks(label) else COLOURS.get(level(label), _UNKNOWN_COLOUR)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    x: float
    y: float


def svg(node: NodeTopology) -> str:
    """The whole picture as one `<svg>` document."""
    frames: list[str] = []
    boxes: list[str] = []
    spots: dict[str, _Spot] = {}
    left: float = _GAP
    places = _numa_nodes(node)
    numas = sorted(set(places.values()), key=lambda n: (n is None, n or 0))
    labels = columns(node)
    for numa in numas:
        left = _numa(node, numa, places, left, labels, frames, boxes, spots)
    width = max(left, 520)
    lines = [*_nvlinks(node, spots), *_nearest(node, spots)]
    title = f"{node.hostname}: {len(node.gpus)} GPUs, {len(node.nics)} NICs"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT + 40}" width="{width}" '
            f'height="{_HEIGHT + 40}" role="img" font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{_HEIGHT + 40}" fill="#ffffff"/>',
            _text(_GAP, 24, title, size=15),
            *_legend(),
            *frames,
            *lines,
            *boxes,
            "</svg>",
            "",
        ]
    )


def _numa_nodes(node: NodeTopology) -> dict[str, int | None]:
    """NUMA node of every device; a NIC that a text matrix gives none stands with a GPU it is nearer to than SYS."""
    known = Pairs(node.pairs)
    places: dict[str, int | None] = {gpu.name: gpu.numa_node for gpu in node.gpus}
    for nic in node.nics:
        near = [gpu.numa_node for gpu in node.gpus if rank(known.label(gpu.name, nic.name)) < rank("SYS")]
        places[nic.name] = nic.numa_node if nic.numa_node is not None or not near else near[0]
    return places


def _numa(
    node: NodeTopology,
    numa: int | None,
    places: dict[str, int | None],
    left: float,
    labels: dict[str, str],
    frames: list[str],
    boxes: list[str],
    spots: dict[str, _Spot],
) -> float:
    """Place the devices of one NUMA node; frames apart, since lines pass over them."""
    gpus = [gpu for gpu in node.gpus if places[gpu.name] == numa]
    nics = [nic for nic in node.nics if places[nic.name] == numa]
    wide = max(len(gpus), len(nics), 1) * _CELL + _GAP / 2
    title = f"NUMA {numa}" if numa is not None else "NUMA node unknown"
    frame = (
        f'<rect x="{left}" y="{_TOP}" width="{wide}" height="{_HEIGHT - _TOP}" rx="8" fill="#f6f7f9" stroke="#c5cad1"/>'
        + _text(left + 8, _HEIGHT - 10, title, colour="#555555")
    )
    frames.append(frame)
    rows: tuple[tuple[Sequence[GpuNode | NicNode], int], ...] = ((gpus, _GPU_Y), (nics, _NIC_Y))
    for row, y in rows:
        step = wide / max(len(row), 1)
        for index, device in enumerate(row):
            x = left + step * (index + 0.5)
            spots[device.name] = _Spot(x=x, y=y)
            boxes.append(_device(device, labels[device.name], x, y))
    return left + wide + _GAP


def _device(device: GpuNode | NicNode, label: str, x: float, y: float) -> str:
    if isinstance(device, GpuNode):
        second, fill, dead = device.model or device.bus_id or "", "#e3f1df", not device.usable
        about = f"{device.name} {device.model or ''} {device.bus_id or ''}"
    else:
        second = device.name if label != device.name else (device.netdev or device.kind)
        fill, dead = "#e1ebf7", device.active is False
        about = f"{device.name} {device.kind} {device.link_layer or ''} {device.bus_id or ''}"
    stroke = "#c0392b" if dead else "#6b7280"
    dash = ' stroke-dasharray="4 3"' if dead else ""
    return (
        f"<g><title>{escape(about.strip() + (' (down)' if dead else ''))}</title>"
        f'<rect x="{x - _BOX / 2:.1f}" y="{y}" width="{_BOX}" height="{_HIGH}" rx="6" fill="{fill}" '
        f'stroke="{stroke}"{dash}/>'
        + _text(x, y + 19, label, anchor="middle")
        + _text(x, y + 36, second[-15:] if len(second) > 15 else second, anchor="middle", size=10, colour="#555555")
        + "</g>"
    )


def _nvlinks(node: NodeTopology, spots: dict[str, _Spot]) -> list[str]:
    """One bar over an island whose pairs are all alike, else an arc for every pair."""
    drawn = []
    for number, island in enumerate(node.islands):
        places = [spots[name] for name in island.gpus]
        if island.all_to_all and len(island.nvlinks_per_pair) == 1 and len(places) > 2:
            y = _TOP - 12 - 6 * (number % 3)
            first, last = min(spot.x for spot in places), max(spot.x for spot in places)
            stubs = "".join(f"M{spot.x:.1f} {y}V{spot.y}" for spot in places)
            drawn.append(
                f'<path d="M{first:.1f} {y}H{last:.1f}{stubs}" fill="none" stroke="{COLOURS["NV"]}" stroke-width="3"/>'
                + _text((first + last) / 2, y - 5, f"{island.nvlinks_per_pair[0]} on every pair", anchor="middle")
            )
            continue
        drawn += [
            _arc(spots[pair.a], spots[pair.b], pair.label, pair.nvlinks)
            for pair in node.pairs
            if pair.nvlinks and pair.a in island.gpus and pair.b in island.gpus
        ]
    return drawn


def _arc(a: _Spot, b: _Spot, label: str, count: int) -> str:
    high = a.y - 14 - abs(a.x - b.x) / 12
    return (
        f"<g><title>{escape(label)}</title>"
        f'<path d="M{a.x:.1f} {a.y}Q{(a.x + b.x) / 2:.1f} {high:.1f} {b.x:.1f} {b.y}" fill="none" '
        f'stroke="{COLOURS["NV"]}" stroke-width="{1 + min(count, 18) / 6:.1f}"/></g>'
    )


def _nearest(node: NodeTopology, spots: dict[str, _Spot]) -> list[str]:
    """Lines from GPUs to their nearest NICs; GPUs that share NICs behind a switch share the switch."""
    known = Pairs(node.pairs)
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for near in node.nearest_nic:
        if near.decidable and near.gpu in spots:
            behind = near.label in ("PIX", "PXB")
            groups.setdefault((near.label if behind else near.gpu, near.nics), []).append(near.gpu)
    drawn = []
    for (label, nics), gpus in groups.items():
        if label not in ("PIX", "PXB"):
            drawn += [
                _line(spots[gpu], spots[nic], known.label(gpu, nic), f"{gpu} to {nic}") for gpu in gpus for nic in nics
            ]
            continue
        middle = [spots[name].x for name in (*gpus, *nics)]
        switch = _Spot(x=sum(middle) / len(middle), y=_SWITCH_Y)
        drawn += [_line(spots[gpu], switch, label, f"{gpu} to {', '.join(nics)}") for gpu in gpus]
        drawn += [_line(_Spot(x=switch.x, y=_SWITCH_Y + 18 - _HIGH), spots[nic], label, nic) for nic in nics]
        drawn.append(_switch(switch, label))
    return drawn


def _line(start: _Spot, end: _Spot, label: str, about: str) -> str:
    bend = (start.y + _HIGH + end.y) / 2
    dash = ' stroke-dasharray="6 4"' if level(label) == "SYS" else ""
    return (
        f"<g><title>{escape(f'{about}: {label}')}</title>"
        f'<path d="M{start.x:.1f} {start.y + _HIGH}C{start.x:.1f} {bend:.1f} {end.x:.1f} {bend:.1f} '
        f'{end.x:.1f} {end.y}" fill="none" stroke="{colour(label)}" stroke-width="2"{dash}/></g>'
    )


def _switch(spot: _Spot, label: str) -> str:
    name = "switch" if label == "PIX" else "switches"
    return (
        f"<g><title>PCIe {name}</title>"
        f'<rect x="{spot.x - 32:.1f}" y="{spot.y}" width="64" height="18" rx="3" fill="#ffffff" '
        f'stroke="{COLOURS[label]}"/>' + _text(spot.x, spot.y + 13, name, anchor="middle", size=10) + "</g>"
    )


def _legend() -> list[str]:
    drawn, x = [], float(_GAP)
    for label, shade in COLOURS.items():
        name = "NVLink" if label == "NV" else label
        drawn.append(f'<rect x="{x}" y="{_HEIGHT + 14}" width="18" height="6" fill="{shade}"/>')
        drawn.append(_text(x + 24, _HEIGHT + 21, name, size=11))
        x += 74
    return drawn


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#1f2937") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
