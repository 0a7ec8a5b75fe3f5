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
from drill_ground import ROOT, SMALL_BENCH, Agent, Ground, drill
from rigs.recorded import path_of
from rigs.results import RUN
from rigs.waiting import eventually

from agent.base.result_store import BENCH_FILE, RUNS_FOLDER, STORED_RUNS
from contracts.run_record import record_of

pytestmark = pytest.mark.long

DAY_SECONDS = 86400
BACK_SECONDS = 300.0  # longer than three of the longest waits between two tries


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


def _assert_refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """A message for the user that names the place, with this exit code and without a traceback."""
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done
    assert all(word in done.stderr for word in words), done


@drill
def test_disk_full(ground: Ground) -> None:
    """The state folder and a --save on such a disk: refused before any load, and what was kept stays."""
    with _disk(ground.state):
        ground.store_earlier_results()
        _fill(ground.state)
        before = _files(ground.state)
        _assert_refused(ground.run(*SMALL_BENCH, f"--save={ground.state / 'saved.json'}"), "saved.json", "is full")
        _assert_refused(ground.run("preflight", "-q", f"--report={ground.state / 'report'}"), "report", "is full")
        with ground.agent() as agent:
            agent.assert_ready()
            _assert_serves_the_earlier_run(agent)
        ground.assert_earlier_results_are_there()
        assert _files(ground.state) <= before
    ground.assert_nothing_is_left()


def _assert_serves_the_earlier_run(agent: Agent) -> None:
    status, runs = agent.ask("/runs")
    assert status == 200 and record_of(RUN) in map(record_of, runs), runs


@drill
def test_disk_full_temporary(ground: Ground) -> None:
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
    _assert_refused(done, "temporary", code=1)
    ground.assert_nothing_is_left()


def _clock(ground: Ground) -> tuple[Path, dict[str, str]]:
    """The file that holds the shift, and the environment that makes a process obey it."""
    file, library = ground.folder / "clock", ground.folder / "clock.so"
    source = Path(__file__).with_name("clock_shift.c")
    file.write_text("0")
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return file, {"LD_PRELOAD": str(library), "DRILL_CLOCK": str(file)}


@drill
def test_clock_of_the_agent(ground: Ground) -> None:
    """It stays ready, goes on to scan, and dates its scans by the new clock."""
    file, shifted = _clock(ground)
    with ground.agent("--interval=2", **shifted) as agent:
        agent.assert_ready()
        for shift in (DAY_SECONDS, -DAY_SECONDS, 0):
            file.write_text(str(shift))
            assert agent.ask("/readyz")[0] == 200, f"after a jump to {shift:+d} s"

            def is_dated_anew(shift: int = shift) -> bool:
                taken: float = agent.ask("/snapshot")[1]["taken_at_seconds"]
                return abs(taken - time.time() - shift) < DAY_SECONDS / 2

            eventually(is_dated_anew, f"a scan after a jump to {shift:+d} s")
            assert agent.ask("/metrics")[0] == 200, f"after a jump to {shift:+d} s"


@drill
def test_clock_of_a_record(ground: Ground) -> None:
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
    assert Path(done.stdout.strip()).is_file(), done
    assert len(list(runs.glob("*.json"))) == STORED_RUNS


@drill
def test_state_corrupt_at_start(ground: Ground) -> None:
    """It is ready, serves the good part on page and in JSON, and names the bad files in its log."""
    ground.store_earlier_results()
    (ground.state / BENCH_FILE).write_text("[" * 100_000)
    runs = ground.state / RUNS_FOLDER
    (runs / "20260102T000000-1.json").write_text(json.dumps({**RUN, "schema_version": 99}))
    odd = {"schema_version": 1, "layout": 7, "comparison": [3, {"forecast": {"low": "x"}}], "model": [], "loss": "no"}
    (runs / "20260103T000000-1.json").write_text(json.dumps(odd))
    with ground.agent() as agent:
        agent.assert_ready()
        _assert_serves_the_earlier_run(agent)
        assert agent.ask("/", Accept="text/html")[0] == 200
        assert BENCH_FILE in agent.words() and "20260102T000000-1.json" in agent.words()


@drill
def test_api_down_at_start(ground: Ground) -> None:
    """The agent is ready without it, and publishes once it is there."""
    with ApiServer() as api:
        api.down()
        config = write_kubeconfig(ground.folder / "kubeconfig", api.url)
        words = (f"--host={path_of()}", "--publish", "--node-name=n1")
        with ground.agent(*words, KUBECONFIG=str(config)) as agent:
            agent.assert_ready()
            api.up()
            eventually(lambda: api.of_kind("NodeTopology"), "the node is published", BACK_SECONDS)
            agent.assert_ends_in_time()
