"""The support bundle: one file with the recording of each host, its agent's files and kubelet's devices, no secrets.

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
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from agent.base import version
from agent.base.output import document
from agent.base.recordings import MOST_BUNDLE_BYTES, MOST_FILE_BYTES, BundleError, Files, folder_name, unpack_bundle
from agent.checks.groups import worst_first
from agent.checks.host_checks import checks_of_scans
from contracts import bounded
from contracts.plain import PlainError, loads
from contracts.redaction import redact, without_secrets
from contracts.tables import read_table
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.pci.facts import PciFacts
from probes.pci.probe import gpus as on_the_bus
from probes.scanner import dumps

LOG_LINES = 2000
NODE_SECONDS = 180
AT_ONCE = 8
CHECKPOINT = "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
PLUGIN_CONTAINER = re.compile(r"nvidia-(gpu-)?device-plugin(-ctr)?$")
_SLICED = re.compile(r"nvidia\.com/mig-((?:\d+c\.)?\d+g\.\d+gb[\w.-]*)", re.ASCII)  # strategy "mixed"; "+me" is ".me"
UNHEALTHY = re.compile(r"device marked unhealthy: (\S{1,200})")  # NVIDIA/k8s-device-plugin, internal/plugin/server.go
_TABLE = read_table(__file__, "bundle.toml")


def of_host(snapshot: Snapshot, recording: dict[str, Any], *, root: str, state: Path, live: bool = True) -> Files:
    """The files of one host, by their name in its folder; `live` is whether this is the host that was recorded."""
    checks = worst_first(checks_of_scans((snapshot,)))
    found: Files = {
        "recording.json": dumps(without_secrets(recording)).encode(),
        "findings.json": _json(document([check for check in checks if check.status != "pass"])),
        "versions.json": _json({"topoflight": version(), "python": platform.python_version(), "at": time.time(),
                                "packages": dict(_versions())} if live else {"topoflight": version()}),
    }  # fmt: skip
    if live:
        found["limits.txt"] = _limits(Path(root)).encode()
        found |= _account(devices(snapshot, Path(root)))
        found |= dict(_state_files(state))
    return found


def _account(report: Mapping[str, Any]) -> Files:
    return {"devices.json": _json(report), "differences.txt": _lines(report["differences"])}


def _json(value: Any) -> bytes:
    return (json.dumps(without_secrets(value), indent=1) + "\n").encode()


def _versions() -> Iterator[tuple[str, str]]:
    for name in _TABLE["packages"]:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _limits(root: Path) -> str:
    return "\n".join(f"# /{name}\n{_text(root / name)}" for name in _TABLE["limit_files"])


def _text(path: Path) -> str:
    try:
        return redact(bounded.read_text(path, MOST_FILE_BYTES))
    except (OSError, ValueError) as error:
        return f"not read: {error}\n"


def _state_files(state: Path) -> Iterator[tuple[str, bytes]]:
    """What the agent keeps: last benchmark, runs; whatever is no JSON is left out and named."""
    for path in sorted([*state.glob("*.json"), *state.glob("runs/*.json")])[:128]:
        name = f"state/{path.relative_to(state).as_posix()}"
        try:
            yield name, _json(loads(bounded.read_text(path, MOST_FILE_BYTES), unknown_numbers=True))
        except (OSError, ValueError) as error:
            yield f"{name}.txt", f"left out: {error}\n".encode()


def devices(snapshot: Snapshot, root: Path) -> dict[str, Any]:
    """Compare the devices of kubelet with those of NVML and of the PCI bus; what could not be read is "unknown"."""
    gpus, pci = snapshot.facts(GpuFacts), snapshot.facts(PciFacts)
    report: dict[str, Any] = {
        "nvml": [gpu.uuid or gpu.bus_id or f"GPU{gpu.index}" for gpu in gpus.gpus] if gpus else "unknown",
        "mig": [gpu.uuid for gpu in gpus.gpus if gpu.mig_enabled and gpu.uuid] if gpus else "unknown",
        "mig_slices": _mig_slices(gpus),
        "nvml_bus": [gpu.bus_id for gpu in gpus.gpus if gpu.bus_id and not gpu.error] if gpus else "unknown",
        "bus": [device.bus_id for device in on_the_bus(pci)] if pci else "unknown",
        "podresources": f"not asked: /{SOCKET} speaks gRPC" if (root / SOCKET).exists() else f"no /{SOCKET} here",
    }
    try:
        return compared(report, bounded.read_text(root / CHECKPOINT, MOST_FILE_BYTES))
    except OSError as error:
        return compared(report, error)


def _mig_slices(gpus: GpuFacts | None) -> list[dict[str, Any]] | str:
    """Every slice that NVML shows, with its GPU; "unknown" where it did not tell of each."""
    if gpus is None or any(gpu.mig_enabled and gpu.mig_slices is None for gpu in gpus.gpus):
        return "unknown"
    return [{"gpu": gpu.uuid, **asdict(one)} for gpu in gpus.gpus for one in gpu.mig_slices or ()]


def compared(report: Mapping[str, Any], checkpoint: str | Exception) -> dict[str, Any]:
    """What the host shows, with kubelet's checkpoint (or why it was not read) and `differences` in words."""
    found = {key: value for key, value in report.items() if key != "kubelet"} | {"differences": _on_the_bus(report)}
    try:
        if isinstance(checkpoint, Exception):
            raise checkpoint
        entries = loads(checkpoint)["Data"]
        registered = {str(name): [str(i) for i in ids or ()] for name, ids in entries["RegisteredDevices"].items()}
        handed = [
            {"pod": each["PodUID"], "container": each["ContainerName"], "resource": each["ResourceName"],
             "devices": _ids(each["DeviceIDs"])}
            for each in entries["PodDeviceEntries"] or ()
        ]  # fmt: skip
    except (OSError, PlainError, BundleError, ValueError, KeyError, TypeError, AttributeError) as error:
        found["kubelet"] = f"unknown: {error}"
        found["differences"].append(
            f"unknown whether kubelet hands out every GPU: its checkpoint was not read: {error}"
        )
        return found
    found |= {"registered": registered, "handed_out": handed}
    found["differences"] += differences(
        registered, handed, report["nvml"], report["mig"], report.get("mig_slices", "unknown")
    )
    return found


