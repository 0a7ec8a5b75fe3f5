"""Who is behind, by the rules. tests/why/test_why_runs.py makes a few faults for real, bench/why.py makes them all."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.tables import each_row, rows_of

from agent.why import diagnosis as gathered
from collectives.traces import ras, watchdog
from collectives.traces.rank_files import Call, Mark, RankState, RankTrace
from collectives.traces.watchdog import LogFacts
from planner.why import RunFacts, Verdict, judge

rows = rows_of(__file__)

NOW = 1000.0


def call(
    number: int, op: str = "all_reduce", *, done: bool = True, at: float = NOW, size: int = 8, group: str = "0"
) -> Call:
    return Call(group=group, number=number, record=number, op=op, done=done, created=at, sizes=((size,),))


def trace(rank: int, *calls: Call, **more) -> RankTrace:
    newest: dict[str, int] = {}
    for one in calls:
        newest[one.group] = max(one.number, newest.get(one.group, 0))
    return RankTrace(rank=rank, calls=calls, enqueued=newest, names={"0": "default_pg"}, **more)


def of(rows: dict[int, list[Call]], world: int = 4, **more) -> RunFacts:
    """What the dumps of these ranks' calls show."""
    return RunFacts(traces={rank: trace(rank, *calls) for rank, calls in rows.items()}, world=world, now=NOW, **more)


def on_hosts(ranks: int = 4, **state) -> dict[int, RankState]:
    """A rank a host, with its address."""
    return {rank: RankState(rank=rank, host=f"h{rank}", addresses=(f"10.0.0.{rank}",), written=NOW, **state)
            for rank in range(ranks)}  # fmt: skip


def said(found: Verdict) -> tuple[str, tuple[int, ...], str]:
    return found.state, found.ranks, found.causes[0].code if found.causes else ""


def text_of(found: Verdict) -> str:
    """Its line, the evidence of its first cause, and what it does not know."""
    evidence = found.causes[0].evidence if found.causes else ()
    return "\n".join((found.line, *evidence, *(one.what for one in found.unknown)))


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
    assert (said(found), found.waiting, found.nodes) == (("stuck", (2,), code), (0, 1, 3), ("b",))


def test_the_state_counts_where_the_dump_of_a_rank_is_old() -> None:
    """Rank 2 has called four more since its dump, and has not come to call 61; its file is newer than the wait."""
    facts = waiting(phase="compute")
    old = {2: trace(2, *facts.traces[2].calls[:56])}
    assert judge(replace(facts, traces={**facts.traces, **old})).ranks == (2,)


STEP = ("model.py:7 forward", "train.py:31 main")


@each_row(("state", "seconds", "code"), rows("work"))
def test_work_that_others_wait_for_is_a_fault_only_beyond_its_limit(state, seconds, code):
    state = {name: tuple(value) if isinstance(value, list) else value for name, value in state.items()}
    found = judge(waiting(for_seconds=seconds, **state))
    assert said(found) == (("stuck", (2,), code) if code else ("fine", (), ""))
    assert not found.gpus and (state.get("cpu_share") != 0.0 or "computes" not in found.line)
    assert code or (found.not_at_fault and "counts as a fault after" in found.line)
    assert judge(replace(waiting(for_seconds=40.0, **state), limit=20.0)).ranks == (2,)  # as --limit sets it


@each_row(("saved", "computed", "state"), [(14, 1, "fine"), (2, 30, "stuck"), (0, 3, "stuck")])
def test_who_has_just_come_back_from_a_checkpoint_is_not_at_fault(saved: int, computed: int, state: str) -> None:
    mark = Mark(at=NOW - 75, samples={"compute": 100, "collective": 100})
    looks = {"compute": 100 + computed, "collective": 175 - computed - saved, "save": saved}
    found = judge(waiting(phase="compute", since=NOW - computed, marks=(mark,), samples=looks))
    assert (found.state, bool(found.not_at_fault)) == (state, state == "fine")


@each_row(("looks", "seconds", "state"), [(12, 70.0, "fine"), (75, 70.0, "stuck"), (12, 310.0, "stuck")])
def test_a_line_after_a_time_without_looks_does_not_explain_the_wait(looks: int, seconds: float, state: str) -> None:
    """It has pickled in one call that holds Python's lock, and is in an ordinary line again."""
    mark = Mark(at=NOW - seconds - 5, samples={"compute": 100})
    facts = waiting(for_seconds=seconds, phase="compute", since=NOW - seconds - 20, marks=(mark,), own=STEP, usual=STEP,
                    samples={"compute": 100 + looks})  # fmt: skip
    found = judge(facts)
    assert found.state == state and ("its monitor could not run" in found.line) == (looks == 12), found.line
    ahead = {rank: replace(one, calls=tuple(replace(call, created=call.created + 60) for call in one.calls))
             for rank, one in facts.traces.items()}  # fmt: skip
    clocks = {rank: replace(one, written=one.written + 60 * (rank != 2)) for rank, one in facts.states.items()}
    assert judge(replace(facts, traces=ahead, states=clocks)).state == state, "the clocks of the others are ahead"


