"""Who is accused and who is not: clocks, margins, limits of time, ends without a word; what `why --watch` leaves."""

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rigs.command import topoflight
from rigs.tables import each_row, rows_of

from agent.cli.why import why
from agent.jobs.script import add_monitor
from agent.why import diagnosis, ranks
from collectives.bench import processes
from collectives.traces import rank_files, watchdog
from collectives.traces.rank_files import NAME, RANKS_FOLDER, Call, Mark, RankState, RankTrace
from contracts import plain, run_record
from contracts.run_record import RunRecord
from finetune import rank_monitor
from planner.why import RunFacts, Verdict, judge, limits

rows = rows_of(__file__)
START = 1_000_000.0


def dumps(rows: dict[int, list[float]], **more) -> dict[int, RankTrace]:
    """Ranks that have made calls at these times, which are over."""
    return {
        rank: RankTrace(rank=rank, enqueued={"0": len(mine)}, names={"0": "default_pg"}, calls=tuple(
            Call(group="0", number=n, record=n, op="all_reduce", done=True, created=at, **more)
            for n, at in enumerate(mine, 1)))
        for rank, mine in rows.items()
    }  # fmt: skip


def arrivals(shift: float = 0.0, late: float = 0.0, steps: int = 100, anchors: bool = True) -> dict[int, RankTrace]:
    """Two ranks of two hosts that call at the end of each step; rank 1's clock is ahead, rank 0 is late.

    `anchors`: calls in quick succession, as a model is wrapped, and as a loss is reduced after the gradients.
    """
    noise = random.Random(1)
    rows: dict[int, list[float]] = {0: [], 1: []}
    at = START
    for step in range(steps):
        times = [at + noise.uniform(0.030, 0.040) + (late if rank == 0 else 0.0) for rank in rows]
        for rank, mine in rows.items():
            mine.append(times[rank] + shift * rank)
        at = max(times) + 0.001
        for _ in range(3 if anchors and step % 10 == 0 else 0):
            for rank, mine in rows.items():
                mine.append(at + noise.uniform(0.0005, 0.0015) + shift * rank)
            at += 0.0025
    return dumps(rows)


@each_row(("shift", "late", "anchors", "named"), rows("clocks"))
def test_clocks_of_two_hosts_are_aligned_or_not_compared(shift, late, anchors, named):
    traces = arrivals(shift, late, anchors=anchors)
    states = {r: RankState(rank=r, host=f"h{r}", written=START + 60, calls=sum(traces[r].enqueued.values()))
              for r in traces}  # fmt: skip
    found = judge(RunFacts(traces=traces, states=states, world=2, now=START + 60))
    assert (found.ranks, found.state) == (tuple(named), "slow" if named else "fine"), found.line
    assert not named or "clocks within" in found.causes[0].evidence[0]
    alike = {r: replace(state, samples={"compute": 10, "collective": 10}) for r, state in states.items()}
    found = judge(RunFacts(traces=traces, states=alike, world=2, now=START + 60))
    assert found.ranks == (), "late for ten seconds, and seen to do what the other does"
    assert not named or "not distinguishable yet: rank 0" in found.line, found.line


@each_row(("late", "every", "named"), rows("pauses"))
def test_a_few_long_pauses_are_no_habit_and_no_second_counts_twice(late, every, named):
    """Two calls a step, both made before the first of them is over, as DDP does."""
    noise = random.Random(1)
    rows: dict[int, list[float]] = {0: [], 1: [], 2: []}
    at = START
    for step in range(1, 501):
        times = [at + noise.uniform(0.04, 0.05) + (late if rank == 0 and step % every == 0 else 0.0) for rank in rows]
        for rank, mine in rows.items():
            mine += [times[rank], times[rank] + 0.001]
        at = max(times) + 0.002
    traces = dumps(rows)
    states = {r: RankState(rank=r, host="h", boot="b", written=at, calls=1000) for r in rows}
    found = judge(RunFacts(traces=traces, states=states, world=3, now=at))
    assert found.ranks == tuple(named), found.line
    # of each step of 0.077 s the others wait 0.03 s for rank 0
    assert not named or " 3.9 s of 9.6 s " in found.causes[0].evidence[0], found.causes[0].evidence


