"""Joins several nodes: the network between them, and its bandwidth.

Specification: NCCL selects one network for all ranks (NCCL_NET). A flat ring over nodes is limited by the total NIC
rate of the slowest node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from topology.graph import ClusterTopology, NicNode, NodeTopology
from topology.paths import plan_node, plan_rail, usable_rate, with_expectations

_TRANSPORTS = (("efa", "efa"), ("hca", "rdma"), ("rxe", "rdma"), ("siw", "rdma"), ("ethernet", "tcp"))


def join(nodes: tuple[NodeTopology, ...] | list[NodeTopology]) -> ClusterTopology:
    """Join nodes into a cluster with expectations for each node. A single node has no inter-node transport."""
    planned: dict[tuple[int, ...], NodeTopology] = {}  # by the parts that the copies of one node share
    joined = []
    for node in nodes:
        parts = (node.gpus, node.pairs, node.nics, node.nearest_nic, node.islands, node.rails, node.nvlink_known)
        key = tuple(map(id, parts))
        if key not in planned:
            planned[key] = with_expectations(node)
        joined.append(replace(node, expectations=planned[key].expectations))
    if len(nodes) < 2:
        return ClusterTopology(nodes=tuple(joined))
    different = list(planned.values())
    transport = _choose_transport(different)
    rate = _find_rate_between(different, transport)
    return ClusterTopology(nodes=tuple(joined), inter_node_bytes_per_second=rate, inter_node_transport=transport)


def _choose_transport(models: Sequence[NodeTopology]) -> str | None:
    """Return the best network that every node has."""
    domains = {gpu.nvlink_domain for model in models for gpu in model.gpus}
    if len(domains) == 1 and None not in domains and all(model.gpus for model in models):
        return "nvlink"
    kinds = [{nic.kind for nic in model.nics if nic.active is not False} for model in models]
    offers = [[transport for kind, transport in _TRANSPORTS if kind in present] for present in kinds]
    common = [kind for kind in offers[0] if all(kind in other for other in offers)]
    if not common and all(offers):
        return "tcp"  # RDMA devices of different kinds; their interfaces support IP
    return common[0] if common else None


def _list_nics(node: NodeTopology, transport: str | None) -> tuple[NicNode, ...]:
    """Return the transport's NICs that are nearest to GPUs; if distances are unknown, all (also for storage)."""
    kinds = {kind for kind, name in _TRANSPORTS if name == transport}
    offered = tuple(nic for nic in node.nics if nic.kind in kinds)
    rails = {name for rail in node.rails for name in rail.nics}
    near = rails or {name for nearest in node.nearest_nic if nearest.decidable for name in nearest.nics}
    return tuple(nic for nic in offered if nic.name in near) or offered


def _find_rate_between(models: Sequence[NodeTopology], transport: str | None) -> float | None:
    """Return the rate of the node with the weakest network; None if that of a node is not known."""
    if transport is None:
        return None
    by_nvlink = transport == "nvlink"
    rates = [plan_node(node)[0] if by_nvlink else _compute_node_rate(node, transport) for node in models]
    known_rates = [rate for rate in rates if rate is not None]
    return min(known_rates) if len(known_rates) == len(rates) else None


def _compute_node_rate(node: NodeTopology, transport: str) -> float | None:
    """Return a node's total NIC rate. With one rail per GPU: rate of the slowest rail times the number of rails."""
    nics = _list_nics(node, transport)
    plans = [plan_rail(node, rail)[0] for rail in node.rails] if not node.lacking else []
    if plans and {nic.name for nic in nics} == {name for rail in node.rails for name in rail.nics}:
        known_plans = [plan for plan in plans if plan]
        return len(plans) * min(known_plans) if len(known_plans) == len(plans) else None
    rates = [usable_rate(nic, node.gpus) for nic in nics]
    known_rates = [rate for rate in rates if rate is not None]
    return sum(known_rates) if known_rates and len(known_rates) == len(rates) else None
