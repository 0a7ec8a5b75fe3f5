"""What links should carry: held against published results, in whatever words they come, healthy and broken."""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from busbw_rows import PlaceError, Row, place
from rigs.tables import each_row

from topology.expected import (
    FAILS_BELOW,
    ExpectedBandwidth,
    Paths,
    UnknownBandwidth,
    exact_rate,
    expect_bandwidth,
    rate_between,
)

GB, GIB = 1e9, 1 << 30


Ranks = tuple[Paths, int]


def switch(links: int, per_link: float, capability: tuple[int, int], ranks: int, **more: object) -> Ranks:
    """GPUs of one host behind NVSwitch, and how many ranks there are."""
    nvls = capability >= (9, 0)
    made = Paths(inside="NVSwitch", link=exact_rate(links * per_link * GB), capability=capability, nvls=nvls)
    return replace(made, **more), ranks  # type: ignore[arg-type]


def h100(ranks: int = 8, **more: object) -> Ranks:
    return switch(18, 20.6, (9, 0), ranks, **more)


def a100(ranks: int = 8, **more: object) -> Ranks:
    return switch(12, 20.0, (8, 0), ranks, **more)


def expect(joined: Ranks, op: str, size_bytes: int) -> ExpectedBandwidth | UnknownBandwidth:
    return expect_bandwidth(joined[0], op, size_bytes, joined[1])


def hosts(count: int, nics: float) -> dict[str, object]:
    return {"groups": count, "between": "RDMA", "wire": exact_rate(nics * GB)}


PCIE_4 = Paths(inside="PCIe", link=exact_rate(24 * GB), capability=(8, 0))
OTHERS = {
    "v100 mesh": Paths(inside="NVLink", link=exact_rate(120 * GB), capability=(7, 0)),
    "PCIe": PCIE_4,
    "shared memory": replace(PCIE_4, inside="shared memory"),
}


def published() -> list[tuple[Ranks, str, int, float, bool]]:
    """(paths, operation, S, GB/s, whether the source calls it healthy) of each row of published.csv."""
    kinds = {"h100": h100, "b200": partial(switch, 18, 40.1, (10, 0)), "a100": a100}
    text = (Path(__file__).with_name("published.csv")).read_text(encoding="utf-8")
    made = []
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        machine, ranks, size = row["machine"], int(row["ranks"]), int(float(row["size_GiB"]) * GIB)
        more = hosts(int(row["hosts"]), float(row["nics_GBps"])) if row["nics_GBps"] else {}
        paths = kinds[machine](ranks, **more) if machine in kinds else (OTHERS[machine], ranks)
        made.append((paths, row["op"], size, float(row["busbw_GBps"]), row["healthy"] == "yes"))
    return made


@each_row(("paths", "op", "size", "busbw", "healthy"), published())
def test_published_results_are_judged_as_their_sources_do(paths, op, size, busbw, healthy):
    found = expect(paths, op, size)
    assert isinstance(found, ExpectedBandwidth)
    assert (busbw * GB >= found.interval.low) is healthy, found.describe()
    assert found.interval.low <= found.interval.mid <= found.interval.high
    assert found.derivation


def test_two_ranks_are_not_held_to_the_ring_of_eight() -> None:
    """The own part's copy weighs most in a ring of two; all-reduce is no ring with eight."""
    two, eight = expect(h100(2), "all_gather", 8 * GIB), expect(h100(8), "all_gather", 8 * GIB)
    assert isinstance(two, ExpectedBandwidth) and isinstance(eight, ExpectedBandwidth)
    assert two.interval.mid < 0.8 * eight.interval.mid
    switched = expect(h100(8), "all_reduce", 8 * GIB)
    assert isinstance(switched, ExpectedBandwidth) and switched.algorithm == "NVLS"
    assert switched.interval.low > eight.interval.mid


def test_bytes_count_by_rank_and_not_in_total() -> None:
    """1 GiB over 256 GPUs is 4 MiB of each: latency, and no fault (NVIDIA/nccl#1218: 200 GB/s with 8 MiB)."""
    small = expect(h100(256, **hosts(32, 400)), "all_gather", 2 * GIB)
    large = expect(h100(256, **hosts(32, 400)), "all_gather", 256 * GIB)
    assert isinstance(small, ExpectedBandwidth) and isinstance(large, ExpectedBandwidth)
    assert small.interval.low <= 200 * GB
    assert FAILS_BELOW * large.interval.low <= 200 * GB < large.interval.low


@each_row(
    ("paths", "why"),
    [
        ((Paths(), 1), "one rank"),
        ((Paths(), 8), "not known"),
        ((Paths(groups=2), 2), "hosts is not known"),
        ((Paths(inside="NVSwitch", link=exact_rate(0.0)), 8), "not known"),
        (a100(link=rate_between(370 * GB, 722 * GB), sources=("generation not known",)), "generation"),
    ],
)
def test_what_cannot_be_known_is_unknown(paths: Ranks, why: str) -> None:
    found = expect(paths, "all_gather", GIB)
    assert isinstance(found, UnknownBandwidth)
    assert why in found.describe()


def test_a_link_of_unknown_generation_still_gives_its_range_and_an_operation_without_a_model_none() -> None:
    found = expect(a100(link=rate_between(370 * GB, 722 * GB), nvls=None), "all_gather", 8 * GIB)
    assert isinstance(found, UnknownBandwidth) and found.range is not None
    assert found.range.low < 330 * GB < 700 * GB < found.range.high
    assert isinstance(expect(h100(), "all_to_all", GIB), UnknownBandwidth)


def test_one_and_several_streams_fill_a_slow_wire_and_not_a_fast_one() -> None:
    """NVIDIA/nccl#209: 60 % of 32 Gb/s at best; A3 Mega over TCP: 4 of 200 GB/s."""
    slow = expect((Paths(groups=2, between="sockets", wire=exact_rate(1.25 * GB)), 2), "all_reduce", GIB)
    fast = expect((Paths(groups=2, between="sockets", wire=exact_rate(200 * GB)), 2), "all_reduce", GIB)
    assert isinstance(slow, ExpectedBandwidth) and isinstance(fast, ExpectedBandwidth)
    assert slow.interval.mid > 0.8 * 1.25 * GB
    assert fast.interval.mid < 0.1 * 200 * GB
    assert fast.interval.low < 4 * GB


WORDS = yaml.safe_load(Path(__file__).with_name("busbw_rows.yaml").read_text(encoding="utf-8"))


def row(machine: str, gpus: int, nodes: int) -> Row:
    return Row(
        machine=machine, gpus_per_node=gpus, nodes=nodes, op="all_gather", bytes=GIB, busbw=GB, healthy="yes",
        source="", kind="", nccl="2.27", nvls="", gdr="",
    )  # fmt: skip


@each_row(("machine", "gpus", "nodes", "inside", "link", "between", "wire"), WORDS["placed"])
def test_a_machine_in_words_is_placed(machine, gpus, nodes, inside, link, between, wire):
    found = place(row(machine, gpus, nodes))
    assert (found.inside, found.between) == (inside, between)
    assert (found.link.low / GB if found.link else None) == (pytest.approx(link) if link else None)
    assert (found.wire.low / GB if found.wire else None) == (pytest.approx(wire) if wire else None)


@each_row(("machine", "nodes"), WORDS["unplaced"])
def test_what_the_words_do_not_say_is_not_guessed(machine: str, nodes: int) -> None:
    with pytest.raises(PlaceError, match=machine):
        place(row(machine, 8, nodes))
