"""A benchmark that is stopped from outside keeps what it had measured, and is never taken for a whole one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rigs.recorded import view

from agent.base import result_store
from agent.base import result_store as keep
from agent.base.exit_codes import EXIT_FAILED
from agent.checks.measured import checks_of_bench, must_be_measured, with_bench
from agent.checks.verdict import judge
from collectives.bench.results import BenchResult, Measurement, read_result

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


def statuses(result: BenchResult) -> dict[str, str]:
    return {check.code: check.status for check in checks_of_bench(result, ())}


def test_what_was_stopped_is_unknown_not_failed_and_not_passed() -> None:
    """The machine did nothing wrong; a run that ended of itself before its end fails as ever."""
    assert statuses(WHOLE)["bench.run.incomplete"] == "pass"
    assert statuses(CUT)["bench.run.incomplete"] == "unknown"
    assert statuses(replace(CUT, stopped_by=None))["bench.run.incomplete"] == "fail"
    wrong = replace(CUT, measurements=(replace(ONE, verified=False),))
    assert statuses(wrong)["bench.result.unverified"] == "fail"


def test_who_asked_for_the_measurement_gets_no_pass() -> None:
    """A preflight that was to measure, and was stopped, fails; what an agent kept from before stays unknown."""
    seen = with_bench(view("cpu-only-vm"), CUT)
    kept = {check.code: check.status for check in seen.checks}
    assert kept["bench.run.incomplete"] == "unknown"
    now = must_be_measured(seen.checks)
    assert {check.code: check.status for check in now}["bench.run.incomplete"] == "fail"
    assert judge(now, fail_on="fail").exit_code == EXIT_FAILED
    assert must_be_measured(checks_of_bench(WHOLE, ())) == checks_of_bench(WHOLE, ())


def test_a_stopped_run_that_measured_nothing_replaces_nothing(tmp_path: Path) -> None:
    """One that measured something does, with its mark."""
    keep.keep_bench(WHOLE, tmp_path)
    assert keep.keep_bench(replace(CUT, measurements=()), tmp_path) is None
    assert read_result(tmp_path / keep.BENCH_FILE) == WHOLE
    keep.keep_bench(CUT, tmp_path)
    assert read_result(tmp_path / keep.BENCH_FILE) == CUT
    assert [line.complete for line in result_store.bench_history(tmp_path)] == [False, True]
