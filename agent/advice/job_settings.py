"""The settings of the fine-tune job (the YAML file of --config, then --set): build its request, choose its trainer.

Specification: docs/reference/finetune-job.md; contracts.job_config defines the names. The job validates the values. If
the model's name is not in the table, its shape is read from config.json on the hub that the job will use, or from the
hub cache, through huggingface_hub. Weights are never downloaded. A name in the table is looked up only if HF_ENDPOINT
names a hub, because the job will load the model of that hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agent.advice.advise import EMBEDDED_MODEL, advise
from agent.advice.request import Request
from agent.base import raise_as
from agent.base.options import InputError, RequestError, split_pair
from contracts import bounded, plain
from contracts.job_config import ConfigError, JobPlan, JobSettings, dump_plan, parse_config, read_file, with_overrides
from contracts.layout import Layout
from contracts.tables import read_table, read_texts
from planner.advice import Recommendation
from planner.forecast.models import ModelError, hub_id, model_named, read_model, read_model_file
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.recommend import AS_REQUESTED
from planner.stacks import find_engine
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts

texts = read_texts(__file__, "texts.toml")
_TABLE = read_table(__file__, "job_settings.toml")
PLANNED: dict[str, str] = _TABLE["planned"]  # settings that the forecast uses, and their names in the planner
_OF_SHARDING = ("sharding", "dp_shard", "dp_replicate", "reshard_after_forward", "offload")
_MAX_CONFIG_BYTES = 1 << 20  # of a model's config.json
RANDOM = "random:"  # prefix of a model with random weights: only its shape is used

# The embedded job has rows of about 51 tokens, padded to the longest row of a micro-batch.
EMBEDDED_REQUEST: dict[str, Any] = {
    "model": EMBEDDED_MODEL, "method": "lora", "lora_rank": 8, "saved_modules": ("embed_tokens", "lm_head"),
    "sequence_length": 64, "global_batch": 16,
}  # fmt: skip
# What TRL 1.16 (ModelConfig), PEFT (Llama and most others) and transformers (use_liger_kernel) do without the setting.
TRL_DEFAULTS = {"dtype": "float32", "lora_targets": ("q_proj", "v_proj"), "fused_cross_entropy": False}
OURS, TRL = "topoflight", "trl"  # the trainers finetune.loop and finetune.sft_trl; also the names of their stacks


def read_settings(request: Request, trainer: str = OURS) -> JobSettings:
    """Read the job's settings; for another trainer than the built-in one also those that only TRL's trainer has.

    Raises RequestError that names the file or argument.
    """
    for word in request.overrides:
        split_pair("--set", word)
    option = f"--config {request.config}{' with --set' * bool(request.overrides)}:" if request.config else "--set"
    with raise_as(RequestError, ConfigError, "--config "):
        raw = read_file(request.config) if request.config is not None else {}
    with raise_as(RequestError, ConfigError, f"{option} "):
        settings = parse_config(with_overrides(raw, request.overrides), by_trl=trainer != OURS)
        dump_plan(JobPlan(config=settings.config))  # reject settings that no rank could read before any rank starts
    if trainer != OURS:
        settings.explicit.update({name: raw[name] for name in ("datasets", "dataset_mixture") if raw.get(name)})
    return settings


def read_explicit_settings(advice: Recommendation, request: Request) -> dict[str, Any]:
    """Return the settings that the user gave and the trainer of the advice takes, by current name."""
    return read_settings(request, advice.train.engine if advice.train else OURS).explicit


def add_job_settings(request: Request, settings: JobSettings) -> Request:
    """Add the job's settings to the request as fixed values that the plan does not change."""
    config, explicit = settings.config, settings.explicit
    if not explicit:
        return request
    requested: dict[str, Any] = dict(TRL_DEFAULTS) if request.train.engine == TRL else {}
    requested |= {field: getattr(config, name) for name, field in PLANNED.items() if name in explicit}
    model = explicit.get("model_name_or_path")
    if {"load_in_4bit", "use_peft", "model_name_or_path"} & set(explicit) and model != f"{RANDOM}{EMBEDDED_MODEL}":
        requested["method"] = "qlora" if config.load_in_4bit else "lora" if config.use_peft else "full"
    is_default = request.train.sequence_length == TrainSpec().sequence_length
    if "model_name_or_path" in explicit and "max_length" not in explicit and is_default:
        # TRL's default applies to a complete job that does not set this
        requested["sequence_length"] = config.max_length
    if "attn_implementation" in explicit:
        kernel = config.attn_implementation
        requested["attention"] = "flash" if kernel == "flash_attention_2" else kernel
    if "dtype" in explicit or config.load_in_4bit:
        requested["dtype"] = config.dtype
    if config.layout:
        requested["fixed_layout"] = tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in config.layout.items())
        if {"micro_batch", "gradient_accumulation"} & set(config.layout) and request.model == EMBEDDED_MODEL:
            requested["global_batch"] = None
    return request.changed(**requested)


