"""Matrices that lost something on their way: what is not there stays unknown, and the reader says so."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from rigs.tables import each_row
from topo_samples import OLD_SOC

from agent.cli.topo import topo
from topology.check import check
from topology.formats import TopologyFileError
from topology.formats.text import parse
from topology.graph import Pairs

FOUR = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tSYS\t0-31\t0
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tSYS\t0-31\t0
"""


@each_row("rest", ["\tN", "\tNV", "\tNV1", "", "\t"])
def test_a_text_that_ends_within_a_row_keeps_what_is_whole(rest):
    node = parse(FOUR + "GPU2\tNV12\tNV12\t X " + rest)
    assert Pairs(node.pairs).get("GPU2", "GPU3") is None
    assert {pair.label for pair in node.pairs if "NIC" not in pair.b} == {"NV12"}
    assert any("row GPU2 ends after 3 of 6 cells" in warning for warning in node.warnings)
    assert any("row GPU3 is missing" in warning for warning in node.lacking)


def test_the_beginning_of_a_count_at_the_very_end_does_not_outvote_the_opposite_row():
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV18\tNV18\nGPU1\tNV18\t X \tNV18\nGPU2\tNV18\tNV1"
    assert {pair.label for pair in parse(text).pairs} == {"NV18"}


def test_a_short_row_with_more_text_below_is_refused():
    with pytest.raises(TopologyFileError, match="line 4: row GPU2 has 3 cells, expected 6"):
        parse(FOUR + "GPU2\tNV12\tNV12\t X \nGPU3\tNV12\tNV12\tNV12")


def test_a_gpu_whose_paths_are_unknown_has_no_nearest_nic():
    near = {near.gpu: near for near in parse(FOUR + "GPU2\tNV12\tNV12\t X ").nearest_nic}
    assert (near["GPU0"].nics, near["GPU0"].decidable) == (("NIC0",), True)
    assert (near["GPU2"].nics, near["GPU2"].decidable) == ((), False)
    assert near["GPU2"].why == "no path to any NIC is known"


def test_cells_that_are_unknown_are_no_missing_nvlink():
    names = [f"GPU{i}" for i in range(8)]
    rows = [[("X" if a == b else "ERR!" if "GPU5" in (a, b) else "NV12") for b in names] for a in names]
    text = "\t".join(["", *names]) + "\n" + "\n".join("\t".join([a, *row]) for a, row in zip(names, rows, strict=True))
    assert [finding.code for finding in check(parse(text))] == []
    missing = check(parse(text.replace("ERR!", "SYS")))
    assert [(finding.code, finding.subject) for finding in missing] == [("topology.nvlink.missing", "GPU5")]


def test_a_markdown_table_with_bold_cells_and_a_short_numa_title():
    text = "| | GPU0 | GPU1 | NUMA |\n|---|:--:|---|---|\n| GPU0 | X | **NV4** | 0 |\n| GPU1 | **NV4** | X | 1 |\n"
    node = parse(text)
    assert [pair.label for pair in node.pairs] == ["NV4"]
    assert [(gpu.cpu_affinity, gpu.numa_affinity) for gpu in node.gpus] == [(None, "0"), (None, "1")]


ACROSS = """\
\tGPU0\tGPU1\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV2\tSYS\tSYS\t32-63\t1
GPU1\tNV2\t X \tSYS\tSYS\t32-63\t1
mlx5_0\tSYS\tSYS\t X \t{nics}
mlx5_1\tSYS\tSYS\t{nics}\t X
"""


def test_nics_beside_each_other_and_far_from_every_gpu_are_a_real_machine():
    """All GPUs on one socket, the card with two ports on the other: nothing hides that tree."""
    assert parse(ACROSS.format(nics="PIX")).virtual is None
    assert "hides the PCIe tree" in (parse(ACROSS.format(nics="SYS")).virtual or "")
    for nics in ("PIX", "SYS"):
        assert not any(near.decidable for near in parse(ACROSS.format(nics=nics)).nearest_nic)


def test_sys_beside_a_gpu_of_the_same_numa_node_that_is_near_is_not_called_another_node():
    rows = ("GPU0\t X \tSYS\tSYS\t0-31\t0", "GPU1\tSYS\t X \tPHB\t0-31\t0", "mlx5_0\tSYS\tPHB\t X ")
    text = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\n" + "\n".join(rows) + "\n"
    far = next(finding for finding in check(parse(text)) if finding.code == "topology.gpu_nic.far")
    assert far.message == "GPU0 has no NIC nearer than SYS, though GPU1 of its NUMA node has one: mlx5_0 is SYS"
    far = next(finding for finding in check(parse(OLD_SOC)) if finding.code == "topology.gpu_nic.far")
    assert "no NIC on its own NUMA node" in far.message


HEADERS = {  # header -> columns that are read; the last cell of every row is SYS
    "GPU0\tGPU1\tHSN": ["GPU0", "GPU1", "HSN"],
    "GPU0\tGPU1\tNIC2 (vf0)": ["GPU0", "GPU1", "NIC2"],
    "GPU0 [A100]\tGPU1 [A100]\tHSN (200G)\tCPU Affinity": ["GPU0", "GPU1", "HSN"],
    "GPU0\tHSN\tGPU1": ["GPU0", "GPU1", "HSN"],
    "GPU0\tGPU1\tModel": ["GPU0", "GPU1"],
}


