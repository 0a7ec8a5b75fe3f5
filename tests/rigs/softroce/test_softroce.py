"""The probes on a real RDMA device: both states of a port, GIDs, memlock as a user, netlink without sysfs.

One boot of one guest answers all questions of the probes; a second boot, of two guests, proves that the device moves
data. Each test then reads what the guests brought back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import cattrs
import pytest
import rig

from probes import interfaces, limits, rdma
from probes.rdma_gids import nccl_gid_index

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(3000),  # the first run downloads packages and builds the guest
    pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle())),
]

JOB = """
set -e
look() { python3 /job/look.py > "/out/$1.json"; }
look up
ip link set net1 down; look down; ip link set net1 up
ip link set net1 mtu 9000; look jumbo; ip link set net1 mtu 1500
ulimit -l 64
setpriv --reuid 1000 --regid 1000 --clear-groups bash -c 'python3 /job/look.py' > /out/user.json
look root_bound
chmod 600 /dev/infiniband/uverbs0
setpriv --reuid 1000 --regid 1000 --clear-groups bash -c 'python3 /job/look.py' > /out/denied.json
chmod 666 /dev/infiniband/uverbs0
umount /sys
look no_sysfs
mount -t sysfs sysfs /sys
ip link add mv0 link net1 type macvlan mode bridge
ip address add 192.168.77.9/24 dev mv0
ip link set mv0 up
modprobe bonding max_bonds=0
ip link add bond0 type bond
ip link add d0 type dummy
ip link set d0 master bond0
ip link set bond0 up
sleep 1
look tops
rdma link delete rxe0/1 2>/dev/null || rdma link delete rxe0
look none
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What the probes said in each state, by the state's name."""
    (guest,) = rig.run(JOB, [HERE / "look.py", *rig.probe_paths()], guests=1, timeout_seconds=900)
    try:
        assert guest.returncode == 0, guest.output + guest.console[-4000:]
        yield {path.stem: json.loads(path.read_text()) for path in guest.results.glob("*.json")}
    finally:
        shutil.rmtree(guest.results)


def rdma_facts(answer: dict[str, Any]) -> rdma.RdmaFacts:
    return cattrs.structure(answer["rdma"], rdma.RdmaFacts)


def codes(answer: dict[str, Any], probe: str = "rdma") -> dict[str, str]:
    return {finding["code"]: finding["severity"] for finding in answer["findings"][probe]}


def test_a_live_port(seen: dict[str, dict[str, Any]]) -> None:
    facts = rdma_facts(seen["up"])
    device, port = facts.devices[0], facts.devices[0].ports[0]
    assert (device.name, device.kind, facts.source, facts.netns_mode) == ("rxe0", "rxe", "sysfs", "shared")
    assert (port.state, port.physical_state, port.link_layer, port.netdev) == ("ACTIVE", "LinkUp", "Ethernet", "net1")
    assert {gid.type for gid in port.gids} == {"RoCE v2"}
    assert nccl_gid_index(port) == 1, "the IPv4 entry"
    assert (port.netdev_mtu_bytes, port.active_mtu_bytes) == (1500, 1024)
    assert seen["up"]["active_mtu"] == 1024, "as libibverbs says itself"
    assert device.uverbs_usable is True


def test_a_dead_port(seen: dict[str, dict[str, Any]]) -> None:
    port = rdma_facts(seen["down"]).devices[0].ports[0]
    assert (port.state, port.physical_state) == ("DOWN", "Disabled")
    assert codes(seen["down"])["rdma.port.none_active"] == "fail"
    assert "rdma.port.none_active" not in codes(seen["up"])


def test_jumbo_frames_give_the_full_mtu(seen: dict[str, dict[str, Any]]) -> None:
    port = rdma_facts(seen["jumbo"]).devices[0].ports[0]
    assert (port.netdev_mtu_bytes, port.active_mtu_bytes, seen["jumbo"]["active_mtu"]) == (9000, 4096, 4096)
    assert "rdma.mtu.small" in codes(seen["up"])
    assert "rdma.mtu.small" not in codes(seen["jumbo"])


