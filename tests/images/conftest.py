"""The engine and the agent's image, once for the session."""

from collections.abc import Iterator

import containers
import pytest


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
    return containers.build("agent")
