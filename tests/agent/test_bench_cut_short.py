"""A benchmark that is stopped from outside keeps what it had measured, and is never taken for a whole one."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent.cli.exits import EXIT_FAILED
from agent.gate.measured import asked_now, checks_of_bench
from agent.gate.verdict import judge
from agent.http.load import Bench, Bencher, judged
from agent.http.state import State
from agent.jobs import bench_history
from agent.jobs import result_store as keep
from agent.view import look
from collectives.bench.results import BenchResult, Measurement, result_from_json, result_to_json
from probes.host.recording import load
from probes.scan import scan

MACHINE = Path(__file__).parents[1] / "machines" / "cpu-only-vm.json"
ONE = Measurement(
    op="all_gather", backend="gloo", ranks=(0, 1), hosts=("a", "a"), bytes=65536, iteration_seconds=(0.001,),
    median_seconds=0.001, spread_ratio=None, algbw_bytes_per_second=6.5e7, busbw_bytes_per_second=3.3e7, verified=True,
)  # fmt: skip
WHOLE = BenchResult(
    measurements=(ONE, ONE), world_size=2, backend="gloo", hosts=("a", "a"), environment={}, versions={},
    started_at_seconds=1000.0, seconds=3.0,
)  # fmt: skip
CUT = replace(
    WHOLE, measurements=(ONE,), started_at_seconds=2000.0, complete=False, stopped_by="SIGTERM",
    problems=("stopped by SIGTERM: all processes of the run were ended",),
)  # fmt: skip

# What the verb `bench` does: the partial result is written when it is told to end, and not at once.
CHILD = """
import pathlib, signal, sys, time
saved = next(word.partition("=")[2] for word in sys.argv if word.startswith("--save="))
def stop(*_):
    time.sleep(0.2)
    pathlib.Path(saved).write_text(pathlib.Path(sys.argv[1]).read_text())
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).with_name("ready").touch()
time.sleep(600)
"""


def statuses(result: BenchResult) -> dict[str, str]:
    return {check.id: check.status for check in checks_of_bench(result, ())}


def test_what_was_stopped_is_unknown_not_failed_and_not_passed() -> None:
    """The machine did nothing wrong; a run that ended of itself before its end fails as ever."""
    assert statuses(WHOLE)["bench.run.incomplete"] == "pass"
    assert statuses(CUT)["bench.run.incomplete"] == "unknown"
    assert statuses(replace(CUT, stopped_by=None))["bench.run.incomplete"] == "fail"
    wrong = replace(CUT, measurements=(replace(ONE, verified=False),))
    assert statuses(wrong)["bench.result.unverified"] == "fail"


def test_who_asked_for_the_measurement_gets_no_pass() -> None:
    """A preflight that was to measure, and was stopped, fails; what an agent kept from before stays unknown."""
    view = look((scan(load(MACHINE)),), bench=CUT)
    kept = {check.id: check.status for check in view.checks}
    assert kept["bench.run.incomplete"] == "unknown"
    now = judged(view, CUT)
    assert {check.id: check.status for check in now}["bench.run.incomplete"] == "fail"
    assert judge(now, fail_on="fail").exit_code == EXIT_FAILED
    assert asked_now(checks_of_bench(WHOLE, ())) == checks_of_bench(WHOLE, ())


def test_a_stopped_run_that_measured_nothing_replaces_nothing(tmp_path: Path) -> None:
    """One that measured something does, with its mark."""
    keep.keep_bench(WHOLE, tmp_path)
    assert keep.keep_bench(replace(CUT, measurements=()), tmp_path) is None
    assert result_from_json(keep.read(tmp_path / keep.BENCH_FILE)) == WHOLE
    keep.keep_bench(CUT, tmp_path)
    assert result_from_json(keep.read(tmp_path / keep.BENCH_FILE)) == CUT
    assert [line.complete for line in bench_history.read(tmp_path)] == [False, True]


def test_the_end_of_the_agent_keeps_what_its_benchmark_measured(tmp_path: Path) -> None:
    """The agent waits until its child has written, and leaves the result for the next agent."""
    pytest.importorskip("torch", reason="an agent without torch runs no benchmark")
    (tmp_path / "partial.json").write_text(json.dumps(result_to_json(CUT)))
    (tmp_path / "state").mkdir()
    found = scan(load(MACHINE))
    state = State(lambda: (found,), interval_seconds=3600, folder=tmp_path / "state")
    bencher = Bencher(state, command=(sys.executable, "-c", CHILD, str(tmp_path / "partial.json")))
    bencher.start(Bench(ranks=2))
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    bencher.stop()
    assert bencher.last["status"] == "failed"
    view = state.refresh()
    assert view.bench == CUT
    assert next(check for check in view.checks if check.id == "bench.run.incomplete").status == "unknown"