@each_row(("seconds", "named", "words"), rows("on_gpus"))
def test_who_came_last_on_the_gpus_was_in_the_call_shortest(seconds, named, words):
    """NCCL's calls: rank 0 makes them ahead of its GPU and last of all; how long each took on the GPU, if measured."""
    noise = random.Random(1)
    first = {0: START + 0.1, 1: START + 40.0, 2: START + 80.0}
    traces = dumps({rank: [at + n * 0.2 for n in range(1, 101)] for rank, at in first.items()}, is_ahead=True)
    if seconds is not None:
        traces = {rank: replace(one, calls=tuple(replace(call, seconds=noise.uniform(0.9, 1.1) * seconds[rank])
                                                 for call in one.calls)) for rank, one in traces.items()}  # fmt: skip
    states = {r: RankState(rank=r, host=f"h{r}", written=START + 60, calls=100) for r in range(3)}
    found = judge(RunFacts(traces=traces, states=states, world=3, now=START + 60))
    assert found.ranks == tuple(named), found.line
    assert words in " ".join(row for cause in found.causes for row in cause.evidence)


def test_the_recorder_tells_how_long_a_call_took_on_the_gpu() -> None:
    entry = {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"], "collective_seq_id": 1,
             "state": "completed", "time_created_ns": 10**18}  # fmt: skip
    looks = {"time_discovered_started_ns": 10**18, "time_discovered_completed_ns": 10**18 + 3 * 10**8}
    rows = ((entry, None), (entry | looks, 0.3), (entry | looks | {"duration_ms": 250.0}, 0.25),
            (entry | {"duration_ms": True}, None), (entry | {"duration_ms": -1.0}, None))  # fmt: skip
    for row, seconds in rows:
        (call,) = rank_files.read(json.dumps({"version": "2.10", "entries": [row]}).encode(), rank=0).calls
        assert (call.seconds, call.is_ahead) == (seconds, True), row


def opened(traces: dict[int, RankTrace], *ranks: int, at: float | None = None) -> dict[int, RankTrace]:
    """The same dumps, in which these ranks still wait in their last call, which they made then."""
    found = dict(traces)
    for rank in ranks:
        *before, last = traces[rank].calls
        found[rank] = replace(traces[rank], calls=(*before, replace(last, done=False, created=at or last.created)))
    return found


@each_row(("older", "seconds", "named"), rows("straddles"))
def test_a_wait_that_ended_between_two_dumps_accuses_nobody(older, seconds, named):
    """A call takes 20 s. Rank 1 writes its calls just before its end, the others after it, in the next."""
    at = {0: START, 1: START - older, 2: START}
    rows = {rank: [START - 100 + n for n in range(1, 32 if rank == 1 else 33)] for rank in at}
    traces = opened(opened(dumps(rows), 0, 2, at=START - seconds), 1, at=at[1] - 20)
    traces = {rank: replace(trace, taken=at[rank]) for rank, trace in traces.items()}
    states = {rank: RankState(rank=rank, host="a", written=at[rank], calls=len(rows[rank])) for rank in rows}
    found = judge(RunFacts(traces=traces, states=states, world=3, now=START, ages={1: older}))
    assert (found.state, found.ranks) == ("stuck" if named else "fine", tuple(named)), found.line


@each_row(("seconds", "until", "since", "resent", "state", "named", "words"), rows("unwritten"))
def test_time_without_samples_is_no_time_in_which_a_rank_is_stuck(seconds, until, since, resent, state, named, words):
    """Samples are counted once a second, and a mark is made every ten seconds."""
    now = START + 1000
    rows = {rank: [now - seconds - 40 + n for n in range(1, 31 if rank == 2 else 32)] for rank in range(4)}
    traces = opened(dumps(rows), 0, 1, 3, at=now - seconds)
    states = {
        rank: RankState(rank=rank, host=f"h{rank}", phase="collective", calls=len(rows[rank]), written=now,
                        addresses=(f"10.0.0.{rank}",), held={"10.0.0.2": resent}, resent={"10.0.0.2": resent})
        for rank in rows
    }  # fmt: skip
    states[2] = replace(states[2], written=now - seconds + until, phase="compute")
    if since is not None:
        marks = [Mark(at=now - seconds + at, samples={"compute": at - since}) for at in range(since, until + 1, 10)]
        line = ("train.py:7 step",)
        states[2] = replace(states[2], marks=tuple(marks), own=line, usual=line, cpu_share=0.5,
                            samples={"compute": until - since}, since=now - seconds + max(0, since))  # fmt: skip
    found = judge(RunFacts(traces=traces, states=states, world=4, now=now, ages={2: seconds - until}))
    assert (found.state, found.ranks) == (state, tuple(named)), found.line
    assert words in found.line


