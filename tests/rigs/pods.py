"""Pods inside the manifests of jobs, and the manifests that `launch` prints."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from rigs.command import topoflight

Document = dict[str, Any]


def templates(node: Any) -> Iterator[Document]:
    """Every pod template below `node`."""
    if isinstance(node, Mapping) and "containers" in (node.get("spec") or {}):
        yield dict(node)
    elif isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from templates(value)


def launched(*words: object) -> tuple[list[Document], str]:
    """What `launch --dry-run` of an Indexed Job prints, as documents, and what it says on stderr."""
    rows = ("--set", "dataset_name=synthetic:arithmetic")
    done = topoflight("launch", "--dry-run", "--api", "job", "--image", "registry.example/f:1", *rows, *words)
    assert done.exit_code == 0, f"{done.exit_code}: {done.output}"
    return list(yaml.safe_load_all(done.stdout)), done.stderr
