"""The verbs bench, search, calibrate and compare-networks, which measure with real ranks and generate load."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent.base import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PASS, EXIT_UNKNOWN, units
from agent.base.options import command, read_snapshots, require_writable
from agent.base.output import Progress, console, emit, print_text, render, save_document, write_result

if TYPE_CHECKING:
    from rich.console import Console

    from agent.jobs.networks import NetworkBars
    from collectives.bench.perftest import Port
    from collectives.bench.results import BenchResult
    from contracts.finding import Finding
    from probes.api import Snapshot

_BAR_WIDTH = 20  # characters


@command("bench")
def bench(
    form: str, save: Path | None, baseline: Path | None, verbose: bool, rdma: str | None, devices: tuple[str, ...],
    startup: float | None, **options: Any,
) -> None:  # fmt: skip
    """Run the benchmark, compare it with a baseline, print the result, and exit with its code."""
    if rdma:
        sys.exit(_bench_rdma(rdma, devices, startup, form, save, baseline))
    from agent.base.result_store import save_benchmark_result
    from agent.checks.baseline import add_baseline_bars, read_baseline
    from agent.checks.measured import check_bars
    from agent.jobs.benchmark import build_spec, make_event_printer
    from agent.terminal import measured
    from collectives.bench.run import run
    from probes.registry import ALL

    stop, received = _stop_on_signals()
    progress = Progress()
    before = read_baseline(baseline, ("busbw",)).busbw  # before the run, to reject a wrong file early
    spec = build_spec(startup=startup, **options)
    progress.step(f"measure: {spec.world_size} ranks, up to {units.seconds(spec.budget_seconds)}")
    result = run(spec, make_event_printer(progress.note), stop)
    if received:
        result = replace(result, stopped_by=received[0])
    result = add_baseline_bars(result, before)
    save_benchmark_result(result)
    emit(result, form, lambda out: measured.print_benchmark(out, result, verbose=verbose))
    save_document(save, result)
    sys.exit(_choose_exit_code(result, _report_low(check_bars(result, read_snapshots((), ALL)))))


def _report_low(checks: Iterable[Finding]) -> bool:
    """Print results below their expected value to stderr; return whether none of them is a failure."""
    low = [check for check in checks if check.status in ("warn", "fail")]
    for check in low:
        print_text(f"{check.status}: {check.code} {check.subject}: {check.message}\n  {check.remedy}", err=True)
    return all(check.status != "fail" for check in low)


def _stop_on_signals() -> tuple[threading.Event, list[str]]:
    """Until the verb ends, SIGTERM and SIGINT set the returned event and add their names to the returned list."""
    from agent.jobs.benchmark import stop_on_signals

    return click.get_current_context().with_resource(stop_on_signals(signal.SIGTERM, signal.SIGINT))


def _bench_rdma(
    peer: str, devices: Sequence[str], wait_seconds: float | None, form: str, save: Path | None, baseline: Path | None
) -> int:
    """Measure RDMA writes to the other host, or with the peer "listen" serve as their target; return the exit code."""
    from agent.checks.baseline import read_baseline
    from agent.jobs.benchmark import check_writes, select_ports, with_bars
    from agent.terminal import measured
    from collectives.bench import perftest, processes
    from probes.registry import ALL

    stop, received = _stop_on_signals()
    seconds = wait_seconds or perftest.WAIT_SECONDS
    before = read_baseline(baseline, ("writes",)).writes  # before the run, to reject a wrong file early
    perftest.require_program()
    (snapshot,) = read_snapshots((), ALL, stop=stop)
    ports = select_ports(snapshot, devices)
    if not ports:
        print_text(f"{snapshot.hostname}: no RDMA port is ACTIVE; `topoflight scan` shows why", err=True)
        _report_low(_find_causes(snapshot))
        return EXIT_FAILED
    if peer == "listen":
        has_passed = _serve_rdma_writes(snapshot, ports, seconds, stop)
    else:
        with processes.lock_host():
            listed = ", ".join(map(str, ports))
            Progress().step(f"measure: writes of {listed} to {peer}, {perftest.RUN_SECONDS} s for each")
            result = perftest.write(ports, peer, wait_seconds=seconds, stop=stop)
        result = with_bars(result, snapshot, before)
        emit(result, form, lambda out: measured.print_rdma_writes(out, result))
        save_document(save, result)
        causes = [] if result.complete else _find_causes(snapshot)
        has_passed = _report_low([*check_writes(result, before), *causes]) and result.complete
    if signal.SIGINT.name in received:
        return EXIT_INTERRUPTED
    return EXIT_PASS if has_passed else EXIT_FAILED


def _serve_rdma_writes(host: Snapshot, ports: Sequence[Port], wait_seconds: float, stop: threading.Event) -> bool:
    """Wait until the other host has written to each port; print problems, and return whether there was none."""
    from collectives.bench import perftest, processes

    listed = ", ".join(map(str, ports))
    with processes.lock_host():
        Progress().step(f"listen: {listed}, up to {units.seconds(wait_seconds)} for each to be written to")
        served, problems = perftest.listen(ports, wait_seconds=wait_seconds, stop=stop)
    for problem in problems:
        print_text(problem, err=True)
    _report_low(_find_causes(host) if problems else ())
    return bool(served) and not problems


def _find_causes(host: Snapshot) -> list[Finding]:
    """Return findings of this host's scan that prevent RDMA."""
    from agent.checks.host_checks import check_snapshot

    return [c for c in check_snapshot(host) if c.status == "fail" and c.code.startswith(("rdma.", "limits.memlock"))]