def looked_at(compute: int, collective: int, host: str, calls: int = 1000) -> RankState:
    looks = {"compute": compute, "collective": collective}
    return RankState(rank=0, host=host, written=START + compute + collective, samples=looks, moving=looks, calls=calls,
                     marks=(Mark(at=START),))  # fmt: skip


@each_row(("looks", "named", "words"), rows("looks"))
def test_a_late_rank_is_named_only_beyond_the_sampling_error(looks, named, words):
    states = {r: replace(looked_at(*row, f"h{r}"), rank=r) for r, row in enumerate(looks)}
    found = judge(RunFacts(states=states, world=3, now=START + 200))
    assert found.ranks == tuple(named), found.line
    paused = {r: replace(s, moving={"compute": 20, "collective": 20}) for r, s in states.items()}  # one long pause
    assert judge(RunFacts(states=paused, world=3, now=START + 200)).ranks == ()
    over = {r: replace(s, ended=True, marks=(*s.marks, Mark(at=START + 1))) for r, s in states.items()}
    of_end = judge(RunFacts(states=over, world=3, now=START + 200, processes=dict.fromkeys(over, "gone")))
    assert of_end.ranks == tuple(named) and "rank.gone" not in [cause.code for cause in of_end.causes]
    assert named or of_end.line == "the run has ended: 3 ranks have ended by themselves"
    assert words in found.line + " ".join(row for cause in found.causes for row in cause.evidence)


@each_row(("workers", "named", "words"), rows("loaders"))
def test_loaders_that_take_turns_in_being_last_accuse_nobody(workers, named, words):
    looks = [{"compute": 400, "workers": 5 * n, "collective": 5 * (120 - n)} for n in workers]
    states = {r: RankState(rank=r, written=START + 1000, samples=row, moving=row, calls=1000, marks=(Mark(at=START),))
              for r, row in enumerate(looks)}  # fmt: skip
    found = judge(RunFacts(states=states, world=3, now=START + 1000))
    assert found.ranks == tuple(named) and words in found.line, found.line


def test_ranks_that_have_used_up_their_batches_do_not_make_the_last_one_late() -> None:
    """Rank 0 has more batches: the others answer its collectives, at once (DDP's Join)."""
    traces = arrivals(late=0.08)
    looks = {0: {"compute": 180, "collective": 20}, 1: {"compute": 90, "collective": 10, "join": 100}}
    states = {
        r: RankState(rank=r, host="h", boot="b", written=START + 200, samples=row, moving=row, marks=(Mark(at=START),),
                     calls=sum(traces[r].enqueued.values()))
        for r, row in looks.items()
    }  # fmt: skip
    assert judge(RunFacts(traces=traces, states=states, world=2, now=START + 200)).state == "fine"


def test_the_time_until_a_late_rank_is_distinguishable_is_that_of_the_looks_that_show_it() -> None:
    """The same forty seconds, alone and at the end of a run whose older marks have been thinned out."""
    rows = enumerate([(32, 8), (22, 18), (22, 18)])
    alone = {rank: replace(looked_at(*row, f"h{rank}"), rank=rank) for rank, row in rows}
    before = {"compute": 80, "collective": 80}
    marks = (Mark(at=START), Mark(at=START + 160, samples=before, moving=before))
    later = {
        rank: replace(one, moving={kind: n + before[kind] for kind, n in one.moving.items()}, marks=marks,
                      written=one.written + 160)
        for rank, one in alone.items()
    }  # fmt: skip
    lines = {judge(RunFacts(states=one, world=3, now=START + 200)).line for one in (alone, later)}
    over = {rank: replace(one, ended=True) for rank, one in later.items()}
    assert judge(RunFacts(states=over, world=3, now=START + 200)).line.startswith("the run has ended")
    assert len(lines) == 1 and "not distinguishable yet" in lines.pop()
    restarted = {
        rank: replace(one, moving=one.moving | {"compute": 200}, marks=(Mark(at=START, moving={"collective": 90}),))
        for rank, one in alone.items()
    }
    assert judge(RunFacts(states=restarted, world=3, now=START + 200)).state == "fine", "counts that begin again"


