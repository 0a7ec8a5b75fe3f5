"""The verb bundle: one file with each host's recording and the agent's files, without secrets, for support.

It is a zip archive with a folder per host. `--host FILE` replays its recordings. Nothing is uploaded.
"""

from __future__ import annotations

import io
import json
import platform
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from agent.base import raise_as, units, version
from agent.base.options import InputError, command
from agent.base.output import Progress, print_text, to_document, write_result
from agent.checks.findings import sort_worst_first
from agent.checks.view import build_view
from contracts import bounded
from contracts.plain import loads
from contracts.redaction import redact, without_secrets
from contracts.tables import read_table
from probes.api import Snapshot
from probes.registry import ALL
from probes.scanner import Scanner, dumps

Files = dict[str, bytes]
MAX_FILE_BYTES = 8 << 20  # a recording takes about 1 MiB
MAX_BUNDLE_BYTES = 512 << 20  # of an unpacked bundle
LOG_LINES = 2000
NODE_SECONDS = 180
AT_ONCE = 8
_TABLE = read_table(__file__, "bundle.toml")


class BundleError(RuntimeError):
    """The bundle could not be created; the message says what to do."""


@command("bundle")
def bundle(
    root: str, target: str, state: Path, cluster: bool, nodes: tuple[str, ...], namespace: str, context: str | None
) -> None:
    """Collect the files of the hosts and write them into one archive."""
    if cluster:
        Progress().step("bundle: asking the agents")
        hosts = collect_cluster(namespace, context, nodes)
    else:
        with Scanner(root, probes=ALL) as scanner:
            snapshot, recording = scanner.capture()
        hosts = {snapshot.hostname: collect_host(snapshot, recording, state=state)}
    content = pack_bundle(hosts)
    if target == "-":
        sys.stdout.buffer.write(content)
        return
    write_result(Path(target), content, 0o600)
    failed = [name for name, files in hosts.items() if "error.txt" in files]
    written = f"{len(content)} bytes from {units.count(len(hosts.keys() - {'cluster', *failed}), 'host')}"
    print_text(f"{target}: {written}{units.some(failed, '; no answer from ')}. Read it before you send it.", err=True)
    if set(hosts) == {"cluster"}:
        print_text(f"no agent's pod runs in the namespace {namespace}; see daemonsets.json and events.json", err=True)


def collect_host(snapshot: Snapshot, recording: dict[str, Any], *, state: Path) -> Files:
    """Return the files of this host, by name in its folder."""
    checks = sort_worst_first(build_view((snapshot,)).checks)
    files: Files = {
        "recording.json": dumps(without_secrets(recording)).encode(),
        "findings.json": _dump_json(to_document([check for check in checks if check.status != "pass"])),
        "versions.json": _dump_json({"topoflight": version(), "python": platform.python_version(), "at": time.time(),
                                "packages": dict(_list_versions())}),
    }  # fmt: skip
    for path in sorted([*state.glob("*.json"), *state.glob("runs/*.json")])[:128]:
        files |= _make_document(f"state/{path.relative_to(state).as_posix()}", partial(_read, path))
    return files


def _dump_json(value: Any) -> bytes:
    return (json.dumps(without_secrets(value), indent=1) + "\n").encode()


def _list_versions() -> Iterator[tuple[str, str]]:
    for name in _TABLE["packages"]:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _read(path: Path) -> Any:
    return loads(bounded.read_text(path, MAX_FILE_BYTES), unknown_numbers=True)


def _make_document(name: str, make: Callable[[], Any]) -> Files:
    """Return a JSON document under this name; if it cannot be created, a file with the reason."""
    try:
        return {name: _dump_json(make())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BundleError) as error:
        return {f"{name}.txt": f"not read: {redact(str(error))}\n".encode()}


def pack_bundle(hosts: Mapping[str, Files]) -> bytes:
    """Create the archive; equal content gives an identical file. Raises BundleError if it is too large."""
    if sum(len(data) for files in hosts.values() for data in files.values()) > MAX_BUNDLE_BYTES:
        raise BundleError(f"the bundle is larger than {MAX_BUNDLE_BYTES >> 20} MiB: name fewer nodes with --node")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for host, files in hosts.items():
            for name, data in files.items():
                entry = zipfile.ZipInfo(f"{name_folder(host)}/{name}")  # without a modification time
                entry.external_attr = 0o600 << 16
                cut = data[:MAX_FILE_BYTES] if not name.startswith("recording") else data
                archive.writestr(entry, cut, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def name_folder(host: str) -> str:
    """Return the folder of a host in a bundle."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "host"


def unpack_bundle(content: bytes) -> dict[str, Files]:
    """Read the files of a bundle, by host. Raises BundleError."""
    hosts: dict[str, Files] = {}
    with raise_as(BundleError, (bounded.ArchiveError, bounded.TooLargeError), "not a bundle: "):
        files = bounded.zip_files(content, MAX_BUNDLE_BYTES, MAX_BUNDLE_BYTES, lambda path: ".." not in path)
        for path, data in files:
            host, _, name = path.partition("/")
            if name:
                hosts.setdefault(name_folder(host), {})[name] = data
    return hosts


# A whole cluster, through `kubectl`: exec into the agents' pods, read their logs, nodes and records.


def collect_cluster(namespace: str, context: str | None, nodes: Sequence[str]) -> dict[str, Files]:
    """Return a folder per node, and `cluster`. Errors are written to the node's `error.txt`. Raises BundleError."""
    base = ["kubectl", *(["--context", context] if context else []), "-n", namespace]
    agents = _list_objects([*base, "get", "pods", "-l", "app.kubernetes.io/name=topoflight"])["items"]
    pods = {str(pod["spec"]["nodeName"]): str(pod["metadata"]["name"]) for pod in agents if pod["spec"].get("nodeName")}
    if unknown := [name for name in nodes if name not in pods]:
        seen = units.some([*pods], ", but on ")
        raise InputError(f"--node {units.some(unknown)}: no agent's pod runs there in namespace {namespace}{seen}")
    selected = {node: pod for node, pod in pods.items() if not nodes or node in nodes}
    hosts: dict[str, Files] = {"cluster": {}}
    for kind in _TABLE["kinds"]:
        hosts["cluster"] |= _make_document(f"{kind}.json", partial(_list_objects, [*base, "get", kind]))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        each = pool.map(partial(_collect_node, base), selected, selected.values())
        hosts |= dict(zip(selected, each, strict=True))
    return hosts


def _collect_node(base: list[str], node: str, pod: str) -> Files:
    try:
        inside = unpack_bundle(_run_kubectl([*base, "exec", pod, "--", "topoflight", "bundle", "-f", "-"]))
        files = next(iter(inside.values()), {})
    except BundleError as error:
        files = {"error.txt": f"{node}: {redact(str(error))}\n".encode()}
    try:
        log = _run_kubectl([*base, "logs", pod, f"--tail={LOG_LINES}", f"--limit-bytes={MAX_FILE_BYTES}"])
    except BundleError as error:
        log = f"not read: {error}\n".encode()
    return {**files, "log.txt": redact(log.decode(errors="replace")).encode()}


def _list_objects(command: Sequence[str]) -> Any:
    return json.loads(_run_kubectl([*command, "-o", "json"]))


def _run_kubectl(command: Iterable[str]) -> bytes:
    with raise_as(BundleError, (OSError, subprocess.TimeoutExpired), "kubectl: "):
        done = subprocess.run(list(command), capture_output=True, timeout=NODE_SECONDS, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip()[-500:]
        raise BundleError(last or f"kubectl ended with {done.returncode}")
    return done.stdout
