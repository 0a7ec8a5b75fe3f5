"""A few faults made for real on four ranks; bench/why.py makes them all."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import why
from resident import free_port
from rigs.tables import each_row, rows_of

from agent.jobs.script import add_monitor
from agent.why import diagnosis
from agent.why.ranks import read_settled_run
from collectives.traces.rank_files import RankState
from planner.why import RunFacts, judge

rows = rows_of(__file__)
pytestmark = pytest.mark.ranks
STARTED = ["trainer-raises", pytest.param("ddp-pickles", marks=pytest.mark.nightly)]
FORKED = ["ddp-stopped", "ddp-extra-barrier", "ddp-exits", "ddp-killed", "ddp-straggler"]
MORE = ("ddp-hangs", "ddp-other-call", "ddp-raises", "ddp-loader-fails", "ddp-generates")  # two take a minute


@pytest.mark.parametrize("name", STARTED)  # first: the fixture of the others replaces sys.executable until the end
def test_a_fault_made_for_real(name: str) -> None:
    """Each rank is a Python that was started, whose sitecustomize starts the monitor."""
    check(name)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", [*FORKED, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_a_fault_of_forked_ranks(name: str) -> None:
    check(name)


def check(name: str) -> None:
    """Make a fault once, and compare the verdict with its row in bench/why_faults.toml."""
    fault = next(one for one in why.FAULTS if one.name == name)
    result = why.run_fault(fault)
    assert result.right, result.verdict


PYTHON = str(Path(sys.prefix) / "bin/python")  # not the interpreter of `forked_ranks`, which has imported torch before

MEETING = """
import datetime, torch.distributed
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
"""


def test_ranks_that_never_meet_are_diagnosed_and_those_that_wait_are_not_named(tmp_path: Path) -> None:
    """Rank 1 of three does not start; a name that DNS does not know; torchrun's port where nothing listens."""
    (tmp_path / "train.py").write_text(MEETING, encoding="utf-8")
    ports = [free_port() for _ in range(3)]

    def start(run: str, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        words = [PYTHON, "-m", "agent.cli", "run", "--folder", str(tmp_path / run), PYTHON, *command]
        return subprocess.Popen(words, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)

    script, host = str(tmp_path / "train.py"), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    nodes = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1",
             "--master-port", str(ports[1]), "--rdzv-conf", "timeout=5", script]  # fmt: skip
    jobs = [start("absent", [script], RANK=rank, WORLD_SIZE="3", **host) for rank in ("0", "2")]
    jobs += [start("name", [script], RANK="1", WORLD_SIZE="2", MASTER_ADDR="no.invalid", MASTER_PORT=str(ports[2])),
             start("port", nodes)]  # fmt: skip
    for job in jobs:
        assert job.wait(timeout=400) != 0
    found = {run: diagnosis.answer(diagnosis.WhySources(run=tmp_path / run)) for run in ("absent", "name", "port")}
    assert {run: (one.state, one.ranks, *(cause.code for cause in one.causes)) for run, one in found.items()} == {
        "absent": ("failed", (1,), "rendezvous_timeout"), "name": ("failed", (), "rendezvous.name"),
        "port": ("failed", (), "rendezvous_timeout"),
    }, found  # fmt: skip
    assert found["absent"].waiting == (0, 2) and "rank 1 did not come" in found["absent"].line
    assert f"127.0.0.1:{ports[1]} could not be reached" in found["port"].line
    assert " since " in found["port"].causes[0].evidence[0] and found["port"].causes[0].evidence[0].startswith("node 1")


@each_row(("one", "other", "seconds", "state", "words"), rows("rendezvous"))
def test_what_ranks_wrote_at_the_rendezvous(one, other, seconds, state, words):
    waits = {"phase": "rendezvous", "asked": "a:1", "answer": "connected", "since": 1070 - seconds, "written": 1070.0}
    states = {rank: RankState(rank=rank, world_size=2, **waits | more) for rank, more in enumerate((one, other))}
    ages = {rank: 9.0 for rank, one in states.items() if one.since == 1000.0}  # it has given up 9 s before the other
    found = judge(RunFacts(states=states, world=2, now=1070.0, ages=ages))
    assert (found.state, found.ranks) == (state, (0,) * ("rank 0" in words)) and words in found.line, found.line


