"""Flights as the page shows them: forecast and measurement of each, and runs of one job side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from agent import units
from agent.jobs.run import Flight, parse
from agent.pages import charts
from planner.advice import Interval

_GLOO = re.compile(r"gloo: TCP over (.+) \(")  # "gloo: TCP over net1 (10.0.0.1)" (docs/finetune.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flown:
    """One flight of the history."""

    flight: Flight
    transport: str  # "TCP over net1 (NET/Socket)", "RDMA (NET/IB/GDRDMA)", or "" where it was not reported
    lines: tuple[tuple[str, str, Interval, float, Markup], ...]  # what, unit, forecast, measured, figure


def flights(records: Iterable[Mapping[str, Any]]) -> tuple[Flown, ...]:
    """The records that can be read, in their order."""
    return tuple(_one(dict(record)) for record in records)


def _one(record: dict[str, Any]) -> Flown:
    lines, flight = [], parse(record)
    compared = record.get("comparison")
    for line in compared if isinstance(compared, list) else []:
        forecast = _interval(line.get("forecast")) if isinstance(line, Mapping) else None
        measured = line.get("measured") if isinstance(line, Mapping) else None
        if forecast is None or not isinstance(measured, (int, float)):
            continue
        name = str(line.get("quantity", "?"))
        unit = "s" if name.endswith("_seconds") else "B" if name.endswith("_bytes") else "/s"
        figure = charts.interval(forecast, float(measured))
        if name == "step_seconds" and flight.parts:
            figure += Markup('<div class="soft">{}</div>').format(flight.division)
        lines.append((name.rsplit("_", 1)[0].replace("_", " "), unit, forecast, float(measured), figure))
    return Flown(flight=flight, transport=_transport(record), lines=tuple(lines))


def _interval(value: Any) -> Interval | None:
    if not isinstance(value, Mapping) or not all(
        isinstance(value.get(k), (int, float)) for k in ("low", "mid", "high")
    ):
        return None
    return Interval(low=float(value["low"]), mid=float(value["mid"]), high=float(value["high"]))


def _transport(record: Mapping[str, Any]) -> str:
    """The networks NCCL logged, without device numbers, or the backend; with the interface where it was TCP."""
    names = _logged(record)
    networks = ", ".join(sorted({re.sub(r"/\d+(?=/|$)", "", name) for name in names if name.startswith("NET")}))
    if networks.startswith("NET/IB"):
        return f"RDMA ({networks})"
    backend = str(_effective(record).get("backend") or "")
    if networks and networks != "NET/Socket":
        return networks
    if networks or backend == "gloo":
        return f"TCP over {_interface(record, networks)} ({networks or backend})"
    return backend


def _logged(record: Mapping[str, Any]) -> list[str]:
    """The transports that the job saw its collectives take."""
    logged = record.get("transports")
    return [name for name in logged if isinstance(name, str)] if isinstance(logged, list) else []


def _interface(record: Mapping[str, Any], networks: str) -> str:
    """Those that gloo's or NCCL's TCP was seen to take; what the environment asked for only where none was seen."""
    if networks:
        nccl = record.get("nccl")
        named = nccl.get("interfaces") if isinstance(nccl, Mapping) else None
        seen = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    else:
        seen = [found[1] for name in _logged(record) if (found := _GLOO.match(name))]
    if seen:
        return ", ".join(sorted(set(seen)))[:64]
    given = record.get("environment")
    name = "NCCL_SOCKET_IFNAME" if networks else "GLOO_SOCKET_IFNAME"
    chosen = given.get(name) if isinstance(given, Mapping) else None
    return str(chosen)[:64] if chosen else "the default network"


def _effective(record: Mapping[str, Any]) -> Mapping[str, Any]:
    layout = record.get("layout")
    effective = layout.get("effective") if isinstance(layout, Mapping) else None
    return effective if isinstance(effective, Mapping) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Step times of one job over different networks, slowest first."""

    title: str
    runs: tuple[charts.Run, ...]


# A median of fewer is one of the values, or the mean of two: no typical step.
LEAST_STEPS = 3


def by_network(found: Iterable[Flown]) -> tuple[Bars, ...]:
    """What the wire costs, as measured: complete runs of one model, layout and number of ranks, a bar per network.

    The newest run of each network counts that is long enough; none where fewer than two networks differ. What is left
    out, and why, is `not_drawn`.
    """
    newest: dict[tuple[str, str], charts.Run] = {}
    for one in found:
        step = one.flight.step_seconds
        if step and not why_not_drawn(one):
            run = charts.Run(label=one.transport, value=step, shown=f"{units.seconds(step)} a step")
            newest.setdefault((_job(one), one.transport), run)
    made = []
    for job in dict.fromkeys(job for job, _ in newest):
        runs = sorted((run for (mine, _), run in newest.items() if mine == job), key=lambda run: -run.value)
        if len(runs) > 1:
            made.append(Bars(title=f"{job}: step time by network, measured", runs=tuple(runs)))
    return tuple(made)


def _job(one: Flown) -> str:
    """What must be alike for two runs to be compared."""
    ranks = (one.flight.effective or {}).get("world_size")
    named = (one.flight.model, one.flight.family, f"{ranks} ranks" if ranks else None)
    return ", ".join(word for word in named if word)


def why_not_drawn(one: Flown) -> str:
    """What keeps a run from standing for its network; empty where nothing does."""
    run = one.flight
    if run.status != "complete":
        return f"it is not complete but {run.status}"
    if not run.model or not run.step_seconds:
        return "its record names no model or no step time"
    if not one.transport:
        return "its record names no transport"
    if run.counted_steps is not None and run.counted_steps < LEAST_STEPS:
        return (
            f"{run.counted_steps} of its {run.steps} steps count beside warm-up and profiled ones, {LEAST_STEPS} are "
            "needed"
        )
    return ""


def not_drawn(found: Iterable[Flown]) -> tuple[str, ...]:
    """Runs that are in no comparison by network, each with the reason."""
    found = tuple(found)
    told = [
        f"{one.flight.model or 'a run'} of {one.flight.started_at or 'unknown time'} is in no comparison: {why}"
        for one in found
        if (why := why_not_drawn(one))
    ]
    networks: dict[str, set[str]] = {}
    for one in found:
        if not why_not_drawn(one):
            networks.setdefault(_job(one), set()).add(one.transport)
    for job, names in networks.items():
        if len(names) == 1:
            told.append(f"{job}: all runs took one network, {min(names)}; a comparison needs two")
    return tuple(told)


def side_by_side(found: Iterable[Flown]) -> Markup:
    """The same as figures; empty where there is nothing to compare."""
    return Markup().join(charts.runs(bars.title, bars.runs) for bars in by_network(found))
