"""Joins several nodes: the network between them, its bandwidth, and nodes that differ from the others.

Specification: NCCL selects one network for all ranks (NCCL_NET). A flat ring over nodes is limited by the total NIC
rate of the slowest node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import TypeVar

from topology.graph import ClusterTopology, GpuNode, NicNode, NodeTopology, rank
from topology.paths import cluster_expectations, with_expectations
from topology.plan import Plan, gigabytes, node_plan, rail_plan, usable_rate

T = TypeVar("T")
_OF_GPU = attrgetter(*(field.name for field in fields(GpuNode) if field.name != "uuid"))
_TRANSPORTS = (("efa", "efa"), ("hca", "rdma"), ("rxe", "rdma"), ("siw", "rdma"), ("ethernet", "tcp"))


def join(nodes: tuple[NodeTopology, ...] | list[NodeTopology]) -> ClusterTopology:
    """Join nodes into a cluster with expectations for each node. A single node has no inter-node transport."""
    models = _map_trait(_map_models(nodes), with_expectations)
    nodes = tuple(
        node if node.expectations is model.expectations else replace(node, expectations=model.expectations)
        for node, model in zip(nodes, models, strict=True)
    )
    if len(nodes) < 2:
        return ClusterTopology(nodes=nodes)
    warnings = list(_list_asymmetries(nodes, models))
    transport = _choose_transport(nodes, models, warnings)
    value, steps = _plan_between(nodes, models, transport)
    if value is None:
        warnings.append(steps[-1])
    plan = _plan_cluster(nodes, models, value, steps)
    return ClusterTopology(
        nodes=nodes,
        inter_node_bytes_per_second=value,
        inter_node_transport=transport,
        expectations=cluster_expectations(plan, nodes, models),
        warnings=tuple(warnings),
    )


def _list_kinds(node: NodeTopology) -> list[str]:
    kinds = {nic.kind for nic in node.nics if nic.active is not False}
    return [transport for kind, transport in _TRANSPORTS if kind in kinds]


def _choose_transport(nodes: Sequence[NodeTopology], models: Sequence[NodeTopology], warnings: list[str]) -> str | None:
    """Return the best network that every node has."""
    distinct = {id(model): model for model in models}.values()
    domains = {gpu.nvlink_domain for model in distinct for gpu in model.gpus}
    if len(domains) == 1 and None not in domains and all(model.gpus for model in distinct):
        return "nvlink"
    offers = _map_trait(models, _list_kinds)
    common = [kind for kind in offers[0] if all(kind in other for other in offers)]
    best = {offer[0] for offer in offers if offer}
    if len(best) > 1 or not all(offers):
        names = ", ".join(
            f"{node.hostname}: {offer[0] if offer else 'no active NIC'}"
            for node, offer in list(zip(nodes, offers, strict=True))[:8]
        )
        warnings.append(f"the nodes do not offer the same network ({names})")
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


def _plan_between(nodes: Sequence[NodeTopology], models: Sequence[NodeTopology], transport: str | None) -> Plan:
    if transport == "nvlink":
        plans = _map_trait(models, lambda node: node_plan(node)[0])
        values = [value for value in plans if value is not None]
        if len(values) < len(nodes):
            return None, ("the nodes share an NVLink domain, but the speed of its links is not known",)
        return min(values), (f"one NVLink domain holds every GPU: {gigabytes(min(values))} per GPU",)
    if transport is None:
        return None, ("no network that every node has is known: bandwidth between nodes is unknown",)
    sums: dict[str, float] = {}
    for node, rate in zip(nodes, _map_trait(models, lambda node: _compute_node_rate(node, transport)), strict=True):
        if rate is None:
            return None, (f"{node.hostname}: the rate of its {transport} NICs is not known",)
        sums[node.hostname] = rate
    weakest = min(sums, key=lambda name: sums[name])
    return sums[weakest], (
        f"{weakest} has the weakest network: its active {transport} NICs, nearest to GPUs where that is known, "
        f"each bounded by its PCIe slot: together {gigabytes(sums[weakest])} each way",
    )


def _compute_node_rate(node: NodeTopology, transport: str) -> float | None:
    """Return a node's total NIC rate. With one rail per GPU: rate of the slowest rail times the number of rails."""
    nics = _list_nics(node, transport)
    plans = [rail_plan(node, rail)[0] for rail in node.rails] if not node.lacking else []
    if plans and {nic.name for nic in nics} == {name for rail in node.rails for name in rail.nics}:
        known_plans = [plan for plan in plans if plan]
        return len(plans) * min(known_plans) if len(known_plans) == len(plans) else None
    rates = [usable_rate(nic, node.gpus) for nic in nics]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None


