"""What an exporter is given: the chosen layout, to be written as a stack's configuration, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from contracts.layout import Layout
from planner.advice import PodNeed, Recommendation, Setting
from planner.forecast.specs import ModelSpec, TrainSpec


class ExportError(ValueError):
    """A framework that cannot run the layout, or a format that does not exist; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
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


Formats = Mapping[str, tuple[str, Callable[[Request], str]]]  # what each format is, and who writes it


def request_of(recommendation: Recommendation, *, ranks_per_node: int) -> Request:
    """What `export` needs, out of a recommendation; without a chosen layout there is nothing to export."""
    if recommendation.chosen is None or recommendation.model is None or recommendation.train is None:
        nearest = "; ".join(f"{row.what}: {row.reason}" for row in recommendation.rejected[:3])
        raise ExportError(f"no layout was chosen, so there is nothing to export ({nearest})")
    return Request(
        layout=recommendation.chosen.layout,
        model=recommendation.model,
        train=recommendation.train,
        settings=recommendation.settings,
        needs=recommendation.needs,
        ranks_per_node=ranks_per_node,
        on_gpu=recommendation.backend == "nccl",
    )


def refuse(framework: str, reasons: list[str]) -> None:
    """Raise with all the reasons, if there are any."""
    if reasons:
        raise ExportError(f"{framework} cannot run this layout: {'; '.join(reasons)}")
