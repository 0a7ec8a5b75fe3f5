"""The support bundle: one bounded file without secrets, that replays; kubelet's account against NVML and the bus."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from rigs.command import topoflight
from rigs.recorded import facts, path_of, snapshot
from rigs.tables import each_row
from scanned import scan
from test_secrets import PLANTED, SECRETS, S

from agent.base.recordings import MOST_FILE_BYTES, Files, unpack_bundle
from agent.jobs import bundle
from agent.jobs.bundle import pack_bundle
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.host.recording import RecordedHost, load, load_all
from probes.wire import RecordingError

SOUND, SICK = path_of(), path_of("sick-h100-dead-hca")
SEEDED = f"{PLANTED}\nkept: a harmless line"
TABLES = yaml.safe_load(Path(__file__).with_name("bundle_tables.yaml").read_text(encoding="utf-8"))


def host(root: Path, state: Path, machine: Path = SOUND) -> Files:
    return bundle.of_host(scan(load(machine)), load(machine).content, root=str(root), state=state)


def checkpoint(root: Path, registered: dict[str, list[str] | None], held: list[str]) -> str:
    """As kubelet writes it: DeviceIDs by NUMA node, and a resource without a healthy device as null."""
    path = root / bundle.CHECKPOINT
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"PodUID": "p1", "ContainerName": "c", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"0": held},
             "AllocResp": S}  # fmt: skip
    text = json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": registered}, "Checksum": 1})
    path.write_text(text)
    return text


@cache
def with_mig(slices: str) -> Snapshot:
    """A machine whose GPU0 has MIG on with these slices (UUID, profile), as JSON; null: NVML does not tell them."""
    recording, found = load(SOUND).content, json.loads(slices)
    nvml = recording["answers"]["nvml"]
    nvml["nvmlDeviceGetMigMode"]["gpu0"] = [1, 1]
    if found is not None:
        nvml.setdefault("nvmlDeviceGetMaxMigDeviceCount", {})["gpu0"] = 7
    handles = {f"gpu0,{i}": {"$nvml": "NOT_FOUND"} for i in range(7)}
    for i, (uuid, profile) in enumerate(found or []):
        handles[f"gpu0,{i}"] = {"uuid": uuid, "name": f"NVIDIA H100 80GB HBM3 MIG {profile}", "gpuInstance": i + 7,
                                "computeInstance": 0}  # fmt: skip
    nvml.setdefault("nvmlDeviceGetMigDeviceHandleByIndex", {}).update(handles)
    return scan(RecordedHost(recording))


@cache
def gpus() -> list[str]:
    """The UUIDs of the machine's eight GPUs."""
    return [str(gpu.uuid) for gpu in facts(GpuFacts).gpus]


def named(items: list[str] | None) -> list[str]:
    """With the UUIDs for which words of the tables stand."""
    found = []
    for item in items or ():
        many = gpus() if "{n}" in item else gpus()[1:] if "{rest}" in item else gpus()[:1]
        found += [re.sub(r"\{\w+\}", each, item) for each in (many if "{" in item else many[:1])]
    return found


@each_row("row", TABLES["devices"])
def test_kubelet_nvml_and_the_bus_are_compared(row: dict[str, Any], tmp_path: Path) -> None:
    """A GPU or slice that one has and the other has not; a pod that holds one that is gone."""
    machine = with_mig(json.dumps(row["mig"])) if "mig" in row else snapshot()
    registered = {name: None if ids is None else named(ids) for name, ids in row["registered"].items()}
    checkpoint(tmp_path, registered, named(row.get("held")))
    assert bundle.devices(machine, tmp_path)["differences"] == named(row["says"])


def test_without_kubelets_checkpoint_or_slices_of_nvml_the_rest_is_unknown(tmp_path: Path) -> None:
    found = bundle.devices(with_mig('[["MIG-a", "1g.10gb"], ["MIG-b", "3g.40gb"]]'), tmp_path)
    assert (found["nvml"], found["mig"]) == (gpus(), gpus()[:1])
    assert [(one["uuid"], one["profile"], one["gpu"], one["gpu_instance"]) for one in found["mig_slices"]] == [
        ("MIG-a", "1g.10gb", gpus()[0], 7), ("MIG-b", "3g.40gb", gpus()[0], 8)
    ]  # fmt: skip
    (unread,) = bundle.devices(snapshot(), tmp_path)["differences"]
    assert unread.startswith("unknown whether kubelet hands out every GPU: ")
    assert bundle.devices(with_mig("null"), tmp_path)["mig_slices"] == "unknown"


