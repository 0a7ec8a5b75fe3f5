"""Seconds that one layer computes: multiplications, attention, and what only moves memory.

Model: a multiplication of m x n x k runs at `gemm / (1 + a/m + b/n + c/k)`; the shape terms were fitted on 20,000
bf16 timings of A100 to B300 (ai-dynamo/aiconfigurator gemm_perf) and are edge losses of 128-wide tiles. Attention
runs at its own rate (arXiv 2307.08691, 2407.08608). Everything else is passes over HBM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from hardware.gpus import Gpu
from hardware.units import GIB
from planner.forecast.engine import Engine
from planner.forecast.specs import ModelSpec, TrainSpec, mlp_width

# What an unknown CPU core does in a float32 multiplication; wide, and said to be assumed. AVX2 at 2.5 GHz is
# 80 GFLOP/s per core at best, and small models reach a fraction.
ASSUMED_CPU_FLOPS_PER_CORE = 20e9
ASSUMED_CPU_MEMORY_BYTES_PER_SECOND = 10e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The few physical constants of the step-time forecast; docs/decisions/0022 gives the meaning of each."""

    rows_lost: float = 180.0  # a: rows of a multiplication at which half its rate is lost
    columns_lost: float = 190.0  # b
    depth_lost: float = 220.0  # c
    sustained_ampere: float = 0.95  # of the best measured multiplication, held over minutes at the power limit
    sustained_hopper: float = 0.80
    sustained_blackwell: float = 0.68
    fp8_share: float = 0.95  # of the fp8 rate after quantising and scaling around each multiplication
    attention_ampere: float = 0.66  # FlashAttention-2 over the matmul rate, long sequences, forward and backward
    attention_hopper: float = 0.41  # FlashAttention-2 on Hopper
    attention_hopper_3: float = 0.52  # FlashAttention-3, cuDNN 9
    attention_blackwell: float = 0.57
    attention_flash1: float = 0.55  # of FlashAttention-2's rate
    attention_short: float = 480.0  # tokens: a sequence this long runs attention at half its rate
    attention_unfused: float = 0.45  # batched multiplications with the scores written to memory
    score_passes: float = 5.0  # passes over the score matrix, forward, where it is stored
    hbm_share: float = 0.75  # of the data sheet's bandwidth that streaming kernels reach
    hidden_passes_fused: float = 10.0  # reads and writes of a hidden-sized tensor per layer, forward
    hidden_passes_compiled: float = 14.0  # torch.compile fuses within a layer, not across its products
    hidden_passes_eager: float = 19.0
    ffn_passes_fused: float = 3.0
    ffn_passes_eager: float = 5.0
    launch_seconds: float = 6e-6  # the host needs this long to start one kernel
    kernels_eager: float = 50.0  # per layer, forward
    kernels_fused: float = 20.0
    tp_hidden: float = 0.55  # share of the tensor-parallel traffic that overlap hides, where the stack overlaps
    overlap_loss: float = 0.17  # of the shorter of two overlapped things still shows: SMs and HBM are shared
    optimizer_bytes: float = 28.0  # HBM traffic per weight: AdamW reads w, g, m, v and writes w, m, v, half copy
    head_misalign: float = 2.5  # attention takes this much longer where head_dim is no multiple of 8
    lora_passes: float = 3.0  # over the output of an adapted product: adapter's result, sum, scale
    lora_inputs: float = 4.0  # over its input where not fused: dropout, cast, product
    lora_kernels: float = 4.0  # more per adapted product, forward
    unit_kernels: float = 200.0  # FSDP's hooks of one unit and pass, in starts of a kernel (docs/decisions/0023)


DEFAULT = Constants()
# A CPU's products know no tiles: 16 rows run at 0.7, 51 at 0.85, 128 at 0.95 of the best rate, whatever the columns and
# the depth. An adapter takes 0.8 ms of a step even beside 51 tokens, PEFT's Python included (docs/decisions/0023).
CPU = Constants(rows_lost=6.0, columns_lost=0.0, depth_lost=0.0, lora_kernels=12.0)


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
    element_bytes: float = 2.0  # of an activation
    inputs: tuple[str, ...] = ()


