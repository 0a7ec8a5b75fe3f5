"""A matrix through every mangling seen in the wild says the same; what holds for any input: symmetry, inverses."""

import json
import re
from itertools import combinations

from hypothesis import given, settings, strategies as st
from rigs.tables import data_of, each_row
from topo_samples import ALL

from probes.pci.facts import PciDevice
from topology.derive import complete
from topology.formats.text import choose_worse_label, parse
from topology.graph import GpuNode, NicNode, NodeTopology, Pair, nvlinks, path_class, rank
from topology.links import PciTree
from topology.render import render_matrix as matrix

ROW = re.compile(r"(?m)^([ \t]*(?:GPU\d|mlx\d|NIC\d+\t).*)$")


def gist(node):
    """Everything but evidence and warnings."""
    pairs = [(pair.a, pair.b, pair.label) for pair in node.pairs]
    return node.gpus, node.nics, pairs, node.islands, node.nearest_nic, node.rails, node.source


def underlined(escape):
    def underline(text):
        header, rest = text.split("\n", 1)
        return f"\t{escape}[4m{header[1:]}{escape}[0m\n{rest}"

    return underline


def glued_header(text):
    header, rest = text.split("\n", 1)
    devices, affinity, titles = header.partition("CPU")
    return re.sub(r"\s+", "", devices) + affinity + titles + "\n" + rest


def glued_cells(text):
    rows, legend, rest = text.partition("Legend")
    return re.sub(r"(NODE|PIX|PXB|PHB|SYS|SOC)\s+(?=NODE|PIX|PXB|PHB|SYS|SOC|X)", r"\1", rows) + legend + rest


def each_line(form):
    return lambda text: "\n".join(form.format(line, n=n) for n, line in enumerate(text.split("\n"), 1))


FORMS = data_of(__file__, "test_topo_text_shapes.yaml")
SHAPES = {
    **{name: each_line(form) for name, form in FORMS["lines"].items()},
    **{name: form.format for name, form in FORMS["texts"].items()},
    **{name: lambda text, pair=pair: text.replace(*pair) for name, pair in FORMS["replaced"].items()},
    "tabs to columns of 8": lambda text: text.expandtabs(8),
    "tabs to columns of 4": lambda text: text.expandtabs(4),
    "one blank between cells": lambda text: re.sub(r"[ \t]+", " ", text),
    "header glued": glued_header,
    "cells glued": glued_cells,
    "underlined header": underlined("\x1b"),
    "underline spelled out": underlined("^["),
    "escape character lost": underlined(""),
    "lines stripped": lambda text: "\n".join(map(str.strip, text.split("\n"))),
    "in JSON": lambda text: json.dumps({"stdout": text}),
    "in a container runtime's log": lambda text: "\n".join(
        json.dumps({"log": line + "\n", "stream": "stdout"}) for line in text.split("\n")),
    "Markdown table": lambda text: ROW.sub(lambda m: "| " + re.sub(r"\s+", " | ", m[1].strip()) + " |", text),
    "printed twice": lambda text: text + "\n" + text,
}  # fmt: skip


@each_row("sample", ALL, ids=str)
@each_row("shape", SHAPES, ids=str)
def test_a_mangled_matrix_says_the_same(sample, shape):
    assert gist(parse(SHAPES[shape](ALL[sample]))) == gist(parse(ALL[sample]))


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
        GpuNode(name=f"GPU{i}", index=i, cpu_affinity=cpu, numa_affinity=numa, gpu_numa_id=numa_id,
                c2c=True if numa_id == "1" else None, numa_node=0 if numa == "0" else None)
        for i in range(gpus)
    )  # fmt: skip
    legend = draw(st.booleans())
    wires = tuple(
        NicNode(name=f"mlx5_{i}", label=f"NIC{i}" if legend else f"mlx5_{i}", kind="hca") for i in range(nics)
    )
    pairs = []
    for a, b in combinations((*made, *wires), 2):
        word = draw(st.sampled_from(GPU_LABELS if isinstance(b, GpuNode) else NIC_LABELS))
        coherent = isinstance(a, GpuNode) and bool(a.c2c) and not isinstance(b, GpuNode)
        path = path_class(word, c2c=coherent)
        pairs.append(Pair(a=a.name, b=b.name, label=word, path=path, nvlinks=nvlinks(word)))
    return complete(NodeTopology(hostname="x", gpus=made, nics=wires, pairs=tuple(pairs), source="nvidia-smi topo -m"))


def essence(node):
    pairs = [(pair.a, pair.b, pair.label, pair.path, pair.nvlinks) for pair in node.pairs]
    return node.gpus, node.nics, pairs, node.islands, node.nearest_nic, node.rails, node.virtual


@given(nodes())
@settings(deadline=None)
def test_rendered_matrix_parses_to_the_same(node):
    assert essence(parse(matrix(node), "x")) == essence(node)


@given(label, label)
@settings(deadline=None)
def test_lower_label_is_symmetric_and_one_of_the_two(first, second):
    chosen = choose_worse_label(first, second)
    assert chosen in (first, second)
    assert rank(chosen) == rank(choose_worse_label(second, first))
    assert nvlinks(chosen) == nvlinks(choose_worse_label(second, first))


@st.composite
def trees(draw):
    """A random PCIe tree of at most twelve devices."""
    count = draw(st.integers(2, 12))
    devices = []
    for index in range(count):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        root = devices[parent].root if parent is not None else draw(st.sampled_from(["pci0000:00", "pci0000:80"]))
        above = devices[parent].bus_id if parent is not None else None
        devices.append(
            PciDevice(bus_id=f"0000:{index:02x}:00.0", class_code=0x060400, vendor_id=1, device_id=1, parent=above,
                      root=root, numa_node=draw(st.sampled_from([None, 0, 1])))
        )  # fmt: skip
    return PciTree(devices)


@given(trees())
@settings(deadline=None)
def test_path_labels_are_symmetric_and_near_stays_below_one_root(tree):
    for a, b in combinations(tree.devices, 2):
        forth, back = tree.label(a, b), tree.label(b, a)
        assert forth == back
        if forth in ("PIX", "PXB"):
            assert tree.devices[a].root == tree.devices[b].root