def test_a_gpu_that_nvml_lost_is_said_by_its_place(tmp_path: Path) -> None:
    lost = bundle.devices(snapshot("sick-h100-gpu-lost"), tmp_path)["differences"]
    assert [line for line in lost if line.startswith("the bus shows a GPU at 0000:")], lost


def test_a_bundle_replays_as_its_recordings(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tgz"
    checkpoint(tmp_path, {"nvidia.com/gpu": ["GPU-gone"]}, [])
    limits, state = tmp_path / "proc/self/limits", tmp_path / "state"
    for file in (limits, state / "bench.json", state / "runs" / "f.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"note": "kept: a harmless line"}')
    whole = host(tmp_path, state)
    assert set(whole) == {"recording.json", "findings.json", "versions.json", "limits.txt", "devices.json",
                          "differences.txt", "state/bench.json", "state/runs/f.json"}  # fmt: skip
    assert sum(b"a harmless line" in data for data in whole.values()) == 3
    path.write_bytes(pack_bundle({"a": whole, "b": host(tmp_path, tmp_path, SICK)}))
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


# kubectl on PATH, which answers by the table that its test has written beside it.
KUBECTL = f"""#!{sys.executable}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
said = f" {{' '.join(sys.argv[1:])}} "
row = next((row for row in json.loads((here / "answers").read_text()) if row["when"] in said), {{"document": ""}})
if "refusal" in row:
    sys.exit(row["refusal"])
told = (here / row["file"]).read_bytes() if "file" in row else json.dumps(row["document"]).encode()
sys.stdout.buffer.write(told)
"""


def test_a_cluster_by_kubectl(tmp_path: Path) -> None:
    """Through kubectl as a stand-in on PATH: what is refused is said, secrets of logs are left out."""
    kept = checkpoint(tmp_path / "node", {"nvidia.com/gpu": gpus()[1:]}, [])
    marked = "I1 server.go:1] 'nvidia.com/gpu' device marked unhealthy: GPU-marked"
    texts = {"checkpoint": kept, "plugin.log": marked, "agent.log": SEEDED, "answers": json.dumps(TABLES["kubectl"])}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "inner.tgz").write_bytes(pack_bundle({"n1": host(tmp_path, tmp_path)}))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    done = topoflight("bundle", "--cluster", "-f", tmp_path / "all.tgz", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.exit_code == 0, done.stderr
    assert "no answer from n2" in done.stderr
    found = unpack_bundle((tmp_path / "all.tgz").read_bytes())
    assert set(found) == {"cluster", "n1", "n2"} and "recording.json" in found["n1"]
    assert b"Forbidden" in found["n2"]["error.txt"] and b"forbidden" in found["cluster"]["nodetopologies.json.txt"]
    assert b"a harmless line" in found["n2"]["log.txt"]
    assert not any(secret.encode() in data for secret in SECRETS for files in found.values() for data in files.values())
    each = found["n1"]["differences.txt"].decode().splitlines()
    assert each == [f"NVML shows {gpus()[0]}, the device plugin does not advertise it as healthy",
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


@each_row("row", TABLES["api"])
def test_what_the_api_has_of_a_node_is_compared(row: dict[str, Any]) -> None:
    status = {key: row[key] for key in ("capacity", "allocatable") if key in row}
    node = {"metadata": {"name": "n1", "labels": row.get("labels", {})}, "status": status}
    devices = [{"name": f"gpu-{n}", "basic": {"attributes": {"uuid": {"string": uuid}}}}
               for n, uuid in enumerate(row.get("slices", ()))]  # fmt: skip
    spec = {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": devices}
    mig = row.get("mig", [])
    here = {"nvml": [f"GPU-{n}" for n in range(8)], "mig": ["GPU-0"] if mig else [],
            "mig_slices": [{"uuid": uuid} for uuid in mig]}  # fmt: skip
    files = {
        "cluster": {
            "nodes.json": {"items": [node]},
            "resourceslices.json": {"items": [{"spec": spec}] * bool(devices)},
        },
        "n1": {"devices.json": here},
    }
    packed = {place: {name: json.dumps(one).encode() for name, one in found.items()} for place, found in files.items()}
    assert bundle._against_api(packed, {}) == row["says"]
