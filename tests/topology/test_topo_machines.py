"""Recorded machines: their topology, how it is drawn, what is found wrong with it, and the frozen documents of each."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rigs.recorded import NAMES, snapshot, with_facts, with_outcomes
from rigs.tables import each_row
from topo_samples import FOUR_GPUS_TWO_NICS, NVSWITCH8, OLD_SOC, topology

from agent.terminal.topology import list_link_properties
from probes.api import Absent
from probes.gpu.facts import GpuFacts
from probes.pci.facts import PciFacts
from topology.build import build
from topology.check import CODES, check
from topology.derive import complete
from topology.formats.text import parse
from topology.graph import COLOURS, GpuNode, NicNode, NodeTopology, Pair, Pairs, PathClass
from topology.paths import with_expectations
from topology.render import json_document, render_matrix as matrix
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


def test_rails_islands_and_files_of_recorded_machines():
    """What of them is in no golden that people read (findings.json, metrics.txt and topology.txt of each)."""
    hgx, efa, flat, lost = (topology(name) for name in (HGX, P4D, FLAT, "sick-h100-gpu-lost"))
    assert (hgx.sku, [island.nvlinks_per_pair for island in hgx.islands]) == ("HGX H100/H200", [("NV18",)])
    assert [rail.gpus for rail in hgx.rails] == [(f"GPU{i}",) for i in range(8)]
    assert [rail.gpus for rail in efa.rails] == [(f"GPU{2 * i}", f"GPU{2 * i + 1}") for i in range(4)]
    assert len(topology("sick-h100-dead-hca").rails) == 7
    assert [gpu.name for gpu in lost.gpus if not gpu.usable] == ["GPU5"] and len(lost.islands[0].gpus) == 7
    assert {near.decidable for near in flat.nearest_nic} == {False}
    shown = dict(list_link_properties(flat))["nearest NIC"]
    assert shown.startswith("unknown: GPU0, ") and f"({flat.nearest_nic[0].why})" in shown


def with_link(name, bus_id, **link):
    """The node with one device's link as it is given."""
    whole = snapshot(name)
    facts = whole.facts(PciFacts)
    devices = tuple(replace(d, **link) if d.bus_id == bus_id else d for d in facts.devices)
    return build(with_facts(whole, pci=replace(facts, devices=devices)))


def test_a_slow_nic_lowers_its_rail_and_an_idle_gpu_nothing():
    """A NIC keeps its speed at rest, so a low one counts; an idle GPU lowers its own."""
    sound = topology(HGX)
    nic, gpu = sound.nics[0], sound.gpus[0]
    idle = with_link(HGX, gpu.bus_id, link_transfers_per_second=2.5e9)
    assert with_expectations(idle).expectations == with_expectations(sound).expectations
    assert idle.gpus[0].pcie_link == "Gen5 x16"
    slow = with_link(HGX, nic.bus_id, link_transfers_per_second=16e9, link_width=8)
    assert slow.nics[0].pcie_link == "Gen4 of Gen5 x8 of x16"
    narrow = with_link(HGX, gpu.bus_id, link_width=4)
    assert narrow.islands == sound.islands  # NVLink does not care
    for made, member in ((slow, nic.name), (narrow, gpu.name)):  # Gen4 x8, and Gen5 x4 into the rail's only GPU
        rails = [e for e in with_expectations(made).expectations if (e.scope, e.op) == ("rail", "all_gather")]
        (rail,) = [e for e in rails if member in e.members]
        assert rail.busbw_bytes_per_second == pytest.approx(12e9)


def test_pxn_is_promised_only_over_nvlink():
    """A PCIe server has no NVLink; Polaris has, but no GPU with a NIC at PXB or nearer; with one, the way is named."""
    for name in ("l40s-4x-pcie", "polaris-4xA100-nv4"):
        far = [finding for finding in check(topology(name)) if finding.code == "topology.gpu_nic.far"]
        assert far and all("cannot send through another GPU (PXN)" in finding.remedy for finding in far)
    node = topology("polaris-4xA100-nv4")
    nearest = tuple(
        replace(near, label="PIX", path=PathClass.PIX) if near.gpu == "GPU1" else near for near in node.nearest_nic
    )
    far = [f for f in check(replace(node, nearest_nic=nearest)) if f.code == "topology.gpu_nic.far"]
    assert [finding.subject for finding in far] == ["GPU0", "GPU2"]
    for finding in far:
        assert "Until then NCCL sends over NVLink" in finding.remedy
        assert f"{finding.subject} to GPU1: NV4" in finding.evidence
        assert "GPU1 to mlx5_1: PIX" in finding.evidence