def _ids(ids: Any) -> list[str]:
    """A list until Kubernetes 1.19, then lists by NUMA node."""
    groups = ids.values() if isinstance(ids, Mapping) else [ids]
    return [str(each) for group in groups for each in group or ()]


def _on_the_bus(report: Mapping[str, Any]) -> list[str]:
    bus, nvml = report["bus"], report["nvml_bus"]
    if bus == "unknown" or nvml == "unknown":
        return [
            f"unknown whether NVML shows every GPU of the bus: {'the bus' if bus == 'unknown' else 'NVML'} was not read"
        ]
    return [f"the bus shows a GPU at {each}, NVML does not" for each in bus if each not in nvml] + [
        f"NVML shows a GPU at {each}, the bus does not" for each in nvml if each not in bus
    ]


def differences(
    registered: Mapping[str, Sequence[str]], handed: Sequence[Mapping[str, Any]], nvml: Sequence[str] | str,
    mig: Sequence[str] | str, cut: Sequence[Mapping[str, Any]] | str,
) -> list[str]:  # fmt: skip
    """Each way in which kubelet's account of the GPUs departs from what NVML shows, in words.

    `mig` are GPUs with MIG on, `cut` their slices. RegisteredDevices has what the plugin calls healthy alone. A device
    is known by its id, whatever its resource is named: "GPU-<uuid>", "MIG-<uuid>", "GPU-<uuid>::3" (a share of one);
    another plugin may count in its own names.
    """
    found = []
    ids = [each for all_ids in registered.values() for each in all_ids]
    whole = list(dict.fromkeys(each.split("::")[0] for each in ids if each.startswith("GPU-")))
    slices = list(dict.fromkeys(each.split("::")[0] for each in ids if each.startswith("MIG-")))
    named = [name for name in registered if name.startswith("nvidia.com/")]
    other = [each for name in named for each in registered[name] if not each.startswith(("GPU-", "MIG-"))]
    if isinstance(nvml, str) or isinstance(mig, str):
        found.append("unknown whether the device plugin advertises every GPU: NVML was not read")
    else:
        found += [f"the device plugin advertises {each}, NVML does not show it" for each in whole if each not in nvml]
        found += [f"the device plugin advertises {each} whole, NVML shows MIG on" for each in whole if each in mig]
        found += _slices_differ(registered, slices, [each for each in mig if each not in whole], mig, cut)
        plain = [each for each in nvml if each.startswith("GPU-") and each not in mig and each not in whole]
        if other and len(other) != len(nvml) - len(mig):
            found.append(f"the device plugin advertises {len(other)} by names of its own ({', '.join(other)}), NVML "
                         f"shows {len(nvml) - len(mig)}")  # fmt: skip
        elif plain and not other:
            whose = "as healthy" if named else "; no plugin of nvidia.com has registered with kubelet"
            found += [f"NVML shows {each}, the device plugin does not advertise it {whose}".replace(" ;", ";")
                      for each in plain]  # fmt: skip
    for each in handed:
        gone = [i for i in each["devices"] if each["resource"] in registered and i not in registered[each["resource"]]]
        found += [f"pod {each['pod']} holds {i} of {each['resource']}, which its plugin does not advertise as healthy"
                  for i in gone]  # fmt: skip
    return found


