"""Settings of the fine-tune job: one YAML file, which the launcher and the job read into the same dataclass.

Surface: the YAML of TRL's `sft.py` scripts (TrlParser((ScriptArguments, SFTConfig, ModelConfig))) with current and
older option names (`contracts.trl`), plus a `layout:` mapping with the fields of `contracts.layout`. Batch, precision,
sharding, recomputation and offloading options are stored only as fields of the layout.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from contracts import bounded, trl
from contracts.layout import Layout
from contracts.trl import ConfigError as ConfigError
from contracts.trl import EndedError as EndedError

MAX_FILE_BYTES = 1 << 20  # settings are written by hand, so a larger file is the wrong file
MAX_ALIASES = 16  # YAML aliases; nested aliases grow exponentially
DEFAULT_CONFIG = Path(__file__).parent / "default.yaml"  # settings of the embedded job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Every setting of the job. None means that the plan or the machine determines the value."""

    # model
    model_name_or_path: str = "random:tiny-llama"  # hub id, folder, or random:<preset or folder with config.json>
    model_revision: str = "main"
    tokenizer_name: str | None = None  # None: the model's own; "builtin:bytes" needs no download
    tokenizer_revision: str = "main"  # for tokenizer_name; the model's own tokenizer uses the model's revision
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of frozen and exported weights; auto: as stored
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    load_in_4bit: bool = False
    chat_template: str | None = None  # a Jinja template; None: the template of the tokenizer
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
    dataset_config: str | None = None  # configuration of a data set that has several, such as "main" of GSM8K
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_text_field: str = "text"
    dataset_rows: int | None = None  # limit of rows per split
    max_length: int = 1024
    packing: bool = False
    train_sampling_strategy: Literal["random", "group_by_length"] = "random"
    completion_only_loss: bool | None = None  # loss on answers only; None: if rows have a prompt and a completion
    # training
    num_train_epochs: float = 3.0
    max_steps: int | None = None
    per_device_eval_batch_size: int | None = None
    eval_strategy: Literal["no", "epoch", "steps"] = "no"
    eval_steps: int | None = None  # None: same as logging_steps
    tf32: bool | None = None
    learning_rate: float = 2e-5
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = "linear"
    warmup_steps: float = 0  # below 1: a fraction of all steps
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no gradient clipping
    seed: int = 42
    # parallelism
    layout: dict[str, Any] = field(default_factory=dict)  # requested fields of contracts.layout.Layout
    # checkpoints and reports
    output_dir: str = "finetune-output"
    save_strategy: Literal["no", "epoch", "steps"] = "epoch"
    save_steps: int = 500
    save_total_limit: int | None = 1  # None: keep every checkpoint
    resume_from_checkpoint: str | bool | None = "auto"  # "auto": the newest checkpoint in output_dir, if any
    export_merged: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    logging_strategy: Literal["no", "steps", "epoch"] = "steps"
    logging_steps: int = 10
    report_to: tuple[str, ...] = ()
    profile_steps: int = 2  # steps to profile for the communication share; 0: none

    def __post_init__(self) -> None:
        low = {
            "lora_r": 1, "lora_alpha": 0, "max_length": 2, "num_train_epochs": 0, "learning_rate": 0, "warmup_steps": 0,
            "save_steps": 1, "save_total_limit": 1, "logging_steps": 1, "eval_steps": 1, "max_grad_norm": 0,
            "weight_decay": 0, "profile_steps": 0, "max_steps": 1, "dataset_rows": 1,
            "per_device_eval_batch_size": 1,
        }  # fmt: skip
        wrong = [
            f"{name}={value!r}: must be at least {least}"
            for name, least in low.items()
            if (value := getattr(self, name)) is not None and value < least
        ]
        if self.num_train_epochs == 0 and self.max_steps is None:
            wrong.append("num_train_epochs=0: must be above 0, or nothing trains")
        if not 0 <= self.lora_dropout < 1:
            wrong.append(f"lora_dropout={self.lora_dropout!r}: must be in [0, 1)")
        wrong += [_parse_trackers(target) for target in self.report_to if target not in ("tensorboard", "none")]
        if self.load_in_4bit and not self.use_peft:
            wrong.append("load_in_4bit=true: 4-bit weights cannot be trained; set use_peft: true")
        if wrong:
            raise ConfigError("; ".join(wrong))