def state_of(rank: int, row: dict) -> RankState:
    """A rank at work, or one that has ended; `ago` and `of`: seconds since it wrote, and in its phase until then."""
    over = row.get("ended")
    usual = {"ago": 70.0, "of": None} if over else {"ago": 3.0, "of": 60.0, "phase": "compute"}
    given = {"rank": rank, "host": f"h{rank}", **usual, **row}
    ago, of = given.pop("ago"), given.pop("of")
    if over:
        given |= {"ended": True, "error": None if over is True else over}
    since = None if of is None else START - ago - of
    return plain.read({**given, "written": START - ago, "since": since}, RankState)


@each_row(("states", "more", "state", "named", "words"), rows("ends"))
def test_ends_and_silences_accuse_only_whom_others_wait_for(states, more, state, named, words):
    made = {rank: state_of(rank, row) for rank, row in enumerate(states)}
    newest = max(one.written for one in made.values())
    more = {"ages": {rank: newest - one.written for rank, one in made.items()}, **more}
    if "log" in more:
        more["log"] = watchdog.read(more["log"])
    found = judge(RunFacts(states=made, now=START, **{"world": len(made), **more}))
    assert (found.state, found.ranks) == (state, tuple(named)), found.line
    assert words in found.line


@each_row(
    ("error", "first", "stopped"),
    [
        (SimpleNamespace(get_first_failure=lambda: (1, SimpleNamespace(exitcode=1))), 1, ""),
        (SimpleNamespace(get_first_failure=lambda: (1, SimpleNamespace(exitcode=-15))), None, ""),
        (SimpleNamespace(sigval=signal.SIGTERM), None, "SIGTERM at "),
        (SimpleNamespace(), None, ""),
    ],
)
def test_torchrun_leaves_how_the_job_ended(tmp_path, error, first, stopped):
    class EndOfJobError(Exception):
        def __getattr__(self, name: str):
            return getattr(error, name)

    def launch(_config) -> None:
        raise EndOfJobError

    (tmp_path / RANKS_FOLDER).mkdir()
    with pytest.raises(EndOfJobError):
        rank_monitor.launching(launch, tmp_path)(SimpleNamespace(max_nodes=1))
    facts, _ = ranks.read_run(tmp_path, ranks.Heartbeats())
    assert (facts.first, facts.stopped.startswith(stopped), bool(facts.stopped)) == (first, True, bool(stopped))


