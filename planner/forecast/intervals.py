"""How wide the interval around a forecast is, by the kind of job: learned from forecasts of runs that it never saw.

The numbers are `intervals.json`, written by `python bench/forecast.py --write`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from contracts.plain import loads
from hardware.gpus import gpu_named
from planner.forecast.step_time import Job

FILE = Path(__file__).with_name("intervals.json")
LONG_CONTEXT_TOKENS = 16384
UNSEEN_ENGINE, UNSEEN_GPU, MIXTURE, ADAPTERS, LONG = (
    "engine of no published run", "GPU of no published run", "mixture of experts", "adapters", "long context",
)  # fmt: skip
PLAIN = "none of these"


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Standard deviations of log(measured / forecast)."""

    engines: frozenset[str]  # of which published runs were scored
    capabilities: frozenset[tuple[int, int]]  # CUDA's, of the GPUs they ran on
    kinds: dict[str, float]  # of jobs that are these and nothing else, names joined by "; "
    any_with: dict[str, float]  # of jobs that are one of these, whatever else they are
    calibrated: float  # once a step of the same stack was measured on the machine

    def sigma(self, kinds: tuple[str, ...]) -> float:
        """By the kind itself, else by the widest of what it is; where that is unknown too, by the widest there is."""
        exact = self.kinds.get(key_of(kinds))
        if exact is not None:
            return exact
        widest = max(self.any_with.values())
        return max((self.any_with.get(kind, widest) for kind in kinds), default=widest)


def key_of(kinds: tuple[str, ...]) -> str:
    """The name of a combination."""
    return "; ".join(kinds) or PLAIN


@cache
def widths() -> Widths:
    """The table that ships."""
    data = loads(FILE.read_bytes())
    return Widths(
        engines=frozenset(data["engines"]),
        capabilities=frozenset((major, minor) for major, minor in data["capabilities"]),
        kinds=data["kinds"],
        any_with=data["any_with"],
        calibrated=data["calibrated"],
    )


def kinds_of(job: Job, *, seen_engine: bool, seen_gpu: bool) -> tuple[str, ...]:
    """What sets a job apart from full training of a dense model, by a stack and on a GPU of published runs."""
    return tuple(
        name
        for name, is_so in (
            (UNSEEN_ENGINE, not seen_engine), (UNSEEN_GPU, not seen_gpu), (MIXTURE, job.model.experts > 0),
            (ADAPTERS, job.train.method != "full"), (LONG, job.train.sequence_length >= LONG_CONTEXT_TOKENS),
        )
        if is_so
    )  # fmt: skip


def job_kinds(job: Job) -> tuple[str, ...]:
    """The same by the table that ships."""
    gpu, table = gpu_named(job.rates.device), widths()
    return kinds_of(
        job, seen_engine=job.engine.name in table.engines,
        seen_gpu=gpu is not None and gpu.compute_capability in table.capabilities,
    )  # fmt: skip