@each_row(("calls", "process", "age", "state", "named"), rows("processes"))
def test_a_process_that_is_stopped_or_gone_stays_named(calls, process, age, state, named):
    facts = waiting(for_seconds=20.0, phase="compute", calls=calls)
    mine = trace(2, *facts.traces[2].calls, *([call(61, at=NOW - 20, done=False)] if calls == 61 else []))
    states = {**facts.states, 2: replace(facts.states[2], written=NOW - age)}
    found = judge(replace(facts, traces={**facts.traces, 2: mine}, states=states, processes={2: process},
                          ages={2: age}))  # fmt: skip
    assert (found.state, found.ranks) == (state, tuple(named)), found.line


def test_ranks_that_may_work_in_another_group_are_no_fault_before_the_limit() -> None:
    """Ranks 0 and 1 train in group 1 for longer than ranks 2 and 3 in group 2, which wait for them in group 0."""
    groups = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3)}
    rows = {rank: [call(n, group="1" if rank < 2 else "2", at=NOW - 100) for n in range(1, 60)] for rank in range(4)}
    for rank in (2, 3):
        rows[rank].append(call(1, "all_gather", done=False, at=NOW - 44))
    states = {rank: RankState(rank=rank, written=NOW, groups=groups, phase="compute" if rank < 2 else "collective",
                              calls=600 if rank < 2 else 60) for rank in rows}  # fmt: skip
    facts = of(rows, states=states)
    traces = {rank: replace(one, enqueued={"1": 59} if rank < 2 else {"2": 59, "0": 1}, groups=groups)
              for rank, one in facts.traces.items()}  # fmt: skip
    found = judge(replace(facts, traces=traces))
    assert found.state == "fine" and "whether ranks 0, 1 entered is unknown; flight recorder: ranks 2, 3" in found.line


@each_row(("ago", "state"), [(0.1, "fine"), (10.0, "fine"), (20.0, "stuck")])
def test_a_call_that_the_last_rank_has_just_entered_has_not_stopped(ago: float, state: str) -> None:
    """The others have waited for 20 s, and wrote just before it came back from an upload, entered and left the call."""
    facts = waiting(for_seconds=20.0, phase="compute", calls=61)
    mine = trace(2, *facts.traces[2].calls, call(61, at=NOW - ago))
    found = judge(replace(facts, traces={**facts.traces, 2: mine}))
    assert (found.state, found.ranks) == (state, ()), found.line


def dumped(*open_calls: dict, done: int = 3) -> RunFacts:
    """Four ranks' dumps and nothing else, ten minutes after the last call; the ranks' open calls."""
    traces = {}
    for rank, mine in enumerate(open_calls):
        rows = [call(n, at=NOW - 700 + n) for n in range(1, done + 1)]
        if mine:
            rows.append(replace(call(done + 1, done=False, at=NOW - 640), **mine))
        traces[rank] = trace(rank, *rows, groups={"0": (0, 1, 2, 3)}, written=NOW)
    return RunFacts(traces=traces, world=4, now=NOW - 640)


def logged(*rows: tuple[int, str, int, int | None], size: int | None = None, **more) -> RunFacts:
    """Ranks whose watchdog spoke: (rank, group, call, newest call where it says)."""
    traces = {
        rank: RankTrace(
            rank=rank, partial=True, sizes={group: size} if size else {},
            calls=(Call(group=group, number=number, op="allreduce"),) if number else (),
            enqueued={group: newest} if newest is not None else {},
        )
        for rank, group, number, newest in rows
    }  # fmt: skip
    return RunFacts(log=LogFacts(traces=traces, **more))


def odd(mine: Call) -> RunFacts:
    """Rank 1 is in this call, the others in their usual one."""
    return of({rank: [*calls, mine if rank == 1 else call(5, done=False)] for rank, calls in history(4).items()})


def circle(waits_in: str, *groups: tuple[int, ...], ago: float = 60.0, **state) -> RunFacts:
    """Each rank waits in the first call of a group: rank 0 in that of the first letter. By default each group has all.

    `state` is that of rank 1. Small letters are calls that a rank makes only once the first one is over. Calls of the
    NCCL backend, in capitals, are made ahead: those of the groups that follow are enqueued after the first.
    """
    everyone = tuple(range(len(waits_in.split())))
    members = {name: groups[n] if groups else everyone for n, name in enumerate(sorted({*waits_in.lower()} - {" "}))}
    traces, states = {}, {}
    for rank, names in enumerate(waits_in.split()):
        calls = [replace(call(1, group=name.lower(), done=False, at=NOW - ago), record=n, started=n == 0,
                         is_ahead=name.isupper()) for n, name in enumerate(names)]  # fmt: skip
        traces[rank] = trace(rank, *calls, groups=members)
        more: dict = {"phase": "collective", "own": (f"train.py:{ord(names[0])} step",)}
        states[rank] = RankState(rank=rank, written=NOW, groups=members, calls=len(calls),
                                 **more | (state if rank == 1 else {}))  # fmt: skip
    return RunFacts(traces=traces, states=states, world=len(everyone), now=NOW)


def of_a_few(*more: int) -> RunFacts:
    """The dumps of ranks 0 and 1, and of those named, of a group of eight."""
    seen = waiting().traces
    traces = {rank: replace(seen[rank], groups={"0": tuple(range(8))}) for rank in (0, 1)}
    return RunFacts(traces=traces | {rank: seen[rank] for rank in more}, world=8, now=NOW)


