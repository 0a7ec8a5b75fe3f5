"""Reads the limits of this process: rlimits, capabilities, /dev/shm, cgroups.

Specification: getrlimit(2), proc(5), capabilities(7), cgroups(7); Linux Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from probes.host import sysfs
from probes.host.protocol import Host
from probes.hostinfo.read import detect_container, is_of_agent
from probes.limits.probe import SHM, LimitsFacts

IPC_LOCK_BIT, SYS_NICE_BIT = 14, 23  # capabilities(7), include/uapi/linux/capability.h
CGROUPS = "/sys/fs/cgroup"
SECCOMP = {"0": "disabled", "1": "strict", "2": "filter"}
MAX_CGROUP_DEPTH = 32


def read(host: Host) -> LimitsFacts:
    """Read every limit of this process."""
    identity = host.identity()
    uid = int(identity.get("uid") or 0)
    status = sysfs.fields(sysfs.text(host, "/proc/self/status"))
    rights = status.get("CapEff", "")
    capabilities = int(rights, 16) if re.fullmatch(r"[0-9a-fA-F]{1,16}", rights) else None
    memlock, nofile = sysfs.attempt(host.limit, "MEMLOCK"), sysfs.attempt(host.limit, "NOFILE")
    shm = sysfs.attempt(host.statvfs, SHM)
    environment = host.environment()
    of_job = f", Slurm job {environment.get('SLURM_JOB_ID')}" if "SLURM_PROCID" in environment else ""
    container, agent = detect_container(host), is_of_agent(host)
    cpus, is_read = _read_cgroup_cpus(host)
    whose = f"{container} container" + (" of the agent" if agent else "") if container else f"no container{of_job}"
    return LimitsFacts(
        whose=f"this process, pid {identity.get('pid')}, uid {uid}, {whose}",
        uid=uid,
        memlock_soft_bytes=memlock[0] if memlock else None,
        memlock_hard_bytes=memlock[1] if memlock else None,
        memlock_known=memlock is not None,
        nofile_soft=nofile[0] if nofile else None,
        nofile_hard=nofile[1] if nofile else None,
        ipc_lock=None if capabilities is None else bool(capabilities >> IPC_LOCK_BIT & 1),
        sys_nice=None if capabilities is None else bool(capabilities >> SYS_NICE_BIT & 1),
        shm_size_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        hugepages=_read_hugepages(host),
        cgroup_cpus=cpus,
        cgroup_known=is_read,
        container=container,
        of_agent=agent,
        seccomp=SECCOMP.get(status.get("Seccomp", "")),
        elsewhere="" if of_job or container else _explain_slurm_limit(host, environment),
        rdma_present=bool(sysfs.names(host, "/sys/class/infiniband")),
    )


SLURM_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")  # the second is for "configless" nodes


def _explain_slurm_limit(host: Host, environment: Mapping[str, str]) -> str:
    """Return the reason that a Slurm job has another process's locked memory limit; empty if it has this one.

    slurm.conf(5), PropagateResourceLimits: a job has the limits of the submitting shell (ALL, the default, or by name),
    or those of slurmd. A process belongs to slurmd if slurmd set its node name or script context in the environment.
    """
    files = (environment.get("SLURM_CONF", ""), *SLURM_CONFIGURATIONS)
    path, text = next(((path, text) for path in files if path and (text := sysfs.text(host, path))), ("", ""))
    if not text:
        return ""
    rows = re.findall(r"^[ \t]*PropagateResourceLimits(Except)?[ \t]*=[ \t]*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    propagates, line = True, "PropagateResourceLimits=ALL (the default)"
    for is_except, value in rows[:1]:
        listed = {"MEMLOCK", "ALL"} & set(value.upper().split(","))
        propagates, line = bool(listed) != bool(is_except), f"PropagateResourceLimits{is_except}={value}"
    of_slurmd = bool({"SLURMD_NODENAME", "SLURM_SCRIPT_CONTEXT"} & environment.keys())
    if propagates != of_slurmd:
        return ""
    whose = "the shell that submits it" if propagates else "slurmd"
    return f"not judged: a Slurm job gets the limit of locked memory of {whose}, by {line} in {path}"


def _read_hugepages(host: Host) -> dict[str, int] | None:
    root = "/sys/kernel/mm/hugepages"
    counts = {
        name.removeprefix("hugepages-"): sysfs.number(host, f"{root}/{name}/nr_hugepages")
        for name in sysfs.names(host, root)
        if name.startswith("hugepages-")
    }
    return {size: count for size, count in counts.items() if count is not None} or None


def _list_cgroup_folders(host: Host) -> list[str]:
    """Return the CPU cgroup of this process and its parents, v2 or v1. A cgroup namespace shows its root as "/"."""
    folders: list[str] = []
    for line in (sysfs.text(host, "/proc/self/cgroup") or "").splitlines():
        number, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        mounted = CGROUPS if number == "0" else f"{CGROUPS}/cpu"
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if sysfs.NAME.fullmatch(part)][:MAX_CGROUP_DEPTH]
        folders += ["/".join([mounted, *parts[:length]]) for length in range(len(parts), -1, -1)]
    return folders


def _read_cgroup_cpus(host: Host) -> tuple[float | None, bool]:
    """Return the smallest CPU quota of the cgroup and its parents, in CPUs, and whether a file of one was there.

    In v2 the root and folders without the controller of CPUs have no quota. They only show the file of controllers.
    """
    quotas, is_read = [], False
    for folder in _list_cgroup_folders(host):
        limit = sysfs.text(host, f"{folder}/cpu.max") or ""
        quota, period = map(sysfs.parse_number, limit.partition(" ")[::2])
        if quota is None and period is None:
            quota, period = (sysfs.number(host, f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        is_read = is_read or bool(limit) or quota is not None or host.exists(f"{folder}/cgroup.controllers")
        if quota and period and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None), is_read
