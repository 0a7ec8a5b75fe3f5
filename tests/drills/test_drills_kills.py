"""SIGKILL of a benchmark and a launch at random moments; SIGTERM of a whole preflight, and while the agent answers."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from drill_ground import MACHINES, SMALL_BENCH, Agent, Ground, drill, eventually, keep_something, state_lost

from agent.base import EXIT_STOPPED

pytestmark = pytest.mark.long

SMALL_JOB = (
    "--ranks=2", "--set=max_steps=6", "--set=save_steps=2", "--set=dataset_rows=64", "--set=eval_strategy=no",
    "--set=profile_steps=0",
)  # fmt: skip
# Seconds that a run takes, corrected by each that ended before its kill came: kills fall on the whole life.
_life = {"bench": 7.0, "launch": 16.0}


def _kill_at_random(ground: Ground, kind: str, *words: str) -> None:
    """Start, wait for a moment of its life, kill; a run that ended first sets the length of life and is repeated."""
    while True:
        process = ground.start(*words)
        started = time.monotonic()
        try:
            process.communicate(timeout=ground.moment(_life[kind]))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return
        _life[kind] = time.monotonic() - started


def _again(ground: Ground, seconds: float, *words: str) -> list[str]:
    """Every tenth time in the long form: the same command, undisturbed, ends well."""
    if not ground.long or ground.random.random() > 0.1:
        return []
    done = ground.run(*words, seconds=seconds)
    return [] if done.returncode == 0 else [f"the next run ends with {done.returncode}: {done.stderr[-300:]}"]


@drill(long=90)
def test_kill_during_a_benchmark(ground: Ground) -> list[str]:
    """The verb bench, two ranks."""
    keep_something(ground)
    words = (*SMALL_BENCH, f"--save={ground.folder / 'saved.json'}")
    _kill_at_random(ground, "bench", *words)
    lost = [*ground.after(ground.folder), *state_lost(ground.state)]
    return [*lost, *_again(ground, 120, *words)]


@drill(long=60)
def test_kill_during_a_launch(ground: Ground) -> list[str]:
    """The verb launch, two ranks that train and save."""
    keep_something(ground)
    words = ("launch", f"--output={ground.folder / 'out'}", *SMALL_JOB)
    _kill_at_random(ground, "launch", *words)
    lost = [*ground.after(ground.folder / "out"), *state_lost(ground.state)]
    return [*lost, *_again(ground, 180, *words)]


@drill
def test_sigterm_of_a_preflight(ground: Ground) -> list[str]:
    """The report holds the scan and the benchmark; verdict and exit code say that it was stopped."""
    keep_something(ground)
    reports = ground.folder / "reports"
    process = ground.start("preflight", "--train", "-q", f"--report={reports}", "-o", "json", *SMALL_JOB, "--ranks=1")

    def calibrates() -> bool:
        return any("collectives.bench.calibrate" in line for line in ground.commands())

    eventually(lambda: process.poll() is not None or calibrates() or None, seconds=240)
    time.sleep(ground.random.uniform(0.0, 1.0))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    lost = [] if process.returncode == EXIT_STOPPED else [f"exit code {process.returncode}: {err[-500:]}"]
    try:
        found = json.loads((reports / "report.json").read_text())
        lost += [] if json.loads(out) == found else ["stdout has another document than the report"]
    except (OSError, ValueError) as error:
        return [*lost, f"no report: {error}", *ground.after(reports)]
    word, why = found["verdict"]["word"], found["verdict"]["why"]
    lost += [] if (word, why) == ("unknown", "stopped by SIGTERM before it was done") else [f"{word}: {why}"]
    lost += [] if "not calibrated: stopped before it was done" in found["notes"] else [f"{found['notes']}"]
    lost += [f"no {name}" for name in ("snapshots", "bench", "recommendation") if not found[name]]
    judged = {check["status"] for check in found["checks"] if check["code"].startswith(("run.", "forecast."))}
    lost += [] if judged == {"unknown"} else [f"the run that was none is {judged}"]
    return [*lost, *ground.after(reports), *state_lost(ground.state)]


@drill(long=20)
def test_sigterm_during_an_answer(ground: Ground) -> list[str]:
    """Asked for, or half sent to a reader that is slow: what has begun to come still comes whole."""
    hosts = [f"--host={path}" for path in sorted(MACHINES.glob("*.json"))]
    with ground.agent(*hosts) as agent:
        agent.ready()
        with _slow_reader(agent.port, "/snapshot") as reader:
            begun = reader.recv(1) if ground.random.random() < 0.5 else b""
            time.sleep(ground.random.uniform(0.0, 0.3))
            agent.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)  # it has seen the signal before anything more is taken
            head, _, body = _rest(reader, begun).partition(b"\r\n\r\n")
        lost = _ended(agent)
    length = next((line.split(b":")[1] for line in head.lower().split(b"\r\n") if b"content-length" in line), b"-1")
    # where the question came too late it was closed before any of it was read: the client asks again
    if (head or begun) and (not head.startswith(b"HTTP/1.1 200") or len(body) != int(length)):
        lost.append(f"{len(body)} of {int(length)} bytes came: {head[:60]!r}")
    return [*lost, *ground.after()]


def _ended(agent: Agent) -> list[str]:
    """SIGTERM, where it has had none yet: whether it ends well within a kubelet's 30 seconds, of the signal."""
    lost = [] if agent.term() is not None else ["the agent does not end"]
    lost += [] if agent.process.poll() in (None, -signal.SIGTERM) else [f"exit code {agent.process.returncode}"]
    return [*lost, *([f"it complains: {agent.words()[-500:]}"] if "Traceback" in agent.words() else [])]


@contextlib.contextmanager
def _slow_reader(port: int, path: str) -> Iterator[socket.socket]:
    """A client that has asked, and whose kernel holds little for it."""
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(120)
        reader.connect(("127.0.0.1", port))
        reader.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        yield reader


def _rest(reader: socket.socket, begun: bytes) -> bytes:
    """All that still comes until the agent closes."""
    with contextlib.suppress(ConnectionResetError):
        while piece := reader.recv(65536):
            begun += piece
    return begun
