"""Checks that rest on a measurement: the benchmark, its evidence, and the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from agent.base import units
from agent.checks.host_checks import gdrdma_possible, without_secrets
from agent.checks.judged import checks_of_bars, make_finding
from agent.checks.verdict import judge
from agent.checks.view import View
from collectives.bench.results import BenchResult
from contracts.finding import Finding, Status
from contracts.run_record import Comparison, RunRecord, compare
from probes.api import Snapshot

BENCH_CODES = (
    "bench.result.unverified", "bench.run.incomplete", "bench.busbw.low", "bench.nvls.unused", "bench.mnnvl.off",
    "bench.rank.slow", "evidence.gdrdma.off", "evidence.log.problem",
)  # fmt: skip
RUN_CODES = (
    "run.failed", "run.layout.mismatch", "run.loss.not_falling", "forecast.step_time.outside",
    "forecast.memory.outside",
)  # fmt: skip


def unmeasured(codes: Sequence[str], why: str) -> tuple[Finding, ...]:
    """Checks that this run did not measure: unknown, never a pass."""
    return tuple(Finding(code=code, status=Status.UNKNOWN, node="", message=why) for code in codes)


def with_bench(view: View, bench: BenchResult | None, at_seconds: float | None = None) -> View:
    """The view with the checks of a benchmark of its hosts, which ended at `at_seconds` (Unix time)."""
    if bench is None:
        return view
    checks = (*view.checks, *without_secrets(checks_of_bench(bench, view.snapshots)))
    return replace(view, checks=checks, verdict=judge(checks), bench=bench, bench_at_seconds=at_seconds)


def checks_of_bench(result: BenchResult, snapshots: Sequence[Snapshot]) -> tuple[Finding, ...]:
    """What a benchmark established."""
    node = ", ".join(sorted(set(result.hosts)))
    return (
        _unverified(result, node),
        _incomplete(result, node),
        *checks_of_bars(result, snapshots),
        *_stragglers(result, node),
        *_evidence(result, snapshots, node),
    )


def _unverified(result: BenchResult, node: str) -> Finding:
    wrong = [m for m in result.measurements if not m.verified]
    if wrong:
        names = ", ".join(f"{m.op} at {units.size(m.bytes)}" for m in wrong)
        return make_finding("bench.result.unverified", node, evidence=result.problems, names=names)
    if not result.measurements:
        return make_finding("bench.result.unverified none", node)
    return make_finding("bench.result.unverified pass", node, count=len(result.measurements))


def _incomplete(result: BenchResult, node: str) -> Finding:
    if result.complete:
        return make_finding("bench.run.incomplete pass", node)
    if result.stopped_by:  # what became of the ranks then says nothing of the machine
        done = units.count(len(result.measurements), "size")
        key = "bench.run.incomplete stopped"
        return make_finding(key, node, evidence=result.problems, signal=result.stopped_by, done=done)
    why = "; ".join(result.problems) or "ended early"
    return make_finding("bench.run.incomplete", node, evidence=result.problems, why=why)


def must_be_measured(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """The checks of a benchmark that this very answer was to rest on: one that was stopped is no pass then."""
    return tuple(
        replace(check, status=Status.FAIL)
        if check.code == "bench.run.incomplete" and check.status == "unknown"
        else check
        for check in checks
    )


def _stragglers(result: BenchResult, node: str) -> list[Finding]:
    if not result.measurements:
        return [make_finding("bench.rank.slow none", node)]
    if not result.stragglers:
        return [make_finding("bench.rank.slow pass", node)]
    return [
        make_finding("bench.rank.slow", node, subject=f"rank {late.rank} on {late.host}", late=late,
             evidence=(late.why,) if late.why else (), seconds=units.seconds(late.late_seconds))
        for late in result.stragglers
    ]  # fmt: skip


def _evidence(result: BenchResult, snapshots: Sequence[Snapshot], node: str) -> list[Finding]:
    found = result.evidence
    if found is None:
        why = f"the {result.backend} backend leaves no NCCL log to read"
        return list(unmeasured(("evidence.gdrdma.off", "evidence.log.problem"), why))
    sent, received = found.send, found.receive
    noun = "channel" if max(sent.total, received.total) == 1 else "channels"
    seen = [
        f"{word} {side.gdrdma}/{side.total}" for word, side in (("send", sent), ("receive", received)) if side.total
    ]
    could = gdrdma_possible(snapshots)
    status = {"on": Status.PASS, "none": Status.UNKNOWN}.get(found.gdrdma, Status.FAIL if could else Status.INFO)
    gdrdma = make_finding(
        "evidence.gdrdma.off" if could else "evidence.gdrdma.off impossible", node, status,
        evidence=_lines(found.proof[:4]), gdrdma=found.gdrdma,
        counts=f"{', '.join(seen)} {noun}" if seen else "no channel seen",
    )  # fmt: skip
    problems = [
        make_finding("evidence.log.problem", node, Status(problem.severity), subject=problem.code,
             evidence=_lines(problem.lines[:3]), problem=problem)
        for problem in found.problems
    ]  # fmt: skip
    return [gdrdma, *(problems or [make_finding("evidence.log.problem pass", node)])]


def _lines(proof: Iterable[Any]) -> tuple[str, ...]:
    return tuple(f"line {line.line}: {line.text}" for line in proof)


def checks_of_run(record: RunRecord | None, node: str, why: str) -> tuple[Finding, ...]:
    """What the run established; `why` says why there is no record."""
    if record is None:
        return (make_finding("run.failed none", node, why=why), *unmeasured(RUN_CODES[1:], why))
    ended = "run.failed pass" if record.status == "complete" else "run.failed"
    layout = "" if record.status == "mismatch" else " unknown" if record.layout.effective is None else " pass"
    loss = " unknown"
    if record.loss.first is not None and record.loss.last is not None:
        loss = " pass" if record.loss.last < record.loss.first else ""
    return (
        make_finding(ended, node, record=record, reason=record.reason or "no reason given"),
        make_finding(f"run.layout.mismatch{layout}", node, record=record),
        make_finding(f"run.loss.not_falling{loss}", node, record=record),
        *(_compared(line, node) for line in compare(record)),
    )


def _compared(line: Comparison, node: str) -> Finding:
    code = "forecast.step_time.outside" if line.quantity == "step_seconds" else "forecast.memory.outside"
    status = Status.PASS if line.within else Status.UNKNOWN if line.within is None else None
    return make_finding(
        f"{code} within" if status else code, node, status,
        forecast=units.interval(line.forecast, line.unit),
        measured=units.seconds(line.measured) if line.unit == "s" else units.size(line.measured),
    )  # fmt: skip
