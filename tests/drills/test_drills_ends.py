"""SIGKILL of a launch that has saved a checkpoint; SIGTERM of a whole preflight; a full disk."""

import contextlib
import json
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import resident
from drill_ground import ROOT, SMALL_BENCH, Ground, drill
from rigs.results import RUN
from rigs.waiting import eventually

from agent.base import EXIT_STOPPED
from contracts.run_record import record_of

pytestmark = pytest.mark.long

SMALL_JOB = (
    "--ranks=2", "--set=max_steps=6", "--set=save_steps=2", "--set=dataset_rows=64", "--set=eval_strategy=no",
    "--set=profile_steps=0",
)  # fmt: skip


@drill
def test_kill_during_a_launch(ground: Ground) -> None:
    """The verb launch, two ranks that train and save, from their first checkpoint on."""
    ground.store_earlier_results()
    out = ground.folder / "out"
    process = ground.start("launch", f"--output={out}", *SMALL_JOB)
    eventually(lambda: process.poll() is not None or [*out.glob("checkpoint-*")], "it has saved", 300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    ground.assert_nothing_is_left(out)
    ground.assert_earlier_results_are_there()


@drill
def test_sigterm_of_a_preflight(ground: Ground) -> None:
    """The report holds the scan and the benchmark; verdict and exit code say that it was stopped."""
    ground.store_earlier_results()
    reports = ground.folder / "reports"
    process = ground.start("preflight", "--train", "-q", f"--report={reports}", "-o", "json", *SMALL_JOB, "--ranks=1")
    calibrates = "collectives.bench.calibrate"
    eventually(lambda: process.poll() is not None or ground.runs(calibrates), "it calibrates", 300)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == EXIT_STOPPED, err
    found = json.loads((reports / "report.json").read_text())
    assert json.loads(out) == found
    verdict = found["verdict"]
    assert (verdict["word"], verdict["why"]) == ("unknown", "stopped by SIGTERM before it was done")
    assert "not calibrated: stopped before it was done" in found["notes"]
    assert found["snapshots"] and found["bench"] and found["recommendation"]
    of_runs = [check for check in found["checks"] if check["code"].startswith(("run.", "forecast."))]
    assert {check["status"] for check in of_runs} == {"unknown"}
    ground.assert_nothing_is_left(reports)
    ground.assert_earlier_results_are_there()


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[None]:
    """A separate small file system over a folder."""
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
    """The state folder and a --save on such a disk: refused before any load, and what was stored stays."""
    with _disk(ground.state):
        ground.store_earlier_results()
        _fill(ground.state)
        before = _files(ground.state)
        _assert_refused(ground.run(*SMALL_BENCH, f"--save={ground.state / 'saved.json'}"), "saved.json", "is full")
        _assert_refused(ground.run("preflight", "-q", f"--report={ground.state / 'report'}"), "report", "is full")
        with ground.agent() as (agent, port):
            resident.wait(port, "/readyz", agent)
            assert record_of(RUN) in map(record_of, json.loads(resident.get(port, "/runs")[1]))
        ground.assert_earlier_results_are_there()
        assert _files(ground.state) <= before
    ground.assert_nothing_is_left()


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
