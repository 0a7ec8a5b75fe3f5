"""A run beside its forecast, from its record (contracts/run_record.py)."""

from __future__ import annotations

from dataclasses import dataclass

from agent import units
from contracts.run_record import RunRecord
from planner.advice import Forecast, Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One line: what was forecast, what was measured."""

    what: str  # "step time", "peak memory per rank"
    unit: str  # "s", "bytes"
    forecast: Interval | None
    measured: float | None
    inside: bool | None  # None: not measured or not forecast
    detail: str = ""  # the parts: "all-gather 31 % exposed; compute 1.1 s (forecast 1.0 s), ..."

    @property
    def words(self) -> str:
        """ "inside", "above", "below" the interval, or "unknown"."""
        if self.inside is None or self.forecast is None or self.measured is None:
            return "unknown"
        if self.inside:
            return "inside"
        return "above" if self.measured > self.forecast.high else "below"


def division(record: RunRecord) -> str:
    """What the step waits for longest, and seconds of each part; empty where nothing was profiled."""
    by_part = ", ".join(
        f"{part.words} {units.seconds(record.seconds_of(part))}"
        + (f" (forecast {units.seconds(part.forecast_seconds)})" if part.forecast_seconds is not None else "")
        for part in record.parts
    )
    overlap = "these parts overlap" if record.parts_overlap else ""
    return "; ".join(text for text in (record.worst, by_part, overlap) if text)


def compare(forecast: Forecast | None, record: RunRecord) -> tuple[Comparison, ...]:
    """Forecast against measurement: step time and memory."""
    step, memory = (forecast.step_seconds, forecast.memory_bytes) if forecast else (None, None)
    return (
        _line("step time", "s", step, record.measured.step_seconds, division(record)),
        _line("peak memory per rank", "bytes", memory, record.measured.memory_bytes),
    )


def _line(what: str, unit: str, interval: Interval | None, value: float | None, detail: str = "") -> Comparison:
    inside = None if interval is None or value is None else interval.low <= value <= interval.high
    return Comparison(what=what, unit=unit, forecast=interval, measured=value, inside=inside, detail=detail)
