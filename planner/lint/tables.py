"""The names, values, pairs and texts that lint knows, as the tables in data/ hold them. Each is read once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from contracts.finding import Finding, Status

_DATA = Path(__file__).with_name("data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A variable that takes one of a few words."""

    words: tuple[str, ...]
    exact: bool  # the case counts
    effect: str  # of anything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A variable whose text has a form."""

    pattern: re.Pattern[str]
    wanted: str
    effect: str  # of anything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A debugging switch of PyTorch or CUDA."""

    when: tuple[str, ...]  # in small letters
    finding: str  # its key in data/findings.toml
    status: Status
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """How NCCL reads the text of a value."""

    tokens: Mapping[str, Token]
    word_lists: Mapping[str, tuple[str, tuple[str, ...]]]  # separator and words
    shapes: Mapping[str, Shape]
    ranges: Mapping[str, tuple[int, int]]
    choices: Mapping[str, tuple[int, ...]]
    zero: Mapping[str, str]  # what the number 0 does, for a word that is read as 0
    bytes: frozenset[str]
    flags: frozenset[str]
    carries_data: frozenset[str]
    zero_is_unset: frozenset[str]
    like: Mapping[str, re.Pattern[str]]  # what a name or an address looks like


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings that do nothing or harm, alone or together."""

    plugin_values: Mapping[str, tuple[str, ...]]
    effects: Mapping[str, str]
    efa_needless: Mapping[str, tuple[str, str]]  # why, and the only value for which it holds ("" for any)
    torch: Mapping[str, Switch]
    needs: Mapping[str, tuple[str, str]]  # the other name, and why
    shadows: tuple[tuple[str, str, tuple[str, ...]], ...]  # cause, how it must be set, names without effect
    bounds: tuple[tuple[str, str, str], ...]  # least, most, effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """How the form of a text is recognised; the first pattern that matches counts."""

    by_name: Mapping[str, re.Pattern[str]]
    surely: Mapping[str, re.Pattern[str]]
    looks: Mapping[str, re.Pattern[str]]
    foreign: Mapping[str, re.Pattern[str]]  # forms that are not read, in words


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((_DATA / name).read_text(encoding="utf-8"))


@cache
def values() -> Values:
    """The table of values as written."""
    data = _load("values.toml")
    return Values(
        tokens={name: Token(**{**row, "words": tuple(row["words"])}) for name, row in data["token"].items()},
        word_lists={name: (row["separator"], tuple(row["words"])) for name, row in data["word_list"].items()},
        shapes={name: Shape(**{**row, "pattern": re.compile(row["pattern"])}) for name, row in data["shape"].items()},
        ranges={name: (low, high) for name, (low, high) in data["range"].items()},
        choices={name: tuple(numbers) for name, numbers in data["choice"].items()},
        zero=data["zero"],
        like={kind: re.compile(text) for kind, text in data["like"].items()},
        **{name: frozenset(members) for name, members in data["names"].items()},
    )


@cache
def settings() -> Settings:
    """The table of settings as written."""
    data = _load("settings.toml")
    return Settings(
        plugin_values={name: tuple(row) for name, row in data["plugin_values"].items()},
        effects=data["effect"],
        efa_needless={name: (row["why"], row.get("only", "")) for name, row in data["efa_needless"].items()},
        torch={
            name: Switch(**{**row, "when": tuple(row["when"]), "status": Status(row["status"])})
            for name, row in data["torch"].items()
        },
        needs={name: (row["other"], row["why"]) for name, row in data["needs"].items()},
        shadows=tuple((row["cause"], row["set"], tuple(row["names"])) for row in data["shadows"]),
        bounds=tuple((row["least"], row["most"], row["effect"]) for row in data["bounds"]),
    )


class Text(NamedTuple):
    """A finding in words, with fields that the rule fills in."""

    status: Status
    message: str
    remedy: str
    evidence: tuple[str, ...]


@cache
def texts() -> Mapping[str, Text]:
    """The table of findings as written."""
    return {
        key: Text(Status(row["status"]), row["message"], row["remedy"], (row["evidence"],) if "evidence" in row else ())
        for key, row in _load("findings.toml").items()
    }


CODES = tuple(sorted({key.partition("/")[0] for key in texts()}))
"""Every code that lint may return."""


def finding(
    key: str, name: str, value: str, /, *evidence: str, status: Status | None = None, **fields: object
) -> Finding:
    """Fill in a text of data/findings.toml.

    The variable is the subject, what it was set to the first evidence. `status` is given where it is not the table's.
    """
    text = texts()[key]
    message, remedy = (each.format(name=name, value=value, **fields) for each in (text.message, text.remedy))
    return Finding(
        code=key.partition("/")[0], status=status or text.status, subject=name,
        message=message[:1].upper() + message[1:], evidence=(f"{name}={value}", *text.evidence, *evidence),
        remedy=remedy,
    )  # fmt: skip


@cache
def forms() -> Forms:
    """The table of forms as written."""
    tables = _load("forms.toml")
    return Forms(**{part: {key: re.compile(text) for key, text in rows.items()} for part, rows in tables.items()})


@cache
def words() -> Mapping[str, Mapping[str, frozenset[str]]]:
    """The table of words as written."""
    return {
        part: {name: frozenset(members) for name, members in rows.items()} for part, rows in _load("words.toml").items()
    }
