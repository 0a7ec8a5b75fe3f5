"""The one codec: typed records to plain JSON values and back (cattrs; docs/decisions/0016).

Numbers are taken for numbers and text for text (`contracts.plain.strict`); members that a type does not have are left
out. `read` is for documents that must fit, `pick` for those of another release or another writer: what fits is taken.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

import cattrs
from cattrs.preconf.json import make_converter

from contracts.plain import strict

T = TypeVar("T")

MOST_ITEMS = 65536  # of a list that `pick` reads; a run logs at most 4096 steps
# ends at the first thing that does not fit: collecting them all takes a minute for a megabyte of nonsense
converter = make_converter(detailed_validation=False)
strict(converter)
MISFITS = (cattrs.BaseValidationError, KeyError, TypeError, ValueError, AttributeError, OverflowError)


class CodecError(ValueError):
    """The data is not what its type says."""


def write(value: Any) -> Any:
    """Plain dicts, lists, numbers and text."""
    return converter.unstructure(value)


def read(data: object, kind: type[T]) -> T:
    """The record that `write` made plain. Raises CodecError that says what does not fit."""
    try:
        return converter.structure(data, kind)
    except MISFITS as error:
        raise CodecError(f"no {kind.__name__}: {type(error).__name__}: {str(error)[:200]}") from None


def pick(data: object, kind: type[T]) -> T:
    """The members of a dataclass that are there and of the right kind; the others as the type has them by default."""
    found: dict[str, Any] = {}
    if isinstance(data, dict):
        for name, wanted in _members(kind).items():  # type: ignore[arg-type]
            if name in data and (value := _one(data[name], wanted)) is not _MISFIT:
                found[name] = value
    return kind(**found)


_MISFIT = object()


def _one(value: Any, wanted: Any) -> Any:
    options = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    if value is None:
        return None if type(None) in options else _MISFIT
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _dataclass(value, option)
        if get_origin(option) in (list, tuple) and isinstance(value, list | tuple):
            kept = [made for each in value[:MOST_ITEMS] if (made := _one(each, get_args(option)[0])) is not _MISFIT]
            return get_origin(option)(kept)
        if get_origin(option) is dict and isinstance(value, dict):
            kind = get_args(option)[1]
            pairs = {str(key): _one(each, kind) for key, each in value.items()}
            return {key: each for key, each in pairs.items() if each is not _MISFIT}
        if option is Any:
            return value
        if option is not type(None):
            try:
                return converter.structure(value, option)
            except MISFITS:
                continue
    return _MISFIT


def _dataclass(value: dict[str, Any], kind: Any) -> Any:
    try:
        return pick(value, kind)
    except (TypeError, ValueError):  # a member that has no default is missing, or one that cannot stand
        return _MISFIT


@cache
def _members(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
