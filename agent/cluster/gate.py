"""Nodes of the cluster: which nodes `preflight --nodes` and `--selector` select, and the gate for their records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agent.base import units
from agent.checks.expect import Expected, settle
from agent.checks.measured import CLUSTER_CODES, make_finding
from agent.checks.verdict import GateError
from agent.cluster.client import Client, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, NodeRecord
from contracts.finding import Finding, Status

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


def checks_of(
    names: Iterable[str], held: Fleet, *, now: float | None = None, expected: Sequence[Expected] = ()
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
        if expected:
            node = held.topology(record)
            found = [*settle(expected, found, name, (held.snapshot(record), node) if node else None)]
        checks += found
    return tuple(checks)


def _why_silent(record: NodeRecord | None, now: float) -> str:
    if record is None:
        return "no agent publishes it"
    if not record.scanned_at_seconds:
        return "its agent has never answered"
    if record.stopped_at_seconds is not None:
        return f"its agent ended {units.duration(max(0.0, now - record.stopped_at_seconds))} ago"
    return f"silent for {units.duration(record.age_seconds(now))}"


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
