"""A client of the API server that KUBECONFIG names, or of the stand-in where it names none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from api_server import CRD, ApiServer
from e2e_client import client_of, eventually

from agent.kube import Client, path_of
from agent.kube_access import find


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """The stand-in, always: for what a real server does not do on demand."""
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="session")
def definition() -> None:
    """On a real server: the NodeTopology definition, established."""
    if not os.environ.get("KUBECONFIG"):
        return
    client = Client(find())
    path = path_of("apiextensions.k8s.io/v1", "customresourcedefinitions", CRD["metadata"]["name"])
    client.apply(path, CRD)

    def established() -> bool:
        conditions = (client.get(path).get("status") or {}).get("conditions") or ()
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    eventually(established, "the definition is established")


@pytest.fixture
def client(request: pytest.FixtureRequest, definition: None) -> Iterator[Client]:
    """The real server where there is one, else the stand-in: the same tests."""
    made = Client(find()) if os.environ.get("KUBECONFIG") else client_of(request.getfixturevalue("api"))
    yield made
    made.close()
