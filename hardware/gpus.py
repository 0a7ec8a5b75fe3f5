"""GPU models and GPU links: data sheet values and measured rates, from `gpus.toml` and `links.toml`.

A rate that was never measured is None. A forecast that needs such a rate reports that it assumed a value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from contracts.tables import read_table
from hardware.units import GIB, GIGA, TERA

NVIDIA = 0x10DE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    pattern: str  # regular expression matched against the driver's GPU name in lower case, with "-" replaced by a space
    source: str
    peak_bf16: float  # dense FLOP/s from the data sheet; fp16 for GPUs before compute capability 8.0
    matmul_bf16: float  # FLOP/s of the fastest large matrix multiplication that was measured
    matmul_fp32: float  # FP32 FLOP/s without tensor cores, from the data sheet
    hbm_bytes_per_second: float
    memory_bytes: float
    maker: str = "NVIDIA"
    compute_capability: tuple[int, int] | None = None  # of CUDA; None for other vendors
    matmul_fp8: float | None = None
    measured: bool = True  # False: no measurement; matmul_bf16 is the usual fraction of the data sheet peak
    watts: float | None = None  # power limit of the board on which matmul_bf16 was measured: data sheet
    attention: str | None = None  # attention kernel that the training software of this GPU's time selects by default
    interconnect: str = "PCIe"  # in a typical node: "NVSwitch", "NVLink" (direct), "xGMI" or "PCIe"
    links: int = 0  # NVLink or xGMI links of one GPU, bridges included
    busbw: Mapping[int, float] = field(default_factory=dict)  # GPUs in one node (2, 4, 8) -> all-gather at 512 MB
    soldered: str | None = None  # pattern, besides "SXM", for names of boards that are only built with NVLink in use
    peers: bool = True  # False: the driver refuses peer access over PCIe
    grace: bool = False  # attached to a Grace CPU by NVLink-C2C
    unified: bool = False  # shares one memory with its host
    limited: bool = False  # tensor cores slower than the board's power allows, so that they sustain their best rate
    only: bool = False  # no other GPU has its compute capability
    is_fallback: bool = False  # True for the row that stands in for an unlisted GPU; its speed is an assumption
    pci: Mapping[int, str] = field(default_factory=dict)  # PCI device id -> name in pci.ids

    @property
    def bf16(self) -> bool:
        """Whether the tensor cores support bf16 (compute capability 8.0, Ampere, and newer)."""
        return self.compute_capability is None or self.compute_capability >= (8, 0)

    def busbw_of(self, gpus: int) -> float | None:
        """Measured all-gather bus bandwidth of `gpus` GPUs in one node, in bytes/s; None if not measured."""
        return self.busbw.get(2 if gpus <= 2 else 4 if gpus <= 4 else 8)


_REQUIRED = {
    "name", "pattern", "source", "memory_gib", "memory_tb_per_second", "peak_bf16_tflops", "matmul_bf16_tflops",
    "fp32_tflops",
}  # fmt: skip


def _to_pair(capability: list[int] | None) -> tuple[int, int] | None:
    return (capability[0], capability[1]) if capability else None


def _parse_gpu(row: Mapping[str, Any]) -> Gpu:
    """Convert a row of `gpus.toml` to SI units. Raises ValueError that names the row if it lacks a required member."""
    values = dict(row)
    if missing := _REQUIRED - values.keys():
        raise ValueError(f"hardware/gpus.toml: {values.get('name', 'a row without a name')} lacks {', '.join(missing)}")
    fp8 = values.pop("matmul_fp8_tflops", None)
    return Gpu(
        peak_bf16=values.pop("peak_bf16_tflops") * TERA,
        matmul_bf16=values.pop("matmul_bf16_tflops") * TERA,
        matmul_fp8=fp8 * TERA if fp8 else None,
        matmul_fp32=values.pop("fp32_tflops") * TERA,
        hbm_bytes_per_second=values.pop("memory_tb_per_second") * TERA,
        memory_bytes=values.pop("memory_gib") * GIB,
        compute_capability=_to_pair(values.pop("capability", None)),
        busbw={int(count): rate * GIGA for count, rate in values.pop("busbw_gb_per_second", {}).items()},
        pci={int(number, 16): name for number, name in values.pop("pci", {}).items()},
        **values,
    )


# Properties that follow from a GPU's name alone, also for GPUs without a row in `gpus.toml`: `series.toml`.


@cache
def pattern(series: str) -> str:
    """Return the regular expression of a series. Raises LookupError if `series.toml` does not have it."""
    return {row["name"]: str(row["pattern"]) for row in read_table(__file__, "series.toml")["series"]}[series]


def is_of(series: str, name: str) -> bool:
    """Whether a GPU with this name, as the driver reports it, belongs to the series."""
    return re.search(pattern(series), name) is not None


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return every row. If several rows match a name, the first one is used."""
    return tuple(map(_parse_gpu, read_table(__file__, "gpus.toml")["gpu"]))


