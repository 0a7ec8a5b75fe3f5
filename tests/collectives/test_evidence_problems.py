"""Every fault that a log can show has a code, its lines and a first action; how a job ended is reported as well."""

import re
import tomllib
from pathlib import Path

from evidence_rows import INFO, rows
from rigs.logs import read
from rigs.tables import each_row

from collectives.nccl_log import evidence, problems as evidence_problems, reader
from collectives.nccl_log.codes import CODES, PROVIDERS, SIGNS


@each_row(("expected", "line"), rows("warnings"))
def test_warnings(line: str, expected: list[str]) -> None:
    """The text of each version, its code, and the line as proof."""
    verdict = read(["loss 1.0", line])
    got = sorted(problem.code for problem in verdict.problems)
    assert [code for code in got if code not in ("no_transport_evidence",)] == [
        code for code in expected if code != "no_transport_evidence"
    ]
    shown = [row for problem in verdict.problems for row in problem.lines]
    assert {row.line for row in shown} == {2}
    worst = {problem.severity for problem in verdict.problems}
    assert evidence.exit_code(verdict) == (evidence.FAILED if "fail" in worst else evidence.NO_EVIDENCE)


IB = f"{INFO}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
P2P = f"{INFO}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
SHM = f"{INFO}Channel 00 : 1[1] -> 0[0] via SHM/direct/direct"


def net(name: str = "IB/0", tag: str = "/GDRDMA", direction: str = "send") -> str:
    return f"{INFO}Channel 00/0 : 0[0] -> 2[0] [{direction}] via NET/{name}{tag}"


@each_row(("name", "gdrdma", "expected", "exit_code", "lines"), rows("scenes"))
def test_scenes(name: str, gdrdma: str, expected: list[str], exit_code: int, lines: list[str]) -> None:
    """The whole verdict: GPUDirect RDMA, problems, and what a gate does with it."""
    verdict = read(lines)
    assert verdict.gdrdma == gdrdma
    assert sorted(problem.code for problem in verdict.problems) == expected
    assert evidence.exit_code(verdict) == exit_code


@each_row(("listing", "ports"), rows("device_lists"))
def test_lists_of_devices(listing: str, ports: list[str]) -> None:
    """Merged NICs, rails and planes, SHARP, RCCL, data-direct devices, and the empty list."""
    assert read([f"{INFO}NET/IB : Using {listing} eth0:10.0.0.1<0>"]).hcas == tuple(ports)


def test_gate_without_gdrdma() -> None:
    """A gate that does not ask for GPUDirect RDMA passes a proven socket run, and still fails a fault."""
    socket = [net("Socket/0", "")]
    assert [evidence.exit_code(read(socket, require_gdrdma=needed)) for needed in (True, False)] == [3, 0]
    assert [row.severity for row in read(socket, require_gdrdma=False).problems] == ["info"]
    broken = [net(), next(line for codes, line in rows("warnings") if codes == ["ib_retry_exceeded"])]
    assert evidence.exit_code(read(broken, require_gdrdma=False)) == evidence.FAILED


@each_row(("code", "has", "lacks", "lines"), rows("remedies"))
def test_the_first_action_is_for_what_the_log_says(code: str, has: str, lacks: str, lines: list[str]) -> None:
    """The type and the number of an error, the devices, the version and the provider decide on the advice."""
    problem = next(problem for problem in read(lines).problems if problem.code == code)
    assert has in f"{problem.message}. {problem.action}"
    assert lacks not in problem.action


def test_no_case_of_an_action_is_hidden_or_without_a_row() -> None:
    """Each case of codes.toml is the action of a row above, and its keys are known."""
    given = {problem.action for row in rows("remedies") for problem in read(row[3]).problems}
    cases = [case for meaning in CODES.values() for case in meaning.cases]
    assert [case for case in cases if case.keys() - {"message"} != {"seen", "action"}] == []
    assert [case["action"] for case in cases if case["action"] not in given] == []


def test_rows_of_the_tables_are_valid() -> None:
    """messages.toml and codes.toml: known keys only, texts without digits, patterns that compile, every piece used."""
    folder = Path(evidence_problems.__file__).parent
    data = tomllib.loads((folder / "messages.toml").read_text(encoding="utf-8"))
    source = (folder / "messages.toml").read_text(encoding="utf-8")
    wrong = [row for row in data["messages"]["rows"] if not {"code", "text"} <= row.keys()]
    wrong += [row for row in data["messages"]["rows"] if row.keys() - {"code", "text", "pattern", "own", "rising"}]
    assert wrong == []
    assert [sign for sign in SIGNS if not sign.needle.strip() or re.search(rb"\d", sign.needle)] == []
    assert [sign for sign in SIGNS if b"<<" in sign.pattern] == []
    groups = {sign: re.compile(sign.pattern).groups for sign in SIGNS}
    assert [sign for sign in SIGNS if sign.rising and groups[sign] < 2] == []
    assert [name for name in data["pieces"] if source.count(f"<<{name}>>") == 0] == []
    assert [code for code, meaning in CODES.items() if not (meaning.message and meaning.action)] == []
    without = {sign.code for sign in SIGNS} - CODES.keys()
    assert not without, f"collectives/nccl_log/codes.toml: add a row for {', '.join(without)} of messages.toml"
    assert {meaning.severity for meaning in CODES.values()} == {"info", "warn", "fail"}
    assert {meaning.severity for meaning in CODES.values() if meaning.ends} == {"fail"}, "an end is a failure"


