"""Pods of a job on a cluster: late, deleted, killed, failed; on loopback, a process each, as a container has it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from resident import free_port
from rigs.benchmarks import OWN_LOCK, require_own_lock
from rigs.tables import ROOT, each_row, rows_of
from rigs.waiting import eventually

from finetune import pod

rows = rows_of(__file__)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900), pytest.mark.usefixtures("forked_ranks")]
PYTHON = sys.executable  # which starts torchrun and its ranks, where a pod of `forked_ranks` has them forked
# A rank without torch: it tells that it runs, and ends as its file says.
RANK = """
import os, pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if (place / "done").exists() else 75))
(place / f"up-{rank}-{os.getpid()}").touch()
(place / f"restarts-{os.environ.get('TOPOFLIGHT_RESTARTS')}").touch()
while True:
    time.sleep(0.02)
    if (end := place / f"end-{rank}").exists() and (code := end.read_text()):  # empty until it is written
        sys.exit(int(code))
    if (place / "end").exists():
        sys.exit(0)
"""
JOB = Path(__file__).with_name("pods_job.yaml").read_text(encoding="utf-8")


class Rig:
    """Pods of one job, and what they say."""

    def __init__(self, folder, words, **options):
        self.folder, self.words, self.options = folder, words, options
        self.port = free_port()
        self.pods = {}
        self.started = 0

    def start(self, index, before=(), python=None, **environment):
        """A pod of this index, as the job's controller makes it; its log."""
        self.started += 1
        log = self.folder / f"pod-{index}-{self.started}.log"
        given = {"nodes": 2, "ranks": 1, **self.options}
        options = [f"--{name}" if value is None else f"--{name}={value}" for name, value in given.items()]
        command = [python or sys.executable, "-m", "finetune.pod", *options, f"--meet=127.0.0.1:{self.port}"]
        env = {**os.environ, "JOB_COMPLETION_INDEX": str(index), "PYTHONPATH": str(ROOT)}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
        with log.open("wb") as stream:
            self.pods[index] = subprocess.Popen(
                [*before, *command, "--", *self.words], env=env, stdout=stream, stderr=stream, cwd=ROOT
            )
        return log

    def ended(self, index):
        """The pod's exit code."""
        return self.pods[index].wait(timeout=300)

    def ups(self, rank):
        """How often a rank has started."""
        return len(list(self.folder.glob(f"up-{rank}-*")))


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(*words, **options):
        made.append(Rig(tmp_path, words, **options))
        return made[-1]

    yield make
    for one in made:
        for process in one.pods.values():
            process.kill()
            process.wait()
    (tmp_path / "end").touch()  # for ranks of pods that were killed: a container would have taken them along


