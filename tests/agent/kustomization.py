"""What Kustomize makes of the folders of deploy/, by kubectl: each folder once in a process."""

from __future__ import annotations

import copy
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from kubectl_layer import tool

Document = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CLUSTER_SCOPED = {
    "Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "PriorityClass",
    "SecurityContextConstraints", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "RuntimeClass",
}  # fmt: skip


def render(folder: Path) -> list[Document]:
    """Every object of the folder's kustomization."""
    return copy.deepcopy(_render(folder))


@cache
def _render(folder: Path) -> list[Document]:
    said = subprocess.run([str(tool("kubectl")), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return [document for document in yaml.load_all(said.stdout, Loader=LOADER) if document]
