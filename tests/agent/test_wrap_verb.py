"""A trainer that is not ours: its manifest wrapped and its pods run, and the same script launched on this host."""

import functools
import json
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from resident import free_port
from rigs.command import topoflight
from rigs.forking import forking_environment
from rigs.recorded import path_of
from rigs.tables import each_row, rows_of

from agent.jobs.script import add_monitor

H100 = str(path_of())
FILE = Path(__file__).with_name("wrapped_job.yaml")
CONFIG, _ = yaml.safe_load_all(FILE.read_text(encoding="utf-8"))
SFT, SETTINGS = CONFIG["data"]["sft.py"], yaml.safe_load(CONFIG["data"]["config.yaml"])


def manifest(folder: Path) -> str:
    """A PyTorchJob of two pods with its ConfigMap; paths in the folder."""
    return FILE.read_text(encoding="utf-8").replace("/FOLDER", str(folder))


IMAGE = ("--preflight-image", "registry.example/topoflight:1", "--resource", "rdma/hca=1")


def wrap(path: Path, text: str | None = None, *words: object) -> Result:
    """`topoflight wrap` over a file, which holds this text now."""
    if text is not None:
        path.write_text(text)
    return topoflight("wrap", path, "--host", H100, *words)


def wrapped(folder: Path, *words: object) -> tuple[Result, Path]:
    """The whole of it over the manifest of `manifest`."""
    path = folder / "job.yaml"
    return wrap(path, manifest(folder), *IMAGE, *words), path


