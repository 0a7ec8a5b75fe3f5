"""The engine and the agent's image, once for the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parent.parent / name) for name in ("agent", "e2e"))]

import containers  # noqa: E402


@pytest.fixture(scope="session")
def engine() -> Iterator[None]:
    """Podman, buildah and the base image."""
    containers.ready()
    containers.clear()
    yield
    containers.clear()


@pytest.fixture(scope="session")
def agent_image(engine: None) -> str:
    """The agent's image of this checkout."""
    return containers.build("agent")[0]
