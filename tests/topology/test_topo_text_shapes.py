"""The same matrix through every mangling seen in the wild must say the same."""

import json
import re
from pathlib import Path

import yaml
from rigs.tables import each_row
from topo_samples import ALL

from topology.formats.text import parse

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


FORMS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
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