def _slices_differ(
    registered: Mapping[str, Sequence[str]], slices: Sequence[str], split: Sequence[str], mig: Sequence[str],
    cut: Sequence[Mapping[str, Any]] | str,
) -> list[str]:  # fmt: skip
    """By UUID, what the plugin advertises of MIG against NVML; `split` are GPUs that it does not advertise whole.

    Strategy "single" names slices nvidia.com/gpu, "mixed" nvidia.com/mig-PROFILE and has no resource for a part of a
    GPU instance ("1c.3g.40gb"): NVIDIA/k8s-device-plugin, internal/rm.
    """
    if not mig:
        return [f"the device plugin advertises {each}, NVML shows MIG off on every GPU" for each in slices]
    if isinstance(cut, str):
        found = [f"NVML shows MIG on on {each}, the device plugin advertises no slice" for each in split if not slices]
        return [*found, "unknown whether the device plugin advertises every MIG slice: NVML did not report each"]
    profiles = {str(one["uuid"]): str(one["profile"] or "") for one in cut}
    owner = {str(one["uuid"]): one["gpu"] for one in cut}
    found = [f"NVML shows MIG on on {each} and no instance, so no pod can use it"
             for each in split if each not in owner.values()]  # fmt: skip
    found += [f"the device plugin advertises {each}, NVML does not show it" for each in slices if each not in profiles]
    for each, profile in profiles.items():
        if each in slices or owner[each] not in split:
            continue
        part = ": it has no resource for a part of a GPU instance" if re.match(r"\d+c\.", profile) else ""
        found.append(f"NVML shows {each} ({profile or 'unknown profile'} of {owner[each]}), the device plugin does not "
                     f"advertise it as healthy{part}")  # fmt: skip
    for name, ids in registered.items():
        named = _SLICED.fullmatch(name.removesuffix(".shared"))
        for each in dict.fromkeys(i.split("::")[0] for i in ids) if named else ():
            shown = profiles.get(each, "").replace("+", ".")
            if named and shown and shown != named[1]:
                found.append(f"the device plugin advertises {each} as {name}, NVML shows it as {profiles[each]}")
    return found


def _lines(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines or ["none: what could be compared agrees"]) + "\n").encode()


def pack_bundle(hosts: Mapping[str, Files]) -> bytes:
    """The file, the same for the same content. Raises BundleError where it is too large."""
    if sum(len(data) for files in hosts.values() for data in files.values()) > MOST_BUNDLE_BYTES:
        raise BundleError(f"the bundle is larger than {MOST_BUNDLE_BYTES >> 20} MiB: name fewer nodes with --node")
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for host, files in hosts.items():
            for name, data in files.items():
                entry = tarfile.TarInfo(f"{folder_name(host)}/{name}")
                cut = data[:MOST_FILE_BYTES] if not name.startswith("recording") else data
                entry.size, entry.mode = len(cut), 0o600
                tar.addfile(entry, io.BytesIO(cut))
    return buffer.getvalue()


# A whole cluster, with what `kubectl` may do: exec into the agents' pods, read their logs, nodes and records.


