"""Benchmarks of real ranks in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collectives.bench import run as bench
from collectives.bench.results import BenchResult


def measured(folder: Path, **settings: Any) -> BenchResult:
    """A run with gloo, a lock of its own in `folder`, and time to start on a busy machine."""
    usual = {"backend": "gloo", "startup_seconds": 240, "lock_path": str(folder / "lock")}
    return bench.run(bench.BenchSpec(**usual | settings))
