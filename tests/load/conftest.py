"""A real agent on a recorded machine, as a process of its own, and Debian's node_exporter beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import resident
from load_served import H100, Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It scans the recording every second."""
    folder = tmp_path_factory.mktemp("agent")
    with resident.agent(folder, "--host", str(H100), "--interval", "1") as (pid, port, _):
        yield Served(pid, port)


@pytest.fixture(scope="session")
def node_exporter() -> None:
    """Installed from Debian where it is not there and this is root."""
    if shutil.which(resident.EXPORTER) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-q", "--no-install-recommends", resident.EXPORTER],
                       env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, timeout=240,
                       check=False)  # fmt: skip
    if shutil.which(resident.EXPORTER) is None:
        pytest.skip(f"no {resident.EXPORTER}, and it could not be installed (needs root and apt)")


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until it holds; a generous bound, as the machine may be busy."""

    def wait(true: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until, f"never came true: {what}"
            time.sleep(0.05)

    return wait
