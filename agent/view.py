"""What the agent knows at one moment: computed once per scan, read by every request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.gate import Check, Verdict, checks_of_findings, checks_of_snapshot, judge
from collectives.results import BenchResult
from planner.lint import CODES as ENVIRONMENT_CODES
from planner.lint import lint
from planner.lint_sources import recorded_environments
from probes.api import Snapshot
from probes.hostinfo import HostinfoFacts
from topology import check as topology_check
from topology.build import build
from topology.cluster import join
from topology.graph import ClusterTopology, NodeTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Snapshots, what follows from them, and the last results of benchmark and flights."""

    snapshots: tuple[Snapshot, ...]
    topologies: tuple[NodeTopology, ...]
    cluster: ClusterTopology
    checks: tuple[Check, ...]
    verdict: Verdict
    made_at_seconds: float
    bench: BenchResult | None = None
    bench_at_seconds: float | None = None
    flights: tuple[dict[str, Any], ...] = ()  # newest first


def look(
    snapshots: Sequence[Snapshot],
    *,
    bench: BenchResult | None = None,
    bench_at_seconds: float | None = None,
    flights: tuple[dict[str, Any], ...] = (),
) -> View:
    """Derive topology, checks and verdict from snapshots."""
    topologies = tuple(build(snapshot) for snapshot in snapshots)
    checks: list[Check] = []
    for snapshot, node in zip(snapshots, topologies, strict=True):
        checks.extend(node_checks(snapshot, node))
    if bench is not None:
        from agent.measured import checks_of_bench

        checks.extend(checks_of_bench(bench, snapshots))
    return View(
        snapshots=tuple(snapshots),
        topologies=topologies,
        cluster=join(topologies),
        checks=tuple(checks),
        verdict=judge(checks),
        made_at_seconds=time.time(),
        bench=bench,
        bench_at_seconds=bench_at_seconds,
        flights=flights,
    )


def node_checks(snapshot: Snapshot, node: NodeTopology) -> tuple[Check, ...]:
    """All checks that need nothing but a scan: the probes' own, the topology's, and the NCCL environment's."""
    found = (*checks_of_snapshot(snapshot), *environment_checks(snapshot, node))
    if not node.gpus:
        why = "absent: no GPU on this host, so there is no link to judge"
        silent = (Check(id=c, status="unknown", node=snapshot.hostname, message=why) for c in topology_check.CODES)
        return (*found, *silent)
    return (*found, *checks_of_findings(snapshot.hostname, topology_check.check(node), topology_check.CODES))


def environment_checks(snapshot: Snapshot, node: NodeTopology) -> tuple[Check, ...]:
    """The NCCL variables that this process would hand to a job, linted against the machine."""
    host = snapshot.facts(HostinfoFacts)
    if host is None or host.nccl_environment is None:
        why = "the environment of this host was not read"
        return tuple(Check(id=c, status="unknown", node=snapshot.hostname, message=why) for c in ENVIRONMENT_CODES)
    findings = [
        finding
        for named in recorded_environments(snapshot)
        for finding in lint(named.environment, snapshot=snapshot, source=named.source, topology=node)
    ]
    return checks_of_findings(snapshot.hostname, findings, ENVIRONMENT_CODES)
