"""The topologies of the recorded machines, each built once per process."""

from __future__ import annotations

from functools import cache

from rigs.recorded import NAMES, snapshot

from topology.build import build
from topology.graph import NodeTopology

__all__ = ["NAMES", "snapshot", "topology"]


@cache
def topology(name: str) -> NodeTopology:
    """One recording's topology."""
    return build(snapshot(name))
