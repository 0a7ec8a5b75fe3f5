"""Who is accused and who is not: clocks, margins, limits of time, ends without a word, logs of ranks that never met."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rigs.tables import each_row

from agent.cli.why import why
from agent.jobs.script import monitored
from agent.why import diagnosis, ranks
from collectives.bench import processes
from collectives.traces import states
from collectives.traces.calls import Call, RankTrace
from collectives.traces.states import NAME, RANKS_FOLDER, Mark, RankState, dumps, read_stacks
from finetune import rank_monitor
from planner.why import RunFacts, judge

START = 1_000_000.0


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
        if anchors and step % 10 == 0:
            for _ in range(3):
                for rank, mine in rows.items():
                    mine.append(at + noise.uniform(0.0005, 0.0015) + shift * rank)
                at += 0.0025
    return {
        rank: RankTrace(rank=rank, enqueued={"0": len(mine)}, names={"0": "default_pg"}, calls=tuple(
            Call(group="0", number=n, record=n, op="all_reduce", done=True, created=when)
            for n, when in enumerate(mine, 1)))
        for rank, mine in rows.items()
    }  # fmt: skip


@each_row(
    ("shift", "late", "anchors", "named"),
    [
        (0.0, 0.0, True, ()), (0.020, 0.0, True, ()), (2.0, 0.0, True, ()), (-40.0, 0.0, True, ()),
        (0.020, 0.0, False, ()), (0.0, 0.080, True, (0,)), (0.020, 0.080, True, (0,)), (-40.0, 0.080, True, (0,)),
        (0.0, 0.080, False, ()),  # no call bounds the clocks tightly: not distinguishable
        (0.0, 0.004, True, ()),
    ],
)  # fmt: skip
def test_clocks_of_two_hosts_are_aligned_or_not_compared(
    shift: float, late: float, anchors: bool, named: tuple[int, ...]
) -> None:
    traces = arrivals(shift, late, anchors=anchors)
    states = {r: RankState(rank=r, host=f"h{r}", written=START + 60, calls=sum(traces[r].enqueued.values()))
              for r in traces}  # fmt: skip
    found = judge(RunFacts(traces=traces, states=states, world=2, now=START + 60))
    assert (found.ranks, found.state) == (named, "slow" if named else "fine"), found.line
    assert not named or "clocks within" in found.causes[0].evidence[0]


def test_a_wait_that_is_over_by_a_newer_dump_is_none() -> None:
    """Ranks 0 and 2 have gone on since ranks 1 and 3 wrote that all wait for rank 2."""

    def traced(rank: int, newest: int) -> RankTrace:
        rows = tuple(Call(group="0", number=n, record=n, op="all_reduce", done=n < newest, created=START + n)
                     for n in range(1, newest + 1))  # fmt: skip
        return RankTrace(rank=rank, calls=rows, enqueued={"0": newest}, names={"0": "default_pg"})

    newest = {0: 34, 1: 30, 2: 34, 3: 30}
    states = {r: RankState(rank=r, host="a", written=START + 56, calls=n) for r, n in newest.items()}
    facts = RunFacts(traces={r: traced(r, n) for r, n in newest.items()}, states=states, world=4, now=START + 56,
                     ages={0: 0.0, 1: 8.0, 2: 0.0, 3: 8.0})  # fmt: skip
    assert judge(facts).state == "fine"
    assert (
        judge(replace(facts, ages={})).state == "stuck"
    )  # as new: these two are still in a call that all have entered


def looked_at(compute: int, collective: int, host: str, calls: int = 1000) -> RankState:
    looks = {"compute": compute, "collective": collective}
    return RankState(rank=0, host=host, written=START + compute + collective, samples=looks, moving=looks, calls=calls,
                     marks=(Mark(at=START),))  # fmt: skip


@each_row(
    ("looks", "named", "words"),
    [
        ([(90, 10), (45, 55), (45, 55)], (0,), "outside of collectives in 90% of 100 looks"),
        ([(30, 10), (22, 18), (22, 18)], (), "not distinguishable yet"),  # forty looks are too few
        ([(60, 40), (55, 45), (57, 43)], (), "no fault found"),
        ([(20, 4), (4, 20), (4, 20)], (), "no fault found"),  # fewer than 30 looks
    ],
)
def test_a_late_rank_is_named_only_beyond_the_sampling_error(
    looks: list[tuple[int, int]], named: tuple[int, ...], words: str
) -> None:
    states = {r: replace(looked_at(*row, f"h{r}"), rank=r) for r, row in enumerate(looks)}
    found = judge(RunFacts(states=states, world=3, now=START + 200))
    assert found.ranks == named, found.line
    paused = {r: replace(s, moving={"compute": 20, "collective": 20}) for r, s in states.items()}  # one long pause
    assert judge(RunFacts(states=paused, world=3, now=START + 200)).ranks == ()
    assert words in found.line + " ".join(row for cause in found.causes for row in cause.evidence)


@each_row(
    ("state", "silence", "verdict"),
    [
        ({}, 400.0, "failed"), ({}, 20.0, "fine"), ({}, None, "fine"), ({"ended": True}, 400.0, "fine"),
    ],
)  # fmt: skip
def test_ranks_that_all_ended_without_a_word_have_failed(
    state: dict[str, Any], silence: float | None, verdict: str
) -> None:
    states = {r: RankState(rank=r, host=f"h{r}", written=START, phase="compute", **state) for r in range(2)}
    found = judge(RunFacts(states=states, silence=silence, world=2, now=START))
    assert (found.state, found.ranks) == (verdict, ()), found.line
    assert verdict == "fine" or "without a final state" in found.line


def ended(rank: int, error: str | None = None, ago: float = 70.0) -> RankState:
    return RankState(rank=rank, host=f"h{rank}", written=START - ago, ended=True, error=error)


def alive(rank: int, phase: str = "compute", ago: float = 3.0, of: float = 60.0) -> RankState:
    return RankState(rank=rank, host=f"h{rank}", written=START - ago, phase=phase, since=START - ago - of)


SAME, KEY = "FileNotFoundError: /data/rows", "KeyError: 'x'"
LOST = "RuntimeError: [pair.cc:598] Connection closed by peer [10.0.0.9]:28048"


@each_row(
    ("states", "more", "state", "named", "words"),
    [
        ([alive(0), ended(1), ended(2)], {}, "fine", (), "no fault found"),  # rank 0 uploads when the others are done
        ([alive(0, "collective", of=2.0), ended(1, ago=1.0)], {}, "fine", (), "no fault found"),  # they just end
        ([alive(0, "collective"), ended(1, ago=62.0)], {}, "failed", (1,), "rank 1 on h1 has ended by itself"),
        ([alive(0, "collective"), alive(1), ended(2)], {}, "fine", (), "no fault found"),  # rank 0 may wait for rank 1
        ([ended(0, ago=4000.0), alive(1, ago=4003.0)], {"silence": 4000.0}, "failed", (),
         "rank 1 has ended without a final state"),
        ([ended(0, LOST, 5.0), alive(1), alive(2)], {}, "failed", (), "rank 0 ended, having lost another"),
        ([ended(0, LOST, 5.0), alive(1, ago=60.0), alive(2)], {}, "stuck", (1,), "no heartbeat for 57 s"),
        ([alive(0, ago=400.0), alive(1, ago=400.0)], {"processes": {0: "gone", 1: "gone"}, "first": 1}, "failed", (1,),
         "rank 1 on h1: its process is gone"),
        ([ended(0, SAME, 9.2), ended(1, SAME, 9.1)], {}, "failed", (), "ranks 0, 1 each ended with FileNotFound"),
        ([ended(0, SAME, 9.2), ended(1, KEY, 9.1)], {}, "failed", (0,), "rank 0 on h0 ended with FileNotFound"),
        ([ended(0, SAME, 9.2), ended(1, KEY, 9.1)], {"copied": True}, "failed", (), "failed first is not known"),
        ([alive(0, ago=45.0), alive(1)], {}, "stuck", (0,), "has written no heartbeat for 42 s"),
        ([alive(0, ago=45.0), alive(1)], {"processes": {0: "runs"}}, "fine", (), "no fault found"),  # pickles
    ],
)  # fmt: skip
def test_ends_and_silences_accuse_only_whom_others_wait_for(
    states: list[RankState], more: dict[str, Any], state: str, named: tuple[int, ...], words: str
) -> None:
    newest = max(one.written for one in states)
    ages = {one.rank: newest - one.written for one in states}
    found = judge(RunFacts(states={one.rank: one for one in states}, ages=ages, world=len(states), now=START, **more))
    assert (found.state, found.ranks) == (state, named), found.line
    assert words in found.line


def test_a_process_is_gone_only_by_the_table_that_numbers_it(tmp_path: Path) -> None:
    """A pod with the host's name, as with hostNetwork, still numbers its processes by itself."""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("b\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    for namespace, found in (("pid:[1]", {0: "gone"}), ("pid:[2]", {}), (None, {})):
        state = RankState(rank=0, host=os.uname().nodename, pid=7, boot="b", started=5, pid_namespace=namespace)
        assert ranks.processes({0: state}, tmp_path) == found, namespace


