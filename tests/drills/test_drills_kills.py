"""SIGKILL of a benchmark and a launch at random moments; SIGTERM of a whole preflight."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from drill_ground import SMALL_BENCH, Ground, drill, eventually, keep_something, state_lost

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
