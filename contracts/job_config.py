"""The fine-tune job's settings: one YAML file, read into one dataclass by the launcher and by the job alike.

Surface: the YAML of TRL's `sft.py` scripts (TrlParser((ScriptArguments, SFTConfig, ModelConfig))), in today's
names and in the older ones, plus a `layout:` mapping in the words of `contracts.layout`.
"""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from contracts import bounded
from contracts.yaml_text import YamlTextError, load_all

MAX_FILE_BYTES = 1 << 20  # settings are hand-written: anything larger is the wrong file
MAX_ALIASES = 16  # of YAML: aliases of aliases multiply
DEFAULT_CONFIG = Path(__file__).parent / "default.yaml"  # the embedded job's


class EndedError(Exception):
    """The job ends before its last step, in order; the exit codes are those of sysexits.h."""

    code = 1
    status = "failed"  # in flight.json


class ConfigError(EndedError, ValueError):
    """A setting that cannot stand; the message names it, its value and what is allowed."""

    code, status = 2, "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Every setting of the job; None means that the plan, or the machine, decides."""

    # model
    model_name_or_path: str = "random:tiny-llama"  # hub id, folder, or random:<preset or folder with config.json>
    model_revision: str = "main"
    tokenizer_name: str | None = None  # None: the model's own; "builtin:bytes" needs no download
    tokenizer_revision: str = "main"  # of tokenizer_name; the model's own comes from its own revision
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # stored type of frozen weights
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    fused_cross_entropy: bool | None = None
    load_in_4bit: bool = False
    chat_template: str | None = None  # text of a Jinja template; None: the tokenizer's own
    # LoRA
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: float = 32
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    lora_modules_to_save: tuple[str, ...] = ()
    # data
    dataset_name: str = "synthetic:arithmetic"  # hub id, .jsonl/.json/.parquet, folder, or synthetic:arithmetic
    dataset_revision: str = "main"
    dataset_config: str | None = None  # the part of a data set that has several, as GSM8K's "main"
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_text_field: str = "text"
    dataset_rows: int | None = None  # at most so many rows of each split
    max_length: int = 1024
    packing: bool = False
    train_sampling_strategy: Literal["random", "group_by_length"] = "random"
    completion_only_loss: bool = False  # loss on answers only
    # training
    num_train_epochs: float = 3.0
    max_steps: int | None = None
    per_device_train_batch_size: int | None = None
    per_device_eval_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    eval_strategy: Literal["no", "epoch", "steps"] = "no"
    eval_steps: int = 500
    bf16: bool | None = None
    tf32: bool | None = None
    learning_rate: float = 2e-5
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = "linear"
    warmup_steps: float = 0  # below 1: a share of all steps
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no clipping
    seed: int = 42
    # parallelism
    layout: dict[str, Any] = field(default_factory=dict)  # fields of contracts.layout.Layout
    fsdp: bool | None = None
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    activation_checkpointing: bool | None = None
    compile: bool | None = None
    # checkpoints and reports
    output_dir: str = "finetune-output"
    save_strategy: Literal["no", "epoch", "steps"] = "epoch"
    save_steps: int = 500
    save_total_limit: int = 1
    resume_from_checkpoint: str | bool | None = "auto"  # "auto": the newest in output_dir, if any
    export_merged: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    logging_strategy: Literal["no", "steps", "epoch"] = "steps"
    logging_steps: int = 10
    report_to: tuple[str, ...] = ()
    profile_steps: int = 2  # steps under the profiler for the communication share; 0: none

    def __post_init__(self) -> None:
        low = {
            "lora_r": 1, "lora_alpha": 0, "max_length": 2, "num_train_epochs": 0, "learning_rate": 0, "warmup_steps": 0,
            "save_steps": 1, "save_total_limit": 1, "logging_steps": 1, "eval_steps": 1, "max_grad_norm": 0,
            "weight_decay": 0, "profile_steps": 0, "max_steps": 1, "dataset_rows": 1, "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1,
        }  # fmt: skip
        for name, least in low.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value!r}: must be at least {least}")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout={self.lora_dropout!r}: must be in [0, 1)")
        for target in self.report_to:
            if target not in ("tensorboard", "none"):
                raise ConfigError(
                    f"report_to={target!r}: allowed are tensorboard, none (metrics.jsonl is always written)"
                )
        if self.load_in_4bit and not self.use_peft:
            raise ConfigError("load_in_4bit=true: 4-bit weights cannot be trained; set use_peft: true")


