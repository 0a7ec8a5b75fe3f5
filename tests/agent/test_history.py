"""Findings over time: raised by the second scan, cleared by the third without; a node's record of them, its facts."""

import base64
import gzip
import heapq
import html
import ipaddress
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rigs.fleet import fleet_of, record_of, through_the_api
from rigs.recorded import NAMES, changed, each, facts, raised, snapshot, with_outcomes, with_ports
from rigs.tables import each_row, rows_of

from agent.checks import history
from agent.checks.expect import NodeExpectation, parse
from agent.checks.history import History
from agent.checks.host_checks import ALL_CODES
from agent.checks.view import Event, View, build_view
from agent.cluster.client import LONGEST_WAIT_SECONDS, choose_backoff
from agent.cluster.nodes import MAX_CHANGES, MAX_FACTS_BYTES, NodeRecord, make_record, pack_facts, to_resource
from agent.http import pages
from agent.http.worker import WorkerData
from agent.metrics import expose
from contracts.finding import Status
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts, NvLink
from probes.hostinfo.probe import HostinfoFacts
from probes.increases import EarlierScans, compare_scans, find_risen
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort
from topology.paths import with_expectations

rows = rows_of(__file__)

STEP = 30.0
START = float(int(time.time()) - 7200)


@pytest.fixture(scope="module")
def tray() -> Snapshot:
    return snapshot("gb200-nvl72-tray")


def port_down(found: Snapshot, device: str = "mlx5_2", state: str = "DOWN", downed: int = 0) -> Snapshot:
    return with_ports(found, device, state=state, counters={"link_downed": downed})


def at(view: View, seconds: float, name: str = "n") -> View:
    """The view as a scan of another node at another time shows it: equal nodes differ in nothing else."""
    snapshot = replace(view.snapshots[0], hostname=name, taken_at_seconds=START + seconds)
    return replace(view, snapshots=(snapshot,), checks=tuple(replace(check, node=name) for check in view.checks))


@each_row(("scans", "words"), rows("flicker"))
def test_a_finding_is_raised_by_its_second_scan_and_cleared_by_the_third_without(tray, scans, words):
    """By the first letters of scans (sound, down, or blind: its probe failed) and of the verdicts after each."""
    views = {"s": build_view((tray,)), "d": build_view((port_down(tray),)),
             "b": build_view((with_outcomes(tray, rdma=Absent(why="not read")),))}  # fmt: skip
    tracker = History()
    shown = [tracker.update(at(views[scan], STEP * i)) for i, scan in enumerate(scans)]
    assert "".join(view.verdict.word[0] for view in shown) == words
    assert ["rdma.port.down" in raised(view) for view in shown] == [word == "f" for word in words]
    told = [event.kind for event in shown[-1].events if event.code == "rdma.port.down"]
    assert told == (["raised"] if words.endswith("f") else ["raised", "cleared"])


def test_a_finding_whose_question_goes_away_clears(tray: Snapshot) -> None:
    """Withdrawn as a whole, or one of several of which another cannot be read; also in the agent that starts next."""
    blind = with_outcomes(tray, rdma=Absent(why="not read"))
    both, one = parse(["gpus=72,hcas=1"]), parse(["hcas=1"])
    rows: list[tuple[str, Snapshot, tuple[NodeExpectation, ...], bool]] = [
        ("withdrawn", tray, (), False),
        ("one of two withdrawn, the other unknown", blind, one, False),
        ("met", tray, parse(["gpus=1,hcas=1"]), False),
        ("still unmet", tray, both, True),
        ("the file cannot be read", tray, (), True),
        ("GPUs cannot be read", with_outcomes(tray, gpu=Absent(why="no driver")), both, True),
    ]
    wrong = []
    for name, found, wanted, stays in rows:
        first = build_view((tray,), expected=both)
        tracker = History()
        shown = [tracker.update(at(first, STEP * i)) for i in range(2)]
        assert "expect.node.unmet" in raised(shown[-1])
        later = build_view((found,), expected=wanted, unread="expect.yaml: not read" if "file" in name else "")
        after = [tracker.update(at(later, STEP * (2 + i))) for i in range(history.SCANS_TO_CLEAR)]
        held = ["expect.node.unmet" in raised(view) for view in after]
        if held != [True, True, stays]:
            wrong.append((name, held))
    assert not wrong, wrong


