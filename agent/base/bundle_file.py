"""The file that `topoflight bundle` writes: a gzipped tar with a folder of files for each host."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Mapping

from contracts import bounded

Files = dict[str, bytes]
MOST_FILE_BYTES = 8 << 20  # a recording takes about 1 MiB
MOST_BYTES = 512 << 20  # of a bundle, unpacked


class BundleError(RuntimeError):
    """Why no bundle came; the message says what to do."""


def brief(hosts: Mapping[str, Files], most: int = 10) -> list[str]:
    """What kubelet, device plugins, NVML and the bus disagree on, a line each with its host; the rest is counted."""
    found = []
    for host, files in hosts.items():
        lines = files.get("differences.txt", b"").decode(errors="replace").splitlines()
        known = [line for line in lines if not line.startswith(("none:", "unknown"))]
        found += [line if host == "cluster" else f"{host}: {line}" for line in known]
    rest = [f"and {len(found) - most} more: differences.txt of each folder"] if len(found) > most else []
    return found[:most] + rest


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


def unpacked(content: bytes, wanted: str = "") -> dict[str, Files]:
    """Read the files of a bundle, by host: all of them, or the one named `wanted` of each. Raises BundleError."""

    def is_wanted(path: str) -> bool:
        name = path.partition("/")[2]
        return bool(name) and ".." not in name and wanted in ("", name)

    found: dict[str, Files] = {}
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            for path, data in bounded.tar_files(stream, MOST_BYTES, MOST_BYTES, is_wanted):
                host, _, name = path.partition("/")
                found.setdefault(_named(host), {})[name] = data
    except (tarfile.TarError, bounded.TooLargeError, EOFError, OSError, zlib.error) as error:
        raise BundleError(f"not a bundle: {error}") from None
    return found
