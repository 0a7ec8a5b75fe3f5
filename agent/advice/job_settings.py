"""What the fine-tune job's settings (the YAML of --config, then --set) and the rows of its data set say to the planner.

Specification: docs/reference/finetune-job.md, the names of contracts.job_config. The job itself judges the values.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.advice.request import Request, rows_of
from agent.base.inputs import InputError, RequestError
from contracts import bounded
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


# The rows of the data set are counted, and measured with the model's tokenizer, in a child process: this process must
# not load transformers. Where the data or the tokenizer is not available, the rows are unknown and the advice says why.

TIMEOUT_SECONDS = 120.0  # a data set may first have to be fetched
EPOCHS = 3.0  # the job's own default (contracts/default.yaml)
FILES = (".jsonl", ".json", ".parquet", ".csv")  # as finetune.rows reads them
WRONG_DATA = 3  # the exit code of finetune.rows where the rows themselves are at fault, and no tokenizer or hub
_NAMES = (
    "dataset_name", "dataset_revision", "dataset_config", "dataset_train_split", "dataset_text_field", "dataset_rows",
    "tokenizer_name", "tokenizer_revision", "model_name_or_path", "model_revision", "chat_template",
    "completion_only_loss",
)  # fmt: skip


def with_rows(request: Request, settings: Mapping[str, Any]) -> Request:
    """The question with the lengths of the rows that these settings of the job name; user's lengths stand above them.

    The data that the job makes itself, and a model of a name that no hub has, are left as they are. Raises InputError
    where rows of this host cannot be read.
    """
    name = settings.get("dataset_name")
    if not isinstance(name, str) or name.startswith("synthetic:") or request.train.length_histogram:
        return request
    if name.startswith(("/", ".", "~")) and not bounded.exists(Path(name).expanduser()):
        return replace(request, unmeasured=_words(name, "not on this host", request))
    named_settings = {key: settings[key] for key in _NAMES if settings.get(key) is not None}
    if "model_name_or_path" not in named_settings and "tokenizer_name" not in named_settings:
        tokenizer = hub_id(request.model) if request.model else None
        if tokenizer is None:
            why = f"no tokenizer of {request.model or 'the model'} is known"
            return replace(request, unmeasured=_words(name, why, request))
        named_settings["tokenizer_name"] = tokenizer
    try:
        found = _measured(named_settings)
    except LookupError as error:
        return replace(request, unmeasured=_words(name, str(error), request))
    if not found["histogram"]:
        words = _words(name, found["why"], request)
        return replace(request.changed(rows=request.rows or found["rows"]), unmeasured=words)
    lengths = ",".join(f"{tokens}:{rows}" for tokens, rows in found["histogram"])
    return request.changed(lengths=lengths, rows=request.rows or found["rows"])


def for_whole_run(request: Request, settings: Mapping[str, Any]) -> Request:
    """The question for as many steps as the job's settings say, where its rows are known."""
    if settings.get("max_steps"):
        return request.changed(steps=settings["max_steps"])
    if rows_of(request) is None:
        return request
    return replace(request, epochs=float(settings.get("num_train_epochs") or EPOCHS))


def named(dataset: str, tokenizer: str | None, model: str | None) -> dict[str, Any]:
    """The job's settings for "openai/gsm8k:main", a file or a folder; a model that lies in a folder spells its rows.

    Raises InputError for a file that is not there.
    """
    if Path(dataset).suffix in FILES and not bounded.exists(Path(dataset).expanduser()):
        raise InputError(f"--dataset {dataset}: no such file; give a file, a folder, or a data set's name on the hub")
    name, _, part = dataset.rpartition(":") if not bounded.exists(dataset) else (dataset, "", "")
    settings = {"dataset_name": name, "dataset_config": part} if name and part else {"dataset_name": dataset}
    if tokenizer is None and model is not None and bounded.is_folder(model):
        tokenizer = model
    return {**settings, **({"tokenizer_name": tokenizer} if tokenizer else {})}


def _words(name: str, why: str, request: Request) -> str:
    return (
        f"the rows of {name} were not measured ({why}). Each row is assumed to have {request.train.sequence_length} "
        "tokens. Give --lengths and --rows"
    )


def _measured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the job's own reader. LookupError says why there is no answer, InputError what is wrong with the rows."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "finetune.rows"], input=json.dumps(settings), capture_output=True,
            text=True, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LookupError(f"no answer within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode == WRONG_DATA:
        raise InputError(done.stderr.strip()[-600:])
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no words"]
        raise LookupError(last[0][:300])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
