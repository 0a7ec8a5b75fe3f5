"""Recorded machines: their topology, what is found wrong with it, and the frozen documents of each."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rigs.tables import each_row
from topo_machines import NAMES, snapshot, topology

from contracts.finding import Status
from probes.api import Absent, Ok
from probes.gpu.facts import GpuFacts
from probes.pci.facts import PciFacts
from topology.build import build
from topology.check import CODES, check
from topology.formats.text import parse
from topology.graph import Pairs, PathClass
from topology.paths import with_expectations
from topology.render import json_document
from topology.render import render_matrix as matrix
from topology.svg import svg

FLAT = "azure-nd-a100-flat-vm"
HGX, P4D, GB200, A40 = "hgx-h100-8xH100-8hca", "aws-p4d-8xA100-4efa", "gb200-nvl72-tray", "r760xa-2xA40-bf3"


@pytest.mark.parametrize("name", NAMES)
def test_golden(name, golden):
    golden(f"{name}/topology.json", json_document(topology(name)), digest=True)
    golden(f"{name}/topology.txt", matrix(topology(name)))


@each_row("name", NAMES)
def test_every_pair_once_and_every_form_holds(name):
    node = topology(name)
    count = len(node.devices)
    assert len(node.pairs) == count * (count - 1) // 2
    ElementTree.fromstring(svg(node))  # noqa: S314 - our own drawing
    json.dumps(json_document(node))
    for finding in check(node):
        assert finding.code in CODES
        assert finding.remedy
        assert finding.evidence or finding.code == "topology.rail.uneven"


@each_row("name", lambda: [name for name in NAMES if topology(name).gpus])
def test_matrix_reads_back(name):
    node = topology(name)
    again = parse(matrix(node), name)
    assert [(p.a, p.b, p.label) for p in again.pairs if p.label != "N/A"] == [
        (p.a, p.b, p.label) for p in node.pairs if p.label != "N/A"
    ]
    assert again.islands == node.islands


def codes(node):
    return [(finding.code.removeprefix("topology."), finding.subject) for finding in check(node)]


def of(node, code):
    return next(finding for finding in check(node) if finding.code == f"topology.{code}")


def planned(node, scope):
    (found,) = [e for e in with_expectations(node).expectations if (e.scope, e.op) == (scope, "all_gather")]
    return found


def test_what_is_said_of_each_machine():
    hgx, efa, tray, flat, polaris = (topology(name) for name in (HGX, P4D, GB200, FLAT, "polaris-4xA100-nv4"))
    short, dead, lost = (topology(f"sick-h100-{what}") for what in ("nvlink-missing", "dead-hca", "gpu-lost"))
    with_file = replace(flat, topology_files=("/opt/microsoft/ndv4-topo.xml",))
    rows = {
        "an HGX is recognised": (hgx.sku, "HGX H100/H200"),
        "one island behind NVSwitch": ([island.nvlinks_per_pair for island in hgx.islands], [("NV18",)]),
        "each GPU has its NIC": ({near.gpu: near.nics for near in hgx.nearest_nic}["GPU4"], ("mlx5_6",)),
        "and its rail": ([rail.gpus for rail in hgx.rails], [(f"GPU{i}",) for i in range(8)]),
        "a sound one has no finding": (check(hgx), ()),
        "EFA is shown, though nvidia-smi would not": ({nic.kind for nic in efa.nics}, {"efa"}),
        "near each GPU": ({near.label for near in efa.nearest_nic}, {"PIX"}),
        "two GPUs a rail": ([rail.gpus for rail in efa.rails], [(f"GPU{2 * i}", f"GPU{2 * i + 1}") for i in range(4)]),
        "Grace reaches its NIC through C2C": ({near.path for near in tray.nearest_nic}, {PathClass.P2C}),
        "which is no fault": ("gdr.path" in dict(codes(tray)), False),
        "a flat guest decides nothing": ((bool(flat.virtual), {near.decidable for near in flat.nearest_nic}),
                                         (True, {False})),
        "and says so": (of(flat, "gpu_nic.undecidable").status, Status.UNKNOWN),
        "with what to set": ("NCCL_TOPO_FILE" in of(flat, "virtual").remedy, True),
        "and to which file": ("/opt/microsoft/ndv4-topo.xml" in of(with_file, "virtual").remedy, True),
        "fewer NVLinks on a pair": (Pairs(short.pairs).get("GPU0", "GPU3").label, "NV16"),
        "are found": ((of(short, "nvlink.asymmetric").subject, of(short, "nvlink.asymmetric").status),
                      ("GPU3", Status.FAIL)),
        "and lower the plan": (planned(short, "island").busbw_bytes_per_second, pytest.approx(16 * 20.6e9)),
        "a dead HCA is named": ("mlx5_3" in of(dead, "gpu_nic.down").message, True),
        "with the GPU whose rail it was": ((of(dead, "gpu_nic.down").subject, len(dead.rails)), ("GPU3", 7)),
        "a lost GPU stays in the matrix": ([gpu.name for gpu in lost.gpus if not gpu.usable], ["GPU5"]),
        "and out of the island": (len(lost.islands[0].gpus), 7),
        "and of the plan": ("GPU5" in planned(lost, "node").members, False),
        "which is that of the others": (
            planned(lost, "node").busbw_bytes_per_second, pytest.approx(18 * 20.6e9)),
        "far NICs of a PCIe server": (
            {("gpu_nic.far", "GPU0"), ("gdr.path", "GPU1")} <= set(codes(topology(A40))), True),
        # nvidia-smi says NODE where NCCL says PHB; where PHB itself is shown there is nothing to explain
        "NODE beside the level that covers it": (
            "NCCL_NET_GDR_LEVEL=PHB" in (text := of(topology(A40), "gdr.path").remedy)
            and "NCCL's level PHB covers it" in text, True),
        "PHB needs no word": ("NODE" in of(polaris, "gdr.path").remedy, False),
    }  # fmt: skip
    assert not {what: found for what, (found, expected) in rows.items() if found != expected}


def test_a_gpu_at_x4_lowers_the_plan_of_the_ring():
    """NCCL plans by the slot (16 GB/s between these CPUs); the ring crosses four lanes of Gen4, 6 GB/s, and says so."""
    plans = {}
    for name in ("l40s-4x-pcie", "sick-l40s-x4"):
        node = topology(name)
        (plans[name],) = [e for e in with_expectations(node).expectations if (e.scope, e.op) == ("node", "all_gather")]
        slot = Pairs(node.pairs).get("GPU2", "GPU3")
        assert slot.bytes_per_second == pytest.approx(24e9)  # as NCCL reads the slot, either way
    assert plans["l40s-4x-pcie"].busbw_bytes_per_second == pytest.approx(16e9)
    assert plans["sick-l40s-x4"].busbw_bytes_per_second == pytest.approx(6e9)
    assert any("GPU2 runs at Gen4 x4 of x16" in step for step in plans["sick-l40s-x4"].derivation)
    links = {gpu.name: gpu.pcie_link for gpu in topology("sick-l40s-x4").gpus}
    assert links == {"GPU0": "Gen4 x16", "GPU1": "Gen4 x16", "GPU2": "Gen4 x4 of x16", "GPU3": "Gen4 x16"}


def with_links(name, **links):
    """The node with the named devices' links as they are given."""
    whole = snapshot(name)
    facts = whole.facts(PciFacts)
    changed = tuple(
        replace(d, **links[d.bus_id.replace(":", "_")]) if d.bus_id.replace(":", "_") in links else d
        for d in facts.devices
    )
    return build(replace(whole, outcomes={**whole.outcomes, "pci": Ok(facts=replace(facts, devices=changed))}))


