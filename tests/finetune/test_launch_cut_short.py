"""What became of a job that was asked to end: told by its own record, and by what it did when it was asked."""

import math
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest
from rigs.tables import each_row, rows_of

from agent.advice import job_plan
from agent.advice.advise import advise
from agent.advice.request import Request
from agent.jobs.launch import run, run_record
from planner.recommend import checkpoint_to_save

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


def sigterm_once(ready):
    """This process gets SIGTERM when the job has made the file `ready`."""

    def stop():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()


def ended(folder, does, *, timeout_seconds=30.0, sigterm=True):
    """A job that ends as torchrun does, with 1; SIGTERM comes once it is ready."""
    ready, record = folder / "ready", folder / "run.json"
    text = JOB.format(stop=RECORDS[does].format(record=record), ready=ready)

    if sigterm:
        sigterm_once(ready)
    began = time.time() - 1
    made = run([sys.executable, "-c", text], dict(os.environ), folder, timeout_seconds, lambda _line: None)
    own = run_record.choose_exit_code(run_record.read_since(record, began), made.exit_code, cut_short=True)
    return replace(made, exit_code=own)


@pytest.mark.parametrize(("does", "code", "ending"), rows_of(__file__)("sigterm")())
def test_sigterm_is_passed_on_and_its_outcome_reported(tmp_path, does, code, ending):
    """75 only where the job saved; the handler of before is back."""
    before = signal.getsignal(signal.SIGTERM)
    done = ended(tmp_path, does)
    assert (done.exit_code, done.ending, done.killed) == (code, ending, False)
    assert signal.getsignal(signal.SIGTERM) is before
    if does == "saves":
        assert "saved" in done.last_lines


def test_a_job_that_runs_out_of_time_is_told_the_same_way(tmp_path):
    """The time limit asks as SIGTERM does: what was saved then is not lost."""
    for seconds in (3, 20):  # the second for a machine where the interpreter is not up after three
        done = ended(tmp_path, "saves", timeout_seconds=seconds, sigterm=False)
        if (tmp_path / "ready").exists():
            break
    ending, _, _ = done.ending.partition(";")
    assert (done.exit_code, ending) == (75, f"not done within {seconds} s: the job saved and ended")


def test_a_job_that_ends_by_itself_was_not_cut_short(tmp_path):
    """Its code remains, also where its record says nothing."""
    done = run([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), tmp_path, 60, print)
    assert (done.ending, done.cut_short) == ("the job ended with exit code 3", "")


# As torchrun is: told to end, it gives its ranks no long time (30 s in torch 2.13; none here).
LAUNCHER = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {job!r}])

def stop(*_):
    rank.kill(); sys.exit(1)

signal.signal(signal.SIGTERM, stop)
sys.exit(1 if rank.wait() else 0)
"""
SLOW = "time.sleep(1.5); pathlib.Path('{record}').write_text('{{\"exit_code\": 75}}'); sys.exit(1)"


@pytest.mark.parametrize("grace_seconds", [20, 1])
def test_ranks_save_for_as_long_as_they_are_given(tmp_path, grace_seconds):
    """Their launcher is not told to end while they do, and after the time all of it is ended, which is said."""
    ready, record = tmp_path / "ready", tmp_path / "run.json"
    job = JOB.format(stop=SLOW.format(record=record), ready=ready)

    sigterm_once(ready)
    began = time.time() - 1
    words = [sys.executable, "-c", LAUNCHER.format(job=job)]
    made = run(words, dict(os.environ), tmp_path, 30.0, lambda _line: None, grace_seconds=grace_seconds)
    own = run_record.choose_exit_code(run_record.read_since(record, began), made.exit_code, cut_short=True)
    assert made.killed is (grace_seconds == 1) and record.exists() is not made.killed
    if made.killed:
        assert "did not end within 1 s of SIGTERM and was killed" in made.ending
    else:
        assert own == run_record.RESUMABLE


@each_row("given", [125 << 20, 1 << 30])
def test_the_time_to_save_here_is_that_of_the_checkpoint(given):
    """Of a full fine-tune of 8B twice its checkpoint at the storage's rate, as in the pods; the built-in job 20 s."""
    run = {"method": "full", "sequence_length": 2048, "global_batch": 64}
    advice = advise(Request.of(machine="p5.48xlarge", nodes=2, model="Llama-3.1-8B", **run), ())
    saved, step = checkpoint_to_save(advice)
    assert saved > 8e9 * (4 + 2 * 4)  # fp32 weights, and Adam's two moments
    assert job_plan.estimate_grace(advice, given) == math.ceil(step + 2 * saved / given) > 60
    assert job_plan.describe_grace(advice, "the ranks", job_plan.estimate_grace(advice, None), 20, None)
    assert job_plan.estimate_grace(replace(advice, model=None), None) == job_plan.GRACE_SECONDS
