"""Seconds that one layer computes: multiplications, attention, and what only moves memory.

Model: a multiplication of m x n x k runs at `gemm / (1 + a/m + b/n + c/k)`; the shape terms were fitted on 20,000
bf16 timings of A100 to B300 (ai-dynamo/aiconfigurator gemm_perf) and are edge losses of 128-wide tiles. Attention
runs at its own rate (arXiv 2307.08691, 2407.08608). Everything else is passes over HBM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from contracts.layout import EIGHT_BITS
from hardware.gpus import Gpu
from planner.forecast.engine import NF4_BYTES, NF4_SCALES, Engine
from planner.forecast.specs import ModelSpec, TrainSpec, attention_products, linear_products, mlp_width, weights

# What an unknown CPU core does in a float32 multiplication; wide, and said to be assumed. AVX2 at 2.5 GHz is
# 80 GFLOP/s per core at best, and small models reach a fraction.
ASSUMED_CPU_FLOPS_PER_CORE = 20e9
ASSUMED_CPU_MEMORY_BYTES_PER_SECOND = 10e9


_DELTA_CHUNK = 64.0  # tokens of a chunk in which the delta rule is a product of matrices (arXiv 2412.06464)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The few physical constants of the step-time forecast; docs/decisions/0022 gives the meaning of each."""

    rows_lost: float = 180.0  # a: rows of a multiplication at which half its rate is lost
    columns_lost: float = 190.0  # b
    depth_lost: float = 220.0  # c
    # A product whose columns or depth are no multiple of 64 half-precision words (128 bytes) takes this much longer on
    # tensor cores from Ampere on: NVIDIA's Matrix Multiplication Background; BLOOM's trials at hidden 14400 / TP 8.
    misaligned: float = 1.25
    sustained_ampere: float = 0.885  # of the best measured multiplication, held over minutes at the power limit
    sustained_hopper: float = 0.805
    sustained_blackwell: float = 0.77
    # Of each input of an fp8 product, and of its output's gradient: read in 16 bits, written in 8 by rows and by
    # columns (Transformer Engine).
    quantize_bytes: float = 4.0
    # In mxfp8 each copy has a byte of scale for 32 values, written in the order that the product reads; the products
    # themselves take longer: 7.161 ms for 6.812 in fp8, of inputs quantised before (docs/examples/gemm_profiling of
    # NVIDIA/TransformerEngine, 12 products of a layer on a B300).
    scale_bytes: float = 2.0 / 32.0
    block_scaled: float = 7.161 / 6.812
    attention_ampere: float = 0.70  # FlashAttention-2 over the matmul rate, long sequences, forward and backward
    attention_hopper: float = 0.42  # FlashAttention-2 on Hopper
    attention_hopper_3: float = 0.615  # FlashAttention-3, cuDNN 9
    attention_blackwell: float = 0.56
    attention_flash1: float = 0.53  # of FlashAttention-2's rate
    # Tokens of a sequence that runs attention at half its rate: FlashAttention-2 on A100, -3 on H100, causal, head of
    # 128, forward and backward, by the lengths of their papers' figures.
    attention_short: float = 480.0
    attention_short_3: float = 950.0
    attention_unfused: float = 0.45  # batched multiplications with the scores written to memory
    score_passes: float = 4.5  # passes over the score matrix, forward, where it is stored
    hbm_share: float = 0.75  # of the data sheet's bandwidth that streaming kernels reach
    hidden_passes_fused: float = 10.0  # reads and writes of a hidden-sized tensor per layer, forward
    hidden_passes_compiled: float = 14.0  # torch.compile fuses within a layer, not across its products
    hidden_passes_eager: float = 19.0
    # More with RMSNorm and rotary positions, as transformers' LlamaRMSNorm and apply_rotary_pos_emb run them in bf16:
    # 18 in place of 2 for each norm (fp32 copy, square, mean, product, bf16 copy, weight), 14 for queries and keys
    hidden_passes_rms: float = 46.0
    ffn_passes_fused: float = 3.0
    ffn_passes_eager: float = 5.0
    # 4-bit weights become 16-bit ones before each product. Of the data sheet's bandwidth the kernels that do so reach
    # 0.24 (bitsandbytes on A100, litgpt's tables of LoRA beside QLoRA), 0.16 (torchao on RTX 4090, torchtune's) and
    # 0.10 (GPTQ on A100, Qwen's).
    dequantize_share: float = 0.16
    dequantize_kernels: float = 3.0  # per product: the scales' own scales, their offset, the weights
    launch_seconds: float = 12e-6  # of the host, to start one operator of eager PyTorch; docs/decisions/0023
    kernels_eager: float = 50.0  # per layer, forward
    kernels_fused: float = 20.0
    kernels_routing: float = 25.0  # more per layer with experts: scores, top k, counts, permutations, all-to-alls
    # Transformer Engine's GroupedLinear starts each expert's two products by themselves, and in 8 bits their casts. 16
    # H100 with 8 experts each ran 150 kernels per layer and micro-batch (Megatron-Bridge, perf-moe-comm-overlap).
    kernels_expert: float = 2.0
    kernels_quantize: float = 4.0
    # Biases of experts, as gpt-oss has them, in Megatron-LM's TEGroupedMLP: `_apply_bias` adds each expert's bias times
    # the router's fp32 weight by itself and joins the results in fp32; the clamp of the gate is not fused with it. The
    # bytes pass memory per element of an expert's output and of its first product, forward and backward, as a
    # TorchDispatchMode counts them for these lines (megatron/core: transformer/moe/experts.py, fused_bias_geglu.py).
    expert_bias_bytes: float = 66.0
    clamped_gate_bytes: float = 23.0
    kernels_expert_bias: float = 2.0  # per expert: its product with the weights, its sum
    tp_hidden: float = 0.525  # share of the tensor-parallel traffic that overlap hides, where the stack overlaps
    overlap_loss: float = 0.155  # of the shorter of two overlapped things still shows: SMs and HBM are shared
    overlap_loss_network: float = 0.3  # the same of sharded weights and gradients that cross the network
    head_misalign: float = 2.5  # attention takes this much longer where head_dim is no multiple of 8
    lora_passes: float = 3.0  # over the output of an adapted product: adapter's result, sum, scale
    lora_inputs: float = 4.0  # over its input where not fused: dropout, cast, product
    lora_kernels: float = 12.0  # more per adapted product, forward, PEFT's Python included (docs/decisions/0023)
    unit_kernels: float = 200.0  # FSDP's hooks of one unit and pass, in starts of a kernel (docs/decisions/0023)


