"""Machines: those to plan for by name, and those that a scan is recognised as; `machines.toml`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from contracts.tables import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance type or board. What is None is not known, or varies."""

    name: str
    source: str
    gpus: int  # of one host
    gpu: str | None = None  # as the driver names it
    aliases: tuple[str, ...] = ()
    links_per_pair: tuple[int, ...] = ()  # NVLinks or xGMI links of two GPUs that have any; none: no pair has
    all_to_all: bool = True  # every pair of the host has them
    nvlinks: tuple[tuple[int, ...], ...] = ()  # of each pair, by the indices of its GPUs, where pairs differ
    nvlink_nodes: int = 1  # hosts of one NVLink domain
    nics: int | None = None  # for the traffic of the GPUs
    rdma_devices: int | None = None  # all that a scan shows, where these are more
    nic_gbps: float | None = None  # of one
    nic_kind: str | None = None  # "efa", "hca", "ethernet"
    nics_soldered: bool = False  # to its board: how many lanes they have is their maker's choice
    cpus: int | None = None  # as its maker counts them: vCPUs of an instance, cores of a board
    host_gib: float | None = None
    gpu_pattern: str | None = None  # on the GPU's name, from the beginning of a word; None: a scan is not recognised
    product: str | None = None  # on DMI's product name; such a row counts only with it
    other_sizes: tuple[int, ...] = ()  # GPUs of other sizes of which DMI's product name is the same
    sku: str | None = None  # what a recognised one is called, where that is not the name
    gpu_nic: str | None = None  # label of a GPU to its nearest NIC
    gpu_nic_farthest: str | None = None  # the farthest of a healthy host, where makers of the board differ
    basis: str = "seen"  # "seen" in real output, or "stated" by vendors' documents
    seen: str | None = None  # the source of how a healthy one looks, where that is another
    topology_file: str | None = None  # series of Azure's files in /opt/microsoft

    @property
    def called(self) -> str:
        """How a recognised one is called."""
        return self.sku or self.name

    @property
    def devices(self) -> int | None:
        """RDMA devices that a scan shows."""
        return self.rdma_devices or self.nics


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Machine):
    """A machine of which enough is known to plan for it.

    Its GPUs are joined all to all, by the links of `nvlinks`, or by PCIe alone.
    """

    gpu: str
    nics: int
    nic_gbps: float
    nic_kind: str


_NEEDED = {"gpu", "nics", "nic_gbps", "nic_kind"}
_LISTS = {"aliases", "links_per_pair", "other_sizes"}


@cache
def machines() -> tuple[Machine, ...]:
    """Every row."""
    made: list[Machine] = []
    for written in read_table(__file__, "machines.toml")["machine"]:
        row: dict[str, Any] = {name: tuple(value) if name in _LISTS else value for name, value in written.items()}
        row["nvlinks"] = tuple(tuple(counts) for counts in row.get("nvlinks", ()))
        joined = row.get("all_to_all", True) or bool(row["nvlinks"])
        made.append(Known(**row) if row.keys() >= _NEEDED and joined else Machine(**row))
    return tuple(made)


@cache
def catalogue() -> tuple[Known, ...]:
    """Those to plan for."""
    return tuple(row for row in machines() if isinstance(row, Known))


@cache
def recognised() -> tuple[Machine, ...]:
    """Those that a scan is recognised as; the first that fits counts."""
    return tuple(row for row in machines() if row.gpu_pattern is not None)


def machine_of_host(model: str | None, gpus: int, product: str | None) -> Machine | None:
    """The row of a host by its GPUs' model and number and DMI's product name; None where none fits."""
    row = next((row for row in recognised() if model and _fits(row, model, gpus, product)), None)
    return row if row and gpus not in row.other_sizes else None


def _fits(row: Machine, model: str, gpus: int, product: str | None) -> bool:
    if re.search(rf"\b(?:{row.gpu_pattern})", model) is None:
        return False
    if row.product is not None:
        return product is not None and re.search(row.product, product) is not None
    # A missing GPU must not turn a broken HGX into an unknown machine; one extra is a different machine.
    return row.gpus == gpus or (row.gpus == 8 and 4 < gpus < 8)
