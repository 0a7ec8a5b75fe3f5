"""The names NCCL reads, release by release, and the right name for a wrong one.

Specification: `data/nccl_env_names.tsv`, extracted from github.com/NVIDIA/nccl commit 5067397 (2.30.7) and its tags.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal

Version = tuple[int, int, int]
Status = Literal["current", "removed", "other"]

NEWEST_READ: Version = (2, 30, 7)
"""The newest release the table was extracted from: a newer NCCL may read names that are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclName:
    """One variable, who reads it and since when."""

    name: str
    status: Status
    first: Version | None  # None: since 2.3.5 or earlier
    last: Version | None  # None: still read by NEWEST_READ
    doc_class: str  # "system", "debugging", "internal"; "" where other software reads it
    kind: str  # "integer" (strtoll, base 0), "text"; "" unknown
    default: str
    reader: str  # source file in NCCL, or the other software


# Prefixes other software owns wholesale; NCCL itself never reads them, or reads them through a plugin.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "NCCL_INSPECTOR_": "NCCL's inspector profiler plugin",
        "NCCL_PROFILE_": "NCCL's example profiler plugin",
        "NCCL_PROFILER_": "NCCL's profiler plugins",
        "NCCL_FASTRAK_": "Google's FasTrak network plugin",
        "NCCL_GPUDIRECTTCPX": "Google's GPUDirect-TCPX network plugin",
        "NCCL_TESTS_": "nccl-tests",
        "NCCL_GIB_": "Google's gIB network plugin",
        "NCCL_SHARP_": "nccl-rdma-sharp-plugins",
        "NCCL_UCX_": "nccl-rdma-sharp-plugins",
        "NCCL_OFI_": "aws-ofi-nccl",
    }
)

# Wrong names seen in the wild whose right name is not the nearest spelling, or which need a word more.
_KNOWN_WRONG: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "NCCL_IB_HBA": ("NCCL_IB_HCA",),
        "NCCL_MIN_CHANNELS": ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"),
        "NCCL_MAX_CHANNELS": ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"),
        "NCCL_NET_GDR_ENABLE": ("NCCL_NET_GDR_LEVEL",),
        "NCCL_GDR_LEVEL": ("NCCL_NET_GDR_LEVEL",),
        "NCCL_LL128_ENABLE": ("NCCL_PROTO",),
        "NCCL_TIMEOUT": ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "NCCL_IB_TIMEOUT"),
        "NCCL_IFNAME": ("NCCL_SOCKET_IFNAME",),
        "NCCL_INTERFACE": ("NCCL_SOCKET_IFNAME",),
        "NCCL_DEBUG_LEVEL": ("NCCL_DEBUG",),
        "NCCL_ALGORITHM": ("NCCL_ALGO",),
        "NCCL_PROTOCOL": ("NCCL_PROTO",),
        "NCCL_NVLS_DISABLE": ("NCCL_NVLS_ENABLE",),
        "NCCL_NET_DISABLE": ("NCCL_NET",),
    }
)

# What took the place of a removed name: NCCL docs/userguide/source/env.rst.
_REPLACED_BY: Mapping[str, str] = MappingProxyType(
    {
        "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
        "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
        "NCCL_MNNVL": "NCCL_MNNVL_ENABLE",
        "NCCL_WORK_FIFO_DEPTH": "NCCL_WORK_FIFO_BYTES",
        "NCCL_NCCL_ALLOC_P2P_NET_LL_BUFFERS": "NCCL_ALLOC_P2P_NET_LL_BUFFERS",
        "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
        "NCCL_LL_THRESHOLD": "NCCL_PROTO",
        "NCCL_THREAD_THRESHOLD": "NCCL_THREAD_THRESHOLDS",
    }
)

# Below this similarity a guess would mislead.
_CLOSE_ENOUGH = 0.8  # difflib ratio: one letter of five; NCCL_IB_HCAS and NCCL_SOCKET_IFNAMES pass, NCCL_FOO does not


def parse_version(text: str) -> Version:
    """A release as a tuple: "2.21.5+cuda12.4" is (2, 21, 5); missing parts are 0."""
    parts = text.strip().lstrip("v").split("+")[0].split("-")[0].split(".")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"NCCL version {text!r}: must look like 2.21.5") from None
    if not 1 <= len(numbers) <= 4:
        raise ValueError(f"NCCL version {text!r}: must look like 2.21.5")
    padded = (*numbers, 0, 0)
    return (padded[0], padded[1], padded[2])


def version_text(version: Version | tuple[int, ...]) -> str:
    """The release as NCCL prints it."""
    return ".".join(str(part) for part in version)


def _status(text: str) -> Status:
    match text:
        case "current" | "removed" | "other":
            return text
    raise ValueError(f"nccl_env_names.tsv: status {text!r} is not current, removed or other")


@cache
def torch_names() -> frozenset[str]:
    """The TORCH_NCCL_ names PyTorch reads."""
    lines = files("planner").joinpath("data/torch_nccl_names.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@cache
def names() -> Mapping[str, NcclName]:
    """Every known name."""
    table: dict[str, NcclName] = {}
    text = files("planner").joinpath("data/nccl_env_names.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, status, first, last, doc_class, kind, default, reader = line.split("\t")
        table[name] = NcclName(
            name=name,
            status=_status(status),
            first=parse_version(first) if first else None,
            last=parse_version(last) if last else None,
            doc_class=doc_class,
            kind=kind,
            default=default,
            reader=reader,
        )
    return MappingProxyType(table)


def family(name: str) -> str | None:
    """The software that owns the name's prefix, where one does."""
    return next((owner for prefix, owner in FAMILIES.items() if name.startswith(prefix)), None)


def nearest(name: str) -> tuple[str, ...]:
    """The names that were probably meant, best first; empty where none is near."""
    if name.startswith("TORCH_NCCL_"):
        return tuple(difflib.get_close_matches(name, torch_names(), n=1, cutoff=_CLOSE_ENOUGH))
    if name in _KNOWN_WRONG:
        return _KNOWN_WRONG[name]
    live = [known for known, entry in names().items() if entry.status != "removed"]
    return tuple(difflib.get_close_matches(name, live, n=2, cutoff=_CLOSE_ENOUGH))


def replacement(name: str) -> str | None:
    """What took a removed name's place."""
    return _REPLACED_BY.get(name)
