"""Debian's prometheus and promtool: from the PATH, or unpacked from the package into .cache (no service is started)."""

import shutil

import pytest
from rigs.packages import apt_unpacked


@pytest.fixture(scope="session")
def programs() -> dict[str, str]:
    """Paths of `prometheus` and `promtool`."""
    found = {name: shutil.which(name) or "" for name in ("prometheus", "promtool")}
    if all(found.values()):
        return found
    folder = apt_unpacked("usr/bin/prometheus", "prometheus") / "usr" / "bin"
    return {name: str(folder / name) for name in found}