def test_without_a_driver_that_answers_the_gpus_are_known_from_pci_alone():
    seen, whole = topology(HGX), snapshot(HGX)
    facts = GpuFacts(driver_version=None, cuda_version=None, gpus=(), driver_error="DRIVER_NOT_LOADED", pci_gpus=8)
    for blind, words in (
        (with_outcomes(whole, gpu=Absent(why="no driver")), "known from PCI only"),
        (with_facts(whole, gpu=facts), "DRIVER_NOT_LOADED"),
    ):
        node = build(blind)
        assert [gpu.bus_id for gpu in node.gpus] == [gpu.bus_id for gpu in seen.gpus]
        assert node.nearest_nic == seen.nearest_nic
        assert node.islands == () and not node.nvlink_known
        assert any(words in warning for warning in node.warnings)
        assert not [finding for finding in check(node) if finding.code.startswith("topology.nvlink")]


def test_pci_ancestry_agrees_with_nvml_where_no_nvlink_hides_it():
    whole = snapshot("l40s-4x-pcie")
    facts = whole.facts(GpuFacts)
    told = {(pair.a, pair.b): pair.ancestor for pair in facts.pairs}
    blind = build(with_outcomes(whole, gpu=Absent(why="no driver")))
    assert {key: Pairs(blind.pairs).get(f"GPU{key[0]}", f"GPU{key[1]}").label for key in told} == told


def test_the_matrix_is_printed_as_nvidia_smi_prints_it():
    """A node without a legend gets one on printing, and old words stay; -mp prints no NVLink line."""
    assert matrix(parse(FOUR_GPUS_TWO_NICS)) == FOUR_GPUS_TWO_NICS
    assert matrix(parse(OLD_SOC)).startswith(OLD_SOC)
    text = NVSWITCH8.replace("NV18", "SYS").replace("  NV#  = Connection traversing a bonded set of # NVLinks\n", "")
    assert "NV#" not in matrix(parse(text))


HOSTILE = '<script>alert("1")</script>\x00\x1b[31m&"\'\n;}'
SHAPES = {"svg", "title", "style", "rect", "text", "path", "g"}


def test_svg_is_one_closed_picture_without_scripts():
    gpus = tuple(GpuNode(name=f"GPU{i}", index=i, model=HOSTILE, bus_id=HOSTILE, numa_node=0) for i in range(2))
    nic = NicNode(name=HOSTILE, netdev=HOSTILE, kind="hca", link_layer=HOSTILE)
    rows = (("GPU0", "GPU1", "SYS"), ("GPU0", HOSTILE, "PIX"), ("GPU1", HOSTILE, "SYS"))
    pairs = tuple(Pair(a=a, b=b, label=label, path=None) for a, b, label in rows)
    text = svg(complete(NodeTopology(hostname=HOSTILE, gpus=gpus, nics=(nic,), pairs=pairs, product=HOSTILE)))
    root = ElementTree.fromstring(text)  # noqa: S314 - our own drawing
    assert root.tag.endswith("svg")
    assert not [element for element in root.iter() if element.tag.rpartition("}")[2] not in SHAPES]
    assert "<script" not in text
    assert not any(name in ("href", "onload", "style") for element in root.iter() for name in element.attrib)


@each_row(
    ("machine", "words"),
    [("hgx-h100-8xH100-8hca", "NVLink NV18 on every pair ·"),
     ("sick-h100-gpu-lost", "NVLink NV18 on every pair of 7 of 8 GPUs ·")],
)  # fmt: skip
def test_a_gpu_outside_an_island_is_in_none_of_its_pairs(machine, words):
    """A GPU that the driver has lost has no NVLink: what holds of seven is not said of eight."""
    assert words in svg(topology(machine))


def test_json_without_nics_or_without_a_machine_says_so():
    """Nearest is null and not empty, and a shape alone names no machine."""
    assert json_document(parse("\tGPU0\tGPU1\nGPU0\tX\tSYS\nGPU1\tSYS\tX\n"))["nearest_nic"] is None
    assert json_document(parse(NVSWITCH8))["sku"] is None


def test_every_class_has_a_colour_of_its_own_and_a_down_nic_is_drawn_as_such():
    colours = [COLOURS[label] for label in ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")]
    assert all(list(COLOURS.values()).count(colour) == 1 for colour in colours)
    node = topology("hgx-h100-8xH100-8hca")
    down = replace(node, nics=(replace(node.nics[0], active=False), *node.nics[1:]))
    assert [", down</title>" in svg(each) for each in (down, node)] == [True, False]
