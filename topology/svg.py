"""Draws a node: NICs at the top, GPUs below, the PCIe of the CPUs in between, and NVLink at the bottom.

Devices behind one PCIe switch form a column. The CSS class of each line is its `nvidia-smi topo -m` class, so that a
page can colour it for light and dark mode; a standalone picture has its own colours. A device with a finding shows the
glyph of its status.

Specification: SVG 1.1. All text from a host is escaped; there are no scripts, and no external fonts or links.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware.units import bits, rate
from topology.graph import COLOURS, Device, GpuNode, Island, NicNode, NodeTopology, Pairs, level, rank
from topology.render import label_columns, printable

if TYPE_CHECKING:
    from jinja2 import Template

Status = Callable[[Iterable[str | None]], str]
"""Returns the worst status of the findings about a device, given its names: "fail", "warn" or ""."""


CELL, GAP = 100, 20  # width of a device's column, and space between columns; svg.j2 has the heights
_MAX_LETTERS = 14  # of a name in a box


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The box of a GPU or NIC."""

    part: Device
    label: str
    line: str  # below the label
    about: str
    numa: int | None
    status: str  # worst of its findings: "fail", "warn", ""

    @property
    def name(self) -> str:
        """Name of the GPU or NIC."""
        return self.part.name

    @property
    def kind(self) -> str:
        """Its CSS class."""
        return "gpu" if isinstance(self.part, GpuNode) else "nic"


Drawn = dict[str, Any]
"""Values of one part of the drawing, for the template."""


@cache
def _get_template() -> Template:
    """Read svg.j2. Text from a host is escaped, without the control characters that XML forbids."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {"px": "{:.1f}".format, "rate": rate}
    return environment.get_template("svg.j2")


def svg(node: NodeTopology) -> str:
    """Return the node as a standalone `<svg>` document."""
    return _draw(node, _list_devices(node), summary(node), alone=True) + "\n"


def picture(node: NodeTopology, *, status: Status | None = None, suffix: str = "") -> str:
    """Return the node as an inline `<svg>`, coloured by the page; empty if there is nothing to connect.

    `suffix` is added to the summary for screen readers.
    """
    devices = _list_devices(node, status)
    return _draw(node, devices, summary(node) + suffix) if devices else ""


def _draw(node: NodeTopology, devices: Sequence[Box], about: str, *, alone: bool = False) -> str:
    blocks = _group_blocks(node, devices)
    frames: list[Drawn] = []
    spots: dict[str, float] = {}
    left = float(GAP)
    for numa in sorted({_get_numa(block) for block in blocks}, key=lambda n: (n is None, n or 0)):
        start, columns = left, []
        for block in (b for b in blocks if _get_numa(b) == numa):
            columns.append(_place_block(node, block, left + GAP / 2, spots))
            left += _measure_block(block)
        left += GAP
        frames.append({"numa": numa, "left": start, "wide": left - start, "columns": columns})
        left += GAP
    links = _place_links(node, spots)
    width = max(left, 340.0, *(2 * GAP + 7.5 * len(each["words"]) for each in links), 0.0)
    return _get_template().render(
        node=node, frames=frames, links=links, width=width, about=about, alone=alone, colours=COLOURS
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


def _list_devices(node: NodeTopology, status: Status | None = None) -> list[Box]:
    labels, boxes, worst = label_columns(node), [], status or (lambda _: "")
    for gpu in node.gpus:
        model = re.sub(r"^(NVIDIA|Tesla|GeForce|AMD)\s+|\s+HBM\w*$", "", gpu.model or "GPU")
        wrong = "fail" if not gpu.usable else worst((gpu.name, gpu.bus_id, gpu.uuid))
        about = f"{gpu.name}: {gpu.model or 'model unknown'} at {gpu.bus_id or 'an unknown address'}"
        boxes.append(Box(part=gpu, label=gpu.name, line=_cut(model), about=about, numa=gpu.numa_node, status=wrong))
    for nic in node.nics:
        wrong = worst((nic.name, nic.netdev, nic.bus_id)) or ("warn" if nic.active is False else "")
        speed = "down" if nic.active is False else bits(nic.rate_bytes_per_second)
        about = f"{nic.name} ({labels[nic.name]}): {nic.kind} {nic.link_layer or ''} at {nic.bus_id or '?'}, {speed}"
        line, numa = _describe_nic(nic, speed), _guess_numa(nic, node)
        boxes.append(Box(part=nic, label=_cut(nic.name), line=line, about=about, numa=numa, status=wrong))
    return boxes


def _describe_nic(nic: NicNode, speed: str) -> str:
    layer = {"InfiniBand": "IB", "Ethernet": "RoCE" if nic.kind == "hca" else ""}.get(nic.link_layer or "", "")
    return f"{layer or {'ethernet': 'eth'}.get(nic.kind, nic.kind)} {speed}"[:17]


def _guess_numa(nic: NicNode, node: NodeTopology) -> int | None:
    """Guess the NUMA node of a NIC in a text matrix: that of the first GPU with a path shorter than SYS."""
    pairs = Pairs(node.pairs)
    near = (gpu.numa_node for gpu in node.gpus if rank(pairs.label(gpu.name, nic.name)) < rank("SYS"))
    return nic.numa_node if nic.numa_node is not None else next(near, None)


def _group_blocks(node: NodeTopology, devices: Sequence[Box]) -> list[list[Box]]:
    """Group devices that share a PCIe switch, in matrix order; other devices are alone."""
    pairs = Pairs(node.pairs)
    blocks: list[list[Box]] = []
    for device in devices:
        labels = [{pairs.label(device.name, other.name) for other in block} for block in blocks]
        near = [block for block, levels in zip(blocks, labels, strict=True) if levels & {"PIX", "PXB"}]
        blocks = [block for block in blocks if block not in near] + [[*chain.from_iterable(near), device]]
    return sorted(blocks, key=lambda block: devices.index(block[0]))


def _get_numa(block: Sequence[Box]) -> int | None:
    return next((device.numa for device in block if device.numa is not None), None)


def _split_rows(block: Sequence[Box]) -> tuple[list[Box], list[Box]]:
    gpus = sorted((d for d in block if d.kind == "gpu"), key=lambda d: (len(d.name), d.name))  # GPU2 before GPU10
    return [d for d in block if d.kind != "gpu"], gpus


def _measure_block(block: Sequence[Box]) -> float:
    nics, gpus = _split_rows(block)
    return max(len(nics), len(gpus), 1) * CELL


def _place_block(node: NodeTopology, block: Sequence[Box], left: float, spots: dict[str, float]) -> Drawn:
    """Place the devices of one column; single devices are attached to the CPU's PCIe directly."""
    matrix, wide, shared = Pairs(node.pairs), _measure_block(block), len(block) > 1
    nics, gpus = _split_rows(block)
    middle, places = left + wide / 2, []
    for row in (nics, gpus):
        for index, device in enumerate(row):
            x = spots[device.name] = left + wide / len(row) * (index + 0.5)
            pairs = (matrix.get(device.name, other.name) for other in block if other is not device)
            others = [pair.label for pair in pairs if pair and not pair.nvlinks]  # a line shows PCIe, not NVLink
            kind = _classify(min(others, key=rank)) if others and shared else "host"
            places.append({"device": device, "x": x, "end": middle if shared else x, "kind": kind})
    labels = {matrix.label(a.name, b.name) for a in nics for b in gpus}
    switch = ("switches" if labels == {"PXB"} else "switch") if shared else ""
    return {"places": places, "middle": middle, "switch": switch}


