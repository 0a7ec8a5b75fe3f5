"""A benchmark's result as plain JSON values, and back; the reader trusts nothing it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cattrs
from cattrs.strategies import configure_union_passthrough

from collectives.bench.results import SCHEMA_VERSION, BenchResult

# ends at the first thing that does not fit: collecting them all takes a minute for a megabyte of nonsense
_CONVERTER = cattrs.Converter(forbid_extra_keys=False, detailed_validation=False)
configure_union_passthrough(str | bool | int | float | None, _CONVERTER)


def _exactly(kind: type, *allowed: type) -> Callable[[Any, type], Any]:
    """Numbers for numbers and text for text, as `contracts.plain.strict`, which this room may not import."""

    def hook(value: Any, asked: type) -> Any:
        if asked is not kind:  # an IntEnum, which is an int too
            return asked(value)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
        if isinstance(value, int) and value.bit_length() > 64:  # a float cannot hold any size
            raise ValueError(f"a whole number of {value.bit_length()} bits: 64 are allowed")
        return kind(value)

    return hook


for _kind, _allowed in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
    _CONVERTER.register_structure_hook(_kind, _exactly(_kind, *_allowed))


class ResultError(ValueError):
    """What was given is not the JSON of a benchmark's result."""


def result_to_json(result: BenchResult) -> dict[str, Any]:
    """Turn a result into dicts, lists, strings and numbers."""
    plain: dict[str, Any] = _CONVERTER.unstructure(result)
    return plain


def result_from_json(data: object) -> BenchResult:
    """Read a result back; raises ResultError that says where it does not fit."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultError(f"schema_version: {version!r} is not allowed; allowed: {SCHEMA_VERSION}")
    try:
        return _CONVERTER.structure(data, BenchResult)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ResultError(f"not a benchmark result: {type(error).__name__}: {error}"[:500]) from error
