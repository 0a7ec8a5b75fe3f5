"""What the tests of load share apart from fixtures: a running agent, and whether honest clients are served."""

import contextlib
import socket
import time
from pathlib import Path

import psutil
import resident
from rigs.recorded import path_of

H100 = path_of(resident.MACHINE)


class Served:
    """A running agent."""

    def __init__(self, pid: int, port: int, log: Path | None = None) -> None:
        self.pid, self.port, self.log = pid, port, log

    def honest(self) -> None:
        """What a scraper and the kubelet ask is answered."""
        for path in ("/healthz", "/readyz", "/metrics"):
            assert resident.get(self.port, path)[0] == 200, path

    def descriptors(self) -> int:
        """How many it has open."""
        return psutil.Process(self.pid).num_fds()

    def lowest_free_descriptor(self) -> int:
        """The number its next descriptor may get: the lowest that was free at some moment of a scan's length."""
        seen = []
        for _ in range(24):
            taken = {int(one.name) for one in Path(f"/proc/{self.pid}/fd").iterdir()}
            seen.append(min(set(range(len(taken) + 1)) - taken))
            time.sleep(0.05)
        return min(seen)


def connect(port: int, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """A connection from an address of the loopback, on which these bytes were sent."""
    one = socket.create_connection(("127.0.0.1", port), timeout=120, source_address=(source, 0))
    with contextlib.suppress(OSError):
        one.sendall(sent)
    return one


def connect_deaf(port: int, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """A connection of a client that takes few bytes and waits for none; not all of `sent` may be gone."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.bind((source, 0))
    one.connect(("127.0.0.1", port))
    one.setblocking(False)
    with contextlib.suppress(OSError):
        one.sendall(sent)
    return one


def get_of(path: str, *headers: str) -> bytes:
    """A request for the path."""
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", "")).encode()


def read(one: socket.socket, end: bytes | None = None) -> bytes:
    """All that comes until the server closes, or until these bytes have come."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while (end is None or end not in got) and (piece := one.recv(65536)):
            got += piece
    return got