def read_config(path: Path | None, overrides: typing.Sequence[str] = ()) -> tuple[JobConfig, dict[str, Any], list[str]]:
    """Read the YAML and apply `key=value` overrides. Returns the config, the settings that were set, and notes."""
    return parse_config(with_overrides(read_file(path or DEFAULT_CONFIG), overrides))


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings, with the content of files that a setting names in place of their path."""
    raw = read_mapping(path, once=True)
    for name in ("deepspeed", "fsdp_config"):
        named = raw.get(name)
        if isinstance(named, str) and named and (inner := _find_file(path, named)):
            raw[name] = read_mapping(inner, once=True)
    template = raw.get("chat_template_path")
    found = _find_file(path, template) if isinstance(template, str) else None
    if found is not None and found.suffix in (".jinja", ".jinja2", ".j2"):
        del raw["chat_template_path"]
        raw["chat_template"] = _text(found)
    return raw


def _find_file(path: Path, named: str) -> Path | None:
    """Find a file that a setting names, relative to the working directory (as transformers) or to the settings file."""
    return next((one for one in (Path(named), path.parent / named) if bounded.is_file(one)), None)


def with_overrides(raw: dict[str, Any], overrides: typing.Iterable[str]) -> dict[str, Any]:
    """Return the mapping with each `key=value` or `key.member=value` applied. Raises ConfigError, which names it."""
    for text in overrides:
        from contracts.yaml_text import YamlTextError, load_all

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
        if not parents:  # the file has an older name of the same setting
            renamed = trl.option_names().renamed
            today = renamed.get(key, key)
            for name in [other for other in raw if other != key and renamed.get(other, other) == today]:
                del raw[name]
        target[last] = documents[0] if documents else None
    return raw


def read_mapping(path: Path, *, once: bool = False) -> dict[str, Any]:
    """Read a YAML or JSON file with one mapping. If `once` is set, a repeated key is an error."""
    return parse_mapping(_text(path), path, once=once)


def _text(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    try:
        return bounded.read_text(path, MAX_FILE_BYTES)
    except bounded.TooLargeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None


def parse_mapping(text: str, where: object, *, once: bool = False) -> dict[str, Any]:
    """Parse YAML or JSON text with one mapping. If `once` is set, a repeated key is an error."""
    from contracts.yaml_text import YamlTextError, load_all

    try:
        documents = load_all(text, most_aliases=MAX_ALIASES, once=once)
    except YamlTextError as error:
        raise ConfigError(f"{where}: {error}") from None
    if len(documents) > 1:
        raise ConfigError(f"{where}: holds {len(documents)} YAML documents, one is allowed")
    data = documents[0] if documents else None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: must hold a mapping, holds {type(data).__name__}")
    return data


def parse_config(
    raw: Mapping[str, Any], only_trl: dict[str, None] | None = None
) -> tuple[JobConfig, dict[str, Any], list[str]]:
    """Convert a mapping to the config, the settings that were set explicitly, and notes on renamed or unused options.

    Raises ConfigError, which names every wrong setting with its value and the allowed values. If `only_trl` is given,
    errors about settings that only TRL's trainer accepts are added to it instead, and the config omits those settings.
    """
    notes: dict[str, None] = {}
    of_trl: dict[str, None] = {}  # options that TRL's trainer uses and the built-in trainer ignores: no note
    note, own_note = notes.setdefault, (notes if only_trl is None else of_trl).setdefault
    refused: dict[str, None] = {}

    def attempt(read: typing.Callable[..., Any], *words: Any) -> Any:
        try:
            return read(*words)
        except trl.OnlyTrlError as error:
            (refused if only_trl is None else only_trl)[str(error)] = None
        except ConfigError as error:
            refused[str(error)] = None

    whole = {str(key): value for key, value in raw.items()}
    raw = {key: value for key, value in whole.items() if key != "model_init_kwargs"}
    attempt(trl.model_words, whole, raw, own_note)
    values: dict[str, Any] = {}
    layout: dict[str, Any] = attempt(_parse_layout, raw.get("layout")) or {}
    written = {trl.option_names().renamed.get(name, name): name for name in raw}
    known = known_settings()
    if unknown := [name for name in raw if name not in known]:
        methods = trl.option_names().of_trl["methods"]
        if found := {word: methods[word] for n in unknown for word in (n, f"{n}={raw[n]}") if word in methods}:
            what = f"settings of {min(found.values(), key=len)}: {', '.join(found)}"  # some are of several methods
            raise ConfigError(f"only supervised fine-tuning (SFT) is supported; {what}")
        first, *more = unknown
        also = f"; also unknown: {', '.join(map(repr, more[:8]))}" if more else ""
        refused[f"unknown setting {first!r}{trl.hint(first, sorted(known))}{also}"] = None
    for name, value in _rename_options({name: raw[name] for name in raw if name in known}, note, attempt).items():
        attempt(_read, name, value, written.get(name, name), values, layout, own_note)
    attempt(trl.precision, raw, layout)
    attempt(trl.checkpointing, raw, layout)
    attempt(trl.parallelism, raw, layout, note)  # FSDP options set the degrees that this leaves open
    attempt(trl.fsdp, raw, layout, note)
    attempt(trl.deepspeed, raw, values, layout, note)
    if layout:
        values["layout"] = attempt(_parse_layout, layout) or {}
    config = attempt(partial(JobConfig, **values))
    if refused:
        raise ConfigError("; ".join(refused))
    return config, values, list(notes)


def _read(name: str, value: Any, label: str, values: dict[str, Any], layout: dict[str, Any], note: trl.Note) -> None:
    """Convert one setting of the file to a config or layout value; `label` is its name in the file."""
    names = trl.option_names()
    if name in names.read_apart or trl.without_effect(name, value, note):
        return
    if name not in names.in_layout:
        _store_setting(values, name, value, note, label)
    elif value is not None:
        member = names.in_layout[name]
        trl.put(layout, member, _parse_member(member, value, label), label)


def _rename_options(raw: Mapping[str, Any], note: trl.Note, attempt: typing.Callable[..., Any]) -> dict[str, Any]:
    """Return the file's settings under their current names, with transformers' special values translated."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        new = trl.option_names().renamed.get(name, name)
        if new != name:
            if raw.get(new) is not None and value is not None and new != "activation_checkpointing":
                attempt(_refuse, f"{name} is the old name of {new}: both are set")
            if raw.get(new) is not None:
                continue
            note(f"{name} is now {new}")
        found[new] = value
    if found.get("max_steps") in (-1, "-1"):
        del found["max_steps"]  # default of transformers: num_train_epochs determines the steps
    if found.get("eval_steps") == 0:
        found["eval_steps"] = None  # as transformers interprets it
    if "warmup_ratio" in found:
        ratio = attempt(_convert, "warmup_ratio", found.pop("warmup_ratio"), float | None)
        if ratio and not found.get("warmup_steps"):
            note("warmup_ratio is now warmup_steps, below 1")
            found["warmup_steps"] = ratio
    if "group_by_length" in found:
        by_length = attempt(_convert, "group_by_length", found.pop("group_by_length"), bool | None)
        if by_length is not None:
            note("group_by_length is now train_sampling_strategy")
            found.setdefault("train_sampling_strategy", "group_by_length" if by_length else "random")
    if found.get("lora_target_modules") in ("all-linear", ["all-linear"]):
        note("lora_target_modules: all-linear is every projection of a layer")
        del found["lora_target_modules"]
    if found.get("report_to") in ("all", ["all"]):
        note("report_to: all is tensorboard")
        found["report_to"] = ["tensorboard"]
    if "data_seed" in found and (seed := found.pop("data_seed")) not in (None, found.get("seed", _get_default("seed"))):
        attempt(_refuse, f"data_seed={seed!r}: only seed's own value is allowed: one seed decides")
    return found


