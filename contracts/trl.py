"""Translate options of TRL and transformers to this job's settings, or report that an option has no effect.

Surface: `trl.toml` next to this module lists the options and their sources. `fsdp_config` accepts the member names of
transformers and accelerate, and a DeepSpeed configuration those of DeepSpeed. Each option becomes a setting or a layout
field, or a note reports that it has no effect, or it is rejected with the allowed values.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from contracts.tables import read_table

Note = Callable[[str], None]


class EndedError(Exception):
    """The job ends before its last step, in a controlled way. Exit codes are those of sysexits.h."""

    code = 1
    status = "failed"  # status in run.json


class ConfigError(EndedError, ValueError):
    """A setting is invalid; the message names the setting, its value and the allowed values."""

    code, status = 2, "refused"


class OnlyTrlError(ConfigError):
    """A setting that TRL's trainer supports and the built-in trainer does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Values that the built-in trainer accepts for some options, the reason, and whether TRL accepts any value."""

    names: list[str]
    allowed: list[Any]
    why: str
    trl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A nested mapping in the file, such as `fsdp_config`."""

    members: Mapping[str, str]  # name -> setting of the job, or field of the layout
    no_effect: list[str]
    why: str  # reason that the no_effect members have none
    only: Mapping[str, Allowed]
    open: bool = False  # whether TRL passes unknown members on


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionNames:
    """The tables of trl.toml."""

    renamed: Mapping[str, str]  # older name -> current name
    in_layout: Mapping[str, str]  # setting that is stored as a layout field -> the field
    spelled: Mapping[str, str]  # layout field -> the user's option for it
    read_apart: list[str]  # settings that a function of contracts.trl reads
    rewritten: list[str]  # settings that become other ones
    shares: list[str]  # of which transformers reads values below 1 as a fraction of all steps
    no_effect: Mapping[str, str]  # name -> reason
    only: Mapping[str, Allowed]
    elsewhere: Mapping[str, str]  # option of another trainer -> our option
    fsdp: Mapping[str, list[str]]
    deepspeed: Mapping[str, Any]
    sections: Mapping[str, Section]
    of_trl: Mapping[str, Any]  # options TRL's parser must not get, names it knows, other methods' settings


@functools.cache
def option_names() -> OptionNames:
    """Read trl.toml; cached."""

    def only_of(rows: list[dict[str, Any]]) -> dict[str, Allowed]:
        return {name: allowed for allowed in (Allowed(**row) for row in rows) for name in allowed.names}

    data = dict(read_table(__file__, "trl.toml"))
    return OptionNames(
        no_effect={name: row["why"] for row in data.pop("no_effect") for name in row["names"]},
        only=only_of(data.pop("only")),
        deepspeed={**(table := data.pop("deepspeed")), "only": only_of(table["only"])},
        sections={name: Section(**{**row, "only": only_of(row["only"])}) for name, row in data.pop("sections").items()},
        **data,
    )


MOST_SHOWN = 80  # characters of a rejected value in a message: a list of data sets can be very long


def spelled(member: str, value: Any) -> str:
    """Format a layout field as the user's option: "per_device_train_batch_size: 8"."""
    if member == "precision":
        return "fp16: true" if value == "fp16" else f"bf16: {'true' if value == 'bf16' else 'false'}"
    if member == "sharding":
        return f"fsdp: {'false' if value == 'ddp' else 'full_shard'}"
    if member == "checkpointing":
        return "layout.checkpointing: selective" if value == "selective" else f"gradient_checkpointing: {_yaml(value)}"
    return f"{option_names().spelled.get(member, f'layout.{member}')}: {_yaml(value)}"


def _yaml(value: Any) -> str:
    return {True: "true", False: "false", "full": "true", "all": "true", "none": "false", None: "null"}.get(
        value if isinstance(value, bool | str | None) else "", str(value)
    )


_ONE_RANK_GROUPS = {"tp": 1, "pp": 1, "cp": 1}  # all ranks are data parallel, unless the layout says otherwise
NODE = "node"  # value of layout.dp_shard: the number of ranks per node
# Text values accepted by transformers' string_to_bool.
_TRUTHS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def truth(value: Any) -> Any:
    """Convert a quoted "true" or "no" to a bool as transformers does; return any other value unchanged."""
    return _TRUTHS.get(value.lower(), value) if isinstance(value, str) else value


def flag(name: str, value: Any) -> bool | None:
    """Convert a value to True, False or None (not set). Raises ConfigError, which names the option."""
    found = truth(value)
    if not isinstance(found, bool | None):
        raise ConfigError(f"{name}={value!r}: must be true or false")
    return found


