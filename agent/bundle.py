"""One file for whoever helps: what this host answers, what its agent kept, what kubelet hands out, without secrets.

A gzipped tar with a folder per host. `--host FILE` replays its recordings. Nothing is sent anywhere.
Kubelet's checkpoint: kubernetes/kubernetes, pkg/kubelet/cm/devicemanager/checkpoint.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import re
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from agent.documents import document
from agent.gate.verdict import worst_first
from agent.version import VERSION
from agent.view import look
from contracts import bounded
from contracts.plain import PlainError, loads
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.host.recording import RecordedHost, dumps, without_secrets
from probes.pci.facts import PciFacts
from probes.pci.facts import gpus as on_the_bus
from probes.scan import scan

Files = dict[str, bytes]
MOST_FILE_BYTES = 8 << 20  # a recording takes about 1 MiB, the history at most 1
MOST_BYTES = 512 << 20  # of a bundle, unpacked
LOG_LINES = 2000
NODE_SECONDS = 180
AT_ONCE = 8
CHECKPOINT = "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
PACKAGES = ("nvidia-ml-py", "psutil", "pyroute2", "pyverbs", "fastapi", "uvicorn", "prometheus-client", "torch",
            "kubernetes", "nvidia-nccl-cu12", "nvidia-nccl-cu13")  # fmt: skip
LIMIT_FILES = ("proc/self/limits", "proc/self/cgroup", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/cpu.max",
               "sys/fs/cgroup/pids.max")  # fmt: skip


class BundleError(RuntimeError):
    """Why no bundle came; the message says what to do."""


def of_host(recording: dict[str, Any], *, root: str, state: Path, live: bool = True) -> Files:
    """The files of one host, by their name in its folder; `live` is whether this is the host that was recorded."""
    snapshot = scan(RecordedHost(recording))
    checks = worst_first(look((snapshot,)).checks)
    found: Files = {
        "recording.json": dumps(without_secrets(recording)).encode(),
        "findings.json": _json(document([check for check in checks if check.status != "pass"])),
        "versions.json": _json({"topoflight": VERSION, "python": platform.python_version(), "at": time.time(),
                                "packages": dict(_versions())} if live else {"topoflight": VERSION}),
    }  # fmt: skip
    if live:
        found["limits.txt"] = _limits(Path(root)).encode()
        found["devices.json"] = _json(devices(snapshot, Path(root)))
        found |= dict(_kept(state))
    return found


def _json(value: Any) -> bytes:
    return (json.dumps(without_secrets(value), indent=1) + "\n").encode()


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _limits(root: Path) -> str:
    return "\n".join(f"# /{name}\n{_text(root / name)}" for name in LIMIT_FILES)


def _text(path: Path) -> str:
    try:
        return str(without_secrets(bounded.read_text(path, MOST_FILE_BYTES)))
    except (OSError, ValueError) as error:
        return f"not read: {error}\n"


def _kept(state: Path) -> Iterator[tuple[str, bytes]]:
    """What the agent keeps: history, last benchmark, flights; whatever is no JSON is left out and named."""
    for path in sorted([*state.glob("*.json"), *state.glob("flights/*.json")])[:128]:
        name = f"state/{path.relative_to(state).as_posix()}"
        try:
            yield name, _json(loads(bounded.read_text(path, MOST_FILE_BYTES), unknown_numbers=True))
        except (OSError, ValueError) as error:
            yield f"{name}.txt", f"left out: {error}\n".encode()


def devices(snapshot: Snapshot, root: Path) -> dict[str, Any]:
    """What kubelet hands out against what NVML and the bus show; what could not be read is "unknown"."""
    gpus, pci = snapshot.facts(GpuFacts), snapshot.facts(PciFacts)
    nvml = [gpu.uuid or gpu.bus_id or f"GPU{gpu.index}" for gpu in gpus.gpus] if gpus else None
    bus = [device.bus_id for device in on_the_bus(pci)] if pci else None
    told: dict[str, Any] = {
        "nvml": nvml if nvml is not None else "unknown", "bus": bus if bus is not None else "unknown",
        "podresources": f"not asked: /{SOCKET} speaks gRPC" if (root / SOCKET).exists() else f"no /{SOCKET} here",
    }  # fmt: skip
    try:
        kept = loads(bounded.read_text(root / CHECKPOINT, MOST_FILE_BYTES))["Data"]
        registered = {str(name): [str(i) for i in ids or ()] for name, ids in kept["RegisteredDevices"].items()}
        handed = [
            {"pod": each["PodUID"], "container": each["ContainerName"], "resource": each["ResourceName"],
             "devices": _ids(each["DeviceIDs"])}
            for each in kept["PodDeviceEntries"] or ()
        ]  # fmt: skip
    except (OSError, PlainError, ValueError, KeyError, TypeError, AttributeError) as error:
        told["kubelet"] = f"unknown: {error}"
        told["differences"] = "unknown"
        return told
    told |= {"registered": registered, "handed_out": handed}
    told["differences"] = differences(registered, handed, nvml, len(bus) if bus is not None else None)
    return told


def _ids(told: Any) -> list[str]:
    """A list until Kubernetes 1.19, then lists by NUMA node."""
    groups = told.values() if isinstance(told, Mapping) else [told]
    return [str(each) for group in groups for each in group or ()]


def differences(
    registered: Mapping[str, Sequence[str]], handed: Sequence[Mapping[str, Any]], nvml: Sequence[str] | None,
    on_bus: int | None,
) -> list[str]:  # fmt: skip
    """Each way in which kubelet's account of whole GPUs departs from what the host shows, in words."""
    found = []
    ids = [each for name, all_ids in registered.items() if name == "nvidia.com/gpu" for each in all_ids]
    whole = [each for each in ids if each.startswith("GPU-") and "::" not in each]  # "::" counts a shared GPU's shares
    if nvml is not None and whole:
        found += [f"kubelet has {each}, NVML does not" for each in whole if each not in nvml]
        found += [
            f"NVML has {each}, kubelet does not" for each in nvml if each.startswith("GPU-") and each not in whole
        ]
    if nvml is not None and on_bus is not None and on_bus != len(nvml):
        found.append(f"the bus shows {on_bus} GPUs, NVML {len(nvml)}")
    for each in handed:
        gone = [i for i in each["devices"] if each["resource"] in registered and i not in registered[each["resource"]]]
        found += [f"pod {each['pod']} holds {i} of {each['resource']}, which is not registered" for i in gone]
    return found


