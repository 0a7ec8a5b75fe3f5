"""Two scans of one host say what a single one cannot: which error counters rise."""

from __future__ import annotations

from typing import Any

from rigs.tables import each_row

from agent.checks.codes import ALL_CODES
from contracts.finding import Status
from probes.api import Failed, Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts, NvLink
from probes.increases import Past, risen_since, rising
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort

HEALTHY = {"replay": 3, "recovery": 0, "crc_flit": 900}


def scan_at(at: float, *, link_downed: int | None = 4, errors: dict[str, int] | None = None, **other: Any) -> Snapshot:
    port = RdmaPort(port=1, counters=None if link_downed is None else {"link_downed": link_downed})
    rdma = RdmaFacts(devices=(RdmaDevice(name="mlx5_0", kind="hca", ports=(port,)),), source="sysfs")
    link = NvLink(link=7, active=True, errors=HEALTHY if errors is None else errors)
    gpu = Gpu(index=2, bus_id="0000:1b:00.0", uuid="GPU-a", nvlinks=(link,), nvlinks_known=True)
    gpus = GpuFacts(driver_version=other.pop("driver", "570.1"), cuda_version=None, gpus=(gpu,))
    outcomes = other.pop("outcomes", {"rdma": Ok(facts=rdma), "gpu": Ok(facts=gpus)})
    return Snapshot(
        hostname=other.pop("hostname", "node0"), taken_at_seconds=at, topoflight_version="1", outcomes=outcomes
    )


def test_counters_that_stand_still_say_nothing() -> None:
    assert rising(scan_at(0), scan_at(15)) == ()


def test_a_link_that_went_down_and_an_nvlink_that_was_trained_again() -> None:
    found = rising(scan_at(0), scan_at(15, link_downed=5, errors={**HEALTHY, "recovery": 2, "crc_flit": 1500}))
    assert [(f.code, f.status, f.subject) for f in found] == [
        ("rdma.counters.rising", Status.FAIL, "mlx5_0:1"),
        ("gpu.nvlink.errors", Status.WARN, "GPU2"),
    ]
    assert found[0].evidence == ("link_downed: 4, then 5, 15 s later",)
    assert found[1].evidence == ("link 7 recovery: 0, then 2",)
    assert {f.code for f in found} <= set(ALL_CODES)


@each_row(
    "later",
    [
        scan_at(15, link_downed=None, errors={}),
        scan_at(15, link_downed=0, errors={"replay": 0, "recovery": 0}),
        scan_at(0, link_downed=9),
        scan_at(15, link_downed=9, errors={"replay": 9}, hostname="node1"),
        scan_at(15, outcomes={"rdma": Failed(error="x")}),
    ],
    ids=["unreadable", "reset", "same time", "another host", "failed"],
)
def test_what_cannot_be_compared_gives_no_finding(later: Snapshot) -> None:
    assert rising(scan_at(0), later) == ()


def test_another_driver_counts_anew() -> None:
    assert rising(scan_at(0), scan_at(15, errors={"replay": 99}, driver="575.2")) == ()


def gpus(**changes: Any) -> Snapshot:
    gpu = Gpu(index=2, bus_id="0000:1b:00.0", uuid="GPU-a", **changes.pop("gpu", {}))
    facts = GpuFacts(driver_version="570.1", cuda_version=None, gpus=(gpu,))
    return scan_at(changes.pop("at", 0.0), outcomes={"gpu": Ok(facts=facts)}, **changes)


@each_row(
    ("before", "after", "expected"),
    [
        ({"pcie_replays": 100}, {"pcie_replays": 108}, None),
        ({"pcie_replays": 100}, {"pcie_replays": 109}, ("gpu.counters.rising", Status.WARN)),
        ({"pcie_replays": None}, {"pcie_replays": 900}, None),
        ({"ecc_uncorrected": 2}, {"ecc_uncorrected": 3}, ("gpu.counters.rising", Status.FAIL)),
        ({"ecc_uncorrected": 2}, {"ecc_uncorrected": 0}, None),
        ({"xids": (31,)}, {"xids": (31, 79)}, ("gpu.xid.new", Status.FAIL)),
        ({"xids": (79,)}, {"xids": (79, 79)}, ("gpu.xid.new", Status.FAIL)),
        ({"xids": (79,)}, {"xids": (79, 31)}, ("gpu.xid.new", Status.INFO)),
        ({"xids": ()}, {"xids": (39,)}, ("gpu.xid.new", Status.WARN)),
        ({"xid_events": ()}, {"xid_events": (79,)}, ("gpu.xid.new", Status.FAIL)),
        ({"xids": (), "xid_events": ()}, {"xids": (79,), "xid_events": (79,)}, ("gpu.xid.new", Status.FAIL)),
        ({"xids": (79,), "xid_events": ()}, {"xids": (79,), "xid_events": ()}, None),
        ({"xids": (79,)}, {"xids": (79,)}, None),
        ({"xids": None}, {"xids": (79,)}, None),
    ],
)
def test_what_rises_on_a_gpu(
    before: dict[str, Any], after: dict[str, Any], expected: tuple[str, Status] | None
) -> None:
    """PCIe replays by DCGM's limit, memory errors and Xids at once; what was not read gives no verdict."""
    found = rising(gpus(gpu=before), gpus(gpu=after, at=15.0))
    assert [(f.code, f.status) for f in found] == ([expected] if expected else [])
    assert {f.code for f in found} <= set(ALL_CODES)


