"""Start the agent or node_exporter on a recorded machine, and measure their processes.

The real probes read the recording: /proc and /sys are files below a root folder, and the GPUs are read through an NVML
library of the tests that returns the recorded values. Memory and CPU are read from /proc (Linux proc(5)).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MACHINE = "hgx-h100-8xH100-8hca"
EXPORTER = "prometheus-node-exporter"
MIB = 1 << 20
_HEAD = re.compile(rb"HTTP/1\.1 (\d+) .*?\r\ncontent-length: (\d+)\r\n", re.IGNORECASE | re.DOTALL)
_CHUNKED = re.compile(rb"transfer-encoding: chunked", re.IGNORECASE)
SCRAPER = "Accept: text/plain;version=0.0.4\r\nAccept-Encoding: gzip\r\nUser-Agent: Prometheus\r\n"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """MiB of a process and its children. RSS counts shared pages in each process, PSS divides them among processes."""

    resident: float
    children: float
    pss: float
    descriptors: int

    @property
    def both(self) -> float:
        """Sum of the resident set sizes."""
        return self.resident + self.children


def restore(folder: Path, machine: str = MACHINE) -> tuple[str, dict[str, str]]:
    """Write the files of the recorded machine below `folder`. Return (root folder, environment)."""
    sys.path.insert(0, str(ROOT / "tests" / "fakes" / "nvml"))
    import nvml_profile

    answers = json.loads((ROOT / "tests" / "machines" / f"{machine}.json").read_text(encoding="utf-8"))["answers"]
    nvml_profile.build(folder)
    (folder / "profile").write_text(nvml_profile.profile(answers["nvml"]), encoding="utf-8")
    nvml_profile.restore_files(answers, folder / "root")
    return str(folder / "root"), {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML_PROFILE": str(folder / "profile")}


def free_port() -> int:
    """Return a free loopback port below the ephemeral ports, which Linux could assign to another process meanwhile."""
    below = range(10_000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    for port in (*random.SystemRandom().sample(below, min(99, len(below))), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("no port of the loopback is free")


@contextlib.contextmanager
def process(command: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None) -> Iterator[
    subprocess.Popen[bytes]
]:  # fmt: skip
    """Run a command for the duration of the block. Its output goes to `log`, or is discarded."""
    with (log or Path(os.devnull)).open("ab") as out:
        child = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {}), stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def agent(folder: Path, *extra: str, environment: Mapping[str, str] | None = None) -> Iterator[tuple[int, int, float]]:
    """Run `topoflight serve` on the machine in `folder`. Yield (pid, port, seconds to /readyz)."""
    port = free_port()
    serve = ["-m", "agent.cli", "serve", "--port", str(port), "--state", str(folder / "state"), *extra]
    began = time.perf_counter()
    with process([sys.executable, *serve], environment, folder / "log") as server:
        wait(port, "/readyz", server)
        yield server.pid, port, time.perf_counter() - began


@contextlib.contextmanager
def exporter() -> Iterator[tuple[int, int]]:
    """Run Debian's node_exporter. Yield (pid, port). Raises FileNotFoundError if it is not installed."""
    if shutil.which(EXPORTER) is None:
        raise FileNotFoundError(f"{EXPORTER} is not installed: apt-get install {EXPORTER}")
    port = free_port()
    with process([EXPORTER, f"--web.listen-address=127.0.0.1:{port}"]) as server:
        wait(port, "/metrics", server)
        yield server.pid, port


def wait(port: int, path: str, server: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Wait until a request to `path` returns status 200."""
    until, last = time.monotonic() + seconds, (0, b"")
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"{server.args!r} ended with {server.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            last = get(port, path)
            if last[0] == 200:
                return
        time.sleep(0.01)
    raise TimeoutError(f"port {port} {path}: no answer 200 in {seconds:.0f} s; the last is {last}")


def get(port: int, path: str) -> tuple[int, bytes]:
    """Send one GET request on a new connection. Return (status, body)."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=90)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def memory(pid: int) -> Memory:
    """Measure the memory of a process and its descendants."""
    first, *children = family(pid)
    return Memory(
        resident=first.memory_info().rss / MIB,
        children=sum(child.memory_info().rss for child in children) / MIB,
        pss=sum(member.memory_full_info().pss for member in (first, *children)) / MIB,
        descriptors=sum(member.num_fds() for member in (first, *children)),
    )


def cpu_seconds(pid: int) -> float:
    """Return the user and system time that a process and its descendants have used."""
    return sum(sum(member.cpu_times()[:2]) for member in family(pid))


class Client:
    """A keep-alive connection that repeats one request, without the overhead of an HTTP library.

    Each request is one write. Each response is read up to its Content-Length.
    """

    def __init__(self, port: int, path: str, headers: str = SCRAPER, source: str = "127.0.0.1") -> None:
        self.request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{headers}\r\n".encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=90, source_address=(source, 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left, self._status, self._head = 0, 0, b""

    def send(self) -> None:
        """Send the request."""
        self._left, self._head = -1, b""
        self.socket.sendall(self.request)

    def receive(self) -> int | None:
        """Read once. Return the status if the response is complete, else None. Raises ConnectionError if closed."""
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise ConnectionError("closed")
        if self._left >= 0:
            self._left -= len(piece)
        else:
            self._head += piece
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return None
            match = _HEAD.match(self._head[: end + 2])
            if match is None:
                return self._chunked(end)
            self._status, self._left = int(match[1]), int(match[2]) - (len(self._head) - end - 4)
        return self._status if self._left == 0 else None

    def fetch(self) -> int:
        """Send the request, read the complete response and return its status."""
        self.send()
        while (status := self.receive()) is None:
            pass
        return status

    def _chunked(self, end: int) -> int | None:
        """Return the status after the last, empty chunk. node_exporter sends long responses in chunks."""
        if not _CHUNKED.search(self._head[:end]):
            raise ConnectionError("neither a length nor chunks")
        return int(self._head[9:12]) if self._head.endswith(b"\r\n0\r\n\r\n") else None


def latencies(port: int, path: str, scrapes: int, client: Client | None = None) -> list[float]:
    """Return the seconds of each of `scrapes` requests on one connection."""
    connection, times = client or Client(port, path), []
    for _ in range(scrapes):
        began = time.perf_counter()
        status = connection.fetch()
        times.append(time.perf_counter() - began)
        if status != 200:
            raise RuntimeError(f"{path}: {status}")
    return times