def by_file_times(seconds: float) -> RunFacts:
    """PyTorch's dumps do not say when they were made; the file's time bounds it."""
    traces = {rank: replace(one, written=NOW + seconds) for rank, one in waiting(for_seconds=0.0).traces.items()}
    return RunFacts(traces=traces, world=4, now=NOW)


def came_late(ago: float) -> RunFacts:
    """All are in one call, rank 2 for so many seconds and the others for a minute."""
    return of({r: [call(1, at=NOW - 90), call(2, done=False, at=NOW - (ago if r == 2 else 60))] for r in range(4)})


def ahead(first: Call | None = None, taken: float = NOW) -> RunFacts:
    """All have called ahead, and rank 2, dumped then, has not left what the others have; `first` is all of rank 1."""
    later = (call(46, done=False, at=NOW - 60), call(47, done=False, at=NOW - 60))
    rows = {rank: trace(rank, call(45, done=rank != 2, at=NOW - 61), *later, taken=taken if rank == 2 else NOW)
            for rank in range(4)}  # fmt: skip
    return RunFacts(traces=rows | ({1: trace(1, first)} if first else {}), world=4, now=NOW)


def message(*, sent: bool) -> RunFacts:
    """Rank 0 waits for a message of rank 2, which has sent it or not."""
    receive = Call(group="0", number=9, record=9, op="recv", p2p=True, peer=2, created=NOW - 640)
    mine = {0: [receive], 2: [replace(receive, op="send", peer=0)] if sent else []}
    rows = {r: trace(r, call(1), groups={"0": (0, 1, 2, 3)}, taken=NOW) for r in range(4)}
    return RunFacts(traces={r: replace(t, calls=(*t.calls, *mine.get(r, ()))) for r, t in rows.items()}, world=4,
                    now=NOW)  # fmt: skip


def p2p(op: str, peer: int, *, done: bool = False, size: int = 8, record: int = 50) -> Call:
    return Call(group="pp", number=record, record=record, op=op, p2p=True, peer=peer, done=done, created=NOW - 60,
                sizes=((size,),))  # fmt: skip


def pipeline(*calls: Call | None) -> RunFacts:
    """Ranks 4, 5, 6 of a pipeline; the numbers of peers are those within it."""
    traces = {4 + n: trace(4 + n, *([mine] if mine else []), groups={"pp": (4, 5, 6)}) for n, mine in enumerate(calls)}
    return RunFacts(traces=traces, world=8, now=NOW)


def left_by_some(**resent) -> RunFacts:
    """Ranks 0 and 3 have had their parts of the call; 1 and 2 wait for each other's. What rank 1 sends again."""
    states = on_hosts(phase="collective")
    states[1] = replace(states[1], held={"10.0.0.2": 30}, resent=resent)
    return of({rank: [call(45 if rank in (0, 3) else 44, done=False, at=NOW - 60)] for rank in range(4)}, states=states)


def late(**looks: int) -> RunFacts:
    """Rank 3 comes late to every call, and at these looks was where they say."""
    usual = {"collective": 60, "compute": 40}
    states = {r: RankState(rank=r, host="a", written=NOW, samples=usual, moving=usual, calls=60) for r in range(4)}
    states[3] = replace(states[3], samples=looks, moving=looks)
    return of(history(60, {3: 0.6}), states=states)


def marks(before: dict[str, int], since: dict[str, int], began: int = 8, pieces: int = 14) -> tuple[Mark, ...]:
    """Ten seconds and a look a second each; of the calls half as many since."""
    found = [Mark(at=0.0), Mark(at=10.0)]
    for number in range(pieces):
        old, spent = found[-1], before if number < began else since
        samples = {kind: old.samples.get(kind, 0) + spent.get(kind, 0) for kind in {*before, *since, *old.samples}}
        found.append(Mark(at=old.at + 10, calls=old.calls + (100 if number < began else 25), samples=samples))
    return tuple(found)


def paced(**since: int) -> RunFacts:
    """Ranks whose looks were this way in the slower part of the run."""
    rows = marks({"compute": 6, "collective": 4}, since)
    states = {r: RankState(rank=r, host="a", written=NOW, marks=rows) for r in range(4)}
    return RunFacts(states=states, world=4, now=NOW)


TIMED_OUT = "RuntimeError: Timed out waiting 120000ms for recv operation to complete"
LOST = "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"
GONE = dict.fromkeys(range(4), "gone")


def gave_up(phase: str, killed_before: float = 0.0, error: str = TIMED_OUT, waited: float = 120.0, **more) -> RunFacts:
    """Rank 2 was at something while the others waited for 120 s and ended; then its process was gone."""
    before = [call(n, at=NOW - 150 + n) for n in range(1, 9)]
    rows = {rank: [*before, *([] if rank == 2 else [call(9, done=False, at=NOW - waited)])] for rank in range(4)}
    states = {r: RankState(rank=r, written=NOW, phase="collective", ended=True, error=error) for r in range(4)}
    states[2] = RankState(rank=2, written=NOW - killed_before, phase=phase, since=NOW - 140, calls=8)
    return of(rows, states=states, processes=GONE, ages={**dict.fromkeys(rows, 0.0), 2: killed_before}, **more)


