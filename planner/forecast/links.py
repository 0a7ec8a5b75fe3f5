"""Link rates, and the time of a collective over a group of ranks that starts at rank 0 with a given stride.

Model: NCCL's ring, T = alpha (n - 1) + S (n - 1) / (n B) for all-gather and reduce-scatter, twice that for all-reduce
(nccl-tests doc/PERFORMANCE.md). If consecutive ranks share a node, each node boundary carries S (n - 1) / n per ring,
for any number of GPUs per node. Groups that cross nodes in parallel share the network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from contracts.tables import read_table
from hardware.gpus import Gpu, find_gpu
from hardware.units import GIGA
from planner.forecast.specs import PlanError
from topology.graph import ClusterTopology, NodeTopology

if TYPE_CHECKING:  # not imported for a question without measurements
    from collectives.bench.results import Measurement

_CONSTANTS: Mapping[str, float] = read_table(__file__, "constants.toml")["links"]
NETWORK_SHARE = _CONSTANTS["network_share"]
ASSUMED_PCIE_BYTES_PER_SECOND = _CONSTANTS["assumed_pcie"]
TCP_CEILING_BYTES_PER_SECOND = _CONSTANTS["tcp_ceiling"]
_LINKS = {None: "network", "efa": "EFA", "tcp": "TCP", "rdma": "RDMA", "nvlink": "NVLink"}  # a plugin has its own name


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A bandwidth and its origin."""

    bytes_per_second: float
    how: str  # "measured", "derived", "assumed"
    link: str  # "NVLink", "PCIe", "EFA", "TCP"
    why: str = ""
    within: tuple[float, float] | None = None  # minimum and maximum, if no probe knows the rate

    def __str__(self) -> str:
        reason = f" ({self.why})" if self.why else ""
        return f"{self.link} {self.bytes_per_second / GIGA:.3g} GB/s: {self.how}{reason}"


def unknown_network(link: str, reason: str = "no NIC rate known") -> Speed:
    """Return the assumed rate of a network that was not measured and whose NIC rate is unknown."""
    return Speed(bytes_per_second=_CONSTANTS["assumed_tcp"], how="assumed", link=link, why=reason,
                 within=(_CONSTANTS["unknown_least"], _CONSTANTS["unknown_most"]))  # fmt: skip


HOST = Speed(bytes_per_second=12 * GIGA, how="assumed", link="PCIe to host memory",
             why="Gen4 x16, two GPUs behind one uplink")  # fmt: skip
