"""The flight that was flown: reads flight.json of the fine-tune job and sets it beside the forecast.

Specification: docs/finetune.md, flight.json. The agent and the job are siblings: the file is all they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import units
from contracts import bounded
from contracts.plain import loads as plain
from planner.advice import Forecast, Interval

MOST_RECORD_BYTES = 16 << 20  # a flight of 100 000 steps takes 2 MB, a long benchmark alike

COMMUNICATION = ("gather", "reduce", "tensor_parallel", "pipeline")
PART_WORDS = {"gather": "all-gather", "reduce": "gradient reduction", "tensor_parallel": "tensor parallelism",
              "pipeline": "pipeline sends", "idle": "between operators"}  # fmt: skip
_UNCOUNTED = 5  # steps of a record that names no counted_steps: three of warm-up and memory, two profiled
_MOST_PARTS = 16  # of a record: the job writes seven


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
    detail: str = ""  # the parts: "all-gather 31 % exposed; compute 1.1 s (forecast 1.0 s), ..."

    @property
    def words(self) -> str:
        """ "inside", "above", "below" the interval, or "unknown"."""
        if self.inside is None or self.forecast is None or self.measured is None:
            return "unknown"
        if self.inside:
            return "inside"
        return "above" if self.measured > self.forecast.high else "below"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlownPart:
    """One part of a step, from the profiler: what nothing else hides."""

    name: str  # "compute", "gather", "reduce", "tensor_parallel", "pipeline", "optimizer", "idle"
    measured_seconds: float
    share: float  # of the profiled step
    forecast_seconds: float | None

    @property
    def words(self) -> str:
        """The name in a sentence."""
        return PART_WORDS.get(self.name, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """What the agent uses of flight.json; None is "not reported"."""

    status: str  # "complete", "mismatch", "diverged", "running", ...
    reason: str | None
    family: str | None  # of the layout that was asked for
    effective: dict[str, Any] | None  # mesh and placements that the job found itself with
    steps: int | None
    step_seconds: float | None  # median
    counted_steps: int | None  # that it is the median of: without warm-up, memory's and profiled steps
    memory_bytes: float | None  # peak of rank 0
    tokens_per_second: float | None
    loss_first: float | None
    loss_last: float | None
    exposed_communication: float | None  # share of the step
    adapter: str | None
    checkpoint: str | None
    forecast_step_seconds: dict[str, float] | None
    started_at: str | None
    model: str | None
    parts: tuple[FlownPart, ...] = ()  # empty: nothing was profiled, or an older record
    saved_model: str | None = None  # of a full fine-tune, in place of an adapter

    @property
    def worst(self) -> str:
        """The communication that the step waits for longest: "all-gather 31 % exposed"; empty without any."""
        talking = [part for part in self.parts if part.name in COMMUNICATION]
        if not talking:
            return ""
        most = max(talking, key=lambda part: part.share)
        return f"{most.words} {100 * most.share:.0f} % exposed"

    @property
    def by_part(self) -> str:
        """Measured and forecast seconds of each part: "compute 1.1 s (forecast 1.0 s), all-gather ..."."""
        return ", ".join(
            f"{part.words} {units.seconds(part.measured_seconds)}"
            + (f" (forecast {units.seconds(part.forecast_seconds)})" if part.forecast_seconds is not None else "")
            for part in self.parts
        )

    @property
    def division(self) -> str:
        """Both in one line; empty where nothing was profiled."""
        return "; ".join(text for text in (self.worst, self.by_part) if text)

    @property
    def placements(self) -> str:
        """The effective layout in words: "FSDP on 2 x cpu (gloo): dp_shard:S(0) x 97"."""
        found = self.effective
        if not found:
            return "unknown"
        placed = ", ".join(f"{where} x {count}" for where, count in _mapping(found.get("placements")).items())
        where = f"{found.get('world_size', '?')} x {found.get('device', '?')} ({found.get('backend', '?')})"
        return f"{found.get('wrapper', self.family)} on {where}: {placed or 'nothing sharded'}"


def parse(record: dict[str, Any]) -> Flight:
    """The members of one record that are there and of the right kind."""
    measured, loss, layout = (_mapping(record.get(name)) for name in ("measured", "loss", "layout"))
    forecast = {
        k: float(v) for k, v in _mapping(_mapping(record.get("forecast")).get("step_seconds")).items() if _is_number(v)
    }
    return Flight(
        status=str(record.get("status", "unknown")),
        reason=_text(record.get("reason")),
        family=_text(layout.get("family")),
        effective=_mapping(layout.get("effective")) or None,
        steps=int(record["steps_done"]) if _is_number(record.get("steps_done")) else None,
        step_seconds=_number(measured.get("step_seconds")),
        counted_steps=_counted(record, measured),
        memory_bytes=_number(measured.get("memory_bytes")),
        tokens_per_second=_number(measured.get("tokens_per_second")),
        loss_first=_number(loss.get("first")),
        loss_last=_number(loss.get("last")),
        exposed_communication=_number(_mapping(record.get("communication")).get("exposed_share")),
        adapter=_text(record.get("adapter")),
        checkpoint=_text(record.get("checkpoint")),
        forecast_step_seconds=forecast or None,
        started_at=_text(record.get("started_at")),
        model=_text(_mapping(record.get("model")).get("name")),
        parts=_parts(record.get("parts")),
        saved_model=_text(record.get("saved_model")),
    )


def _counted(record: dict[str, Any], measured: dict[str, Any]) -> int | None:
    """Of a record from before the member was written, at least so many: three steps and the profiled go first."""
    if _is_number(measured.get("counted_steps")):
        return int(measured["counted_steps"])
    steps = record.get("step_seconds")
    return max(0, len(steps) - _UNCOUNTED) if isinstance(steps, list) else None


def _parts(raw: Any) -> tuple[FlownPart, ...]:
    found = []
    for one in raw[:_MOST_PARTS] if isinstance(raw, list) else ():
        part = _mapping(one)
        name, measured, share = (
            _text(part.get("part")),
            _number(part.get("measured_seconds")),
            _number(part.get("share")),
        )
        if name is not None and measured is not None and share is not None:
            said = _number(part.get("forecast_seconds"))
            found.append(FlownPart(name=name, measured_seconds=measured, share=share, forecast_seconds=said))
    return tuple(found)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def read(path: Path) -> dict[str, Any]:
    """The record of a flight; FlightError names the file and what is wrong with it."""
    try:
        record = plain(bounded.read_text(path, MOST_RECORD_BYTES), unknown_numbers=True)  # a loss may be NaN
    except FileNotFoundError:
        raise FlightError(f"{path}: the job left no record of its flight") from None
    except (OSError, ValueError) as error:
        raise FlightError(f"{path}: {error}") from None
    if not isinstance(record, dict):
        raise FlightError(f"{path}: must hold one JSON object")
    return record


def compare(forecast: Forecast | None, flown: Flight) -> tuple[Comparison, ...]:
    """Forecast against measurement: step time and memory."""
    step, memory = (forecast.step_seconds, forecast.memory_bytes) if forecast else (None, None)
    return (
        _line("step time", "s", step, flown.step_seconds, flown.division),
        _line("peak memory per rank", "bytes", memory, flown.memory_bytes),
    )


def _line(what: str, unit: str, interval: Interval | None, value: float | None, detail: str = "") -> Comparison:
    inside = None if interval is None or value is None else interval.low <= value <= interval.high
    return Comparison(what=what, unit=unit, forecast=interval, measured=value, inside=inside, detail=detail)