def cut_short() -> RunFacts:
    """gloo ends the rank that is sent more than its call takes, which may be the one that is right."""
    states = {r: RankState(rank=r, written=NOW, ended=r != 2, error="RuntimeError: Connection closed by peer")
              for r in range(4)}  # fmt: skip
    line = "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 2048 vs 1024."
    return RunFacts(states=states, world=4, now=NOW, log=watchdog.read([line]))


@each_row(("error", "words"), rows("advice"))
def test_the_advice_fits_the_error_of_the_rank(error: str | None, words: str) -> None:
    states = {r: RankState(rank=r, written=NOW, ended=r == 2, error=error, phase="collective", since=NOW - 60)
              for r in range(4)}  # fmt: skip
    (cause,) = judge(RunFacts(states=states, world=4, now=NOW)).causes
    assert cause.ranks == (2,) and words in cause.action
    assert ("Xid" in cause.action) == (error is not None and "CUDA error" in error)


WAITS = {"started": True}
FIRST_OF_TWO = {r: [call(1), call(2, done=False, size=8 if r == 0 else 5)] for r in range(2)}
TWO_AND_TWO = {r: [call(1), call(2, "broadcast" if r < 2 else "gather", done=False)] for r in range(4)}
TORCH = {1: Call(group="", number=21, op="broadcast"), 0: Call(group="", number=21, op="allreduce")}
HUNG = {6: "480"}
BY_FILES = "640 s by the dumps' file times"
NETWORK, BEHIND, TIMEOUT = "network", "rank.behind", "call.timeout"
Row = tuple[str, RunFacts, str, tuple[int, ...], str, tuple[str, ...]]


