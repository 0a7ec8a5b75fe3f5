"""A real agent on a recorded machine, as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import resident
from load_served import H100, Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It scans the recording every second."""
    folder = tmp_path_factory.mktemp("agent")
    with resident.agent(folder, "--host", str(H100), "--interval", "1") as (pid, port, _):
        yield Served(pid, port)
