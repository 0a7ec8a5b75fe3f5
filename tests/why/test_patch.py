"""What the verdict asks of a manifest, as a patch: patch(1) and git take it, and the cause is gone with it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from agent.advice.advise import Request
from agent.checks.lint import lint_text
from agent.cli.main import cli
from agent.why.diagnosis import diagnosis as gathered
from planner.lint.change import Change, ChangeError, changed, in_shell, parse_remedy
from planner.why import Verdict

HERE = Path(__file__).parent
A40 = HERE.parent / "machines" / "r760xa-2xA40-bf3.json"
GPUS = "              resources: {limits: {nvidia.com/gpu: 2}}\n"
CONFIG = """\
# of the cluster
apiVersion: v1
kind: ConfigMap
metadata: {name: nccl}
data:
  NCCL_IB_DISABLE: "1"   # since the outage
  note: "kept  as it is"
---
"""
JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: sft
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template:
        spec:
          containers:
            - name: pytorch
              # what was tried
              env:
                # off, for a test
                - name: NCCL_P2P_DISABLE
                  value: "1"
              envFrom:
                - configMapRef: {name: nccl}
              args: ["bash", "-c", "NCCL_SHM_DISABLE=1 torchrun train.py"]
    Worker:
      replicas: 1
      template:
        spec:
          containers:
            - name: pytorch
              env:
                - {name: NCCL_ALGO, value: Rign}
                - name: NCCL_DEBUG   # stays
                  value: INFO
              args:
                - bash
                - -c
                - |
                  export NCCL_IB_DISABLE=1
                  # export NCCL_IB_DISABLE=1
                  NCCL_P2P_DISABLE=1 torchrun \\
                    --nnodes 2 train.py
"""
MPI = """\
apiVersion: batch/v1
kind: Job
metadata: {name: mpi}
spec:
  template:
    spec:
      containers:
        - name: mpi
          args:
            - mpirun
            - -x
            - NCCL_IB_DISABLE=1
            - -x
            - NCCL_DEBUG=INFO   # stays
            - python
          env:
            - name: NCCL_BUFFSIZE
              value: 4194304
"""
SCRIPT = """\
#!/bin/bash
# export NCCL_IB_DISABLE=1
export NCCL_IB_DISABLE=1 NCCL_DEBUG=INFO
export NCCL_P2P_DISABLE="1"; echo begins
mpirun -x NCCL_SHM_DISABLE=1 \\
  -x NCCL_ALGO=Rign \\
  python train.py
"""


def verdict(path: Path) -> Verdict:
    return gathered.answer(gathered.Asked(manifest=path))


def wrong(text: str, name: str) -> list[str]:
    checks = lint_text(text, "auto", nccl_version=None, snapshot=None, name=name).checks
    return [f"{check.node} {check.subject}" for check in checks if check.status in ("fail", "warn")]


def apply(folder: Path, name: str, diff: str, tool: str) -> bytes:
    words = ["patch", "-p0"] if tool == "patch" else ["git", "apply", "-p0", "-"]
    subprocess.run(words, cwd=folder, input=diff.encode(), check=True, capture_output=True)
    return (folder / name).read_bytes()


def as_json(text: str) -> str:
    return json.dumps(yaml.safe_load(text), indent=2) + "\n"


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("two.yaml", CONFIG + JOB),
        ("crlf.yaml", (CONFIG + JOB).replace("\n", "\r\n")),
        ("mpi.yaml", MPI),
        ("no-newline.yaml", MPI.removesuffix("\n")),
        ("job.json", as_json(JOB)),
        ("mpi.json", as_json(MPI.replace("4194304", '"4194304"'))),
        ("run.sh", SCRIPT),
        ("job.env", "NCCL_DEBUG=INFO\nNCCL_IB_DISABLE=1\n# NCCL_IB_DISABLE=1\n"),
    ],
)
def test_the_printed_patch_is_applied_and_the_cause_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, tool: str
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    Path(name).write_bytes(text.encode())
    assert wrong(text, name)
    told = CliRunner().invoke(cli, ["why", "--manifest", name])
    assert told.exit_code == 4, told.output
    printed = told.stdout_bytes.decode()
    made = apply(tmp_path, name, printed[printed.index(f"--- {name}\n") :], tool)
    assert wrong(made.decode(), name) == []
    again = verdict(Path(name))
    assert (again.state, again.causes, again.patch) == ("fine", (), None)
    lines = text.encode().splitlines(keepends=True)
    kept = [line for line in made.splitlines(keepends=True) if line in lines]
    rest = iter(lines)
    assert all(line in rest for line in kept)  # in their order, byte for byte
    assert len(kept) >= len(lines) - 14
    comments = [line for line in lines if b"#" in line and b"since" not in line and not name.endswith("json")]
    assert set(comments) <= set(kept)


