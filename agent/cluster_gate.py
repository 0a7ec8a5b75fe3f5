"""The gate over nodes of the cluster, from what their agents published: `preflight --nodes` and `--selector`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agent import units
from agent.gate import Check, GateError
from agent.kube import Client, path_of
from agent.nodes import API_VERSION, PLURAL, Fleet, NodeRecord

CLUSTER_CODES = ("cluster.node.silent",)
_SILENT = CLUSTER_CODES[0]


def named(client: Client, names: Sequence[str], selector: str | None) -> tuple[str, ...]:
    """The nodes meant: by name, and by label of the Node. Raises ApiError, GateError where there are none."""
    found = list(dict.fromkeys(names))
    if selector is not None:
        for items, _ in client.pages(path_of("v1", "nodes"), {"labelSelector": selector}):
            found += [item["metadata"]["name"] for item in items if item["metadata"]["name"] not in found]
        if not found:
            raise GateError(f"--selector {selector}: no node has these labels")
    return tuple(found)


def fleet(client: Client) -> Fleet:
    """Every record, read once. Raises ApiError."""
    held = Fleet()
    held.replace(item for items, _ in client.pages(path_of(API_VERSION, PLURAL)) for item in items)
    return held


def records_of(names: Iterable[str], held: Fleet) -> tuple[NodeRecord, ...]:
    """The record of each node; one that no agent publishes is unknown and was never heard of."""
    nobody = NodeRecord(name="", host="", verdict="unknown", scanned_at_seconds=0.0, agent_version="")
    return tuple(held.record(name) or replace(nobody, name=name, host=name) for name in names)


def checks_of(names: Iterable[str], held: Fleet, *, now: float | None = None) -> tuple[Check, ...]:
    """What the agents found on these nodes; a node that says nothing is a failure, for nothing is known about it."""
    now = time.time() if now is None else now
    checks: list[Check] = []
    for name in names:
        record = held.record(name)
        if record is None or record.silent(now):
            why = _why_silent(record, now)
            checks.append(Check(id=_SILENT, status="fail", node=name, message=f"{why}: nothing is known of this node",
                                remedy="topoflight explain cluster.node.silent"))  # fmt: skip
            continue
        checks.append(Check(id=_SILENT, status="pass", node=name))
        checks += _published(name, record)
    return tuple(checks)


def _why_silent(record: NodeRecord | None, now: float) -> str:
    if record is None:
        return "no agent publishes it"
    if not record.scanned_at_seconds:
        return "its agent has never answered"
    return f"silent for {units.ago(record.age_seconds(now))}"


def _published(name: str, record: NodeRecord) -> list[Check]:
    return [
        Check(id=str(found.get("code", "")), status="fail" if found.get("severity") == "fail" else "warn", node=name,
              subject=str(found.get("subject", "")), message=str(found.get("message", "")))
        for found in record.findings
    ]  # fmt: skip
