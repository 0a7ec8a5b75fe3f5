"""promtool's own lint of the exposition of every recorded machine."""

from __future__ import annotations

import subprocess

import pytest
from rigs.recorded import NAMES, snapshot
from rigs.tables import each_row
from test_real_prometheus import bench, run

from agent import metrics
from agent.checks.measured import with_bench
from agent.checks.view import look


@pytest.mark.prometheus
@each_row("name", NAMES)
def test_promtool_finds_nothing_to_mend(name: str, programs: dict[str, str]) -> None:
    """`promtool check metrics` reads the exposition and has no word against it."""
    view = with_bench(look((snapshot(name),), runs=(run(name),)), bench(name))
    body, _ = metrics.exposition(view, "")
    assert b"topoflight_bench_busbw" in body and b"topoflight_run_step_seconds" in body
    done = subprocess.run([programs["promtool"], "check", "metrics"], input=body, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()
