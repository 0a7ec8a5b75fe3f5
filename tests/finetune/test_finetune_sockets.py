"""Which network gloo's connections take: ends that match, what is left out, what is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rigs.tables import ROOT, each_row

from finetune.channels import gloo_transports

ROWS = yaml.safe_load((Path(__file__).with_name("jobs") / "rows.yaml").read_text())


@each_row(("first", "second", "interfaces", "told"), ROWS["connections"])
def test_connections_between_ranks_are_told_with_their_interface(first, second, interfaces, told):
    """Those of which two ranks hold the two ends."""
    ranks = [{tuple(map(tuple, ends)): interfaces[ends[0][0]] for ends in seen}
             for seen in (first, second) if seen is not None]  # fmt: skip
    assert gloo_transports(ranks) == told


RANK = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from finetune import channels, verify
rank, number = int(os.environ["RANK"]), Path(sys.argv[1])
while rank and not number.exists():  # rank 0 holds the store, at a port that is free as it is taken
    time.sleep(0.05)
port = int(number.read_text()) if rank else 0
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(minutes=5), wait_for_workers=False)
if rank == 0:
    number.with_suffix(".draft").write_text(str(store.port))
    number.with_suffix(".draft").replace(number)
os.environ["MASTER_PORT"] = str(store.port)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
seen = verify._gather(0) and verify._gather(channels.read_gloo_connections())
if dist.get_rank() == 0:
    print(json.dumps(channels.gloo_transports(seen)))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(600)
def test_the_connections_of_real_ranks_are_found(tmp_path):
    """Two ranks over lo without torchrun, where rank 0 holds the store itself."""
    (tmp_path / "rank.py").write_text(RANK)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env.pop("MASTER_PORT", None)
    argv = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path / "port")]
    started = [subprocess.Popen(argv, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE) for r in range(2)]
    said = [one.communicate(timeout=500)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0]
    assert json.loads(said[0]) == ["gloo: TCP over lo (127.0.0.1)"]