def of_cluster(namespace: str, context: str | None, wanted: Sequence[str]) -> dict[str, Files]:
    """A folder per node, and `cluster`. What is refused is said in the node's `error.txt`. Raises BundleError."""
    base = ["kubectl", *(["--context", context] if context else []), "-n", namespace]
    listed = json.loads(_kubectl([*base, "get", "pods", "-l", "app.kubernetes.io/name=topoflight", "-o", "json"]))
    agents = list(listed["items"])
    placed = [pod for pod in agents if pod["spec"].get("nodeName")]
    pods = {str(pod["spec"]["nodeName"]): str(pod["metadata"]["name"]) for pod in placed}
    unknown = [name for name in wanted if name not in pods]
    if unknown:
        raise BundleError(f"no agent's pod on {', '.join(unknown)} in the namespace {namespace}")
    chosen = {node: pod for node, pod in pods.items() if not wanted or node in wanted}
    found: dict[str, Files] = {"cluster": {}}
    for kind in _TABLE["kinds"]:
        try:
            found["cluster"][f"{kind}.json"] = _json(json.loads(_kubectl([*base, "get", kind, "-o", "json"])))
        except (BundleError, ValueError) as error:
            found["cluster"][f"{kind}.json.txt"] = f"{redact(str(error))}\n".encode()
    plugins, refused = _plugins(base)
    if refused:
        found["cluster"]["plugins.txt"] = f"not listed: {redact(refused)}\n".encode()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        each = pool.map(lambda item: _node(base, item[0], item[1], plugins.get(item[0])), chosen.items())
        found |= dict(zip(chosen, each, strict=True))
    found["cluster"]["differences.txt"] = _lines([*_not_started(agents, namespace), *_against_api(found, plugins)])
    return found


def _not_started(agents: Sequence[Mapping[str, Any]], namespace: str) -> list[str]:
    """Why an agent's pod does not run, by the status that kubelet and scheduler gave it."""
    if not agents:
        return [f"there is no agent's pod in the namespace {namespace}: daemonsets.json and events.json say why"]
    lines = []
    for pod in agents:
        status = pod.get("status") or {}
        states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
        reasons = [state.get("waiting") or state.get("terminated") for state in states]
        reasons += [one for one in status.get("conditions") or ()
                    if one.get("type") == "PodScheduled" and one.get("status") == "False"]  # fmt: skip
        for one in filter(None, reasons):
            text = ": ".join(str(one[key]) for key in ("reason", "message") if one.get(key))
            where, name = pod["spec"].get("nodeName") or "no node", pod["metadata"]["name"]
            lines.append(f"{where}: the agent's pod {name} does not run: {redact(text[:500])}")
    return lines


def _plugins(base: list[str]) -> tuple[dict[str, tuple[str, str, str]], str]:
    """(namespace, pod, container) of NVIDIA's device plugin on each node, and why none could be listed."""
    found, refused = {}, ""
    for label in _TABLE["plugins"]:
        try:
            listed = json.loads(_kubectl([*base[:-2], "get", "pods", "-A", "-l", label, "-o", "json"]))
            for pod in listed["items"]:
                names = [str(each.get("name")) for each in pod["spec"].get("containers") or ()]
                container = next(filter(PLUGIN_CONTAINER.match, names), "")
                if container:
                    node = str(pod["spec"].get("nodeName"))
                    found[node] = str(pod["metadata"].get("namespace")), str(pod["metadata"]["name"]), container
        except (BundleError, ValueError, KeyError, TypeError) as error:
            refused = str(error)
    return found, refused


