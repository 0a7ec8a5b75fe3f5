"""What a GPU's name alone says of it, whether or not it has a row of its own; `series.toml`."""

from __future__ import annotations

import re
from functools import cache

from hardware.tables import read


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
