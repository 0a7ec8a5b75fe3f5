"""Machines of the catalogue (hardware/machines.toml) as topologies, for what-if questions."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hardware.gpus import find_gpu
from hardware.machines import Known, catalogue
from hardware.units import GIGA
from planner.forecast.specs import PlanError
from topology.derive import find_islands, find_nearest_nics, find_rails, mark_through_neighbours
from topology.graph import (
    ClusterTopology,
    GpuNode,
    Island,
    NicNode,
    NodeTopology,
    Pair,
    PathClass,
    nvlink_bytes_per_second,
)
from topology.paths import with_expectations


class MachineError(PlanError):
    """The catalogue does not have this machine, or not with these nodes, GPUs or network."""


def names() -> tuple[str, ...]:
    """Return every machine name that `get` accepts."""
    return tuple(machine.name for machine in catalogue())


_PUNCTUATION = re.compile(r"[\W_]")


@cache
def _rows_by_name() -> dict[str, Known]:
    """Return the rows of the catalogue by their names and aliases, without punctuation."""
    return {_PUNCTUATION.sub("", name.lower()): row for row in catalogue() for name in (row.name, *row.aliases)}


def machine(name: str) -> Known:
    """Return a row of the catalogue by name or alias; Azure also writes `Standard_` before its names."""
    query = name.strip().lower().removeprefix("standard_")
    if row := _rows_by_name().get(_PUNCTUATION.sub("", query)):
        return row
    near = difflib.get_close_matches(query, [row.name for row in catalogue()], n=3, cutoff=0.4)
    hint = "; --sweep compares several machines" if "," in name else f"; similar: {', '.join(near)}" if near else ""
    parts = _PUNCTUATION.split(re.sub(r"\A\d+x", "", query))  # rtx4090 and rtx-4090 are named "RTX 4090"
    words = filter(re.compile(r"[a-z]+\d").match, () if "," in name else ("".join(parts), *parts))
    gpu = "|".join(re.sub(r"(?<=[a-z])(?=\d)", " ?", word) for word in words)
    if with_gpu := [row.name for row in catalogue() if gpu and re.search(rf"\b({gpu})\b", row.gpu.lower())]:
        hint = f"; machines with such a GPU: {', '.join(with_gpu[:3])} (--ranks-per-node uses only some of the GPUs)"
    raise MachineError(
        f"machine={name!r}: not in the catalogue{hint}. `topoflight recommend --machine list` prints all machines. "
        "To use a machine of your own, record it with `topoflight capture` and give --host FILE on the command line"
    )


def _find_nearest(row: Known, gpu: int) -> list[int]:
    """Return the indices of the NICs on the same switch as a GPU."""
    by_nic = [j for j in range(row.nics) if j * row.gpus // row.nics == gpu]
    if row.nics >= row.gpus:
        return by_nic
    return sorted({*by_nic, gpu * row.nics // row.gpus} & set(range(row.nics)))


def _make_pairs(row: Known, gpus: Sequence[GpuNode], nics: Sequence[NicNode], per_link: float | None) -> list[Pair]:
    """Return all GPU pairs, by NVLink if the pair has any, and each GPU's NICs: on its switch, or beyond its CPU."""
    pairs = []
    for a, b in itertools.combinations(gpus, 2):
        links = row.nvlinks[a.index][b.index] if row.nvlinks else min(row.links_per_pair, default=0)
        pair = _join_by_cpus(a, b)
        if links:
            nvlinks = links if _is_nvidia(row) else 0
            pair = replace(pair, label=f"NV{links}" if nvlinks else "XGMI", path=PathClass.NVL, nvlinks=nvlinks,
                           bytes_per_second=per_link * links if per_link else None)  # fmt: skip
        pairs.append(pair)
    for gpu in gpus:
        near = _find_nearest(row, gpu.index)
        over = [_join_by_cpus(gpu, nic) for nic in nics]
        pairs += [replace(p, label="PIX", path=PathClass.PIX) if j in near else p for j, p in enumerate(over)]
    return pairs


def _join_by_cpus(a: GpuNode, b: GpuNode | NicNode) -> Pair:
    same = a.numa_node == b.numa_node
    return Pair(a=a.name, b=b.name, label="NODE" if same else "SYS", path=PathClass.PHB if same else PathClass.SYS,
                evidence="catalogue")  # fmt: skip


def _is_nvidia(row: Known) -> bool:
    gpu = find_gpu(row.gpu)
    return gpu is None or gpu.maker == "NVIDIA"


def get(name: str, hostname: str | None = None) -> NodeTopology:
    """Return one node of the catalogue as a topology. For planning, it is equivalent to a probed one."""
    row = machine(name)
    gpu = find_gpu(row.gpu)
    gpus = tuple(
        GpuNode(
            name=f"GPU{i}",
            index=i,
            model=row.gpu,
            memory_bytes=int(gpu.memory_bytes) if gpu else None,
            compute_capability=gpu.compute_capability if gpu else None,
            numa_node=i * 2 // row.gpus,
        )
        for i in range(row.gpus)
    )
    nics = tuple(
        NicNode(
            name=f"{'efa' if row.nic_kind == 'efa' else 'mlx5' if row.nic_kind == 'hca' else 'eth'}_{i}",
            kind=row.nic_kind,
            rate_bytes_per_second=row.nic_gbps * GIGA / 8.0,
            active=True,
            numa_node=i * 2 // row.nics if row.nics > 1 else 0,
        )
        for i in range(row.nics)
    )
    fewest = min(row.links_per_pair, default=0)
    linked = f"NV{fewest}" if _is_nvidia(row) else "XGMI"
    pairs = _make_pairs(row, gpus, nics, nvlink_bytes_per_second(gpu.compute_capability if gpu else None))
    island = Island(gpus=tuple(each.name for each in gpus), all_to_all=True, nvlinks_per_pair=(linked,))
    joined = mark_through_neighbours(gpus, tuple(pairs)) if row.nvlinks else tuple(pairs)
    return with_expectations(NodeTopology(
        hostname=hostname or row.name,
        gpus=gpus,
        nics=nics,
        pairs=joined,
        islands=find_islands(gpus, joined) if row.nvlinks else (island,) if fewest else (),
        nearest_nic=find_nearest_nics(gpus, nics, joined),
        cpu_count=row.cpus,
        numa_nodes=2,
        sku=row.name,
        source=f"catalogue: {row.source}",
    ))  # fmt: skip


