"""The NCCL environment: one function per variable, each a setting with its reason, a note, or nothing.

"Set nothing" is the usual right answer, and is said as such. Only variables that NCCL's documentation files under
"System configuration" are recommended; those under "Debugging" never are. docs/nccl-env.md lists the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectives.transport import Evidence
from planner import nccl_env_gpus as gpus
from planner import nccl_env_interfaces as interfaces
from planner import nccl_env_rdma as rdma
from planner import nccl_env_roce as roce
from planner import nccl_env_torch as torch_env
from planner.advice import Note, PodNeed, Setting
from planner.nccl_env_situation import Situation, situation
from planner.pod_needs import pod_needs
from probes.api import Snapshot
from topology.graph import ClusterTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAdvice:
    """What to set, what was left alone on purpose, and what the pod needs besides."""

    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]
    needs: tuple[PodNeed, ...]
    backend: str = "nccl"  # "gloo" where there is no GPU


RULES: tuple[Callable[[Situation], Setting | Note | None], ...] = (
    gpus.unread,
    interfaces.socket_ifname,
    interfaces.gloo_socket_ifname,
    rdma.ib_hca,
    rdma.silent_ports,
    roce.ib_gid_index,
    roce.ib_addr_family,
    roce.ib_roce_version,
    roce.ib_traffic_class,
    rdma.cross_nic,
    rdma.net_plugin,
    gpus.topo_file,
    gpus.p2p_level,
    gpus.pcie_pairs,
    gpus.nvls,
    gpus.mnnvl,
    gpus.gdr_c2c,
    gpus.gdrdma,
    torch_env.allocator,
    torch_env.watchdog,
    torch_env.omp_threads,
    torch_env.cpu_binding,
)
"""In the order of the answer."""


def settings(
    snapshots: Sequence[Snapshot],
    cluster: ClusterTopology,
    *,
    nccl_version: tuple[int, ...] | None = None,
    multi_node: bool | None = None,
    evidence: Evidence | None = None,
) -> EnvAdvice:
    """The environment for a job on this cluster.

    `multi_node` None with one snapshot means that the job may come to span nodes: the network is then advised on too.
    `evidence` of an earlier run supplies the NCCL version and tells where NCCL fell back to TCP.
    """
    case = situation(snapshots, cluster, nccl_version=nccl_version, multi_node=multi_node, evidence=evidence)
    answers = [answer for rule in RULES if (answer := rule(case)) is not None]
    chosen = tuple(answer for answer in answers if isinstance(answer, Setting))
    notes = tuple(answer for answer in answers if isinstance(answer, Note))
    unknown = any(note.text.startswith("Unknown") for note in notes)
    if case.backend == "nccl" and not unknown and not any(each.name.startswith("NCCL_") for each in chosen):
        text = "Set no NCCL variable: NCCL finds what this machine offers by itself."
        notes = (Note(topic="NCCL", text=text), *notes)
    return EnvAdvice(settings=chosen, notes=notes, needs=pod_needs(case), backend=case.backend)
