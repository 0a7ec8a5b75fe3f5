"""The support bundle: one bounded file without secrets, that replays; kubelet's account against NVML and the bus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent import bundle
from agent.cli.main import cli
from probes.host.recording import RecordingError, load, load_all
from probes.scan import scan

MACHINES = Path(__file__).parent.parent / "machines"
SOUND, SICK = MACHINES / "hgx-h100-8xH100-8hca.json", MACHINES / "sick-h100-dead-hca.json"
# Built from parts, so that no scanner of this repository takes them for real ones.
SECRETS = {
    "pair": "hunter2hunter2", "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "aws": "AKIA" + "Z" * 16,
    "hub": "hf_" + "q" * 34, "url": "bob:s3cretpass", "bearer": "0pAqUeBearer99",
    "key": "MIIEvQIBADANBgkqhkiG9w0BAQ", "forge": "ghp_" + "w" * 36,
}  # fmt: skip
SEEDED = "\n".join((
    f"API_TOKEN={SECRETS['pair']}", f"aws {SECRETS['aws']}", f"hub: {SECRETS['hub']}", f"jwt {SECRETS['jwt']}",
    f"proxy https://{SECRETS['url']}@proxy:3128/", f"Authorization: Bearer {SECRETS['bearer']}", SECRETS["forge"],
    f"-----BEGIN PRIVATE KEY-----\n{SECRETS['key']}\n-----END PRIVATE KEY-----", "kept: a harmless line",
))  # fmt: skip


def host(root: Path, state: Path, machine: Path = SOUND) -> bundle.Files:
    return bundle.of_host(load(machine).content, root=str(root), state=state)


def checkpoint(root: Path, registered: list[str], held: list[str]) -> None:
    path = root / bundle.CHECKPOINT
    path.parent.mkdir(parents=True)
    entry = {"PodUID": "p1", "ContainerName": "c", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"0": held},
             "AllocResp": SECRETS["key"]}  # fmt: skip
    data = {"PodDeviceEntries": [entry], "RegisteredDevices": {"nvidia.com/gpu": registered}}
    path.write_text(json.dumps({"Data": data, "Checksum": 1}))


def test_no_seeded_secret_is_in_the_file_and_what_is_harmless_is(tmp_path: Path) -> None:
    """In the recording, the kept state, limits and kubelet's checkpoint."""
    root, state = tmp_path / "root", tmp_path / "state"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/limits").write_text(SEEDED)
    (state / "flights").mkdir(parents=True)
    told = {"log": SEEDED, "nested": [{"api_key": SECRETS["pair"], "note": f"x {SECRETS['jwt']}"}]}
    (state / "history.json").write_text(json.dumps(told))
    (state / "flights" / "f.json").write_text(json.dumps(told))
    checkpoint(root, [], [])
    recording = json.loads(SOUND.read_text())
    recording["answers"]["read_text"]["/proc/cmdline"] = SEEDED
    recording["answers"].setdefault("environment", {})[""] = {"NCCL_SECRET": SECRETS["pair"], "NCCL_DEBUG": "INFO"}
    files = bundle.unpacked(bundle.packed({"n": bundle.of_host(recording, root=str(root), state=state)}))["n"]
    whole = b"\n".join(files.values()).decode()
    for name, secret in SECRETS.items():
        assert secret not in whole, name
    assert whole.count("a harmless line") >= 4
    assert {"recording.json", "findings.json", "versions.json", "limits.txt", "devices.json", "state/history.json",
            "state/flights/f.json"} == set(files)  # fmt: skip


