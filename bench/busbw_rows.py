"""Read published bus bandwidths: from the description of a machine to the links between its GPUs.

Columns: machine, gpus_per_node, nodes, op, bytes, busbw_GBps, healthy, source (published_busbw.csv), or system, device,
op, n_gpus, bytes, busbw_GBps, source (collectives_intranode.csv). If the machine of a row is not recognised, the row
counts as "not placed", which is an error of this reader. A fault that the row mentions ("MNNVL off") is ignored: the
links are those of a healthy machine.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from contracts.finding import Interval
from contracts.tables import read_table
from hardware.gpus import Gpu, find_gpu
from hardware.machines import catalogue
from hardware.units import GIGA
from topology.expected import Paths, exact_rate
from topology.graph import nvlink_bytes_per_second, pcie_bytes_per_second
from topology.paths import RAW_OVER_PLAN, pcie_generations

MIB = 1 << 20
_DOMAIN = 72  # GPUs of an NVL72


class PlaceError(ValueError):
    """The links of a row are unknown; the message names what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published result."""

    machine: str
    gpus_per_node: int
    nodes: int
    op: str
    bytes: int
    busbw: float  # bytes per second
    healthy: str  # "yes", "no", "unclear"
    source: str
    kind: str  # the class that the file gives the row; "" if it gives none
    nccl: str
    nvls: str
    gdr: str

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.gpus_per_node * self.nodes


def is_of_a_rack(gpu: Gpu) -> bool:
    """Whether the NVLink domain spans the hosts of a rack: GPUs on a Grace CPU from Blackwell on."""
    return gpu.grace and (gpu.compute_capability or (0, 0)) >= (10, 0)


def read(path: Path, bad: list[str] | None = None) -> list[Row]:
    """Read the rows of either file. Errors of rows are added to `bad`; without it the first raises PlaceError."""
    rows = []
    with path.open(encoding="utf-8", newline="") as stream:
        for number, raw in enumerate(csv.DictReader(stream), 2):
            try:
                row = _row(raw)
                if row.busbw <= 0 or row.bytes <= 0:
                    raise ValueError(f"{row.bytes} bytes at {row.busbw / GIGA:g} GB/s")
                rows.append(row)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                message = f"{path.name}:{number}: not a row of results: {error}"
                if bad is None:
                    raise PlaceError(message) from None
                bad.append(message)
    return rows


def _row(raw: dict[str, str]) -> Row:
    has_machine = "machine" in raw
    source = raw.get("source", "")
    # The file gives one L40S machine a link of 32 GB/s, but 5 GB/s are measured with 4 of its GPUs, and 1 GB/s with 8.
    is_doubtful = raw.get("system") == "l40s" and int(raw["n_gpus"]) > 2
    return Row(
        machine=raw["machine"] if has_machine else raw.get("device") or raw["system"],
        gpus_per_node=int(raw["gpus_per_node" if has_machine else "n_gpus"]),
        nodes=int(raw.get("nodes") or 1),
        op={"alltoall": "all_to_all"}.get(raw["op"], raw["op"]),
        bytes=int(raw["bytes"]),
        busbw=float(raw["busbw_GBps"]) * GIGA,
        healthy=(raw.get("healthy") or ("unclear" if is_doubtful else "yes")).strip().lower(),
        # Comments of one thread and files of one repository count as one source: they describe the same machines.
        source=re.split(r"[\s@:]|#", source.removeprefix("github:"))[0] + "".join(re.findall(r"#\d+", source)[:1]),
        kind=raw.get("class") or "",
        nccl=raw.get("nccl") or raw.get("nccl_version") or "",
        nvls=(raw.get("nvls") or "").lower(),
        gdr=raw.get("gdr") or "",
    )


_SPEEDS = {3: 8e9, 4: 16e9, 5: 32e9}  # transfers per second


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instance:
    """A machine that is recognised by its name, with what the text of a row leaves out."""

    pattern: str
    gpu: str
    gpus: int
    nics: int
    gbps: float
    network: str = "RDMA"  # "RDMA without GPUDirect", "sockets"
    virtual: bool = False  # a virtual machine without P2P over PCIe


_RATES = r"(25|40|50|56|80|100|200|400|800)"
INFINIBAND_GBPS = {"xdr": 800, "ndr": 400, "hdr": 200, "edr": 100, "fdr": 56}  # a port of four lanes


def place(row: Row) -> Paths:
    """Return the links between the ranks of a row. Raises PlaceError if the row does not describe them."""
    text = row.machine.lower()
    instance = next((each for each in _instances() if re.search(each.pattern, text)), None)
    rated = re.sub(_RATES + r"\s*g(?:b?/?p?s|be?)?\b(?!\w)", r"\1 gb/s", text)
    rated = re.sub(rf"(x\s*{_RATES}) gb/s", r"\1", rated)
    # Azure's NC sizes have PCIe cards of the GPU that they name. Names of racks and of A4X contain no GPU.
    gpu = find_gpu(re.sub(r"(nc\d+ads.*a100)", r"\1 pcie", text)) or (find_gpu(instance.gpu) if instance else None)
    between, wire = _network(row, rated, instance) if row.nodes > 1 else (None, None)
    if gpu is None and row.gpus_per_node > 1 and "pcie" not in text:
        raise PlaceError(f"{row.machine}: unknown GPU")
    if row.ranks < 2:
        raise PlaceError(f"{row.machine}: one rank")
    if gpu is not None and gpu.links and nvlink_bytes_per_second(gpu.compute_capability) is None:
        raise PlaceError(f"{row.machine}: no model for the links of {gpu.name}")
    wire = _limit_by_gpus(row, gpu, wire)
    inside, link = _inside(row, text, gpu, instance, wire)
    groups, wire = _groups(row, text, gpu, wire)
    capability = gpu.compute_capability if gpu else None
    return Paths(
        groups=groups,
        inside=inside,
        link=link,
        capability=capability,
        nvls=_nvls(row) if inside == "NVSwitch" and (capability or (0, 0)) >= (9, 0) else False,
        between=between if groups > 1 else None,
        wire=wire if groups > 1 else None,
        sources=(row.machine,),
    )


def _limit_by_gpus(row: Row, gpu: Gpu | None, wire: Interval | None) -> Interval | None:
    """Limit the network of a host to what the PCIe links of its GPUs carry, as `topology.paths` does."""
    if gpu is None or gpu.grace or wire is None or (gpu.compute_capability or (0, 0)) >= (10, 3):
        return wire  # C2C, or the PCIe 6 switch of the NIC
    slot = pcie_bytes_per_second(_SPEEDS[pcie_generations(gpu.compute_capability)[1]], 16) or 0.0
    reach = row.gpus_per_node * slot
    return exact_rate(reach) if 0 < reach * RAW_OVER_PLAN < wire.high else wire


def _nvls(row: Row) -> bool | None:
    """Whether NCCL supports NVLS (2.17 and newer); None if the version is not published."""
    version = re.match(r"(\d+)\.(\d+)", row.nccl)
    if version:
        return (int(version[1]), int(version[2])) >= (2, 17)
    return True if row.nvls in ("on", "off", "auto") else None


@cache
def _instances() -> tuple[_Instance, ...]:
    """Return the rows of busbw_machines.toml, then the machines of the catalogue by their own names."""
    tables = read_table(__file__, "busbw_machines.toml")
    kinds = {"efa": "RDMA", "hca": "RDMA", "ethernet": "sockets"}
    rows = {row.name: row for row in catalogue()}
    instances = [_Instance(**row) for row in tables["instance"]]
    for entry in (*tables["named"], *({"pattern": re.escape(name.lower()), "machine": name} for name in rows)):
        row = rows[entry["machine"]]
        instances.append(_Instance(
            pattern=entry["pattern"], gpu=row.gpu, gpus=row.gpus, nics=row.nics, gbps=row.nic_gbps,
            network=entry.get("network", kinds[row.nic_kind]), virtual=entry.get("virtual", False),
        ))  # fmt: skip
    return tuple(instances)


def _groups(row: Row, text: str, gpu: Gpu | None, wire: Interval | None) -> tuple[int, Interval | None]:
    """Return the number of NVLink groups and the network bandwidth of each. A domain of several hosts is one group."""
    plain = re.search(r"no domain|no mnnvl|\bib\b|infiniband|roce|\btcp\b|ethernet|socket|racks? to rack", text)
    racked = gpu is not None and is_of_a_rack(gpu) and (not plain or "mnnvl off" in text)
    if not racked or row.nodes == 1:
        return row.nodes, wire
    groups = -(-row.ranks // _DOMAIN)
    hosts = -(-row.nodes // groups)
    return groups, exact_rate(wire.mid * hosts) if wire else None


def _inside(
    row: Row, text: str, gpu: Gpu | None, instance: _Instance | None, wire: Interval | None
) -> tuple[str | None, Interval | None]:
    """Return what connects the GPUs of a host, and its bytes per second for each; None for a single GPU."""
    if row.gpus_per_node < 2 and not (gpu and is_of_a_rack(gpu)):
        return None, None
    through = "PCIe" if gpu is None or not gpu.links else "NVSwitch" if gpu.interconnect == "NVSwitch" else "NVLink"
    capability = (gpu.compute_capability if gpu else None) or (0, 0)
    links = _count_links(row, text, gpu, through) if gpu else 0
    if links and not (through == "NVLink" and "without p2p" in text):
        return through, exact_rate(links * (nvlink_bytes_per_second(capability) or 0.0))
    # A 400 Gb/s NIC needs a PCIe slot of generation 5, and the GPUs behind the same switches have at least the same.
    fast = wire is not None and re.search(r"x\s*400", text) is not None
    generation = pcie_generations(capability)[1] if gpu else 5 if fast else 4
    rate = pcie_bytes_per_second(_SPEEDS[generation], 16)
    refused = "without p2p" in text or "(shm" in text or bool(instance and instance.virtual)
    direct = (gpu.peers if gpu else True) and not refused
    return "PCIe" if direct else "shared memory", exact_rate(rate or 0.0)


def _count_links(row: Row, text: str, gpu: Gpu, through: str) -> int:
    """Return the NVLinks of each GPU that a ring over all GPUs of the host uses."""
    pair = re.search(r"\bnv(\d+)\b", text)
    links, capability = int(pair[1]) if pair else gpu.links, gpu.compute_capability or (0, 0)
    if through != "NVLink":
        return links
    if capability > (7, 0) and "sxm" not in text and "mesh" not in text:
        # Bridges are optional on these cards. A bridge connects two cards; only SXM2 boards connect more.
        is_bridged = pair or re.search(r"nvlink|bridge|\bnc\d+ad", text)
        return links if is_bridged and row.gpus_per_node <= 2 else 0
    if capability == (7, 0) and not pair:
        # A ring over part of a hybrid cube mesh, in which two pairs of each four GPUs have two links.
        return {2: 2, 3: 2, 4: 4}.get(row.gpus_per_node, 6)
    return links


def _network(row: Row, text: str, instance: _Instance | None) -> tuple[str, Interval]:
    """Return the transport, and the bandwidth of all NICs of one host in bytes per second."""
    kind = instance.network if instance else "RDMA"
    plain = re.search(r"\btcp\b|ethernet|socket|\dgbe\b|\d gbe\b", row.machine.lower()) and "roce" not in text
    if plain or row.gdr.upper() == "TCP":
        kind = "sockets"
    gbps = _parse_gbps(text)
    if gbps is None and instance:
        # If the row uses some of the machine's GPUs, it uses the same share of its NICs.
        gbps = instance.gbps * max(1, instance.nics * min(row.gpus_per_node, instance.gpus) // instance.gpus)
    if gbps is None:
        gbps = next((float(rate) for word, rate in INFINIBAND_GBPS.items() if re.search(rf"\b{word}", text)), None)
    if gbps is None:
        raise PlaceError(f"{row.machine}: unknown network between its {row.nodes} nodes")
    return kind, exact_rate(gbps * GIGA / 8)


# Number of NICs or ports, and the rate of each. Their product is the bandwidth of one host.
_COUNTS = (
    rf"(\d+)\s*(?:x\s*)?dual-port\s*(?:nics?\s*)?(\d+)\s*x\s*{_RATES}",
    rf"(\d+)\s*x\s*{_RATES}\b(?!\s*gb\b)",
    rf"(\d+)\s*x\s*({'|'.join(INFINIBAND_GBPS)})",
    rf"(\d+)\s*(?:nics?|hcas?|ports|connectx-?\d?|cx-?\d)\W+(?:of\s+|at\s+)?{_RATES}\b",
)


def _parse_gbps(text: str) -> float | None:
    """Return the rate of all NICs of one host in Gb/s as the text states it; None if it does not."""
    if terabits := re.search(r"([\d.]+)\s*tb(?:it)?/?p?s?\b", text):
        return float(terabits[1]) * 1000
    for pattern in _COUNTS:
        if counted := re.search(pattern, text):
            return math.prod(float(INFINIBAND_GBPS.get(part, part)) for part in counted.groups())
    single = re.search(r"([\d.]+)\s*(?:gb(?:e|it)?(?:/s|ps)?\b|(?=roce|ib\b|infiniband|ethernet|tcp|efa))", text)
    if single and not re.search(rf"{re.escape(single[0])}\s*(hbm|vram|memory)", text) and float(single[1]) >= 1:
        # "80GB" after a GPU's name is its memory. "100 Gb/s" and "25 GbE" are networks.
        rate = f"{float(single[1]):g}"
        is_memory = re.search(rf"{rate}\s*gb\b(?!/s|ps)", text) is not None
        is_network = re.search(rf"{rate}\s*gb\s*(ib|roce|ethernet|tcp)", text) is not None
        return float(single[1]) if is_network or not is_memory else None
    return None
