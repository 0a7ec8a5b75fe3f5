"""Nodes of the cluster: which nodes are selected, the gate for their published records, and their racks.

`preflight --nodes` and `--selector` select nodes by name and label. There is no standard label for the rack of a node.
The following are recognised: NVIDIA Topograph (network.topology.nvidia.com/leaf, and fabric.topograph.run/tier-0 since
1.0), EKS (topology.k8s.aws/network-node-layer-3, the layer next to an instance), GKE
(cloud.google.com/gce-topology-subblock), GPU feature discovery (nvidia.com/gpu.clique, an NVLink domain), and site
labels whose name ends with rack, leaf or switch.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.base import units
from agent.checks.measured import CLUSTER_CODES, make_finding
from agent.checks.verdict import GateError
from agent.cluster.client import METADATA, ApiError, Client, path_of
from agent.cluster.node_facts import clean
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, NodeRecord
from contracts.finding import Finding, Status
from probes.api import Snapshot

if TYPE_CHECKING:  # pydantic, which is not loaded without expectations
    from agent.checks.expect import Expectation

_SILENT, _VERDICT = CLUSTER_CODES


def named(client: Client, names: Sequence[str], selector: str | None) -> tuple[str, ...]:
    """Return the nodes selected by name and label. Raises ApiError, or GateError if there are none."""
    found = list(dict.fromkeys(names))
    if selector is not None:
        labelled = client.items(path_of("v1", "nodes"), {"labelSelector": selector})
        found = list(dict.fromkeys([*found, *(item["metadata"]["name"] for item in labelled)]))
        if not found:
            raise GateError(f"--selector {selector}: no node has these labels")
    return tuple(found)


def fleet(client: Client) -> Fleet:
    """Read every record once. Raises ApiError."""
    held = Fleet()
    held.replace(client.items(path_of(API_VERSION, PLURAL)))
    return held


def records_of(names: Iterable[str], held: Fleet) -> tuple[NodeRecord, ...]:
    """Return the record of each node; a node without a published record is unknown and was never scanned."""
    unknown = NodeRecord(name="", host="", verdict="unknown", scanned_at_seconds=0.0, agent_version="")
    return tuple(held.record(name) or replace(unknown, name=name, host=name) for name in names)


def readable(names: Iterable[str], held: Fleet) -> tuple[Snapshot, ...]:
    """Return what the agents of these nodes read, for each record that contains it."""
    records = [record for name in names if (record := held.record(name)) is not None]
    return tuple(held.snapshot(record) for record in records if held.topology(record) is not None)


def checks_of(
    names: Iterable[str], held: Fleet, *, now: float | None = None, expected: Expectation | None = None
) -> tuple[Finding, ...]:
    """Return the findings of these nodes' agents; a node without reports fails, because nothing is known about it."""
    now = time.time() if now is None else now
    checks: list[Finding] = []
    for name in names:
        record = held.record(name)
        if record is None or record.silent(now):
            checks.append(make_finding(_SILENT, name, why=_why_silent(record, now)))
            continue
        checks.append(Finding(code=_SILENT, status=Status.PASS, node=name))
        found = published(name, record)
        if expected is not None:
            found = _settled(expected, record, held, found)
        checks += found
    return tuple(checks)


def _settled(expected: Expectation, record: NodeRecord, held: Fleet, found: Sequence[Finding]) -> list[Finding]:
    """Add the expectations of a node from its record; for a record of another release all of them are unknown."""
    from agent.checks import expect

    node = held.topology(record)
    if node is None:
        why = f"the record of {record.name} holds no graph of this release"
        more = expect.unread(expected, record.name, why)
    else:
        more = expect.checks_of(expected, held.snapshot(record), node, record.name)
    return [*expect.settled((*found, *more))]


def _why_silent(record: NodeRecord | None, now: float) -> str:
    if record is None:
        return "no agent publishes it"
    if not record.scanned_at_seconds:
        return "its agent has never answered"
    if record.stopped_at_seconds is not None:
        return f"its agent ended {units.ago(max(0.0, now - record.stopped_at_seconds))} ago"
    return f"silent for {units.ago(record.age_seconds(now))}"


def published(name: str, record: NodeRecord) -> list[Finding]:
    """Return the findings of a record, and its verdict if that is worse than all findings."""
    statuses: dict[str, Status] = {"fail": Status.FAIL, "unknown": Status.UNKNOWN}
    found = [
        Finding(code=str(found.get("code", "")), node=name,
                status=statuses.get(str(found.get("severity")), Status.WARN), subject=str(found.get("subject", "")),
                message=str(found.get("message", "")), remedy=str(found.get("remedy", "")),
                required=found.get("severity") == "unknown")
        for found in record.findings
    ]  # fmt: skip
    worst = "fail" if record.verdict == "fail" else "unknown" if record.verdict == "unknown" else ""
    if worst and not any(check.status in (worst, "fail") for check in found):
        found.append(replace(
            make_finding(_VERDICT, name, statuses[worst], word=worst), required=worst == "unknown"
        ))  # fmt: skip
    else:
        found.append(Finding(code=_VERDICT, status=Status.PASS, node=name))
    return found


# The rack or switch of each node, from the labels of the Node objects.

LABELS = tuple(map(re.compile, (
    r"(?:.*[./-])?rack", r"(?:.*[./-])?(?:leaf|switch)", r"fabric\.topograph\.run/tier-0",
    r"topology\.k8s\.aws/network-node-layer-3", r"cloud\.google\.com/gce-topology-subblock",
    r"(?:.*[./-])?block", r"nvidia\.com/gpu\.clique",
)))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The racks or switches of nodes: `of` contains (node, value) from the label, or `why` the reason for none."""

    label: str = ""
    of: tuple[tuple[str, str], ...] = ()
    why: str = "no label of the Nodes names a rack or a switch"


def places_by(labels: Mapping[str, Mapping[str, str]]) -> Places:
    """Use the first of LABELS that any node has; of several matching keys, the one that most nodes have."""
    counts = Counter(key for mine in labels.values() for key in mine)
    for pattern in LABELS:
        keys = [key for key, _ in counts.most_common() if pattern.fullmatch(key)]
        if keys:
            found = ((name, clean(mine[keys[0]], 63)) for name, mine in labels.items() if mine.get(keys[0]))
            return Places(label=clean(keys[0], 317), of=tuple(sorted(found)), why="")
    return Places()


def read_places(client: Client) -> Places:
    """Read the places from the API server; without permission to list Nodes they are empty, with the reason."""
    try:
        nodes = client.items(path_of("v1", "nodes"), accept=METADATA)
        return places_by({str(node["metadata"]["name"]): node["metadata"].get("labels") or {} for node in nodes})
    except ApiError as error:
        return Places(why=f"the labels of the Nodes could not be read: HTTP {error.status}")
