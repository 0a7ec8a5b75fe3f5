"""What travels in a node's record is what advice needs: the cluster's answer for like nodes is each node's own."""

from __future__ import annotations

import base64
import gzip
import ipaddress
import json
from dataclasses import replace
from typing import Any

from rigs.fleet import fleet_of, record_of, through_the_api
from rigs.recorded import H100, NAMES, changed, facts, snapshot
from rigs.tables import each_row

from agent.advice import advise
from agent.advice.request import Request
from agent.checks.verdict import build_view
from agent.cluster import node_facts
from agent.cluster.publish import to_resource
from agent.http.cluster import advise_cluster
from planner.advice import Recommendation
from probes.api import Snapshot
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from topology.paths import with_expectations

every_machine = each_row("machine", NAMES)
ASKED = (H100, "aws-p4d-8xA100-4efa", "azure-nd-a100-flat-vm", "cpu-only-vm", "gb200-nvl72-tray", "l40s-4x-pcie",
         "r760xa-2xA40-bf3", "sick-h100-dead-hca")  # fmt: skip
QUESTIONS: tuple[dict[str, Any], ...] = (
    {}, {"model": "Llama-3.1-8B"}, {"model": "Qwen2.5-0.5B", "ranks_per_node": 1}, {"nccl_version": "2.18.5"},
    {"model": "Llama-3.1-8B", "nccl_version": "2.27.7", "steps": 100},
)  # fmt: skip


def answer_of(advice: Recommendation) -> dict[str, Any]:
    """What is advised, and why; not which host is named as the example."""
    return {
        "settings": [(s.name, s.value, s.reason.rule) for s in advice.settings],
        "notes": [(n.topic, n.text) for n in advice.notes if n.topic != "cluster"],
        "needs": [(n.name, n.value, n.reason.rule) for n in advice.needs],
        "layout": advice.chosen.layout if advice.chosen else None,
        "forecast": advice.chosen.forecast if advice.chosen else None,
        "rejected": [r.reason for r in advice.rejected], "backend": advice.backend, "hours": advice.total_seconds,
        "unknowns": [text for text in advice.unknowns if "not in the forecast" not in text],
    }  # fmt: skip


@each_row(
    ("machine", "question"),
    [*((machine, QUESTIONS[1]) for machine in ASKED), *((H100, question) for question in QUESTIONS)],
)
def test_like_nodes_get_each_nodes_own_answer(machine: str, question: dict[str, Any]) -> None:
    """Two nodes like this one, asked of one of them or of the cluster: the same environment, needs and layout."""
    own = advise.answer(Request.of(nodes=2, **question), (snapshot(machine),))
    records = [through_the_api(record_of(machine, name, verdict="pass")) for name in ("n1", "n2")]
    whole, count = advise_cluster(fleet_of(*records), Request.of(**question))
    assert count == 2 and answer_of(whole) == answer_of(own)


@every_machine
def test_like_nodes_carry_equal_facts_and_their_own_addresses(machine: str) -> None:
    """Other addresses in the same subnets, other counters, another process: one machine for thousands of nodes."""
    first, second = snapshot(machine), moved(snapshot(machine))
    (shared, addresses), (other, others) = node_facts.pack(first), node_facts.pack(second)
    assert shared is not None and shared == other
    assert len(addresses) == len(others)
    for node, found in ((first, addresses), (second, others)):
        back = node_facts.of_node(node_facts.unpack(shared), name="n", addresses=found)
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


def packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode())).decode()


def later(facts: str | None) -> str:
    """As a later agent may write: a field that is needed here has another name."""
    assert facts is not None
    machine = json.loads(gzip.decompress(base64.b64decode(facts)))
    return packed(json.dumps({**machine, "interfaces": {"status": "ok", "facts": {"interfaces": [{"called": "e"}]}}}))


def test_a_record_of_another_release_makes_unknown_and_no_fact() -> None:
    """Without facts that this release reads, the answer says whose interfaces are unknown, not that none are."""
    for machine in ("cpu-only-vm", "hgx-h100-8xH100-8hca", "l40s-4x-pcie"):
        new = record_of(machine, "n1")
        of_later = through_the_api(replace(new, name="n2", facts=later(new.facts)))
        advice, _ = advise_cluster(fleet_of(new, of_later), Request())
        notes = " ".join(f"{note.text} {note.evidence}" for note in advice.notes)
        assert "no interface with an address" not in notes and "no RDMA device" not in notes
        assert "n2" in notes, notes
        assert fleet_of(of_later).topology(of_later) is None


