"""What the fine-tune job's own settings say of the job that is to be planned: the YAML of --config, --set over it.

Specification: docs/finetune.md, the names of finetune.config. The job itself judges the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.advise import Request, RequestError
from planner.advice import Recommendation
from planner.models import hub_id
from probes import bounded
from probes.yaml_text import load_all

# The job's own default (finetune/default.yaml): a Llama small enough for any host, on data that the job makes.
EMBEDDED_MODEL = "tiny-llama"

_MOST_BYTES = 1 << 20
_MOST_ALIASES = 16
_RANDOM = "random:"  # weights of a shape alone


def said(config: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings by name. Raises RequestError that names the file or the word."""
    settings: dict[str, Any] = {}
    if config is not None:
        try:
            parts = load_all(bounded.read_text(config, _MOST_BYTES), most_aliases=_MOST_ALIASES)
        except (OSError, ValueError) as error:
            raise RequestError(f"--config {config}: {error}") from None
        if len(parts) != 1 or not isinstance(parts[0], dict):
            raise RequestError(f"--config {config}: must be one mapping of settings")
        settings = parts[0]
    for word in overrides:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise RequestError(f"--set {word!r}: must be NAME=VALUE")
        settings = {**settings, name: value}
    return settings


def planned_for(request: Request, settings: Mapping[str, Any]) -> Request:
    """The question as the job's settings put it: method, adapters, row length, and the model where none is named."""
    name = settings.get("model_name_or_path")
    if request.model is None and (not isinstance(name, str) or name == f"{_RANDOM}{EMBEDDED_MODEL}"):
        return request
    found: dict[str, Any] = {} if request.model is not None else {"model": str(name).removeprefix(_RANDOM)}
    length = str(settings.get("max_length", settings.get("max_seq_length", "")))
    if length.isdecimal() and 0 < len(length) < 10:
        found["sequence_length"] = int(length)
    rank = str(settings.get("lora_r", ""))
    if rank.isdecimal() and 0 < len(rank) < 6:
        found["lora_rank"] = int(rank)
    if "packing" in settings:
        found["packing"] = _true(settings, "packing")
    if _true(settings, "load_in_4bit"):
        found["method"] = "qlora"
    elif "use_peft" in settings or request.model is None:
        found["method"] = "lora" if _true(settings, "use_peft") else "full"
    saved = settings.get("lora_modules_to_save")
    if isinstance(saved, list | tuple):
        found["saved_modules"] = tuple(str(one) for one in saved)
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


def _true(settings: Mapping[str, Any], name: str) -> bool:
    return str(settings.get(name, "")).lower() in ("true", "yes", "on")
