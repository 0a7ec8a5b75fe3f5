"""Print a topology as `nvidia-smi topo -m` does: tabs between cells, NIC columns, both legends.

Unlike nvidia-smi it shows every NIC a GPU may send through, EFA and Ethernet included. No escape codes.
"""

from __future__ import annotations

from topology.graph import LEGEND, SELF, UNKNOWN, GpuNode, NicNode, NodeTopology, Pairs


def columns(node: NodeTopology) -> dict[str, str]:
    """Column label of every device, by name, in matrix order: NICs without a label are numbered."""
    labels = {gpu.name: gpu.name for gpu in node.gpus}
    taken = {nic.label for nic in node.nics}
    number = 0
    for nic in node.nics:
        label = nic.label
        while label is None:
            label = None if f"NIC{number}" in taken else f"NIC{number}"
            number += 1
        labels[nic.name] = label
    return labels


def render(node: NodeTopology) -> str:
    """The matrix with its legends; ends with a newline."""
    labels, known = columns(node), Pairs(node.pairs)
    affinity = _affinity_columns(node)
    lines = ["\t" + "\t".join((*labels.values(), *(title for title, _ in affinity)))]
    for device in node.devices:
        cells = [f" {SELF} " if other == device.name else known.label(device.name, other) for other in labels]
        lines.append("\t".join((labels[device.name], *cells)) + _affinity(device, affinity))
    lines += ["", "Legend:", ""]
    lines += [f"  {label:<4} = {meaning}" for label, meaning in LEGEND if label != "NV#" or _shows_nvlink(node)]
    if UNKNOWN in "".join(lines[1 : len(labels) + 1]) and any(pair.label == UNKNOWN for pair in node.pairs):
        lines.append(f"  {UNKNOWN:<4} = Unknown: no probe could tell")
    named = [(labels[nic.name], nic.name) for nic in node.nics if labels[nic.name] != nic.name]
    if named:
        lines += ["", "NIC Legend:", "", *(f"  {label}: {printable(name)}" for label, name in named)]
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """Text without control characters: a host's names must not steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _shows_nvlink(node: NodeTopology) -> bool:
    return node.nvlink_known or not node.source.endswith("-mp")


def _affinity_columns(node: NodeTopology) -> tuple[tuple[str, str], ...]:
    titles = (
        ("CPU Affinity", "cpu_affinity"),
        ("NUMA Affinity", "numa_affinity"),
        ("GPU NUMA ID", "gpu_numa_id"),
    )
    return tuple((title, name) for title, name in titles if any(getattr(gpu, name) is not None for gpu in node.gpus))


def _affinity(device: GpuNode | NicNode, affinity: tuple[tuple[str, str], ...]) -> str:
    """The cells after the last device; nvidia-smi puts two tabs before the GPU NUMA ID, and none of them for NICs."""
    if isinstance(device, NicNode) or not affinity:
        return ""
    text = ""
    for title, name in affinity:
        before = "\t\t" if title == "GPU NUMA ID" and len(affinity) > 1 else "\t"
        text += before + (getattr(device, name) or "")
    return text
