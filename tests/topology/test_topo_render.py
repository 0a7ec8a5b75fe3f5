"""What is printed and drawn: nvidia-smi's own shape, stable JSON names, and nothing a host's text can break out of."""

from __future__ import annotations

import json
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
    assert matrix(parse(FOUR_GPUS_TWO_NICS)) == FOUR_GPUS_TWO_NICS


def test_a_node_without_a_legend_gets_one_on_printing_and_old_words_stay():
    assert matrix(parse(OLD_SOC)).startswith(OLD_SOC)


def test_mp_prints_no_nvlink_line():
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


def test_json_has_the_frozen_names():
    document = json.loads(json.dumps(json_document(topology("hgx-h100-8xH100-8hca"))))
    assert set(document) == {
        "schema_version", "hostname", "source", "sku", "sku_candidates", "product", "nvlink_known", "virtual",
        "cpu_count", "numa_nodes", "gpus", "nics", "pairs_by_class", "pairs", "islands", "nearest_nic", "rails",
        "expectations", "departures_from_reference", "warnings",
    }  # fmt: skip
    assert set(document["nearest_nic"]["GPU0"]) == {
        "label", "class", "nics", "names", "local", "decidable", "why", "gpu_bus_id", "nic_bus_ids",
    }  # fmt: skip
    assert document["pairs_by_class"]["gpu_gpu"] == {"NV18": 28}


def test_without_nics_nearest_is_null_not_empty():
    text = "\tGPU0\tGPU1\nGPU0\tX\tSYS\nGPU1\tSYS\tX\n"
    assert json_document(parse(text))["nearest_nic"] is None


def test_shape_alone_names_candidates():
    assert "HGX H100/H200" in json_document(parse(NVSWITCH8))["sku_candidates"]
    assert json_document(parse(NVSWITCH8))["sku"] is None


@each_row("label", ["NV", "PIX", "PXB", "PHB", "NODE", "SYS"])
def test_every_class_has_a_colour_of_its_own(label):
    assert list(COLOURS.values()).count(COLOURS[label]) == 1


def test_a_down_nic_is_drawn_as_such():
    node = topology("hgx-h100-8xH100-8hca")
    down = replace(node, nics=(replace(node.nics[0], active=False), *node.nics[1:]))
    assert ", down</title>" in svg(down)
    assert ", down</title>" not in svg(node)
