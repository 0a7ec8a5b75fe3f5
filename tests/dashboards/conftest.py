"""Debian's prometheus and promtool: from the PATH, or unpacked from the package into .cache (no service is started)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
UNPACKED = ROOT / ".cache" / "prometheus"
sys.path.insert(0, str(ROOT / "dashboards"))


@pytest.fixture(scope="session")
def programs() -> dict[str, str]:
    """Paths of `prometheus` and `promtool`."""
    found = {name: shutil.which(name) or "" for name in ("prometheus", "promtool")}
    if all(found.values()):
        return found
    unpacked = {name: UNPACKED / "usr" / "bin" / name for name in found}
    if not all(path.exists() for path in unpacked.values()):
        _unpack()
    return {name: str(path) for name, path in unpacked.items()}


def _unpack() -> None:
    if not shutil.which("apt-get"):
        pytest.skip("neither prometheus on the PATH nor apt-get to take Debian's package from")
    UNPACKED.mkdir(parents=True, exist_ok=True)
    for command in (
        ["apt-get", "download", "prometheus"],
        ["apt-get", "update"],
        ["apt-get", "download", "prometheus"],
    ):
        done = subprocess.run(command, cwd=UNPACKED, capture_output=True, text=True, timeout=240, check=False)
        packages = sorted(UNPACKED.glob("prometheus_*.deb"))
        if packages:
            subprocess.run(["dpkg-deb", "-x", str(packages[-1]), str(UNPACKED)], check=True, timeout=120)
            return
    pytest.skip(f"Debian's prometheus cannot be had: {done.stderr.strip()[-300:]}")
