"""Print benchmarks and runs; the pages use the same words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import Grid, make_table
from agent.checks.measured import format_bar, format_expected
from collectives.bench.results import BenchResult, Measurement, RdmaResult
from collectives.nccl_log.transport import Evidence
from contracts.run_record import Comparison, RunRecord, compare


def results_grid(measurements: Sequence[Measurement]) -> Grid:
    """Return a row for each result of a benchmark."""
    expected = any(m.expected_busbw_bytes_per_second for m in measurements)
    rows = [
        (m.op, units.size(m.bytes), units.seconds(m.median_seconds),
         f"{m.spread_ratio * 100:.1f} %" if m.spread_ratio is not None else "?",
         units.rate(m.algbw_bytes_per_second), units.rate(m.busbw_bytes_per_second),
         *([format_expected(m)] if expected else []), "yes" if m.verified else "NO")
        for m in measurements
    ]  # fmt: skip
    columns = ("op", "size", "median", "± 95 %", "algbw", "busbw", *(["expected"] if expected else []), "verified")
    return Grid(columns=columns, rows=tuple(rows))


def print_benchmark(out: Console, result: BenchResult, *, verbose: bool = False) -> None:
    """Print measured collectives: each op at its largest size and what is unverified; `verbose`: every size."""
    largest = {m.op: m for m in sorted(result.measurements, key=lambda m: m.bytes)}
    measurements = [m for m in result.measurements if m is largest[m.op] or not m.verified or verbose]
    title = describe_ranks(result)
    left = len(result.measurements) - len(measurements)
    out.print(_describe_verdict(result, sum(not m.verified for m in result.measurements)))
    out.print(escape(title + (f"; -v shows {left} smaller sizes" if left else "")))
    out.print(make_table(results_grid(measurements)))
    for problem in result.problems:
        out.print(f"[red]! {escape(problem)}[/red]")
    if result.evidence is not None:
        out.print(escape(describe_transport(result.evidence)))


def describe_ranks(result: BenchResult) -> str:
    """Return who measured: "16 nccl ranks on node-a, node-b"."""
    return f"{result.world_size} {result.backend} ranks on {units.some(sorted(set(result.hosts))) or 'this host'}"


def describe_transport(e: Evidence) -> str:
    """Return which transport NCCL's log shows between and within nodes, and how many channels use GPUDirect RDMA."""
    channels = f"send {e.send.gdrdma}/{e.send.total}, receive {e.receive.gdrdma}/{e.receive.total}"
    return (
        f"transport between nodes: {e.inter_node_transport or 'none'}; within: {e.intra_node_transport or 'none'}; "
        f"GPUDirect RDMA: {e.gdrdma} ({channels})"
    )


def _describe_verdict(result: BenchResult, wrong: int) -> str:
    """Return the first line: whether the measurement can be used, and the recommended action."""
    many = units.count(len(result.measurements), "result")
    if wrong:
        return f"[bold red]✗ FAIL[/bold red] [bold]Measured[/bold]: {wrong} of {many} not verified"
    if result.stopped_by:
        ended = f"stopped by {result.stopped_by} before the end; {many} verified until then → measure again"
        return f"[magenta]? unknown[/magenta] [bold]Measured[/bold]: {ended}"
    if result.problems:
        return f"[bold red]✗ FAIL[/bold red] [bold]Measured[/bold]: the run ended early; {many} verified until then"
    todo = "→ save a baseline with --save FILE, compare with --baseline FILE"
    return f"[green]✓[/green] [bold]Measured[/bold]: every result verified {todo}"


def print_rdma_writes(out: Console, result: RdmaResult) -> None:
    """Print measured RDMA writes, one row per port."""
    bars = [next((bar for bar in write.bars if bar.low is not None), None) for write in result.writes]
    rows = [
        (write.port, units.bits(write.rate_bytes_per_second), str(write.mtu_bytes or "?"),
         units.rate(write.bytes_per_second), format_bar(bar) if bar else "unknown")
        for write, bar in zip(result.writes, bars, strict=True)
    ]  # fmt: skip
    out.print(f"\n[bold]RDMA writes[/bold] from {escape(result.host)} to {escape(result.peer)}")
    out.print(make_table(Grid(columns=("port", "rate", "MTU", "written", "expected"), rows=tuple(rows))))
    for problem in result.problems:
        out.print(f"[red]! {escape(problem)}[/red]")


def print_comparison(out: Console, record: RunRecord) -> None:
    """Print the forecast and the measurement of step time and memory."""
    out.print("\n[bold]Forecast against run[/bold]")
    for line in compare(record):
        forecast, measured = describe_comparison(line)
        out.print(f"{line.title}: forecast {forecast}, measured {measured}: {line.verdict}")


def describe_comparison(line: Comparison) -> tuple[str, str]:
    """Return a forecast and the measured value in the same unit."""
    show = units.seconds if line.unit == "s" else units.size
    return units.interval(line.forecast, line.unit), show(line.measured)


def describe_run(record: RunRecord) -> str:
    """Return steps, loss, tokens per second and exposed communication of a run, in one line."""
    loss, measured = "loss unknown", record.measured
    if record.loss.first is not None and record.loss.last is not None:
        loss = f"loss {record.loss.first:.3f} -> {record.loss.last:.3f}"
    tokens = f"{measured.tokens_per_second:,.0f} tokens/s" if measured.tokens_per_second else "tokens/s unknown"
    exposed = record.communication.exposed_share if record.communication else None
    waits = f", communication {exposed:.0%} exposed" if exposed else ""
    steps = "steps unknown" if record.steps_done is None else units.count(record.steps_done, "step")
    return f"{steps}, {loss}, {tokens}{waits}"


def print_run(out: Console, record: RunRecord) -> None:
    """Print the job's own report."""
    out.print(f"\n[bold]Run[/bold] {escape(record.placements)}")
    out.print(describe_run(record))
    saved = f"model: {record.saved_model}" if record.saved_model else f"adapter: {record.adapter or 'none'}"
    out.print(f"{saved}\ncheckpoint: {record.checkpoint or 'none'}", markup=False)


def list_transports(record: RunRecord) -> str:
    """Return the transports of a run without the numbers of devices, and the interfaces of NCCL's TCP."""
    names = [re.sub(r"/\d+(?=/|$)", "", name) for name in record.transports]
    interfaces = record.nccl.interfaces if record.nccl and "NET/Socket" in names else ()
    return ", ".join(dict.fromkeys((*names, *interfaces)))
