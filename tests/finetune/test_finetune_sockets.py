"""Which network gloo's connections take: ends that match, what is left out, what is told."""

import json
import os
import subprocess
import sys

import pytest
from rigs.tables import ROOT, each_row

from finetune.channels import gloo_transports

INTERFACES = {"10.0.0.1": "net1", "192.0.2.1": "eth0", "10.0.0.2": "net1", "192.0.2.2": "eth0"}
OVER_NET1 = (("10.0.0.1", 4001), ("10.0.0.2", 5001))
OVER_ETH0 = (("192.0.2.1", 4002), ("192.0.2.2", 5002))
ROUTED = (("10.0.0.1", 4001), ("192.0.2.2", 5003))
TO_A_HUB = (("192.0.2.1", 4003), ("198.51.100.7", 443))


UNKNOWN = "gloo: unknown: no connection is seen from both of its ends, as behind address translation (NAT)"


@each_row(
    ("first", "second", "interfaces", "told"),
    [
        # another connection, to a hub say, is not the ranks'
        ((OVER_NET1, TO_A_HUB), (OVER_NET1[::-1],), INTERFACES, ["gloo: TCP over net1 (10.0.0.1)"]),
        # rank 0 accepts at net1's address what a route brings over eth0
        ((ROUTED,), (ROUTED[::-1],), INTERFACES,
         ["gloo: TCP over net1 (10.0.0.1)", "gloo: TCP over eth0 (192.0.2.2)"]),
        ((OVER_ETH0,), (OVER_ETH0[::-1],), {**INTERFACES, "192.0.2.1": "an unknown interface"},
         ["gloo: TCP over an unknown interface (192.0.2.1)", "gloo: TCP over eth0 (192.0.2.2)"]),
        ((OVER_NET1,), ((OVER_NET1[1], ("172.16.5.9", 3)),), INTERFACES, [UNKNOWN]),  # translated
        ((), (), {}, [UNKNOWN]),
        ((OVER_NET1,), None, INTERFACES, []),  # a rank that is alone has no transport to know
    ],
)  # fmt: skip
def test_connections_between_ranks_are_told_with_their_interface(first, second, interfaces, told):
    """Those of which two ranks hold the two ends."""
    ranks = [{ends: interfaces[ends[0][0]] for ends in seen} for seen in (first, second) if seen is not None]
    assert gloo_transports(ranks) == told


RANK = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from finetune import channels, verify
rank, number = int(os.environ["RANK"]), Path(sys.argv[1])
if "MASTER_PORT" in os.environ:
    dist.init_process_group("gloo")
else:  # rank 0 holds the store, at a port that is free as it is taken
    while rank and not number.exists():
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
@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_the_connections_of_real_ranks_are_found(tmp_path, launcher):
    """Two ranks over lo, under torchrun and without it, where rank 0 holds the store itself."""
    (tmp_path / "rank.py").write_text(RANK)
    words = [str(tmp_path / "rank.py"), str(tmp_path / "port")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if launcher == "torchrun":
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        started = [subprocess.Popen([*argv, *words], env=env, stdout=subprocess.PIPE)]
    else:
        env.pop("MASTER_PORT", None)
        argv = [sys.executable, *words]
        started = [subprocess.Popen(argv, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE) for r in range(2)]
    said = [one.communicate(timeout=500)[0] for one in started]
    assert [one.returncode for one in started] == [0] * len(started)
    assert json.loads(said[0]) == ["gloo: TCP over lo (127.0.0.1)"]
