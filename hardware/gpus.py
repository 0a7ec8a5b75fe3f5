"""GPUs and the links between them: what their makers say of them, and what they reach; `gpus.toml`, `links.toml`.

A figure without a measurement is None, and a forecast that needs it says that it assumed one.
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
    pattern: str  # regular expression on the driver's name, in lower case and with spaces for "-"
    source: str
    peak_bf16: float  # dense FLOP/s of the data sheet; before capability 8.0 of fp16
    matmul_bf16: float  # FLOP/s of the best measured large multiplication
    matmul_fp32: float  # FP32 without tensor cores: data sheet
    hbm_bytes_per_second: float
    memory_bytes: float
    maker: str = "NVIDIA"
    compute_capability: tuple[int, int] | None = None  # CUDA's; None for other makers
    matmul_fp8: float | None = None
    measured: bool = True  # False: matmul_bf16 is a usual share of the data sheet's peak
    watts: float | None = None  # of the board whose multiplication was measured: data sheet
    attention: str | None = None  # the attention kernel that software of its time takes by itself
    interconnect: str = "PCIe"  # of a usual node: "NVSwitch", "NVLink" (direct), "xGMI", "PCIe"
    links: int = 0  # of one GPU, bridges included
    busbw: Mapping[int, float] = field(default_factory=dict)  # all-gather at 512 MB by GPUs of one node: 2, 4, 8
    soldered: str | None = None  # beside "SXM", on the driver's name: boards that exist only with NVLink in use
    peers: bool = True  # False: the driver refuses peer access over PCIe
    grace: bool = False  # on a Grace CPU, by C2C
    is_fallback: bool = False  # its speed is assumed of a GPU in no row
    pci: Mapping[int, str] = field(default_factory=dict)  # device id: name in pci.ids

    @property
    def bf16(self) -> bool:
        """Whether its tensor cores multiply bf16: not before Ampere."""
        return self.compute_capability is None or self.compute_capability >= (8, 0)

    @property
    def of_a_rack(self) -> bool:
        """Whether its NVLink domain spans the hosts of a rack: beside a Grace CPU, from Blackwell on."""
        return self.grace and (self.compute_capability or (0, 0)) >= (10, 0)

    def busbw_of(self, gpus: int) -> float | None:
        """Measured all-gather bus bandwidth, bytes/s, of so many GPUs of one node; None without a measurement."""
        return self.busbw.get(2 if gpus <= 2 else 4 if gpus <= 4 else 8)


def _pair(capability: list[int] | None) -> tuple[int, int] | None:
    return (capability[0], capability[1]) if capability else None


def _gpu(row: Mapping[str, Any]) -> Gpu:
    made = dict(row)
    fp8 = made.pop("matmul_fp8_tflops", None)
    return Gpu(
        peak_bf16=made.pop("peak_bf16_tflops") * TERA,
        matmul_bf16=made.pop("matmul_bf16_tflops") * TERA,
        matmul_fp8=fp8 * TERA if fp8 else None,
        matmul_fp32=made.pop("fp32_tflops") * TERA,
        hbm_bytes_per_second=made.pop("memory_tb_per_second") * TERA,
        memory_bytes=made.pop("memory_gib") * GIB,
        compute_capability=_pair(made.pop("capability", None)),
        busbw={int(count): rate * GIGA for count, rate in made.pop("busbw_gb_per_second", {}).items()},
        pci={int(number, 16): name for number, name in made.pop("pci", {}).items()},
        **made,
    )


# What a GPU's name alone says of it, whether or not it has a row of its own: `series.toml`.


@cache
def pattern(series: str) -> str:
    """The regular expression of a series. Raises LookupError for one that the table does not have."""
    return {row["name"]: str(row["pattern"]) for row in read_table(__file__, "series.toml")["series"]}[series]


def is_of(series: str, name: str) -> bool:
    """Whether a GPU of this name, as the driver prints it, is of the series."""
    return re.search(pattern(series), name) is not None


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every row; the first that matches a name counts."""
    return tuple(map(_gpu, read_table(__file__, "gpus.toml")["gpu"]))


