"""A client of the API server that KUBECONFIG names, or of the stand-in where it names none."""

import os

import pytest
from api_server import CRD, ApiServer, write_kubeconfig
from e2e_client import client_of
from rigs.waiting import eventually

from agent.cluster.client import ApiError, connect, make_path


@pytest.fixture
def api():
    """The stand-in, always: for what a real server does not do on demand."""
    with ApiServer() as server:
        yield server


@pytest.fixture
def kubeconfig(api, tmp_path, monkeypatch):
    """The stand-in, and the way to it in KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", api.url)))
    return api


@pytest.fixture(scope="session")
def definition():
    """On a real server: the NodeTopology definition, established; taken away where nobody had it before."""
    if not os.environ.get("KUBECONFIG"):
        yield
        return
    client = connect()
    path = make_path("apiextensions.k8s.io/v1", "customresourcedefinitions", CRD["metadata"]["name"])
    try:
        client.get(path)
        had = True
    except ApiError as error:
        assert error.status == 404, error
        had = False
    client.apply(path, CRD)

    def established() -> bool:
        conditions = (client.get(path).get("status") or {}).get("conditions") or ()
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    eventually(established, "the definition is established")
    yield
    if not had:
        client.request("DELETE", path)


@pytest.fixture
def client(request, definition):
    """The real server where there is one, else the stand-in: the same tests."""
    made = connect() if os.environ.get("KUBECONFIG") else client_of(request.getfixturevalue("api"))
    yield made
    made.close()