def test_a_header_word_is_a_column_where_the_rows_have_labels_for_it():
    """A device without a digit in its name, or with a note; a column of other words is none."""
    wrong = {}
    for header, expected in HEADERS.items():
        last = "card" if "Model" in header else "SYS"
        middle = "GPU0\tX\tPHB\tNV4\nGPU1\tNV4\tSYS\tX\n"
        rows = middle if "HSN\tGPU1" in header else f"GPU0\tX\tNV4\t{last}\nGPU1\tNV4\tX\t{last}\n"
        node = parse(f"\t{header}\n{rows}")
        found = [gpu.name for gpu in node.gpus] + [nic.name for nic in node.nics]
        if found != expected or Pairs(node.pairs).get("GPU0", "GPU1").label != "NV4":
            wrong[header] = found
    assert not wrong


LINES = ["\tGPU0\tGPU1\tCPU Affinity", "GPU0\tX\tNV4\t0-7", "GPU1\tNV4\tX\t0-7"]
STRINGS = {
    "JSON": json.dumps({"topology": LINES}),
    "JSON, indented": json.dumps({"topology": LINES}, indent=1),
    "JSON with blanks": json.dumps({"topology": [line.expandtabs() for line in LINES]}),
    "a list alone": json.dumps(LINES),
    "Python": f"topology: {LINES!r}",
}


def test_one_line_for_each_string_of_a_list(tmp_path):
    wrong = {}
    for form, text in STRINGS.items():
        path = tmp_path / "topology.json"
        path.write_text(text)
        done = CliRunner().invoke(topo, ["--from", str(path), "-o", "json"])
        found = json.loads(done.output) if done.exit_code == 0 else {"gpus": [], "pairs": done.output}
        if [gpu["cpu_affinity"] for gpu in found["gpus"]] != ["0-7", "0-7"] or found["pairs"][0]["label"] != "NV4":
            wrong[form] = found["pairs"]
    assert not wrong


def test_the_affinity_of_a_wrapped_row_is_unknown():
    text = "  GPU0 GPU1  CPU Affinity  NUMA Affinity\nGPU0  X  SYS  0-31,64-9\n5  0\nGPU1 SYS  X   32-63  1\n"
    assert [(gpu.cpu_affinity, gpu.numa_affinity) for gpu in parse(text).gpus] == [(None, None), ("32-63", "1")]


def test_disks_are_no_nics():
    text = "\tGPU0\tGPU1\tNIC0\tNVMe0\nGPU0\t X \tNODE\tSYS\tPIX\nGPU1\tNODE\t X \tNODE\tSYS\n"
    node = parse(text + "NIC0\tSYS\tNODE\t X \tSYS\nNVMe0\tPIX\tSYS\tSYS\t X\n")
    assert [nic.name for nic in node.nics] == ["NIC0"]
    assert [(near.gpu, near.label) for near in node.nearest_nic] == [("GPU0", "SYS"), ("GPU1", "NODE")]
    assert "NVMe0: no network devices; their cells are not read" in node.warnings


def test_tabs_tell_empty_cells_only_where_one_tab_parts_two_cells():
    """The first row of a table with two tabs between cells, cut: its columns are not shifted."""
    text = "\t\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\t X\t\tNV2\t\tNV1\t\tNV"
    assert [(pair.b, pair.label) for pair in parse(text).pairs] == [("GPU1", "NV2"), ("GPU2", "NV1")]


def test_a_nic_whose_cell_is_cut_off_may_be_the_nearest():
    text = "\tGPU0\tGPU1\tNIC0\tNIC1\nGPU0\t X \tNODE\tPIX\tSYS\nGPU1\tNODE\t X \tSYS\t"
    near = {near.gpu: near for near in parse(text).nearest_nic}
    assert (near["GPU0"].nics, near["GPU0"].decidable) == (("NIC0",), True)
    assert (near["GPU1"].decidable, near["GPU1"].why) == (False, "NIC1 may be nearer: no path is known")


@each_row(
    ("rest", "expected"),
    [("0-31\t0", ("0-31", None)), ("0-3", (None, None)), ("0-31\t0\n", ("0-31", "0")), ("0-3\n", ("0-3", None))],
)
def test_the_last_word_of_a_text_that_breaks_off_is_not_believed(rest, expected):
    node = parse("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t" + rest)
    assert (node.gpus[0].cpu_affinity, node.gpus[0].numa_affinity) == expected
    assert any("may be cut" in warning for warning in node.warnings) == (not rest.endswith("\n"))


def test_a_cut_matrix_expects_no_bandwidth():
    """What it lacks may be the slowest pair; the whole text says what the node should carry."""
    cell = lambda a, b: " X " if a == b else "NV12"  # noqa: E731
    rows = ["\t" + "\t".join(f"GPU{n}" for n in range(4))]
    rows += [f"GPU{a}\t" + "\t".join(cell(a, b) for b in range(4)) for a in range(4)]
    assert parse("\n".join(rows) + "\n").expectations
    assert parse("\n".join(rows[:2]) + "\n").expectations == ()