def test_a_process_is_gone_only_by_the_table_that_numbers_it(tmp_path: Path) -> None:
    """A pod with the host's name, as with hostNetwork, still numbers its processes by itself."""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("b\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    for namespace, found in (("pid:[1]", {0: "gone"}), ("pid:[2]", {}), (None, {})):
        state = RankState(rank=0, host=os.uname().nodename, pid=7, boot="b", started=5, pid_namespace=namespace)
        assert ranks.read_process_states({0: state}, tmp_path) == found, namespace


def write_states(folder: Path, *states: RankState) -> list[Path]:
    """The files of these ranks below the folder of a run, as their monitors write them."""
    (folder / RANKS_FOLDER).mkdir(exist_ok=True)
    paths = [folder / RANKS_FOLDER / NAME.format(rank=state.rank) for state in states]
    for path, state in zip(paths, states, strict=True):
        path.write_text(json.dumps(plain.write(state)))
    return paths


def test_only_the_newest_marks_of_a_file_are_read(tmp_path: Path) -> None:
    (path,) = write_states(tmp_path, RankState(rank=0, marks=tuple(Mark(calls=n) for n in range(1000))))
    assert [mark.calls for mark in rank_files.read_state(path).marks] == list(range(936, 1000))


def test_a_clock_that_is_ahead_is_no_silence(tmp_path: Path) -> None:
    """Files have the time of one clock; what the ranks wrote into them is each host's own."""
    for rank, ahead in enumerate((0.0, 40.0, -40.0)):
        state = RankState(rank=rank, world_size=3, host=f"h{rank}", written=time.time() + ahead, phase="compute")
        write_states(tmp_path, state)
    assert judge(ranks.read_settled_run(tmp_path)[0]).state == "fine"


def test_a_rank_that_writes_is_heard_whatever_the_clock_of_its_files(tmp_path, monkeypatch):
    """Hosts that set the times of their files themselves: one is 50 s behind, or all are 200 s behind the reader."""

    def write(behind: dict[int, float]) -> None:
        for rank, seconds in behind.items():
            state = RankState(rank=rank, world_size=3, host=f"h{rank}", written=time.time() - seconds, phase="compute")
            (path,) = write_states(tmp_path, state)
            os.utime(path, (state.written, state.written))

    for behind, mute in (
        ({0: 0.0, 1: 50.0, 2: 0.0}, set()),
        ({0: 0.0, 1: 50.0, 2: 0.0}, {1}),
        (dict.fromkeys(range(3), 200.0), set()),
        (dict.fromkeys(range(3), 200.0), {0, 1, 2}),
    ):
        write(behind)
        rest = {rank: seconds for rank, seconds in behind.items() if rank not in mute}
        monkeypatch.setattr(ranks.time, "sleep", lambda _seconds, rest=rest: write(rest))
        facts, _ = ranks.read_settled_run(tmp_path)
        assert {rank for rank, age in facts.ages.items() if age > limits.STALE_SECONDS} == (mute if rest else set()), (
            behind
        )
        assert judge(facts).state == ("fine" if rest else "failed")


def test_a_rank_that_torchrun_saw_abort_may_have_only_waited(tmp_path: Path) -> None:
    write_states(tmp_path, *(RankState(rank=rank, world_size=2, written=time.time() - 400) for rank in (0, 1)))
    (tmp_path / RANKS_FOLDER / rank_monitor.FIRST).write_text('{"rank": 1, "exit_code": -6}')
    verdict = judge(replace(ranks.read_run(tmp_path, ranks.Heartbeats())[0], silence=400.0))
    assert (verdict.state, verdict.ranks) == ("failed", ())
    assert verdict.line.startswith("failed: rank 1 was aborted (SIGABRT)")


def test_a_rank_that_ended_with_an_exit_code_is_not_told_of_fewer_batches(tmp_path: Path) -> None:
    """A program that ends by sys.exit("text") leaves no exception."""
    waits = RankState(rank=0, world_size=2, written=time.time(), phase="collective", since=time.time() - 30)
    write_states(tmp_path, waits, RankState(rank=1, world_size=2, written=time.time() - 30, ended=True))
    (tmp_path / RANKS_FOLDER / rank_monitor.FIRST).write_text('{"rank": 1, "exit_code": 1}')
    verdict = judge(ranks.read_run(tmp_path, ranks.Heartbeats())[0])
    assert (verdict.state, verdict.ranks) == ("failed", (1,))
    assert "with an error" in verdict.causes[0].action


def test_a_new_start_hides_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    """Rank 0 of three starts. The earlier start had more ranks; rank 2 of this one has written."""
    folder = tmp_path / RANKS_FOLDER
    write_states(tmp_path, *(RankState(rank=rank) for rank in (0, 2, 7)))
    (folder / rank_monitor.FIRST).write_text('{"signal": 15, "at": 1.0}')
    earlier, monitor = (rank_monitor.RankMonitor(tmp_path, 0, 3) for _ in range(2))
    earlier.write()
    monitor.remove_own_files()
    monitor._remove_files_of_others()
    assert [path.name for path in folder.iterdir()] == [NAME.format(rank=2)]
    for one in (monitor, earlier, monitor, earlier):  # the process of the earlier start still runs
        one.write()
    assert rank_files.read_state(folder / NAME.format(rank=0)).written == monitor.marks[-1]["at"]


def test_an_upload_in_a_thread_that_the_main_thread_waits_for_is_one(tmp_path: Path) -> None:
    """The server answers only when the monitor has looked."""
    monitor = rank_monitor.RankMonitor(tmp_path, 0, 2)

    def upload() -> None:
        with contextlib.suppress(http.client.HTTPException, OSError):
            client.getresponse()

    def look() -> None:
        until = time.monotonic() + 30
        while monitor.phase != "server" and time.monotonic() < until:
            monitor.sample()
            time.sleep(0.05)
        server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        client = http.client.HTTPConnection(*server.getsockname())
        client.request("GET", "/")
        worker, looker = threading.Thread(target=upload), threading.Thread(target=look)
        worker.start()
        looker.start()
        worker.join()
        looker.join()
    assert monitor.phase == "server"


def test_nothing_replaces_the_final_state(tmp_path: Path) -> None:
    """The thread may be about to write when the process ends; its connections of this moment are in the last file."""
    monitor = rank_monitor.RankMonitor(tmp_path, 0, 2)
    monitor.folder.mkdir()
    monitor.write()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        monitor.over.set()
        monitor.write(ended=True)
        monitor.write()
        end = "{}:{}".format(*client.getsockname())
    state = rank_files.read_state(monitor.folder / NAME.format(rank=0))
    assert state.ended and end in state.ends


def test_a_rank_that_failed_writes_the_line_of_its_error_though_its_launcher_ends_it(tmp_path, monkeypatch):
    class Terminated(rank_monitor.RankMonitor):
        def dump(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        raise ValueError("no rows")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    came, monitor = list[bool](), Terminated(tmp_path, 0, 2)
    monitor.folder.mkdir()
    file = monitor.folder / NAME.format(rank=0)

    def handle(*_: object) -> None:
        came.append(rank_files.read_state(file).ended)

    before = signal.signal(signal.SIGTERM, handle)
    monitor.start()
    monitor.end()
    assert signal.signal(signal.SIGTERM, before) is handle and came == [True], "the job's own handler runs, once"
    state = rank_files.read_state(file)
    assert state.error == "ValueError: no rows"
    assert state.own[0].endswith("_though_its_launcher_ends_it")


def test_the_recorder_of_nccl_is_read_and_only_a_wait_is_a_collective(tmp_path: Path, monkeypatch) -> None:
    """A build for CUDA keeps NCCL's calls apart (torch 2.11 on an H100): gloo's recorder is then empty.

    While a call runs on the GPU, a thread that polls runs, and one that sleeps in the user's own code does not wait.
    """
    status = {"last_enqueued_collective": "104", "last_started_collective": "104", "last_completed_collective": "103"}
    recorded = {"version": "2.10", "pg_config": {}, "pg_status": {"0": status}}
    for name, text in (("_dump_fr_trace_json", {**recorded, "pg_status": {}}), ("_dump_nccl_trace_json", recorded)):
        monkeypatch.setattr(
            f"torch._C._distributed_c10d.{name}", lambda text=text, **_: json.dumps(text).encode(), raising=False
        )
    monitor = rank_monitor.RankMonitor(tmp_path, 0, 2)
    monitor.folder.mkdir()
    for wait, phase in ((lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000), "collective"),
                        (lambda: time.sleep(1), "compute"),
                        (lambda: threading.Event().wait(1), "compute")):  # fmt: skip
        timer = threading.Timer(0.3, monitor.sample)
        timer.start()
        wait()
        timer.join()
        assert monitor.phase == phase
    assert monitor.calls == 104
    before = monitor._measure_effort()[2]
    monitor._replace("large", bytes(1 << 22))
    assert monitor._measure_effort()[2] - before < 1 << 16, "a dump of the monitor is no work of the rank"
    monitor.dump()
    assert json.loads((monitor.folder / "trace_rank_0.json").read_text()) == recorded
    monitor.write()
    found = diagnosis.answer(diagnosis.WhySources(recorder=monitor.folder))
    assert not any("state_rank" in one.what for one in found.unknown), "states are in the folder of the dumps"


def test_an_empty_run_is_unknown_and_a_watch_refuses_what_it_does_not_use(tmp_path: Path) -> None:
    found = diagnosis.answer(diagnosis.WhySources(run=tmp_path))
    assert found.state == "unknown" and "(topoflight launch, wrap or run)" in found.unknown[0].command
    used = {"--run", "--watch", "--limit", "--output", "--metrics"}
    for text in (option.opts[-1] for option in why.params if option.opts[-1] not in used):
        words = ["x"] if text == "logs" else [text, str(tmp_path) if text == "--flight-recorder" else "7"]
        done = topoflight("why", "--watch", "--run", tmp_path, *words)
        assert done.exit_code == 2 and "cannot be combined" in done.output, (words, done.output)


def test_the_monitor_writes_what_the_reader_reads() -> None:
    """It runs where nothing of this package is, so it has its own names."""
    assert rank_monitor.NODE_STATE == rank_files.NODE and rank_monitor._answer_of("the rendezvous", "") == "connected"
    assert (rank_monitor.RANKS_FOLDER, rank_monitor.STATE, rank_monitor.TRACE, rank_monitor.ASK) == (
        rank_files.RANKS_FOLDER, rank_files.NAME, rank_files.TRACE, rank_files.ASK)  # fmt: skip
    # a launcher marks its processes with a variable of another name, and would overwrite the folder
    assert processes.RUN_VARIABLE not in add_monitor({}, Path("run"))


@pytest.mark.ranks
def test_a_script_needs_no_change_and_may_have_any_name(tmp_path: Path) -> None:
    """Modules named as ours, a sitecustomize of the user's own, and a folder that cannot be written."""
    for name in ("contracts", "finetune", "agent"):
        (tmp_path / f"{name}.py").write_text(f"NAME = 'the script\\'s {name}'\n")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['OWN_RAN'] = '1'\n")
    (tmp_path / "finetune_job.py").write_text(
        "import json, os, pathlib, time, contracts, finetune, agent, torch.distributed as dist\n"
        "assert agent.NAME.startswith('the script') and os.environ['OWN_RAN'] == '1'\n"
        "import sys\nown = dict(rank=int(sys.argv[1]), world_size=2, init_method=sys.argv[2]) if sys.argv[1:] else {}\n"
        "dist.init_process_group('gloo', **own)\n"
        "run, until = pathlib.Path(os.environ['TOPOFLIGHT_RUN']), time.monotonic() + 200\n"
        "state = run / 'ranks' / f'state_rank_{dist.get_rank()}.json'\n"
        "while run.is_dir() and time.monotonic() < until:  # until the monitor has seen where this script is\n"
        "    if state.exists() and json.loads(state.read_text())['own']:\n        break\n"
        "    time.sleep(0.1)\n"
        "dist.destroy_process_group()\n"
    )  # fmt: skip
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    for folder in (tmp_path / "run", unwritable):
        environment = add_monitor({**os.environ, "PYTHONPATH": str(own), "OMP_NUM_THREADS": "1"}, folder)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                 "finetune_job.py"]  # fmt: skip
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
                              timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    facts, wrong = ranks.read_settled_run(tmp_path / "run")
    assert (sorted(facts.states), wrong) == ([0, 1], [])
    assert all(state.ended and state.own for state in facts.states.values())
    assert judge(facts).state == "fine"
    copied = tmp_path / "copied"  # as the init container of a wrapped manifest copies it
    subprocess.run([sys.executable, "-m", "agent.jobs.autostart.sitecustomize", str(copied)], check=True)
    environment = {**os.environ, "PYTHONPATH": f"{copied}/agent/jobs/autostart:{own}", "OMP_NUM_THREADS": "1",
                   "TOPOFLIGHT_RUN": str(tmp_path / "own-run")}  # fmt: skip
    words = [sys.executable, "finetune_job.py"]  # a launcher of the job's own, which sets no RANK
    started = [subprocess.Popen([*words, str(rank), f"file://{tmp_path}/store"], cwd=tmp_path, env=environment)
               for rank in range(2)]  # fmt: skip
    assert [one.wait(300) for one in started] == [0, 0]
    assert sorted(ranks.read_settled_run(tmp_path / "own-run")[0].states) == [0, 1]


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of --watch in which no process of these tests does anything."""
    monkeypatch.setattr(ranks, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(ranks, "SETTLED_SECONDS", 0.02)


@pytest.mark.usefixtures("quick_watch")
def test_watch_ends_with_the_run_and_keeps_the_verdict(tmp_path: Path) -> None:
    """The rank that failed first is named; the record's notes and why.json hold the same line."""
    run_record.save(tmp_path / "run.json", RunRecord(status="failed", host="trainer-0"))
    for rank in range(3):
        lost = "RuntimeError: [pair.cc:598] Connection closed by peer [10.0.0.9]:28048"
        error = "ValueError: bad row, password=hunter22" if rank == 2 else lost
        state = RankState(rank=rank, world_size=3, written=time.time(), ended=True, error=error, host=f"trainer-{rank}")
        write_states(tmp_path, state)
    metrics = tmp_path / "why.prom"
    ended = topoflight("why", "--watch", "--run", tmp_path, "--metrics", metrics)
    assert ended.exit_code == 3, ended.output
    run = f'run="{tmp_path.name}"'
    (line,) = [line for line in metrics.read_text().splitlines() if not line.startswith("#")]
    assert line == f'topoflight_why{{code="rank.gone",node="trainer-2",rank="2",{run},state="failed"}} 1.0'
    alone = topoflight("why", "--run", tmp_path, "--metrics", metrics)
    assert alone.exit_code == 2 and "--watch" in alone.output
    saved = json.loads((tmp_path / run_record.WHY).read_text())
    assert (saved["state"], saved["ranks"]) == ("failed", [2])
    assert saved["line"].split(": ")[0] in topoflight("why", tmp_path).output, "a run's folder among the logs"
    assert saved["line"] in ended.output
    assert topoflight("why", "--run", tmp_path, "-o", "slurm").stdout == "", "another node does not help a program"
    assert run_record.read(tmp_path / "run.json").notes == [f"why: {saved['line']}"]
    assert "hunter22" not in ended.output + "".join(path.read_text() for path in tmp_path.glob("*.json"))


