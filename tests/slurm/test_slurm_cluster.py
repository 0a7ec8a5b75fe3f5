"""Topoflight on a real slurmctld and real slurmd: health check, prolog, epilog, launch, requeue, search, why.

The tutorial's comparison of networks has two slurmd, each with its own two networks. As with pods, `eth0` is slow (a
vxlan that `tc tbf` limits) and `net1` is a fast secondary network. Both carry TCP: this kernel has no RDMA, so the
tutorial's third bar is not among them.
"""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rigs import netns
from rigs.forking import forking_environment
from rigs.slurm import Slurm, slurm_cluster
from rigs.tables import ROOT
from rigs.waiting import eventually

from contracts.run_record import read
from topology.slurm_conf import Placement, format_topology_conf

SCRIPTS = ROOT / "deploy" / "slurm"

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes, with the scripts of deploy/slurm as prolog, epilog and health check."""
    folder = tmp_path_factory.mktemp("slurm")
    shutil.copytree(SCRIPTS, folder / "scripts")
    expect(folder, "")
    more = f"Prolog={folder}/scripts/prolog.sh\nEpilog={folder}/scripts/epilog.sh\n"
    placed = [Placement(node=f"node0{n}", leaves=frozenset({f"leaf{n}"})) for n in (1, 2, 3)]
    (folder / "topology.conf").write_text(format_topology_conf(placed))
    more += "TopologyPlugin=topology/tree\n"
    more += f"HealthCheckProgram={folder}/scripts/health-check.sh\nHealthCheckInterval=0\nHealthCheckNodeState=ANY\n"
    with slurm_cluster(folder, 3, more) as made:
        yield made


def expect(folder: Path, options: str) -> None:
    """Settings of the scripts: the installation under test, these options of preflight, and a file as the log."""
    settings = (SCRIPTS / "settings").read_text()
    settings += f"topoflight={Path(sys.executable).parent}/topoflight\noptions=({options})\nseconds=240\n"
    settings += f"export SLURM_CONF={folder}/slurm.conf\n"
    settings += f'log() {{ echo "$1: $2" >> {folder}/log; }}\n'
    (folder / "scripts" / "settings").write_text(settings)


def topoflight(
    cluster: Slurm, *words: str, fails: bool = False, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """One command of this project on a login node of the cluster; a job that it submits runs this interpreter."""
    command = [python, "-m", "agent.cli", *words]
    done = subprocess.run(
        command, env=cluster.environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert fails or done.returncode == 0, done.stderr
    return done


def submitted(cluster: Slurm, *words: str, python: str = sys.executable) -> str:
    """The id of a job that `launch` has submitted."""
    small = ("--nodes", "2", "--ranks", "1", "--no-preflight", "--set", "use_peft=false")  # PEFT takes long to import
    done = topoflight(cluster, "launch", "--api", "slurm", *small, *words, python=python)
    assert done.stdout.startswith("job ") and " submitted: " in done.stdout
    return done.stdout.split()[1]


def test_slurm_reads_the_topology_that_is_written(cluster: Slurm) -> None:
    shown = cluster.run("scontrol", "show", "topology")
    assert "SwitchName=top Level=1" in shown and "Nodes=node[01-03] Switches=leaf[1-3]" in shown


def test_a_failed_check_drains_the_node_and_only_its_own_reason_is_lifted(cluster: Slurm) -> None:
    """The finding is the reason; a pass resumes the node, but not one that an administrator has drained."""
    run = partial(check_health, cluster, "node02")
    expect(cluster.folder, "--expect gpus=8")
    every(cluster, 10)  # by slurmd itself, each time a preflight on each of three nodes
    drained = "drained|topoflight: node02: expect."
    eventually(lambda: cluster.node("node02").startswith(drained), "slurmd has it drained")
    expect(cluster.folder, "")
    eventually(lambda: [cluster.node(name) for name in ("node01", "node02")] == ["idle|none"] * 2, "and resumed")
    every(cluster, 0)
    cluster.run("scontrol", "update", "NodeName=node02", "State=DRAIN", "Reason=new board")
    assert run() == "drained|new board"
    expect(cluster.folder, "--expect gpus=8")
    assert run() == "drained|new board"
    cluster.run("scontrol", "update", "NodeName=node02", "State=RESUME")
    drained = run()
    assert drained.startswith("drained|topoflight: node02: expect.") and "8" in drained and run() == drained
    expect(cluster.folder, "--require gpu.*")  # what is unknown changes no node
    assert run() == drained and "node not checked (exit code 5)" in (cluster.folder / "log").read_text()
    expect(cluster.folder, "")
    assert run() == "idle|none"


def check_health(cluster: Slurm, node: str) -> str:
    """Run the health check as slurmd does; the node's state and reason after it."""
    environment = {**cluster.environment, "SLURMD_NODENAME": node}
    subprocess.run([str(cluster.folder / "scripts" / "health-check.sh")], env=environment, check=True, timeout=300)
    return cluster.node(node)


