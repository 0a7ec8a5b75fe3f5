"""Matrices made here, each in a shape nvidia-smi, a terminal or a document gives them."""

from __future__ import annotations

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(rows: list[str], columns: str, affinity: list[str] | None = None, titles: str = "") -> str:
    """Tab-separated as nvidia-smi prints: `rows` hold the labels of each row, "X" on the diagonal."""
    names = columns.split()
    lines = ["\t" + "\t".join(names) + ("\t" + titles if titles else "")]
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        cells = [" X " if cell == "X" else cell for cell in row.split()]
        tail = "\t" + affinity[index] if affinity and index < len(affinity) else ""
        lines.append("\t".join((name, *cells)) + tail)
    return "\n".join(lines) + "\n"


TITLES = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"

FOUR_GPUS_TWO_NICS = (
    matrix(
        [
            "X NV4 NV4 NV4 PIX SYS",
            "NV4 X NV4 NV4 NODE SYS",
            "NV4 NV4 X NV4 SYS NODE",
            "NV4 NV4 NV4 X SYS PIX",
            "PIX NODE SYS SYS X SYS",
            "SYS SYS NODE PIX SYS X",
        ],
        "GPU0 GPU1 GPU2 GPU3 NIC0 NIC1",
        ["0-31\t0\t\tN/A", "0-31\t0\t\tN/A", "32-63\t1\t\tN/A", "32-63\t1\t\tN/A"],
        TITLES,
    )
    + LEGEND
    + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: rocep145s0\n"
)

TWO_SWITCH_PAIRS = (
    matrix(
        ["X PXB SYS SYS PHB", "PXB X SYS SYS PHB", "SYS SYS X PXB SYS", "SYS SYS PXB X SYS", "PHB PHB SYS SYS X"],
        "GPU0 GPU1 GPU2 GPU3 mlx5_0",
        ["0-15\t0", "0-15\t0", "16-31\t1", "16-31\t1"],
        "CPU Affinity\tNUMA Affinity",
    )
    + LEGEND
)

OLD_SOC = matrix(
    ["X PIX SOC SOC SOC", "PIX X SOC SOC SOC", "SOC SOC X PIX PHB", "SOC SOC PIX X PHB", "SOC SOC PHB PHB X"],
    "GPU0 GPU1 GPU2 GPU3 mlx4_0",
    ["0-5", "0-5", "6-11", "6-11"],
    "CPU Affinity",
)


def _of_eight(row: int, links: str, itself: str) -> str:
    """Labels of a row of eight: itself, its socket's and the others; all alike where `links` says so."""
    return " ".join(itself if row == j else links or ("NODE" if row // 4 == j // 4 else "SYS") for j in range(8))


NVSWITCH8 = (
    matrix(
        [f"{_of_eight(i, 'NV18', 'X')} {_of_eight(i, '', 'PIX')}" for i in range(8)]
        + [f"{_of_eight(i, '', 'PIX')} {_of_eight(i, '', 'X')}" for i in range(8)],
        " ".join([*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(8))]),
        [f"{'0-55,112-167' if i < 4 else '56-111,168-223'}\t{i // 4}\t\tN/A" for i in range(8)],
        TITLES,
    )
    + LEGEND
    + "\nNIC Legend:\n\n"
    + "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(8))
)

ALL = {
    "four GPUs, two NICs by legend": FOUR_GPUS_TWO_NICS,
    "switch pairs, one mlx5 column": TWO_SWITCH_PAIRS,
    "old SOC words": OLD_SOC,
    "eight GPUs behind NVSwitch": NVSWITCH8,
}