def test_other_words_of_the_same_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    found = verdict(path).patch
    assert found is not None
    diff = found.diff.replace(str(path), "run.sh")
    made = apply(tmp_path, "run.sh", diff, "patch").decode()
    assert made == (
        "#!/bin/bash\n# export NCCL_IB_DISABLE=1\nexport NCCL_DEBUG=INFO\necho begins\nmpirun \\\n  python train.py\n"
    )
    assert subprocess.run(["bash", "-n"], input=made.encode(), check=False).returncode == 0


def test_a_configmap_of_elsewhere_is_named_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    found = verdict(path)
    assert any("ConfigMap nccl" in one.what and "kubectl get configmap nccl" in one.command for one in found.unknown)
    assert found.patch is not None
    assert not any("NCCL_IB_DISABLE" in line and "Master" in line for line in found.patch.settings)


def test_a_choice_is_left_to_a_person(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MPI.replace("NCCL_IB_DISABLE=1", "NCCL_IB_HAC=mlx5_0"))
    found = verdict(path).patch
    assert found is not None
    assert any("NCCL_IB_HAC: Did you mean NCCL_IB_HCA" in line for line in found.left)
    assert "HAC" not in "".join(row for row in found.diff.splitlines() if row[:1] in "+-")


def test_nothing_is_asked_of_a_manifest_that_is_no_cause(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MPI.replace("NCCL_IB_DISABLE=1", "NCCL_DEBUG=WARN").replace("4194304", '"4194304"'))
    log = tmp_path / "job.log"
    log.write_text("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    found = gathered.answer(gathered.Asked(manifest=path, logs=(str(log),)))
    assert found.state == "failed"
    assert found.patch is None


def test_a_template_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MPI.replace("name: mpi}", "name: {{ .Release.Name }} }").replace("4194304", '"4194304"'))
    found = verdict(path).patch
    assert found is not None
    assert (found.diff, len(found.left)) == ("", 1)


SOCKETS = """pod-0:1:2 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
pod-0:1:2 [0] NCCL INFO comm 0x5 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0
pod-0:1:2 [0] NCCL INFO Using network Socket
pod-0:1:2 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [receive] via NET/Socket/0
"""


def test_what_the_logs_cause_asks_for_is_set_in_the_container(tmp_path: Path) -> None:
    path, log = tmp_path / "job.yaml", tmp_path / "job.log"
    text = JOB.replace("NCCL_ALGO, value: Rign", "NCCL_IB_HCA, value: mlx5_9")
    path.write_text(text.replace("              args:", f"{GPUS}              args:"))
    log.write_text(SOCKETS)
    request = Request.of(hosts=(A40,), nodes=2, network="8.4G", model="Llama-3.1-8B")
    found = gathered.answer(gathered.Asked(manifest=path, logs=(str(log),), request=request))
    advised = dict(line.split("=", 1) for line in found.change if line.startswith("NCCL_"))
    assert advised
    assert found.patch is not None
    made = apply(tmp_path, "job.yaml", found.patch.diff.replace(str(path), "job.yaml"), "patch").decode()
    replicas = yaml.safe_load(made)["spec"]["pytorchReplicaSpecs"]
    worker = replicas["Worker"]["template"]["spec"]["containers"][0]["env"]
    has = {each["name"]: each["value"] for each in worker}
    assert {name: has.get(name) for name in advised} == advised


def test_the_forecast_of_the_manifests_own_job_after_the_change(tmp_path: Path) -> None:
    arguments = "[torchrun, sft.py, --model_name_or_path, meta-llama/Llama-3.1-8B, --use_peft, 'true']"
    text = JOB.replace('["bash", "-c", "NCCL_SHM_DISABLE=1 torchrun train.py"]', arguments)
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("              args:", f"{GPUS}              args:"))
    told = gathered.answer(gathered.Asked(manifest=path, request=Request.of(machine="2xa40-roce")))
    assert told.forecast.startswith("patched, PyTorchJob/sft is due"), told.unknown
    unknown = verdict(path)
    assert unknown.forecast == ""
    assert any(one.what == "the forecast after the change" for one in unknown.unknown)


