"""Compute time of one layer: matrix multiplications, attention, and memory-bound operations.

Model: a multiplication of m x n x k runs at `gemm / (1 + a/m + b/n + c/k)`. The shape terms were fitted on 20,000 bf16
timings of A100 to B300 (ai-dynamo/aiconfigurator gemm_perf) and describe edge losses of 128-wide tiles. Attention has
its own rate (arXiv 2307.08691, 2407.08608). All other operations are passes over HBM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from contracts.layout import EIGHT_BITS, Layout
from contracts.tables import read_table
from hardware.gpus import Gpu
from planner.forecast.engine import NF4_BYTES, NF4_SCALES, Engine
from planner.forecast.links import Links
from planner.forecast.specs import (
    ModelSpec,
    TrainSpec,
    attention_products,
    document_length,
    expected_longest,
    mamba_products,
    mean_length,
    mlp_width,
    weights,
)

Constants = Mapping[str, float]  # constants.toml explains each
DEFAULT: Constants = read_table(__file__, "constants.toml")["gpu"]
CPU: Constants = {**DEFAULT, **read_table(__file__, "constants.toml")["cpu"]}
_EAGER_SCORE_BYTES: Constants = read_table(__file__, "constants.toml")["eager_score_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Compute and memory rates of one rank."""

    gemm: float  # sustained FLOP/s of large multiplications in the run's precision
    grouped: float = 1.0  # slowdown of experts' products
    head: float | None = None  # of the output projection, which fp8 recipes keep in bf16; None: same as gemm
    attention: float  # FLOP/s of the attention kernel
    hbm: float  # bytes/s of streaming kernels
    memory_bytes: float | None  # of one rank's device
    launch_seconds: float
    how: str  # "measured", "derived", "assumed"
    device: str
    score_bytes: float = 0.0  # through memory per score in the forward pass; 0: the kernel stores no scores
    attention_short: float = DEFAULT["attention_short"]
    latent_speed: float = 1.0  # of attention with latent heads: by torch, or in 8 bits in a captured step
    element_bytes: float = 2.0  # bytes per activation element
    quantized_bytes: float = 0.0  # HBM bytes per value that is cast to fp8
    inputs: tuple[str, ...] = ()


def _get_kernel_shares(gpu: Gpu, kernel: str, constants: Constants) -> tuple[float, float, float]:
    """Return attention's and multiplication's fraction of the best matmul rate, and the half-rate sequence length."""
    major = (gpu.compute_capability or (0, 0))[0]
    # Kernels for Ampere run on consumer Blackwell (12.0), which has the same tensor instructions.
    chip = "limited" if gpu.limited else {9: "hopper", 10: "blackwell"}.get(major, "ampere")
    newer = kernel == "flash3" and chip != "ampere"
    attention = constants[f"attention_{chip}{'_3' if newer else ''}"]
    if kernel == "flash1":
        attention *= constants["attention_flash1"]
    elif kernel == "unfused":
        attention = constants["attention_unfused"]
    short = constants["attention_short_3" if newer and not gpu.limited else "attention_short"]
    return attention, constants["sustained_blackwell" if major > 10 else f"sustained_{chip}"], short