def of_calls() -> Iterator[Row]:
    """What is seen; state, ranks, code, and words of the line, its evidence or what it does not know."""
    without = waiting()
    unread = replace(without, traces={r: t for r, t in without.traces.items() if r != 2}, states={})
    yield "a short wait is none", waiting(phase="compute", for_seconds=1.5), "fine", (), "", ()
    seen = waiting(phase="compute", cpu_share=0.0)
    early = [replace(one, created=one.created - 40 if one.number <= 3 else one.created) for one in seen.traces[0].calls]
    old = waiting(for_seconds=27.0, phase="compute", own=STEP, usual=STEP, samples={"compute": 110},
                  marks=(Mark(at=NOW - 37, samples={"compute": 100}),))  # fmt: skip
    old = replace(old, states=old.states | {2: replace(old.states[2], written=NOW - 26.9)}, ages={2: 26.9})
    yield "it wrote when the wait began, and pickles since then", old, "fine", (), "", ("its monitor could not run",)
    old = replace(old, states=old.states | {2: replace(old.states[2], phase="collective")})
    yield "it was in the last call when it wrote", old, "fine", (), "", ("its monitor could not run",)
    started = {0: replace(seen.traces[0], calls=tuple(early))}
    yield ("the first calls waited for a rank that started late", replace(seen, traces=seen.traces | started),
           "stuck", (2,), "rank.idle", ())  # fmt: skip
    stopped = {0: "runs", 2: "stopped"}
    yield ("a stopped process", replace(waiting(phase="compute", for_seconds=16.0), processes=stopped),
           "stuck", (2,), "rank.stopped", ())  # fmt: skip
    brief = replace(waiting(phase="compute", for_seconds=7.0), processes=stopped)
    yield ("a process that py-spy stops", brief, "fine", (), "", ("rank 2 is stopped", "a fault after 15 s"))
    yield ("stopped for long", replace(brief, ages={2: 26.0}), "stuck", (2,), "rank.stopped", ())
    seen = replace(brief, traces={})
    yield ("a brief stop without dumps", seen, "fine", (), "", ("rank 2 is stopped", "a fault after 15 s"))
    yield ("a stop without dumps", replace(seen, ages={2: 26.0}), "stuck", (2,), "rank.stopped", ())
    every = dict.fromkeys(range(4), "stopped")
    yield ("a job that is suspended", replace(seen, processes=every), "stuck", (0, 1, 2, 3), "rank.stopped", ())
    yield ("a process that is gone", replace(waiting(phase="compute", for_seconds=3.0), processes={2: "gone"}),
           "failed", (2,), "rank.gone", ())  # fmt: skip
    yield "nothing was read of a rank", unread, "stuck", (), TIMEOUT, ("whether rank 2 entered is unknown",)
    yield ("a size of the job that cannot be true costs no memory", replace(waiting(), world=10**15), "stuck", (2,),
           BEHIND, ())  # fmt: skip
    yield "dumps alone", dumped(WAITS, WAITS, {}, WAITS), "stuck", (2,), BEHIND, (
        "its last call there is number 3", BY_FILES)  # fmt: skip
    yield "dumps: not begun", dumped(WAITS, WAITS, {"started": False}, WAITS), "stuck", (2,), BEHIND, (
        "its GPU has not begun it", BY_FILES)  # fmt: skip
    yield "dumps of three", dumped(WAITS, WAITS, WAITS), "stuck", (), TIMEOUT, (
        "whether rank 3 entered is unknown", BY_FILES)  # fmt: skip
    yield "all have come", dumped(WAITS, WAITS, WAITS, WAITS), "stuck", (), NETWORK, (
        "every rank of the group has entered", BY_FILES)  # fmt: skip
    yield "the dumps count before the watchdog", replace(dumped(WAITS, WAITS, {}, WAITS), log=logged(
        (0, "0", 4, 4)).log), "stuck", (2,), BEHIND, ()  # fmt: skip
    yield "the dumps of a few ranks accuse nobody", of_a_few(), "stuck", (), TIMEOUT, ()
    yield "but one of the missing rank", of_a_few(2), "stuck", (2,), BEHIND, ()
    yield "dumps of a timeout alone", by_file_times(600), "stuck", (2,), BEHIND, ("for 600 s by the dumps' file times",)
    yield "fresh dumps", by_file_times(3), "fine", (), "", ()
    yield "the last has only just come", came_late(1.0), "fine", (), "", ()
    yield "and stays in it with the others", came_late(20.0), "stuck", (), NETWORK, ()
    yield "a wait for a message names its sender", message(sent=False), "stuck", (2,), BEHIND, ()
    yield "but not one that has sent it", message(sent=True), "stuck", (), NETWORK, ()
    begun = {rank: trace(rank, call(1), replace(call(2, done=False), started=rank != 3), written=NOW + 600)
             for rank in range(4)}  # fmt: skip
    yield ("a GPU that has not come to the call is behind, though it is enqueued",
           RunFacts(traces=begun, world=4, now=NOW), "stuck", (3,), BEHIND, ())  # fmt: skip
    yield "another call", odd(call(5, "broadcast", done=False)), "stuck", (1,), "call.other", ()
    lines = {r: RankState(rank=r, written=NOW + 20, phase="collective", calls=5, own=(f"train.py:{r} step",))
             for r in range(4)}  # fmt: skip
    lines[2] = replace(lines[2], ended=True, error="RuntimeError: Read error", where=("loss.py:7 loss",))
    yield ("the lines of calls that differ", replace(odd(call(5, "broadcast", done=False)), states=lines), "failed",
           (1,), "call.other", ("rank 1: broadcast of [8], number 5 of group 0, from train.py:1 step",
                                "rank 2: all_reduce of [8], number 5 of group 0\nrank 3"))  # fmt: skip
    yield "another size", odd(call(5, done=False, size=4)), "stuck", (1,), "call.size", ()
    before = [call(1), call(2, "all_gather"), call(3), call(4, "all_gather")]
    swapped = {r: [*before, call(5, "all_gather" if r == 1 else "all_reduce", done=False)] for r in range(3)}
    yield ("of three that alternate two calls one has swapped its last two", of(swapped, world=3), "stuck", (1,),
           "call.other", ("where the others call all_reduce",))  # fmt: skip
    yield "of two of four no majority is known", of(FIRST_OF_TWO), "stuck", (), "call.size", (
        "the calls of ranks 2, 3 are not known",)  # fmt: skip
    yield "two against two name no rank", of(TWO_AND_TWO), "stuck", (), "call.other", ("disagree",)
    for what, (names, groups, ranks, words) in rows("circles")().items():
        seen = circle(names, *map(tuple, groups))
        yield f"a circle: {what}", seen, "stuck", tuple(ranks), "call.circle", tuple(words)
    for ago, state in ((20.0, "fine"), (60.0, "stuck")):
        seen = circle("b b a b", ago=ago)
        seen = replace(seen, traces={rank: one for rank, one in seen.traces.items() if rank})
        yield ("without the dump of one rank of the majority there is none", seen, state, (),
               "call.circle" * (ago > 30), ())  # fmt: skip
    seen = replace(circle("b a b", phase="compute"), limit=50.0)
    yield "who is at other work is not certain to wait", seen, "stuck", (), "call.circle", ("no majority",)
    yield ("who has only called ahead may yet come", circle("b a b", phase="compute"), "fine", (), "",
           ("rank 1 computes", "a fault after 300 s"))  # fmt: skip
    left = {rank: [call(44, "all_gather", done=False, at=NOW - 60) if rank == 2 else call(45, done=False, at=NOW - 60)]
            for rank in range(4)}  # fmt: skip
    yield "in a call that the others have left", of(left), "stuck", (2,), BEHIND, ("which the others have finished",)
    left = {rank: [call(45 if rank == 2 else 44, done=False, at=NOW - 60)] for rank in range(4)}
    yield "one has left the call of the others", of(left), "stuck", (), TIMEOUT, ("number 44 of group 0",)
    yield "it has called ahead as well", ahead(), "stuck", (2,), BEHIND, ("which the others have finished",)
    yield ("it may have left since it dumped", ahead(taken=NOW - 30), "stuck", (),
           NETWORK, ())  # fmt: skip
    yield ("of a reduce the others may have left before one comes", ahead(call(44)), "stuck", (1,),
           BEHIND, ())  # fmt: skip


