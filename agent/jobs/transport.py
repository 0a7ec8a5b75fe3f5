"""Which transport a job's NCCL is to take between hosts: plan.json's `transport`, held against NCCL's own log.

Only what the hosts were seen to have is promised; what was not seen is left out, and the job then expects nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.checks.coverage import gdrdma_possible
from hardware.gpus import without_gdr
from planner.advice import Recommendation
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.build import build


def transport(advice: Recommendation, found: Sequence[Snapshot] = ()) -> dict[str, str]:
    """The network that NCCL is to take between hosts, and whether by GPUDirect RDMA; empty: unknown.

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
