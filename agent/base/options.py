"""Command-line options of a verb, read from verbs/VERB.toml, and the files, hosts and values that they name.

`help` is the help text of the verb. Each table in such a file is one option. The table key is what the user types, and
its members are the parameters of click.option; `type` is a name in `_TYPES` or a range. Help texts show defaults. A
table without members refers to the table of the same name in verbs/shared.toml or question.toml. With `shared
= true` a table overrides members of that table, and `without` lists the members to remove. A table whose name does not
begin with "-" includes all options of the file of that name, except those in its `without`; a later table with `shared
= true` overrides members of an included option.

`requires` lists options of which at least one must be given with this option. `excludes` lists options that cannot be
combined with it. A name may end with the values that it applies to ("--api=job|jobset"). A verb with an invalid
combination ends before it does any work. An error in a table (an unknown type, member or table name) is raised when the
verb is imported.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from agent.base import EXIT_FAILED, EXIT_USAGE, raise_as
from agent.base.output import explain_unwritable, print_text
from agent.base.units import SIZE_WORDS, parse_size
from contracts import bounded, tables

if TYPE_CHECKING:
    from pydantic import BaseModel

    from probes.api import Snapshot
    from probes.scanner import Probes

RECORDINGS = (".json", ".json.gz", ".zip")


class InputError(click.ClickException):
    """A file, name or value is invalid; the message says which one and what is allowed."""

    exit_code = EXIT_USAGE


class RequestError(InputError):
    """A request cannot be answered; the message names the setting, its value and what is allowed."""


class NothingFitsError(click.ClickException):
    """No layout of the described job fits the described machines."""

    exit_code = EXIT_FAILED


def describe_source(source: str) -> str:
    """Return the source in words."""
    return "standard input" if source == "-" else source


def read_input(source: str, limit_bytes: int, *, hint: str) -> bytes:
    """Read the whole source; `hint` ends the error message for a source that is too large. Raises InputError."""
    try:
        return bounded.rest(sys.stdin.buffer, limit_bytes) if source == "-" else bounded.read(source, limit_bytes)
    except OSError as error:
        raise InputError(f"{describe_source(source)}: {error.strerror or error}") from None
    except bounded.TooLargeError as error:
        raise InputError(f"{describe_source(source)}: {error}{hint}") from None


def split_pair(option: str, word: str) -> tuple[str, str]:
    """Split the NAME=VALUE of an option. Raises UsageError."""
    name, _, value = word.partition("=")
    if not (name and value):
        raise click.UsageError(f"{option} {word!r}: must be NAME=VALUE")
    return name, value


def parse_version(text: str | None) -> tuple[int, int, int] | None:
    """Parse "2.27.7" or "2.27.7+cuda12.9" into numbers."""
    if text is None:
        return None
    if not (match := re.fullmatch(r"([0-9]{1,5})\.([0-9]{1,5})(?:\.([0-9]{1,5}))?(?:[+-].*)?", text)):
        raise RequestError(f"nccl={text!r}: must look like 2.27.7")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def require_writable(option: str, path: Path, *, folder: bool = False) -> None:
    """Reject an output that cannot be written, before any scan or load starts. Raises InputError."""
    if problem := explain_unwritable(path, folder=folder):
        raise InputError(f"{option} {path}: {problem}")


# The hosts that a command reads.


def read_snapshots(
    hosts: Sequence[Path], probes: Probes, *, root: str = "/", timeout_seconds: float = 30.0,
    stop: threading.Event | None = None,
) -> tuple[Snapshot, ...]:  # fmt: skip
    """Run the probes on this host with `timeout_seconds` for each, or replay the recordings in order.

    After `stop` is set the function returns soon: probes that have not answered are reported as failed, and unread
    recordings are omitted.
    """
    if hosts:
        return replay_recordings(hosts, probes, stop)
    from probes.scanner import Scanner

    with Scanner(root, probes=probes, timeout_seconds=timeout_seconds, stop=stop) as scanner:
        return (scanner.scan(),)


def replay_recordings(
    hosts: Sequence[Path], probes: Probes, stop: threading.Event | None = None
) -> tuple[Snapshot, ...]:
    """Replay the recordings in order; omit those not read when `stop` is set. Raises InputError."""
    from probes.scanner import replay
    from probes.wire import RecordingError

    snapshots: list[Snapshot] = []
    paths: list[Path] = []
    for path in _list_recordings(hosts):
        if stop and stop.is_set():
            break
        with raise_as(InputError, (OSError, RecordingError)):
            snapshots += replay(path, probes, stop)
        paths += [path] * (len(snapshots) - len(paths))
    return make_names_distinct(snapshots, paths)


def make_names_distinct(snapshots: Sequence[Snapshot], paths: Sequence[Path]) -> tuple[Snapshot, ...]:
    """Add the file names to hosts that have the same name, which is common for pods."""
    times = Counter(snapshot.hostname for snapshot in snapshots)
    used: Counter[str] = Counter()
    renamed = []
    for snapshot, path in zip(snapshots, paths, strict=True):
        if times[snapshot.hostname] > 1:
            name = f"{snapshot.hostname} ({path.name.removesuffix('.gz').removesuffix('.json')})"
            used[name] += 1
            snapshot = replace(snapshot, hostname=name if used[name] == 1 else f"{name} {used[name]}")
        renamed.append(snapshot)
    return tuple(renamed)


def _list_recordings(hosts: Sequence[Path]) -> list[Path]:
    """Return the files of --host; a folder is replaced by the recordings in it."""
    files: list[Path] = []
    for path in hosts:
        inside = sorted(p for p in path.iterdir() if p.name.endswith(RECORDINGS)) if path.is_dir() else [path]
        if not inside:
            raise click.UsageError(f"{path}: no recording (*.json, *.json.gz, *.zip) in this folder")
        files += inside
    return files


# Types of values.


class _Output(click.Path):
    """The path of an output option, checked when the option is parsed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises InputError if it cannot be written."""
        path = os.fsdecode(super().convert(value, param, ctx))
        if str(path) != "-":
            require_writable(param.opts[-1] if param else "output", Path(path), folder=not self.file_okay)
        return self.coerce_path_result(path)


class _Size(click.ParamType[int]):
    """A number of bytes, at least 1, with or without a unit: 65536, 64MiB, 1G."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes. Raises BadParameter that lists what is allowed."""
        size = value if isinstance(value, int) else parse_size(value)
        if not size:
            self.fail(f"{value!r}: must be {SIZE_WORDS}", param, ctx)
        return size


