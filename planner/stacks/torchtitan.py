"""torchtitan: its traits, and a job configuration in TOML.

Surface: torchtitan's ParallelDims and config (sections training, parallelism, activation_checkpoint, compile).
"""

from __future__ import annotations

from typing import Any

from contracts.layout import Layout
from planner.advice import ExportRequest, Formats, refuse
from planner.forecast.engine import Fsdp, Share


class Torchtitan(Fsdp):
    """Its selective checkpointing keeps every second product of a layer, and attention's result.

    Only the compiler's async TP hides tensor-parallel traffic (benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
    """

    def hides_tensor_parallel(self, layout: Layout) -> bool:
        """Where it is compiled, which the export then asks for."""
        return layout.compile and super().hides_tensor_parallel(layout)

    def selective_activations(self, share: Share, boundary: float) -> float:
        """The layer's input; of q, k, v, o, w1, w3 and w2 the results of the first, third, fifth and seventh."""
        model = share.model
        if model.experts or model.kv_rank or model.linear_layers or not model.gated_mlp:
            return super().selective_activations(share, boundary)
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        kept = 2.0 * q + kv + model.ffn + model.hidden
        return boundary + share.tokens * share.element * kept / share.layout.tp


ENGINE = Torchtitan(
    name="torchtitan",
    can=frozenset({"ddp", "zero3", "hsdp", "tp", "sp", "pp", "cp", "ep"}),
    methods=frozenset({"full"}),
    eight_bits=("fp8",),
    compile=True,
    fused_cross_entropy=False,
    logits_bytes=10.0,
    compiled_logits_bytes=4.0,  # the compiled loss reads bf16 logits and writes their gradient
    ends_apart=True,
    tp_overlap=True,
    gathers_context=True,  # torch's context_parallel by default (_RotateMethod.ALL_GATHER)
)

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_MODELS = {"llama": "llama3", "qwen3": "qwen3"}


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)


def torchtitan_toml(request: ExportRequest) -> str:
    """The configuration; tokenizer, data set and checkpoints are the user's to set."""
    layout, train, model = request.layout, request.train, request.model
    reasons = []
    if layout.sharding in ("zero1", "zero2") and layout.dp_shard > 1:
        reasons.append(f"{layout.sharding}: its FSDP2 shards weights, gradients and optimizer")
    if train.method != "full":
        reasons.append(f"{train.method}: its LoRA is a converter in code, not in the TOML")
    if layout.offload == "optimizer":
        reasons.append("offload=optimizer: it offloads weights, gradients and optimizer together")
    if layout.tp > 1 and not layout.sequence_parallel:
        reasons.append("TP without sequence parallelism: its plans always shard the sequence")
    if model.family not in _MODELS:
        reasons.append(f"{model.family} models: the TOML names {', '.join(sorted(_MODELS.values()))} only")
    if len(set(layout.stage_layers)) > 2:
        reasons.append(f"stages of {layout.stage_layers}: it makes first and last stage lighter, no other")
    refuse("torchtitan", reasons)
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": _MODELS[model.family], "flavor": model.name.rsplit("-", 1)[-1]},
        "training": {
            "local_batch_size": layout.micro_batch * (layout.gradient_accumulation if layout.pp > 1 else 1),
            "global_batch_size": layout.global_batch,
            "seq_len": train.sequence_length,
            "steps": train.steps or 1000,
            "mixed_precision_param": "float32" if layout.precision == "fp32" else "bfloat16",
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": layout.offload == "all",
        },
        "parallelism": {
            "data_parallel_replicate_degree": layout.dp_replicate,
            "data_parallel_shard_degree": layout.dp_shard,
            "fsdp_reshard_after_forward": "always" if layout.reshard_after_forward else "never",
            "tensor_parallel_degree": layout.tp,
            "enable_async_tensor_parallel": layout.tp > 1 and layout.compile,
            "pipeline_parallel_degree": layout.pp,
            "context_parallel_degree": layout.cp,
        },
        "activation_checkpoint": {"mode": layout.checkpointing},
        "compile": {"enable": layout.compile},
    }
    if layout.pp > 1:
        sections["parallelism"] |= {
            "pipeline_parallel_schedule": _SCHEDULES[layout.schedule],
            "pipeline_parallel_microbatch_size": layout.micro_batch,
        }
        chunks = layout.stage_layers or (model.layers // (layout.pp * layout.virtual_stages),)
        most = max(chunks)
        sections["parallelism"] |= {
            "pipeline_parallel_layers_per_stage": most,
            "pipeline_parallel_first_stage_less_layers": most - chunks[0],
            "pipeline_parallel_last_stage_less_layers": most - chunks[-1],
        }
    if layout.ep > 1:
        sections["parallelism"]["expert_parallel_degree"] = layout.ep
    if layout.checkpointing == "selective":
        sections["activation_checkpoint"]["selective_ac_option"] = "op"
    if layout.precision == "fp8":
        sections["model"]["converters"] = "float8"
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines).replace('converters = "float8"', 'converters = ["float8"]')


FORMATS: Formats = {"torchtitan": ("torchtitan's job configuration (TOML)", torchtitan_toml)}