def of_pipelines_and_links() -> Iterator[Row]:
    """Stages wait for who has not posted; where both ends have, it is the network, and its link by resent bytes."""
    yield ("a receiver has not posted", pipeline(p2p("send", 1), p2p("recv", 0, done=True), p2p("recv", 1)), "stuck",
           (5,), BEHIND, ("rank 4 waits in send", "rank 6 waits in recv"))  # fmt: skip
    yield "nor has a sender", pipeline(None, p2p("recv", 0), p2p("recv", 1)), "stuck", (4,), BEHIND, ()
    yield "both have", pipeline(p2p("send", 1), p2p("recv", 0), p2p("recv", 1)), "stuck", (), NETWORK, (
        "ranks 4, 5 are",)  # fmt: skip
    yield "two sends are a circle", pipeline(p2p("send", 1), p2p("send", 0), None), "stuck", (), "call.circle", ()
    yield "other sizes no match", pipeline(p2p("send", 1), p2p("recv", 0, size=4), None), "stuck", (), "call.size", ()
    yield "bytes are sent again in vain", left_by_some(**{"10.0.0.2": 28}), "stuck", (), "link", (
        "the link between h1 and h2", "h1 to h2: bytes wait")  # fmt: skip
    yield "bytes wait, and the other's kernel answers", left_by_some(), "stuck", (1, 2), BEHIND, ()


def of_logs() -> Iterator[Row]:
    """A rank is named only where a line says that it has not come."""
    for made, size, ranks, code in rows("logged")():
        yield str(made), logged(*map(tuple, made), size=size), "stuck", tuple(ranks), code, ()
    # one has enqueued what the other waits in, and the other has left what it is in: no fault of the network
    yield "different calls", logged((0, "0", 122, 127), (1, "0", 126, 128), size=2), "stuck", (), TIMEOUT, (
        "number 122 of group 0", "number 126 of group 0")  # fmt: skip
    waits, heard = (0, "", 10, None), "torch.distributed.DistBackendError: NCCL error in: x, remote process exited"
    yield ("who ended with its own error", logged(waits, errors={3: "ValueError: no rows", 1: heard}), "failed", (3,),
           "rank.gone", ("ValueError: no rows", "rank 0 timed out waiting"))  # fmt: skip
    yield "who only heard of an end", logged(waits, errors={1: heard}), "stuck", (), TIMEOUT, ()
    both = dict.fromkeys((1, 3), "ValueError: no rows")
    yield "two errors", logged(waits, errors=both), "failed", (), "ranks.gone", ()
    yield "torch itself found calls that do not match", RunFacts(log=LogFacts(
        clash=TORCH, errors={1: "RuntimeError: Detected mismatch between collectives"})), "failed", (), "call.other", (
        "disagree",)  # fmt: skip
    yield ("a watchdog that hangs itself is not waited for", RunFacts(log=LogFacts(hung=HUNG, idle={6: ""})), "failed",
           (6,), "watchdog_hung", ("no collective was outstanding",))  # fmt: skip
    yield ("one that hangs in a collective accuses nobody", RunFacts(log=LogFacts(hung=HUNG)), "failed", (),
           "watchdog_hung", ())  # fmt: skip


