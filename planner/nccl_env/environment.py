"""The NCCL environment: one function per variable, each a setting with its reason, a note, or nothing.

"Set nothing" is the usual right answer, and is said as such. Only variables that NCCL's documentation files under
"System configuration" are recommended; those under "Debugging" never are. docs/nccl-env.md lists the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectives.nccl_log.transport import Evidence
from planner.advice import Note, PodNeed, Setting
from planner.kubernetes.pod_needs import pod_needs
from planner.nccl_env import gpus as gpus
from planner.nccl_env import interfaces as interfaces
from planner.nccl_env import platform as platform
from planner.nccl_env import rdma as rdma
from planner.nccl_env import roce as roce
from planner.nccl_env import torch_env as torch_env
from planner.nccl_env.platforms import settings_as_published
from planner.nccl_env.situation import Situation, situation
from probes.api import Snapshot
from topology.graph import ClusterTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAdvice:
    """What to set, what was left alone on purpose, and what the pod needs besides."""

    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]
    needs: tuple[PodNeed, ...]
    backend: str = "nccl"  # "gloo" where there is no GPU, "rccl" where the GPUs are AMD's: not judged


RULES: tuple[Callable[[Situation], Setting | Note | None], ...] = (
    gpus.unread,
    platform.amd,
    platform.vendor_script,
    platform.unknown_platform,
    interfaces.socket_ifname,
    interfaces.gloo_socket_ifname,
    rdma.ib_hca,
    rdma.silent_ports,
    roce.ib_gid_index,
    roce.ib_addr_family,
    roce.ib_roce_version,
    roce.ib_traffic_class,
    roce.ib_service_level,
    rdma.cross_nic,
    rdma.net_plugin,
    platform.slingshot_protocol,
    platform.slingshot_tuning,
    platform.collnet,
    gpus.topo_file,
    gpus.p2p_level,
    gpus.pcie_pairs,
    gpus.nvls,
    gpus.mnnvl,
    gpus.gdr_c2c,
    gpus.gdrdma,
    platform.gdr_prerequisites,
    torch_env.allocator,
    torch_env.watchdog,
    torch_env.omp_threads,
    torch_env.cpu_binding,
)
"""In the order of the answer."""

_KEPT = ("NCCL_MNNVL_ENABLE", "NCCL_NET_GDR_LEVEL", "NCCL_NVLS_ENABLE")  # notes of needs, not of variables to set


def settings(
    snapshots: Sequence[Snapshot],
    cluster: ClusterTopology,
    *,
    nccl_version: tuple[int, ...] | None = None,
    multi_node: bool | None = None,
    evidence: Evidence | None = None,
    ranks_per_node: int | None = None,
) -> EnvAdvice:
    """The environment for a job on this cluster.

    `multi_node` None with one snapshot means that the job may come to span nodes: the network is then advised on too.
    `ranks_per_node` None: one per GPU, or two without any. `evidence` of an earlier run supplies the NCCL version and
    tells where NCCL fell back to TCP.
    """
    case = situation(
        snapshots,
        cluster,
        nccl_version=nccl_version,
        multi_node=multi_node,
        evidence=evidence,
        ranks_per_node=ranks_per_node,
    )
    answers = [answer for rule in RULES if (answer := rule(case)) is not None]
    chosen = tuple(answer for answer in answers if isinstance(answer, Setting))
    notes = tuple(answer for answer in answers if isinstance(answer, Note))
    if not case.one_node and case.backend == "nccl":
        chosen, notes = _with_published(case, chosen, notes)
    if platform.leave_to_the_vendor(case):
        chosen, notes = _without_nccl(case, chosen, notes)
    unknown = any(note.text.startswith("Unknown") or note.topic == "platform" for note in notes)
    if case.backend == "nccl" and not unknown and not any(each.name.startswith("NCCL_") for each in chosen):
        text = "Set no NCCL variable: NCCL finds what this machine offers by itself."
        notes = (Note(topic="NCCL", text=text), *notes)
    return EnvAdvice(settings=chosen, notes=notes, needs=pod_needs(case), backend=case.backend)


_Answers = tuple[tuple[Setting, ...], tuple[Note, ...]]


def _with_published(case: Situation, chosen: tuple[Setting, ...], notes: tuple[Note, ...]) -> _Answers:
    """What the platform publishes beside what the rules chose; a note about such a variable gives way."""
    named = {one.name for one in chosen}
    added = tuple(each for each in settings_as_published(case) if each.name not in named)
    published = {each.name for each in added}
    return (*chosen, *added), tuple(note for note in notes if note.topic not in published)


def _without_nccl(case: Situation, chosen: tuple[Setting, ...], notes: tuple[Note, ...]) -> _Answers:
    """What is left where the vendor's own script or plugin sets NCCL's variables."""
    if platform.vendor_script(case) is not None:
        notes = tuple(note for note in notes if not note.topic.startswith("NCCL_") or note.topic in _KEPT)
    return tuple(each for each in chosen if not each.name.startswith("NCCL_")), notes
