"""The view: what the scans of hosts show at one time, with the results of all checks.

A view is computed once per scan and used by every request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from agent.checks.host_checks import EXPECT_CODES, add_rising_counters, check_node
from agent.checks.verdict import Verdict, judge
from contracts.finding import Finding, Status
from contracts.redaction import without_secrets
from probes.api import Snapshot
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from topology.build import build
from topology.cluster import join
from topology.graph import NodeTopology

if TYPE_CHECKING:
    from agent.checks.expect import NodeExpectation
    from collectives.bench.results import BenchResult
    from collectives.search.plan import SearchResult
    from contracts.run_record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A device, link or trait that appeared, disappeared or changed, or a finding that was raised or cleared."""

    at_seconds: float
    kind: Literal["raised", "cleared", "changed", "version", "boot"]
    text: str
    code: str = ""  # of the finding; for a change one of agent.checks.history.PARTS, or empty
    subject: str = ""

    @property
    def is_finding(self) -> bool:
        """Return whether it reports a finding."""
        return self.kind in ("raised", "cleared")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Snapshots, the results derived from them, and the latest benchmark and runs."""

    snapshots: tuple[Snapshot, ...]
    topologies: tuple[NodeTopology, ...]
    checks: tuple[Finding, ...]
    verdict: Verdict
    made_at_seconds: float
    made_at_monotonic: float = field(default_factory=time.monotonic)  # seconds; not affected by changes of the clock
    bench: BenchResult | None = None
    bench_at_seconds: float | None = None
    search: SearchResult | None = None  # the latest search for bad nodes that this host planned
    runs: tuple[RunRecord, ...] = ()  # newest first
    events: tuple[Event, ...] = ()  # the newest events, oldest first; only for the resident agent's own host
    since: Mapping[tuple[str, str], float] = field(default_factory=dict)  # Unix time of each finding: code, subject


def build_view(
    snapshots: Sequence[Snapshot], *, runs: tuple[RunRecord, ...] = (), earlier: Sequence[Snapshot] = (),
    expected: Sequence[NodeExpectation] = (), unread: str = "", search: SearchResult | None = None,
) -> View:  # fmt: skip
    """Derive topology, checks and verdict from snapshots; `earlier` scans of the same hosts show which counters rise.

    `expected` contains the expectations for each host; `unread` is the reason if they could not be read.
    """
    topologies = join([build(snapshot) for snapshot in snapshots]).nodes  # expectations once per kind of node
    checks: list[Finding] = []
    for snapshot, node in zip(snapshots, topologies, strict=True):
        findings = add_rising_counters(check_node(snapshot, node), earlier, snapshot)
        if unread:
            unknown = Finding(code=EXPECT_CODES[0], status=Status.UNKNOWN, node=snapshot.hostname, message=unread,
                              required=True)  # fmt: skip
            findings = (*findings, unknown)
        elif expected:
            from agent.checks.expect import check_expectations

            findings = check_expectations(expected, findings, snapshot.hostname, (snapshot, node))
        # messages and evidence quote environments, files and the kernel log
        checks += [check if check.status == "pass" else without_secrets(check) for check in findings]
    return View(
        snapshots=tuple(snapshots), topologies=topologies, checks=tuple(checks), verdict=judge(checks),
        made_at_seconds=time.time(), runs=runs, search=search,
    )  # fmt: skip


def with_environment(snapshot: Snapshot, environment: Mapping[str, str]) -> Snapshot:
    """Apply a job's environment variables to the host, so that no check blames the host for settings of the job."""
    snapshot = snapshot.with_facts(HostinfoFacts, lambda facts: replace(
        facts, nccl_environment={**(facts.nccl_environment or {}), **environment}))  # fmt: skip
    return snapshot.with_facts(InterfacesFacts, lambda facts: replace(
        facts, socket_ifname=environment.get("NCCL_SOCKET_IFNAME") or facts.socket_ifname,
        gloo_ifname=environment.get("GLOO_SOCKET_IFNAME") or facts.gloo_ifname))  # fmt: skip