def test_only_the_newest_marks_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / NAME.format(rank=0)
    path.write_text(dumps(RankState(rank=0, marks=tuple(Mark(calls=n) for n in range(1000)))))
    assert [mark.calls for mark in states.read_state(path).marks] == list(range(936, 1000))


def test_a_clock_that_is_ahead_is_no_silence(tmp_path: Path) -> None:
    """Files have the time of one clock; what the ranks wrote into them is each host's own."""
    (tmp_path / RANKS_FOLDER).mkdir()
    for rank, ahead in enumerate((0.0, 40.0, -40.0)):
        state = RankState(rank=rank, world_size=3, host=f"h{rank}", written=time.time() + ahead, phase="compute")
        (tmp_path / RANKS_FOLDER / NAME.format(rank=rank)).write_text(dumps(state))
    assert judge(ranks.of_run(tmp_path)[0]).state == "fine"


def test_an_empty_run_is_unknown_and_a_watch_refuses_what_it_does_not_use(tmp_path: Path) -> None:
    found = diagnosis.answer(diagnosis.WhySources(run=tmp_path))
    assert found.state == "unknown" and "topoflight run" in found.unknown[0].command
    used = {"--run", "--watch", "--limit", "--output"}
    others = [option for option in why.params if option.opts[-1] not in used]
    for option in others:
        value = {"--flight-recorder": str(tmp_path), "--manifest": __file__, "--host": __file__, "--method": "full"}
        text = option.opts[-1]
        words = ["x"] if text == "logs" else [text, value.get(text, "7")]
        refused = CliRunner().invoke(why, ["--watch", "--run", str(tmp_path), *words])
        assert refused.exit_code == 2 and "cannot be combined" in refused.output, (words, refused.output)