def _plan_cluster(
    nodes: Sequence[NodeTopology], models: Sequence[NodeTopology], between: float | None, steps: tuple[str, ...]
) -> Plan:
    """Return the plan for a flat ring over all GPUs: the minimum of the rates inside a node and between nodes."""
    if between is None:
        return None, steps
    plans = _map_trait(models, lambda node: node_plan(node)[0])
    inside = [(node.hostname, value) for node, value in zip(nodes, plans, strict=True) if len(node.gpus) > 1]
    unknown = [name for name, value in inside if value is None]
    if unknown:
        return None, (*steps, f"no plan: what the GPUs of {unknown[0]} carry among themselves is not known")
    known = [(value, name) for name, value in inside if value is not None]
    if not known:
        return between, steps
    value, name = min(known)
    return min(between, value), (
        *steps,
        f"inside a node at least {gigabytes(value)} ({name})",
        f"a flat ring is bounded by the smaller: {gigabytes(min(between, value))}",
    )


def _list_asymmetries(nodes: Sequence[NodeTopology], models: Sequence[NodeTopology]) -> list[str]:
    """Describe every trait in which a node differs from most others."""
    found = []
    for what, trait in _TRAITS:
        values = _map_trait(models, trait)
        common, count = Counter(values).most_common(1)[0]
        if count == len(nodes):
            continue
        odd = [(node.hostname, value) for node, value in zip(nodes, values, strict=True) if value != common]
        listed = ", ".join(f"{name} has {value}" for name, value in odd[:6])
        more = f" and {len(odd) - 6} more nodes" if len(odd) > 6 else ""
        found.append(f"{what} differ: {listed}{more}; {count} of {len(nodes)} nodes have {common}")
    names = Counter(node.hostname for node in nodes)
    found += [f"{count} nodes are called {name}" for name, count in names.items() if count > 1]
    return found


def _map_models(nodes: Sequence[NodeTopology]) -> list[NodeTopology]:
    """Map each node to the first node with the same hardware, so that results are computed once per hardware model."""
    by_id: dict[tuple[int, ...], NodeTopology] = {}  # the nodes keep these objects alive, so their ids stay valid
    by_content: dict[Hashable, NodeTopology] = {}
    models = []
    for node in nodes:
        parts = (node.gpus, node.pairs, node.nics, node.nearest_nic, node.islands, node.rails, node.nvlink_known)
        known = tuple(map(id, parts))
        model = by_id.get(known)
        if model is None:
            # UUIDs always differ and do not matter here
            model = by_id[known] = by_content.setdefault((tuple(map(_OF_GPU, node.gpus)), *parts[1:]), node)
        models.append(model)
    return models


def _map_trait(models: Sequence[NodeTopology], trait: Callable[[NodeTopology], T]) -> list[T]:
    """Return `trait` of every node, computed once per hardware model."""
    known = {id(model): model for model in models}
    values = {number: trait(model) for number, model in known.items()}
    return [values[id(model)] for model in models]


def _format_spread(values: list[str]) -> str:
    return " + ".join(f"{count} x {value}" for value, count in sorted(Counter(values).items())) or "none"


def _format_classes(labels: list[str], of: str) -> str:
    """Return path classes, nearest first, with the number of pairs: "PIX for 2 pairs, SYS for 4 pairs"."""
    counted = sorted(Counter(labels).items(), key=lambda each: (rank(each[0]), each[0]))
    return ", ".join(f"{label} for {count} {of}{'' if count == 1 else 's'}" for label, count in counted) or "none"


_TRAITS: tuple[tuple[str, Callable[[NodeTopology], str]], ...] = (
    ("GPUs", lambda node: _format_spread([gpu.model or "GPU" for gpu in node.gpus])),
    ("usable GPUs", lambda node: str(sum(gpu.usable for gpu in node.gpus))),
    ("GPU links", lambda node: _format_classes([pair.label for pair in node.gpu_pairs()], "pair")),
    ("active NICs", lambda node: _format_spread([nic.kind for nic in node.nics if nic.active is not False])),
    (
        "NIC rates",
        lambda node: _format_spread([gigabytes(usable_rate(n, node.gpus)) for n in node.nics if n.active is not False]),
    ),
    ("link layers", lambda node: _format_spread(sorted({nic.link_layer or "unknown" for nic in node.nics}))),
    ("nearest NIC classes", lambda node: _format_classes([near.label for near in node.nearest_nic], "GPU")),
)
