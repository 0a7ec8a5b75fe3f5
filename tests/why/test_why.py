"""Who is behind, by the rules; and a few faults made for real. bench/why.py makes them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import why as table
from rigs.tables import each_row

from agent.advice import network_cost
from agent.advice.request import Request
from agent.cluster.node_facts import unpublished
from agent.why import diagnosis as gathered
from collectives.nccl_log.transport import Evidence
from collectives.traces import ras, watchdog
from collectives.traces.calls import Call, RankTrace
from collectives.traces.states import Mark, RankState
from collectives.traces.watchdog import LogFacts
from contracts.finding import Finding, Status
from contracts.run_record import Measured, RunRecord
from planner.why import Cause, RunFacts, Verdict, judge
from probes.api import Ok
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort

NOW = 1000.0


def call(
    number: int, op: str = "all_reduce", *, done: bool = True, at: float = NOW, size: int = 8, group: str = "0"
) -> Call:
    return Call(group=group, number=number, record=number, op=op, done=done, created=at, sizes=((size,),))


def trace(rank: int, *calls: Call) -> RankTrace:
    newest: dict[str, int] = {}
    for one in calls:
        newest[one.group] = max(one.number, newest.get(one.group, 0))
    return RankTrace(rank=rank, calls=calls, enqueued=newest, names={"0": "default_pg"})


def of(rows: dict[int, list[Call]], world: int = 4, **more: Any) -> RunFacts:
    """What the dumps of these ranks' calls show."""
    return RunFacts(traces={rank: trace(rank, *calls) for rank, calls in rows.items()}, world=world, now=NOW, **more)


def said(found: Verdict) -> tuple[str, tuple[int, ...], str]:
    return found.state, found.ranks, found.causes[0].code if found.causes else ""


def history(count: int, late: dict[int, float] | None = None, ranks: int = 4) -> dict[int, list[Call]]:
    """Three calls in quick succession, as a model is wrapped; then one a second, to which `late` ranks come later."""
    return {
        rank: [call(n, at=NOW - 200 + (n * 0.002 if n <= 3 else n + (late or {}).get(rank, 0.0)))
               for n in range(1, count + 1)]
        for rank in range(ranks)
    }  # fmt: skip


def waiting(missing: int = 2, for_seconds: float = 70.0, **state: object) -> RunFacts:
    """Everyone but one rank waits in call 61."""
    rows = history(60)
    for rank, calls in rows.items():
        if rank != missing:
            calls.append(call(61, done=False, at=NOW - for_seconds))
    states = {rank: RankState(rank=rank, host="a", written=NOW, phase="collective") for rank in rows}
    more = {"calls": 60, **state}
    states[missing] = RankState(rank=missing, host="b", written=NOW, **more)  # type: ignore[arg-type]
    return of(rows, states=states)


@each_row(("phase", "code"), [("data", "rank.data"), ("compute", "rank.compute"), (None, "rank.behind")])
def test_the_missing_rank_is_named_and_never_who_waits(phase: str | None, code: str) -> None:
    found = judge(waiting(phase=phase, since=NOW - 40))
    assert (found.state, found.ranks, found.waiting, found.nodes) == ("stuck", (2,), (0, 1, 3), ("b",))
    assert found.causes[0].code == code


BUSY = {"phase": "compute", "cpu_share": 0.9}
STEP = ("model.py:7 forward", "train.py:31 main")


@each_row(
    ("state", "seconds", "code"),
    [
        *(({"phase": phase}, 200.0, "") for phase in ("save", "evaluate", "compile")),
        ({"phase": "save"}, 310.0, "rank.save"),
        ({"phase": "compute", "calls": 6}, 200.0, ""),  # before the first step: data is prepared, a model is loaded
        ({**BUSY, "own": ("train.py:40 push_to_hub",)}, 200.0, ""),
        ({**BUSY, "own": ("train.py:40 push_to_hub",)}, 310.0, "rank.compute"),
        ({**BUSY, "own": STEP, "usual": STEP}, 20.0, "rank.compute"),
        ({**BUSY, "own": ("model.py:7 forward", "train.py:80 main"), "usual": STEP}, 200.0, ""),  # rank 0 evaluates
        ({"phase": "compute", "cpu_share": 0.0}, 50.0, ""),
        ({"phase": "compute", "cpu_share": 0.0}, 70.0, "rank.compute"),
        ({"phase": "compute", "cpu_share": 0.0, "is_active": True}, 70.0, ""),  # it downloads
    ],
)
def test_work_that_others_wait_for_is_a_fault_only_beyond_its_limit(
    state: dict[str, Any], seconds: float, code: str
) -> None:
    found = judge(waiting(for_seconds=seconds, **state))
    assert said(found) == (("stuck", (2,), code) if code else ("fine", (), ""))
    assert code or (found.not_at_fault and "counts as a fault after" in found.line)
    assert judge(replace(waiting(for_seconds=40.0, **state), limit=20.0)).ranks == (2,)  # as --limit sets it


@each_row(("saved", "computed", "state"), [(14, 1, "fine"), (2, 30, "stuck"), (0, 3, "stuck")])
def test_who_has_just_come_back_from_a_checkpoint_is_not_at_fault(saved: int, computed: int, state: str) -> None:
    mark = Mark(at=NOW - 75, samples={"compute": 100, "collective": 100})
    looks = {"compute": 100 + computed, "collective": 104, "save": saved}
    found = judge(waiting(phase="compute", since=NOW - computed, marks=(mark,), samples=looks))
    assert (found.state, bool(found.not_at_fault)) == (state, state == "fine")


@each_row(("process", "state", "code"), [("stopped", "stuck", "rank.stopped"), ("gone", "failed", "rank.gone")])
def test_the_process_table_comes_first(process: str, state: str, code: str) -> None:
    found = judge(replace(waiting(phase="compute", for_seconds=3.0), processes={2: process}))
    assert (found.state, found.causes[0].code, found.ranks) == (state, code, (2,))


def test_a_rank_of_which_nothing_was_read_is_not_accused() -> None:
    seen = waiting()
    found = judge(replace(seen, traces={r: t for r, t in seen.traces.items() if r != 2}, states={}))
    assert said(found) == ("stuck", (), "call.timeout")
    assert "whether rank 2 came is not known" in found.line


def dumped(*open_calls: dict[str, Any], done: int = 3, gone: bool = False) -> RunFacts:
    """Four ranks' dumps without anything beside them, ten minutes after the last call; the ranks' open calls."""
    traces = {}
    for rank, mine in enumerate(open_calls):
        rows = [call(n, at=NOW - 700 + n) for n in range(1, done + 1)]
        if mine:
            rows.append(replace(call(done + 1, done=False, at=NOW - 640), **mine))
        traces[rank] = replace(trace(rank, *rows), groups={"0": (0, 1, 2, 3)}, written=NOW)
    return RunFacts(traces=traces, world=4, now=NOW - 640)