DIFFERS = (
    "[rank{0}]: RuntimeError: DDP expects same model across all ranks, but Rank {0} has {1} params, while rank {2} has "
    "inconsistent {3} params."
)
SHAPE = "[rank1]: RuntimeError: [1]: params[0] in this process with sizes [6, 4] appears not to match sizes of the "
SOCKET = "[E socket.cpp:957] [c10d] The client socket has timed out after 60s while trying to connect to (n0, 29500)."
JOINED = (
    "[rank0]: torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined."
)
IN_USE = "[W socket.cpp:464] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."
GAI = "[W socket.cpp:755] [c10d] The IPv4 network addresses of (m-0, 29500) cannot be retrieved (gai error: -2 - Name)."
SPOKEN = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType={}, NumelIn={}, NumelOut=1,"


@each_row(
    ("lines", "code", "named", "words"),
    [
        ([JOINED],
         "rendezvous_timeout", (), "3 of 4 ranks have joined"),
        ([SOCKET], "rendezvous_timeout", (), "n0:29500 could not be reached"),
        ([GAI], "rendezvous.name", (), "the name m-0 could not be resolved"),
        ([IN_USE], "port_in_use", (), "port 29500"),
        ([DIFFERS.format(0, 2, 1, 4), DIFFERS.format(1, 4, 0, 2),
          DIFFERS.format(2, 2, 1, 4)], "model.differs", (1,), "rank 1 has another model"),
        ([SHAPE + "same param in process 0."], "model.differs", (1,), "params[0] of sizes [6, 4]"),
        ([SPOKEN.format(0, "ALLREDUCE", 100), SPOKEN.format(1, "ALLREDUCE", 200)], "call.size", (), "disagree"),
        ([SPOKEN.format(0, "ALLREDUCE", 100), SPOKEN.format(1, "BROADCAST", 100)], "call.other", (), "disagree"),
        (["[rank3]: ValueError: Caught ValueError in DataLoader worker process 0."], "rank.gone", (3,), "ValueError"),
    ],
)  # fmt: skip
def test_logs_name_who_is_missing_and_never_who_wrote(
    tmp_path: Path, lines: list[str], code: str, named: tuple[int, ...], words: str
) -> None:
    (tmp_path / "job.log").write_text("\n".join(lines))
    found = diagnosis.answer(diagnosis.WhySources(logs=(str(tmp_path / "job.log"),)))
    assert (found.causes[0].code, found.ranks) == (code, named), found.line
    assert words in found.line