def gpu_rates(gpu: Gpu, train: TrainSpec, engine: Engine, precision: str, constants: Constants = DEFAULT) -> Rates:
    """Return the rates of a known GPU."""
    default = gpu.attention if gpu.attention and engine.attention == "flash2" else engine.attention
    kernel = {"eager": "unfused", "flash": "flash2"}.get(train.attention, default)
    share, sustained, short = _get_kernel_shares(gpu, kernel, constants)
    bf16 = gpu.matmul_bf16 * sustained
    attention = gpu.matmul_bf16 * share
    if precision == "bf16" and not gpu.bf16:
        bf16 = gpu.matmul_fp32 * 0.8  # before Ampere there are no bf16 tensor cores
        attention = bf16 * 0.4
    gemm = bf16
    quantized = 0.0
    if precision in EIGHT_BITS:
        quantized = constants["quantize_bytes"] + (constants["scale_bytes"] if precision == "mxfp8" else 0.0)
        gemm = (gpu.matmul_fp8 or gpu.matmul_bf16) * sustained
        gemm /= constants["block_scaled"] if precision == "mxfp8" else 1.0
    elif precision == "fp32":
        gemm = gpu.matmul_fp32 * 0.8
        attention = gemm * 0.4
    major = (gpu.compute_capability or (0, 0))[0]
    grouped = sustained / constants["grouped_blackwell"] if engine.groups_experts and major == 10 else 1.0
    latent_speed = constants["attention_latent_mxfp8"] if gpu.compute_capability == (10, 3) else 1.0
    if not engine.fused and major == 10:  # torch's cuDNN attention has up to 128 columns (check_cudnn_tensor_shapes)
        latent_speed = constants["attention_blackwell"] / share
    # the sustained fractions were only fitted on NVIDIA generations
    how = "derived" if gpu.measured and gpu.maker == "NVIDIA" else "assumed"
    score_bytes = 2.0 * constants["score_passes"] if kernel == "unfused" else 0.0
    if train.attention == "eager":  # the backward pass is counted as 2.5 times the forward pass
        score_bytes = _EAGER_SCORE_BYTES.get(precision, _EAGER_SCORE_BYTES["bf16"]) / 3.5
    return Rates(
        gemm=gemm,
        grouped=grouped if precision == "bf16" else 1.0,
        head=bf16 if precision in EIGHT_BITS else None,
        attention=attention,
        hbm=gpu.hbm_bytes_per_second * constants["hbm_share"],
        memory_bytes=gpu.memory_bytes,
        launch_seconds=constants["launch_seconds"],
        how=how,
        device=gpu.name,
        score_bytes=score_bytes,
        attention_short=short,
        latent_speed=latent_speed,
        element_bytes=4.0 if precision == "fp32" else 2.0,
        quantized_bytes=quantized,
        inputs=(f"GEMM {gemm / 1e12:.4g} TFLOP/s on {gpu.name} ({precision}): {how} from published measurements",),
    )


def cpu_rates(cores_per_rank: float, memory_bytes: float | None) -> Rates:
    """Return assumed rates of a rank that computes on CPU cores, reported as assumed."""
    gemm = CPU["flops_per_core"] * max(cores_per_rank, 0.25)
    return Rates(
        gemm=gemm,
        attention=gemm * 0.4,
        hbm=CPU["memory_bytes_per_second"],
        memory_bytes=memory_bytes,
        launch_seconds=CPU["launch_seconds"],
        how="assumed",
        device="CPU",
        element_bytes=4.0,
        inputs=(f"GEMM {gemm / 1e9:.3g} GFLOP/s per rank on {cores_per_rank:.3g} CPU cores: assumed",),
    )