def test_since_when_and_after_what(tray: Snapshot) -> None:
    """The words of the page, and the metric."""
    sound, sick = build_view((tray,)), build_view((port_down(tray),))
    newer = build_view((changed(port_down(tray), GpuFacts, driver_version="580.65.06"),))
    tracker = History()
    for i, view in enumerate([sound, sound, sick, sick, sound, sound, sound, sound, sick, sick, *[sound] * 3]):
        tracker.update(at(view, STEP * i))
    late = STEP * 13
    shown = [tracker.update(at(newer, late + STEP * i)) for i in range(14)]
    assert "rdma.port.down" in raised(shown[-1]) and "rdma.port.down" not in raised(shown[2])
    began = history.clock(START + late)
    words = f"rdma.port.down on mlx5_2:1: since {began}, after driver 570.124.06 -> 580.65.06 ({began})"
    assert words in html.unescape(pages.render_node_page(shown[-1], None, "no model", trouble=None))
    body = expose(shown[-1], "")[0].decode()
    shown_at = re.search(r'topoflight_finding_since_seconds{code="rdma.port.down",severity="fail"} (\S+)', body)
    assert shown_at and float(shown_at[1]) == pytest.approx(START + late)
    told = history.describe_changes(shown[-1])
    assert sum("raised rdma.port.down" in line for line in told) == 3


def changes_of(view: View) -> dict[str, float]:
    """The samples of topoflight_change_timestamp_seconds by kind."""
    found = re.findall(r'topoflight_change_timestamp_seconds{kind="(\w+)"} (\S+)', expose(view, "")[0].decode())
    return {kind: float(at) for kind, at in found}


def test_the_metric_of_changes_has_the_last_of_each_kind(tray: Snapshot) -> None:
    """Versions at the scan that shows them, hardware once it persists; nothing on a node that starts, or is sick."""
    rdma = facts(RdmaFacts, tray)
    tracker = History()
    one = changed(tray, HostinfoFacts, kernel="6.99.0")
    new = tuple(replace(each, firmware="99.1.1") if each.name == "mlx5_1" else each for each in rdma.devices)
    two = changed(one, RdmaFacts, devices=new)
    three = changed(two, RdmaFacts, devices=new[1:])
    four = changed(three, GpuFacts, driver_version="580.65.06")
    five = changed(four, GpuFacts, driver_version="580.82.07")
    steps = [tray, tray, port_down(tray), port_down(tray), one, two, three, three, four, five]
    seen = [tracker.update(at(build_view((each,)), STEP * i)) for i, each in enumerate(steps)]
    shown = [changes_of(view) for view in seen]
    assert "mlx5_0 missing" in [event.text for event in seen[-1].events]
    when = [START + STEP * i for i in range(len(steps))]
    assert shown[:4] == [{}] * 4
    assert shown[4:6] == [{"kernel": when[4]}, {"kernel": when[4], "firmware": when[5]}]
    assert shown[6] == shown[5], "hardware that is gone in one scan may be back in the next"
    assert shown[7] == {**shown[5], "hardware": when[7]}
    assert shown[8:] == [{**shown[7], "driver": when[8]}, {**shown[7], "driver": when[9]}]


