"""What the planner says: settings with reasons, a layout with a forecast, what was rejected, what is exported."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contracts.finding import Interval
from contracts.layout import Layout
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.nccl_env.situation import Note, PodNeed, Setting

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the step time or of the memory."""

    name: str  # "gemm", "attention", "all_gather", "bubble"; "weights", "activations", "logits"
    value: float  # seconds or bytes
    detail: str = ""  # formula with numbers; for communication also the link it crosses


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Memory and time of one optimizer step."""

    step_seconds: Interval
    memory_bytes: Interval  # peak reserved per GPU, the fullest rank
    time_parts: tuple[Part, ...]
    memory_parts: tuple[Part, ...]
    dominant: str  # in words: "compute-bound: GEMMs are 71 % of the step"
    tokens_per_second: float  # of all ranks, padding not counted
    tokens_per_second_per_rank: float = 0.0
    mfu: float | None = None  # of the data sheet's bf16 peak, as the run counts it; None without a GPU that has it
    capacity_bytes: float | None = None
    inputs: tuple[str, ...] = ()  # each number used: "all_gather 48.1 GB/s: measured", "... derived", "... assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout that fits, with its forecast."""

    layout: Layout
    forecast: Forecast
    why: str = ""  # against the winner


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A layout or a family that was rejected, by the named rule."""

    what: str  # "TP=16", "PP=1 TP=8"
    rule: str
    reason: str  # "needs 9.3 GiB more memory per rank than is available", "TP=16 would cross the 50 GB/s EFA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The whole answer for one job on one cluster."""

    settings: tuple[Setting, ...]
    notes: tuple[Note, ...] = ()
    needs: tuple[PodNeed, ...] = ()
    backend: str = "nccl"  # "gloo" where there is no GPU, "rccl" where the GPUs are AMD's: not judged
    model: ModelSpec | None = None
    train: TrainSpec | None = None
    chosen: RankedLayout | None = None  # None: nothing fits, see `rejected`
    runners_up: tuple[RankedLayout, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    helps_most: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()  # facts that were missing, and what they would change
    slowed: tuple[str, ...] = ()  # what is wrong with these nodes, as the forecast counts it
    sound: RankedLayout | None = None  # the best layout of the same nodes, repaired; None where nothing slows them
    sound_here: RankedLayout | None = None  # that layout on the nodes as they are
    total_steps: int | None = None  # of the whole run, where a budget of steps or tokens was given
    total_seconds: Interval | None = None  # of the whole run
    total_cost: Interval | None = None  # of the whole run, in the currency of the user's price
    node_hour_price: float | None = None  # as the user gave it
    rows: int | None = None  # of the data set, where it was counted
    schema_version: int = SCHEMA_VERSION


class ExportError(ValueError):
    """A framework that cannot run the layout, or a format that does not exist; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What an exporter may use."""

    layout: Layout
    model: ModelSpec
    train: TrainSpec
    settings: tuple[Setting, ...] = ()
    needs: tuple[PodNeed, ...] = ()
    ranks_per_node: int = 1
    on_gpu: bool = True

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return max(1, self.layout.world_size // self.ranks_per_node)


Formats = Mapping[str, tuple[str, Callable[[ExportRequest], str]]]  # what each format is, and who writes it


def request_of(recommendation: Recommendation, *, ranks_per_node: int) -> ExportRequest:
    """What `export` needs, out of a recommendation; without a chosen layout there is nothing to export."""
    if recommendation.chosen is None or recommendation.model is None or recommendation.train is None:
        nearest = "; ".join(f"{row.what}: {row.reason}" for row in recommendation.rejected[:3])
        raise ExportError(f"no layout was chosen, so there is nothing to export ({nearest})")
    return ExportRequest(
        layout=recommendation.chosen.layout,
        model=recommendation.model,
        train=replace(recommendation.train, steps=recommendation.total_steps or recommendation.train.steps),
        settings=recommendation.settings,
        needs=recommendation.needs,
        ranks_per_node=ranks_per_node,
        on_gpu=recommendation.backend == "nccl",
    )


def refuse(framework: str, refusals: Mapping[str, object]) -> None:
    """Raise with all the reasons that hold, if there are any."""
    if reasons := [reason for reason, holds in refusals.items() if holds]:
        raise ExportError(f"{framework} cannot run this layout: {'; '.join(reasons)}")


def render(template: str, /, **values: Any) -> str:
    """Fill in a template of planner/stacks/templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - no HTML
        loader=FileSystemLoader(Path(__file__).parent / "stacks" / "templates"), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    return environment.get_template(f"{template}.j2").render(**values)


def from_template(name: str, request: ExportRequest, **values: Any) -> str:
    """The same with the request's layout, model and train."""
    return render(name, request=request, layout=request.layout, model=request.model, train=request.train, **values)


def yaml_from_template(name: str, request: ExportRequest, **values: Any) -> str:
    """The same of a YAML template, written as PyYAML writes it; lines that are comments come first."""
    import yaml

    text = from_template(name, request, **values)
    comments = [line for line in text.splitlines(keepends=True) if line.startswith("#")]
    return "".join(comments) + yaml.safe_dump(yaml.safe_load(text), sort_keys=False)