def planned_rail(node, member):
    """The all-gather of the rail that a device belongs to."""
    rails = [e for e in with_expectations(node).expectations if (e.scope, e.op) == ("rail", "all_gather")]
    return next(e for e in rails if member in e.members)


def test_a_slow_nic_lowers_its_rail_and_an_idle_gpu_nothing():
    """A NIC keeps its speed at rest, so a low one counts; an idle GPU lowers its own."""
    sound = topology(HGX)
    nic, gpu = sound.nics[0], sound.gpus[0]
    at_rest = {"link_transfers_per_second": 2.5e9}
    idle = with_links(HGX, **{gpu.bus_id.replace(":", "_"): at_rest})
    assert with_expectations(idle).expectations == with_expectations(sound).expectations
    assert idle.gpus[0].pcie_link == "Gen5 x16"
    slow = with_links(HGX, **{nic.bus_id.replace(":", "_"): {"link_transfers_per_second": 16e9, "link_width": 8}})
    assert slow.nics[0].pcie_link == "Gen4 of Gen5 x8 of x16"
    assert planned_rail(slow, nic.name).busbw_bytes_per_second == pytest.approx(12e9)  # Gen4 x8
    narrow = with_links(HGX, **{gpu.bus_id.replace(":", "_"): {"link_width": 4}})
    # Gen5 x4 into the rail's only GPU
    assert planned_rail(narrow, gpu.name).busbw_bytes_per_second == pytest.approx(12e9)
    assert narrow.islands == sound.islands  # NVLink does not care


