"""Formats a topology like `nvidia-smi topo -m`, or as a JSON document, also for a cluster.

The matrix has tabs between cells, NIC columns and both legends. Unlike nvidia-smi, it shows every NIC that GPUs may
use, including EFA and Ethernet, and has no escape codes.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

from contracts.tables import read_table
from topology.check import describe_departures
from topology.graph import SELF, UNKNOWN, Device, NearestNic, NicNode, NodeTopology, Pairs
from topology.paths import with_expectations

Json = dict[str, Any]
_LABELS = read_table(__file__, "labels.toml")
_AFFINITY = (("CPU Affinity", "cpu_affinity"), ("NUMA Affinity", "numa_affinity"), ("GPU NUMA ID", "gpu_numa_id"))
_LEGEND = tuple((name, row["meaning"]) for name, row in reversed(_LABELS.items()) if "meaning" in row)
"""nvidia-smi's legend, printed below the matrix so that other tools accept it."""


# The matrix ---------------------------------------------------------------------------------------------------------


def label_columns(node: NodeTopology) -> dict[str, str]:
    """Return the column label of every device by name, in matrix order; NICs without a label are numbered."""
    labels = {gpu.name: gpu.name for gpu in node.gpus}
    used = {nic.label for nic in node.nics}
    free = (label for label in map("NIC{}".format, count()) if label not in used)
    return labels | {nic.name: next(free) if nic.label is None else nic.label for nic in node.nics}


def render_matrix(node: NodeTopology) -> str:
    """Format the matrix with its legends; ends with a newline."""
    labels, pairs = label_columns(node), Pairs(node.pairs)
    affinity = tuple(column for column in _AFFINITY if any(getattr(gpu, column[1]) is not None for gpu in node.gpus))
    lines = ["\t" + "\t".join((*labels.values(), *(title for title, _ in affinity)))]
    for device in node.devices:
        cells = [f" {SELF} " if other == device.name else pairs.label(device.name, other) for other in labels]
        lines.append("\t".join((labels[device.name], *cells)) + _format_affinity(device, affinity))
    lines += ["", "Legend:", ""]
    shows_nvlink = node.nvlink_known or not node.source.endswith("-mp")
    lines += [f"  {label:<4} = {meaning}" for label, meaning in _LEGEND if label != "NV#" or shows_nvlink]
    if UNKNOWN in "".join(lines[1 : len(labels) + 1]) and any(pair.label == UNKNOWN for pair in node.pairs):
        lines.append(f"  {UNKNOWN:<4} = Unknown: no probe could read it")
    if legend := [(labels[nic.name], nic.name) for nic in node.nics if labels[nic.name] != nic.name]:
        lines += ["", "NIC Legend:", "", *(f"  {label}: {printable(name)}" for label, name in legend)]
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """Remove control characters, so that names from a host cannot control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _format_affinity(device: Device, affinity: tuple[tuple[str, str], ...]) -> str:
    """Return the cells after the last device. nvidia-smi has two tabs before the GPU NUMA ID, and none for NICs."""
    titles = () if isinstance(device, NicNode) else affinity
    tabs = {title: "\t\t" if title == "GPU NUMA ID" and len(affinity) > 1 else "\t" for title, _ in titles}
    return "".join(tabs[title] + (getattr(device, name) or "") for title, name in titles)


# The document -------------------------------------------------------------------------------------------------------

_NODE_FACTS = ("product", "nvlink_known", "virtual", "cpu_count", "numa_nodes")
_GPU = (
    "name", "index", "bus_id", "uuid", "model", "memory_bytes", "compute_capability", "numa_node", "cpu_affinity",
    "numa_affinity", "gpu_numa_id", "nvlink_domain", "c2c", "pcie_link", "usable",
)  # fmt: skip
_NIC = (
    "numa_node", "rate_bytes_per_second", "pcie_bytes_per_second", "pcie_link", "link_layer", "active", "ports",
)  # fmt: skip
_EXPECTATION = (
    "scope", "op", "busbw_bytes_per_second", "least_bytes_per_second", "usual_bytes_per_second",
    "most_bytes_per_second", "members", "derivation",
)  # fmt: skip


def _get_values(item: object, *names: str) -> Json:
    """Return these fields as plain JSON values."""
    values = {name: getattr(item, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def json_document(node: NodeTopology) -> Json:
    """Return the node as plain JSON values. The names are a stable interface for scripts."""
    node, labels = with_expectations(node), label_columns(node)
    return {
        **_get_values(node, "schema_version", "hostname", "source", "sku"),
        **_get_values(node, *_NODE_FACTS),
        "gpus": [_get_values(gpu, *_GPU) for gpu in node.gpus],
        "nics": [
            {
                "name": nic.name,
                "label": labels[nic.name],
                **_get_values(nic, "kind", "bus_id", "netdev"),
                "nets": list(nic.nets) or [nic.name],
                **_get_values(nic, *_NIC),
            }
            for nic in node.nics
        ],
        "pairs_by_class": _count_by_class(node),
        "pairs": [
            {
                **_get_values(pair, "a", "b", "label"),
                "class": pair.path.name if pair.path is not None else None,
                **_get_values(pair, "nvlinks", "bytes_per_second", "evidence"),
            }
            for pair in node.pairs
        ],
        "islands": [_get_values(island, "gpus", "all_to_all", "nvlinks_per_pair") for island in node.islands],
        "nearest_nic": {near.gpu: _describe_nearest(near, node, labels) for near in node.nearest_nic} or None,
        "rails": [_get_values(rail, "rail", "nics", "gpus") for rail in node.rails],
        "expectations": [_get_values(expectation, *_EXPECTATION) for expectation in node.expectations],
        "departures_from_reference": list(describe_departures(node)),
        "warnings": list(node.warnings),
    }


def _count_by_class(node: NodeTopology) -> dict[str, dict[str, int]]:
    """Count pairs by nvidia-smi label, separately for GPU-GPU, GPU-NIC and NIC-NIC."""
    gpus = {gpu.name for gpu in node.gpus}
    counts: dict[str, Counter[str]] = {"gpu_gpu": Counter(), "gpu_nic": Counter(), "nic_nic": Counter()}
    for pair in node.pairs:
        kind = ("nic_nic", "gpu_nic", "gpu_gpu")[(pair.a in gpus) + (pair.b in gpus)]
        counts[kind][pair.label] += 1
    return {kind: dict(counter) for kind, counter in counts.items()}


def _describe_nearest(near: NearestNic, node: NodeTopology, labels: dict[str, str]) -> Json:
    return {
        "label": near.label,
        "class": near.path.name if near.path is not None else None,
        "nics": [labels[name] for name in near.nics],
        "names": list(near.nics),
        **_get_values(near, "local", "decidable", "why"),
        "gpu_bus_id": next(gpu.bus_id for gpu in node.gpus if gpu.name == near.gpu),
        "nic_bus_ids": [nic.bus_id for nic in node.nics if nic.name in near.nics],
    }