def _refuse(text: str) -> None:
    raise ConfigError(text)


def _parse_layout(settings: Any) -> dict[str, Any]:
    """Return the fields of `layout:`, converted to their types."""
    if not isinstance(settings, dict | None):
        raise ConfigError(f"layout={settings!r}: must be a mapping")
    return {str(name): _parse_member(str(name), value, f"layout.{name}") for name, value in (settings or {}).items()}


def _parse_member(member: str, value: Any, name: str) -> Any:
    kinds = typing.get_type_hints(Layout)
    if member not in kinds:
        raise ConfigError(f"unknown setting {name!r}{trl.hint(member, kinds)}")
    if member == "dp_shard" and value == trl.NODE:
        return value
    if member == "stage_layers":
        if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
            raise ConfigError(f"{name}={value!r}: must be a list of whole numbers")
        return list(value)
    made = _convert(name, value, kinds[member])
    if kinds[member] is int and made < 1:
        raise ConfigError(f"{name}={made!r}: must be at least 1")
    return made


def resolve_layout(settings: Mapping[str, Any], world_size: int, ranks_per_node: int) -> dict[str, Any]:
    """Return JobConfig.layout for this number of ranks, including the degrees that follow from it.

    Raises ConfigError if the degrees do not divide the number of ranks.
    """
    resolved: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    if resolved.get("dp_shard") == trl.NODE:
        resolved["dp_shard"] = min(ranks_per_node, world_size)
    rest = world_size
    for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard"):
        degree = resolved.get(name, 1)
        if rest % degree:
            raise ConfigError(f"layout.{name}={degree!r}: does not divide the {rest} ranks that are left to it")
        rest //= degree
    if {"tp", "pp", "cp", "sharding"} <= set(resolved):  # the remaining ranks are data parallel
        if resolved["sharding"] == "ddp":
            resolved.setdefault("dp_shard", 1)
        for name, other in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
            if other in resolved:
                resolved.setdefault(name, rest)
    if resolved.get("dp_shard") == resolved.get("dp_replicate") == 1:
        resolved.pop("sharding", None)  # with one rank all kinds of sharding are the same
        resolved.pop("reshard_after_forward", None)
    return resolved


