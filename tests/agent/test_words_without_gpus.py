"""On hosts without GPUs nothing is said to be "per GPU"."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from rigs.tables import each_row
from starlette.testclient import TestClient

from agent.cli.recommend import recommend
from agent.http.server import create
from agent.http.state import State
from probes.host.recording import load
from probes.scan import scan

MACHINES = Path(__file__).parent.parent / "machines"


@each_row(("machine", "word"), [("cpu-only-vm", "rank"), ("hgx-h100-8xH100-8hca", "GPU")])
def test_memory_is_told_per_what_holds_it(machine: str, word: str) -> None:
    """In the terminal and on the page."""
    path = MACHINES / f"{machine}.json"
    done = CliRunner().invoke(recommend, ["--host", str(path), "--model", "Qwen2.5-0.5B"])
    assert done.exit_code == 0, done.output
    other = {"rank": "GPU", "GPU": "rank"}[word]
    assert f"per {word}" in done.output and f"per {other}" not in done.output
    state = State(lambda: (scan(load(path)),), interval_seconds=3600)
    state.refresh()
    page = TestClient(create(state)).get("/").text
    assert f"Memory per {other}" not in page
