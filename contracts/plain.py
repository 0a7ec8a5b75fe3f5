"""JSON of strangers as plain data: bounded in depth, every number within bounds, every text writable as UTF-8.

Specification: RFC 8259. Python's own reader also takes NaN, integers of any length and halves of surrogate pairs, which
later break whoever computes with them, or writes them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

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
            raise PlainError("half of a surrogate pair stands in a text") from None
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


_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text of others for a terminal, a log or a file that one reads: what steers it and is not shown becomes "?".

    These are the control characters of ISO 6429 but line feed and tab, Unicode's marks of direction and separators of
    lines, and halves of surrogate pairs, which no encoding has.
    """
    return _STEERS.sub("?", text)
