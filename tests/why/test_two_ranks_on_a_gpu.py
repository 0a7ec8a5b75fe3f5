"""`why` and `search` with NCCL: ranks that share one GPU, as separate hosts, which exchange data over sockets."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rigs.command import ROOT, topoflight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not any(Path("/dev").glob("nvidia[0-9]*")), reason="no NVIDIA GPU on this host"),
]
TRAINING = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def load_batch(step):
    if dist.get_rank() == 1:
        time.sleep(600 if sys.argv[1] == "stuck" and step == 60 else 0.15 if sys.argv[1] == "late" else 0)
    return torch.randn(64, 2048, device=device)

device = "cuda:0" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda:0" else "gloo")
net = DistributedDataParallel(torch.nn.Linear(2048, 2048).to(device))
for step in range(100_000):
    net(load_batch(step)).square().mean().backward()
    net.zero_grad()
    float(net.module.bias.sum())
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("fault", "state"), [("late", "slow"), ("stuck", "stuck")])
def test_why_names_the_rank(fault: str, state: str, tmp_path: Path) -> None:
    """The script is unchanged; NCCL's flight recorder shows who came last."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAINING)
    rank = f"export NCCL_HOSTID=$RANK NCCL_IB_DISABLE=1 LOCAL_RANK=0; exec {sys.executable} {script} {fault}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    words = [sys.executable, "-m", "agent.cli", "run", "--folder", str(run), "--", *torchrun, "bash", "-c", rank]
    job = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    until, found = time.monotonic() + 240, {"ranks": []}
    try:
        while not found["ranks"] and time.monotonic() < until:
            time.sleep(5)
            if (run / "ranks").is_dir():
                (run / "ranks" / "dump").touch()  # as --watch asks
                time.sleep(3)
                found = json.loads(topoflight("why", "--run", run, "-o", "json").stdout)
    finally:
        job.terminate()
        job.wait()
    assert (found["state"], found["ranks"]) == (state, [1]), found


def test_search_names_the_stopped_host(tmp_path: Path) -> None:
    journal, hosts = tmp_path / "journal", []
    for host in range(4):
        words = [sys.executable, "-m", "agent.cli", "search", "--nodes=4", f"--node-rank={host}", "--ranks=1",
                 "--force", "--rendezvous=127.0.0.1:29711", f"--host-name=host-{host}", "--size=64MiB", "--silence=8",
                 "--no-advice", f"--journal={journal}", "-o", "json"]  # fmt: skip
        # a separate lock for each, as each is a host
        alone = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /run/lock && exec "$@"', "sh", *words]
        own = {"NCCL_HOSTID": str(host), "NCCL_IB_DISABLE": "1", "PYTHONPATH": str(ROOT)}
        hosts.append(subprocess.Popen(alone, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **own}))
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (journal.exists() and "outcomes" in journal.read_text()):
            time.sleep(0.1)
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # of another user, or just ended
                if b"NCCL_HOSTID=2" in path.read_bytes() and b"search.rank" in path.with_name("cmdline").read_bytes():
                    os.kill(int(path.parent.name), signal.SIGSTOP)
        out, _ = hosts[0].communicate(timeout=300)
    finally:
        for process in hosts:
            process.kill()
    found = json.loads(out)
    assert [one["node"] for one in found["verdicts"] if one["state"] == "bad"] == [2], out