def test_a_diff_is_shown_and_nothing_written_until_asked(tmp_path: Path) -> None:
    shown, path = wrapped(tmp_path)
    assert shown.exit_code == 0, shown.output
    assert path.read_text() == manifest(tmp_path)
    assert not [line for line in shown.stdout.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert "name: preflight" in shown.stdout
    assert "forecast FSDP" in shown.stderr and "+    topoflight.io/forecast-step: step " in shown.stdout
    written, _ = wrapped(tmp_path, "-o", tmp_path / "new.yaml")
    applied, _ = wrapped(tmp_path, "--apply")
    refused = topoflight("wrap", path, "--host", H100, "--monitor")
    assert refused.exit_code == 2 and "--monitor requires --preflight-image" in refused.output
    assert written.stdout.splitlines()[2:] == applied.stdout.splitlines()[2:] == shown.stdout.splitlines()[2:]
    assert (tmp_path / "new.yaml").read_text() == path.read_text() != manifest(tmp_path)
    again = wrap(path, None, *IMAGE)
    assert again.stdout == "" and "nothing to add" in again.stderr


def test_a_placeholder_for_the_number_of_nodes_may_be_several(tmp_path: Path) -> None:
    """The settings and needs of several nodes, which is said; of one node none of them."""
    pod = {"containers": [{"name": "t", "command": ["torchrun", "--nnodes=$NUM_NODES", "t.py"],
                           "resources": {"limits": {"nvidia.com/gpu": 8}}}]}  # fmt: skip
    for count, wanted in (("$NUM_NODES", True), (1, False), (2, True)):
        for kind, spec in (
            ("Job", {"parallelism": count, "template": {"spec": pod}}),
            ("JobSet", {"replicatedJobs": [{"name": "w", "template": {"spec": {"template": {"spec": pod}}},
                                            "replicas": count}]}),
            ("PyTorchJob", {"pytorchReplicaSpecs": {"Worker": {"replicas": count, "template": {"spec": pod}}}}),
        ):  # fmt: skip
            (tmp_path / "job.yaml").write_text(yaml.safe_dump({"kind": kind, "metadata": {"name": "a"}, "spec": spec}))
            said = topoflight("wrap", tmp_path / "job.yaml", "--machine", "p5.48xlarge")
            assert said.exit_code == 0, said.output
            assert ["AWS Libfabric" in said.stdout, "IPC_LOCK" in said.stdout] == [wanted] * 2, (count, kind)
            assert ("settings are those of several nodes" in said.stderr) is (count == "$NUM_NODES"), (count, kind)


@pytest.mark.parametrize(("gpus", "ranks", "devices"), [(1, 4, "1"), (8, 4, "4"), (8, 16, "4"), (16, 8, "4")])
def test_a_pod_gets_the_efa_devices_of_its_gpus(tmp_path: Path, gpus: int, ranks: int, devices: str) -> None:
    """The option of torchrun decides the ranks. A p4d has four devices for eight GPUs. Too many ranks give a note."""
    container = {"name": "pytorch", "command": ["torchrun", f"--nproc-per-node={ranks}", "t.py"],
                 "resources": {"limits": {"nvidia.com/gpu": gpus}}}  # fmt: skip
    larger = container | {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    replicas = {"Worker": {"replicas": 2, "template": {"spec": {"containers": [container]}}}}
    job = {"kind": "PyTorchJob", "metadata": {"name": "a"},
           "spec": {"nprocPerNode": "4", "pytorchReplicaSpecs": replicas}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    said = topoflight("wrap", tmp_path / "job.yaml", "--machine", "p4d.24xlarge")
    assert f"vpc.amazonaws.com/efa: '{devices}'" in said.stdout, said.output
    replicas["Master"] = {"template": {"spec": {"containers": [larger]}}}  # only the Workers have too few
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(job))
    said = topoflight("wrap", tmp_path / "both.yaml", "--machine", "p4d.24xlarge")
    assert (f"starts {ranks} ranks in a pod of {gpus} GPUs" in said.stderr) == (ranks > gpus), said.output


def test_a_forecast_that_cannot_be_made_is_unknown_and_the_rest_is_added(tmp_path: Path) -> None:
    said = wrap(tmp_path / "job.yaml", manifest(tmp_path).replace("config.yaml\n", "gone.yaml\n"))
    assert said.exit_code == 0 and "forecast: unknown: " in said.stderr and "gone.yaml" in said.stderr
    assert "NCCL_DEBUG_FILE" in said.stdout and "topoflight.io/forecast" not in said.stdout


def ended(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for processes, which all succeed; none is left when one does not end."""
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs


def run_pods(folder: Path, wrapped_job: Path, binaries: Path) -> None:
    """Both pods' own command with the environment of the wrapped manifest, and with what the operator sets."""
    config, job = yaml.safe_load_all(wrapped_job.read_text())
    (folder / "config").mkdir()
    for name, text in config["data"].items():
        (folder / "config" / name).write_text(text)
    port, pods = free_port(), []
    for rank, role in enumerate(("Master", "Worker")):
        (container,) = job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        operator = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1",
                    "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                    "PATH": f"{binaries}:{os.environ['PATH']}"}  # fmt: skip
        pods.append(subprocess.Popen(container["command"], env={**os.environ, **environment, **operator},
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))  # fmt: skip
    ended(pods)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_wrapped_pods_run_as_before(tmp_path: Path) -> None:
    """Over gloo, the command unchanged; NCCL's log would go where the claim is."""
    done, path = wrapped(tmp_path, "--apply")
    assert done.exit_code == 0, done.output
    run_pods(tmp_path, path, Path(forking_environment()).parent)
    seen = json.loads((tmp_path / "shared" / "out" / "seen.json").read_text())
    assert seen["world"] == 2
    assert seen["env"]["NCCL_DEBUG_FILE"] == f"{tmp_path}/shared/nccl-sft.%h.%p.log"


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_script_is_launched_and_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments unchanged; its ranks measure their steps and memory."""
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path / "state"))
    (tmp_path / "sft.py").write_text(SFT)
    own = {"output_dir": str(tmp_path / "out"), "model_name_or_path": "tiny-llama"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, **own}))
    words = ("launch", "--no-preflight", "--script", tmp_path / "sft.py", "--output", tmp_path / "run", "--")
    done = topoflight(*words, "--config", tmp_path / "config.yaml", "--max_steps", "4")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["steps_done"], record["exit_code"]) == ("complete", 4, 0)
    measured = record["measured"]
    assert measured["step_seconds"] > 0 and measured["memory_bytes"] > 1 << 20 and record["nccl"] is None
    assert len(record["step_seconds"]) == 3 and "between the ends of the optimizer's steps" in str(record["notes"])
    assert json.loads((tmp_path / "out" / "seen.json").read_text())["world"] == 2
    (stored,) = (tmp_path / "state" / "runs").glob("*.json")
    assert json.loads(stored.read_text())["steps_done"] == 4
    (tmp_path / "sft.py").write_text("import sys\nsys.exit('no data')")
    failed = topoflight(*words)
    assert failed.exit_code == 3 and "exit code 1" in failed.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed" and record["steps_done"] is None
    assert record["reason"].endswith(": SystemExit: no data"), record["reason"]
    (tmp_path / "sft.py").write_text("import atexit, os\natexit.register(os.abort)\nprint(__name__, __file__)")
    aborted = topoflight(*words)  # after its work
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert aborted.exit_code == 3 and "SIGABRT" in record["reason"], record
    assert record["reason"] in aborted.stderr
    assert f"__main__ {tmp_path}/sft.py" in (tmp_path / "run" / "job.log").read_text()
    (tmp_path / "sft.py").write_text("raise ValueError('no such layer')")
    assert "ValueError: no such layer" in topoflight(*words).stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "rank " in record["reason"] and record["reason"].endswith(": ValueError: no such layer"), record["reason"]
    (tmp_path / "sft.py").write_text(
        "raise ValueError('Caught in worker 0.\\n' + 'at line\\n' * 200 + 'corrupt row 7')"
    )
    topoflight(*words)
    reason = json.loads((tmp_path / "run" / "run.json").read_text())["reason"]
    assert "Caught in worker 0." in reason and reason.endswith("corrupt row 7"), "the cause is the end of a long error"
    (tmp_path / "sft.py").write_text("import os, time\nos._exit(7) if os.environ['RANK'] == '1' else time.sleep(60)")
    assert "rank 1 ended with exit code 7 and reported no error" in topoflight(*words).stderr


STARVE = """
def starve():  # one CPU for all threads of this rank, of which gloo's come last
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
        if "gloo" in pathlib.Path(f"/proc/self/task/{thread}/comm").read_text():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
starve()
"""


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_script_ends_well_where_gloos_threads_get_no_cpu(tmp_path: Path) -> None:
    """Plain python aborts then: such a thread comes to release its tensors while the interpreter is finalized."""
    (tmp_path / "sft.py").write_text(SFT.replace("history, began", f"{STARVE}history, began", 1))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "output_dir": str(tmp_path / "out")}))
    ranks, port = [], free_port()
    for rank in ("0", "1"):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                     "OMP_NUM_THREADS": "1", "TOPOFLIGHT_SCRIPT": f"{tmp_path}/sft.py"}  # fmt: skip
        words = [sys.executable, f"{tmp_path}/sft.py", "--config", f"{tmp_path}/config.yaml"]
        environment = add_monitor({**os.environ, **variables}, tmp_path)
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True))  # fmt: skip
    ended(ranks)
    assert (tmp_path / "left.0").exists() and (tmp_path / "left.1").exists()


def test_a_script_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    shown = topoflight("launch", "--script", script, "--dry-run", "--ranks", "2", "--", "--lr", "a b")
    assert shown.exit_code == 0 and "--nproc-per-node=2" in shown.stdout and f"{script} --lr 'a b'" in shown.stdout
    assert "forecast: unknown: the arguments of the command name no model" in shown.stderr
    python = tmp_path / "venv" / "bin" / "python"  # an environment first on PATH, without torchrun: it is taken
    python.parent.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    for code, exit_code, told in (
        (0, 0, f"the ranks run {python}"),
        (1, 2, f"{python}, the first Python on PATH, has no"),
    ):
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
            shown = topoflight("launch", "--script", script, "--dry-run", "--ranks", "2")
        assert shown.exit_code == exit_code and told in shown.stderr, shown.stderr


@each_row(("place", "value"), rows_of(__file__)("odd_members"))
def test_a_manifest_of_another_shape_is_refused_in_words(tmp_path, place, value):
    """A member of another kind than its API knows, anywhere in the job: an answer or a refusal, never a traceback."""
    config, job = yaml.safe_load_all(manifest(tmp_path))
    place = place.replace("POD", "spec.pytorchReplicaSpecs.Master.template.spec")
    *above, last = (int(key) if key.isdigit() else key for key in place.split("."))
    functools.reduce(operator.getitem, above, job)[last] = value
    done = wrap(tmp_path / "odd.yaml", yaml.safe_dump_all([config, job], sort_keys=False), *IMAGE)
    assert done.exit_code in (0, 1, 2), done.output
