"""A start of the agent raises no failed probe: the port is there before the rest is loaded, readiness waits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agent_pod import OVERLAYS, agent_of
from rigs.recorded import path_of, snapshot
from rigs.tables import each_row
from rigs.waiting import eventually
from starlette.testclient import TestClient

from agent.http.server import MOST_WAIT_SECONDS, create
from agent.http.state import State

HELD = """
import builtins, os, time
real = builtins.__import__
def held(name, *rest, **more):
    if name.partition('.')[0] in ('uvicorn', 'fastapi'):
        while not os.path.exists(os.environ['OPEN']):
            time.sleep(0.01)
    return real(name, *rest, **more)
builtins.__import__ = held
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def test_who_asks_while_the_agent_is_loading_waits_and_is_answered(tmp_path: Path) -> None:
    """On a slow disk the libraries take seconds: the kubelet's first question is not refused meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    opened, port = tmp_path / "open", free_port()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "OPEN": str(opened)}
    command = [sys.executable, "-m", "agent.cli", "serve", "--host", str(path_of()), "--port", str(port),
               "--state", str(tmp_path / "state")]  # fmt: skip
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as served:
        try:
            eventually(lambda: connects(port), "the port is there while the libraries are held back")
            answers: list[tuple[str, int]] = []

            def ask(path: str) -> None:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
                    answers.append((path, answer.status))

            asking = [threading.Thread(target=ask, args=(path,)) for path in ("/healthz", "/readyz?wait=60")]
            for thread in asking:
                thread.start()
            time.sleep(0.3)
            assert not answers and served.poll() is None
            opened.touch()
            for thread in asking:
                thread.join(300)
            assert sorted(answers) == [("/healthz", 200), ("/readyz?wait=60", 200)]
        finally:
            served.terminate()


def test_readiness_waits_for_the_first_scan() -> None:
    """A scan that takes a moment is not told as a failed probe; without waiting the answer is no at once."""
    gate = threading.Event()

    def slow() -> Any:
        gate.wait()
        return (snapshot(),)

    with TestClient(create(State(slow, interval_seconds=3600))) as running:
        assert running.get("/readyz").status_code == 503
        assert running.get("/readyz?wait=0.2").status_code == 503
        threading.Timer(0.3, gate.set).start()
        assert running.get(f"/readyz?wait={MOST_WAIT_SECONDS}").status_code == 200
        assert running.get(f"/readyz?wait={MOST_WAIT_SECONDS + 1}").status_code in (400, 422)


def test_readiness_does_not_wait_for_a_scan_that_failed() -> None:
    """Its error is the answer."""

    def failing() -> Any:
        raise RuntimeError("driver gone")

    with TestClient(create(State(failing, interval_seconds=3600))) as running:
        eventually(lambda: "driver gone" in running.get("/readyz").text, "the scan has failed")
        assert running.get(f"/readyz?wait={MOST_WAIT_SECONDS}").status_code == 503


@each_row("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_the_manifests_probes_leave_a_start_its_time(overlay: str) -> None:
    """The interpreter binds the port within the delay; then the kubelet waits longer than the agent takes to say no."""
    (container,) = agent_of(overlay)["spec"]["template"]["spec"]["containers"]
    startup, ready = container["startupProbe"], container["readinessProbe"]
    assert startup["httpGet"]["path"] == "/healthz" and startup["initialDelaySeconds"] >= 2
    assert startup["timeoutSeconds"] * startup["failureThreshold"] >= 120
    asked = urlsplit(ready["httpGet"]["path"])
    (wait,) = parse_qs(asked.query)["wait"]
    assert asked.path == "/readyz" and 30 <= float(wait) <= MOST_WAIT_SECONDS
    assert ready["timeoutSeconds"] > float(wait)
