"""Learn the width of 80 % intervals for each kind of job from the errors of forecasts without the run's own source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.forecast.calibration import ADAPTERS, LONG, MIXTURE, PLAIN, Z80

MIN_ROWS = 20  # rows that a kind of job needs for a separate width
# COVERED is the share with each source weighted by the root of its number of rows, so that long tables do not dominate.
# LEAST bounds the share of all rows, each with the same weight.
COVERED, LEAST = 0.80, 0.76
# Step times of a new source are covered by about this much less (docs/measurements/forecast.md), and every user is a
# new source.
UNSEEN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The error of one forecast that was made without the run's source."""

    source: str
    error: float  # log(forecast / measured)
    kind: str = ""
    # Additional standard deviations (below, above) from settings that the row leaves open.
    extra: tuple[float, float] = (0.0, 0.0)
    reach: tuple[float, float] = (0.0, 0.0)  # how far an unknown network moves the interval's ends


def inside(sample: Sample, sigma: float) -> bool:
    """Whether the measured time lies in the interval."""
    (below, above), (low, high) = (Z80 * math.hypot(sigma, extra) for extra in sample.extra), sample.reach
    return low - below <= -sample.error <= high + above


def covered(samples: Sequence[Sample], sigma: float, weights: Sequence[float]) -> float:
    """Return the weighted share of measured times in the interval."""
    return sum(w for s, w in zip(samples, weights, strict=True) if inside(s, sigma)) / sum(weights)


def _least(reached: Callable[[float], bool]) -> float:
    """Return the smallest width, in steps of 0.005, that reaches a coverage."""
    return next((step / 200.0 for step in range(4, 400) if reached(step / 200.0)), 2.0)


def width(samples: Sequence[Sample], margin: float = 0.0) -> float:
    """Return the standard deviation whose interval covers 80 % (plus `margin`); NaN without samples."""
    if not samples:
        return math.nan
    rows = Counter(s.source for s in samples)
    by_source = [1.0 / math.sqrt(rows[s.source]) for s in samples]
    by_row = [1.0] * len(samples)
    sigma = _least(lambda x: covered(samples, x, by_source) >= COVERED + margin)
    return max(sigma, _least(lambda x: covered(samples, x, by_row) >= LEAST + margin))


def learn(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the width of each kind of job with enough rows; of the others, the largest of these.

    A kind with rows of one source only is at least as wide as every kind with rows of several sources.
    """
    kinds: dict[str, list[Sample]] = {LONG: [], MIXTURE: [], ADAPTERS: [], PLAIN: []}
    for sample in samples:
        kinds[sample.kind].append(sample)
    widths = {kind: width(members, UNSEEN) for kind, members in kinds.items() if len(members) >= MIN_ROWS}
    several = {kind for kind in widths if len({s.source for s in kinds[kind]}) > 1}
    widest = max((widths[kind] for kind in several), default=max(widths.values(), default=math.nan))
    return {kind: widths[kind] if kind in several else max(widths.get(kind, 0.0), widest) for kind in kinds}
