"""The same matrix through every mangling seen in the wild must say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rigs.tables import each_row
from topo_samples import ALL

from agent.cli.topo import topo
from topology.check import check
from topology.formats.text import parse

ROW = re.compile(r"(?m)^([ \t]*(?:GPU\d|mlx\d|NIC\d+\t).*)$")


def gist(node):
    """Everything but evidence and warnings."""
    return (
        node.gpus,
        node.nics,
        [(pair.a, pair.b, pair.label) for pair in node.pairs],
        node.islands,
        node.nearest_nic,
        node.rails,
        node.source,
    )


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
    "underlined header": lambda text: text.replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1", 1).replace(
        "\nGPU0", "\x1b[0m\nGPU0", 1
    ),
    "underline spelled out": lambda text: text.replace("\tGPU0\tGPU1", "\t^[[4mGPU0\tGPU1", 1).replace(
        "\nGPU0", "^[[0m\nGPU0", 1
    ),
    "escape character lost": lambda text: text.replace("\tGPU0\tGPU1", "\t[4mGPU0\tGPU1", 1).replace(
        "\nGPU0", "[0m\nGPU0", 1
    ),
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


def switched(odd: int | None, gpus: int = 8, note: str = "", nic: str = "NODE") -> str:
    """A matrix behind NVSwitch, one GPU of which may be off it."""
    rows = ["\t" + "\t".join(f"GPU{j}" for j in range(gpus)) + "\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity"]
    for i in range(gpus):
        far = {j: "NODE" if (i < gpus // 2) == (j < gpus // 2) else "SYS" for j in range(gpus)}
        cells = [" X " if i == j else far[j] if odd in (i, j) else "NV18" for j in range(gpus)]
        rows.append("\t".join((f"GPU{i}", *cells, "PIX" if i == 0 else nic, "SYS", "0-55", "0")))
    for k in range(2):
        cells = ["SYS" if k else "PIX" if i == 0 else nic for i in range(gpus)]
        rows.append("\t".join((f"NIC{k}", *cells, *(" X " if k == j else "SYS" for j in range(2)))))
    return "\n".join((*rows, note, "Legend:", "  X    = Self", "NIC Legend:", "  NIC0: mlx5_0", "  NIC1: mlx5_1", ""))


@pytest.mark.parametrize("gpus", [4, 8])
def test_a_gpu_off_the_switch_is_named(gpus: int, tmp_path: Path) -> None:
    """NODE and SYS to all while the others are NV18: `topo` prints what it finds, with its lines."""
    path = tmp_path / "topo.txt"
    path.write_text(switched(gpus - 1, gpus))
    done = CliRunner().invoke(topo, ["--from", str(path)])
    assert "topology.nvlink.missing" in done.output
    assert f"GPU{gpus - 1} reaches no other GPU over NVLink" in " ".join(done.output.split())
    document = json.loads(CliRunner().invoke(topo, ["--from", str(path), "-o", "json"]).output)
    assert ("topology.nvlink.missing", "fail") in [(f["code"], f["status"]) for f in document["findings"]]
    path.write_text(switched(None, gpus))
    assert "topology.nvlink.missing" not in CliRunner().invoke(topo, ["--from", str(path)]).output


@each_row("place", ["above", "below"])
@each_row(
    "said", ["76 NICs found in the topology, only displaying 56 in the matrix.", "76 NICs found, only displaying 56"]
)
def test_nics_that_are_not_shown_are_told(place: str, said: str) -> None:
    """nvidia-smi leaves NICs out: what is shown as nearest is the nearest of those shown only, unless it is PIX."""
    text = said + "\n" + switched(None) if place == "above" else switched(None, note=said)
    node = parse(text)
    assert [warning for warning in node.warnings if "56 of 76 NICs" in warning] != []
    assert [near.decidable for near in node.nearest_nic] == [True] + [False] * 7
    assert all("56 of 76" in near.why for near in node.nearest_nic[1:])
    assert parse(switched(None)).warnings == ()
    assert parse(said.replace("76", "56") + "\n" + switched(None)).warnings == ()


def found(*rows: str) -> list[tuple[str, str, str]]:
    return [(f.code, f.status, f.subject) for f in check(parse("\n".join(rows) + "\n"))]


def test_a_card_beside_a_bridged_pair_is_no_fault():
    """A bridge joins two cards; a third has none."""
    assert not found("\tGPU0\tGPU1\tGPU2", "GPU0\t X \tNV12\tSYS", "GPU1\tNV12\t X \tSYS", "GPU2\tSYS\tSYS\t X ")


def test_a_bridged_pair_with_fewer_links_than_another_is_told():
    rows = ("GPU0\t X \tNV12\tNODE\tNODE", "GPU1\tNV12\t X \tNODE\tNODE", "GPU2\tNODE\tNODE\t X \tNV10",
            "GPU3\tNODE\tNODE\tNV10\t X ")  # fmt: skip
    assert found("\tGPU0\tGPU1\tGPU2\tGPU3", *rows) == [("topology.nvlink.asymmetric", "warn", "GPU2")]
    assert not found("\tGPU0\tGPU1\tGPU2\tGPU3", *(row.replace("NV10", "NV12") for row in rows))


def test_nics_without_a_legend_are_judged():
    """nvidia-smi gives columns to Mellanox's devices only."""
    rows = ("\tGPU0\tNIC0", "GPU0\t X \tNODE", "NIC0\tNODE\t X ")
    assert found(*rows) == [("topology.gdr.path", "fail", "GPU0")]
    assert not found(*(row.replace("NODE", "PIX") for row in rows))