@each_row("silent", ["gpu", "rdma"])
def test_what_begins_to_answer_has_not_come(tray: Snapshot, silent: str) -> None:
    """An agent that starts before the driver does sees GPUs later: nobody put them in."""
    mute = with_outcomes(tray, **{silent: Absent(why="no driver")})
    tracker = History()
    shown = [tracker.update(at(build_view((each,)), STEP * i)) for i, each in enumerate([mute, mute, tray, tray, tray])]
    assert any(event.text.startswith(f"probe {silent}") for event in shown[-1].events)
    assert "hardware" not in changes_of(shown[-1])
    tracker, lost = History(), changed(tray, GpuFacts, gpus=(), driver_version=None, driver_error="ERROR_UNKNOWN")
    for start, found in ((0.0, build_view((tray,))), (100.0, build_view((lost,))), (200.0, build_view((tray,)))):
        for i in range(20):
            view = tracker.update(at(found, STEP * (start + i)))
    assert changes_of(view) == {}, "a driver that stops and answers again: no GPU has gone or come"


# Racks rebooted one after the other, each tray's agent with it.


def phases(tray: Snapshot) -> dict[str, View]:
    """What the agent of a tray sees, in the order of a boot."""
    booted = changed(tray, HostinfoFacts, boot_id="the next one")
    training = [
        replace(gpu, fabric_state="in_progress", fabric_clique=None,
                nvlinks=each(gpu.nvlinks, active=False))
        for gpu in facts(GpuFacts, tray).gpus
    ]  # fmt: skip
    no_driver = with_outcomes(port_down(booted, "", "INIT"), **dict.fromkeys(("gpu", "imex"), Absent(why="no driver")))
    early = replace(changed(port_down(booted, "", "DOWN"), GpuFacts, gpus=tuple(training)), taken_at_seconds=1.0)
    flapped = replace(port_down(early, "", "ARMED", downed=2), taken_at_seconds=31.0)
    sound = port_down(booted, "", "ACTIVE", downed=2)
    found = {
        "before": build_view((tray,)), "no driver": build_view((no_driver,)), "training": build_view((early,)),
        "flapped": build_view((flapped,), earlier=(early,)), "sound": build_view((sound,)),
        "fault": build_view((port_down(sound, "mlx5_1", "DOWN", downed=2),)),
    }  # fmt: skip
    assert {"gpu.fabric.incomplete", "rdma.counters.rising"} <= raised(found["flapped"]), "boot as one scan sees it"
    return found


def scans(rack: int) -> Iterator[tuple[str, float]]:
    """Phase and time of each scan of a tray in this rack; while it is down there is none."""
    down = 120.0 + rack * 600.0
    steps = ["no driver", "no driver", "no driver", "training", "training", "flapped", "flapped"]
    for i in range(4):
        yield "before", down - STEP * (4 - i)
    for i, phase in enumerate([*steps, *["sound"] * 8]):
        yield phase, down + 90.0 + STEP * i


def test_a_reboot_raises_nothing_and_a_fault_after_it_is_named_within_two_scans(tray: Snapshot) -> None:
    """Of a tray in the first and in the last rack of a rolling reboot: trays differ by the time alone."""
    views = phases(tray)
    for rack in (0, 15):
        times = list(scans(rack))
        before, after, clock = History(), times[4:], [times[4][1]]
        booted = History(lambda clock=clock, began=clock[0] - 60.0: clock[0] - began)  # the agent starts with the host
        assert not any(raised(before.update(at(views[phase], when))) for phase, when in times[:4])
        last = times[-1][1]
        for phase, when in [*after, ("fault", last + STEP), ("fault", last + 2 * STEP)]:
            clock[0] = when
            shown = raised(booted.update(at(views[phase], when)))
            assert phase == "fault" or not shown, (phase, when)
        assert "rdma.port.down" in shown


def test_a_fault_of_boot_that_stays_is_named_when_the_host_has_settled(tray: Snapshot) -> None:
    views, uptime = phases(tray), [0.0]
    tracker = History(lambda: uptime[0])
    first = None
    for i in range(20):
        uptime[0] = 60.0 + STEP * i
        if "gpu.fabric.incomplete" in raised(tracker.update(at(views["training"], STEP * i))):
            first = uptime[0]
            break
    assert first == history.SETTLING_SECONDS


