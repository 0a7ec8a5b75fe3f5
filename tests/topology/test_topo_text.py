"""`nvidia-smi topo -m` text: what a matrix says, and how one that cannot be read is refused."""

from __future__ import annotations

import pytest
from rigs.tables import each_row
from topo_samples import FOUR_GPUS_TWO_NICS, LEGEND, NVSWITCH8, OLD_SOC, TITLES, TWO_SWITCH_PAIRS, matrix

from topology.formats import TopologyFileError
from topology.formats.text import parse
from topology.graph import Pairs, PathClass


def pair_labels(node):
    return {(pair.a, pair.b): pair.label for pair in node.pairs}


def nearest(node):
    return {near.gpu: (near.label, near.nics, near.local) for near in node.nearest_nic}


def affinities(node):
    return [(gpu.cpu_affinity, gpu.numa_affinity, gpu.gpu_numa_id) for gpu in node.gpus]


def without_rows(text, name):
    return "\n".join(line for line in text.split("\n") if not line.startswith(name))


ORDER = matrix(
    ["X SYS PIX PIX NODE", "SYS X NODE NODE PIX", "PIX NODE X PIX NODE", "PIX NODE PIX X NODE", "NODE PIX NODE NODE X"],
    "GPU0 GPU1 mlx5_0 mlx5_2 mlx5_1",
)
VIRTUAL = matrix(
    ["X PHB PHB PHB PHB", "PHB X PHB PHB PHB", "PHB PHB X PHB PHB", "PHB PHB PHB X PHB", "PHB PHB PHB PHB X"],
    "GPU0 GPU1 GPU2 mlx5_0 mlx5_1",
)
FEWER_BACK = FOUR_GPUS_TWO_NICS.replace("GPU2\tNV4\tNV4\t X \tNV4", "GPU2\tNV3\tNV3\t X \tNV3")
MP = TWO_SWITCH_PAIRS.replace("  NV#  = Connection traversing a bonded set of # NVLinks\n", "")
OTHER_LEGEND = FOUR_GPUS_TWO_NICS.replace("NIC0: mlx5_0", "NIC0: mlx5_1").replace("rocep145s0", "mlx5_bond_0")
OVERWRITTEN = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPH0-115\t0-1\nGPU1\tPHB\t X \t0-115\t0-1\n"
ONE_GPU = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-71\t0\t\t1\n" + LEGEND
ONE_NUMA = matrix(["X SYS", "SYS X"], "GPU0 GPU1", ["0-31\t0", "0-31\t0"], "CPU Affinity\tNUMA Affinity")