# The request for a job.


def build_job_request(request: Request, settings: JobSettings | None = None) -> Request:
    """Return the request for a job; the model is that of the request, else of the settings, else the embedded job."""
    settings = settings or read_settings(request, request.train.engine)
    if request.model is None:
        name = str(settings.explicit.get("model_name_or_path", f"{RANDOM}{EMBEDDED_MODEL}")).removeprefix(RANDOM)
        embedded = {**EMBEDDED_REQUEST, "global_batch": request.train.global_batch or EMBEDDED_REQUEST["global_batch"]}
        request = request.changed(**(embedded if name == EMBEDDED_MODEL else {"model": name}))
    shape = look_up_shape(request.model or "", settings.config.model_revision)
    return add_job_settings(replace(request, shape=shape), settings)


# A child process counts the rows of the data set and measures them with the model's tokenizer, because this process
# must not import transformers. If the data or tokenizer is not available, the rows are unknown and the advice says why.

TIMEOUT_SECONDS = 120.0  # a data set may have to be downloaded first; a hub may not answer
WRONG_DATA = 3  # exit code of finetune.rows if the rows are invalid, not the tokenizer or hub


def with_rows(request: Request, explicit: Mapping[str, Any]) -> Request:
    """Add the row lengths of the data set in the job's settings to the request, unless the user has given lengths.

    Data that the job generates is not measured. If the tokenizer is unknown or the data set cannot be read here, the
    request gets the reason. Raises InputError if rows on this host are invalid.
    """
    name = explicit.get("dataset_name")
    if not isinstance(name, str) or name.startswith("synthetic:") or request.train.length_histogram:
        return request
    explain = partial(texts, "unmeasured_rows", name=name, length=request.train.sequence_length)
    if name.startswith(("/", ".", "~")) and not os.path.exists(Path(name).expanduser()):
        return replace(request, unmeasured=explain(why="not on this host"))
    named_settings = {key: explicit[key] for key in _TABLE["rows"]["names"] if explicit.get(key) is not None}
    if request.train.engine == TRL:
        named_settings.pop("completion_only_loss", None)  # TRL's trainer finds answers by templates that it has
    if "model_name_or_path" not in named_settings and "tokenizer_name" not in named_settings:
        tokenizer = hub_id(request.model) if request.model else None
        if tokenizer is None:
            return replace(request, unmeasured=explain(why=f"no tokenizer of {request.model or 'the model'} is known"))
        named_settings["tokenizer_name"] = tokenizer
    try:
        measured = json.loads(ask_trainer("finetune.rows", text=json.dumps(named_settings)))
    except LookupError as error:
        return replace(request, unmeasured=explain(why=error))
    if not measured["histogram"]:
        return replace(request.changed(rows=request.rows or measured["rows"]), unmeasured=explain(why=measured["why"]))
    lengths = ",".join(f"{tokens}:{rows}" for tokens, rows in measured["histogram"])
    return request.changed(lengths=lengths, rows=request.rows or measured["rows"])


def complete_request(request: Request) -> Request:
    """Return the request for a job with the rows of its data and its length: steps, else epochs if rows are known."""
    settings = read_settings(request, request.train.engine)
    request = with_rows(build_job_request(request, settings), settings.explicit)
    if settings.config.max_steps:
        return request.changed(steps=settings.config.max_steps)
    return request if request.count_rows() is None else replace(request, epochs=settings.config.num_train_epochs)