WAITS = {"started": True}


@each_row(
    ("rows", "ranks", "code", "words"),
    [
        ((WAITS, WAITS, {}, WAITS), (2,), "rank.behind", "its last there is number 3"),
        ((WAITS, WAITS, {"started": False}, WAITS), (2,), "rank.behind", "its GPU has not begun it"),
        ((WAITS, WAITS, WAITS), (), "call.timeout", "whether rank 3 came is not known"),
        ((WAITS, WAITS, WAITS, WAITS), (), "network", "every rank of the group has entered"),
    ],
)
def test_dumps_alone_tell_who_is_missing(rows: Any, ranks: tuple[int, ...], code: str, words: str) -> None:
    found = judge(dumped(*rows))
    assert said(found) == ("stuck", ranks, code)
    assert words in found.line
    assert any("640 s by the dumps' file times" in said for said in found.causes[0].evidence)


def test_a_wait_for_a_message_names_its_sender_alone() -> None:
    receive = Call(group="0", number=9, record=9, op="recv", p2p=True, peer=2, created=NOW - 640)
    rows = {r: replace(trace(r, call(1)), groups={"0": (0, 1, 2, 3)}, taken=NOW) for r in range(4)}
    rows[0] = replace(rows[0], calls=(*rows[0].calls, receive))
    assert judge(RunFacts(traces=rows, world=4, now=NOW)).ranks == (2,)
    send = replace(receive, op="send", peer=0)
    rows[2] = replace(rows[2], calls=(*rows[2].calls, send))
    assert judge(RunFacts(traces=rows, world=4, now=NOW)).ranks == ()


def logged(*rows: tuple[int, str, int, int | None], size: int | None = None) -> RunFacts:
    """Ranks whose watchdog spoke: (rank, group, call, newest call where it says)."""
    traces = {
        rank: RankTrace(
            rank=rank, partial=True, sizes={group: size} if size else {},
            calls=(Call(group=group, number=number, op="allreduce"),) if number else (),
            enqueued={group: newest} if newest is not None else {},
        )
        for rank, group, number, newest in rows
    }  # fmt: skip
    return RunFacts(log=LogFacts(traces=traces))


@each_row(
    ("seen", "ranks", "code"),
    [
        (logged((118, "0", 10, 12)), (), "call.timeout"),
        (logged((0, "0", 10, 12), (1, "0", 10, 12), (2, "", 10, None)), (), "call.timeout"),
        (logged((0, "", 96120, None), (7, "", 64088, None)), (), "call.timeout"),
        (logged((0, "", 11, None), (1, "", 10, None)), (), "call.timeout"),
        (logged((0, "0", 10, 12), (1, "0", 10, 12), (3, "0", 0, 12)), (), "call.timeout"),
        (logged((0, "0", 10, 12), (1, "0", 10, 12), (3, "0", 0, 9)), (3,), "rank.behind"),
        (logged((0, "0", 10, 12), (1, "0", 9, 9)), (1,), "rank.behind"),
        (logged((0, "5", 10, 10), (1, "5", 10, 10), size=3), (), "call.timeout"),
        (logged((0, "5", 10, 10), (1, "5", 10, 10), (2, "5", 10, 10), size=3), (), "network"),
        (logged((0, "a", 10, 10), (1, "b", 4, 4)), (), "call.timeout"),
    ],
)
def test_a_rank_is_named_only_where_a_line_says_that_it_has_not_come(
    seen: RunFacts, ranks: tuple[int, ...], code: str
) -> None:
    found = judge(seen)
    assert said(found) == ("stuck", ranks, code)


BARRIER = "Waiting in store based barrier to initialize process group for {} rank: {}, key: k:1 (world_size=4, {}=3, t"


def test_ranks_in_different_calls_of_a_group_are_no_fault_of_the_network() -> None:
    """One has enqueued what the other waits in, and the other has left what it is in."""
    seen = logged((0, "0", 122, 127), (1, "0", 126, 128), size=2)
    found = judge(seen)
    assert said(found) == ("stuck", (), "call.timeout")
    assert any("some have left number 122" in said for said in found.causes[0].evidence)
    assert judge(logged((0, "0", 126, 127), (1, "0", 126, 128), size=2)).causes[0].code == "network"


@each_row(
    ("lines", "state", "code", "words"),
    [
        (["[rank2]: RuntimeError: [/pytorch/third_party/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
          "1800000ms for recv operation to complete"], "failed", "call.timeout", "rank 2 waited in vain"),
        (["[rank1]: RuntimeError: [pair.cc:598] Connection closed by peer [::ffff:10.0.0.9]:28048"], "failed",
         "rank.lost", "rank 1 lost a peer: 10.0.0.9"),
        ([BARRIER.format("", 0, "worker_count").replace("=3", "=5")], "stuck", "bootstrap_mismatch", "5 ranks"),
        (["RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error"], "failed", "socket_connect_failed",
         "could not be reached"),
        (["RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for send operation to complete"], "failed",
         "watchdog_timeout", "did not finish"),
        (["NVRM: fallen off the bus and is not responding to commands."], "failed", "gpu_xid", "GPU driver"),
        (["NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=python3, Ch 00000001 caused by previous Xid 149",
          "NVRM: Xid (PCI:0000:ed:00): 45, pid=19, name=python3, Ch 0000000c caused by previous Xid 145"], "failed",
         "gpu_xid", "GPUs 0000:dc:00, 0000:ed:00: Xid 149"),
        (["[rank3]:[E905 10:00:00.1 WorkNCCL.cpp:310] [TC][rank=1][name=fsdp] Operation timed out after 600001 ms",
          "[rank3]:[E905 10:00:00.2 U.cpp:310] [TC][rank=1][name=fsdp] Aborting process due to timeout on rank 1 - x"],
         "failed", "call.timeout", "rank 3 waited in vain"),
        (["[rank3]: RuntimeError: NCCL operation timed out"], "failed", "call.timeout", "rank 3 waited in vain"),
        (["[rank0]: socketProgressOpt: Call to recv from 172.16.3.4<33759> failed : Connection reset by peer"],
         "failed", "rank.lost", "rank 0 lost a peer: 172.16.3.4"),
        (["x" * 400 + " RuntimeError: NCCL error: unhandled cuda error a1:2:3 [1] NCCL INFO cudaDriverVersion 12080"],
         "failed", "call_failed", "NCCL call failed"),
    ],
)  # fmt: skip
def test_what_gloo_and_the_kernel_say_is_read(
    tmp_path: Path, lines: list[str], state: str, code: str, words: str
) -> None:
    log = tmp_path / "job.log"
    log.write_text("\n".join(lines))
    found = gathered.answer(gathered.WhySources(logs=(str(log),)))
    assert said(found) == (state, (), code)
    assert words in found.line


