"""Reads a trainer's command line: the number of ranks from the launcher, and the script's arguments as settings.

Surface: torchrun (torch 2.13 torch/distributed/run.py), `accelerate launch` and its file (accelerate 1.15
ClusterConfig), `deepspeed`, `trl sft`; scripts with TrlParser or HfArgumentParser (`--name value`, `--config FILE`),
and DeepSpeed's JSON.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.job_config import ConfigError, known_settings, parse_mapping, with_overrides
from contracts.tables import read_patterns, read_table
from planner.lint.expansion import limit_parsing, parse, walk

Files = Callable[[str], str | None]  # returns the text of a file named in the command; None if it cannot be read

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "trl")
_SHELLS = ("bash", "sh", "ash", "dash", "zsh")
_NODES = ("nnodes", "num_machines", "num_nodes")
_RANKS = ("nproc_per_node", "num_gpus")
_TABLE = read_table(__file__, "scripts.toml")
_PATTERNS = read_patterns(__file__, "scripts.toml", "pattern", str)


@dataclass(slots=True, kw_only=True)
class CommandSettings:
    """Settings found in a command. None and empty mean that the command does not specify them."""

    launcher: str = ""  # "torchrun", "accelerate", ...
    script: str = ""
    nodes: int | None = None
    ranks_per_node: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # under the names of TRL and transformers
    unknown: list[str] = field(default_factory=list)  # parts that could not be read, and the consequences
    notes: list[str] = field(default_factory=list)


def read_command(command: Sequence[str], files: Files) -> CommandSettings:
    """Parse the command of a container, or of a shell. A command without known parts is reported as unknown."""
    parsed = CommandSettings()
    limit_parsing()
    line = next(filter(None, map(_find_launch, _split_commands(command))), None)
    if line is None:
        parsed.unknown.append("the command starts no torchrun, accelerate, deepspeed or script that is read")
        return parsed
    parsed.launcher = os.path.basename(line[0])  # noqa: PTH119
    script = _find_script(line)
    if script is None:
        parsed.unknown.append(f"{parsed.launcher}: which script it starts")
        return parsed
    parsed.script = line[script]
    options = _parse_options(line[1:script])
    if parsed.launcher.startswith("python") and "torch.distributed.run" in line[:script]:
        parsed.launcher = "torchrun"
    parsed.nodes, parsed.ranks_per_node = _count(options, _NODES), _count(options, _RANKS)
    if parsed.launcher == "accelerate":
        _read_accelerate(options, files, parsed)
    command = line[script + 1 :]
    options = _parse_options(command)
    first = next((i for i, word in enumerate(command) if word.startswith("--")), len(command))
    if first and command[0].endswith((".yaml", ".yml", ".json")):  # HfArgumentParser: a file alone or before others
        options.setdefault("config", command[0])
    parsed.unknown += [f"{word}: what the shell's variable holds" for word in command[:first] if "$" in word]
    if _PATTERNS["other_loss"].search(parsed.script):
        parsed.unknown.append(f"{parsed.script}: what its loss takes: the forecast is of supervised fine-tuning")
    _read_script(options, files, parsed)
    return parsed


def _split_commands(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words of each command in the script that a shell runs (-c); without such a script, the words."""
    shell = next((i for i, word in enumerate(words) if os.path.basename(word) in _SHELLS), len(words))  # noqa: PTH119
    options = (i for i in range(shell, len(words) - 1) if words[i].startswith("-") and words[i].endswith("c"))
    option = next(options, None)
    if option is None:
        yield list(words)
    else:
        yield from _split_script(words[option + 1].replace("\\\n", " ").encode())


def _split_script(source: bytes) -> Iterator[list[str]]:
    """Yield the words of each command in a script, and in the texts that it writes."""
    for node in walk(parse(source), "command", "heredoc_body"):
        text = source[node.start_byte : node.end_byte]
        if node.type == "heredoc_body":
            yield from _split_script(text)
        else:
            with contextlib.suppress(ValueError):  # quotes that do not end
                yield from _split_commands(shlex.split(text.decode()))