def ask_trainer(module: str, *arguments: str, text: str = "") -> str:
    """Return the last line that a module of the trainer prints, in a child process.

    Raises LookupError if the child fails, InputError if it says that the rows are invalid.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise LookupError(f"no answer within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode == WRONG_DATA:
        raise InputError(done.stderr.strip()[-600:])
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode or not lines:
        raise LookupError(lines[-1][:800] if lines else f"exit code {done.returncode}")
    return lines[-1]


# Choose the trainer of a job: the built-in trainer, or TRL's for jobs that the built-in trainer does not support.


def choose_trainer(request: Request, requested: str, snapshots: Sequence[Snapshot]) -> tuple[Recommendation, str]:
    """Return the advice for the trainer that supports the settings, model and layout, and a line with the reason.

    `requested` is "auto" or the name of a trainer; `train.engine` of the advice is the chosen one. Raises RequestError
    if neither trainer supports the settings.
    """
    only_trl = read_settings(request, requested).only_trl
    if requested != "auto":
        advice = _advise_for(request, requested, snapshots)
        return advice, _describe_trainer(advice, requested, request)
    if only_trl:
        advice = _advise_for(request, TRL, snapshots)
        return advice, _describe_trainer(advice, TRL, request, "; ".join(only_trl))
    advice = _advise_for(request, OURS, snapshots)
    if advice.chosen is not None:
        return advice, _describe_trainer(advice, OURS, request)
    assert advice.model is not None and advice.train is not None  # noqa: S101 - a job always names one
    measured = request.changed(length_histogram=advice.train.length_histogram)
    by_trl = _advise_for(measured, TRL, snapshots)
    is_too_large = any(row.rule == "memory-fits" for row in advice.rejected)
    if by_trl.chosen is None or (is_too_large and by_trl.chosen.layout.cp == 1):  # TRL's trainer can split sequences
        return advice, "" if is_too_large else f"with TRL's trainer: {describe_refusal(by_trl)}"
    simplest = find_engine(OURS).refuses(advice.model, advice.train, Layout(world_size=1))
    return by_trl, _describe_trainer(by_trl, TRL, request, simplest or advice.rejected[0].reason)


def _describe_trainer(advice: Recommendation, trainer: str, request: Request, refusal: str = "") -> str:
    """Name the trainer; `refusal` is why the built-in one cannot run the job. Empty if the user needs no line."""
    if trainer == OURS:
        line = "trainer: topoflight (built in); it supports every setting of the file and the layout."
        return line if request.config and advice.chosen else ""
    if trainer != TRL:  # another stack, named with --engine
        return ""
    on_cpu = " Without a GPU it runs DDP, whatever sharding the file names." if advice.backend == "gloo" else ""
    reason = f", because the built-in one refuses: {refusal}." if refusal else ", as --trainer requests."
    return f"trainer: TRL's SFTTrainer{reason}{on_cpu}"


def _advise_for(request: Request, trainer: str, snapshots: Sequence[Snapshot]) -> Recommendation:
    request = complete_request(request.changed(engine=trainer))
    has_gpus = request.machine or any((facts := snapshot.facts(GpuFacts)) and facts.gpus for snapshot in snapshots)
    if trainer == TRL and not has_gpus:
        others = [(name, value) for name, value in request.train.fixed_layout if name not in _OF_SHARDING]
        request = request.changed(fixed_layout=tuple(others))
    return advise(request, snapshots)


def describe_refusal(advice: Recommendation) -> str:
    """Explain why nothing can be launched and which settings to change, if the settings exclude every layout."""
    for row in advice.rejected[:1]:
        if row.what == AS_REQUESTED:
            could = f"; what can: {'; or '.join(advice.helps_most)}" if advice.helps_most else ""
            return f"nothing to launch: {row.reason}{could}"
    return "no layout fits: nothing to launch"


# Look up the shape of a model by its hub id.


def look_up_shape(name: str, revision: str) -> ModelSpec | None:
    """Return the model's shape; None if the table has the name. Raises ModelError for an unknown name.

    If the architecture is in no table, the field names that most configurations use are read, because TRL may train it.
    """
    if os.path.exists(name):
        with contextlib.suppress(ModelError):  # the later request reports what is wrong with the file
            return read_model_file(Path(name), any_type=True)
        return None
    if hub_id(name) != name:
        return None
    is_known = False
    with contextlib.suppress(ModelError):
        is_known = bool(model_named(name))
    if is_known and not os.environ.get("HF_ENDPOINT"):
        return None
    try:
        path = ask_trainer("finetune.hub", name, revision)  # this process does not import huggingface_hub
        return read_model(plain.loads(bounded.read(path, _MAX_CONFIG_BYTES)), name=name, any_type=True)
    except (LookupError, OSError, plain.PlainError) as error:
        if is_known:
            return None
        reason = f"not a known name; {error}; give the path of its config.json with --model"
        raise ModelError(f"model={name!r}: {reason}") from None
