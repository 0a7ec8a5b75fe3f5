"""Limits are read with whose they are, and judged by what NCCL documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from dicthost import DictHost
from rigs.tables import each_row

from probes.limits import probe as limits
from probes.limits.read import read as read_limits

MIB = 1 << 20
UNPRIVILEGED = "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t2\n"
TABLES = yaml.safe_load(Path(__file__).with_name("limits_rows.yaml").read_text(encoding="utf-8"))


def host(
    status: str = UNPRIVILEGED, memlock: Any = (65536, 65536), files: Any = None, rdma: bool = True, **more: Any
) -> DictHost:
    """A pod with an RDMA device and Docker's defaults."""
    device = {"/sys/class/infiniband/mlx5_0/node_type": "1: CA"} if rdma else {}
    bounds = {"MEMLOCK": memlock, "NOFILE": (1024, 524288), "NPROC": (None, None)}
    shm = {"shm": (64 * MIB, 60 * MIB)}
    return DictHost({"/proc/self/status": status, **device, **(files or {})}, limits=bounds, **{**shm, **more})


@each_row(("machine", "code", "severity", "words"), TABLES["wrong"])
def test_what_is_wrong_with_the_limits(
    machine: dict[str, Any] | str, code: str, severity: str | None, words: str
) -> None:
    read = read_limits(DictHost() if machine == "bare" else host(**machine))
    found = next((finding for finding in limits.check(read) if finding.code == f"limits.{code}"), None)
    assert (found.status if found else None) == severity
    assert not found or words in f"{found.message} {found.evidence} {found.remedy}"


def test_unlimited_is_exported_as_infinity_and_unknown_not_at_all() -> None:
    exported = {(s.metric, s.labels): s.value for s in limits.samples(read_limits(host(memlock=(65536, None))))}
    assert exported["limits_memlock_bytes", ("soft",)] == 65536
    assert exported["limits_memlock_bytes", ("hard",)] == float("inf")
    assert not [s for s in limits.samples(read_limits(DictHost())) if s.metric == "limits_memlock_bytes"]


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "slurmd": {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}, "a shell": {},
    "a step": {"SLURMD_NODENAME": "n1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
}  # fmt: skip


@each_row(("conf", "of", "reason"), TABLES["slurm"])
def test_the_memlock_limit_is_the_jobs_or_is_not_judged(conf: str | None, of: str, reason: str | None) -> None:
    """Slurm gives a job the limit of the shell that submits it, or slurmd's; the other one says nothing."""
    files = {} if conf is None else {"/etc/slurm/slurm.conf": f"ClusterName=c\n{conf}\n"}
    facts = read_limits(host(files=files, environment=ENVIRONMENTS[of]))
    raised = any(found.code == "limits.memlock.low" for found in limits.check(facts))
    why = limits.unjudged(facts).get("limits.memlock.low")
    assert (raised, why is None) == (reason is None, reason is None) and (reason or "") in (why or "")
    assert ("Slurm job 7" in facts.whose) == (of == "a step")