def _find_launch(line: list[str]) -> list[str]:
    """Return the words from the launcher on, which `exec`, `env` or variables may precede; none if there is none."""
    for i, word in enumerate(line):
        name = os.path.basename(word)  # noqa: PTH119 - not a path
        if name in _LAUNCHERS:  # Python needs a script or module
            return line[i:] if not name.startswith("python") or _find_script(line[i:]) is not None else []
        if name not in ("exec", "env", "time", "nohup") and "=" not in word:
            break
    return []


def _find_script(line: Sequence[str]) -> int | None:
    """Return the index of the script, or of the module after -m."""
    if line[0] == "trl" and len(line) > 1:
        return 1
    for i, word in enumerate(line):
        if word.endswith(".py"):
            return i
        if word in ("-m", "--module") and i + 1 < len(line) and line[i + 1] not in (
            "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"):  # fmt: skip
            return i + 1
    return None


def _parse_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `--name value`, `--name=value`, `--flag`, `--name a b`; values as in YAML, names with underscores."""
    values_of, name = dict[str, list[str]](), ""
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values_of[name] = [value] if equals else []
        elif name:
            values_of[name].append(word)
    values_of.pop("", None)  # of a bare `--`, after which no word is an option's value
    parsed: dict[str, Any] = {}
    for name, values in values_of.items():
        if name.startswith("no_") and not values:
            parsed[name.removeprefix("no_")] = False
        else:
            parsed[name] = True if not values else _parse_value(values[0]) if len(values) == 1 else values
    return parsed


def _parse_value(text: str) -> Any:
    if ":" in text:  # such as 1:4, which YAML 1.1 parses as 64
        return text
    try:
        return with_overrides({}, [f"value={text}"])["value"]
    except ConfigError:
        return text


def _count(options: dict[str, Any], names: Iterable[str]) -> int | None:
    for name in names:
        value = str(options.get(name, "")).rpartition(":")[2]
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return None


def _read_script(options: dict[str, Any], files: Files, parsed: CommandSettings) -> None:
    """Read the script's own settings: from its file, overridden by arguments."""
    config = options.pop("config", None)
    settings: dict[str, Any] = dict(parsed.settings)
    if isinstance(config, str) and (inside := _read_settings_file(config, files, parsed)) is not None:
        settings |= inside
    settings |= options
    for name in ("deepspeed", "fsdp_config"):
        if isinstance(settings.get(name), str) and settings[name]:
            inside = _read_settings_file(settings.pop(name), files, parsed)
            if inside is not None:
                settings[name] = inside
    settings = _rename_settings(settings, parsed)
    if strange := sorted(set(settings) - known_settings()):
        parsed.notes.append(f"settings of the script itself, which the forecast ignores: {', '.join(strange)}")
    parsed.unknown += [f"{name}={settings[name]!r}: what the script's own setting does to memory and step time"
                       for name in strange if _is_telling(name, settings[name])]  # fmt: skip
    parsed.settings = {name: value for name, value in settings.items() if name not in strange}


def _rename_settings(settings: dict[str, Any], parsed: CommandSettings) -> dict[str, Any]:
    """Return the settings under TRL's names, with the script's own defaults, if scripts.toml knows the script."""
    rows = (entry for entry in _TABLE["script"] if re.search(entry["pattern"], parsed.script))
    row: dict[str, Any] = next((entry for entry in rows if settings.keys() & entry["needs"]), {})
    renamed: dict[str, Any] = dict(row.get("defaults", {}))
    for name, value in settings.items():
        meaning = row.get("values", {}).get(name, {}).get(str(value).lower())
        renamed |= {row.get("rename", {}).get(name, name): value} if meaning is None else meaning
    if "defaults" in row:
        parsed.notes.append(f"settings and defaults are those of {row['name']}")
    return renamed


