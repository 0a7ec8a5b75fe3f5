"""Clocks of ranks, aligned by what both ends of a collective observed.

A rank leaves a collective only after every other rank has entered it. So the next call of a rank comes after each
other rank's present one, in true time. Each pair of calls bounds the difference of two clocks from one side; calls that
follow each other quickly, as the broadcasts with which a model is wrapped and the reduction of a loss after that of the
gradients, bound it to a few milliseconds. Calls that are made before the last one is over bound it wrongly, but only
towards less lateness, or leave no room at all: then the clocks are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

# A quartz oscillator without discipline is off by some 20 ppm (its usual specification); NTP slews by less
DRIFT = 2e-5
SAME_HOST_SECONDS = 1e-3  # ranks of one host read one clock; what is left is the time between read and record


class Offset(NamedTuple):
    """By how much a rank's clock is ahead of the reference's: seconds, and how much that may be off."""

    seconds: float
    error: float


def align(rows: Sequence[Mapping[int, float]], hosts: Mapping[int, str | None]) -> dict[int, Offset]:
    """The clock of each rank against that of the lowest one; a rank whose clock no bounds fit is left out.

    `rows` has the time at which each rank made one call, for consecutive calls of one group, oldest first.
    """
    if len(rows) < 2:
        return {}
    reference = min(rows[0])
    elapsed = max(rows[-1].values()) - max(rows[0].values())
    found = {reference: Offset(0.0, 0.0)}
    for rank in rows[0]:
        if rank == reference:
            continue
        low = max(now[rank] - after[reference] for now, after in pairwise(rows))
        high = min(after[rank] - now[reference] for now, after in pairwise(rows))
        if hosts.get(rank) is not None and hosts.get(rank) == hosts.get(reference) and (low <= 0 <= high or low > high):
            low, high = -SAME_HOST_SECONDS, SAME_HOST_SECONDS  # one clock, whatever calls that overlap seem to say
        elif low <= high:
            low, high = low - DRIFT * elapsed, high + DRIFT * elapsed
        if low <= high:
            found[rank] = Offset((low + high) / 2, (high - low) / 2)
    return found
