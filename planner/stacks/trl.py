"""TRL and accelerate: their traits, accelerate's file and TRL's YAML.

Surface: accelerate 1.15 ClusterConfig, FullyShardedDataParallelPlugin (FSDP2) and ParallelismConfig; transformers 5
TrainingArguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contracts.layout import EIGHT_BITS, Layout
from planner.advice import ExportRequest, Formats, refuse
from planner.forecast.engine import IN_HALF, Fsdp, Share, StateBytes
from planner.forecast.models import hub_id
from planner.forecast.specs import TrainSpec


def _sharded(layout: Layout) -> bool:
    return layout.dp_shard > 1 and layout.sharding == "zero3"


def _wrapped(layout: Layout) -> bool:
    return _sharded(layout) or layout.tp > 1 or layout.cp > 1


def _loaded_in_half(train: TrainSpec, layout: Layout) -> bool:
    """Whether what trains lies in the two bytes that it was loaded in: weights, gradients and AdamW's states.

    FSDP's trainable weights become fp32 (accelerate's fsdp2_prepare_model); nothing else changes their type. fp16 must
    be loaded in fp32: torch's GradScaler refuses fp16 gradients.
    """
    full = train.method == "full" and train.dtype != "float32"
    return full and layout.precision == "bf16" and not _wrapped(layout)


class Trl(Fsdp):
    """accelerate's FSDP, with fsdp_cpu_ram_efficient_loading: one rank reads the model and sends the others theirs.

    Without FSDP weights stay as loaded.
    """

    def state_bytes(self, share: Share) -> StateBytes:
        """As loaded, or FSDP's."""
        half = not share.in_fp32 and _loaded_in_half(share.train, share.layout)
        return Fsdp.state_bytes(replace(self, states=IN_HALF) if half else self, share)

    def loaded_bytes(self, share: Share) -> float:
        """Frozen weights too stay as loaded, under FSDP as well."""
        return 4.0 if share.train.dtype == "float32" else super().loaded_bytes(share)

    def casts(self, share: Share) -> float:
        """None of weights in half precision already; of frozen ones autocast keeps what a product has saved."""
        if share.adapters and share.train.dtype == "float32" and not (share.in_fp32 or self.in_units(share)):
            return 2.0 * (share.largest if share.layout.checkpointing == "full" else share.local)
        return 0.0 if _loaded_in_half(share.train, share.layout) else super().casts(share)

    def reduced_bytes(self, train: TrainSpec, layout: Layout) -> float:
        """DDP's gradients are of their weights' type."""
        return 2.0 if _loaded_in_half(train, layout) else super().reduced_bytes(train, layout)

    def host_load(self, file_bytes: float, layout: Layout, ranks: int) -> float:
        """The whole model in one rank's memory; without FSDP in each one's."""
        return file_bytes if _sharded(layout) else file_bytes * ranks


ENGINE = Trl(
    name="trl",
    can=frozenset({"ddp", "zero3", "hsdp", "tp", "cp"}),
    together=frozenset({"tp+dp"}),
    checkpointing=("none", "full"),
    offloads=("all",),
    interleaved=False,
    liger=True,
    # transformers' ForCausalLMLoss: the logits in 2 bytes, then in 4; log-softmax and the gradient, 4 each
    logits_bytes=14.0,
    merges_expert_adapters=True,
    splits_documents=True,  # packed rows carry positions, which flash attention takes for lengths
    gradient_bytes=2,  # accelerate's FullyShardedDataParallelPlugin.set_mixed_precision: reduce_dtype as param_dtype
    ddp_bucket_copies=True,  # accelerate leaves gradient_as_bucket_view at torch's default, which is off
)

_LAYER_CLASSES = {
    "llama": "LlamaDecoderLayer", "mistral": "MistralDecoderLayer", "mixtral": "MixtralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer",
    "gemma": "GemmaDecoderLayer", "gemma2": "Gemma2DecoderLayer", "gpt2": "GPT2Block", "phi3": "Phi3DecoderLayer",
}  # fmt: skip


def _refusals(request: ExportRequest) -> dict[str, bool]:
    layout = request.layout
    return {
        f"PP={layout.pp}: accelerate has no pipeline parallelism for training": layout.pp > 1,
        f"EP={layout.ep}: accelerate has no expert parallelism": layout.ep > 1,
        f"{layout.sharding}: FSDP2 shards weights too; use the deepspeed format":
            layout.sharding in ("zero1", "zero2") and layout.dp_shard > 1,
        "TP or CP with replication and no sharding: ParallelismConfig refuses it":
            (layout.tp > 1 or layout.cp > 1) and layout.dp_replicate > 1 and layout.dp_shard == 1,
        "offload=optimizer: FSDP2 offloads weights, gradients and optimizer together": layout.offload == "optimizer",
        f"{layout.precision} needs a recipe (te, ao or msamp) that this export does not choose":
            layout.precision in EIGHT_BITS,
        "FSDP without a GPU: accelerate silently runs DDP there": not request.on_gpu and _sharded(layout),
    }  # fmt: skip


def _fsdp(request: ExportRequest) -> dict[str, Any]:
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


def _dtype(request: ExportRequest) -> str:
    train, precision = request.train, request.layout.precision
    if train.dtype == "float32" or (train.method == "full" and precision == "fp16"):
        return "float32"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")


def accelerate_yaml(request: ExportRequest) -> str:
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
    if _wrapped(layout):
        data["distributed_type"] = "FSDP"
        data["fsdp_config"] = _fsdp(request)
    degrees = {"dp_replicate_size": layout.dp_replicate, "dp_shard_size": layout.dp_shard, "tp_size": layout.tp,
               "cp_size": layout.cp}  # fmt: skip
    if data["distributed_type"] == "FSDP" and (layout.dp_replicate > 1 or layout.tp > 1 or layout.cp > 1):
        data["parallelism_config"] = {f"parallelism_config_{key}": value for key, value in degrees.items()}
    import yaml

    return yaml.safe_dump(data, sort_keys=False)


def trl_yaml(request: ExportRequest) -> str:
    """Arguments of TRL's SFT script; launch it with the accelerate file where degrees other than FSDP's are used."""
    refuse("TRL", _refusals(request))
    layout, train = request.layout, request.train
    data: dict[str, Any] = {
        "model_name_or_path": hub_id(request.model.name) or request.model.name,
        "dtype": _dtype(request),
        "attn_implementation": {"flash": "flash_attention_2"}.get(train.attention, train.attention),
        "max_length": train.sequence_length,
        "packing": train.packing,
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        "bf16": layout.precision == "bf16",
        "fp16": layout.precision == "fp16",
        "torch_compile": layout.compile,
        "use_liger_kernel": layout.fused_cross_entropy and request.on_gpu,
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
    import yaml

    return yaml.safe_dump(data, sort_keys=False)


FORMATS: Formats = {
    "accelerate": ("accelerate's config file (YAML)", accelerate_yaml),
    "trl": ("TRL / transformers training arguments (YAML)", trl_yaml),
}
