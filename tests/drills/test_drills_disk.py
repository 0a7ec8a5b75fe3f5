"""A full disk, state that is corrupt, an API server that is not there as the agent starts, and clocks that jump."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer, write_kubeconfig
from drill_ground import MACHINES, ROOT, RUN, SMALL_BENCH, Ground, drill, eventually, keep_something, state_lost

from agent.base.result_store import BENCH_FILE, RUNS_FOLDER, STORED_RUNS
from contracts.run_record import record_of

pytestmark = pytest.mark.long

DAY_SECONDS = 86400
BACK_SECONDS = 150.0  # longer than three of the longest waits between two tries


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[None]:
    """A small file system of its own over a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(place: Path) -> None:
    """To the last byte."""
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))


def _files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def _refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> list[str]:
    """A message for the user that names the place, with this exit code and without a traceback."""
    right = done.returncode == code and "Traceback" not in done.stderr and all(word in done.stderr for word in words)
    return [] if right else [f"{done.args[0]} ends with {done.returncode}: {done.stderr[-500:]}"]


@drill
def test_disk_full(ground: Ground) -> list[str]:
    """The state folder and a --save on such a disk: refused before any load, and what was kept stays."""
    with _disk(ground.state):
        keep_something(ground)
        _fill(ground.state)
        before = _files(ground.state)
        lost = _refused(ground.run(*SMALL_BENCH, f"--save={ground.state / 'saved.json'}"), "saved.json", "is full")
        report = ground.run("preflight", "-q", f"--report={ground.state / 'report'}")
        lost += _refused(report, "report", "is full")
        with ground.agent() as agent:
            lost += [] if agent.ready() else [f"the agent is not ready: {agent.words()[-300:]}"]
            status, told = agent.ask("/runs")
            lost += [] if status == 200 and record_of(RUN) in map(record_of, told) else [f"/runs: {status} {told}"]
        lost += state_lost(ground.state)
        lost += [f"left on the disk: {name}" for name in _files(ground.state) - before]
    return [*lost, *ground.after()]


@drill
def test_disk_full_temporary(ground: Ground) -> list[str]:
    """Neither TMPDIR nor /tmp nor /var/tmp takes a byte: a benchmark says so and starts nothing."""
    places = ('"$TMPDIR"', "/tmp", "/var/tmp", "/dev/shm")
    commands = [f"mkdir /run/lock/project && mount --bind {shlex.quote(str(ROOT))} /run/lock/project"]
    for place in places:
        commands.append(f"mount -t tmpfs -o size=4k tmpfs {place}")
        if ROOT.is_relative_to(place):  # the project itself must stay in reach where it lies below
            there = shlex.quote(str(ROOT))
            commands.append(f"mkdir -p {there} && mount --bind /run/lock/project {there}")
        commands.append(f"head -c 4096 /dev/zero > {place}/filler")
    mounts = "; ".join(commands)
    done = ground.run(*SMALL_BENCH, DRILL_MOUNTS=f"{mounts}; cd /tmp")  # the working folder is the last resort
    return [*_refused(done, "temporary", code=1), *ground.after()]


def _clock(ground: Ground) -> tuple[Path, dict[str, str]]:
    """The file that holds the shift, and the environment that makes a process obey it."""
    file, library = ground.folder / "clock", ground.folder / "clock.so"
    source = Path(__file__).with_name("clock_shift.c")
    file.write_text("0")
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return file, {"LD_PRELOAD": str(library), "DRILL_CLOCK": str(file)}


@drill
def test_clock_of_the_agent(ground: Ground) -> list[str]:
    """It stays ready, goes on to scan, and dates its scans by the new clock."""
    file, shifted = _clock(ground)
    lost = []
    with ground.agent("--interval=2", **shifted) as agent:
        agent.ready()
        for shift in (DAY_SECONDS, -DAY_SECONDS, 0):
            file.write_text(str(shift))
            status, told = agent.ask("/readyz")
            lost += [] if status == 200 else [f"not ready after a jump to {shift:+d} s: {told}"]

            def near(shift: int = shift) -> bool | None:
                taken = agent.ask("/snapshot")[1]["taken_at_seconds"]
                return abs(taken - time.time() - shift) < DAY_SECONDS / 2 or None

            lost += [] if eventually(near) else [f"no scan after a jump to {shift:+d} s"]
            status, told = agent.ask("/metrics")
            lost += [] if status == 200 else [f"/metrics after a jump: {status} {told}"]
    return [*lost, *ground.orphans()]


@drill
def test_clock_of_a_record(ground: Ground) -> list[str]:
    """The folder is full of records that look newer: the new one stays."""
    file, shifted = _clock(ground)
    runs = ground.state / RUNS_FOLDER
    runs.mkdir()
    for number in range(STORED_RUNS):
        (runs / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{number}.json").write_text(json.dumps(RUN))
    file.write_text(str(-DAY_SECONDS))
    code = (
        "import sys, json\nfrom contracts.run_record import record_of\n"
        "from agent.base.result_store import store_run\n"
        "print(store_run(record_of(json.loads(sys.argv[1]))))"
    )
    record = {**RUN, "reason": "the new one", "started_at": "2026-01-01T00:00:00Z"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(record)], env=ground.environment(shifted), cwd=ROOT,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    kept = Path(done.stdout.strip())
    lost = [] if kept.is_file() else [f"the new record is gone: {done.stdout} {done.stderr[-300:]}"]
    left = len(list(runs.glob("*.json")))
    return lost if left == STORED_RUNS else [*lost, f"{left} records are kept"]


@drill
def test_state_corrupt_at_start(ground: Ground) -> list[str]:
    """It is ready, serves the good part on page and in JSON, and names the bad files in its log."""
    keep_something(ground)
    (ground.state / BENCH_FILE).write_text("[" * 100_000)
    runs = ground.state / RUNS_FOLDER
    (runs / "20260102T000000-1.json").write_text(json.dumps({**RUN, "schema_version": 99}))
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


@drill
def test_api_down_at_start(ground: Ground) -> list[str]:
    """The agent is ready without it, and publishes once it is there."""
    with ApiServer() as api:
        api.down()
        config = write_kubeconfig(ground.folder / "kubeconfig", api.url)
        words = (f"--host={MACHINES / 'hgx-h100-8xH100-8hca.json'}", "--publish", "--node-name=n1")
        with ground.agent(*words, KUBECONFIG=str(config)) as agent:
            lost = [] if agent.ready() else [f"not ready: {agent.words()[-500:]}"]
            api.up()
            if eventually(lambda: api.of_kind("NodeTopology") or None, seconds=BACK_SECONDS) is None:
                lost.append(f"not published: {agent.words()[-500:]}")
            lost += [] if agent.term() is not None else ["the agent does not end"]
    return [*lost, *ground.orphans()]
