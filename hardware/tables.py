"""Reads the tables beside this file: TOML, an array of one kind of row, each row with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def read(table: str) -> tuple[dict[str, Any], ...]:
    """The rows of `gpus.toml` and its like: read once, and only when asked for."""
    import tomllib  # not before a table is asked for: whoever imports a type pays for no parser

    (rows,) = tomllib.loads(Path(__file__).with_name(f"{table}.toml").read_text(encoding="utf-8")).values()
    return tuple(rows)


def pair(value: list[int] | None) -> tuple[int, int] | None:
    """A compute capability."""
    return (value[0], value[1]) if value else None
