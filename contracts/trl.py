"""Translate options of TRL and transformers to this job's settings, or report that an option has no effect.

Surface: `trl.toml` next to this module lists the options and their sources. `fsdp_config` accepts the member names of
transformers and accelerate, and a DeepSpeed configuration those of DeepSpeed. Each option becomes a setting or a layout
field, or a note reports that it has no effect, or it is rejected with the allowed values.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from contracts.layout import Layout
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


def option_names() -> dict[str, Any]:
    """Read trl.toml, whose comments describe its tables."""
    return read_table(__file__, "trl.toml")


FILES = ("deepspeed", "fsdp_config")  # each is a mapping, or the name of a file that contains it
MAX_LISTED = 24  # names that a message lists
MAX_SHOWN = 80  # characters of a rejected value in a message: a list of data sets can be very long


def spelled(member: str, value: Any) -> str:
    """Format a layout field as the user's option: "per_device_train_batch_size: 8"."""
    option = option_names()["spelled"].get(
        member, f"layout.{member}" if member in Layout.__dataclass_fields__ else member
    )
    if isinstance(option, dict):
        return str(option.get(value, option["another"]))
    return f"{option}: {str(value).lower() if isinstance(value, bool) else value}"


AUTO = "auto"  # in a DeepSpeed configuration: transformers takes the file's setting
NODE = "node"  # value of layout.dp_shard: the number of ranks per node
# Text values accepted by transformers' string_to_bool.
_TRUTHS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def truth(value: Any) -> Any:
    """Convert a quoted "true" or "no" to a bool as transformers does; return any other value unchanged."""
    return _TRUTHS.get(value.lower(), value) if isinstance(value, str) else value


def flag(name: str, value: Any) -> bool | None:
    """Convert a value to True, False or None (not set). Raises ConfigError, which names the option."""
    switch = truth(value)
    if not isinstance(switch, bool | None):
        raise ConfigError(f"{name}={value!r}: must be true or false")
    return switch


def hint(name: str, settings: Collection[str]) -> str:
    """Return in brackets the name that another trainer's option has here, or known names: all, or only similar ones."""
    if here := option_names()["elsewhere"].get(name):
        return f" (here it is {here})"
    if close := difflib.get_close_matches(name, settings, n=3):
        return f" (close: {', '.join(close)})"
    return f" (known: {', '.join(settings)})" if 0 < len(settings) <= MAX_LISTED else ""


def require(name: str, value: Any, row: Mapping[str, Any]) -> None:
    """Raise ConfigError if a value is not allowed (null always is), or OnlyTrlError if TRL's trainer accepts it."""
    allowed, reason = row["allowed"], row["why"]
    if any(isinstance(choice, bool) for choice in allowed):
        value = truth(value)
    if isinstance(value, dict):
        unset = (None, AUTO) if name.startswith("deepspeed.") else (None,)
        value = {key: item for key, item in value.items() if item not in unset}
    if value is None or any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        return
    *first, last = [repr(item) for item in allowed if item not in ("", {}, [])] or ["nothing"]
    choices = f"only {', '.join(first)} or {last}" if first else last if last == "nothing" else f"only {last}"
    value_text = repr(value)
    value_text = value_text if len(value_text) <= MAX_SHOWN else f"{value_text[:MAX_SHOWN]}..."
    kind = OnlyTrlError if row.get("trl") else ConfigError
    raise kind(f"{name}={value_text}: {choices} is allowed: {reason}")


