"""Which of the two trainers runs a job: the built-in one, or TRL's for what the built-in one does not support."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent.advice.advise import advise
from agent.advice.job_settings import OURS, TRL, explicit_settings, job_request, trainer_of
from agent.advice.request import Request, for_whole_run, with_rows
from contracts.layout import Layout
from planner.advice import Recommendation
from planner.recommend import AS_ASKED
from planner.stacks import engine_named
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts

_OF_SHARDING = ("sharding", "dp_shard", "dp_replicate", "reshard_after_forward", "offload")


def choose_trainer(
    request: Request, config: Path | None, overrides: Sequence[str], requested: str, found: Sequence[Snapshot]
) -> tuple[Recommendation, str, str]:
    """The advice for the trainer that supports the file, the model and the layout; its name; a line with the reason.

    `requested`: "auto", or a trainer. Raises RequestError for settings that neither trainer supports.
    """
    trainer, why = trainer_of(config, overrides, requested)
    advice = _advise_for(request, config, overrides, trainer, found)
    is_open = trainer == OURS and requested == "auto"
    if advice.chosen is None and is_open and not any(row.rule == "memory-fits" for row in advice.rejected):
        assert advice.model is not None and advice.train is not None  # noqa: S101 - a job always names one
        measured = request.changed(length_histogram=advice.train.length_histogram)
        other = _advise_for(measured, config, overrides, TRL, found)
        if other.chosen is None:
            return advice, OURS, f"with TRL's trainer: {describe_refusal(other)}"
        simplest = engine_named(OURS).refuses(advice.model, advice.train, Layout(world_size=1))
        advice, trainer, why = other, TRL, simplest or advice.rejected[0].reason
    if trainer not in (OURS, TRL):  # another stack, which --engine names
        return advice, trainer, ""
    if trainer == OURS:
        line = "trainer: topoflight (built in); it supports every setting of the file and the layout."
        return advice, OURS, line if config and advice.chosen else ""
    on_cpu = " Without a GPU it runs DDP, whatever sharding the file names." if advice.backend == "gloo" else ""
    reason = f", because the built-in one refuses: {why}." if why else ", as --trainer says."
    return advice, TRL, f"trainer: TRL's SFTTrainer{reason}{on_cpu}"


def _advise_for(
    request: Request, config: Path | None, overrides: Sequence[str], trainer: str, found: Sequence[Snapshot]
) -> Recommendation:
    settings = explicit_settings(config, overrides, trainer)
    request = job_request(request.changed(engine=trainer), config, overrides)
    request = for_whole_run(with_rows(request, settings), settings)
    has_gpus = bool(request.machine) or any((facts := one.facts(GpuFacts)) and facts.gpus for one in found)
    if trainer == TRL and not has_gpus:
        kept = [(name, value) for name, value in request.train.asked if name not in _OF_SHARDING]
        request = request.changed(asked=tuple(kept))
    return advise(request, lambda: found)


def describe_refusal(advice: Recommendation) -> str:
    """Why nothing is launched, and which settings could be, if the settings themselves exclude every layout."""
    for row in advice.rejected[:1]:
        if row.what == AS_ASKED:
            could = f"; what can: {'; or '.join(advice.helps_most)}" if advice.helps_most else ""
            return f"nothing to launch: {row.reason}{could}"
    return "no layout fits: nothing to launch"
