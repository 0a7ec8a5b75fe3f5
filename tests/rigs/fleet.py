"""A cluster of any size from the recorded machines: what its agents publish."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from rigs.recorded import H100, view

from agent.checks.view import build_view
from agent.cluster.nodes import Fleet, NodeRecord, from_resource, make_record, to_resource
from contracts.run_record import timestamp
from probes.api import Snapshot

SICK = ("sick-h100-gpu-lost", "sick-h100-memlock-64KiB", "sick-h100-nvlink-missing", "sick-h100-thermal",
        "sick-h100-dead-hca")  # fmt: skip
EVERY = 60  # one in so many is sick, one in three times as many silent
FAULT_SECONDS = 5400.0  # how long ago a fault came


def record_of(found: str | Snapshot = H100, name: str | None = None, **changed: Any) -> NodeRecord:
    """What the agent of a machine, recorded or made from one, has published just now."""
    made = make_record(view(found) if isinstance(found, str) else build_view((found,)), name=name)
    return replace(made, **{"scanned_at_seconds": time.time(), **changed})


def fleet_of(*records: NodeRecord) -> Fleet:
    """A cluster that has these records."""
    return Fleet(records)


def resource_of(record: NodeRecord) -> dict[str, Any]:
    """A record as the API server holds it."""
    whole, status = to_resource(record)
    return {**whole, "status": status["status"]}


def through_the_api(record: NodeRecord) -> NodeRecord:
    """A record as it is read back from the API server that it was published to."""
    return from_resource(json.loads(json.dumps(resource_of(record))))


def records(nodes: int, *, sick: bool, now: float | None = None) -> Iterator[NodeRecord]:
    """Of H100 nodes; where `sick`, each sixtieth or the only one has one of five faults, and a few are silent."""
    now = time.time() if now is None else now
    known = cache(lambda machine: make_record(view(machine)))
    for n in range(nodes):
        ill = sick and (n % EVERY == EVERY // 3 or nodes == 1)
        made = known(SICK[n // EVERY % len(SICK)] if ill else H100)
        at = now - (7200.0 if sick and n % (3 * EVERY) == EVERY // 2 else 30.0)
        made = replace(made, name=f"gpu-{n:04}", host=f"gpu-{n:04}", scanned_at_seconds=at)
        since = timestamp(now - FAULT_SECONDS - 60 * (n % 40))
        yield replace(made, findings=tuple({**finding, "since": since} for finding in made.findings))


def resources(nodes: int, *, sick: bool) -> list[dict[str, Any]]:
    """As the API server holds them."""
    return [resource_of(record) for record in records(nodes, sick=sick)]
