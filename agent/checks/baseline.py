"""Baselines: `--save` stores a good state, `--baseline` reads it, and the checks of a run are compared with it.

A baseline is one file that every verb can read: the report of a preflight, or the result of a benchmark of collectives
or RDMA writes. Findings that the baseline already contains are shown but do not fail. A check that passed there must
be measured again, and a GPU or HCA that the PCI bus showed there must still be on the bus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.base import raise_as, units
from agent.checks.findings import ORDER
from agent.checks.host_checks import EXPECT_CODES, make_finding
from agent.checks.measured import BASELINE
from agent.checks.verdict import IN_BASELINE, GateError
from collectives.bench.results import Bar, BenchResult, Measurement, RdmaResult, RdmaWrite, read_as
from contracts import bounded, plain
from contracts.finding import Finding, Status
from probes.api import Snapshot
from probes.pci import probe as pci_probe
from probes.pci.facts import PciFacts

BASELINE_LEAST = 0.8  # fraction of the baseline; healthy links: 0.88 to 0.98 of wire rate (stas00, aws-samples)
REPORT_VERSION = 1  # of report.json: increased if an older reader would misread the file
LIMIT_BYTES = 32 << 20
_MEMBERS = {"statuses": "checks of a host", "busbw": "verified benchmark of collectives", "writes": "RDMA writes"}
Key = tuple[str, str, str]  # code, node, subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The good state in a baseline file; a member that the file does not contain is empty."""

    statuses: Mapping[Key, Status] = field(default_factory=dict)
    buses: Mapping[str, PciFacts] = field(default_factory=dict)  # devices on the PCI bus, by node
    busbw: Mapping[tuple[str, int, int, str], float] = field(default_factory=dict)  # by op, S, ranks, backend: bytes/s
    writes: Mapping[str, RdmaWrite] = field(default_factory=dict)  # by port


def read_baseline(path: Path | None, needs: Sequence[str] = ()) -> Baseline:
    """Read the baseline from a file; return an empty one if `path` is None.

    Raises GateError if the file is not a baseline, or if it contains none of the members in `needs`: then nothing would
    be compared, and the result would look like a pass.
    """
    if path is None:
        return Baseline()
    lacks = (AttributeError, KeyError, TypeError)  # a member that every report has, or its type
    with raise_as(GateError, (OSError, ValueError), f"--baseline {path}: "), raise_as(ValueError, lacks, "no report: "):
        baseline = _read_baseline(path)
    if needs and not any(getattr(baseline, name) for name in needs):
        listed = " or ".join(_MEMBERS[name] for name in needs)
        raise GateError(f"--baseline {path}: contains no {listed}; give a file that --save of the same command wrote")
    return baseline


def _read_baseline(path: Path) -> Baseline:
    value = plain.loads(bounded.read(path, LIMIT_BYTES))
    value = value if isinstance(value, dict) else {}
    if "writes" in value:
        return Baseline(writes={write.port: write for write in read_as(value, RdmaResult).writes})
    if "measurements" in value:
        return Baseline(busbw=_read_busbw(value))
    if not isinstance(value.get("checks"), list):
        raise GateError("no report and no benchmark; `preflight --host RECORDING --save FILE` makes a report")
    version = value.get("schema_version")
    if not isinstance(version, int) or not 1 <= version <= REPORT_VERSION:
        raise GateError(f"schema_version is {version!r}; this release reads 1 to {REPORT_VERSION}")
    snapshots = [one for one in value.get("snapshots") or () if "facts" in one["outcomes"].get("pci", {})]
    buses = {str(one["hostname"]): plain.read(one["outcomes"]["pci"]["facts"], PciFacts) for one in snapshots}
    busbw = _read_busbw(value["bench"]) if value.get("bench") else {}
    return Baseline(statuses=_select_worst(value["checks"]), buses=buses, busbw=busbw)


def _read_busbw(bench: Any) -> dict[tuple[str, int, int, str], float]:
    result = read_as(bench, BenchResult)
    return {_get_key(m): m.busbw_bytes_per_second for m in result.measurements if m.verified}


def _match_single_node(now: Iterable[str], then: Iterable[str]) -> dict[str, str]:
    """Return the name in the baseline of the only node, if the run and the baseline have one node each."""
    now, then = set(now), set(then)
    return {now.pop(): then.pop()} if len(now) == len(then) == 1 else {}


