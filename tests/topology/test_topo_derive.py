"""Islands, rails, expected bandwidth, NCCL's constants, path labels from PCI ancestry, reference machines."""

from dataclasses import replace
from itertools import combinations

import pytest
from rigs.tables import each_row, rows_of

from probes.gpu.facts import Gpu, GpuFacts, GpuPair, NvLink
from probes.pci.facts import PciDevice
from topology.check import check, describe_departures
from topology.derive import complete, find_reference
from topology.formats import xml
from topology.formats.text import parse
from topology.graph import (
    GpuNode,
    NicNode,
    NodeTopology,
    Pair,
    Pairs,
    PathClass,
    cpu_bytes_per_second,
    nvlink_bytes_per_second,
    nvlinks,
    path_class,
    pcie_bytes_per_second,
)
from topology.links import NvLinks, PciTree
from topology.paths import with_expectations

rows = rows_of(__file__)

A100, V100 = (8, 0), (7, 0)


def node(gpus, words, *, capability=A100, model=None, nics=(), **fields):
    """A node whose GPU pairs carry `words` by (i, j), SYS elsewhere; NIC pairs by (i, name)."""
    made = tuple(GpuNode(name=f"GPU{i}", index=i, compute_capability=capability, model=model) for i in range(gpus))
    wires = tuple(NicNode(name=name, kind="hca", rate_bytes_per_second=50e9, active=True) for name in nics)
    pairs = []
    for a, b in combinations((*made, *wires), 2):
        key = (a.index, b.index if isinstance(b, GpuNode) else b.name) if isinstance(a, GpuNode) else None
        word = words.get(key, words.get("else", "SYS"))
        pairs.append(Pair(a=a.name, b=b.name, label=word, path=path_class(word), nvlinks=nvlinks(word)))
    return complete(NodeTopology(hostname="n", gpus=made, nics=wires, pairs=tuple(pairs), **fields))


ONE_BRIDGE = node(3, {"else": "PHB"}, nics=("mlx5_0",))


def plan(topology, scope="node", op="all_gather"):
    return next(e for e in with_expectations(topology).expectations if (e.scope, e.op) == (scope, op))


