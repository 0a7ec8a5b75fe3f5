"""Baselines: `--save` stores a good state, `--baseline` reads it, and the checks of a run are compared with it.

A baseline is one file that every verb can read: the report of a preflight, the result of a benchmark of collectives or
RDMA writes, or a recording (`topoflight capture`), which is checked by this release. Findings that the baseline already
contains are shown but do not fail. A check that passed there must be measured again, and a GPU or HCA that the PCI bus
showed there must still be on the bus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.checks.groups import ORDER
from agent.checks.host_checks import EXPECT_CODES, checks_of_scans
from agent.checks.measured import BASELINE, baseline_bar, make_finding
from agent.checks.verdict import IN_BASELINE, GateError
from collectives.bench.results import BenchResult, Measurement, RdmaResult, RdmaWrite, ResultError, read_as
from contracts import bounded, plain
from contracts.finding import Finding, Status
from contracts.plain import PlainError
from probes.api import Snapshot
from probes.child import replay
from probes.pci import probe as pci_probe
from probes.pci.facts import PciFacts
from probes.registry import ALL
from probes.wire import RecordingError

REPORT_VERSION = 1  # of report.json: increased if an older reader would misread the file
LIMIT_BYTES = 32 << 20  # the limit of a recording
Key = tuple[str, str, str]  # code, node, subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The good state in a baseline file; a member that the file does not contain is empty."""

    statuses: Mapping[Key, Status] = field(default_factory=dict)
    buses: Mapping[str, PciFacts] = field(default_factory=dict)  # devices on the PCI bus, by node
    busbw: Mapping[tuple[str, int, int, str], float] = field(default_factory=dict)  # by op, S, ranks, backend: bytes/s
    writes: Mapping[str, RdmaWrite] = field(default_factory=dict)  # by port


