"""A client of the agent's HTTP server without an HTTP library, and the latencies that it sees.

Each request is one write, each answer is read to the length it names. tests/load/crowds.py makes many of it.
"""

from __future__ import annotations

import re
import socket
import time

_HEAD = re.compile(rb"HTTP/1\.1 (\d+) .*?\r\ncontent-length: (\d+)\r\n", re.IGNORECASE | re.DOTALL)
_CHUNKED = re.compile(rb"transfer-encoding: chunked", re.IGNORECASE)
SCRAPER = "Accept: text/plain;version=0.0.4\r\nAccept-Encoding: gzip\r\nUser-Agent: Prometheus\r\n"


class Client:
    """One keep-alive connection that asks the same again and again."""

    def __init__(self, port: int, path: str, headers: str = SCRAPER, source: str = "127.0.0.1") -> None:
        self.request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{headers}\r\n".encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=90, source_address=(source, 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left, self._status, self._head = 0, 0, b""

    def ask(self) -> None:
        """Send the request; an answer is then awaited."""
        self._left, self._head = -1, b""
        self.socket.sendall(self.request)

    def take(self) -> int | None:
        """Read once; the status where the answer is whole. ConnectionError where it was cut."""
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
            found = _HEAD.match(self._head[: end + 2])
            if found is None:
                return self._chunked(end)
            self._status, self._left = int(found[1]), int(found[2]) - (len(self._head) - end - 4)
        return self._status if self._left == 0 else None

    def fetch(self) -> int:
        """Send the request and read the whole answer; its status."""
        self.ask()
        while (status := self.take()) is None:
            pass
        return status

    def _chunked(self, end: int) -> int | None:
        """node_exporter sends its longer answers so; the last chunk is empty."""
        if not _CHUNKED.search(self._head[:end]):
            raise ConnectionError("neither a length nor chunks")
        return int(self._head[9:12]) if self._head.endswith(b"\r\n0\r\n\r\n") else None


def latencies(port: int, path: str, scrapes: int, client: Client | None = None) -> list[float]:
    """Seconds of each of `scrapes` on one connection."""
    one, found = client or Client(port, path), []
    for _ in range(scrapes):
        began = time.perf_counter()
        status = one.fetch()
        found.append(time.perf_counter() - began)
        if status != 200:
            raise RuntimeError(f"{path}: {status}")
    return found
