"""Renders the small part of Kustomize that deploy/ uses: resources, namespace, labels, images, JSON patches.

In a process of its own kubectl is slower; a test holds every folder equal to `kubectl kustomize`.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
KNOWN = {"apiVersion", "kind", "resources", "namespace", "labels", "images", "patches"}
CLUSTER_SCOPED = {
    "Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "PriorityClass",
    "SecurityContextConstraints", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "RuntimeClass",
}  # fmt: skip


def render(folder: Path) -> list[Document]:
    """Every object of the folder's kustomization."""
    return copy.deepcopy(_render(folder))


@cache
def _read(path: Path) -> list[Document]:
    return list(yaml.load_all(path.read_text(), Loader=LOADER))


@cache
def _render(folder: Path) -> list[Document]:
    own = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(own) - KNOWN
    assert not unknown, f"{folder}: this renderer does not know {unknown}"
    documents: list[Document] = []
    for name in own["resources"]:
        path = folder / name
        documents += _render(path.resolve()) if path.is_dir() else _read(path)
    documents = copy.deepcopy([d for d in documents if d])
    for document in documents:
        _namespace(document, own.get("namespace"))
        for labels in own.get("labels", []):
            document["metadata"].setdefault("labels", {}).update(labels["pairs"])
        for image in own.get("images", []):
            _image(document, image)
        for patch in own.get("patches", []):
            target = patch["target"]
            if document["kind"] == target["kind"] and document["metadata"]["name"] == target["name"]:
                for step in yaml.safe_load(patch["patch"]):
                    _patch(document, step)
    return documents


def _namespace(document: Document, namespace: str | None) -> None:
    if namespace is None:
        return
    if document["kind"] == "Namespace":
        document["metadata"]["name"] = namespace
    elif document["kind"] not in CLUSTER_SCOPED:
        document["metadata"]["namespace"] = namespace
    for subject in document.get("subjects", []):
        if subject.get("kind") == "ServiceAccount":
            subject["namespace"] = namespace


def _image(node: Any, image: dict[str, str]) -> None:
    if isinstance(node, dict):
        if node.get("image") == image["name"]:
            node["image"] = f"{image['newName']}:{image['newTag']}"
        for value in node.values():
            _image(value, image)
    elif isinstance(node, list):
        for value in node:
            _image(value, image)


def _patch(document: Any, step: dict[str, Any]) -> None:
    """RFC 6902: add, replace, remove."""
    *path, last = [w.replace("~1", "/").replace("~0", "~") for w in step["path"].split("/")[1:]]
    for word in path:
        document = document[int(word)] if isinstance(document, list) else document[word]
    key: Any = int(last) if isinstance(document, list) and last != "-" else last
    if step["op"] == "remove":
        del document[key]
    elif last == "-":
        document.append(step["value"])
    else:
        assert step["op"] == "add" or key in document, f"{step}: nothing to replace"
        document[key] = step["value"]