class _Count(click.IntRange):
    """A whole number in a range, with or without a suffix for thousands to trillions: 250000, 250k, 100M, 1.5B, 15T."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raises BadParameter that lists what is allowed."""
        from decimal import Decimal  # few commands have such an option

        match = re.fullmatch(r"(\d{1,19}(?:\.\d{1,19})?)([kmbt]?)", str(value), re.IGNORECASE)
        number = Decimal(match[1]) * 1000 ** " kmbt".index(match[2].lower() or " ") if match else None
        if number is None or number % 1:
            self.fail(f"{value!r}: must be a whole number, or one with k, M, B or T: 250000, 100M, 1.5B", param, ctx)
        return super().convert(int(number), param, ctx)


class _Number(click.FloatRange):
    """A number in a range, in which click's own type also accepts `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises BadParameter."""
        if math.isnan(number := super().convert(value, param, ctx)):
            self.fail(f"{value!r} is not a number in a range.", param, ctx)
        return number


# Read the option tables.

_TYPES: dict[str, click.ParamType[Any]] = {
    "file": click.Path(exists=True, dir_okay=False, path_type=Path),
    "folder": click.Path(exists=True, file_okay=False, path_type=Path),
    "path": click.Path(exists=True, path_type=Path),
    "any file": click.Path(dir_okay=False, path_type=Path),  # may be missing
    "any folder": click.Path(file_okay=False, path_type=Path),
    "any path": click.Path(path_type=Path),
    "path or -": click.Path(allow_dash=True, path_type=str),
    "output file": _Output(dir_okay=False, path_type=Path),
    "output file or -": _Output(dir_okay=False, allow_dash=True),
    "output folder": _Output(file_okay=False, path_type=Path),
    "size": _Size(),
    "text": click.STRING,
}
_PACKAGES = ("agent", "collectives", "contracts", "hardware", "planner", "probes", "topology")
_OWN_MEMBERS = ("shared", "without", "most", "requires", "excludes")  # all others belong to click.option


