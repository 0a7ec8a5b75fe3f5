"""What the agent knows at one moment: computed once per scan, read by every request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.checks.host_checks import checks_of_hosts, without_secrets
from agent.checks.verdict import Verdict, judge
from contracts.finding import Finding, Status
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.gpu.health import FREE_MEMORY, is_full, subject_of
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from topology.build import build
from topology.cluster import join
from topology.graph import ClusterTopology, NodeTopology

if TYPE_CHECKING:
    from agent.base.result_store import Line
    from agent.checks.expect import Expectation
    from agent.checks.history import Event
    from collectives.bench.results import BenchResult
    from collectives.search.plan import SearchResult
    from contracts.run_record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Snapshots, what follows from them, and the last results of benchmark and runs."""

    snapshots: tuple[Snapshot, ...]
    topologies: tuple[NodeTopology, ...]
    cluster: ClusterTopology
    checks: tuple[Finding, ...]
    verdict: Verdict
    made_at_seconds: float
    made_at_monotonic: float = field(default_factory=time.monotonic)  # seconds; a clock that jumps does not age a view
    bench: BenchResult | None = None
    bench_at_seconds: float | None = None
    benches: tuple[Line, ...] = ()  # a line of each benchmark that is remembered, newest first
    search: SearchResult | None = None  # the last search for bad nodes that this host planned
    runs: tuple[RunRecord, ...] = ()  # newest first
    events: tuple[Event, ...] = ()  # the newest, oldest first; of the resident agent's own host
    since: Mapping[tuple[str, str], float] = field(default_factory=dict)  # Unix time of each finding: code, subject


def build_view(
    snapshots: Sequence[Snapshot],
    *,
    benches: tuple[Line, ...] = (),
    runs: tuple[RunRecord, ...] = (),
    earlier: Sequence[Snapshot] = (),
    expected: Expectation | str | None = None,
    search: SearchResult | None = None,
) -> View:
    """Derive topology, checks and verdict from snapshots; `earlier` ones of the same hosts show what rises.

    `expected` is what each of them must have, or why that could not be read.
    """
    cluster = join([build(snapshot) for snapshot in snapshots])
    checks = checks_of_hosts(snapshots, cluster.nodes, earlier=earlier, expected=expected)
    return View(
        snapshots=tuple(snapshots),
        topologies=cluster.nodes,
        cluster=cluster,
        checks=without_secrets(checks),
        verdict=judge(checks),
        made_at_seconds=time.time(),
        benches=benches,
        runs=runs,
        search=search,
    )


def only(view: View, hostname: str) -> View:
    """The same view of one node; measurements and runs are of the whole run and stay."""
    others = {snapshot.hostname for snapshot in view.snapshots} - {hostname}
    checks = tuple(check for check in view.checks if hostname in _nodes(check) or not others & _nodes(check))
    return _part(view, {hostname}, checks)


def named(view: View, name: str) -> View:
    """The same view of what is called so: a node, or the checks of a device or of a code. UnknownNameError."""
    hosts = {snapshot.hostname for snapshot in view.snapshots}
    if name in hosts:
        return only(view, name)
    checks = tuple(c for c in view.checks if name == c.code or name in c.subject.split(", "))
    if not checks:
        some = ", ".join(sorted(hosts)[:8])
        raise UnknownNameError(f"{name}: no node, no device with a finding and no finding code here; nodes: {some}")
    return _part(view, {check.node for check in checks}, checks)


def _part(view: View, hosts: Set[str], checks: tuple[Finding, ...]) -> View:
    """The view of these hosts, with these checks of them."""
    pairs = [pair for pair in zip(view.snapshots, view.topologies, strict=True) if pair[0].hostname in hosts]
    topologies = tuple(node for _, node in pairs)
    return replace(
        view, snapshots=tuple(snapshot for snapshot, _ in pairs), topologies=topologies, cluster=join(topologies),
        checks=checks, verdict=judge(checks),
    )  # fmt: skip


class UnknownNameError(ValueError):
    """A name that nothing in a view has."""


def _nodes(check: Finding) -> set[str]:
    """The nodes of a check: several where it is of a run over several, whose names need not be those of a scan."""
    return set(check.node.split(", "))


def with_environment(snapshot: Snapshot, environment: Mapping[str, str]) -> Snapshot:
    """The same host as a job with these variables meets it: what the job sets is not to be held against the host."""
    snapshot = snapshot.with_facts(HostinfoFacts, lambda facts: replace(
        facts, nccl_environment={**(facts.nccl_environment or {}), **environment}))  # fmt: skip
    return snapshot.with_facts(InterfacesFacts, lambda facts: replace(
        facts, socket_ifname=environment.get("NCCL_SOCKET_IFNAME") or facts.socket_ifname,
        gloo_ifname=environment.get("GLOO_SOCKET_IFNAME") or facts.gloo_ifname))  # fmt: skip


def for_next_job(checks: Iterable[Finding], snapshots: Iterable[Snapshot]) -> tuple[Finding, ...]:
    """The checks as they count for a job that is to start now: memory that a running job fills is not its own."""
    facts = [(snapshot.hostname, found) for snapshot in snapshots if (found := snapshot.facts(GpuFacts)) is not None]
    full = {(node, subject_of(gpu)) for node, found in facts for gpu in found.gpus if is_full(gpu)}
    return tuple(
        replace(check, status=Status.FAIL, remedy=FREE_MEMORY)
        if check.code == "gpu.memory.held" and (check.node, check.subject) in full
        else check
        for check in checks
    )
