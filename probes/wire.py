"""Outcomes and snapshots as JSON and back.

An outcome is {"status": "ok", "facts": {...}}, {"status": "absent", "why": ...} or {"status": "failed", "error": ...},
always with "seconds". Facts are dataclasses of numbers, text, None, and tuples and dicts of these. Fields that this
release does not know are left out, a newer schema_version is refused. The child that asks the drivers writes only, and
never imports what reads.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from contracts.plain import PlainError, strict
from contracts.plain import loads as plain
from probes.api import SCHEMA_VERSION, Absent, Failed, Ok, Snapshot
from probes.host.protocol import Json
from probes.registry import BY_NAME

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
    return {name: _plain(getattr(value, name)) for name in _fields(kind)}  # type: ignore[arg-type]  # a class is hashable


_AS_IT_IS = frozenset({str, int, float, bool, type(None)})


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The names of a dataclass' fields. TypeError where it is none: no fact may be lost silently."""
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is None:
        raise TypeError(f"a fact of type {kind.__name__} has no plain form")
    return tuple(fields)


@cache
def _converter() -> Any:
    """Imported with the first outcome that is read."""
    from cattrs.preconf.json import make_converter

    converter = make_converter()
    strict(converter)
    return converter


class SnapshotError(ValueError):
    """The data is not a snapshot that can be read here."""


def outcome_from_json(probe: str, data: Json) -> Outcome:
    """The outcome of the probe of that name. Raises SnapshotError that says what does not fit."""
    try:
        status, seconds = data["status"], float(data.get("seconds", 0.0))
        if status == "absent":
            return Absent(why=str(data["why"]), seconds=seconds)
        if status == "failed":
            return Failed(error=str(data["error"]), seconds=seconds)
        if status != "ok":
            raise SnapshotError(f'outcome of probe {probe!r}: status is {status!r}; allowed: "ok", "absent", "failed"')
        if probe not in BY_NAME:
            return Failed(error=f"this release has no probe {probe!r}; its facts cannot be read", seconds=seconds)
        return Ok(facts=_converter().structure(data["facts"], BY_NAME[probe].facts), seconds=seconds)
    except SnapshotError:
        raise
    except (ExceptionGroup, KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise SnapshotError(f"outcome of probe {probe!r}: {_words(error)}") from None


def to_json(snapshot: Snapshot) -> dict[str, Json]:
    """A snapshot as plain data."""
    return {
        "schema_version": snapshot.schema_version,
        "hostname": snapshot.hostname,
        "taken_at_seconds": snapshot.taken_at_seconds,
        "topoflight_version": snapshot.topoflight_version,
        "outcomes": {name: outcome_to_json(outcome) for name, outcome in snapshot.outcomes.items()},
    }


def from_json(data: Json) -> Snapshot:
    """A snapshot from plain data. Raises SnapshotError."""
    if not isinstance(data, dict) or not isinstance(data.get("outcomes"), dict):
        raise SnapshotError('not a snapshot: an object with "outcomes" is expected')
    version = data.get("schema_version")
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise SnapshotError(f"snapshot: schema_version is {version!r}; this release reads 1 to {SCHEMA_VERSION}")
    try:
        taken = float(data.get("taken_at_seconds", 0.0))
    except (TypeError, ValueError, OverflowError):
        raise SnapshotError("snapshot: taken_at_seconds must be a number") from None
    return Snapshot(
        hostname=str(data.get("hostname", "")),
        taken_at_seconds=taken,
        topoflight_version=str(data.get("topoflight_version", "")),
        outcomes={name: outcome_from_json(name, outcome) for name, outcome in data["outcomes"].items()},
        schema_version=version,
    )


def dumps(snapshot: Snapshot) -> str:
    """A snapshot as JSON text."""
    return json.dumps(to_json(snapshot))


def loads(text: str | bytes) -> Snapshot:
    """A snapshot from JSON text. Raises SnapshotError."""
    try:
        data = plain(text)
    except PlainError as error:
        raise SnapshotError(str(error)) from None
    return from_json(data)


def _words(error: BaseException) -> str:
    if isinstance(error, ExceptionGroup):  # of cattrs: one for each field that does not fit
        import cattrs

        return "; ".join(cattrs.transform_error(error)[:5])
    return f"{type(error).__name__}: {error}"