@pytest.mark.usefixtures("quick_watch")
def test_watch_continues_while_torchrun_may_restart_the_ranks(tmp_path: Path) -> None:

    def write(**values) -> None:
        for rank in range(2):
            error = values["error"] if rank == 1 else None
            state = RankState(**{**values, "rank": rank, "error": error}, world_size=2, written=time.time(), ended=True)
            write_states(tmp_path, state)

    reported, warned = list[str](), list[str]()

    def report(verdict: Verdict) -> None:
        reported.append(verdict.state)
        if verdict.state == "unknown":  # no rank has written yet
            write(restarts_left=1, error="ValueError: bad row")
        if verdict.state == "failed" and len(reported) == 2:  # the next start succeeds
            write(restarts_left=0, error=None)

    assert ranks.watch(tmp_path, report, warned.append).state == "fine"
    assert reported == ["unknown", "failed", "fine"] and "may start the ranks again" in warned[0]
    write(restarts_left=1, error="ValueError: bad row")
    assert ranks.watch(tmp_path, lambda _: None, warned.append, limit=0.1).state == "failed"


@each_row(("verdict", "until", "times"), [
    (Verdict(state="fine", line="no fault found"), 2000, [0, 30, 60, 120, 240, 480, 960, 1440, 1920]),
    (Verdict(state="stuck", line="stuck: rank 1"), 50, [0, 10, 20, 30, 40]),
    (Verdict(state="fine", line="not distinguishable yet"), 1000, [*range(0, 300, 10), 580]),
])  # fmt: skip
def test_dumps_are_requested_ever_more_rarely(verdict: Verdict, until: int, times: list[int]) -> None:
    """The verdict has been the same since second 0, in which the first dump was requested."""
    requested = [0]
    for now in range(until):
        if now - requested[-1] >= ranks._find_pause(verdict, now, requested[-1]):
            requested.append(now)
    assert requested == times


