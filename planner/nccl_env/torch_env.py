"""Variables of PyTorch and of the CPU side: allocator, watchdog, OpenMP threads and binding.

Specification: PyTorch docs notes/cuda (allocator), ProcessGroupNCCL.hpp (TORCH_NCCL_*), torch/distributed/run.py.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.advice import Note, Reason, Setting
from planner.nccl_env.platforms import published
from planner.nccl_env.situation import NodeView, Situation


def allocator(case: Situation) -> Setting | None:
    """PYTORCH_CUDA_ALLOC_CONF: segments that grow, so that unequal sequence lengths do not fragment the memory."""
    if not case.gpus:
        return None
    rule = (
        "Fine-tuning batches differ in length, so fixed segments fragment and reserve more than is used; segments that "
        "grow keep the peak near what the forecast counts"
    )
    evidence = f"{case.gpus} CUDA GPUs; newer PyTorch also reads it as PYTORCH_ALLOC_CONF"
    source = "PyTorch docs, notes/cuda: optimizing memory usage, expandable_segments"
    reason = Reason(rule=rule, evidence=evidence, source=source)
    return Setting(name="PYTORCH_CUDA_ALLOC_CONF", value="expandable_segments:True", reason=reason)


def watchdog(case: Situation) -> Note | None:
    """TORCH_NCCL_*: the defaults already abort a hung collective."""
    if case.backend != "nccl":
        return None
    text = (
        "Set nothing: TORCH_NCCL_ASYNC_ERROR_HANDLING is on by default and ends a job whose collective hangs; "
        "TORCH_NCCL_BLOCKING_WAIT=1 would turn that off and stall the overlap. To find who hung, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 writes the flight record."
    )
    return Note(topic="TORCH_NCCL_ASYNC_ERROR_HANDLING", text=text)


def omp_threads(case: Situation) -> Setting | Note | None:
    """OMP_NUM_THREADS: torchrun sets 1 where several ranks share a node, and nothing for a rank that is alone."""
    topic = "OMP_NUM_THREADS"
    if case.amd:
        return None
    shares = [share for node in case.nodes if (share := _cores_per_rank(case, node)) is not None]
    if not shares:
        return None
    share = min(shares, key=lambda share: share.threads)
    source = "PyTorch torch/distributed/run.py: OMP_NUM_THREADS is 1 for each of several ranks of a node, unless set"
    if share.ranks == 1:
        if case.backend == "gloo" or share.limited:
            rule = (
                "torchrun sets nothing for a rank that is alone on its node, which then starts a thread for each core "
                "that it sees, whatever its container may use: name the cores that it has"
            )
            reason = Reason(rule=rule, evidence=share.evidence, source=source)
            return Setting(name=topic, value=str(share.threads), reason=reason)
        text = (
            "Unset: a rank that is alone on its node starts a thread per core; where a pod has a CPU limit, set that."
        )
        return Note(topic=topic, text=text, evidence=f"{share.hostname}: {share.evidence}")
    if case.backend == "gloo":
        if share.threads <= 1:
            return Note(topic=topic, text="Set nothing: torchrun's 1 thread per rank is what the cores allow.")
        rule = (
            "The ranks compute on the CPU, and torchrun would give each a single thread: share the cores among "
            f"{share.ranks} ranks"
        )
        reason = Reason(rule=rule, evidence=share.evidence, source=source)
        return Setting(name=topic, value=str(share.threads), reason=reason)
    text = (
        "Set nothing: torchrun gives each rank 1 thread, enough where the GPU computes. With parameters or optimizer "
        f"on the CPU (offload) set it to {share.threads}, the cores of one rank."
    )
    return Note(topic=topic, text=text, evidence=f"{share.hostname}: {share.evidence}")


class _Share(NamedTuple):
    """What one rank has of its node's cores."""

    hostname: str
    threads: int
    ranks: int
    limited: bool  # by the cgroup, below the cores that it sees
    evidence: str


def _cores_per_rank(case: Situation, node: NodeView) -> _Share | None:
    info, limits = node.hostinfo(), node.limits()
    cores = info.cores or info.threads if info else None
    if cores is None:
        return None
    quota = limits.cgroup_cpus if limits and not limits.of_agent else None  # the agent's own CPU limit is no job's
    usable = min(cores, int(quota)) if quota else cores
    ranks = case.ranks_on(node)
    limited = bool(quota and quota < cores)
    by_cgroup = f", {quota:g} by cgroup" if limited else ""
    evidence = f"{cores} cores{by_cgroup}, {ranks} rank{'s' if ranks > 1 else ''}"
    return _Share(node.hostname, max(usable // ranks, 1), ranks, limited, evidence)


def cpu_binding(case: Situation) -> Note | None:
    """Binding ranks to the NUMA node of their GPU."""
    if case.backend != "nccl":
        return None
    for node in case.nodes:
        facts = node.gpu()
        nodes = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None} if facts else set()
        if len(nodes) > 1:
            text = (
                "NCCL binds its own threads to the CPUs near each GPU"
                + ("" if published(case, "NCCL_IGNORE_CPU_AFFINITY") else " (NCCL_IGNORE_CPU_AFFINITY stays unset)")
                + ". The ranks are not bound: torchrun --numa-binding=node keeps their memory near their GPU too."
            )
            evidence = f"{node.hostname}: GPUs on NUMA nodes {', '.join(str(each) for each in sorted(nodes))}"
            return Note(topic="CPU binding", text=text, evidence=evidence)
    return None
