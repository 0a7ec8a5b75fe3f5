"""JSON from untrusted sources as plain data, with limited nesting, bounded numbers and text that UTF-8 can encode; and
the codec between plain data and dataclasses.

Specification: RFC 8259. Python's own reader also accepts NaN, integers of any length and unpaired surrogates, which
would break code that later computes with these values or writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

DEEPEST = 64  # a recording, the deepest of our documents, has six levels
LARGEST = 2**64  # NVML and the kernel count in unsigned 64 bits
LARGEST_DECIMAL = 1e30  # larger than any rate, time or size; sums and products of such values stay finite


class PlainError(ValueError):
    """The text is not JSON, or contains a value that none of our documents has."""


def loads(text: str | bytes, *, unknown_numbers: bool = False) -> Any:
    """Parse a document. Raises PlainError. With `unknown_numbers`, a non-finite number such as NaN becomes None."""

    def refused(word: str) -> float | None:
        if unknown_numbers:
            return None
        raise PlainError(f"the number {word[:20]} is out of bounds: 64 bits, or 1e30 with decimals")

    def whole(word: str) -> float | None:
        return value if len(word) < 22 and -LARGEST < (value := int(word)) < LARGEST else refused(word)

    def decimal(word: str) -> float | None:
        return value if abs(value := float(word)) < LARGEST_DECIMAL else refused(word)

    try:
        document = json.loads(text, parse_int=whole, parse_float=decimal, parse_constant=refused)
    except RecursionError:
        raise PlainError(f"nested more than {DEEPEST} levels deep") from None
    except PlainError:
        raise
    except ValueError as error:
        raise PlainError(f"not JSON: {error}" if text.strip() else "it is empty") from None
    _check_depth(document)
    if (b"\\u" if isinstance(text, bytes) else "\\u") in text:  # type: ignore[operator]
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise PlainError("a text contains half of a surrogate pair") from None
    return document


def _require_type(kind: type, allowed: Any) -> Callable[[Any, type], Any]:
    def hook(value: Any, target_type: type) -> Any:
        if target_type is not kind:  # e.g. an IntEnum, which is also an int
            return target_type(value)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise PlainError(f"{str(value)[:40]!r} is no {kind.__name__}")
        if kind is int and value.bit_length() > 64:  # width of a counter; larger integers may not fit a float
            raise PlainError(f"a whole number of {value.bit_length()} bits: 64 are allowed")
        return kind(value)

    return hook


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [item for node in level if isinstance(node, dict | list)
                 for item in (node.values() if isinstance(node, dict) else node)]  # fmt: skip
        if not level:
            return
    raise PlainError(f"nested more than {DEEPEST} levels deep")


# Conversion between dataclasses and plain values (cattrs; docs/decisions/0016).
#
# A number is never read as text, nor text as a number. Unknown members are ignored.

T = TypeVar("T")

MISFITS = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # of cattrs without detailed validation


class MisfitError(ValueError):
    """The data does not match its type."""


@cache
def converter(*, detailed: bool = False) -> Any:
    """Return the cattrs converter, created on first use: importing cattrs takes 0.1 s and most verbs read nothing.

    It stops at the first error: collecting all errors (`detailed`) takes a minute for 1 MB of invalid data.
    """
    from cattrs.preconf.json import make_converter

    structure = make_converter(detailed_validation=detailed)
    for kind, allowed in ((int, int), (float, int | float), (str, str), (bool, bool)):
        structure.register_structure_hook(kind, _require_type(kind, allowed))
    return structure


def write(value: Any) -> Any:
    """Convert a dataclass to dicts, lists, numbers and text, without cattrs. A value of another type is not changed."""
    if type(value) in _NUMBERS_AND_TEXT:
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [write(item) for item in value]
    if isinstance(value, Mapping):
        return {key: write(item) for key, item in value.items()}
    names = getattr(value, "__dataclass_fields__", None)
    return value if names is None else {name: write(getattr(value, name)) for name in names}


_NUMBERS_AND_TEXT = frozenset({str, int, float, bool, type(None)})  # most values: decided first


def read(data: object, kind: type[T]) -> T:
    """Convert plain data to a dataclass. Raises MisfitError, which names what does not match."""
    from cattrs.errors import CattrsError

    try:
        result: T = converter().structure(data, kind)
    except (*MISFITS, CattrsError) as error:
        raise MisfitError(f"no {kind.__name__}: {type(error).__name__}: {str(error)[:200]}") from None
    return result


_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Make untrusted text safe for a terminal, a log or a file: replace invisible control characters with "?".

    These are the control characters of ISO 6429 except line feed and tab, Unicode's directional marks and line
    separators, and unpaired surrogates, which cannot be encoded.
    """
    return _STEERS.sub("?", text)
