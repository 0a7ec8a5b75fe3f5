"""Seconds that one layer computes: multiplications, attention, and what only moves memory.

Model: a multiplication of m x n x k runs at `gemm / (1 + a/m + b/n + c/k)`; the shape terms were fitted on 20,000
bf16 timings of A100 to B300 (ai-dynamo/aiconfigurator gemm_perf) and are edge losses of 128-wide tiles. Attention
runs at its own rate (arXiv 2307.08691, 2407.08608). Everything else is passes over HBM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.hardware import ASSUMED_CPU_FLOPS_PER_CORE, ASSUMED_CPU_MEMORY_BYTES_PER_SECOND, GIB, Gpu
from planner.specs import ModelSpec, TrainSpec
from planner.stacks import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The few physical constants of the step-time forecast; docs/model.md gives the meaning of each."""

    rows_lost: float = 180.0  # a: rows of a multiplication at which half its rate is lost
    columns_lost: float = 190.0  # b
    depth_lost: float = 220.0  # c
    sustained: float = 0.85  # of the measured peak rate, over minutes at the power limit
    fp8_sustained: float = 0.70  # quantisation and scaling around each fp8 multiplication
    attention_flash1: float = 0.30  # of the multiplication rate
    attention_flash2: float = 0.50
    attention_flash3: float = 0.60
    attention_unfused: float = 0.35  # batched multiplications with scores written to memory
    score_passes: float = 8.0  # passes over the score matrix, forward, where it is stored
    hbm_share: float = 0.75  # of the data sheet's bandwidth that streaming kernels reach
    hidden_passes_fused: float = 10.0  # reads and writes of a hidden-sized tensor per layer, forward
    hidden_passes_eager: float = 22.0
    ffn_passes_fused: float = 3.0
    ffn_passes_eager: float = 5.0
    launch_seconds: float = 6e-6  # the host needs this long to start one kernel
    kernels_eager: float = 34.0  # per layer, forward
    kernels_fused: float = 20.0
    tp_hidden: float = 0.5  # share of the tensor-parallel traffic that overlap hides, where the stack overlaps
    overlap_loss: float = 0.15  # of the shorter of two overlapped things still shows: SMs and HBM are shared
    optimizer_bytes: float = 28.0  # HBM traffic per weight: AdamW reads w, g, m, v and writes w, m, v, half copy
    head_misalign: float = 1.5  # attention takes this much longer where head_dim is no multiple of 64


