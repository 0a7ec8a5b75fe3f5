"""The support bundle: one bounded file without secrets, that replays; kubelet's account against NVML and the bus."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row
from scanned import scan

from agent.base.recordings import MOST_FILE_BYTES, Files, pack_bundle, unpack_bundle
from agent.jobs import bundle
from probes.host.recording import RecordedHost, load, load_all
from probes.wire import RecordingError

SOUND, SICK = path_of(), path_of("sick-h100-dead-hca")
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


def host(root: Path, state: Path, machine: Path = SOUND) -> Files:
    return bundle.of_host(scan(load(machine)), load(machine).content, root=str(root), state=state)


def checkpoint(root: Path, registered: dict[str, list[str] | None], held: list[str]) -> str:
    """As kubelet writes it: DeviceIDs by NUMA node, and a resource without a healthy device as null."""
    path = root / bundle.CHECKPOINT
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"PodUID": "p1", "ContainerName": "c", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"0": held},
             "AllocResp": SECRETS["key"]}  # fmt: skip
    text = json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": registered}, "Checksum": 1})
    path.write_text(text)
    return text


def test_no_seeded_secret_is_in_the_file_and_what_is_harmless_is(tmp_path: Path) -> None:
    """In the recording, the kept state, limits and kubelet's checkpoint."""
    root, state = tmp_path / "root", tmp_path / "state"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/limits").write_text(SEEDED)
    (state / "runs").mkdir(parents=True)
    told = {"log": SEEDED, "nested": [{"api_key": SECRETS["pair"], "note": f"x {SECRETS['jwt']}"}]}
    (state / "bench.json").write_text(json.dumps(told))
    (state / "runs" / "f.json").write_text(json.dumps(told))
    checkpoint(root, {}, [])
    recording = json.loads(SOUND.read_text())
    recording["answers"]["read_text"]["/proc/cmdline"] = SEEDED
    recording["answers"].setdefault("environment", {})[""] = {"NCCL_SECRET": SECRETS["pair"], "NCCL_DEBUG": "INFO"}
    made = bundle.of_host(scan(RecordedHost(recording)), recording, root=str(root), state=state)
    files = unpack_bundle(pack_bundle({"n": made}))["n"]
    whole = b"\n".join(files.values()).decode()
    for name, secret in SECRETS.items():
        assert secret not in whole, name
    assert whole.count("a harmless line") >= 4
    assert {"recording.json", "findings.json", "versions.json", "limits.txt", "devices.json", "differences.txt",
            "state/bench.json", "state/runs/f.json"} == set(files)  # fmt: skip


def told(root: Path, machine: Path = SOUND) -> list[str]:
    return list(bundle.devices(scan(load(machine)), root)["differences"])


def test_kubelet_nvml_and_the_bus_are_compared(tmp_path: Path) -> None:
    """A GPU that one has and the other has not, a pod that holds one that is gone; unknown without the checkpoint."""
    nvml = bundle.devices(scan(load(SOUND)), tmp_path)["nvml"]
    assert len(nvml) == 8 and [line.split(":")[0] for line in told(tmp_path)] == [
        "unknown whether kubelet hands out every GPU"
    ]
    checkpoint(tmp_path, {"nvidia.com/gpu": nvml}, nvml[:1])
    assert told(tmp_path) == []
    checkpoint(tmp_path, {"nvidia.com/gpu": [*nvml[1:], "GPU-gone"]}, ["GPU-older"])
    assert set(told(tmp_path)) == {
        "the device plugin advertises GPU-gone, NVML does not show it",
        f"NVML shows {nvml[0]}, the device plugin does not advertise it as healthy",
        "pod p1 holds GPU-older of nvidia.com/gpu, which its plugin does not advertise as healthy",
    }


@each_row("none", [None, []])
def test_a_plugin_without_a_healthy_device_and_no_plugin_are_said(none: list[str] | None, tmp_path: Path) -> None:
    checkpoint(tmp_path, {"nvidia.com/gpu": none}, [])
    assert len(told(tmp_path)) == 8 and all(line.endswith("not advertise it as healthy") for line in told(tmp_path))
    checkpoint(tmp_path, {"rdma/hca": ["0"]}, [])
    assert all(line.endswith("no plugin of nvidia.com has registered with kubelet") for line in told(tmp_path))