def test_every_code_can_be_reached() -> None:
    """A code that nothing gives is no vocabulary."""
    of_providers = {code for _, code in PROVIDERS}
    assert of_providers <= CODES.keys()
    given = of_providers | {sign.code for sign in SIGNS} | {meaning.other_provider for meaning in CODES.values()}
    source = "".join(Path(module.__file__).read_text() for module in (evidence, evidence_problems, reader))
    unreached = [code for code in CODES if code not in given and f'"{code}"' not in source]
    assert not unreached, f"collectives/nccl_log/messages.toml: add a row that gives {', '.join(unreached)}"


@each_row("line", rows("harmless"))
def test_what_is_tried_again_or_follows_is_no_failure(line: str) -> None:
    """Retries, NCCL's way on without SHARP, the shutdown, and variables set to their default."""
    verdict = read([P2P, line])
    assert evidence.exit_code(verdict, fail_on="warn") == evidence.PASS
    assert [note.code for note in verdict.notes] == []


def test_a_long_line_is_shown_where_it_names_the_fault() -> None:
    """The launcher's messages share a line with the bar of a program, which ends no line."""
    signals = "".join(f"WARNING:api:Sending process {pid} closing signal SIGTERM     " for pid in range(899505, 899512))
    line = f"Loading:   0%| | 0/2{signals}ERROR:api:failed (exitcode: -9) local_rank: 4 (pid: 899509) of binary: python"
    (shown,) = read([line]).problems[0].lines
    assert "(exitcode: -9) local_rank: 4 (pid: 899509)" in shown.text
    assert (shown.text[:3], len(shown.text)) == ("...", 300)
    (shown,) = read([f"ERROR:api:failed (exitcode: -9) local_rank: 4{signals}"]).problems[0].lines
    assert (shown.text[:9], len(shown.text)) == ("ERROR:api", 300)


GOOD = [
    f"{INFO}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
    f"{INFO}Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
]


ENDS = [rows(name) for name in ("ends", "ends_of_launchers", "failures")]


@each_row(("code", "line", "steps"), [*((*row, 1) for table in ENDS for row in table),
                                      *((*table[0], 900) for table in ENDS)])  # fmt: skip
def test_a_job_that_died_is_not_a_pass(line: str, code: str, steps: int) -> None:
    """Two statements: GPUDirect RDMA was on, and the job failed, with the line as proof; the exit code is the worse."""
    verdict = read([*GOOD, *(f"step {n} loss 1.0" for n in range(steps)), line])
    assert (verdict.gdrdma, verdict.outcome) == ("on", "failed")
    assert [problem.code for problem in verdict.problems] == [code]
    assert [row.line for row in verdict.problems[0].lines] == [steps + 3]
    assert evidence.exit_code(verdict) == evidence.FAILED


@each_row("step", rows("steps"))
@each_row("caught", rows("caught"))
def test_a_failure_that_training_outlives_is_a_note(caught: str, step: str) -> None:
    """Two more steps may be of ranks that wait for the failed one; three are of a job that continues."""
    first, second, *more = (step.replace("N", str(number)) for number in range(1, 6))
    for after, outcome in ((more[:2], "failed"), (more[:1] * 4, "failed"), (more, "unknown")):
        verdict = read([*GOOD, first, second, caught, *after])
        assert (verdict.gdrdma, verdict.outcome) == ("on", outcome)
        assert bool(verdict.notes) == (after == more)
    assert read([*GOOD, first, second, *more, caught]).outcome == "failed"


@each_row("launcher", rows("launchers"))
@each_row(("code", "line"), [rows("ends")[n] for n in (4, 11, 19, -4)])
def test_behind_a_launcher_too(launcher: str, line: str, code: str) -> None:
    """The line that ended the job has the prefix of the launcher."""
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
    found = read([*front, f"{rank}Last error: {cause}"])
    assert code in [problem.code for problem in (*found.problems, *found.notes)]


def test_a_failed_connection_names_both_hosts_and_the_rank_that_reports_it() -> None:
    ranks = [f"n{rank // 2}:{rank}:9 [{rank % 2}] NCCL INFO comm 0x{rank} rank {rank} nRanks 4 nNodes 2 localRanks 2"
             for rank in range(4)]  # fmt: skip
    names = [f"n{host}:{2 * host}:9 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.{host}<0>" for host in range(2)]
    failed = "n1:3:9 [1] ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.0<33> with status=12 opcode=0 len=0"
    problem = read([*names, *ranks, failed]).problems[0]
    assert (problem.code, problem.hosts, problem.ranks) == ("ib_retry_exceeded", ("n0", "n1"), (3,))