DEFAULT = Constants()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank computes with."""

    gemm: float  # FLOP/s of large multiplications in the precision of the run, sustained
    attention: float  # FLOP/s of the attention kernel
    hbm: float  # bytes/s of streaming kernels
    memory_bytes: float | None  # of one rank's device
    launch_seconds: float
    how: str  # "measured", "derived", "assumed"
    device: str
    attention_unfused: bool = False
    inputs: tuple[str, ...] = ()


def gpu_rates(gpu: Gpu, train: TrainSpec, stack: Stack, precision: str, constants: Constants = DEFAULT) -> Rates:
    """Rates of a known GPU."""
    kernel = stack.attention
    if train.attention == "eager":
        kernel = "unfused"
    elif kernel == "flash3" and gpu.compute_capability[0] < 9:
        kernel = "flash2"
    share = {
        "unfused": constants.attention_unfused,
        "flash1": constants.attention_flash1,
        "flash2": constants.attention_flash2,
        "flash3": constants.attention_flash3,
    }[kernel]
    bf16 = gpu.matmul_bf16 * constants.sustained
    if precision == "bf16" and gpu.compute_capability < (8, 0):
        bf16 = gpu.matmul_fp32 * 0.8  # no bf16 tensor cores before Ampere
    gemm = bf16
    if precision == "fp8":
        gemm = (gpu.matmul_fp8 or gpu.matmul_bf16) * constants.fp8_sustained
    elif precision == "fp32":
        gemm = gpu.matmul_fp32 * 0.8
        bf16 = gemm
    how = "derived" if gpu.measured else "assumed"
    return Rates(
        gemm=gemm,
        attention=bf16 * share,
        hbm=gpu.hbm_bytes_per_second * constants.hbm_share,
        memory_bytes=gpu.memory_bytes,
        launch_seconds=constants.launch_seconds,
        how=how,
        device=gpu.name,
        attention_unfused=kernel == "unfused",
        inputs=(f"GEMM {gemm / 1e12:.4g} TFLOP/s on {gpu.name} ({precision}): {how} from published measurements",),
    )


def cpu_rates(cores_per_rank: float, memory_bytes: float | None) -> Rates:
    """Rates of a rank that computes on CPU cores: assumed, and said to be."""
    gemm = ASSUMED_CPU_FLOPS_PER_CORE * max(cores_per_rank, 0.25)
    return Rates(
        gemm=gemm,
        attention=gemm * 0.4,
        hbm=ASSUMED_CPU_MEMORY_BYTES_PER_SECOND,
        memory_bytes=memory_bytes,
        launch_seconds=15e-6,
        how="assumed",
        device="CPU",
        inputs=(f"GEMM {gemm / 1e9:.3g} GFLOP/s per rank on {cores_per_rank:.3g} CPU cores: assumed",),
    )


class LayerCost(NamedTuple):
    """Seconds of one layer and one micro-batch on one rank, forward; backward follows by factors."""

    gemm: float
    attention: float
    elementwise: float
    host: float


def _rate_loss(m: float, n: float, k: float, constants: Constants) -> float:
    return 1.0 + constants.rows_lost / m + constants.columns_lost / n + constants.depth_lost / k


def layer_cost(
    model: ModelSpec, tokens: float, sequence: float, tp: int, sequence_parallel: bool, rates: Rates, stack: Stack,
    *, ep: int = 1, lora: bool = False, compiled: bool = False, constants: Constants = DEFAULT,
) -> LayerCost:  # fmt: skip
    """Forward seconds of one layer for `tokens` on this rank, of sequences `sequence` long."""
    h = float(model.hidden)
    q = model.heads * model.head_dim / tp
    kv = model.kv_heads * model.head_dim / max(1, min(tp, model.kv_heads))
    qkv = q + 2 * kv
    shapes = [(tokens, qkv, h), (tokens, h, q)]
    width = (model.expert_ffn if model.experts else model.ffn) / tp
    if model.experts:
        rows = tokens * model.experts_per_token / model.experts * ep  # of one local expert, balanced
        for _ in range(max(1, model.experts // ep)):
            shapes += [(rows, width * (2 if model.gated_mlp else 1), h), (rows, h, width)]
    else:
        shapes += [(tokens, width * (2 if model.gated_mlp else 1), h), (tokens, h, width)]
    gemm = sum(2.0 * m * n * k * _rate_loss(m, n, k, constants) for m, n, k in shapes) / rates.gemm
    window = min(sequence, model.sliding_window) if model.sliding_window else sequence
    if model.sliding_window and model.family == "gemma2":
        window = (window + sequence) / 2.0  # every other layer is global
    attention = 4.0 * tokens * window * q / rates.attention
    if rates.attention_unfused:
        heads = model.heads / tp
        attention += 2.0 * constants.score_passes * tokens * window * heads / rates.hbm
    else:
        attention *= 0.5  # causal: the upper triangle is skipped
    if model.head_dim % 64:
        attention *= constants.head_misalign
    fused = stack.fused or compiled
    hidden_passes = constants.hidden_passes_fused if fused else constants.hidden_passes_eager
    ffn_passes = constants.ffn_passes_fused if fused else constants.ffn_passes_eager
    active = model.experts_per_token if model.experts else 1
    moved = tokens * 2.0 * (
        hidden_passes * h / (tp if sequence_parallel else 1) + ffn_passes * width * active
    )  # fmt: skip
    if lora:  # each adapted product reads its input again and adds into its output
        moved += tokens * 2.0 * (4 * h + 2 * qkv + q + 5 * width * active)
    kernels = constants.kernels_fused if fused else constants.kernels_eager
    if lora:
        kernels += 28.0
    return LayerCost(gemm, attention, moved / rates.hbm, kernels * rates.launch_seconds)


def head_cost(
    model: ModelSpec, tokens: float, tp: int, rates: Rates, *, fused: bool, constants: Constants = DEFAULT
) -> tuple[float, float]:
    """Forward seconds of the output projection, and forward-and-backward seconds of the loss over the vocabulary."""
    n = model.vocab / tp
    gemm = 2.0 * tokens * n * model.hidden * _rate_loss(tokens, n, model.hidden, constants) / rates.gemm
    passes = 6.0 if fused else 16.0  # bytes per logit: bf16 read twice and written; fp32 copies, softmax, gradient
    return gemm, tokens * n * passes / rates.hbm


def usable_memory(rates: Rates) -> float | None:
    """Memory of the device that a job may plan for."""
    return rates.memory_bytes


def gib(value: float) -> str:
    """A size in words."""
    return f"{value / GIB:.1f} GiB"
