"""`nvidia-smi topo -m` text: what a matrix says, and how one that cannot be read is refused."""

from __future__ import annotations

import pytest
from rigs.tables import each_row
from topo_samples import FOUR_GPUS_TWO_NICS, LEGEND, NVSWITCH8, OLD_SOC, TITLES, TWO_SWITCH_PAIRS, matrix

from topology.formats import TopologyFileError
from topology.formats.text import parse
from topology.graph import PathClass


def labels(node):
    return {(pair.a, pair.b): pair.label for pair in node.pairs}


def nearest(node):
    return {near.gpu: (near.label, near.nics, near.local) for near in node.nearest_nic}


def test_legend_gives_nics_their_names_and_keeps_the_column():
    node = parse(FOUR_GPUS_TWO_NICS, "sample")
    assert [(nic.name, nic.label) for nic in node.nics] == [("mlx5_0", "NIC0"), ("rocep145s0", "NIC1")]
    assert nearest(node)["GPU3"] == ("PIX", ("rocep145s0",), True)
    assert nearest(node)["GPU1"] == ("NODE", ("mlx5_0",), True)


def test_every_pair_is_there_once_with_its_class_and_line():
    node = parse(FOUR_GPUS_TWO_NICS, "sample")
    assert len(node.pairs) == 15
    pair = node.pair("GPU2", "mlx5_0")
    assert (pair.label, pair.path) == ("SYS", PathClass.SYS)
    assert pair.evidence == "line 4 of sample"
    assert node.pair("GPU0", "GPU1").nvlinks == 4


def test_affinities_as_printed():
    gpus = parse(FOUR_GPUS_TWO_NICS).gpus
    assert [(g.cpu_affinity, g.numa_affinity, g.gpu_numa_id, g.numa_node) for g in gpus[1:3]] == [
        ("0-31", "0", "N/A", 0),
        ("32-63", "1", "N/A", 1),
    ]


def test_soc_is_sys_but_stays_as_printed():
    node = parse(OLD_SOC)
    assert labels(node)["GPU0", "GPU2"] == "SOC"
    assert node.pair("GPU0", "GPU2").path is PathClass.SYS
    assert nearest(node)["GPU0"] == ("SYS", ("mlx4_0",), False)


def test_nvswitch_island_and_rails():
    node = parse(NVSWITCH8)
    (island,) = node.islands
    assert (len(island.gpus), island.all_to_all, island.nvlinks_per_pair) == (8, True, ("NV18",))
    assert [(rail.nics, rail.gpus) for rail in node.rails][5] == (("mlx5_5",), ("GPU5",))


def test_lower_of_two_asymmetric_counts_is_taken_and_told():
    text = FOUR_GPUS_TWO_NICS.replace("GPU2\tNV4\tNV4\t X \tNV4", "GPU2\tNV3\tNV3\t X \tNV3")
    node = parse(text)
    assert labels(node)["GPU0", "GPU2"] == labels(node)["GPU2", "GPU3"] == "NV3"
    assert any("GPU0 to GPU2 is NV4, GPU2 to GPU0 is NV3" in warning for warning in node.warnings)


def test_worse_of_two_asymmetric_classes_is_taken():
    text = TWO_SWITCH_PAIRS.replace("GPU1\tPXB", "GPU1\tNODE")
    assert labels(parse(text))["GPU0", "GPU1"] == "NODE"


def test_mp_says_nothing_about_nvlink():
    text = TWO_SWITCH_PAIRS.replace("  NV#  = Connection traversing a bonded set of # NVLinks\n", "")
    node = parse(text)
    assert node.source == "nvidia-smi topo -mp"
    assert any("hides NVLink" in warning for warning in node.warnings)


def test_no_legend_is_plain_m():
    assert parse(OLD_SOC).source == "nvidia-smi topo -m"


