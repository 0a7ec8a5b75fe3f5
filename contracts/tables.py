"""Tables that a package has as TOML files in the folder of its modules."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_table(module: str, name: str) -> dict[str, Any]:
    """Read the TOML file `name` from the folder of a module, whose `__file__` is `module`. Each file is parsed once."""
    return _read(Path(module).parent / name)


@cache  # of its own: the modules of a folder share its tables
def _read(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))