HEALTHY = {"replay": 3, "recovery": 0, "crc_flit": 900}


def scan_at(at: float, *, link_downed: int | None = 4, errors: dict[str, int] | None = None, **other) -> Snapshot:
    port = RdmaPort(port=1, counters=None if link_downed is None else {"link_downed": link_downed})
    rdma = RdmaFacts(devices=(RdmaDevice(name="mlx5_0", kind="hca", ports=(port,)),))
    link = NvLink(link=7, active=True, errors=HEALTHY if errors is None else errors)
    gpu = Gpu(index=2, bus_id="0000:1b:00.0", uuid="GPU-a", nvlinks=(link,), nvlinks_known=True)
    gpus = GpuFacts(driver_version=other.pop("driver", "570.1"), cuda_version=None, gpus=(gpu,))
    outcomes = other.pop("outcomes", {"rdma": Ok(facts=rdma), "gpu": Ok(facts=gpus)})
    return Snapshot(hostname=other.pop("hostname", "node0"), taken_at_seconds=at, outcomes=outcomes)


def test_a_link_that_went_down_and_an_nvlink_that_was_trained_again() -> None:
    found = compare_scans(scan_at(0), scan_at(15, link_downed=5, errors={**HEALTHY, "recovery": 2, "crc_flit": 1500}))
    assert [(f.code, f.status, f.subject) for f in found] == [
        ("rdma.counters.rising", Status.FAIL, "mlx5_0:1"),
        ("gpu.nvlink.errors", Status.WARN, "GPU2"),
    ]
    assert found[0].evidence == ("link_downed: 4, then 5, 15 s later",)
    assert found[1].evidence == ("link 7 recovery: 0, then 2",)
    assert {f.code for f in found} <= set(ALL_CODES)


def test_what_cannot_be_compared_gives_no_finding() -> None:
    failed = scan_at(15, outcomes={"rdma": Failed(error="x")})
    later = {what: scan_at(**row) for what, row in rows("incomparable")().items()} | {"failed": failed}
    assert {what: compare_scans(scan_at(0), scan) for what, scan in later.items()} == dict.fromkeys(later, ())


def gpus(**changes) -> Snapshot:
    gpu = Gpu(index=2, bus_id="0000:1b:00.0", uuid="GPU-a", **changes.pop("gpu", {}))
    facts = GpuFacts(driver_version="570.1", cuda_version=None, gpus=(gpu,))
    return scan_at(changes.pop("at", 0.0), outcomes={"gpu": Ok(facts=facts)}, **changes)


@each_row(("before", "after", "expected"), rows("rises"))
def test_what_rises_on_a_gpu(before: dict, after: dict, expected: list[str] | None) -> None:
    """PCIe replays by DCGM's limit, memory errors and Xids at once; what was not read gives no verdict."""
    found = compare_scans(gpus(gpu=before), gpus(gpu=after, at=15.0))
    assert [[f.code, f.status] for f in found] == ([expected] if expected else [])
    assert {f.code for f in found} <= set(ALL_CODES)


@each_row(("each", "expected"), [(2, 0), (3, 1), (9, 1)])
def test_replays_that_rise_slowly_add_up_over_several_scans(each: int, expected: int) -> None:
    """Every 15 s a few, never more than eight in one interval: eight a minute is the limit all the same."""
    past, found = EarlierScans(), ()
    for scan in range(8):
        now = gpus(gpu={"pcie_replays": 100 + each * scan}, at=15.0 * scan)
        found = find_risen(past.snapshots, now)
        past.add((now,))
    assert [f.code for f in found] == ["gpu.counters.rising"] * expected


