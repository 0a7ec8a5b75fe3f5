"""Which network gloo's connections take: ends that match, what is left out, what is told and stops the job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.tables import each_row

from finetune.channels import GlooSeen as Seen
from finetune.channels import addresses_taken as taken
from finetune.channels import gloo_differences as differences
from finetune.channels import gloo_transports as transports
from finetune.channels import spell_address as spell

ROOT = Path(__file__).parents[2]
INTERFACES = ({"10.0.0.1": ("net1",), "192.0.2.1": ("eth0",)}, {"10.0.0.2": ("net1",), "192.0.2.2": ("eth0",)})
OVER_NET1 = (("10.0.0.1", 4001), ("10.0.0.2", 5001))
OVER_ETH0 = (("192.0.2.1", 4002), ("192.0.2.2", 5002))
TO_A_HUB = (("192.0.2.1", 4003), ("198.51.100.7", 443))


def ranks(*connections):
    """Two ranks on two hosts; what the first sees, the second sees from its end, but for what leaves them both."""
    turned = [(other, own) for own, other in connections if other[0].endswith(".2")]
    return [Seen(connections, INTERFACES[0]), Seen(tuple(turned), INTERFACES[1])]


def test_connections_between_ranks_are_told_with_their_interface():
    """Another connection, to a hub say, is not the ranks'."""
    found = taken(ranks(OVER_NET1, TO_A_HUB))
    assert found == [[("10.0.0.1", ("net1",))], [("10.0.0.2", ("net1",))]]
    assert spell(*found[0][0]) == "gloo: TCP over net1 (10.0.0.1)"
    assert differences(ranks(OVER_NET1, TO_A_HUB), {"GLOO_SOCKET_IFNAME": "net1"}) == []


@each_row(("asked", "stops"), [("net1", True), ("net0,net1", True), ("net1,eth0", False), (None, False)])
def test_another_interface_than_the_plan_s_is_a_difference(asked, stops):
    """One of a list is enough; where the plan sets none, nothing is compared."""
    environment = {"GLOO_SOCKET_IFNAME": asked} if asked else {}
    wrong = differences(ranks(OVER_NET1, OVER_ETH0), environment)
    assert len(wrong) == (2 if stops else 0)
    if stops:
        assert wrong[0] == f"rank 0: GLOO_SOCKET_IFNAME={asked}: gloo: TCP over eth0 (192.0.2.1)"


def test_what_cannot_be_seen_is_no_difference():
    """Ends that do not match (address translation), addresses without an interface, and no connection at all."""
    environment = {"GLOO_SOCKET_IFNAME": "net1"}
    alone = [Seen((OVER_ETH0,), INTERFACES[0]), Seen((), INTERFACES[1])]
    nameless = [Seen(one.connections, {}) for one in ranks(OVER_ETH0)]
    for seen in (alone, nameless, [Seen((), {})]):
        assert differences(seen, environment) == []


def test_what_is_not_known_says_why():
    """Translated ends, or nothing to read; a rank that is alone has no transport to know."""
    elsewhere = [Seen((OVER_NET1,), INTERFACES[0]), Seen(((OVER_NET1[1], ("172.16.5.9", 3)),), INTERFACES[1])]
    for seen in (elsewhere, [Seen((), {}), Seen((), {})]):
        assert transports(seen) == [
            "gloo: unknown: no connection is seen from both of its ends, as behind address translation (NAT)"
        ]
    assert transports([Seen((OVER_NET1,), INTERFACES[0])]) == []


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
    told = [channels.gloo_differences(seen, {"GLOO_SOCKET_IFNAME": name}) for name in ("lo", "absent0")]
    print(json.dumps([channels.addresses_taken(seen), told]))
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
    found, (right, wrong) = json.loads(said[0])
    assert found == [[["127.0.0.1", ["lo"]]]] * 2
    assert right == []
    assert wrong[1] == "rank 1: GLOO_SOCKET_IFNAME=absent0: gloo: TCP over lo (127.0.0.1)"
