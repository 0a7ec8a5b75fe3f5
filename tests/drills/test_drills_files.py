"""Recordings and state that are corrupt or of a newer release: named and left out, the rest kept."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from drill_ground import MACHINES, RUN, Ground, drill, keep_something
from scanned import scan

from agent.base.result_store import BENCH_FILE, RUNS_FOLDER
from agent.http.state import State
from contracts.run_record import record_of
from probes.api import Failed, Probe
from probes.host.recording import RecordingHost, load
from probes.registry import ALL
from probes.worker import reader, run

pytestmark = pytest.mark.long

MACHINE = MACHINES / "titan-rtx-2x-nv2.json"
CORRUPTIONS = 40  # of one file in one run


def _corrupt(ground: Ground, whole: bytes) -> bytes:
    """Cut off, bytes changed, a piece gone or doubled, another kind of file, or nested without end."""
    at, width = ground.random.randrange(len(whole)), ground.random.randrange(1, 64)
    noise = ground.random.randbytes(width)
    return ground.random.choice(
        (
            whole[:at], whole[:at] + noise + whole[at + width :], whole[:at] + whole[at + width :],
            whole[:at] + whole[max(0, at - width) :], noise, b"", b"[" * 100_000, b'{"a":' * 100_000,
            gzip.compress(whole)[:at], b"\x1f\x8b" + whole, b"\0" * len(whole), whole + whole,
        )
    )  # fmt: skip


def _newer(whole: bytes) -> bytes:
    return json.dumps({**json.loads(whole), "schema_version": 99}).encode()


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
    """The words that the agent logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("agent").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("agent").removeHandler(handler)


@drill
def test_recording_partly_wrong(ground: Ground) -> list[str]:
    """At most the probes that ask for it fail; the others answer."""
    content = json.loads(MACHINE.read_text())
    asked = {probe.name: _questions_of(probe) for probe in ALL}
    path, lost = ground.folder / "machine.json", []
    for _ in range(CORRUPTIONS):
        bent: dict[str, Any] = json.loads(json.dumps(content))
        answers = bent["answers"][ground.random.choice(("read_text", "list_dir", "nvml", "netlink", "cpu"))]
        if answers is bent["answers"]["nvml"]:
            answers = answers[ground.random.choice(list(answers))]
        question = ground.random.choice(list(answers))
        answers[question] = ground.random.choice((None, 7, "x", [[]], {"a": {}}, [None] * 9))
        path.write_text(json.dumps(bent))
        found = scan(load(path)).outcomes
        failed = [name for name, outcome in found.items() if isinstance(outcome, Failed)]
        lost += [f"{name} did not ask {question!r} and failed" for name in failed if question not in asked[name]]
        lost += [] if len(found) == len(ALL) else [f"only {list(found)} answered"]
    return lost


def _questions_of(probe: Probe[Any]) -> set[str]:
    """Every question that a probe asks of the machine."""
    host = RecordingHost(load(MACHINE))
    run(reader(probe.name), host)
    symbols = [inner for answers in host.answers.get("nvml", {}).values() for inner in answers]
    return {question for answers in host.answers.values() for question in answers} | set(symbols)


@drill
def test_state_corrupt(ground: Ground) -> list[str]:
    """Each bad file is named in the log, the good record is served."""
    keep_something(ground)
    whole, lost = (ground.state / BENCH_FILE).read_bytes(), []
    record = json.dumps({**RUN, "layout": {"family": "fsdp"}, "measured": {"step_seconds": 1.0}}).encode()
    snapshot = scan(load(MACHINE))
    for number in range(CORRUPTIONS):
        folder = ground.folder / f"state-{number}"
        shutil.copytree(ground.state, folder)
        bench, runs = folder / BENCH_FILE, folder / RUNS_FOLDER
        bench.write_bytes(_newer(whole) if number == 0 else _corrupt(ground, whole))
        bad = runs / "20260102T000001-2.json"
        bad.write_bytes(_newer(record) if number == 0 else _corrupt(ground, record))
        with _log() as lines:
            view = State(lambda: (snapshot,), interval_seconds=3600, folder=folder).refresh()
        told = "\n".join(lines)
        lost += [] if record_of(RUN) in view.runs else ["the good run is gone"]
        lost += [] if view.bench is not None or BENCH_FILE in told else [f"{BENCH_FILE} is not named: {told}"]
        lost += [] if len(view.runs) > 1 or bad.name in told else [f"{bad.name} is not named: {told}"]
    return lost


@drill
def test_state_corrupt_at_start(ground: Ground) -> list[str]:
    """It is ready, serves the good part on page and in JSON, and names the bad files in its log."""
    keep_something(ground)
    (ground.state / BENCH_FILE).write_text("[" * 100_000)
    runs = ground.state / RUNS_FOLDER
    (runs / "20260102T000000-1.json").write_bytes(_newer(json.dumps(RUN).encode()))
    odd = {"schema_version": 1, "layout": 7, "comparison": [3, {"forecast": {"low": "x"}}], "model": [], "loss": "no"}
    (runs / "20260103T000000-1.json").write_text(json.dumps(odd))
    with ground.agent() as agent:
        lost = [] if agent.ready() else [f"not ready: {agent.words()[-500:]}"]
        served = agent.ask("/runs")
        page = agent.ask("/", Accept="text/html")[0]
        words = agent.words()
    lost += [] if served[0] == 200 and record_of(RUN) in map(record_of, served[1]) else [f"/runs: {served}"]
    lost += [] if page == 200 else [f"the page: {page}"]
    lost += [f"{name} is not named" for name in (BENCH_FILE, "20260102T000000-1.json") if name not in words]
    return [*lost, *ground.orphans()]
