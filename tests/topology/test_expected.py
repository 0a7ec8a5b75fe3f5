"""What links should carry: held against published results, in whatever words they come, healthy and broken.

From a node's links to the paths of the ranks that run on it: with current links, and when healthy.
"""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from busbw_rows import PlaceError, Row, place
from rigs.recorded import snapshot
from rigs.tables import data_of, each_row, rows_of

from planner.forecast import machines
from topology.build import build
from topology.expected import (
    FAILS_BELOW,
    ExpectedBandwidth,
    Paths,
    UnknownBandwidth,
    exact_rate,
    expect_bandwidth,
    rate_between,
)
from topology.formats.text import parse
from topology.graph import NodeTopology, PathClass
from topology.paths import BarName, host_links, join_hosts, with_expectations

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


WORDS = data_of(__file__, "busbw_rows.yaml")


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


rows = rows_of(__file__, "paths.yaml")


def node(name: str) -> NodeTopology:
    return with_expectations(build(snapshot(name)))


def links(machine: NodeTopology, ranks: int, bar: BarName = "with current links") -> Paths:
    return host_links(machine, range(ranks), bar)


@each_row(("machine", "ranks", "inside", "gigabytes"), rows("links"))
def test_the_links_are_those_of_the_ranks_that_run(machine: str, ranks: int, inside: str, gigabytes: float) -> None:
    for bar in ("with current links", "when healthy"):
        found = links(node(machine), ranks, bar)  # type: ignore[arg-type]
        assert (found.inside, found.link.low / GB) == (inside, pytest.approx(gigabytes)), bar


def test_800g_nics_behind_gpus_of_their_own_switch_are_not_halved_by_the_hosts_link() -> None:
    """GB300 and B300: the GPU hangs on ConnectX-8's own PCIe 6 switch. In a plain slot of PCIe 5 the bound stays."""
    tray = node("gb200-nvl72-tray")
    nics = tuple(
        replace(nic, rate_bytes_per_second=100 * GB, pcie_bytes_per_second=48 * GB, pcie_running_bytes_per_second=None)
        for nic in tray.nics
    )
    for capability, each in (((10, 3), 100.0), ((10, 0), 48.0)):
        gpus = tuple(replace(gpu, compute_capability=capability) for gpu in tray.gpus)
        for bar in ("with current links", "when healthy"):
            found = links(replace(tray, nics=nics, gpus=gpus), 4, bar)  # type: ignore[arg-type]
            assert found.wire.low / GB == pytest.approx(4 * each), (capability, bar)


def test_a_nic_is_not_faster_than_the_pcie_links_of_its_gpus() -> None:
    """L40S with PCIe 4, and a NIC of 400 Gb/s in a slot of PCIe 5 (NVIDIA/nccl#1357: 50 GB/s of four NICs)."""
    l40s = node("l40s-4x-pcie")
    nic = replace(l40s.nics[0], rate_bytes_per_second=50 * GB, pcie_bytes_per_second=48 * GB)
    for bar in ("with current links", "when healthy"):
        wires = [links(replace(l40s, nics=(nic,)), ranks, bar).wire for ranks in (1, 2)]  # type: ignore[arg-type]
        assert [wire.low / GB for wire in wires] == [pytest.approx(24.0), pytest.approx(48.0)]


@each_row(("machine", "ranks", "field"), rows("sick"))
def test_a_missing_link_lowers_what_is_and_not_what_should_be(machine: str, ranks: int, field: str) -> None:
    """The sick node must not pass its own bar."""
    sick = node(machine)
    now, due = getattr(links(sick, ranks), field), getattr(links(sick, ranks, "when healthy"), field)
    assert now.high < due.low
    healthy = node("l40s-4x-pcie" if "l40s" in machine else "hgx-h100-8xH100-8hca")
    assert getattr(links(healthy, ranks, "when healthy"), field) == due


def test_a_host_without_its_rdma_devices_is_held_to_no_socket() -> None:
    """With current links: 25 Gb/s of Ethernet. When healthy: not known, as no device shows its rate."""
    sick = node("sick-h100-rdma-off")
    assert links(sick, 8).between == "sockets"
    due = links(sick, 8, "when healthy")
    assert due.between is None
    assert any("RDMA" in word for word in due.sources)


def test_more_ranks_than_gpus_have_no_link_that_is_known() -> None:
    """Two ranks on one GPU meet in its memory."""
    one = replace(node("hgx-h100-8xH100-8hca"), gpus=node("hgx-h100-8xH100-8hca").gpus[:1])
    found = expect_bandwidth(join_hosts([links(one, 2)], 2, nvls=True), "all_gather", 1 << 30, 2)
    assert isinstance(found, UnknownBandwidth)
    assert any("two ranks on one GPU" in word for word in links(one, 2).sources)


def test_hosts_of_one_nvlink_domain_are_one_group() -> None:
    tray = links(node("gb200-nvl72-tray"), 4)
    assert tray.domain
    inside = join_hosts([tray, tray], 8, nvls=True)
    apart = join_hosts([tray, replace(tray, domain="elsewhere.1")], 8, nvls=True)
    assert (inside.groups, apart.groups) == (1, 2)
    domain, wire = expect_bandwidth(inside, "all_gather", 8 << 30, 8), expect_bandwidth(apart, "all_gather", 8 << 30, 8)
    assert isinstance(domain, ExpectedBandwidth) and isinstance(wire, ExpectedBandwidth)
    assert domain.interval.low > 2 * wire.interval.high


def test_geforce_goes_through_the_hosts_memory() -> None:
    """The driver refuses peers over PCIe; without its word and without a name either is possible."""
    l40s = node("l40s-4x-pcie")
    named = replace(l40s, gpus=tuple(replace(gpu, model="NVIDIA GeForce RTX 4090") for gpu in l40s.gpus))
    assert links(named, 4).inside == "shared memory"
    for access, inside in ((None, "PCIe or shared memory"), (False, "shared memory")):
        pairs = tuple(replace(pair, peer_access=access) for pair in l40s.pairs)
        assert links(replace(l40s, pairs=pairs), 4).inside == inside


def test_a_matrix_without_a_model_gives_a_range() -> None:
    """`nvidia-smi topo -m` names no GPU: 18 links are Hopper's or Blackwell's."""
    rows = "\n".join(f"GPU{i}\t" + "\t".join(" X " if i == j else "NV18" for j in range(8)) for i in range(8))
    text = "\t" + "\t".join(f"GPU{i}" for i in range(8)) + "\n" + rows + "\n"
    found = expect_bandwidth(join_hosts([links(parse(text), 8)], 8, nvls=None), "all_gather", 8 << 30, 8)
    assert isinstance(found, UnknownBandwidth) and found.range is not None
    assert found.range.low < 336 * GB < 617 * GB < found.range.high
    assert PathClass.NVL in {pair.path for pair in parse(text).pairs}


def test_a_node_tells_what_its_links_reach_and_a_catalogue_machine_too() -> None:
    """With NCCL's plan; where the speed of a link is not known the range alone."""
    for made, known in ((node("hgx-h100-8xH100-8hca"), True), (machines.get("p5.48xlarge"), True),
                        (machines.get("4xl40s"), False)):  # fmt: skip
        (found,) = [each for each in made.expectations if (each.scope, each.op) == ("node", "all_gather")]
        assert found.least_bytes_per_second and found.most_bytes_per_second
        assert found.least_bytes_per_second < found.most_bytes_per_second
        assert (found.usual_bytes_per_second is not None) is known
