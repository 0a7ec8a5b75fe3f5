"""Several nodes joined: what carries data between them, how much, and which node differs from the others.

Specification: NCCL picks one network for all ranks (NCCL_NET); a flat ring over nodes is bounded by the NICs of the
weakest node together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from topology.expect import for_cluster, gigabytes, node_plan, usable_rate
from topology.graph import ClusterTopology, NicNode, NodeTopology

T = TypeVar("T")
_TRANSPORTS = (("efa", "efa"), ("hca", "rdma"), ("rxe", "rdma"), ("siw", "rdma"), ("ethernet", "tcp"))


def join(nodes: tuple[NodeTopology, ...] | list[NodeTopology]) -> ClusterTopology:
    """The cluster of these nodes. A single node has no inter-node transport."""
    nodes = tuple(nodes)
    if len(nodes) < 2:
        return ClusterTopology(nodes=nodes)
    warnings = list(_asymmetries(nodes))
    transport = _transport(nodes, warnings)
    value, steps = _between(nodes, transport)
    if value is None:
        warnings.append(steps[-1])
    plan, plan_steps = _cluster_plan(nodes, value, steps)
    return ClusterTopology(
        nodes=nodes,
        inter_node_bytes_per_second=value,
        inter_node_transport=transport,
        expectations=for_cluster(plan, plan_steps, nodes),
        warnings=tuple(warnings),
    )


def _kinds(node: NodeTopology) -> list[str]:
    kinds = {nic.kind for nic in node.nics if nic.active is not False}
    return [transport for kind, transport in _TRANSPORTS if kind in kinds]


def _transport(nodes: tuple[NodeTopology, ...], warnings: list[str]) -> str | None:
    """The best network that every node has."""
    domains = {gpu.nvlink_domain for node in nodes for gpu in node.gpus}
    if len(domains) == 1 and None not in domains and all(node.gpus for node in nodes):
        return "nvlink"
    offers = [_kinds(node) for node in nodes]
    common = [kind for kind in offers[0] if all(kind in other for other in offers)]
    best = {offer[0] for offer in offers if offer}
    if len(best) > 1 or not all(offers):
        names = ", ".join(
            f"{node.hostname}: {offer[0] if offer else 'no active NIC'}"
            for node, offer in list(zip(nodes, offers, strict=True))[:8]
        )
        warnings.append(f"the nodes do not offer the same network ({names})")
    if not common and all(offers):
        return "tcp"  # RDMA devices of different kinds: their interfaces still speak IP
    return common[0] if common else None


def _nics_of(node: NodeTopology, transport: str | None) -> tuple[NicNode, ...]:
    """NICs of the transport that GPUs are nearest to; all of it where that cannot be told (storage NICs included)."""
    kinds = {kind for kind, name in _TRANSPORTS if name == transport}
    offered = tuple(nic for nic in node.nics if nic.kind in kinds)
    rails = {name for rail in node.rails for name in rail.nics}
    near = rails or {name for nearest in node.nearest_nic if nearest.decidable for name in nearest.nics}
    return tuple(nic for nic in offered if nic.name in near) or offered


def _between(nodes: tuple[NodeTopology, ...], transport: str | None) -> tuple[float | None, tuple[str, ...]]:
    if transport == "nvlink":
        plans = [node_plan(node) for node in nodes]
        values = [value for value, _ in plans if value is not None]
        if len(values) < len(nodes):
            return None, ("the nodes share an NVLink domain, but the speed of its links is not known",)
        return min(values), (f"one NVLink domain holds every GPU: {gigabytes(min(values))} per GPU",)
    if transport is None:
        return None, ("no network that every node has is known: bandwidth between nodes is unknown",)
    sums: dict[str, float] = {}
    for node in nodes:
        rates = [usable_rate(nic) for nic in _nics_of(node, transport)]
        if not rates or None in rates:
            return None, (f"{node.hostname}: the rate of its {transport} NICs is not known",)
        sums[node.hostname] = sum(rate for rate in rates if rate is not None)
    weakest = min(sums, key=lambda name: sums[name])
    return sums[weakest], (
        f"{weakest} has the weakest network: its active {transport} NICs, nearest to GPUs where that is known, "
        f"each bounded by its PCIe slot: together {gigabytes(sums[weakest])} each way",
    )


def _cluster_plan(
    nodes: tuple[NodeTopology, ...], between: float | None, steps: tuple[str, ...]
) -> tuple[float | None, tuple[str, ...]]:
    """A flat ring over all GPUs: the weaker of what is inside a node and what is between nodes."""
    if between is None:
        return None, steps
    several = [node for node in nodes if len(node.gpus) > 1]
    plans = _each(several, lambda node: node_plan(node)[0])
    inside = [(node.hostname, value) for node, value in zip(several, plans, strict=True)]
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


def _asymmetries(nodes: tuple[NodeTopology, ...]) -> list[str]:
    """Every trait in which a node differs from most of the others."""
    found = []
    for what, trait in _TRAITS:
        values = _each(nodes, trait)
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


def _each(nodes: Sequence[NodeTopology], trait: Callable[[NodeTopology], T]) -> list[T]:
    """`trait` of every node, worked out once for nodes made of the same parts: thousands are a handful of graphs."""
    known: dict[tuple[int, ...], T] = {}
    values = []
    for node in nodes:  # which keeps the parts alive, so that an id stays theirs
        parts = (id(node.gpus), id(node.pairs), id(node.nics), id(node.nearest_nic), id(node.islands),
                 node.nvlink_known)  # fmt: skip
        if parts not in known:
            known[parts] = trait(node)
        values.append(known[parts])
    return values


def _spread(values: list[str]) -> str:
    return " + ".join(f"{count} x {value}" for value, count in sorted(Counter(values).items())) or "none"


_TRAITS: tuple[tuple[str, Callable[[NodeTopology], str]], ...] = (
    ("GPUs", lambda node: _spread([gpu.model or "GPU" for gpu in node.gpus])),
    ("usable GPUs", lambda node: str(sum(gpu.usable for gpu in node.gpus))),
    ("GPU links", lambda node: _spread([pair.label for pair in node.pairs if _gpu_pair(node, pair.a, pair.b)])),
    ("active NICs", lambda node: _spread([nic.kind for nic in node.nics if nic.active is not False])),
    ("NIC rates", lambda node: _spread([gigabytes(usable_rate(nic)) for nic in node.nics if nic.active is not False])),
    ("link layers", lambda node: _spread(sorted({nic.link_layer or "unknown" for nic in node.nics}))),
    ("nearest NIC classes", lambda node: _spread([near.label for near in node.nearest_nic])),
)


def _gpu_pair(node: NodeTopology, a: str, b: str) -> bool:
    names = {gpu.name for gpu in node.gpus}
    return a in names and b in names
