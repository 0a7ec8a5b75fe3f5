"""Small figures as inline SVG: stacked bars, an interval with what was measured, runs and benchmarks side by side.

Shapes carry CSS classes and no text that stretching could distort; the numbers are text next to them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from agent.base import units
from agent.base.result_store import Largest, Line
from contracts.finding import Interval
from contracts.run_record import RunRecord
from planner.advice import Part

SHADES = 14  # classes p0 to p13 of the style sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One bar of a comparison: what ran, and the number it got."""

    label: str  # "RDMA", "TCP on net1"
    value: float  # seconds, or bytes per second
    shown: str  # the number as people read it


def names_of(parts: Iterable[Sequence[Part]]) -> tuple[str, ...]:
    """Every part's name once, in order of first appearance: its place is its colour in every bar."""
    return tuple(dict.fromkeys(part.name for row in parts for part in row if part.value > 0))


def swatch(name: str, names: Sequence[str]) -> Markup:
    """The colour of a name, for a legend."""
    shade = names.index(name) % SHADES
    square = f'<rect class="p{shade}" width="10" height="10"/>'
    return _own(f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">{square}</svg>')


def stacked(parts: Sequence[Part], names: Sequence[str], *, full: float, limit: float | None = None) -> Markup:
    """Parts end to end on a scale that ends at `full`; a mark at `limit`, where there is one."""
    full = max(full, sum(part.value for part in parts), limit or 0.0) or 1.0
    drawn, x = [], 0.0
    for part in parts:
        wide = 1000.0 * part.value / full
        if wide <= 0:
            continue
        drawn.append(
            f'<rect class="p{names.index(part.name) % SHADES}" x="{x:.2f}" width="{wide:.2f}" height="24">'
            f"<title>{escape(part.name)}: {escape(part.detail)}</title></rect>"
        )
        x += wide
    if limit:
        drawn.append(f'<rect class="limit" x="{min(997.0, 1000.0 * limit / full):.1f}" width="3" height="24"/>')
    return _wide(drawn, _shares(parts))


def _shares(parts: Sequence[Part]) -> str:
    total = sum(part.value for part in parts) or 1.0
    return ", ".join(f"{part.name} {100 * part.value / total:.0f} %" for part in parts if part.value > 0)


def interval(forecast: Interval, measured: float | None) -> Markup:
    """The forecast's range as a band, its middle as a line, the measurement as a diamond."""
    full = 1.1 * max(forecast.high, measured or 0.0) or 1.0
    at = [1000.0 * value / full for value in (forecast.low, forecast.mid, forecast.high)]
    drawn = [
        f'<rect class="p0" x="{at[0]:.1f}" y="5" width="{max(3.0, at[2] - at[0]):.1f}" height="14"/>',
        f'<rect class="limit" x="{at[1]:.1f}" y="5" width="2" height="14"/>',
    ]
    words = "forecast range"
    if measured is not None:
        here = 1000.0 * measured / full
        inside = forecast.low <= measured <= forecast.high
        drawn.append(f'<rect class="{"in" if inside else "out"}" x="{here - 5:.1f}" width="10" height="24"/>')
        words += ", measured " + ("inside it" if inside else "outside it")
    return _wide(drawn, words)


def runs(title: str, rows: Sequence[Run], *, less_is_better: bool = True) -> Markup:
    """One horizontal bar per run, best to the eye: the shared scale starts at zero, and each says how far off it is."""
    if not rows:
        return Markup()
    full = max(run.value for run in rows) or 1.0
    best = min(run.value for run in rows) if less_is_better else full
    drawn = []
    for run in rows:
        bar = f'<rect class="p0" width="{max(2.0, 1000.0 * run.value / full):.1f}" height="24"/>'
        against = _against(run.value, best)
        figure = _wide([bar], f"{run.shown}{against}")
        drawn.append(
            f'<tr><th scope="row">{escape(run.label)}</th><td class="wide">{figure}</td>'
            f'<td class="number">{escape(run.shown)}{against}</td></tr>'
        )
    return _own(f'<table class="runs"><caption>{escape(title)}</caption><tbody>{"".join(drawn)}</tbody></table>')


def blocks(rows: Sequence[Run], width: int = 24) -> list[tuple[str, str, str]]:
    """Label, a bar of block characters and the number with its factor: the same figure where only text goes."""
    full, best = max((run.value for run in rows), default=1.0) or 1.0, min((run.value for run in rows), default=0.0)
    return [
        (run.label, "█" * max(1, round(width * run.value / full)), run.shown + _against(run.value, best))
        for run in rows
    ]


def _against(value: float, best: float) -> str:
    return "" if value == best or not best else f" ({value / best:.2f} x)"


def _wide(drawn: Iterable[str], label: str) -> Markup:
    return _own(
        f'<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label or "nothing")}">{"".join(drawn)}</svg>'
    )


def _own(svg: str) -> Markup:
    """Marked safe: every text that came from outside was escaped where it was put in."""
    return Markup(svg)  # noqa: S704


# Runs and benchmarks as the page shows them: forecast and measurement of each run, those of one job side by side.

_GLOO = re.compile(r"gloo: TCP over (.+) \(")  # "gloo: TCP over net1 (10.0.0.1)" (docs/reference/finetune-job.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One run of the history."""

    record: RunRecord
    transport: str  # "TCP over net1 (NET/Socket)", "RDMA (NET/IB/GDRDMA)", or "" where it was not reported
    lines: tuple[tuple[str, str, Interval, float, Markup], ...]  # what, unit, forecast, measured, figure


def shown(records: Iterable[RunRecord]) -> tuple[Shown, ...]:
    """Return each record with what the page draws of it, in the same order."""
    return tuple(_one(record) for record in records)


def division(record: RunRecord) -> str:
    """What the step waits for longest, and seconds of each part; empty where nothing was profiled."""
    by_part = ", ".join(
        f"{part.words} {units.seconds(record.seconds_of(part))}"
        + (f" (forecast {units.seconds(part.forecast_seconds)})" if part.forecast_seconds is not None else "")
        for part in record.parts
    )
    overlap = "these parts overlap" if record.parts_overlap else ""
    return "; ".join(text for text in (record.worst, by_part, overlap) if text)


def _one(record: RunRecord) -> Shown:
    lines = []
    for line in record.comparison:
        if line.forecast is None or line.measured is None:
            continue
        figure = interval(line.forecast, line.measured)
        if line.quantity == "step_seconds" and record.parts:
            figure += Markup('<div class="soft">{}</div>').format(division(record))
        name = line.quantity.rsplit("_", 1)[0].replace("_", " ")
        lines.append((name, line.unit, line.forecast, line.measured, figure))
    return Shown(record=record, transport=_transport(record), lines=tuple(lines))


def _transport(record: RunRecord) -> str:
    """The networks NCCL logged, without device numbers, or the backend; with the interface where it was TCP."""
    seen = record.transports
    networks = ", ".join(sorted({re.sub(r"/\d+(?=/|$)", "", name) for name in seen if name.startswith("NET")}))
    if networks.startswith("NET/IB"):
        return f"RDMA ({networks})"
    backend = (record.layout.effective.backend if record.layout.effective else None) or ""
    if networks and networks != "NET/Socket":
        return networks
    if networks or backend == "gloo":
        return f"TCP over {_interface(record, networks)} ({networks or backend})"
    return backend


def _interface(record: RunRecord, networks: str) -> str:
    """Those that gloo's or NCCL's TCP was seen to take; what the environment set only where none was seen."""
    if networks:
        seen = record.nccl.interfaces if record.nccl else []
    else:
        seen = [found[1] for name in record.transports if (found := _GLOO.match(name))]
    if seen:
        return ", ".join(sorted(set(seen)))[:64]
    chosen = record.plan.environment.get("NCCL_SOCKET_IFNAME" if networks else "GLOO_SOCKET_IFNAME")
    return chosen[:64] if chosen else "the default network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Step times of one job over different networks, slowest first."""

    title: str
    runs: tuple[Run, ...]


# A median of fewer is one of the values, or the mean of two: no typical step.
LEAST_STEPS = 3


def by_network(found: Iterable[Shown]) -> tuple[Bars, ...]:
    """What the wire costs, as measured: complete runs of one model, layout and number of ranks, a bar per network.

    The newest run of each network counts that is long enough; none where fewer than two networks differ. What is left
    out, and why, is `not_drawn`.
    """
    newest: dict[tuple[str, str], Run] = {}
    for one in found:
        step = one.record.measured.step_seconds
        if step and not why_not_drawn(one):
            run = Run(label=one.transport, value=step, shown=f"{units.seconds(step)} a step")
            newest.setdefault((_job(one), one.transport), run)
    made = []
    for job in dict.fromkeys(job for job, _ in newest):
        bars = sorted((run for (mine, _), run in newest.items() if mine == job), key=lambda run: -run.value)
        if len(bars) > 1:
            made.append(Bars(title=f"{job}: step time by network, measured", runs=tuple(bars)))
    return tuple(made)


def _job(one: Shown) -> str:
    """What must be alike for two runs to be compared."""
    ranks = one.record.layout.effective.world_size if one.record.layout.effective else None
    named = (one.record.model.name, one.record.layout.family, f"{ranks} ranks" if ranks else None)
    return ", ".join(word for word in named if word)


def why_not_drawn(one: Shown) -> str:
    """What keeps a run from standing for its network; empty where nothing does."""
    run = one.record
    if run.status != "complete":
        return f"it is not complete but {run.status}"
    if not run.model.name or not run.measured.step_seconds:
        return "its record names no model or no step time"
    if not one.transport:
        return "its record names no transport"
    if run.counted_steps is not None and run.counted_steps < LEAST_STEPS:
        return (
            f"{run.counted_steps} of its {run.steps_done} steps count beside warm-up and profiled ones, "
            f"{LEAST_STEPS} are needed"
        )
    return ""


def not_drawn(found: Iterable[Shown]) -> tuple[str, ...]:
    """Runs that are in no comparison by network, each with the reason."""
    found = tuple(found)
    rows = [
        f"{one.record.model.name or 'a run'} of {one.record.started_at or 'unknown time'} is in no comparison: {why}"
        for one in found
        if (why := why_not_drawn(one))
    ]
    networks: dict[str, set[str]] = {}
    for one in found:
        if not why_not_drawn(one):
            networks.setdefault(_job(one), set()).add(one.transport)
    for job, names in networks.items():
        if len(names) == 1:
            rows.append(f"{job}: all runs took one network, {min(names)}; a comparison needs two")
    return tuple(rows)


SHOWN_BARS = 12


def bench_figures(lines: Sequence[Line], when: Callable[[float], str]) -> Markup:
    """Bars of what the newest benchmark measured, over the earlier ones of the same job; `when` formats their times."""
    if not lines:
        return Markup()
    drawn = []
    for now in lines[0].largest:
        bars = list(itertools.islice(_bench_runs(lines, now, when), SHOWN_BARS))
        if len(bars) > 1:
            title = f"{now.op} of {units.size(now.size_bytes)}, {lines[0].job}: bus bandwidth, newest first"
            drawn.append(runs(title, bars, less_is_better=False))
    return Markup().join(drawn)


def _bench_runs(lines: Sequence[Line], now: Largest, when: Callable[[float], str]) -> Iterable[Run]:
    for line in lines:
        same = next((one for one in line.largest if (one.op, one.size_bytes) == (now.op, now.size_bytes)), None)
        if line.job == lines[0].job and same:
            rate = same.busbw_bytes_per_second
            yield Run(label=when(line.started_at_seconds), value=rate, shown=units.rate(rate))
