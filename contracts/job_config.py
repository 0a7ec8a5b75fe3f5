"""Settings of the fine-tune job, one YAML file, and its plan: the launcher and the job read both into the same types.

Surface: the YAML of TRL's `sft.py` scripts (TrlParser((ScriptArguments, SFTConfig, ModelConfig))) with current and
older option names (`contracts.trl`), plus a `layout:` mapping with the fields of `contracts.layout`. Batch, precision,
sharding, recomputation and offloading options are stored only as fields of the layout.

plan.json, which the launcher writes and every rank reads, holds the settings, as given by a file or by the planner, the
layout, its forecast, the environment, and the transport that NCCL should use between hosts. The ConfigMap and `plan` in
run.json hold the same document.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contracts import bounded, plain, trl
from contracts.finding import Interval
from contracts.layout import Layout, LayoutError
from contracts.trl import ConfigError as ConfigError, EndedError as EndedError

PLAN_VERSION = 1
MAX_FILE_BYTES = 1 << 20  # settings are written by hand, so a larger file is the wrong file
MAX_COUNT = 10**7  # of a degree or a batch in the layout
MAX_ALIASES = 16  # YAML aliases; nested aliases grow exponentially
DEFAULT_CONFIG = Path(__file__).parent / "default.yaml"  # settings of the embedded job


def _limited(default: Any, **limits: float) -> Any:
    """Declare a field that has limits, in the words of pydantic's Field: ge, lt."""
    return field(default=default, metadata=limits)


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
    lora_r: int = _limited(16, ge=1)
    lora_alpha: float = _limited(32, ge=0)
    lora_dropout: float = _limited(0.0, ge=0, lt=1)
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
    dataset_rows: int | None = _limited(None, ge=1)  # limit of rows per split
    max_length: int = _limited(1024, ge=2)
    packing: bool = False
    train_sampling_strategy: Literal["random", "group_by_length"] = "random"
    completion_only_loss: bool | None = None  # loss on answers only; None: if rows have a prompt and a completion
    # training
    num_train_epochs: float = _limited(3.0, ge=0)
    max_steps: int | None = _limited(None, ge=1)
    per_device_eval_batch_size: int | None = _limited(None, ge=1)
    eval_strategy: Literal["no", "epoch", "steps"] = "no"
    eval_steps: int | None = _limited(None, ge=1)  # None: same as logging_steps
    tf32: bool | None = None
    learning_rate: float = _limited(2e-5, ge=0)
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = "linear"
    warmup_steps: float = _limited(0, ge=0)  # below 1: a fraction of all steps
    weight_decay: float = _limited(0.0, ge=0)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = _limited(1.0, ge=0)  # 0: no gradient clipping
    seed: int = 42
    # parallelism
    layout: dict[str, Any] = field(default_factory=dict)  # requested fields of contracts.layout.Layout
    # checkpoints and reports
    output_dir: str = "finetune-output"
    save_strategy: Literal["no", "epoch", "steps"] = "epoch"
    save_steps: int = _limited(500, ge=1)
    save_total_limit: int | None = _limited(1, ge=1)  # None: keep every checkpoint
    resume_from_checkpoint: str | bool | None = "auto"  # "auto": the newest checkpoint in output_dir, if any
    export_merged: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    logging_strategy: Literal["no", "steps", "epoch"] = "steps"
    logging_steps: int = _limited(10, ge=1)
    report_to: tuple[Literal["tensorboard", "none"], ...] = ()  # metrics.jsonl is always written
    profile_steps: int = _limited(2, ge=0)  # steps to profile for the communication share; 0: none

    def __post_init__(self) -> None:
        wrong = []
        if self.num_train_epochs == 0 and self.max_steps is None:
            wrong.append("num_train_epochs=0: must be above 0, or nothing trains")
        if self.load_in_4bit and not self.use_peft:
            wrong.append("load_in_4bit=true: 4-bit weights cannot be trained; set use_peft: true")
        if wrong:
            raise ConfigError("; ".join(wrong))