def test_a_failed_mesh_of_gloo_names_the_peer() -> None:
    error = ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: "
             "Connection refused, remote=[10.0.0.2]:13229$1")  # fmt: skip
    state = RankState(rank=1, world_size=2, written=START, asked="10.0.0.1:29500", answer="connected", ended=True,
                      error=error)  # fmt: skip
    found = judge(RunFacts(states={1: state}, world=2, now=START))
    assert found.state == "failed" and "rank 1 could not connect to another rank at 10.0.0.2:13229" in found.line
    assert found.causes[0].code == "socket_connect_failed" and "GLOO_SOCKET_IFNAME" in found.causes[0].action


def test_ranks_that_cannot_write_to_a_full_disk_are_not_called_dead(small_disk, monkeypatch):
    disk = small_disk("256k")
    for rank in range(2):
        state = RankState(rank=rank, world_size=2, host=f"host-{rank}", written=time.time() - 600, phase="compute")
        (path,) = write_states(disk, state)
        os.utime(path, (time.time() - 600,) * 2)
    assert diagnosis.answer(diagnosis.WhySources(run=disk)).state == "failed"
    with contextlib.suppress(OSError):
        (disk / "checkpoint").write_bytes(bytes(1 << 20))
    found = diagnosis.answer(diagnosis.WhySources(run=disk))
    assert found.state == "unknown" and f"{disk} is full" in found.line
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0))  # FUSE without statfs
    assert diagnosis.answer(diagnosis.WhySources(run=disk)).state == "failed"
