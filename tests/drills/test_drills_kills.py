"""SIGKILL of a benchmark and a launch at random moments; SIGTERM of a whole preflight."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from drill_ground import LONG, SMALL_BENCH, Ground, drill
from rigs.waiting import eventually

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


def _assert_runs_again(ground: Ground, *words: str) -> None:
    """Every tenth time in the long form: the same command, undisturbed, ends well."""
    if LONG and ground.random.random() < 0.1:
        done = ground.run(*words)
        assert done.returncode == 0, done


@drill(long=90)
def test_kill_during_a_benchmark(ground: Ground) -> None:
    """The verb bench, two ranks."""
    ground.store_earlier_results()
    words = (*SMALL_BENCH, f"--save={ground.folder / 'saved.json'}")
    _kill_at_random(ground, "bench", *words)
    ground.assert_nothing_is_left(ground.folder)
    ground.assert_earlier_results_are_there()
    _assert_runs_again(ground, *words)


@drill(long=60)
def test_kill_during_a_launch(ground: Ground) -> None:
    """The verb launch, two ranks that train and save."""
    ground.store_earlier_results()
    words = ("launch", f"--output={ground.folder / 'out'}", *SMALL_JOB)
    _kill_at_random(ground, "launch", *words)
    ground.assert_nothing_is_left(ground.folder / "out")
    ground.assert_earlier_results_are_there()
    _assert_runs_again(ground, *words)


@drill
def test_sigterm_of_a_preflight(ground: Ground) -> None:
    """The report holds the scan and the benchmark; verdict and exit code say that it was stopped."""
    ground.store_earlier_results()
    reports = ground.folder / "reports"
    process = ground.start("preflight", "--train", "-q", f"--report={reports}", "-o", "json", *SMALL_JOB, "--ranks=1")
    calibrates = "collectives.bench.calibrate"
    eventually(lambda: process.poll() is not None or ground.runs(calibrates), "it calibrates", 300)
    time.sleep(ground.random.uniform(0.0, 1.0))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == EXIT_STOPPED, err
    found = json.loads((reports / "report.json").read_text())
    assert json.loads(out) == found
    verdict = found["verdict"]
    assert (verdict["word"], verdict["why"]) == ("unknown", "stopped by SIGTERM before it was done")
    assert "not calibrated: stopped before it was done" in found["notes"]
    assert found["snapshots"] and found["bench"] and found["recommendation"]
    assert {check["status"] for check in found["checks"] if check["code"].startswith(("run.", "forecast."))} == {
        "unknown"
    }
    ground.assert_nothing_is_left(reports)
    ground.assert_earlier_results_are_there()
