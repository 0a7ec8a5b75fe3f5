"""TRL's and transformers' settings in this job's words: what each asks for here, or why it asks for nothing.

Surface: the fields of TrainingArguments (transformers 4.46 to 5.23), of SFTConfig, ModelConfig and ScriptArguments (TRL
0.9 to 1.16); `fsdp_config` as transformers and accelerate spell its members; DeepSpeed's JSON. Each is taken over into
a setting or into the layout, or named in a note because nothing depends on it, or refused with what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class EndedError(Exception):
    """The job ends before its last step, in order; the exit codes are those of sysexits.h."""

    code = 1
    status = "failed"  # in flight.json


class ConfigError(EndedError, ValueError):
    """A setting that cannot stand; the message names it, its value and what is allowed."""

    code, status = 2, "refused"


# Other names of a setting: of older releases, and transformers' of one that is the job's own.
RENAMED = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "assistant_only_loss": "completion_only_loss",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "use_liger": "fused_cross_entropy",
    "use_liger_kernel": "fused_cross_entropy",
    "torch_compile": "compile",
    "gradient_checkpointing": "activation_checkpointing",
}
MOST_SHOWN = 80  # characters of a value that is refused: lists of data sets run over pages
# Settings that are members of the layout.
IN_LAYOUT = {
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "gradient_accumulation",
    "fused_cross_entropy": "fused_cross_entropy",
    "compile": "compile",
}
_SPELLED = {member: name for name, member in IN_LAYOUT.items()} | {
    "precision": "bf16", "sharding": "fsdp", "checkpointing": "gradient_checkpointing",
    "offload": "fsdp_config.cpu_offload", "reshard_after_forward": "fsdp_config.reshard_after_forward",
}  # fmt: skip


def spelled(member: str, value: Any) -> str:
    """A member of the layout as a user writes it: "per_device_train_batch_size: 8"."""
    if member == "precision":
        return f"bf16: {'true' if value == 'bf16' else 'false'}"
    if member == "sharding":
        return f"fsdp: {'false' if value == 'ddp' else 'full_shard'}"
    if member == "checkpointing":
        return "layout.checkpointing: selective" if value == "selective" else f"gradient_checkpointing: {_yaml(value)}"
    return f"{_SPELLED.get(member, f'layout.{member}')}: {_yaml(value)}"


def _yaml(value: Any) -> str:
    return {True: "true", False: "false", "full": "true", "all": "true", "none": "false", None: "null"}.get(
        value if isinstance(value, bool | str | None) else "", str(value)
    )


# Nothing depends on them, whatever their value: why -> names.
_WITHOUT_EFFECT = {
    "eval_strategy decides": "do_eval",
    "checkpoints are named by step and never overwritten": "overwrite_output_dir save_on_each_node save_safetensors",
    "columns that the job does not need are never loaded": "remove_unused_columns label_names length_column_name",
    "rows are read and tokenised once, before the first step":
        "dataset_num_proc dataset_batch_size num_of_sequences chars_per_token dataloader_num_workers "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order",
    "rows that fill no whole batch wait for another epoch": "dataloader_drop_last",
    "batches are pinned where there is a GPU": "dataloader_pin_memory",
    "rows are shuffled anew in each epoch, as seed says": "shuffle_dataset",
    "padding takes no part in the loss": "pad_to_multiple_of padding_free",
    "rows of both splits are treated alike": "eval_packing",
    "logs and record go to output_dir, which names the run":
        "logging_dir run_name project trackio_space_id trackio_bucket_id trackio_static_space_id",
    "nothing is uploaded":
        "hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub_model_id "
        "push_to_hub_organization push_to_hub_token",
    "the bar is drawn on a terminal only": "disable_tqdm",
    "tokens/s and tokens are always reported": "include_tokens_per_second include_num_input_tokens_seen",
    "rank 0 reports": "log_on_each_node log_level_replica logging_nan_inf_filter logging_first_step",
    "GPUs are used where there are any": "no_cuda use_cpu use_mps_device use_ipex",
    "torchrun says who is which rank": "local_rank ddp_backend ddp_timeout _n_gpu mp_parameters",
    "gradients are averaged over the tokens of the whole batch":
        "average_tokens_across_devices accelerator_config split_batches dispatch_batches",
    "the wrapper of the layout sees to it":
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ignore_bias_buffers "
        "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    "recomputation is never reentrant":
        "gradient_checkpointing_kwargs gradient_checkpointing_use_reentrant activation_checkpointing_kwargs",
    "evaluation reports the loss":
        "prediction_loss_only eval_accumulation_steps eval_do_concat_batches eval_use_gather_object eval_on_start "
        "eval_delay include_for_metrics include_inputs_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval",
    "no checkpoint is chosen by a metric": "metric_for_best_model greater_is_better",
    "checkpoints hold what trains and its optimizer":
        "save_only_model ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint",
    "the job keeps no cache of keys": "use_cache",
    "memory is always measured": "skip_memory_metrics torch_empty_cache_steps debug tpu_metrics_debug tpu_num_cores",
    "bf16 says the precision": "fp16_opt_level fp16_backend half_precision_backend",
    "4-bit scales are quantised too, and blocks kept in 16 bits":
        "use_bnb_nested_quant bnb_4bit_quant_storage bnb_4bit_compute_dtype bnb_4bit_use_double_quant",
    "torch's own compiler in its own mode": "torch_compile_mode",
    "of Liger's kernels the job uses the fused cross-entropy alone": "liger_kernel_config",
    "of another kind of model or run": "router_aux_loss_coef past_index ray_scope dataset_kwargs",
}  # fmt: skip
NO_EFFECT = {name: why for why, names in _WITHOUT_EFFECT.items() for name in names.split()}
# One value of them, or a few, asks for what the job does: allowed, why.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "do_train": ((True,), "the job trains"),
    "do_predict": ((False,), "the job trains"),
    "trust_remote_code": ((False,), "code from a model folder is not run"),
    "optim": (("adamw_torch", "adamw_torch_fused"), "the optimizer is torch's fused AdamW"),
    "optim_args": (("", {}), "the optimizer takes adam_beta1, adam_beta2, adam_epsilon and weight_decay"),
    "optim_target_modules": ((), "the optimizer is torch's fused AdamW"),
    "adafactor": ((False,), "the optimizer is torch's fused AdamW"),
    "lr_scheduler_kwargs": (("", {}), "schedules have no further parameters"),
    "push_to_hub": ((False,), "nothing is uploaded"),
    "load_in_8bit": ((False,), "weights are kept in 32, 16 or, with load_in_4bit, 4 bits"),
    "bnb_4bit_quant_type": (("nf4",), "4-bit weights are NF4"),
    "use_rslora": ((False,), "adapters are LoRA's own"),
    "use_dora": ((False,), "adapters are LoRA's own"),
    "lora_task_type": (("CAUSAL_LM",), "the job trains causal language models"),
    "lora_target_parameters": (([],), "adapters stand beside modules: lora_target_modules"),
    "dataset_streaming": ((False,), "rows are read once, before the first step"),
    **dict.fromkeys(
        ("datasets", "dataset_mixture", "dataset_mixer", "dataset_splits", "dataset_configs"),
        ((), "the job trains on one data set: dataset_name, dataset_config, dataset_train_split"),
    ),
    "packing_strategy": (("bfd", "ffd"), "rows are packed whole, longest first"),
    "truncation_mode": (("keep_start",), "longer rows are cut at their end"),
    "chat_template_path": ((), "a Jinja file (.jinja) that is there; chat_template holds the template itself"),
    "eos_token": ((), "the tokenizer's own is used"),
    "pad_token": ((), "the tokenizer's own is used"),
    "loss_type": (("nll", "chunked_nll"), "the loss is the cross-entropy; fused_cross_entropy makes it in parts"),
    "label_smoothing_factor": ((0,), "the loss is the plain cross-entropy"),
    "neftune_noise_alpha": ((), "embeddings are trained without noise"),
    "activation_offloading": ((False,), "activations stay where they are: gradient_checkpointing makes them again"),
    "auto_find_batch_size": ((False,), "the plan chooses per_device_train_batch_size where it is left away"),
    "load_best_model_at_end": ((False,), "the last checkpoint is what is exported"),
    "full_determinism": ((False,), "the fastest kernels are used"),
    "torch_compile_backend": (("inductor",), "layers are compiled by torch's inductor"),
    "torchdynamo": (("inductor",), "layers are compiled by torch's inductor"),
    "jit_mode_eval": ((False,), "evaluation runs the model that trains"),
    "use_legacy_prediction_loop": ((False,), "evaluation runs the model that trains"),
}
# Names of other trainers' files (axolotl, LLaMA-Factory, torchtune), for the hint beside an unknown name.
ELSEWHERE = {
    "base_model": "model_name_or_path", "model": "model_name_or_path", "sequence_len": "max_length",
    "cutoff_len": "max_length", "max_seq_len": "max_length", "micro_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size", "num_epochs": "num_train_epochs", "epochs": "num_train_epochs",
    "lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "sample_packing": "packing", "adapter": "use_peft",
    "finetuning_type": "use_peft", "lora_rank": "lora_r", "lora_target": "lora_target_modules",
    "lora_target_linear": "lora_target_modules", "dataset": "dataset_name", "dataset_path": "dataset_name",
    "flash_attention": "attn_implementation", "flash_attn": "attn_implementation", "template": "chat_template",
    "val_set_size": "dataset_test_split", "saves_per_epoch": "save_strategy", "optimizer": "optim",
}  # fmt: skip

# what only the files of these have together, by their published examples
OTHERS = {
    "axolotl": ("base_model", "datasets"), "LLaMA-Factory": ("stage", "finetuning_type"),
    "torchtune": ("tokenizer", "checkpointer"), "NeMo": ("trainer", "exp_manager"),
    "nanotron": ("parallelism", "tokens"), "verl": ("actor_rollout_ref",),
    "accelerate": ("distributed_type",), "DeepSpeed": ("zero_optimization",),
}  # fmt: skip

_FSDP_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "auto_wrap", "offload")
# accelerate counts the strategies of torch's ShardingStrategy from 1
_FSDP_NUMBERS = dict(enumerate(("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"), 1))
_FSDP_MEMBERS = (
    "reshard_after_forward", "activation_checkpointing", "cpu_offload", "offload_params", "sharding_strategy",
)  # fmt: skip
# What fully_shard does by itself, or in one way only.
_FSDP_NO_EFFECT = frozenset({
    "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "use_orig_params", "sync_module_states",
    "limit_all_gathers", "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "state_dict_type",
    "cpu_ram_efficient_loading", "min_num_params", "mixed_precision_policy", "ignored_modules",
})  # fmt: skip
_ONE_RANK_GROUPS = {"tp": 1, "pp": 1, "cp": 1}  # every rank is a data-parallel one, unless the layout says otherwise
NODE = "node"  # of layout.dp_shard: the ranks of a node, however many the job comes to have

Note = Callable[[str], None]


# transformers' string_to_bool, which reads the texts of a file's truths
_TRUTHS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def truth(value: Any) -> Any:
    """A quoted "true" or "no" as the truth that transformers reads in it; anything else as it is."""
    return _TRUTHS.get(value.lower(), value) if isinstance(value, str) else value


def hint(name: str, known: Iterable[str]) -> str:
    """The names nearest to an unknown one, as the end of a sentence."""
    if name in ELSEWHERE:
        return f"; here it is {ELSEWHERE[name]}"
    close = difflib.get_close_matches(name, [*known], n=3)
    return f"; close: {', '.join(close)}" if close else ""


def without_effect(name: str, value: Any, note: Note) -> bool:
    """Whether a setting asks for nothing; a note says so, and a value that would ask for something is refused."""
    if name in NO_EFFECT:
        note(f"{name}: no effect, {NO_EFFECT[name]}")
        return True
    if name not in ONLY:
        return False
    allowed, why = ONLY[name]
    if any(isinstance(one, bool) for one in allowed):
        value = truth(value)
    if value is not None and not any(value == one and isinstance(value, bool) == isinstance(one, bool)
                                     for one in allowed):  # fmt: skip
        named = " or ".join(repr(one) for one in allowed if one not in ("", {}, []))
        shown = repr(value)
        shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
        raise ConfigError(f"{name}={shown}: {f'only {named}' if named else 'nothing'} is allowed: {why}")
    note(f"{name}: no effect, {why}")
    return True


def precision(raw: Mapping[str, Any], layout: dict[str, Any]) -> None:
    """bf16 and fp16 of the file as the layout's precision; neither says nothing."""
    flags = {}
    for name in ("bf16", "fp16"):
        value = truth(raw.get(name))
        if not isinstance(value, bool | None):
            raise ConfigError(f"{name}={value!r}: must be true or false")
        flags[name] = value
    if flags["fp16"]:
        raise ConfigError("fp16=true: not supported, allowed are bf16 and fp32; set bf16: true or bf16: false")
    if flags["bf16"] is not None:
        put(layout, "precision", "bf16" if flags["bf16"] else "fp32", "bf16")


