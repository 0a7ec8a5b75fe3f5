"""NCCL's planning constants: what its topology search believes a link carries, one direction, payload.

Specification: NCCL 2.30 src/graph/topo.h and topo.cc (ncclTopoNVLinkBw, the PCIe speed table, CPU to CPU bandwidths).
They lie below line rate on purpose: NVLink 4 is 25 GB/s on the wire and 20.6 in the plan.
"""

from __future__ import annotations

from hardware.links import link_named, nvlink
from hardware.units import GIGA

# kvDictPciGen in topo.cc: 100 Mb/s per lane, by GT/s.
_PCIE_LANE = ((64.0, 480), (32.0, 240), (16.0, 120), (8.0, 60), (5.0, 30), (2.5, 15))
_PCIE_DIVISOR = 80.0  # lanes x table / 80 is GB/s
INTEL_P2P_OVERHEAD = 6 / 5  # INTEL_P2P_OVERHEAD: GPU to GPU through an Intel CPU

_AMD_CPU = 16.0
_ARM_CPU = 6.0
_POWER9_CPU = 32.0
_ZHAOXIN_CPU = 6.0
_INTEL_BEFORE_SKYLAKE = 6.0
_INTEL_BY_MODEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))  # Emerald Rapids, Sapphire Rapids, Skylake


def nvlink_bytes_per_second(compute_capability: tuple[int, int] | None) -> float | None:
    """One NVLink, one direction, None where the capability is unknown or has no NVLink constant."""
    if compute_capability is None:
        return None
    link = nvlink(compute_capability)
    return link.nccl_bytes_per_second if link else None


def nvlink_candidates(count: int) -> tuple[float, float]:
    """Least and most that one of a GPU's `count` NVLinks may carry where its generation is unknown.

    18 links have Hopper and Blackwell, up to 4 also the bridges of SM 8.6 (NVIDIA data sheets).
    """
    first, last = ("NVLink 4", "NVLink 5") if count >= 18 else ("NVLink 3", "NVLink 4")
    if count <= 4:
        first = "NVLink 3 bridge"
    low, high = (link_named(name).nccl_bytes_per_second or 0.0 for name in (first, last))
    return low, high


def pcie_bytes_per_second(transfers_per_second: float | None, width: int | None) -> float | None:
    """A PCIe link by its speed and lanes, None where either is unknown."""
    if not transfers_per_second or not width:
        return None
    gigatransfers = transfers_per_second / GIGA
    # 2 % below the nominal speed still is that generation: sysfs prints "8.0" and "7.99".
    lane = next((value for speed, value in _PCIE_LANE if gigatransfers >= speed * 0.98), _PCIE_LANE[-1][1])
    return width * lane / _PCIE_DIVISOR * GIGA


def pcie_generation(transfers_per_second: float | None) -> int | None:
    """Generation of a PCIe link by its speed: 16 GT/s is 4; None where it is unknown or none of them."""
    if not transfers_per_second:
        return None
    speeds = [speed for speed, _ in reversed(_PCIE_LANE)]  # from 2.5 on
    reached = [number for number, speed in enumerate(speeds, 1) if transfers_per_second / GIGA >= speed * 0.98]
    return reached[-1] if reached else None


def cpu_bytes_per_second(
    vendor: str | None, family: int | None, model: int | None, arch: str | None = None
) -> float | None:
    """Between two CPUs (or NUMA nodes) of one host, None where the CPU is unknown."""
    if vendor == "AuthenticAMD":
        return _AMD_CPU * GIGA
    if vendor == "GenuineIntel":
        if family != 6 or model is None:
            return _INTEL_BEFORE_SKYLAKE * GIGA
        return next((value * GIGA for least, value in _INTEL_BY_MODEL if model >= least), _INTEL_BEFORE_SKYLAKE * GIGA)
    if vendor in ("CentaurHauls", "  Shanghai  "):
        return _ZHAOXIN_CPU * GIGA
    if arch in ("aarch64", "arm64") or vendor == "ARM":
        return _ARM_CPU * GIGA
    if arch in ("ppc64", "ppc64le"):
        return _POWER9_CPU * GIGA
    return None