def hint(name: str, known: Iterable[str]) -> str:
    """Suggest known names similar to an unknown one, as the end of a sentence."""
    if here := option_names().elsewhere.get(name):
        return f"; here it is {here}"
    close = difflib.get_close_matches(name, [*known], n=3)
    return f"; close: {', '.join(close)}" if close else ""


def without_effect(name: str, value: Any, note: Note) -> bool:
    """Whether an option has no effect, which is noted. Raises ConfigError if its value asks for something else."""
    names = option_names()
    if name in names.no_effect:
        note(f"{name}: no effect, {names.no_effect[name]}")
        return True
    if name not in names.only:
        return False
    require(name, value, names.only[name])
    note(f"{name}: no effect, {names.only[name].why}")
    return True


def require(name: str, value: Any, only: Allowed) -> None:
    """Raise ConfigError if a value is not allowed (null always is), or OnlyTrlError if TRL's trainer accepts it."""
    allowed, why = only.allowed, only.why
    if any(isinstance(one, bool) for one in allowed):
        value = truth(value)
    if isinstance(value, dict):
        value = {key: one for key, one in value.items() if one is not None}
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        return
    *first, last = [repr(one) for one in allowed if one not in ("", {}, [])] or ["nothing"]
    named = f"only {', '.join(first)} or {last}" if first else last if last == "nothing" else f"only {last}"
    shown = repr(value)
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
    kind = OnlyTrlError if only.trl else ConfigError
    raise kind(f"{name}={shown}: {named} is allowed: {why}")


def members_of(raw: Mapping[str, Any], name: str, note: Note) -> Iterator[tuple[str, str, Any]]:
    """Yield (full name, own name, value) of each member of a nested mapping that the job uses.

    Members without effect are noted. Unknown members and unsupported values raise ConfigError.
    """
    found, section = raw.get(name), option_names().sections[name]
    if found is None:
        return
    if not isinstance(found, dict):
        file = "or a file of one that is there" if name == "fsdp_config" else "not the name of a file"
        raise ConfigError(f"{name}={found!r}: must be a mapping, {file}")
    for key, value in found.items():
        own = str(key).removeprefix(f"{name}_").removeprefix("fsdp_")  # prefix in accelerate's own configuration file
        where = f"{name}.{own}"
        if own in section.members:
            yield where, own, value
        elif own in section.only:
            require(where, value, section.only[own])
        elif own not in section.no_effect:
            kind = OnlyTrlError if section.open else ConfigError
            raise kind(f"unknown setting {where!r}{hint(own, [*section.members, *section.no_effect])}")
        else:
            note(f"{where}: no effect, {section.why}")


def precision(raw: Mapping[str, Any], layout: dict[str, Any]) -> None:
    """Set the layout's precision from bf16 and fp16; if neither is set, the precision stays open."""
    flags = {name: flag(name, raw.get(name)) for name in ("bf16", "fp16")}
    if flags["fp16"]:
        put(layout, "precision", "fp16", "fp16")
        raise OnlyTrlError("fp16=true: not supported, allowed are bf16 and fp32; set bf16: true or bf16: false")
    if flags["bf16"] is not None:
        put(layout, "precision", "bf16" if flags["bf16"] else "fp32", "bf16")


def put(layout: dict[str, Any], member: str, value: Any, name: str) -> None:
    """Set a layout field. Raises ConfigError if another option of the file set a different value."""
    if layout.get(member, value) != value:
        raise ConfigError(
            f"{name} asks for {spelled(member, value)}, and the file says {spelled(member, layout[member])}"
        )
    layout[member] = value


def checkpointing(raw: Mapping[str, Any], layout: dict[str, Any]) -> None:
    """Set recomputation. It has several options (FSDP's and the Trainer's) and is on if any of them is on."""
    inside = raw.get("fsdp_config")
    places = {name: raw.get(name) for name in ("gradient_checkpointing", "activation_checkpointing")}
    for name in ("activation_checkpointing", "fsdp_activation_checkpointing"):
        if isinstance(inside, dict) and name in inside:
            places[f"fsdp_config.{name}"] = inside[name]
    flags = {name: flag(name, value) for name, value in places.items() if value is not None}
    if flags and not (any(flags.values()) and layout.get("checkpointing") == "selective"):
        put(layout, "checkpointing", "full" if any(flags.values()) else "none", next(iter(flags)))


