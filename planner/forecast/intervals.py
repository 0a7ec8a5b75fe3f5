"""How wide a forecast's 80 % interval is, by the kind of job: learned from forecasts of runs that they never saw.

The numbers are intervals.json, written by `python bench/forecast.py --write`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

from contracts import codec
from contracts.interval import Interval
from contracts.plain import loads
from planner.forecast.memory import DEFAULT_MEMORY
from planner.forecast.step_time import Job

# Standard deviations of log(measured / forecast) that no published run tells. An 80 % interval is 1.2816 of them to
# each side.
SIGMA_CALIBRATED_CPU = 0.25  # ranks share cores with each other and with others; docs/decisions/0023
SIGMA_ASSUMED = 0.55  # a CPU or a GPU nobody measured
SIGMA_MEMORY_CPU = 0.25
Z80 = 1.2816
SIGMA_LINK_ASSUMED = 0.5  # of the share of a step that crosses a link whose speed nobody knows

FILE = Path(__file__).with_suffix(".json")
LONG_CONTEXT_TOKENS = 16384
UNSEEN_ENGINE, MIXTURE, ADAPTERS, LONG = (
    "engine of no published run", "mixture of experts", "adapters", "long context",
)  # fmt: skip
PLAIN = "none of these"


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Standard deviations of log(measured / forecast)."""

    engines: frozenset[str]  # of which published runs were scored
    kinds: dict[str, float]  # of jobs that are these and nothing else, names joined by "; "
    any_with: dict[str, float]  # of jobs that are one of these, whatever else they are
    calibrated: float  # once a step of the same stack was measured on the machine
    memory: dict[str, float]  # of the bytes on the fullest rank, by the method of training
    # Of the difference between two forecasts of one job, whose common errors cancel: of layouts that differ in their
    # degrees, and of those that differ in micro-batch, chunks or recomputation only.
    pair: float
    pair_same: float

    def sigma(self, kinds: tuple[str, ...]) -> float:
        """By the kind itself, else by the widest of what it is; where that is unknown too, by the widest there is.

        What is less known is forecast no better: no kind is narrower than one that has a part of its marks.
        """
        least = max((self.kinds.get(key_of(part), 0.0) for n in range(len(kinds)) for part in combinations(kinds, n)),
                    default=0.0)  # fmt: skip
        exact = self.kinds.get(key_of(kinds))
        if exact is None:
            widest = max(self.any_with.values())
            exact = max((self.any_with.get(kind, widest) for kind in kinds), default=widest)
        return max(exact, least)


def key_of(kinds: tuple[str, ...]) -> str:
    """The name of a combination."""
    return "; ".join(kinds) or PLAIN


@cache
def widths() -> Widths:
    """The table that ships."""
    return codec.read(loads(FILE.read_bytes()), Widths)


def kinds_of(job: Job, *, seen_engine: bool) -> tuple[str, ...]:
    """What sets a job apart from full training of a dense model by a stack of published runs.

    Not the GPU: 943 forecasts without any row of its generation erred no more than those with them.
    """
    marks = {
        UNSEEN_ENGINE: not seen_engine, MIXTURE: job.model.experts > 0, ADAPTERS: job.train.method != "full",
        LONG: job.train.sequence_length >= LONG_CONTEXT_TOKENS,
    }  # fmt: skip
    return tuple(name for name, holds in marks.items() if holds)


def memory_interval(job: Job, mid: float) -> Interval:
    """The 80 % interval of so many forecast bytes on the fullest rank."""
    return interval(mid, widths().memory[job.train.method] if job.has_gpu else SIGMA_MEMORY_CPU)


def bytes_that_fit(job: Job, capacity: float, *, surely: bool = True) -> float:
    """The most forecast bytes that fit a device of `capacity` bytes.

    Surely: the interval of the forecast ends below the capacity. Else it begins there, and a run may still fit.
    """
    if not job.has_gpu:
        return capacity * DEFAULT_MEMORY.safe_share
    around = memory_interval(job, capacity)
    return around.low if surely else around.high


def base_sigma(job: Job, *, calibrated: bool) -> float:
    """Uncertainty of log step time by the kind of job, all links known."""
    if job.rates.how == "assumed":
        return SIGMA_ASSUMED
    if job.rates.device == "CPU":
        return SIGMA_CALIBRATED_CPU
    table = widths()
    sigma = table.sigma(kinds_of(job, seen_engine=job.engine.name in table.engines))
    return min(table.calibrated, sigma) if calibrated else sigma


def interval(mid: float, sigma: float) -> Interval:
    """80 % around the best guess, as a factor to each side."""
    factor = math.exp(Z80 * sigma)
    return Interval(low=mid / factor, mid=mid, high=mid * factor)
