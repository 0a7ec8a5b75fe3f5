"""Reads the tables beside this file: TOML, an array of one kind of row, each row with its source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read(table: str) -> tuple[dict[str, Any], ...]:
    """The rows of `gpus.toml` and its like: read once, and only when asked for."""
    import tomllib  # only when a table is read: importing a type must not load the parser

    (rows,) = tomllib.loads(Path(__file__).with_name(f"{table}.toml").read_text(encoding="utf-8")).values()
    return tuple(rows)


def pair(value: list[int] | None) -> tuple[int, int] | None:
    """A compute capability."""
    return (value[0], value[1]) if value else None


# What a GPU's name alone says of it, whether or not it has a row of its own: `series.toml`.


@cache
def pattern(series: str) -> str:
    """The regular expression of a series. Raises LookupError for one that the table does not have."""
    return {row["name"]: str(row["pattern"]) for row in read("series")}[series]


@cache
def _compiled(series: str) -> re.Pattern[str]:
    return re.compile(pattern(series))


def is_of(series: str, name: str) -> bool:
    """Whether a GPU of this name, as the driver prints it, is of the series."""
    return _compiled(series).search(name) is not None
