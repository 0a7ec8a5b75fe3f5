"""A node's record: facts without what is the node's own, what changed since when, and agents after an outage."""

import base64
import gzip
import heapq
import ipaddress
import json
import random
import time
from collections import Counter
from dataclasses import replace

from rigs.fleet import fleet_of, record_of, through_the_api
from rigs.recorded import NAMES, changed, facts, snapshot, with_ports
from rigs.tables import each_row

from agent.checks.history import Event, History
from agent.checks.verdict import build_view
from agent.cluster.client import LONGEST_WAIT_SECONDS, backoff_seconds
from agent.cluster.nodes import MOST_CHANGES, MOST_FACTS_BYTES, NodeRecord, make_record, pack_facts, to_resource
from agent.http.worker import WorkerData
from probes.api import Failed, Snapshot
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from topology.paths import with_expectations

every_machine = each_row("machine", NAMES)


def packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode())).decode()


def unpacked(record: NodeRecord) -> str:
    return gzip.decompress(base64.b64decode(record.facts)).decode()


@every_machine
def test_like_nodes_carry_equal_facts(machine: str) -> None:
    """Other addresses in the same subnets, other counters, another process: one machine for thousands of nodes."""
    assert pack_facts(snapshot(machine)) == pack_facts(moved(snapshot(machine))) is not None


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


def test_a_record_of_another_release_makes_unknown_and_no_fact() -> None:
    """Without facts that this release reads, the probes are failed, with the node's name; there is no graph."""
    for machine in ("cpu-only-vm", "hgx-h100-8xH100-8hca", "l40s-4x-pcie"):
        new = record_of(machine, "n1")
        # a later agent may write a field that is needed here with another name
        other = {"status": "ok", "facts": {"interfaces": [{"called": "eth0"}]}}
        facts = packed(json.dumps({**json.loads(unpacked(new)), "interfaces": other}))
        of_later = through_the_api(replace(new, name="n2", facts=facts))
        outcomes = fleet_of(new, of_later).snapshot(of_later).outcomes.values()
        assert all(isinstance(one, Failed) and "n2" in one.error for one in outcomes)
        assert fleet_of(of_later).topology(of_later) is None


def test_a_record_whose_compressed_facts_are_broken_is_unknown_too() -> None:
    """Whatever gzip raises: a stream that is no gzip, that is cut, or whose compressed data is invalid."""
    new = record_of("cpu-only-vm", "n1")
    whole = base64.b64decode(new.facts or "")
    for broken in (b"{}", whole[:-9], whole[:10] + b"\x07" + whole[11:]):
        record = replace(new, facts=base64.b64encode(broken).decode())
        fleet = fleet_of(record)
        assert not fleet.is_readable(record) and fleet.topology(record) is None


def test_the_own_node_is_silent_after_three_missed_scans() -> None:
    """An agent that does not publish: its node is not silent between two scans that are far apart."""
    seen = replace(build_view((snapshot("cpu-only-vm"),)), made_at_seconds=1000.0)
    known = WorkerData()
    known.view = seen
    (often,), (seldom,) = (known.fleet("hosts", seconds).records() for seconds in (30.0, 3600.0))
    assert often.silent(1200.0) and not seldom.silent(1000.0 + 3 * 3600.0) and seldom.silent(1001.0 + 3 * 3600.0)


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
    blank = packed(" " * 2 * MOST_FACTS_BYTES)
    for text in (pack_facts(many), blank, "x" * 70000, packed("[" * 99)):
        record = through_the_api(replace(record_of(), facts=text))
        assert fleet_of(record).topology(record) is None


def test_no_control_character_of_a_host_is_published() -> None:
    """What the schema refuses is never sent: the record would be lost with it."""
    hostile = {"product": "\x1b[31mred\n", "nccl_environment": {"NCCL_DEBUG\x00": "INFO\x7f" * 500}}
    record = record_of(changed(snapshot("cpu-only-vm"), HostinfoFacts, **hostile), "n1")
    text = json.dumps(to_resource(record)[1], ensure_ascii=False) + unpacked(record)
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text)
    assert "?[31mred?" in unpacked(record)


CODE = "rdma.port.down"
START = float(int(time.time()) - 7200)


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def test_a_raised_finding_has_its_start_in_the_record() -> None:
    """It is raised by the second scan and keeps the time of the first; one that no history has raised has no time."""
    down, history = with_ports(snapshot("gb200-nvl72-tray"), "mlx5_2", state="DOWN"), History()
    for scan in range(3):
        view = history.update(build_view((replace(down, taken_at_seconds=START + 30 * scan),)))
        found = [one.get("since") for one in make_record(view, name="n1").findings if one["code"] == CODE]
        assert found == ([] if scan == 0 else [_time(START)])
    alone = [one for one in make_record(build_view((down,)), name="n1").findings if one["code"] == CODE]
    assert [one.get("since") for one in alone] == [None]


def test_the_record_holds_the_newest_and_says_so_by_its_schema() -> None:
    """As many as the definition admits, and no more bytes than fit with every finding."""
    tray = snapshot("gb200-nvl72-tray")
    events = tuple(Event(at_seconds=START + i, kind="raised", text="t" * 300, code="c" * 128, subject="s" * 128)
                   for i in range(100))  # fmt: skip
    made = make_record(replace(build_view((tray,)), events=events), name="n1")
    assert [one["at"] for one in made.changes] == [_time(START + i) for i in range(100)][-MOST_CHANGES:]
    assert len(json.dumps(made.changes)) < 24 << 10
    assert len(json.dumps(to_resource(made)[1])) < 64 << 10


AGENTS = 5000


@each_row("down_seconds", [60.0, 600.0])
def test_after_an_outage_no_second_sees_more_than_its_share(down_seconds: float) -> None:
    """All fail first at the same moment, the worst case; then requests are spread evenly over the longest pause."""
    random.seed(7)
    requests: Counter[int] = Counter()
    due = [(0.0, agent, 0) for agent in range(AGENTS)]
    while due:
        at, agent, failures = heapq.heappop(due)
        if at < down_seconds:
            heapq.heappush(due, (at + backoff_seconds(failures), agent, failures + 1))
        else:
            requests[int(at)] += 1
    assert requests.total() == AGENTS
    assert max(requests.values()) < 2 * AGENTS / LONGEST_WAIT_SECONDS, "a burst"
    assert max(requests) - down_seconds <= 1.5 * LONGEST_WAIT_SECONDS
