"""What the monitor thread of a rank sees of real sockets in a network namespace, and how much CPU time it takes."""

import json
import socket
import subprocess
import sys
import threading

import pytest
from rigs.command import ROOT, TORCHRUN, interpreter
from rigs.netns import missing
from rigs.tables import rows_of

from agent.jobs.script import AUTOSTART, add_monitor
from finetune import rank_monitor

programs = rows_of(__file__, "programs.yaml")


def test_the_monitor_starts_in_a_rank_of_an_older_python(tmp_path):
    """Python 3.9, with which torch 2.8 still runs, has no sys.orig_argv."""
    done = interpreter("-c", programs("older_python")(), AUTOSTART, seconds=30, TOPOFLIGHT_RUN=str(tmp_path), RANK="0")
    assert done.stdout == "_AfterImport\n", done.stderr


@pytest.mark.netns
def test_bytes_that_wait_are_seen_on_the_jobs_own_sockets():
    """By the other end's address, over both families, loopback left out; the sockets stay as they were."""
    if absent := missing():
        pytest.skip(absent)
    words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && ip addr add 10.9.9.9/32 dev lo && exec "$@"', "sh"]
    words += [sys.executable, "-c", programs("talk")()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[["10.9.9.9", False, False]], [["10.9.9.9", True, False]], True]


def test_bytes_over_sockets_count_as_data_that_a_process_moves(tmp_path):
    """/proc/self/io leaves out what send() and recv() move, as those of an upload do."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        monitor = rank_monitor.RankMonitor(tmp_path, 0, 2)
        taken, _ = server.accept()
        with taken:
            monitor.sample()
            before, sent = monitor._measure_effort()[2], 1 << 20
            client.settimeout(60)
            threading.Thread(target=client.sendall, args=(bytes(sent),)).start()
            while sent:
                sent -= len(taken.recv(1 << 16))
            monitor.sample()
            assert monitor._measure_effort()[2] - before > 1 << 20
    monitor.sample()
    assert monitor.uncounted >= 1 << 20, "a connection that was closed keeps its bytes"


def test_only_a_host_with_a_driver_gives_its_ranks_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(rank_monitor, "_DRIVERS", (str(tmp_path / "nvidiactl"), str(tmp_path / "kfd")))
    assert "gpu" not in rank_monitor._get_identity()
    (tmp_path / "kfd").touch()
    assert rank_monitor._get_identity()["gpu"] == 3


MAX_SHARE = 0.005  # of the CPU time of a rank that computes all the time


@pytest.mark.nightly
@pytest.mark.ranks
def test_the_monitor_costs_less_than_half_a_percent(tmp_path):
    """With its default settings: two ranks under DDP for a minute (docs/measurements/why.md).

    The time of the monitor's own thread is more exact than two runs by turns.
    """
    (tmp_path / "train.py").write_text(programs("trains")())
    environment = add_monitor({"PYTHONPATH": str(ROOT)}, tmp_path / "run")
    done = interpreter(*TORCHRUN, "--nproc-per-node=2", "train.py", tmp_path, seconds=300, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        share = found["monitor"] / found["all"]
        print(f"rank {rank}: {found['steps']} steps, {found['all']:.1f} CPU s, of these the monitor {share:.2%}")
        assert 0 < share < MAX_SHARE, found
