"""Real ranks over several hosts: which network they take, what the fast one gains, and what a cut link does."""

import json
import re
import subprocess
import sys

import pytest
from rigs.benchmarks import SCRIPT
from rigs.netns import RANKS_ON_HOSTS, hosts
from rigs.tables import ROOT

from collectives.bench import results

pytestmark = [pytest.mark.ranks, pytest.mark.netns, pytest.mark.timeout(1200), *RANKS_ON_HOSTS]

DEFAULT_BYTES_PER_SECOND = 200e6 / 8  # what the rig lets through on eth0


def start(rig, count, settings, env=None):
    """Start one benchmark in each host, as an Indexed Job would."""
    processes = []
    for host in range(count):
        own = {
            "hosts": count, "node_rank": host, "rendezvous": f"{rig.address(0)}:29555", "ranks_per_host": 1,
            "lock_path": None, "startup_seconds": 240, "backend": "gloo", **settings,
        }  # fmt: skip
        argv = [sys.executable, "-c", SCRIPT, json.dumps(own)]
        processes.append(rig.popen(host, argv, env, stdout=subprocess.PIPE, text=True, cwd=ROOT))
    return processes


def finish(processes, seconds=500):
    """Wait for all; returns their results by host."""
    outs = [process.communicate(timeout=seconds)[0] for process in processes]
    return [results.read_as(json.loads(out.splitlines()[-1]), results.BenchResult) for out in outs]


def best(measured):
    """Bus bandwidth of the quickest iteration, in bytes per second: a busy machine only takes from it."""
    return measured.busbw_bytes_per_second * measured.median_seconds / min(measured.iteration_seconds)


def test_the_default_interface_is_slow_and_the_named_one_gains():
    settings = {"sizes_bytes": (8_000_000,), "warmup": 1, "min_iterations": 6, "max_iterations": 10}
    with hosts(2, default_rate="200mbit") as rig:
        default = finish(start(rig, 2, settings))
        fast = finish(start(rig, 2, settings, {"GLOO_SOCKET_IFNAME": "net1"}))
    for found in (*default, *fast):
        assert found.complete, found.problems
        assert found.hosts == ("host-0", "host-1")
    assert default[0].measurements == default[1].measurements and fast[0].environment["GLOO_SOCKET_IFNAME"] == "net1"
    # The shaper counts headers as well (about 5 % of a full frame), and lets a burst of 256 kB of 4 MB pass (6 %).
    assert best(default[0].measurements[0]) > 0.5 * DEFAULT_BYTES_PER_SECOND
    for slow, quick in zip(default[0].measurements, fast[0].measurements, strict=True):
        assert slow.busbw_bytes_per_second < 1.1 * DEFAULT_BYTES_PER_SECOND
        assert best(quick) > 2 * DEFAULT_BYTES_PER_SECOND


def test_hosts_that_torchrun_numbers_see_the_same_measurements():
    with hosts(2) as rig:
        first, second = finish(start(rig, 2, {"sizes_bytes": (65536,), "max_iterations": 10, "node_rank": None}))
    assert set(first.hosts) == {"host-0", "host-1"}
    assert first.measurements == second.measurements
    assert first.complete and second.complete


def test_a_rank_that_dies_is_named_by_its_own_host():
    env = {"TOPOFLIGHT_FAULT": "rank=1:die@iteration=20"}
    with hosts(2) as rig:
        near, far = ("\n".join(each.problems) for each in finish(start(rig, 2, {"sizes_bytes": (65536, 131072)}, env)))
    assert "`topoflight search` finds the node" in near and "rank 0 on host-0: died" not in near
    assert "rank 1 on host-1: died silently" in far


def test_a_link_at_a_third_is_named_as_the_fault_between_the_hosts(tmp_path):
    """With what was measured before as the bar: gloo has no other. The shaper is the only thing that changed."""
    sizes = ["--op", "all_gather", "--op", "all_reduce", "--size", "12000000", "--budget", "20"]

    def measured(rig, port, *more):
        lines = []
        for host in range(2):
            saved = tmp_path / f"{port}-{host}.json"
            argv = [sys.executable, "-m", "agent.cli", "bench", "--nodes=2", f"--node-rank={host}", "--ranks=1",
                    f"--rendezvous={rig.address(0)}:{port}", "-o", "json", "--save", str(saved), *sizes,
                    *more]  # fmt: skip
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
            own = {"TOPOFLIGHT_STATE": str(tmp_path / f"state-{host}")}
            lines.append((saved, rig.popen(host, argv, own, **pipes)))
        return [(process.communicate(timeout=500)[1], process.returncode, saved) for saved, process in lines]

    with hosts(2, default_rate="300mbit", fast_rate="300mbit") as rig:  # whichever network the advice takes
        (said, code, before), _ = measured(rig, 29561)
        assert code == 0, said
        (said, code, _), _ = measured(rig, 29562, "--baseline", str(before))
        assert code == 0 and "bench.busbw.low" not in said, said
        for device in ("eth0", "net1"):
            rig.shape(1, device, "100mbit")
        for said, code, _ in measured(rig, 29563, "--baseline", str(before)):
            assert code == (3 if "fail: bench" in said else 0), said  # half of the least lies near a third of all
            for op in ("all_gather", "all_reduce"):
                assert re.search(rf"(warn|fail): bench\.busbw\.low {op}", said), said
            assert "in the baseline" in said and "between the 2 hosts" in said
            assert "topoflight search" in said