def test_addresses_that_are_not_the_interfaces_are_not_believed() -> None:
    """A record that was tampered with makes unknown."""
    record = record_of("cpu-only-vm", "n1")
    wrong = replace(record, addresses=("198.51.100.7",) * len(record.addresses))
    advice, _ = advise_cluster(fleet_of(wrong), Request())
    assert not any("198.51.100.7" in f"{note.text}{note.evidence}" for note in advice.notes)
    assert not any("198.51.100.7" in setting.reason.evidence for setting in advice.settings)


def test_nodes_of_different_kinds_are_all_asked() -> None:
    """An interface of another name on one of three nodes is seen, whichever of them is first."""
    first = snapshot("cpu-only-vm")
    known = facts(InterfacesFacts, first).interfaces
    renamed = tuple(replace(i, name="ens9") if i.role not in ("loopback",) else i for i in known)
    second = changed(first, InterfacesFacts, interfaces=renamed, default_route="ens9")
    records = [record_of(each, name, verdict="pass") for name, each in (("n1", first), ("n2", first), ("n3", second))]
    advice, _ = advise_cluster(fleet_of(*records), Request())
    (note,) = [note for note in advice.notes if note.topic == "GLOO_SOCKET_IFNAME"]
    assert "a different name on each node" in note.text and "n3: ens9" in note.text


@every_machine
def test_the_graph_is_what_the_facts_give(machine: str) -> None:
    """Nothing but names is left out of what travels: built from the record, the graph is the machine's own."""
    (topology,) = build_view((snapshot(machine),)).topologies
    record = through_the_api(record_of(machine, "n1"))
    bare = replace(topology, hostname="n1", gpus=tuple(replace(gpu, uuid=None) for gpu in topology.gpus))
    assert with_expectations(fleet_of(record).topology(record)) == bare


def test_a_machine_that_is_more_than_a_record_holds_leaves_the_rest_of_the_record() -> None:
    """Too much text: verdict and findings are published all the same."""
    record = record_of(changed(snapshot(), PciFacts, topology_files=("x" * 512,) * 3000), "n1")
    assert record.facts is None and record.gpus == 8 and record.verdict == "pass"


def test_a_short_record_that_holds_very_much_is_not_read() -> None:
    """Compressed facts are short and pairs are many: what a node may say of itself must not keep the reader busy."""
    nic = facts(RdmaFacts).devices[0]
    many = changed(snapshot(), RdmaFacts, devices=tuple(replace(nic, name=f"mlx5_{n}") for n in range(300)))
    whole = record_of()
    blank = packed(" " * 2 * node_facts.MOST_FACTS_BYTES)
    for text in (node_facts.pack(many)[0], blank, "x" * 70000, packed("[" * 99)):
        assert text is not None
        record = through_the_api(replace(whole, facts=text))
        assert fleet_of(record).topology(record) is None


def test_no_control_character_of_a_host_is_published() -> None:
    """What the schema refuses is never sent: the record would be lost with it."""
    hostile = {"product": "\x1b[31mred\n", "nccl_environment": {"NCCL_DEBUG\x00": "INFO\x7f" * 500}}
    record = record_of(changed(snapshot("cpu-only-vm"), HostinfoFacts, **hostile), "n1")
    assert record.facts
    facts_text = gzip.decompress(base64.b64decode(record.facts)).decode()
    text = json.dumps(to_resource(record)[1], ensure_ascii=False) + facts_text
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text)
    assert "?[31mred?" in facts_text


def test_a_kind_outlives_the_node_that_it_was_first_seen_on() -> None:
    """Equal graphs of records that differ otherwise stay one kind when one of the nodes goes."""
    records = [record_of(changed(snapshot("l40s-4x-pcie"), HostinfoFacts, kernel=f"6.{name}"), name)
               for name in ("n1", "n2", "n3")]  # fmt: skip
    held = fleet_of(*records)
    assert len({record.facts for record in records}) == 3 and len({held.kind(record) for record in records}) == 1
    held.set(records[1:])
    assert [(node := held.topology(record)) and node.hostname for record in records[1:]] == ["n2", "n3"]
