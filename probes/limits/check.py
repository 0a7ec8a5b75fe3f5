"""Judges limits by what NCCL and PyTorch document that they need.

Sources: NCCL user guide, Troubleshooting ("Shared memory", "Docker": --shm-size=1g --ulimit memlock=-1, SYS_NICE);
NCCL_BUFFSIZE, default 4194304; PyTorch multiprocessing, "Sharing CPU tensors", strategy file_descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from probes.api import Finding, Severity
from probes.limits.probe import LimitsFacts

NCCL_BUFFER_BYTES = 4 << 20  # NCCL_BUFFSIZE default: one channel's buffer to one peer in one direction
SHM_WANTED_BYTES = 1 << 30  # NCCL user guide: docker run --shm-size=1g; Docker's own default is 64 MiB
SHM = "/dev/shm"  # noqa: S108 - judged by its size, nothing is put there
NOFILE_DEFAULT = 1024  # the kernel's soft default (INR_OPEN_CUR)

CRIO_REMEDY = (
    'On OpenShift apply a MachineConfig that writes [crio.runtime] default_ulimits = ["memlock=-1:-1"] below '
    "/etc/crio/crio.conf.d/; with containerd set LimitMEMLOCK=infinity for its unit"
)
MEMLOCK_REMEDIES = {
    "kubernetes": f"{CRIO_REMEDY}; then read the limit again in the job's own pod.",
    "docker": "Start the container with --ulimit memlock=-1:-1.",
    "podman": "Start the container with --ulimit memlock=-1:-1.",
    "containerd": "Start the container with --ulimit memlock=-1:-1, or set LimitMEMLOCK=infinity for its unit.",
    "lxc": "Set lxc.prlimit.memlock = unlimited in the container's configuration.",
    "systemd-nspawn": "Start the container with --rlimit=RLIMIT_MEMLOCK=infinity.",
}
MEMLOCK_IN_CONTAINER = "Raise the memlock limit to unlimited (soft and hard) in what starts the container."
MEMLOCK_REMEDY = (
    "Set memlock to unlimited (soft and hard) in /etc/security/limits.d/, in the unit's LimitMEMLOCK, and with Slurm "
    "in PropagateResourceLimitsExcept=MEMLOCK."
)
SHM_REMEDIES = {
    "kubernetes": "Mount an emptyDir with medium: Memory and a sizeLimit of at least 1Gi at /dev/shm.",
    "docker": "Start the container with --shm-size=1g or more, or --ipc=host.",
    "podman": "Start the container with --shm-size=1g or more, or --ipc=host.",
    "containerd": "Start the container with --shm-size=1g or more, or --ipc=host (nerdctl).",
}
SHM_IN_CONTAINER = "Give the container a /dev/shm of at least 1 GiB in what starts it."
SHM_REMEDY = "Remount /dev/shm with a larger size: mount -o remount,size=8G /dev/shm."


def size(value: int | None) -> str:
    """A limit in words."""
    if value is None:
        return "unlimited"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value} bytes"


def check(facts: LimitsFacts) -> Iterator[Finding]:
    """Every limit in turn."""
    yield from _memlock(facts)
    yield from _nofile(facts)
    if not facts.of_agent:  # see probes.limits.probe.unjudged
        yield from _shm(facts)
        yield from _numa_policy(facts)


def _memlock(facts: LimitsFacts) -> Iterator[Finding]:
    if not facts.memlock_known:
        yield Finding(
            code="limits.memlock.unknown",
            severity=Severity.UNKNOWN,
            subject="",
            message="The memlock limit could not be read.",
            evidence=(facts.whose,),
            remedy="Run `ulimit -l` and `ulimit -H -l` in the job's own environment.",
        )
        return
    if facts.memlock_soft_bytes is None:
        return
    soft, hard = size(facts.memlock_soft_bytes), size(facts.memlock_hard_bytes)
    if facts.ipc_lock:
        severity = Severity.INFO
        message = (
            f"RLIMIT_MEMLOCK is {soft}; this process has CAP_IPC_LOCK and is not bound by it, but a job that runs as "
            "another user without that capability is."
        )
    else:
        # Two buffers, one to send and one to receive, are the least that a connection registers, beside its control
        # structures: at or below that no RDMA connection of NCCL can be set up.
        too_small = facts.memlock_soft_bytes <= 2 * NCCL_BUFFER_BYTES
        severity = Severity.FAIL if facts.rdma_present and too_small else Severity.WARN
        if facts.rdma_present is False:  # nothing here registers memory: it costs no job of this host
            severity = Severity.INFO
        message = (
            f"RLIMIT_MEMLOCK is {soft}: registering RDMA memory beyond it fails with ENOMEM, "
            "and NCCL asks for unlimited."
        )
        if facts.memlock_hard_bytes is None:
            message += " The hard limit would allow it: the launcher may raise it with ulimit -l unlimited."
    yield Finding(
        code="limits.memlock.low",
        severity=severity,
        subject="",
        message=message,
        evidence=(
            f"getrlimit(RLIMIT_MEMLOCK): soft {soft}, hard {hard}",
            f"CapEff bit 14 (CAP_IPC_LOCK): {_word(facts.ipc_lock)}",
            f"whose limit: {facts.whose}",
        ),
        remedy=_of_engine(facts, MEMLOCK_REMEDIES, MEMLOCK_IN_CONTAINER, MEMLOCK_REMEDY),
    )


def _shm(facts: LimitsFacts) -> Iterator[Finding]:
    remedy = _of_engine(facts, SHM_REMEDIES, SHM_IN_CONTAINER, SHM_REMEDY)
    if facts.shm_size_bytes is None:
        yield Finding(
            code="limits.shm.unknown",
            severity=Severity.UNKNOWN,
            subject=SHM,
            message="The size of /dev/shm could not be read; NCCL's SHM transport and DataLoader workers need it.",
            evidence=("statvfs(/dev/shm) failed", facts.whose),
            remedy=remedy,
        )
        return
    evidence = (f"statvfs(/dev/shm): {size(facts.shm_size_bytes)}, {size(facts.shm_free_bytes or 0)} free", facts.whose)
    if facts.shm_free_bytes is not None and facts.shm_free_bytes < NCCL_BUFFER_BYTES:
        yield Finding(
            code="limits.shm.full",
            severity=Severity.FAIL,
            subject=SHM,
            message=f"{SHM} has {size(facts.shm_free_bytes)} left: not one NCCL buffer of 4 MiB fits.",
            evidence=evidence,
            remedy="Remove left-over segments of dead jobs from /dev/shm. " + remedy,
        )
    elif facts.shm_size_bytes < SHM_WANTED_BYTES:
        yield Finding(
            code="limits.shm.small",
            severity=Severity.WARN,
            subject=SHM,
            message=(
                f"{SHM} is {size(facts.shm_size_bytes)}, the NCCL user guide asks for 1 GiB: ranks that talk "
                "through "
                "shared memory fail with “No space left on device”."
            ),
            evidence=evidence,
            remedy=remedy,
        )


def _nofile(facts: LimitsFacts) -> Iterator[Finding]:
    if facts.nofile_soft is not None and facts.nofile_soft <= NOFILE_DEFAULT:
        yield Finding(
            code="limits.nofile.low",
            severity=Severity.INFO if facts.nofile_soft == NOFILE_DEFAULT else Severity.WARN,
            subject="",
            message=(
                f"A process may open {facts.nofile_soft} files: DataLoader workers pass one descriptor a tensor, NCCL "
                "opens some for every peer."
            ),
            evidence=(f"getrlimit(RLIMIT_NOFILE): soft {facts.nofile_soft}, hard {facts.nofile_hard}", facts.whose),
            remedy=(
                "Raise it in the launcher with ulimit -n, up to the hard limit, or in the container engine's ulimits."
            ),
        )


def _numa_policy(facts: LimitsFacts) -> Iterator[Finding]:
    if facts.container and facts.seccomp == "filter" and facts.sys_nice is False:
        yield Finding(
            code="limits.numa_policy.denied",
            severity=Severity.INFO,
            subject="",
            message=(
                "A seccomp filter without CAP_SYS_NICE usually refuses set_mempolicy: ranks cannot bind memory to a "
                "NUMA node."
            ),
            evidence=(f"/proc/self/status: Seccomp {facts.seccomp}", "CapEff bit 23 (CAP_SYS_NICE): no", facts.whose),
            remedy="Add the capability SYS_NICE to the job's container where it binds memory.",
        )


def _of_engine(facts: LimitsFacts, engines: Mapping[str, str], other: str, bare: str) -> str:
    """The remedy of this container's engine, of any other one, or of a host without container."""
    return engines.get(facts.container, other) if facts.container else bare


def _word(known: bool | None) -> str:
    return "unknown" if known is None else "yes" if known else "no"
