"""Read TOML tables that are stored next to a package's modules."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, AnyStr


def read_table(module: str, name: str) -> dict[str, Any]:
    """Read the TOML file `name` from the folder of `module` (its `__file__`). Each file is parsed once."""
    return _read(module.rpartition("/")[0], name)  # no Path object: a scan calls this hundreds of times


@cache
def _read(folder: str, name: str) -> dict[str, Any]:
    return tomllib.loads(Path(folder, name).read_text(encoding="utf-8"))


def read_patterns(
    module: str, name: str, section: str, encode: Callable[[str], AnyStr]
) -> dict[str, re.Pattern[AnyStr]]:
    """Compile the regular expressions of one section of a TOML file. <<name>> inserts an entry of the file's `pieces`.

    `encode` is `str`, or `str.encode` for patterns that match bytes.
    """
    table = read_table(module, name)
    pieces = table.get("pieces", {})
    return {key: re.compile(encode(insert_pieces(text, pieces))) for key, text in table[section].items()}


def read_texts(module: str, name: str) -> Callable[..., str]:
    """Return a function that looks up a text in a TOML file and fills in its {names} from keyword arguments."""
    return lambda key, **values: str(read_table(module, name)[key]).format(**values)


def insert_pieces(text: str | list[str], pieces: Mapping[str, str | list[str]]) -> str:
    """Return the regular expression of a text or of alternatives; <<name>> inserts the piece with that name."""
    joined = text if isinstance(text, str) else "|".join(text)
    return re.sub(r"<<(\w+)>>", lambda match: insert_pieces(pieces[match[1]], pieces), joined)