def _shares(gpu: Gpu, kernel: str, constants: Constants) -> tuple[float, float]:
    """Attention's and multiplication's share of the best measured matmul rate."""
    major = (gpu.compute_capability or (0, 0))[0]
    sustained = constants.sustained_ampere
    attention = constants.attention_ampere
    if major == 9:
        sustained = constants.sustained_hopper
        newer = "flash3" in (kernel, gpu.attention)
        attention = constants.attention_hopper_3 if newer else constants.attention_hopper
    elif major >= 10:
        sustained, attention = constants.sustained_blackwell, constants.attention_blackwell
    if kernel == "flash1":
        attention *= constants.attention_flash1
    elif kernel == "unfused":
        attention = constants.attention_unfused
    return attention, sustained


def gpu_rates(gpu: Gpu, train: TrainSpec, engine: Engine, precision: str, constants: Constants = DEFAULT) -> Rates:
    """Rates of a known GPU."""
    kernel = "unfused" if train.attention == "eager" else engine.attention
    share, sustained = _shares(gpu, kernel, constants)
    bf16 = gpu.matmul_bf16 * sustained
    attention = gpu.matmul_bf16 * share
    if precision == "bf16" and not gpu.bf16:
        bf16 = gpu.matmul_fp32 * 0.8  # no bf16 tensor cores before Ampere
        attention = bf16 * 0.4
    gemm = bf16
    if precision == "fp8":
        gemm = (gpu.matmul_fp8 or gpu.matmul_bf16) * sustained * constants.fp8_share
    elif precision == "fp32":
        gemm = gpu.matmul_fp32 * 0.8
        attention = gemm * 0.4
    # what training keeps of the best multiplication was fitted on NVIDIA's generations only
    how = "derived" if gpu.measured and gpu.maker == "NVIDIA" else "assumed"
    return Rates(
        gemm=gemm,
        attention=attention,
        hbm=gpu.hbm_bytes_per_second * constants.hbm_share,
        memory_bytes=gpu.memory_bytes,
        launch_seconds=constants.launch_seconds,
        how=how,
        device=gpu.name,
        attention_unfused=kernel == "unfused",
        element_bytes=4.0 if precision == "fp32" else 2.0,
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
        element_bytes=4.0,
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
    model: ModelSpec, tokens: float, sequence: float, tp: int, sequence_parallel: bool, rates: Rates, engine: Engine,
    *, ep: int = 1, lora_targets: tuple[str, ...] = (), compiled: bool = False, constants: Constants = DEFAULT,
) -> LayerCost:  # fmt: skip
    """Forward seconds of one layer for `tokens` on this rank, of sequences `sequence` long."""
    if model.dense_layers:  # the mean over the layers
        share = model.dense_layers / model.layers
        sparse, dense = (
            layer_cost(kind, tokens, sequence, tp, sequence_parallel, rates, engine, ep=ep, lora_targets=lora_targets,
                       compiled=compiled, constants=constants)
            for kind in (replace(model, dense_layers=0), replace(model, dense_layers=0, experts=0))
        )  # fmt: skip
        return LayerCost(*(s + share * (d - s) for s, d in zip(sparse, dense, strict=True)))
    fused = engine.fused or compiled
    hidden_passes = constants.hidden_passes_compiled if compiled else constants.hidden_passes_eager
    if engine.fused:
        hidden_passes = constants.hidden_passes_fused
    ffn_passes = constants.ffn_passes_fused if fused else constants.ffn_passes_eager
    moved = tokens * rates.element_bytes * (
        hidden_passes * float(model.hidden) / (tp if sequence_parallel else 1) + ffn_passes * mlp_width(model) / tp
    )  # fmt: skip
    kernels = constants.kernels_fused if fused else constants.kernels_eager
    for into, out in _adapted(model, tp, lora_targets):
        inputs = 1.0 if fused else constants.lora_inputs
        moved += tokens * rates.element_bytes * (inputs * into + constants.lora_passes * out)
        kernels += constants.lora_kernels
    return LayerCost(
        _products(model, tokens, tp, ep, constants) / rates.gemm,
        _attention(model, tokens, sequence, tp, rates, constants),
        moved / rates.hbm,
        kernels * rates.launch_seconds,
    )


