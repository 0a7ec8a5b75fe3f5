"""How wide an 80 % interval has to be, by the kind of job, learned from errors of forecasts that never saw the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.explain import Widths, key_of

Z80 = 1.2816
LEAST_ROWS = 20  # of a kind that gets a width of its own
# Each source counts by the root of its rows, so that no long table speaks for all stacks; of the rows themselves so
# many are covered at least and at most.
COVERED, LEAST, MOST = 0.80, 0.76, 0.89


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One left-out forecast."""

    source: str
    kinds: tuple[str, ...]
    error: float  # log(forecast / measured)
    extra: float  # what the row leaves open and nobody measured: a standard deviation of its own


def inside(sample: Sample, sigma: float) -> bool:
    """Whether the measured time lies in the interval."""
    return abs(sample.error) <= Z80 * math.hypot(sigma, sample.extra)


def covered(samples: Sequence[Sample], sigma: float, weights: Sequence[float]) -> float:
    """Share of the measured times in the interval, weighted."""
    return sum(w for s, w in zip(samples, weights, strict=True) if inside(s, sigma)) / sum(weights)


def _least(reached: Callable[[float], bool]) -> float:
    """The least width that reaches a coverage, to 0.005."""
    return next((step / 200.0 for step in range(4, 400) if reached(step / 200.0)), 2.0)


def width(samples: Sequence[Sample]) -> float:
    """The standard deviation with which an interval covers 80 %."""
    rows = Counter(s.source for s in samples)
    by_source = [1.0 / math.sqrt(rows[s.source]) for s in samples]
    by_row = [1.0] * len(samples)
    sigma = _least(lambda x: covered(samples, x, by_source) >= COVERED)
    sigma = max(sigma, _least(lambda x: covered(samples, x, by_row) >= LEAST))
    if covered(samples, sigma, by_row) > MOST:
        sigma = _least(lambda x: covered(samples, x, by_row) >= MOST)
    return sigma


def learn(samples: Sequence[Sample], scaled: Sequence[Sample], engines: Iterable[str],
          capabilities: Iterable[tuple[int, int]]) -> Widths:  # fmt: skip
    """The table: a width for each combination, and for each single mark, of enough rows."""
    combinations = Counter(s.kinds for s in samples)
    single = Counter(kind for s in samples for kind in s.kinds)
    return Widths(
        engines=frozenset(engines),
        capabilities=frozenset(capabilities),
        kinds={
            key_of(kinds): width([s for s in samples if s.kinds == kinds])
            for kinds, count in sorted(combinations.items())
            if count >= LEAST_ROWS
        },
        any_with={
            kind: width([s for s in samples if kind in s.kinds])
            for kind, count in sorted(single.items())
            if count >= LEAST_ROWS
        },
        calibrated=width(scaled) if scaled else math.nan,
    )


def write(widths: Widths, file: Path) -> None:
    """The file that the planner reads."""
    data = {
        "written_by": "python bench/forecast.py --write",
        "engines": sorted(widths.engines),
        "capabilities": sorted(map(list, widths.capabilities)),
        "kinds": widths.kinds,
        "any_with": widths.any_with,
        "calibrated": widths.calibrated,
    }
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