@each_row(
    ("tail", "expected"),
    [
        ("0-31\t0\t\tN/A", ("0-31", "0", "N/A")),
        ("0-31    0               N/A", ("0-31", "0", "N/A")),
        ("\t0\t\tN/A", (None, "0", "N/A")),
        ("        0               N/A", (None, "0", "N/A")),
        ("0-3 N/A", (None, "0-3", "N/A")),
        ("0-47 N/A", ("0-47", None, "N/A")),
        ("\t\t\tN/A", (None, None, "N/A")),
        ("0,2,4,6,8,10\t0\t\tN/A", ("0,2,4,6,8,10", "0", "N/A")),
        ("0-71\t0,2-17\t\t1", ("0-71", "0,2-17", "1")),
        ("24-31,56-63\tN/A\t\tN/A", ("24-31,56-63", "N/A", "N/A")),
        ("0-15\t\t\tN/A", ("0-15", None, "N/A")),
        ("0-7", ("0-7", None, None)),
        ("0-15 N/A", ("0-15", None, "N/A")),
        ("", (None, None, None)),
    ],
)
def test_affinity_cells_may_be_empty(tail, expected):
    text = f"\tGPU0\tGPU1\t{TITLES}\nGPU0\t X \tSYS\t{tail}\nGPU1\tSYS\t X \t{tail}\n"
    if not tail.count("\t") and " " in tail:  # tabs became blanks
        text = text.expandtabs(8)
    gpu = parse(text).gpus[1]
    assert (gpu.cpu_affinity, gpu.numa_affinity, gpu.gpu_numa_id) == expected


def test_no_affinity_columns():
    gpu = parse("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X\n").gpus[0]
    assert (gpu.cpu_affinity, gpu.numa_affinity, gpu.gpu_numa_id) == (None, None, None)


def test_order_of_columns_is_kept():
    text = matrix(
        [
            "X SYS PIX PIX NODE",
            "SYS X NODE NODE PIX",
            "PIX NODE X PIX NODE",
            "PIX NODE PIX X NODE",
            "NODE PIX NODE NODE X",
        ],
        "GPU0 GPU1 mlx5_0 mlx5_2 mlx5_1",
    )
    node = parse(text)
    assert nearest(node)["GPU0"] == ("PIX", ("mlx5_0", "mlx5_2"), True)
    assert [nic.name for nic in node.nics] == ["mlx5_0", "mlx5_2", "mlx5_1"]


def test_legend_may_start_elsewhere():
    text = FOUR_GPUS_TWO_NICS.replace("NIC0: mlx5_0", "NIC0: mlx5_1").replace("NIC1: rocep145s0", "NIC1: mlx5_bond_0")
    assert [nic.name for nic in parse(text).nics] == ["mlx5_1", "mlx5_bond_0"]


def test_without_nic_rows_the_gpu_rows_suffice():
    text = "\n".join(line for line in FOUR_GPUS_TWO_NICS.split("\n") if not line.startswith("NIC0\t"))
    node = parse(text)
    assert len(node.pairs) == 15
    assert any("row NIC0 is missing" in warning for warning in node.warnings)


def test_pairs_nobody_printed_are_left_out():
    text = "\n".join(line for line in FOUR_GPUS_TWO_NICS.split("\n") if not line.startswith("NIC"))
    assert parse(text).pair("NIC0", "NIC1") is None


def test_overwritten_cell():
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPH0-115\t0-1\nGPU1\tPHB\t X \t0-115\t0-1\n"
    node = parse(text)
    assert labels(node) == {("GPU0", "GPU1"): "PHB"}
    assert node.gpus[0].cpu_affinity == "0-115"


def test_first_of_several_matrices_with_a_warning():
    node = parse(TWO_SWITCH_PAIRS + "\n\n" + OLD_SOC)
    assert [nic.name for nic in node.nics] == ["mlx5_0"]
    assert any("further matrix" in warning for warning in node.warnings)


def test_one_gpu():
    node = parse("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-71\t0\t\t1\n" + LEGEND)
    assert (node.pairs, node.islands, node.nearest_nic) == ((), (), ())
    assert node.gpus[0].gpu_numa_id == "1"


VIRTUAL = matrix(
    ["X PHB PHB PHB PHB", "PHB X PHB PHB PHB", "PHB PHB X PHB PHB", "PHB PHB PHB X PHB", "PHB PHB PHB PHB X"],
    "GPU0 GPU1 GPU2 mlx5_0 mlx5_1",
)


def test_where_every_pair_looks_the_same_the_nearest_nic_is_undecidable():
    node = parse(VIRTUAL)
    assert node.virtual
    assert all(not near.decidable and near.why for near in node.nearest_nic)
    assert node.rails == ()