PY_SPY = """Process 4711: python train.py
Python v3.11.4 (/usr/bin/python3.11)

Thread 4712 (idle): "Thread-1"
    wait (threading.py:320)
Thread 4711 (active+gil): "MainThread"
    load_batch (/job/train.py:31)
    <module> (/job/train.py:90)
"""
MET = "n0:1:2 [0] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 0 busId 100 commId 0x1 - Init COMPLETE"
TRAINED = "{'train_runtime': 1234.5, 'train_loss': 1.2, 'epoch': 3.0}"
ROOT = """Root Cause (first observed failure):
[0]:
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : {0} (pid: 14750)
  traceback : Signal {1} received by PID 14750"""
IN_GROUP = SPOKEN.replace("[Rank {}]", "[rank{}]:[E1126 ProcessGroupNCCL.cpp:6] [PG 0 (default_pg) Rank 0]")


@each_row(
    ("texts", "state", "words"),
    [
        (["\n".join([GAI, MET, "step 1 loss 2"])], "unknown", "nothing was read"),  # an attempt; then they met
        (["\n".join([GAI, TRAINED])], "fine", "came to its end"),
        (["\n".join([IN_USE, TRAINED])], "fine", "came to its end"),
        (["\n".join(["[rank1]: ValueError: bad row, skipped", TRAINED])], "fine", "came to its end"),
        (["[rank0]: ValueError: a", "[rank9]: KeyError: 'x'"], "failed", "failed first is not known: rank 0"),
        (["\n".join([IN_GROUP.format(0, "ALLREDUCE", 9), ROOT.format(-6, 6)])], "stuck", "has not come is not known"),
        ([ROOT.format(-15, 15)], "failed", "was told to end"),  # by whoever stopped the job
        ([PY_SPY], "unknown", "process 4711 is in train.py:31 load_batch"),
    ],
)  # fmt: skip
def test_logs_that_accuse_nobody(tmp_path: Path, texts: list[str], state: str, words: str) -> None:
    logs = [tmp_path / f"node-{number}.log" for number in range(len(texts))]
    for log, text in zip(logs, texts, strict=True):
        log.write_text(text)
    found = diagnosis.answer(diagnosis.WhySources(logs=tuple(map(str, logs))))
    assert (found.state, found.ranks) == (state, ()), found.line
    assert words in found.line


