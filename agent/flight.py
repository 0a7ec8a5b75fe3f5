"""The flight that was flown: reads flight.json of the fine-tune job and sets it beside the forecast.

Specification: docs/finetune.md, flight.json. The agent and the job are siblings: the file is all they share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.advice import Forecast, Interval


class FlightError(Exception):
    """The flight's record is missing or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One line: what was forecast, what was measured."""

    what: str  # "step time", "peak memory per rank"
    unit: str  # "s", "bytes"
    forecast: Interval | None
    measured: float | None
    inside: bool | None  # None: not measured or not forecast

    @property
    def words(self) -> str:
        """ "inside", "above", "below" the interval, or "unknown"."""
        if self.inside is None or self.forecast is None or self.measured is None:
            return "unknown"
        if self.inside:
            return "inside"
        return "above" if self.measured > self.forecast.high else "below"


def read(path: Path) -> dict[str, Any]:
    """The record of a flight; FlightError names the file and what is wrong with it."""
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise FlightError(f"{path}: the job left no record of its flight") from None
    except (OSError, ValueError) as error:
        raise FlightError(f"{path}: {error}") from None
    if not isinstance(record, dict):
        raise FlightError(f"{path}: must hold one JSON object")
    return record


def compare(forecast: Forecast | None, record: dict[str, Any]) -> tuple[Comparison, ...]:
    """Forecast against measurement: step time and memory."""
    step = record.get("step_seconds_median")
    memory = record.get("peak_memory_bytes")
    return (
        _line("step time", "s", forecast.step_seconds if forecast else None, step),
        _line("peak memory per rank", "bytes", forecast.memory_bytes if forecast else None, memory),
    )


def _line(what: str, unit: str, interval: Interval | None, measured: Any) -> Comparison:
    value = float(measured) if isinstance(measured, (int, float)) and not isinstance(measured, bool) else None
    inside = None if interval is None or value is None else interval.low <= value <= interval.high
    return Comparison(what=what, unit=unit, forecast=interval, measured=value, inside=inside)
