"""The verbs bench, search and calibrate, which measure with real ranks and generate load."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PASS, EXIT_UNKNOWN, units
from agent.base.hosts import snapshots
from agent.base.options import command
from agent.base.output import Progress, console, emit, print_text, render, save_document, write_result

if TYPE_CHECKING:
    from collectives.bench.results import BenchResult
    from contracts.finding import Finding
    from probes.api import Snapshot


@command("bench")
def bench(form: str, save: Path | None, baseline: Path | None, verbose: bool, **options: Any) -> None:
    """Run the benchmark, compare it with a baseline, print the result, and exit with its code."""
    if options["rdma"]:
        sys.exit(_rdma(options, form, save, baseline))
    from agent.base.result_store import save_benchmark_result
    from agent.checks.baseline import against_baseline
    from agent.checks.baseline import read as read_baseline
    from agent.checks.measured import checks_of_bars
    from agent.jobs.benchmark import spec_of, watch
    from agent.terminal import measured
    from collectives.bench.run import run
    from probes.registry import ALL

    stop, signals = stop_on_signals()
    progress = Progress()
    before = read_baseline(baseline, ("busbw",)).busbw  # before the run, to reject a wrong file early
    spec = spec_of(options)
    progress.step(f"measure: {spec.world_size} ranks, up to {units.seconds(spec.budget_seconds)}")
    result = run(spec, watch(progress.note), stop)
    if signals:
        result = replace(result, stopped_by=signal.Signals(signals[0]).name)
    result = against_baseline(result, before)
    save_benchmark_result(result)
    emit(result, form, lambda out: measured.bench(out, result, verbose=verbose))
    save_document(save, result)
    sys.exit(_bench_exit(result, _report_low(checks_of_bars(result, snapshots((), ALL)))))


def _report_low(checks: Iterable[Finding]) -> bool:
    """Print results below their expected value to stderr; return whether none of them is a failure."""
    low = [check for check in checks if check.status in ("warn", "fail")]
    for check in low:
        print_text(f"{check.status}: {check.code} {check.subject}: {check.message}", err=True)
        print_text(f"  {check.remedy}", err=True)
    return all(check.status != "fail" for check in low)


def stop_on_signals() -> tuple[threading.Event, list[int]]:
    """Catch SIGTERM and SIGINT. Each sets the returned event and adds its number to the returned list."""
    stop, got = threading.Event(), list[int]()

    def end(number: int, _frame: object) -> None:
        got.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop, got


def _rdma(options: Mapping[str, Any], form: str, save: Path | None, baseline: Path | None) -> int:
    """Measure RDMA writes to the other host, or serve as their target; return the exit code."""
    from agent.checks.baseline import read as read_baseline
    from agent.jobs.benchmark import checks_of_writes, ports_of, with_bars
    from agent.terminal import measured
    from collectives.bench import perftest, processes
    from probes.registry import ALL

    stop, got = stop_on_signals()
    seconds = options["startup"] or perftest.WAIT_SECONDS
    progress = Progress()
    before = read_baseline(baseline, ("writes",)).writes  # before the run, to reject a wrong file early
    perftest.require_program()
    (found,) = snapshots((), ALL, stop=stop)
    ports = ports_of(found, options["devices"])
    if not ports:
        print_text(f"{found.hostname}: no RDMA port is ACTIVE; `topoflight scan` shows why", err=True)
        _report_low(_causes(found))
        return EXIT_FAILED
    named = ", ".join(map(str, ports))
    with processes.lock_host():
        if options["rdma"] == "listen":
            progress.step(f"listen: {named}, up to {units.seconds(seconds)} for each to be written to")
            served, problems = perftest.listen(ports, wait_seconds=seconds, stop=stop)
            for problem in problems:
                print_text(problem, err=True)
            _report_low(_causes(found) if problems else ())
            if signal.SIGINT in got:
                return EXIT_INTERRUPTED
            return EXIT_PASS if served and not problems else EXIT_FAILED
        progress.step(f"measure: writes of {named} to {options['rdma']}, {perftest.RUN_SECONDS} s for each")
        result = perftest.write(ports, options["rdma"], wait_seconds=seconds, stop=stop)
    result = with_bars(result, found, before)
    emit(result, form, lambda out: measured.rdma(out, result))
    save_document(save, result)
    well = _report_low([*checks_of_writes(result, before), *([] if result.complete else _causes(found))])
    if signal.SIGINT in got:
        return EXIT_INTERRUPTED
    return EXIT_PASS if well and result.complete else EXIT_FAILED


def _causes(found: Snapshot) -> list[Finding]:
    """Return findings of this host's scan that prevent RDMA."""
    from agent.checks.host_checks import checks_of_snapshot

    return [
        c for c in checks_of_snapshot(found) if c.status == "fail" and c.code.startswith(("rdma.", "limits.memlock"))
    ]


def _bench_exit(result: BenchResult, well: bool) -> int:
    if result.stopped_by == signal.SIGINT.name:
        return EXIT_INTERRUPTED
    whole = result.complete and result.measurements and all(m.verified for m in result.measurements)
    return EXIT_PASS if whole and well else EXIT_FAILED


@command("search")
def search(form: str, save: Path | None, picture: Path | None, verbose: bool, **options: Any) -> None:
    """Take part in the search; node 0 also prints the result."""
    from agent.base import result_store
    from agent.jobs import search as job
    from agent.terminal.findings import findings
    from collectives.search import run
    from contracts import plain
    from probes.registry import ALL

    stop, got = stop_on_signals()
    progress = Progress()
    try:
        spec = job.spec_of(options, snapshots((), ALL))
        progress.step(f"search: {units.count(spec.place.nodes, 'node')}, up to {units.seconds(spec.limit_seconds)}")
        result = run.search(spec, progress.note, stop)
    except run.SearchError as error:
        if signal.SIGINT not in got:
            raise
        print_text(str(error), err=True)
        sys.exit(EXIT_INTERRUPTED)
    if result is None:
        return
    found, lines, measured = job.findings_of(result), job.summary(result), plain.write(result)
    result_store.save_search_result(measured)
    document = {**measured, "findings": found, "summary": lines, "affinity": job.affinity(result)}
    if form == "table":
        print_text(lines[0])
        findings(console(), found, everything=verbose)
        print_text("\n".join(lines[1:]))
    else:
        print_text(job.slurm_hosts(result) if form == "slurm" else render(document, form), nl=False)
    save_document(save, document)
    if picture is not None:
        write_result(picture, job.picture(result), named=f"--picture {picture}")
    if any(one.status in ("fail", "warn") for one in found):
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_UNKNOWN if found else EXIT_PASS)


@command("calibrate")
def calibrate(model: str, sequence_length: int, target: Path | None, **options: Any) -> None:
    """Measure matrix multiplications and one layer of a model, for more precise forecasts. Generates load."""
    from agent.jobs.benchmark import calibration, default_ranks, has_gpu
    from planner.forecast.models import model_named
    from probes.registry import ALL

    found_hosts, seconds = snapshots((), ALL), options["budget"]
    copies = options["ranks"] or default_ranks(found_hosts)
    Progress().step(f"calibrating for {model} with {copies} ranks, up to {units.seconds(seconds)}")
    found = calibration(
        model_named(model), sequence_length=sequence_length, tokens=options["tokens"] or sequence_length,
        budget_seconds=seconds, ranks=copies, method=options["method"], gpu=has_gpu(found_hosts),
    )  # fmt: skip
    text = render(found, "json")
    if target is None:
        print_text(text, nl=False)
    else:
        write_result(target, text)
        console().print(f"{target}: written")