@pytest.fixture
def scripted(rig, tmp_path):
    """Two pods whose ranks end as they are told, with the record that rank 0 would have."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "exit_code": None}))

    def make(**options):
        return rig("torchrun", str(tmp_path / "rank.py"), str(tmp_path), f"output_dir={tmp_path}", **options)

    return make


def record(folder):
    return json.loads((folder / "run.json").read_text())


def both_up(rig, times=1):
    eventually(lambda: rig.ups(0) >= times and rig.ups(1) >= times, f"both ranks started {times} times", 300)


@pytest.mark.nightly
def test_a_pod_that_does_not_come_is_named(scripted, tmp_path):
    """Bounded, with a code that no controller tries again; the record does not stay "running"."""
    job = scripted(wait=2)
    log = job.start(0)
    assert job.ended(0) == pod.UNAVAILABLE
    assert "pod 1 of 2 did not come within 2 s" in log.read_text()
    assert (record(tmp_path)["status"], record(tmp_path)["exit_code"]) == ("interrupted", 75), "of an earlier start"


def test_a_rank_that_is_killed_is_started_again_with_all_others(scripted, tmp_path):
    """The record says "interrupted" meanwhile; both pods stay."""
    job = scripted()
    log = job.start(0)
    job.start(1)
    both_up(job)
    (started,) = tmp_path.glob("up-1-*")
    os.kill(int(started.name.split("-")[2]), signal.SIGKILL)
    both_up(job, 2)
    (tmp_path / "end").touch()
    assert (job.ended(0), job.ended(1)) == (0, 0), log.read_text()
    assert "a rank of pod 1 was ended by SIGKILL" in log.read_text()


@pytest.mark.nightly
def test_another_exit_code_ends_all_pods_at_once(scripted, tmp_path, code=65):
    """The job's own code, not torchrun's 1; pod 0 goes first."""
    job = scripted()
    log = job.start(0)
    job.start(1)
    both_up(job)
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "exit_code": None}))
    (tmp_path / "end-1").write_text(str(code))
    (tmp_path / "end-0").write_text("1")
    assert job.ended(0) == code
    assert job.ended(1) == code
    assert job.ups(0) == job.ups(1) == 1, "it was not started again"
    assert f"the ranks of pod 1 ended with exit code {code}" in log.read_text()
    assert (record(tmp_path)["status"], record(tmp_path)["exit_code"]) == ("failed", code)
    assert "Root Cause" in log.read_text()


@pytest.mark.nightly
def test_restarts_are_counted_and_used_up(scripted, tmp_path):
    """Of a pod that is lost again and again; the record then says how to go on."""
    job = scripted(restarts=1, wait=60)
    log = job.start(0)
    job.start(1)
    for times in (1, 2):
        both_up(job, times)
        (tmp_path / "run.json").write_text(json.dumps({"status": "running", "exit_code": None}))
        job.pods[1].kill()
        job.ended(1)
        if times == 1:
            job.start(1)
    assert job.ended(0) == pod.UNAVAILABLE
    assert "restart 1 of 1 is used up" in log.read_text()
    assert job.ups(0) == 2
    ended = record(tmp_path)
    assert (ended["status"], ended["exit_code"]) == ("interrupted", 75)


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("65", 65),
        *(pytest.param(*row, marks=pytest.mark.nightly) for row in (("0", 0), (None, pod.TERMINATED), ("done", 0))),
    ],
)
def test_under_an_operator_torchrun_is_started_once(scripted, tmp_path, code, wanted):
    """The job's own exit code, or SIGTERM's with time to save; the operator restarts pods and counts."""
    job = scripted(nodes=1, once=None)
    log = job.start(0, python=PYTHON, TOPOFLIGHT_RESTARTS="2")
    eventually(lambda: job.ups(0) == 1, "the rank is up", 300)
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "exit_code": None}))
    if code in (None, "done"):
        if code:  # the last step was over as SIGTERM came
            (tmp_path / "done").touch()
        job.pods[0].send_signal(signal.SIGTERM)
    else:
        (tmp_path / "end-0").write_text(code)
    assert job.ended(0) == wanted, log.read_text()
    assert job.ups(0) == 1, "it was not started again"
    assert (tmp_path / "restarts-2").exists()
    status = {65: "failed", 0: "running", pod.TERMINATED: "interrupted"}[wanted]  # the job itself ends a good one
    assert record(tmp_path)["status"] == status


@each_row(("codes", "lost", "verdict"), rows("failed_first"))
def test_what_follows_is_of_the_pod_that_failed_first(codes, lost, verdict):
    """A failure of one is a failure of all: what tells is the code that no other pod's can have caused."""
    settings = pod.Settings(index=0, nodes=2, ranks=1, meet=("127.0.0.1", 1), words=())
    code, _why = pod.Pod(settings=settings).judge(codes, set(lost))
    assert code == verdict


def connected(count):
    """Connections of pod 0 to that many others, and their ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()) for _ in range(count)]
        return {number: pod.Wire(server.accept()[0]) for number in range(1, count + 1)}, ends


def watch(settings, wires, ranks):
    """What pod 0 makes of one start."""
    with pod._listen(0) as listener:
        return pod.Pod(settings=settings)._watch(listener, ranks, wires)


def test_ranks_that_this_pod_ended_keep_that_code_while_another_pod_still_runs(tmp_path, monkeypatch):
    """Their process has another code by then, SIGTERM's, which would read as saved and start the job again."""
    monkeypatch.setattr(pod, "LOST_GRACE_SECONDS", 0.2)
    (tmp_path / "idle.py").write_text("import time\ntime.sleep(600)\n")
    settings = pod.Settings(index=0, nodes=3, ranks=1, meet=("127.0.0.1", 1), words=(str(tmp_path / "idle.py"),))
    wires, (failed, slow) = connected(2)
    failed.sendall(b'{"ended": 1}\n')

    def end_later():
        while b"troubled" not in slow.recv(4096):
            pass
        time.sleep(2.5)  # until well after the ranks of pod 0 are ended
        slow.sendall(b'{"ended": -1000}\n')

    late = threading.Thread(target=end_later)
    late.start()
    with contextlib.closing(pod.Ranks(settings, "127.0.0.1", (1, 2))) as ranks:
        found = watch(settings, wires, ranks)
    late.join()
    assert found == ({1: 1, 0: pod.ENDED_HERE, 2: pod.ENDED_HERE}, set())


def test_a_pod_that_is_stopped_is_given_up(tmp_path):
    """Its node answers, so the connection stays; the ranks of pod 0 have ended well."""
    (tmp_path / "done.py").touch()
    words = (str(tmp_path / "done.py"),)
    settings = pod.Settings(index=0, nodes=2, ranks=1, meet=("127.0.0.1", 1), words=words, wait=0.2)
    wires, _stopped = connected(1)
    alone = replace(settings, nodes=1, wait=60)
    with contextlib.closing(pod.Ranks(alone, "127.0.0.1", (1, 2))) as ranks:
        assert watch(settings, wires, ranks) == ({0: 0}, {1})


