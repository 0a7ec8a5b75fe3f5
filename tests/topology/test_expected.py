"""What links should carry: held against published results, healthy and broken, and against what must not be known."""

from __future__ import annotations

from dataclasses import replace

from rigs.tables import each_row

from topology.expected import FAILS_BELOW, Expected, Paths, Unknown, between, expected, span

GB, GIB = 1e9, 1 << 30


Ranks = tuple[Paths, int]


def switch(links: int, per_link: float, capability: tuple[int, int], ranks: int, **more: object) -> Ranks:
    """GPUs of one host behind NVSwitch, and how many ranks there are."""
    nvls = capability >= (9, 0)
    made = Paths(inside="NVSwitch", link=span(links * per_link * GB), capability=capability, nvls=nvls)
    return replace(made, **more), ranks  # type: ignore[arg-type]


def h100(ranks: int = 8, **more: object) -> Ranks:
    return switch(18, 20.6, (9, 0), ranks, **more)


def b200(ranks: int = 8, **more: object) -> Ranks:
    return switch(18, 40.1, (10, 0), ranks, **more)


def a100(ranks: int = 8, **more: object) -> Ranks:
    return switch(12, 20.0, (8, 0), ranks, **more)


def expect(joined: Ranks, op: str, size_bytes: int) -> Expected | Unknown:
    return expected(joined[0], op, size_bytes, joined[1])


def hosts(count: int, nics: float) -> dict[str, object]:
    return {"groups": count, "between": "RDMA", "wire": span(nics * GB)}


V100 = Paths(inside="NVLink", link=span(120 * GB), capability=(7, 0)), 8  # a hybrid cube mesh
PCIE_4 = Paths(inside="PCIe", link=span(24 * GB), capability=(8, 0)), 2