HYBRID_MESH = {(a, b): word for a, b, word in rows("hybrid_mesh")()}
MESH = node(8, HYBRID_MESH, capability=V100)
CHAIN = node(3, {(0, 1): "NV2", (1, 2): "NV2"})
TWO_PAIRS = node(4, {(0, 1): "NV12", (2, 3): "NV12"})
UNNAMED = node(2, {(0, 1): "NV4"}, capability=None)
H100 = "NVIDIA H100 80GB HBM3"
SEVEN = node(7, dict.fromkeys(combinations(range(7), 2), "NV18"), model=H100)
RAILS = {(i, f"n{i}"): "PIX" for i in range(7)}
SEVEN_RAILS = node(7, dict.fromkeys(combinations(range(7), 2), "NV18") | RAILS, model=H100, nics=[n for _, n in RAILS])
SEVEN_OF_EIGHT = replace(SEVEN_RAILS, nics=(*SEVEN_RAILS.nics, replace(SEVEN_RAILS.nics[0], name="n7")))  # GPU lost
CUT_OFF = node(8, {key: "NV18" for key in combinations(range(8), 2) if 3 not in key}, capability=(9, 0))
FOUR_NICS = ("n0", "n1", "n2", "n3")
TIED = {(i, f"n{j}"): "PIX" if i // 2 == j // 2 else "NODE" for i in range(4) for j in range(4)}
BUNDLED = node(2, {(i, f"n{j}"): "PIX" if j // 2 == i else "SYS" for i in range(2) for j in range(4)}, nics=FOUR_NICS)


def rate(made, scope="node"):
    """The planned bus bandwidth in GB/s."""
    value = plan(made, scope).busbw_bytes_per_second
    return value and round(value / 1e9, 3)


def codes(made):
    return [(finding.code, finding.subject) for finding in check(made) if ".nvlink." in finding.code]


def with_fewer_links(links):
    """Eight GPUs with NV12, of which GPU2 has fewer links."""
    return node(8, {pair: links if 2 in pair else "NV12" for pair in combinations(range(8), 2)})


def with_nics(model):
    """Eight GPUs with a NIC behind the switch of each, and no NVLink."""
    names = [f"n{i}" for i in range(8)]
    return node(8, dict.fromkeys(enumerate(names), "PIX"), model=model, nics=names)


def slot(rate_of_slot, capability=None, **nic):
    """The status, and the first words of message and remedy, of what is found on a 50 GB/s NIC in such a slot."""
    made = node(1, {(0, "mlx5_0"): "PIX"}, nics=("mlx5_0",))
    made = replace(made, gpus=(replace(made.gpus[0], compute_capability=capability),))
    made = replace(made, nics=(replace(made.nics[0], pcie_bytes_per_second=rate_of_slot, **nic),))
    found = [finding for finding in check(made) if finding.code == "topology.nic.pcie_bound"]
    return [(one.status, "Gen3 of Gen5 x16" in one.message, one.remedy.startswith("Reseat")) for one in found]


def trained(running):
    """A slot that would do, whose link has trained down to this rate."""
    return slot(50e9, pcie_running_bytes_per_second=running, pcie_link="Gen3 of Gen5 x16")


def test_what_follows_from_the_pairs():
    rows = {
        "a hybrid cube mesh is one island without all pairs": (
            [(len(i.gpus), i.all_to_all, i.nvlinks_per_pair) for i in MESH.islands], [(8, False, ("NV1", "NV2"))]),
        "six NVLink 2 of each V100": (rate(MESH), 6 * 20.0),
        "pairs one GPU apart are NVB to NCCL": (Pairs(MESH.pairs).get("GPU0", "GPU5").path, PathClass.NVB),
        "and SYS to nvidia-smi": (Pairs(MESH.pairs).get("GPU0", "GPU5").label, "SYS"),
        "joined pairs are NVL": (Pairs(MESH.pairs).get("GPU0", "GPU1").path, PathClass.NVL),
        "two GPUs apart is too far": (
            Pairs(node(4, {(0, 1): "NV1", (1, 2): "NV1", (2, 3): "NV1"}).pairs).get("GPU0", "GPU3").path,
            PathClass.SYS,
        ),
        "a chain closes no ring": (
            (rate(CHAIN, "island"), "no ring" in plan(CHAIN, "island").derivation[0]), (None, True)),
        "pairs are separate islands": (
            [island.gpus for island in TWO_PAIRS.islands], [("GPU0", "GPU1"), ("GPU2", "GPU3")]),
        "twelve NVLink 3": (rate(TWO_PAIRS, "island"), 240.0),
        "what SYS carries is not known here": (rate(TWO_PAIRS), None),
        "no capability, no plan": ((rate(UNNAMED), "compute capability" in plan(UNNAMED).derivation[0]), (None, True)),
        "four direct links add up": (rate(node(4, dict.fromkeys(combinations(range(4), 2), "NV4"))), 240.0),
        "a switch's do not": (rate(node(8, dict.fromkeys(combinations(range(8), 2), "NV12"))), 240.0),
        "PCIe cards are no HGX": (find_reference(node(8, {}, model="NVIDIA H100 PCIe")), None),
        "an HGX that lost a GPU is still one": (complete(SEVEN).sku, "HGX H100/H200"),
        "the pod of a job may have requested seven and their NICs": (
            [[f.status for f in check(made, of_job=pod) if "mismatch" in f.code]
             for made, pod in ((SEVEN_RAILS, True), (SEVEN_RAILS, False), (SEVEN_OF_EIGHT, True))],
            [["info"], ["warn"], ["warn"]]),
        "and its loss is reported": ("This node has 7 GPUs, HGX H100/H200 has 8" in describe_departures(SEVEN), True),
        "PHB everywhere is a hypervisor's, unless the host is known to be physical": (
            [complete(replace(ONE_BRIDGE, virtual=None), is_physical=known).virtual is None for known in (False, True)],
            [False, True]),
        "only probes.pci makes it a note": (
            [[f.status for f in check(replace(ONE_BRIDGE, source="probes", virtual=why)) if "virtual" in f.code]
             for why in (ONE_BRIDGE.virtual, "every device sits on its own root (KVM)")],
            [["warn"], ["info"]]),
        "an HGX without NVLink": (codes(node(8, {}, model=H100)), [("topology.nvlink.down_hgx", "")]),
        "a board of unknown model may be one": (
            [codes(with_nics(model)) for model in ("NVIDIA X900", "NVIDIA H20-3e", "NVIDIA RTX PRO 6000 Blackwell")],
            [[("topology.nvlink.down_hgx", "")], [("topology.nvlink.down_hgx", "")], []]),
        "one GPU cut off from the switch": (codes(CUT_OFF), [("topology.nvlink.missing", "GPU3")]),
        "one link of twelve is less than a tenth, two are more": (
            [f.status for links in ("NV11", "NV10") for f in check(with_fewer_links(links)) if "asymmetric" in f.code],
            ["warn", "fail"]),
        "a NIC faster than its slot": (
            [status for rate in (24e9, 48e9) for status, *_ in slot(rate)], ["fail"]),
        "800 Gb/s of a ConnectX-8 in a slot of PCIe 5 are halved": (
            [status for status, *_ in slot(48e9, rate_bytes_per_second=100e9)], ["fail"]),
        "but not on HGX B300 and GB300, whose GPUs are behind the NIC's PCIe switch": (
            slot(48e9, (10, 3), rate_bytes_per_second=100e9), []),
        "a slot that carries one of two ports is no fault": ([status for status, *_ in slot(24e9, ports=2)], ["info"]),
        "a NIC faster than its link as it runs": (
            [trained(rate) for rate in (None, 48e9, 37e9, 24e9, 12e9)],
            [[], [], [("warn", True, True)], [("fail", True, True)], [("fail", True, True)]]),
        "tied NICs are dealt out in order": (
            [(rail.nics, rail.gpus) for rail in node(4, TIED, nics=FOUR_NICS).rails],
            [((f"n{i}",), (f"GPU{i}",)) for i in range(4)]),
        "several NICs of one GPU are one rail": ([rail.nics for rail in BUNDLED.rails], [("n0", "n1"), ("n2", "n3")]),
        "which carries what they carry together": (rate(BUNDLED, "rail"), 100.0),
    }  # fmt: skip
    wrong = {what: found for what, (found, expected) in rows.items() if found != expected}
    assert not wrong


def test_constants_of_nccl():
    """ncclTopoNVLinkBw, the PCIe speeds and CPU to CPU of NCCL 2.30, value by value, in GB/s."""
    nvlink = {
        (6, 0): 18.0, V100: 20.0, (7, 5): 20.0, A100: 20.0, (8, 6): 12.0, (8, 7): 20.0, (8, 9): 20.0, (9, 0): 20.6,
        (10, 0): 40.1, (10, 3): 40.1, (12, 0): 40.1, None: None,
    }  # fmt: skip
    pcie = {(8e9, 16): 12, (16e9, 16): 24, (32e9, 16): 48, (64e9, 16): 96, (32e9, 8): 24, (None, 16): None}
    cpus = {
        ("AuthenticAMD", 25, 1): 16, ("GenuineIntel", 6, 79): 6, ("GenuineIntel", 6, 85): 10,
        ("GenuineIntel", 6, 143): 22, ("GenuineIntel", 6, 207): 40, ("ARM", None, None): 6,
    }  # fmt: skip
    found = [
        {key: nvlink_bytes_per_second(key) for key in nvlink},
        {key: pcie_bytes_per_second(*key) for key in pcie},
        {key: cpu_bytes_per_second(*key) for key in cpus},
    ]
    in_gigabytes = [{key: value and value / 1e9 for key, value in rates.items()} for rates in found]
    assert in_gigabytes == [pytest.approx(nvlink), pytest.approx(pcie), pytest.approx(cpus)]


def device(bus_id, parent=None, root="pci0000:00", numa=0, **fields):
    return PciDevice(
        bus_id=bus_id, class_code=0x060400, vendor_id=1, device_id=1, parent=parent, root=root, numa_node=numa, **fields
    )


TREE = PciTree(
    [
        device("rp0"), device("up", "rp0"), device("dp1", "up"), device("dp2", "up"),
        device("gpu", "dp1"), device("nic", "dp2"), device("nic.1", "dp2"),
        device("up2", "dp2"), device("dp3", "up2"), device("deep", "dp3"),
        device("rp1"), device("other", "rp1"),
        device("rp2", root="pci0000:40"), device("node", "rp2", root="pci0000:40"),
        device("rp3", root="pci0000:80", numa=1), device("far", "rp3", root="pci0000:80", numa=1),
    ]
)  # fmt: skip


def test_labels_from_ancestry():
    labels = {"nic": "PIX", "deep": "PXB", "other": "PHB", "node": "NODE", "far": "SYS", "absent": None}
    assert {other: TREE.label("gpu", other) for other in labels} == labels
    assert TREE.label("nic", "nic.1") == "PIX", "two functions of one device are one bridge apart"
    best = {"link_transfers_per_second_max": 32e9, "link_width_max": 16}
    slots = PciTree([device("rp", link_transfers_per_second_max=16e9, link_width_max=16),
                     device("gpu", "rp", link_transfers_per_second=2.5e9, **best)])  # fmt: skip
    assert slots.link("gpu")[0] == pytest.approx(24e9), "what device and port can both do"


def gpu(index, *links, **fields):
    return Gpu(index=index, bus_id=f"0000:0{index}:00.0", nvlinks=tuple(links), nvlinks_known=True, **fields)


def link(number, kind, bus_id=None, active=True):
    return NvLink(link=number, active=active, remote_kind=kind, remote_bus_id=bus_id)


def links_of(*gpus, **more):
    return NvLinks(GpuFacts(driver_version=None, cuda_version=None, gpus=gpus, **more))


def test_direct_links_count_towards_their_peer_only():
    links = links_of(
        gpu(0, link(0, "gpu", "0000:01:00.0"), link(1, "gpu", "0000:01:00.0"), link(2, "gpu", "0000:02:00.0")),
        gpu(1, link(0, "gpu", "0000:00:00.0"), link(1, "gpu", "0000:00:00.0", active=False)),
        gpu(2),
    )
    assert (links.between(0, 1)[0], links.between(1, 2)[0]) == (1, 0)
    assert any("GPU0 reports 2 NVLinks to GPU1, but GPU1 reports 1 to GPU0" in warning for warning in links.warnings)


@each_row(("status", "count"), [("ok", 2), ("not_supported", 0), (None, 0)])
def test_hidden_ends_count_only_where_p2p_over_nvlink_works(status, count):
    gpus = [gpu(i, link(0, None), link(1, None)) for i in range(2)]
    assert links_of(*gpus, pairs=(GpuPair(a=0, b=1, p2p_nvlink=status),)).between(0, 1)[0] == count


def test_a_lost_gpu_takes_no_share_of_hidden_links():
    """Links of the other GPUs still end at the switch; an even share would accuse all of them of missing links."""
    gpus = [gpu(i, link(0, None), link(1, None)) for i in range(3)]
    pairs = [GpuPair(a=a, b=b, p2p_nvlink="ok") for a, b in combinations(range(3), 2)]
    lost = replace(gpu(3), error="GPU_IS_LOST")
    assert links_of(*gpus, lost, pairs=tuple(pairs)).between(0, 1)[0] == 2


@each_row(("model", "product", "gpus", "sku"), rows("boards"))
def test_a_board_is_known_by_its_whole_name_and_a_smaller_size_has_lost_no_gpu(model, product, gpus, sku):
    """GB200 is no B200, and GH200 no H200."""
    made = replace(node(gpus, dict.fromkeys(combinations(range(gpus), 2), "NV6"), model=model), product=product)
    assert complete(made).sku == sku
    assert [words for words in describe_departures(made) if sku is None] == []


def switched(count: int, nic: str) -> NodeTopology:
    """A matrix of GPUs behind an NVSwitch with one NIC."""
    names = [f"GPU{n}" for n in range(count)]
    rows = ["\t".join([name, *(" X " if other == name else "NV18" for other in names), nic]) for name in names]
    return parse("\n".join(["\t" + "\t".join([*names, "mlx5_0"]), *rows, ""]), "switched")


def test_shapes_of_machines_with_an_nvswitch() -> None:
    """NODE is no fault of four unnamed GPUs, which may be a tray of GB200; no board has five or seven."""
    judged = {count: {f.code for f in check(switched(count, "NODE")) if f.status == "fail"} for count in (4, 8)}
    assert judged == {4: set(), 8: {"topology.gdr.path"}}
    noted = [count for count in range(2, 9) if any("a GPU is missing" in w for w in switched(count, "PIX").warnings)]
    assert noted == [3, 5, 6, 7]


def test_a_slower_port_in_xml_is_a_slower_rail() -> None:
    part = (
        '<pci busid="0000:{0}0:00.0" class="0x060400" link_speed="32 GT/s" link_width="16">'
        '<pci busid="0000:{0}1:00.0" class="0x030200"><gpu dev="{0}" sm="90"/></pci>'
        '<pci busid="0000:{0}2:00.0" class="0x020700"><nic><net name="mlx5_{0}" dev="{0}" speed="{1}"/></nic></pci>'
        "</pci>"
    )
    for speed, wanted in ((400000, []), (100000, ["The rails are uneven: mlx5_3 has 100 Gb/s of 400 Gb/s."])):
        parts = "".join(part.format(n, speed if n == 3 else 400000) for n in range(4))
        found = check(xml.parse(f'<system version="1"><cpu numaid="0">{parts}</cpu></system>'))
        assert [f.message.partition(" The slowest")[0] for f in found if f.code == "topology.rail.uneven"] == wanted


def test_gpus_without_a_nic_of_their_own_are_by_design_only_if_nics_are_fewer() -> None:
    links = dict.fromkeys(combinations(range(4), 2), "NV12")
    near = {(i, f"n{j}"): "PIX" if i == 2 * j else "NODE" for i in range(4) for j in range(4)}
    for nics, status in ((FOUR_NICS[:2], "info"), (FOUR_NICS, "warn")):
        found = {f.subject: f.status for f in check(node(4, links | near, nics=nics)) if f.code == "topology.gdr.path"}
        assert found == {"GPU1": status, "GPU3": status}
