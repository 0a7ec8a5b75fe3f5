"""Exports for the Hugging Face world: accelerate's file, TRL's YAML, DeepSpeed's JSON.

Surface: accelerate 1.15 ClusterConfig, FullyShardedDataParallelPlugin (FSDP2) and ParallelismConfig; transformers 5
TrainingArguments; DeepSpeed's configuration JSON with transformers' "auto" values.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from contracts.layout import Layout
from planner.exports.frameworks import Request, refuse
from planner.forecast.models import hub_id

# With weights on the host the GPU holds what is in flight: 1e8 weights live (200 MB), buckets and prefetch of 5e7.
_OFFLOADED_LIVE = 1e8
_OFFLOADED_BUCKET = 5e7
# DeepSpeed's own defaults where the weights stay on the GPU (deepspeed/runtime/zero/config.py).
_LIVE, _BUCKET = 1e9, 5e8

_LAYER_CLASSES = {
    "llama": "LlamaDecoderLayer", "mistral": "MistralDecoderLayer", "mixtral": "MixtralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer",
    "gemma": "GemmaDecoderLayer", "gemma2": "Gemma2DecoderLayer", "gpt2": "GPT2Block", "phi3": "Phi3DecoderLayer",
}  # fmt: skip


def _sharded(layout: Layout) -> bool:
    return layout.dp_shard > 1 and layout.sharding == "zero3"


def _refusals(request: Request) -> list[str]:
    layout, reasons = request.layout, []
    if layout.pp > 1:
        reasons.append(f"PP={layout.pp}: accelerate has no pipeline parallelism for training")
    if layout.ep > 1:
        reasons.append(f"EP={layout.ep}: accelerate has no expert parallelism")
    if layout.sharding in ("zero1", "zero2") and layout.dp_shard > 1:
        reasons.append(f"{layout.sharding}: FSDP2 shards weights too; use the deepspeed format")
    if (layout.tp > 1 or layout.cp > 1) and layout.dp_replicate > 1 and layout.dp_shard == 1:
        reasons.append("TP or CP with replication and no sharding: ParallelismConfig refuses it")
    if layout.offload == "optimizer":
        reasons.append("offload=optimizer: FSDP2 offloads weights, gradients and optimizer together")
    if layout.precision == "fp8":
        reasons.append("fp8 needs a recipe of its own (te, ao or msamp) that this export does not choose")
    if not request.on_gpu and _sharded(layout):
        reasons.append("FSDP without a GPU: accelerate silently runs DDP there")
    return reasons


def _fsdp(request: Request) -> dict[str, Any]:
    layout = request.layout
    config: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.reshard_after_forward,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": layout.checkpointing != "none",
        "fsdp_offload_params": layout.offload == "all",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
    wrap = _LAYER_CLASSES.get(request.model.family)
    if wrap:
        config["fsdp_transformer_layer_cls_to_wrap"] = wrap
    return config


def _precision(layout: Layout) -> str:
    return {"fp32": "no"}.get(layout.precision, layout.precision)


def accelerate_yaml(request: Request) -> str:
    """accelerate's default_config.yaml for one machine; machine_rank differs on each."""
    refuse("accelerate", _refusals(request))
    layout = request.layout
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if layout.world_size > 1 else "NO",
        "mixed_precision": _precision(layout),
        "num_machines": request.nodes,
        "num_processes": layout.world_size,
        "machine_rank": 0,
        "rdzv_backend": "c10d" if request.nodes > 1 else "static",
        "same_network": True,
        "main_training_function": "main",
        "use_cpu": not request.on_gpu,
    }
    if _sharded(layout) or layout.tp > 1 or layout.cp > 1:
        data["distributed_type"] = "FSDP"
        data["fsdp_config"] = _fsdp(request)
    degrees = {"dp_replicate_size": layout.dp_replicate, "dp_shard_size": layout.dp_shard, "tp_size": layout.tp,
               "cp_size": layout.cp}  # fmt: skip
    if data["distributed_type"] == "FSDP" and (layout.dp_replicate > 1 or layout.tp > 1 or layout.cp > 1):
        data["parallelism_config"] = {f"parallelism_config_{key}": value for key, value in degrees.items()}
    return yaml.safe_dump(data, sort_keys=False)


def trl_yaml(request: Request) -> str:
    """Arguments of TRL's SFT script; launch it with the accelerate file where degrees other than FSDP's are used."""
    reasons = _refusals(request)
    layout, train = request.layout, request.train
    refuse("TRL", reasons)
    data: dict[str, Any] = {
        "model_name_or_path": hub_id(request.model.name) or request.model.name,
        "dtype": "bfloat16" if layout.precision == "bf16" else "float16" if layout.precision == "fp16" else "float32",
        "attn_implementation": {"flash": "flash_attention_2"}.get(train.attention, train.attention),
        "max_length": train.sequence_length,
        "packing": train.packing,
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        "bf16": layout.precision == "bf16",
        "fp16": layout.precision == "fp16",
        "torch_compile": layout.compile,
    }
    if train.steps is not None:
        data["max_steps"] = train.steps
    if train.method != "full":
        data |= {"use_peft": True, "lora_r": train.lora_rank, "lora_target_modules": list(train.lora_targets)}
    if train.method == "qlora":
        data["load_in_4bit"] = True
    if _sharded(layout):
        data["fsdp"] = True
        data["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": layout.reshard_after_forward,
            "activation_checkpointing": layout.checkpointing != "none",
            "cpu_offload": layout.offload == "all",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        data["gradient_checkpointing"] = False  # FSDP's own is used: both together recompute twice
    else:
        data["gradient_checkpointing"] = layout.checkpointing != "none"
    return yaml.safe_dump(data, sort_keys=False)


def deepspeed_json(request: Request) -> str:
    """DeepSpeed's JSON; batch sizes are "auto", so that transformers fills in its own arguments."""
    layout, reasons = request.layout, []
    for word, degree in (("TP", layout.tp), ("PP", layout.pp), ("CP", layout.cp), ("EP", layout.ep)):
        if degree > 1:
            reasons.append(f"{word}={degree}: ZeRO through transformers is data parallelism only")
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        reasons.append(f"HSDP {layout.dp_replicate} x {layout.dp_shard}: ZeRO shards over all ranks")
    if layout.precision == "fp8":
        reasons.append("fp8 is not among its precisions")
    if layout.sharding == "zero3" and not layout.reshard_after_forward and layout.dp_shard > 1:
        reasons.append("reshard_after_forward=false: ZeRO-3 releases weights by its reuse distance")
    refuse("DeepSpeed", reasons)
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[layout.sharding] if layout.dp_shard > 1 else 0
    zero: dict[str, Any] = {"stage": stage}
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    bucket, live = _BUCKET, _LIVE
    if layout.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        bucket, live = _OFFLOADED_BUCKET, _OFFLOADED_LIVE
    if stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if stage == 3:
        zero |= {
            "sub_group_size": live,
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket if layout.offload == "all" else 5e7,
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    elif stage:
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    data = {
        "fp16": {"enabled": layout.precision == "fp16"},
        "bf16": {"enabled": layout.precision == "bf16"},
        "zero_optimization": zero,
        "gradient_clipping": "auto",
        "steps_per_print": 10,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "wall_clock_breakdown": False,
    }
    return json.dumps(data, indent=4) + "\n"
