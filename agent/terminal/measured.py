"""Benchmarks and runs on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import SHOWN
from agent.base.tables import Grid, grid, table_of
from agent.checks.measured import bar_words, expected_words
from collectives.bench.results import BenchResult, Measurement, RdmaResult
from contracts.run_record import RunRecord, compare

if TYPE_CHECKING:
    from agent.jobs.preflight import Report


def results_grid(found: Sequence[Measurement]) -> Grid:
    """A row for each result of a benchmark."""
    expected = any(m.expected_busbw_bytes_per_second for m in found)
    rows = [
        (m.op, units.size(m.bytes), units.seconds(m.median_seconds),
         f"{m.spread_ratio * 100:.1f} %" if m.spread_ratio is not None else "?",
         units.rate(m.algbw_bytes_per_second), units.rate(m.busbw_bytes_per_second),
         *([expected_words(m)] if expected else []), "yes" if m.verified else "NO")
        for m in found
    ]  # fmt: skip
    columns = ("op", "size", "median", "± 95 %", "algbw", "busbw", *(["expected"] if expected else []), "verified")
    return Grid(columns=columns, rows=tuple(rows), long=("expected",))


def bench(out: Console, result: BenchResult, *, verbose: bool = False) -> None:
    """Measured collectives: each op at its largest size and what is unverified; `verbose`: every size."""
    largest = {m.op: m for m in sorted(result.measurements, key=lambda m: m.bytes)}
    shown = [m for m in result.measurements if m is largest[m.op] or not m.verified or verbose]
    where = f"{result.world_size} {result.backend} ranks on {units.some(sorted(set(result.hosts))) or 'this host'}"
    left = len(result.measurements) - len(shown)
    out.print(_verdict(result, sum(not m.verified for m in result.measurements)))
    out.print(escape(where + (f"; {left} smaller sizes: -v" if left else "")))
    out.print(table_of(results_grid(shown)))
    if result.step is not None and verbose:
        rows = [
            (
                part.name,
                units.size(part.bytes),
                str(part.times),
                str(part.group_ranks),
                units.seconds(part.median_seconds),
            )
            for part in result.step.parts
        ]
        columns = ("one training step", "bytes", "calls", "ranks", "time")
        out.print(table_of(Grid(columns=columns, rows=tuple(rows))))
    if result.step is not None:
        out.print(f"communication of one step without overlap: {units.seconds(result.step.median_seconds)}")
    if len(set(result.hosts)) > 1 and result.carried:
        over: dict[str, int] = {}
        for row in result.carried:
            name = f"{row.interface or 'an unknown interface'} on {result.hosts[row.rank]}"
            over[name] = over.get(name, 0) + row.bytes
        most = sorted(over.items(), key=lambda item: -item[1])[:SHOWN]
        out.print("over TCP: " + escape(", ".join(f"{units.size(count)} by {name}" for name, count in most)))
    for problem in result.problems:
        out.print(f"[red]! {escape(problem)}[/red]")
    if result.evidence is not None:
        e = result.evidence
        out.print(
            f"transport between nodes: {e.inter_node_transport or 'none'}; within: {e.intra_node_transport or 'none'}; "
            f"GPUDirect RDMA: {e.gdrdma} (send {e.send.gdrdma}/{e.send.total}, "
            f"receive {e.receive.gdrdma}/{e.receive.total})"
        )


def _verdict(result: BenchResult, wrong: int) -> str:
    """The first line: what the measurement is worth, and what to do with it."""
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


def rdma(out: Console, result: RdmaResult) -> None:
    """Measured RDMA writes, one row per port."""
    bars = [next((bar for bar in write.bars if bar.low is not None), None) for write in result.writes]
    rows = [
        (write.port, units.bits(write.rate_bytes_per_second), str(write.mtu_bytes or "?"),
         units.rate(write.bytes_per_second), bar_words(bar) if bar else "unknown")
        for write, bar in zip(result.writes, bars, strict=True)
    ]  # fmt: skip
    out.print(f"\n[bold]RDMA writes[/bold] from {escape(result.host)} to {escape(result.peer)}")
    columns = ("port", "rate", "MTU", "written", "expected")
    out.print(table_of(Grid(columns=columns, rows=tuple(rows), long=("expected",))))
    for problem in result.problems:
        out.print(f"[red]! {escape(problem)}[/red]")


def comparison(out: Console, record: RunRecord) -> None:
    """Print the forecast and the measurement of step time and memory, and the parts of the step."""
    from agent.pages.charts import division

    out.print("\n[bold]Forecast against run[/bold]")
    for line in compare(record):
        show = units.seconds if line.unit == "s" else units.size
        out.print(
            f"{line.title}: forecast {units.interval(line.forecast, line.unit)}, measured {show(line.measured)}: "
            f"{line.verdict}"
        )
        if line.quantity == "step_seconds" and (parts := division(record)):
            out.print(f"  {escape(parts)}")


def run(out: Console, record: RunRecord) -> None:
    """What the job says of itself."""
    out.print(f"\n[bold]Run[/bold] {escape(record.placements)}")
    loss, measured = "loss unknown", record.measured
    if record.loss.first is not None and record.loss.last is not None:
        loss = f"loss {record.loss.first:.3f} -> {record.loss.last:.3f}"
    tokens = f"{measured.tokens_per_second:.0f} tokens/s" if measured.tokens_per_second else "tokens/s unknown"
    exposed = record.communication.exposed_share if record.communication else None
    waits = f", communication {exposed:.0%} exposed" if exposed else ""
    out.print(f"{record.steps_done} steps, {loss}, {tokens}{waits}")
    saved = f"model: {record.saved_model}" if record.saved_model else f"adapter: {record.adapter or 'none'}"
    out.print(f"{saved}\ncheckpoint: {record.checkpoint or 'none'}", markup=False)


def by_network(out: Console, whole: Report) -> None:
    """Runs of one job over different networks, a bar each."""
    from agent.pages import charts

    for bars in charts.by_network(whole.runs):
        out.print(f"\n[bold]{escape(bars.title)}[/bold]")
        rows = grid(2, 3)
        for label, share, shown in bars.rows():
            rows.add_row(escape(label), blocks(share), shown)
        out.print(rows)


def blocks(share: float, width: int = 20) -> str:
    """A bar of block characters; `share` is 1 for the whole width."""
    return "█" * max(1, round(width * share))
