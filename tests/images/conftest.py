"""The engine and the agent's image, once for the session."""

import containers
import pytest


@pytest.fixture(scope="session")
def engine():
    """Podman, buildah and the base image."""
    containers.ready()
    containers.clear()
    yield
    containers.clear()


@pytest.fixture(scope="session")
def agent_image(engine: None) -> str:
    """The agent's image of this checkout."""
    return containers.build("agent")