def of_ends_and_paces() -> Iterator[Row]:
    """Ranks that gave up, and those that became slower."""
    for phase in ("compile", "save", "evaluate"):
        words = ("timeout of 120 s",)
        yield f"a timeout too short: {phase}", gave_up(phase, first=0), "failed", (), "timeout.short", words
        by_states = replace(gave_up(phase), traces={})
        yield f"{phase}, without any dump", by_states, "failed", (), "timeout.short", words
    yield "killed while saving, by torchrun", gave_up("save", first=2), "failed", (2,), "rank.gone", ()
    yield "killed long before", gave_up("save", killed_before=110.0), "failed", (2,), "rank.gone", ()
    yield "killed, by its peers", gave_up("save", error=LOST), "failed", (2,), "rank.gone", ()
    for seconds, result in ((17.0, ("failed", (), "ranks.gone")), (400.0, ("stuck", (2,), "rank.compute"))):
        together = waiting(for_seconds=seconds, phase="compute", cpu_share=0.4)
        yield f"all were gone at once, {seconds} s into a wait", replace(together, processes=GONE), *result, ()
    alone = replace(waiting(), processes=GONE, ages={**dict.fromkeys((0, 1, 3), 0.0), 2: 40.0})
    yield "one was gone 40 s before the others", alone, "failed", (2,), "rank.gone", ()
    for waited in (120.0, 40.0):
        yield "still loading data, though the launcher ended it", gave_up("data", waited=waited), "failed", (
            2,), "rank.data", ()  # fmt: skip
    lost = "RuntimeError: Read error [127.0.0.1]:41: Connection reset by peer"
    states = {r: RankState(rank=r, written=NOW - (r == 2), ended=True, error=None if r == 2 else lost)
              for r in range(4)}  # fmt: skip
    quiet = RunFacts(states=states, processes=GONE, world=4, now=NOW, first=1)
    yield "the rank that ended without an error is the one that the others lost", quiet, "failed", (2,), "rank.gone", ()
    yield "a size that gloo could not take", cut_short(), "failed", (), "call.size", ("which rank's size is the odd",)
    others = {rank: trace(rank, call(9, "gather", size=4)) for rank in (0, 1, 3)}
    yield ("a size that gloo could not take, and all others alike", replace(cut_short(), traces=others, processes=GONE),
           "failed", (2,), "call.size", ("rank 2 calls another size", "rank 3: gather of [4]"))  # fmt: skip
    uneven: dict[str, RunFacts] = {}
    for what, calls, named, error in (
        ("one of three made one call more", (9, 8, 8), (0,), None),
        ("it lost the others", (9, 8, 8), (0,), LOST),
        ("of two nobody is odd", (9, 8), (), None),
        ("two against two", (9, 9, 8, 8), (), None),
        ("one of four ended too early", (8, 9, 9, 9), (0,), None),
        ("no dump shows the calls", (0, 8, 8), (), LOST),
    ):
        done = {r: n == 8 for r, n in enumerate(calls)}
        states = {r: RankState(rank=r, written=NOW, phase="collective", since=NOW - 60, calls=8,
                               ended=done[r] or error is not None, error=None if done[r] else error)
                  for r in done}  # fmt: skip
        eight, ninth = [call(n) for n in range(1, 9)], call(9, done=False, at=NOW - 60)
        traces = {r: trace(r, *eight, *([] if done[r] else [ninth]), taken=NOW) for r, n in enumerate(calls) if n}
        uneven[what] = RunFacts(states=states, traces=traces, world=len(calls), now=NOW)
        code = "rank.gone" if calls[0] == 8 else "call.order"
        yield f"uneven ends: {what}", uneven[what], "failed", named, code, ()
    three = uneven["one of three made one call more"]
    drained = {r: replace(state, host="a" if r == 0 else "b") for r, state in three.states.items()}
    yield "the ranks that ended are all of another host", replace(three, states=drained), "failed", (), "call.order", ()
    yield ("of two, one called sys.exit(1)", replace(uneven["of two nobody is odd"], first=1), "failed", (1,),
           "rank.gone", ())  # fmt: skip
    terminated = replace(three, ages={0: 0.0, 1: 400.0, 2: 400.0}, stopped="SIGTERM at 04:03:03 UTC")
    yield "uneven ends, and torchrun was terminated later", terminated, "failed", (0,), "call.order", ()
    ended = {r: RankState(rank=r, written=NOW, ended=True) for r in range(4)}
    last = {r: trace(r, call(7 if r == 2 else 8), taken=NOW) for r in range(4)}
    yield ("the table names another rank than the one that left first",
           RunFacts(states=ended, traces=last, world=4, now=NOW, first=1),
           "failed", (2,), "rank.gone", ())  # fmt: skip
    asleep = late(collective=20, compute=80)
    # the bytes of collectives make its process an active one
    states = {r: replace(s, cpu_share=0.01, is_active=True) for r, s in asleep.states.items()}
    yield ("a late rank that sleeps", replace(asleep, states=states), "slow", (3,), "rank.idle", ("sleeps or waits",))
    met = of({r: [call(44, done=False, at=NOW - 60)] for r in range(2)}, world=2, states={
        r: RankState(rank=r, host="a", written=NOW, calls=44) for r in range(2)})  # fmt: skip
    yield "a call that does not move on one host", met, "stuck", (), "host.transfer", ("no network is between",)
    yield "a late rank that does nothing more", late(collective=60, compute=40), "fine", (), "", ()
    yield "a late rank that computes", late(collective=20, compute=80), "slow", (3,), "rank.compute", ()
    yield "all compute longer", paced(compute=9, collective=1), "slow", (), "all.compute", ()
    yield "all wait longer", paced(compute=2, collective=8), "slow", (), "all.collective", ("ranks are on one host",)
    yield "an evaluation", paced(evaluate=8, compute=1, collective=1), "fine", (), "", ()
    rows = history(60)
    rows[2] = [replace(c, created=(c.created or 0) + (0.9 if n == 30 else 0)) for n, c in enumerate(rows[2])]
    yield "one long pause", of(rows), "fine", (), "", ()


@each_row(
    ("what", "seen", "state", "ranks", "code", "words"),
    lambda: [row for rows in (of_calls, of_pipelines_and_links, of_logs, of_ends_and_paces) for row in rows()],
)
def test_who_is_named(what, seen, state, ranks, code, words):
    found = judge(seen)
    assert said(found) == (state, ranks, code), found.line
    assert [each for each in words if each not in text_of(found)] == []


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