_NETWORK = re.compile(r"(?:(\d{1,2})x)?(\d{1,6}(?:\.\d{1,3})?)([GMT])(?:b/s|bps|bit)?", re.IGNORECASE)


def network_bytes_per_second(network: str) -> float:
    """Return the rate of a node's network, "100G" or "8x400G", in bytes per second. Raises MachineError."""
    parts = _NETWORK.fullmatch(network.strip())
    if parts is None or float(parts[2]) == 0:
        raise MachineError(f"network={network!r}: must be the bits per second of a node, as 100G, 2x200G or 800M")
    bits = int(parts[1] or 1) * float(parts[2]) * {"M": 1e-3, "G": 1.0, "T": 1e3}[parts[3].upper()] * GIGA
    return bits / 8.0


def over_network(cluster: ClusterTopology, network: str, transport: str | None = None) -> ClusterTopology:
    """Return the nodes connected by a given network: "100G", "8x400G" per node, with RDMA or TCP.

    The default `transport` is that of the nodes, else TCP. Raises MachineError.
    """
    bytes_per_second = network_bytes_per_second(network)
    if len(cluster.nodes) < 2:
        raise MachineError(f"network={network!r}: joins nodes, and this is one; name how many")
    if cluster.inter_node_transport == "nvlink":
        raise MachineError(f"network={network!r}: these {len(cluster.nodes)} nodes are one NVLink domain")
    return replace(
        cluster,
        inter_node_bytes_per_second=bytes_per_second,
        inter_node_transport=transport or cluster.inter_node_transport or "tcp",
    )


def with_gpus(node: NodeTopology, count: int) -> NodeTopology:
    """Return the node for a job that uses its first `count` usable GPUs; other GPUs' paths and rails are dropped.

    Raises MachineError if the node has fewer.
    """
    usable = tuple(gpu for gpu in node.gpus if gpu.usable)
    if not 1 <= count <= len(usable):
        raise MachineError(
            f"ranks per node = {count}: must be from 1 to {len(usable)}, the usable GPUs of {node.hostname}; NCCL "
            "takes one rank per GPU"
        )
    if count == len(node.gpus):
        return node
    gpus = usable[:count]
    dropped = {gpu.name for gpu in node.gpus} - {gpu.name for gpu in gpus}
    pairs = tuple(pair for pair in node.pairs if pair.a not in dropped and pair.b not in dropped)
    nearest = tuple(near for near in node.nearest_nic if near.gpu not in dropped)
    return replace(
        node, gpus=gpus, pairs=pairs, islands=find_islands(gpus, pairs), nearest_nic=nearest, rails=find_rails(nearest),
        expectations=(),
    )  # fmt: skip


def cluster(name: str, nodes: int = 1, *, gpus_per_node: int | None = None) -> ClusterTopology:
    """Return a cluster of `nodes` equal catalogue machines, with `gpus_per_node` GPUs for the job (default: all).

    If an NVLink domain cannot hold all nodes, they are distributed evenly over as few domains as possible.

    Raises MachineError for an unknown machine or more GPUs than it has.
    """
    row = machine(name)
    node = get(name) if gpus_per_node is None else with_expectations(with_gpus(get(name), gpus_per_node))
    near = {nic for nearest in node.nearest_nic for nic in nearest.nics}
    if row.nic_kind == "efa":  # EFA devices are allocated one by one; those of the other GPUs are for other jobs
        far = {nic.name for nic in node.nics} - near
        node = replace(node, nics=tuple(nic for nic in node.nics if nic.name in near),
                       pairs=tuple(pair for pair in node.pairs if pair.b not in far))  # fmt: skip
    transport = row.network_plugin or {"efa": "efa", "hca": "rdma", "ethernet": "tcp"}[row.nic_kind]
    if row.nvlink_nodes >= nodes > 1:
        transport = "nvlink"
    members = (node,) * nodes
    if row.nvlink_nodes > 1:
        domains = -(-nodes // row.nvlink_nodes)
        ends = [nodes * i // domains for i in range(domains + 1)]
        names = [f"{node.hostname}: domain {i}" for i in range(domains)]
        variants = [replace(node, gpus=tuple(replace(gpu, nvlink_domain=name) for gpu in node.gpus)) for name in names]
        members = tuple(variants[i] for i in range(domains) for _ in range(ends[i], ends[i + 1]))
    return ClusterTopology(
        nodes=members,
        inter_node_bytes_per_second=len(near) * row.nic_gbps * GIGA / 8.0 if nodes > 1 else None,
        inter_node_transport=transport if nodes > 1 else None,
    )
