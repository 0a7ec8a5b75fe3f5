"""What became of a job that was asked to end: told by its own record, and by what it did when it was asked."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from agent.jobs import launch

JOB = """
import pathlib, signal, sys, time

def stop(*_):
    {stop}

signal.signal(signal.SIGTERM, stop)
pathlib.Path("{ready}").touch()
time.sleep(30)
"""
RECORDS = {
    "saves": "pathlib.Path('{record}').write_text('{{\"exit_code\": 75}}'); print('saved', flush=True); sys.exit(1)",
    "is done": "pathlib.Path('{record}').write_text('{{\"exit_code\": 0}}'); sys.exit(1)",
    "only ends": "sys.exit(1)",
}


def ended(folder, does, *, timeout_seconds=30.0, sigterm=True):
    """A job that ends as torchrun does, with 1; SIGTERM comes once it is ready."""
    ready, record = folder / "ready", folder / "flight.json"
    text = JOB.format(stop=RECORDS[does].format(record=record), ready=ready)

    def stop():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if sigterm:
        threading.Thread(target=stop, daemon=True).start()
    began = time.time() - 1
    made = launch.run([sys.executable, "-c", text], dict(os.environ), folder, timeout_seconds, lambda _line: None)
    own = launch.run_record.own_exit_code(record, made.exit_code, began, cut_short=bool(made.cut_short))
    return replace(made, exit_code=own)


@pytest.mark.parametrize(
    ("does", "code", "fate"),
    [("saves", 75, "stopped by SIGTERM: the job saved and ended; the same command goes on from there"),
     ("is done", 0, "stopped by SIGTERM: the job was done by then"),
     ("only ends", 1, "stopped by SIGTERM: the job ended without saving (exit code 1); the same command goes on from "
                      "its last checkpoint, if it had saved one")],
)  # fmt: skip
def test_sigterm_is_passed_on_and_its_outcome_told(tmp_path, does, code, fate):
    """75 only where the job saved; the handler of before is back."""
    before = signal.getsignal(signal.SIGTERM)
    done = ended(tmp_path, does)
    assert (done.exit_code, done.fate, done.killed) == (code, fate, False)
    assert signal.getsignal(signal.SIGTERM) is before
    if does == "saves":
        assert "saved" in done.last_lines


def test_a_job_that_runs_out_of_time_is_told_the_same_way(tmp_path):
    """The time limit asks as SIGTERM does: what was saved then is not lost."""
    for seconds in (3, 20):  # the second for a machine where the interpreter is not up after three
        done = ended(tmp_path, "saves", timeout_seconds=seconds, sigterm=False)
        if (tmp_path / "ready").exists():
            break
    fate, _, _ = done.fate.partition(";")
    assert (done.exit_code, fate) == (75, f"not done within {seconds} s: the job saved and ended")


def test_a_job_that_ends_by_itself_was_not_cut_short(tmp_path):
    """Its code stands, also where its record says nothing."""
    done = launch.run([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), tmp_path, 60, print)
    assert (done.fate, done.cut_short) == ("the job ended with exit code 3", "")
