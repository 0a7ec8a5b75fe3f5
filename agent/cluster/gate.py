"""The gate of `preflight --nodes` and `--selector`: the nodes that they select, and the findings of their records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agent.base import units
from agent.checks.expect import NodeExpectation, check_expectations
from agent.checks.host_checks import CLUSTER_CODES, make_finding
from agent.checks.verdict import GateError
from agent.cluster.client import ApiError, Client, Json, make_path
from agent.cluster.nodes import Fleet, NodeRecord
from contracts.finding import Finding, Status
from contracts.host_list import name_in_slurm

_SILENT, _VERDICT, _UNREADY, _CORDONED = CLUSTER_CODES
_REMOVED = {"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"}  # keys of taints


def select_nodes(client: Client, names: Sequence[str], selector: str | None) -> dict[str, list[Finding]]:
    """Return the selected nodes with the findings of their Nodes. Raises ApiError, or GateError without any."""
    if names:  # a list would have all Nodes of the cluster
        return {name: _check_node(client, name) for name in names}
    nodes = client.items(make_path("v1", "nodes"), {"labelSelector": selector})
    if found := {node["metadata"]["name"]: _check_node_object(node) for node in nodes}:
        return found
    raise GateError(f"--selector {selector}: no node has these labels")


def _check_node(client: Client, name: str) -> list[Finding]:
    """Read and check a Node; unknown, with the reason, if there is none of this name or this user may not read it."""
    try:
        return _check_node_object(client.get(make_path("v1", "nodes", name)))
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        why = "the cluster has no Node of this name" if error.status == 404 else f"the Node cannot be read: {error}"
        return [Finding(code=_UNREADY, status=Status.UNKNOWN, node=name, message=why)]


def _check_node_object(item: Json) -> list[Finding]:
    """Check whether the node is Ready, cordoned or leaving. A node that has just joined has no condition Ready."""
    name, spec = item["metadata"]["name"], item.get("spec") or {}
    conditions = (item.get("status") or {}).get("conditions") or ()
    ready: Json = next((condition for condition in conditions if condition.get("type") == "Ready"), {})
    findings = []
    if ready and ready["status"] != "True":
        reason = ": ".join(filter(None, (ready.get("reason"), ready.get("message"))))
        findings.append(make_finding(_UNREADY, name, why=reason, name=name))
    elif ready:
        findings.append(Finding(code=_UNREADY, status=Status.PASS, node=name))
    if "deletionTimestamp" in item["metadata"] or any(t.get("key") in _REMOVED for t in spec.get("taints") or ()):
        return [*findings, make_finding(f"{_CORDONED} leaving", name, name=name)]
    if spec.get("unschedulable"):
        return [*findings, make_finding(_CORDONED, name, name=name)]
    return [*findings, Finding(code=_CORDONED, status=Status.PASS, node=name)]


def check_nodes(
    names: Iterable[str], records: Fleet, *, now: float | None = None, expected: Sequence[NodeExpectation] = ()
) -> tuple[Finding, ...]:
    """Return the findings of these nodes' agents; a node without reports fails, because nothing is known about it."""
    now = time.time() if now is None else now
    checks: list[Finding] = []
    near = {name_in_slurm(record.name): record.name for record in records.records()}
    for name in names:
        record = records.record(name)
        if record is None or record.silent(now):
            checks.append(make_finding(_SILENT, name, why=_explain_silence(record, now, near.get(name_in_slurm(name)))))
            continue
        of_node = [Finding(code=_SILENT, status=Status.PASS, node=name), *check_record(name, record)]
        if expected:
            node = records.topology(record)
            of_node = [*check_expectations(expected, of_node, name, (records.snapshot(record), node) if node else None)]
        checks += of_node
    return tuple(checks)


def _explain_silence(record: NodeRecord | None, now: float, similar: str | None) -> str:
    if record is None:
        return f"no agent publishes a record of this name{f' (there is a node {similar})' if similar else ''}"
    if not record.scanned_at_seconds:
        return "its agent has never answered"
    if record.stopped_at_seconds is not None:
        return f"its agent ended {units.duration(max(0.0, now - record.stopped_at_seconds))} ago"
    lead = record.scanned_at_seconds - now
    return f"its clock is {units.duration(lead)} ahead of ours" if lead > 0 else f"silent for {units.duration(-lead)}"


def check_record(name: str, record: NodeRecord) -> list[Finding]:
    """Return the findings of a record, and its verdict if that is worse than all findings."""
    statuses: dict[str, Status] = {"fail": Status.FAIL, "unknown": Status.UNKNOWN}
    findings = [
        Finding(code=str(entry.get("code", "")), node=name,
                status=statuses.get(str(entry.get("severity")), Status.WARN), subject=str(entry.get("subject", "")),
                message=str(entry.get("message", "")), remedy=str(entry.get("remedy", "")),
                required=entry.get("severity") == "unknown")
        for entry in record.findings
    ]  # fmt: skip
    worst = record.verdict
    if worst in statuses and not any(check.status in (worst, "fail") for check in findings):
        verdict = make_finding(_VERDICT, name, statuses[worst], word=worst)
        return [*findings, replace(verdict, required=worst == "unknown")]
    return [*findings, Finding(code=_VERDICT, status=Status.PASS, node=name)]
