"""The graph of one node and of a cluster, in NCCL's words, and the words of ``nvidia-smi topo -m``: their order, and
what they mean to NCCL.

Specification: NCCL src/graph/topo.h (path types and their order, 2.27.5 and later); the legend that nvidia-smi prints
under the matrix for labels. "SOC" is the word of drivers before 384 for "SYS".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from contracts.tables import read_table
from hardware.gpus import nvlink
from hardware.units import GIGA

SCHEMA_VERSION = 1


class PathClass(IntEnum):
    """NCCL's path types, best first; the numbers are those of NCCL 2.27.5 and later."""

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    PXN = 7
    PHB = 8  # nvidia-smi's NODE is PHB to NCCL: both stay on one NUMA node's CPU
    SYS = 9
    NET = 10
    DIS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLinkTarget:
    """What a GPU's NVLinks end at, as NCCL's XML says it."""

    bus_id: str | None  # of a GPU or an NVSwitch; None where a hypervisor hides it
    count: int
    kind: str = "unknown"  # "gpu", "nvswitch", "cpu", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The facts of a host's processors that NCCL plans by."""

    arch: str | None = None  # "x86_64", "arm64", "ppc64"
    vendor: str | None = None  # "GenuineIntel", "AuthenticAMD"
    family: int | None = None
    model: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNode:
    """A GPU as the graph needs it."""

    name: str  # "GPU0", as nvidia-smi numbers it
    index: int
    bus_id: str | None = None
    uuid: str | None = None
    model: str | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    numa_node: int | None = None
    cpu_affinity: str | None = None
    numa_affinity: str | None = None  # text as printed: "0-1", "N/A"
    gpu_numa_id: str | None = None
    nvlink_domain: str | None = None  # fabric clique, where several hosts share NVLink
    c2c: bool | None = None
    usable: bool = True  # False: lost GPU
    nvlinks: tuple[NvLinkTarget, ...] = ()  # active links by where they end; empty from a text matrix
    pcie_bytes_per_second: float | None = None  # NCCL's planning value of its slot, one direction
    pcie_running_bytes_per_second: float | None = None  # of the link as it runs, where that is less than its slot
    pcie_link: str | None = None  # the link as it runs: "Gen4 x16", "Gen4 x4 of x16"
    pcie_lanes: int | None = None  # from NCCL's XML only, of its link
    bridge_lanes: tuple[str, int] | None = None  # from NCCL's XML only: bus id of the bridge above, and its lanes
    gdr_refused: str = ""  # what says that NCCL found no GPUDirect RDMA on it; empty where nothing does


