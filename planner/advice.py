"""The planner's answer: settings with reasons, a layout with its forecast, rejected layouts, exports."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contracts.finding import Interval
from contracts.layout import Layout
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.nccl_env.situation import Note, Setting
from probes.pci.facts import UNSUPPORTED

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One component of the step time or of the memory."""

    name: str  # "gemm", "attention", "all_gather", "bubble"; "weights", "activations", "logits"
    value: float  # seconds or bytes
    detail: str = ""  # formula with numbers; for communication also the link


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast memory and time of one optimizer step."""

    step_seconds: Interval
    memory_bytes: Interval  # peak reserved memory per GPU, on the fullest rank
    time_parts: tuple[Part, ...]
    memory_parts: tuple[Part, ...]
    dominant: str  # a sentence: "compute-bound: GEMMs are 71 % of the step"
    tokens_per_second: float  # all ranks, without padding
    tokens_per_second_per_rank: float = 0.0
    mfu: float | None = None  # relative to the data sheet's bf16 peak; None without such a GPU
    capacity_bytes: float | None = None
    inputs: tuple[str, ...] = ()  # all inputs: "all_gather 48.1 GB/s: measured", "... derived", "... assumed"

    @property
    def may_not_fit(self) -> bool:
        """Whether the interval of the memory reaches above the capacity of the device."""
        return self.capacity_bytes is not None and self.memory_bytes.high > self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout that fits, with its forecast."""

    layout: Layout
    forecast: Forecast
    why: str = ""  # comparison with the winner


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A layout or a family that was rejected, with the violated rule."""

    what: str  # "TP=16", "PP4 x TP8"
    rule: str
    reason: str  # "needs 9.3 GiB more memory per rank than is available", "TP=16 would cross the 50 GB/s EFA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The complete answer for one job on one cluster."""

    settings: tuple[Setting, ...]
    notes: tuple[Note, ...] = ()
    needs: tuple[Setting, ...] = ()
    backend: str = "nccl"  # "gloo" without GPUs, "rccl" (AMD) and "hccl" (Gaudi) are not checked
    model: ModelSpec | None = None
    train: TrainSpec | None = None
    chosen: RankedLayout | None = None  # None: no layout fits, see `rejected`
    runners_up: tuple[RankedLayout, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    helps_most: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()  # missing facts, and their effect on the answer
    slowed: tuple[str, ...] = ()  # faults of these nodes that the forecast includes
    healthy: RankedLayout | None = None  # best layout without these faults, if they are not part of the topology
    total_steps: int | None = None  # of the whole run, if steps or tokens are limited
    total_seconds: Interval | None = None  # of the whole run
    total_cost: Interval | None = None  # of the whole run, in the currency of the price
    node_hour_price: float | None = None  # given by the user
    rows: int | None = None  # in the data set, if counted
    schema_version: int = SCHEMA_VERSION

    @property
    def unsupported(self) -> str:
        """The GPUs, if their collective library is not supported: "AMD GPUs"; else empty."""
        return UNSUPPORTED.get(self.backend, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Machines of one type over one network: time and cost of the training run."""

    machine: str
    nodes: int
    network: str  # "catalogue", "100G tcp"
    ranks: int
    layout: str = ""  # "" if no layout fits
    global_batch: int = 0  # sequences per step
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None
    seconds: Interval | None = None  # of the whole run
    gpu_hours: float | None = None
    cost: Interval | None = None  # None without a price
    best: bool = False  # no other point is both faster and cheaper (without prices: with fewer GPU-hours)
    reason: str = ""  # why no layout fits


class ExportError(ValueError):
    """The framework cannot run the layout, or the format is unknown; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Input of an exporter."""

    layout: Layout
    model: ModelSpec
    train: TrainSpec
    ranks_per_node: int = 1
    on_gpu: bool = True

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return max(1, self.layout.world_size // self.ranks_per_node)


def request_of(recommendation: Recommendation, *, ranks_per_node: int) -> ExportRequest:
    """Extract the input of `export` from a recommendation. Raises ExportError if it has no layout."""
    if recommendation.chosen is None or recommendation.model is None or recommendation.train is None:
        nearest = "; ".join(f"{row.what}: {row.reason}" for row in recommendation.rejected[:3])
        raise ExportError(f"no layout was chosen, so there is nothing to export ({nearest})")
    return ExportRequest(
        layout=recommendation.chosen.layout,
        model=recommendation.model,
        train=replace(recommendation.train, steps=recommendation.total_steps or recommendation.train.steps),
        ranks_per_node=ranks_per_node,
        on_gpu=recommendation.backend == "nccl",
    )


def render(template: str, /, **values: Any) -> str:
    """Render a template of planner/stacks/templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - not HTML
        loader=FileSystemLoader(Path(__file__).parent / "stacks" / "templates"), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    return environment.get_template(f"{template}.j2").render(**values)