def test_shares_and_names_of_another_plugin_are_no_difference(tmp_path: Path) -> None:
    nvml = bundle.devices(scan(load(SOUND)), tmp_path)["nvml"]
    checkpoint(tmp_path, {"nvidia.com/gpu.shared": [f"{each}::{n}" for each in nvml for n in range(4)]}, [])
    assert told(tmp_path) == []
    checkpoint(tmp_path, {"nvidia.com/gpu": [f"nvidia{n}" for n in range(8)]}, [])
    assert told(tmp_path) == []
    checkpoint(tmp_path, {"nvidia.com/gpu": [f"nvidia{n}" for n in range(7)]}, [])
    assert ["NVML shows 8" in line for line in told(tmp_path)] == [True]


def with_mig(folder: Path, slices: list[tuple[str, str]] | None, gpus: int = 1) -> Path:
    """A recording whose first GPUs have MIG on, GPU0 with these slices (UUID, profile); None: NVML does not tell."""
    recording = json.loads(SOUND.read_text())
    nvml = recording["answers"]["nvml"]
    for index in range(gpus):
        nvml["nvmlDeviceGetMigMode"][f"gpu{index}"] = [1, 1]
        mine = (slices or []) if index == 0 else []
        if slices is not None:
            nvml.setdefault("nvmlDeviceGetMaxMigDeviceCount", {})[f"gpu{index}"] = 7
        nvml.setdefault("nvmlDeviceGetMigDeviceHandleByIndex", {}).update({
            f"gpu{index},{i}": {"uuid": mine[i][0], "name": f"NVIDIA H100 80GB HBM3 MIG {mine[i][1]}",
                                "gpuInstance": i + 7, "computeInstance": 0}
            if i < len(mine) else {"$nvml": "NOT_FOUND"} for i in range(7)})  # fmt: skip
    path = folder / "mig.json"
    path.write_text(json.dumps(recording))
    return path


def test_mig_is_compared_by_slices(tmp_path: Path) -> None:
    """By UUID, whatever the strategy names the resource: what is missing, what is too much, what is named wrongly."""
    machine = with_mig(tmp_path, [("MIG-a", "1g.10gb"), ("MIG-b", "3g.40gb"), ("MIG-m", "1g.10gb+me")])
    found = bundle.devices(scan(load(machine)), tmp_path)
    nvml, (split,) = found["nvml"], found["mig"]
    assert [(one["uuid"], one["profile"], one["gpu"], one["gpu_instance"]) for one in found["mig_slices"]] == [
        ("MIG-a", "1g.10gb", split, 7), ("MIG-b", "3g.40gb", split, 8), ("MIG-m", "1g.10gb+me", split, 9)
    ]  # fmt: skip
    rest = [each for each in nvml if each != split]

    def said(**registered: list[str]) -> list[str]:
        checkpoint(tmp_path, {"nvidia.com/gpu": rest, **{f"nvidia.com/{k}": v for k, v in registered.items()}}, [])
        return told(tmp_path, machine)

    one, three, media = "mig-1g.10gb", "mig-3g.40gb", "mig-1g.10gb.me"
    assert said(**{one: ["MIG-a"], three: ["MIG-b"], media: ["MIG-m"]}) == []
    shared = {f"{one}.shared": ["MIG-a::0", "MIG-a::1"], three: ["MIG-b"], media: ["MIG-m"]}
    assert said(**shared) == [], "a share of a slice is that slice"
    checkpoint(tmp_path, {"nvidia.com/gpu": [*rest, "MIG-a", "MIG-b", "MIG-m"]}, [])
    assert told(tmp_path, machine) == [], "the strategy single"
    assert said(**{one: ["MIG-a"], media: ["MIG-m"]}) == [
        f"NVML shows MIG-b (3g.40gb of {split}), the device plugin does not advertise it as healthy"
    ]
    assert said(**{one: ["MIG-a", "MIG-old"], three: ["MIG-b"], media: ["MIG-m"]}) == [
        "the device plugin advertises MIG-old, NVML does not show it"
    ]
    assert said(**{one: ["MIG-a", "MIG-b"], media: ["MIG-m"]}) == [
        "the device plugin advertises MIG-b as nvidia.com/mig-1g.10gb, NVML shows it as 3g.40gb"
    ]
    assert len(said()) == 3
    checkpoint(tmp_path, {"nvidia.com/gpu": nvml}, [])
    assert told(tmp_path, machine) == [f"the device plugin advertises {split} whole, NVML shows MIG on"]
    checkpoint(tmp_path, {"nvidia.com/gpu": nvml, "nvidia.com/mig-1g.10gb": ["MIG-a"]}, [])
    assert told(tmp_path) == ["the device plugin advertises MIG-a, NVML shows MIG off on every GPU"]


