"""Megatron-LM: its traits, and the arguments of pretrain_gpt.py.

Surface: megatron/training/arguments.py.
"""

from __future__ import annotations

from contracts.layout import Layout
from planner.advice import ExportRequest, Formats, refuse
from planner.forecast.engine import Engine, StateBytes
from planner.forecast.specs import ModelSpec

ENGINE = Engine(
    name="megatron",
    can=frozenset({"ddp", "zero1", "tp", "sp", "pp", "cp", "ep"}),
    methods=frozenset({"full"}),
    eight_bits=("fp8", "mxfp8"),
    copies_kv_heads=True,
    fused=True,
    attention="flash3",
    # --bf16 sets --accumulate-allreduce-grads-in-fp32 (megatron/training/arguments.py)
    states=StateBytes(2.0, 4.0, 12.0, copy=4.0),
    gradient_bytes=4,
    replica_gradient_bytes=4,
    logits_bytes=8.0,
    gradient_buffer=True,
    sends_parts=True,
    tp_overlap=True,
    selective_attention=True,
)


def _refusals(request: ExportRequest) -> list[str]:
    layout, train, model = request.layout, request.train, request.model
    reasons = []
    if train.method != "full":
        reasons.append(f"{train.method}: it has no adapters (Megatron-Bridge has)")
    if layout.sharding in ("zero2", "zero3") and layout.dp_shard > 1:
        reasons.append(f"{layout.family}: the distributed optimizer shards optimizer states only (zero1)")
    if layout.sharding == "zero1" and layout.dp_shard > 1 and layout.dp_replicate > 1:
        reasons.append("ZeRO-1 over part of the data-parallel ranks is not exported")
    if layout.offload == "all":
        reasons.append("offload=all: weights stay on the GPU")
    if layout.schedule == "gpipe" and layout.pp > 1:
        reasons.append("GPipe: its schedules are 1F1B and interleaved 1F1B")
    if model.family == "gemma2":
        reasons.append("gemma2: alternating windows and soft-capped logits are not arguments of pretrain_gpt.py")
    if model.family == "gemma":
        reasons.append("gemma: its MLPs are GeGLU, and what is exported is SwiGLU")
    if model.mlp_bias or (model.attention_bias and model.family not in ("gpt2", "qwen2", "qwen2_moe")):
        reasons.append("biases of single matrices: Megatron has them in all, in none, or in queries, keys and values")
    if model.shared_expert_ffn or model.dense_layers:
        reasons.append("a gated shared expert, or experts in some of the layers only, are not exported")
    if len(set(layout.stage_layers[1:-1])) > 1:
        reasons.append(f"stages of {layout.stage_layers}: only the first and the last may differ")
    return reasons


def megatron_arguments(request: ExportRequest) -> str:
    """One argument per line; data, tokenizer, learning rate and checkpoints are the user's to set."""
    refuse("Megatron-LM", _refusals(request))
    layout, model, train = request.layout, request.model, request.train
    positions = max(train.sequence_length, model.max_positions or 0)
    words = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        f"--kv-channels {model.head_dim}",
        f"--seq-length {train.sequence_length}",
        f"--max-position-embeddings {positions}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.global_batch}",
        "--use-mcore-models",
        "--transformer-impl transformer_engine",
    ]
    words += _model_words(model) + _layout_words(layout, model)
    return "\n".join(words) + "\n"


_PRECISION = {
    "bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"],
    "mxfp8": ["--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"],
}  # fmt: skip
_RECOMPUTE = {
    "full": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
    "selective": ["--recompute-granularity selective"],
}


def _model_words(model: ModelSpec) -> list[str]:
    words = []
    if model.kv_heads != model.heads:
        words += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    if model.family == "gpt2":
        words += ["--position-embedding-type learned_absolute", "--normalization LayerNorm"]
    else:
        words += ["--position-embedding-type rope", "--normalization RMSNorm", "--swiglu", "--disable-bias-linear"]
        if model.attention_bias:
            words.append("--add-qkv-bias")
    if model.family in ("qwen3", "qwen3_moe"):
        words.append("--qk-layernorm")
    if not model.tied_embeddings:
        words.append("--untie-embeddings-and-output-weights")
    return words


def _layout_words(layout: Layout, model: ModelSpec) -> list[str]:
    # the overlap is the forecast's; arguments.py has it only with sequence parallelism, and not by itself
    words = ["--sequence-parallel", "--tp-comm-overlap"] if ENGINE.hides_tensor_parallel(layout) else []
    if layout.pp > 1:
        words += _stage_words(layout, model.layers)
    if layout.sharding == "zero1" and layout.data_parallel > 1:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
                  "--grad-reduce-in-bf16"]  # fmt: skip
    elif layout.data_parallel > 1:
        words.append("--overlap-grad-reduce")
    if model.experts:
        words += [f"--num-experts {model.experts}", f"--moe-router-topk {model.experts_per_token}",
                  f"--moe-ffn-hidden-size {model.expert_ffn}", f"--expert-model-parallel-size {layout.ep}",
                  "--moe-grouped-gemm"]  # fmt: skip
    words += _RECOMPUTE.get(layout.checkpointing, []) + _PRECISION.get(layout.precision, [])
    if layout.fused_cross_entropy:
        words.append("--cross-entropy-loss-fusion")
    if layout.offload == "optimizer":
        words.append("--optimizer-cpu-offload")
    return words


def _stage_words(layout: Layout, layers: int) -> list[str]:
    """How layers are cut: of equal chunks the first and the last may give a layer to the embedding and to the loss."""
    words, stages = [], layout.pp * layout.virtual_stages
    if layout.virtual_stages > 1:
        words.append(f"--num-layers-per-virtual-pipeline-stage {-(-layers // stages)}")
        if layout.stage_layers:
            words.append("--account-for-loss-in-pipeline-split")
        if layout.stage_layers and layout.stage_layers[0] < max(layout.stage_layers):
            words.append("--account-for-embedding-in-pipeline-split")
    elif layout.stage_layers:
        words += [
            f"--decoder-first-pipeline-num-layers {layout.stage_layers[0]}",
            f"--decoder-last-pipeline-num-layers {layout.stage_layers[-1]}",
        ]
    return words


FORMATS: Formats = {"megatron": ("Megatron-LM arguments", megatron_arguments)}
