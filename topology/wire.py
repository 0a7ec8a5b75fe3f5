"""Node and cluster topologies as JSON and back, whole: every field, with the version of the schema."""

from __future__ import annotations

from typing import Any, TypeVar

import cattrs
from cattrs.preconf.json import make_converter

from contracts.plain import strict
from topology.graph import SCHEMA_VERSION, ClusterTopology, NodeTopology

T = TypeVar("T", NodeTopology, ClusterTopology)

# ends at the first thing that does not fit: collecting them all takes a minute for a megabyte of nonsense
_converter = make_converter(detailed_validation=False)
strict(_converter)


class TopologyWireError(ValueError):
    """The JSON is no topology of a version that this release reads."""


def to_json(topology: NodeTopology | ClusterTopology) -> dict[str, Any]:
    """Plain JSON values; path classes by NCCL's number."""
    made: dict[str, Any] = _converter.unstructure(topology)
    return made


def node_from_json(data: object) -> NodeTopology:
    """The node that `to_json` wrote. Raises TopologyWireError."""
    return _from_json(data, NodeTopology)


def cluster_from_json(data: object) -> ClusterTopology:
    """The cluster that `to_json` wrote. Raises TopologyWireError."""
    return _from_json(data, ClusterTopology)


def _from_json(data: object, wanted: type[T]) -> T:
    if not isinstance(data, dict):
        raise TopologyWireError(f"expected an object, got {type(data).__name__}")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise TopologyWireError(f"schema_version is {version!r}, this release reads {SCHEMA_VERSION}")
    try:
        made = _converter.structure(data, wanted)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TopologyWireError(f"no {wanted.__name__}: {type(error).__name__}: {str(error)[:200]}") from None
    nodes: tuple[NodeTopology, ...] = made.nodes if isinstance(made, ClusterTopology) else (made,)
    for node in nodes:
        _check_names(node)
    return made


def _check_names(node: NodeTopology) -> None:
    """Every device is named once, and nothing speaks of a device that is not there."""
    gpus, nics = {gpu.name for gpu in node.gpus}, {nic.name for nic in node.nics}
    if len(gpus | nics) != len(node.devices):
        raise TopologyWireError("no NodeTopology: two devices have one name")
    spoken = {name for pair in node.pairs for name in (pair.a, pair.b)} - gpus - nics
    spoken |= {near.gpu for near in node.nearest_nic} - gpus
    spoken |= {name for near in node.nearest_nic for name in near.nics} - nics
    spoken |= {name for rail in node.rails for name in rail.nics} - nics
    spoken |= {name for rail in node.rails for name in rail.gpus} - gpus
    spoken |= {name for island in node.islands for name in island.gpus} - gpus
    if spoken:
        raise TopologyWireError(f"no NodeTopology: {min(spoken)[:64]!r} is none of its devices")