FAULT = """Thread 0x00007efff9b326c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007efffa895b80 (most recent call first):
  File "/job/train.py", line 31 in load_batch
  File "/job/train.py", line 90 in <module>
"""


def test_stacks_of_three_tools_are_read_and_one_look_accuses_nobody(tmp_path: Path) -> None:
    frames = ("train.py:31 load_batch", "train.py:90 <module>")
    (one,) = read_stacks(PY_SPY.splitlines())
    assert (one.pid, one.rank, one.frames) == (4711, None, frames)
    (two,) = read_stacks(FAULT.splitlines(), rank=3)
    assert (two.rank, two.frames) == (3, frames)
    debug = f"=== Rank 0: http://n:1 ===\n{FAULT}=== Rank 1: http://n:2 ===\n{PY_SPY}"
    assert [(each.rank, each.frames) for each in read_stacks(debug.splitlines())] == [(0, frames), (1, frames)]
    (tmp_path / "stacks").write_text(debug)
    found = diagnosis.answer(diagnosis.WhySources(logs=(str(tmp_path / "stacks"),)))
    assert (found.state, found.ranks) == ("unknown", ()) and "load_batch" in found.line


def test_the_monitor_writes_what_the_reader_reads() -> None:
    """It runs where nothing of this package is, so it has names of its own."""
    assert (rank_monitor.RANKS_FOLDER, rank_monitor.STATE, rank_monitor.TRACE, rank_monitor.ASK) == (
        states.RANKS_FOLDER, states.NAME, states.TRACE, states.ASK)  # fmt: skip
    # a launcher marks its processes with a variable of another name, and would overwrite the folder
    assert processes.RUN_VARIABLE not in monitored({}, Path("run"))


@pytest.mark.ranks
def test_a_script_needs_no_change_and_may_have_any_name(tmp_path: Path) -> None:
    """Modules named as ours, a sitecustomize of the user's own, and a folder that cannot be written."""
    for name in ("contracts", "finetune", "agent"):
        (tmp_path / f"{name}.py").write_text(f"NAME = 'the script\\'s {name}'\n")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['OWN_RAN'] = '1'\n")
    (tmp_path / "finetune_job.py").write_text(
        "import os, time, contracts, finetune, agent, torch.distributed as dist\n"
        "assert agent.NAME.startswith('the script') and os.environ['OWN_RAN'] == '1'\n"
        "import sys\nown = dict(rank=int(sys.argv[1]), world_size=2, init_method=sys.argv[2]) if sys.argv[1:] else {}\n"
        "dist.init_process_group('gloo', **own)\ntime.sleep(3)\ndist.destroy_process_group()\n"
    )  # fmt: skip
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    for folder in (tmp_path / "run", unwritable):
        environment = monitored({**os.environ, "PYTHONPATH": str(own), "OMP_NUM_THREADS": "1"}, folder)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                 "finetune_job.py"]  # fmt: skip
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
                              timeout=120)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    facts, wrong = ranks.of_run(tmp_path / "run")
    assert (sorted(facts.states), wrong) == ([0, 1], [])
    assert all(state.ended and state.own for state in facts.states.values())
    assert judge(facts).state == "fine"
    environment = monitored({**os.environ, "PYTHONPATH": str(own), "OMP_NUM_THREADS": "1"}, tmp_path / "own-run")
    words = [sys.executable, "finetune_job.py"]  # a launcher of the job's own, which sets no RANK
    started = [subprocess.Popen([*words, str(rank), f"file://{tmp_path}/store"], cwd=tmp_path, env=environment)
               for rank in range(2)]  # fmt: skip
    assert [one.wait(120) for one in started] == [0, 0]
    assert sorted(ranks.of_run(tmp_path / "own-run")[0].states) == [0, 1]
