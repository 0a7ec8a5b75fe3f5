"""A topology, and a cluster of them, as a JSON document."""

from __future__ import annotations

from collections import Counter
from typing import Any

from topology.formats.matrix import columns
from topology.graph import ClusterTopology, NearestNic, NodeTopology
from topology.reference import candidates, departures

Json = dict[str, Any]


_NODE_FACTS = ("product", "nvlink_known", "virtual", "cpu_count", "numa_nodes")
_GPU = (
    "name", "index", "bus_id", "uuid", "model", "memory_bytes", "compute_capability", "numa_node", "cpu_affinity",
    "numa_affinity", "gpu_numa_id", "nvlink_domain", "c2c", "pcie_link", "usable",
)  # fmt: skip
_NIC = (
    "numa_node", "rate_bytes_per_second", "pcie_bytes_per_second", "pcie_link", "link_layer", "active", "ports",
)  # fmt: skip
_EXPECTATION = (
    "scope", "op", "busbw_bytes_per_second", "least_bytes_per_second", "usual_bytes_per_second",
    "most_bytes_per_second", "members", "derivation",
)  # fmt: skip


def _values(item: object, *names: str) -> Json:
    """These fields as plain JSON values."""
    values = {name: getattr(item, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def json_document(node: NodeTopology) -> Json:
    """The node as plain JSON values. Names are stable: a frozen surface for scripts."""
    labels = columns(node)
    return {
        **_values(node, "schema_version", "hostname", "source", "sku"),
        "sku_candidates": list(candidates(node)),
        **_values(node, *_NODE_FACTS),
        "gpus": [_values(gpu, *_GPU) for gpu in node.gpus],
        "nics": [
            {
                "name": nic.name,
                "label": labels[nic.name],
                **_values(nic, "kind", "bus_id", "netdev"),
                "nets": list(nic.nets) or [nic.name],
                **_values(nic, *_NIC),
            }
            for nic in node.nics
        ],
        "pairs_by_class": _by_class(node),
        "pairs": [
            {
                **_values(pair, "a", "b", "label"),
                "class": pair.path.name if pair.path is not None else None,
                **_values(pair, "nvlinks", "bytes_per_second", "evidence"),
            }
            for pair in node.pairs
        ],
        "islands": [_values(island, "gpus", "all_to_all", "nvlinks_per_pair") for island in node.islands],
        "nearest_nic": {near.gpu: _nearest(near, node, labels) for near in node.nearest_nic} or None,
        "rails": [_values(rail, "rail", "nics", "gpus") for rail in node.rails],
        "expectations": [_values(expectation, *_EXPECTATION) for expectation in node.expectations],
        "departures_from_reference": list(departures(node)),
        "warnings": list(node.warnings),
    }


def _by_class(node: NodeTopology) -> dict[str, dict[str, int]]:
    """Pairs counted by nvidia-smi's label, apart for GPU-GPU, GPU-NIC and NIC-NIC."""
    gpus = {gpu.name for gpu in node.gpus}
    counts: dict[str, Counter[str]] = {"gpu_gpu": Counter(), "gpu_nic": Counter(), "nic_nic": Counter()}
    for pair in node.pairs:
        kind = ("nic_nic", "gpu_nic", "gpu_gpu")[(pair.a in gpus) + (pair.b in gpus)]
        counts[kind][pair.label] += 1
    return {kind: dict(counter) for kind, counter in counts.items()}


def _nearest(near: NearestNic, node: NodeTopology, labels: dict[str, str]) -> Json:
    return {
        "label": near.label,
        "class": near.path.name if near.path is not None else None,
        "nics": [labels[name] for name in near.nics],
        "names": list(near.nics),
        **_values(near, "local", "decidable", "why"),
        "gpu_bus_id": next(gpu.bus_id for gpu in node.gpus if gpu.name == near.gpu),
        "nic_bus_ids": [nic.bus_id for nic in node.nics if nic.name in near.nics],
    }


def cluster_document(cluster: ClusterTopology) -> Json:
    """The cluster as plain JSON values, its nodes included."""
    return {
        **_values(cluster, "schema_version", "world_size", "inter_node_bytes_per_second", "inter_node_transport"),
        "expectations": [_values(expectation, *_EXPECTATION) for expectation in cluster.expectations],
        "warnings": list(cluster.warnings),
        "nodes": [json_document(node) for node in cluster.nodes],
    }