def read(path: Path | None, needs: Sequence[str] = ()) -> Baseline:
    """Read the baseline from a file; return an empty one if `path` is None.

    Raises GateError if the file is not a baseline, or if it contains none of the members in `needs`: then nothing would
    be compared, and the result would look like a pass.
    """
    if path is None:
        return Baseline()
    try:
        found = _read(path)
    except (OSError, bounded.TooLargeError, ResultError) as error:
        raise GateError(f"--baseline {path}: {getattr(error, 'strerror', None) or error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GateError(f"--baseline {path}: {error if isinstance(error, GateError) else repr(error)}") from None
    if needs and not any(getattr(found, name) for name in needs):
        words = " or ".join(_MEMBERS[name] for name in needs)
        raise GateError(f"--baseline {path}: contains no {words}; give a file that --save of the same command wrote")
    return found


_MEMBERS = {"statuses": "checks of a host", "busbw": "verified benchmark of collectives", "writes": "RDMA writes"}


def _read(path: Path) -> Baseline:
    try:
        value = plain.loads(bounded.read(path, LIMIT_BYTES))
    except PlainError:
        value = None
    value = value if isinstance(value, dict) else {}
    if "writes" in value:
        return Baseline(writes={write.port: write for write in read_as(value, RdmaResult).writes})
    if "measurements" in value:
        return Baseline(busbw=_busbw(value))
    if isinstance(value.get("checks"), list):
        version = value.get("schema_version")
        if not isinstance(version, int) or not 1 <= version <= REPORT_VERSION:
            raise GateError(f"schema_version is {version!r}; this release reads 1 to {REPORT_VERSION}")
        statuses = _worst((str(c["code"]), str(c["node"]), str(c["subject"]), c["status"]) for c in value["checks"])
        bench = value.get("bench")
        return Baseline(statuses=statuses, buses=_buses(value), busbw=_busbw(bench) if bench else {})
    try:
        snapshots = replay(path, ALL)
    except RecordingError as error:
        raise GateError(f"no report, no benchmark and no recording: {error}") from None
    return Baseline(
        statuses=_worst((check.code, check.node, check.subject, check.status) for check in checks_of_scans(snapshots)),
        buses={snapshot.hostname: facts for snapshot in snapshots if (facts := snapshot.facts(PciFacts))},
    )


def _busbw(bench: Any) -> dict[tuple[str, int, int, str], float]:
    result = read_as(bench, BenchResult)
    return {_measured_as(m): m.busbw_bytes_per_second for m in result.measurements if m.verified}


def _buses(report: dict[str, Any]) -> dict[str, PciFacts]:
    """Return the PCI devices in the scans of a report, by node."""
    return {
        str(snapshot["hostname"]): plain.read(snapshot["outcomes"]["pci"]["facts"], PciFacts)
        for snapshot in report.get("snapshots") or ()
        if "facts" in snapshot["outcomes"].get("pci", {})
    }


def gone(baseline: Baseline, snapshots: Sequence[Snapshot]) -> tuple[Finding, ...]:
    """Return a failure for each kind of device of which a host's PCI bus shows fewer than in the baseline.

    A GPU or HCA that left the bus has no check that could fail. Nodes are matched as in `regressions`. A baseline
    without a scan (a report of nodes) has no device counts.
    """
    then, now = baseline.buses, {s.hostname: facts for s in snapshots if (facts := s.facts(PciFacts)) is not None}
    alias = {next(iter(now)): next(iter(then))} if len(then) == len(now) == 1 else {}
    found = []
    for node, facts in now.items():
        before = then.get(alias.get(node, node))
        for key, words, listed in (("gpus", "GPU", pci_probe.gpus), ("hcas", "HCA", pci_probe.hcas)):
            earlier = {device.bus_id for device in listed(before)} if before else set()
            have = {device.bus_id for device in listed(facts)}
            if len(have) < len(earlier):
                lost = ", ".join(sorted(earlier - have))
                found.append(make_finding(
                    f"{EXPECT_CODES[0]} gone", node, subject=f"{key}={len(earlier)}", have=len(have), had=len(earlier),
                    words=f"{words}{'' if len(have) == 1 else 's'}", one=words, lost=lost,
                ))  # fmt: skip
    return tuple(found)


def _worst(found: Iterable[tuple[str, str, str, Any]]) -> dict[Key, Status]:
    held: dict[Key, Status] = {}
    for code, node, subject, status in found:
        key = code, node, subject
        if status not in ORDER:
            raise ValueError(f"status {status!r}: must be one of {', '.join(ORDER)}")
        held[key] = min(status, held.get(key, status), key=ORDER.index)
    return held


def regressions(checks: Iterable[Finding], baseline: Mapping[Key, Status]) -> tuple[Finding, ...]:
    """Change findings that the baseline contains to "info", and checks that can no longer be measured to "fail".

    Nodes are matched by name. If the run and the baseline have one node each, they are treated as the same node.
    """
    checks = tuple(checks)
    then, now = {node for _, node, _ in baseline if node}, {check.node for check in checks if check.node}
    alias = {next(iter(now)): next(iter(then))} if len(then) == len(now) == 1 else {}
    passed = {(code, node) for (code, node, _), status in baseline.items() if status == "pass"}
    return tuple(_judged(check, alias.get(check.node, check.node), baseline, passed) for check in checks)


def _judged(check: Finding, node: str, baseline: Mapping[Key, Status], passed: set[tuple[str, str]]) -> Finding:
    if check.status == "unknown" and (check.code, node) in passed:
        return replace(check, status=Status.FAIL, message=f"passed in the baseline, not measured now: {check.message}")
    before = baseline.get((check.code, node, check.subject))
    if check.status in ("fail", "warn") and before is not None and ORDER.index(before) <= ORDER.index(check.status):
        return replace(check, status=Status.INFO, message=f"{IN_BASELINE}{check.message}")
    return check


def against_baseline(result: BenchResult, before: Mapping[tuple[str, int, int, str], float]) -> BenchResult:
    """Add a bar from the baseline before the other bars of each measurement, at the largest size that both have."""
    largest: dict[tuple[str, int], int] = {}
    for m in result.measurements:
        if _measured_as(m) in before:
            largest[m.op, len(m.ranks)] = max(m.bytes, largest.get((m.op, len(m.ranks)), 0))
    made = []
    for m in result.measurements:
        then = before.get(_measured_as(m)) if largest.get((m.op, len(m.ranks))) == m.bytes else None
        if then:
            bar = baseline_bar(then)
            rest = tuple(each for each in m.bars if each.name != BASELINE)
            m = replace(m, bars=(bar, *rest), expected_busbw_bytes_per_second=then, expectation=bar.why)
        made.append(m)
    return replace(result, measurements=tuple(made))


def _measured_as(m: Measurement) -> tuple[str, int, int, str]:
    return m.op, m.bytes, len(m.ranks), m.backend
