"""An agent's application over a recorded machine, asked without a port, and the token that opens its endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rigs.recorded import H100, snapshot

from probes.api import Snapshot

if TYPE_CHECKING:  # what serves HTTP is loaded by the first test that asks, not when tests are collected
    from starlette.testclient import TestClient

    from agent.http.access import TokenChecker

TOKEN = "s3cret-" + "t" * 20


def token_file(folder: Path) -> Path:
    """A token file as the agent takes it: one token, for its owner alone."""
    path = folder / "tokens"
    path.write_text(f"# for the pipeline\n{TOKEN}\n")
    path.chmod(0o600)
    return path


def tokens(folder: Path, **more: Any) -> TokenChecker:
    """Which requests may use the closed endpoints: those with TOKEN."""
    from agent.http.access import TokenChecker

    return TokenChecker(token_file=token_file(folder), **more)


def bearer(token: str = TOKEN) -> dict[str, str]:
    """The header that carries a token."""
    return {"Authorization": f"Bearer {token}"}


def list_readable_paths(client: TestClient) -> list[str]:
    """Return the paths that GET answers, as the agent's OpenAPI document lists them."""
    return [path for path, methods in client.get("/openapi.json").json()["paths"].items() if "get" in methods]


def agent(machine: str | Snapshot = H100, folder: Path | None = None, **more: Any) -> TestClient:
    """An agent that has scanned once; further words are those of `agent.http.server.create`."""
    from starlette.testclient import TestClient

    from agent.http.server import create
    from agent.http.state import State

    found = snapshot(machine) if isinstance(machine, str) else machine
    state = State(lambda: (found,), interval_seconds=3600, folder=folder)
    state.refresh()
    return TestClient(create(state, **more))
