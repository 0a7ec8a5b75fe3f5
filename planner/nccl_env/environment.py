"""The recommended environment of a job and other needs of its pods; formats settings for other tools.

Specification: PyTorch docs notes/cuda (allocator), ProcessGroupNCCL.hpp (TORCH_NCCL_*), torch/distributed/run.py; NCCL
docs/userguide/source/troubleshooting.rst (shared memory, memlock); Kubernetes EnvVar and extended resources; Multus
annotation k8s.v1.cni.cncf.io/networks; AWS EKS user guide, EFA; docker run --env-file (one NAME=value per line, no
quoting); POSIX shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.nccl_env import gpus as gpus
from planner.nccl_env import interfaces as interfaces
from planner.nccl_env import platforms as platforms
from planner.nccl_env import rdma as rdma
from planner.nccl_env import roce as roce
from planner.nccl_env.hcas import choose_ports, is_virtual_function
from planner.nccl_env.names import RESERVED
from planner.nccl_env.nodes import NodeView
from planner.nccl_env.platforms import published, settings_as_published
from planner.nccl_env.situation import Note, PodNeed, Setting, Situation, need, note, setting
from probes.limits.probe import LimitsFacts


class RenderError(ValueError):
    """The format cannot represent a setting; the message names the setting."""


def render_env(settings: Sequence[Setting]) -> str:
    """Format an env file: unquoted values, as `docker run --env-file` reads them, and reasons as comments."""
    return _render(settings, lambda each: f"{each.name}={each.value}")


def render_shell(settings: Sequence[Setting]) -> str:
    """Format export commands for a POSIX shell."""
    return _render(settings, lambda each: f"export {each.name}={shlex.quote(each.value)}")


def _render(settings: Sequence[Setting], line: Callable[[Setting], str]) -> str:
    lines = [text for each in _check_values(settings) for text in (f"# {each.reason.rule}", line(each))]
    return "\n".join(text.replace("\n", " ") for text in lines or ("# nothing to set",)) + "\n"


def render_k8s(settings: Sequence[Setting]) -> str:
    """Format the `env:` list of a container as YAML. Every value is a string, even if it looks like a number."""
    import yaml

    rows = [{"name": each.name, "value": each.value} for each in _check_values(settings)]
    return yaml.safe_dump(rows, sort_keys=False, allow_unicode=True, width=10_000)


def _check_values(settings: Sequence[Setting]) -> Sequence[Setting]:
    for each in settings:
        if each.name in RESERVED:
            raise RenderError(f"{each.name}: reserved for the launcher, must not be set")
        if not each.name.isidentifier() or not each.name.isascii():
            raise RenderError(f"{each.name!r}: not a name of an environment variable")
        if any(mark in each.value for mark in "\n\r\0"):
            raise RenderError(f"{each.name}: the value {each.value!r} has a line break, which no env file can carry")
    return settings


def allocator(case: Situation) -> Setting | None:
    """PYTORCH_CUDA_ALLOC_CONF: expandable segments, so that varying sequence lengths do not fragment the memory."""
    if not case.gpus:
        return None
    evidence = f"{case.gpus} CUDA GPUs; newer PyTorch also reads it as PYTORCH_ALLOC_CONF"
    return setting("allocator", "expandable_segments:True", evidence)


def watchdog(case: Situation) -> Note | None:
    """TORCH_NCCL_*: by default, a hung collective is already aborted."""
    if case.backend != "nccl":
        return None
    return note("watchdog")


def omp_threads(case: Situation) -> Setting | Note | None:
    """OMP_NUM_THREADS: torchrun sets it to 1 if several ranks share a node, and does not set it for a single rank."""
    if case.amd:
        return None
    shares = [share for node in case.nodes if (share := _count_cores_per_rank(case, node)) is not None]
    if not shares:
        return None
    share = min(shares, key=lambda share: share.threads)
    if share.ranks == 1:
        if case.backend == "gloo" or share.limited:
            return setting("omp.limited", str(share.threads), share.evidence)
        return note("omp.alone", f"{share.hostname}: {share.evidence}")
    if case.backend == "gloo":
        if share.threads <= 1:
            return note("omp.one_core")
        return setting("omp.cpu", str(share.threads), share.evidence, ranks=share.ranks)
    return note("omp.gpu", f"{share.hostname}: {share.evidence}", threads=share.threads)


class _CoreShare(NamedTuple):
    """CPU cores of a node that one rank can use."""

    hostname: str
    threads: int
    ranks: int
    limited: bool  # the cgroup allows fewer cores than are visible
    evidence: str


def _count_cores_per_rank(case: Situation, node: NodeView) -> _CoreShare | None:
    info, limits = node.hostinfo(), _get_limits(node)
    cores = info.cores or info.threads if info else None
    if cores is None:
        return None
    quota = limits.cgroup_cpus if limits and not limits.of_agent else None  # the agent's CPU limit does not limit jobs
    usable = min(cores, int(quota)) if quota else cores
    ranks = case.ranks_on(node)
    limited = bool(quota and quota < cores)
    by_cgroup = f", {quota:g} by cgroup" if limited else ""
    evidence = f"{cores} cores{by_cgroup}, {ranks} rank{'s' if ranks > 1 else ''}"
    return _CoreShare(node.hostname, max(usable // ranks, 1), ranks, limited, evidence)


def cpu_binding(case: Situation) -> Note | None:
    """Recommend to bind ranks to the NUMA node of their GPU."""
    if case.backend != "nccl":
        return None
    for node in case.nodes:
        facts = node.gpu()
        nodes = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None} if facts else set()
        if len(nodes) > 1:
            unset = "" if published(case, "NCCL_IGNORE_CPU_AFFINITY") else " (NCCL_IGNORE_CPU_AFFINITY stays unset)"
            evidence = f"{node.hostname}: GPUs on NUMA nodes {', '.join(str(each) for each in sorted(nodes))}"
            return note("cpu_binding", evidence, unset=unset)
    return None


# NCCL's troubleshooting page starts containers with --shm-size=1g. DataLoader workers pass batches through the same
# file system, one set per rank. A memory-backed emptyDir uses only as much memory as is written to it.
_SHM_BYTES_PER_RANK = 1024**3

# AWS EKS user guide, "Run machine learning training with EFA": the example pods request 5120Mi of 2 MiB pages.
_EFA_HUGEPAGES = "hugepages-2Mi: 5120Mi"


def pod_needs(case: Situation) -> tuple[PodNeed, ...]:
    """Return all needs of a pod of this job; one entry per need, with the largest value of all nodes."""
    if not case.nodes:
        return ()
    found: dict[tuple[str, str], PodNeed] = {}
    for each in _list_needs(case):
        found.setdefault((each.name, each.value), each)
    return tuple(found.values())


def _list_needs(case: Situation) -> Iterator[PodNeed]:
    largest = max(case.nodes, key=lambda node: node.gpu_count())
    yield _need_shm(largest, case.ranks_on(largest))
    if case.gpus:
        yield need(
            "pod.gpus", f"nvidia.com/gpu: {largest.gpu_count()}", f"{largest.hostname}: {largest.gpu_count()} GPUs"
        )
    if case.one_node:
        return
    if joined := gpus.nvlink_between_nodes(case):
        yield need("pod.compute_domain", "resource.nvidia.com/v1beta1", joined)
    if case.rdma_ports or case.efa or case.cxi or any(map(_has_hcas, case.nodes)):
        yield need("pod.memlock", "unlimited", _describe_memlock(case))
        yield need("pod.ipc_lock", "IPC_LOCK", _describe_memlock(case))
    if case.efa:
        yield from _need_efa(case)
    for node in case.nodes:
        yield from _need_roce(node)


def _has_hcas(node: NodeView) -> bool:
    """Whether a node without probes (from the catalogue or a matrix) has RDMA devices."""
    nics = node.topology.nics if node.topology and not node.snapshot else ()
    return any(nic.kind in ("hca", "efa") for nic in nics)


def _get_limits(node: NodeView) -> LimitsFacts | None:
    """Return the limits of the probing process."""
    return node.snapshot.facts(LimitsFacts) if node.snapshot else None


def _need_shm(node: NodeView, ranks: int) -> PodNeed:
    limits = _get_limits(node)
    have = limits.shm_size_bytes if limits and not limits.of_agent else None
    evidence = f"{node.hostname}: {ranks} ranks"
    if have is not None and limits is not None:
        evidence += f"; /dev/shm of {limits.whose}: {have / 2**20:.0f} MiB"
    users = "NCCL and DataLoader workers pass" if node.gpu_count() else "DataLoader workers pass"
    return need("pod.shm", str(ranks * _SHM_BYTES_PER_RANK), evidence, users=users)


def _describe_memlock(case: Situation) -> str:
    for node in case.nodes:
        limits = _get_limits(node)
        if limits is None or not limits.memlock_known:
            continue
        soft = limits.memlock_soft_bytes
        text = "unlimited" if soft is None else f"{soft} bytes"
        return f"{node.hostname}: memlock of {limits.whose} is {text}; the job's pod may get another"
    return "memlock was not read"


def _need_efa(case: Situation) -> Iterator[PodNeed]:
    node = max(case.nodes, key=lambda each: each.efa_count())
    gpus, ranks = node.gpu_count(), case.ranks_on(node)
    part = ranks < gpus  # pods on the other GPUs need theirs
    count = -(-node.efa_count() * ranks // gpus) if part else node.efa_count()
    yield need(
        "pod.efa",
        f"vpc.amazonaws.com/efa: {count}",
        f"{node.hostname}: {node.efa_count()} EFA devices" + (f", for {ranks} of {gpus} GPUs" if part else ""),
    )
    yield need("pod.hugepages", _EFA_HUGEPAGES, _describe_hugepages(node))


def _describe_hugepages(node: NodeView) -> str:
    limits = _get_limits(node)
    pages = limits.hugepages if limits else None
    if not pages:
        return f"{node.hostname}: huge pages were not read"
    return f"{node.hostname}: " + ", ".join(f"{size}: {number}" for size, number in pages.items())


def _need_roce(node: NodeView) -> Iterator[PodNeed]:
    """Return the secondary network and the RDMA resource that belongs to it."""
    facts = node.interfaces()
    choice = choose_ports(node)
    for interface in facts.interfaces if facts else ():
        if interface.role == "secondary" and interface.multus_network:
            yield need(
                "pod.network",
                interface.multus_network,
                f"{node.hostname}: {interface.name} is on {interface.multus_network}",
            )
    if choice.secondary:
        devices = ", ".join(f"{device} ({interface})" for device, interface in choice.secondary.items())
        functions = sum(is_virtual_function(view) for view in choice.chosen)
        more = ["pod.virtual_functions"] if functions else []
        yield need("pod.rdma", f"rdma/*: {functions or 1}", f"{node.hostname}: {devices}", *more)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAdvice:
    """Recommended settings, notes about variables that are not set on purpose, and other needs of the pod."""

    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]
    needs: tuple[PodNeed, ...]
    backend: str = "nccl"  # "gloo" without GPUs, "rccl" with AMD GPUs (not checked)


RULES: tuple[Callable[[Situation], Setting | Note | None], ...] = (
    gpus.unread,
    platforms.amd,
    platforms.vendor_script,
    platforms.unknown_platform,
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
    platforms.slingshot_protocol,
    platforms.slingshot_tuning,
    platforms.collnet,
    gpus.topo_file,
    gpus.p2p_level,
    gpus.pcie_pairs,
    gpus.nvls,
    gpus.mnnvl,
    gpus.gdr_c2c,
    platforms.gdr_prerequisites,
    allocator,
    watchdog,
    omp_threads,
    cpu_binding,
)
"""Rules, in the order of their answers."""

_KEPT = ("NCCL_MNNVL_ENABLE", "NCCL_NET_GDR_LEVEL", "NCCL_NVLS_ENABLE")  # kept: notes about needs


def settings(case: Situation) -> EnvAdvice:
    """Return the recommended environment of a job."""
    answers = [answer for rule in RULES if (answer := rule(case)) is not None]
    chosen = tuple(answer for answer in answers if isinstance(answer, Setting))
    notes = tuple(answer for answer in answers if isinstance(answer, Note))
    if not case.one_node and case.backend == "nccl":
        chosen, notes = _add_published(case, chosen, notes)
    if platforms.has_vendor_script(case):
        chosen, notes = _drop_nccl(case, chosen, notes)
    unknown = any(each.text.startswith("Unknown") or each.topic == "platform" for each in notes)
    if case.backend == "nccl" and not unknown and not any(each.name.startswith("NCCL_") for each in chosen):
        notes = (note("nccl.nothing"), *notes)
    return EnvAdvice(settings=chosen, notes=notes, needs=pod_needs(case), backend=case.backend)


_Answers = tuple[tuple[Setting, ...], tuple[Note, ...]]


def _add_published(case: Situation, chosen: tuple[Setting, ...], notes: tuple[Note, ...]) -> _Answers:
    """Add the platform's published settings to those of the rules; they replace notes about the same variables."""
    named = {one.name for one in chosen}
    added = tuple(each for each in settings_as_published(case) if each.name not in named)
    published = {each.name for each in added}
    return (*chosen, *added), tuple(each for each in notes if each.topic not in published)


def _drop_nccl(case: Situation, chosen: tuple[Setting, ...], notes: tuple[Note, ...]) -> _Answers:
    """Drop NCCL variables, because a script or plugin of the vendor sets them."""
    if platforms.vendor_script(case) is not None:
        notes = tuple(each for each in notes if not each.topic.startswith("NCCL_") or each.topic in _KEPT)
    return tuple(each for each in chosen if not each.name.startswith("NCCL_")), notes
