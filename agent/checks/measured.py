"""Checks that rest on a measurement: the benchmark, its evidence, and the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from agent.base import units
from agent.checks.coverage import gdrdma_possible
from agent.checks.judged import checks_of_bars
from agent.checks.verdict import judge
from agent.checks.view import View, without_secrets
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
    finding = partial(Finding, code="bench.result.unverified", node=node)
    wrong = [m for m in result.measurements if not m.verified]
    if wrong:
        names = ", ".join(f"{m.op} at {units.size(m.bytes)}" for m in wrong)
        return finding(
            status=Status.FAIL, message=f"wrong data from {names}", evidence=result.problems,
            remedy="Treat the named rank's GPU, memory or link as faulty: run its diagnostics before any training.",
        )  # fmt: skip
    if not result.measurements:
        return finding(status=Status.UNKNOWN, message="nothing was measured")
    return finding(status=Status.PASS, message=f"{len(result.measurements)} results verified element by element")


def _incomplete(result: BenchResult, node: str) -> Finding:
    finding = partial(Finding, code="bench.run.incomplete", node=node)
    if result.complete:
        return finding(status=Status.PASS, message="ran to its end")
    if result.stopped_by:  # what became of the ranks then says nothing of the machine
        done = units.count(len(result.measurements), "size")
        return finding(
            status=Status.UNKNOWN, evidence=result.problems,
            message=f"stopped by {result.stopped_by} before it was done: {done} measured until then",
            remedy="Measure again: what was not measured is not known.",
        )  # fmt: skip
    return finding(
        status=Status.FAIL, evidence=result.problems,
        message="; ".join(result.problems) or "ended early",
        remedy="See which rank ended first; `topoflight explain bench.run.incomplete` lists the usual causes.",
    )  # fmt: skip


def must_be_measured(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """The checks of a benchmark that this very answer was to rest on: one that was stopped is no pass then."""
    return tuple(
        replace(check, status=Status.FAIL)
        if check.code == "bench.run.incomplete" and check.status == "unknown"
        else check
        for check in checks
    )


def _stragglers(result: BenchResult, node: str) -> list[Finding]:
    finding = partial(Finding, code="bench.rank.slow", node=node)
    if not result.measurements:
        return [finding(status=Status.UNKNOWN, message="nothing was measured")]
    if not result.stragglers:
        return [finding(status=Status.PASS, message="no rank is waited for")]
    return [
        finding(
            status=Status.WARN, subject=f"rank {s.rank} on {s.host}",
            message=f"comes last in {s.share:.0%} of {s.iterations} iterations, {units.seconds(s.late_seconds)} late",
            evidence=(s.why,) if s.why else (), remedy="Look at this rank's GPU clocks, NIC and CPU load first.",
        )
        for s in result.stragglers
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
    counts = f"{', '.join(seen)} {noun}" if seen else "no channel seen"
    lines = tuple(f"line {p.line}: {p.text}" for p in found.proof[:4])
    could = gdrdma_possible(snapshots)
    status = {"on": "pass", "none": "unknown"}.get(found.gdrdma, "fail" if could else "info")
    checks = [
        Finding(
            code="evidence.gdrdma.off", status=status, node=node, message=f"GPUDirect RDMA is {found.gdrdma}: {counts}",  # type: ignore[arg-type]
            evidence=lines, remedy="Load nvidia_peermem or use DMA-BUF, and check the GPU-NIC path." if could else "",
        )
    ]  # fmt: skip
    finding = partial(Finding, code="evidence.log.problem", node=node)
    for problem in found.problems:
        proof = tuple(f"line {p.line}: {p.text}" for p in problem.lines[:3])
        checks.append(
            finding(
                status=problem.severity, subject=problem.code, message=problem.message, evidence=proof,  # type: ignore[arg-type]
                remedy=problem.action,
            )
        )  # fmt: skip
    return checks if found.problems else [*checks, finding(status=Status.PASS, message="the log shows no problem")]


def checks_of_run(record: RunRecord | None, node: str, why: str) -> tuple[Finding, ...]:
    """What the run established; `why` says why there is no record."""
    if record is None:
        failed = Finding(code="run.failed", status=Status.FAIL, node=node, message=why)
        return (failed, *unmeasured(RUN_CODES[1:], why))
    return (
        _ended(record, node),
        _layout(record, node),
        _loss(record, node),
        *(_compared(line, node) for line in compare(record)),
    )


def _ended(record: RunRecord, node: str) -> Finding:
    finding = partial(Finding, code="run.failed", node=node)
    if record.status == "complete":
        return finding(status=Status.PASS, message=f"{record.steps_done} steps trained")
    message = f"the job ended as {record.status!r}: {record.reason or 'no reason given'}"
    return finding(status=Status.FAIL, message=message, remedy="Read the job's log.")


def _layout(record: RunRecord, node: str) -> Finding:
    code = "run.layout.mismatch"
    if record.status == "mismatch":
        message = f"what runs is not what was requested: {record.reason}"
        remedy = "Use an engine that can run the layout."
        return Finding(code=code, status=Status.FAIL, node=node, message=message, remedy=remedy)
    if record.layout.effective is None:
        return Finding(code=code, status=Status.UNKNOWN, node=node, message="the job did not report its layout")
    return Finding(code=code, status=Status.PASS, node=node, message=record.placements)


def _loss(record: RunRecord, node: str) -> Finding:
    code = "run.loss.not_falling"
    if record.loss.first is None or record.loss.last is None:
        return Finding(code=code, status=Status.UNKNOWN, node=node, message="no loss was reported")
    falls = record.loss.last < record.loss.first
    return Finding(
        code=code, status=Status.PASS if falls else Status.FAIL, node=node,
        message=f"loss {record.loss.first:.3f} -> {record.loss.last:.3f} in {record.steps_done} steps",
        remedy="" if falls else "Lower the learning rate, and look at the data.",
    )  # fmt: skip


def _compared(line: Comparison, node: str) -> Finding:
    code = "forecast.step_time.outside" if line.quantity == "step_seconds" else "forecast.memory.outside"
    forecast, measured = (
        units.interval(line.forecast, line.unit),
        (units.seconds(line.measured) if line.unit == "s" else units.size(line.measured)),
    )
    message = f"forecast {forecast}, measured {measured}"
    if line.within is None:
        return Finding(code=code, status=Status.UNKNOWN, node=node, message=message)
    return Finding(
        code=code, status=Status.PASS if line.within else Status.WARN, node=node, message=message,
        remedy="" if line.within else "Run `topoflight calibrate` on this machine.",
    )  # fmt: skip
