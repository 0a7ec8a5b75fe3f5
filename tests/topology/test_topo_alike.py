"""Nodes made alike are looked at once: the cluster is the same as if each had been looked at."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topo_machines import topology

from topology.cluster import join
from topology.graph import ClusterTopology, NodeTopology

MACHINES = ("hgx-h100-8xH100-8hca", "aws-p4d-8xA100-4efa", "gb200-nvl72-tray", "cpu-only-vm", "sick-h100-dead-hca")


class Own(tuple[Any, ...]):
    """Parts that equal no other node's: what holds them is grouped with nothing."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def changed(node: NodeTopology, how: str) -> NodeTopology:
    """One of the ways in which a node of a fleet differs from its neighbours."""
    gpus, nics = node.gpus, node.nics
    if how == "copied":
        return copy.deepcopy(node)
    if how == "lost GPU" and gpus:
        return replace(node, gpus=(replace(gpus[0], usable=False), *gpus[1:]))
    if how == "own UUIDs":
        return replace(node, gpus=tuple(replace(gpu, uuid=f"GPU-{id(node)}-{gpu.index}") for gpu in gpus))
    if how == "slow NIC" and nics and nics[0].rate_bytes_per_second:
        return replace(
            node, nics=(replace(nics[0], rate_bytes_per_second=nics[0].rate_bytes_per_second / 2), *nics[1:])
        )
    if how == "unknown rate" and nics:
        return replace(node, nics=(replace(nics[-1], rate_bytes_per_second=None), *nics[1:]))
    if how == "dead NICs":
        return replace(node, nics=tuple(replace(nic, active=False) for nic in nics))
    if how == "no NVLink":
        return replace(node, islands=(), pairs=tuple(replace(pair, nvlinks=0, label="SYS") for pair in node.pairs))
    if how == "no rails":
        return replace(node, rails=())
    if how == "NVLink unknown":
        return replace(node, nvlink_known=False)
    return node


WAYS = ("same", "same", "copied", "own UUIDs", "lost GPU", "slow NIC", "unknown rate", "dead NICs", "no NVLink",
        "no rails", "NVLink unknown")  # fmt: skip


def essence(cluster: ClusterTopology) -> ClusterTopology:
    return replace(cluster, nodes=())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MACHINES[:2]), st.sampled_from(WAYS), st.integers(0, 7)), max_size=9))
@pytest.mark.parametrize("more", MACHINES)
def test_the_cluster_is_the_same_as_looked_at_node_by_node(more: str, drawn: list[tuple[str, str, int]]) -> None:
    """Bandwidth and transport, whatever the nodes are and in whichever order."""
    rows = [*drawn, (more, "same", 0), (more, "own UUIDs", 1)]
    nodes = [replace(changed(topology(name), how), hostname=f"n{number}") for name, how, number in rows]
    alone = [replace(node, pairs=Own(node.pairs)) for node in nodes]
    assert essence(join(nodes)) == essence(join(alone))


def test_the_copies_of_a_fleet_are_one_model() -> None:
    """What is worked out does not grow with the number of alike nodes: their NICs are read once."""
    read = []

    class Counted(tuple[Any, ...]):
        __slots__ = ()

        def __iter__(self) -> Any:
            read.append(1)
            return super().__iter__()

    node = topology("hgx-h100-8xH100-8hca")

    def looks(count: int) -> int:
        read.clear()
        join([replace(copy.deepcopy(node), hostname=f"n{n}", nics=Counted(node.nics)) for n in range(count)])
        return len(read)

    assert looks(50) == looks(3)
