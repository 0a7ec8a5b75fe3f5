"""Runs and benchmarks as the page shows them: forecast and measurement of each run, those of one job side by side."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from agent.base import units
from agent.base.result_store import Largest, Line
from agent.pages import charts
from contracts.interval import Interval
from contracts.run_record import RunRecord

_GLOO = re.compile(r"gloo: TCP over (.+) \(")  # "gloo: TCP over net1 (10.0.0.1)" (docs/reference/finetune-job.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One run of the history."""

    record: RunRecord
    transport: str  # "TCP over net1 (NET/Socket)", "RDMA (NET/IB/GDRDMA)", or "" where it was not reported
    lines: tuple[tuple[str, str, Interval, float, Markup], ...]  # what, unit, forecast, measured, figure


def shown(records: Iterable[RunRecord]) -> tuple[Shown, ...]:
    """Each record with what the page draws of it, in their order."""
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
        figure = charts.interval(line.forecast, line.measured)
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
    runs: tuple[charts.Run, ...]


# A median of fewer is one of the values, or the mean of two: no typical step.
LEAST_STEPS = 3


def by_network(found: Iterable[Shown]) -> tuple[Bars, ...]:
    """What the wire costs, as measured: complete runs of one model, layout and number of ranks, a bar per network.

    The newest run of each network counts that is long enough; none where fewer than two networks differ. What is left
    out, and why, is `not_drawn`.
    """
    newest: dict[tuple[str, str], charts.Run] = {}
    for one in found:
        step = one.record.measured.step_seconds
        if step and not why_not_drawn(one):
            run = charts.Run(label=one.transport, value=step, shown=f"{units.seconds(step)} a step")
            newest.setdefault((_job(one), one.transport), run)
    made = []
    for job in dict.fromkeys(job for job, _ in newest):
        runs = sorted((run for (mine, _), run in newest.items() if mine == job), key=lambda run: -run.value)
        if len(runs) > 1:
            made.append(Bars(title=f"{job}: step time by network, measured", runs=tuple(runs)))
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


def side_by_side(found: Iterable[Shown]) -> Markup:
    """The same as figures; empty where there is nothing to compare."""
    return Markup().join(charts.runs(bars.title, bars.runs) for bars in by_network(found))


SHOWN_BARS = 12


def bench_figures(lines: Sequence[Line], when: Mapping[float, str]) -> Markup:
    """Bars of what the newest benchmark measured, over the earlier ones of the same job; empty without any."""
    if not lines:
        return Markup()
    drawn = []
    for now in lines[0].largest:
        runs = list(itertools.islice(_bench_runs(lines, now, when), SHOWN_BARS))
        if len(runs) > 1:
            title = f"{now.op} of {units.size(now.size_bytes)}, {lines[0].job}: bus bandwidth, newest first"
            drawn.append(charts.runs(title, runs, less_is_better=False))
    return Markup().join(drawn)


def _bench_runs(lines: Sequence[Line], now: Largest, when: Mapping[float, str]) -> Iterable[charts.Run]:
    for line in lines:
        same = next((one for one in line.largest if (one.op, one.size_bytes) == (now.op, now.size_bytes)), None)
        if line.job == lines[0].job and same:
            rate = same.busbw_bytes_per_second
            yield charts.Run(label=when[line.started_at_seconds], value=rate, shown=units.rate(rate))
