"""Which transport a job's NCCL is to take between hosts: plan.json's `transport`, held against NCCL's own log.

Only what the hosts were seen to have is promised; what was not seen is left out, and the job then expects nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.measured import gdrdma_possible
from planner.advice import Recommendation
from probes.api import Snapshot
from probes.gpu import GpuFacts
from topology.build import build

# GPUDirect RDMA is for data center and workstation GPUs (CUDA documentation, GPUDirect RDMA)
WITHOUT_GPUDIRECT = ("GeForce", "TITAN")


def transport(advice: Recommendation, found: Sequence[Snapshot] = ()) -> dict[str, str]:
    """The network that NCCL is to take between hosts, and whether by GPUDirect RDMA; empty: unknown.

    Locked memory is needed for RDMA alone, the resource of EFA's name for EFA alone (planner/pod_needs.py).
    """
    resources = [need.value for need in advice.needs if need.name == "resource"]
    pinned = any(need.name == "memlock" for need in advice.needs)
    if advice.backend != "nccl" or not pinned:
        return {}
    seen = [s.reason.evidence for s in advice.settings if s.name == "NCCL_IB_HCA"]
    seen += [note.evidence for note in advice.notes if note.topic == "NCCL_IB_HCA"]
    efa = any(value.startswith("vpc.amazonaws.com/efa: ") for value in resources)
    planned = {"network": "AWS Libfabric" if efa else "IB", "evidence": next(filter(None, seen), "")}
    if not efa and (why := gdrdma(found)):
        planned["gdrdma"] = why
    return planned


def gdrdma(found: Sequence[Snapshot]) -> str:
    """Why every GPU of these hosts is to use GPUDirect RDMA; empty where one does not, or where it is not known."""
    if not gdrdma_possible(found):
        return ""
    said = []
    for snapshot in found:
        gpus, node = snapshot.facts(GpuFacts), build(snapshot)
        names = [gpu.name for gpu in gpus.gpus] if gpus else [None]
        able = all(name and not any(word in name for word in WITHOUT_GPUDIRECT) for name in names)
        if not able or len(node.nearest_nic) != len(node.gpus) or not node.nearest_nic:
            return ""
        for near in node.nearest_nic:
            if not (near.decidable and near.gdr_by_default and not near.why):
                return ""
        labels = sorted({near.label for near in node.nearest_nic})
        said.append(f"{snapshot.hostname}: each GPU is {' or '.join(labels)} from its NIC")
    return "; ".join(said[:2]) + (f"; and {len(said) - 2} more hosts alike" if len(said) > 2 else "")
