"""Node and cluster topologies as JSON and back, whole: every field, with the version of the schema."""

from __future__ import annotations

from typing import Any, TypeVar

import cattrs
from cattrs.preconf.json import make_converter

from topology.graph import SCHEMA_VERSION, ClusterTopology, NodeTopology

T = TypeVar("T", NodeTopology, ClusterTopology)

_converter = make_converter()


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
        return _converter.structure(data, wanted)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError) as error:
        words = cattrs.transform_error(error) if isinstance(error, cattrs.BaseValidationError) else [repr(error)]
        raise TopologyWireError(f"no {wanted.__name__}: {'; '.join(words[:3])}") from None