@each_row(
    ("lines", "line"),
    [
        (["[OK]   ECC: no uncorrected volatile errors across 8 ranks"], "no fault found"),
        (["[OK]   ECC: no", "[INFO] NCCL environment: mismatch across 8 ranks in comm 0x1 for NCCL_ALGO"],
         "fine but for the log: NCCL's diagnostics: ranks differ"),
    ],
)  # fmt: skip
def test_what_nccls_diagnostics_say_is_an_answer(tmp_path: Path, lines: list[str], line: str) -> None:
    log = tmp_path / "diag.log"
    log.write_text("".join(f"node042:12345 NCCL DIAG {one}\n" for one in ["=== RAS Diagnostics ===", *lines]))
    found = gathered.answer(gathered.WhySources(diagnostics=(str(log),)))
    assert found.state == "fine"
    assert line in found.line
    assert any("1 checks passed" in source for source in found.sources)


def test_diagnostics_as_the_socket_of_ras_prints_them_are_read(tmp_path: Path) -> None:
    log = tmp_path / "diag.log"
    log.write_text("=== RAS Diagnostics ===\n[OK]   ECC: no uncorrected volatile errors across 8 ranks in comm 0x1f\n"
                   "[INFO] Xid 79 detected 2 times on host node-b. Restart the affected application.\n")  # fmt: skip
    with pytest.raises(gathered.WhyError, match="--diag"):
        gathered.answer(gathered.WhySources(ras=(str(log),)))
    found = gathered.answer(gathered.WhySources(diagnostics=(str(log),)))
    assert (found.state, found.causes[0].code) == ("failed", "gpu_xid")
    assert "GPU of node-b: Xid 79" in found.line
    assert any("1 checks passed" in source for source in found.sources)


def test_a_warning_alone_is_listed_and_decides_nothing(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("n:1:2 [3] NCCL INFO NET/IB: WQE stall (no CQE): peer=10.0.0.9<1> | local: qpn=1 dev=mlx5_3\n")
    found = gathered.answer(gathered.WhySources(logs=(str(log),)))
    assert (found.state, [cause.code for cause in found.causes]) == ("unknown", ["ib_request_stalled"])


@each_row(("signal", "ranks"), [(9, (3,)), (11, (3,)), (6, ())])
def test_who_aborts_first_may_only_have_waited(tmp_path: Path, signal: int, ranks: Any) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"""torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2025-05-21_15:43:03
  host      : n1
  rank      : 3 (local_rank: 3)
  exitcode  : -{signal} (pid: 14750)
  error_file: <N/A>
  traceback : Signal {signal} received by PID 14750
""")
    found = gathered.answer(gathered.WhySources(logs=(str(log),)))
    assert (found.state, found.ranks) == ("failed", ranks), found.line


def test_a_rank_that_ended_with_its_own_error_is_who_the_others_waited_for() -> None:
    heard = "torch.distributed.DistBackendError: NCCL error in: x, remote process exited"
    waited = logged((0, "", 10, None))

    def with_errors(errors: dict[int, str]) -> Verdict:
        return judge(replace(waited, log=replace(waited.log, errors=errors)))

    found = with_errors({3: "ValueError: no rows", 1: heard})
    assert (found.state, found.ranks, found.waiting) == ("failed", (3,), (0,))
    assert "ValueError: no rows" in found.line
    assert with_errors({1: heard}).causes[0].code == "call.timeout"
    assert with_errors(dict.fromkeys((1, 3), "ValueError: no rows")).ranks == ()


def test_the_dumps_of_a_few_ranks_accuse_nobody() -> None:
    seen = waiting()
    mine = {rank: replace(t, groups={"0": tuple(range(8))}) for rank, t in seen.traces.items() if rank in (0, 1)}
    found = judge(RunFacts(traces=mine, world=8, now=NOW))
    assert said(found) == ("stuck", (), "call.timeout")
    behind = judge(RunFacts(traces={**mine, 2: seen.traces[2]}, world=8, now=NOW))
    assert behind.ranks == (2,)


def test_dumps_of_a_timeout_alone_name_the_missing_rank() -> None:
    """PyTorch's dumps do not say when they were made; the file's time bounds it."""
    seen = waiting(for_seconds=0.0)
    late = {rank: replace(one, written=NOW + 600) for rank, one in seen.traces.items()}
    found = judge(RunFacts(traces=late, world=4, now=NOW))
    assert (found.state, found.ranks) == ("stuck", (2,))
    assert "for 600 s by the dumps' file times" in found.causes[0].evidence[0]
    fresh = {rank: replace(one, written=NOW + 3) for rank, one in seen.traces.items()}
    assert judge(RunFacts(traces=fresh, world=4, now=NOW)).state == "fine"


def odd(mine: Call) -> RunFacts:
    """Rank 1 is in this call, the others in their usual one."""
    return of({rank: [*calls, mine if rank == 1 else call(5, done=False)] for rank, calls in history(4).items()})


def in_order(of_rank: int) -> RunFacts:
    """Three ranks that alternate two calls, of which one has swapped its last two."""
    rows = {r: [call(1), call(2, "all_gather"), call(3), call(4, "all_gather")] for r in range(3)}
    for rank, calls in rows.items():
        calls.append(call(5, "all_gather" if rank == of_rank else "all_reduce", done=False))
    return of(rows, world=3)


def left_behind(*, call_of_rank_2: Call) -> RunFacts:
    rows = {rank: [call(45, done=False, at=NOW - 60)] for rank in (0, 1, 3)}
    return of({**rows, 2: [call_of_rank_2]})


def circle() -> RunFacts:
    groups: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (0, 1)}
    waits = [trace(rank, call(1, group=group, done=False, at=NOW - 60)) for rank, group in enumerate("ab")]
    return RunFacts(traces={one.rank: replace(one, groups=groups) for one in waits}, world=2, now=NOW)


def not_begun() -> RunFacts:
    """The last rank has enqueued the call that the others wait in; its GPU has not come to it."""
    rows = {rank: trace(rank, call(1), replace(call(2, done=False), started=rank != 3)) for rank in range(4)}
    return RunFacts(traces={rank: replace(one, written=NOW + 600) for rank, one in rows.items()}, world=4, now=NOW)


