"""What the end-to-end tests share apart from fixtures: a client of the stand-in, and patience."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from api_server import ApiServer

from agent.kube import Client
from agent.kube_access import Access

MACHINES = Path(__file__).parent.parent / "machines"


def eventually(true: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Wait until it holds; a generous bound, as the machine may be busy."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"never came true: {what}"
        time.sleep(0.02)


def client_of(server: ApiServer) -> Client:
    return Client(Access(server=server.url, token=lambda: "agent-token", namespace="topoflight"))