class LayerCost(NamedTuple):
    """Forward seconds of one layer and micro-batch on one rank; factors convert them to backward seconds."""

    gemm: float
    attention: float
    elementwise: float
    host: float
    dequantize: float = 0.0  # once per pass over the weights, independent of tokens
    experts: float = 0.0  # part of gemm: products of routed experts
    merged: float = 0.0  # backward: full gradients of experts that are merged with their adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run for which a layout is needed; costs of layers are cached over the evaluated layouts.

    Not to be confused with a Kubernetes Job, `planner.kubernetes.manifests.JobSpec`.
    """

    model: ModelSpec
    train: TrainSpec
    links: Links
    engine: Engine
    rates: Rates
    has_gpu: bool = True
    compute_capability: tuple[int, int] | None = None
    host_memory_bytes: float | None = None  # per node; None: unknown
    constants: Constants = field(default_factory=lambda: DEFAULT)
    host_adam_bytes_per_second: float = DEFAULT["adam_rank_bytes_per_second"]
    # dataclasses.replace starts with an empty cache, because fields without init are not copied.
    _layers: dict[tuple[float, ...], LayerCost] = field(default_factory=dict, init=False)

    def sequence(self, micro_batch: int) -> float:
        """Return the computed tokens per sequence: full length if packed, else padded to the micro-batch's longest."""
        if self.train.length_histogram and not self.train.packing:
            return expected_longest(self.train.length_histogram, micro_batch, self.train.sequence_length)
        return float(self.train.sequence_length)

    def attended(self, micro_batch: int) -> float:
        """Return the tokens per sequence that attention sees; if the stack supports it, packed samples are separate."""
        train = self.train
        if train.packing and train.length_histogram and self.engine.splits_documents and train.attention != "eager":
            return document_length(train.length_histogram, train.sequence_length)
        return self.sequence(micro_batch)

    def real_tokens(self, micro_batch: int) -> float:
        """Return the tokens per sequence that are not padding."""
        if self.train.length_histogram and not self.train.packing:
            return mean_length(self.train.length_histogram, self.train.sequence_length)
        return self.sequence(micro_batch)

    def layer(self, layout: Layout, tokens: float) -> LayerCost:
        """Cached `layer_cost`."""
        compiled = self.engine.fuses(layout)
        key = (tokens, layout.micro_batch, layout.tp, layout.sequence_parallel, layout.ep, layout.cp, compiled)
        if key not in self._layers:
            self._layers[key] = layer_cost(self, layout, tokens)
        return self._layers[key]


def _rate_loss(m: float, n: float, k: float, constants: Constants) -> float:
    aligned = n % 64 == 0 and k % 64 == 0
    lost = 1.0 + constants["rows_lost"] / m + constants["columns_lost"] / n + constants["depth_lost"] / k
    return lost if aligned else lost * constants["misaligned"]


def layer_cost(job: Job, layout: Layout, tokens: float) -> LayerCost:
    """Return the forward seconds of one layer for `tokens` on this rank."""
    model, rates, engine, constants = job.model, job.rates, job.engine, job.constants
    kinds = _split_by_kind(model)
    if len(kinds) > 1:  # mean over the layers
        costs = [layer_cost(replace(job, model=kind), layout, tokens) for kind, _ in kinds]
        shares = [share for _, share in kinds]
        return LayerCost(*(sum(s * v for s, v in zip(shares, part, strict=True)) for part in zip(*costs, strict=True)))
    tp, ep, compiled = layout.tp, layout.ep, engine.fuses(layout)
    lora_targets = job.train.lora_targets if job.train.method != "full" else ()
    kind = "fused" if engine.fused or compiled else "eager"
    hidden_passes = constants["hidden_passes_compiled" if compiled and not engine.fused else f"hidden_passes_{kind}"]
    hidden_passes += constants["hidden_passes_rms"] if kind == "eager" and model.gated_mlp else 0.0
    # Columns of experts whose gate and casts are part of their products; the first product has twice as many.
    in_products = float(model.experts_per_token * model.expert_ffn) if engine.uses_cuda_graph(model, layout) else 0.0
    moved = tokens * rates.element_bytes * (
        hidden_passes * float(model.hidden) / (tp if layout.sequence_parallel else 1)
        + constants[f"ffn_passes_{kind}"] * (mlp_width(model) - in_products) / tp
        + constants["mamba_passes"] * (model.mamba_columns if model.mamba_layers else 0.0) / tp
    )  # fmt: skip
    shapes = _list_shapes(model, tokens, tp, ep)
    elements = sum(rows * (columns + depth) * copies for rows, columns, depth, copies in shapes)
    # divided by 3, since the time is tripled for both passes
    moved += rates.quantized_bytes * (elements - 3.0 * tokens * in_products / tp) / 3.0
    kernels = constants[f"kernels_{kind}"]
    experts = merged = 0.0
    if model.experts:
        experts = _time_products(_list_mlp_shapes(model, tokens, tp, ep), rates, constants)
        rows = tokens / (tp if ep > 1 else 1)
        biased = model.family == "gpt_oss"
        moved += rates.element_bytes * rows * _count_routing_passes(model, ep) * model.hidden
        output, first = engine.expert_bytes[(at := 4 if layout.compile and engine.compile else 2 * biased) : at + 2]
        both_passes = rows * model.experts_per_token * (output * model.hidden + 2.0 * first * model.expert_ffn)
        moved += both_passes / 3.0  # the factor of 3 adds the backward pass
        kernels += constants["kernels_routing"]
        if engine.fused:
            each = constants["kernels_expert"] + (constants["kernels_quantize"] if rates.quantized_bytes else 0.0)
            each *= not engine.groups_experts
            kernels += (each + constants["kernels_expert_bias"] * biased) * model.experts / ep
        if engine.merges_expert_adapters and {"gate_proj", "up_proj", "down_proj"} & set(lora_targets):
            # Experts are read and written with adapters added; backward, twice that for their gradients.
            moved += 2.0 * rates.element_bytes * weights(model).routed_per_layer / max(tp, ep)
            merged = experts
    for into, out in _list_adapted(model, tp, lora_targets):
        inputs = 1.0 if kind == "fused" else constants["lora_inputs"]
        moved += tokens * rates.element_bytes * (inputs * into + constants["lora_passes"] * out)
        kernels += constants["lora_kernels"]
    sizes = [into * out * copies for _, out, into, copies in shapes] if job.train.method == "qlora" else []
    kernels += constants["dequantize_kernels"] * len(sizes)
    share = constants["dequantize_share"] / constants["hbm_share"]
    dequantize = sum(sizes) * (NF4_BYTES + NF4_SCALES + rates.element_bytes) / (rates.hbm * share)
    return LayerCost(
        _time_products(shapes, rates, constants),
        _attention(job, layout, tokens),
        moved / rates.hbm,
        kernels * rates.launch_seconds,
        dequantize,
        experts,
        merged,
    )


