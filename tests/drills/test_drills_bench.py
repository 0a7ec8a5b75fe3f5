"""Benchmarks whose ranks fork or print without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from drill_ground import ROOT, Ground, drill

from collectives.bench import processes

pytestmark = pytest.mark.long
# Longer than any drill: what ends it is the fault. A result comes out whatever happens.
_LONG_RUN = """
import json, signal, sys, threading
from collectives.bench import run as bench
from contracts import plain
spec = bench.BenchSpec(
    sizes_bytes=(1024,), ops=("all_gather",), precision=None, min_iterations=1_000_000, max_iterations=1_000_000,
    budget_seconds=60, startup_seconds=240, backend="gloo", lock_path=sys.argv[1],
)
told = lambda event: print(event["event"], flush=True) if event["event"] == "joined" else None
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print(json.dumps(plain.write(bench.run(spec, told, stop))), flush=True)
"""


def _long_run(ground: Ground, **environment: str) -> subprocess.Popen[str]:
    """A benchmark in a process of its own, back once its ranks have joined."""
    place = ground.folder / "lock" / processes.LOCK_NAME
    process = subprocess.Popen(
        [sys.executable, "-c", _LONG_RUN, str(place)], env=ground.environment(environment),
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if (first := process.stdout.readline().strip()) != "joined":
        _, err = process.communicate(timeout=240)
        raise RuntimeError(f"the ranks do not join: {first} {err[-2000:]}")
    return process


def _result(process: subprocess.Popen[str], *words: str) -> list[str]:
    """What the partial result fails to say."""
    out, err = process.communicate(timeout=240)
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return [f"no result: {out[-300:]} {err[-500:]}"]
    told = "\n".join(found["problems"])
    lost = [f"the result does not say {word!r}: {told}" for word in words if word not in told]
    return ["the result claims to be complete", *lost] if found["complete"] else lost


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


def _at_start_of_ranks(ground: Ground, code: str) -> str:
    """PYTHONPATH with something that each Python process does when it starts."""
    place = ground.folder / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(code)
    return os.pathsep.join((str(place), str(ROOT)))


@drill
def test_bench_rank_forks(ground: Ground) -> list[str]:
    """A plain child and one that became a daemon: both end with the run."""
    process = _long_run(ground, PYTHONPATH=_at_start_of_ranks(ground, _FORKS))
    seen = sum("collectives.bench.rank" in line.split() for line in ground.commands())
    process.terminate()
    lost = [] if seen >= 4 else [f"only {seen} processes: the drill did not fork"]
    return [*lost, *_result(process, "stopped by its caller"), *ground.after()]


@drill
def test_bench_rank_fills_its_output(ground: Ground) -> list[str]:
    """Printed without end: the run is ended before the disk is full, with what was measured."""
    try:
        process = _long_run(ground, PYTHONPATH=_at_start_of_ranks(ground, _PRINTS))
    except RuntimeError as error:  # ended before the ranks joined: the result stands in the error's words
        return [*([] if "MiB" in str(error) else [str(error)]), *ground.after()]
    return [*_result(process, "the ranks printed more than"), *ground.after()]