def test_pxn_is_promised_only_over_nvlink():
    """A PCIe server has no NVLink; Polaris has, but no GPU with a NIC at PXB or nearer; with one, the way is named."""
    for name in ("l40s-4x-pcie", "polaris-4xA100-nv4"):
        far = [finding for finding in check(topology(name)) if finding.code == "topology.gpu_nic.far"]
        assert far and all("(PXN) is closed" in finding.remedy for finding in far)
    node = topology("polaris-4xA100-nv4")
    beside = tuple(
        replace(near, label="PIX", path=PathClass.PIX) if near.gpu == "GPU1" else near for near in node.nearest_nic
    )
    far = [f for f in check(replace(node, nearest_nic=beside)) if f.code == "topology.gpu_nic.far"]
    assert [finding.subject for finding in far] == ["GPU0", "GPU2"]
    for finding in far:
        assert "until then NCCL sends over NVLink" in finding.remedy
        assert f"{finding.subject} to GPU1: NV4" in finding.evidence
        assert "GPU1 to mlx5_1: PIX" in finding.evidence


def test_without_nvml_the_gpus_are_known_from_pci_alone():
    whole = snapshot(HGX)
    blind = replace(whole, outcomes={**whole.outcomes, "gpu": Absent(why="no driver")})
    node, seen = build(blind), topology(HGX)
    assert [gpu.bus_id for gpu in node.gpus] == [gpu.bus_id for gpu in seen.gpus]
    assert node.nearest_nic == seen.nearest_nic
    assert node.islands == ()
    assert any("known from PCI alone" in warning for warning in node.warnings)


def test_pci_ancestry_agrees_with_nvml_where_no_nvlink_hides_it():
    whole = snapshot("l40s-4x-pcie")
    facts = whole.facts(GpuFacts)
    assert facts is not None
    told = {(pair.a, pair.b): pair.ancestor for pair in facts.pairs}
    blind = build(replace(whole, outcomes={**whole.outcomes, "gpu": Absent(why="no driver")}))
    assert {key: Pairs(blind.pairs).get(f"GPU{key[0]}", f"GPU{key[1]}").label for key in told} == told


def test_a_driver_that_does_not_load_leaves_the_gpus_of_the_pci_tree():
    whole = snapshot(HGX)
    facts = GpuFacts(driver_version=None, cuda_version=None, gpus=(), driver_error="DRIVER_NOT_LOADED", pci_gpus=8)
    node = build(replace(whole, outcomes={**whole.outcomes, "gpu": Ok(facts=facts)}))
    assert len(node.gpus) == 8
    assert not node.nvlink_known
    assert any("DRIVER_NOT_LOADED" in warning for warning in node.warnings)
    assert not [finding for finding in check(node) if finding.code.startswith("topology.nvlink")]