def packed(hosts: Mapping[str, Files]) -> bytes:
    """The file, the same for the same content. Raises BundleError where it is too large."""
    if sum(len(data) for files in hosts.values() for data in files.values()) > MOST_BYTES:
        raise BundleError(f"the bundle is larger than {MOST_BYTES >> 20} MiB: name fewer nodes with --node")
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for host, files in hosts.items():
            for name, data in files.items():
                entry = tarfile.TarInfo(f"{_named(host)}/{name}")
                cut = data[:MOST_FILE_BYTES] if not name.startswith("recording") else data
                entry.size, entry.mode = len(cut), 0o600
                tar.addfile(entry, io.BytesIO(cut))
    return buffer.getvalue()


def _named(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "host"


def unpacked(content: bytes) -> dict[str, Files]:
    """The files of a bundle, by host. Raises BundleError."""
    found: dict[str, Files] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r|gz") as tar:
            for entry in tar:
                total += entry.size
                host, _, name = entry.name.partition("/")
                if total > MOST_BYTES:
                    raise BundleError(f"larger than {MOST_BYTES >> 20} MiB")
                if entry.isfile() and name and ".." not in name and (data := tar.extractfile(entry)) is not None:
                    found.setdefault(_named(host), {})[name] = data.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BundleError(f"not a bundle: {error}") from None
    return found


# A whole cluster, with what `kubectl` may do: exec into the agents' pods, read their logs, nodes and records.


def of_cluster(namespace: str, context: str | None, wanted: Sequence[str]) -> dict[str, Files]:
    """A folder per node, and `cluster`. What is refused is said in the node's `error.txt`. Raises BundleError."""
    base = ["kubectl", *(["--context", context] if context else []), "-n", namespace]
    listed = json.loads(_kubectl([*base, "get", "pods", "-l", "app.kubernetes.io/name=topoflight", "-o", "json"]))
    pods = {str(pod["spec"].get("nodeName")): str(pod["metadata"]["name"]) for pod in listed["items"]}
    unknown = [name for name in wanted if name not in pods]
    if unknown or not pods:
        raise BundleError(f"no agent's pod on {', '.join(unknown) or 'any node'} in the namespace {namespace}")
    chosen = {node: pod for node, pod in pods.items() if not wanted or node in wanted}
    found: dict[str, Files] = {"cluster": {}}
    for name, words in {
        "nodetopologies.json": ["get", "nodetopologies", "-o", "json"],
        "nodes.json": ["get", "nodes", "-o", "json"],
    }.items():
        try:
            found["cluster"][name] = _json(json.loads(_kubectl([*base, *words])))
        except (BundleError, ValueError) as error:
            found["cluster"][f"{name}.txt"] = f"{without_secrets(str(error))}\n".encode()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        each = pool.map(lambda item: _node(base, *item), chosen.items())
        found |= dict(zip(chosen, each, strict=True))
    found["cluster"]["differences.json"] = _json(_against_nodes(found))
    return found


def _against_nodes(found: Mapping[str, Files]) -> dict[str, str]:
    """Nodes whose capacity, as the device plugin told kubelet, is not the number of GPUs that NVML shows."""
    try:
        nodes = json.loads(found["cluster"]["nodes.json"])["items"]
    except (KeyError, ValueError):
        return {"": "unknown: the nodes could not be read"}
    told = {}
    for node in nodes:
        name, status = str(node["metadata"]["name"]), node.get("status") or {}
        if "devices.json" in found.get(name, {}):
            seen = json.loads(found[name]["devices.json"])["nvml"]
            has = (status.get("capacity") or {}).get("nvidia.com/gpu")
            if isinstance(seen, list) and has is not None and int(has) != len(seen):
                told[name] = f"capacity nvidia.com/gpu is {has}, NVML shows {len(seen)}"
    return told


def _node(base: list[str], node: str, pod: str) -> Files:
    files: Files = {}
    try:
        inside = unpacked(_kubectl([*base, "exec", pod, "--", "topoflight", "bundle", "-f", "-"]))
        files |= next(iter(inside.values()), {})
    except BundleError as error:
        files["error.txt"] = f"{node}: {without_secrets(str(error))}\n".encode()
    try:
        log = _kubectl([*base, "logs", pod, f"--tail={LOG_LINES}", f"--limit-bytes={MOST_FILE_BYTES}"])
        files["log.txt"] = str(without_secrets(log.decode(errors="replace"))).encode()
    except BundleError as error:
        files["log.txt"] = f"not read: {without_secrets(str(error))}\n".encode()
    return files


def _kubectl(words: Iterable[str]) -> bytes:
    try:
        done = subprocess.run(list(words), capture_output=True, timeout=NODE_SECONDS, check=False, env=os.environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BundleError(f"kubectl: {error}") from None
    if done.returncode:
        raise BundleError(
            done.stderr.decode(errors="replace").strip()[-500:] or f"kubectl ended with {done.returncode}"
        )
    return done.stdout