def find_missing_devices(baseline: Baseline, snapshots: Sequence[Snapshot]) -> tuple[Finding, ...]:
    """Return a failure for each kind of device of which a host's PCI bus shows fewer than in the baseline.

    A GPU or HCA that left the bus has no check that could fail. A baseline without a scan has no device counts.
    """
    now = {snapshot.hostname: facts for snapshot in snapshots if (facts := snapshot.facts(PciFacts))}
    alias = _match_single_node(now, baseline.buses)
    findings = []
    for node, facts in now.items():
        before = baseline.buses.get(alias.get(node, node))
        models = [{gpu.device_id for gpu in pci_probe.list_gpus(bus)} for bus in (before, facts) if bus]
        if len(models) == 2 and all(models) and models[0].isdisjoint(models[1]):
            findings.append(make_finding(f"{EXPECT_CODES[0]} model", node, subject="gpus"))
            continue
        for key, noun, list_devices in (("gpus", "GPU", pci_probe.list_gpus), ("hcas", "HCA", pci_probe.list_hcas)):
            earlier = {device.bus_id for device in list_devices(before)} if before else set()
            have = {device.bus_id for device in list_devices(facts)}
            if len(have) < len(earlier):
                findings.append(make_finding(
                    f"{EXPECT_CODES[0]} gone", node, subject=f"{key}={len(earlier)}", have=len(have), had=len(earlier),
                    words=f"{noun}{'' if len(have) == 1 else 's'}", one=noun, lost=", ".join(sorted(earlier - have)),
                ))  # fmt: skip
    return tuple(findings)


def _select_worst(checks: Iterable[Mapping[str, Any]]) -> dict[Key, Status]:
    worst: dict[Key, Status] = {}
    for check in checks:
        key = str(check["code"]), str(check["node"]), str(check["subject"])
        if check["status"] not in ORDER:
            raise ValueError(f"status {check['status']!r}: must be one of {', '.join(ORDER)}")
        worst[key] = min(check["status"], worst.get(key, check["status"]), key=ORDER.index)
    return worst


def compare_with_baseline(checks: Iterable[Finding], baseline: Mapping[Key, Status]) -> tuple[Finding, ...]:
    """Change findings that the baseline contains to "info", and checks that can no longer be measured to "fail".

    Nodes are matched by name. If the run and the baseline have one node each, they are treated as the same node.
    """
    checks = tuple(checks)
    alias = _match_single_node((c.node for c in checks if c.node), (node for _, node, _ in baseline if node))
    passed = {(code, node) for (code, node, _), status in baseline.items() if status == "pass"}

    def judged(check: Finding) -> Finding:
        node = alias.get(check.node, check.node)
        if check.status == "unknown" and (check.code, node) in passed:
            message = f"passed in the baseline, not measured now: {check.message}"
            return replace(check, status=Status.FAIL, message=message)
        before = baseline.get((check.code, node, check.subject))
        if check.status in ("fail", "warn") and before is not None and ORDER.index(before) <= ORDER.index(check.status):
            return replace(check, status=Status.INFO, message=f"{IN_BASELINE}{check.message}")
        return check

    return tuple(map(judged, checks))


def make_baseline_bar(rate: float, *more: str) -> Bar:
    """Return the bar for a baseline value, in bytes/s."""
    spread = f"runs of one machine lie within {1 - BASELINE_LEAST:.0%}"
    reasons = (f"the baseline measured {units.rate(rate)}", spread, *more)
    return Bar(name=BASELINE, low=BASELINE_LEAST * rate, typical=rate, high=rate / BASELINE_LEAST, why=reasons)


def add_baseline_bars(result: BenchResult, before: Mapping[tuple[str, int, int, str], float]) -> BenchResult:
    """Add a bar from the baseline before the other bars of each measurement, at the largest size that both have."""
    shared = [m for m in result.measurements if before.get(_get_key(m))]
    largest = {(m.op, len(m.ranks)): m.bytes for m in sorted(shared, key=lambda m: m.bytes)}
    measurements = []
    for m in result.measurements:
        if m in shared and largest[m.op, len(m.ranks)] == m.bytes:
            rate = before[_get_key(m)]
            bar = make_baseline_bar(rate)
            others = tuple(each for each in m.bars if each.name != BASELINE)
            m = replace(m, bars=(bar, *others), expected_busbw_bytes_per_second=rate, expectation=bar.why)
        measurements.append(m)
    return replace(result, measurements=tuple(measurements))


def _get_key(m: Measurement) -> tuple[str, int, int, str]:
    return m.op, m.bytes, len(m.ranks), m.backend
