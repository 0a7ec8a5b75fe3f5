"""Whatever breaks, a benchmark ends, names who it was, and leaves no process, port or lock behind."""

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import resident
from rigs.benchmarks import SCRIPT
from rigs.tables import ROOT, rows_of
from rigs.waiting import eventually

from collectives.bench import processes, run as bench

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600), pytest.mark.usefixtures("forked_ranks")]
STARTED = sys.executable  # ranks of this interpreter are started for real

HOST = socket.gethostname()
TEST_VARIABLE = "TOPOFLIGHT_TEST_FOLDER"
# An iteration takes a millisecond. A busy machine may leave the other rank without a core for long.
SILENCE_SECONDS = 30


def spec(tmp_path, **changes):
    settings = {
        "sizes_bytes": (65536, 131072), "max_iterations": 20, "budget_seconds": 300, "silence_seconds": 60,
        "startup_seconds": 240, "backend": "gloo", "lock_path": str(tmp_path / "lock"),
        "precision": None,  # always 20 iterations: those of a fault are counted
    }  # fmt: skip
    marked = {TEST_VARIABLE: str(tmp_path), **changes.pop("environment", {})}
    return bench.BenchSpec(**{**settings, **changes}, environment=marked)


def meeting(tmp_path, port, **changes):
    """One of two hosts with a rank each."""
    return spec(tmp_path, hosts=2, rendezvous=f"127.0.0.1:{port}", ranks_per_host=1, **changes)


def with_fault(tmp_path, fault, **changes):
    return bench.run(spec(tmp_path, environment={"TOPOFLIGHT_FAULT": fault}, **changes))


def left_behind(tmp_path):
    """Processes of the runs of one test: they carry its folder in their environment."""
    return [process.cmdline() for process in processes.find_marked(TEST_VARIABLE, str(tmp_path))]


def assert_ended(found, tmp_path, *words):
    assert not found.complete
    told = "\n".join(found.problems)
    for word in words:
        assert word in told
    assert not left_behind(tmp_path)
    with processes.lock_host(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("row", rows_of(__file__)("faults")(), ids=lambda row: row["what"])
def test_a_rank_that_stops_dies_or_is_late_is_named(tmp_path, row):
    """It is named and told from those that wait for it, and what was measured before stays."""
    changes = {"silence_seconds": SILENCE_SECONDS} if row.get("stands_still") else {}
    words, never = ([word.format(host=HOST, silence=SILENCE_SECONDS) for word in row.get(name, ())]
                    for name in ("words", "never"))  # fmt: skip
    found = with_fault(tmp_path, row["fault"], **changes)
    assert_ended(found, tmp_path, *words)
    assert not [word for word in never if word in "\n".join(found.problems)]
    assert len(found.measurements) == row.get("measured", len(found.measurements))
    assert "fail" not in row["fault"] or words[0] in found.problems[0], "its own error comes first"


def test_a_lying_rank_leaves_nothing_verified_and_is_named(tmp_path):
    """Of every op, in one run: each is verified for itself. A sum names no sender."""
    ops = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    found = with_fault(tmp_path, "rank=1:lie", ops=ops, sizes_bytes=(65536,), ranks_per_host=3, max_iterations=10)
    assert {m.op for m in found.measurements} == {*ops} and not any(m.verified for m in found.measurements)
    assert_ended(found, tmp_path, *(f"{op} of" for op in ops), f"rank 1 on {HOST} gave wrong data")
    assert not [word for word in ("rank 0 on", "rank 2 on") if word in "\n".join(found.problems)]


def test_a_wrong_interface_is_told_with_the_words_of_the_library(tmp_path):
    found = bench.run(spec(tmp_path, environment={"GLOO_SOCKET_IFNAME": "nosuch0"}))
    assert_ended(found, tmp_path, f" on {HOST}", "nosuch0")


def test_a_refused_rendezvous_ends_at_the_start_up_budget(tmp_path):
    with socket.socket() as bound:  # and not listened on: no other process can take the port meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        found = bench.run(meeting(tmp_path, port, node_rank=1, startup_seconds=8))
    assert_ended(found, tmp_path, "did not join within 8 s", f"rendezvous 127.0.0.1:{port}: Connection refused")


def test_a_rendezvous_port_that_is_taken_is_told(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = bench.run(meeting(tmp_path, port, node_rank=0))
    assert_ended(found, tmp_path, "EADDRINUSE")


def test_the_port_is_free_again_after_a_kill(tmp_path):
    port = resident.free_port()
    found = bench.run(meeting(tmp_path, port, node_rank=0, startup_seconds=8))
    assert_ended(found, tmp_path, "did not join within 8 s")
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
        again.listen()


def start_parent(tmp_path):
    """A benchmark in a separate process, which is measuring."""
    settings = {
        "sizes_bytes": [65536], "max_iterations": 10**6, "precision": None, "budget_seconds": 300, "backend": "gloo",
        "startup_seconds": 240, "lock_path": str(tmp_path / "lock"), "environment": {TEST_VARIABLE: str(tmp_path)},
    }  # fmt: skip
    parent = subprocess.Popen(
        [STARTED, "-c", SCRIPT, json.dumps(settings)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert "progress\n" in iter(parent.stdout.readline, "")
    return parent


def test_sigterm_ends_the_run_with_a_partial_result(tmp_path):
    parent = start_parent(tmp_path)
    parent.terminate()
    out, _ = parent.communicate(timeout=240)
    assert parent.returncode == 0
    result = json.loads(out.splitlines()[-1])
    assert result["problems"][0].startswith("stopped by its caller")
    assert (result["complete"], result["stopped_by"]) == (False, "its caller")
    assert not left_behind(tmp_path)


def test_sigkill_of_the_parent_takes_the_ranks_with_it_and_frees_the_lock(tmp_path):
    parent = start_parent(tmp_path)
    with pytest.raises(processes.BusyError, match=f"pid {parent.pid}"), processes.lock_host(tmp_path / "lock"):
        pass
    ranks = [p for p in psutil.Process(parent.pid).children(recursive=True) if p.is_running()]
    assert len(ranks) >= 3, "a launcher and two ranks"
    assert len(left_behind(tmp_path)) >= 3, "or the test would find nothing afterwards either"
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=240)
    eventually(lambda: not left_behind(tmp_path), "the ranks have ended")
    with processes.lock_host(tmp_path / "lock"):
        pass


def test_a_tree_ends_with_its_orphans_and_with_those_that_are_stopped(tmp_path):
    """One child has lost its parent, one ignores SIGTERM, one is stopped; the command itself has ended."""
    code = """
import os, signal, subprocess, sys
sleep = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN) if sys.argv[1:] else None; "
sleep += "print(1, flush=True); time.sleep(600)"
for words in ((), ("deaf",), ()):
    child = subprocess.Popen([sys.executable, "-c", sleep, *words], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
os.kill(child.pid, signal.SIGSTOP)
"""
    with (tmp_path / "log").open("wb") as log:
        tree = processes.Tree([STARTED, "-c", code], os.environ, log)
    assert tree.process.wait(300) == 0
    assert len(tree.members()) == 3
    tree.end(1.0)
    assert not tree.members()