# Names of older transformers and TRL releases -> (today's name, remark).
RENAMED = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "use_liger": "fused_cross_entropy",
    "use_liger_kernel": "fused_cross_entropy",
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "assistant_only_loss": "completion_only_loss",
    "torch_compile": "compile",
    "warmup_ratio": "warmup_steps",
    "fp16": "layout.precision",
}
# Accepted because they ask for what happens anyway: (the only value that stands or None for any, why).
NO_EFFECT: dict[str, tuple[Any, str]] = {
    "do_train": (True, "the job trains"),
    "do_eval": (None, "eval_strategy decides"),
    "overwrite_output_dir": (None, "checkpoints are named by step and never overwritten"),
    "save_safetensors": (True, "adapters and exports are safetensors"),
    "trust_remote_code": (False, "code from a model folder is not run"),
    "remove_unused_columns": (None, "columns that the job does not need are never loaded"),
    "dataloader_num_workers": (None, "rows are tokenised once, before the first step"),
    "dataloader_pin_memory": (None, "batches are pinned where there is a GPU"),
    "ddp_find_unused_parameters": (False, "every trainable parameter is used"),
    "optim": ("adamw_torch", "the optimizer is torch's AdamW"),
    "logging_dir": (None, "logs go to output_dir"),
    "run_name": (None, "output_dir names the run"),
    "push_to_hub": (False, "nothing is uploaded"),
    "disable_tqdm": (None, "the bar is drawn on a terminal only"),
    "include_tokens_per_second": (None, "tokens/s is always reported"),
    "no_cuda": (None, "GPUs are used where there are any"),
    "use_cpu": (None, "GPUs are used where there are any"),
}
# FSDP1's options that fully_shard does by itself.
FSDP_NO_EFFECT = frozenset({
    "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers", "version",
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "state_dict_type", "cpu_ram_efficient_loading",
    "min_num_params",
})  # fmt: skip


def read_config(path: Path | None, overrides: typing.Sequence[str] = ()) -> tuple[JobConfig, dict[str, Any], list[str]]:
    """Read the YAML and the `key=value` overrides; returns the config, what was set explicitly, and notes."""
    return parse_config(with_overrides(read_mapping(path or DEFAULT_CONFIG), overrides))


def with_overrides(raw: dict[str, Any], overrides: typing.Iterable[str]) -> dict[str, Any]:
    """The mapping with each `key=value` or `key.member=value` put over it. Raises ConfigError that names the word."""
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"override {text!r}: must be key=value")
        target = raw
        *parents, last = key.split(".")
        for name in parents:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise ConfigError(f"override {text!r}: {name} is not a mapping")
        try:
            documents = load_all(value, most_aliases=0)
        except YamlTextError as error:
            raise ConfigError(f"override {text!r}: {error}") from None
        target[last] = documents[0] if documents else None
    return raw


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that holds one mapping."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    try:
        text = bounded.read_text(path, MAX_FILE_BYTES)
    except bounded.TooLargeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    return parse_mapping(text, path)


def parse_mapping(text: str, where: object) -> dict[str, Any]:
    """YAML or JSON text that holds one mapping."""
    try:
        documents = load_all(text, most_aliases=MAX_ALIASES)
    except YamlTextError as error:
        raise ConfigError(f"{where}: {error}") from None
    if len(documents) > 1:
        raise ConfigError(f"{where}: holds {len(documents)} YAML documents, one is allowed")
    data = documents[0] if documents else None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: must hold a mapping, holds {type(data).__name__}")
    return data


def parse_config(raw: dict[str, Any]) -> tuple[JobConfig, dict[str, Any], list[str]]:
    """Settings from a mapping, with a note for each old name."""
    notes: list[str] = []
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key)
        if name in NO_EFFECT:
            wanted, why = NO_EFFECT[name]
            if wanted is not None and value != wanted:
                raise ConfigError(f"{name}={value!r}: only {wanted!r} is allowed: {why}")
            notes.append(f"{name}: no effect, {why}")
            continue
        if name == "fp16":
            if value:
                raise ConfigError("fp16=true: not supported; set bf16: true")
            continue
        if name == "fsdp" and not isinstance(value, bool | None):
            _old_fsdp(value, values, notes)
            continue
        if name in RENAMED:
            new = RENAMED[name]
            if new in raw:
                raise ConfigError(f"{name} is the old name of {new}: both are set")
            notes.append(f"{name} is now {new}")
            name = new
        _put(values, name, value)
    _fsdp_config(values, notes)
    return JobConfig(**values), values, notes


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    known = _types()
    if name not in known:
        close = difflib.get_close_matches(name, [*known, *RENAMED], n=3)
        hint = f"; close: {', '.join(close)}" if close else ""
        raise ConfigError(f"unknown setting {name!r}{hint}")
    values[name] = _convert(name, value, known[name])