@each_row(("each", "expected"), [(2, 0), (3, 1), (9, 1)])
def test_replays_that_rise_slowly_add_up_over_several_scans(each: int, expected: int) -> None:
    """Every 15 s a few, never more than eight in one interval: eight a minute is the limit all the same."""
    past, found = Past(), ()
    for scan in range(8):
        now = gpus(gpu={"pcie_replays": 100 + each * scan}, at=15.0 * scan)
        found = risen_since(past.snapshots, now)
        past.add((now,))
    assert [f.code for f in found] == ["gpu.counters.rising"] * expected


def test_what_rose_is_told_as_long_as_it_is_recent() -> None:
    """Not in the one scan only that saw it first: for a minute, and then no more."""
    past, told = Past(), []
    for scan in range(12):
        now = gpus(gpu={"pcie_replays": 100 if scan < 3 else 150, "xids": () if scan < 3 else (79,)}, at=15.0 * scan)
        told.append({f.code for f in risen_since(past.snapshots, now)})
        past.add((now,))
    both = {"gpu.counters.rising", "gpu.xid.new"}
    assert told == [set()] * 3 + [both] * 5 + [set()] * 4


@each_row("interval", [1.0, 15.0, 60.0, 300.0])
def test_few_scans_are_kept_however_often_one_is_made(interval: float) -> None:
    """And the oldest is at least a minute old once there is one."""
    past = Past()
    for scan in range(200):
        past.add((gpus(gpu={}, at=interval * scan),))
    kept = past.snapshots
    assert len(past._kept) <= 8
    assert interval * 200 - kept[0].taken_at_seconds >= min(60.0, interval)
    assert kept[0].taken_at_seconds >= interval * 199 - max(90.0, interval)


def test_a_counter_that_was_reset_is_still_seen_to_rise() -> None:
    """It fell against the scan of a minute ago, and rose since the last one."""
    past = Past()
    for at, replays in ((0.0, 900), (30.0, 0), (60.0, 0)):
        past.add((gpus(gpu={"pcie_replays": replays}, at=at),))
    found = risen_since(past.snapshots, gpus(gpu={"pcie_replays": 50}, at=75.0))
    assert [f.code for f in found] == ["gpu.counters.rising"]


@each_row("name", ["receive", "recovery_failed", "effective", "symbol"])
def test_blackwells_counters_of_links_are_judged(name: str) -> None:
    """100,000 more in a minute is no healthy link, and one lost link is one too many."""
    errors = {"receive": 0, "recovery_failed": 0, "effective": 0, "symbol": 0}
    found = rising(scan_at(0, errors=errors), scan_at(60, errors={**errors, name: 100_000}))
    assert [(f.code, f.status) for f in found] == [("gpu.nvlink.errors", Status.WARN)]
    assert f"{name}: 0, then 100000" in found[0].evidence[0]
    few = rising(scan_at(0, errors=errors), scan_at(60, errors={**errors, name: 2}))
    assert len(few) == (name in ("receive", "recovery_failed"))


def test_crc_errors_count_by_their_rate() -> None:
    """DCGM's limit is a hundred a second: 1499 in 15 s are below it."""
    for rise, expected in ((1499, 0), (1500, 1)):
        errors = {**HEALTHY, "crc_flit": HEALTHY["crc_flit"] + rise}
        assert len(rising(scan_at(0), scan_at(15, errors=errors))) == expected


def test_a_gpu_that_was_lost_is_known_by_its_place() -> None:
    """It no longer tells its UUID, but its Xid is in the log."""
    before = gpus(gpu={"xids": ()})
    lost = Gpu(index=2, bus_id="0000:1b:00.0", error="GPU_IS_LOST", xids=(79,))
    facts = GpuFacts(driver_version="570.1", cuda_version=None, gpus=(lost,))
    (found,) = rising(before, scan_at(15, outcomes={"gpu": Ok(facts=facts)}))
    assert (found.code, found.subject) == ("gpu.xid.new", "GPU2")
