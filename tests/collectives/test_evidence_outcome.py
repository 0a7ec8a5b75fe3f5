# ruff: noqa: E501 - messages are quoted as they are printed
"""How a job ended is a statement of its own: good channels excuse no death, and no death makes channels bad."""

from __future__ import annotations

from evidence_rows import DIED, END, INFO, rows
from rigs.logs import read
from rigs.tables import each_row

from collectives.nccl_log import evidence
from collectives.nccl_log.codes import CODES

GOOD = [
    f"{INFO}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
    f"{INFO}Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
]


@each_row(("code", "line"), rows("ends"))
def test_a_job_that_died_is_not_a_pass(line: str, code: str) -> None:
    """Two statements: GPUDirect RDMA was on, and the job failed; the exit code follows the worse."""
    verdict = read([*GOOD, "loss 1.0", line])
    assert verdict.gdrdma == "on"
    assert verdict.outcome == "failed"
    assert [problem.code for problem in verdict.problems] == [code]
    assert [row.line for row in verdict.problems[0].lines] == [4]
    assert evidence.exit_code(verdict) == evidence.FAILED


@each_row(
    "launcher", ["12: ", "[1,3]<stdout>:", "[rank3]: ", "2026-01-02T03:04:05.678Z ", "(Worker pid=3, ip=10.0.0.1) "]
)
@each_row(("code", "line"), [rows("ends")[n] for n in (4, 11, 19, -4)])
def test_behind_a_launcher_too(launcher: str, line: str, code: str) -> None:
    """What ended the job stands behind the marks of the launcher."""
    assert [p.code for p in read([launcher + text for text in (*GOOD, line)]).problems] == [code]


@each_row("line", rows("alive"))
def test_words_of_a_living_job_are_no_end(line: str) -> None:
    """Handlers, zeros, retries and other libraries' words."""
    verdict = read([*GOOD, line])
    assert (verdict.problems, verdict.outcome) in [((), "unknown"), ((), "finished")]


def test_the_cause_is_named_and_the_launchers_words_are_notes() -> None:
    """One problem, the memory; what followed from it stands beside."""
    verdict = read(
        [
            *GOOD,
            "Traceback (most recent call last):",
            '  File "train.py", line 3, in <module>',
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
            "  exitcode  : 1 (pid: 4242)",
            "srun: error: node-1: task 0: Exited with exit code 1",
        ]
    )
    assert [problem.code for problem in verdict.problems] == ["gpu_out_of_memory"]
    assert {"job_failed", "python_traceback"} <= {note.code for note in verdict.notes}


def test_a_traceback_is_an_end_with_its_exception() -> None:
    """The header alone may be quoted; an ignored exception, or one before the end of the job, ended nothing."""
    header, error = "Traceback (most recent call last):", "ValueError: no such column"
    assert [p.code for p in read([*GOOD, header, "  File ...", error]).problems] == ["python_traceback"]
    assert [p.code for p in read([*GOOD, "[rank1]: " + header, "[rank1]: " + error]).problems] == ["python_traceback"]
    assert read([*GOOD, header, "loss 1.0"]).problems == ()
    assert read([*GOOD, "Exception ignored in: <function A.__del__>", header, error]).problems == ()
    frame = '  File "/usr/lib/python3.10/multiprocessing/util.py", line 300, in _run_finalizers'
    assert read([*GOOD, header, frame, "    finalizer()", error]).problems == ()
    logged = "INFO: import of quick_gelu failed with: Traceback (most recent call last):"
    assert read([*GOOD, logged, error]).problems == ()
    finished = read([*GOOD, header, error, "{'train_runtime': 12.5, 'train_loss': 1.0}"])
    assert (finished.problems, finished.outcome) == ((), "finished")
    assert "python_traceback" in [note.code for note in finished.notes]