WORDS = "Rank {} is running collective: CollectiveFingerPrint(SequenceNumber={}OpType=BARRIER)"
SAME_CALL = f"Detected mismatch between collectives on ranks. {WORDS.format(1, 1)}, but {WORDS.format(2, 0)}."
FIRST_OF_TWO = {r: [call(1), call(2, done=False, size=8 if r == 0 else 5)] for r in range(2)}
TWO_AND_TWO = {r: [call(1), call(2, "broadcast" if r < 2 else "gather", done=False)] for r in range(4)}
TORCH = {1: Call(group="", number=21, op="broadcast"), 0: Call(group="", number=21, op="allreduce")}
HUNG = {6: "stood still for 480 s"}


@each_row(
    ("what", "seen", "state", "ranks", "code", "words"),
    [
        ("a short wait is none", waiting(phase="compute", for_seconds=1.5), "fine", (), "", ""),
        ("the dumps count before the watchdog",
         replace(dumped(WAITS, WAITS, {}, WAITS), log=logged((0, "0", 4, 4)).log), "stuck", (2,),
         "rank.behind", ""),
        ("a size of the job that cannot be true costs no memory", replace(waiting(), world=10**15), "stuck", (2,),
         "rank.behind", ""),
        ("torch itself found calls that do not match",
         RunFacts(log=LogFacts(clash=TORCH, errors={1: "RuntimeError: Detected mismatch between collectives"})),
         "failed", (), "call.other", "disagree"),
        ("the same call under other numbers is another order", RunFacts(log=watchdog.read([SAME_CALL])),
         "failed", (), "call.order", "disagree"),
        ("a watchdog that hangs itself is no wait for others", RunFacts(log=LogFacts(hung=HUNG, idle={6})), "failed",
         (6,), "watchdog_hung", "no collective was outstanding"),
        ("a watchdog that hangs in a collective accuses nobody", RunFacts(log=LogFacts(hung=HUNG)), "failed", (),
         "watchdog_hung", ""),
        ("a GPU that has not come to the call is behind", not_begun(), "stuck", (3,), "rank.behind", ""),
        ("another call", odd(call(5, "broadcast", done=False)), "stuck", (1,), "call.other", ""),
        ("another size", odd(call(5, done=False, size=4)), "stuck", (1,), "call.size", ""),
        ("an order is known by what came after what", in_order(1), "stuck", (1,), "call.order", ""),
        ("of two of four no majority is known", of(FIRST_OF_TWO), "stuck", (), "call.size",
         "the calls of ranks 2, 3 are not known"),
        ("two against two name no rank", of(TWO_AND_TWO), "stuck", (), "call.other", "disagree"),
        ("groups that wait for each other are a circle", circle(), "stuck", (0, 1), "call.circle", ""),
        ("a rank in a call that the others have left is behind",
         left_behind(call_of_rank_2=call(44, "all_gather", done=False, at=NOW - 60)), "stuck", (2,), "rank.behind",
         "which the others have left"),
    ],
)  # fmt: skip
def test_who_is_named(what: str, seen: RunFacts, state: str, ranks: tuple[int, ...], code: str, words: str) -> None:
    found = judge(seen)
    assert said(found) == (state, ranks, code), what
    assert words in found.line, what


def test_a_size_that_gloo_could_not_take_names_no_rank() -> None:
    """gloo ends the rank that is sent more than its call takes, which may be the one that is right."""
    states = {r: RankState(rank=r, written=NOW, ended=r in (0, 1, 3), error="RuntimeError: Connection closed by peer")
              for r in range(4)}  # fmt: skip
    line = "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 2048 vs 1024."
    found = judge(RunFacts(traces={}, states=states, world=4, now=NOW, log=watchdog.read([line])))
    assert said(found) == ("failed", (), "call.size") and found.unknown


def p2p(op: str, peer: int, *, done: bool = False, size: int = 8, record: int = 50) -> Call:
    return Call(group="pp", number=record, record=record, op=op, p2p=True, peer=peer, done=done, created=NOW - 60,
                sizes=((size,),))  # fmt: skip


def pipeline(**calls: list[Call]) -> Verdict:
    """Ranks 4, 5, 6 of a pipeline; the numbers of peers are those within it."""
    traces = {
        int(name[1:]): replace(trace(int(name[1:]), *mine), groups={"pp": (4, 5, 6)}) for name, mine in calls.items()
    }
    return judge(RunFacts(traces=traces, world=8, now=NOW))


def test_stages_of_a_pipeline_wait_for_each_other() -> None:
    """For who has not posted; where both ends have, the network; two sends are a circle, other sizes no match."""
    unposted = pipeline(r4=[p2p("send", 1)], r5=[p2p("recv", 0, done=True)], r6=[p2p("recv", 1)])
    assert (unposted.state, unposted.ranks, unposted.waiting) == ("stuck", (5,), (4, 6))
    assert pipeline(r4=[], r5=[p2p("recv", 0)], r6=[p2p("recv", 1)]).ranks == (4,)
    moving = pipeline(r4=[p2p("send", 1)], r5=[p2p("recv", 0)], r6=[p2p("recv", 1)])
    assert said(moving) == ("stuck", (), "network") and "ranks 4, 5" in moving.causes[0].evidence[1]
    assert said(pipeline(r4=[p2p("send", 1)], r5=[p2p("send", 0)], r6=[])) == ("stuck", (4, 5), "call.circle")
    assert said(pipeline(r4=[p2p("send", 1)], r5=[p2p("recv", 0, size=4)], r6=[])) == ("stuck", (), "call.size")


def test_one_late_rank_is_named_two_share_the_wait() -> None:
    one = judge(of(history(60, {3: 0.6})))
    assert (one.state, one.ranks) == ("slow", (3,))
    assert one.causes[0].share == pytest.approx(1.0)
    rows = history(60)
    for rank, start in ((1, 0), (3, 1)):
        rows[rank] = [
            replace(c, created=(c.created or 0) + (0.7 if n % 2 == start else 0)) for n, c in enumerate(rows[rank])
        ]
    assert all((cause.share or 0) < 0.8 for cause in judge(of(rows)).causes)


def test_a_late_rank_that_does_nothing_more_than_the_others_is_not_accused() -> None:
    traces = {r: trace(r, *c) for r, c in history(60, {3: 0.6}).items()}
    looks = {"collective": 60, "compute": 40}
    states = {r: RankState(rank=r, host="a", written=NOW, samples=looks, moving=looks, calls=60) for r in range(4)}
    assert judge(RunFacts(traces=traces, states=states, world=4, now=NOW)).ranks == ()
    more = {"collective": 20, "compute": 80}
    states[3] = replace(states[3], samples=more, moving=more)
    assert judge(RunFacts(traces=traces, states=states, world=4, now=NOW)).ranks == (3,)


