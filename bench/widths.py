"""Learn the width of 80 % intervals for each kind of job from the errors of forecasts without the run's own source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.forecast.calibration import Z80, Widths, key_of

LEAST_ROWS = 20  # rows that a kind of job needs for a width of its own
# COVERED is the share with each source weighted by the root of its number of rows, so that long tables do not dominate.
# LEAST and MOST bound the share of all rows, each with the same weight.
COVERED, LEAST, MOST = 0.80, 0.76, 0.89
# Step times of a new source are covered by about this much less (docs/measurements/forecast.md), and every user is a
# new source.
UNSEEN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The error of one forecast that was made without the run's source."""

    source: str
    error: float  # log(forecast / measured)
    kinds: tuple[str, ...] = ()
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


def width(samples: Sequence[Sample], more: float = 0.0) -> float:
    """Return the standard deviation whose interval covers 80 % (plus `more`); NaN without samples."""
    if not samples:
        return math.nan
    rows = Counter(s.source for s in samples)
    by_source = [1.0 / math.sqrt(rows[s.source]) for s in samples]
    by_row = [1.0] * len(samples)
    sigma = _least(lambda x: covered(samples, x, by_source) >= COVERED + more)
    sigma = max(sigma, _least(lambda x: covered(samples, x, by_row) >= LEAST + more))
    if covered(samples, sigma, by_row) > MOST + more:
        sigma = _least(lambda x: covered(samples, x, by_row) >= MOST + more)
    return sigma


def learn(samples: Sequence[Sample], **others: Any) -> Widths:
    """Learn a width for each combination of kinds and each single kind with enough rows. Pass `others` on."""
    return Widths(
        kinds={key_of(kinds): sigma for kinds, sigma in _each(samples, lambda s: (s.kinds,)).items()},
        any_with=_each(samples, lambda s: s.kinds),
        **others,
    )


def _each(samples: Sequence[Sample], groups_of: Callable[[Sample], Sequence[Any]]) -> dict[Any, float]:
    """Return the width of each group with enough rows.

    A group with rows of one source only is at least as wide as every group with rows of several sources.
    """
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        for group in groups_of(sample):
            groups.setdefault(group, []).append(sample)
    found = {group: width(groups[group], UNSEEN) for group in sorted(groups) if len(groups[group]) >= LEAST_ROWS}
    several = {group for group in found if len({s.source for s in groups[group]}) > 1}
    widest = max((found[group] for group in several), default=0.0)
    return {group: sigma if group in several else max(sigma, widest) for group, sigma in found.items()}
