"""The probes on a real RDMA device: both states of a port, GIDs, memlock as a user.

One boot of two guests answers everything: first they move data, then the first one takes every state a port can be
found in. Each test reads what they brought back.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cattrs
import pytest
import rig

from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.rdma import probe as rdma
from probes.rdma.probe import find_nccl_gid_index

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(6000),  # the first run downloads packages and builds the guest
]


@pytest.fixture(scope="module")
def guests() -> Iterator[list[rig.Guest]]:
    """Two guests that moved data and were looked at in every state, in one boot."""
    paths = [HERE / "look.py", *rig.command_paths()]
    ended = rig.run(HERE / "job.sh", paths, timeout_seconds=2400)
    try:
        yield ended
    finally:
        for guest in ended:
            shutil.rmtree(guest.results)


@pytest.fixture(scope="module")
def seen(guests: list[rig.Guest]) -> dict[str, dict[str, Any]]:
    """What the probes said in each state of the first guest, by the state's name."""
    guest = guests[0]
    assert guest.returncode == 0, guest.output + guest.console[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in guest.results.glob("*.json")}


def rdma_facts(answer: dict[str, Any]) -> rdma.RdmaFacts:
    return cattrs.structure(answer["rdma"], rdma.RdmaFacts)


def codes(answer: dict[str, Any], probe: str = "rdma") -> dict[str, str]:
    return {finding["code"]: finding["status"] for finding in answer["findings"][probe]}


def test_a_live_port(seen: dict[str, dict[str, Any]]) -> None:
    facts = rdma_facts(seen["up"])
    device, port = facts.devices[0], facts.devices[0].ports[0]
    assert (device.name, device.kind) == ("rxe0", "rxe")
    assert (port.state, port.physical_state, port.link_layer, port.netdev) == ("ACTIVE", "LinkUp", "Ethernet", "net1")
    assert {gid.type for gid in port.gids} == {"RoCE v2"}
    assert find_nccl_gid_index(port) == 1, "the IPv4 entry"
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
    assert (proof.registered_bytes, proof.failed_bytes) == (65536, 262144)
    assert codes(seen["user"])["rdma.memlock.registration"] == "fail"
    bound = cattrs.structure(seen["user"]["limits"], limits.LimitsFacts)
    assert (bound.uid, bound.memlock_soft_bytes, bound.ipc_lock) == (1000, 65536, False)
    assert codes(seen["user"], "limits")["limits.memlock.low"] == "fail"


def test_root_is_not_bound_by_the_same_limit(seen: dict[str, dict[str, Any]]) -> None:
    proof = rdma_facts(seen["root_bound"]).memlock_proof
    assert (proof.registered_bytes, proof.failed_bytes) == (64 << 20, None)
    assert codes(seen["root_bound"], "limits")["limits.memlock.low"] == "info"


def test_a_user_who_may_not_open_the_device(seen: dict[str, dict[str, Any]]) -> None:
    assert codes(seen["denied"])["rdma.uverbs.permission"] == "fail"
    assert rdma_facts(seen["denied"]).memlock_proof is None


def test_the_interface_knows_its_rdma_device(seen: dict[str, dict[str, Any]]) -> None:
    facts = cattrs.structure(seen["tops"]["interfaces"], interfaces.InterfacesFacts)
    found = {interface.name: interface for interface in facts.interfaces}
    assert (found["net1"].rdma_device, found["mgmt0"].rdma_device) == ("rxe0", None)
    assert (found["mv0"].kind, found["mv0"].parent, found["mv0"].rdma_device) == ("macvlan", "net1", "rxe0")
    assert (found["bond0"].kind, found["d0"].master) == ("bond", "bond0")


def test_no_device_is_absent(seen: dict[str, dict[str, Any]]) -> None:
    assert "no RDMA device" in seen["none"]["rdma"]["absent"]


def test_the_counters_show_what_was_moved(guests: list[rig.Guest]) -> None:
    for guest in guests:
        answer = guest.results / "after.json"
        assert answer.exists(), guest.output + guest.console[-4000:]
        counters = rdma_facts(json.loads(answer.read_text())).devices[0].ports[0].counters
        assert counters["sent_pkts"] >= 200


def part(guest: rig.Guest, name: str) -> tuple[int, str, str]:
    """Exit code, output and errors of one part of the job."""
    code = guest.results / f"{name}.code"
    assert code.exists(), guest.output + guest.console[-4000:]
    return int(code.read_text()), *((guest.results / f"{name}.{end}").read_text() for end in ("out", "err"))


def test_a_healthy_pair_passes_against_its_own_baseline(guests: list[rig.Guest]) -> None:
    """Without one nothing is known: Soft-RoCE's rate says nothing."""
    for run, expected in (("base", "unknown"), ("healthy", "MB/s (")):
        code, output, errors = part(guests[1], run)
        assert (code, part(guests[0], run)[0]) == (0, 0), errors + part(guests[0], run)[2]
        assert expected in output and "bench.rdma.low_bandwidth" not in errors


def test_a_link_at_a_third_is_named_with_the_hosts_it_joins(guests: list[rig.Guest]) -> None:
    """The same command; the port, its rate and its MTU are as they were."""
    code, output, errors = part(guests[1], "shaped")
    assert code == 3, output + errors
    assert "fail: bench.rdma.low_bandwidth rxe0:1:" in errors
    assert "the port of node1 is as it was, so the fault is on the link between node1 and 10.77.0.1" in errors
    assert part(guests[0], "shaped")[0] == 0, "being written to slowly is no fault of this side's"


def test_a_memlock_limit_that_is_too_small_is_said_with_its_remedy(guests: list[rig.Guest]) -> None:
    code, output, errors = part(guests[1], "memlock")
    assert code == 3
    assert "failed to create mr" in output
    assert "fail: rdma.memlock.registration" in errors and "memlock=-1:-1" in errors, errors
    code, _, errors = part(guests[0], "memlock")
    assert code == 3 and "rxe0:1: " in errors
