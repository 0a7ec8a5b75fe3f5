"""Tables that a package has as TOML files in the folder of its modules."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, AnyStr


def read_table(module: str, name: str) -> dict[str, Any]:
    """Read the TOML file `name` from the folder of a module, whose `__file__` is `module`. Each file is parsed once."""
    return _read(module.rpartition("/")[0], name)  # no Path: a scan calls this hundreds of times


@cache
def _read(folder: str, name: str) -> dict[str, Any]:
    return tomllib.loads(Path(folder, name).read_text(encoding="utf-8"))


def read_patterns(
    module: str, name: str, section: str, encode: Callable[[str], AnyStr]
) -> dict[str, re.Pattern[AnyStr]]:
    """Compile the regular expressions of one section of a TOML file, in which <<name>> is one of the file's `pieces`.

    `encode` is `str`, or `str.encode` for regular expressions on bytes.
    """
    table = read_table(module, name)
    pieces = table.get("pieces", {})
    return {key: re.compile(encode(insert_pieces(text, pieces))) for key, text in table[section].items()}


def read_texts(module: str, name: str) -> Callable[..., str]:
    """Return a function that gives the text of a key of a TOML file, the {names} in it filled in with keywords."""
    texts = read_table(module, name)
    return lambda key, **values: str(texts[key]).format(**values)


def insert_pieces(text: str, pieces: Mapping[str, str]) -> str:
    """Return a regular expression with each <<name>> replaced by the piece of that name."""
    return re.sub(r"<<(\w+)>>", lambda found: pieces[found[1]], text)


def bounds(text: str) -> tuple[str, float, float | None, bool] | None:
    """Read "int 1..1024" or "float above 0..1_000_000.0": the type, both ends, and whether the lower one is excluded.

    "int 1.." has no upper end. None for a text that is no range.
    """
    found = re.fullmatch(r"(int|float) (above )?(\d[\d_.]*?)\.\.([\d_.]*)", text)
    if found is None:
        return None
    low, high = ((float(word) if "." in word else int(word)) if word else None for word in found.group(3, 4))
    assert low is not None  # noqa: S101 - the pattern asks for it
    return found[1], low, high, bool(found[2])
