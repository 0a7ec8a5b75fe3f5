"""A quantity that is forecast: an 80 % interval around the best guess."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """`low` and `high` bound the middle 80 % of what is expected; all three in the unit of the quantity."""

    low: float
    mid: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval of `factor` times the quantity; `factor` is positive."""
        return Interval(low=self.low * factor, mid=self.mid * factor, high=self.high * factor)
