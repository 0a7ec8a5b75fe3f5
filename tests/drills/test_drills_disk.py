"""Disks that are full or read-only, and clocks that jump."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_ground import ROOT, RUN, SMALL_BENCH, Ground, drill, eventually, keep_something, state_lost

from agent.base.result_store import RUNS_FOLDER, STORED_RUNS
from contracts.run_record import record_of

pytestmark = pytest.mark.long

DAY_SECONDS = 86400


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[None]:
    """A small file system of its own over a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _close(place: Path, *, full: bool) -> None:
    """Full to the last byte, or read-only."""
    if not full:
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        return
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))


def _files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def _no_room(ground: Ground, *, full: bool) -> list[str]:
    """The state folder and a --save on such a disk: refused before any load, and what was kept stays."""
    with _disk(ground.state):
        keep_something(ground)
        _close(ground.state, full=full)
        before = _files(ground.state)
        done = ground.run(*SMALL_BENCH, f"--save={ground.state / 'saved.json'}")
        lost = _refused(done, "saved.json", "is full" if full else "cannot be written to")
        if full or ground.long:  # a report is written alike on both: the short form holds it on one
            report = ground.run("preflight", "-q", f"--report={ground.state / 'report'}")
            lost += _refused(report, "report", "is full" if full else "cannot be written to")
        with ground.agent() as agent:
            lost += [] if agent.ready() else [f"the agent is not ready: {agent.words()[-300:]}"]
            status, told = agent.ask("/runs")
            lost += [] if status == 200 and record_of(RUN) in map(record_of, told) else [f"/runs: {status} {told}"]
        lost += state_lost(ground.state)
        lost += [f"left on the disk: {name}" for name in _files(ground.state) - before]
    return [*lost, *ground.after()]


def _refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> list[str]:
    """A message for the user that names the place, with this exit code and without a traceback."""
    right = done.returncode == code and "Traceback" not in done.stderr and all(word in done.stderr for word in words)
    return [] if right else [f"{done.args[0]} ends with {done.returncode}: {done.stderr[-500:]}"]


@drill
def test_disk_full(ground: Ground) -> list[str]:
    """Nothing can be written where results are kept."""
    return _no_room(ground, full=True)


@pytest.mark.nightly
@drill
def test_disk_read_only(ground: Ground) -> list[str]:
    """The same on a disk that the kernel has turned read-only."""
    return _no_room(ground, full=False)


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


@pytest.mark.nightly
@drill
def test_clock_of_a_benchmark(ground: Ground) -> list[str]:
    """A whole result; no time in it is negative or a day long."""
    file, shifted = _clock(ground)
    over = threading.Event()

    def jump() -> None:
        while not over.wait(0.2):
            file.write_text(str(ground.random.choice((-DAY_SECONDS, 0, DAY_SECONDS))))

    thread = threading.Thread(target=jump)
    thread.start()
    done = ground.run(*SMALL_BENCH, **shifted)
    over.set()
    thread.join()
    if done.returncode:
        return [f"exit code {done.returncode}: {done.stderr[-500:]}", *ground.after()]
    found = json.loads(done.stdout)
    times = [found["seconds"], *(t for m in found["measurements"] for t in m["iteration_seconds"])]
    lost = [] if found["complete"] and all(0 < t < 3600 for t in times) else [f"times: {sorted(times)[:3]}"]
    return [*lost, *ground.after()]


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