def _choose_exit_code(result: BenchResult, well: bool) -> int:
    if result.stopped_by == signal.SIGINT.name:
        return EXIT_INTERRUPTED
    is_complete = result.complete and result.measurements and all(m.verified for m in result.measurements)
    return EXIT_PASS if is_complete and well else EXIT_FAILED


@command("search")
def search(form: str, save: Path | None, picture: Path | None, verbose: bool, **options: Any) -> None:
    """Take part in the search; node 0 also prints the result."""
    from agent.base import result_store
    from agent.jobs import search as job
    from agent.terminal.findings import print_findings
    from collectives.search import run
    from contracts import plain
    from probes.registry import ALL

    stop, received = _stop_on_signals()
    progress = Progress()
    try:
        spec = job.build_spec(read_snapshots((), ALL), **options)
        progress.step(f"search: {units.count(spec.rank.nodes, 'node')}, up to {units.seconds(spec.limit_seconds)}")
        result = run.search(spec, progress.note, stop)
    except run.SearchError as error:
        if signal.SIGINT.name not in received:
            raise
        print_text(str(error), err=True)
        sys.exit(EXIT_INTERRUPTED)
    if result is None:
        return
    findings, lines, measured = job.make_findings(result), job.summarise(result), plain.write(result)
    result_store.save_search_result(measured)
    document = {**measured, "findings": findings, "summary": lines, "affinity": job.build_affinity(result)}
    if form == "table":
        print_text(lines[0])
        print_findings(console(), findings, everything=verbose)
        print_text("\n".join(lines[1:]))
    else:
        print_text(job.format_slurm_hosts(result) if form == "slurm" else render(document, form), nl=False)
    save_document(save, document)
    if picture is not None:
        write_result(picture, job.draw_pairs(result), label=f"--picture {picture}")
    if any(finding.status in ("fail", "warn") for finding in findings):
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_UNKNOWN if findings else EXIT_PASS)


@command("calibrate")
def calibrate(
    model: str, method: str, sequence_length: int, tokens: int | None, ranks: int | None, budget: float,
    target: Path | None,
) -> None:  # fmt: skip
    """Measure matrix multiplications and one layer of a model, for more precise forecasts. Generates load."""
    from agent.advice.request import Request
    from agent.jobs.benchmark import calibrate_host, count_default_ranks, list_gpus
    from probes.registry import ALL

    hosts = read_snapshots((), ALL)
    copies, gpu, tokens = ranks or count_default_ranks(hosts), bool(list_gpus(hosts)), tokens or sequence_length
    Progress().step(f"calibrating for {model} with {copies} ranks, up to {units.seconds(budget)}")
    request = Request.of(model=model, sequence_length=sequence_length, method=method)
    calibration = calibrate_host(request, copies, tokens=tokens, gpu=gpu, budget_seconds=budget)
    text = render(calibration, "json")
    if target is None:
        print_text(text, nl=False)
    else:
        write_result(target, text)
        console().print(f"{target}: written")


