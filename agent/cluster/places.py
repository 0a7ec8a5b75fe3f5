"""In which rack, or behind which switch, each node stands: by the labels of the Nodes.

There is no one label for it. Known are those of NVIDIA Topograph (network.topology.nvidia.com/leaf, and
fabric.topograph.run/tier-0 since 1.0), EKS (topology.k8s.aws/network-node-layer-3, the layer next to an instance),
GKE (cloud.google.com/gce-topology-subblock) and the GPU feature discovery (nvidia.com/gpu.clique, an NVLink domain);
of a site's own labels those whose name ends with rack, leaf or switch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.cluster.client import METADATA, ApiError, Client, path_of
from agent.cluster.node_facts import clean

LABELS = tuple(map(re.compile, (
    r"(?:.*[./-])?rack", r"(?:.*[./-])?(?:leaf|switch)", r"fabric\.topograph\.run/tier-0",
    r"topology\.k8s\.aws/network-node-layer-3", r"cloud\.google\.com/gce-topology-subblock",
    r"(?:.*[./-])?block", r"nvidia\.com/gpu\.clique",
)))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where nodes stand: `of` holds (node, value) by the label; without one, `why`."""

    label: str = ""
    of: tuple[tuple[str, str], ...] = ()
    why: str = "no label of the Nodes names a rack or a switch"


def chosen(labels: Mapping[str, Mapping[str, str]]) -> Places:
    """By the first of LABELS that any node has; of several keys the one that most nodes have."""
    counts = Counter(key for mine in labels.values() for key in mine)
    for pattern in LABELS:
        keys = [key for key, _ in counts.most_common() if pattern.fullmatch(key)]
        if keys:
            found = ((name, clean(mine[keys[0]], 63)) for name, mine in labels.items() if mine.get(keys[0]))
            return Places(label=clean(keys[0], 317), of=tuple(sorted(found)), why="")
    return Places()


def read(client: Client) -> Places:
    """From the API server; without the right to list Nodes there is none, and why."""
    try:
        return chosen(dict(_labels(client)))
    except ApiError as error:
        return Places(why=f"the labels of the Nodes could not be read: HTTP {error.status}")


def _labels(client: Client) -> Iterable[tuple[str, Mapping[str, str]]]:
    for items, _ in client.pages(path_of("v1", "nodes"), accept=METADATA):
        for item in items:
            yield str(item["metadata"]["name"]), item["metadata"].get("labels") or {}
