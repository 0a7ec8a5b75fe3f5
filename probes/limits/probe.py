"""Limits that break RDMA and shared memory, and whose they are.

Specification: getrlimit(2), proc(5), capabilities(7), cgroups(7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probes.api import Finding, Metric, Probe, Sample
from probes.host.protocol import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsFacts:
    """Limits of the process that read them; None is "no limit" only where the field says so."""

    whose: str  # "this process, pid 17, uid 1000, container": the job may get others
    uid: int
    memlock_soft_bytes: int | None  # None with memlock_known is unlimited
    memlock_hard_bytes: int | None
    memlock_known: bool = True
    nofile_soft: int | None = None
    nofile_hard: int | None = None
    nproc_soft: int | None = None
    cap_effective: int | None = None  # CapEff bit mask
    ipc_lock: bool | None = None  # bit 14 of CapEff
    sys_nice: bool | None = None
    shm_size_bytes: int | None = None  # /dev/shm
    shm_free_bytes: int | None = None
    hugepages: dict[str, int] | None = None  # "2048kB" -> number
    cgroup_memory_max_bytes: int | None = None  # None unlimited or unknown
    cgroup_cpus: float | None = None
    container: str | None = None  # "kubernetes", "docker", "podman", None
    seccomp: str | None = None
    overcommit: int | None = None
    of_agent: bool = False  # of the resident agent's own container, whose manifest is not a job's
    rdma_present: bool | None = None  # /sys/class/infiniband has a device: memlock then decides whether NCCL uses it


def read(host: Host) -> LimitsFacts:
    """Ask for every limit of this process."""
    from probes.limits import read as limits_read

    return limits_read.read(host)


def check(facts: LimitsFacts) -> Iterator[Finding]:
    """Limits a training job would stumble over if it got the same ones."""
    from probes.limits import check as limits_check

    return limits_check.check(facts)


def unjudged(facts: LimitsFacts) -> dict[str, str]:
    """What the agent's own container cannot tell: a job's manifest gives its pod another /dev/shm and other rights.

    RLIMIT_MEMLOCK and RLIMIT_NOFILE stay judged: both come from the container engine, the same for every pod.
    """
    if not facts.of_agent:
        return {}
    why = "not judged: this is the agent's own container, and a job's pod gets what its own manifest says"
    return dict.fromkeys(
        ("limits.shm.small", "limits.shm.full", "limits.shm.unknown", "limits.numa_policy.denied"), why
    )


def samples(facts: LimitsFacts) -> Iterator[Sample]:
    """The limits as numbers; +Inf is unlimited, nothing is exported where a limit could not be read."""
    if facts.memlock_known:
        for bound, value in (("soft", facts.memlock_soft_bytes), ("hard", facts.memlock_hard_bytes)):
            yield Sample(metric="limits_memlock_bytes", value=float("inf") if value is None else value, labels=(bound,))
    pairs = (
        ("limits_ipc_lock", facts.ipc_lock),
        ("limits_shm_size_bytes", facts.shm_size_bytes),
        ("limits_shm_free_bytes", facts.shm_free_bytes),
        ("limits_open_files", facts.nofile_soft),
    )
    for metric, number in pairs:
        if number is not None:
            yield Sample(metric=metric, value=float(number))


PROBE = Probe(
    name="limits",
    facts=LimitsFacts,
    read=read,
    check=check,
    samples=samples,
    unjudged=unjudged,
    codes=(
        "limits.memlock.low",
        "limits.memlock.unknown",
        "limits.shm.small",
        "limits.shm.full",
        "limits.shm.unknown",
        "limits.nofile.low",
        "limits.numa_policy.denied",
    ),
    metrics=(
        Metric(name="limits_memlock_bytes", help="RLIMIT_MEMLOCK of the agent, +Inf is unlimited.", labels=("bound",)),
        Metric(name="limits_ipc_lock", help="1 where the agent has CAP_IPC_LOCK and RLIMIT_MEMLOCK does not bind it."),
        Metric(name="limits_shm_size_bytes", help="Size of /dev/shm as the agent sees it."),
        Metric(name="limits_shm_free_bytes", help="Free space of /dev/shm as the agent sees it."),
        Metric(name="limits_open_files", help="Soft RLIMIT_NOFILE of the agent."),
    ),
)
