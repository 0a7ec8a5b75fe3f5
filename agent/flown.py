"""Flights as the page shows them: forecast and measurement of each, and runs of one job side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from agent import charts, units
from agent.flight import Flight, parse
from planner.advice import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Flown:
    """One flight of the history."""

    flight: Flight
    transport: str  # "NET/IB/GDRDMA", "gloo", or "" where it was not reported
    lines: tuple[tuple[str, str, Interval, float, Markup], ...]  # what, unit, forecast, measured, figure


def flights(records: Iterable[Mapping[str, Any]]) -> tuple[Flown, ...]:
    """The records that can be read, in their order."""
    return tuple(_one(dict(record)) for record in records)


def _one(record: dict[str, Any]) -> Flown:
    lines = []
    compared = record.get("comparison")
    for line in compared if isinstance(compared, list) else []:
        forecast = _interval(line.get("forecast")) if isinstance(line, Mapping) else None
        measured = line.get("measured") if isinstance(line, Mapping) else None
        if forecast is None or not isinstance(measured, (int, float)):
            continue
        name = str(line.get("quantity", "?"))
        unit = "s" if name.endswith("_seconds") else "B" if name.endswith("_bytes") else "/s"
        figure = charts.interval(forecast, float(measured))
        lines.append((name.rsplit("_", 1)[0].replace("_", " "), unit, forecast, float(measured), figure))
    return Flown(flight=parse(record), transport=_transport(record), lines=tuple(lines))


def _interval(value: Any) -> Interval | None:
    if not isinstance(value, Mapping) or not all(
        isinstance(value.get(k), (int, float)) for k in ("low", "mid", "high")
    ):
        return None
    return Interval(low=float(value["low"]), mid=float(value["mid"]), high=float(value["high"]))


def _transport(record: Mapping[str, Any]) -> str:
    """The networks NCCL logged ("NET/IB/GDRDMA", without device numbers); the backend's name where it logged none."""
    logged = record.get("transports")
    names = [name for name in logged if isinstance(name, str)] if isinstance(logged, list) else []
    networks = sorted({re.sub(r"/\d+(?=/|$)", "", name) for name in names if name.startswith("NET")})
    if networks:
        return ", ".join(networks)
    layout = record.get("layout")
    effective = layout.get("effective") if isinstance(layout, Mapping) else None
    return str(effective.get("backend") or "") if isinstance(effective, Mapping) else ""


def side_by_side(found: Iterable[Flown]) -> Markup:
    """Step times of complete flights of one model, a bar per network: what the wire costs, from real measurements.

    The newest flight of each transport counts; empty unless at least two differ.
    """
    newest: dict[tuple[str, str], charts.Run] = {}
    for one in found:
        model, step = one.flight.model, one.flight.step_seconds
        if one.flight.status == "complete" and model and step and one.transport:
            newest.setdefault(
                (model, one.transport),
                charts.Run(label=one.transport, value=step, shown=f"{units.seconds(step)} a step"),
            )
    figures = []
    for model in dict.fromkeys(model for model, _ in newest):
        runs = sorted((run for (m, _), run in newest.items() if m == model), key=lambda run: -run.value)
        if len(runs) > 1:
            figures.append(charts.runs(f"{model}: step time by network, measured", runs))
    return Markup().join(figures)
