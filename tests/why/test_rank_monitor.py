"""What the monitor thread of a rank sees of real sockets in a network namespace, and how much CPU time it takes."""

import json
import socket
import subprocess
import sys
import threading

import pytest
from rigs.command import ROOT, TORCHRUN, interpreter
from rigs.netns import missing

from agent.jobs.script import AUTOSTART, add_monitor
from finetune import rank_monitor

TALK = """
import json, socket, sys
from finetune import rank_monitor

server = socket.create_server(("10.9.9.9", 0))
client = socket.create_connection(server.getsockname())
taken, _ = server.accept()
six = socket.socket(socket.AF_INET6)  # as gloo may dial an IPv4 address
six.connect(("::ffff:10.9.9.9", server.getsockname()[1]))
also, _ = server.accept()
inner = socket.create_server(("127.0.0.1", 0))
loop = socket.create_connection(inner.getsockname())
client.settimeout(3)
def sending():
    return rank_monitor._list_sending(list(rank_monitor._list_connections()))

before, modes = sending(), (client.gettimeout(), client.getblocking())
six.setblocking(False)
try:
    while True:
        six.send(bytes(1 << 16))
except BlockingIOError:
    print(json.dumps([before, sending(), modes == (client.gettimeout(), client.getblocking())]))
"""


OLDER = """
import sys
del sys.orig_argv
sys.path.insert(0, sys.argv[1])
sys.modules.pop("sitecustomize", None)
import sitecustomize
print(type(sys.meta_path[0]).__name__)
"""


def test_the_monitor_starts_in_a_rank_of_an_older_python(tmp_path):
    """Python 3.9, with which torch 2.8 still runs, has no sys.orig_argv."""
    done = interpreter("-c", OLDER, AUTOSTART, seconds=30, TOPOFLIGHT_RUN=str(tmp_path), RANK="0")
    assert done.stdout == "_AfterImport\n", done.stderr


@pytest.mark.netns
def test_bytes_that_wait_are_seen_on_the_jobs_own_sockets():
    """By the other end's address, over both families, loopback left out; the sockets stay as they were."""
    if absent := missing():
        pytest.skip(absent)
    words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && ip addr add 10.9.9.9/32 dev lo && exec "$@"', "sh"]
    done = subprocess.run([*words, sys.executable, "-c", TALK], capture_output=True, text=True, check=False, timeout=60)
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
TRAINS = """
import json, resource, sys, threading, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
steps, ends = 0, time.monotonic() + 60
is_over = torch.zeros(1)
while not is_over:
    model(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    is_over += time.monotonic() > ends
    dist.broadcast(is_over, 0)
(monitor,) = (one for one in threading.enumerate() if one.name == "topoflight-rank-monitor")
with open(f"/proc/self/task/{monitor.native_id}/schedstat") as stream:
    own = int(stream.read().split()[0]) / 1e9  # nanoseconds on a CPU, whatever else runs on the host
used = resource.getrusage(resource.RUSAGE_SELF)
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as stream:
    json.dump({"steps": steps, "monitor": own, "all": used.ru_utime + used.ru_stime}, stream)
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.ranks
def test_the_monitor_costs_less_than_half_a_percent(tmp_path):
    """With its default settings: two ranks under DDP for a minute (docs/measurements/why.md).

    The time of the monitor's own thread is more exact than two runs by turns.
    """
    (tmp_path / "train.py").write_text(TRAINS)
    environment = add_monitor({"PYTHONPATH": str(ROOT)}, tmp_path / "run")
    done = interpreter(*TORCHRUN, "--nproc-per-node=2", "train.py", tmp_path, seconds=300, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        share = found["monitor"] / found["all"]
        print(f"rank {rank}: {found['steps']} steps, {found['all']:.1f} CPU s, of these the monitor {share:.2%}")
        assert 0 < share < MAX_SHARE, found
