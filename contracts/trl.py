"""Translate the options of TRL and transformers to this job's settings, or say why an option asks for nothing.

Surface: `trl.toml` beside this module names the options and their sources. `fsdp_config` is read as transformers and
accelerate spell its members, and DeepSpeed's JSON as DeepSpeed does. Each option becomes a setting or a member of the
layout, or is named in a note because nothing depends on it, or is refused with what is allowed.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from contracts.tables import read_table

Note = Callable[[str], None]


class EndedError(Exception):
    """The job ends before its last step, in order; the exit codes are those of sysexits.h."""

    code = 1
    status = "failed"  # in run.json


class ConfigError(EndedError, ValueError):
    """A setting that cannot stand; the message names it, its value and what is allowed."""

    code, status = 2, "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionNames:
    """The tables of trl.toml."""

    renamed: Mapping[str, str]  # older name -> today's
    no_effect: Mapping[str, str]  # name -> why
    only: Mapping[str, tuple[list[Any], str]]  # name -> allowed values, why
    elsewhere: Mapping[str, str]  # another trainer's name -> ours
    other_trainers: Mapping[str, list[str]]  # trainer -> names that only its files have together
    fsdp: Mapping[str, list[str]]
    deepspeed: Mapping[str, Any]
    parallelism: Mapping[str, str]  # member of accelerate's ParallelismConfig -> member of the layout
    model_init: Mapping[str, str]  # member of model_init_kwargs -> setting


@functools.cache
def option_names() -> OptionNames:
    """Read trl.toml, once."""
    data = dict(read_table(__file__, "trl.toml"))
    no_effect = {name: row["why"] for row in data.pop("no_effect") for name in row["names"]}
    only = {name: (row["allowed"], row["why"]) for row in data.pop("only") for name in row["names"]}
    return OptionNames(no_effect=no_effect, only=only, **data)


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


_ONE_RANK_GROUPS = {"tp": 1, "pp": 1, "cp": 1}  # every rank is a data-parallel one, unless the layout says otherwise
NODE = "node"  # of layout.dp_shard: the ranks of a node, however many the job comes to have
# transformers' string_to_bool, which reads the texts of a file's truths
_TRUTHS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def truth(value: Any) -> Any:
    """A quoted "true" or "no" as the truth that transformers reads in it; anything else as it is."""
    return _TRUTHS.get(value.lower(), value) if isinstance(value, str) else value


def flag(name: str, value: Any) -> bool | None:
    """Read a value as true, false or not set. Raises ConfigError that names the option."""
    found = truth(value)
    if not isinstance(found, bool | None):
        raise ConfigError(f"{name}={value!r}: must be true or false")
    return found


def hint(name: str, known: Iterable[str]) -> str:
    """The names nearest to an unknown one, as the end of a sentence."""
    if here := option_names().elsewhere.get(name):
        return f"; here it is {here}"
    close = difflib.get_close_matches(name, [*known], n=3)
    return f"; close: {', '.join(close)}" if close else ""


def without_effect(name: str, value: Any, note: Note) -> bool:
    """Whether a setting asks for nothing; a note says so, and a value that would ask for something is refused."""
    names = option_names()
    if name in names.no_effect:
        note(f"{name}: no effect, {names.no_effect[name]}")
        return True
    if name not in names.only:
        return False
    allowed, why = names.only[name]
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
    flags = {name: flag(name, raw.get(name)) for name in ("bf16", "fp16")}
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
    flags = {name: flag(name, value) for name, value in places.items() if value is not None}
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
        allowed = option_names().fsdp["strategies"]
        strategy = dict(enumerate(allowed, 1)).get(strategy, strategy)
        if not isinstance(strategy, str) or strategy.lower() not in allowed:
            raise ConfigError(f"fsdp_config.sharding_strategy={strategy!r}: allowed are {', '.join(allowed)}")
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
    words, known = [word.lower() for word in words], option_names().fsdp["words"]
    for word in words:
        if word not in known:
            raise ConfigError(f"fsdp={value!r}: {word!r} is none of {', '.join(known)}")
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
    where, known = f"fsdp_config.{name}", option_names().fsdp
    if name in known["no_effect"]:
        note(f"{where}: no effect with fully_shard")
    elif name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        if truth(value):
            raise ConfigError(f"{where}={value!r}: only false is allowed: the job runs on GPUs and CPUs")
    elif name == "reshard_after_forward" and isinstance(truth(value), str):  # accelerate's FSDP1 names its strategy so
        _sharded(_fsdp_words(value) or [], layout, note, where)
    elif name in ("reshard_after_forward", "cpu_offload", "offload_params"):
        value = flag(where, value)
        if value is not None and name == "reshard_after_forward":
            put(layout, name, value, where)
        elif value is not None and not (value is False and layout.get("offload") == "all"):  # "offload" among the words
            put(layout, "offload", "all" if value else "none", where)
    elif name not in known["members"]:
        raise ConfigError(f"unknown setting {where!r}{hint(name, [*known['members'], *known['no_effect']])}")


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
    passed = sorted(set(config) - set(option_names().deepspeed["sections"]))
    note(f"{where}: ZeRO stage {stage} is run by torch's {'fully_shard' if stage else 'DDP'}, without DeepSpeed"
         + (f"; no effect: {', '.join(passed)} (DeepSpeed's own buffers and logs)" if passed else ""))  # fmt: skip


def _deepspeed_alone(config: Mapping[str, Any], where: str) -> None:
    for name, nothing in option_names().deepspeed["alone"].items():
        value = config.get(name)
        plain = {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value
        if plain is not None and plain not in nothing:
            raise ConfigError(f"{where}.{name}={value!r}: only {nothing[-1]!r} is allowed: torch's fully_shard, "
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


def _deepspeed_scheduler(
    config: Mapping[str, Any], raw: Mapping[str, Any], values: dict[str, Any], where: str, note: Note
) -> None:
    kind, automatic = _section(config, "scheduler")
    schedules = option_names().deepspeed["schedules"]
    if kind is None:
        return
    if kind not in schedules or not automatic:
        raise ConfigError(f"{where}.scheduler: only {' or '.join(schedules)} with each parameter 'auto' is allowed: "
                          "learning_rate and warmup_steps decide")  # fmt: skip
    schedule = schedules[kind]
    if raw.get("lr_scheduler_type", schedule) != schedule:
        raise ConfigError(f"{where}.scheduler={kind}: is {schedule}, and lr_scheduler_type says "
                          f"{raw['lr_scheduler_type']!r}")  # fmt: skip
    values["lr_scheduler_type"] = schedule
    note(f"{where}.scheduler: {kind} is lr_scheduler_type: {schedule}, with a linear warm-up")


def parallelism(raw: Mapping[str, Any], layout: dict[str, Any], note: Note) -> None:
    """accelerate's ParallelismConfig."""
    config = raw.get("parallelism_config")
    if config is None:
        return
    if not isinstance(config, dict):
        raise ConfigError(f"parallelism_config={config!r}: must be a mapping")
    members = option_names().parallelism
    for key, value in config.items():
        name = str(key).removeprefix("parallelism_config_")
        if name in members:
            put(layout, members[name], value, f"parallelism_config.{name}")
        elif name in ("sp_size",) and value not in (None, 1):
            raise ConfigError(f"parallelism_config.{name}={value!r}: only 1 is allowed; cp_size splits the sequence")
        elif name in ("sp_size", "sp_backend", "cp_backend", "cp_handler", "sp_handler", "tp_handler"):
            note(f"parallelism_config.{name}: no effect")
        else:
            raise ConfigError(f"unknown setting 'parallelism_config.{name}'{hint(name, members)}")


def model_words(raw: dict[str, Any], note: Note) -> dict[str, Any]:
    """The file with `model_init_kwargs` as settings of their own."""
    config = raw.get("model_init_kwargs")
    rest = {key: value for key, value in raw.items() if key != "model_init_kwargs"}
    if config is None:
        return rest
    if not isinstance(config, dict):
        raise ConfigError(f"model_init_kwargs={config!r}: must be a mapping")
    settings = option_names().model_init
    for name, value in config.items():
        if name in ("use_cache", "low_cpu_mem_usage", "device_map", "use_safetensors"):
            note(f"model_init_kwargs.{name}: no effect, the layout says where weights are")
        elif name == "trust_remote_code":
            without_effect(name, value, note)
        elif name not in settings:
            raise ConfigError(f"unknown setting 'model_init_kwargs.{name}'{hint(str(name), settings)}")
        elif rest.setdefault(settings[name], value) != value:
            raise ConfigError(f"model_init_kwargs.{name}={value!r}: {settings[name]} says another")
    return rest