@each_row(
    "line",
    [
        "# Avg bus bandwidth    : 123.45",
        "[INFO] [launch.py:348:main] Process 4242 exits successfully.",
        "job exited with code 0",
    ],
)
def test_an_end_that_a_line_states(line: str) -> None:
    """Not known is not finished."""
    assert read([*GOOD, line]).outcome == "finished"
    assert read(GOOD).outcome == "unknown"


def test_a_plugin_that_failed_ends_no_job_that_has_another_network() -> None:
    """NCCL goes on with sockets; without a network that it names the job is over."""
    failed = INFO.replace("INFO", "WARN") + "NET/OFI aws-ofi-nccl initialization failed"
    chosen = [
        f"{INFO}Using network Socket",
        f"{INFO}comm 0x7f rank 6 nRanks 16 nNodes 2 localRanks 8 localRank 6 MNNVL 0",
    ]
    assert read([failed]).outcome == "failed"
    assert read([failed, *chosen]).outcome == "unknown"


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


def test_a_retry_is_no_failure_before_the_last() -> None:
    """ "retrying (33/34)" goes on, "(34/34)" does not."""
    line = f"{INFO}socketPollConnect: connect to 10.0.0.2<40> returned No route to host, retrying (%d/34) after sleep for 3400 msec"
    assert read([*GOOD, line % 33]).problems == ()
    assert [p.code for p in read([*GOOD, line % 34]).problems] == ["socket_connect_failed"]


def test_every_code_that_ends_a_job_fails() -> None:
    """An end is never less than a failure."""
    assert {meaning.severity for meaning in CODES.values() if meaning.ends} == {"fail"}


@each_row(("code", "line"), rows("ends_of_launchers"))
def test_schedulers_name_how_a_step_ended(line: str, code: str) -> None:
    """The signal, the memory or the node that the launcher names; also among many other lines."""
    for lines in ([*GOOD, line], [*GOOD, *(f"step {n} loss 1.0" for n in range(900)), line]):
        verdict = read(lines)
        assert ([problem.code for problem in verdict.problems], verdict.outcome) == ([code], "failed")


@each_row("line", rows("resembling"))
def test_words_that_only_resemble_an_end(line: str) -> None:
    """A handler, a text about errors, a zero."""
    assert read([*GOOD, line]).problems == ()


def test_an_exception_in_a_thread_does_not_end_the_program() -> None:
    """Python says so above the traceback; an interrupt by the keyboard does end it."""
    header, error = "Traceback (most recent call last):", "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert read([*GOOD, "Exception in thread Thread-3 (run):", header, error]).problems == ()
    stopped = read([*GOOD, header, '  File "train.py", line 3', "KeyboardInterrupt"])
    assert [problem.code for problem in stopped.problems] == ["python_traceback"]


STEP = "srun: error: node-1: task 0: Exited with exit code 1"


def test_the_order_of_end_and_exception_decides_within_a_file() -> None:
    """Caught before the end; after it the program died, whatever it had trained."""
    assert read([*GOOD, *DIED, END]).outcome == "finished"
    late = read([*GOOD, END, *DIED])
    assert (late.outcome, [problem.code for problem in late.problems]) == ("failed", ["python_traceback"])


def test_an_earlier_step_that_failed_is_a_note_where_the_job_came_to_its_end() -> None:
    """Before the first line of NCCL, and with the end stated; else the failure stands."""
    early = read([STEP, *GOOD, END])
    assert (early.outcome, early.problems) == ("finished", ())
    assert "job_failed" in [note.code for note in early.notes]
    for lines in ([STEP, *GOOD], [*GOOD, STEP, END], [*GOOD, END, STEP], [STEP, *GOOD, END, STEP]):
        assert read(lines).outcome == "failed"


@each_row("line", ["Job 'raysubmit_a1b2' succeeded", "Successfully completed."])
def test_a_scheduler_states_the_end(line: str) -> None:
    """Ray's and LSF's own words."""
    assert read([*GOOD, line]).outcome == "finished"
