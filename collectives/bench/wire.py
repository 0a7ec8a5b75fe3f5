"""A benchmark's result as plain JSON values, and back; the reader trusts nothing it is given."""

from __future__ import annotations

from typing import Any, TypeVar

import cattrs
from cattrs.strategies import configure_union_passthrough

from collectives.bench.perftest import RdmaResult
from collectives.bench.results import SCHEMA_VERSION, BenchResult
from contracts.plain import strict

# ends at the first thing that does not fit: collecting them all takes a minute for a megabyte of nonsense
_CONVERTER = cattrs.Converter(forbid_extra_keys=False, detailed_validation=False)
configure_union_passthrough(str | bool | int | float | None, _CONVERTER)
strict(_CONVERTER)


T = TypeVar("T")


class ResultError(ValueError):
    """What was given is not the JSON of a benchmark's result."""


def result_to_json(result: BenchResult | RdmaResult) -> dict[str, Any]:
    """Turn a result into dicts, lists, strings and numbers."""
    plain: dict[str, Any] = _CONVERTER.unstructure(result)
    return plain


def result_from_json(data: object) -> BenchResult:
    """Read a result of collectives back; raises ResultError that says where it does not fit."""
    return _read(data, BenchResult)


def rdma_from_json(data: object) -> RdmaResult:
    """Read a result of RDMA writes back; raises ResultError that says where it does not fit."""
    return _read(data, RdmaResult)


def _read(data: object, kind: type[T]) -> T:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultError(f"schema_version: {version!r} is not allowed; allowed: {SCHEMA_VERSION}")
    try:
        return _CONVERTER.structure(data, kind)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ResultError(f"not a benchmark result: {type(error).__name__}: {error}"[:500]) from error
