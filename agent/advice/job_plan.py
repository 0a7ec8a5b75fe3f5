"""The fine-tune job: its settings (the YAML file of --config, then --set), its request, its trainer and its plan.

Specification: docs/reference/finetune-job.md; contracts.job_config defines the names. The job validates the values. If
the model's name is not in the table, its shape is read from config.json on the hub that the job will use, or from the
hub cache, through huggingface_hub. Weights are never downloaded. A name in the table is looked up only if HF_ENDPOINT
names a hub, because the job will load the model of that hub.
"""

from __future__ import annotations

import contextlib
import copy
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
from agent.base import raise_as, units
from agent.base.options import InputError, RequestError, split_pair
from agent.base.output import to_document
from agent.checks.host_checks import is_gdrdma_possible
from contracts import bounded, job_config, plain
from contracts.job_config import ConfigError, JobConfig, JobPlan, JobSettings, RunForecast
from contracts.layout import Layout
from contracts.tables import read_table, read_texts
from contracts.trl import make_trl_settings
from hardware.gpus import without_gdr
from hardware.units import rate
from planner.advice import RankedLayout, Recommendation
from planner.forecast.memory import STORAGE_BYTES_PER_SECOND, save_seconds
from planner.forecast.models import ModelError, hub_id, model_named, read_model, read_model_file
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.recommend import AS_REQUESTED, checkpoint_to_save
from planner.stacks import find_engine
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.build import build

texts = read_texts(__file__, "texts.toml")
_TABLE = read_table(__file__, "job_plan.toml")
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
    raw = copy.deepcopy(dict(request.file_settings))
    with raise_as(RequestError, ConfigError, f"{option} "):
        settings = job_config.parse_config(job_config.with_overrides(raw, request.overrides), by_trl=trainer != OURS)
        # reject settings that no rank could read before any rank starts
        job_config.dump_plan(JobPlan(config=settings.config))
    if trainer != OURS:
        settings.explicit.update({name: raw[name] for name in _TABLE["only_trl"] if raw.get(name)})
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
    if optimizer := _TABLE["optimizers"].get(str(settings.raw.get("optim"))):
        requested["optimizer"] = optimizer
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
    names = [*_TABLE["rows"]["names"], *(_TABLE["rows"]["not_for_trl"] if request.train.engine != TRL else ())]
    named_settings = {key: explicit[key] for key in names if explicit.get(key) is not None}
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
    if trainer != TRL:  # ours, or another stack, named with --engine
        line = "trainer: topoflight (built in); it supports every setting of the file and the layout."
        return line if trainer == OURS and request.config and advice.chosen else ""
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


# The plan of the job: settings, layout, environment, network, and the time to write a checkpoint.

GRACE_SECONDS = 20  # minimum time to write a checkpoint after SIGTERM


def require_layout(advice: Recommendation) -> RankedLayout:
    """Return the chosen layout. Raises RequestError with the first reasons if there is none."""
    if advice.chosen is None:
        raise RequestError("no layout fits: " + "; ".join(row.reason for row in advice.rejected[:2]))
    return advice.chosen


def build_job_plan(advice: Recommendation, request: Request, snapshots: Sequence[Snapshot] = ()) -> JobPlan:
    """Build the plan of a job on these hosts with the chosen layout and planned values for missing settings.

    Raises RequestError if there is no layout, or if the job cannot be trained.
    """
    ranked = require_layout(advice)
    embedded = advice.model is None or advice.model.name == EMBEDDED_MODEL
    by_trl = advice.train is not None and advice.train.engine == TRL
    if embedded and request.config is None:
        request = request.with_config(job_config.DEFAULT_CONFIG)
    settings = read_settings(request, TRL if by_trl else OURS)
    if refusal := explain_untrainable(advice, settings.explicit):
        raise RequestError(refusal)
    planned = {} if embedded else fill_unset(advice, settings.explicit)
    config = replace(settings.config, **planned)
    of_trl = None
    if by_trl:
        translated = _translate_for_trl(config, settings.explicit, planned)
        of_trl = make_trl_settings({**translated, **settings.raw}, settings.explicit)
        config = replace(config, layout={})  # the layout of the plan is complete: without a GPU it is DDP
    return JobPlan(
        config=config, trl=of_trl, layout=ranked.layout, notes=tuple(settings.notes),
        forecast=run_forecast(advice), transport=plan_transport(advice, snapshots),
        environment={setting.name: setting.value for setting in advice.settings},
    )  # fmt: skip


def explain_untrainable(advice: Recommendation, explicit: Mapping[str, Any]) -> str:
    """Return why the job's defaults would train another model, or sums, instead of the planned model; else ""."""
    if advice.model is None or advice.model.name == EMBEDDED_MODEL:
        return ""
    if not {"dataset_name", "datasets", "dataset_mixture"} & set(explicit):
        return texts("no_data")
    if "model_name_or_path" not in explicit and hub_id(advice.model.name) is None:
        return texts("no_weights", model=advice.model.name)
    has_targets = {"lora_target_modules", "lora_target_parameters"} & set(explicit)
    by_trl = advice.train is not None and advice.train.engine == TRL and advice.train.method != "full"
    if by_trl and not has_targets and advice.model.family not in _TABLE["default_targets"]:
        return texts("no_targets", model=advice.model.name)
    return ""