def fsdp(raw: Mapping[str, Any], layout: dict[str, Any], note: Note) -> None:
    """Convert `fsdp` and `fsdp_config` to layout fields."""
    value = raw.get("fsdp")
    words = _split_fsdp_words(value)
    options = {own: (where, each) for where, own, each in members_of(raw, "fsdp_config", note)}
    _, strategy = options.get("sharding_strategy", ("", None))
    if strategy is not None and truth(value) is not False:
        allowed = option_names().fsdp["strategies"]
        strategy = dict(enumerate(allowed, 1)).get(strategy, strategy)
        if not isinstance(strategy, str) or strategy.lower() not in allowed:
            raise ConfigError(f"fsdp_config.sharding_strategy={strategy!r}: allowed are {', '.join(allowed)}")
        words = [*(words or []), strategy.lower()]
    if words is not None:
        _set_sharding(words, layout, note, "fsdp" if value is not None else "fsdp_config.sharding_strategy")
    for name, (where, each) in options.items():
        _set_fsdp_member(name, where, each, layout, note)
    if (words is not None or raw.get("fsdp_config")) and layout.get("sharding") == "zero3":
        # defaults of accelerate if no word and no member says otherwise: the plan must not change them
        layout.setdefault("reshard_after_forward", True)
        layout.setdefault("offload", "none")


def _split_fsdp_words(value: Any) -> list[str] | None:
    """Return the words of `fsdp`; None if the option is empty, because transformers writes "" or [] for "not set"."""
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


def _set_sharding(words: list[str], layout: dict[str, Any], note: Note, name: str) -> None:
    strategies = set(words) - {"auto_wrap", "offload"}
    if len(strategies) > 1:
        raise ConfigError(f"{name}: asks for {' and '.join(sorted(strategies))}: one of them is allowed")
    strategy = strategies.pop() if strategies else "full_shard"
    put(layout, "sharding", "ddp" if strategy == "no_shard" else "zero3", name)
    if strategy.startswith("hybrid_shard") and not {"dp_replicate", "dp_shard"} & set(layout):
        layout["dp_shard"] = NODE
    if strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        put(layout, "reshard_after_forward", False, name)
    if "offload" in words:
        put(layout, "offload", "all", name)
    _set_data_parallel(layout)
    note(f"{name}: {' '.join(words)} is {spelled('sharding', layout['sharding'])} of torch's fully_shard"
         if strategy != "no_shard" else f"{name}: weights are not sharded")  # fmt: skip


def _set_data_parallel(layout: dict[str, Any]) -> None:
    for degree, one in _ONE_RANK_GROUPS.items():
        layout.setdefault(degree, one)
    if layout["sharding"] == "zero3" and "dp_shard" not in layout:
        layout.setdefault("dp_replicate", 1)


def _set_fsdp_member(name: str, where: str, value: Any, layout: dict[str, Any], note: Note) -> None:
    if name == "reshard_after_forward" and isinstance(truth(value), str):  # FSDP1's strategy in accelerate
        _set_sharding(_split_fsdp_words(value) or [], layout, note, where)
    elif name in ("reshard_after_forward", "cpu_offload", "offload_params"):
        value = flag(where, value)
        if value is not None and name == "reshard_after_forward":
            put(layout, name, value, where)
        elif value is not None and not (value is False and layout.get("offload") == "all"):  # `fsdp` has "offload"
            put(layout, "offload", "all" if value else "none", where)