def flatten(raw: Mapping[str, Any], refuse: Note, prefix: str = "") -> dict[str, Any]:
    """Return the options by name, with members of a nested mapping as "fsdp_config.cpu_offload".

    Null and "auto" members of a DeepSpeed configuration are left out, except those of `only`. Its default stage is 0.
    """
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if prefix:  # both prefixes are those of accelerate's own configuration file
            name = prefix + str(key).removeprefix(f"{prefix[:-1]}_").removeprefix("fsdp_")
        if name not in option_names()["nested"]:
            if value not in (None, AUTO) or not prefix.startswith("deepspeed.") or name in option_names()["only"]:
                flat[name] = value
        elif isinstance(value, dict):
            flat |= {"deepspeed.zero_optimization.stage": 0} if value and name == "deepspeed" else {}
            flat |= flatten(value, refuse, f"{name}.")
        elif value not in (None, ""):
            file = ", or the name of a file that exists" if name in FILES else ", not the name of a file"
            refuse(f"{name}={value!r}: must be a mapping{'' if prefix else file}")
    return flat


def sort_options(flat: Mapping[str, Any]) -> list[str]:
    """Return the options of a file, older names and members last: a message about two values then names these.

    An option that is null is left out if the file has a value under another name of the same setting.
    """
    renamed = option_names()["renamed"]
    set_names = {renamed.get(name, name) for name, value in flat.items() if value is not None}
    options = [name for name, value in flat.items() if value is not None or renamed.get(name, name) not in set_names]
    return sorted(options, key=lambda name: name in renamed or "." in name)


def translate(name: str, value: Any, note: Note) -> tuple[str, Any] | None:
    """Return the current name of an option and its value here, or None if it says nothing. Raises ConfigError."""
    names = option_names()
    if name in names["only"]:
        require(name, value, names["only"][name])
    today, means = names["renamed"].get(name, name), names["values"].get(name, {})
    key = truth(value) if "True" in means else value
    if not isinstance(key, bool):
        key = f"{value:g}" if isinstance(value, float) else str(value).lower()
    is_deepspeed, value = name.startswith("deepspeed."), means.get(str(key), value)
    is_checked = is_deepspeed and name in names["only"] and name not in names["values"]  # it leaves no note
    if is_checked or (value is None and today != name) or means.get(str(key)) == "":
        return None
    if today != name and not is_deepspeed:
        note(f"{name} is now {today}{', below 1' if name == 'warmup_ratio' else ''}")
    return today, value


def set_switch(member: str, flat: Mapping[str, Any], layout: dict[str, Any]) -> None:
    """Set a layout field that options of true and false decide. It is on if any of them is true."""
    row = option_names()["switch"][member]
    values, flags = row["options"], {name: flag(name, flat.get(name)) for name in row["options"]}
    on = [name for name in values if flags[name]]
    off = [name for name in values if flags[name] is False and len(values[name]) > 1]
    for name in on or off[:1]:
        put(layout, member, values[name][not on], name)
    for name, reason in row.get("only_trl", {}).items():
        if name in on:
            raise OnlyTrlError(f"{name}=true: {reason}")


def put(target: dict[str, Any], member: str, value: Any, name: str) -> None:
    """Set a setting or a layout field. Raises ConfigError if another option of the file set a different value."""
    if target.get(member, value) != value:
        raise ConfigError(
            f"{name} asks for {spelled(member, value)}, and the file says {spelled(member, target[member])}"
        )
    target[member] = value


