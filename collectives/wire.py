"""A benchmark's result as plain JSON values, and back; the reader trusts nothing it is given."""

from __future__ import annotations

from typing import Any

import cattrs
from cattrs.strategies import configure_union_passthrough

from collectives.results import SCHEMA_VERSION, BenchResult

_CONVERTER = cattrs.Converter(forbid_extra_keys=False)
configure_union_passthrough(str | bool | int | float | None, _CONVERTER)


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
    except (cattrs.BaseValidationError, TypeError, ValueError) as error:
        told = "; ".join(cattrs.transform_error(error)) if isinstance(error, cattrs.BaseValidationError) else str(error)
        raise ResultError(f"not a benchmark result: {told}"[:500]) from error
