"""Translate options of TRL and transformers to this job's settings, or report that an option has no effect.

Surface: `trl.toml` next to this module lists the options and their sources. `fsdp_config` accepts the member names of
transformers and accelerate, and a DeepSpeed configuration those of DeepSpeed. Each option becomes a setting or a layout
field, or a note reports that it has no effect, or it is rejected with the allowed values.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
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


@functools.cache
def option_names() -> dict[str, Any]:
    """Read trl.toml, whose comments describe its tables, with the rows of `no_effect` and `only` by option."""

    def by_option(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {name: row for row in rows for name in row["names"]}

    table = read_table(__file__, "trl.toml")
    deepspeed = table["deepspeed"]
    return table | {
        "no_effect": by_option(table["no_effect"]),
        "only": by_option(table["only"]),
        "deepspeed": deepspeed | {"only": by_option(deepspeed["only"])},
    }


MOST_LISTED = 24  # names that a message lists
MOST_SHOWN = 80  # characters of a rejected value in a message: a list of data sets can be very long


def spelled(member: str, value: Any) -> str:
    """Format a layout field as the user's option: "per_device_train_batch_size: 8"."""
    option = option_names()["spelled"].get(member, f"layout.{member}")
    if isinstance(option, dict):
        return str(option.get(value, option["another"]))
    return f"{option}: {str(value).lower() if isinstance(value, bool) else value}"


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
    """Return in brackets the name that another trainer's option has here, or known names: all, or only similar ones."""
    if here := option_names()["elsewhere"].get(name):
        return f" (here it is {here})"
    names = [*known]
    if close := difflib.get_close_matches(name, names, n=3):
        return f" (close: {', '.join(close)})"
    return f" (known: {', '.join(names)})" if 0 < len(names) <= MOST_LISTED else ""


def require(name: str, value: Any, row: Mapping[str, Any]) -> None:
    """Raise ConfigError if a value is not allowed (null always is), or OnlyTrlError if TRL's trainer accepts it."""
    allowed, why = row["allowed"], row["why"]
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
    kind = OnlyTrlError if row.get("trl") else ConfigError
    raise kind(f"{name}={shown}: {named} is allowed: {why}")


def flatten(raw: Mapping[str, Any], refuse: Note) -> dict[str, Any]:
    """Return the options by name, with members of a nested mapping as "fsdp_config.cpu_offload"."""
    flat: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in option_names()["nested"]:
            flat[name] = value
        elif isinstance(value, dict):
            # both prefixes are those of accelerate's own configuration file
            names = {str(key).removeprefix(f"{name}_").removeprefix("fsdp_"): key for key in value}
            flat |= {f"{name}.{own}": value[key] for own, key in names.items()}
        elif value is not None:
            file = "or a file of one that is there" if name == "fsdp_config" else "not the name of a file"
            refuse(f"{name}={value!r}: must be a mapping, {file}")
    return flat


def switch(member: str, flat: Mapping[str, Any], layout: dict[str, Any]) -> None:
    """Set a layout field that options of true and false decide. It is on if any of them is true."""
    row = option_names()["switch"][member]
    values, flags = row["options"], {name: flag(name, flat.get(name)) for name in row["options"]}
    on = [name for name in values if flags[name]]
    off = [name for name in values if flags[name] is False and len(values[name]) > 1]
    for name in (on or off)[:1]:
        if member not in layout or layout[member] != row.get("stays"):
            put(layout, member, values[name][not on], name)
        if on and name in row.get("only_trl", {}):
            raise OnlyTrlError(f"{name}=true: {row['only_trl'][name]}")


def put(layout: dict[str, Any], member: str, value: Any, name: str) -> None:
    """Set a layout field. Raises ConfigError if another option of the file set a different value."""
    if layout.get(member, value) != value:
        raise ConfigError(
            f"{name} asks for {spelled(member, value)}, and the file says {spelled(member, layout[member])}"
        )
    layout[member] = value


def fsdp(flat: Mapping[str, Any], layout: dict[str, Any], note: Note) -> None:
    """Convert the words of `fsdp` and `fsdp_config` to layout fields."""
    table, words, reshard = option_names()["fsdp"], dict[str, str](), "fsdp_config.reshard_after_forward"
    is_off = truth(flat.get("fsdp")) is False
    for name in ("fsdp",) if is_off else ("fsdp", "fsdp_config.sharding_strategy", reshard):
        words |= dict.fromkeys(_split_fsdp_words(name, flat.get(name)), name)
    strategies = [word for word in words if "sharding" in table[word]]
    if len(strategies) > 1:
        raise ConfigError(f"{words[strategies[-1]]}: asks for {' and '.join(strategies)}: one of them is allowed")
    if words and not strategies:
        words["full_shard"] = next(iter(words.values()))
    for word, name in words.items():
        for member, value in table[word].items():
            if value != NODE or not {"dp_replicate", "dp_shard"} & set(layout):
                put(layout, member, value, name)
    if words:
        _set_data_parallel(layout)
        shown = " ".join(word for word in words if word != "true")
        note(f"{next(iter(words.values()))}: {shown} is {spelled('sharding', layout['sharding'])} here")
    if reshard not in words.values() and (value := flag(reshard, flat.get(reshard))) is not None:
        put(layout, "reshard_after_forward", value, reshard)


