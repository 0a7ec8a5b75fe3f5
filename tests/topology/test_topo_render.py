"""What is printed and drawn: nvidia-smi's own shape, stable JSON names, and nothing a host's text can break out of."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from rigs.tables import each_row
from topo_machines import topology
from topo_samples import FOUR_GPUS_TWO_NICS, NVSWITCH8, OLD_SOC

from topology.derive import complete
from topology.formats.text import parse
from topology.graph import COLOURS, GpuNode, NicNode, NodeTopology, Pair
from topology.render import json_document
from topology.render import render_matrix as matrix
from topology.svg import svg

HOSTILE = '<script>alert("1")</script>\x00\x1b[31m&"\'\n;}'


def hostile():
    gpus = tuple(GpuNode(name=f"GPU{i}", index=i, model=HOSTILE, bus_id=HOSTILE, numa_node=0) for i in range(2))
    nic = NicNode(name=HOSTILE, netdev=HOSTILE, kind="hca", link_layer=HOSTILE)
    pairs = (
        Pair(a="GPU0", b="GPU1", label="SYS", path=None),
        Pair(a="GPU0", b=HOSTILE, label="PIX", path=None),
        Pair(a="GPU1", b=HOSTILE, label="SYS", path=None),
    )
    return complete(NodeTopology(hostname=HOSTILE, gpus=gpus, nics=(nic,), pairs=pairs, product=HOSTILE))


def test_the_matrix_is_printed_as_nvidia_smi_prints_it():
    """A node without a legend gets one on printing, and old words stay; -mp prints no NVLink line."""
    assert matrix(parse(FOUR_GPUS_TWO_NICS)) == FOUR_GPUS_TWO_NICS
    assert matrix(parse(OLD_SOC)).startswith(OLD_SOC)
    text = NVSWITCH8.replace("NV18", "SYS").replace("  NV#  = Connection traversing a bonded set of # NVLinks\n", "")
    assert "NV#" not in matrix(parse(text))


def test_svg_is_one_closed_picture_without_scripts():
    text = svg(hostile())
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


SHAPES = {"svg", "title", "style", "rect", "text", "path", "g"}


def test_json_without_nics_or_without_a_machine_says_so():
    """Nearest is null and not empty; a shape alone names candidates."""
    assert json_document(parse("\tGPU0\tGPU1\nGPU0\tX\tSYS\nGPU1\tSYS\tX\n"))["nearest_nic"] is None
    document = json_document(parse(NVSWITCH8))
    assert "HGX H100/H200" in document["sku_candidates"] and document["sku"] is None


def test_every_class_has_a_colour_of_its_own_and_a_down_nic_is_drawn_as_such():
    colours = [COLOURS[label] for label in ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")]
    assert all(list(COLOURS.values()).count(colour) == 1 for colour in colours)
    node = topology("hgx-h100-8xH100-8hca")
    down = replace(node, nics=(replace(node.nics[0], active=False), *node.nics[1:]))
    assert [", down</title>" in svg(each) for each in (down, node)] == [True, False]