@lru_cache(maxsize=256)
def find_gpu(name: str | None) -> Gpu | None:
    """Return the first row whose pattern matches the GPU's marketing name; None if no row matches."""
    if not name:
        return None
    text = name.lower().replace("-", " ")
    return next((gpu for gpu in gpus() if re.search(gpu.pattern, text)), None)


def compute_clock_share(watts: float, of: float) -> float:
    """Return the fraction of the matrix rate at a power limit of `watts` instead of `of`: sqrt(watts / of), at most 1.

    The best matrix rate of one chip on two boards grows with the power limit by exponents of 0.52 (A100 at 300 and 400
    W), 0.57 (H100 at 350 and 700 W, per SM), 0.42 and 0.39 (B200 at 1000 W, GB200 at 1200, B300 at 1100): `gpus.toml`.
    """
    return float(min(1.0, watts / of) ** 0.5)


def scale_to_board(gpu: Gpu, watts: float | None) -> Gpu:
    """Return the GPU with rates scaled to a board power limit of `watts`; None means the data sheet's limit."""
    share = compute_clock_share(watts, gpu.watts) if watts and gpu.watts else 1.0
    if share == 1.0:
        return gpu
    fp8 = gpu.matmul_fp8 * share if gpu.matmul_fp8 else None
    return replace(gpu, matmul_bf16=gpu.matmul_bf16 * share, matmul_fp8=fp8, matmul_fp32=gpu.matmul_fp32 * share)


def soldered(name: str | None) -> bool:
    """Whether this board is only built with NVLink in use. On such a board, no link at all is a fault."""
    gpu, name = find_gpu(name), name or ""
    return "SXM" in name or bool(gpu and gpu.soldered and re.search(gpu.soldered, name))


def is_card(name: str | None) -> bool:
    """Whether this is a known PCIe card, on which an NVLink bridge is optional; False for an unknown model."""
    gpu = find_gpu(name)
    return gpu is not None and gpu.interconnect != "NVSwitch" and not soldered(name)


def refuses_peers(name: str) -> bool:
    """Whether the driver refuses peer access over PCIe for this GPU, as it does for all consumer GPUs."""
    gpu = find_gpu(name)
    return is_of("sold for games", name) or bool(gpu and not gpu.peers)


def without_gdr(name: str) -> bool:
    """Whether the GPU has no GPUDirect RDMA by design: it is a consumer GPU, or it uses the host's memory."""
    return is_of("sold for games", name) or is_of("without GPUDirect RDMA", name)


def find_model(
    vendor_id: int | None, device_id: int | None, capability: tuple[int, int] | None = None
) -> tuple[str | None, tuple[int, int] | None]:
    """Return (model, compute capability) for PCI ids, or a capability of one GPU only; else (None, None)."""
    if vendor_id == NVIDIA and device_id is not None:
        for gpu in gpus():
            if device_id in gpu.pci:
                return gpu.pci[device_id], gpu.compute_capability
    only = next((gpu for gpu in gpus() if gpu.only and gpu.compute_capability == capability), None)
    return (only.name, capability) if only else (None, None)


# Links by generation, and the rate that NCCL's planning assumes for each.


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One generation of NVLink or xGMI. Rates are per link and per direction."""

    name: str
    source: str
    bytes_per_second: float  # signalling rate of the link
    most: int  # maximum number of links per GPU
    capability: tuple[int, int] | None = None  # lowest CUDA compute capability that has it; None: not by NVIDIA
    only: bool = False  # True if newer compute capabilities do not have it
    nccl_bytes_per_second: float | None = None  # bandwidth that NCCL assumes when planning; None: unknown to NCCL


@cache
def links() -> tuple[Link, ...]:
    """Return every row, newest generation first."""
    rows = []
    for row in map(dict, read_table(__file__, "links.toml")["link"]):
        plan = row.pop("nccl_gb_per_second", None)
        rows.append(
            Link(
                bytes_per_second=row.pop("gb_per_second") * GIGA,
                nccl_bytes_per_second=plan * GIGA if plan is not None else None,
                capability=_to_pair(row.pop("capability", None)),
                **row,
            )
        )
    return tuple(rows)


def nvlink(capability: tuple[int, int]) -> Link | None:
    """Return the link generation that NCCL assumes for a compute capability; None if it predates NVLink."""
    known = ((link, link.capability) for link in links() if link.capability is not None)
    return next((link for link, first in known if capability == first or (capability > first and not link.only)), None)


@cache
def most_links() -> int:
    """Return the maximum NVLinks of any GPU. If a GPU's links add up to more, its peers share them through a switch."""
    return max(link.most for link in links())


def link_named(name: str) -> Link:
    """Return the row with this name. Raises LookupError if there is none."""
    return next(link for link in links() if link.name == name)
