"""How wide an 80 % interval has to be, by the kind of job, learned from errors of forecasts that never saw the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.forecast.calibration import Z80, Widths, key_of

LEAST_ROWS = 20  # of a kind that gets a width of its own
# Each source counts by the root of its rows, so that no long table speaks for all stacks; of the rows themselves so
# many are covered at least and at most.
COVERED, LEAST, MOST = 0.80, 0.76, 0.89
# Step times of a source that a width was not learned from are covered by about so much less, and every user is such a
# source (docs/measurements/forecast.md).
UNSEEN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One left-out forecast."""

    source: str
    error: float  # log(forecast / measured)
    kinds: tuple[str, ...] = ()
    # What the row leaves open and nobody measured: standard deviations of its own, if it is faster and if it is slower.
    extra: tuple[float, float] = (0.0, 0.0)
    reach: tuple[float, float] = (0.0, 0.0)  # how far an unknown network moves the interval's ends


def inside(sample: Sample, sigma: float) -> bool:
    """Whether the measured time lies in the interval."""
    (below, above), (low, high) = (Z80 * math.hypot(sigma, extra) for extra in sample.extra), sample.reach
    return low - below <= -sample.error <= high + above


def covered(samples: Sequence[Sample], sigma: float, weights: Sequence[float]) -> float:
    """Share of the measured times in the interval, weighted."""
    return sum(w for s, w in zip(samples, weights, strict=True) if inside(s, sigma)) / sum(weights)


def _least(reached: Callable[[float], bool]) -> float:
    """The least width that reaches a coverage, to 0.005."""
    return next((step / 200.0 for step in range(4, 400) if reached(step / 200.0)), 2.0)


def width(samples: Sequence[Sample], more: float = 0.0) -> float:
    """The standard deviation with which an interval covers 80 %, and so much `more`; NaN of nothing."""
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
    """The table: a width for each combination, and for each single mark, of enough rows; `others` as they are."""
    return Widths(
        kinds={key_of(kinds): sigma for kinds, sigma in _each(samples, lambda s: (s.kinds,)).items()},
        any_with=_each(samples, lambda s: s.kinds),
        **others,
    )


def _each(samples: Sequence[Sample], groups_of: Callable[[Sample], Sequence[Any]]) -> dict[Any, float]:
    """The width of each group of enough rows.

    Rows of one source tell nothing of how far other sources are off: such a group is no narrower than any of several.
    """
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        for group in groups_of(sample):
            groups.setdefault(group, []).append(sample)
    found = {group: width(groups[group], UNSEEN) for group in sorted(groups) if len(groups[group]) >= LEAST_ROWS}
    several = {group for group in found if len({s.source for s in groups[group]}) > 1}
    widest = max((found[group] for group in several), default=0.0)
    return {group: sigma if group in several else max(sigma, widest) for group, sigma in found.items()}
