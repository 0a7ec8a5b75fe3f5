"""How the devices of a node are linked, in rows of a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agent.base import units
from topology.graph import NodeTopology


def links(topology: NodeTopology) -> Iterator[tuple[str, str]]:
    """GPUs among themselves, to their nearest NICs, and what that should carry."""
    gpus = {gpu.name for gpu in topology.gpus}
    labels = Counter(pair.label for pair in topology.pairs if {pair.a, pair.b} <= gpus)
    if labels:
        yield "links", ", ".join(f"{label} ({units.count(n, 'pair')})" for label, n in labels.most_common())
    near = Counter(nearest.label for nearest in topology.nearest_nic if nearest.nics)
    if near:
        yield "nearest", ", ".join(f"{label} for {units.count(n, 'GPU')}" for label, n in near.most_common())
    for expected in topology.expectations:
        if expected.op == "all_gather" and expected.scope == "node":
            yield "expected", f"all_gather {units.expected_rate(expected)} bus bandwidth"
