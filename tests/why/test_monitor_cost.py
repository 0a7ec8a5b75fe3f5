"""What the rank monitor costs the rank that it is in, with its default settings (docs/measurements/why.md)."""

import json
from pathlib import Path

import pytest
from rigs.command import ROOT, TORCHRUN, interpreter

from agent.jobs.script import monitored

MOST_SHARE = 0.005  # of the CPU time of a rank that computes all the time
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
def test_the_monitor_costs_less_than_half_a_percent(tmp_path: Path) -> None:
    """Two ranks under DDP for a minute. The time of the monitor's own thread is more exact than two runs by turns."""
    (tmp_path / "train.py").write_text(TRAINS)
    environment = monitored({"PYTHONPATH": str(ROOT)}, tmp_path / "run")
    done = interpreter(*TORCHRUN, "--nproc-per-node=2", "train.py", tmp_path, seconds=300, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        share = found["monitor"] / found["all"]
        print(f"rank {rank}: {found['steps']} steps, {found['all']:.1f} CPU s, of these the monitor {share:.2%}")
        assert 0 < share < MOST_SHARE, found
