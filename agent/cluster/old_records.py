"""Records as agents wrote them before `status.machine`: graph and facts as JSON, zlib, base64. Read, never written.

An agent of this release replaces its own node's with its first write; those of older agents stand beside the new ones
while a DaemonSet is rolled over.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import cattrs
from cattrs.preconf.json import make_converter

from contracts.plain import loads as plain
from contracts.plain import strict
from probes.api import Snapshot
from probes.wire import SnapshotError
from probes.wire import from_json as snapshot_from_json
from topology.graph import SCHEMA_VERSION, NodeTopology

# ends at the first thing that does not fit: collecting them all takes a minute for a megabyte of nonsense
_converter = make_converter(detailed_validation=False)
strict(_converter)

MOST_BYTES = 1 << 20  # unpacked; 64 KiB packed hold ten times what the largest machine needs


def graph(text: str) -> NodeTopology:
    """The graph without host name and UUIDs. Raises ValueError where the text is none, or unpacks to too much."""
    try:
        document = _inflated(text)
        version = document.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, this release reads {SCHEMA_VERSION}")
        node = _converter.structure(document, NodeTopology)
    except (zlib.error, cattrs.BaseValidationError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no graph: {type(error).__name__}: {str(error)[:200]}") from None
    _check_names(node)
    return node


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


def _check_names(node: NodeTopology) -> None:
    """Every device is named once, and nothing speaks of a device that is not there."""
    gpus, nics = {gpu.name for gpu in node.gpus}, {nic.name for nic in node.nics}
    if len(gpus | nics) != len(node.devices):
        raise ValueError("no graph: two devices have one name")
    spoken = {name for pair in node.pairs for name in (pair.a, pair.b)} - gpus - nics
    spoken |= {near.gpu for near in node.nearest_nic} - gpus
    spoken |= {name for near in node.nearest_nic for name in near.nics} - nics
    spoken |= {name for rail in node.rails for name in rail.nics} - nics
    spoken |= {name for rail in node.rails for name in rail.gpus} - gpus
    spoken |= {name for island in node.islands for name in island.gpus} - gpus
    if spoken:
        raise ValueError(f"no graph: {min(spoken)[:64]!r} is none of its devices")