def _split_by_kind(model: ModelSpec) -> list[tuple[ModelSpec, float]]:
    """Return one model per kind of layer, with that kind's fraction of the layers."""
    kinds, dense, mamba = [(model, 1.0)], model.dense_layers / model.layers, model.mamba_layers / model.layers
    if dense:
        plain = replace(model, dense_layers=0)
        kinds = [(plain, 1.0 - dense), (replace(plain, experts=0, experts_per_token=0), dense)]
    if 0.0 < mamba < 1.0:
        counts = ((0, 1.0 - mamba), (model.layers, mamba))
        kinds = [(replace(kind, mamba_layers=count), part * share) for kind, part in kinds for count, share in counts]
    return kinds


def _count_routing_passes(model: ModelSpec, ep: int) -> float:
    """Return the forward passes over a hidden-sized tensor that move tokens to their experts and back.

    Tokens are copied in the order of their experts and summed afterwards. The all-to-all delivers them in the order of
    the senders, so a rank with several experts sorts them again, in both directions.
    """
    k = float(model.experts_per_token)
    return 2.0 * (k + 1.0) + (4.0 * k if 1 < ep < model.experts else 0.0)


_Product = tuple[float, float, float, int]  # rows, columns, depth, number of products


def _time_products(shapes: Sequence[_Product], rates: Rates, constants: Constants) -> float:
    """Return the seconds of multiplications, each slowed down by its shape; a layer without an MLP has empty ones."""
    return sum(2.0 * m * n * k * c * _rate_loss(m, n, k, constants) * (rates.grouped if c > 1 else 1.0)
               for m, n, k, c in shapes if n and k) / rates.gemm  # fmt: skip


def _list_shapes(model: ModelSpec, tokens: float, tp: int, ep: int) -> tuple[_Product, ...]:
    """Return the multiplications of a layer on one rank."""
    mixer = mamba_products(model, tp) if model.mamba_layers else attention_products(model, tp)
    shapes = (*((tokens, out, into, 1) for into, out in mixer), *_list_mlp_shapes(model, tokens, tp, ep))
    if model.experts and model.shared_expert_ffn:
        h, shared = float(model.hidden), model.shared_expert_ffn / tp
        shapes += ((tokens, shared * (2 if model.gated_mlp else 1), h, 1), (tokens, h, shared, 1))
    return shapes