def put(layout: dict[str, Any], member: str, value: Any, name: str) -> None:
    """A member of the layout, unless something else in the file says another value."""
    if layout.get(member, value) != value:
        raise ConfigError(
            f"{name} asks for {spelled(member, value)}, and the file says {spelled(member, layout[member])}"
        )
    layout[member] = value


def checkpointing(raw: Mapping[str, Any], layout: dict[str, Any]) -> None:
    """Recomputation by any of its names: on where one of them is on, as FSDP's stands for the Trainer's."""
    inside = raw.get("fsdp_config")
    places = {name: raw.get(name) for name in ("gradient_checkpointing", "activation_checkpointing")}
    for name in ("activation_checkpointing", "fsdp_activation_checkpointing"):
        if isinstance(inside, dict) and name in inside:
            places[f"fsdp_config.{name}"] = inside[name]
    flags = {name: truth(value) for name, value in places.items() if value is not None}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: must be true or false")
    if flags and not (any(flags.values()) and layout.get("checkpointing") == "selective"):
        put(layout, "checkpointing", "full" if any(flags.values()) else "none", next(iter(flags)))


def fsdp(raw: Mapping[str, Any], layout: dict[str, Any], note: Note) -> None:
    """`fsdp` and `fsdp_config` as members of the layout."""
    value, inside = raw.get("fsdp"), raw.get("fsdp_config")
    words = _fsdp_words(value)
    if inside is not None and not isinstance(inside, dict):
        raise ConfigError(f"fsdp_config={inside!r}: must be a mapping, or a file of one that is there")
    options = {str(key).removeprefix("fsdp_"): each for key, each in (inside or {}).items()}
    strategy = options.get("sharding_strategy")
    if strategy is not None and truth(value) is not False:
        strategy = _FSDP_NUMBERS.get(strategy, strategy)
        if not isinstance(strategy, str) or strategy.lower() not in _FSDP_NUMBERS.values():
            allowed = ", ".join(_FSDP_NUMBERS.values())
            raise ConfigError(f"fsdp_config.sharding_strategy={strategy!r}: allowed are {allowed}")
        words = [*(words or []), strategy.lower()]
    if words is not None:
        _sharded(words, layout, note, "fsdp" if value is not None else "fsdp_config.sharding_strategy")
    for name, each in options.items():
        _fsdp_member(name, each, layout, note)
    if (words is not None or options) and layout.get("sharding") == "zero3":
        # accelerate's defaults, where neither a word nor a member says otherwise: the plan may not choose here
        layout.setdefault("reshard_after_forward", True)
        layout.setdefault("offload", "none")