# One fine-tune over several networks.


@command("compare-networks")
def compare_networks(form: str, folder: Path, if_possible: bool, verbose: bool, **values: Any) -> None:
    """Run the job over each network, write the report, and exit with the verdict's code."""
    from agent.jobs import networks
    from agent.jobs.launch import LaunchOptions
    from agent.jobs.namespaces import HOSTS, NamespaceError
    from collectives.bench.processes import BusyError

    options = LaunchOptions.of(**values)
    if not options.dry_run:
        require_writable("--report", folder, folder=True)
    is_local = options.api == "local"
    if is_local and options.request.ranks_per_node not in (None, HOSTS):
        raise click.UsageError(f"--ranks {options.request.ranks_per_node}: is {HOSTS} here, one in each namespace")
    try:
        result = networks.compare_here(options, folder) if is_local else networks.compare_in_cluster(options)
    except (NamespaceError, BusyError) as error:
        if if_possible:
            print_text(f"networks: not compared: {error}", err=True)
            return
        raise click.ClickException(f"not compared: {error}") from None
    if result is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("networks.svg", networks.draw_bars(result)), ("networks.json", render(result, "json"))):
        write_result(folder / name, content, label=f"--report {folder}")
    emit(result, form, lambda out: show_networks(out, result, verbose=verbose))
    print_text(f"report: {folder / 'networks.svg'}, {folder / 'networks.json'}", err=True)
    sys.exit(result.exit_code)


def show_networks(out: Console, comparison: NetworkBars, *, verbose: bool = False) -> None:
    """Print the verdict and the bars; if `verbose`, also the evidence."""
    from rich.markup import escape

    from agent.base.lines import grid
    from agent.jobs.networks import label_bar

    steps = [bar.step_seconds for bar in comparison.bars if bar.step_seconds]
    best, longest = min(steps, default=0.0), max(steps, default=1.0)
    out.print(escape(_describe_networks(comparison, verbose=verbose)))
    out.print(f"[dim]{escape(comparison.title)}[/dim]")
    rows = grid(2, 3)
    for bar in comparison.bars:
        text = "\n".join(label_bar(bar, best)) if bar.step_seconds else f"{bar.status}: {bar.why}"
        block = "█" * max(1, round(_BAR_WIDTH * bar.step_seconds / longest)) if bar.step_seconds else ""
        rows.add_row(escape(bar.network), block, escape(text))
    out.print(rows)
    if verbose:
        out.print(escape(comparison.where))
        for bar in filter(lambda bar: bar.step_seconds, comparison.bars):
            rate = f"; measured before: {units.rate(bar.busbw_bytes_per_second)}" if bar.busbw_bytes_per_second else ""
            line = f"{bar.network}: {bar.description}; proven by {'; '.join(bar.proof)}{rate}"
            out.print(escape(line), highlight=False)


def _describe_networks(networks: NetworkBars, *, verbose: bool) -> str:
    """Return the verdict: the fastest network, and the recommended action."""
    ran = sorted((bar for bar in networks.bars if bar.step_seconds), key=lambda bar: bar.step_seconds or 0.0)
    wrong = [f"{bar.network} {bar.status}" for bar in networks.bars if bar.status not in ("measured", "not available")]
    if wrong:
        mark = "✗" if networks.exit_code == EXIT_FAILED else "?"
        return f"{mark} not every network was measured: {', '.join(wrong)} → see the reasons below"
    if len(ran) < 2:
        return f"? {len(ran)} network ran: nothing to compare → add another with --over"
    first, *slower = ran
    times = ", ".join(f"{bar.network} {(bar.step_seconds or 0) / (first.step_seconds or 1):.3g} x" for bar in slower)
    hint = "" if verbose else " (-v shows the proof)"
    return f"✓ {first.network} is the fastest ({times} as long) → use it for the job{hint}"