def _place_links(node: NodeTopology, spots: Mapping[str, float]) -> list[Drawn]:
    """Place the NVLinks of each island: a bar with a stub per GPU if all pairs are linked, else arcs.

    In a bar, a GPU with fewer links than the others shows its count.
    """
    placed: list[Drawn] = []
    matrix, y = Pairs(node.pairs), 0.0
    for island in node.islands:
        end, stubs, arcs = y, [], []
        if island.all_to_all and len(island.gpus) > 2:
            counts = {a: max(matrix.nvlinks(a, b) for b in island.gpus if b != a) for a in island.gpus}
            highest = max(counts.values())
            stubs = [(spots[name], f"! NV{count}" if count < highest else "") for name, count in counts.items()]
        else:
            pairs = [p for p in node.pairs if p.a in island.gpus and p.b in island.gpus and p.nvlinks]
            arcs = [(spots[p.a], spots[p.b], p.label) for p in pairs]
            end += 14 + max((abs(a - b) / 14 for a, b, _ in arcs), default=0)
        text = _describe_bandwidth(node, island)
        left = min(spots[name] for name in island.gpus)
        placed.append({"y": y, "end": end, "left": left, "words": text, "stubs": stubs, "arcs": arcs})
        y = end + 34
    return placed


def _describe_bandwidth(node: NodeTopology, island: Island) -> str:
    rates = [p.bytes_per_second for p in node.pairs if p.a in island.gpus and p.b in island.gpus and p.bytes_per_second]
    text = f"NVLink {' and '.join(island.nvlinks_per_pair)}"
    of = f" of {len(island.gpus)} of {len(node.gpus)} GPUs" if len(island.gpus) < len(node.gpus) else ""
    text += f" on every pair{of}" if island.all_to_all else f", not on every pair{of}"
    if rates:
        spread = rate(max(rates)) if min(rates) == max(rates) else f"{rate(min(rates))} at the least"
        text += f" · {spread} planned each way"
    return text


def _classify(label: str) -> str:
    word = level(label).lower()
    return word if word in ("pix", "pxb", "phb", "node", "sys") else "host"


def _cut(text: str) -> str:
    """Truncate a name to fit its box; the box's title has the full name."""
    return text if len(text) <= _MAX_LETTERS else text[: _MAX_LETTERS - 1] + "…"