def _against_api(found: Mapping[str, Files], plugins: Mapping[str, Any]) -> list[str]:
    """What the API has of each node (capacity, what is healthy of it, ResourceSlices) against what NVML shows."""
    try:
        nodes = json.loads(found["cluster"]["nodes.json"])["items"]
    except (KeyError, ValueError):
        return ["unknown: the nodes could not be read"]
    slices = _slices(found["cluster"].get("resourceslices.json", b"{}"))
    differences = []
    for node in nodes:
        name, status = str(node["metadata"]["name"]), node.get("status") or {}
        if name not in found:
            continue
        capacity = {key: int(count) for key, count in (status.get("capacity") or {}).items()
                    if key.startswith("nvidia.com/") and str(count).isdigit()}  # fmt: skip
        healthy = status.get("allocatable") or {}
        for key, count in capacity.items():
            if str(healthy.get(key, "")).isdigit() and int(healthy[key]) < count:
                differences.append(
                    f"{name}: {count - int(healthy[key])} of {count} {key} unhealthy, by the device plugin "
                    f"(allocatable {healthy[key]})"
                )
        here = json.loads(found[name].get("devices.json", b"{}"))
        nvml, mig, cut = here.get("nvml"), here.get("mig"), here.get("mig_slices", [])
        if not isinstance(nvml, list) or not isinstance(mig, list) or not isinstance(cut, list):
            continue
        shown = [*(each for each in nvml if each not in mig), *(one["uuid"] for one in cut)]
        labels = node["metadata"].get("labels") or {}
        counted = {key: count / _replicas(labels, key) for key, count in capacity.items()
                   if key.removesuffix(".shared") == "nvidia.com/gpu" or _SLICED.match(key)}  # fmt: skip
        whole, names = sum(counted.values()), " and ".join(counted) or "nvidia.com/gpu"
        has = f"{len(shown)}" if not mig else f"{len(shown) - len(cut)} whole and {len(cut)} MIG slices"
        if name in slices:
            differences += [
                f"{name}: NVML shows {each}, no ResourceSlice has it" for each in shown if each not in slices[name]
            ]
            differences += [f"{name}: a ResourceSlice has {each}, NVML does not show it"
                            for each in slices[name] if each not in shown]  # fmt: skip
        elif shown and not capacity:
            plugin = "" if name in plugins else ", no plugin was found"
            differences.append(f"{name}: the node offers no nvidia.com/gpu{plugin}; NVML shows {has}")
        elif whole != len(shown):
            differences.append(f"{name}: capacity {names} is {whole:g}, NVML shows {has}")
    return differences


def _replicas(labels: Mapping[str, Any], resource: str) -> int:
    """How often a device is shared, by the label that gpu-feature-discovery gives the node."""
    replicas = str(labels.get(f"{resource.removesuffix('.shared')}.replicas", "1"))
    return max(int(replicas), 1) if replicas.isdigit() else 1


def _slices(content: bytes) -> dict[str, list[str]]:
    """UUIDs of GPUs and MIG slices by node, as a DRA driver publishes them: resource.k8s.io v1; v1beta1 in `basic`."""
    found: dict[str, list[str]] = {}
    for each in json.loads(content).get("items") or ():
        spec = each.get("spec") or {}
        if spec.get("driver") == "gpu.nvidia.com" and spec.get("nodeName"):
            for device in spec.get("devices") or ():
                attributes = (device.get("basic") or device).get("attributes") or {}
                uuid = str((attributes.get("uuid") or {}).get("string") or "")
                if uuid.startswith(("GPU-", "MIG-")):
                    found.setdefault(str(spec["nodeName"]), []).append(uuid)
    return found


def _node(base: list[str], node: str, pod: str, plugin: tuple[str, str, str] | None) -> Files:
    files: Files = {}
    try:
        inside = unpack_bundle(_kubectl([*base, "exec", pod, "--", "topoflight", "bundle", "-f", "-"]))
        files |= next(iter(inside.values()), {})
    except BundleError as error:
        files["error.txt"] = f"{node}: {redact(str(error))}\n".encode()
    files["log.txt"] = _log([*base, "logs", pod])
    if plugin is not None:
        # The agent mounts nothing of the host; the plugin's pod has kubelet's folder, since it registers there.
        there = [*base[:-2], "-n", plugin[0]]
        files["plugin-log.txt"] = _log([*there, "logs", plugin[1], "-c", plugin[2]])
        report = json.loads(files.get("devices.json", b"{}"))
        if "registered" not in report and "nvml" in report:
            try:
                words = [*there, "exec", plugin[1], "-c", plugin[2], "--", "cat", f"/{CHECKPOINT}"]
                text = _kubectl(words).decode(errors="replace")
                report = compared(report, text)
            except BundleError as error:
                report = compared(report, error)
        marked = dict.fromkeys(UNHEALTHY.findall(files["plugin-log.txt"].decode(errors="replace")))
        if "nvml" in report:
            report["differences"] += [f"the device plugin's log has {each} marked unhealthy" for each in marked]
            files |= _account(report)
    return files


def _log(words: list[str]) -> bytes:
    try:
        log = _kubectl([*words, f"--tail={LOG_LINES}", f"--limit-bytes={MOST_FILE_BYTES}"])
    except BundleError as error:
        return f"not read: {redact(str(error))}\n".encode()
    return redact(log.decode(errors="replace")).encode()


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
