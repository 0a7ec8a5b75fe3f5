"""The shipped agent's own pod is not a job: what its manifest gives it puts no finding on a sound node."""

import fcntl
import os
import subprocess
import sys

import pytest
from agent_pod import OVERLAYS, PodHost, agent_of, healthy, in_pod
from rigs.command import MODULE
from rigs.recorded import H100, NAMES, of_code, path_of, raised, statuses, view
from rigs.tables import each_row
from scanned import scan

from agent.checks.verdict import build_view


@each_row("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_a_healthy_node_stays_silent_in_the_agents_pod(overlay: str) -> None:
    """/dev/shm, CPU, memory, user, capabilities and network of the pod are its own: nothing of them is judged."""
    for name in (H100, "cpu-only-vm"):
        found = in_pod(name, overlay)
        assert not raised(found) and found.verdict.word == view(name).verdict.word, name


@each_row("name", NAMES)
def test_the_pod_adds_no_finding_to_any_node(name: str) -> None:
    """What the machine lacks is found from inside the pod or is unknown there; nothing is found that it does not."""
    assert raised(in_pod(name)) <= raised(view(name))
    assert all(any(word in each for each in healthy()) for word in ("hgx-h100", "p4d", "gb200", "cpu-only"))


def test_shared_memory_is_judged_in_a_jobs_pod_and_unknown_in_the_agents() -> None:
    """The agent's 64 MiB are neither a warning nor a proof; the same pod as a job holds no segment for 8 ranks."""
    for code in ("limits.shm.small", "limits.shm.full", "limits.cpu.quota", "limits.numa_policy.denied"):
        (check,) = of_code(in_pod(H100), code)
        assert check.status == "unknown" and "the agent's own" in check.message
    host = PodHost(path_of(), agent_of("kubernetes"))
    del host.env["TOPOFLIGHT_ROLE"]
    (check,) = of_code(build_view((scan(host),)), "limits.shm.small")
    assert check.status == "fail" and "64 MiB" in check.message and "73.53 MiB" in check.message


@each_row(("memlock", "status"), [(None, "pass"), (8 << 20, "fail"), (65536, "fail")])
def test_what_the_engine_gives_every_pod_is_judged_in_the_agents(memlock: int | None, status: str) -> None:
    """RLIMIT_MEMLOCK comes from the container engine, not from the manifest: a job's pod gets the same."""
    found = build_view((scan(PodHost(path_of(), agent_of("kubernetes"), memlock=memlock)),))
    assert statuses(found, "limits.memlock.low") == {status}


def test_one_verb_at_a_time_runs_in_the_agents_container(tmp_path):
    """A second verb waits until the first has ended; the agent itself does not wait. Each uses 60 of 256 MiB."""
    environment = {**os.environ, "TOPOFLIGHT_ROLE": "agent", "TOPOFLIGHT_STATE": str(tmp_path)}
    command = (sys.executable, *MODULE)
    with (tmp_path / "verb.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert subprocess.run([*command, "serve", "--help"], env=environment, capture_output=True).returncode == 0
        second = subprocess.Popen([*command, "--version"], env=environment, stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1.0)
    assert second.wait(30.0) == 0
