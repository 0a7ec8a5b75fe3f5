"""A topology in the forms people want it: JSON document, SVG, matrix text."""

from __future__ import annotations

from collections import Counter
from typing import Any

from topology.formats.matrix import columns
from topology.formats.matrix import render as matrix
from topology.graph import ClusterTopology, Expectation, NearestNic, NodeTopology, Pair
from topology.reference import candidates, departures
from topology.svg import COLOURS, svg

__all__ = ["COLOURS", "cluster_document", "json_document", "matrix", "svg"]

Json = dict[str, Any]


def json_document(node: NodeTopology) -> Json:
    """The node as plain JSON values. Names are stable: a frozen surface for scripts."""
    labels = columns(node)
    return {
        "schema_version": node.schema_version,
        "hostname": node.hostname,
        "source": node.source,
        "sku": node.sku,
        "sku_candidates": list(candidates(node)),
        "product": node.product,
        "nvlink_known": node.nvlink_known,
        "virtual": node.virtual,
        "cpu_count": node.cpu_count,
        "numa_nodes": node.numa_nodes,
        "gpus": [
            {
                "name": gpu.name,
                "index": gpu.index,
                "bus_id": gpu.bus_id,
                "uuid": gpu.uuid,
                "model": gpu.model,
                "memory_bytes": gpu.memory_bytes,
                "compute_capability": list(gpu.compute_capability) if gpu.compute_capability else None,
                "numa_node": gpu.numa_node,
                "cpu_affinity": gpu.cpu_affinity,
                "numa_affinity": gpu.numa_affinity,
                "gpu_numa_id": gpu.gpu_numa_id,
                "nvlink_domain": gpu.nvlink_domain,
                "c2c": gpu.c2c,
                "pcie_link": gpu.pcie_link,
                "usable": gpu.usable,
            }
            for gpu in node.gpus
        ],
        "nics": [
            {
                "name": nic.name,
                "label": labels[nic.name],
                "kind": nic.kind,
                "bus_id": nic.bus_id,
                "netdev": nic.netdev,
                "nets": list(nic.nets) or [nic.name],
                "numa_node": nic.numa_node,
                "rate_bytes_per_second": nic.rate_bytes_per_second,
                "pcie_bytes_per_second": nic.pcie_bytes_per_second,
                "pcie_link": nic.pcie_link,
                "link_layer": nic.link_layer,
                "active": nic.active,
                "ports": nic.ports,
            }
            for nic in node.nics
        ],
        "pairs_by_class": _by_class(node),
        "pairs": [_pair(pair) for pair in node.pairs],
        "islands": [
            {
                "gpus": list(island.gpus),
                "all_to_all": island.all_to_all,
                "nvlinks_per_pair": list(island.nvlinks_per_pair),
            }
            for island in node.islands
        ],
        "nearest_nic": {near.gpu: _nearest(near, node, labels) for near in node.nearest_nic} or None,
        "rails": [{"rail": rail.rail, "nics": list(rail.nics), "gpus": list(rail.gpus)} for rail in node.rails],
        "expectations": [_expectation(expectation) for expectation in node.expectations],
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


def _pair(pair: Pair) -> Json:
    return {
        "a": pair.a,
        "b": pair.b,
        "label": pair.label,
        "class": pair.path.name if pair.path is not None else None,
        "nvlinks": pair.nvlinks,
        "bytes_per_second": pair.bytes_per_second,
        "evidence": pair.evidence,
    }


def _nearest(near: NearestNic, node: NodeTopology, labels: dict[str, str]) -> Json:
    gpu = next(gpu for gpu in node.gpus if gpu.name == near.gpu)
    return {
        "label": near.label,
        "class": near.path.name if near.path is not None else None,
        "nics": [labels[name] for name in near.nics],
        "names": list(near.nics),
        "local": near.local,
        "decidable": near.decidable,
        "why": near.why,
        "gpu_bus_id": gpu.bus_id,
        "nic_bus_ids": [nic.bus_id for nic in node.nics if nic.name in near.nics],
    }


def _expectation(expectation: Expectation) -> Json:
    return {
        "scope": expectation.scope,
        "op": expectation.op,
        "busbw_bytes_per_second": expectation.busbw_bytes_per_second,
        "least_bytes_per_second": expectation.least_bytes_per_second,
        "usual_bytes_per_second": expectation.usual_bytes_per_second,
        "most_bytes_per_second": expectation.most_bytes_per_second,
        "members": list(expectation.members),
        "derivation": list(expectation.derivation),
    }


def cluster_document(cluster: ClusterTopology) -> Json:
    """The cluster as plain JSON values, its nodes included."""
    return {
        "schema_version": cluster.schema_version,
        "world_size": cluster.world_size,
        "inter_node_bytes_per_second": cluster.inter_node_bytes_per_second,
        "inter_node_transport": cluster.inter_node_transport,
        "expectations": [_expectation(expectation) for expectation in cluster.expectations],
        "warnings": list(cluster.warnings),
        "nodes": [json_document(node) for node in cluster.nodes],
    }
