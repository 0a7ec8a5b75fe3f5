"""Limits that break RDMA and shared memory, of the process that asks, judged by what NCCL and PyTorch need.

Sources: NCCL user guide, Troubleshooting ("Shared memory", "Docker": --shm-size=1g --ulimit memlock=-1, SYS_NICE);
NCCL_BUFFSIZE, default 4194304; PyTorch multiprocessing, "Sharing CPU tensors", strategy file_descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Sample, Source, finding, known_samples, probe_of


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
    ipc_lock: bool | None = None  # bit 14 of CapEff
    sys_nice: bool | None = None
    shm_size_bytes: int | None = None  # /dev/shm
    shm_free_bytes: int | None = None
    hugepages: dict[str, int] | None = None  # "2048kB" -> number
    cgroup_memory_max_bytes: int | None = None  # None unlimited or unknown
    cgroup_cpus: float | None = None
    container: str | None = None  # "kubernetes", "docker", "podman", None
    seccomp: str | None = None
    of_agent: bool = False  # of the resident agent's own container, whose manifest is not a job's
    gpus: int | None = None  # of this host: set by `agent.checks.host_checks`
    elsewhere: str = ""  # why this memlock limit is not that of a Slurm job; empty: it is, or there is no Slurm
    rdma_present: bool | None = None  # /sys/class/infiniband has a device: memlock then decides whether NCCL uses it


def unjudged(facts: LimitsFacts) -> dict[str, str]:
    """What the agent's own container cannot tell: a job's manifest gives its pod another /dev/shm and other rights.

    Nor can slurmd's own limit of locked memory, or that of a shell, where Slurm gives a job the other one.
    RLIMIT_MEMLOCK and RLIMIT_NOFILE of an agent stay judged: both come from the container engine, the same for all.
    """
    if not facts.of_agent:
        return {"limits.memlock.low": facts.elsewhere} if facts.elsewhere else {}
    why = "not judged: this is the agent's own container, and a job's pod gets what its own manifest says"
    return dict.fromkeys(
        ("limits.shm.small", "limits.shm.full", "limits.shm.unknown", "limits.numa_policy.denied"), why
    )


def samples(facts: LimitsFacts) -> Iterator[Sample]:
    """The limits as numbers; +Inf is unlimited, nothing is exported where a limit could not be read."""
    if facts.memlock_known:
        for bound, value in (("soft", facts.memlock_soft_bytes), ("hard", facts.memlock_hard_bytes)):
            yield Sample(metric="limits_memlock_bytes", value=float("inf") if value is None else value, labels=(bound,))
    yield from known_samples((
        ("limits_ipc_lock", facts.ipc_lock),
        ("limits_shm_size_bytes", facts.shm_size_bytes),
        ("limits_shm_free_bytes", facts.shm_free_bytes),
        ("limits_open_files", facts.nofile_soft),
    ))  # fmt: skip


NCCL_BUFFER_BYTES = 4 << 20  # NCCL_BUFFSIZE default: one channel's buffer to one peer in one direction
SHM_WANTED_BYTES = 1 << 30  # NCCL user guide: docker run --shm-size=1g; Docker's own default is 64 MiB
SHM_SEGMENT_BYTES = 9637892
"""One connection through shared memory, as NCCL asks for it (pytorch/ci-infra#490); each rank opens one or more, on
machines with NVLink too (pytorch/torchtitan#853)."""
SHM = "/dev/shm"  # noqa: S108 - judged by its size, nothing is put there
NOFILE_DEFAULT = 1024  # the kernel's soft default (INR_OPEN_CUR)

TEXTS = read_table(__file__, "findings.toml")
REMEDIES = read_table(__file__, "remedies.toml")


def size(value: int | None) -> str:
    """A limit in words: bytes, or None where there is none."""
    if value is None:
        return "unlimited"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value} bytes"


def check(facts: LimitsFacts) -> Iterator[Finding]:
    """Every limit in turn."""
    yield from _memlock(facts)
    if facts.nofile_soft is not None and facts.nofile_soft <= NOFILE_DEFAULT:
        status = Status.INFO if facts.nofile_soft == NOFILE_DEFAULT else Status.WARN
        yield finding(TEXTS, "limits.nofile.low", status, facts=facts)
    if facts.of_agent:  # see `unjudged`
        return
    yield from _shm(facts)
    if facts.container and facts.seccomp == "filter" and facts.sys_nice is False:
        yield finding(TEXTS, "limits.numa_policy.denied", facts=facts)


def _memlock(facts: LimitsFacts) -> Iterator[Finding]:
    if not facts.memlock_known:
        yield finding(TEXTS, "limits.memlock.unknown", facts=facts)
        return
    if facts.memlock_soft_bytes is None or facts.elsewhere:
        return
    soft, hard = size(facts.memlock_soft_bytes), size(facts.memlock_hard_bytes)
    # Two buffers, one to send and one to receive, are the least that a connection registers, beside its control
    # structures: at or below that no RDMA connection of NCCL can be set up.
    too_small = facts.memlock_soft_bytes <= 2 * NCCL_BUFFER_BYTES
    status = Status.FAIL if facts.rdma_present and too_small else Status.WARN
    if facts.rdma_present is False or facts.ipc_lock:  # nothing here registers memory, or nothing binds who does
        status = Status.INFO
    more = " The hard limit would allow it: the launcher may raise it with ulimit -l unlimited."
    yield finding(
        TEXTS, "limits.memlock.low" + " unbound" * bool(facts.ipc_lock), status, soft=soft, hard=hard, facts=facts,
        capable="unknown" if facts.ipc_lock is None else "yes" if facts.ipc_lock else "no",
        more=more if facts.memlock_hard_bytes is None else "", remedy=_of_engine(facts, REMEDIES["memlock"]),
    )  # fmt: skip


def _shm(facts: LimitsFacts) -> Iterator[Finding]:
    remedy, total, free = _of_engine(facts, REMEDIES["shm"]), facts.shm_size_bytes, facts.shm_free_bytes
    if total is None:
        seen = ("statvfs(/dev/shm) failed", facts.whose)
        yield finding(TEXTS, "limits.shm.unknown", Status.UNKNOWN, SHM, seen, remedy=remedy)
        return
    seen = (f"statvfs(/dev/shm): {size(total)}, {'unknown' if free is None else size(free)} free", facts.whose)
    values = {"shm": SHM, "size": size(total), "free": size(free), "remedy": remedy}
    gpus = facts.gpus or 0
    if free is not None and free < NCCL_BUFFER_BYTES:
        yield finding(TEXTS, "limits.shm.full", Status.FAIL, SHM, seen, **values)
    elif gpus > 1 and total < gpus * SHM_SEGMENT_BYTES:
        needed = size(gpus * SHM_SEGMENT_BYTES)
        key = "limits.shm.small ranks"
        yield finding(TEXTS, key, Status.FAIL, SHM, seen, gpus=gpus, needed=needed, **values)
    elif total < SHM_WANTED_BYTES:
        yield finding(TEXTS, "limits.shm.small", Status.WARN, SHM, seen, **values)


def _of_engine(facts: LimitsFacts, remedies: Mapping[str, str]) -> str:
    """The remedy of this container's engine, of any other one, or of a host without container."""
    return remedies.get(facts.container, remedies["another"]) if facts.container else remedies["none"]


SOURCE = Source(name="limits", facts=LimitsFacts)
PROBE = probe_of(__file__, SOURCE, check, samples=samples, unjudged=unjudged)
