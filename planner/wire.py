"""JSON of what the planner says and is asked: round-trip, with the schema's version checked on the way in."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import cattrs
from cattrs.errors import BaseValidationError, StructureHandlerNotFoundError

from contracts.layout import Layout
from contracts.plain import PlainError
from contracts.plain import loads as plain
from planner.advice import SCHEMA_VERSION, Recommendation
from planner.forecast.specs import ModelSpec, TrainSpec

T = TypeVar("T", Recommendation, Layout, ModelSpec, TrainSpec)

_MAX_CHARACTERS = 8 << 20
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)


class WireError(ValueError):
    """JSON that is not what was asked for."""


def to_json(value: Recommendation | Layout | ModelSpec | TrainSpec, *, indent: int | None = None) -> str:
    """JSON text."""
    return json.dumps(to_data(value), indent=indent, sort_keys=False, allow_nan=False)


def to_data(value: Recommendation | Layout | ModelSpec | TrainSpec) -> dict[str, Any]:
    """Plain dicts, lists and numbers."""
    data: dict[str, Any] = _CONVERTER.unstructure(value)
    return data


def from_data(data: Any, kind: type[T]) -> T:
    """Rebuild from plain data; a wrong or missing field is an error that names it."""
    if not isinstance(data, dict):
        raise WireError(f"{kind.__name__}: must be a JSON object, not {type(data).__name__}")
    if kind is Recommendation and data.get("schema_version") != SCHEMA_VERSION:
        raise WireError(f"schema_version={data.get('schema_version')!r}: this version reads {SCHEMA_VERSION}")
    try:
        return _CONVERTER.structure(data, kind)
    except (BaseValidationError, StructureHandlerNotFoundError, ValueError, TypeError) as error:
        raise WireError(f"{kind.__name__}: {'; '.join(cattrs.transform_error(error))}") from error


def from_json(text: str, kind: type[T]) -> T:
    """Parse and rebuild."""
    if len(text) > _MAX_CHARACTERS:
        raise WireError(f"{kind.__name__}: longer than {_MAX_CHARACTERS} characters")
    try:
        data = plain(text)
    except PlainError as error:
        raise WireError(f"{kind.__name__}: {error}") from None
    return from_data(data, kind)