def fill_unset(advice: Recommendation, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return planned values for settings that the file does not set: weights, method, adapters, rows."""
    train, model = advice.train, advice.model
    if train is None or model is None:
        return {}
    kernel = "flash_attention_2" if train.attention == "flash" else train.attention
    plan = {name: getattr(train, field) for name, field in PLANNED.items() if name != "max_steps" or train.steps}
    plan |= {"use_peft": train.method != "full", "load_in_4bit": train.method == "qlora", "attn_implementation": kernel,
             "model_name_or_path": hub_id(model.name) or model.name}  # fmt: skip
    return {name: value for name, value in plan.items() if name not in explicit}


def _translate_for_trl(config: JobConfig, explicit: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    """Translate planned values for TRL's parser; PEFT chooses targets, transformers sdpa. Raises RequestError."""
    generated = {"model_name_or_path": RANDOM, "dataset_name": "synthetic:"}
    values = {name: getattr(config, name) for name in generated if name in {**explicit, **planned}}
    wrong = [f"{name}={value}" for name, value in values.items() if value.startswith(generated[name])]
    if wrong:
        reason = "only the built-in trainer generates it; TRL's trainer reads files and hub ids"
        raise RequestError(f"{' and '.join(wrong)}: {reason}")
    return {name: value for name, value in planned.items() if not isinstance(value, tuple) and value != "sdpa"}


def run_forecast(advice: Recommendation) -> RunForecast:
    """Return the forecast of the chosen layout for the plan; empty without a layout."""
    return plain.read(to_document(advice.chosen.forecast), RunForecast) if advice.chosen else RunForecast()


def plan_transport(advice: Recommendation, snapshots: Sequence[Snapshot] = ()) -> dict[str, str]:
    """Return the network that NCCL should use between hosts and whether it uses GPUDirect RDMA; empty if unknown.

    The job compares this `transport` of plan.json with NCCL's log. It contains only what host scans show or the advice
    sets. Only RDMA needs locked memory, only EFA its resource (planner/nccl_env/environment.py).
    """
    resources = [need.value for need in advice.needs if need.name == "resource"]
    pinned = any(need.name == "memlock" for need in advice.needs)
    if advice.backend != "nccl" or not pinned:
        return {}
    evidence = [s.reason.evidence for s in advice.settings if s.name == "NCCL_IB_HCA"]
    evidence += [note.evidence for note in advice.notes if note.topic == "NCCL_IB_HCA"]
    efa = any(value.startswith("vpc.amazonaws.com/efa: ") for value in resources)
    values = {setting.name: setting.value for setting in advice.settings}
    planned = {
        "network": values.get("NCCL_NET", "AWS Libfabric" if efa else "IB"),
        "evidence": next(filter(None, evidence), ""),
    }
    if level := values.get("NCCL_NET_GDR_LEVEL"):  # set where the fabric is known to use it (Slingshot, gIB)
        planned["gdrdma"] = f"NCCL_NET_GDR_LEVEL={level}"
    elif not efa and (reason := explain_gdrdma(snapshots, values.get("NCCL_IB_HCA", ""))):
        planned["gdrdma"] = reason
    return planned


def explain_gdrdma(snapshots: Sequence[Snapshot], hca_list: str = "") -> str:
    """Return why every GPU of these hosts should use GPUDirect RDMA; empty if one should not, or if this is unknown.

    `hca_list` is NCCL_IB_HCA. A GPU whose nearest NICs are not in it uses a NIC that is farther away.
    """
    names = {word.partition(":")[0] for word in hca_list.lstrip("=").split(",")}
    if not is_gdrdma_possible(snapshots) or hca_list.startswith("^"):
        return ""
    sentences = []
    for snapshot in snapshots:
        gpus, node = snapshot.facts(GpuFacts), build(snapshot)
        models = [gpu.name for gpu in gpus.gpus] if gpus else [None]
        able = all(model and not without_gdr(model) for model in models)
        if not able or len(node.nearest_nic) != len(node.gpus) or not node.nearest_nic:
            return ""
        for near in node.nearest_nic:
            is_selected = not hca_list or not names.isdisjoint(near.nics)
            if not (is_selected and near.decidable and near.gdr_by_default and not near.why):
                return ""
        labels = sorted({near.label for near in node.nearest_nic})
        sentences.append(f"{snapshot.hostname}: each GPU is {' or '.join(labels)} from its NIC")
    return "; ".join(sentences[:2]) + (f"; and {len(sentences) - 2} more hosts alike" if len(sentences) > 2 else "")


def estimate_grace(advice: Recommendation, bytes_per_second: float | None, shortest: int = GRACE_SECONDS) -> int:
    """Return the seconds a job may take to save after SIGTERM, at least those of a job on this host."""
    return save_seconds(*checkpoint_to_save(advice), bytes_per_second, shortest)


def describe_grace(advice: Recommendation, who: str, seconds: int, least: int, bytes_per_second: float | None) -> str:
    """Describe how long a checkpoint may take at the assumed storage rate; empty if the user gave the rate."""
    if seconds == least or bytes_per_second is not None:
        return ""
    size, storage = units.size(checkpoint_to_save(advice)[0]), rate(STORAGE_BYTES_PER_SECOND)
    return texts("time_to_save", size=size, who=who, seconds=seconds, rate=storage)
