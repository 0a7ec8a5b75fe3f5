"""Slurm without Slurm: host lists, batch scripts that are written, and a user's own that is wrapped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import resident
from cattrs import structure
from rigs.command import topoflight
from rigs.recorded import path_of, snapshot
from rigs.results import search_result
from rigs.tables import ROOT, each_row, rows_of

from agent.checks.verdict import judge
from agent.jobs.preflight import Report, format_slurm_reasons
from agent.jobs.search import format_slurm_hosts, make_findings, make_resolvable
from agent.jobs.slurm import SlurmError, find_job_files
from collectives.search.coordinator import coordinate, read_journal
from collectives.search.plan import SearchResult
from collectives.search.rank import RankSettings, connect, note_path
from collectives.traces.rank_files import NAME, RankState
from contracts import plain
from contracts.finding import Finding
from contracts.host_list import HostListError, compress_host_list, expand_host_list, name_in_slurm
from finetune.rank_monitor import _get_identity
from planner.slurm import parse_limit, wrap_script
from probes.api import read_host_name
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts
from topology.slurm_conf import Placement, find_placement, format_topology_conf

rows = rows_of(__file__)


def test_host_lists_are_written_and_read_as_slurm_does() -> None:
    """Each list reads back as its hosts; what is none is refused with the part that is wrong."""
    for text, hosts in rows("lists")().items():
        assert (compress_host_list(reversed(hosts)), list(expand_host_list(text))) == (text, hosts), text
    for text, found in rows("read")().items():
        assert expand_host_list(text) == tuple(found), text
    for text in rows("wrong")():
        with pytest.raises(HostListError, match=r"must be a number|is no host name|more than"):
            expand_host_list(text)
    names = ("gpu1.example.com", "gpu1", "10.0.0.1", "fd00::1")
    assert [name_in_slurm(name) for name in names] == ["gpu1", "gpu1", "10.0.0.1", "fd00::1"]


LAUNCH = ("launch", "--api", "slurm", "--machine", "p5.48xlarge", "--nodes", "2", "--dry-run", "-o", "yaml")


def test_a_batch_script_has_the_options_of_the_command(tmp_path: Path) -> None:
    """bash reads it; it contains the options, and each setting with its reason."""
    done = topoflight(
        *LAUNCH, "--output", tmp_path, "--exclude", "node[05-07],node9", "--time-limit", "2:00:00",
        "--partition", "gpu", "--sbatch", "account=physics", "--sbatch", "contiguous", "--require", "gpu.*",
        "--restarts", "5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line for line in rows("options")() if line not in lines] == []
    assert lines[lines.index("export NCCL_NET='AWS Libfabric'") - 1].startswith("# EFA works only")
    assert "--require 'gpu.*'" in done.stdout and '"$restarts" -lt 5' in done.stdout and "ulimit -l" in done.stdout
    checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    over = topoflight(*LAUNCH, "--over", "ens5.7").stdout
    assert "export NCCL_SOCKET_IFNAME=ens5.7\n" in over and "export NCCL_IB_DISABLE=1\n" in over
    assert "export NCCL_NET=Socket\n" in over and "FI_" not in over and '"step_seconds": null' in over
    assert " --measure -- torchrun" in topoflight(*LAUNCH, "--measure").stdout and "--measure" not in over
    hosts = tmp_path / "hosts"
    hosts.write_bytes(b"n1\xff\n")
    named = ",".join(f"a{number}-ib" for number in range(100))
    for word, line in ((named, "exclude=a[0-9,10-99]-ib"), (hosts, "is no host")):
        assert line in topoflight(*LAUNCH, "--exclude", word).output, line
    large = ("--model", "Llama-3.1-70B", "--method", "full", "--set", "dataset_name=synthetic:arithmetic")
    noted = topoflight(*LAUNCH, *large, "--set", "max_seq_length=128").stderr
    assert "note: max_seq_length is now max_length" in noted and "note: a checkpoint takes 788.5 GiB" in noted, noted


@each_row(("words", "message"), rows("refused"))
def test_a_wrong_option_is_refused_by_name(words: list[str], message: str) -> None:
    done = topoflight(*LAUNCH, *words)
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_time_limit_is_read_as_sbatch_reads_it() -> None:
    limits = {"90": 5400, "1:30": 90, "2:00:00": 7200, "1-2": 93_600, "1-2:30": 95_400, "1-0:0:5": 86_405,
              "0": None, "UNLIMITED": None}  # fmt: skip
    assert {text: parse_limit(text) for text in limits} == limits
    for text in ("3:01", "0", "UNLIMITED"):
        done = topoflight(*LAUNCH, "--time-limit", text)
        assert done.exit_code == 0 and f"#SBATCH --time={text}" in done.stdout, done.output


def test_wrap_adds_to_a_batch_script_and_moves_nothing(tmp_path: Path) -> None:
    """Settings that the script has stay; the added lines are together, before the statement that starts ranks."""
    path, script = tmp_path / "job.sbatch", rows("script")()
    path.write_text(script)
    done = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
    assert done.exit_code == 0, done.output
    made, old = path.read_text().splitlines(), script.splitlines()
    added = made[6 : len(made) - 3]
    assert made[:6] + made[-3:] == old and added[0].startswith("# Added by topoflight wrap")
    text = "\n".join(added)
    assert "export NCCL_DEBUG=" not in text and "export NCCL_NET='AWS Libfabric'" in text and "NCCL_DEBUG_FILE=" in text
    assert "preflight -q -o reason || {" in text and "The job is not started: $reason" in text
    again = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
    assert again.exit_code == 0 and path.read_text().splitlines() == made and "wrapped before" in again.output
    gate = "  srun -l /opt/bin/topoflight preflight -q || exit\n    srun --label"
    path.write_text(script.replace("  srun --label", gate))
    own = topoflight("wrap", path, "--machine", "p5.48xlarge")
    assert "no second check of the nodes" in own.stderr and "+srun" not in own.stdout and "+export" in own.stdout
    for option, gpus in (("--gres=gpu:1", 2), ("--gres=gpu:h100:4,tmpdisk:9", 8), ("--gpus-per-node=2", 4),
                         ("-c 4", 16)):  # fmt: skip
        path.write_text(f"#!/bin/bash\n#SBATCH -N2\n#SBATCH {option}\nsrun train\n")
        done = topoflight("wrap", path, "--machine", "h100")
        assert f"({gpus} CUDA GPUs" in done.stdout, (option, done.output)
    path.write_text(script.replace("export", "#SBATCH --time=1\nexport"))
    late = topoflight("wrap", path, "--machine", "p5.48xlarge")
    assert "line 6: sbatch ignores this option" in late.output, late.output
    long = {"longer than 65536 characters": f"#!/bin/bash\n#SBATCH --comment={'x' * 70_000}\nsrun x\n"}
    for message, wrong in (rows("bad")() | long).items():
        path.write_bytes(wrong.encode())
        done = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
        assert done.exit_code == 2 and message in done.output, (message, done.output)
        assert path.read_bytes() == wrong.encode()


def test_the_gate_comes_before_the_first_start_of_ranks() -> None:
    """A launcher is seen behind another program, in the text of a shell and in a variable, not where it is a name.

    No statement is split: the lines go before the whole `if`.
    """
    split = "#!/bin/bash\nif true; then\n  echo one\nfi; srun train\n"
    made, _ = wrap_script(split, (), python="python", has_log=True)
    assert made.startswith("#!/bin/bash\n# Added by") and made.endswith(split.partition("\n")[2])
    for line in rows("starts")():
        made, notes = wrap_script(f"#!/bin/bash\n{line}\nsrun last\n", (), python="python", has_log=True)
        assert made.splitlines()[1].startswith("# Added by") and not notes, (line, notes)
    for line, note in rows("idle")():
        made, notes = wrap_script(f"#!/bin/bash\n{line}\nsrun last\n", (), python="python", has_log=True)
        lines = made.splitlines()
        assert (lines[-2], lines[-1]) == ("# End of what topoflight wrap has added", "srun last"), line
        assert len(notes) == bool(note) and note in "".join(notes), (line, notes)


OF_TASK = "topoflight-1239/node01-7.log"


def commands(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which these commands of Slurm are found first."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    usual = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return {**usual, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1",
            "SLURM_SUBMIT_DIR": str(folder)}  # fmt: skip


STEP = 'while [[ $1 == -* ]]; do shift; done\nexec "$@"'  # srun of one task


def test_a_module_of_the_users_folder_is_not_run_as_the_gate(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("print('the wrong agent')\n")
    (tmp_path / "own.sbatch").write_text("#!/bin/bash\nsrun echo ranks\n")
    done = topoflight("wrap", tmp_path / "own.sbatch", "--machine", "p5.48xlarge", "--require", "gpu.*", "--apply")
    script = (tmp_path / "own.sbatch").read_text()
    assert done.exit_code == 0 and "-o reason --require 'gpu.*' || {" in script, done.output
    ran = subprocess.run(["bash", "own.sbatch"], cwd=tmp_path, env=commands(tmp_path, srun=STEP), capture_output=True,
                         text=True, timeout=120, check=False)  # fmt: skip
    assert ran.returncode == 5 and "a required check is unknown" in ran.stdout, ran
    assert "the wrong agent" not in ran.stdout and "ranks" not in ran.stdout


def test_a_signal_before_the_first_checkpoint_names_the_time_limit(tmp_path: Path) -> None:
    """The ranks end with SIGTERM while they start. `why` names the limit, not somebody who cancelled the job."""
    done = topoflight(*LAUNCH, "--output", tmp_path / "run", "--no-preflight")
    step = (f'trap "kill \\$!; exit 143" TERM; echo $$ > {tmp_path}/pid; sleep 60 > /dev/null 2>&1 &\n'
            'echo "safe path: $PYTHONSAFEPATH"; wait')  # fmt: skip
    cancels = f'kill -TERM "$(cat {tmp_path}/pid)"; echo "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT x ***"'
    squeue = 'case "$*" in *%T*) echo RUNNING ;; *) date -d "2 minutes" +%Y-%m-%dT%H:%M:%S ;; esac'
    environment = commands(tmp_path, srun=step, scancel=cancels, squeue=squeue, scontrol="echo n1")
    job = subprocess.Popen(["bash"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    job.stdin.write(done.stdout)
    job.stdin.close()
    assert any(line == "safe path: 1\n" for line in job.stdout)
    job.send_signal(signal.SIGTERM)
    log = job.stdout.read()
    assert job.wait(60) == 143 and "The job has almost reached its time limit: SIGTERM came " in log, log
    (tmp_path / "log").write_text(log)
    found = json.loads(topoflight("why", tmp_path / "log", "-o", "json").stdout)
    assert found["causes"][0]["code"] == "time_limit_reached", found


def test_a_job_gets_no_output_folder_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it waits for the end of the other job."""
    queue = f"echo '12 {tmp_path}/run/job.sbatch'; echo '13 {tmp_path}/run2/job.sbatch'"
    path = commands(tmp_path, squeue=queue, sbatch="echo 14")["PATH"]
    monkeypatch.setenv("PATH", path)
    words = [word for word in LAUNCH if word not in ("--dry-run", "-o", "yaml")]
    for more, code, wanted in (
        ((), 1, "job 12 writes there"), (("--sbatch", "dependency=afterany:12"), 0, "job 14 submitted"),
    ):  # fmt: skip
        done = topoflight(*words, "--output", tmp_path / "run", *more)
        assert done.exit_code == code and wanted in " ".join(done.output.split()), done.output


