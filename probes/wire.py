"""The JSON formats of outcomes, which the child process sends, and of recordings.

An outcome is {"status": "ok", "facts": {...}}, {"status": "absent", "why": ...} or {"status": "failed", "error": ...},
always with "seconds". Facts are dataclasses of numbers, text, None, and tuples and dicts of these. Unknown fields are
ignored. The child only writes outcomes, so it never imports cattrs.

A recording is JSON (plain or gzip): schema_version, kind "topoflight-recording", hostname, captured_at (Unix seconds),
source, and `answers` by method and query. An error is also an answer: {"$errno": "ENOENT"}, {"$nvml": "NOT_SUPPORTED"}
or {"$import": "..."}. `probes.host.recording` replays a recording.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contracts.plain import converter, write
from probes.api import Absent, Failed, Ok, Outcome, Snapshot, Source

Json = Any
"""None, bool, int, float, str, or lists and string-keyed dicts of these."""


def outcome_to_json(outcome: Outcome) -> dict[str, Json]:
    """Return {"status": "ok", "absent" or "failed", "seconds": ..., and "facts", "why" or "error"}."""
    return {"status": type(outcome).__name__.lower(), "seconds": outcome.seconds, **write(outcome)}


class OutcomeError(ValueError):
    """The data is not a valid outcome."""


def outcome_from_json(source: Source[Any], data: Json) -> Outcome:
    """Parse the outcome of a probe. Raises OutcomeError, which names what is invalid."""
    try:
        status, seconds = data["status"], float(data.get("seconds", 0.0))
        if status == "absent":
            return Absent(why=str(data["why"]), seconds=seconds)
        if status == "failed":
            return Failed(error=str(data["error"]), seconds=seconds)
        if status != "ok":
            raise ValueError(f'status is {status!r}; allowed: "ok", "absent", "failed"')
        return Ok(facts=converter(detailed=True).structure(data["facts"], source.facts), seconds=seconds)
    except (ExceptionGroup, KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise OutcomeError(f"outcome of probe {source.name!r}: {_describe_error(error)}") from None


def to_json(snapshot: Snapshot) -> dict[str, Json]:
    """Serialize a snapshot for another process of the same release."""
    outcomes = {name: outcome_to_json(outcome) for name, outcome in snapshot.outcomes.items()}
    return {"hostname": snapshot.hostname, "taken_at_seconds": snapshot.taken_at_seconds, "outcomes": outcomes}


def from_json(data: dict[str, Json], probes: Iterable[Source[Any]]) -> Snapshot:
    """Parse the outcomes of these probes in a snapshot. Facts that do not match their type become a failed outcome."""
    outcomes: dict[str, Outcome] = {}
    for probe in (each for each in probes if each.name in data["outcomes"]):
        try:
            outcomes[probe.name] = outcome_from_json(probe, data["outcomes"][probe.name])
        except OutcomeError as error:
            outcomes[probe.name] = Failed(error=str(error))
    return Snapshot(hostname=data["hostname"], taken_at_seconds=data["taken_at_seconds"], outcomes=outcomes)


def _describe_error(error: BaseException) -> str:
    if isinstance(error, ExceptionGroup):  # of cattrs, with one exception per invalid field
        import cattrs

        return "; ".join(cattrs.transform_error(error)[:5])
    return f"{type(error).__name__}: {error}"


# Recordings ----------------------------------------------------------------------------------------------------------

KIND = "topoflight-recording"
SCHEMA_VERSION = 1  # increased if older releases would misread a recording
METHODS = (
    "read_text", "read_bytes", "list_dir", "exists", "resolve", "usable", "statvfs", "limit", "environment",
    "identity", "nvml", "netlink", "port_link", "verbs", "cpu", "kernel_log",
)  # fmt: skip
"""Query methods of a host (`probes.host.protocol`)."""


class RecordingError(ValueError):
    """The file is not a recording that this release can read."""