def every(cluster: Slurm, seconds: int) -> None:
    """Have slurmd run the health check so often; 0: never."""
    config = cluster.folder / "slurm.conf"
    config.write_text(re.sub(r"HealthCheckInterval=\d+", f"HealthCheckInterval={seconds}", config.read_text()))
    cluster.run("scontrol", "reconfigure")


def test_the_prolog_drains_by_its_exit_code_and_the_epilog_notes_leftovers(cluster: Slurm) -> None:
    """No job starts on a node whose check fails; what a job leaves in /dev/shm is written to the log."""
    expect(cluster.folder, "--expect gpus=8")
    number = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "-w", "node01", "--wrap", "true").strip()
    eventually(lambda: cluster.node("node01") == "drained|Prolog error", "the prolog drains")
    assert cluster.job(number)["JobState"] == "PENDING"
    log = (cluster.folder / "log").read_text()
    assert f"prolog: job {number} is not started: node01: expect." in log
    expect(cluster.folder, "")
    assert check_health(cluster, "node01") == "drained|Prolog error"  # not its own: it saw no failure since
    cluster.run("scancel", number)
    for options, state in (("--expect gpus=8", "drained|topoflight: node01: expect."), ("", "idle|none")):
        expect(cluster.folder, options)
        assert check_health(cluster, "node01").startswith(state)
    left = Path(f"/dev/shm/nccl-{os.getpid()}")
    leave = f"echo left > {left}; setsid sleep 600 > /dev/null 2>&1 & true"
    number = cluster.run("sbatch", "--parsable", "-W", "-o", "/dev/null", "-w", "node01", "--wrap", leave).strip()
    noted = re.compile(rf"epilog: job {number} left process (\d+) \(sleep\) of user root")
    try:
        eventually(lambda: noted.search((cluster.folder / "log").read_text()), "the epilog notes the process")
        memory = f"after job {number} this node has shared memory {left}"
        eventually(lambda: memory in (cluster.folder / "log").read_text(), "and the memory")
    finally:
        left.unlink(missing_ok=True)
        for pid in noted.findall((cluster.folder / "log").read_text()):
            os.kill(int(pid), signal.SIGKILL)


def test_a_job_sees_the_limit_that_slurm_gives_it(cluster: Slurm) -> None:
    """That of the shell that submits it, or of slurmd where slurm.conf leaves locked memory out."""
    config, before = cluster.folder / "slurm.conf", (cluster.folder / "slurm.conf").read_text()
    scan = shlex.join(["srun", "-w", "node01", sys.executable, "-m", "agent.cli", "scan", "-o", "json"])
    of_slurmd = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        for more, limit in (("", 65536), ("PropagateResourceLimitsExcept=MEMLOCK\n", of_slurmd)):
            config.write_text(before + more)
            cluster.run("scontrol", "reconfigure")
            done = subprocess.run(
                ["bash", "-c", f"ulimit -S -l 64; exec {scan}"], env=cluster.environment, cwd=ROOT, capture_output=True,
                text=True, timeout=300, check=False,
            )  # fmt: skip
            found = json.loads(done.stdout)["snapshot"]
            facts = found["outcomes"]["limits"]["facts"]
            assert found["hostname"] == "node01"  # as slurm.conf calls it
            assert facts["memlock_soft_bytes"] == limit and facts["elsewhere"] == "", (more, facts)
    finally:
        config.write_text(before)
        cluster.run("scontrol", "reconfigure")