def test_two_recordings_of_a_node_are_one_name(tmp_path: Path) -> None:
    recording = json.loads(path_of().read_text())
    (tmp_path / "node01.json").write_text(json.dumps(recording))
    recording["answers"]["identity"][""]["time"] -= 60
    recording["answers"]["nvml"]["nvmlDeviceGetCount"][""] = 7
    (tmp_path / "old.json").write_text(json.dumps(recording))
    both = ("--host", tmp_path / "node01.json", "--host", tmp_path / "old.json")
    done = topoflight("preflight", "-q", *both, "-o", "slurm", "--expect", "gpus=99")
    assert (done.exit_code, done.stdout) == (3, f"{name_in_slurm(snapshot().hostname)}\n"), done.output


@each_row(("job", "shown", "here", "wanted", "where", "awaited", "again"), rows("jobs"))
def test_the_logs_of_a_job_are_found(job, shown, here, wanted, where, awaited, again, tmp_path, monkeypatch):
    """By the controller, or in the current folder when it has forgotten the job.

    NCCL's logs of an array's task are in the folder of the task's own id.
    """
    folder = tmp_path / "jobs"
    for name in ("a.out", OF_TASK, "run/slurm-1234.log", "run/job.sbatch"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")
    fails = " >&2; exit 1" * (" error: " in shown)
    answer = f"cat <<'END'{fails}\n{shown.format(folder=folder)}\nEND"
    monkeypatch.setenv("PATH", commands(tmp_path, scontrol=answer)["PATH"])
    monkeypatch.chdir(folder / here)
    try:
        run, logs, text, does = find_job_files(job)
    except SlurmError as error:
        run, logs, text, does = None, (), str(error), ""
    assert [str(log.absolute().relative_to(Path.cwd())) for log in logs] == wanted
    assert run == (folder / awaited if awaited else None)
    assert where.format(folder=folder) in text and again in does and bool(again) == bool(does), (text, does)
    if logs:
        (folder / "topoflight-1239" / "ranks").mkdir()  # where the monitor in a wrapped script's ranks writes
        assert find_job_files(job).run == (folder / awaited if awaited else None)


@each_row(("words", "machine", "code", "wanted"), rows("over"))
def test_an_interface_that_a_recorded_node_lacks_is_refused(words, machine, code, wanted):
    """With the node and what it has. What the pods will have is unknown where the recording is of a host."""
    done = topoflight(*words, "--nodes", "2", "--dry-run", *(("--host", path_of(machine)) if machine else ()))
    assert done.exit_code == code and wanted in done.output, done.output


def test_the_record_of_a_later_job_in_the_same_folder_is_not_read(tmp_path, monkeypatch):
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    monkeypatch.setenv("PATH", commands(tmp_path, scontrol=forgotten)["PATH"])
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    for name in ("slurm-7.log", "slurm-9.log", "slurm-9.0.log"):
        (tmp_path / "run" / name).write_text("x\n")
    monkeypatch.chdir(tmp_path / "run")
    assert find_job_files("9").run == tmp_path / "run"
    found = find_job_files("7")
    assert found.run is None and "are of job 9, which ran there later" in found.where


TOLD = (
    "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***\nsrun: error: n1: task 0: Terminated\n"
)


@each_row(("says", "record", "more", "code", "wanted", "absent"), rows("requeued"))
def test_a_job_that_saved_and_was_queued_again_has_not_failed(
    says, record, more, code, wanted, absent, tmp_path, monkeypatch
):
    """Slurm writes "CANCELLED" of each job that it signals; run.json and the controller say what became of it."""
    log = tmp_path / "slurm-7.log"
    log.write_text(f"{TOLD}{more}\n" if "COMPLETED" not in says else "")
    (tmp_path / "ranks").mkdir()
    if record is not None:
        (tmp_path / "run.json").write_text(json.dumps(record))
    words = [log, "--run", tmp_path]
    if says:
        answer = f"echo 'JobId=7\n   JobState={says} Reboot=0\n   StdOut={log}'"
        monkeypatch.setenv("PATH", commands(tmp_path, scontrol=answer)["PATH"])
        words = ["--job", "7"]
    done = topoflight("why", *words, "-o", "json")
    found = json.loads(done.stdout)
    causes = [text for cause in found["causes"] for text in (cause["code"], *cause["evidence"], cause["action"])]
    text = "; ".join([found["line"], *causes])
    assert done.exit_code == code and all(part in text for part in wanted.split("; ")) and absent not in text, text


@pytest.mark.parametrize("ends", [TOLD, TOLD.replace(" ***", " DUE TO TIME LIMIT ***")])
@pytest.mark.parametrize("early", [0.0, 100.0])
def test_the_end_of_a_job_is_the_cause_where_its_ranks_ran_until_then(ends: str, early: float, tmp_path: Path) -> None:
    """A rank that was gone 100 s before the other is no effect of the end of the job."""
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        state = RankState(rank=rank, host=f"n{rank + 1}", pid=7, calls=50, phase="collective" if early else "compute",
                          written=time.time() - 500 - early * rank)  # fmt: skip
        path = tmp_path / "ranks" / NAME.format(rank=rank)
        path.write_text(json.dumps(plain.write(state)))
        os.utime(path, (state.written, state.written))
    log = tmp_path / "slurm-7.log"
    log.write_text(ends)
    done = topoflight("why", log, "--run", tmp_path, "-o", "json")
    found = json.loads(done.stdout)
    if early:
        assert found["causes"][0]["code"] == "ranks.gone", found
    else:
        code = "time_limit_reached" if "LIMIT" in ends else "job_cancelled"
        assert (found["nodes"], [cause["code"] for cause in found["causes"]]) == ([], [code]), found
    assert done.exit_code == 3


@each_row(("code", "reason", "line"), rows("gated"))
def test_a_job_that_the_gate_stopped_says_so(code: int, reason: str, line: str, tmp_path: Path) -> None:
    """The batch script's own words, in the log or in the run's folder: the gate's finding is no line of NCCL."""
    gate = (ROOT / "planner/stacks/templates/gate.sbatch.j2").read_text()
    told = subprocess.run(["bash", "-c", f"gate={code}\n{gate}"], capture_output=True, text=True, check=False)
    assert told.returncode == code and f"{reason} (exit code {code})" in told.stdout
    log = tmp_path / "slurm-7.log"
    log.write_text(f"{line}\nsrun: error: node01: task 0: Exited with exit code {code}\n{told.stdout}")
    for words in ([log], ["--run", tmp_path]):
        done = topoflight("why", *words, "-o", "json")
        found = json.loads(done.stdout)
        assert (done.exit_code, [cause["code"] for cause in found["causes"]]) == (3, ["job.gate"]), done.stdout
        assert f"before any rank started: {reason} (exit code {code})" in found["line"], found["line"]
        assert found["causes"][0]["evidence"][0] == line and found["nodes"] == ["node01"], found


def test_of_the_log_in_the_folder_of_a_run_only_the_end_is_read(tmp_path: Path) -> None:
    """The log may have gigabytes. Read as a whole, this one is a damaged archive."""
    (tmp_path / "slurm-7.log").write_bytes(b"BZh9" + bytes(1 << 17))
    done = topoflight("why", "--run", tmp_path)
    assert done.exit_code == 5 and "damaged" not in done.output, done.output


def test_the_nodes_of_a_verdict_are_named_as_slurm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank and a recording have the name that slurmd gives them; other host names are without their domain."""
    (tmp_path / "ranks").mkdir()
    waits = topoflight("why", "--run", tmp_path)
    assert waits.exit_code == 5 and "no rank has written into" in waits.output and "init_process_group" in waits.output
    monkeypatch.setenv("SLURMD_NODENAME", "gpu03")
    assert _get_identity()["host"] == read_host_name() == "gpu03"
    checks = (Finding(code="gpu.x", status="unknown"),)  # SIGTERM came before the scan
    unscanned = Report(checks=checks, verdict=judge(checks, stopped="SIGTERM"))
    assert format_slurm_reasons(unscanned) == "gpu03: stopped by SIGTERM before it was done\n"
    recorded = replace(unscanned, snapshots=(snapshot("gb200-nvl72-tray"),))
    assert format_slurm_reasons(recorded) == "nvl72-r1-t07: stopped by SIGTERM before it was done\n"
    assert format_slurm_reasons(replace(recorded, snapshots=recorded.snapshots * 2)) == "", "the node is unknown"
    lost = "Connection closed by peer"
    for rank, error in enumerate(("CUDA error: uncorrectable ECC error encountered", lost, lost)):
        host = f"ip-10-0-0-{rank}.example.com"
        state = {"rank": rank, "host": host, "written": 1e9, "ended": True, "error": error}
        (tmp_path / "ranks" / f"state_rank_{rank}.json").write_text(json.dumps(state))
    found = topoflight("why", "--run", tmp_path, "-o", "slurm")
    assert (found.exit_code, found.stdout) == (3, "ip-10-0-0-0\n")


def test_the_bad_nodes_of_a_search_are_named_as_slurm_does() -> None:
    hosts = [f"gpu-{number:02d}.example.com" for number in range(4)]
    assert format_slurm_hosts(search_result(hosts, bad=(1, 2))) == "gpu-[01-02]\n"
    assert format_slurm_hosts(search_result(hosts)) == ""
    assert format_slurm_hosts(search_result([*hosts, "node 4"], bad=(1, 4))) == "gpu-01\n", "it never joined"


UNREACHED = [  # nodes that join, whether node 2 leaves a note, state of each node, words of the verdict on node 2
    ((), False, ["not judged"] * 3, "it did not join at nowhere.invalid:29400 within 1 s"),
    ((1,), False, ["not judged", "bad", "bad"], "it did not join at nowhere.invalid:29400 within 1 s"),
    ((1,), True, ["not judged", "bad", "not judged"], "cannot resolve nowhere.invalid, the name of node 0"),
]


@each_row(("joins", "is_noted", "states", "words"), UNREACHED)
def test_nodes_that_cannot_reach_the_rendezvous_are_not_accused(joins, is_noted, states, words, tmp_path):
    """Nor does node 0 ever accuse itself. A node that is absent although another one joined is lost, unless its note
    next to the journal says that it cannot resolve the name of node 0."""
    from torch.distributed import HashStore

    store = HashStore()
    for node in joins:
        described = {"host": f"node0{node + 1}", "domain": "", "model": "", "nvlink": "", "ranks": 1}
        store.set(f"join/{node}/0", json.dumps(described))
    settings = RankSettings(store="nowhere.invalid:29400", nodes=3, node=2, local=0, ranks=1, host="node03", domain="",
                  model="", nvlink="", backend="gloo", bytes=1 << 20, wait_seconds=1.0, silence_seconds=0.5,
                  journal=str(tmp_path / "journal"))  # fmt: skip
    note_path(settings.journal, 2).write_text("of an earlier search")

    def fail_to_connect() -> None:
        with pytest.raises(OSError, match="Name or service"):
            connect(replace(settings, wait_seconds=0.0))

    if is_noted:
        threading.Timer(0.5, fail_to_connect).start()
    coordinate(settings, store)
    result = structure(read_journal(tmp_path / "journal")[-1]["result"], SearchResult)
    assert [verdict.state for verdict in result.verdicts] == states and words in result.verdicts[2].seen, result
    finding = make_findings(result)[2]
    assert (finding.code == "search.node.unjudged") == (states[2] != "bad") and words in finding.message, finding
    assert finding.required == (states[2] != "bad"), "a node without a verdict is listed by its name"
    assert is_noted or "--rendezvous HOST:PORT" in finding.message


def test_a_name_that_does_not_resolve_is_replaced_by_slurm_address(tmp_path, monkeypatch):
    """scontrol of Slurm 22.05 prints these words in one line among others."""
    answer = 'echo "NodeName=$3 Arch=x86_64"; echo "   NodeAddr=10.0.0.11 NodeHostName=$3"'
    assert make_resolvable("nowhere.invalid:29407") == "nowhere.invalid:29407"
    monkeypatch.setenv("PATH", commands(tmp_path, scontrol=answer)["PATH"])
    assert make_resolvable("nowhere.invalid:29407") == "10.0.0.11:29407"
    assert make_resolvable("localhost:29407") == "localhost:29407"


def rack(first: int, last: int, *leaves: str, clique: str = "") -> list[Placement]:
    """Nodes that are wired alike."""
    numbers = range(first, last + 1)
    return [Placement(node=f"n{n:02d}", leaves=frozenset(leaves), clique=clique) for n in numbers]


RAILS = [*rack(1, 3, "leaf1", "leaf2"), *rack(4, 4, "leaf2"), *rack(5, 6, "leaf3", "leaf4"), *rack(7, 7)]
NVL = [*rack(1, 2, clique="a/1"), *rack(3, 4, clique="b/1")]
TREE = ["SwitchName=leaf1 Nodes=n[01-04]", "SwitchName=leaf3 Nodes=n[05-06]", "SwitchName=top Switches=leaf[1,3]"]


def test_topology_conf_is_written() -> None:
    """Rails are one line; a node without LLDP is named."""
    tree, blocks = format_topology_conf(RAILS), format_topology_conf(NVL, has_blocks=True)
    assert [line for line in tree.splitlines() if not line.startswith("#")] == TREE
    assert "Unknown place, add them yourself: n07" in tree
    assert [line.partition(" #")[0] for line in blocks.splitlines() if not line.startswith("#")] == [
        "BlockName=block1 Nodes=n[01-02]", "BlockName=block2 Nodes=n[03-04]", "BlockSizes=2",
    ]  # fmt: skip


def test_a_node_is_placed_by_the_switches_of_its_rdma_ports() -> None:
    """Not by that of its management port; the command writes the same."""
    recorded = snapshot()
    facts, rdma = recorded.facts(InterfacesFacts), recorded.facts(RdmaFacts)
    ports = {port.netdev for device in rdma.devices for port in device.ports}
    links = tuple(replace(link, neighbour="leaf7 Ethernet1/5" if link.name in ports else "mgmt 3")
                  for link in facts.interfaces)  # fmt: skip
    placed = find_placement(recorded.with_facts(InterfacesFacts, lambda facts: replace(facts, interfaces=links)))
    assert placed.leaves == ({"leaf7"} if ports & {link.name for link in links} else {"mgmt"})
    done = topoflight("topo", "--host", path_of(), "-o", "slurm")
    assert done.exit_code == 0 and placed.node in done.stdout


@each_row(("script", "check", "sinfo", "logged"), rows("hung"))
def test_a_script_of_slurmd_ends_whatever_hangs(script, check, sinfo, logged, tmp_path):
    """The check, the controller, or a process in a driver that no signal ends and that keeps the output open."""
    shutil.copytree(ROOT / "deploy" / "slurm", tmp_path, dirs_exist_ok=True)
    hangs = f"setsid sleep 600 & echo $! > {tmp_path}/pid\n{check}"
    environment = commands(tmp_path, topoflight=hangs, sinfo=sinfo)
    with (tmp_path / "settings").open("a") as settings:
        settings.write(f'topoflight={tmp_path}/topoflight\nseconds=4\nlog() {{ echo "$1: $2" >> {tmp_path}/log; }}\n')
    done = subprocess.run([tmp_path / script], env=environment, capture_output=True, timeout=300, check=False)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # raises where the script has waited for its end
    assert (done.returncode, done.stderr) == ("is not started" in logged, b"")
    assert logged in (tmp_path / "log").read_text()


@each_row(("text", "logged"), rows("broken"))
def test_broken_settings_are_logged_and_drain_no_node(text: str | None, logged: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy" / "slurm", tmp_path, dirs_exist_ok=True)
    (tmp_path / "settings").unlink()
    if text is not None:
        (tmp_path / "settings").write_text(text)
    environment = commands(tmp_path, logger=f'echo "$@" >> {tmp_path}/log', sinfo="echo 'idle|none'")
    environment["SLURM_JOB_UID"] = str(os.getuid())
    for script in ("prolog", "health-check", "epilog"):
        command = [tmp_path / f"{script}.sh"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
        if script == "epilog" and "not checked (" in logged:  # it makes no check
            assert done.returncode == 0
            continue
        lines = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
        wanted = logged.format(folder=tmp_path)
        assert done.returncode == 0 and any(f"topoflight-{script} " in line and wanted in line for line in lines), lines


def test_the_log_names_the_driver_call_that_hangs(tmp_path: Path) -> None:
    """The node is not drained, because nothing is known of it."""
    root, machine = resident.restore(tmp_path)
    shutil.copytree(ROOT / "deploy" / "slurm", tmp_path / "scripts")
    with (tmp_path / "scripts" / "settings").open("a") as settings:
        settings.write(f"topoflight={Path(sys.executable).parent}/topoflight\noptions=(--timeout 3 --root {root})\n")
        settings.write(f'seconds=120\nlog() {{ echo "$1: $2" >> {tmp_path}/log; }}\n')
    hangs = {"FAKE_NVML_INJECT": "nvmlDeviceGetName@gpu1=hang", "SLURMD_NODENAME": "node02"}
    environment = os.environ | machine | hangs
    subprocess.run([tmp_path / "scripts" / "health-check.sh"], env=environment, timeout=300, check=True)
    log = (tmp_path / "log").read_text()
    assert "node not checked (exit code 5): node02: " in log and "in nvmlDeviceGetName of GPU1" in log, log


@each_row(("usable", "count", "granted", "code", "wanted"), rows("limited"))
def test_a_gpu_that_the_cgroup_of_a_job_refuses_is_limited_and_not_lost(usable, count, granted, code, wanted, tmp_path):
    """The PCI bus shows eight; open(2) of the other jobs' device nodes ends with EPERM, and NVML leaves them out."""
    recording = json.loads(path_of().read_text())
    answers = recording["answers"]
    information = sorted(path for path in answers["read_text"] if path.startswith("/proc/driver/nvidia/gpus/"))
    for number, path in enumerate(information):
        answers["exists"][f"/dev/nvidia{number}"] = True
        answers["usable"][f"/dev/nvidia{number}"] = number < (usable or 0)
        if usable is not None:
            answers["read_text"][path] = f"Model: \t\t NVIDIA H100\nDevice Minor: \t {number}\n"
    answers["nvml"]["nvmlDeviceGetCount"][""] = count
    answers["environment"][""] = {"SLURM_JOB_GPUS": granted, "CUDA_VISIBLE_DEVICES": granted}
    (tmp_path / "node.json").write_text(json.dumps(recording))
    done = topoflight("preflight", "--host", tmp_path / "node.json", "-o", "json")
    found = {check["code"]: check["status"] for check in json.loads(done.stdout)["checks"]
             if check["code"].startswith("gpu.device.") and check["status"] not in ("pass", "unknown")}  # fmt: skip
    assert (done.exit_code, found) == (code, wanted), done.stdout[:2000]
