"""How a job ended is a statement of its own: good channels excuse no death, and no death makes channels bad."""

from __future__ import annotations

from evidence_rows import INFO, rows
from rigs.logs import read
from rigs.tables import each_row

from collectives.nccl_log import evidence
from collectives.nccl_log.codes import CODES

GOOD = [
    f"{INFO}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
    f"{INFO}Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
]


@each_row("steps", [1, 900])
@each_row(("code", "line"), [*rows("ends"), *rows("ends_of_launchers"), *rows("failures")])
def test_a_job_that_died_is_not_a_pass(line: str, code: str, steps: int) -> None:
    """Two statements: GPUDirect RDMA was on, and the job failed, with the line as proof; the exit code is the worse."""
    verdict = read([*GOOD, *(f"step {n} loss 1.0" for n in range(steps)), line])
    assert (verdict.gdrdma, verdict.outcome) == ("on", "failed")
    assert [problem.code for problem in verdict.problems] == [code]
    assert [row.line for row in verdict.problems[0].lines] == [steps + 3]
    assert evidence.exit_code(verdict) == evidence.FAILED


@each_row(
    "launcher", ["12: ", "[1,3]<stdout>:", "[rank3]: ", "2026-01-02T03:04:05.678Z ", "(Worker pid=3, ip=10.0.0.1) "]
)
@each_row(("code", "line"), [rows("ends")[n] for n in (4, 11, 19, -4)])
def test_behind_a_launcher_too(launcher: str, line: str, code: str) -> None:
    """What ended the job stands behind the marks of the launcher."""
    assert [p.code for p in read([launcher + text for text in (*GOOD, line)]).problems] == [code]


@each_row("line", [*rows("alive"), *rows("resembling")])
def test_words_of_a_living_job_are_no_end(line: str) -> None:
    """Handlers, zeros, retries, texts about errors and other libraries' words."""
    verdict = read([*GOOD, line])
    assert (verdict.problems, verdict.outcome) in [((), "unknown"), ((), "finished")]


@each_row(("code", "cause"), rows("causes"))
@each_row("rank", ["", "10: ", "[rank3]: ", "(RayWorker pid=3, ip=10.0.0.1) "])
def test_every_known_text_counts_below_last_error(cause: str, code: str, rank: str) -> None:
    """PyTorch repeats NCCL's last warning without anything of NCCL's before it."""
    front = [
        rank + "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled system error, NCCL version 2.18.5"
    ]
    below = read([*front, rank + "Last error:", rank + cause])
    assert code in [problem.code for problem in (*below.problems, *below.notes)]
    beside = read([*front, f"{rank}Last error: {cause}"])
    assert code in [problem.code for problem in (*beside.problems, *beside.notes)]


def test_every_code_that_ends_a_job_fails() -> None:
    """An end is never less than a failure."""
    assert {meaning.severity for meaning in CODES.values() if meaning.ends} == {"fail"}
