"""What travels in a node's record: facts without what is the node's own, from which other agents build its graph."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rigs.fleet import fleet_of, record_of, through_the_api
from rigs.recorded import NAMES, changed, facts, snapshot
from rigs.tables import each_row

from agent.checks.verdict import build_view
from agent.cluster import node_facts
from agent.cluster.nodes import from_resource
from agent.cluster.publish import to_resource
from probes.api import Failed, Snapshot
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from topology.paths import with_expectations

ROLLOUT = Path(__file__).parent / "rollout"
every_machine = each_row("machine", NAMES)


@every_machine
def test_like_nodes_carry_equal_facts_and_their_own_addresses(machine: str) -> None:
    """Other addresses in the same subnets, other counters, another process: one machine for thousands of nodes."""
    first, second = snapshot(machine), moved(snapshot(machine))
    (machine_of_first, addresses), (other, others) = node_facts.pack(first), node_facts.pack(second)
    assert machine_of_first is not None and machine_of_first == other
    assert len(addresses) == len(others)
    for node, found in ((first, addresses), (second, others)):
        back = node_facts.of_node(node_facts.unpack(machine_of_first), name="n", addresses=found)
        was, now = ([i.addresses for i in facts(InterfacesFacts, each).interfaces] for each in (node, back))
        assert now == was


def moved(node: Snapshot) -> Snapshot:
    """Another node of the kind: the last octet of each address, GIDs and counters differ."""
    rdma = node.facts(RdmaFacts)
    known: dict[str, str] = {}

    def other(text: str) -> str:
        address, slash, prefix = text.partition("/")
        if ":" in address or address.startswith("127.") or prefix in ("31", "32"):
            return text
        head, _, last = address.rpartition(".")
        known[address] = f"{head}.{(int(last) + 100) % 250 + 2}"
        return f"{known[address]}{slash}{prefix}"

    def other_gid(text: str) -> str:
        mapped = str(ipaddress.IPv6Address(text).ipv4_mapped)
        return str(ipaddress.IPv6Address(f"::ffff:{known[mapped]}")) if mapped in known else text

    interfaces = tuple(replace(i, addresses=tuple(other(a) for a in i.addresses))
                       for i in facts(InterfacesFacts, node).interfaces)  # fmt: skip
    made = changed(node, InterfacesFacts, interfaces=interfaces)
    if rdma is not None:
        made = changed(made, RdmaFacts, devices=tuple(
            replace(device, uverbs="/dev/infiniband/uverbs9", ports=tuple(
                replace(port, counters={"link_downed": 9}, gids=tuple(
                    replace(gid, gid=other_gid(gid.gid)) for gid in port.gids)) for port in device.ports))
            for device in rdma.devices))  # fmt: skip
    return replace(made, hostname="another", taken_at_seconds=9.0)


def later(machine: dict[str, Any] | None) -> dict[str, Any]:
    """As a later agent may write: a field that is needed here has another name."""
    assert machine is not None
    return {**machine, "interfaces": {"interfaces": [{"called": "eth0"}]}}


def test_a_record_of_another_release_makes_unknown_and_no_fact() -> None:
    """Without facts that this release reads, the probes are failed, with the node's name; there is no graph."""
    for machine in ("cpu-only-vm", "hgx-h100-8xH100-8hca", "l40s-4x-pcie"):
        new = record_of(machine, "n1")
        of_later = through_the_api(replace(new, name="n2", machine=later(new.machine)))
        outcomes = fleet_of(new, of_later).snapshot(of_later).outcomes.values()
        assert all(isinstance(one, Failed) and "n2" in one.error for one in outcomes)
        assert fleet_of(of_later).topology(of_later) is None


def test_addresses_that_are_not_the_interfaces_are_not_believed() -> None:
    """A record that was tampered with makes unknown."""
    record = record_of("cpu-only-vm", "n1")
    wrong = replace(record, addresses=("198.51.100.7",) * len(record.addresses))
    assert "198.51.100.7" not in repr(fleet_of(wrong).snapshot(wrong))


@every_machine
def test_the_graph_is_what_the_facts_give(machine: str) -> None:
    """Nothing but names is left out of what travels: built from the record, the graph is the machine's own."""
    (topology,) = build_view((snapshot(machine),)).topologies
    record = through_the_api(record_of(machine, "n1"))
    bare = replace(topology, hostname="n1", gpus=tuple(replace(gpu, uuid=None) for gpu in topology.gpus))
    assert with_expectations(fleet_of(record).topology(record)) == bare


def test_a_machine_that_is_more_than_a_record_holds_leaves_the_rest_of_the_record() -> None:
    """Too many devices, or a number that none can be: verdict and findings are published all the same."""
    last = facts(PciFacts).devices[-1]
    many = tuple(replace(last, bus_id=f"0000:{n:04x}") for n in range(node_facts.MOST_ITEMS + 1))
    for devices in (many, (replace(last, link_width_max=None, numa_node=-7),)):
        record = record_of(changed(snapshot(), PciFacts, devices=devices), "n1")
        assert record.machine is None and record.graph is None and record.gpus == 8


def test_a_short_record_that_names_very_many_devices_is_not_built() -> None:
    """Rows are short and pairs are many: what a node may say of itself must not keep the reader busy."""
    whole = record_of("hgx-h100-8xH100-8hca", "n1")
    assert whole.machine is not None
    row = " ".join(str(number) for number in range(3000))
    nic = whole.machine["rdma"]["devices"][0]
    of_gpus = {**whole.machine, "gpu": {"gpus": [{"indices": row}] * 512}}
    of_links = {**whole.machine, "gpu": {"gpus": [{"indices": "0", "nvlinks": [{"links": row, "active": True}]}]}}
    of_nics = {**whole.machine, "rdma": {"devices": [{**nic, "name": f"mlx5_{number}"} for number in range(512)]}}
    for machine in (of_gpus, of_links, of_nics):
        record = through_the_api(replace(whole, machine=machine))
        assert fleet_of(record).topology(record) is None


def test_no_control_character_of_a_host_is_published() -> None:
    """What the schema refuses is never sent: the record would be lost with it."""
    hostile = {"product": "\x1b[31mred\n", "nccl_environment": {"NCCL_DEBUG\x00": "INFO\x7f" * 500}}
    record = record_of(changed(snapshot("cpu-only-vm"), HostinfoFacts, **hostile), "n1")
    text = json.dumps(to_resource(record)[1], ensure_ascii=False)
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in json.loads(json.dumps(text)))
    assert "?[31mred?" in text


def test_a_record_of_the_agent_before_is_read_like_one_of_this() -> None:
    """While a DaemonSet is rolled over both stand side by side: both have the same graph."""
    for name in ("sick-l40s-x4", "titan-rtx-2x-nv2"):
        item = json.loads((ROLLOUT / f"{name}.json").read_text())
        old = replace(from_resource(item), name="n1")
        new = through_the_api(record_of(name, "n1", verdict="pass"))
        assert [change["text"] for change in old.changes] == ["driver 570 -> 580"]
        assert fleet_of(old).topology(old) == fleet_of(new).topology(new) is not None