def _list_mlp_shapes(model: ModelSpec, tokens: float, tp: int, ep: int) -> tuple[_Product, ...]:
    """Return the multiplications of the MLP, or of the routed experts."""
    h, width = float(model.hidden), model.ffn / tp
    rows, copies = tokens, 1
    if model.experts:  # one local expert with balanced load, and the number of experts; TP: see engine.share_of
        width = model.expert_ffn / (tp if ep == 1 else 1)
        rows = tokens / (tp if ep > 1 else 1) * model.experts_per_token / model.experts * ep
        copies = max(1, model.experts // ep)
    return (rows, width * (2 if model.gated_mlp else 1), h, copies), (rows, h, width, copies)


def _attention(job: Job, layout: Layout, tokens: float) -> float:
    """Return the seconds of the attention kernel; the scan of Mamba-2 is counted in passes over memory."""
    model, rates = job.model, job.rates
    if model.mamba_layers:
        return 0.0
    window, heads = _compute_window(model, job.attended(layout.micro_batch)), model.heads / layout.tp
    seconds = 2.0 * tokens * window * heads * (model.head_dim + (model.value_dim or model.head_dim))
    seconds /= rates.attention
    # fp8_dot_product_attention in the recipes of captured steps
    if model.kv_rank and (not job.engine.fused or job.engine.uses_cuda_graph(model, layout)):
        seconds /= rates.latent_speed
    if model.head_dim % 8:
        seconds *= job.constants["head_misalign"]
    if rates.score_bytes:
        return seconds + rates.score_bytes * tokens * window * heads / rates.hbm
    # Causal attention skips the upper triangle, except for the tiles on the diagonal.
    return seconds * (0.5 * (1.0 + rates.attention_short / window))


def _compute_window(model: ModelSpec, sequence: float) -> float:
    """Return twice the mean number of keys per token, over tokens and layers; with causal attention, the length.

    With window w and s tokens, a token has w - w^2 / 2s keys. Llama 4 instead divides the sequence into chunks of w.
    """
    if not model.sliding_window or model.sliding_window >= sequence:
        return sequence
    w = float(model.sliding_window)
    within = w if model.family == "llama4" else 2.0 * w - w * w / sequence
    sliding = model.sliding_layers
    if sliding is None:  # Gemma 2: every other layer is global
        sliding = model.layers // 2 if model.family == "gemma2" else model.layers
    return within + (sequence - within) * (1.0 - sliding / model.layers)


def _list_adapted(model: ModelSpec, tp: int, targets: tuple[str, ...]) -> list[tuple[float, float]]:
    """Return (input columns, output columns) of each adapted product."""
    h, q = float(model.hidden), model.heads * model.head_dim / tp
    kv = model.kv_heads * model.head_dim / min(tp, model.kv_heads)
    width = model.experts_per_token * model.expert_ffn / tp if model.experts else model.ffn / tp
    sides = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h), "gate_proj": (h, width),
             "up_proj": (h, width), "down_proj": (width, h)}  # fmt: skip
    return [sides.get(target, (0.0, 0.0)) for target in targets]


def head_cost(job: Job, layout: Layout, tokens: float) -> tuple[float, float]:
    """Return the output projection's forward seconds, and the vocabulary loss's forward and backward seconds."""
    model, rates, engine = job.model, job.rates, job.engine
    fused = layout.fused_cross_entropy or (layout.compile if engine.compile else engine.chunks_loss)
    n = model.vocab / layout.tp
    lost = _rate_loss(tokens, n, model.hidden, job.constants)
    gemm = 2.0 * tokens * n * model.hidden * lost / (rates.head or rates.gemm)
    on_cpu = rates.device == "CPU"  # its constants contain what torch's kernels add (docs/decisions/0138)
    loss = tokens * n * ((6.0, 16.0) if on_cpu else engine.loss_bytes)[not fused] / rates.hbm
    return gemm, loss + (gemm if fused and engine.loss_again and not on_cpu else 0.0)
