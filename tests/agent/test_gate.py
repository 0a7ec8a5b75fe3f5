"""The gate's table of exit codes, and that unknown is never a pass."""

import pytest
from rigs.tables import each_row, rows_of

from agent.checks.findings import sort_worst_first
from agent.checks.verdict import GateError, judge, select
from contracts.finding import Finding

rows = rows_of(__file__)


def check(status: str, name: str = "a.b.c", *, required: bool = False) -> Finding:
    return Finding(code=name, status=status, node="n", required=required)  # type: ignore[arg-type]


# statuses present, a required check unknown, --fail-on -> exit code: every row of docs/reference/exit-codes.md
TABLE = rows("exit_codes")()


@each_row(("statuses", "required", "fail_on", "code"), TABLE)
def test_exit_codes(statuses: tuple[str, ...], required: bool, fail_on: str, code: int) -> None:
    """Each combination ends in its documented code."""
    checks = [check(s, f"x.{i}", required=required and s == "unknown") for i, s in enumerate(statuses)]
    assert judge(checks, fail_on=fail_on).exit_code == code  # type: ignore[arg-type]


@each_row(("status", "stopped", "word", "code"), rows("stopped"))
def test_a_stopped_run_is_no_pass_and_what_had_failed_stays_a_failure(status, stopped, word, code):
    verdict = judge([check(status)], stopped=stopped)
    assert (verdict.word, verdict.exit_code) == (word, code)


def test_require_marks_what_it_matches_and_adds_what_was_never_judged() -> None:
    """A required check that no probe judged is unknown, not forgotten."""
    chosen = select(
        [check("pass", "rdma.port.down")], require=("rdma.*",), known=("rdma.port.down", "rdma.memlock.low")
    )
    assert {(c.code, c.status, c.required) for c in chosen} == {
        ("rdma.port.down", "pass", True),
        ("rdma.memlock.low", "unknown", True),
    }
    assert judge(chosen).exit_code == 5
    assert select([check("fail", "a.b")], require=("a.*",), skip=("a.b",)) == (), "--skip wins over --require"


@each_row("option", ["require", "skip"])
def test_a_pattern_that_names_no_check_is_an_error(option: str) -> None:
    """A typing error in a gate must not read as a pass."""
    with pytest.raises(GateError, match=r"rmda\.\*"):
        select([check("pass", "rdma.port.down")], **{option: ("rmda.*",)})


def test_failures_are_listed_first() -> None:
    """Worst first, then by name."""
    order = [c.status for c in sort_worst_first([check(s) for s in ("pass", "warn", "info", "fail", "unknown")])]
    assert order == ["fail", "warn", "unknown", "info", "pass"]


def on(status: str, code: str, subject: str = "", node: str = "n") -> Finding:
    return Finding(code=code, status=status, node=node, subject=subject)  # type: ignore[arg-type]


@each_row(("found", "why"), rows("verdicts"))
def test_a_verdict_counts_the_findings_that_the_list_prints(found: list[list[str]], why: str) -> None:
    """The same on several devices is one; nothing seen is not called healthy."""
    assert judge([on(*each) for each in found]).why == why


def test_a_check_counts_once_by_its_worst_result_and_results_are_counted_too() -> None:
    """The sum over checks is their number; `counts`, which scripts read, stays the number of results."""
    found = [on("fail", "a.b", "x"), on("fail", "a.b", "y"), on("pass", "a.b", node="m"), on("unknown", "a.c"),
             on("warn", "a.c", node="m"), on("pass", "a.d")]  # fmt: skip
    verdict = judge(found)
    assert verdict.listed == {"fail": 1, "warn": 1, "unknown": 0, "info": 0, "pass": 1}
    assert verdict.counts == {"fail": 2, "warn": 1, "unknown": 1, "info": 0, "pass": 2}
    assert judge(found[3:5], fail_on="unknown").exit_code == 5  # an unknown stays one, whatever another node says
