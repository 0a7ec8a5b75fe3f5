"""What the fine-tune job's own settings say of the job that is to be planned: the YAML of --config, --set over it.

Specification: docs/finetune.md, the names of contracts.job_config. The job itself judges the values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent.advice.request import Request
from agent.base.inputs import RequestError
from contracts.job_config import ConfigError, JobConfig, parse_config, read_file, with_overrides
from contracts.job_plan import JobPlan, dumps
from planner.advice import Recommendation
from planner.forecast.models import hub_id
from planner.forecast.specs import TrainSpec

# The job's own default (contracts/default.yaml): a Llama small enough for any host, on data that the job makes.
EMBEDDED_MODEL = "tiny-llama"

RANDOM = "random:"  # weights of a shape alone


def explicit_settings(config: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings that are given, by today's names. Raises RequestError that names the file or the word."""
    return settings(config, overrides)[1]


def settings(config: Path | None, overrides: Iterable[str]) -> tuple[JobConfig, dict[str, Any], list[str]]:
    """The job's settings, those of them that are given, and notes on them, as the job will read them.

    Raises RequestError that names the file or the word.
    """
    try:
        raw = read_file(config) if config is not None else {}
    except ConfigError as error:
        raise RequestError(f"--config {error}") from None
    alone = copy.deepcopy(raw)
    words = list(overrides)
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise RequestError(f"--set {word!r}: must be NAME=VALUE")
    try:
        parsed = parse_config(with_overrides(raw, words))
        dumps(JobPlan(config=parsed[0]))  # what no rank would read is refused before any starts
        return parsed
    except ConfigError as error:
        wrong = _wrong_alone(alone)
        where = f"--config {config}:" if str(error) == wrong else f"--config {config} with --set:" if wrong else "--set"
        raise RequestError(f"{where} {error}") from None


def _wrong_alone(raw: Mapping[str, Any]) -> str:
    """Why the file itself cannot be read, without what `--set` puts over it."""
    try:
        parse_config(raw)
    except ConfigError as error:
        return str(error)
    return ""


def planned_for(request: Request, config: JobConfig, explicit: Mapping[str, Any]) -> Request:
    """The question as the job's settings put it: what they say stands, and the plan is made around it."""
    if not explicit:
        return request
    requested: dict[str, Any] = {field: getattr(config, name) for name, field in _PLANNED.items() if name in explicit}
    if {"load_in_4bit", "use_peft", "model_name_or_path"} & set(explicit) and explicit.get(
        "model_name_or_path") != f"{RANDOM}{EMBEDDED_MODEL}":  # fmt: skip
        requested["method"] = "qlora" if config.load_in_4bit else "lora" if config.use_peft else "full"
    if {"model_name_or_path", "max_length"} & set(explicit) == {"model_name_or_path"} and (
        request.train.sequence_length == TrainSpec().sequence_length
    ):
        # a whole job that is silent on it has TRL's default, as the job
        requested["sequence_length"] = config.max_length
    if "attn_implementation" in explicit:
        kernel = config.attn_implementation
        requested["attention"] = "flash" if kernel == "flash_attention_2" else kernel
    if "dtype" in explicit:
        requested["dtype"] = config.dtype
    if config.layout:
        requested["asked"] = tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in config.layout.items())
        requested["fused_cross_entropy"] = config.layout.get("fused_cross_entropy")
        if {"micro_batch", "gradient_accumulation"} & set(config.layout) and request.model == EMBEDDED_MODEL:
            requested["global_batch"] = None
    return request.changed(**requested)


# Settings that a forecast goes by -> their names there.
_PLANNED = {
    "max_length": "sequence_length", "packing": "packing", "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets", "lora_modules_to_save": "saved_modules", "max_steps": "steps",
}  # fmt: skip


def left_open(advice: Recommendation, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the file leaves open as they were planned: weights, method, adapters, rows."""
    train, model = advice.train, advice.model
    if train is None or model is None:
        return {}
    kernel = "flash_attention_2" if train.attention == "flash" else train.attention
    made = {name: getattr(train, field) for name, field in _PLANNED.items() if name != "max_steps" or train.steps}
    made |= {"use_peft": train.method != "full", "load_in_4bit": train.method == "qlora", "attn_implementation": kernel,
             "model_name_or_path": hub_id(model.name) or model.name}  # fmt: skip
    return {name: value for name, value in made.items() if name not in explicit}


def untrainable(advice: Recommendation, settings: Mapping[str, Any]) -> str:
    """Why the job's own defaults would train another model, or sums, in place of what was planned; else nothing."""
    if advice.model is None or advice.model.name == EMBEDDED_MODEL:
        return ""
    if "dataset_name" not in settings:
        return (
            "dataset_name: no data set is named, so the job would train on made-up sums; give --set dataset_name=NAME, "
            "a hub id such as openai/gsm8k (with --set dataset_config=main) or a file that the job sees, or --config "
            "FILE that names one"
        )
    if "model_name_or_path" not in settings and hub_id(advice.model.name) is None:
        return (
            f"model {advice.model.name}: where its weights are is not known; give --set model_name_or_path=OWNER/NAME, "
            "a folder that the job sees, or --config FILE"
        )
    return ""
