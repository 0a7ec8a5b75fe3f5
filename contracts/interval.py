"""A quantity that is forecast: an 80 % interval around the best guess."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """`low` and `high` bound the middle 80 % of what is expected; all three in the unit of the quantity."""

    low: float
    mid: float
    high: float
