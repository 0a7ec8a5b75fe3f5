"""Islands, rails, expected bandwidth, NCCL's constants, path labels from PCI ancestry, reference machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from rigs.tables import each_row
from topo_machines import topology

from contracts.finding import Status
from hardware.machines import recognised
from probes.gpu.facts import Gpu, GpuFacts, GpuPair, NvLink
from probes.pci.facts import PciDevice
from topology.check import check
from topology.derive import complete
from topology.formats.text import parse
from topology.graph import GpuNode, NicNode, NodeTopology, Pair, PathClass, nvlinks, path_class
from topology.links import NvLinks, PciTree
from topology.plan import cpu_bytes_per_second, nvlink_bytes_per_second, pcie_bytes_per_second
from topology.reference import departures, recognise, reference_of

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


def plan(topology, scope="node", op="all_gather"):
    return next(e for e in topology.expectations if (e.scope, e.op) == (scope, op))


HYBRID_MESH = {
    (0, 1): "NV1", (0, 2): "NV1", (0, 3): "NV2", (0, 4): "NV2", (1, 2): "NV2", (1, 3): "NV1", (1, 5): "NV2",
    (2, 3): "NV2", (2, 6): "NV1", (3, 7): "NV1", (4, 5): "NV1", (4, 6): "NV1", (4, 7): "NV2", (5, 6): "NV2",
    (5, 7): "NV1", (6, 7): "NV2",
}  # fmt: skip


def test_hybrid_cube_mesh_is_one_island_without_all_pairs():
    made = node(8, HYBRID_MESH, capability=V100)
    (island,) = made.islands
    assert (len(island.gpus), island.all_to_all, island.nvlinks_per_pair) == (8, False, ("NV1", "NV2"))
    assert plan(made).busbw_bytes_per_second == pytest.approx(6 * 20e9)  # six NVLink 2 of each V100


def test_pairs_one_gpu_apart_are_nvb_to_nccl_and_sys_to_nvidia_smi():
    made = node(8, HYBRID_MESH, capability=V100)
    pair = made.pair("GPU0", "GPU5")
    assert (pair.label, pair.path) == ("SYS", PathClass.NVB)
    assert made.pair("GPU0", "GPU1").path is PathClass.NVL
    two_apart = node(4, {(0, 1): "NV1", (1, 2): "NV1", (2, 3): "NV1"})
    assert two_apart.pair("GPU0", "GPU3").path is PathClass.SYS


def test_a_chain_closes_no_ring_and_gets_no_plan():
    made = node(3, {(0, 1): "NV2", (1, 2): "NV2"})
    assert plan(made, "island").busbw_bytes_per_second is None
    assert "no ring" in plan(made, "island").derivation[0]


def test_pairs_of_gpus_are_islands_of_their_own():
    made = node(4, {(0, 1): "NV12", (2, 3): "NV12"})
    assert [island.gpus for island in made.islands] == [("GPU0", "GPU1"), ("GPU2", "GPU3")]
    assert plan(made, "island").busbw_bytes_per_second == pytest.approx(240e9)
    assert plan(made).busbw_bytes_per_second is None  # what SYS carries is not known here


def test_unknown_capability_gets_no_plan_and_says_why():
    made = node(2, {(0, 1): "NV4"}, capability=None)
    assert plan(made).busbw_bytes_per_second is None
    assert "compute capability" in plan(made).derivation[0]


def test_four_direct_links_add_up_and_a_switch_does_not():
    direct = node(4, dict.fromkeys(combinations(range(4), 2), "NV4"))
    switched = node(8, dict.fromkeys(combinations(range(8), 2), "NV12"))
    assert plan(direct).busbw_bytes_per_second == plan(switched).busbw_bytes_per_second == pytest.approx(240e9)


def test_every_operation_and_scope_is_derived_with_steps():
    made = topology("hgx-h100-8xH100-8hca")
    assert {(e.scope, e.op) for e in made.expectations} >= {
        (scope, op) for scope in ("island", "node", "rail") for op in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert all(e.derivation for e in made.expectations)
    assert any("NVLS" in step for step in plan(made, op="all_reduce").derivation)
    assert not any("NVLS" in step for step in plan(made, op="all_gather").derivation)
    assert any("64 MiB" in step for step in plan(made).derivation)


@each_row(
    ("capability", "gigabytes"),
    [
        ((6, 0), 18.0),
        (V100, 20.0),
        ((7, 5), 20.0),
        (A100, 20.0),
        ((8, 6), 12.0),
        ((8, 7), 20.0),
        ((8, 9), 20.0),
        ((9, 0), 20.6),
        ((10, 0), 40.1),
        ((10, 3), 40.1),
        ((12, 0), 40.1),
    ],
)
def test_nvlink_constants(capability, gigabytes):
    """ncclTopoNVLinkBw of NCCL 2.30, value by value."""
    assert nvlink_bytes_per_second(capability) == pytest.approx(gigabytes * 1e9)


@each_row(
    ("speed", "width", "gigabytes"), [(8e9, 16, 12), (16e9, 16, 24), (32e9, 16, 48), (64e9, 16, 96), (32e9, 8, 24)]
)
def test_pcie_constants(speed, width, gigabytes):
    assert pcie_bytes_per_second(speed, width) == pytest.approx(gigabytes * 1e9)


def test_unknown_link_has_no_bandwidth():
    assert pcie_bytes_per_second(None, 16) is None
    assert nvlink_bytes_per_second(None) is None


@each_row(
    ("cpu", "gigabytes"),
    [
        (("AuthenticAMD", 25, 1), 16),
        (("GenuineIntel", 6, 79), 6),
        (("GenuineIntel", 6, 85), 10),
        (("GenuineIntel", 6, 143), 22),
        (("GenuineIntel", 6, 207), 40),
        (("ARM", None, None), 6),
    ],
)
def test_cpu_constants(cpu, gigabytes):
    assert cpu_bytes_per_second(*cpu) == pytest.approx(gigabytes * 1e9)


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


@each_row(
    ("other", "label"),
    [("nic", "PIX"), ("deep", "PXB"), ("other", "PHB"), ("node", "NODE"), ("far", "SYS"), ("absent", None)],
)
def test_labels_from_ancestry(other, label):
    assert TREE.label("gpu", other) == label


def test_two_functions_of_one_device_are_one_bridge_apart():
    assert TREE.label("nic", "nic.1") == "PIX"


def test_slot_is_what_device_and_port_can_both_do():
    tree = PciTree(
        [
            device("rp", link_transfers_per_second_max=16e9, link_width_max=16),
            device("gpu", "rp", link_transfers_per_second=2.5e9, link_transfers_per_second_max=32e9, link_width_max=16),
        ]
    )
    assert tree.slot_bytes_per_second("gpu") == pytest.approx(24e9)


def gpu(index, *links, **fields):
    return Gpu(index=index, bus_id=f"0000:0{index}:00.0", nvlinks=tuple(links), nvlinks_known=True, **fields)


def link(number, kind, bus_id=None, active=True):
    return NvLink(link=number, active=active, remote_kind=kind, remote_bus_id=bus_id)


def test_direct_links_count_towards_their_peer_only():
    facts = GpuFacts(
        driver_version=None,
        cuda_version=None,
        gpus=(
            gpu(0, link(0, "gpu", "0000:01:00.0"), link(1, "gpu", "0000:01:00.0"), link(2, "gpu", "0000:02:00.0")),
            gpu(1, link(0, "gpu", "0000:00:00.0"), link(1, "gpu", "0000:00:00.0", active=False)),
            gpu(2),
        ),
    )
    links = NvLinks(facts)
    assert links.between(0, 1)[0] == 1
    assert any("GPU0 has 2 NVLinks towards GPU1, GPU1 has 1 back" in warning for warning in links.warnings)
    assert links.between(1, 2)[0] == 0


@each_row(("status", "count"), [("ok", 2), ("not_supported", 0), (None, 0)])
def test_hidden_ends_count_only_where_p2p_over_nvlink_works(status, count):
    facts = GpuFacts(
        driver_version=None,
        cuda_version=None,
        gpus=tuple(gpu(i, link(0, None), link(1, None)) for i in range(2)),
        pairs=(GpuPair(a=0, b=1, p2p_nvlink=status),),
    )
    assert NvLinks(facts).between(0, 1)[0] == count


def test_every_recognised_machine_has_labels_that_exist():
    for row in recognised():
        assert row.basis in ("seen", "stated")
        assert row.gpu_nic is None or path_class(row.gpu_nic) is not None


def test_an_hgx_that_lost_a_gpu_is_still_an_hgx():
    made = node(7, dict.fromkeys(combinations(range(7), 2), "NV18"), model="NVIDIA H100 80GB HBM3")
    assert recognise(made).sku == "HGX H100/H200"
    assert "7 GPUs, HGX H100/H200 has 8" in departures(made)


@each_row(
    ("model", "product", "gpus", "sku"),
    [
        ("NVIDIA H100 80GB HBM3", "Google Compute Engine", 8, "GCP A3"),
        ("NVIDIA H100 80GB HBM3", "Google Compute Engine", 7, "GCP A3"),  # a lost GPU
        ("NVIDIA H100 80GB HBM3", "Google Compute Engine", 4, None),  # a3-highgpu-4g
        ("NVIDIA A100 80GB PCIe", "Virtual Machine", 4, "Azure NC A100 v4"),
        ("NVIDIA A100 80GB PCIe", "Virtual Machine", 1, None),  # NC24ads
        ("Tesla V100-SXM2-16GB", "8335-GTX", 6, None),
    ],
)
def test_a_smaller_size_with_the_same_product_name_has_lost_no_gpu(model, product, gpus, sku):
    made = replace(node(gpus, dict.fromkeys(combinations(range(gpus), 2), "NV12"), model=model), product=product)
    assert recognise(made).sku == sku
    assert [words for words in departures(made) if sku is None] == []


def test_pcie_cards_are_no_hgx():
    made = node(8, {}, model="NVIDIA H100 PCIe")
    assert reference_of(made) is None


def test_hgx_without_any_nvlink_is_a_fault():
    made = node(8, {}, model="NVIDIA H100 80GB HBM3")
    (finding,) = [finding for finding in check(made) if finding.code == "topology.nvlink.down_hgx"]
    assert finding.status is Status.FAIL
    assert "fabricmanager" in finding.remedy


def test_text_of_an_hgx_without_nvlink_warns_and_mp_does_not():
    rows = ["\t" + "\t".join([f"GPU{i}" for i in range(8)] + [f"NIC{i}" for i in range(8)])]
    for i in range(8):
        gpus = [" X " if i == j else "SYS" for j in range(8)]
        rows.append("\t".join([f"GPU{i}", *gpus, *("PIX" if i == j else "SYS" for j in range(8))]))
    text = "\n".join(rows) + "\n"
    assert "topology.nvlink.down_hgx" in {finding.code for finding in check(parse(text))}
    mp = parse("$ nvidia-smi topo -mp\n" + text)
    assert "topology.nvlink.down_hgx" not in {finding.code for finding in check(mp)}


def test_one_gpu_cut_off_from_the_switch():
    words = {key: "NV18" for key in combinations(range(8), 2) if 3 not in key}
    found = [f for f in check(node(8, words, capability=(9, 0))) if f.code == "topology.nvlink.missing"]
    assert [finding.subject for finding in found] == ["GPU3"]


def test_nic_faster_than_its_slot():
    made = node(1, {(0, "mlx5_0"): "PIX"}, nics=("mlx5_0",))
    slow = replace(made, nics=(replace(made.nics[0], pcie_bytes_per_second=24e9),))
    fits = replace(made, nics=(replace(made.nics[0], pcie_bytes_per_second=48e9),))
    assert "topology.nic.pcie_bound" in {finding.code for finding in check(slow)}
    assert "topology.nic.pcie_bound" not in {finding.code for finding in check(fits)}


@each_row(("running", "severity"), [(None, None), (48e9, None), (24e9, "fail"), (12e9, "fail"), (37e9, "warn")])
def test_nic_faster_than_its_link_as_it_runs(running: float | None, severity: str | None) -> None:
    """The slot would do; what the link trained down to does not."""
    made = node(1, {(0, "mlx5_0"): "PIX"}, nics=("mlx5_0",))
    nic = replace(
        made.nics[0], pcie_bytes_per_second=50e9, pcie_running_bytes_per_second=running, pcie_link="Gen3 of Gen5 x16",
        rate_bytes_per_second=50e9,
    )  # fmt: skip
    found = [f for f in check(replace(made, nics=(nic,))) if f.code == "topology.nic.pcie_bound"]
    assert [(f.status, "Gen3 of Gen5 x16" in f.message) for f in found] == ([(severity, True)] if severity else [])
    assert all(f.remedy.startswith("Reseat") for f in found)


def test_rails_deal_tied_nics_out_in_order():
    words = {(i, f"n{j}"): "PIX" if i // 2 == j // 2 else "NODE" for i in range(4) for j in range(4)}
    made = node(4, words, nics=("n0", "n1", "n2", "n3"))
    assert [(rail.nics, rail.gpus) for rail in made.rails] == [((f"n{i}",), (f"GPU{i}",)) for i in range(4)]


def test_several_nics_of_one_gpu_are_one_rail():
    words = {(i, f"n{j}"): "PIX" if j // 2 == i else "SYS" for i in range(2) for j in range(4)}
    made = node(2, words, nics=("n0", "n1", "n2", "n3"))
    assert [rail.nics for rail in made.rails] == [("n0", "n1"), ("n2", "n3")]
    assert plan(made, "rail").busbw_bytes_per_second == pytest.approx(100e9)
