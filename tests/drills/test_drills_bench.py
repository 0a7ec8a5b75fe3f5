"""Benchmarks whose ranks fork or print without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from drill_ground import ROOT, Ground, drill
from rigs.benchmarks import SCRIPT
from rigs.waiting import eventually

from collectives.bench import processes

pytestmark = pytest.mark.long
# Longer than any drill: what ends it is the fault.
LONG_RUN = {
    "sizes_bytes": [1024], "ops": ["all_gather"], "precision": None, "min_iterations": 1_000_000,
    "max_iterations": 1_000_000, "budget_seconds": 60, "startup_seconds": 240, "backend": "gloo",
}  # fmt: skip
_FORKS = """
import os, signal, time
if os.environ.get("RANK") == "1":
    for daemon in (False, True):
        if os.fork() == 0:
            if daemon:
                os.setsid()
                if os.fork():
                    os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
            os._exit(0)
"""
_PRINTS = """
import os, threading
def forever():
    line = b"NET/IB : complaint of a library\\n" * 32768
    while True:
        os.write(2, line)
if os.environ.get("RANK") == "0":
    threading.Thread(target=forever, daemon=True).start()
"""


def _start_with(ground: Ground, code: str) -> subprocess.Popen[str]:
    """A benchmark in a separate process. Each of its Python processes runs this code as it starts."""
    (ground.folder / "site").mkdir()
    (ground.folder / "site" / "sitecustomize.py").write_text(code)
    path = os.pathsep.join((str(ground.folder / "site"), str(ROOT)))
    settings = {**LONG_RUN, "lock_path": str(ground.folder / "lock" / processes.LOCK_NAME)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(settings)], env=ground.environment({"PYTHONPATH": path}), cwd=ROOT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _assert_partial(process: subprocess.Popen[str], words: str) -> None:
    """The result is partial and says why."""
    out, err = process.communicate(timeout=300)
    found = json.loads(out.strip().splitlines()[-1])
    assert not found["complete"] and words in "\n".join(found["problems"]), (found["problems"], err[-500:])


@drill
def test_bench_rank_forks(ground: Ground) -> None:
    """A plain child and one that became a daemon: both end with the run."""
    process = _start_with(ground, _FORKS)

    def ranks() -> int:
        return sum("collectives.bench.rank" in words.split() for _, words in ground.living())

    eventually(lambda: process.poll() is not None or ranks() >= 5, "a launcher, two ranks and two forks of them")
    process.terminate()
    _assert_partial(process, "stopped by its caller")
    ground.assert_nothing_is_left()


@drill
def test_bench_rank_fills_its_output(ground: Ground) -> None:
    """Printed without end: the run is ended before the disk is full, with what was measured."""
    _assert_partial(_start_with(ground, _PRINTS), "MiB")
    ground.assert_nothing_is_left()
