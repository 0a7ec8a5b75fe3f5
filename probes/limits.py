"""Limits that break RDMA and shared memory, and whose they are.

Specification: getrlimit(2), proc(5), capabilities(7), cgroups(7).
"""

from __future__ import annotations

from dataclasses import dataclass


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