def _fsdp_words(value: Any) -> list[str] | None:
    """None where nothing is said: transformers writes an empty text or list for it."""
    if value is None or value in ("", []):
        return None
    value = truth(value)
    if isinstance(value, bool):
        return ["full_shard"] if value else ["no_shard"]
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"fsdp={value!r}: must be true, false, or words such as full_shard auto_wrap")
    words = [word.lower() for word in words]
    for word in words:
        if word not in _FSDP_WORDS:
            raise ConfigError(f"fsdp={value!r}: {word!r} is none of {', '.join(_FSDP_WORDS)}")
    return words or None


def _sharded(words: list[str], layout: dict[str, Any], note: Note, name: str) -> None:
    strategies = set(words) - {"auto_wrap", "offload"}
    if len(strategies) > 1:
        raise ConfigError(f"{name}: asks for {' and '.join(sorted(strategies))}: one of them is allowed")
    strategy = strategies.pop() if strategies else "full_shard"
    if strategy == "no_shard":
        put(layout, "sharding", "ddp", name)
    else:
        put(layout, "sharding", "zero3", name)
    if strategy.startswith("hybrid_shard") and not {"dp_replicate", "dp_shard"} & set(layout):
        layout["dp_shard"] = NODE
    if strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        put(layout, "reshard_after_forward", False, name)
    if "offload" in words:
        put(layout, "offload", "all", name)
    _only_data_parallel(layout)
    note(f"{name}: {' '.join(words)} is {spelled('sharding', layout['sharding'])} of torch's fully_shard"
         if strategy != "no_shard" else f"{name}: weights are not sharded")  # fmt: skip


