"""Promises for any input: symmetry, render and parse are inverse, and no text or XML ever crashes a parser."""

from __future__ import annotations

import json
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from topo_samples import FOUR_GPUS_TWO_NICS, NVSWITCH8

from probes.pci.facts import PciDevice
from topology.derive import complete
from topology.formats import TopologyFileError, xml
from topology.formats.text import lower, parse
from topology.graph import GpuNode, NicNode, NodeTopology, Pair, nvlinks, path_class, rank
from topology.links import PciTree
from topology.render import json_document
from topology.render import render_matrix as matrix
from topology.svg import svg

GPU_LABELS = ["NV1", "NV2", "NV4", "NV12", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"]
NIC_LABELS = ["PIX", "PXB", "PHB", "NODE", "SYS"]
label = st.sampled_from([*GPU_LABELS, "SOC", "N/A"])


@st.composite
def nodes(draw):
    """A node as a text matrix could hold it."""
    gpus = draw(st.integers(1, 9))
    nics = draw(st.integers(0, 4))
    cpu = draw(st.sampled_from([None, "0-31", "0-15,32-47", "0,2,4"]))
    numa = draw(st.sampled_from([None, "0", "0-1", "N/A"])) if cpu else None
    numa_id = draw(st.sampled_from([None, "N/A", "1"])) if numa else None
    made = tuple(
        GpuNode(
            name=f"GPU{i}",
            index=i,
            cpu_affinity=cpu,
            numa_affinity=numa,
            gpu_numa_id=numa_id,
            numa_node=0 if numa == "0" else None,
        )
        for i in range(gpus)
    )
    legend = draw(st.booleans())
    wires = tuple(
        NicNode(name=f"mlx5_{i}", label=f"NIC{i}" if legend else f"mlx5_{i}", kind="hca") for i in range(nics)
    )
    pairs = []
    for a, b in combinations((*made, *wires), 2):
        word = draw(st.sampled_from(GPU_LABELS if isinstance(b, GpuNode) else NIC_LABELS))
        pairs.append(Pair(a=a.name, b=b.name, label=word, path=path_class(word), nvlinks=nvlinks(word)))
    return complete(NodeTopology(hostname="x", gpus=made, nics=wires, pairs=tuple(pairs), source="nvidia-smi topo -m"))


def gist(node):
    pairs = [(pair.a, pair.b, pair.label, pair.path, pair.nvlinks) for pair in node.pairs]
    return node.gpus, node.nics, pairs, node.islands, node.nearest_nic, node.rails, node.virtual


@given(nodes())
@settings(deadline=None)
def test_rendered_matrix_parses_to_the_same(node):
    assert gist(parse(matrix(node), "x")) == gist(node)


@given(nodes())
@settings(max_examples=50, deadline=None)
def test_every_output_can_be_drawn(node):
    json.dumps(json_document(node))
    assert svg(node).count("<svg") == 1


@given(label, label)
@settings(deadline=None)
def test_lower_label_is_symmetric_and_one_of_the_two(first, second):
    chosen = lower(first, second)
    assert chosen in (first, second)
    assert rank(chosen) == rank(lower(second, first))
    assert nvlinks(chosen) == nvlinks(lower(second, first))


WORDS = (
    "GPU0 GPU1 GPU2 NIC0 mlx5_0 X NV18 NV1 PIX PXB PHB NODE SYS SOC N/A 0-31 0 CPU Affinity NUMA GPU ID Legend: NIC "
    "NIC0: OK GNS MX # | <br> ^[[0m"
)
words = st.sampled_from([*WORDS.split(), "\t", "\n", "\x1b[4m", "\\n", "\r\n"])


SALAD = st.tuples(st.lists(words, max_size=120), st.sampled_from([" ", "\t", ""])).map(lambda two: two[1].join(two[0]))


@given(SALAD | st.text(max_size=400))
@settings(max_examples=500, deadline=None)
def test_any_text_never_crashes(text):
    reads_or_refuses(text)


@given(st.sampled_from([FOUR_GPUS_TWO_NICS, NVSWITCH8]), st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_matrix_is_read_or_refused_with_a_line_of_the_text(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 60)))
    damaged = text[:start] + data.draw(st.text("GPUNIC0189XVSY \t\n,-", max_size=8)) + text[end:]
    reads_or_refuses(damaged)


def reads_or_refuses(text):
    try:
        node = parse(text, "x")
    except TopologyFileError as error:
        assert 1 <= error.line <= text.count("\n") + text.count("\\n") + 1
        assert error.message
    else:
        assert node.gpus
        names = {device.name for device in node.devices}
        assert all(pair.a in names and pair.b in names and pair.a != pair.b for pair in node.pairs)
        assert len({frozenset((pair.a, pair.b)) for pair in node.pairs}) == len(node.pairs)
        parse(matrix(node), "again")


elements = st.recursive(
    st.sampled_from(
        [
            '<gpu dev="0" sm="90"/>',
            '<nic><net name="a" dev="0" speed="x"/></nic>',
            '<pci busid="0000:01:00.0" class="0x030200"/>',
            '<nvlink target="x" count="y"/>',
            "<gpu/>",
            "<pci/>",
            "<cpu/>",
            "&amp;",
        ]
    ),
    lambda inner: st.lists(inner, max_size=4).map(
        lambda parts: '<pci busid="0000:0a:00.0" class="0x060400">' + "".join(parts) + "</pci>"
    ),
    max_leaves=12,
)


ODD_XML = st.lists(elements, max_size=6).map(
    lambda parts: '<system version="1"><cpu numaid="-1">' + "".join(parts) + "</cpu></system>"
)


@given(ODD_XML | st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_odd_xml_is_read_or_refused(text):
    try:
        xml.parse(text, "x")
    except TopologyFileError as error:
        assert error.line >= 1 and error.message


@st.composite
def trees(draw):
    """A random PCIe tree of at most twelve devices."""
    count = draw(st.integers(2, 12))
    devices = []
    for index in range(count):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        root = devices[parent].root if parent is not None else draw(st.sampled_from(["pci0000:00", "pci0000:80"]))
        devices.append(
            PciDevice(
                bus_id=f"0000:{index:02x}:00.0",
                class_code=0x060400,
                vendor_id=1,
                device_id=1,
                parent=devices[parent].bus_id if parent is not None else None,
                root=root,
                numa_node=draw(st.sampled_from([None, 0, 1])),
            )
        )
    return PciTree(devices)


@given(trees())
@settings(deadline=None)
def test_path_labels_are_symmetric_and_near_stays_below_one_root(tree):
    for a, b in combinations(tree.devices, 2):
        forth, back = tree.label(a, b), tree.label(b, a)
        assert forth == back
        if forth in ("PIX", "PXB"):
            assert tree.devices[a].root == tree.devices[b].root
