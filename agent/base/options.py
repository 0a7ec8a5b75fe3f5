"""Read the options of each verb from verbs/VERB.toml.

Each table of such a file is one option. Its key is the text that the user types, and its members are the parameters of
click.option; `type` is a word of `_TYPES` or a range. Help texts show defaults. A table without members is the table of
the same name in verbs/shared.toml or in contracts/question.toml; one with `shared = true` overrides members of that
table, and its `without` lists those that it does not have. A table whose name does not begin with "-" includes all
options of the file of that name, except those that its `without` lists.

An error in a table (a type, a member or the name of another table that does not exist) is raised when the verb is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from agent.base.inputs import OUTPUT_FILE, OUTPUT_FILE_OR_STDOUT, OUTPUT_FOLDER, SIZE
from agent.base.output import say
from contracts import question
from contracts.tables import read_table

_TYPES: dict[str, click.ParamType[Any]] = {
    "file": click.Path(exists=True, dir_okay=False, path_type=Path),
    "folder": click.Path(exists=True, file_okay=False, path_type=Path),
    "path": click.Path(exists=True, path_type=Path),
    "any file": click.Path(dir_okay=False, path_type=Path),  # need not exist
    "any folder": click.Path(file_okay=False, path_type=Path),
    "any path": click.Path(path_type=Path),
    "path or -": click.Path(allow_dash=True, path_type=str),
    "output file": OUTPUT_FILE,
    "output file or -": OUTPUT_FILE_OR_STDOUT,
    "output folder": OUTPUT_FOLDER,
    "size": SIZE,
    "text": click.STRING,
}


def with_options(verb: str, **types: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds the options of a verb, in their order; `types` are types that only this verb has."""

    def add(command: Any) -> Any:
        for key, row in reversed(list(_rows(verb))):
            command = _option(key, row, types)(command)
        return command

    return add


def _rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the members of each option of a file, with what it includes and shares."""
    for key, row in _table(name).items():
        if not key.startswith("-"):
            included = dict(_rows(key))
            for excluded in row.get("without", ()):
                del included[excluded]
            yield from included.items()
        elif not row or "shared" in row:
            members = {**question.rows(), **_table("shared")}[key] | row
            yield key, {name: value for name, value in members.items() if name not in row.get("without", ())}
        else:
            yield key, row


def _table(name: str) -> dict[str, dict[str, Any]]:
    return read_table(__file__, f"verbs/{name}.toml")


_NOT_OF_CLICK = ("shared", "without", "most")


def _option(key: str, row: Mapping[str, Any], types: Mapping[str, Any]) -> Callable[[Any], Any]:
    members = {member: value for member, value in row.items() if member not in _NOT_OF_CLICK}
    words = (*key.split(), *filter(None, (members.pop("name", None),)))
    if "choices" in members:
        members["type"] = click.Choice(members.pop("choices"))
    elif "type" in members:
        members["type"] = types.get(str(members["type"])) or _type(members["type"])
    if "callback" in members:
        members["callback"] = _CALLBACKS[members["callback"]]
    if "default" in members:
        members.setdefault("show_default", True)
    elif "/" in key:  # --this/--not-this: None where the user gives neither
        members["default"] = None
    return click.option(*words, **members)


def _type(text: str | list[str]) -> Any:
    """A word of _TYPES or a range (contracts.question.bounds), or several."""
    if isinstance(text, list):
        return tuple(map(_type, text))
    found = question.bounds(text)
    if found is None:
        return _TYPES[text]
    name, low, high, above = found
    kind: Any = click.IntRange if name == "int" else click.FloatRange
    return kind(low, high, min_open=above)


def _list_machines(context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    """`--machine list` is a question, and its answer ends the verb."""
    if name == "list" and not context.resilient_parsing:
        from hardware.machines import catalogue

        for row in catalogue():
            say(f"{row.name:20} {row.gpus} x {row.gpu}, {row.nics} x {row.nic_gbps:g}G {row.nic_kind}")
        context.exit()
    return name


_CALLBACKS = {"list_machines": _list_machines}


def refuse_two_sources(options: Mapping[str, Any]) -> None:
    """UsageError where recordings and a catalogue machine are both given: the advice can be for one of them."""
    if options["hosts"] and options["machine"]:
        named = f"--host {options['hosts'][0]} and --machine {options['machine']}"
        raise click.UsageError(f"{named}: give one of them; a machine stands in place of a host")
