"""What the fine-tune job's own settings say of the job that is to be planned: the YAML of --config, --set over it.

Specification: docs/finetune.md, the names of contracts.job_config. The job itself judges the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.advise import Request, RequestError
from contracts.job_config import ConfigError, parse_config, read_file, with_overrides
from planner.advice import Recommendation
from planner.forecast.models import hub_id

# The job's own default (contracts/default.yaml): a Llama small enough for any host, on data that the job makes.
EMBEDDED_MODEL = "tiny-llama"

_RANDOM = "random:"  # weights of a shape alone


def said(config: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings by today's names, as the job will read them. Raises RequestError that names the file or the word."""
    try:
        raw = read_file(config) if config is not None else {}
    except ConfigError as error:
        raise RequestError(f"--config {error}") from None
    try:
        parse_config(raw)
    except ConfigError as error:
        raise RequestError(f"--config {config}: {error}") from None
    words = list(overrides)
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise RequestError(f"--set {word!r}: must be NAME=VALUE")
    try:
        return parse_config(with_overrides(raw, words))[1]
    except ConfigError as error:
        raise RequestError(f"--set {error}") from None


def planned_for(request: Request, settings: Mapping[str, Any]) -> Request:
    """The question as the job's settings put it: method, adapters, row length, and the model where none is named."""
    name = settings.get("model_name_or_path")
    if request.model is None and (not isinstance(name, str) or name == f"{_RANDOM}{EMBEDDED_MODEL}"):
        return request
    found: dict[str, Any] = {} if request.model is not None else {"model": str(name).removeprefix(_RANDOM)}
    fields = {"max_length": "sequence_length", "lora_r": "lora_rank", "packing": "packing"}
    found |= {fields[name]: value for name, value in settings.items() if name in fields}
    if settings.get("load_in_4bit"):
        found["method"] = "qlora"
    elif "use_peft" in settings or request.model is None:
        found["method"] = "lora" if settings.get("use_peft") else "full"
    if "lora_modules_to_save" in settings:
        found["saved_modules"] = settings["lora_modules_to_save"]
    return replace(request, **found)


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
