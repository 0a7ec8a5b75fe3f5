"""Clients of the agent's HTTP server: one scraper's latencies, many keep-alive clients, a crowd of costly questions.

The clients are one process without an HTTP library: sockets in one epoll, each request one write, each answer read to
the length it names. They share the machine's cores with the server. tests/load holds the server against node_exporter's
figures, taken in turns, and against its own without a crowd.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection

CLIENTS = 100
ASKERS = 200  # of costly questions, from several addresses: one address has fewer connections
PER_ADDRESS = 50
COSTLY = "/recommendations?model=Llama-3.1-405B&nodes=64&lora_rank={}&sequence_length={}"
LONGEST_SECONDS = 120.0  # for the least number of answers
BLOCK = 50  # scrapes of one server before it is the other's turn, so that both see the same machine
_HEAD = re.compile(rb"HTTP/1\.1 (\d+) .*?\r\ncontent-length: (\d+)\r\n", re.IGNORECASE | re.DOTALL)
_CHUNKED = re.compile(rb"transfer-encoding: chunked", re.IGNORECASE)
SCRAPER = "Accept: text/plain;version=0.0.4\r\nAccept-Encoding: gzip\r\nUser-Agent: Prometheus\r\n"


@dataclass
class Load:
    """What many clients saw."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    errors: int = 0

    @property
    def per_second(self) -> float:
        """Answers 200 a second."""
        return self.statuses[200] / self.seconds if self.seconds else 0.0


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
        one.ask()
        while (status := one.take()) is None:
            pass
        found.append(time.perf_counter() - began)
        if status != 200:
            raise RuntimeError(f"{path}: {status}")
    return found


def load(port: int, path: str, *, clients: int = CLIENTS, seconds: float = 10.0, least: int = 0) -> Load:
    """As many answers as `clients` get that always wait for one; beyond `seconds` until `least` are there."""
    found, poll = Load(), select.epoll()
    everyone = {}
    for _ in range(clients):
        one = Client(port, path)
        everyone[one.socket.fileno()] = one
        poll.register(one.socket, select.EPOLLIN)
    began = time.perf_counter()
    for one in everyone.values():
        one.ask()
    while everyone and ((now := time.perf_counter()) < began + seconds or found.statuses.total() < least):
        if now > began + seconds + LONGEST_SECONDS:
            raise TimeoutError(f"{path}: {found.statuses.total()} answers in {now - began:.0f} s")
        for descriptor, _ in poll.poll(1.0):
            one = everyone[descriptor]
            try:
                status = one.take()
                if status is not None:
                    found.statuses[status] += 1
                    one.ask()
            except OSError:
                found.errors += 1
                poll.unregister(descriptor)
                one.socket.close()
                del everyone[descriptor]
    found.seconds = time.perf_counter() - began
    for one in everyone.values():
        one.socket.close()
    poll.close()
    return found


@contextlib.contextmanager
def background_load(port: int, clients: int = ASKERS) -> Iterator[Counter[int]]:
    """Costly questions for the length of the block, each another one; how many answers of each status there were.

    The clients are a process of their own, as they would be on other machines.
    """
    ours, theirs = Pipe()
    crowd = Process(target=_crowd, args=(port, clients, theirs), daemon=True)
    crowd.start()
    found: Counter[int] = Counter()
    ours.recv()  # the first have asked
    try:
        yield found
    finally:
        ours.send("enough")
        found.update(ours.recv())
        crowd.join()


def _crowd(port: int, clients: int, pipe: Connection) -> None:
    poll, everyone, numbers, found = select.epoll(), dict[int, Client](), itertools.count(), Counter[int]()

    def again(one: Client) -> None:
        path = COSTLY.format(1 + (number := next(numbers)) % 4096, 2048 + number)
        one.request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        one.ask()

    for number in range(clients):
        one = Client(port, "/", source=f"127.0.0.{2 + number // PER_ADDRESS}")
        everyone[one.socket.fileno()] = one
        poll.register(one.socket, select.EPOLLIN)
        again(one)
    pipe.send("asked")
    while not pipe.poll(0):
        for descriptor, _ in poll.poll(0.1):
            one = everyone[descriptor]
            try:
                if (status := one.take()) is not None:
                    found[status] += 1
                    again(one)
            except OSError:
                found[0] += 1
                poll.unregister(descriptor)
    pipe.send(found)


def side_by_side(ports: Sequence[int], scrapes: int) -> list[list[float]]:
    """Latencies of /metrics of several servers, taken in turns."""
    clients = [Client(port, "/metrics") for port in ports]
    found: list[list[float]] = [[] for _ in ports]
    for _ in range(max(1, scrapes // BLOCK)):
        for index, port in enumerate(ports):
            found[index] += latencies(port, "/metrics", min(BLOCK, scrapes), clients[index])
    for one in clients:
        one.socket.close()
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all stays below."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