def _widths(model: ModelSpec, tp: int) -> tuple[float, float, float]:
    """Columns of the queries, of the keys, and of one MLP or expert, on one rank."""
    q = model.heads * model.head_dim / tp
    kv = model.kv_heads * model.head_dim / max(1, min(tp, model.kv_heads))
    return q, kv, (model.expert_ffn if model.experts else model.ffn) / tp


def _products(model: ModelSpec, tokens: float, tp: int, ep: int, constants: Constants) -> float:
    """FLOPs of a layer's multiplications, each raised by what its shape loses."""
    h, (q, kv, width) = float(model.hidden), _widths(model, tp)
    rows, copies = tokens, 1
    if model.experts:  # one of the local experts, balanced, and how many there are
        rows = tokens * model.experts_per_token / model.experts * ep
        copies = max(1, model.experts // ep)
    shapes: tuple[tuple[float, float, float, int], ...] = (
        (tokens, q + 2 * kv, h, 1), (tokens, h, q, 1),
        (rows, width * (2 if model.gated_mlp else 1), h, copies), (rows, h, width, copies),
    )  # fmt: skip
    if model.experts and model.shared_expert_ffn:
        shared = model.shared_expert_ffn / tp
        shapes += ((tokens, shared * (2 if model.gated_mlp else 1), h, 1), (tokens, h, shared, 1))
    return sum(2.0 * m * n * k * c * _rate_loss(m, n, k, constants) for m, n, k, c in shapes)


def _attention(model: ModelSpec, tokens: float, sequence: float, tp: int, rates: Rates, constants: Constants) -> float:
    """Seconds of the attention kernel."""
    window = min(sequence, model.sliding_window) if model.sliding_window else sequence
    if model.sliding_window and model.sliding_layers is not None:
        window += (sequence - window) * (1.0 - model.sliding_layers / model.layers)  # the mean over the layers
    elif model.sliding_window and model.family == "gemma2":
        window = (window + sequence) / 2.0  # every other layer is global
    seconds = 4.0 * tokens * window * _widths(model, tp)[0] / rates.attention
    if model.head_dim % 8:
        seconds *= constants.head_misalign
    if rates.attention_unfused:
        return seconds + 2.0 * constants.score_passes * tokens * window * (model.heads / tp) / rates.hbm
    # Causal: the upper triangle is skipped, but for the tiles on the diagonal.
    return seconds * (0.5 * (1.0 + constants.attention_short / window))


def _adapted(model: ModelSpec, tp: int, targets: tuple[str, ...]) -> list[tuple[float, float]]:
    """Input and output columns of each adapted product."""
    h, (q, kv, width) = float(model.hidden), _widths(model, tp)
    sides = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h), "gate_proj": (h, width),
             "up_proj": (h, width), "down_proj": (width, h)}  # fmt: skip
    return [sides.get(target, (0.0, 0.0)) for target in targets]


def head_cost(
    model: ModelSpec, tokens: float, tp: int, rates: Rates, *, fused: bool, constants: Constants = DEFAULT
) -> tuple[float, float]:
    """Forward seconds of the output projection, and forward-and-backward seconds of the loss over the vocabulary."""
    n = model.vocab / tp
    gemm = 2.0 * tokens * n * model.hidden * _rate_loss(tokens, n, model.hidden, constants) / rates.gemm
    passes = 6.0 if fused else 16.0  # bytes per logit: bf16 read twice and written; fp32 copies, softmax, gradient
    return gemm, tokens * n * passes / rates.hbm


def gib(value: float) -> str:
    """A size in words."""
    return f"{value / GIB:.1f} GiB"
