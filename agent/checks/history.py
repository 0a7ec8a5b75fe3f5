"""Recent changes on this node, and findings that are raised after they persist and cleared with hysteresis.

The resident agent evaluates scan after scan and can observe a link in training, a driver reload or a boot. Therefore a
finding is raised by its second consecutive scan and cleared by the third consecutive scan without it, so that an
intermittent finding stays raised. The history is kept in memory and ends with the agent. The node's record
(agent.cluster.nodes) shows the newest changes and the start time of each finding. A one-shot preflight has no history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.base.units import clock
from agent.checks.verdict import judge
from agent.checks.view import Event, View
from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from topology.diff import Difference, Trait, compare, list_traits

MAX_EVENTS, SHOWN_EVENTS = 50, 24
SCANS_TO_RAISE = 2
SCANS_TO_CLEAR = 3  # one more than to raise, so that an intermittent finding stays raised
# Settling time after a boot or driver restart: the time that Kubernetes lets a node be not ready before it evicts its
# pods (the toleration of node.kubernetes.io/not-ready added by the admission plug-in DefaultTolerationSeconds: 300 s).
SETTLING_SECONDS = 300.0
CAUSE_SECONDS = 86400.0  # a version change is shown with findings raised within a day after it

_RULES = read_table(__file__, "rules.toml")
AT_ONCE: dict[str, str] = {**_RULES["compared"], **_RULES["persistent"]}
"""Findings that one scan raises, with the reason: docs/reference/findings.md says it with each."""
_MOVES_BY_ITSELF = "throttled by"  # the trait changes on a GPU under load
_VERSIONS = {"driver": "driver", "CUDA": "driver", "kernel": "kernel", "OS": "kernel"}
_COUNTED = {"GPUs", "RDMA devices", "CPU", "CPU threads", "NUMA nodes", "memory", "product"}  # traits of the whole host
PARTS = ("driver", "firmware", "kernel", "hardware")
"""What a change is of; `memlock`, a link that comes up and the like are of none."""

Key = tuple[str, str]  # code and subject


@dataclass(slots=True, kw_only=True)
class TrackedFinding:
    """A finding that a scan found; it is pending until `raised`."""

    checks: tuple[Finding, ...]  # of one code and subject: usually one
    since: float
    scans: int = 1  # consecutive scans with it
    missing: int = 0  # consecutive scans without it
    raised: bool = False


class History:
    """The history of one live host. `uptime` returns the seconds since its boot."""

    def __init__(self, uptime: Callable[[], float] = lambda: float("inf")) -> None:
        self._uptime = uptime
        self._events: list[Event] = []
        self._open: dict[Key, TrackedFinding] = {}
        self._traits: dict[Key, Trait] = {}
        self._boot_id: str | None = None
        self._last: dict[Key, Trait] = {}
        self._driver = True  # whether the driver, if there is one, answered in the previous scan
        self._settled_at = 0.0

    def update(self, view: View) -> View:
        """Replace the findings of this scan by those that are raised, and add the changes."""
        snapshot = view.snapshots[0]
        now = snapshot.taken_at_seconds
        settling = self._is_settling(snapshot, now)
        self._report_changes(view, now, settling=settling)
        checks = tuple(self._raised(view.checks, now, settling=settling))
        self._events = self._events[-MAX_EVENTS:]
        return replace(
            view, checks=checks, verdict=judge(checks), events=tuple(self._events),
            since={key: tracked.since for key, tracked in self._open.items() if tracked.raised},
        )  # fmt: skip

    def _is_settling(self, snapshot: Snapshot, now: float) -> bool:
        """Return whether the host has just booted or its driver is restarting, so that its state is still changing."""
        host = snapshot.facts(HostinfoFacts)
        boot = host.boot_id if host else None
        if boot and self._boot_id and boot != self._boot_id:
            self._add_event(now, "boot", "booted")
            self._settled_at = now + SETTLING_SECONDS
        self._boot_id = boot or self._boot_id
        gpus, driver = snapshot.facts(GpuFacts), _get_value(self._traits, "driver")
        answers = gpus is not None and gpus.driver_error is None
        if driver is not None and (answers != self._driver or (gpus is not None and driver != gpus.driver_version)):
            self._settled_at = now + SETTLING_SECONDS  # the driver stops, starts or changes its version
        self._driver = answers or driver is None
        return now < self._settled_at or self._uptime() < SETTLING_SECONDS

    def _report_changes(self, view: View, now: float, *, settling: bool) -> None:
        """Report version changes at once, and others after two equal scans in a row, but not while the host settles."""
        snapshot, previous = view.snapshots[0], self._traits
        is_silent = settling or any(
            not isinstance(outcome, Ok) and _get_value(previous, f"probe {name}") == "answers"
            for name, outcome in snapshot.outcomes.items()
        )
        traits = list_traits(snapshot, node=view.topologies[0])
        current = {key: trait for key, trait in traits.items() if trait.what != _MOVES_BY_ITSELF}
        self._traits = self._merge_traits(current, is_silent=is_silent)
        self._last = current
        if not previous:
            return
        differ = compare(previous, self._traits, same_host=True)
        # If an object is first seen because its probe or driver now answers, it has not appeared.
        answers = any(d.subject.startswith("probe ") or (d.subject, d.what) == ("driver", "error") for d in differ)
        for difference in differ:
            part = _classify_change(difference)
            kind = "version" if part not in ("", "hardware") else "changed"
            self._add_event(now, kind, difference.message, "" if answers and part == "hardware" else part)

    def _merge_traits(self, current: dict[Key, Trait], *, is_silent: bool) -> dict[Key, Trait]:
        """Return the known traits with the versions of this scan, and with what two scans in a row have or lack."""
        merged = dict(self._traits)
        for key, trait in current.items():
            is_version = key[1] == "firmware" or (key[0] in _VERSIONS and not key[1])
            is_steady = not is_silent and (self._last.get(key) == trait or not self._traits)
            if is_version or is_steady:
                merged[key] = trait
        if is_silent:
            return merged
        return {key: trait for key, trait in merged.items() if key in current or key in self._last}

    def _raised(self, checks: Sequence[Finding], now: float, *, settling: bool) -> Iterable[Finding]:
        """Return the findings that are raised; a new finding is unknown until it persists."""
        current: dict[Key, tuple[Finding, ...]] = {}
        for check in checks:
            if check.status in ("fail", "warn"):
                key = check.code, check.subject
                current[key] = (*current.get(key, ()), check)
        unknown = {(check.code, check.subject) for check in checks if check.status == "unknown"}
        self._count(current, unknown, now, settling=settling)
        reason = "this host or its driver has just started" if settling else "seen for the first time"
        open_now = {key: tracked for key, tracked in self._open.items() if tracked.raised}
        yield from (check for tracked in open_now.values() for check in tracked.checks)
        for key, new in current.items():
            for check in () if key in open_now else new:
                yield replace(check, status=Status.UNKNOWN, pending=check.status == "fail",
                              message=f"{reason}, and raised if it persists: {check.message}")  # fmt: skip
        raised = {code for code, _ in open_now}
        for check in checks:
            if check.status not in ("fail", "warn") and not (check.status == "pass" and check.code in raised):
                yield check

    def _count(
        self, current: Mapping[Key, tuple[Finding, ...]], unknown: set[Key], now: float, *, settling: bool
    ) -> None:
        """Count the scans of each finding, raise findings that persist, and clear those that are gone.

        A finding stays while a check of its code is unknown, for its subject or as a whole (subject ""). If this scan
        has no check for it at all, for example because an expectation was withdrawn, it is treated like one that
        passes.
        """
        tracked_findings = self._open
        for key, checks in current.items():
            if settling and key[0] in _RULES["compared"]:  # counters that rose during the start belong to the start
                continue
            tracked = tracked_findings.setdefault(key, TrackedFinding(checks=checks, since=now, scans=0))
            tracked.checks, tracked.scans, tracked.missing = checks, tracked.scans + 1, 0
            at_once = key[0] in AT_ONCE
            if not tracked.raised and (at_once or (tracked.scans >= SCANS_TO_RAISE and not settling)):
                tracked.raised = True
                self._add_event(tracked.since, "raised", checks[0].message, *key)
        for key, tracked in list(tracked_findings.items()):
            if key in current or key in unknown or (key[0], "") in unknown:
                continue
            tracked.missing, tracked.scans = tracked.missing + 1, 0
            if not tracked.raised or tracked.missing >= SCANS_TO_CLEAR:
                del tracked_findings[key]
                if tracked.raised:
                    self._add_event(now, "cleared", tracked.checks[0].message, *key)

    def _add_event(self, at_seconds: float, kind: Any, text: str, code: str = "", subject: str = "") -> None:
        self._events.append(Event(at_seconds=at_seconds, kind=kind, text=text, code=code, subject=subject))


def _classify_change(difference: Difference) -> str:
    """Return which of PARTS changed; "hardware" is a device that appeared, disappeared or was replaced."""
    if difference.what == "firmware":
        return "firmware"
    if not difference.what and difference.subject in _VERSIONS:
        return _VERSIONS[difference.subject]
    came_or_went = difference.what in ("device", "state") and None in (difference.a, difference.b)
    is_count = not difference.what and difference.subject in _COUNTED
    return "hardware" if came_or_went or is_count or difference.what in ("model", "memory") else ""


def _get_value(traits: Mapping[Key, Trait], subject: str) -> str | None:
    trait = traits.get((subject, ""))
    return trait.value if trait else None


def describe_changes(view: View) -> list[str]:
    """Return lines for a page: start times of raised findings, then the newest events."""
    raised = [f"{_describe_subject(code, subject)}: since {clock(since)}{_find_cause(view, since)}"
              for (code, subject), since in view.since.items()]  # fmt: skip
    events = []
    for event in sorted(view.events, key=lambda event: -event.at_seconds)[:SHOWN_EVENTS]:
        about = f"{event.kind} {_describe_subject(event.code, event.subject)}: " if event.is_finding else ""
        events.append(f"{clock(event.at_seconds)}  {about}{event.text}")
    return [*raised, *events]


def _describe_subject(code: str, subject: str) -> str:
    return f"{code} on {subject}" if subject else code


def _find_cause(view: View, since: float) -> str:
    """Return the last version change or boot in the day before: ", after driver 550 -> 560 (03:10)"; or ""."""
    causes = [e for e in view.events if e.kind in ("version", "boot") and since - CAUSE_SECONDS < e.at_seconds <= since]
    return f", after {causes[-1].text} ({clock(causes[-1].at_seconds)})" if causes else ""