def test_the_network_is_named_only_where_bytes_were_seen_to_wait() -> None:
    rows = on_hosts(marks=marks({"compute": 6, "collective": 4}, {"compute": 2, "collective": 8}))
    rows[1] = replace(rows[1], unsent={"10.0.0.2": 30, "10.0.0.3": 30, "10.0.0.0": 30})
    assert judge(RunFacts(states=rows, world=4, now=NOW)).causes[0].code == "link.node"
    # what rank 3's bytes waited for before the change says nothing of it
    busy = {"10.0.0.0": 90, "10.0.0.2": 90}
    rows[3] = replace(rows[3], unsent=busy, marks=tuple(
        replace(mark, unsent={one: looks * n // 9 for one, looks in busy.items()} if n < 9 else busy)
        for n, mark in enumerate(rows[3].marks)))  # fmt: skip
    found = judge(RunFacts(states=rows, world=4, now=NOW))
    assert (found.causes[0].code, found.nodes) == ("link.node", ("h1",))
    few = {r: replace(s, unsent=dict.fromkeys(s.unsent, 3 if r == 1 else 0)) for r, s in rows.items()}
    early = judge(RunFacts(states=few, world=4, now=NOW))
    assert said(early) == ("slow", (), NETWORK) and "cannot be distinguished yet" in text_of(early), "looks are too few"
    calls = {rank: [call(44, done=False, at=NOW - 60)] for rank in range(2)}
    unseen = judge(of(calls, world=2, states=on_hosts(2, calls=44)))
    assert said(unseen) == ("stuck", (), "link") and "bytes wait" not in text_of(unseen), "no look saw any"


def counts(op: str, ranks: dict[int, int], **comm) -> ras.RasReport:
    """What RAS lists: how many of an operation each rank has launched."""
    listed = {rank: ras.RasRank(rank=rank, counts={op: count}) for rank, count in ranks.items()}
    return ras.RasReport(comms=(ras.RasComm(id="1", ranks=listed, **{"size": len(ranks), **comm}),), total=1)


def outliers(count: int) -> ras.RasReport:
    """Two of 32 ranks are one call further."""
    return counts("AllGather", {12: count + 1, 13: count + 1}, size=32, spread={"AllGather": {count: 30, count + 1: 2}})


NOTHING = Verdict(state="fine", line="no fault found")
LATE = logged((0, "0", 10, 12))
SILENT = ras.RasReport(comms=(ras.RasComm(id="1", size=2, ranks={
    1: ras.RasRank(rank=1, host="n2", pid=9, missing="no answer")}),), total=1)  # fmt: skip
EQUAL = [counts("AllReduce", dict.fromkeys(range(3), n)) for n in (8, 9)]
BEHIND_ONE = [counts("AllReduce", {r: n - (r == 1) for r in range(3)}) for n in (8, 9)]
ONE_LISTED = counts("AllReduce", {2: 9}, size=4, spread={"AllReduce": {9: 1, 10: 3}})


DEAD = tuple(ras.RasRank(rank=-1, host="n2", pid=pid, gpu=1, missing="dead") for pid in (7, 8))


@each_row(
    ("before", "report", "earlier", "gives", "words"),
    [
        (NOTHING, outliers(640), outliers(640), ("stuck", (), TIMEOUT), "30 of 32"),  # it accuses no majority
        (NOTHING, outliers(640), None, ("unknown", (), ""), ""),
        (NOTHING, outliers(700), outliers(640), ("fine", (), ""), "moved"),
        (NOTHING, EQUAL[1], EQUAL[0], ("fine", (), ""), ""),
        (NOTHING, EQUAL[1], EQUAL[1], ("unknown", (), ""), "no count moved"),
        (NOTHING, EQUAL[1], None, ("fine", (), ""), "whether the counts move"),
        (NOTHING, BEHIND_ONE[1], BEHIND_ONE[0], ("fine", (), ""), ""),
        (NOTHING, BEHIND_ONE[1], BEHIND_ONE[1], ("stuck", (1,), BEHIND), ""),
        (NOTHING, SILENT, None, ("unknown", (), ""), "rank 1"),  # once may be a lost answer
        (NOTHING, SILENT, SILENT, ("stuck", (1,), "rank.silent"), ""),
        (NOTHING, replace(SILENT, timeouts=1), None, ("stuck", (1,), "rank.silent"), ""),
        (NOTHING, replace(SILENT, dead=DEAD), None, ("failed", (1,), "rank.gone"), "process 7 on n2"),
        (NOTHING, replace(BEHIND_ONE[1], dead=DEAD[:1]), None, ("failed", (), "rank.gone"), "process 7 on n2"),
        (judge(LATE), ONE_LISTED, None, ("stuck", (2,), BEHIND), ""),
        (judge(LATE), ras.RasReport(total=1), None, ("stuck", (), TIMEOUT), "which rank has not entered"),
        (judge(waiting(phase="data")), counts("AllReduce", {r: 9 - (r == 0) for r in range(4)}), None,
         ("stuck", (2,), "rank.data"), "lists outliers"),  # it does not overrule the calls
    ],
)  # fmt: skip
def test_what_ras_adds(before, report, earlier, gives, words):
    found = gathered.with_ras(before, report, earlier)
    assert said(found) == gives, found.line
    assert words in "\n".join((text_of(found), *found.disagree))


def test_a_dead_process_is_a_conflict_if_it_is_on_another_node_than_the_rank_of_the_verdict() -> None:
    of_rank, (dead, _) = judge(waiting(phase="data")), DEAD
    for host, conflicts in (of_rank.nodes[0], ()), ("n2", ("RAS names a dead process on n2",)):
        report = ras.RasReport(total=1, dead=(replace(dead, host=host),))
        found = gathered.with_ras(of_rank, report, None).disagree
        assert tuple(text.partition(",")[0] for text in found) == conflicts


def test_an_answer_of_ras_without_communicators_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text("Job summary\n===========\n\nCommunicators... (0.00s)\n=============\n")
    found = gathered.answer(gathered.WhySources(ras=(str(tmp_path / "ras.txt"),)))
    assert (found.state, found.sources) == ("unknown", ())


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


@pytest.mark.long
@each_row(("frames", "phase"), rows("stacks"))
def test_a_stack_says_what_a_rank_does(frames: list[tuple[str, str]], phase: str) -> None:
    from finetune.rank_monitor import find_phase  # and with it torch

    library = str(Path(os.__file__).parent)
    assert find_phase([(file.replace("LIB", library), 1, function) for file, function in frames]) == phase