SAYS = {  # what is shown -> text, what of the node, expected
    "a legend gives NICs their names and keeps the column": (
        FOUR_GPUS_TWO_NICS, lambda node: [(nic.name, nic.label) for nic in node.nics],
        [("mlx5_0", "NIC0"), ("rocep145s0", "NIC1")]),
    "a NIC behind the same switch": (FOUR_GPUS_TWO_NICS, lambda node: nearest(node)["GPU3"],
     ("PIX", ("rocep145s0",), True)),
    "a NIC of the same NUMA node": (FOUR_GPUS_TWO_NICS, lambda node: nearest(node)["GPU1"],
     ("NODE", ("mlx5_0",), True)),
    "every pair is there once": (FOUR_GPUS_TWO_NICS, lambda node: len(node.pairs), 15),
    "a pair with its class and line": (
        FOUR_GPUS_TWO_NICS,
        lambda node: (lambda p: (p.label, p.path, p.evidence))(Pairs(node.pairs).get("GPU2", "mlx5_0")),
        ("SYS", PathClass.SYS, "line 4 of sample")),
    "NVLinks of a pair": (FOUR_GPUS_TWO_NICS, lambda node: Pairs(node.pairs).get("GPU0", "GPU1").nvlinks, 4),
    "affinities as printed": (
        FOUR_GPUS_TWO_NICS, lambda node: affinities(node)[1:3], [("0-31", "0", "N/A"), ("32-63", "1", "N/A")]),
    "the number of a NUMA node": (FOUR_GPUS_TWO_NICS, lambda node: [g.numa_node for g in node.gpus], [0, 0, 1, 1]),
    "SOC stays as printed": (OLD_SOC, lambda node: pair_labels(node)["GPU0", "GPU2"], "SOC"),
    "SOC is SYS": (OLD_SOC, lambda node: Pairs(node.pairs).get("GPU0", "GPU2").path, PathClass.SYS),
    "the nearest NIC beyond SOC": (OLD_SOC, lambda node: nearest(node)["GPU0"], ("SYS", ("mlx4_0",), False)),
    "without a legend it is plain -m": (OLD_SOC, lambda node: node.source, "nvidia-smi topo -m"),
    "NVSwitch makes one island": (
        NVSWITCH8, lambda node: [(len(i.gpus), i.all_to_all, i.nvlinks_per_pair) for i in node.islands],
        [(8, True, ("NV18",))]),
    "a rail of each NIC": (NVSWITCH8, lambda node: (node.rails[5].nics, node.rails[5].gpus), (("mlx5_5",), ("GPU5",))),
    "the lower of two counts": (
        FEWER_BACK, lambda node: {pair_labels(node)["GPU0", "GPU2"], pair_labels(node)["GPU2", "GPU3"]}, {"NV3"}),
    "the worse of two classes": (
        TWO_SWITCH_PAIRS.replace("GPU1\tPXB", "GPU1\tNODE"), lambda node: pair_labels(node)["GPU0", "GPU1"], "NODE"),
    "a legend without NV# is -mp": (MP, lambda node: node.source, "nvidia-smi topo -mp"),
    "no affinity columns": (
        "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X\n", affinities, [(None, None, None)] * 2),
    "NICs that tie": (ORDER, lambda node: nearest(node)["GPU0"], ("PIX", ("mlx5_0", "mlx5_2"), True)),
    "the order of columns is kept": (
        ORDER, lambda node: [nic.name for nic in node.nics], ["mlx5_0", "mlx5_2", "mlx5_1"]),
    "a legend may start elsewhere": (
        OTHER_LEGEND, lambda node: [nic.name for nic in node.nics], ["mlx5_1", "mlx5_bond_0"]),
    "without NIC rows the GPU rows suffice": (
        without_rows(FOUR_GPUS_TWO_NICS, "NIC0\t"), lambda node: len(node.pairs), 15),
    "pairs that nobody printed are left out": (
        without_rows(FOUR_GPUS_TWO_NICS, "NIC"), lambda node: Pairs(node.pairs).get("NIC0", "NIC1"), None),
    "an overwritten cell": (OVERWRITTEN, lambda node: pair_labels(node), {("GPU0", "GPU1"): "PHB"}),
    "the words after it": (OVERWRITTEN, lambda node: node.gpus[0].cpu_affinity, "0-115"),
    "the first of several matrices": (
        TWO_SWITCH_PAIRS + "\n\n" + OLD_SOC, lambda node: [nic.name for nic in node.nics], ["mlx5_0"]),
    "one GPU": (ONE_GPU, lambda node: (node.pairs, node.islands, node.nearest_nic), ((), (), ())),
    "the NUMA node of its memory": (ONE_GPU, lambda node: node.gpus[0].gpu_numa_id, "1"),
    "where every pair looks the same no NIC is nearest": (
        VIRTUAL, lambda node: (bool(node.virtual), {n.decidable or not n.why for n in node.nearest_nic}, node.rails),
        (True, {False}, ())),
    "NODE everywhere is one real socket": (
        VIRTUAL.replace("PHB", "NODE"), lambda node: (node.virtual, {n.decidable for n in node.nearest_nic}),
        (None, {True})),
    "SYS within one NUMA node is not believed": (
        ONE_NUMA, lambda node: "GPU0 and GPU1 share a NUMA node" in (node.virtual or ""), True),
}  # fmt: skip
WARNS = {  # text -> words of a warning
    FEWER_BACK: "GPU0 to GPU2 is NV4, GPU2 to GPU0 is NV3",
    MP: "hides NVLink",
    without_rows(FOUR_GPUS_TWO_NICS, "NIC0\t"): "row NIC0 is missing",
    TWO_SWITCH_PAIRS + "\n\n" + OLD_SOC: "further matrix",
}


def test_what_a_matrix_says():
    wrong = {}
    for what, (text, of, expected) in SAYS.items():
        if (found := of(parse(text, "sample"))) != expected:
            wrong[what] = found
    assert not wrong
    for text, words in WARNS.items():
        assert any(words in warning for warning in parse(text).warnings), words


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
        ("\tPPU0\tPPU1\nPPU0\tX\tICN2\nPPU1\tICN2\tX\n", 1, "Alibaba ppu-smi"),
        ("\tGPU0\tGPU1CPUAffinity\nGPU0\tX\tPSB\t0-3\nGPU1\tPSB\tX\t0-3\n", 2, "DCGM"),
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
        ("  GPU0 GPU1 GP\nU2\nGPU0  X  SYS SY\nS\nGPU1 SYS  X  SY\nS\n", 1, "wrapped"),
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