def test_what_rose_is_told_as_long_as_it_is_recent() -> None:
    """Not in the one scan only that saw it first: for a minute, and then no more."""
    past, told = EarlierScans(), []
    for scan in range(12):
        now = gpus(gpu={"pcie_replays": 100 if scan < 3 else 150, "xids": () if scan < 3 else (79,)}, at=15.0 * scan)
        told.append({f.code for f in find_risen(past.snapshots, now)})
        past.add((now,))
    both = {"gpu.counters.rising", "gpu.xid.new"}
    assert told == [set()] * 3 + [both] * 5 + [set()] * 4


@each_row("interval", [1.0, 15.0, 60.0, 300.0])
def test_few_scans_are_stored_however_often_one_is_made(interval: float) -> None:
    """And the oldest is at least a minute old once there is one."""
    past = EarlierScans()
    for scan in range(200):
        past.add((gpus(gpu={}, at=interval * scan),))
    stored = past.snapshots
    assert len(past._kept) <= 8
    assert interval * 200 - stored[0].taken_at_seconds >= min(60.0, interval)
    assert stored[0].taken_at_seconds >= interval * 199 - max(90.0, interval)


def test_a_counter_that_was_reset_is_still_seen_to_rise() -> None:
    """It fell against the scan of a minute ago, and rose since the last one."""
    past = EarlierScans()
    for at, replays in ((0.0, 900), (30.0, 0), (60.0, 0)):
        past.add((gpus(gpu={"pcie_replays": replays}, at=at),))
    found = find_risen(past.snapshots, gpus(gpu={"pcie_replays": 50}, at=75.0))
    assert [f.code for f in found] == ["gpu.counters.rising"]


@each_row(("name", "rise", "seconds", "found"), rows("link_errors"))
def test_errors_of_links_are_judged_by_their_kind(name: str, rise: int, seconds: float, found: int) -> None:
    """One lost link is one too many; what a healthy link has counts by its rate."""
    before = {**HEALTHY, "receive": 0, "recovery_failed": 0, "effective": 0, "symbol": 0}
    after = compare_scans(scan_at(0, errors=before), scan_at(seconds, errors={**before, name: before[name] + rise}))
    assert [(f.code, f.status) for f in after] == [("gpu.nvlink.errors", Status.WARN)] * found


def test_a_gpu_that_was_lost_is_known_by_its_place() -> None:
    """It no longer tells its UUID, but its Xid is in the log."""
    before = gpus(gpu={"xids": ()})
    lost = Gpu(index=2, bus_id="0000:1b:00.0", error="GPU_IS_LOST", xids=(79,))
    facts = GpuFacts(driver_version="570.1", cuda_version=None, gpus=(lost,))
    (found,) = compare_scans(before, scan_at(15, outcomes={"gpu": Ok(facts=facts)}))
    assert (found.code, found.subject) == ("gpu.xid.new", "GPU2")


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


def test_a_record_whose_facts_are_broken_or_hold_very_much_has_no_graph() -> None:
    """Whatever gzip raises: no gzip, cut, or invalid inside. A short record must not keep the reader busy."""
    nic = facts(RdmaFacts).devices[0]
    many = changed(snapshot(), RdmaFacts, devices=tuple(replace(nic, name=f"mlx5_{n}") for n in range(300)))
    blank, whole = packed(" " * 2 * MAX_FACTS_BYTES), base64.b64decode(record_of("cpu-only-vm").facts or "")
    broken = [base64.b64encode(each).decode() for each in (b"{}", whole[:-9], whole[:10] + b"\x07" + whole[11:])]
    for text in (*broken, pack_facts(many), blank, "x" * 70000, packed("[" * 99)):
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
    assert [one["at"] for one in made.changes] == [_time(START + i) for i in range(100)][-MAX_CHANGES:]
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
            heapq.heappush(due, (at + choose_backoff(failures), agent, failures + 1))
        else:
            requests[int(at)] += 1
    assert requests.total() == AGENTS
    assert max(requests.values()) < 2 * AGENTS / LONGEST_WAIT_SECONDS, "a burst"
    assert max(requests) - down_seconds <= 1.5 * LONGEST_WAIT_SECONDS
