"""From devices and pairs to a whole `NodeTopology`: the derivations in their order, whatever the source was."""

from __future__ import annotations

from dataclasses import replace

from topology.derive import islands, looks_virtual, nearest_nic, rails, through_neighbours
from topology.expect import node_expectations
from topology.graph import NodeTopology


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
    return replace(derived, expectations=node_expectations(derived))