@lru_cache(maxsize=256)
def gpu_named(name: str | None) -> Gpu | None:
    """The row whose pattern is found in a GPU's marketing name; None where no row knows it."""
    if not name:
        return None
    text = name.lower().replace("-", " ")
    return next((gpu for gpu in gpus() if re.search(gpu.pattern, text)), None)


def clock_share(watts: float, of: float) -> float:
    """What a GPU multiplies that may draw so many watts in place of `of`: the root of their ratio, 1 at the most.

    The best multiplication of one chip on two boards rises with the watts by exponents of 0.52 (A100 at 300 and 400 W),
    0.57 (H100 at 350 and 700 W, per SM), 0.42 and 0.39 (B200 at 1000 W, GB200 at 1200, B300 at 1100): the rows above.
    """
    return float(min(1.0, watts / of) ** 0.5)


def of_board(gpu: Gpu, watts: float | None) -> Gpu:
    """The same GPU on a board of so many watts; None: unknown, and taken for the data sheet's."""
    share = clock_share(watts, gpu.watts) if watts and gpu.watts else 1.0
    if share == 1.0:
        return gpu
    fp8 = gpu.matmul_fp8 * share if gpu.matmul_fp8 else None
    return replace(gpu, matmul_bf16=gpu.matmul_bf16 * share, matmul_fp8=fp8, matmul_fp32=gpu.matmul_fp32 * share)


def soldered(name: str) -> bool:
    """Whether a board of this name exists only with NVLink in use: there no link at all is a fault, not a choice."""
    gpu = gpu_named(name)
    return "SXM" in name or bool(gpu and gpu.soldered and re.search(gpu.soldered, name))


def refuses_peers(name: str) -> bool:
    """Whether the driver refuses this GPU peer access over PCIe, as it does to all that are sold for games."""
    gpu = gpu_named(name)
    return is_of("sold for games", name) or bool(gpu and not gpu.peers)


def without_gdr(name: str) -> bool:
    """Whether a GPU has no GPUDirect RDMA by design: it is sold for games, or its memory is the host's."""
    return is_of("sold for games", name) or is_of("without GPUDirect RDMA", name)


def model_of(vendor_id: int | None, device_id: int | None) -> tuple[str | None, tuple[int, int] | None]:
    """(model, compute capability) of a GPU by its PCI ids, (None, None) where no row knows it."""
    if vendor_id == NVIDIA and device_id is not None:
        for gpu in gpus():
            if device_id in gpu.pci:
                return gpu.pci[device_id], gpu.compute_capability
    return None, None


# Links by generation, and what NCCL plans for one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One generation of NVLink or xGMI; rates of one link in one direction."""

    name: str
    source: str
    bytes_per_second: float  # on the wire
    most: int  # links of one GPU, at most
    capability: tuple[int, int] | None = None  # the first CUDA compute capability that has it; None: not NVIDIA's
    only: bool = False  # no later capability has it
    nccl_bytes_per_second: float | None = None  # payload that NCCL plans for; None: not NCCL's


@cache
def links() -> tuple[Link, ...]:
    """Every row, the newest first."""
    made = []
    for row in map(dict, read_table(__file__, "links.toml")["link"]):
        plan = row.pop("nccl_gb_per_second", None)
        made.append(
            Link(
                bytes_per_second=row.pop("gb_per_second") * GIGA,
                nccl_bytes_per_second=plan * GIGA if plan is not None else None,
                capability=_pair(row.pop("capability", None)),
                **row,
            )
        )
    return tuple(made)


def nvlink(capability: tuple[int, int]) -> Link | None:
    """The generation whose rate NCCL plans with for a compute capability; None before the first."""
    known = ((link, link.capability) for link in links() if link.capability is not None)
    return next((link for link, first in known if capability == first or (capability > first and not link.only)), None)


@cache
def most_links() -> int:
    """NVLinks that any GPU has: more in sum over its peers means that a switch shares them."""
    return max(link.most for link in links())


def link_named(name: str) -> Link:
    """A row by its name. Raises LookupError for one that the table does not have."""
    return next(link for link in links() if link.name == name)
