"""What a job's pod needs that is no environment variable: shared memory, locked memory, devices, networks.

Specification: NCCL docs/userguide/source/troubleshooting.rst (shared memory, memlock); Kubernetes extended resources;
Multus annotation k8s.v1.cni.cncf.io/networks; AWS EKS user guide, EFA.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.advice import PodNeed, Reason
from planner.nccl_env.hcas import choose_ports, is_virtual_function
from planner.nccl_env.situation import NodeView, Situation

_TROUBLESHOOTING = "NCCL docs/userguide/source/troubleshooting.rst"

# NCCL's troubleshooting page starts containers with --shm-size=1g; DataLoader workers hand their batches over in the
# same file system, one set per rank. An emptyDir in memory costs only what is written to it.
_SHM_BYTES_PER_RANK = 1024**3

# AWS EKS user guide, "Run machine learning training with EFA": the example pods ask for 5120Mi of 2 MiB pages.
_EFA_HUGEPAGES = "hugepages-2Mi: 5120Mi"


def pod_needs(case: Situation) -> tuple[PodNeed, ...]:
    """Everything a pod of this job must ask for; one entry per need, from the node that needs most."""
    if not case.nodes:
        return ()
    found: dict[tuple[str, str], PodNeed] = {}
    for need in _needs(case):
        found.setdefault((need.name, need.value), need)
    return tuple(found.values())


def _needs(case: Situation) -> Iterator[PodNeed]:
    largest = max(case.nodes, key=lambda node: node.gpu_count())
    yield _shm(largest, case.ranks_on(largest))
    if case.gpus:
        yield PodNeed(
            name="resource",
            value=f"nvidia.com/gpu: {largest.gpu_count()}",
            reason=Reason(
                rule="One pod per node with all its GPUs keeps NVLink and shared memory usable: pods do not share them",
                evidence=f"{largest.hostname}: {largest.gpu_count()} GPUs",
                source="NCCL src/transport/{p2p,shm}.cc: ranks of different hosts or containers use the network",
            ),
        )
    if case.one_node:
        return
    if case.rdma_ports or case.efa or case.cxi or any(map(_has_hcas, case.nodes)):
        yield from _locked_memory(case)
    if case.efa:
        yield from _efa(case)
    for node in case.nodes:
        yield from _roce_in_pod(node)


def _has_hcas(node: NodeView) -> bool:
    """Whether a machine that nobody probed, of the catalogue or of a matrix, is known to have RDMA devices."""
    nics = node.topology.nics if node.topology and not node.snapshot else ()
    return any(nic.kind in ("hca", "efa") for nic in nics)


def _shm(node: NodeView, ranks: int) -> PodNeed:
    limits = node.limits()
    have = limits.shm_size_bytes if limits and not limits.of_agent else None
    evidence = f"{node.hostname}: {ranks} ranks"
    if have is not None and limits is not None:
        evidence += f"; /dev/shm of {limits.whose}: {have / 2**20:.0f} MiB"
    users = "NCCL and DataLoader workers pass" if node.gpu_count() else "DataLoader workers pass"
    rule = f"{users} data through /dev/shm, which container engines limit to 64 MiB"
    return PodNeed(
        name="shm_bytes",
        value=str(ranks * _SHM_BYTES_PER_RANK),
        reason=Reason(rule=rule, evidence=evidence, source=f"{_TROUBLESHOOTING} (--shm-size=1g), here per rank"),
    )


def _locked_memory(case: Situation) -> Iterator[PodNeed]:
    rule = (
        "RDMA pins the memory it registers: under a small limit ibv_reg_mr fails with 'Cannot allocate memory'. "
        "The limit of a pod comes from the container engine (default_ulimits memlock=-1:-1), not from its manifest"
    )
    yield PodNeed(
        name="memlock",
        value="unlimited",
        reason=Reason(rule=rule, evidence=_memlock_evidence(case), source=_TROUBLESHOOTING),
    )
    lifts = "IPC_LOCK lifts the memlock limit for processes that hold it: root in the container, not other users"
    yield PodNeed(
        name="capability",
        value="IPC_LOCK",
        reason=Reason(rule=lifts, evidence=_memlock_evidence(case), source="capabilities(7)"),
    )


def _memlock_evidence(case: Situation) -> str:
    for node in case.nodes:
        limits = node.limits()
        if limits is None or not limits.memlock_known:
            continue
        soft = limits.memlock_soft_bytes
        text = "unlimited" if soft is None else f"{soft} bytes"
        return f"{node.hostname}: memlock of {limits.whose} is {text}; the job's pod may get another"
    return "memlock was not read"


def _efa(case: Situation) -> Iterator[PodNeed]:
    node = max(case.nodes, key=lambda each: each.efa_count())
    count = node.efa_count()
    source = "AWS EKS user guide: machine learning training with EFA"
    yield PodNeed(
        name="resource",
        value=f"vpc.amazonaws.com/efa: {count}",
        reason=Reason(
            rule="EFA devices reach a pod only as this resource; fewer than the node has give away their bandwidth",
            evidence=f"{node.hostname}: {count} EFA devices",
            source=source,
        ),
    )
    yield PodNeed(
        name="resource",
        value=_EFA_HUGEPAGES,
        reason=Reason(
            rule="libfabric's EFA provider takes its bounce buffers from 2 MiB huge pages",
            evidence=_hugepages(node),
            source=source,
        ),
    )


def _hugepages(node: NodeView) -> str:
    limits = node.limits()
    pages = limits.hugepages if limits else None
    if not pages:
        return f"{node.hostname}: huge pages were not read"
    return f"{node.hostname}: " + ", ".join(f"{size}: {number}" for size, number in pages.items())


def _roce_in_pod(node: NodeView) -> Iterator[PodNeed]:
    """The secondary network and the RDMA resource that belongs to it."""
    facts = node.interfaces()
    choice = choose_ports(node)
    for interface in facts.interfaces if facts else ():
        if interface.role == "secondary" and interface.multus_network:
            yield PodNeed(
                name="network",
                value=interface.multus_network,
                reason=Reason(
                    rule="The job's pods must be on the secondary network that this one was probed on",
                    evidence=f"{node.hostname}: {interface.name} is on {interface.multus_network}",
                    source="Multus annotation k8s.v1.cni.cncf.io/networks",
                ),
            )
    if choice.secondary:
        devices = ", ".join(f"{device} ({interface})" for device, interface in choice.secondary.items())
        functions = sum(is_virtual_function(view) for view in choice.keep)
        rule = (
            "The RDMA device reaches a pod only as the resource of its device plugin; its name is the cluster's own: "
            "look it up in the node's allocatable (rdma/..., openshift.io/..., nvidia.com/...)"
        )
        if functions:
            rule += (
                "; a virtual function is handed out once, so that the pod needs as many as it has networks on them, "
                "each of the resource that its network names"
            )
        yield PodNeed(
            name="resource",
            value=f"rdma/*: {functions or 1}",
            reason=Reason(
                rule=rule,
                evidence=f"{node.hostname}: {devices}",
                source="Kubernetes device plugins: node.status.allocatable",
            ),
        )