def _store_setting(values: dict[str, Any], name: str, value: Any, note: trl.Note, label: str) -> None:
    """Store one setting; `label` is its name in the file."""
    known = _types()
    if value is None and type(None) not in typing.get_args(known[name]):
        if name == "max_length":
            raise trl.OnlyTrlError(
                "max_length=None: must be a whole number: rows are cut at it, and the memory follows from it"
            )
        note(f"{name}: null, so {_get_default(name)!r} is taken")
        return
    trackers = _convert_to(tuple, value) if name == "report_to" else ()
    if trackers is not _MISFIT and (others := set(trackers) - {"tensorboard", "none"}):
        raise trl.OnlyTrlError(_parse_trackers(sorted(map(str, others))[0]))
    try:
        values[name] = _convert(label, value, known[name])
    except ConfigError as error:
        is_word = isinstance(value, str) and any(typing.get_origin(one) is Literal for one in _split_union(known[name]))
        is_share = name in trl.option_names().shares and isinstance(value, float) and 0 < value < 1
        raise trl.OnlyTrlError(str(error)) if is_word or is_share else error from None


def _parse_trackers(target: str) -> str:
    return f"report_to={target!r}: allowed are tensorboard, none (metrics.jsonl is always written)"


def known_settings() -> frozenset[str]:
    """Return every setting name that a file may have, including older names and options without effect."""
    names = trl.option_names()
    own = (*names.renamed, *names.in_layout, *names.no_effect, *names.only, *names.read_apart, *names.rewritten)
    return frozenset([*_types(), *own])


def _get_default(name: str) -> Any:
    return next(one.default for one in dataclasses.fields(JobConfig) if one.name == name)


def _types() -> dict[str, Any]:
    return typing.get_type_hints(JobConfig)


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to its field's type. YAML reads 2e-4 as text and has lists instead of tuples."""
    options = _split_union(kind)
    for option in options:
        if (found := _convert_to(option, value)) is not _MISFIT:
            return found
    allowed = " or ".join(_format_type(option) for option in options)
    raise ConfigError(f"{name}={value!r}: must be {allowed}")


def _split_union(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


_MISFIT = object()


def _convert_to(option: Any, value: Any) -> Any:
    """Convert the value to one type of a field; return _MISFIT if it does not have this type."""
    origin = typing.get_origin(option) or option
    if origin is Literal:
        choices = typing.get_args(option)
        if value is False and "no" in choices:
            return "no"  # YAML 1.1 reads an unquoted no as false
        return value if value in choices else _MISFIT
    if origin is tuple:
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        return (value,) if isinstance(value, str) else _MISFIT
    if origin is dict:
        return dict(value or {}) if isinstance(value, dict | None) else _MISFIT
    if option is type(None):
        return None if value is None else _MISFIT
    return _convert_scalar(option, value)


def _convert_scalar(option: Any, value: Any) -> Any:
    if option is bool:
        found = trl.truth(value)
        return found if isinstance(found, bool) else _MISFIT
    if isinstance(value, bool):
        return _MISFIT
    if option is int and isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
        return int(value)  # quoted; argparse, which parses the defaults of TRL's files, accepts it
    if option in (str, int) and isinstance(value, option):
        return value
    if option is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if option is float and isinstance(value, int | float | str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return _MISFIT
        return number if math.isfinite(number) else _MISFIT
    return _MISFIT


def _format_type(option: Any) -> str:
    if option is type(None):
        return "null"
    if typing.get_origin(option) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(option)))
    if typing.get_origin(option) is tuple:
        return "a list of names"
    names = {
        "str": "text",
        "int": "a whole number",
        "float": "a finite number",
        "bool": "true or false",
        "dict": "a mapping",
    }
    return names.get((typing.get_origin(option) or option).__name__, str(option))
