"""The graph of one node and of a cluster in NCCL's terms; the labels of ``nvidia-smi topo -m``, their order, and their
NCCL equivalents.

Specification: NCCL src/graph/topo.h (path types and their order, 2.27.5 and later); labels: the legend printed by
nvidia-smi. Drivers before 384 print "SOC" for "SYS".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from contracts.tables import read_table
from hardware.gpus import nvlink
from hardware.units import GIGA


class PathClass(IntEnum):
    """NCCL's path types, best first, with the numbers of NCCL 2.27.5 and later."""

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    PXN = 7
    PHB = 8  # NCCL has no NODE: as for PHB, the path stays on the CPU of one NUMA node
    SYS = 9
    NET = 10
    DIS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLinkTarget:
    """The other end of a GPU's NVLinks, as in NCCL's XML."""

    bus_id: str | None  # GPU or NVSwitch; None if a hypervisor hides it
    count: int
    kind: str = "unknown"  # "gpu", "nvswitch", "cpu", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Properties of the host's CPUs that NCCL uses."""

    arch: str | None = None  # "x86_64", "arm64", "ppc64"
    vendor: str | None = None  # "GenuineIntel", "AuthenticAMD"
    family: int | None = None
    model: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNode:
    """A GPU in the graph."""

    name: str  # "GPU0", numbered as in nvidia-smi
    index: int
    bus_id: str | None = None
    uuid: str | None = None
    model: str | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    numa_node: int | None = None
    cpu_affinity: str | None = None
    numa_affinity: str | None = None  # as printed: "0-1", "N/A"
    gpu_numa_id: str | None = None
    nvlink_domain: str | None = None  # fabric clique, if several hosts share NVLink
    c2c: bool | None = None
    usable: bool = True  # False: the GPU is lost
    nvlinks: tuple[NvLinkTarget, ...] = ()  # active links by target; empty for a text matrix
    pcie_bytes_per_second: float | None = None  # rate of its slot in NCCL's plan, per direction
    pcie_running_bytes_per_second: float | None = None  # current rate, if lower than the slot's
    pcie_link: str | None = None  # current link: "Gen4 x16", "Gen4 x4 of x16"
    pcie_lanes: int | None = None  # lanes of its link; only from NCCL's XML
    bridge_lanes: tuple[str, int] | None = None  # (bus id, lanes) of the bridge above; only from NCCL's XML
    gdr_refused: str = ""  # evidence that NCCL found no GPUDirect RDMA support; empty if none

    def count_nvlinks(self, kind: str, bus_id: str | None = None) -> int:
        """Count the active NVLinks to devices of this kind, or to one of them."""
        return sum(link.count for link in self.nvlinks if link.kind == kind and bus_id in (None, link.bus_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class NicNode:
    """A network device that GPUs may use."""

    name: str  # "mlx5_0", "rdmap16s27"; "NIC0" if no legend has its name
    label: str | None = None  # "NIC0": its column in the matrix
    kind: str = "hca"  # "hca", "efa", "rxe", "ethernet", "unknown"
    bus_id: str | None = None
    netdev: str | None = None
    numa_node: int | None = None
    rate_bytes_per_second: float | None = None  # total of its ACTIVE ports
    link_layer: str | None = None  # "InfiniBand", "Ethernet"
    active: bool | None = None
    ports: int | None = None
    nets: tuple[str, ...] = ()  # all devices of this PCIe function, if there are several
    pcie_bytes_per_second: float | None = None  # rate of its slot in NCCL's plan, per direction
    pcie_running_bytes_per_second: float | None = None  # current rate, if lower than the slot's
    pcie_link: str | None = None  # current link: "Gen5 x16", "Gen3 of Gen5 x16"
    gdr_refused: str = ""  # as in GpuNode


Device = GpuNode | NicNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The path between two GPUs or NICs; stored once per pair, in matrix order."""

    a: str
    b: str
    label: str  # as printed by nvidia-smi: "NV18", "PIX", "NODE", "SYS"
    path: PathClass | None  # None if the label is unknown
    nvlinks: int = 0
    bytes_per_second: float | None = None  # rate in NCCL's plan, per direction
    evidence: str = ""  # "nvml", "sysfs", "line 5 of topo.txt"
    running_bytes_per_second: float | None = None  # with current PCIe links, if lower than the plan
    peer_access: bool | None = None  # for GPUs: whether the driver allows peer access over PCIe
    nvlinks_unread: int = 0  # NVLinks that could not be read; the count may be too low by this number


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """GPUs connected by NVLink, directly or through other GPUs."""

    gpus: tuple[str, ...]
    all_to_all: bool
    nvlinks_per_pair: tuple[str, ...]  # distinct labels: ("NV18",) or ("NV1", "NV2")


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNic:
    """The NICs nearest to one GPU."""

    gpu: str
    label: str  # label of nvidia-smi: "PIX"; "SYS" means that no NIC is local
    path: PathClass | None
    nics: tuple[str, ...]  # including ties
    local: bool  # whether it is nearer than SYS
    decidable: bool  # False in a VM in which all pairs look the same
    why: str = ""

    @property
    def gdr_by_default(self) -> bool:
        """Whether NCCL uses GPUDirect RDMA on this path by default (src/graph/paths.cc, ncclTopoCheckGdr).

        It does up to PXB, and over the C2C link between GPU and CPU.
        """
        return self.path is not None and (self.path <= PathClass.PXB or self.path == PathClass.P2C)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """NICs in the same position on every node: rail 0 is the nearest NIC of each GPU0."""

    rail: int
    nics: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """An expected bandwidth with its derivation."""

    scope: str  # "island", "node", "rail"
    op: str  # "all_gather"
    busbw_bytes_per_second: float | None  # by NCCL's plan; None: not derivable, see `derivation`
    derivation: tuple[str, ...]  # steps with their sources
    members: tuple[str, ...] = ()
    # Bandwidth of healthy machines with 1 GiB per rank (topology/expected.py); usual is None if only a range is known.
    least_bytes_per_second: float | None = None
    usual_bytes_per_second: float | None = None
    most_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology:
    """One node: devices, all pairs, and derived facts."""

    hostname: str
    gpus: tuple[GpuNode, ...]
    nics: tuple[NicNode, ...]
    pairs: tuple[Pair, ...]
    islands: tuple[Island, ...] = ()
    nearest_nic: tuple[NearestNic, ...] = ()  # empty without NICs
    rails: tuple[Rail, ...] = ()
    expectations: tuple[Expectation, ...] = ()  # set by `topology.paths.with_expectations`
    cpu_count: int | None = None
    numa_nodes: int | None = None
    sku: str | None = None  # machine row that this node matches
    virtual: str | None = None  # reason not to trust the PCIe tree
    source: str = "probes"  # "probes", "nvidia-smi topo -m", "NCCL XML"
    warnings: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()  # warnings about parts missing from truncated text, so the lists are incomplete
    nvlink_known: bool = True  # False: the source has no NVLink information
    product: str | None = None  # DMI product name: "p4d.24xlarge"
    schema_version: int = 1

    @property
    def devices(self) -> tuple[Device, ...]:
        """GPUs, then NICs, in matrix order."""
        return (*self.gpus, *self.nics)

    def gpu_pairs(self, *, usable: bool = False) -> list[Pair]:
        """Return the pairs of two GPUs; with `usable`, only GPUs that respond."""
        names = {gpu.name for gpu in self.gpus if gpu.usable or not usable}
        return [pair for pair in self.pairs if pair.a in names and pair.b in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTopology:
    """Several nodes, and the network between them."""

    nodes: tuple[NodeTopology, ...]
    inter_node_bytes_per_second: float | None = None  # from one node to the others, per direction, all rails
    inter_node_transport: str | None = None  # "rdma", "efa", "tcp", "nvlink" or a plugin; None: unknown or single node

    @property
    def world_size(self) -> int:
        """Number of GPUs in all nodes."""
        return sum(len(node.gpus) for node in self.nodes)


SELF = "X"
UNKNOWN = "N/A"
NVLINK = re.compile(r"NV(\d{1,3})")
_LABELS = read_table(__file__, "labels.toml")
CLASSES = tuple((name.lower().rstrip("#"), row["called"]) for name, row in _LABELS.items() if "called" in row)
"""(label of `nvidia-smi topo -m` in lower case, readable name) of each path class, nearest first."""

COLOURS = {name.rstrip("#"): row["colour"] for name, row in _LABELS.items() if "colour" in row}
"""Colour of each label in drawings, best to worst; NV represents every NV#."""

_PATHS = {name: PathClass[row["path"]] for name, row in _LABELS.items() if "path" in row}
_RANKS = {name: row["rank"] for name, row in _LABELS.items() if "rank" in row}
FARTHEST = 99
"""Rank of an unknown label, which is never the nearest."""


def nvlinks(label: str) -> int:
    """Return the link count of an NV# label, 0 for other labels."""
    match = NVLINK.fullmatch(label)
    return int(match[1]) if match else 0


def path_class(label: str, *, c2c: bool = False) -> PathClass | None:
    """Return NCCL's path type of a label, None if unknown; `c2c`: from a GPU over C2C to Grace, then PCIe to a NIC."""
    if c2c and label in ("PHB", "NODE"):
        return PathClass.P2C
    return PathClass.NVL if nvlinks(label) else _PATHS.get(label)


def rank(label: str) -> int:
    """Return the rank of a label: NVLink first, then PCIe from near to far, unknown last."""
    return 0 if label.startswith("NV") else _RANKS.get(label, FARTHEST)


def level(label: str) -> str:
    """Return the current name of a label: SOC becomes SYS."""
    return "SYS" if label == "SOC" else label


class Pairs:
    """Lookup of pairs by two names, in either order."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._by_names = {frozenset((pair.a, pair.b)): pair for pair in pairs}

    def get(self, a: str, b: str) -> Pair | None:
        """Return the pair, None if it is not known."""
        return self._by_names.get(frozenset((a, b)))

    def nvlinks(self, a: str, b: str) -> int:
        """Return the number of NVLinks between two devices."""
        pair = self.get(a, b)
        return pair.nvlinks if pair else 0

    def label(self, a: str, b: str) -> str:
        """Return the label of a pair, "N/A" if it is not known."""
        pair = self.get(a, b)
        return pair.label if pair else UNKNOWN


# Rates in NCCL's plan, from NCCL's planning constants (rates.toml).

_RATES = read_table(__file__, "rates.toml")
INTEL_P2P_OVERHEAD = 6 / 5  # INTEL_P2P_OVERHEAD: GPU to GPU through an Intel CPU


def nvlink_bytes_per_second(compute_capability: tuple[int, int] | None) -> float | None:
    """Return the rate of one NVLink per direction, None if the capability is unknown or has no NVLink constant."""
    link = nvlink(compute_capability) if compute_capability is not None else None
    return link.nccl_bytes_per_second if link else None


def pcie_bytes_per_second(transfers_per_second: float | None, width: int | None) -> float | None:
    """Return the planned rate of a PCIe link, None if its speed or width is unknown."""
    if not transfers_per_second or not width:
        return None
    lane = _RATES["pcie_lanes"][(pcie_generation(transfers_per_second) or 1) - 1][1]
    return float(width * lane / _RATES["pcie_divisor"] * GIGA)


def pcie_generation(transfers_per_second: float | None) -> int | None:
    """Return the generation of a PCIe link by its speed: 16 GT/s is 4; None if unknown."""
    gigatransfers = (transfers_per_second or 0.0) / GIGA
    # Accept speeds down to 2 % below nominal: sysfs prints "8.0" and "7.99".
    reached = [number for number, (speed, _) in enumerate(_RATES["pcie_lanes"], 1) if gigatransfers >= speed * 0.98]
    return reached[-1] if reached else None


def cpu_bytes_per_second(
    vendor: str | None, family: int | None, model: int | None, arch: str | None = None
) -> float | None:
    """Return the rate between two CPUs (or NUMA nodes) of one host, None if the CPU is unknown."""
    rate = _RATES["cpu_vendor"].get(vendor) or _RATES["cpu_architecture"].get(arch)
    if vendor == "GenuineIntel":
        reached = (value for model_from, value in _RATES["intel_models"] if family == 6 and (model or 0) >= model_from)
        rate = next(reached, _RATES["intel_before_skylake"])
    return rate * GIGA if rate else None