def _types() -> dict[str, Any]:
    return typing.get_type_hints(JobConfig)


def _convert(name: str, value: Any, kind: Any) -> Any:
    """The value in the type of its field; YAML writes 2e-4 as text, and lists for tuples."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for option in options:
        if (found := _as(option, value)) is not _MISFIT:
            return found
    allowed = " or ".join(_spell(option) for option in options)
    raise ConfigError(f"{name}={value!r}: must be {allowed}")


_MISFIT = object()


def _as(option: Any, value: Any) -> Any:
    """The value as one of the types of a field; _MISFIT where it is not of it."""
    origin = typing.get_origin(option)
    if origin is Literal:
        choices = typing.get_args(option)
        if value is False and "no" in choices:
            return "no"  # YAML 1.1 reads a bare no as false
        return value if value in choices else _MISFIT
    if origin is tuple:
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        return (value,) if isinstance(value, str) else _MISFIT
    if origin is dict:
        return dict(value or {}) if isinstance(value, dict | None) else _MISFIT
    if option is type(None):
        return None if value is None else _MISFIT
    return _plain(option, value)


def _plain(option: Any, value: Any) -> Any:
    if isinstance(value, bool):
        return value if option is bool else _MISFIT
    if option in (str, int) and isinstance(value, option):
        return value
    if option is float and isinstance(value, int | float | str):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return _MISFIT
    return _MISFIT


def _spell(option: Any) -> str:
    if option is type(None):
        return "null"
    if typing.get_origin(option) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(option)))
    if typing.get_origin(option) is tuple:
        return "a list of names"
    names = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "dict": "a mapping"}
    return names.get((typing.get_origin(option) or option).__name__, str(option))


def _old_fsdp(value: Any, values: dict[str, Any], notes: list[str]) -> None:
    """The space-separated words that `fsdp:` used to take."""
    if not isinstance(value, str | list) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"fsdp={value!r}: must be true, false, or words such as full_shard auto_wrap")
    words = value.split() if isinstance(value, str) else value
    allowed = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "auto_wrap", "offload")
    for word in words:
        if word not in allowed:
            raise ConfigError(f"fsdp={value!r}: {word!r} is none of {', '.join(allowed)}")
    if "hybrid_shard" in words and not (values.get("layout") or {}).get("dp_replicate"):
        notes.append("fsdp: hybrid_shard is now layout.dp_replicate; the plan or layout must give it")
    values["fsdp"] = "no_shard" not in words
    extra = values.setdefault("fsdp_config", {})
    if "shard_grad_op" in words:
        extra.setdefault("reshard_after_forward", False)
    if "offload" in words:
        extra.setdefault("cpu_offload", True)
    notes.append(f"fsdp: {' '.join(words)!r} is now fsdp: {str(values['fsdp']).lower()}")


def _fsdp_config(values: dict[str, Any], notes: list[str]) -> None:
    """fsdp_config's members: three mean something, FSDP1's are noted, others are unknown."""
    kept: dict[str, Any] = {}
    for key, value in (values.get("fsdp_config") or {}).items():
        name = str(key).removeprefix("fsdp_")
        if name in ("reshard_after_forward", "activation_checkpointing", "cpu_offload", "offload_params"):
            if not isinstance(value, bool):
                raise ConfigError(f"fsdp_config.{name}={value!r}: must be true or false")
            kept["cpu_offload" if name == "offload_params" else name] = value
        elif name in FSDP_NO_EFFECT:
            notes.append(f"fsdp_config.{name}: no effect with fully_shard")
        else:
            close = difflib.get_close_matches(
                name, ["reshard_after_forward", "activation_checkpointing", "cpu_offload"]
            )
            raise ConfigError(f"unknown setting 'fsdp_config.{name}'{'; close: ' + ', '.join(close) if close else ''}")
    if kept.get("activation_checkpointing") is not None:
        values.setdefault("activation_checkpointing", kept["activation_checkpointing"])
    if "fsdp_config" in values:
        values["fsdp_config"] = kept