def test_mig_without_slices_parts_of_an_instance_and_slices_that_were_not_read(tmp_path: Path) -> None:
    part = with_mig(tmp_path, [("MIG-p", "1c.3g.40gb")])
    found = bundle.devices(scan(load(part)), tmp_path)
    (split,), rest = found["mig"], found["nvml"][1:]
    checkpoint(tmp_path, {"nvidia.com/gpu": rest}, [])
    assert told(tmp_path, part) == [f"NVML shows MIG-p (1c.3g.40gb of {split}), the device plugin does not advertise it"
                                    " as healthy: it has no resource for a part of a GPU instance"]  # fmt: skip
    none = with_mig(tmp_path, [])
    assert told(tmp_path, none) == [f"NVML shows MIG on on {split} and no slice: a pod can use nothing of it"]
    unread = with_mig(tmp_path, None)
    assert bundle.devices(scan(load(unread)), tmp_path)["mig_slices"] == "unknown"
    doubt = "unknown whether the device plugin advertises every MIG slice: NVML did not tell of each"
    assert told(tmp_path, unread) == [f"NVML shows MIG on on {split}, the device plugin advertises no slice", doubt]
    checkpoint(tmp_path, {"nvidia.com/gpu": rest, "nvidia.com/mig-1g.10gb": ["MIG-x"]}, [])
    assert told(tmp_path, unread) == [doubt], "what NVML did not tell is no difference"


def test_a_gpu_that_nvml_lost_is_said_by_its_place(tmp_path: Path) -> None:
    lost = told(tmp_path, path_of("sick-h100-gpu-lost"))
    assert [line for line in lost if line.startswith("the bus shows a GPU at 0000:")], lost


def test_a_bundle_replays_as_its_recordings(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tgz"
    checkpoint(tmp_path, {"nvidia.com/gpu": ["GPU-gone"]}, [])
    path.write_bytes(pack_bundle({"a": host(tmp_path, tmp_path), "b": host(tmp_path, tmp_path, SICK)}))
    done = topoflight("preflight", "-q", "--host", path)
    assert done.exit_code == 3 and "rdma.port.down" in done.output and "hgx-h100-sick-hca" in done.output
    assert "a: the device plugin advertises GPU-gone, NVML does not show it" in done.stderr
    assert "and 8 more: differences.txt of each folder" in done.stderr
    assert [scan(each).outcomes["rdma"].facts for each in load_all(path)] == [
        scan(load(machine)).outcomes["rdma"].facts for machine in (SOUND, SICK)
    ]  # type: ignore[union-attr]


@each_row("content", [b"", b"\x1f\x8b", b"no tar at all", pack_bundle({"n": {"note.txt": b"x"}})])
def test_what_is_no_bundle_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "b.tgz"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"b\.tgz"):
        load_all(path)
    assert topoflight("scan", "--host", path).exit_code == 2


def test_files_are_bounded() -> None:
    files = {"state/bench.json": b"x" * (MOST_FILE_BYTES + 1)}
    assert len(unpack_bundle(pack_bundle({"n": files}))["n"]["state/bench.json"]) == MOST_FILE_BYTES