def test_memlock_of_a_user_is_found_and_explained_by_a_real_registration(seen: dict[str, dict[str, Any]]) -> None:
    proof = rdma_facts(seen["user"]).memlock_proof
    assert proof is not None
    assert (proof.registered_bytes, proof.failed_bytes) == (65536, 262144)
    assert codes(seen["user"])["rdma.memlock.registration"] == "fail"
    bound = cattrs.structure(seen["user"]["limits"], limits.LimitsFacts)
    assert (bound.uid, bound.memlock_soft_bytes, bound.ipc_lock) == (1000, 65536, False)
    assert codes(seen["user"], "limits")["limits.memlock.low"] == "fail"


def test_root_is_not_bound_by_the_same_limit(seen: dict[str, dict[str, Any]]) -> None:
    proof = rdma_facts(seen["root_bound"]).memlock_proof
    assert proof is not None
    assert (proof.registered_bytes, proof.failed_bytes) == (64 << 20, None)
    assert codes(seen["root_bound"], "limits")["limits.memlock.low"] == "info"


def test_a_user_who_may_not_open_the_device(seen: dict[str, dict[str, Any]]) -> None:
    assert codes(seen["denied"])["rdma.uverbs.permission"] == "fail"
    assert rdma_facts(seen["denied"]).memlock_proof is None


def test_netlink_tells_the_same_without_sysfs(seen: dict[str, dict[str, Any]]) -> None:
    facts = rdma_facts(seen["no_sysfs"])
    port = facts.devices[0].ports[0]
    assert (facts.source, facts.devices[0].name, facts.devices[0].kind) == ("netlink", "rxe0", "rxe")
    assert (port.state, port.physical_state, port.netdev) == ("ACTIVE", "LinkUp", "net1")
    assert facts.devices[0].node_guid == rdma_facts(seen["up"]).devices[0].node_guid


def test_the_interface_knows_its_rdma_device(seen: dict[str, dict[str, Any]]) -> None:
    facts = cattrs.structure(seen["tops"]["interfaces"], interfaces.InterfacesFacts)
    found = {interface.name: interface for interface in facts.interfaces}
    assert (found["net1"].rdma_device, found["mgmt0"].rdma_device) == ("rxe0", None)
    assert (found["mv0"].kind, found["mv0"].parent, found["mv0"].rdma_device) == ("macvlan", "net1", "rxe0")
    assert (found["bond0"].kind, found["d0"].master) == ("bond", "bond0")


def test_no_device_is_absent(seen: dict[str, dict[str, Any]]) -> None:
    assert "no RDMA device" in seen["none"]["rdma"]["absent"]


TRAFFIC = """
set -e
if [ "$RANK" = 0 ]; then
  ib_write_bw -d rxe0 -x 1 -s 65536 -n 200 > /out/bandwidth.txt
else
  for try in 1 2 3 4 5 6 7 8 9 10; do
    ib_write_bw -d rxe0 -x 1 -s 65536 -n 200 "$PEER" > /out/bandwidth.txt && break
    sleep 1
  done
fi
python3 /job/look.py > /out/after.json
"""


def test_two_guests_move_data_and_the_counters_show_it() -> None:
    guests = rig.run(TRAFFIC, [HERE / "look.py", *rig.probe_paths()], guests=2, timeout_seconds=900)
    for guest in guests:
        assert guest.returncode == 0, guest.output + guest.console[-4000:]
        counters = rdma_facts(json.loads((guest.results / "after.json").read_text())).devices[0].ports[0].counters
        assert counters is not None
        assert counters["sent_pkts"] >= 200
    assert "65536" in (guests[1].results / "bandwidth.txt").read_text()
    for guest in guests:
        shutil.rmtree(guest.results)
