"""Ceilings of GPUs: what a matrix multiplication, the memory and the links were measured to reach.

Sources of the rows: peak and best measured bf16/fp8 matmul of stas00/ml-engineering compute/accelerator/README.md
(maximum achievable matmul FLOPS table) and of ai-dynamo/aiconfigurator gemm_perf tables (SXM parts, L40S, RTX PRO
6000); collectives at 512 MB of ai-dynamo/aiconfigurator nccl_perf tables (NCCL 2.27.3 and later); memory bandwidth
and size of the makers' data sheets. A figure nobody measured is None and the forecast says "assumed".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1024.0**3
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    pattern: str  # regular expression on the lower-case marketing name
    peak_bf16: float  # dense FLOP/s of the data sheet
    matmul_bf16: float  # best measured FLOP/s of a large multiplication
    matmul_fp8: float | None
    matmul_fp32: float  # FP32 without tensor cores: data sheet
    hbm_bytes_per_second: float
    memory_bytes: float
    compute_capability: tuple[int, int]
    busbw_2: float | None = None  # all-gather busbw of 2, 4 and 8 GPUs of one node at 512 MB
    busbw_4: float | None = None
    busbw_8: float | None = None
    all_reduce_gain: float = 1.0  # all-reduce busbw over all-gather busbw, 8 GPUs (NVLS)
    interconnect: str = "PCIe"
    measured: bool = True  # False: matmul_bf16 is a usual share of the data sheet's peak


def _gpu(
    name: str, pattern: str, peak: float, matmul: float, fp8: float | None, fp32: float, hbm: float, gib: float,
    cc: tuple[int, int], busbw: tuple[float, float, float] | None, gain: float, link: str, *, measured: bool = True,
) -> Gpu:  # fmt: skip
    two, four, eight = busbw or (None, None, None)
    return Gpu(
        name=name, pattern=pattern, peak_bf16=peak * TERA, matmul_bf16=matmul * TERA,
        matmul_fp8=fp8 * TERA if fp8 else None, matmul_fp32=fp32 * TERA, hbm_bytes_per_second=hbm * TERA,
        memory_bytes=gib * GIB, compute_capability=cc, busbw_2=two * GIGA if two else None,
        busbw_4=four * GIGA if four else None,
        busbw_8=eight * GIGA if eight else None, all_reduce_gain=gain, interconnect=link, measured=measured,
    )  # fmt: skip


_A100 = (150.0, 192.0, 205.0)
_H100 = (258.0, 318.0, 336.0)
_B200 = (438.0, 566.0, 617.0)
_L40S = (19.6, 4.7, 1.2)  # PCIe through the CPUs; the data sheet's 32 GB/s is not reached
_PRO = (32.3, 23.4, 23.0)

_XGMI = (48.0, 144.0, 310.0)  # 7 links of 64 GB/s to the other seven; three quarters of it, by arithmetic only

# Order matters: the first pattern that matches wins.
GPUS: tuple[Gpu, ...] = (
    _gpu("MI355X", r"mi355x", 2300, 1565, 3000, 157, 8.0, 287, (9, 5), _XGMI, 1.0, "Infinity Fabric"),
    _gpu("MI325X", r"mi325x", 1300, 785, 1500, 163, 6.0, 255, (9, 4), _XGMI, 1.0, "Infinity Fabric"),
    _gpu("MI300X", r"mi300x", 1300, 668, 1300, 163, 5.3, 191, (9, 4), _XGMI, 1.0, "Infinity Fabric"),
    _gpu("GB300", r"gb300", 2500, 1830, 3600, 80, 8.0, 277, (10, 3), _B200, 1.14, "NVLink"),
    _gpu("GB200", r"gb200", 2500, 1850, 3616, 80, 8.0, 184, (10, 0), _B200, 1.14, "NVLink"),
    _gpu("B300", r"b300", 2250, 1780, 3353, 80, 8.0, 268, (10, 3), _B200, 1.14, "NVLink"),
    _gpu("B200", r"b200", 2250, 1715, 3433, 80, 8.0, 179, (10, 0), _B200, 1.14, "NVLink"),
    _gpu("GH200", r"gh200", 989, 828, 1535, 67, 4.0, 95, (9, 0), None, 1.0, "NVLink"),
    _gpu("H200", r"h200", 989, 848, 1453, 67, 4.8, 140, (9, 0), _H100, 1.33, "NVLink"),
    _gpu("H100 NVL", r"h100.*nvl", 835, 560, 1000, 60, 3.9, 93, (9, 0), None, 1.0, "NVLink pairs"),
    # Fewer watts and HBM2e: the variant of the published torchtitan runs.
    _gpu(
        "H100 96GB HBM2e",
        r"h100.*(96\s?gb|hbm2e)",
        989,
        690,
        1150,
        55,
        2.4,
        94,
        (9, 0),
        _H100,
        1.33,
        "NVLink",
        measured=False,
    ),
    _gpu("H100 PCIe", r"h100.*pcie", 756, 496, 880, 51, 2.0, 79.6, (9, 0), None, 1.0, "PCIe"),
    _gpu("H800", r"h800", 989, 850, 1403, 67, 3.35, 79.6, (9, 0), (129, 159, 168), 1.2, "NVLink"),
    _gpu("H20", r"h20\b", 148, 137, 270, 44, 4.0, 95.6, (9, 0), _H100, 1.33, "NVLink"),
    _gpu("H100", r"h100", 989, 850, 1403, 67, 3.35, 79.6, (9, 0), _H100, 1.33, "NVLink"),
    _gpu("A800", r"a800", 312, 290, None, 19.5, 2.0, 79.3, (8, 0), (100, 128, 137), 1.05, "NVLink"),
    _gpu("A100 PCIe 40GB", r"a100.*pcie.*40", 312, 250, None, 19.5, 1.55, 39.4, (8, 0), None, 1.0, "PCIe"),
    _gpu("A100 PCIe", r"a100.*pcie", 312, 250, None, 19.5, 1.9, 79.3, (8, 0), None, 1.0, "PCIe"),
    _gpu("A100 40GB", r"a100.*40", 312, 285, None, 19.5, 1.55, 39.4, (8, 0), _A100, 1.08, "NVLink"),
    _gpu("A100", r"a100", 312, 290, None, 19.5, 2.0, 79.3, (8, 0), _A100, 1.08, "NVLink"),
    _gpu("L40S", r"l40s", 362, 250, 466, 91, 0.86, 44.7, (8, 9), _L40S, 1.1, "PCIe"),
    _gpu("L40", r"\bl40\b", 181, 160, 300, 90, 0.86, 44.7, (8, 9), _L40S, 1.1, "PCIe", measured=False),
    _gpu("L4", r"\bl4\b", 121, 60, 120, 30, 0.3, 22.5, (8, 9), None, 1.0, "PCIe", measured=False),
    _gpu("RTX PRO 6000", r"rtx pro 6000", 503, 440, 850, 120, 1.8, 95, (12, 0), _PRO, 1.05, "PCIe"),
    _gpu("RTX 5090", r"5090", 210, 200, 400, 105, 1.79, 31.4, (12, 0), None, 1.0, "PCIe", measured=False),
    _gpu("RTX 6000 Ada", r"6000 ada", 364, 260, 500, 91, 0.96, 47.5, (8, 9), _L40S, 1.1, "PCIe", measured=False),
    _gpu("RTX 4090", r"4090", 165, 165, 300, 82, 1.0, 23.6, (8, 9), None, 1.0, "PCIe"),
    _gpu("RTX 4080", r"4080", 97, 95, 180, 48, 0.72, 15.7, (8, 9), None, 1.0, "PCIe", measured=False),
    _gpu("RTX 3090", r"3090", 71, 75, None, 35, 0.94, 23.6, (8, 6), None, 1.0, "PCIe"),
    _gpu("RTX A6000", r"a6000", 155, 122, None, 38, 0.77, 47.5, (8, 6), None, 1.0, "PCIe"),
    _gpu("A40", r"\ba40\b", 149.7, 122, None, 37, 0.70, 44.9, (8, 6), None, 1.0, "PCIe"),
    _gpu("A10", r"\ba10g?\b", 125, 70, None, 31, 0.6, 22.3, (8, 6), None, 1.0, "PCIe", measured=False),
    _gpu("A30", r"\ba30\b", 165, 140, None, 10, 0.93, 23.6, (8, 0), None, 1.0, "PCIe", measured=False),
    _gpu("V100 32GB", r"v100.*32", 125, 92, None, 15.7, 0.9, 31.7, (7, 0), (60, 110, 125), 1.0, "NVLink"),
    _gpu("V100", r"v100", 125, 92, None, 15.7, 0.9, 15.8, (7, 0), (60, 110, 125), 1.0, "NVLink"),
    _gpu("TITAN RTX", r"titan rtx", 65, 55, None, 16.3, 0.67, 23.6, (7, 5), None, 1.0, "PCIe", measured=False),
    _gpu("T4", r"\bt4\b", 65, 30, None, 8.1, 0.3, 14.6, (7, 5), None, 1.0, "PCIe", measured=False),
    _gpu("P100", r"p100", 19, 16, None, 9.3, 0.7, 15.9, (6, 0), None, 1.0, "NVLink", measured=False),
)

# Planning values of NCCL for one NVLink, one direction (NCCL src/graph/topo.h), by compute capability major.minor.
_NVLINK_PLAN = {60: 18.0, 70: 20.0, 75: 20.0, 80: 20.0, 86: 12.0, 90: 20.6, 100: 40.1, 103: 40.1}

# What an unknown CPU core does in a float32 multiplication; wide, and said to be assumed. AVX2 at 2.5 GHz is
# 80 GFLOP/s per core at best, and small models reach a fraction.
ASSUMED_CPU_FLOPS_PER_CORE = 20e9
ASSUMED_CPU_MEMORY_BYTES_PER_SECOND = 10e9
# Loopback gloo of two local ranks moves of the order of 1 GB/s; assumed until measured.
ASSUMED_GLOO_BYTES_PER_SECOND = 1e9


def gpu_named(name: str | None) -> Gpu | None:
    """The row whose pattern is found in a GPU's marketing name; None where no row knows it."""
    if not name:
        return None
    text = name.lower().replace("-", " ")
    for gpu in GPUS:
        if re.search(gpu.pattern, text):
            return gpu
    return None


def nvlink_plan_bytes_per_second(links: int, compute_capability: tuple[int, int] | None) -> float | None:
    """What NCCL plans for `links` NVLinks in one direction."""
    if not links or compute_capability is None:
        return None
    major, minor = compute_capability
    per_link = _NVLINK_PLAN.get(major * 10 + minor)
    return per_link * GIGA * links if per_link is not None else None
