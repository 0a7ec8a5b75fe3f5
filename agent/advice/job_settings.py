"""What the fine-tune job's settings (the YAML of --config, then --set) say to the planner, and its model's shape.

Specification: docs/reference/finetune-job.md, the names of contracts.job_config. The job itself judges the values. The
shape of a model that is no known name is read from config.json of the hub that the job will ask, or from its cache:
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_HOME as huggingface_hub reads them, and its cache's folders;
`GET {endpoint}/{id}/resolve/{revision}/config.json`. Weights are never fetched. A known name is not asked for unless
HF_ENDPOINT names a hub: what stands there under that name is what the job will load.
"""

from __future__ import annotations

import copy
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from agent.advice.request import Request
from agent.base.inputs import RequestError
from contracts import bounded
from contracts.job_config import ConfigError, JobConfig, parse_config, read_file, with_overrides
from contracts.job_plan import JobPlan, dumps
from contracts.plain import loads as plain
from planner.advice import Recommendation
from planner.forecast.models import ModelError, hub_id, model_from_config, model_named
from planner.forecast.specs import ModelSpec, TrainSpec

# The job's own default (contracts/default.yaml): a Llama small enough for any host, on data that the job makes.
EMBEDDED_MODEL = "tiny-llama"

RANDOM = "random:"  # weights of a shape alone

# What the embedded job does: its rows of about 51 tokens are padded to the longest of a micro-batch.
EMBEDDED_REQUEST: dict[str, Any] = {
    "model": EMBEDDED_MODEL,
    "method": "lora",
    "lora_rank": 8,
    "saved_modules": ("embed_tokens", "lm_head"),
    "sequence_length": 64,
    "global_batch": 16,
}


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


# The question behind a job.


def training_request(options: Mapping[str, Any]) -> Request:
    """The question behind `launch`: the named model, or the embedded one."""
    names = ("hosts", "root", "model", "method", "sequence_length", "global_batch", "machine", "nodes", "lengths",
             "rows")  # fmt: skip
    request = Request.of(**{name: options[name] for name in names if name in options}, ranks_per_node=options["ranks"])
    return job_request(request, options["config"], options["overrides"])


def job_request(request: Request, config: Path | None, overrides: Sequence[str]) -> Request:
    """The job that is to be trained: the model named, else the one that its settings name, else the embedded one."""
    job, explicit, _ = settings(config, overrides)
    if request.model is None:
        name = str(explicit.get("model_name_or_path", f"{RANDOM}{EMBEDDED_MODEL}")).removeprefix(RANDOM)
        embedded = {**EMBEDDED_REQUEST, "global_batch": request.train.global_batch or EMBEDDED_REQUEST["global_batch"]}
        request = request.changed(**(embedded if name == EMBEDDED_MODEL else {"model": name}))
    try:
        shape = shape_of(request.model or "", job.model_revision)
    except ModelError as error:
        raise RequestError(str(error)) from None
    return planned_for(replace(request, shape=shape), job, explicit)


# The shape of the model by its hub id.

_SECONDS = 10.0
_MOST_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


def shape_of(name: str, revision: str, environment: Mapping[str, str] = os.environ) -> ModelSpec | None:
    """The model's shape; None where the known names are to answer. Raises ModelError for a name that nobody knows."""
    if hub_id(name) != name or bounded.exists(name):
        return None
    try:
        model_named(name)
        known = True
    except ModelError:
        known = False
    if known and not environment.get("HF_ENDPOINT"):
        return None
    why = ""
    found = _cached(name, revision, environment)
    if found is None and environment.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
        try:
            found = _fetched(name, revision, environment)
        except (OSError, ValueError) as error:
            why = f"; {_endpoint(environment)}: {error}"
    if found is not None:
        return model_from_config(found, name=name)
    if known:
        return None
    raise ModelError(f"model={name!r}: not a known name{why}; give the path of its config.json with --model")


def _endpoint(environment: Mapping[str, str]) -> str:
    return (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _home(environment: Mapping[str, str]) -> Path:
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environment.get("HF_HOME") or cache / "huggingface").expanduser()


def _cached(name: str, revision: str, environment: Mapping[str, str]) -> Any:
    cache = Path(environment.get("HF_HUB_CACHE") or _home(environment) / "hub")
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = revision if _COMMIT.fullmatch(revision) else bounded.read_text(folder / "refs" / revision, 256).strip()
        return plain(bounded.read(folder / "snapshots" / commit / "config.json", _MOST_BYTES))
    except (OSError, ValueError):
        return None


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Redirects are followed; the token goes to the hub alone."""

    def redirect_request(self, req: Any, *words: Any) -> urllib.request.Request | None:
        made = super().redirect_request(req, *words)
        if made is not None and urlsplit(made.full_url)[:2] != urlsplit(req.full_url)[:2]:
            made.remove_header("Authorization")
        return made


def _fetched(name: str, revision: str, environment: Mapping[str, str]) -> Any:
    endpoint = _endpoint(environment)
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"HF_ENDPOINT={endpoint!r}: must be http://HOST or https://HOST")
    request = urllib.request.Request(f"{endpoint}/{name}/resolve/{quote(revision, safe='')}/config.json")  # noqa: S310
    if token := environment.get("HF_TOKEN") or _token(environment):
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.build_opener(_SameHost).open(request, timeout=_SECONDS) as answer:
        body = answer.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise ValueError("config.json is larger than 1 MiB, which none is")
    return plain(body)


def _token(environment: Mapping[str, str]) -> str:
    try:
        return bounded.read_text(environment.get("HF_TOKEN_PATH") or _home(environment) / "token", _MOST_BYTES).strip()
    except (OSError, ValueError):
        return ""
