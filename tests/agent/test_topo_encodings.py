"""`topo --from` reads what shells and mail make of a file: UTF-16, a byte order mark, gzip."""

from __future__ import annotations

import gzip
import json

from rigs.command import topoflight
from rigs.tables import each_row

MATRIX = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\r\nGPU0\t X \tNV4\t0-31\t0\r\nGPU1\tNV4\t X \t32-63\t1\r\n"
XML = """<system version="1"><cpu numaid="0" arch="x86_64">
<pci busid="0000:01:00.0" class="0x030200"/><pci busid="0000:02:00.0" class="0x030200"/></cpu></system>
"""
SHAPES = {
    "UTF-8": lambda text: text.encode(),
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "UTF-16 with a mark": lambda text: text.encode("utf-16"),
    "UTF-16 little-endian": lambda text: text.encode("utf-16-le"),
    "UTF-16 big-endian": lambda text: text.encode("utf-16-be"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "gzip of UTF-16": lambda text: gzip.compress(text.encode("utf-16")),
}


def run(raw, tmp_path):
    given = tmp_path / "given"
    given.write_bytes(raw)
    return topoflight("topo", "--from", given, "-o", "json")


@each_row("shape", SHAPES)
@each_row(("text", "labels"), [(MATRIX, ["NV4"]), (XML, ["PHB"])], ids=["matrix", "XML"])
def test_the_same_text_in_other_bytes_says_the_same(shape, text, labels, tmp_path):
    result = run(SHAPES[shape](text), tmp_path)
    assert result.exit_code == 0, result.output
    assert [pair["label"] for pair in json.loads(result.output)["pairs"]] == labels


def test_a_matrix_in_html_is_no_xml(tmp_path):
    result = run(f"<details><summary>Topology</summary>\n<pre>\n{MATRIX}</pre>\n".encode(), tmp_path)
    assert [pair["label"] for pair in json.loads(result.output)["pairs"]] == ["NV4"]


@each_row(
    ("raw", "told"),
    [
        (gzip.compress(MATRIX.encode())[:40], "not a whole gzip file"),
        (b'<graphs version="1"><graph id="0" pattern="4"/></graphs>', "NCCL_GRAPH_DUMP_FILE"),
    ],
)
def test_what_is_no_topology_is_named(raw, told, tmp_path):
    result = run(raw, tmp_path)
    assert result.exit_code == 2 and told in result.output