def test_a_job_is_saved_queued_again_and_trained_to_its_end(cluster: Slurm, tmp_path: Path) -> None:
    """What Slurm sends before the time limit makes the ranks save; the job resumes, and its record says so.

    Its ranks are forked; those of the job that is cancelled, below, are started.
    """
    output = tmp_path / "run"
    words = ("--output", str(output), "--set", "max_steps=12", "--set", "dataset_rows=64")
    number = submitted(cluster, *words, python=forking_environment())
    metrics = output / "metrics.jsonl"
    eventually(lambda: metrics.exists() and metrics.stat().st_size, "the first step", 300)
    cluster.run("scancel", "--signal=TERM", "--batch", number)
    eventually(lambda: cluster.job(number).get("Restarts") == "1", "it is queued again", 300)
    eventually(lambda: cluster.job(number)["JobState"] == "PENDING", "it waits")
    waits = topoflight(cluster, "why", "--job", number, fails=True)
    assert waits.returncode == 0 and "so that it can resume (run.json: interrupted, exit code" in waits.stdout, waits
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)  # Slurm lets it wait for minutes
    saved = json.loads((output / "run.json").read_text())
    assert (saved["status"], saved["exit_code"]) == ("interrupted", 75)
    eventually(lambda: cluster.job(number)["JobState"] == "COMPLETED", "it ends", 400)
    record = json.loads((output / "run.json").read_text())
    assert (record["status"], record["restarts"], record["steps_done"]) == ("complete", 1, 12)
    hosts = {json.loads(path.read_text())["host"] for path in (output / "ranks").glob("state_rank_*.json")}
    assert hosts == {"node01", "node02"}
    assert "is queued again and resumes (restart 1 of 3)" in (output / f"slurm-{number}.0.log").read_text()
    found = json.loads(topoflight(cluster, "why", "--job", number, "-o", "json", fails=True).stdout)
    assert any("record: complete" in line for line in found["sources"]), found
    assert found["state"] in ("fine", "slow"), found  # slow, where other work takes the cores
    assert found["state"] == "slow" or "it ran again and completed (COMPLETED, restart 1)" in found["line"], found
    unknown = topoflight(cluster, "why", "--job", "99999", fails=True)
    assert unknown.returncode == 1 and "job 99999: no file of it was found" in unknown.stderr, unknown.stderr


def test_a_wrapped_script_runs_with_its_gate(cluster: Slurm, tmp_path: Path) -> None:
    """The gate runs on both nodes before the ranks, and ends the job where a check fails."""
    path = tmp_path / "own.sbatch"
    ranks = "srun bash -c 'echo rank $PYTHONPATH $(env | grep ^TOPOFLIGHT_R)'"
    path.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\nset -eu\n{ranks}\n")
    topoflight(cluster, "wrap", str(path), "--apply")
    for code, count, script in (
        (0, 4, path.read_text()), (3, 0, path.read_text().replace("-o reason", "-o reason --expect gpus=8")),
    ):  # fmt: skip
        path.write_text(script)
        log = tmp_path / f"{code}.log"
        words = ("sbatch", "-W", "-o", str(log), str(path))
        done = subprocess.run(words, env=cluster.environment, capture_output=True, timeout=300, check=False)
        started = re.findall(r"(?m)^rank \S+/jobs/autostart\S* TOPOFLIGHT_RUN=\S+/topoflight-\d+$", log.read_text())
        assert (done.returncode, len(started)) == (code, count), log.read_text()
    assert all(f"{node}: expect." in log.read_text() for node in ("node01", "node02")), log.read_text()


def test_a_cancelled_job_leaves_nothing(cluster: Slurm, tmp_path: Path) -> None:
    """It saves, and is not queued again."""
    output = tmp_path / "run"
    number = submitted(cluster, "--output", str(output))
    eventually(lambda: (output / "ranks").is_dir(), "the ranks start", 300)
    cancel(cluster, number)


def cancel(cluster: Slurm, number: str) -> None:
    """Cancel a job that runs: it ends, and so do all its processes."""
    cluster.run("scancel", number)
    eventually(lambda: not cluster.run("squeue", "-h"), "it is gone")
    assert cluster.job(number)["JobState"] == "CANCELLED"
    eventually(lambda: not processes_of(number), "no process is left")


# One host is all nodes here, and one load at a time is allowed on a host: each task has its own locks.
ALONE = 'unshare --mount sh -c \'mount -t tmpfs none /run/lock && exec "$0" "$@"\' '


def load(verb: str, folder: Path, *words: str) -> str:
    """A search or a benchmark as a task of a job, in words for a shell."""
    port = folder.joinpath("slurm.conf").read_text().partition("SlurmctldPort=")[2].split()[0]
    where = ("--rendezvous", f"127.0.0.1:{int(port) + 7}", "--ranks", "1") if verb == "search" else ("--ranks", "2")
    return ALONE + shlex.join([sys.executable, "-m", "agent.cli", verb, *where, *words])


