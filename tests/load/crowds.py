"""Many keep-alive clients, a crowd of costly questions, and two servers side by side, on the server's own cores."""

from __future__ import annotations

import contextlib
import itertools
import select
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection

from resident import Client, latencies

CLIENTS = 100
ASKERS = 200  # of costly questions, from several addresses: one address has fewer connections
PER_ADDRESS = 50
COSTLY = "/recommendations?model=Llama-3.1-405B&nodes=64&lora_rank={}&sequence_length={}"
BLOCK = 50  # scrapes of one server before it is the other's turn, so that both see the same machine


def load(port: int, path: str, *, clients: int = CLIENTS, seconds: float, least: int) -> Counter[int]:
    """How many answers of each status so many clients get that always wait for one: for so long, and each so many."""
    end = time.monotonic() + seconds

    def ask(one: Client) -> list[int]:
        found: list[int] = []
        while time.monotonic() < end or len(found) < least:
            found.append(one.fetch())
        one.socket.close()
        return found

    with ThreadPoolExecutor(clients) as pool:
        everyone = [Client(port, path) for _ in range(clients)]
        return Counter(status for found in pool.map(ask, everyone) for status in found)


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
