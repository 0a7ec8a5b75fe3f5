"""What the end-to-end tests share apart from fixtures: a client of the stand-in."""

from __future__ import annotations

from pathlib import Path

from api_server import ApiServer, configuration

from agent.cluster.client import Client

MACHINES = Path(__file__).parent.parent / "machines"


def client_of(server: ApiServer) -> Client:
    return Client(configuration(server.url), namespace="topoflight")
