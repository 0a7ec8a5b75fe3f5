"""Records as agents wrote them before `status.machine`: graph and facts as JSON, zlib, base64. Read, never written.

An agent of this release replaces its own node's with its first write; those of older agents stand beside the new ones
while a DaemonSet is rolled over.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

from contracts.plain import loads as plain
from probes.api import Snapshot
from probes.wire import SnapshotError
from probes.wire import from_json as snapshot_from_json
from topology.graph import NodeTopology
from topology.wire import TopologyWireError, node_from_json

MOST_BYTES = 1 << 20  # unpacked; 64 KiB packed hold ten times what the largest machine needs


def graph(text: str) -> NodeTopology:
    """The graph without host name and UUIDs. Raises ValueError where the text is none, or unpacks to too much."""
    try:
        return node_from_json(_inflated(text))
    except (zlib.error, TypeError, TopologyWireError) as error:
        raise ValueError(f"no graph: {error}") from None


def facts(text: str) -> Snapshot:
    """The facts without host name, addresses numbered. Raises ValueError as `graph` does."""
    try:
        return snapshot_from_json(_inflated(text))
    except (zlib.error, TypeError, SnapshotError) as error:
        raise ValueError(f"no facts: {error}") from None


def _inflated(text: str) -> Any:
    inflate = zlib.decompressobj()
    raw = inflate.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    if inflate.unconsumed_tail or not inflate.eof:
        raise ValueError(f"cut off, or larger than {MOST_BYTES} bytes")
    return plain(raw)
