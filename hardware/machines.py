"""Machine types that a plan can name, and machine types that a scan can recognise: `machines.toml`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from contracts.tables import read_table

_VGPU = re.compile(r"-\d+[ABCQ](?:ME|GFX)?\b")  # end of a vGPU's name ("H100-80C"): NVIDIA vGPU software user guide
Nearness = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]  # `nvidia-smi topo` label of a path to a NIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One cloud instance type or server board. None means unknown, or different between servers of this type."""

    name: str
    source: str
    gpus: int  # per host
    gpu: str | None = None  # GPU name as the driver reports it
    aliases: tuple[str, ...] = ()
    links_per_pair: tuple[int, ...] = ()  # NVLinks or xGMI links of each connected pair of GPUs; empty: no NVLink
    all_to_all: bool = True  # whether every pair of GPUs in the host is connected
    nvlinks: tuple[tuple[int, ...], ...] = ()  # links of each pair, by GPU index, if pairs differ
    nvlink_nodes: int = 1  # hosts in one NVLink domain
    nics: int | None = None  # NICs for GPU traffic
    rdma_devices: int | None = None  # RDMA devices that a scan lists, if more than `nics`
    nic_gbps: float | None = None  # rate of one NIC
    nic_kind: str | None = None  # "efa", "hca", "ethernet"
    network_plugin: str | None = None  # that carries GPU traffic over Ethernet NICs; without it NCCL uses TCP sockets
    nics_soldered: bool = False  # on the board: the vendor chose how many PCIe lanes they have
    cpus: int | None = None  # as the vendor counts them: vCPUs of an instance, cores of a board
    host_gib: float | None = None
    gpu_pattern: str | None = None  # matched against the GPU name from a word start; None: a scan cannot recognise it
    product: str | None = None  # matched against DMI's product name; the row then requires a match
    other_sizes: tuple[int, ...] = ()  # GPU counts of other sizes with the same DMI product name
    sku: str | None = None  # name of a recognised machine, if it differs from `name`
    gpu_nic: Nearness | None = None  # between a GPU and its nearest NIC
    gpu_nic_farthest: Nearness | None = None  # most distant label of a healthy host, if vendors' boards differ
    basis: Literal["seen", "stated"] = "seen"  # "seen" in real output, or "stated" by vendors' documents
    seen: str | None = None  # source of the healthy topology, if not `source`
    topology_file: str | None = None  # series in the names of Azure's files in /opt/microsoft

    @property
    def called(self) -> str:
        """Display name of a recognised machine."""
        return self.sku or self.name

    @property
    def devices(self) -> int | None:
        """Number of RDMA devices that a scan lists."""
        return self.rdma_devices or self.nics


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Machine):
    """A machine with enough known properties to plan for it.

    Its GPUs are connected all-to-all, by the links listed in `nvlinks`, or only by PCIe.
    """

    gpu: str
    nics: int
    nic_gbps: float
    nic_kind: str


_NEEDED = {"gpu", "nics", "nic_gbps", "nic_kind"}
_LISTS = {"aliases", "links_per_pair", "other_sizes"}


@cache
def machines() -> tuple[Machine, ...]:
    """Return every row."""
    rows: list[Machine] = []
    for written in read_table(__file__, "machines.toml")["machine"]:
        row: dict[str, Any] = {name: tuple(value) if name in _LISTS else value for name, value in written.items()}
        row["nvlinks"] = tuple(tuple(counts) for counts in row.get("nvlinks", ()))
        joined = row.get("all_to_all", True) or bool(row["nvlinks"])
        rows.append(Known(**row) if row.keys() >= _NEEDED and joined else Machine(**row))
    return tuple(rows)


@cache
def catalogue() -> tuple[Known, ...]:
    """Return the machines that a plan can name."""
    return tuple(row for row in machines() if isinstance(row, Known))


def machine_of_host(model: str | None, gpus: int, product: str | None, links: int = 0) -> Machine | None:
    """Return the first row that matches a host's GPU model, GPU count and DMI product name; None if none matches.

    `links`: most NVLinks between two GPUs. A machine whose pairs have fewer is another one: four GPUs with NV12 are
    half of a board with a switch, and no HGX A100 4-GPU. vGPUs are parts of boards, also of PCIe cards without NVLink.
    """
    if _VGPU.search(model or ""):
        return None
    enough = (row for row in machines() if links <= max(row.links_per_pair, default=links))
    row = next((row for row in enough if model and _matches(row, model, gpus, product)), None)
    return row if row and gpus not in row.other_sizes else None


def _matches(row: Machine, model: str, gpus: int, product: str | None) -> bool:
    if row.gpu_pattern is None or re.search(rf"\b(?:{row.gpu_pattern})", model) is None:
        return False
    if row.product is not None:
        return product is not None and re.search(row.product, product) is not None
    # A missing GPU must not turn a broken HGX into an unknown machine; one extra is a different machine.
    return row.gpus == gpus or (row.gpus == 8 and 4 < gpus < 8)
