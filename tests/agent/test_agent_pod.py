"""The shipped agent's own pod is not a job: what its manifest gives it puts no finding on a sound node."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from agent_pod import HEALTHY, MACHINES, OVERLAYS, PodHost, agent_of, bad, in_pod, of_host
from rigs.tables import each_row

from agent.checks.view import View, look
from contracts.finding import Finding
from probes.scan import scan

PATHS = sorted(MACHINES.glob("*.json"))
NAMES = sorted(path.name for path in OVERLAYS.iterdir())


def test_there_are_healthy_machines_of_every_sort() -> None:
    """GPUs with InfiniBand, with EFA, Grace, and a host without GPUs."""
    names = " ".join(path.stem for path in HEALTHY)
    assert all(word in names for word in ("hgx-h100", "p4d", "gb200", "cpu-only"))


@each_row("overlay", NAMES)
@each_row("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_node_stays_silent_in_the_agents_pod(path: Path, overlay: str) -> None:
    """/dev/shm, CPU, memory, user, capabilities and network of the pod are its own: nothing of them is judged."""
    view = in_pod(path, overlay)
    assert not bad(view), [check for check in view.checks if check.status in ("fail", "warn")]
    assert view.verdict.word == of_host(path).verdict.word


@each_row("path", PATHS, ids=lambda path: path.stem)
def test_the_pod_adds_no_finding_to_any_node(path: Path) -> None:
    """What the machine lacks is found from inside the pod or is unknown there; nothing is found that it does not."""
    assert bad(in_pod(path)) <= bad(of_host(path))


def checks(view: View, code: str) -> list[Finding]:
    return [check for check in view.checks if check.code == code]


def test_what_only_a_jobs_pod_can_tell_is_unknown_and_no_pass() -> None:
    """The agent's /dev/shm of 64 MiB is neither a warning nor a proof that a job's is large enough."""
    path = next(path for path in HEALTHY if "hgx-h100" in path.stem)
    for code in ("limits.shm.small", "limits.shm.full", "limits.numa_policy.denied"):
        (check,) = checks(in_pod(path), code)
        assert check.status == "unknown" and "agent's own container" in check.message


def test_the_same_pod_as_a_job_is_judged() -> None:
    """Without the agent's role the same limits are what ranks will get: 64 MiB hold no segment for each of 8 ranks."""
    path = next(path for path in HEALTHY if "hgx-h100" in path.stem)
    host = PodHost(path, agent_of("kubernetes"))
    del host.env["TOPOFLIGHT_ROLE"]
    (check,) = checks(look((scan(host),)), "limits.shm.small")
    assert check.status == "fail" and "64 MiB" in check.message and "73.53 MiB" in check.message


@each_row(("memlock", "status"), [(None, "pass"), (8 << 20, "fail"), (65536, "fail")])
def test_what_the_engine_gives_every_pod_is_judged_in_the_agents(memlock: int | None, status: str) -> None:
    """RLIMIT_MEMLOCK comes from the container engine, not from the manifest: a job's pod gets the same."""
    path = next(path for path in HEALTHY if "hgx-h100" in path.stem)
    view = look((scan(PodHost(path, agent_of("kubernetes"), memlock=memlock)),))
    assert {check.status for check in checks(view, "limits.memlock.low")} == {status}