def deepspeed(raw: Mapping[str, Any], values: dict[str, Any], layout: dict[str, Any], note: Note) -> None:
    """Convert a DeepSpeed configuration to layout fields: fully_shard with the sharding of its ZeRO stage."""
    config, table = raw.get("deepspeed"), option_names().deepspeed
    if config in (None, "", {}):
        return
    if not isinstance(config, dict):
        raise ConfigError(f"deepspeed={config!r}: must be a mapping, or a JSON file that is there")
    if not isinstance(zero := config.get("zero_optimization"), dict | None):
        raise ConfigError(f"deepspeed.zero_optimization={zero!r}: must be a mapping")
    for name, only in table["only"].items():
        require(f"deepspeed.{name}", _at(config, name), only)
    stage, where = _at(config, "zero_optimization.stage") or 0, "deepspeed.zero_optimization"
    put(layout, "sharding", "zero3" if stage else "ddp", f"{where}.stage")
    if stage:
        put(layout, "reshard_after_forward", stage == 3, f"{where}.stage")
    _set_data_parallel(layout)
    offloads = {
        _at(config, f"zero_optimization.{name}.device") == "cpu" for name in ("offload_optimizer", "offload_param")
    }
    if len(offloads) > 1:
        raise ConfigError(
            f"{where}: offload_optimizer and offload_param must both be on the cpu, or neither: fully_shard moves "
            "weights and optimizer together"
        )
    if True in offloads:
        put(layout, "offload", "all", f"{where}.offload_param")
    else:
        layout.setdefault("offload", "none")
    for name, member in table["members"].items():
        if config.get(name, "auto") != "auto":
            put(layout, member, config[name], f"deepspeed.{name}")
    if _at(config, "bf16.enabled") is True:
        put(layout, "precision", "bf16", "deepspeed.bf16")
    clipping = config.get("gradient_clipping", "auto")
    if clipping != "auto":
        if raw.get("max_grad_norm", clipping) != clipping:
            raise ConfigError(f"deepspeed.gradient_clipping={clipping!r}: max_grad_norm says {raw['max_grad_norm']!r}")
        values["max_grad_norm"] = clipping
    _require_auto(config, "optimizer", ("Adam", "AdamW"), "learning_rate, adam_beta1, weight_decay ... decide")
    schedules = table["schedules"]
    if kind := _require_auto(config, "scheduler", tuple(schedules), "learning_rate and warmup_steps decide"):
        schedule = schedules[kind]
        if raw.get("lr_scheduler_type", schedule) != schedule:
            raise ConfigError(f"deepspeed.scheduler={kind}: is {schedule}, and lr_scheduler_type says "
                              f"{raw['lr_scheduler_type']!r}")  # fmt: skip
        values["lr_scheduler_type"] = schedule
        note(f"deepspeed.scheduler: {kind} is lr_scheduler_type: {schedule}, with a linear warm-up")
    passed = sorted(set(config) - set(table["sections"]))
    note(f"deepspeed: ZeRO stage {stage} is run by torch's {'fully_shard' if stage else 'DDP'}, without DeepSpeed"
         + (f"; no effect: {', '.join(passed)} (DeepSpeed's own buffers and logs)" if passed else ""))  # fmt: skip


def _at(config: Any, name: str) -> Any:
    """Return the value at a dotted path such as "optimizer.type", else None. `optimizer: AdamW` is read as its type."""
    for word in name.split("."):
        config = config.get(word) if isinstance(config, dict) else config
    return config


def _require_auto(config: Mapping[str, Any], section: str, kinds: tuple[str, ...], why: str) -> str | None:
    """Return the type in a section, None if there is no section. All of its parameters must be "auto"."""
    kind, parameters = _at(config, f"{section}.type"), _at(config, f"{section}.params")
    values = parameters.values() if isinstance(parameters, dict) else [parameters]
    own = parameters not in (None, kind) and any(value != "auto" for value in values)
    if kind is not None and (kind not in kinds or own):
        raise ConfigError(
            f"deepspeed.{section}: only {' or '.join(kinds)} with each parameter 'auto' is allowed: {why}"
        )
    return kind  # type: ignore[no-any-return]


def parallelism(raw: Mapping[str, Any], layout: dict[str, Any], note: Note) -> None:
    """Convert accelerate's ParallelismConfig to layout fields."""
    for where, own, value in members_of(raw, "parallelism_config", note):
        put(layout, option_names().sections["parallelism_config"].members[own], value, where)


def model_words(raw: dict[str, Any], rest: dict[str, Any], note: Note) -> None:
    """Add the members of `model_init_kwargs` to `rest` as separate settings."""
    for where, own, value in members_of(raw, "model_init_kwargs", note):
        setting = option_names().sections["model_init_kwargs"].members[own]
        if rest.setdefault(setting, value) != value:
            raise ConfigError(f"{where}={value!r}: {setting} has another value")


def trl_settings(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file for TRL's parser, with current names and the values of its DeepSpeed section (`values`).

    Options that the layout holds are omitted, because the plan's layout sets them.
    """
    table = option_names().of_trl
    left_out = {*option_names().in_layout, *table["left_out"]}
    made = {table["renamed"].get(name, name): value for name, value in raw.items() if name not in left_out}
    if (ratio := made.pop("warmup_ratio", None)) and not made.get("warmup_steps"):
        made["warmup_steps"] = ratio
    if truth(made.pop("group_by_length", None)):
        made.setdefault("train_sampling_strategy", "group_by_length")
    of_deepspeed = {name: values[name] for name in ("max_grad_norm", "lr_scheduler_type") if name in values}
    return {**of_deepspeed, **made} if raw.get("deepspeed") else made
