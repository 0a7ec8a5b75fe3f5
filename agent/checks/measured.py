"""Checks of measurements: a benchmark, its evidence, and a run compared with its forecast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from agent.base import units
from agent.checks.findings import ORDER
from agent.checks.host_checks import RUN_CODES, is_gdrdma_possible, make_finding, make_unmeasured
from agent.checks.verdict import judge
from agent.checks.view import View
from collectives.bench.results import Bar, BenchResult, Measurement
from contracts.finding import Finding, Status
from contracts.redaction import without_secrets
from contracts.run_record import Comparison, RunRecord, compare
from probes.api import Snapshot
from topology.build import build
from topology.check import describe_departures
from topology.expected import FAILS_BELOW, OPS as JUDGED_OPS
from topology.paths import CURRENT, HEALTHY, BarName

BUSBW = "bench.busbw.low"
_PROVES = {" nvls": "NVLS", " mnnvl": "MNNVL"}  # what the lines of NCCL's log prove that show this cause
BASELINE: Final = "in the baseline"
BARS: tuple[BarName, ...] = (HEALTHY, CURRENT)
JUDGED_BYTES_PER_RANK = 64 << 20
MAX_JUDGED_BYTES = 8 << 30  # checked for any number of ranks: larger sizes do not fit next to a job


def is_judged(op: str, size_bytes: int, ranks: int) -> bool:
    """Return whether a result of this size shows the link bandwidth; smaller sizes measure latency."""
    return op in JUDGED_OPS and size_bytes >= choose_bytes(ranks)


def choose_bytes(ranks: int) -> int:
    """Return the message size S at which `ranks` are evaluated."""
    return min(JUDGED_BYTES_PER_RANK * ranks, MAX_JUDGED_BYTES)


def check_bars(result: BenchResult, snapshots: Sequence[Snapshot]) -> list[Finding]:
    """Return the checks of all results measured with enough bytes."""
    node = ", ".join(sorted(set(result.hosts)))
    judged = [m for m in result.measurements if m.verified and is_judged_result(m)]
    if not judged:
        return [make_finding(f"{BUSBW} unknown", node, why=_explain_unjudged(result))]
    return [_compare_with_bars(m, node, result, snapshots) for m in judged]


def find_least_bandwidth(m: Measurement) -> float | None:
    """Return the largest lower end of its bars, in bytes/s, against which it is checked; None if none is known."""
    return max((bar.low for bar in m.bars if bar.low is not None), default=None)


def is_judged_result(m: Measurement) -> bool:
    """Return whether the result was measured with enough bytes, or has a baseline."""
    return any(bar.name == BASELINE for bar in m.bars) or (bool(m.bars) and is_judged(m.op, m.bytes, len(m.ranks)))


def _explain_unjudged(result: BenchResult) -> str:
    if not result.measurements:
        return "nothing was measured"
    if result.backend != "nccl":
        return f"{result.backend} moves data through the CPUs, so there is no link to compare it with; use --baseline"
    if not any(m.bars for m in result.measurements):
        return "the links are unknown, so the results have no reference value"
    return "no result of at least 64 MiB per rank; smaller sizes measure latency, not links"


def _compare_with_bars(m: Measurement, node: str, result: BenchResult, snapshots: Sequence[Snapshot]) -> Finding:
    """Compare a measurement with its bars: the first is the expected value, CURRENT counts only active links."""
    value = m.busbw_bytes_per_second
    first = next((bar for bar in m.bars if bar.name != CURRENT), None)
    now = next((bar for bar in m.bars if bar.name == CURRENT), None)
    bars = [bar for bar in m.bars if bar.low is not None]
    evidence = tuple(f"{bar.name}: {format_bar(bar)}" for bar in m.bars) + tuple(
        cause for bar in m.bars for cause in bar.why
    )
    if not bars:
        reason, key = m.bars[0].why[0] if m.bars[0].why else "unknown", f"{BUSBW} none"
        rate, size = units.rate(value), units.size(m.bytes)
        return make_finding(key, node, subject=m.op, evidence=evidence, rate=rate, size=size, why=reason)
    status = min((judge_bandwidth(value, bar) for bar in bars), key=ORDER.index)
    listed = "; ".join(f"{format_bar(bar)} {bar.name}" for bar in m.bars)
    measured = f"{units.rate(value)} at {units.size(m.bytes)} of {listed}"
    if status == "pass":
        case = "open" if first is None or first.low is None else "pass"
        return make_finding(f"{BUSBW} {case}", node, subject=m.op, evidence=evidence, measured=measured)
    case, fields = _find_cause(m, first, now, result, snapshots)
    fabric = result.evidence.fabric if result.evidence and case in _PROVES else ()
    evidence = (*_format_lines(line for line in fabric if _PROVES[case] in line.proves), *evidence)
    return make_finding(BUSBW + case, node, status, subject=m.op, evidence=evidence, measured=measured, **fields)


def format_expected(m: Measurement) -> str:
    """Format the first known bar of a measurement with its interval, for a table."""
    bar = next((bar for bar in m.bars if bar.low is not None), None)
    return format_bar(bar) if bar else units.rate(m.expected_busbw_bytes_per_second)


def format_bar(bar: Bar) -> str:
    """Format a bar: "332 GB/s (278 GB/s to 424 GB/s)", "unknown"."""
    if bar.low is None:
        return "unknown"
    return f"{units.rate(bar.typical)} ({units.rate(bar.low)} to {units.rate(bar.high)})"


def judge_bandwidth(value: float, bar: Bar) -> Status:
    """Return the status by cost: a value below the low end warns, below half of it fails."""
    low = bar.low or 0.0
    return Status.PASS if value >= low else Status.WARN if value >= low * FAILS_BELOW else Status.FAIL


def _find_cause(
    m: Measurement, first: Bar | None, now: Bar | None, result: BenchResult, snapshots: Sequence[Snapshot]
) -> tuple[str, dict[str, object]]:
    """Return the cause as far as the two bars show it: the case of the finding, and the values for its text."""
    hosts, value = len(set(m.hosts)), m.busbw_bytes_per_second
    if first and first.ring_high and value <= first.ring_high and (first.low or 0.0) > value:
        return " nvls", {"ring": units.rate(first.ring_high)}
    expected = (first.low if first else None) or 0.0
    if now is not None and now.low is not None and now.low <= value and now.low < expected:
        missing = [text for snapshot in snapshots for text in describe_departures(build(snapshot))]
        return " links", {"missing": "; ".join(missing) or _describe_difference(first, now)}
    remote = result.evidence.inter_node_transport if result.evidence else None
    if hosts > 1 and len(result.nvlink_domains) == 1 and result.nvlink_domains[0] and remote != "NVLink (MNNVL)":
        return " mnnvl", {"hosts": hosts, "domain": result.nvlink_domains[0], "by": remote or "another way"}
    if hosts > 1:
        nccl = m.backend == "nccl"
        hint = "NIC at a time with NCCL_IB_HCA" if nccl else "interface at a time with GLOO_SOCKET_IFNAME"
        return " hosts", {"hosts": hosts, "one": hint}
    return "", {}


def _describe_difference(first: Bar | None, now: Bar) -> str:
    lost = [reason for reason in (first.why if first else ()) if reason not in now.why]
    have = [reason for reason in now.why if first is None or reason not in first.why]
    return f"{have[0]}, where {lost[0]}" if have and lost else "fewer than on its equals"


# The checks of a benchmark and of a run.


def with_bench(view: View, bench: BenchResult | None, at_seconds: float | None = None) -> View:
    """Add to the view the checks of a benchmark of its hosts, which ended at `at_seconds` (Unix time)."""
    if bench is None:
        return view
    checks = (*view.checks, *without_secrets(check_benchmark(bench, view.snapshots)))
    return replace(view, checks=checks, verdict=judge(checks), bench=bench, bench_at_seconds=at_seconds)


def check_benchmark(result: BenchResult, snapshots: Sequence[Snapshot]) -> tuple[Finding, ...]:
    """Return the checks of a benchmark."""
    node = ", ".join(sorted(set(result.hosts)))
    return (
        _check_verified(result, node),
        _check_complete(result, node),
        *check_bars(result, snapshots),
        *_check_stragglers(result, node),
        *_check_evidence(result, snapshots, node),
    )


def _check_verified(result: BenchResult, node: str) -> Finding:
    wrong = [m for m in result.measurements if not m.verified]
    if wrong:
        names = ", ".join(f"{m.op} at {units.size(m.bytes)}" for m in wrong)
        return make_finding("bench.result.unverified", node, evidence=result.problems, names=names)
    if not result.measurements:
        return make_finding("bench.result.unverified none", node)
    return make_finding("bench.result.unverified pass", node, count=len(result.measurements))


def _check_complete(result: BenchResult, node: str) -> Finding:
    if result.complete:
        return make_finding("bench.run.incomplete pass", node)
    if result.stopped_by:  # the end of the ranks then shows nothing about the machine
        done = units.count(len(result.measurements), "size")
        key = "bench.run.incomplete stopped"
        return make_finding(key, node, evidence=result.problems, signal=result.stopped_by, done=done)
    reason = "; ".join(result.problems) or "ended early"
    return make_finding("bench.run.incomplete", node, evidence=result.problems, why=reason)


def require_measured(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """Change an incomplete benchmark from unknown to a failure, for a request that depends on its result."""
    return tuple(
        replace(check, status=Status.FAIL)
        if check.code == "bench.run.incomplete" and check.status == "unknown"
        else check
        for check in checks
    )


def _check_stragglers(result: BenchResult, node: str) -> list[Finding]:
    if not result.measurements:
        return [make_finding("bench.rank.slow none", node)]
    if not result.stragglers:
        return [make_finding("bench.rank.slow pass", node)]
    return [
        make_finding("bench.rank.slow", node, subject=f"rank {straggler.rank} on {straggler.host}", late=straggler,
             evidence=(straggler.why,) if straggler.why else (), seconds=units.seconds(straggler.late_seconds))
        for straggler in result.stragglers
    ]  # fmt: skip


def _check_evidence(result: BenchResult, snapshots: Sequence[Snapshot], node: str) -> list[Finding]:
    log = result.evidence
    if log is None:
        reason = f"the {result.backend} backend leaves no NCCL log to read"
        return list(make_unmeasured(("evidence.gdrdma.off", "evidence.log.problem"), reason))
    sent, received = log.send, log.receive
    noun = "channel" if max(sent.total, received.total) == 1 else "channels"
    sides = (("send", sent), ("receive", received))
    counts_seen = [f"{word} {side.gdrdma}/{side.total}" for word, side in sides if side.total]
    could = is_gdrdma_possible(snapshots)
    status = {"on": Status.PASS, "none": Status.UNKNOWN}.get(log.gdrdma, Status.FAIL if could else Status.INFO)
    gdrdma = make_finding(
        "evidence.gdrdma.off" if could else "evidence.gdrdma.off impossible", node, status,
        evidence=_format_lines(log.proof[:4]), gdrdma=log.gdrdma,
        counts=f"{', '.join(counts_seen)} {noun}" if counts_seen else "no channel seen",
    )  # fmt: skip
    problems = [
        make_finding("evidence.log.problem", node, Status(problem.severity), subject=problem.code,
             evidence=_format_lines(problem.lines[:3]), problem=problem)
        for problem in log.problems
    ]  # fmt: skip
    return [gdrdma, *(problems or [make_finding("evidence.log.problem pass", node)])]


def _format_lines(proof: Iterable[Any]) -> tuple[str, ...]:
    return tuple(f"line {line.line}: {line.text}" for line in proof)


def check_run(record: RunRecord | None, node: str, reason: str) -> tuple[Finding, ...]:
    """Return the checks of a run; `reason` says why there is no record."""
    if record is None:
        return (make_finding("run.failed none", node, why=reason), *make_unmeasured(RUN_CODES[1:], reason))
    ended = "run.failed pass" if record.status == "complete" else "run.failed"
    layout = "" if record.status == "mismatch" else " unknown" if record.layout.effective is None else " pass"
    loss = " unknown"
    if record.loss.first is not None and record.loss.last is not None:
        loss = " pass" if record.loss.last < record.loss.first else ""
    return (
        make_finding(ended, node, record=record, reason=record.reason or "no reason given"),
        make_finding(f"run.layout.mismatch{layout}", node, record=record),
        make_finding(f"run.loss.not_falling{loss}", node, record=record),
        *(_check_forecast(line, node) for line in compare(record)),
    )


def _check_forecast(line: Comparison, node: str) -> Finding:
    code = "forecast.step_time.outside" if line.quantity == "step_seconds" else "forecast.memory.outside"
    status = Status.PASS if line.within else Status.UNKNOWN if line.within is None else None
    return make_finding(
        f"{code} within" if status else code, node, status,
        forecast=units.interval(line.forecast, line.unit),
        measured=units.seconds(line.measured) if line.unit == "s" else units.size(line.measured),
    )  # fmt: skip
