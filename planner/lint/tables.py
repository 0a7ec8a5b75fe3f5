"""The names, values, pairs and texts that lint knows, as the tables in data/ hold them. Each is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from contracts.finding import Finding, Status
from contracts.tables import read_table


def _load(name: str) -> dict[str, Any]:
    return read_table(__file__, f"data/{name}")


def values() -> Mapping[str, Any]:
    """How NCCL reads the text of a value: data/values.toml as written."""
    return _load("values.toml")


def members(kind: str) -> Sequence[str]:
    """Names that data/values.toml lists: those of "bytes", "flags", what "carries_data", where "zero_is_unset"."""
    found: list[str] = values()["names"][kind]
    return found


def settings() -> Mapping[str, Any]:
    """Settings that do nothing or harm, alone or together: data/settings.toml as written."""
    return _load("settings.toml")


def forms() -> Mapping[str, Mapping[str, str]]:
    """Patterns by which the form of a text is recognised, the first that matches counts: data/forms.toml as written."""
    return _load("forms.toml")


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
def words() -> Mapping[str, Mapping[str, frozenset[str]]]:
    """The table of words as written."""
    return {
        part: {name: frozenset(members) for name, members in rows.items()} for part, rows in _load("words.toml").items()
    }