KUBECTL = """#!{python}
import json, subprocess, sys
words = " ".join(sys.argv[1:])
node = lambda name, gpus, healthy: {{"metadata": {{"name": name}}, "status": {{
    "capacity": {{"nvidia.com/gpu": gpus}}, "allocatable": {{"nvidia.com/gpu": healthy}}}}}}
if " -l app=nvidia-device-plugin-daemonset " in words:
    plugin = {{"name": "plugin-n1", "namespace": "gpus"}}
    print(json.dumps({{"items": [{{"metadata": plugin, "spec": {{"nodeName": "n1",
        "containers": [{{"name": "config-manager"}}, {{"name": "nvidia-device-plugin-ctr"}}]}}}}]}}))
elif " -l app.kubernetes.io/name=nvidia-device-plugin " in words:  # older charts label this one so too
    other = {{"nodeName": "n1", "containers": [{{"name": "gpu-feature-discovery-ctr"}}]}}
    print(json.dumps({{"items": [{{"metadata": {{"name": "gfd-n1", "namespace": "gpus"}}, "spec": other}}]}}))
elif " -A " in " " + words:
    print('{{"items": []}}')
elif " get pods " in words:
    wait = {{"waiting": {{"reason": "ImagePullBackOff", "message": "no such image"}}}}
    state = {{"n1": {{"running": {{}}}}, "n2": wait}}
    pods = [{{"metadata": {{"name": f"agent-{{n}}"}}, "spec": {{"nodeName": n}},
              "status": {{"containerStatuses": [{{"state": state[n]}}]}}}} for n in ("n1", "n2")]
    scheduled = {{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "a taint"}}
    pods.append({{"metadata": {{"name": "agent-x"}}, "spec": {{}}, "status": {{"conditions": [scheduled]}}}})
    print(json.dumps({{"items": pods}}))
elif " get events " in words:
    print(json.dumps({{"items": [{{"reason": "FailedCreate", "message": "violates PodSecurity"}}]}}))
elif " get daemonsets " in words:
    print(json.dumps({{"items": []}}))
elif " get nodes " in words:
    print(json.dumps({{"items": [node("n1", "8", "7"), node("n2", "8", "8")]}}))
elif " get resourceslices " in words:
    sys.exit("the server doesn't have a resource type resourceslices")
elif " get nodetopologies " in words:
    sys.exit("nodetopologies is forbidden")
elif " exec plugin-n1 -c nvidia-device-plugin-ctr " in words:
    print({checkpoint!r})
elif " logs plugin-n1 -c nvidia-device-plugin-ctr " in words:
    print("I1 server.go:1] 'nvidia.com/gpu' device marked unhealthy: GPU-marked")
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
    inner.write_bytes(pack_bundle({"n1": host(tmp_path, tmp_path)}))
    nvml = bundle.devices(scan(load(SOUND)), tmp_path)["nvml"]
    kept = checkpoint(tmp_path / "node", {"nvidia.com/gpu": nvml[1:]}, [])
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable, file=str(inner), log=SEEDED, checkpoint=kept))
    kubectl.chmod(0o755)
    done = topoflight("bundle", "--cluster", "-f", tmp_path / "all.tgz", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.exit_code == 0, done.stderr
    assert "no answer from n2" in done.stderr
    found = unpack_bundle((tmp_path / "all.tgz").read_bytes())
    assert set(found) == {"cluster", "n1", "n2"} and "recording.json" in found["n1"]
    assert b"Forbidden" in found["n2"]["error.txt"] and b"forbidden" in found["cluster"]["nodetopologies.json.txt"]
    assert b"a harmless line" in found["n2"]["log.txt"]
    assert not any(
        secret.encode() in data for secret in SECRETS.values() for f in found.values() for data in f.values()
    )
    each = found["n1"]["differences.txt"].decode().splitlines()
    assert each == [f"NVML shows {nvml[0]}, the device plugin does not advertise it as healthy",
                    "the device plugin's log has GPU-marked marked unhealthy"]  # fmt: skip
    said = "n1: 1 of 8 nvidia.com/gpu unhealthy, by the device plugin (allocatable 7)"
    assert found["cluster"]["differences.txt"].decode().splitlines() == [
        "n2: the agent's pod agent-n2 does not run: ImagePullBackOff: no such image",
        "no node: the agent's pod agent-x does not run: Unschedulable: a taint",
        said,
    ]
    assert "ImagePullBackOff" in done.stderr
    assert (
        b"violates PodSecurity" in found["cluster"]["events.json"]
        and "agent-x" in found["cluster"]["pods.json"].decode()
    )
    assert said in done.stderr and f"n1: {each[0]}" in done.stderr
    assert (tmp_path / "all.tgz").stat().st_mode & 0o077 == 0


def offered(node: dict[str, object], slices: list[str] | None = None, mig: list[str] | None = None) -> list[str]:
    """What is said of one node, n1, of eight GPUs GPU-0 ... that the API has so; GPU-0 has these MIG slices."""
    one = {"metadata": {"name": "n1", "labels": node.pop("labels", {})}, "status": node}
    devices = [
        {"name": f"gpu-{n}", "basic": {"attributes": {"uuid": {"string": u}}}} for n, u in enumerate(slices or [])
    ]
    spec = {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": devices}
    cluster = {"nodes.json": json.dumps({"items": [one]}).encode(),
               "resourceslices.json": json.dumps({"items": [{"spec": spec}] if slices else []}).encode()}  # fmt: skip
    here = json.dumps({"nvml": [f"GPU-{n}" for n in range(8)], "mig": ["GPU-0"] if mig else [],
                       "mig_slices": [{"uuid": each} for each in mig or ()]}).encode()  # fmt: skip
    return bundle._against_api({"cluster": cluster, "n1": {"devices.json": here}}, {})


def test_what_the_api_has_of_a_node_is_compared() -> None:
    eight = {"nvidia.com/gpu": "8"}
    assert offered({"capacity": eight, "allocatable": eight}) == []
    assert offered({"capacity": {"nvidia.com/gpu": "7"}}) == ["n1: capacity nvidia.com/gpu is 7, NVML shows 8"]
    assert offered({"capacity": {"cpu": "8"}}) == [
        "n1: the node offers no nvidia.com/gpu, no plugin was found; NVML shows 8"
    ]
    assert offered({"capacity": {"nvidia.com/gpu": "32"}, "labels": {"nvidia.com/gpu.replicas": "4"}}) == []
    assert offered({"capacity": {}}, [f"GPU-{n}" for n in range(8)]) == []
    assert offered({"capacity": {}}, ["GPU-x", *(f"GPU-{n}" for n in range(7))]) == [
        "n1: NVML shows GPU-7, no ResourceSlice has it", "n1: a ResourceSlice has GPU-x, NVML does not show it"
    ]  # fmt: skip


def test_what_the_api_has_of_mig_is_compared() -> None:
    """Both strategies count slices; a shared slice counts once."""
    two = ["MIG-a", "MIG-b"]
    assert offered({"capacity": {"nvidia.com/gpu": "7", "nvidia.com/mig-1g.10gb": "2"}}, mig=two) == []
    assert offered({"capacity": {"nvidia.com/gpu": "9"}}, mig=two) == []
    replicas = {"nvidia.com/mig-1g.10gb.replicas": "4"}
    shared = {"nvidia.com/gpu": "7", "nvidia.com/mig-1g.10gb.shared": "8"}
    assert offered({"capacity": shared, "labels": replicas}, mig=two) == []
    assert offered({"capacity": {"nvidia.com/gpu": "7", "nvidia.com/mig-1g.10gb": "1"}}, mig=two) == [
        "n1: capacity nvidia.com/gpu and nvidia.com/mig-1g.10gb is 8, NVML shows 7 whole and 2 MIG slices"
    ]
    seven = [f"GPU-{n}" for n in range(1, 8)]
    assert offered({"capacity": {}}, [*seven, *two], mig=two) == []
    assert offered({"capacity": {}}, [*seven, "MIG-a"], mig=two) == ["n1: NVML shows MIG-b, no ResourceSlice has it"]