def command(verb: str, **settings: Any) -> Callable[[Any], click.Command]:
    """Return a decorator that creates the command of a verb; its options follow its arguments, in table order.

    The decorated function is called only if the options can be combined. An exception class of this project ends the
    verb with one line: a ValueError is invalid input, a RuntimeError a refusal by this machine or a cluster. Before a
    message that begins with the name of an option, the usage is printed.
    """
    rows = _rows(verb)

    def add(function: Any) -> click.Command:
        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            _check_combinations(click.get_current_context(), rows)
            try:
                return function(*arguments, **options)
            except (ValueError, RuntimeError, RequestError) as error:
                if type(error).__module__.partition(".")[0] not in _PACKAGES:
                    raise
                if isinstance(error, RuntimeError):
                    raise click.ClickException(str(error)) from None
                text = _name_option(str(error))
                raise (click.UsageError if text.startswith("--") else InputError)(text) from None

        decorated: Any = run
        arguments = run.__dict__.pop("__click_params__", [])  # click processes the last of these first
        for key, row in reversed(rows.items()):
            decorated = _option(key, row)(decorated)
        decorated.__click_params__ += arguments
        make: Callable[[Any], click.Command] = click.command(verb, help=_table(verb)["help"], **settings)
        return make(decorated)

    return add


def _name_option(message: str) -> str:
    """Return a message that begins with the name of a field as one that begins with the option: "--op 'x': ..."."""
    match = re.match(r"(?:--)?([a-z][a-z_-]*)([=: ])", message)
    option = f"--{match[1].replace('_', '-')}" if match else ""
    if not match or not any(option in param.opts for param in click.get_current_context().command.params):
        return message
    return f"{option}{match[2].replace('=', ' ')}{message[match.end() :]}"


def _rows(name: str) -> dict[str, dict[str, Any]]:
    """Return the members of each option of a file by its key, with included and shared tables resolved."""
    rows: dict[str, dict[str, Any]] = {}
    for key, row in _table(name).items():
        if key == "help":  # help of the verb
            continue
        if not key.startswith("-"):
            rows |= {each: members for each, members in _rows(key).items() if each not in row.get("without", ())}
        elif not row or "shared" in row:
            shared = rows.get(key) or _table("shared").get(key) or QUESTION[key]
            members = shared | row
            rows[key] = {name: value for name, value in members.items() if name not in row.get("without", ())}
        else:
            rows[key] = row
    return rows


