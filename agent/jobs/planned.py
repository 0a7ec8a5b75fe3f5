"""The plan of a job: what the fine-tune is told of settings, layout, environment and network, and how long it may save.

The job reads it from plan.json (docs/reference/finetune-job.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agent.advice.job_settings import EMBEDDED_MODEL, left_open, settings, untrainable
from agent.base import units
from agent.base.documents import document
from agent.base.inputs import RequestError
from agent.checks.host_checks import gdrdma_possible
from contracts import codec
from contracts.job_config import DEFAULT_CONFIG
from contracts.job_plan import JobPlan, RunForecast
from hardware.gpus import without_gdr
from hardware.units import rate
from planner.advice import Recommendation
from planner.forecast.memory import STORAGE_BYTES_PER_SECOND, checkpoint_bytes, save_seconds
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.build import build

GRACE_SECONDS = 20  # for a checkpoint after SIGTERM, at least


def job_plan(
    advice: Recommendation, config: Path | None = None, overrides: Sequence[str] = (), found: Sequence[Snapshot] = ()
) -> JobPlan:
    """The document of a job with the chosen layout: the settings of the file, and over them the plan's of what it
    leaves open; `found` are the hosts that it is for. RequestError where there is nothing to train, or nowhere.
    """
    if advice.chosen is None:
        raise RequestError("there is no layout to launch: " + "; ".join(r.reason for r in advice.rejected[:3]))
    embedded = advice.model is None or advice.model.name == EMBEDDED_MODEL
    job_config, explicit, notes = settings(DEFAULT_CONFIG if embedded and config is None else config, overrides)
    if why := untrainable(advice, explicit):
        raise RequestError(why)
    if not embedded:
        job_config = replace(job_config, **left_open(advice, explicit))
    return JobPlan(
        config=job_config, layout=advice.chosen.layout, notes=tuple(notes),
        forecast=run_forecast(advice),
        environment={setting.name: setting.value for setting in advice.settings}, transport=transport(advice, found),
    )  # fmt: skip


def run_forecast(advice: Recommendation) -> RunForecast:
    """The forecast of the chosen layout as a plan holds it; an empty one without a layout."""
    return codec.pick(document(advice.chosen.forecast), RunForecast) if advice.chosen else RunForecast()


def transport(advice: Recommendation, found: Sequence[Snapshot] = ()) -> dict[str, str]:
    """The network that NCCL is to take between hosts, and whether by GPUDirect RDMA; empty: unknown.

    It is plan.json's `transport`, held against NCCL's own log. Only what the hosts were seen to have is promised.
    Locked memory is needed for RDMA alone, the resource of EFA's name for EFA alone (planner/nccl_env/environment.py).
    """
    resources = [need.value for need in advice.needs if need.name == "resource"]
    pinned = any(need.name == "memlock" for need in advice.needs)
    if advice.backend != "nccl" or not pinned:
        return {}
    seen = [s.reason.evidence for s in advice.settings if s.name == "NCCL_IB_HCA"]
    seen += [note.evidence for note in advice.notes if note.topic == "NCCL_IB_HCA"]
    efa = any(value.startswith("vpc.amazonaws.com/efa: ") for value in resources)
    planned = {"network": "AWS Libfabric" if efa else "IB", "evidence": next(filter(None, seen), "")}
    chosen = next((s.value for s in advice.settings if s.name == "NCCL_IB_HCA"), "")
    if not efa and (why := gdrdma(found, chosen)):
        planned["gdrdma"] = why
    return planned


def gdrdma(found: Sequence[Snapshot], chosen: str = "") -> str:
    """Why every GPU of these hosts is to use GPUDirect RDMA; empty where one does not, or where it is not known.

    `chosen` is NCCL_IB_HCA: a GPU whose nearest NICs it leaves out takes one that is farther.
    """
    names = {word.partition(":")[0] for word in chosen.lstrip("=").split(",")}
    if not gdrdma_possible(found) or chosen.startswith("^"):
        return ""
    sentences = []
    for snapshot in found:
        gpus, node = snapshot.facts(GpuFacts), build(snapshot)
        models = [gpu.name for gpu in gpus.gpus] if gpus else [None]
        able = all(model and not without_gdr(model) for model in models)
        if not able or len(node.nearest_nic) != len(node.gpus) or not node.nearest_nic:
            return ""
        for near in node.nearest_nic:
            taken = not chosen or not names.isdisjoint(near.nics)
            if not (taken and near.decidable and near.gdr_by_default and not near.why):
                return ""
        labels = sorted({near.label for near in node.nearest_nic})
        sentences.append(f"{snapshot.hostname}: each GPU is {' or '.join(labels)} from its NIC")
    return "; ".join(sentences[:2]) + (f"; and {len(sentences) - 2} more hosts alike" if len(sentences) > 2 else "")


def to_save(advice: Recommendation) -> tuple[float, float]:
    """Bytes of a checkpoint, and seconds of the step that may have to end first; of nothing known, 0."""
    if advice.chosen is None or advice.model is None or advice.train is None:
        return 0.0, 0.0
    in_fp32 = advice.backend != "nccl" or advice.chosen.layout.precision == "fp32"
    due = advice.chosen.forecast.step_seconds.high
    return checkpoint_bytes(advice.model, advice.train, in_fp32=in_fp32), due


def grace(advice: Recommendation, bytes_per_second: float | None) -> int:
    """Seconds that a job on this host may take to save after SIGTERM."""
    return save_seconds(*to_save(advice), bytes_per_second, least=GRACE_SECONDS)


def grace_notice(advice: Recommendation, who: str, seconds: int, least: int, bytes_per_second: float | None) -> str:
    """How long they may take to save, where that goes by a rate of storage that nobody has told; else nothing."""
    if seconds == least or bytes_per_second is not None:
        return ""
    return (
        f"a checkpoint is {units.size(to_save(advice)[0])}: {who} have {seconds} s for it after SIGTERM, at the "
        f"{rate(STORAGE_BYTES_PER_SECOND)} of a common volume: --storage-rate says what yours takes"
    )