def _only_data_parallel(layout: dict[str, Any]) -> None:
    for degree, one in _ONE_RANK_GROUPS.items():
        layout.setdefault(degree, one)
    if layout["sharding"] == "zero3" and "dp_shard" not in layout:
        layout.setdefault("dp_replicate", 1)


def _fsdp_member(name: str, value: Any, layout: dict[str, Any], note: Note) -> None:
    where = f"fsdp_config.{name}"
    if name in _FSDP_NO_EFFECT:
        note(f"{where}: no effect with fully_shard")
    elif name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        if truth(value):
            raise ConfigError(f"{where}={value!r}: only false is allowed: the job runs on GPUs and CPUs")
    elif name == "reshard_after_forward" and isinstance(truth(value), str):  # accelerate's FSDP1 names its strategy so
        _sharded(_fsdp_words(value) or [], layout, note, where)
    elif name in ("reshard_after_forward", "cpu_offload", "offload_params"):
        value = truth(value)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{where}={value!r}: must be true or false")
        if value is not None and name == "reshard_after_forward":
            put(layout, name, value, where)
        elif value is not None and not (value is False and layout.get("offload") == "all"):  # "offload" among the words
            put(layout, "offload", "all" if value else "none", where)
    elif name not in _FSDP_MEMBERS:
        raise ConfigError(f"unknown setting {where!r}{hint(name, [*_FSDP_MEMBERS, *_FSDP_NO_EFFECT])}")