@pytest.mark.parametrize(
    ("machine", "words"),
    [("2xa40-roce", "with RDMA over net1 of the manifest's networks: "), ("p5.48xlarge", "patched, in ")],
)
def test_a_manifest_alone_has_a_price_and_a_forecast_after_the_change(tmp_path: Path, machine: str, words: str) -> None:
    """Its settings keep NCCL off RDMA, but for a machine whose network has a plugin; its selector names the machine."""
    text = f"""kind: Pod
apiVersion: v1
metadata: {{name: a, annotations: {{k8s.v1.cni.cncf.io/networks: rdma-net}}}}
spec:
  nodeSelector: {{node.kubernetes.io/instance-type: {machine}}}
  containers:
  - name: pytorch
    image: x
    command: [torchrun, train.py]
    env:
    - {{name: NCCL_IB_DISABLE, value: "1"}}
    - {{name: NCCL_SOCKET_IFNAME, value: eth0}}
    resources: {{limits: {{nvidia.com/gpu: 2}}}}
"""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    request = Request.of(model="Llama-3.1-8B", nodes=2, network="8.4G", steps=100, price="10")
    told = gathered.answer(gathered.Asked(manifest=path, request=request))
    assert told.forecast.startswith(words), told.unknown
    price = told.causes[0].price
    assert ("TCP over eth0 (8.4G) instead of RDMA over net1" in price) is (machine == "2xa40-roce"), price
    assert ("of your prices" in price) is (machine == "2xa40-roce")
    script = tmp_path / "job.sh"
    script.write_text("export NCCL_IB_DISABLE=1\ntorchrun train.py\n")
    alone = gathered.answer(gathered.Asked(manifest=script, request=replace(request, machine=machine)))
    assert alone.forecast.startswith(words.partition(" over")[0]), alone


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("export A=1; export NCCL_X=1; run\n", "export A=1; run\n"),
        ("export A=1; export NCCL_X=1\n", "export A=1\n"),
        ("export NCCL_X=1 && run", "run"),
        ("export NCCL_X='1' # why\nrun\n", "run\n"),
        ("export A=1 NCCL_X=1\n", "export A=1\n"),
        ("env NCCL_X=1 A=2 run", "env A=2 run"),
        ("docker run --env=NCCL_X=1 -e A=2 image", "docker run -e A=2 image"),
        ("run \\\n  -x NCCL_X=1\nnext\n", "run \\\n \nnext\n"),
        ("MY_NCCL_X=1 NCCL_X=1 run", "MY_NCCL_X=1 run"),
        ("NCCL_X=1\r\nrun\r\n", "run\r\n"),
    ],
)
def test_a_setting_goes_out_of_shell_words(text: str, made: str) -> None:
    found = in_shell(text, Change(name="NCCL_X", was="1", to=None))
    assert [row.rstrip(" ") for row in found.split("\n")] == [row.rstrip(" ") for row in made.split("\n")]


def test_another_value_is_not_touched() -> None:
    with pytest.raises(ChangeError):
        in_shell("NCCL_X=2 run", Change(name="NCCL_X", was="1", to=None))
    with pytest.raises(ChangeError):
        changed(MPI, "job.yaml", Change(name="NCCL_IB_DISABLE", was="1", to=None), "Job/other")


def test_what_a_remedy_asks_for() -> None:
    assert parse_remedy("NCCL_X", "1", "Unset NCCL_X.") == Change(name="NCCL_X", was="1", to=None)
    assert parse_remedy("NCCL_X", "y", "Write NCCL_X=1, or unset it.") == Change(name="NCCL_X", was="y", to="1")
    assert parse_remedy("NCCL_X", "1", 'Write "1" in quotes.') == Change(name="NCCL_X", was="1", to="1")
    assert parse_remedy("NCCL_X", "1", "Unset NCCL_X or NCCL_Y.") is None
    assert parse_remedy("NCCL_X", "1", "Did you mean NCCL_Y? Correct the name, or unset it.") is None


def test_many_changes_of_a_long_file_come_in_turns(tmp_path: Path) -> None:
    script = "".join(f"if [ $A = {n} ]; then\n  export NCCL_ALGO=Rign{n}\nfi\n" for n in range(20))
    path = tmp_path / "run.sh"
    path.write_text(script)
    found = verdict(path).patch
    assert found is not None
    assert len(found.settings) == 16
    assert found.left == ("4 findings more: give the patched file again",)
