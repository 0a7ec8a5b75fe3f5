"""Limits are read with whose they are, and judged by what NCCL documents."""

from __future__ import annotations

from typing import Any

from dicthost import DictHost
from rigs.tables import each_row

from contracts.finding import Finding, Status
from probes.limits import probe as limits

MIB, GIB = 1 << 20, 1 << 30
UNPRIVILEGED = "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t2\n"
ROOT = "CapEff:\t000001ffffffffff\nSeccomp:\t0\n"


def host(status: str = UNPRIVILEGED, memlock: Any = (65536, 65536), files: Any = None, **more: Any) -> DictHost:
    """A pod with an RDMA device and Docker's defaults."""
    return DictHost(
        {"/proc/self/status": status, "/sys/class/infiniband/mlx5_0/node_type": "1: CA", **(files or {})},
        limits={"MEMLOCK": memlock, "NOFILE": (1024, 524288), "NPROC": (None, None)},
        **{"shm": (64 * MIB, 60 * MIB), **more},
    )


def findings(machine: DictHost) -> dict[str, Finding]:
    return {finding.code: finding for finding in limits.check(limits.read(machine))}


def test_memlock_too_small_for_one_nccl_buffer_fails_where_there_is_rdma() -> None:
    found = findings(host())["limits.memlock.low"]
    assert found.status is Status.FAIL
    assert "64 KiB" in found.message
    assert any("pid 7, uid 1000" in line for line in found.evidence), "says whose limit it is"


@each_row(
    ("status", "memlock", "severity"),
    [
        (UNPRIVILEGED, (8 * MIB, 8 * MIB), Status.FAIL),  # systemd's default, inherited by containers
        (UNPRIVILEGED, (64 * GIB, None), Status.WARN),  # not unlimited, as NCCL asks
        (UNPRIVILEGED, (None, None), None),
        (ROOT, (65536, 65536), Status.INFO),  # CAP_IPC_LOCK: the job may not have it
        ("", (65536, 65536), Status.FAIL),  # capabilities unknown are not a pass
    ],
)
def test_memlock_is_judged_with_the_capability(status: str, memlock: Any, severity: Status | None) -> None:
    found = findings(host(status, memlock)).get("limits.memlock.low")
    assert (found.status if found else None) == severity


def test_without_rdma_a_low_memlock_is_a_note() -> None:
    machine = DictHost({"/proc/self/status": UNPRIVILEGED}, limits={"MEMLOCK": (65536, 65536)})
    assert findings(machine)["limits.memlock.low"].status is Status.INFO


def test_an_unreadable_limit_is_unknown_and_no_pass() -> None:
    found = findings(DictHost())
    assert found["limits.memlock.unknown"].status is Status.UNKNOWN
    assert found["limits.shm.unknown"].status is Status.UNKNOWN
    assert "limits.memlock.low" not in found


def test_the_remedy_is_that_of_the_container_engine() -> None:
    kubernetes = findings(host(files={"/etc/hosts": "# Kubernetes-managed hosts file.\n127.0.0.1 localhost\n"}))
    assert 'default_ulimits = ["memlock=-1:-1"]' in kubernetes["limits.memlock.low"].remedy
    assert "emptyDir" in kubernetes["limits.shm.small"].remedy
    docker = findings(host(files={"/.dockerenv": ""}))
    assert "--ulimit memlock=-1:-1" in docker["limits.memlock.low"].remedy
    assert "--shm-size=1g" in docker["limits.shm.small"].remedy


@each_row(
    ("shm", "code"),
    [((64 * MIB, 60 * MIB), "limits.shm.small"), ((8 * GIB, 3 * MIB), "limits.shm.full"), ((8 * GIB, 7 * GIB), None)],
)
def test_shared_memory(shm: tuple[int, int], code: str | None) -> None:
    found = {c for c in findings(host(shm=shm)) if c.startswith("limits.shm")}
    assert found == ({code} if code else set())


def test_cgroup_limits_are_the_tightest_on_the_way_to_the_root() -> None:
    v2 = limits.read(
        host(
            files={
                "/proc/self/cgroup": "0::/kubepods/pod1/job\n",
                "/sys/fs/cgroup/kubepods/pod1/job/memory.max": "max\n",
                "/sys/fs/cgroup/kubepods/pod1/memory.max": "1073741824\n",
                "/sys/fs/cgroup/kubepods/pod1/job/cpu.max": "400000 100000\n",
                "/sys/fs/cgroup/kubepods/cpu.max": "max 100000\n",
            }
        )
    )
    assert (v2.cgroup_memory_max_bytes, v2.cgroup_cpus, v2.container) == (GIB, 4.0, "kubernetes")
    v1 = limits.read(
        host(
            files={
                "/proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n",
                "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "2147483648\n",
                "/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            }
        )
    )
    assert (v1.cgroup_memory_max_bytes, v1.cgroup_cpus, v1.container) == (2 * GIB, None, "docker")


def test_unlimited_is_exported_as_infinity_and_unknown_not_at_all() -> None:
    exported = {(s.metric, s.labels): s.value for s in limits.samples(limits.read(host(memlock=(65536, None))))}
    assert exported["limits_memlock_bytes", ("soft",)] == 65536
    assert exported["limits_memlock_bytes", ("hard",)] == float("inf")
    assert not [s for s in limits.samples(limits.read(DictHost())) if s.metric == "limits_memlock_bytes"]