_TYPES = typing.get_type_hints(JobConfig)


class JobSettings(NamedTuple):
    """The settings of a job as they were read."""

    config: JobConfig
    explicit: dict[str, Any]  # settings that were set, by current name
    notes: list[str]  # on renamed options and on options without effect
    only_trl: list[str]  # settings that only TRL's trainer has, with their values; `config` omits them
    raw: Mapping[str, Any]  # the mapping that was read


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> JobSettings:
    """Read the settings of the built-in trainer from the YAML, with `key=value` overrides applied."""
    return parse_config(with_overrides(read_file(path or DEFAULT_CONFIG), overrides))


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings, with the content of files that a setting names in place of their path."""
    raw = read_mapping(path, once=True)
    for name in trl.FILES:
        if inner := _find_file(path, raw.get(name)):
            raw[name] = read_mapping(inner, once=True)
    template = _find_file(path, raw.get("chat_template_path"))
    if template is not None and template.suffix in (".jinja", ".jinja2", ".j2"):
        del raw["chat_template_path"]
        raw["chat_template"] = _text(template)
    return raw


def _find_file(path: Path, value: object) -> Path | None:
    """Find a file that a setting names, relative to the working directory (as transformers) or to the settings file."""
    candidates = (Path(value), path.parent / value) if isinstance(value, str) and value else ()
    return next((candidate for candidate in candidates if os.path.isfile(candidate)), None)


def with_overrides(raw: dict[str, Any], overrides: typing.Iterable[str]) -> dict[str, Any]:
    """Return the mapping with each `key=value` or `key.member=value` applied. Raises ConfigError, which names it."""
    for text in overrides:
        from contracts.yaml_text import YamlTextError, load_all

        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: must be NAME=VALUE")
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
            renamed = trl.option_names()["renamed"]
            today = renamed.get(key, key)
            for name in [other for other in raw if other != key and renamed.get(other, other) == today]:
                del raw[name]
        target[last] = documents[0] if documents else None
    return raw


def read_mapping(path: Path, *, once: bool = False) -> dict[str, Any]:
    """Read a YAML or JSON file with one mapping. If `once` is set, a repeated key is an error."""
    return parse_mapping(_text(path), path, once=once)


def _text(path: Path) -> str:
    try:
        return bounded.read_text(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: too large, or not UTF-8
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}") from None


def parse_mapping(text: str, source: object, *, once: bool = False) -> dict[str, Any]:
    """Parse YAML or JSON text with one mapping. If `once` is set, a repeated key is an error."""
    from contracts.yaml_text import YamlTextError, load_all

    try:
        documents = load_all(text, most_aliases=MAX_ALIASES, once=once)
    except YamlTextError as error:
        raise ConfigError(f"{source}: {error}") from None
    if len(documents) > 1:
        raise ConfigError(f"{source}: holds {len(documents)} YAML documents, one is allowed")
    data = documents[0] if documents else None
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must hold a mapping, holds {type(data).__name__}")
    return data


def parse_config(raw: Mapping[str, Any], *, by_trl: bool = False) -> JobSettings:
    """Convert a mapping to the settings of the built-in trainer or, if `by_trl` is set, of TRL's trainer.

    Raises ConfigError, which names every wrong setting with its value and the allowed values.
    """
    notes, refused = dict[str, None](), dict[str, None]()
    only_trl: dict[str, None] = {} if by_trl else refused  # an error for the built-in trainer
    own_notes: dict[str, None] = {} if by_trl else notes  # TRL's trainer uses some options that ours ignores: no note

    def attempt(parse: typing.Callable[..., Any], *arguments: Any) -> Any:
        try:
            return parse(*arguments)
        except ConfigError as error:
            (only_trl if isinstance(error, trl.OnlyTrlError) else refused)[str(error)] = None

    flat = trl.flatten(raw, refused.setdefault)
    values: dict[str, Any] = {}
    layout: dict[str, Any] = attempt(_parse_layout, flat.pop("layout", None), "layout") or {}
    is_ratio = flat.get("warmup_ratio") and not flat.get("warmup_steps")  # as transformers chooses between them
    flat.pop("warmup_steps" if is_ratio else "warmup_ratio", None)
    settings = known_settings()
    unlisted = [name for name in flat if name not in settings and not name.startswith("model_init_kwargs.")]
    if ignored := [name for name in unlisted if name.startswith("deepspeed.")]:
        notes[f"no effect, because these concern only DeepSpeed's own buffers and logs: {', '.join(ignored)}"] = None
    if unknown := [name for name in unlisted if name not in ignored]:
        methods = trl.option_names()["of_trl"]["methods"]
        if found := {word: methods[word] for n in unknown for word in (n, f"{n}={raw.get(n)}") if word in methods}:
            reason = f"settings of {min(found.values(), key=len)}: {', '.join(found)}"  # some are of several methods
            raise ConfigError(f"only supervised fine-tuning (SFT) is supported; {reason}")
        head, more = unknown[: trl.MAX_LISTED], unknown[trl.MAX_LISTED :]
        listed = ", ".join(f"{name!r}{trl.hint(name, settings)}" for name in head)
        refused[f"unknown setting{'s' * (len(unknown) > 1)} {listed}{f' and {len(more)} more' if more else ''}"] = None
    for member in trl.option_names()["switch"]:
        attempt(trl.set_switch, member, flat, layout)
    of_sharding: dict[str, dict[str, Any]] = {"fsdp": {}, "deepspeed": {}}
    for label in trl.sort_options({name: value for name, value in flat.items() if name not in unlisted}):
        name, value = attempt(trl.translate, label, flat[label], notes.setdefault) or ("", None)
        if name in trl.option_names()["of_fsdp"]:
            of_sharding["deepspeed" if name.startswith("deepspeed") else "fsdp"][name] = value
        elif name:
            attempt(_read, name, value, label, values, layout, own_notes.setdefault)
    for options in of_sharding.values():  # they set the degrees that the options before them leave open
        attempt(trl.set_sharding, flat, options, layout, notes.setdefault)
    if layout:
        values["layout"] = attempt(_parse_layout, layout, "layout") or {}
    config = attempt(lambda: JobConfig(**values))
    if refused:
        raise ConfigError("; ".join(refused))
    return JobSettings(config, values, list(notes), list(only_trl), raw)


def _read(name: str, value: Any, label: str, values: dict[str, Any], layout: dict[str, Any], note: trl.Note) -> None:
    """Convert one setting of the file to a config or layout value; `label` is its name in the file."""
    names, kind = trl.option_names(), _TYPES.get(name)
    if any(name in row["options"] for row in names["switch"].values()):
        return
    if name in names["in_layout"]:
        if value is not None:
            member = names["in_layout"][name]
            trl.put(layout, member, _parse_member(member, value, label), label)
    elif reason := names["no_effect"].get(name, names["only"].get(name, {}).get("why")):
        note(f"{name}: no effect, {reason}")
    elif kind is None:
        raise trl.OnlyTrlError(f"unknown setting {name!r}: only TRL passes it on to the model")
    elif value is None and name == "max_length":
        raise trl.OnlyTrlError("max_length=None: must be a whole number: rows are cut at it, and memory depends on it")
    elif value is None and type(None) not in typing.get_args(kind):
        note(f"{name}: null, so {JobConfig.__dataclass_fields__[name].default!r} is taken")
    elif name in names["shares"] and isinstance(value, float) and 0 < value < 1:
        raise trl.OnlyTrlError(f"{label}={value!r}: must be a whole number of steps")
    else:
        limits = JobConfig.__dataclass_fields__[name].metadata
        trl.put(values, name, _convert(label, value, kind, refusal=trl.OnlyTrlError, **limits), label)


def _parse_layout(settings: Any, setting: str) -> dict[str, Any]:
    """Return layout fields, converted to their types; `setting` names the mapping in a message."""
    if not isinstance(settings, dict | None):
        raise ConfigError(f"{setting}={settings!r}: must be a mapping")
    return {str(name): _parse_member(str(name), value, f"{setting}.{name}") for name, value in (settings or {}).items()}


def parse_layout(settings: Any, setting: str) -> Layout:
    """Convert a mapping to a Layout. Raises ConfigError, which names the field."""
    try:
        return Layout(**_parse_layout(settings, setting))
    except (LayoutError, TypeError) as error:
        raise ConfigError(f"{setting}: {error}") from None


def parse_layout_text(text: str) -> dict[str, Any]:
    """Parse "dp_shard=4,tp=2,micro_batch=2" into layout fields. Raises ConfigError, which names the wrong item."""
    members = _parse_layout(with_overrides({}, filter(None, text.split(","))), "layout")
    for name, value in members.items():
        if name in ("world_size", "stage_layers") or value == trl.NODE:
            raise ConfigError(f"layout.{name}={value!r}: must follow from the model, the nodes and the other degrees")
    return members


def _parse_member(member: str, value: Any, name: str) -> Any:
    kinds = typing.get_type_hints(Layout)
    if member not in kinds:
        raise ConfigError(f"unknown setting {name!r}{trl.hint(member, kinds)}")
    if member == "dp_shard" and value == trl.NODE:
        return value
    limits: dict[str, Any] = {"ge": 1, "lt": MAX_COUNT} if kinds[member] is int else {}
    return _convert(name, value, kinds[member], **limits)


def resolve_layout(settings: Mapping[str, Any], world_size: int, ranks_per_node: int) -> dict[str, Any]:
    """Return JobConfig.layout for this number of ranks, including the degrees that follow from it.

    Raises ConfigError if the degrees do not divide the number of ranks.
    """
    resolved: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    if resolved.get("dp_shard") == trl.NODE:
        resolved["dp_shard"] = min(ranks_per_node, world_size)
    ranks_left = world_size
    for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard"):
        degree = resolved.get(name, 1)
        if ranks_left % degree:
            raise ConfigError(f"layout.{name}={degree!r}: does not divide the {ranks_left} ranks that are left to it")
        ranks_left //= degree
    if {"tp", "pp", "cp", "sharding"} <= set(resolved):  # the remaining ranks are data parallel
        if resolved["sharding"] == "ddp":
            resolved.setdefault("dp_shard", 1)
        for name, other in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
            if other in resolved:
                resolved.setdefault(name, ranks_left)
    if resolved.get("dp_shard") == resolved.get("dp_replicate") == 1:
        resolved.pop("sharding", None)  # with one rank all kinds of sharding are the same
        resolved.pop("reshard_after_forward", None)
    return resolved


def known_settings() -> frozenset[str]:
    """Return every setting name that a file may have, including older names and options without effect."""
    names = trl.option_names()
    tables = [names[table] for table in ("renamed", "in_layout", "no_effect", "only", "of_fsdp", "nested")]
    switches = [row["options"] for row in names["switch"].values()]
    return frozenset(itertools.chain(_TYPES, *tables, *switches))


def _convert(name: str, value: Any, kind: Any, *, refusal: type[ConfigError] = ConfigError, **limits: float) -> Any:
    """Convert a value to its field's type with pydantic: YAML reads 2e-4 as text and has lists instead of tuples.

    Raises ConfigError, which names the setting and the allowed values; for a word that is none of these, `refusal`.
    """
    from pydantic import ValidationError

    if value is False and "no" in typing.get_args(kind):
        return "no"  # YAML 1.1 reads an unquoted no as false
    items = [value] if isinstance(value, str) and typing.get_origin(kind) is tuple else value
    try:  # strictly for true and false, which are no numbers
        return _validator(kind, **limits).validate_python(items, strict=isinstance(value, bool))
    except ValidationError as error:
        first = error.errors()[0]
        raised = refusal if first["type"] == "literal_error" and isinstance(first["input"], str) else ConfigError
        raise raised(f"{name}={value!r}: must {first['msg'].removeprefix('Input should ')}") from None


@functools.cache
def _validator(kind: Any, **limits: float) -> Any:
    from pydantic import ConfigDict, Field, TypeAdapter

    return TypeAdapter(typing.Annotated[kind, Field(**limits)], config=ConfigDict(allow_inf_nan=False))


# The plan.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """Forecast of the run. None means not forecast."""

    step_seconds: Interval | None = None
    memory_bytes: Interval | None = None
    tokens_per_second: float | None = None  # of all ranks, without padding
    mfu: float | None = None  # at this rate


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The content of plan.json. If the layout is None, the settings and the number of started ranks determine it."""

    schema_version: int = PLAN_VERSION
    config: JobConfig | None = None  # None: settings of the built-in job
    trl: dict[str, Any] | None = None  # settings for TRL's parser, if TRL's SFTTrainer runs the job (finetune.sft_trl)
    layout: Layout | None = None
    forecast: RunForecast = field(default_factory=RunForecast)
    environment: dict[str, str] = field(default_factory=dict)
    transport: dict[str, str] = field(default_factory=dict)  # network, evidence, gdrdma: transport that NCCL should use
    notes: tuple[str, ...] = ()  # about the settings: older option names, options without effect


