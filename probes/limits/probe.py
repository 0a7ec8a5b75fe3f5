"""Resource limits of the probing process, compared with what NCCL and PyTorch need for RDMA and shared memory.

Sources: NCCL user guide, Troubleshooting ("Shared memory", "Docker": --shm-size=1g --ulimit memlock=-1, SYS_NICE);
NCCL_BUFFSIZE, default 4194304; PyTorch multiprocessing, "Sharing CPU tensors", strategy file_descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Sample, Source, finding, probe_of, sample_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsFacts:
    """Limits of the probing process. None means "unlimited" only where a comment says so."""

    whose: str  # "this process, pid 17, uid 1000, container"; a job may have other limits
    uid: int
    memlock_soft_bytes: int | None  # if memlock_known: None means unlimited
    memlock_hard_bytes: int | None
    memlock_known: bool = True
    nofile_soft: int | None = None
    nofile_hard: int | None = None
    ipc_lock: bool | None = None  # bit 14 of CapEff
    sys_nice: bool | None = None
    shm_size_bytes: int | None = None  # /dev/shm
    shm_free_bytes: int | None = None
    hugepages: dict[str, int] | None = None  # "2048kB" -> number
    cgroup_cpus: float | None = None  # if cgroup_known: None means no limit
    cgroup_known: bool = True
    container: str | None = None  # "kubernetes", "docker", "podman", None
    seccomp: str | None = None
    of_agent: bool = False  # in the container of the resident agent, whose manifest differs from a job's
    gpus: int | None = None  # GPUs of this host: set by `agent.checks.host_checks`
    elsewhere: str = ""  # reason that a Slurm job has another memlock limit; empty: it has this one, or no Slurm
    rdma_present: bool | None = None  # /sys/class/infiniband has a device: NCCL's RDMA then depends on memlock


def unjudged(facts: LimitsFacts) -> dict[str, str]:
    """Return the checks that the agent's container cannot do: a job's manifest sets its own /dev/shm and capabilities.

    If Slurm sets a job's locked memory limit, the limit of slurmd or of a shell does not decide. RLIMIT_MEMLOCK and
    RLIMIT_NOFILE of the agent are checked, because the container engine sets both for all containers alike.
    """
    if not facts.of_agent:
        return {"limits.memlock.low": facts.elsewhere} if facts.elsewhere else {}
    reason = "not judged: these limits are the agent's own, and a job gets those of its manifest or its shell"
    codes = ("shm.small", "shm.full", "shm.unknown", "cpu.quota", "numa_policy.denied")
    return dict.fromkeys((f"limits.{code}" for code in codes), reason)


def samples(facts: LimitsFacts) -> Iterator[Sample]:
    """Export the limits. +Inf means unlimited; a limit that could not be read has no sample."""
    if facts.memlock_known:
        for bound, value in (("soft", facts.memlock_soft_bytes), ("hard", facts.memlock_hard_bytes)):
            yield Sample(metric="limits_memlock_bytes", value=float("inf") if value is None else value, labels=(bound,))
    yield from sample_facts(__file__, facts)


NCCL_BUFFER_BYTES = 4 << 20  # default of NCCL_BUFFSIZE: buffer of one channel, for one peer and direction
SHM_WANTED_BYTES = 1 << 30  # NCCL user guide: docker run --shm-size=1g; Docker's default is 64 MiB
SHM_SEGMENT_BYTES = 9637892
"""Bytes that NCCL requests for one shared memory connection (pytorch/ci-infra#490). Each rank opens at least one, also
on machines with NVLink (pytorch/torchtitan#853)."""
SHM = "/dev/shm"  # noqa: S108 - only its size is checked, nothing is written
NOFILE_DEFAULT = 1024  # soft default of the kernel (INR_OPEN_CUR)

TEXTS = read_table(__file__, "findings.toml")
REMEDIES = read_table(__file__, "remedies.toml")


def format_size(value: int | None) -> str:
    """Format a limit in bytes; None is unlimited."""
    if value is None:
        return "unlimited"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value} bytes"


def check(facts: LimitsFacts) -> Iterator[Finding]:
    """Check every limit."""
    yield from _check_memlock(facts)
    if facts.nofile_soft is not None and facts.nofile_soft <= NOFILE_DEFAULT:
        status = Status.INFO if facts.nofile_soft == NOFILE_DEFAULT else Status.WARN
        yield finding(TEXTS, "limits.nofile.low", status, facts=facts)
    if facts.of_agent:  # see `unjudged`
        return
    yield from _check_shm(facts)
    if facts.cgroup_cpus and facts.cgroup_cpus < (facts.gpus or 0):  # a rank needs a CPU to launch its kernels
        yield finding(TEXTS, "limits.cpu.quota", facts=facts)
    elif not facts.cgroup_known and facts.gpus != 0:
        yield finding(TEXTS, "limits.cpu.quota unknown", facts=facts)
    if facts.container and facts.seccomp == "filter" and facts.sys_nice is False:
        yield finding(TEXTS, "limits.numa_policy.denied", facts=facts)


def _check_memlock(facts: LimitsFacts) -> Iterator[Finding]:
    if not facts.memlock_known:
        yield finding(TEXTS, "limits.memlock.unknown", facts=facts)
        return
    if facts.memlock_soft_bytes is None or facts.elsewhere:
        return
    soft, hard = format_size(facts.memlock_soft_bytes), format_size(facts.memlock_hard_bytes)
    # A connection registers at least two buffers, one to send and one to receive, plus control structures. At or below
    # that size NCCL cannot set up any RDMA connection.
    too_small = facts.memlock_soft_bytes <= 2 * NCCL_BUFFER_BYTES
    status = Status.FAIL if facts.rdma_present and too_small else Status.WARN
    if facts.rdma_present is False or facts.ipc_lock:  # no RDMA device, or CAP_IPC_LOCK lifts the limit
        status = Status.INFO
    hint = " The hard limit would allow it: the launcher may raise it with ulimit -l unlimited."
    yield finding(
        TEXTS, "limits.memlock.low" + " unbound" * bool(facts.ipc_lock), status, soft=soft, hard=hard, facts=facts,
        capable="unknown" if facts.ipc_lock is None else "yes" if facts.ipc_lock else "no",
        more=hint if facts.memlock_hard_bytes is None else "", remedy=_choose_remedy(facts, REMEDIES["memlock"]),
    )  # fmt: skip


def _check_shm(facts: LimitsFacts) -> Iterator[Finding]:
    remedy, total, free = _choose_remedy(facts, REMEDIES["shm"]), facts.shm_size_bytes, facts.shm_free_bytes
    if total is None:
        evidence = ("statvfs(/dev/shm) failed", facts.whose)
        yield finding(TEXTS, "limits.shm.unknown", Status.UNKNOWN, SHM, evidence, remedy=remedy)
        return
    left = "unknown" if free is None else format_size(free)
    evidence = (f"statvfs(/dev/shm): {format_size(total)}, {left} free", facts.whose)
    gpus = facts.gpus or 0
    needed = gpus * SHM_SEGMENT_BYTES if gpus > 1 else 0
    sizes = {"size": format_size(total), "free": format_size(free), "needed": format_size(needed)}
    values = {"shm": SHM, "remedy": remedy, "gpus": gpus, **sizes}
    if free is not None and free < NCCL_BUFFER_BYTES:
        yield finding(TEXTS, "limits.shm.full", Status.FAIL, SHM, evidence, **values)
    elif total < needed:
        yield finding(TEXTS, "limits.shm.small ranks", Status.FAIL, SHM, evidence, **values)
    elif free is not None and free < needed:
        yield finding(TEXTS, "limits.shm.full ranks", Status.FAIL, SHM, evidence, **values)
    elif total < SHM_WANTED_BYTES:
        yield finding(TEXTS, "limits.shm.small", Status.WARN, SHM, evidence, **values)


def _choose_remedy(facts: LimitsFacts, remedies: Mapping[str, str]) -> str:
    """Return the remedy for this container's engine, for another engine, or for a host without container."""
    return remedies.get(facts.container, remedies["another"]) if facts.container else remedies["none"]


SOURCE = Source(name="limits", facts=LimitsFacts)
PROBE = probe_of(__file__, SOURCE, check, samples=samples, unjudged=unjudged)
