"""The plan of the fine-tune job: settings, layout, environment, network, and the time to write a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.advice.advise import EMBEDDED_MODEL
from agent.advice.job_settings import OURS, PLANNED, RANDOM, TRL, read_settings
from agent.advice.request import Request
from agent.base import units
from agent.base.options import RequestError
from agent.base.output import to_document
from agent.checks.host_checks import is_gdrdma_possible
from contracts import plain
from contracts.job_config import DEFAULT_CONFIG, JobConfig, JobPlan, RunForecast
from contracts.tables import read_texts
from contracts.trl import make_trl_settings
from hardware.gpus import without_gdr
from hardware.units import rate
from planner.advice import RankedLayout, Recommendation
from planner.forecast.memory import STORAGE_BYTES_PER_SECOND, save_seconds
from planner.forecast.models import hub_id
from planner.recommend import checkpoint_to_save
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.build import build

texts = read_texts(__file__, "texts.toml")
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
        request = replace(request, config=DEFAULT_CONFIG)
    settings = read_settings(request, TRL if by_trl else OURS)
    if refusal := explain_untrainable(advice, settings.explicit):
        raise RequestError(refusal)
    planned = {} if embedded else fill_unset(advice, settings.explicit)
    job_config = replace(settings.config, **planned)
    of_trl = None
    if by_trl:
        translated = _translate_for_trl(job_config, settings.explicit, planned)
        of_trl = make_trl_settings({**translated, **settings.raw}, settings.explicit)
        job_config = replace(job_config, layout={})  # the layout of the plan is complete: without a GPU it is DDP
    return JobPlan(
        config=job_config, trl=of_trl, layout=ranked.layout, notes=tuple(settings.notes),
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
    """Translate planned values for TRL's parser; PEFT chooses the targets. RequestError if TRL cannot load them."""
    generated = {"model_name_or_path": RANDOM, "dataset_name": "synthetic:"}
    values = {name: getattr(config, name) for name in generated if name in {**explicit, **planned}}
    wrong = [f"{name}={value}" for name, value in values.items() if value.startswith(generated[name])]
    if wrong:
        reason = "only the built-in trainer generates it; TRL's trainer reads files and hub ids"
        raise RequestError(f"{' and '.join(wrong)}: {reason}")
    return {name: value for name, value in planned.items() if not isinstance(value, tuple)}


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
