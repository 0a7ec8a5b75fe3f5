"""From a node's links to the paths of the ranks that run on it: with current links, and when healthy."""

from dataclasses import replace

import pytest
from rigs.recorded import snapshot
from rigs.tables import each_row, rows_of

from planner.forecast import machines
from topology.build import build
from topology.expected import ExpectedBandwidth, Paths, UnknownBandwidth, expect_bandwidth
from topology.formats.text import parse
from topology.graph import NodeTopology, PathClass
from topology.paths import BarName, host_links, join_hosts, with_expectations

rows = rows_of(__file__)
GB = 1e9


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
            count = round(found.wire.low / GB / each)
            assert found.wire.low / GB == pytest.approx(each * count) and count in (4, len(nics)), (capability, bar)


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
    silent = replace(l40s, pairs=tuple(replace(pair, peer_access=None) for pair in l40s.pairs))
    assert links(silent, 4).inside == "PCIe or shared memory"
    refused = replace(l40s, pairs=tuple(replace(pair, peer_access=False) for pair in l40s.pairs))
    assert links(refused, 4).inside == "shared memory"


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