# paths, operation, S, GB/s, whether the source calls it healthy; sources: NVIDIA/nccl issues by number,
# stas00/ml-engineering network/README, ai-dynamo/aiconfigurator nccl_perf, kubernetes-sigs/dranet,
# coreweave/nccl-tests, aws-samples, oracle-quickstart, NVIDIA/cluster-readiness-engine validation-results
PUBLISHED = [
    (h100(), "all_gather", 16 * GIB, 361.4, True),  # stas00, H200
    (h100(), "reduce_scatter", 16 * GIB, 362.9, True),
    (h100(), "all_reduce", 16 * GIB, 480.0, True),
    (h100(), "all_reduce", 16 * GIB, 367.2, False),  # the same, ring
    (h100(), "all_reduce", 8 * GIB, 476.0, True),  # nccl-tests#290
    (h100(), "all_reduce", GIB // 2, 445.0, True),  # aiconfigurator
    (h100(2), "all_gather", GIB // 2, 249.5, True),
    (h100(4), "all_gather", GIB // 2, 312.1, True),
    (h100(4), "all_reduce", GIB // 2, 350.2, True),
    (b200(), "all_reduce", 16 * GIB, 845.7, True),  # stas00, p6-b200
    (b200(), "all_reduce", GIB, 723.0, True),
    (h100(7), "all_reduce", 8 * GIB, 460.0, True),  # stas00, 5, 6 and 7 of 8 H200
    (h100(7), "all_reduce", 8 * GIB, 365.7, False),  # NVLS off
    (h100(6), "all_reduce", 8 * GIB, 435.6, True),
    (h100(6), "all_reduce", 8 * GIB, 365.1, False),
    (h100(5), "all_reduce", 8 * GIB, 414.2, True),
    (b200(7), "all_reduce", 8 * GIB, 811.2, True),  # stas00, p6-b200
    (b200(7), "all_reduce", 8 * GIB, 680.5, False),
    (b200(6), "all_reduce", 8 * GIB, 778.2, True),
    (b200(5), "all_reduce", 8 * GIB, 677.8, True),  # the ring, which AWS's tuner keeps there
    (b200(), "all_reduce", 8 * GIB, 695.0, False),  # B300, NVLS off (2140)
    (V100, "all_reduce", 4 * GIB, 110.0, True),  # what azurehpc-health-checks accepts
    (V100, "all_reduce", 4 * GIB, 66.0, False),
    (h100(1024, **hosts(128, 400)), "all_reduce", GIB // 2, 150.0, False),  # a tree does not wait for 1024 ranks
    (h100(1984, **hosts(248, 400)), "all_reduce", GIB // 2, 350.0, True),  # nccl-tests#283
    (h100(1984, **hosts(248, 400)), "all_reduce", GIB // 2, 200.0, False),
    (b200(2), "all_gather", 8 * GIB, 482.7, True),  # dranet
    (b200(2), "all_gather", 8 * GIB, 180.0, False),  # half the links and more gone
    (a100(2), "all_gather", GIB // 2, 150.0, True),  # aiconfigurator
    (h100(16, **hosts(2, 400)), "all_reduce", 16 * GIB, 487.1, True),  # awsome, p5
    (h100(16, **hosts(2, 400)), "all_reduce", 8 * GIB, 231.0, False),  # 2409
    (h100(32, **hosts(4, 400)), "all_reduce", 4 * GIB, 364.9, True),  # stas00, p5en
    (h100(32, **hosts(4, 400)), "all_reduce", 8 * GIB, 180.0, False),  # 1031
    (h100(64, **hosts(8, 400)), "all_reduce", 8 * GIB, 386.0, True),  # coreweave
    (h100(16, **hosts(2, 200)), "all_gather", 8 * GIB, 188.0, True),  # A3 Mega
    (h100(16, **hosts(2, 200)), "all_gather", 8 * GIB, 4.0, False),  # the same over TCP
    (b200(32, **hosts(4, 400)), "all_reduce", 16 * GIB, 381.8, True),  # stas00
    (a100(16, **hosts(2, 200)), "all_reduce", 8 * GIB, 189.6, True),  # oracle-quickstart
    (a100(16, **hosts(2, 50)), "all_reduce", GIB, 76.8, True),  # awsome, p4de
    (a100(16, **hosts(2, 50)), "all_reduce", 4 * GIB, 43.8, True),  # aws-efa-eks, p4d
    (b200(16), "all_reduce", 16 * GIB, 882.5, True),  # four GB200 trays in one NVLink domain
    (b200(16), "all_gather", 16 * GIB, 609.3, True),
    (b200(16), "all_reduce", 16 * GIB, 191.4, False),  # the same, MNNVL off
    (PCIE_4, "all_reduce", GIB // 2, 20.1, True),  # aiconfigurator, two L40S
    ((replace(PCIE_4[0], inside="shared memory"), 2), "all_gather", 4 * GIB, 8.79, True),  # 4090
]


@each_row(("paths", "op", "size", "busbw", "healthy"), PUBLISHED)
def test_published_results_are_judged_as_their_sources_do(
    paths: Ranks, op: str, size: int, busbw: float, healthy: bool
) -> None:
    found = expect(paths, op, size)
    assert isinstance(found, Expected)
    assert (busbw * GB >= found.interval.low) is healthy, found.words()
    assert found.interval.low <= found.interval.mid <= found.interval.high
    assert found.derivation


def test_two_ranks_are_not_held_to_the_ring_of_eight() -> None:
    """The own part's copy weighs most in a ring of two; all-reduce is no ring with eight."""
    two, eight = expect(h100(2), "all_gather", 8 * GIB), expect(h100(8), "all_gather", 8 * GIB)
    assert isinstance(two, Expected) and isinstance(eight, Expected)
    assert two.interval.mid < 0.8 * eight.interval.mid
    switched = expect(h100(8), "all_reduce", 8 * GIB)
    assert isinstance(switched, Expected) and switched.algorithm == "NVLS"
    assert switched.interval.low > eight.interval.mid


def test_bytes_count_by_rank_and_not_in_total() -> None:
    """1 GiB over 256 GPUs is 4 MiB of each: latency, and no fault (NVIDIA/nccl#1218: 200 GB/s with 8 MiB)."""
    small = expect(h100(256, **hosts(32, 400)), "all_gather", 2 * GIB)
    large = expect(h100(256, **hosts(32, 400)), "all_gather", 256 * GIB)
    assert isinstance(small, Expected) and isinstance(large, Expected)
    assert small.interval.low <= 200 * GB
    assert FAILS_BELOW * large.interval.low <= 200 * GB < large.interval.low


@each_row(
    ("paths", "why"),
    [
        ((Paths(), 1), "one rank"),
        ((Paths(), 8), "not known"),
        ((Paths(groups=2), 2), "hosts is not known"),
        ((Paths(inside="NVSwitch", link=span(0.0)), 8), "not known"),
        (a100(link=between(370 * GB, 722 * GB), words=("generation not known",)), "generation"),
    ],
)
def test_what_cannot_be_known_is_unknown(paths: Ranks, why: str) -> None:
    found = expect(paths, "all_gather", GIB)
    assert isinstance(found, Unknown)
    assert why in found.words()


def test_a_link_of_unknown_generation_still_gives_its_range() -> None:
    found = expect(a100(link=between(370 * GB, 722 * GB), nvls=None), "all_gather", 8 * GIB)
    assert isinstance(found, Unknown) and found.range is not None
    assert found.range.low < 330 * GB < 700 * GB < found.range.high


def test_an_operation_without_a_model_is_unknown() -> None:
    assert isinstance(expect(h100(), "all_to_all", GIB), Unknown)


def test_one_and_several_streams_fill_a_slow_wire_and_not_a_fast_one() -> None:
    """NVIDIA/nccl#209: 60 % of 32 Gb/s at best; A3 Mega over TCP: 4 of 200 GB/s."""
    slow = expect((Paths(groups=2, between="sockets", wire=span(1.25 * GB)), 2), "all_reduce", GIB)
    fast = expect((Paths(groups=2, between="sockets", wire=span(200 * GB)), 2), "all_reduce", GIB)
    assert isinstance(slow, Expected) and isinstance(fast, Expected)
    assert slow.interval.mid > 0.8 * 1.25 * GB
    assert fast.interval.mid < 0.1 * 200 * GB
    assert fast.interval.low < 4 * GB