@dataclass(frozen=True, slots=True, kw_only=True)
class NicNode:
    """A network device that a GPU may send through."""

    name: str  # "mlx5_0", "rdmap16s27", or "NIC0" where no legend names it
    label: str | None = None  # "NIC0": column of the matrix it came from
    kind: str = "hca"  # "hca", "efa", "rxe", "ethernet", "unknown"
    bus_id: str | None = None
    netdev: str | None = None
    numa_node: int | None = None
    rate_bytes_per_second: float | None = None  # sum over its ACTIVE ports
    link_layer: str | None = None  # "InfiniBand", "Ethernet"
    active: bool | None = None
    ports: int | None = None
    nets: tuple[str, ...] = ()  # every device of the same PCIe function, where it is more than `name`
    pcie_bytes_per_second: float | None = None  # NCCL's planning value of its slot, one direction
    pcie_running_bytes_per_second: float | None = None  # of the link as it runs, where that is less than its slot
    pcie_link: str | None = None  # the link as it runs: "Gen5 x16", "Gen3 of Gen5 x16"
    gdr_refused: str = ""  # as of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """How two of GPUs and NICs reach each other; stored once, `a` before `b` in matrix order."""

    a: str
    b: str
    label: str  # as nvidia-smi prints it: "NV18", "PIX", "NODE", "SYS"
    path: PathClass | None  # None where the label is unknown
    nvlinks: int = 0
    bytes_per_second: float | None = None  # NCCL's planning value, one direction
    evidence: str = ""  # "nvml", "sysfs", "line 5 of topo.txt"
    running_bytes_per_second: float | None = None  # as the PCIe links run now, where that is less than the plan
    peer_access: bool | None = None  # between GPUs: whether the driver lets one read the other's memory over PCIe
    nvlinks_unread: int = 0  # by so many the count of NVLinks may be too low: the driver did not tell of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """GPUs joined by NVLink, directly or through others."""

    gpus: tuple[str, ...]
    all_to_all: bool
    nvlinks_per_pair: tuple[str, ...]  # distinct labels: ("NV18",) or ("NV1", "NV2")


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNic:
    """The NICs one GPU is nearest to."""

    gpu: str
    label: str  # nvidia-smi's word: "PIX"; "SYS" means none is local
    path: PathClass | None
    nics: tuple[str, ...]  # all that tie
    local: bool  # nearer than SYS
    decidable: bool  # False on a VM where every pair looks the same
    why: str = ""

    @property
    def gdr_by_default(self) -> bool:
        """Whether NCCL uses GPUDirect RDMA over this path by itself (src/graph/paths.cc, ncclTopoCheckGdr).

        Up to PXB, or over the link of GPU and CPU.
        """
        return self.path is not None and (self.path <= PathClass.PXB or self.path == PathClass.P2C)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """NICs of the same position on every node: rail 0 is each GPU0's nearest NIC."""

    rail: int
    nics: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A bandwidth that was derived, and from what."""

    scope: str  # "island", "node", "rail", "cluster"
    op: str  # "all_gather"
    busbw_bytes_per_second: float | None  # NCCL's plan; None: not derivable, `derivation` says why
    derivation: tuple[str, ...]  # steps with their sources
    members: tuple[str, ...] = ()
    # What healthy machines reach with 1 GiB of every rank (topology/expected.py); usual is None where only a range is
    # known.
    least_bytes_per_second: float | None = None
    usual_bytes_per_second: float | None = None
    most_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology:
    """One node: devices, every pair, and what follows from them."""

    hostname: str
    gpus: tuple[GpuNode, ...]
    nics: tuple[NicNode, ...]
    pairs: tuple[Pair, ...]
    islands: tuple[Island, ...] = ()
    nearest_nic: tuple[NearestNic, ...] = ()  # empty where there are no NICs
    rails: tuple[Rail, ...] = ()
    expectations: tuple[Expectation, ...] = ()  # empty until `topology.paths.with_expectations`
    cpu_count: int | None = None
    numa_nodes: int | None = None
    sku: str | None = None  # row of the reference table this node was recognised as
    virtual: str | None = None  # why the PCIe tree cannot be trusted
    source: str = "probes"  # "probes", "nvidia-smi topo -m", "NCCL XML"
    warnings: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()  # of the warnings, what a cut text does not hold: what is there may not be all
    nvlink_known: bool = True  # False: the source says nothing about NVLink, so none seen is not none there
    topology_files: tuple[str, ...] = ()  # NCCL topology XML that the provider put on the host
    product: str | None = None  # DMI product name: "p4d.24xlarge"
    schema_version: int = SCHEMA_VERSION

    @property
    def devices(self) -> tuple[GpuNode | NicNode, ...]:
        """GPUs, then NICs: the order of the matrix."""
        return (*self.gpus, *self.nics)

    def gpu_pairs(self, *, usable: bool = False) -> list[Pair]:
        """Of two GPUs; with `usable`, of two that answer."""
        names = {gpu.name for gpu in self.gpus if gpu.usable or not usable}
        return [pair for pair in self.pairs if pair.a in names and pair.b in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTopology:
    """Several nodes, and what joins them."""

    nodes: tuple[NodeTopology, ...]
    inter_node_bytes_per_second: float | None = None  # one node to the others, one direction, all rails together
    inter_node_transport: str | None = None  # "rdma", "efa", "tcp", "nvlink"; None unknown or single node
    expectations: tuple[Expectation, ...] = ()
    warnings: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def world_size(self) -> int:
        """GPUs of all nodes together."""
        return sum(len(node.gpus) for node in self.nodes)


SELF = "X"
UNKNOWN = "N/A"
NVLINK = re.compile(r"NV(\d{1,3})")
_LABELS = read_table(__file__, "labels.toml")
CLASSES = tuple((name.lower().rstrip("#"), row["called"]) for name, row in _LABELS.items() if "called" in row)
"""Path classes as `nvidia-smi topo -m` names them, nearest first, for people who do not know them by heart."""

COLOURS = {name.rstrip("#"): row["colour"] for name, row in _LABELS.items() if "colour" in row}
"""Of a label in a drawing, best to worst; NV stands for every NV#."""

_PATHS = {name: PathClass[row["path"]] for name, row in _LABELS.items() if "path" in row}
_RANKS = {name: row["rank"] for name, row in _LABELS.items() if "rank" in row}
FARTHEST = 99
"""Rank of an unknown label: never the nearest."""