def test_a_search_under_srun_names_the_bad_node_as_slurm_does(cluster: Slurm) -> None:
    """A node that never comes is lost. Of the two that are left the search judges none."""
    command = load("search", cluster.folder, "--wait", "100", "--size", "2M", "-o", "slurm")
    script = f'[ "$SLURMD_NODENAME" = node03 ] || exec {command}'
    words = ("srun", "--nodes=3", "--ntasks-per-node=1", "bash", "-c", script)
    environment = {**cluster.environment, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (3, "node03\n"), done.stderr


def test_a_cancelled_benchmark_leaves_nothing(cluster: Slurm) -> None:
    """Its ranks are separate processes, which end with the job, too."""
    task = "srun --ntasks-per-node=1 " + load("bench", cluster.folder, "--budget", "500")
    words = ("--parsable", "--nodes=2", "-o", "/dev/null", "-D", str(ROOT), "--wrap", task)
    number = cluster.run("sbatch", *words).strip()
    eventually(lambda: any("collectives.bench.rank" in line for line in processes_of(number)), "it runs", 300)
    cancel(cluster, number)


def processes_of(number: str) -> list[str]:
    """The command lines of the processes that a job has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_JOB_ID={number}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.with_name("cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_a_controller_that_does_not_answer_is_an_error(cluster: Slurm, tmp_path: Path) -> None:
    """Every command that asks it ends and names it, nothing is submitted, and no node is changed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = tmp_path / "slurm.conf"
        text = (cluster.folder / "slurm.conf").read_text()
        config.write_text(text.replace("SlurmctldPort=", f"SlurmctldPort={silent.getsockname()[1]} #"))
        expect(cluster.folder, "--expect gpus=8")
        launch = ("launch", "--api", "slurm", "--nodes", "2", "--no-preflight", "--output", str(tmp_path / "run"))
        commands = {
            ("-m", "agent.cli", *launch): "Error: squeue: ",
            ("-m", "agent.cli", "why", "--job", "7"): "Error: scontrol: ",
            (str(cluster.folder / "scripts" / "health-check.sh"),): "",
        }  # fmt: skip
        environment = {**cluster.environment, "SLURM_CONF": str(config), "SLURMD_NODENAME": "node02"}
        with (cluster.folder / "scripts" / "settings").open("a") as settings:
            settings.write(f"export SLURM_CONF={config}\n")
        started = [
            subprocess.Popen([sys.executable, *words] if len(words) > 1 else words, env=environment, cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for words in commands
        ]  # fmt: skip
        ended = [process.communicate(timeout=240)[1].splitlines()[-1:] for process in started]
    expect(cluster.folder, "")
    for process, said, wanted in zip(started, ended, commands.values(), strict=True):
        assert process.returncode == bool(wanted) and "".join(said).startswith(wanted), said
    assert "node not changed: sinfo failed or did not answer" in (cluster.folder / "log").read_text()
    assert cluster.node("node02") == "idle|none"


PAGE = ROOT / "docs" / "tutorials" / "slurm.md"
# The layout and the length of a job that is small enough for a test; PEFT takes long to import.
RUNS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
SMALL = "--ranks 1 --set use_peft=false --set dataset_rows=64"


def commands(shared: Path) -> list[str]:
    """The commands of the page that record the nodes and train over both TCP networks, as it has them.

    The names of the nodes, of the second interface and of the folder are those of the rig.
    """
    text = PAGE.read_text(encoding="utf-8")
    names = {"node01": "host-0", "node02": "host-1", "eth1": "net1", "/shared": str(shared),
             "max_steps=200": "max_steps=12"}  # fmt: skip
    for old, new in names.items():
        text = text.replace(old, new)
    found = [line for line in re.findall(r"^\$ (.*)", text, re.MULTILINE)
             if "topoflight capture" in line or " --over " in line]  # fmt: skip
    return [f"{line} {SMALL}" if " --over " in line else line for line in found]


@pytest.mark.netns
@pytest.mark.timeout(1200)
@pytest.mark.nightly  # minutes of waiting; with other clusters on the host its jobs have waited longer
@pytest.mark.skipif(netns.missing("tc") is not None, reason=str(netns.missing("tc")))
def test_the_runs_of_the_tutorial_are_in_the_order_of_their_networks(tmp_path: Path) -> None:
    """The commands run as a reader types them; the slower network has the longer step."""
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"}
    (tmp_path / "slurm").mkdir()
    with netns.hosts(2, default_rate="40mbit") as hosts, slurm_cluster(tmp_path / "slurm", hosts=hosts) as cluster:
        for line in commands(tmp_path):
            done = subprocess.run(
                cluster.inside(["bash", "-c", f"cd {shlex.quote(str(tmp_path))} && {line}"]), capture_output=True,
                env={**cluster.environment, **environment}, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            if " --over " in line:
                number = done.stdout.split()[1]
                eventually(lambda number=number: cluster.job(number)["JobState"] not in RUNS, line, 300)
                logs = [path.read_text() for path in (tmp_path / "bars").glob(f"*/slurm-{number}.log")]
                assert cluster.job(number)["JobState"] == "COMPLETED", logs
    slow, fast = (read(tmp_path / "bars" / name / "run.json") for name in ("eth0", "net1"))
    for record, name in ((slow, "eth0"), (fast, "net1")):
        assert record.transports and all(f"TCP over {name} " in seen for seen in record.transports)
    assert slow.measured.step_seconds and fast.measured.step_seconds
    assert slow.measured.step_seconds > fast.measured.step_seconds
