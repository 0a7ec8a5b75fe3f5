"""Benchmarks and runs on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.checks.judged import bar_words, expected_words
from collectives.bench.results import BenchResult, RdmaResult
from contracts.run_record import RunRecord, compare

if TYPE_CHECKING:
    from agent.jobs.preflight import Report
from agent.base.tables import SHOWN, grid, some, table


def bench(out: Console, result: BenchResult, *, verbose: bool = False) -> None:
    """Measured collectives: each op at its largest size and what is unverified; `verbose`: every size."""
    expected = any(m.expected_busbw_bytes_per_second for m in result.measurements)
    rows = table("op", "size", "median", "± 95 %", "algbw", "busbw", *(["expected"] if expected else []), "verified")
    for column in rows.columns:
        column.no_wrap = column.header != "expected"  # the longest, of several values
    largest = {m.op: m for m in sorted(result.measurements, key=lambda m: m.bytes)}
    for m in result.measurements:
        if m is not largest[m.op] and m.verified and not verbose:
            continue
        cells = [m.op, units.size(m.bytes), units.seconds(m.median_seconds)]
        cells.append(f"{m.spread_ratio * 100:.1f} %" if m.spread_ratio is not None else "?")
        cells += [units.rate(m.algbw_bytes_per_second), units.rate(m.busbw_bytes_per_second)]
        if expected:
            cells.append(expected_words(m))
        rows.add_row(*cells, "yes" if m.verified else "NO")
    where = f"{result.world_size} {result.backend} ranks on {some(sorted(set(result.hosts))) or 'this host'}"
    wrong = sum(not m.verified for m in result.measurements)
    shown = len(rows.rows)
    more = f"; {len(result.measurements) - shown} smaller sizes: -v" if shown < len(result.measurements) else ""
    out.print(_verdict(result, wrong))
    out.print(escape(f"{where}{more}"))
    out.print(rows)
    if result.step is not None and verbose:
        pieces = table("one training step", "bytes", "calls", "ranks", "time")
        for part in result.step.parts:
            moved, time = units.size(part.bytes), units.seconds(part.median_seconds)
            pieces.add_row(part.name, moved, str(part.times), str(part.group_ranks), time)
        out.print(pieces)
    if result.step is not None:
        out.print(f"communication of the step, nothing hidden: {units.seconds(result.step.median_seconds)}")
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
    todo = "→ keep it as the bar: --save FILE, then --baseline FILE"
    return f"[green]✓[/green] [bold]Measured[/bold]: every result verified {todo}"


def rdma(out: Console, result: RdmaResult) -> None:
    """Measured RDMA writes, one row per port."""
    rows = table("port", "rate", "MTU", "written", "expected")
    for column in rows.columns[:-1]:
        column.no_wrap = True
    for write in result.writes:
        bar = next((bar for bar in write.bars if bar.low is not None), None)
        rows.add_row(
            write.port, units.bits(write.rate_bytes_per_second), str(write.mtu_bytes or "?"),
            units.rate(write.bytes_per_second), bar_words(bar) if bar else "unknown",
        )  # fmt: skip
    out.print(f"\n[bold]RDMA writes[/bold] from {escape(result.host)} to {escape(result.peer)}")
    out.print(rows)
    for problem in result.problems:
        out.print(f"[red]! {escape(problem)}[/red]")


def comparison(out: Console, record: RunRecord) -> None:
    """Print the forecast and the measurement of step time and memory, and the parts of the step."""
    from agent.pages.runs import division

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
    from agent.pages import charts, runs

    for bars in runs.by_network(runs.shown(whole.runs)):
        out.print(f"\n[bold]{escape(bars.title)}[/bold]")
        rows = grid(2, 3)
        for label, bar, shown in charts.blocks(bars.runs, 20):
            rows.add_row(escape(label), bar, shown)
        out.print(rows)
