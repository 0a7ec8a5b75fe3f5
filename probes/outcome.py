"""One probe's outcome as plain data, without a converter: the child that asks the drivers imports no more than this.

Facts are dataclasses of numbers, text, None, and tuples and dicts of these; `probes.wire` reads them back.
"""

from __future__ import annotations

from typing import Any

from probes.api import Absent, Failed, Ok
from probes.host.protocol import Json

Outcome = Ok[Any] | Absent | Failed


def outcome_to_json(outcome: Outcome) -> dict[str, Json]:
    """{"status": "ok", "absent" or "failed", "seconds": ..., and "facts", "why" or "error"}."""
    if isinstance(outcome, Ok):
        return {"status": "ok", "seconds": outcome.seconds, "facts": _plain(outcome.facts)}
    if isinstance(outcome, Absent):
        return {"status": "absent", "seconds": outcome.seconds, "why": outcome.why}
    return {"status": "failed", "seconds": outcome.seconds, "error": outcome.error}


def _plain(value: Any) -> Json:
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is tuple or kind is list:
        return [_plain(item) for item in value]
    if kind is dict:
        return {key: _plain(item) for key, item in value.items()}
    return {name: _plain(getattr(value, name)) for name in _fields(kind)}


_AS_IT_IS = frozenset({str, int, float, bool, type(None)})


_known: dict[type, tuple[str, ...]] = {}


def _fields(kind: type) -> tuple[str, ...]:
    """The names of a dataclass' fields. TypeError where it is none: no fact may be lost silently."""
    if kind not in _known:
        fields = getattr(kind, "__dataclass_fields__", None)
        if fields is None:
            raise TypeError(f"a fact of type {kind.__name__} has no plain form")
        _known[kind] = tuple(fields)
    return _known[kind]
