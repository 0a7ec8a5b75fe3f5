"""Who is accused and who is not: clocks, margins, limits of time, ends without a word; what `why --watch` leaves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rigs.command import topoflight
from rigs.tables import each_row

from agent.cli.why import why
from agent.jobs.script import monitored
from agent.why import diagnosis, ranks
from collectives.bench import processes
from collectives.traces import states
from collectives.traces.calls import Call, RankTrace
from collectives.traces.states import NAME, RANKS_FOLDER, Mark, RankState, dumps
from contracts import run_record
from contracts.run_record import RunRecord
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
    as_new = judge(replace(facts, ages={}))
    assert as_new.state == "stuck", "these two are still in a call that all have entered"


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


def ended(rank: int, error: str | None = None, ago: float = 70.0) -> RankState:
    return RankState(rank=rank, host=f"h{rank}", written=START - ago, ended=True, error=error)


def silent(ended: bool = False) -> list[RankState]:
    """Two ranks whose states are as old as each other."""
    return [RankState(rank=r, host=f"h{r}", written=START, phase="compute", ended=ended) for r in range(2)]


def alive(rank: int, phase: str = "compute", ago: float = 3.0, of: float = 60.0) -> RankState:
    return RankState(rank=rank, host=f"h{rank}", written=START - ago, phase=phase, since=START - ago - of)


SAME, KEY = "FileNotFoundError: /data/rows", "KeyError: 'x'"
LOST = "RuntimeError: [pair.cc:598] Connection closed by peer [10.0.0.9]:28048"


@each_row(
    ("states", "more", "state", "named", "words"),
    [
        (silent(), {"silence": 400.0}, "failed", (), "without a final state"),
        (silent(), {"silence": 20.0}, "fine", (), "no fault found"),
        (silent(), {"silence": None}, "fine", (), "no fault found"),
        (silent(ended=True), {"silence": 400.0}, "fine", (), "no fault found"),
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
        done = topoflight("why", "--watch", "--run", tmp_path, *words)
        assert done.exit_code == 2 and "cannot be combined" in done.output, (words, done.output)


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


def test_watch_ends_with_the_run_and_keeps_the_verdict(tmp_path: Path) -> None:
    """The rank that failed first is named; the record's notes and why.json hold the same line."""
    ranks = tmp_path / RANKS_FOLDER
    ranks.mkdir()
    run_record.save(tmp_path / "run.json", RunRecord(status="failed", host="trainer-0"))
    for rank in range(3):
        error = "ValueError: bad row" if rank == 2 else "RuntimeError: Connection closed by peer [10.0.0.2]:4"
        state = RankState(rank=rank, world_size=3, written=time.time(), ended=True, error=error, host=f"trainer-{rank}")
        (ranks / NAME.format(rank=rank)).write_text(dumps(state))
    ended = topoflight("why", "--watch", "--run", tmp_path)
    assert ended.exit_code == 3, ended.output
    kept = json.loads((tmp_path / run_record.WHY).read_text())
    assert (kept["state"], kept["ranks"]) == ("failed", [2])
    assert kept["line"].split(": ")[0] in topoflight("why", tmp_path).output, "a run's folder among the logs"
    assert kept["line"] in ended.output
    assert run_record.read(tmp_path / "run.json").notes == [f"why: {kept['line']}"]