DEFAULT = Constants()
# A CPU's products know no tiles: 16 rows run at 0.7, 51 at 0.85, 128 at 0.95 of the best rate, whatever the columns and
# the depth. An adapter takes 0.8 ms of a step even beside 51 tokens, PEFT's Python included (docs/decisions/0023).
CPU = Constants(rows_lost=6.0, columns_lost=0.0, depth_lost=0.0, misaligned=1.0, hidden_passes_rms=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank computes with."""

    gemm: float  # FLOP/s of large multiplications in the precision of the run, sustained
    head: float | None = None  # of the output projection, which fp8 recipes leave in bf16; None: the same
    attention: float  # FLOP/s of the attention kernel
    hbm: float  # bytes/s of streaming kernels
    memory_bytes: float | None  # of one rank's device
    launch_seconds: float
    how: str  # "measured", "derived", "assumed"
    device: str
    attention_unfused: bool = False
    attention_short: float = DEFAULT.attention_short
    element_bytes: float = 2.0  # of an activation
    quantized_bytes: float = 0.0  # through memory for each value that is cast to fp8
    inputs: tuple[str, ...] = ()


def _shares(gpu: Gpu, kernel: str, constants: Constants) -> tuple[float, float, float]:
    """Attention's and multiplication's share of the best measured matmul rate, and attention's short length."""
    major = (gpu.compute_capability or (0, 0))[0]
    sustained, attention = constants.sustained_ampere, constants.attention_ampere
    newer = major >= 9 and "flash3" in (kernel, gpu.attention)
    if major == 9:
        sustained = constants.sustained_hopper
        attention = constants.attention_hopper_3 if newer else constants.attention_hopper
    elif major >= 10:
        sustained, attention = constants.sustained_blackwell, constants.attention_blackwell
    if kernel == "flash1":
        attention *= constants.attention_flash1
    elif kernel == "unfused":
        attention = constants.attention_unfused
    return attention, sustained, constants.attention_short_3 if newer else constants.attention_short


def gpu_rates(gpu: Gpu, train: TrainSpec, engine: Engine, precision: str, constants: Constants = DEFAULT) -> Rates:
    """Rates of a known GPU."""
    kernel = "unfused" if train.attention == "eager" else engine.attention
    share, sustained, short = _shares(gpu, kernel, constants)
    bf16 = gpu.matmul_bf16 * sustained
    attention = gpu.matmul_bf16 * share
    if precision == "bf16" and not gpu.bf16:
        bf16 = gpu.matmul_fp32 * 0.8  # no bf16 tensor cores before Ampere
        attention = bf16 * 0.4
    gemm = bf16
    quantized = 0.0
    if precision in EIGHT_BITS:
        quantized = constants.quantize_bytes + (constants.scale_bytes if precision == "mxfp8" else 0.0)
        gemm = (gpu.matmul_fp8 or gpu.matmul_bf16) * sustained
        gemm /= constants.block_scaled if precision == "mxfp8" else 1.0
    elif precision == "fp32":
        gemm = gpu.matmul_fp32 * 0.8
        attention = gemm * 0.4
    # what training keeps of the best multiplication was fitted on NVIDIA's generations only
    how = "derived" if gpu.measured and gpu.maker == "NVIDIA" else "assumed"
    return Rates(
        gemm=gemm,
        head=bf16 if precision in EIGHT_BITS else None,
        attention=attention,
        hbm=gpu.hbm_bytes_per_second * constants.hbm_share,
        memory_bytes=gpu.memory_bytes,
        launch_seconds=constants.launch_seconds,
        how=how,
        device=gpu.name,
        attention_unfused=kernel == "unfused",
        attention_short=short,
        element_bytes=4.0 if precision == "fp32" else 2.0,
        quantized_bytes=quantized,
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
    dequantize: float = 0.0  # once per pass over the weights, whatever the tokens
    merged: float = 0.0  # backward: gradients of experts that are merged with their adapters, whole


def _rate_loss(m: float, n: float, k: float, constants: Constants) -> float:
    aligned = n % 64 == 0 and k % 64 == 0
    lost = 1.0 + constants.rows_lost / m + constants.columns_lost / n + constants.depth_lost / k
    return lost if aligned else lost * constants.misaligned


def layer_cost(
    model: ModelSpec, tokens: float, sequence: float, tp: int, sequence_parallel: bool, rates: Rates, engine: Engine,
    *, ep: int = 1, lora_targets: tuple[str, ...] = (), compiled: bool = False, four_bit: bool = False,
    constants: Constants = DEFAULT,
) -> LayerCost:  # fmt: skip
    """Forward seconds of one layer for `tokens` on this rank, of sequences `sequence` long."""
    kinds = _kinds(model)
    if len(kinds) > 1:  # the mean over the layers
        costs = [
            layer_cost(kind, tokens, sequence, tp, sequence_parallel, rates, engine, ep=ep, lora_targets=lora_targets,
                       compiled=compiled, four_bit=four_bit, constants=constants)
            for kind, _ in kinds
        ]  # fmt: skip
        shares = [share for _, share in kinds]
        return LayerCost(*(sum(s * v for s, v in zip(shares, part, strict=True)) for part in zip(*costs, strict=True)))
    fused = engine.fused or compiled
    hidden_passes = constants.hidden_passes_eager + (constants.hidden_passes_rms if model.gated_mlp else 0.0)
    if fused:
        hidden_passes = constants.hidden_passes_fused if engine.fused else constants.hidden_passes_compiled
    ffn_passes = constants.ffn_passes_fused if fused else constants.ffn_passes_eager
    moved = tokens * rates.element_bytes * (
        hidden_passes * float(model.hidden) / (tp if sequence_parallel else 1) + ffn_passes * mlp_width(model) / tp
    )  # fmt: skip
    if rates.quantized_bytes:  # a third of it: the backward pass, which quantises the gradients, counts twice
        elements = sum(m * (n + k) * copies for m, n, k, copies in _shapes(model, tokens, tp, ep))
        moved += rates.quantized_bytes * elements / 3.0
    kernels = constants.kernels_fused if fused else constants.kernels_eager
    merged = 0.0
    if model.experts:
        moved += rates.element_bytes * tokens / (tp if ep > 1 else 1) * _routing_passes(model, ep) * model.hidden
        kernels += constants.kernels_routing
        if engine.fused:
            each = constants.kernels_expert + (constants.kernels_quantize if rates.quantized_bytes else 0.0)
            if model.family == "gpt_oss":  # a third of the bytes: the backward pass counts twice
                each += constants.kernels_expert_bias
                biased = (
                    constants.expert_bias_bytes * model.hidden + 2.0 * constants.clamped_gate_bytes * model.expert_ffn
                )
                moved += tokens / (tp if ep > 1 else 1) * model.experts_per_token * biased / 3.0
            kernels += each * model.experts / ep
        if engine.merges_expert_adapters and {"gate_proj", "up_proj", "down_proj"} & set(lora_targets):
            # Experts are read and written with their adapters added; twice that, backward, for their gradients.
            moved += 2.0 * rates.element_bytes * weights(model).routed_per_layer / max(tp, ep)
            merged = _seconds_of_products(_expert_shapes(model, tokens, tp, ep), rates, constants)
    for into, out in _adapted(model, tp, lora_targets):
        inputs = 1.0 if fused else constants.lora_inputs
        moved += tokens * rates.element_bytes * (inputs * into + constants.lora_passes * out)
        kernels += constants.lora_kernels
    dequantize = 0.0
    if four_bit:
        products = [into * out * copies for _, out, into, copies in _shapes(model, tokens, tp, ep)]
        kernels += constants.dequantize_kernels * len(products)
        share = constants.dequantize_share / constants.hbm_share
        dequantize = sum(products) * (NF4_BYTES + NF4_SCALES + rates.element_bytes) / (rates.hbm * share)
    return LayerCost(
        _seconds_of_products(_shapes(model, tokens, tp, ep), rates, constants),
        _attention(model, tokens, sequence, tp, rates, constants),
        moved / rates.hbm,
        kernels * rates.launch_seconds,
        dequantize,
        merged,
    )


def _kinds(model: ModelSpec) -> list[tuple[ModelSpec, float]]:
    """A model of each kind of layer that this one has, and the kind's share of the layers."""
    kinds = [(model, 1.0)]
    if model.dense_layers:
        share = model.dense_layers / model.layers
        plain = replace(model, dense_layers=0)
        kinds = [(plain, 1.0 - share), (replace(plain, experts=0, experts_per_token=0), share)]
    if 0 < model.linear_layers < model.layers:
        share = model.linear_layers / model.layers
        kinds = [
            pair for kind, of in kinds
            for pair in ((replace(kind, linear_layers=0), of * (1.0 - share)),
                         (replace(kind, linear_layers=kind.layers), of * share))
        ]  # fmt: skip
    return kinds


def _routing_passes(model: ModelSpec, ep: int) -> float:
    """Reads and writes of a hidden-sized tensor that bring tokens to their experts and back, forward.

    Tokens are copied in the order of their experts and summed back; between ranks the all-to-all delivers them in the
    order of the senders, so a rank with several experts sorts them again, both ways.
    """
    k = float(model.experts_per_token)
    return 2.0 * (k + 1.0) + (4.0 * k if 1 < ep < model.experts else 0.0)


_Product = tuple[float, float, float, int]  # rows, columns, depth, and how many


def _seconds_of_products(shapes: Sequence[_Product], rates: Rates, constants: Constants) -> float:
    """Seconds of multiplications, each longer by what its shape loses."""
    return sum(2.0 * m * n * k * c * _rate_loss(m, n, k, constants) for m, n, k, c in shapes) / rates.gemm


def _shapes(model: ModelSpec, tokens: float, tp: int, ep: int) -> tuple[_Product, ...]:
    """A layer's multiplications on one rank."""
    attention = linear_products(model, tp) if model.linear_layers else attention_products(model, tp)
    shapes = (*((tokens, out, into, 1) for into, out in attention), *_expert_shapes(model, tokens, tp, ep))
    if model.experts and model.shared_expert_ffn:
        h, shared = float(model.hidden), model.shared_expert_ffn / tp
        shapes += ((tokens, shared * (2 if model.gated_mlp else 1), h, 1), (tokens, h, shared, 1))
    return shapes


def _expert_shapes(model: ModelSpec, tokens: float, tp: int, ep: int) -> tuple[_Product, ...]:
    """Those of the MLP, or of the routed experts in its place."""
    h, width = float(model.hidden), model.ffn / tp
    rows, copies = tokens, 1
    if model.experts:  # one of the local experts, balanced, and how many there are; see engine.share_of for TP
        width = model.expert_ffn / (tp if ep == 1 else 1)
        rows = tokens / (tp if ep > 1 else 1) * model.experts_per_token / model.experts * ep
        copies = max(1, model.experts // ep)
    return (rows, width * (2 if model.gated_mlp else 1), h, copies), (rows, h, width, copies)


def _attention(model: ModelSpec, tokens: float, sequence: float, tp: int, rates: Rates, constants: Constants) -> float:
    """Seconds of the attention kernel."""
    if model.linear_layers:  # gated delta rule: a state of keys by values per head, updated and read in chunks
        state = model.linear_key_width * model.linear_value_width / model.linear_heads / tp
        chunks = _DELTA_CHUNK * (model.linear_key_width + model.linear_value_width) / tp
        return 2.0 * tokens * (4.0 * state + chunks) / rates.attention
    window = _window(model, sequence)
    seconds = 2.0 * tokens * window * model.heads / tp * (model.head_dim + (model.value_dim or model.head_dim))
    seconds /= rates.attention
    if model.head_dim % 8:
        seconds *= constants.head_misalign
    if rates.attention_unfused:
        return seconds + 2.0 * constants.score_passes * tokens * window * (model.heads / tp) / rates.hbm
    # Causal: the upper triangle is skipped, but for the tiles on the diagonal.
    return seconds * (0.5 * (1.0 + rates.attention_short / window))


def _window(model: ModelSpec, sequence: float) -> float:
    """Twice the keys that a token meets, the mean over tokens and layers: the length where attention is causal.

    In a window of w of s tokens it meets w - w^2 / 2s; Llama 4 cuts the sequence in pieces of w in its place.
    """
    if not model.sliding_window or model.sliding_window >= sequence:
        return sequence
    w = float(model.sliding_window)
    within = w if model.family == "llama4" else 2.0 * w - w * w / sequence
    sliding = model.sliding_layers
    if sliding is None:  # of Gemma 2's layers every other is global
        sliding = model.layers // 2 if model.family == "gemma2" else model.layers
    return within + (sequence - within) * (1.0 - sliding / model.layers)


def _adapted(model: ModelSpec, tp: int, targets: tuple[str, ...]) -> list[tuple[float, float]]:
    """Input and output columns of each adapted product."""
    h, q = float(model.hidden), model.heads * model.head_dim / tp
    kv = model.kv_heads * model.head_dim / min(tp, model.kv_heads)
    width = model.experts_per_token * model.expert_ffn / tp if model.experts else model.ffn / tp
    sides = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h), "gate_proj": (h, width),
             "up_proj": (h, width), "down_proj": (width, h)}  # fmt: skip
    return [sides.get(target, (0.0, 0.0)) for target in targets]


def head_cost(
    model: ModelSpec, tokens: float, tp: int, rates: Rates, engine: Engine, *, fused: bool,
    constants: Constants = DEFAULT,
) -> tuple[float, float]:  # fmt: skip
    """Forward seconds of the output projection, and forward-and-backward seconds of the loss over the vocabulary."""
    n = model.vocab / tp
    gemm = 2.0 * tokens * n * model.hidden * _rate_loss(tokens, n, model.hidden, constants) / (rates.head or rates.gemm)
    made = Engine if rates.device == "CPU" else engine  # a CPU's constants have it in them (docs/decisions/0023)
    in_parts, whole = made.loss_bytes
    loss = tokens * n * (in_parts if fused else whole) / rates.hbm
    return gemm, loss + (gemm if fused and made.loss_again else 0.0)