_ZERO_NO_EFFECT = "DeepSpeed's own buffers and logs"
_DEEPSPEED_SECTIONS = (
    "zero_optimization", "bf16", "fp16", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "train_batch_size", "gradient_clipping", "optimizer", "scheduler",
)  # fmt: skip


def deepspeed(raw: Mapping[str, Any], values: dict[str, Any], layout: dict[str, Any], note: Note) -> None:
    """A DeepSpeed configuration as members of the layout: the job shards as its ZeRO stage does, by fully_shard."""
    config = raw.get("deepspeed")
    if config in (None, "", {}):
        return
    if not isinstance(config, dict):
        raise ConfigError(f"deepspeed={config!r}: must be a mapping, or a JSON file that is there")
    where = "deepspeed"
    zero = config.get("zero_optimization") or {}
    if not isinstance(zero, dict):
        raise ConfigError(f"{where}.zero_optimization={zero!r}: must be a mapping")
    stage = zero.get("stage", 0)
    if stage not in (0, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"{where}.zero_optimization.stage={stage!r}: allowed are 0, 2 and 3: fully_shard, which the "
                          "job runs in its place, always shards gradients too")  # fmt: skip
    put(layout, "sharding", "zero3" if stage else "ddp", f"{where}.zero_optimization.stage")
    if stage:
        put(layout, "reshard_after_forward", stage == 3, f"{where}.zero_optimization.stage")
    _only_data_parallel(layout)
    _deepspeed_offload(zero, layout, f"{where}.zero_optimization")
    for name, member in (("train_micro_batch_size_per_gpu", "micro_batch"),
                         ("gradient_accumulation_steps", "gradient_accumulation")):  # fmt: skip
        if config.get(name, "auto") != "auto":
            put(layout, member, config[name], f"{where}.{name}")
    if config.get("train_batch_size", "auto") != "auto":
        raise ConfigError(f"{where}.train_batch_size={config['train_batch_size']!r}: only 'auto' is allowed: "
                          "per_device_train_batch_size and gradient_accumulation_steps say it")  # fmt: skip
    if _enabled(config, "fp16"):
        raise ConfigError(f"{where}.fp16: not supported, allowed are bf16 and fp32; set bf16: true")
    if _enabled(config, "bf16"):
        put(layout, "precision", "bf16", f"{where}.bf16")
    clipping = config.get("gradient_clipping", "auto")
    if clipping != "auto":
        if raw.get("max_grad_norm", clipping) != clipping:
            raise ConfigError(f"{where}.gradient_clipping={clipping!r}: max_grad_norm says {raw['max_grad_norm']!r}")
        values["max_grad_norm"] = clipping
    _deepspeed_optimizer(config, where)
    _deepspeed_scheduler(config, raw, values, where, note)
    _deepspeed_alone({**config, **{f"zero_optimization.{name}": value for name, value in zero.items()}}, where)
    passed = sorted(set(config) - set(_DEEPSPEED_SECTIONS))
    note(f"{where}: ZeRO stage {stage} is run by torch's {'fully_shard' if stage else 'DDP'}, without DeepSpeed"
         + (f"; no effect: {', '.join(passed)} ({_ZERO_NO_EFFECT})" if passed else ""))  # fmt: skip


