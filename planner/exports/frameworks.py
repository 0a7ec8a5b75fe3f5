"""Exports: the chosen layout in the words of each framework, or the reason why that framework cannot run it."""

from __future__ import annotations

from collections.abc import Callable
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


Exporter = Callable[[Request], str]


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


def _formats() -> dict[str, tuple[str, Exporter]]:
    from planner.exports import hugging_face as exports_hf  # they import this module
    from planner.exports import job as exports_job
    from planner.exports import megatron as exports_megatron
    from planner.exports import torchtitan as exports_torchtitan

    return {
        "finetune": ("the YAML of the fine-tune job that ships", exports_job.finetune_yaml),
        "torchrun": ("the torchrun line", exports_job.torchrun_line),
        "env": ("environment file, one NAME=value per line", exports_job.env_file),
        "shell": ("export statements", exports_job.shell_exports),
        "pod": ("env and resources of a pod's container, YAML", exports_job.pod_env),
        "accelerate": ("accelerate's config file (YAML)", exports_hf.accelerate_yaml),
        "trl": ("TRL / transformers training arguments (YAML)", exports_hf.trl_yaml),
        "deepspeed": ("DeepSpeed's configuration (JSON)", exports_hf.deepspeed_json),
        "torchtitan": ("torchtitan's job configuration (TOML)", exports_torchtitan.torchtitan_toml),
        "megatron": ("Megatron-LM arguments", exports_megatron.megatron_arguments),
    }


def formats() -> dict[str, str]:
    """Format names and what each is."""
    return {name: text for name, (text, _) in _formats().items()}


def export(name: str, request: Request) -> str:
    """The layout in one format."""
    known = _formats()
    if name not in known:
        raise ExportError(f"format={name!r}: allowed are {', '.join(known)}")
    return known[name][1](request)
