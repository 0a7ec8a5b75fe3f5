"""JSON of strangers as plain data: bounded in depth, every number within bounds, every text writable as UTF-8; and the
codec between plain data and typed records.

Specification: RFC 8259. Python's own reader also takes NaN, integers of any length and halves of surrogate pairs, which
would later break code that computes with them or writes them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

DEEPEST = 64  # the deepest document of ours, a recording, has six levels
LARGEST = 2**64  # NVML and the kernel count in unsigned 64 bits
LARGEST_DECIMAL = 1e30  # no rate, time or size comes near; sums and products of what is read stay finite


class PlainError(ValueError):
    """The text is no JSON, or holds what no document of ours does."""


def loads(text: str | bytes, *, unknown_numbers: bool = False) -> Any:
    """The document. Raises PlainError; with `unknown_numbers` a number that is none, such as NaN, reads as None."""

    def refused(word: str) -> float | None:
        if unknown_numbers:
            return None
        raise PlainError(f"the number {word[:20]} is out of bounds: 64 bits, or 1e30 with decimals")

    def whole(word: str) -> float | None:
        return value if len(word) < 22 and -LARGEST < (value := int(word)) < LARGEST else refused(word)

    def decimal(word: str) -> float | None:
        return value if abs(value := float(word)) < LARGEST_DECIMAL else refused(word)

    try:
        found = json.loads(text, parse_int=whole, parse_float=decimal, parse_constant=refused)
    except RecursionError:
        raise PlainError(f"nested more than {DEEPEST} levels deep") from None
    except PlainError:
        raise
    except ValueError as error:
        raise PlainError(f"not JSON: {error}") from None
    _check_depth(found)
    if (b"\\u" if isinstance(text, bytes) else "\\u") in text:  # type: ignore[operator]
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise PlainError("a text contains half of a surrogate pair") from None
    return found


def strict(converter: Any) -> None:
    """Have a cattrs converter take numbers for numbers and text for text, and turn nothing into the other."""
    for kind, allowed in ((int, int), (float, int | float), (str, str), (bool, bool)):
        converter.register_structure_hook(kind, _exactly(kind, allowed))


def _exactly(kind: type, allowed: Any) -> Callable[[Any, type], Any]:
    def hook(value: Any, target_type: type) -> Any:
        if target_type is not kind:  # an IntEnum, which is an int too
            return target_type(value)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise PlainError(f"{str(value)[:40]!r} is no {kind.__name__}")
        if kind is int and value.bit_length() > 64:  # a counter's width; a float cannot hold any size
            raise PlainError(f"a whole number of {value.bit_length()} bits: 64 are allowed")
        return kind(value)

    return hook


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(DEEPEST):
        level = [item for node in level if isinstance(node, dict | list)
                 for item in (node.values() if isinstance(node, dict) else node)]  # fmt: skip
        if not level:
            return
    raise PlainError(f"nested more than {DEEPEST} levels deep")


# Typed records to plain values and back (cattrs; docs/decisions/0016).
#
# A number is never read as text, nor text as a number. Members that a type does not have are ignored. `read` is for
# documents that must fit, `pick` for those of another release or another writer: it takes what fits.

T = TypeVar("T")

MOST_ITEMS = 65536  # of a list that `pick` reads; a run logs at most 4096 steps
MISFITS = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # of cattrs without details


class MisfitError(ValueError):
    """The data does not fit its type."""


@cache
def converter() -> Any:
    """Return the cattrs converter, made on first use: importing cattrs takes 0.1 s, and most verbs do not need it."""
    from cattrs.preconf.json import make_converter

    # stops at the first misfit: collecting all of them takes a minute for a megabyte of nonsense
    made = make_converter(detailed_validation=False)
    strict(made)
    return made


def write(value: Any) -> Any:
    """Turn a record into dicts, lists, numbers and text."""
    return converter().unstructure(value)


def read(data: object, kind: type[T]) -> T:
    """Turn plain data into a record. Raises MisfitError that says what does not fit."""
    try:
        found: T = converter().structure(data, kind)
    except MISFITS as error:
        raise MisfitError(f"no {kind.__name__}: {type(error).__name__}: {str(error)[:200]}") from None
    return found


def pick(data: object, kind: type[T]) -> T:
    """Return a dataclass with the members that are present and of the right kind; all others have their default."""
    found: dict[str, Any] = {}
    if isinstance(data, dict):
        for name, hint in _members(kind).items():  # type: ignore[arg-type]
            if name in data and (value := _pick_one(data[name], hint)) is not _MISFIT:
                found[name] = value
    return kind(**found)


_MISFIT = object()


def _pick_one(value: Any, hint: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None:
        return None if type(None) in options else _MISFIT
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _dataclass(value, option)
        if get_origin(option) in (list, tuple) and isinstance(value, list | tuple):
            items = (_pick_one(each, get_args(option)[0]) for each in value[:MOST_ITEMS])
            return get_origin(option)(item for item in items if item is not _MISFIT)
        if get_origin(option) is dict and isinstance(value, dict):
            kind = get_args(option)[1]
            pairs = {str(key): _pick_one(each, kind) for key, each in value.items()}
            return {key: each for key, each in pairs.items() if each is not _MISFIT}
        if option is Any:
            return value
        if option is not type(None):
            try:
                return converter().structure(value, option)
            except MISFITS:
                continue
    return _MISFIT


def _dataclass(value: dict[str, Any], kind: Any) -> Any:
    try:
        return pick(value, kind)
    except (TypeError, ValueError):  # a member without a default is missing, or one is refused
        return _MISFIT


@cache
def _members(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text of others for a terminal, a log or a file that one reads: what steers it and is not shown becomes "?".

    These are the control characters of ISO 6429 but line feed and tab, Unicode's marks of direction and separators of
    lines, and halves of surrogate pairs, which no encoding has.
    """
    return _STEERS.sub("?", text)