def set_sharding(flat: Mapping[str, Any], options: Mapping[str, Any], layout: dict[str, Any], note: Note) -> None:
    """Convert the words of `fsdp` and `fsdp_config`, or those of a DeepSpeed configuration, to layout fields.

    DeepSpeed's ZeRO is run by torch's fully_shard, or by DDP in stage 0. What no option says has accelerate's default:
    all ranks are data parallel, weights are gathered again in the backward pass, and nothing is offloaded.
    """
    table, reshard = option_names()["fsdp"], "fsdp_config.reshard_after_forward"
    is_off, words = truth(flat.get("fsdp")) is False, dict[str, str]()
    for name in option_names()["of_fsdp"]:
        if not (is_off and name.startswith("fsdp_config.")):
            words |= dict.fromkeys(_split_fsdp_words(name, options.get(name)), name)
    zero = "deepspeed.zero_optimization"
    if len({flat.get(f"{zero}.{part}.device") == "cpu" for part in ("offload_optimizer", "offload_param")}) > 1:
        both = "offload_optimizer and offload_param must both be on the cpu, or neither"
        raise ConfigError(f"{zero}: {both}: fully_shard moves weights and optimizer together")
    strategies = [word for word in words if "sharding" in table[word]]
    if len(strategies) > 1:
        raise ConfigError(f"{words[strategies[-1]]}: asks for {' and '.join(strategies)}: one of them is allowed")
    if words and not strategies:
        words["full_shard"] = next(iter(words.values()))
    for word, name in words.items():
        for member, value in table[word].items():
            if value != NODE or not {"dp_replicate", "dp_shard"} & set(layout):
                put(layout, member, value, name)
    for name in ("fsdp_config.cpu_offload", "fsdp_config.offload_params"):
        if truth(flat.get(name)) is False and layout.get("offload") != "all":
            put(layout, "offload", "none", name)
    if reshard not in words.values() and (value := flag(reshard, options.get(reshard))) is not None:
        put(layout, "reshard_after_forward", value, reshard)
    if words:
        _set_fsdp_defaults(words, layout)
        name, shown = next(iter(words.values())), " ".join(word for word in words if word != "true")
        sharding = f"{name}: {shown} is {spelled('sharding', layout['sharding'])} here"
        if name.startswith(zero):
            stage, kind = int(flat[f"{zero}.stage"] or 0), "DDP" if layout["sharding"] == "ddp" else "fully_shard"
            sharding = f"deepspeed: ZeRO stage {stage} is run by torch's {kind}, without DeepSpeed"
        note(sharding)


def _set_fsdp_defaults(word_names: Mapping[str, str], layout: dict[str, Any]) -> None:
    """Set what no option says. ZeRO stage 3 always gathers weights again in the backward pass."""
    defaults: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1}
    if layout["sharding"] == "zero3":
        if word_names.get("full_shard", "").startswith("deepspeed."):
            put(layout, "reshard_after_forward", True, word_names["full_shard"])
        defaults |= {"reshard_after_forward": True, "offload": "none"}
        if "dp_shard" not in layout:
            defaults["dp_replicate"] = 1
    for member, value in defaults.items():
        layout.setdefault(member, value)


def _split_fsdp_words(name: str, value: Any) -> list[str]:
    """Return the words of an option in lower case. transformers writes "" or [] for "not set"."""
    allowed = [word for word, sets in option_names()["fsdp"].items() if "sharding" in sets]
    if name.endswith("reshard_after_forward"):  # true and false are no words, but a switch
        value, choices = None if isinstance(truth(value), bool) else value, ["true", "false", *allowed]
    elif name == "fsdp_config.sharding_strategy":
        choices = allowed
    else:
        allowed = [*option_names()["fsdp"]]
        choices = [*dict.fromkeys(("true", "false", *allowed))]
    words = (value or "").split() if isinstance(value, str | None) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.lower() in allowed for word in words):
        raise ConfigError(f"{name}={value!r}: allowed are {', '.join(choices)}")
    return [word.lower() for word in words]


def make_trl_settings(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file for TRL's parser, with current names and the values of its DeepSpeed section (`values`).

    Options that the layout holds are omitted, because the plan's layout sets them.
    """
    table = option_names()["of_trl"]
    left_out = {*option_names()["in_layout"], *table["left_out"]}
    settings = {table["renamed"].get(name, name): raw[name] for name in sort_options(raw) if name not in left_out}
    if (ratio := settings.pop("warmup_ratio", None)) and not settings.get("warmup_steps"):
        settings["warmup_steps"] = ratio
    if truth(settings.pop("group_by_length", None)):
        settings.setdefault("train_sampling_strategy", "group_by_length")
    of_deepspeed = {name: values[name] for name in ("max_grad_norm", "lr_scheduler_type") if name in values}
    return {**settings, **of_deepspeed} if raw.get("deepspeed") else settings