# The slower direction, from the GPU, measured on a GH200; the other carries 375 GB/s (arXiv 2407.07850).
GRACE = Speed(bytes_per_second=297 * GIGA, how="derived", link="NVLink-C2C", why="measured on a GH200")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between ranks: an NVLink island, a node, and the network between nodes."""

    ranks_per_node: int
    nodes: int
    island_size: int  # ranks that reach each other at `island` speed; divides or exceeds ranks_per_node
    island: Speed  # busbw within an island
    node: Speed  # busbw within a node across islands
    network: Speed | None  # from one node to the others, per direction, all rails; None: single node
    alpha_intra_seconds: float = _CONSTANTS["alpha_intra_seconds"]
    alpha_inter_seconds: float = _CONSTANTS["alpha_inter_seconds"]
    host: Speed = HOST  # per rank, for offloading
    scatter_share: float = 1.0  # busbw of reduce-scatter relative to all-gather; gloo uses an all-reduce

    @property
    def domain_size(self) -> int:
        """Ranks that reach each other without the network: of a node, or of an NVLink domain of several nodes."""
        return max(self.island_size, self.ranks_per_node)

    def crosses(self, size: int, stride: int) -> Speed:
        """Return the slowest link that a group of `size` ranks with this stride uses."""
        reach = (size - 1) * stride + 1
        if reach <= self.island_size:
            return self.island
        if reach <= self.ranks_per_node or self.network is None:
            return self.node
        return self.network

    def ring_seconds(self, total_bytes: float, size: int, stride: int, messages: float = 1.0) -> float:
        """Return the seconds of all-gathers or reduce-scatters of `total_bytes` in `messages` parts over a group."""
        if size <= 1 or total_bytes <= 0:
            return 0.0
        share, alpha = total_bytes * (size - 1) / size, self.alpha_intra_seconds
        slowest, fast, per_node = self.crosses(size, stride), self.node.bytes_per_second, self.ranks_per_node
        if slowest is not self.network:
            return messages * alpha * (size - 1) + share / slowest.bytes_per_second
        if self.island_size > per_node:  # NVLink domain of several nodes: the network connects domains
            per_node, fast = self.island_size, self.island.bytes_per_second
        members = max(1, min(size, per_node // stride))
        side_by_side = per_node // members  # rings of other groups that share the network
        network = slowest.bytes_per_second * (per_node / self.ranks_per_node)
        seconds = max(share * side_by_side / network, share / fast if members > 1 else 0.0)
        # All-gather and reduce-scatter have no tree: every rank of the ring adds a step (PAT: only one GPU per node).
        across = size / members
        hops = alpha * (size - across) + self.alpha_inter_seconds * across
        return seconds + messages * hops

    def scatter_seconds(self, total_bytes: float, size: int, stride: int, messages: float = 1.0) -> float:
        """Return the seconds of reduce-scatters of `total_bytes`, relative to the all-gather's bytes and steps."""
        return self.ring_seconds(total_bytes / self.scatter_share, size, stride, messages / self.scatter_share)

    def all_reduce_seconds(self, total_bytes: float, size: int, stride: int, messages: float = 1.0) -> float:
        """Return the seconds of one all-reduce: reduce-scatter and all-gather; for many nodes a tree with few steps."""
        transfer = 2.0 * self.ring_seconds(total_bytes, size, stride, 0.0)
        steps = min(size - 1, 64)
        alpha = self.alpha_intra_seconds if (size - 1) * stride < self.ranks_per_node else self.alpha_inter_seconds
        return transfer + 2.0 * messages * steps * alpha

    def send_seconds(self, size_bytes: float, stride: int, stages: int = 2) -> float:
        """Return the seconds to send to the next pipeline stage, `stride` ranks further, over the slowest boundary.

        All ranks of a stage send at the same time; ranks of one node share its network.
        """
        slowest = self.crosses(stages, stride)
        if slowest is not self.network:
            return self.alpha_intra_seconds + size_bytes / slowest.bytes_per_second
        return self.alpha_inter_seconds + size_bytes * min(stride, self.ranks_per_node) / slowest.bytes_per_second

    def all_to_all_seconds(self, bytes_per_rank: float, size: int, stride: int, spread: float | None = None) -> float:
        """Return the time in which each rank sends (size-1)/size of its bytes evenly: over the network, then NVLink.

        With `spread`, bytes for several ranks of a domain enter it once, and reach `spread` of them over NVLink.
        """
        if size <= 1:
            return 0.0
        domain = self.domain_size  # of several nodes: it uses the networks of all of them
        members = max(1, min(size, domain // stride)) if self.network else size
        inside = (members - 1) / size if spread is None else spread * (members - 1) / members
        seconds = bytes_per_rank * inside / self.island.bytes_per_second
        if self.network is None or members == size:
            return self.alpha_intra_seconds * size + seconds
        out = bytes_per_rank * (size - members) / size * self.ranks_per_node
        return self.alpha_inter_seconds * min(size / members, 32.0) + out / self.network.bytes_per_second + seconds


_RING_OPS = ("all_gather", "reduce_scatter")


def _find_measured(measurements: Sequence[Measurement], *, across: bool) -> tuple[float, str, float] | None:
    """Return the busbw of the largest verified all-gather, and the reduce-scatter's fraction of it.

    `across`: between hosts instead of within one. If only one of the two was measured, both are assumed equal.
    """
    best: dict[str, Measurement] = {}
    for m in measurements:
        if not m.verified or m.op not in _RING_OPS or (len(set(m.hosts)) > 1) is not across or len(m.ranks) < 2:
            continue
        if m.op not in best or (m.bytes, len(m.ranks)) > (best[m.op].bytes, len(best[m.op].ranks)):
            best[m.op] = m
    if not best:
        return None
    gather = best.get("all_gather") or best["reduce_scatter"]
    scatter = best.get("reduce_scatter") or gather
    rate = gather.busbw_bytes_per_second
    source = f"{gather.op} of {gather.bytes} bytes over {len(gather.ranks)} ranks"
    return rate, source, scatter.busbw_bytes_per_second / rate


def _measure_alpha(measurements: Sequence[Measurement]) -> float | None:
    """Return the latency per ring step from the smallest verified all-gather within one host."""
    small = [m for m in measurements if m.verified and m.op in _RING_OPS and len(m.ranks) > 1 and m.bytes <= 1 << 16]
    smallest = min(small, key=lambda m: m.bytes, default=None)
    return smallest.median_seconds / (len(smallest.ranks) - 1) if smallest else None


def _find_expected(node: NodeTopology, scope: str) -> float | None:
    rates = (each.busbw_bytes_per_second for each in node.expectations if each.scope == scope and each.op in _RING_OPS)
    return next(filter(None, rates), None)


def _find_island(node: NodeTopology) -> tuple[int, Speed]:
    """Return size and speed of the node's smallest NVLink island; (1, ...) without NVLink."""
    sizes = [len(island.gpus) for island in node.islands if len(island.gpus) > 1]
    if not sizes:
        return 1, Speed(bytes_per_second=ASSUMED_PCIE_BYTES_PER_SECOND, how="assumed", link="PCIe")
    usable, gpu = sum(gpu.usable for gpu in node.gpus), find_gpu(node.gpus[0].model)
    size = min(min(sizes), usable) if sum(sizes) >= usable > 0 else 1
    derived = _find_expected(node, "island")
    table = gpu.busbw_of(size) if gpu and gpu.interconnect != "PCIe" else None
    if derived or table:
        return size, _choose_lower(derived, table, "NVLink", gpu)
    xgmi = gpu is not None and gpu.interconnect == "xGMI"
    return size, Speed(bytes_per_second=40 * GIGA, how="assumed", link="xGMI" if xgmi else "NVLink")


def _choose_lower(derived: float | None, table: float | None, link: str, gpu: Gpu | None) -> Speed:
    """Return the lower of the topology's rate and the rate measured on other machines with the same GPU."""
    if derived is not None and (table is None or derived <= table):
        return Speed(bytes_per_second=derived, how="derived", link=link, why="topology")
    name = gpu.name if gpu else "GPU"
    how = "derived" if link == "NVLink" else "assumed"  # PCIe differs between machines
    return Speed(bytes_per_second=table or 0.0, how=how, link=link, why=f"measured on other {name}")


def _find_node_speed(cluster: ClusterTopology, node: NodeTopology, island: Speed, island_size: int) -> Speed:
    if island_size >= sum(gpu.usable for gpu in node.gpus) > 1:
        return island
    derived, gpu = _find_expected(node, "node"), find_gpu(node.gpus[0].model)
    table = gpu.busbw_of(len(node.gpus)) if gpu and gpu.interconnect == "PCIe" else None
    speed = Speed(bytes_per_second=ASSUMED_PCIE_BYTES_PER_SECOND, how="assumed", link="PCIe")
    if derived or table:
        speed = _choose_lower(derived, table, "PCIe", gpu)
    return _limit_to_links(speed, cluster)


def _limit_to_links(speed: Speed, cluster: ClusterTopology) -> Speed:
    """Limit a speed to the slowest probed GPU link, with a note if a link runs below its slot."""
    rates = [
        (carries, node, g) for node in cluster.nodes for g in node.gpus
        if g.usable and (carries := g.pcie_running_bytes_per_second or g.pcie_bytes_per_second)
    ]  # fmt: skip
    if not rates:
        return speed
    carries, node, gpu = min(rates, key=lambda rate: rate[0])
    slowed = gpu.pcie_running_bytes_per_second is not None
    name = gpu.name if len(cluster.nodes) == 1 else f"{gpu.name} of {node.hostname}"
    runs = f"{name} {'runs at' if slowed else 'has'} {gpu.pcie_link}"
    if carries < speed.bytes_per_second or (slowed and carries == speed.bytes_per_second):
        return replace(speed, bytes_per_second=carries, how="derived", why=runs)
    if slowed:  # measurements of other machines are even lower
        runs += f", which carries {carries / GIGA:.3g} GB/s"
        return replace(speed, why="; ".join(filter(None, (speed.why, runs))))
    return speed


def _find_host_speed(cluster: ClusterTopology, gpu: Gpu | None) -> Speed:
    """Return the rate of one rank to host memory: NVLink-C2C to a Grace CPU, else half of the slowest GPU link."""
    if gpu and gpu.grace:
        return GRACE
    upstream = _limit_to_links(replace(HOST, bytes_per_second=math.inf), cluster)
    half = upstream.bytes_per_second * _CONSTANTS["host_share"]
    return HOST if math.isinf(half) else replace(upstream, bytes_per_second=half)


def _count_domain_ranks(cluster: ClusterTopology, per_node: int) -> int:
    """Return the ranks of the smallest multi-node NVLink domain with consecutive nodes; 0 if there is none.

    For several domains, this is the largest power of two of their nodes, times the ranks per node. Rank groups that
    start at a multiple of their size then never span two domains.
    """
    if cluster.inter_node_transport == "nvlink":
        return per_node * len(cluster.nodes)
    domains = [next((gpu.nvlink_domain for gpu in node.gpus if gpu.usable), None) for node in cluster.nodes]
    together = [(domain, len(list(nodes))) for domain, nodes in itertools.groupby(domains)]
    fewest = min(count for _, count in together)
    if fewest < 2 or any(domain is None for domain, _ in together):
        return 0
    return per_node * (1 << (fewest.bit_length() - 1))


def _find_network(cluster: ClusterTopology) -> Speed:
    transport = cluster.inter_node_transport
    link = _LINKS.get(transport, str(transport))
    if cluster.inter_node_bytes_per_second:
        rate, source = cluster.inter_node_bytes_per_second * NETWORK_SHARE, f"NIC rates x {NETWORK_SHARE}"
        if link == "TCP" and rate > TCP_CEILING_BYTES_PER_SECOND:
            rate, source = TCP_CEILING_BYTES_PER_SECOND, "what NCCL's sockets reach, however fast the NICs"
        return Speed(bytes_per_second=rate, how="derived", link=link, why=source)
    offered = [{n.kind for n in node.nics if n.kind in ("hca", "efa")} for node in cluster.nodes]
    common = set.intersection(*offered)
    rates = [sum(n.rate_bytes_per_second or 0.0 for n in node.nics if n.kind in common) for node in cluster.nodes]
    if link != "TCP" and min(rates) > 0:
        kind = "EFA" if "efa" in common else "RDMA"
        return Speed(bytes_per_second=min(rates) * NETWORK_SHARE, how="derived", link=kind,
                     why=f"NIC rates x {NETWORK_SHARE}")  # fmt: skip
    kinds = sorted({"EFA" if kind == "efa" else "RDMA" for each in offered for kind in each})
    if kinds and not common:
        return unknown_network("TCP", f"some nodes have {' and others '.join(kinds)}: all ranks use sockets")
    return unknown_network(link if link != "network" else "TCP")


def make_links(
    cluster: ClusterTopology, measurements: Sequence[Measurement] = (), *, ranks_per_node: int | None = None
) -> Links:
    """Return the bandwidths of a cluster; measured values take precedence over derived, then assumed ones."""
    first = cluster.nodes[0]
    usable = [sum(gpu.usable for gpu in n.gpus) for n in cluster.nodes]
    per_node = min(usable, default=0) or ranks_per_node or 1
    if ranks_per_node and first.gpus and ranks_per_node != per_node:
        raise PlanError(f"ranks_per_node={ranks_per_node}: the cluster's nodes have {per_node} usable GPUs each")
    nodes = len(cluster.nodes)
    inside, across = _find_measured(measurements, across=False), _find_measured(measurements, across=True)
    alpha = _measure_alpha(measurements)
    if not first.gpus:
        node = Speed(bytes_per_second=_CONSTANTS["assumed_gloo"], how="assumed", link="host memory (gloo)")
        size, island = per_node, node
    else:
        different = {id(each.gpus): each for each in cluster.nodes}.values()  # copies of a node share their GPUs
        islands = [(each, *_find_island(each)) for each in different if each.gpus]
        weakest, size, island = min(islands, key=lambda entry: (entry[1], entry[2].bytes_per_second))
        node = _find_node_speed(cluster, weakest, island, size)
    if inside:
        node = Speed(bytes_per_second=inside[0], how="measured", link=node.link, why=inside[1])
        if size >= per_node:
            island = node
    network = None
    # the slowest link determines the backend: without a measurement, the type of gloo or NCCL
    slowest = across or inside
    share = slowest[2] if slowest else 1.0 if first.gpus else _CONSTANTS["gloo_scatter_share"]
    if nodes > 1:
        network = _find_network(cluster)
        if across:
            network = Speed(bytes_per_second=across[0], how="measured", link=network.link, why=across[1])
        size = _count_domain_ranks(cluster, per_node) or size
    alphas = ("alpha_intra", "alpha_inter") if first.gpus else ("gloo_alpha", "gloo_alpha")
    start, across_start = (_CONSTANTS[f"{name}_seconds"] for name in alphas)
    return Links(
        ranks_per_node=per_node, nodes=nodes, island_size=size, island=island, node=node, network=network,
        alpha_intra_seconds=alpha if alpha is not None else start,
        alpha_inter_seconds=max(across_start, alpha or 0.0), scatter_share=share,
        host=_find_host_speed(cluster, find_gpu(first.gpus[0].model if first.gpus else None)),
    )  # fmt: skip