def _check_combinations(context: click.Context, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UsageError if an option lacks one that it requires, or is combined with one that it excludes."""
    names = {text: param for param in context.command.params for text in param.opts}

    def is_typed(text: str) -> bool:
        param = names.get(text)
        return param is not None and context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE

    def is_given(text: str) -> bool:
        option, _, values = text.partition("=")
        if not is_typed(option):
            return False
        value = context.params[names[option].name or ""]
        return value in values.split("|") if values else value != names[option].default

    texts = {key.partition("/")[0].split()[-1]: row for key, row in rows.items()}
    for text, row in texts.items():
        if not is_typed(text):
            continue
        if row.get("requires") and not any(map(is_given, row["requires"])):
            raise click.UsageError(f"{text} requires {' or '.join(row['requires'])}.")
        for other in filter(is_given, row.get("excludes", ())):
            raise click.UsageError(f"{text} and {other} cannot be combined.")


def _table(name: str) -> dict[str, Any]:
    return tables.read_table(__file__, f"verbs/{name}.toml")


def _option(key: str, row: Mapping[str, Any]) -> Callable[[Any], Any]:
    members = {member: value for member, value in row.items() if member not in _OWN_MEMBERS}
    names = (*key.split(), *filter(None, (members.pop("name", None),)))
    if "choices" in members:
        members["type"] = click.Choice(members.pop("choices"))
    elif "type" in members:
        members["type"] = option_type(members["type"])
    if "callback" in members:
        members["callback"] = {"list_machines": _list_machines}[members["callback"]]
    if "default" in members:
        members.setdefault("show_default", True)
    elif "/" in key:  # --this/--not-this: None if the user gives neither
        members["default"] = None
    return click.option(*names, **members)


def option_type(text: str | list[str]) -> Any:
    """Return the click type for a name in _TYPES, for a range, or for a list of them.

    A range is "int 1..1024" or "float above 0..1_000_000.0", whose lower bound is excluded. "count 1.." has no upper
    bound; an option of this type takes suffixes.
    """
    if isinstance(text, list):
        return tuple(map(option_type, text))
    match = re.fullmatch(r"(int|count|float) (above )?(\d[\d_.]*?)\.\.([\d_.]*)", text)
    if match is None:
        return _TYPES[text]
    low, high = ((float(word) if "." in word else int(word)) if word else None for word in match.group(3, 4))
    kind: Any = {"int": click.IntRange, "count": _Count, "float": _Number}[match[1]]
    return kind(low, high, min_open=bool(match[2]))


def _list_machines(context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    """Handle `--machine list`: print the machines and end the verb."""
    if name == "list" and not context.resilient_parsing:
        from hardware.machines import catalogue

        for row in catalogue():
            also = f" (also {', '.join(row.aliases)})" if row.aliases else ""
            print_text(f"{row.name:20} {row.gpus} x {row.gpu}, {row.nics} x {row.nic_gbps:g}G {row.nic_kind}{also}")
        context.exit()
    return name


# The question to the planner: machines, model and run. The HTTP agent validates query parameters and bodies with a
# pydantic model of it, built on first use: with the import of pydantic this takes 0.1 s (docs/decisions/0038).

QUESTION: dict[str, dict[str, Any]] = tables.read_table(__file__, "question.toml")  # by command line option


def get_parameter(option: str) -> str:
    """Return the HTTP parameter of an option: "sequence_length" of "--sequence-length"."""
    return option.removeprefix("--").replace("-", "_")


FIELDS: Mapping[str, str] = {str(row.get("name", get_parameter(option))): option for option, row in QUESTION.items()}
"""The command line option of each field, by field name."""


def find_most(name: str) -> int:
    """Return the upper bound of a field: the largest number, or the maximum text length in characters."""
    row = QUESTION[FIELDS[name]]
    limits = option_type(row["type"]) if "type" in row else None
    return int(limits.max) if limits else int(row["most"])


@cache
def question_model() -> type[BaseModel]:
    """Return the pydantic model of a question, with every field of question.toml; unknown members are rejected."""
    from pydantic import ConfigDict, Field, create_model

    members: dict[str, Any] = {}
    for name, option in FIELDS.items():
        row, limits = QUESTION[option], dict[str, Any]()
        kind: Any = bool if row.get("is_flag") else str
        if "choices" in row:
            kind = Literal[tuple(row["choices"])]
        elif "type" in row:
            number = option_type(row["type"])
            kind = float if isinstance(number, click.FloatRange) else int
            limits |= {"gt" if number.min_open else "ge": number.min, "le": number.max}
        elif kind is str:
            limits["max_length"] = row["most"]
        default = row.get("default", False if kind is bool else None)
        about = Field(default, description=row["help"], alias=get_parameter(option), **limits)
        members[name] = kind if default is not None else kind | None, about
    return create_model("Question", __config__=ConfigDict(extra="forbid", populate_by_name=True), **members)
