"""Pods inside the manifests of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def templates(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod template below `node`."""
    if isinstance(node, Mapping) and "containers" in (node.get("spec") or {}):
        yield dict(node)
    elif isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from templates(value)