def marks(before: dict[str, int], since: dict[str, int], began: int = 8, pieces: int = 14) -> tuple[Mark, ...]:
    """Ten seconds and a look a second each; of the calls half as many since."""
    found = [Mark(at=0.0), Mark(at=10.0)]
    for number in range(pieces):
        old, spent = found[-1], before if number < began else since
        samples = {kind: old.samples.get(kind, 0) + spent.get(kind, 0) for kind in {*before, *since, *old.samples}}
        found.append(Mark(at=old.at + 10, calls=old.calls + (100 if number < began else 25), samples=samples))
    return tuple(found)


GREW = ({"compute": 6, "collective": 4}, {"compute": 9, "collective": 1})
WAITED = ({"compute": 6, "collective": 4}, {"compute": 2, "collective": 8})


@each_row(
    ("rows", "ranks", "code"),
    [
        ([GREW] * 4, (), "all.compute"),
        ([WAITED] * 4, (), "all.collective"),
    ],
)
def test_a_pace_that_falls_is_told_by_what_grew(rows: list[Any], ranks: tuple[int, ...], code: str) -> None:
    states = {r: RankState(rank=r, host="a", written=NOW, marks=marks(*row)) for r, row in enumerate(rows)}
    found = judge(RunFacts(states=states, world=4, now=NOW))
    assert said(found) == ("slow", ranks, code)