def _is_telling(name: str, value: Any) -> bool:
    is_set = value is not None and value is not False and value != ""
    return is_set and bool(_PATTERNS["telling"].search(name)) and not _PATTERNS["not_of_steps"].search(name)


def _read_settings_file(name: str, files: Files, parsed: CommandSettings) -> dict[str, Any] | None:
    text = files(name)
    if text is None:
        parsed.unknown.append(f"{name}: what the file says, which is not here")
        return None
    try:
        return parse_mapping(text, name)
    except ConfigError as error:
        parsed.unknown.append(str(error))
        return None


_ACCELERATE_KINDS = (None, "NO", False, "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")  # YAML reads NO as false


def _read_accelerate(options: dict[str, Any], files: Files, parsed: CommandSettings) -> None:
    """Convert accelerate's file and options to settings of transformers' Trainer, which they override."""
    config: dict[str, Any] = {}
    if isinstance(options.get("config_file"), str):
        config = _read_settings_file(options["config_file"], files, parsed) or {}
    config |= options
    machines = _count(config, ("num_machines",)) or (None if config.get("num_machines") else 1)
    processes = _count(config, ("num_processes",))
    parsed.nodes = machines
    parsed.ranks_per_node = processes // machines if processes and machines and processes % machines == 0 else None
    if config.get("mixed_precision") in ("bf16", "fp16"):
        parsed.settings[config["mixed_precision"]] = True
    elif config.get("mixed_precision") == "fp8":
        parsed.unknown.append("mixed_precision=fp8: bf16 and fp32 are forecast")
    kind = config.get("distributed_type")
    if kind not in _ACCELERATE_KINDS or config.get("use_megatron_lm"):
        parsed.unknown.append(f"accelerate's distributed_type={kind}: read are DDP, FSDP and DeepSpeed")
    if kind == "FSDP" or config.get("use_fsdp"):
        inside = {k: v for k, v in options.items() if k.startswith("fsdp_") and k != "fsdp_config"}
        inside = {**(config.get("fsdp_config") or {}), **inside}
        parsed.settings |= {"fsdp": True, "fsdp_config": inside}
    elif kind == "DEEPSPEED" or config.get("use_deepspeed"):
        _read_accelerate_deepspeed({**(config.get("deepspeed_config") or {}), **options}, parsed)
    if config.get("parallelism_config"):
        parsed.settings["parallelism_config"] = config["parallelism_config"]


def _read_accelerate_deepspeed(config: dict[str, Any], parsed: CommandSettings) -> None:
    if isinstance(config.get("deepspeed_config_file"), str):
        parsed.settings["deepspeed"] = config["deepspeed_config_file"]  # read together with the script's own
        return
    zero: dict[str, Any] = {"stage": config.get("zero_stage", 2)}  # default of accelerate
    for name in ("offload_optimizer", "offload_param"):
        if device := config.get(f"{name}_device"):
            zero[name] = {"device": device}
    parsed.settings["deepspeed"] = {"zero_optimization": zero}
    if "gradient_accumulation_steps" in config:
        parsed.settings["gradient_accumulation_steps"] = config["gradient_accumulation_steps"]


def add_defaults(parsed: CommandSettings) -> dict[str, Any]:
    """Return the settings that the trainer uses, with its defaults for missing ones, and a note about them."""
    elsewhere = ("report_to", "output_dir", "push_to_hub")
    settings = {name: value for name, value in parsed.settings.items() if name not in elsewhere}
    of_trl = parsed.launcher == "trl" or parsed.script.endswith("trl/scripts/sft.py")
    assumed: dict[str, Any] = {
        row["name"]: row["value"] for row in _TABLE["default"]
        if not {row["name"], *row.get("unless", ())} & set(settings) and (of_trl or not row.get("of_trl"))
    }  # fmt: skip
    if assumed:
        listed = ", ".join(f"{name}={str(value).lower()}" for name, value in assumed.items())
        parsed.notes.append(f"not set, so the defaults of TRL 1.x and transformers 5 apply: {listed}")
    return {**settings, **assumed}
