"""A real agent on a recorded machine, as a process of its own, and Debian's node_exporter beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import resident
from load_served import H100, Served
from rigs.packages import apt_installed


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It scans the recording every second."""
    folder = tmp_path_factory.mktemp("agent")
    with resident.agent(folder, "--host", str(H100), "--interval", "1") as (pid, port, _):
        yield Served(pid, port)


@pytest.fixture(scope="session")
def node_exporter() -> None:
    """Installed from Debian where it is not there and this is root."""
    apt_installed(resident.EXPORTER, resident.EXPORTER)