def _split_fsdp_words(name: str, value: Any) -> list[str]:
    """Return the words of an option in lower case. transformers writes "" or [] for "not set"."""
    table, value = option_names()["fsdp"], truth(value)
    strategies = [word for word in table if "sharding" in table[word]]
    allowed = [*table] if name == "fsdp" else strategies
    if isinstance(value, bool) and name == "fsdp":
        value = "true" if value else "no_shard"
    elif isinstance(value, bool) and name == "fsdp_config.reshard_after_forward":  # no word, but a switch
        value = None
    elif type(value) is int and name == "fsdp_config.sharding_strategy":
        value = dict(enumerate(strategies, 1)).get(value, value)
    words = (value or "").split() if isinstance(value, str | None) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.lower() in allowed for word in words):
        shown = allowed if name == "fsdp_config.sharding_strategy" else dict.fromkeys(("true", "false", *allowed))
        raise ConfigError(f"{name}={value!r}: allowed are {', '.join(shown)}")
    return [word.lower() for word in words]


def set_fsdp_defaults(flat: Mapping[str, Any], layout: dict[str, Any]) -> None:
    """Set accelerate's defaults where no word and no member says otherwise: the plan must not change them."""
    if any(name.startswith("fsdp") for name in flat) and layout.get("sharding") == "zero3":
        layout.setdefault("reshard_after_forward", True)
        layout.setdefault("offload", "none")


def _set_data_parallel(layout: dict[str, Any]) -> None:
    """All ranks are data parallel, unless the layout says otherwise."""
    for degree in ("tp", "pp", "cp"):
        layout.setdefault(degree, 1)
    if layout["sharding"] == "zero3" and "dp_shard" not in layout:
        layout.setdefault("dp_replicate", 1)


def deepspeed(raw: Mapping[str, Any], values: dict[str, Any], layout: dict[str, Any], note: Note) -> None:
    """Convert a DeepSpeed configuration to layout fields: fully_shard with the sharding of its ZeRO stage."""
    config, table = raw.get("deepspeed"), option_names()["deepspeed"]
    if config in (None, "", {}):
        return
    if not isinstance(config, dict):
        raise ConfigError(f"deepspeed={config!r}: must be a mapping, or a JSON file that is there")
    if not isinstance(zero := config.get("zero_optimization"), dict | None):
        raise ConfigError(f"deepspeed.zero_optimization={zero!r}: must be a mapping")
    for name, row in table["only"].items():
        require(f"deepspeed.{name}", _at(config, name), row)
    stage, where = _at(config, "zero_optimization.stage") or 0, "deepspeed.zero_optimization"
    put(layout, "sharding", "zero3" if stage else "ddp", f"{where}.stage")
    if stage:
        put(layout, "reshard_after_forward", stage == 3, f"{where}.stage")
    _set_data_parallel(layout)
    optimizer, weights = (_at(config, f"zero_optimization.offload_{name}.device") for name in ("optimizer", "param"))
    if (optimizer == "cpu") != (weights == "cpu"):
        both = "offload_optimizer and offload_param must both be on the cpu, or neither"
        raise ConfigError(f"{where}: {both}: fully_shard moves weights and optimizer together")
    if weights == "cpu" or "offload" not in layout:
        put(layout, "offload", "all" if weights == "cpu" else "none", f"{where}.offload_param")
    for name, member in table["members"].items():
        if config.get(name, "auto") != "auto":
            put(layout, member, config[name], f"deepspeed.{name}")
    if _at(config, "bf16.enabled") is True:
        put(layout, "precision", "bf16", "deepspeed.bf16")
    settings = _deepspeed_settings(config)
    for name, value in settings.items():
        if raw.get(name, value) != value:
            raise ConfigError(f"deepspeed asks for {name}={value!r}, and the file says {raw[name]!r}")
    values |= settings
    passed = sorted(set(config) - set(table["sections"]))
    note(f"deepspeed: ZeRO stage {stage} is run by torch's {'fully_shard' if stage else 'DDP'}, without DeepSpeed"
         + (f"; no effect: {', '.join(passed)} (DeepSpeed's own buffers and logs)" if passed else ""))  # fmt: skip


def _at(config: Any, name: str) -> Any:
    """Return the value at a dotted path such as "optimizer.type", else None. `optimizer: AdamW` is read as its type."""
    for word in name.split("."):
        config = config.get(word) if isinstance(config, dict) else config
    return config


def _deepspeed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that DeepSpeed's file decides. Parameters of its optimizer and schedule must be "auto"."""
    clipping = config.get("gradient_clipping", "auto")
    settings = {} if clipping == "auto" else {"max_grad_norm": clipping}
    for section, types in option_names()["deepspeed"]["types"].items():
        kind, parameters = _at(config, f"{section}.type"), _at(config, f"{section}.params")
        given = parameters.values() if isinstance(parameters, dict) else [parameters]
        is_open = parameters in (None, kind) or all(value == "auto" for value in given)
        if kind is not None and not (str(kind) in types and is_open):
            raise ConfigError(f"deepspeed.{section}: only {' or '.join(types)} with each parameter 'auto' is allowed: "
                              "learning_rate, warmup_steps, adam_beta1, weight_decay ... decide")  # fmt: skip
        settings |= types.get(kind, {})
    return settings


def trl_settings(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file for TRL's parser, with current names and the values of its DeepSpeed section (`values`).

    Options that the layout holds are omitted, because the plan's layout sets them.
    """
    table = option_names()["of_trl"]
    left_out = {*option_names()["in_layout"], *table["left_out"]}
    made = {table["renamed"].get(name, name): value for name, value in raw.items() if name not in left_out}
    if (ratio := made.pop("warmup_ratio", None)) and not made.get("warmup_steps"):
        made["warmup_steps"] = ratio
    if truth(made.pop("group_by_length", None)):
        made.setdefault("train_sampling_strategy", "group_by_length")
    of_deepspeed = {name: values[name] for name in ("max_grad_norm", "lr_scheduler_type") if name in values}
    return {**of_deepspeed, **made} if raw.get("deepspeed") else made