def test_a_rank_that_ended_after_its_first_file_had_met_the_others():
    """That file still says that the rank asks for them, and accuses none of those that ended after it."""
    ended = {"world_size": 2, "written": 1003.0, "ended": True, "phase": "collective"}
    first = RankState(rank=1, world_size=2, written=1000.0, since=1000.0, phase="rendezvous", asked="a:1",
                      answer="pending")  # fmt: skip
    states = {0: RankState(rank=0, **ended), 1: first}
    for known in ({}, {0: "gone", 1: "gone"}):
        found = judge(RunFacts(states=states, world=2, now=1003.0, ages={0: 0.0, 1: 3.0}, processes=known))
        assert 0 not in found.ranks and "have not met" not in found.line, found.line


RESTORING = """
import os, time, torch.distributed as dist
if os.environ["RANK"] == "0":
    time.sleep(float(os.environ["RESTORES"]))
dist.init_process_group("gloo")
"""


def test_a_rank_that_restores_before_the_rendezvous_is_seen_by_its_process(tmp_path: Path) -> None:
    """Rank 0 runs on the host of the rank that waits: no fault before the limit. A rank without a process is one."""
    (tmp_path / "train.py").write_text(RESTORING, encoding="utf-8")
    words = [PYTHON, "-m", "agent.cli", "run", "--folder", str(tmp_path / "run"), PYTHON, "-m",
             "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "127.0.0.1:0", str(tmp_path / "train.py")]  # fmt: skip
    with subprocess.Popen(words, env={**os.environ, "RESTORES": "600"}, stderr=subprocess.DEVNULL) as job:
        until = time.monotonic() + 400
        while not (facts := read_settled_run(tmp_path / "run")[0]).starting and time.monotonic() < until:
            time.sleep(0.5)
        job.terminate()
        job.wait()
    found = judge(facts)
    assert (found.state, [*facts.starting]) == ("fine", [0])
    assert "rank 0, alive on this host as pid " in found.line and "counts as a fault after 300 s" in found.line
    later = {rank: replace(state, since=state.written - 310.0) for rank, state in facts.states.items()}
    assert judge(replace(facts, states=later)).state == "stuck"
    later = {rank: replace(state, since=state.written - 70.0) for rank, state in facts.states.items()}
    assert judge(replace(facts, states=later)).state == "fine"
    assert judge(replace(facts, states=later, starting={})).ranks == (0,)


LOOP = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=200))
rank, fault = dist.get_rank(), sys.argv[1]
if fault == "gathers":  # the others end by their own error, which writes their last call; torchrun may be quicker
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    for step in range(80 if rank == 1 and fault == "leaves" else 100):
        dist.all_reduce(torch.ones(3))
        time.sleep(0.02)
        if rank == 1 and fault == "is-killed" and step == 60:
            os.kill(os.getpid(), signal.SIGKILL)
    if fault == "gathers":
        size = 4 if rank == 1 else 8
        dist.all_gather([torch.empty(size) for _ in range(3)], torch.ones(size))
except RuntimeError:
    if fault == "leaves":
        sys.exit(1)
    raise
"""


@each_row(("fault", "code", "words"), rows("differs"))
def test_the_rank_that_differs_is_named_with_and_without_the_log(tmp_path, fault, code, words):
    """Rank 1 of three leaves its loop first, gathers another size, or is killed. torchrun's table may name another."""
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    run, log = tmp_path / "run", tmp_path / "log"
    job = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py", fault]
    with log.open("wb") as stream:
        subprocess.run(job, env=add_monitor(os.environ, run), cwd=tmp_path, stdout=stream, stderr=stream, check=False)
    found = diagnosis.answer(diagnosis.WhySources(run=run, logs=(str(log),)))
    assert (found.state, found.ranks, found.causes[0].code) == ("failed", (1,), code) and words in found.line
    if fault != "leaves":
        assert diagnosis.answer(diagnosis.WhySources(run=run)).ranks == (1,)