# What only DeepSpeed does, and memory or messages depend on; by the values that ask for nothing.
_DEEPSPEED_ALONE: dict[str, tuple[Any, ...]] = {
    "tensor_parallel": ({}, {"autotp_size": 0}, {"autotp_size": 1}), "sequence_parallel_size": (1,),
    "amp": ({}, {"enabled": False}), "elasticity": ({}, {"enabled": False}), "compression_training": ({},),
    "data_types": ({}, {"grad_accum_dtype": None}),
    "zero_optimization.zero_hpz_partition_size": (1,), "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.zero_quantized_weights": (False,), "zero_optimization.zero_quantized_gradients": (False,),
}  # fmt: skip


def _deepspeed_alone(config: Mapping[str, Any], where: str) -> None:
    for name, nothing in _DEEPSPEED_ALONE.items():
        if config.get(name) is not None and config[name] not in nothing:
            raise ConfigError(f"{where}.{name}={config[name]!r}: only {nothing[-1]!r} is allowed: torch's fully_shard, "
                              "which runs in place of ZeRO, has nothing of it")  # fmt: skip


def _enabled(config: Mapping[str, Any], name: str) -> bool:
    section = config.get(name)
    return isinstance(section, dict) and section.get("enabled") is True


def _deepspeed_offload(zero: Mapping[str, Any], layout: dict[str, Any], where: str) -> None:
    devices = {}
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) or {}
        device = section.get("device", "none") if isinstance(section, dict) else section
        if device not in ("cpu", "none", None):
            raise ConfigError(f"{where}.{name}.device={device!r}: allowed are cpu and none")
        devices[name] = device == "cpu"
    if len(set(devices.values())) > 1:
        raise ConfigError(
            f"{where}: offload_optimizer and offload_param must both be on the cpu, or neither: fully_shard moves "
            "weights and optimizer together"
        )
    if all(devices.values()):
        put(layout, "offload", "all", f"{where}.offload_param")
    else:
        layout.setdefault("offload", "none")


