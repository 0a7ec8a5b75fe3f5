"""The same matrix through every mangling seen in the wild must say the same."""

import json
import re

from rigs.tables import each_row
from topo_samples import ALL

from topology.formats.text import parse

ROW = re.compile(r"(?m)^([ \t]*(?:GPU\d|mlx\d|NIC\d+\t).*)$")


def gist(node):
    """Everything but evidence and warnings."""
    pairs = [(pair.a, pair.b, pair.label) for pair in node.pairs]
    return node.gpus, node.nics, pairs, node.islands, node.nearest_nic, node.rails, node.source


def numbered(form):
    return lambda text: "\n".join(form.format(n, line) for n, line in enumerate(text.split("\n"), 1))


def each_line(change):
    return lambda text: "\n".join(change(line) for line in text.split("\n"))


def prefix(words):
    return each_line(lambda line: words + line)


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


SHAPES = {
    "as printed": lambda text: text,
    "tabs to columns of 8": lambda text: text.expandtabs(8),
    "tabs to columns of 4": lambda text: text.expandtabs(4),
    "one blank between cells": lambda text: re.sub(r"[ \t]+", " ", text),
    "two tabs between cells": lambda text: text.replace("\t", "\t\t"),
    "tab and blanks between cells": lambda text: text.replace("\t", "\t    "),
    "commented": prefix("#"),
    "commented with a blank": prefix("# "),
    "C comment": prefix("// "),
    "quoted mail": prefix("> "),
    "indented": prefix("        "),
    "srun label": prefix("0: "),
    "mpirun tag": prefix("[1,0]<stdout>:"),
    "time stamp": prefix("2024-05-01T10:20:30.123Z "),
    "Ray worker": prefix("(RayWorker pid=123, ip=10.0.0.1) "),
    "host name": prefix("gpu-node-12: "),
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
    "header glued": glued_header,
    "header broken apart": lambda text: text.replace("CPU Affinity", "CPU    Affinity"),
    "titles glued": lambda text: text.replace("CPU Affinity\tNUMA Affinity", "CPU AffinityNUMA Affinity"),
    "cells glued": glued_cells,
    "underlined header": underlined("\x1b"),
    "underline spelled out": underlined("^["),
    "escape character lost": underlined(""),
    "leading tab lost": lambda text: text.replace("\tGPU0\tGPU1", "GPU0\tGPU1", 1),
    "lines stripped": each_line(str.strip),
    "blanks at the end": each_line(lambda line: line + "   "),
    "blank line after each": lambda text: text.replace("\n", "\n\n"),
    "in a README": lambda text: f"We have GPU0 and GPU1 here.\n```\n$ nvidia-smi topo -m\n{text}```\nGPU0 is fine.\n",
    "in HTML": lambda text: f"<pre>{text}</pre>",
    "with HTML line breaks": each_line(lambda line: line + "<br>"),
    "in JSON": lambda text: json.dumps({"stdout": text}),
    "in a container runtime's log": each_line(lambda line: json.dumps({"log": line + "\n", "stream": "stdout"})),
    "in a Python string": lambda text: f'OUTPUT = """{text}"""',
    "hard blanks": lambda text: text.replace("\t", "\xa0\xa0\xa0"),
    "Markdown table": lambda text: ROW.sub(lambda m: "| " + re.sub(r"\s+", " | ", m[1].strip()) + " |", text),
    "printed twice": lambda text: text + "\n" + text,
    "cat -n": numbered("{:6d}\t{}"),
    "an editor's gutter": numbered("{:>4} | {}"),
    "log lines between": lambda text: text.replace("\nGPU2", "\n[INFO] worker started\nGPU2"),
}


@each_row("sample", ALL, ids=str)
@each_row("shape", SHAPES, ids=str)
def test_a_mangled_matrix_says_the_same(sample, shape):
    assert gist(parse(SHAPES[shape](ALL[sample]))) == gist(parse(ALL[sample]))
