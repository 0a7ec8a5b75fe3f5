"""What the end-to-end tests share apart from fixtures: a client of the stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from api_server import ApiServer, configuration

from agent.cluster.client import Client

MACHINES = Path(__file__).parent.parent / "machines"


def merge(client: Client, path: str, document: dict[str, Any]) -> dict[str, Any]:
    """A JSON merge patch, as kubectl sends it: the product itself only applies."""
    return client.request("PATCH", path, body=document, content_type="application/merge-patch+json")


def client_of(server: ApiServer) -> Client:
    return Client(configuration(server.url), namespace="topoflight")