def _section(config: Mapping[str, Any], name: str) -> tuple[Any, bool]:
    """The type that a section names, and whether it leaves every parameter to the file's own settings."""
    section = config.get(name)
    kind = section.get("type") if isinstance(section, dict) else section
    parameters = (section.get("params") if isinstance(section, dict) else None) or {}
    return kind, isinstance(parameters, dict) and all(value == "auto" for value in parameters.values())


def _deepspeed_optimizer(config: Mapping[str, Any], where: str) -> None:
    kind, automatic = _section(config, "optimizer")
    if kind is not None and (kind not in ("Adam", "AdamW") or not automatic):
        raise ConfigError(f"{where}.optimizer: only AdamW with each parameter 'auto' is allowed: learning_rate, "
                          "adam_beta1, weight_decay ... decide")  # fmt: skip


# DeepSpeed's schedules by transformers' names of them (its DeepSpeed page: "Scheduler")
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"}


def _deepspeed_scheduler(
    config: Mapping[str, Any], raw: Mapping[str, Any], values: dict[str, Any], where: str, note: Note
) -> None:
    kind, automatic = _section(config, "scheduler")
    if kind is None:
        return
    if kind not in _SCHEDULES or not automatic:
        raise ConfigError(f"{where}.scheduler: only {' or '.join(_SCHEDULES)} with each parameter 'auto' is allowed: "
                          "learning_rate and warmup_steps decide")  # fmt: skip
    schedule = _SCHEDULES[kind]
    if raw.get("lr_scheduler_type", schedule) != schedule:
        raise ConfigError(f"{where}.scheduler={kind}: is {schedule}, and lr_scheduler_type says "
                          f"{raw['lr_scheduler_type']!r}")  # fmt: skip
    values["lr_scheduler_type"] = schedule
    note(f"{where}.scheduler: {kind} is lr_scheduler_type: {schedule}, with a linear warm-up")


_PARALLELISM = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tp_size": "tp", "cp_size": "cp"}


def parallelism(raw: Mapping[str, Any], layout: dict[str, Any], note: Note) -> None:
    """accelerate's ParallelismConfig."""
    config = raw.get("parallelism_config")
    if config is None:
        return
    if not isinstance(config, dict):
        raise ConfigError(f"parallelism_config={config!r}: must be a mapping")
    for key, value in config.items():
        name = str(key).removeprefix("parallelism_config_")
        if name in _PARALLELISM:
            put(layout, _PARALLELISM[name], value, f"parallelism_config.{name}")
        elif name in ("sp_size",) and value not in (None, 1):
            raise ConfigError(f"parallelism_config.{name}={value!r}: only 1 is allowed; cp_size splits the sequence")
        elif name in ("sp_size", "sp_backend", "cp_backend", "cp_handler", "sp_handler", "tp_handler"):
            note(f"parallelism_config.{name}: no effect")
        else:
            raise ConfigError(f"unknown setting 'parallelism_config.{name}'{hint(name, _PARALLELISM)}")


_MODEL_WORDS = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation",
                "revision": "model_revision"}  # fmt: skip


def model_words(raw: dict[str, Any], note: Note) -> dict[str, Any]:
    """The file with `model_init_kwargs` as settings of their own."""
    config = raw.get("model_init_kwargs")
    rest = {key: value for key, value in raw.items() if key != "model_init_kwargs"}
    if config is None:
        return rest
    if not isinstance(config, dict):
        raise ConfigError(f"model_init_kwargs={config!r}: must be a mapping")
    for name, value in config.items():
        if name in ("use_cache", "low_cpu_mem_usage", "device_map", "use_safetensors"):
            note(f"model_init_kwargs.{name}: no effect, the layout says where weights are")
        elif name == "trust_remote_code":
            without_effect(name, value, note)
        elif name not in _MODEL_WORDS:
            raise ConfigError(f"unknown setting 'model_init_kwargs.{name}'{hint(str(name), _MODEL_WORDS)}")
        elif rest.setdefault(_MODEL_WORDS[name], value) != value:
            raise ConfigError(f"model_init_kwargs.{name}={value!r}: {_MODEL_WORDS[name]} says another")
    return rest
