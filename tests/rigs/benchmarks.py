"""Benchmarks of real ranks in tests."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from collectives.bench import run as bench
from collectives.bench.results import BenchResult

# `python -c SCRIPT SETTINGS`: a benchmark that prints each event and its result; SIGTERM stops it.
SCRIPT = """
import json, signal, sys, threading
from collectives.bench import run as bench
from contracts import plain
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
result = bench.run(bench.BenchSpec(**json.loads(sys.argv[1])), lambda event: print(event["event"], flush=True), stop)
print(json.dumps(plain.write(result)), flush=True)
"""
# A command behind these words has its own /run/lock, and meets no other benchmark of this host.
OWN_LOCK = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /run/lock && exec "$@"', "sh")


def require_own_lock() -> None:
    """Skip the test where no command can have its own lock."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")


def measured(folder: Path, **settings: Any) -> BenchResult:
    """A run with gloo, its own lock in `folder`, and time to start on a busy machine."""
    usual = {"backend": "gloo", "startup_seconds": 240, "lock_path": str(folder / "lock")}
    return bench.run(bench.BenchSpec(**usual | settings))