def nvlinks(label: str) -> int:
    """The count of an NV# label, 0 for any other."""
    match = NVLINK.fullmatch(label)
    return int(match[1]) if match else 0


def path_class(label: str) -> PathClass | None:
    """NCCL's class of a label, None where it is unknown."""
    return PathClass.NVL if nvlinks(label) else _PATHS.get(label)


def rank(label: str) -> int:
    """Position of a label, nearest first; NVLink before PCIe, unknown last."""
    return 0 if label.startswith("NV") else _RANKS.get(label, FARTHEST)


def level(label: str) -> str:
    """The current word for a label: SOC is SYS."""
    return "SYS" if label == "SOC" else label


class Pairs:
    """Pairs by their two names, in either order."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._by_names = {frozenset((pair.a, pair.b)): pair for pair in pairs}

    def get(self, a: str, b: str) -> Pair | None:
        """The pair, None where nothing is known of it."""
        return self._by_names.get(frozenset((a, b)))

    def nvlinks(self, a: str, b: str) -> int:
        """The NVLinks between the two."""
        pair = self.get(a, b)
        return pair.nvlinks if pair else 0

    def label(self, a: str, b: str) -> str:
        """The label of the pair, "N/A" where nothing is known of it."""
        pair = self.get(a, b)
        return pair.label if pair else UNKNOWN


# NCCL's planning constants: what its topology search believes a link carries, one direction, payload. They lie below
# line rate on purpose: NVLink 4 is 25 GB/s on the wire and 20.6 in the plan. Specification: NCCL 2.30 src/graph/topo.h
# and topo.cc (ncclTopoNVLinkBw, the PCIe speed table, CPU to CPU bandwidths).

# kvDictPciGen in topo.cc: 100 Mb/s per lane, by GT/s.
_PCIE_LANE = ((64.0, 480), (32.0, 240), (16.0, 120), (8.0, 60), (5.0, 30), (2.5, 15))
_PCIE_DIVISOR = 80.0  # lanes x table / 80 is GB/s
INTEL_P2P_OVERHEAD = 6 / 5  # INTEL_P2P_OVERHEAD: GPU to GPU through an Intel CPU

# Between CPUs, GB/s: by vendor (the middle two are Zhaoxin's), by architecture, and Intel's family 6 by model.
_CPU = {"AuthenticAMD": 16.0, "CentaurHauls": 6.0, "  Shanghai  ": 6.0, "ARM": 6.0}
_CPU_OF_ARCH = {"aarch64": 6.0, "arm64": 6.0, "ppc64": 32.0, "ppc64le": 32.0}
_INTEL_BY_MODEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))  # Emerald Rapids, Sapphire Rapids, Skylake
_INTEL_BEFORE_SKYLAKE = 6.0


def nvlink_bytes_per_second(compute_capability: tuple[int, int] | None) -> float | None:
    """One NVLink, one direction, None where the capability is unknown or has no NVLink constant."""
    if compute_capability is None:
        return None
    link = nvlink(compute_capability)
    return link.nccl_bytes_per_second if link else None


def pcie_bytes_per_second(transfers_per_second: float | None, width: int | None) -> float | None:
    """A PCIe link by its speed and lanes, None where either is unknown."""
    if not transfers_per_second or not width:
        return None
    gigatransfers = transfers_per_second / GIGA
    # 2 % below the nominal speed still is that generation: sysfs prints "8.0" and "7.99".
    lane = next((value for speed, value in _PCIE_LANE if gigatransfers >= speed * 0.98), _PCIE_LANE[-1][1])
    return width * lane / _PCIE_DIVISOR * GIGA


def pcie_generation(transfers_per_second: float | None) -> int | None:
    """Generation of a PCIe link by its speed: 16 GT/s is 4; None where it is unknown or none of them."""
    if not transfers_per_second:
        return None
    speeds = [speed for speed, _ in reversed(_PCIE_LANE)]  # from 2.5 on
    reached = [number for number, speed in enumerate(speeds, 1) if transfers_per_second / GIGA >= speed * 0.98]
    return reached[-1] if reached else None


def cpu_bytes_per_second(
    vendor: str | None, family: int | None, model: int | None, arch: str | None = None
) -> float | None:
    """Between two CPUs (or NUMA nodes) of one host, None where the CPU is unknown."""
    known = _CPU.get(vendor or "") or _CPU_OF_ARCH.get(arch or "")
    if vendor == "GenuineIntel":
        reached = (value for least, value in _INTEL_BY_MODEL if family == 6 and (model or 0) >= least)
        known = next(reached, _INTEL_BEFORE_SKYLAKE)
    return known * GIGA if known else None