def test_connections_that_name_no_pod_are_bounded():
    """A port scanner's, or what breaks the parser: pod 0 goes on."""
    settings = pod.Settings(index=0, nodes=2, ranks=1, meet=("127.0.0.1", 1), words=())
    with pod._listen(0) as listener:
        leader = pod.Pod(settings=settings)
        at = ("127.0.0.1", listener.getsockname()[1])
        silent = [socket.create_connection(at) for _ in range(9)]
        silent[-1].sendall(b"[" * 9000 + b"\n")
        for _ in range(30):
            leader._admit(listener)
        assert len(leader.arrived) <= settings.nodes
        with socket.create_connection(at) as real:
            real.sendall(b'{"index": 1}\n')
            eventually(lambda: leader._admit(listener) or 1 in leader.peers, "the pod is admitted", 30)
    for one in (*silent, *leader.arrived, *leader.peers.values()):
        one.close()


def measured_pod(job, index, **environment):
    """A pod on a host of its own, as far as the benchmark's lock and names go."""
    require_own_lock()
    return job.start(index, OWN_LOCK, NODE_NAME=f"host-{index}", **environment)


@pytest.mark.nightly
@pytest.mark.netns
def test_pods_measure_together_before_each_start_of_their_ranks(scripted, tmp_path):
    """Real benchmark ranks, of both pods in one run, and again after a pod was deleted while it measured."""
    job = scripted(measure=None)
    log = measured_pod(job, 0)
    second = measured_pod(job, 1)
    eventually(lambda: "measuring" in second.read_text(), "both measure")
    job.pods[1].terminate()
    job.ended(1)
    assert job.ups(0) == job.ups(1) == 0
    measured_pod(job, 1)
    both_up(job)
    assert log.read_text().count("measuring what the ranks will use") == 2
    (tmp_path / "end").touch()
    assert (job.ended(0), job.ended(1)) == (0, 0)


@pytest.mark.nightly
@pytest.mark.netns
def test_a_measurement_that_fails_ends_all_pods_and_no_rank_trains(scripted, tmp_path):
    """The ranks of one pod find no interface of the name that its environment gives: 3, which nothing tries again."""
    job = scripted(measure=None)
    log = measured_pod(job, 0)
    measured_pod(job, 1, GLOO_SOCKET_IFNAME="nosuch0")
    assert (job.ended(0), job.ended(1)) == (3, 3), log.read_text()
    assert "not started: measured before the job: the ranks of pod" in log.read_text()
    assert job.ups(0) == job.ups(1) == 0


@pytest.mark.nightly
def test_nccls_lines_reach_the_pods_log(scripted, tmp_path):
    """Of this pod's files, of this start: what `logs POD | topoflight evidence -` reads."""
    host = os.uname().nodename.partition(".")[0]
    (tmp_path / "nccl").mkdir()
    (tmp_path / "nccl" / f"nccl.{host}.1.log").write_text("n1:1:1 [0] NCCL INFO of an earlier start\n")
    job = scripted(nodes=1)
    log = job.start(0)
    eventually(lambda: job.ups(0) == 1, "the rank is up", 300)
    line = "n1:7:7 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n"
    (tmp_path / "nccl" / f"nccl.{host}.7.log").write_text(line)
    (tmp_path / "nccl" / "nccl.elsewhere.7.log").write_text("of another pod\n")
    eventually(lambda: line in log.read_text(), "the line is in the pod's log")
    (tmp_path / "end").touch()
    assert job.ended(0) == 0
    assert "earlier" not in log.read_text() and "of another pod" not in log.read_text()


def test_the_fine_tune_goes_on_from_its_checkpoint_after_a_pod_was_lost(rig, tmp_path):
    """Real gloo ranks, in one run: deleted, all save at one step; then killed, the newest whole checkpoint remains."""
    (tmp_path / "job.yaml").write_text(JOB)
    out = tmp_path / "out"
    job = rig("torchrun", "-m", "finetune.train", "--config", str(tmp_path / "job.yaml"), f"output_dir={out}")
    log = job.start(0)
    job.start(1)

    def saved():
        return max((int(p.parent.name.partition("-")[2]) for p in out.glob("checkpoint-*/trainer.json")), default=0)

    at = 0
    for sign, ended in ((signal.SIGTERM, pod.TERMINATED), (signal.SIGKILL, -signal.SIGKILL)):
        eventually(lambda at=at: saved() > at, "a new checkpoint is there", 300)
        job.pods[1].send_signal(sign)
        assert job.ended(1) == ended
        eventually(lambda: record(out)["status"] == "interrupted", "the record has ended")
        assert record(out)["exit_code"] == 75
        at = saved()
        if sign == signal.SIGTERM:
            assert f"saved at step {at}" in log.read_text()
        else:
            (tmp_path / "job.yaml").write_text(JOB.replace("max_steps: 400", f"max_steps: {at + 4}"))
        job.start(1)
    assert (job.ended(0), job.ended(1)) == (0, 0), log.read_text()[-3000:]
    done = record(out)
    assert (done["status"], done["restarts"], done["steps_done"]) == ("complete", 2, at + 4)
    assert f"resumed from checkpoint-{at}, " in "".join(done["notes"])