def test_all_node_is_one_real_socket():
    node = parse(VIRTUAL.replace("PHB", "NODE"))
    assert node.virtual is None
    assert all(near.decidable for near in node.nearest_nic)


def test_sys_between_gpus_of_one_numa_node_is_not_believed():
    text = matrix(["X SYS", "SYS X"], "GPU0 GPU1", ["0-31\t0", "0-31\t0"], "CPU Affinity\tNUMA Affinity")
    assert "GPU0 and GPU1 share a NUMA node" in (parse(text).virtual or "")


def test_sys_to_every_nic_is_what_a_grace_machine_shows():
    """The GPUs' memories are NUMA nodes: nothing is hidden, and yet the matrix does not tell the NICs apart."""
    rows = ["X NV18 SYS SYS", "NV18 X SYS SYS", "SYS SYS X SYS", "SYS SYS SYS X"]
    affinity = ["0-71\t0,2-9\t2", "72-143\t1,10-17\t10"]
    node = parse(matrix(rows, "GPU0 GPU1 NIC0 NIC1", affinity, "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"))
    assert [gpu.gpu_numa_id for gpu in node.gpus] == ["2", "10"]
    assert node.virtual is None
    assert all(not near.decidable and "nothing tells" in near.why for near in node.nearest_nic)


@each_row(
    ("text", "line", "words"),
    [
        ("", 1, "no header line"),
        ("hello\nworld\n", 1, "topo -m"),
        ("<system version='1'/>", 1, "XML"),
        (" \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n", 2, "topo -p2p"),
        ("\tGPU0\tGPU1\nGPU0\tX\tMX\nGPU1\tMX\tX\n", 2, "MetaX mx-smi"),
        ("\tGPU0\tGPU1\nGPU0\tX\tICN6\nGPU1\tICN6\tX\n", 2, "Alibaba"),
        ("       GPU0    GPU1\nGPU0   0       XGMI\nGPU1   XGMI    0\n", 2, "rocm-smi"),
        ("card\n\t   NPU0    NPU1\nNPU0    X       HCCS\nNPU1    HCCS    X\n", 2, "npu-smi"),
        ("| GPU 0/0 | GPU 0/1 |\n| S | MDF |\n", 1, "xpu-smi"),
        ("\tGPU0\tGPU1\nGPU0\t X \tFOO\nGPU1\tFOO\t X\n", 2, '"FOO" is no label'),
        ("\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n", 2, "no header line with GPU0"),
        ("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tSYS\nGPU1\tSYS\t X \nGPU2\tSYS\tSYS\n", 2, "has 2 cells, expected 3"),
        ("\tGPU0\tGPU1\nGPU0\tSYS\t X \nGPU1\tSYS\t X \n", 2, "has its X under GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \nGPU7\tSYS\tSYS\n", 4, "row GPU7 has no column"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV180-55\nGPU1\tNV18\t X \t0-55\n", 2, '"NV180-55" is no label'),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV1\tSYS\nGPU1\tNV1\t X \tPIX\n", 2, 'goes on with "SYS" after its 2 cells'),
        ("\tGPU0\tGPU1\tGPU2\nGPU0\t X \t\tSYS\nGPU1\tSYS\t X \tSYS\nGPU2\tSYS\tSYS\t X \n", 2, "empty cells"),
        ("  GPU0 GPU1\n  GPU2\nGPU0  X  SYS\n SYS\nGPU1 SYS  X\n SYS\n", 3, "row GPU0 has no column"),
        ("  GPU0 GPU1 GPU2\nGPU0  X  SYS\n SYS\nGPU1 SYS  X\n SYS\n", 2, "Rows that a terminal wrapped"),
        ("a:\tGPU0\tGPU1\nb:\tGPU0\tGPU1\na:GPU0\t X \tSYS\nb:GPU0\t X \tSYS\n", 4, "lines of one host alone"),
    ],
)
def test_what_cannot_be_read_names_its_line_and_what_was_expected(text, line, words):
    with pytest.raises(TopologyFileError) as caught:
        parse(text, "file.txt")
    assert caught.value.line == line
    assert caught.value.source == "file.txt"
    assert str(caught.value).startswith(f"line {line}: ")
    assert words in str(caught.value)
