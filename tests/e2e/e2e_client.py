"""What the end-to-end tests share apart from fixtures: a client of the stand-in."""

from __future__ import annotations

from pathlib import Path

from api_server import ApiServer

from agent.cluster.access import Access
from agent.cluster.client import Client

MACHINES = Path(__file__).parent.parent / "machines"


def client_of(server: ApiServer) -> Client:
    return Client(Access(server=server.url, token=lambda: "agent-token", namespace="topoflight"))