def dump_plan(plan: JobPlan) -> str:
    """Serialize the plan. Raises ConfigError if a job would reject it."""
    text = json.dumps(plain.write(plan), indent=1) + "\n"
    try:
        plain.loads(text.encode())
    except ValueError as error:
        raise ConfigError(f"the plan: {error}") from None
    return text


def read_plan(path: Path, overrides: Sequence[str] = ()) -> JobPlan:
    """Read plan.json and apply `key=value` overrides to its settings. Raises ConfigError, which names the file."""
    members = [field.name for field in fields(JobPlan)]
    try:
        data = plain.loads(bounded.read(path, MAX_FILE_BYTES))
        if not isinstance(data, dict) or not members & data.keys():
            raise ConfigError(f"must hold a mapping of {', '.join(members)}")
        if unknown := data.keys() - members:
            raise ConfigError(f"unknown {min(unknown)!r}{trl.hint(min(unknown), members)}")
        settings, of_trl, layout = (data.pop(name, None) for name in ("config", "trl", "layout"))
        for name, value in (("config", settings), ("trl", of_trl)):
            if not isinstance(value, dict | None):
                raise ConfigError(f"{name}: must be a mapping")
        plan = plain.read({name: value for name, value in data.items() if value is not None}, JobPlan)
        if plan.schema_version != PLAN_VERSION:
            raise ConfigError(f"schema_version={plan.schema_version!r}: this release reads {PLAN_VERSION}")
        raw = with_overrides(read_mapping(DEFAULT_CONFIG) if settings is None else settings, overrides)
        parsed = parse_config(raw, by_trl=of_trl is not None)
        return replace(
            plan,
            config=parsed.config,
            trl=None if of_trl is None else trl.make_trl_settings(with_overrides(of_trl, overrides), {}),
            layout=None if layout is None else parse_layout(layout, "layout"),
            notes=tuple(dict.fromkeys([*plan.notes, *parsed.notes])),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan {path}: {error}") from None


def choose_plan(plan: Path | None, config: Path | None, overrides: Sequence[str] = ()) -> tuple[JobPlan, JobConfig]:
    """Return the plan and its settings, read from plan.json or created from a settings file. Raises ConfigError."""
    if plan is None:
        settings = read_config(config, overrides)
        return JobPlan(config=settings.config, notes=tuple(settings.notes)), settings.config
    if config is not None:
        raise ConfigError(f"--config {config}: the plan holds the settings; use only one of --plan and --config")
    job_plan = read_plan(plan, overrides)
    return job_plan, job_plan.config or JobConfig()
