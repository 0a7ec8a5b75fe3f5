"""From devices and pairs to a whole `NodeTopology`: the derivations in their order, whatever the source was."""

from __future__ import annotations

from dataclasses import replace

from topology.derive import islands, looks_virtual, nearest_nic, rails, through_neighbours
from topology.expect import node_expectations
from topology.graph import NodeTopology
from topology.reach_paths import with_reach


def complete(node: NodeTopology) -> NodeTopology:
    """The node with islands, nearest NICs, rails and expectations derived from its pairs.

    A reason in `virtual` is kept; without one, the pairs themselves may show that a hypervisor hides the tree.
    """
    # NCCL XML says PHB for NODE too: there, PHB everywhere is what one real socket looks like.
    drawn = node.source == "NCCL XML"
    virtual = node.virtual or (None if drawn else looks_virtual(node.gpus, node.nics, node.pairs))
    nearest = nearest_nic(node.gpus, node.nics, node.pairs, virtual)
    warnings = node.warnings
    if virtual and virtual not in warnings:
        warnings = (*warnings, virtual)
    derived = replace(
        node,
        pairs=through_neighbours(node.gpus, node.pairs),
        virtual=virtual,
        islands=islands(node.gpus, node.pairs),
        nearest_nic=nearest,
        rails=rails(nearest),
        warnings=warnings,
    )
    return with_reach(replace(derived, expectations=node_expectations(derived)))


def with_gpus(node: NodeTopology, count: int) -> NodeTopology:
    """The node as a job sees it that uses its first `count` usable GPUs only: the others' paths and rails are left out.

    Raises ValueError where the node has fewer.
    """
    usable = tuple(gpu for gpu in node.gpus if gpu.usable)
    if not 1 <= count <= len(usable):
        raise ValueError(
            f"ranks per node = {count}: must be from 1 to {len(usable)}, the usable GPUs of {node.hostname}; NCCL "
            "takes one rank per GPU"
        )
    if count == len(node.gpus):
        return node
    kept = usable[:count]
    dropped = {gpu.name for gpu in node.gpus} - {gpu.name for gpu in kept}
    pairs = tuple(pair for pair in node.pairs if pair.a not in dropped and pair.b not in dropped)
    nearest = tuple(near for near in node.nearest_nic if near.gpu not in dropped)
    part = replace(
        node, gpus=kept, pairs=pairs, islands=islands(kept, pairs), nearest_nic=nearest, rails=rails(nearest)
    )
    return with_reach(replace(part, expectations=node_expectations(part) if node.expectations else ()))
