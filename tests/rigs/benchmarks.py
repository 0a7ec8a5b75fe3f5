"""Benchmarks of real ranks in tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from collectives.bench import run as bench
from collectives.bench.results import BenchResult

# A command behind these words has a /run/lock of its own, and meets no other benchmark of this host.
OWN_LOCK = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /run/lock && exec "$@"', "sh")


def require_own_lock() -> None:
    """Skip the test where no command can have a lock of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")


def measured(folder: Path, **settings: Any) -> BenchResult:
    """A run with gloo, a lock of its own in `folder`, and time to start on a busy machine."""
    usual = {"backend": "gloo", "startup_seconds": 240, "lock_path": str(folder / "lock")}
    return bench.run(bench.BenchSpec(**usual | settings))
