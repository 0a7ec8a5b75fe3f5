"""The words of ``nvidia-smi topo -m``: their order, and what they mean to NCCL.

Specification: the legend nvidia-smi prints under the matrix; NCCL src/graph/topo.h for the path classes. "SOC" is the
word of drivers before 384 for "SYS".
"""

from __future__ import annotations

import re

from topology.graph import PathClass

SELF = "X"
UNKNOWN = "N/A"
NVLINK = re.compile(r"NV(\d{1,3})")

_PATHS = {
    "PIX": PathClass.PIX,
    "PXB": PathClass.PXB,
    "PHB": PathClass.PHB,
    "NODE": PathClass.PHB,  # both stay on one NUMA node's CPU
    "SYS": PathClass.SYS,
    "SOC": PathClass.SYS,
}
_RANKS = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}
FARTHEST = 99
"""Rank of a label nobody knows: never the nearest."""

LEGEND = (
    ("X", "Self"),
    ("SYS", "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)"),
    (
        "NODE",
        "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node",
    ),
    ("PHB", "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)"),
    ("PXB", "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)"),
    ("PIX", "Connection traversing at most a single PCIe bridge"),
    ("NV#", "Connection traversing a bonded set of # NVLinks"),
)
"""nvidia-smi's own legend, printed under a rendered matrix so that other tools read it."""


def path_class(label: str) -> PathClass | None:
    """NCCL's class of a label, None where it is unknown."""
    return PathClass.NVL if nvlinks(label) else _PATHS.get(label)


def nvlinks(label: str) -> int:
    """The count of an NV# label, 0 for any other."""
    match = NVLINK.fullmatch(label)
    return int(match[1]) if match else 0


def rank(label: str) -> int:
    """Position of a label, nearest first; NVLink before PCIe, unknown last."""
    return 0 if nvlinks(label) else _RANKS.get(label, FARTHEST)


def level(label: str) -> str:
    """The current word for a label: SOC is SYS."""
    return "SYS" if label == "SOC" else label


def lower(first: str, second: str) -> str:
    """The worse of two labels the two directions of one pair were given: what really works both ways."""
    if UNKNOWN in (first, second):
        return second if first == UNKNOWN else first
    if nvlinks(first) and nvlinks(second):
        return min(first, second, key=nvlinks)
    return max(first, second, key=rank)
