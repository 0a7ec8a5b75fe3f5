"""The version, read from the installed package so that it is written in one place: pyproject.toml."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("topoflight")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+unknown"