def test_kubelet_nvml_and_the_bus_are_compared(tmp_path: Path) -> None:
    """A GPU that one has and the other has not, a pod that holds one that is gone; unknown without the checkpoint."""
    snapshot = scan(load(SOUND))
    nvml = bundle.devices(snapshot, tmp_path)["nvml"]
    assert len(nvml) == 8 and bundle.devices(snapshot, tmp_path)["differences"] == "unknown"
    checkpoint(tmp_path, [*nvml[1:], "GPU-gone"], ["GPU-older"])
    told = bundle.devices(snapshot, tmp_path)
    assert set(told["differences"]) == {
        "kubelet has GPU-gone, NVML does not", f"NVML has {nvml[0]}, kubelet does not",
        "pod p1 holds GPU-older of nvidia.com/gpu, which is not registered",
    }  # fmt: skip
    lost = bundle.devices(scan(load(MACHINES / "sick-h100-rdma-off.json")), tmp_path)
    assert len(lost["bus"]) == 8


def test_a_bundle_replays_as_its_recordings(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tgz"
    path.write_bytes(bundle.packed({"a": host(tmp_path, tmp_path), "b": host(tmp_path, tmp_path, SICK)}))
    done = CliRunner().invoke(cli, ["preflight", "-q", "--host", str(path)])
    assert done.exit_code == 3 and "rdma.port.down" in done.output and "hgx-h100-sick-hca" in done.output
    assert [scan(each).outcomes["rdma"].facts for each in load_all(path)] == [
        scan(load(machine)).outcomes["rdma"].facts for machine in (SOUND, SICK)
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"no tar at all", bundle.packed({"n": {"note.txt": b"x"}})])
def test_what_is_no_bundle_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "b.tgz"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"b\.tgz"):
        load_all(path)
    assert CliRunner().invoke(cli, ["scan", "--host", str(path)]).exit_code == 2


def test_files_are_bounded() -> None:
    files = {"state/history.json": b"x" * (bundle.MOST_FILE_BYTES + 1)}
    assert len(bundle.unpacked(bundle.packed({"n": files}))["n"]["state/history.json"]) == bundle.MOST_FILE_BYTES


KUBECTL = """#!{python}
import json, subprocess, sys
words = " ".join(sys.argv[1:])
node = lambda name, gpus: {{"metadata": {{"name": name}}, "status": {{"capacity": {{"nvidia.com/gpu": gpus}}}}}}
if " get pods " in words:
    pods = [{{"metadata": {{"name": f"agent-{{n}}"}}, "spec": {{"nodeName": n}}}} for n in ("n1", "n2")]
    print(json.dumps({{"items": pods}}))
elif " get nodes " in words:
    print(json.dumps({{"items": [node("n1", "7"), node("n2", "8")]}}))
elif " get nodetopologies " in words:
    sys.exit("nodetopologies is forbidden")
elif " exec agent-n1 " in words:
    sys.stdout.buffer.write(open({file!r}, "rb").read())
elif " exec " in words:
    sys.exit("error: unable to upgrade connection: Forbidden")
elif " logs " in words:
    print({log!r})
"""


def test_a_cluster_by_kubectl(tmp_path: Path) -> None:
    """Through kubectl as a stand-in on PATH: what is refused is said, secrets of logs are left out."""
    inner = tmp_path / "inner.tgz"
    inner.write_bytes(bundle.packed({"n1": host(tmp_path, tmp_path)}))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable, file=str(inner), log=SEEDED))
    kubectl.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [sys.executable, "-m", "agent.cli", "bundle", "--cluster", "-f", str(tmp_path / "all.tgz")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 without an answer: n2" in done.stderr
    found = bundle.unpacked((tmp_path / "all.tgz").read_bytes())
    assert set(found) == {"cluster", "n1", "n2"} and "recording.json" in found["n1"]
    assert b"Forbidden" in found["n2"]["error.txt"] and b"forbidden" in found["cluster"]["nodetopologies.json.txt"]
    assert b"a harmless line" in found["n2"]["log.txt"]
    assert not any(
        secret.encode() in data for secret in SECRETS.values() for f in found.values() for data in f.values()
    )
    told = json.loads(found["cluster"]["differences.json"])
    assert told == {"n1": "capacity nvidia.com/gpu is 7, NVML shows 8"}
    assert (tmp_path / "all.tgz").stat().st_mode & 0o077 == 0