def test_the_network_is_named_only_where_bytes_were_seen_to_wait() -> None:
    rows = {r: RankState(rank=r, host=f"h{r}", addresses=(f"10.0.0.{r}",), written=NOW, marks=marks(*WAITED))
            for r in range(4)}  # fmt: skip
    assert judge(RunFacts(states=rows, world=4, now=NOW)).unknown
    rows[1] = replace(rows[1], unsent={"10.0.0.2": 30, "10.0.0.3": 30, "10.0.0.0": 30})
    assert judge(RunFacts(states=rows, world=4, now=NOW)).causes[0].code == "link.node"
    # what rank 3's bytes waited for before the change says nothing of it
    busy = {"10.0.0.0": 90, "10.0.0.2": 90}
    rows[3] = replace(rows[3], unsent=busy, marks=tuple(
        replace(mark, unsent={one: looks * n // 9 for one, looks in busy.items()} if n < 9 else busy)
        for n, mark in enumerate(rows[3].marks)))  # fmt: skip
    found = judge(RunFacts(states=rows, world=4, now=NOW))
    assert (found.causes[0].code, found.nodes) == ("link.node", ("h1",))


def test_an_evaluation_is_no_slower_pace() -> None:
    evaluates = ({"compute": 6, "collective": 4}, {"evaluate": 8, "compute": 1, "collective": 1})
    states = {r: RankState(rank=r, host="a", written=NOW, marks=marks(*evaluates)) for r in range(4)}
    assert judge(RunFacts(states=states, world=4, now=NOW)).state == "fine"


TIMED_OUT = "RuntimeError: Timed out waiting 120000ms for recv operation to complete"


def gave_up(phase: str, killed_before: float = 0.0, error: str = TIMED_OUT, **more: Any) -> Verdict:
    """Rank 2 was at something while the others waited for 120 s and ended; then its process was gone."""
    before = [call(n, at=NOW - 150 + n) for n in range(1, 9)]
    rows = {rank: trace(rank, *before, call(9, done=False, at=NOW - 120)) for rank in (0, 1, 3)}
    states = {r: RankState(rank=r, written=NOW, phase="collective", ended=True, error=error) for r in rows}
    states[2] = RankState(rank=2, written=NOW - killed_before, phase=phase, since=NOW - 140, calls=8)
    gone = dict.fromkeys(range(4), "gone")
    return judge(
        RunFacts(traces={**rows, 2: trace(2, *before)}, states=states, processes=gone, world=4, now=NOW, **more)
    )


@each_row("phase", ["compile", "save", "evaluate"])
def test_a_timeout_that_is_too_short_is_named_and_not_who_worked(phase: str) -> None:
    found = gave_up(phase, first=0)
    assert said(found) == ("failed", (), "timeout.short")
    assert "timeout of 120 s" in found.line
    assert by_states_alone(phase).causes[0].code == "timeout.short"


def by_states_alone(phase: str) -> Verdict:
    """The same without any dump."""
    states = {r: RankState(rank=r, written=NOW, phase="collective", ended=True, error=TIMED_OUT) for r in (0, 1, 3)}
    states[2] = RankState(rank=2, written=NOW, phase=phase, since=NOW - 140)
    return judge(RunFacts(states=states, processes=dict.fromkeys(range(4), "gone"), world=4, now=NOW))


def test_who_was_killed_while_saving_is_gone() -> None:
    lost = "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"
    by_torchrun = gave_up("save", error=TIMED_OUT, first=2)
    long_before = gave_up("save", killed_before=110.0)
    by_peers = gave_up("save", error=lost)
    for found in (by_torchrun, long_before, by_peers):
        assert said(found) == ("failed", (2,), "rank.gone")


def test_a_rank_that_still_loaded_data_is_named_for_that_though_the_launcher_ended_it() -> None:
    found = gave_up("data")
    assert said(found) == ("failed", (2,), "rank.data")


def test_one_long_pause_is_no_fault() -> None:
    rows = history(60)
    rows[2] = [replace(c, created=(c.created or 0) + (0.9 if n == 30 else 0)) for n, c in enumerate(rows[2])]
    assert judge(of(rows)).state == "fine"


def test_ras_that_lists_who_is_ahead_does_not_overrule_the_calls() -> None:
    comm = ras.RasComm(
        id="1", size=4, ranks={r: ras.RasRank(rank=r, counts={"AllReduce": 9 - (r == 0)}) for r in range(4)}
    )
    found = gathered.with_ras(judge(waiting(phase="data")), ras.RasReport(comms=(comm,)), None)
    assert found.ranks == (2,)
    assert "lists outliers" in found.disagree[0]


def test_a_monitored_barrier_and_the_checks_of_detail_name_ranks() -> None:
    told = watchdog.read(["RuntimeError: [Rank 0]: Ranks 3, 5 failed to pass monitoredBarrier in 30000 ms"])
    found = judge(RunFacts(log=told, world=8, now=NOW))
    assert (found.state, found.ranks) == ("failed", (3, 5))
    print_of = "Rank {} is running collective: CollectiveFingerPrint(SequenceNumber=5, OpType={}, TensorShape=[2, 5], T"
    words = [f"Detected mismatch between collectives on ranks. {print_of.format(rank, op)}, but "
             f"{print_of.format(0, 'REDUCE')}" for rank, op in ((1, "ALLREDUCE"), (2, "REDUCE"))]  # fmt: skip
    odd_one = judge(RunFacts(log=watchdog.read(words)))
    assert (odd_one.ranks, odd_one.causes[0].code) == ((1,), "call.other")
    two = judge(RunFacts(log=watchdog.read(words[:1])))
    assert two.ranks == ()
    assert "rank 0 calls reduce of [2, 5], rank 1 calls allreduce of [2, 5]" in two.line


def test_one_rank_that_prints_its_own_call_accuses_nobody() -> None:
    line = "Detected mismatch between collectives on ranks. Rank 0 is running inconsistent collective: "
    found = judge(RunFacts(log=watchdog.read([f"{line}CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[9], T"])))
    assert said(found) == ("failed", (), "call.other")
    assert "rank 0 calls broadcast of [9]" in found.line


@each_row(
    ("lines", "state", "ranks"),
    [
        ([BARRIER.format("", rank, "worker_count") for rank in (0, 1, 3)], "stuck", (2,)),
        ([BARRIER.format("10 seconds", rank, "num_workers_joined") for rank in (0, 3)], "stuck", ()),
        ([BARRIER.format("", rank, "worker_count") for rank in (0, 1, 3)]
         + ["INFO Rank 0: Completed store-based barrier for key:k:1 with 4 nodes."], "fine", ()),
        (["torch.distributed.DistStoreError: Timed out initializing process group in store based barrier on "
          "rank 0, for key: k:1 (world_size=2, num_workers_joined=1, timeout=0:30:00)"], "failed", (1,)),
    ],
)  # fmt: skip
def test_who_does_not_join_is_named_where_all_who_did_say_so(lines: list[str], state: str, ranks: Any) -> None:
    found = judge(RunFacts(log=watchdog.read(lines)))
    assert (found.state, found.ranks) == (state, ranks), found.line


def test_a_rank_that_dumps_for_another_says_which_call_it_is_in_itself() -> None:
    said = (
        "[rank{0}]:[E ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Received a dump signal due "
        "to a collective timeout from  rank 6. Last enqueued NCCL work: {1}, last completed NCCL work: {2}."
    )
    read = watchdog.read([said.format(1, 31, 29), said.format(2, 31, 29)])
    found = judge(RunFacts(log=read))
    assert (found.state, found.ranks) == ("stuck", ())
    assert "ranks 1, 2 wait in a collective, number 30 of group 0" in found.line
    idle = judge(RunFacts(log=watchdog.read([said.format(1, 31, 31)])))
    assert idle.state == "fine"
    behind = watchdog.read(
        [said.format(0, 31, 30), said.format(1, 31, 30), said.format(2, 31, 30), said.format(3, 29, 29)]
    )
    assert judge(RunFacts(log=behind, world=4)).ranks == (3,)


def test_a_rank_whose_gpu_is_in_a_call_that_the_others_have_left_is_behind_by_the_log() -> None:
    found = judge(logged((2, "0", 44, 44), *((rank, "0", 47, 47) for rank in (0, 1, 3))))
    assert (found.ranks, found.causes[0].code) == ((2,), "rank.behind"), found.line


def test_a_saved_answer_of_ras_needs_no_option(tmp_path: Path) -> None:
    """Given as a log it says the same as with --ras; a log with other lines stays a log."""
    table = "Communicators... (0.00s)\n    0         1         2         1         2         1   RUNNING  INCOMPLETE\n"
    text = (f"{table}INCOMPLETE\n  Missing communicator data from 1 job process\n"
            "  Process 60004 on node n2 managing GPU 0\n\n#0-0 (b33) INCOMPLETE\n  The missing rank: 1\n")  # fmt: skip
    path = tmp_path / "ras.txt"
    path.write_text(text, encoding="utf-8")
    saved, asked = (
        gathered.answer(gathered.WhySources(logs=(str(path),))),
        gathered.answer(gathered.WhySources(ras=(str(path),))),
    )
    assert saved == asked and saved.unknown
    path.write_text(f"{text}n1:1:2 [0] NCCL INFO Using network Socket\n", encoding="utf-8")
    assert gathered.answer(gathered.WhySources(logs=(str(path),))) != asked


def test_ras_that_lacks_data_once_accuses_nobody() -> None:
    comm = ras.RasComm(id="1", size=2, ranks={1: ras.RasRank(rank=1, host="n2", pid=9, missing="no answer")})
    report, nothing = ras.RasReport(comms=(comm,), total=1, most=2), Verdict(state="fine", line="no fault found")
    once = gathered.with_ras(nothing, report, None)
    assert (once.state, once.causes) == ("unknown", ())
    assert "rank 1" in once.line
    twice, waited = (
        gathered.with_ras(nothing, report, report),
        gathered.with_ras(nothing, replace(report, timeouts=1), None),
    )
    assert [(found.state, found.ranks) for found in (twice, waited)] == [("stuck", (1,))] * 2


def test_a_call_that_some_have_left_is_the_networks_where_bytes_are_sent_again_in_vain() -> None:
    """Ranks 0 and 3 have had their parts of it; 1 and 2 wait for each other's."""
    rows = {rank: trace(rank, call(45, done=False, at=NOW - 60)) for rank in (0, 3)}
    rows |= {rank: trace(rank, call(44, done=False, at=NOW - 60)) for rank in (1, 2)}
    states = {
        r: RankState(rank=r, host=f"h{r}", addresses=(f"10.0.0.{r}",), written=NOW, phase="collective")
        for r in range(4)
    }
    states[1] = replace(states[1], held={"10.0.0.2": 30}, resent={"10.0.0.2": 28})
    found = judge(RunFacts(traces=rows, states=states, world=4, now=NOW))
    assert said(found) == ("stuck", (), "link")
    assert set(found.nodes) == {"h1", "h2"}
    states[1] = replace(states[1], resent={})  # its bytes wait, and the other's kernel answers
    assert judge(RunFacts(traces=rows, states=states, world=4, now=NOW)).ranks == (1, 2)


def test_a_link_that_no_look_saw_waiting_has_no_looks_as_evidence() -> None:
    rows = {rank: trace(rank, call(44, done=False, at=NOW - 60)) for rank in range(2)}
    states = {r: RankState(rank=r, host=f"h{r}", addresses=(f"10.0.0.{r}",), written=NOW, calls=44) for r in rows}
    found = judge(RunFacts(traces=rows, states=states, world=2, now=NOW))
    assert said(found) == ("stuck", (), "link")
    assert not any("bytes wait" in row for row in found.causes[0].evidence)


def test_who_has_called_ahead_and_not_left_what_all_others_have_is_behind() -> None:
    ahead = (call(46, done=False, at=NOW - 60), call(47, done=False, at=NOW - 60))
    rows = {rank: trace(rank, call(45, at=NOW - 61), *ahead) for rank in (0, 1, 3)}
    rows[2] = trace(2, call(45, done=False, at=NOW - 61), *ahead)
    found = judge(RunFacts(traces=rows, world=4, now=NOW))
    assert said(found) == ("stuck", (2,), "rank.behind")
    assert "which the others have left" in found.line
    older = {rank: replace(one, taken=NOW - 30 * (rank == 2)) for rank, one in rows.items()}
    assert judge(RunFacts(traces=older, world=4, now=NOW)).ranks == ()  # it may have left since it dumped
    rows[1] = trace(1, call(44))  # has not come: of a reduce the others may have left
    assert judge(RunFacts(traces=rows, world=4, now=NOW)).ranks == (1,)


def test_the_nic_is_named_of_the_node_behind_and_of_no_other() -> None:
    port = Finding(
        code="rdma.port.down", status=Status.FAIL, node="host-2", subject="mlx5_0", message="x", remedy="plug it in"
    )
    down = [port, replace(port, node="host-3", subject="mlx5_1")]
    throttled = Finding(code="gpu.clocks.throttled", status=Status.FAIL, node="host-2", subject="GPU 3", message="hot")
    cause = Cause(code="link.node", message="the network of host-2 carries nothing", nodes=("host-2",))
    cut = Verdict(state="stuck", line="stuck", nodes=("host-2",), causes=(cause,))
    found = gathered.with_nodes(cut, [*down, throttled])
    assert (found.nics, found.gpus) == (("host-2 mlx5_0",), ())
    assert found.causes[0].action == "plug it in"
    assert "rdma.port.down mlx5_0" in found.causes[0].evidence[0]
    slow = replace(cut, causes=(replace(cause, code="rank.compute"),))
    assert gathered.with_nodes(slow, [*down, throttled]).gpus == ("host-2 GPU 3",)
    nothing = gathered.with_nodes(Verdict(state="fine", line="fine"), down)
    assert (nothing.state, nothing.causes, nothing.nics) == ("fine", (), ())
    assert "host-2" in gathered.with_nodes(cut, down[1:]).unknown[0].what


NETWORKS = """kind: Pod
metadata: {{name: a, annotations: {{k8s.v1.cni.cncf.io/networks: '{}'}}}}
"""


@each_row(
    ("networks", "words"),
    [
        ("rdma-net", "net1 of the manifest's networks"),
        ("ns/rdma-a, ns/rdma-b@roce0", "net1, roce0 of the manifest's networks"),
        ('[{"name": "a", "interface": "rdma0"}, {"name": "b"}]', "rdma0, net2 of the manifest's networks"),
        ("", ""),
        ("[", ""),
    ],
)
def test_the_interface_of_rdma_is_named_by_who_knows_it(tmp_path: Path, networks: str, words: str) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(NETWORKS.format(networks))
    assert network_cost.rdma_of((), Evidence(), manifest) == words
    assert network_cost.rdma_of((), Evidence(hcas=("mlx5_1:1/RoCE",)), manifest) == "mlx5_1"
    port = RdmaPort(port=1, state="ACTIVE", netdev="net1")
    device = RdmaDevice(name="mlx5_1", kind="hca", ports=(port, replace(port, port=2, state="DOWN", netdev="net2")))
    scan = replace(unpublished("a", ""), outcomes={"rdma": Ok(facts=RdmaFacts(source="sysfs", devices=(device,)))})
    assert network_cost.rdma_of((scan,), Evidence(), manifest) == "net1"
    assert network_cost.rdma_of((), Evidence(), None) == ""


def test_a_cause_costs_its_share_of_all_steps() -> None:
    late = judge(of(history(60, {3: 0.5})))
    assert late.causes[0].cost == pytest.approx(0.5, abs=0.05)
    record = RunRecord(measured=Measured(step_seconds=2.0))
    request = Request(price="36", nodes=2).changed(steps=3600)
    found = gathered.costed(late, record, request, RunFacts())
    assert "min of 2 h 0 min for 3600 steps, +68 of your prices" in found.causes[0].price
    assert found.forecast.startswith("without it: ")
    assert gathered.costed(late, RunRecord(), request, RunFacts()) == late


def test_ras_accuses_no_majority() -> None:
    def report(count: int) -> ras.RasReport:
        ranks = {r: ras.RasRank(rank=r, counts={"AllGather": count + 1}) for r in (12, 13)}
        return ras.RasReport(comms=(ras.RasComm(id="1", size=32, ranks=ranks,
                                                spread={"AllGather": {count: 30, count + 1: 2}}),))  # fmt: skip

    nothing = Verdict(state="fine", line="no fault found")
    still, once = (gathered.with_ras(nothing, report(640), earlier) for earlier in (report(640), None))
    assert (still.state, still.ranks, still.causes[0].code) == ("stuck", (), "call.timeout")
    assert "30 of 32" in still.line
    assert (once.state, once.causes) == ("unknown", ())
    moved = gathered.with_ras(nothing, report(700), report(640))
    assert (moved.state, moved.causes) == ("fine", ())
    assert "moved" in moved.line


def test_ras_of_every_release_is_read() -> None:
    row = b'"rank": 1,\n"host": "n2",\n"pid": 7,\n"cuda_dev": 1,\n"nvml_dev": 1%b\n"status": {"considered_dead": true}'
    text = b'{"communicators": [{"hash": "a", "size": 2, "ranks": [], "missing_ranks": [{' + row + b"}]}]}"
    for comma in (b"", b","):  # 2.28.7 leaves it out
        (comm,) = ras.read(text % comma).comms
        assert (comm.ranks[1].missing, comm.ranks[1].host) == ("dead", "n2")
    (gone,) = ras.read(b"[2025-12-19 13:07:07] PEER_DEAD: Process 7 on node n2 managing GPU 1\n").dead
    assert (gone.host, gone.pid, gone.missing) == ("n2", 7, "dead")
    part = b"#0-0 (78db921d1c117b4a) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
    (comm,) = ras.read(part + b"  7 ranks have launched up to operation 64\n  Rank 7 has launched up to operation 60 "
                       b"-- GPU 3 managed by process 16 on node node1\n").comms  # fmt: skip
    assert comm.spread == {"AllReduce": {64: 7, 60: 1}}


def test_equal_counts_that_stand_still_are_not_called_fine() -> None:
    def report(count: int) -> ras.RasReport:
        ranks = {r: ras.RasRank(rank=r, counts={"AllReduce": count}) for r in range(3)}
        return ras.RasReport(comms=(ras.RasComm(id="1", size=3, ranks=ranks),), total=1)

    nothing = Verdict(state="fine", line="no fault found")
    assert gathered.with_ras(nothing, report(9), report(8)).state == "fine"
    still = gathered.with_ras(nothing, report(9), report(9))
    assert (still.state, still.ranks, "no count moved" in still.line) == ("unknown", (), True)
    assert "whether the counts move" in gathered.with_ras(nothing, report(9), None).unknown[0].what


def test_ras_names_who_is_missing_where_the_log_cannot() -> None:
    comm = ras.RasComm(id="1", size=4, ranks={2: ras.RasRank(rank=2, counts={"AllReduce": 9})},
                       spread={"AllReduce": {9: 1, 10: 3}})  # fmt: skip
    waits = judge(logged((0, "0", 10, 12)))
    found = gathered.with_ras(waits, ras.RasReport(comms=(comm,), total=1), None)
    assert said(found) == ("stuck", (2,), "rank.behind")
    fine = gathered.with_ras(waits, ras.RasReport(total=1, most=256), None)
    assert (fine.ranks, fine.causes[0].code) == ((), "call.timeout")
    assert "RAS sees no rank behind" in fine.disagree[0]


OVER = "\n".join([
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "step 20 loss 1.9",
    "{'train_runtime': 1234.5, 'train_loss': 1.2, 'epoch': 3.0}",
])  # fmt: skip


@each_row(
    ("text", "state", "words"),
    [
        ("", "unknown", "nothing was read"),
        ("epoch 1 loss 2.3", "unknown", "nothing was read"),
        (OVER, "fine", "came to its end"),
        (
            "[1.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=1, GPU has fallen off the bus",
            "failed",
            "GPU 0000:4e:00: Xid",
        ),
        ("[rank0]: socketProgress: Connection closed by remote peer n2<53>", "failed", "rank 0 lost a peer: n2"),
        (
            "terminate called after throwing an instance of 'std::runtime_error'\nLast error:\n"
            "NET/IB : Got completion from peer 10.0.0.2<39138> with error 12, opcode 0, len 0, vendor err 129",
            "failed",
            "failed: transport retry exceeded",  # the abort is what came of it
        ),
    ],
)
def test_a_log_alone(tmp_path: Path, text: str, state: str, words: str) -> None:
    log = tmp_path / "job.log"
    log.write_text(text)
    found = gathered.answer(gathered.WhySources(logs=(str(log),)))
    assert (found.state, words in found.line) == (state, True), found.line


SOCKETS = """pod-0:1:2 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
pod-0:1:2 [0] NCCL INFO comm 0x5 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
pod-0:1:2 [0] NCCL INFO Using network Socket
pod-0:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0
"""


def test_sockets_are_priced_by_the_best_layout_where_none_is_named(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(SOCKETS)
    request = Request.of(machine="dgx-h100", nodes=2, network="25G", model="Llama-3.1-8B")
    found = gathered.answer(gathered.WhySources(logs=(str(log),), request=request))
    assert found.state == "slow"
    assert "instead of RDMA: " in found.causes[0].price
    assert any("over which interface RDMA" in one.what for one in found.unknown)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(NETWORKS.format("rdma-net"))
    named = gathered.answer(gathered.WhySources(logs=(str(log),), request=request, manifest=manifest))
    assert "instead of RDMA over net1 of the manifest's networks: " in named.causes[0].price


def test_a_manifest_is_judged_as_lint_env_does(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("export NCCL_IB_DISABLE=1\ntorchrun train.py\n")
    found = gathered.answer(gathered.WhySources(manifest=script))
    assert (found.state, found.causes[0].code) == ("slow", "env.debug.leftover")
    assert "NCCL_IB_DISABLE" in found.line


def test_counts_that_move_are_no_stall() -> None:
    def report(count: int) -> ras.RasReport:
        ranks = {r: ras.RasRank(rank=r, counts={"AllReduce": count - (r == 1)}) for r in range(3)}
        return ras.RasReport(comms=(ras.RasComm(id="1", size=3, ranks=ranks),))

    nothing = Verdict(state="fine", line="")
    assert gathered.with_ras(nothing, report(9), report(8)).state == "fine"
    still = gathered.with_ras(nothing, report(9), report(9))
    assert (still.state, still.ranks) == ("stuck", (1,))


@pytest.mark.long
def test_a_stack_says_what_a_rank_does() -> None:
    from finetune.rank_monitor import phase_of  # and with it torch

    wait = ("/x/torch/distributed/distributed_c10d.py", "all_reduce")
    run = ("/x/torch/_dynamo/eval_frame.py", "compile_wrapper")
    compiling = ("/x/torch/_dynamo/convert_frame.py", "_compile")
    loader = ("/x/torch/utils/data/dataloader.py", "__next__")
    assert phase_of([("/job/train.py", "step")]) == "compute"
    assert phase_of([run, ("/job/train.py", "step")]) == "compute"
    assert phase_of([compiling, run, ("/job/train.py", "step")]) == "compile"
    assert phase_of([wait, ("/job/train.py", "evaluate")]) == "collective"
    assert phase_of([("/job/train.py", "evaluate")]) == "evaluate"
    assert phase_of([loader, ("/job/train.py", "main")]) == "data"
    assert phase_of([("/x/torch/serialization.py", "save"), ("/job/train.py", "main")]) == "save"


def test_who_ended_without_an_error_is_who_the_others_lost() -> None:
    lost = "RuntimeError: Read error [127.0.0.1]:41: Connection reset by peer"
    states = {r: RankState(rank=r, written=NOW, ended=True, error=lost) for r in (0, 1, 3)}
    states[2] = RankState(rank=2, written=NOW - 1, ended=True)
    found = judge(RunFacts(states=states, processes=dict.fromkeys(range(4), "gone"), world=4, now=NOW, first=1))
    assert said(found) == ("failed", (2,), "rank.gone")


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["stopped", "other-collective", "exits"])
def test_a_fault_made_for_real(name: str) -> None:
    fault = next(one for one in table.FAULTS if one.name == name)
    result = table.one(fault)
    assert result.right, result.verdict
