"""What-ifs that cost much: few at once, some waiting, dropped when the client leaves or it takes too long."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import resident
from load_served import Served
from starlette.requests import Request

from agent.desk import AT_ONCE, MOST_WAITING, Desk
from agent.problem import ProblemError

COSTLY = "/recommendations?model=Llama-3.1-405B&nodes=60000&global_batch=%d"  # tens of seconds of computing


def ask(served: Served, number: int) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    one.sendall(f"GET {COSTLY % number} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return one


def busy(served: Served, seconds: float = 0.5) -> float:
    """The share of a core that the agent takes now."""
    agent = psutil.Process(served.pid)
    before, began = sum(agent.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    return float(sum(agent.cpu_times()[:2]) - before) / (time.monotonic() - began)


@pytest.fixture
def crowd(served: Served, eventually: Callable[..., None]) -> Iterator[list[socket.socket]]:
    """As many costly questions as are taken; gone afterwards."""
    asked = [ask(served, 1000 + number) for number in range(AT_ONCE + MOST_WAITING)]
    eventually(lambda: refused(served), "every place is taken")
    yield asked
    for one in asked:
        one.close()
    eventually(lambda: not refused(served), "the places are free again")


def refused(served: Served) -> bool:
    return resident.get(served.port, "/recommendations?model=Llama-3.1-8B&nodes=2")[0] == 503


def test_one_more_is_told_to_come_back_and_others_are_served(served: Served, crowd: list[socket.socket]) -> None:
    """503 with Retry-After as a problem document; scrapes and probes do not wait behind questions."""
    with ask(served, 1) as one:
        answer = one.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5" in answer.lower()
    assert b"application/problem+json" in answer
    served.honest()


def test_who_leaves_stops_the_computing(
    served: Served, crowd: list[socket.socket], eventually: Callable[..., None]
) -> None:
    """Those at work and those that wait; afterwards a question is answered and the process rests."""
    for one in crowd:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)  # not one of them is answered: they are costly
        one.close()
    eventually(lambda: not refused(served), "a place is free")
    eventually(lambda: busy(served) < 0.5, "nothing is computed that nobody waits for", seconds=20)


def test_the_next_in_line_is_answered_when_one_leaves(served: Served, eventually: Callable[..., None]) -> None:
    """A cheap question behind costly ones waits for a slot, not for their end."""
    working = [ask(served, 2000 + number) for number in range(AT_ONCE)]
    eventually(lambda: busy(served) > 0.3, "they are being computed")
    waiting = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    waiting.sendall(b"GET /recommendations?model=Llama-3.1-8B&nodes=3 HTTP/1.1\r\nHost: x\r\n\r\n")
    waiting.settimeout(0.5)
    with pytest.raises(TimeoutError):
        waiting.recv(1)
    working[0].close()
    waiting.settimeout(60)
    assert waiting.recv(15) == b"HTTP/1.1 200 OK"
    for one in (*working, waiting):
        one.close()


def request_of(gone: asyncio.Event) -> Request:
    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "GET", "path": "/", "headers": []}, receive)


def spin() -> None:
    while True:
        sum(range(1000))


def test_a_question_that_takes_too_long_is_ended() -> None:
    """503 says so, and its thread is gone before the next one is let in."""

    async def drive() -> None:
        desk = Desk(at_once=1, longest_seconds=0.2)
        with pytest.raises(ProblemError, match="longer than"):
            await desk.ask(request_of(asyncio.Event()), spin)
        assert (desk.present, desk.running, desk.dropped) == (0, 0, 1)
        assert not [thread for thread in threading.enumerate() if thread.name == "question"]
        assert await desk.ask(request_of(asyncio.Event()), lambda: 7) == 7

    asyncio.run(drive())


def test_an_error_in_a_question_is_the_askers() -> None:
    """And frees the slot."""

    async def drive() -> None:
        desk = Desk(at_once=1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await desk.ask(request_of(asyncio.Event()), lambda: 1 / 0)
        assert desk.present == 0

    asyncio.run(drive())


def test_leaving_at_random_moments_loses_no_slot() -> None:
    """Before, during and after the work, 200 times: every slot comes back, no thread stays."""

    async def one(desk: Desk, number: int) -> None:
        gone = asyncio.Event()
        asyncio.get_running_loop().call_later(number % 17 / 1000, gone.set)
        try:
            await desk.ask(request_of(gone), lambda: time.sleep(number % 7 / 1000) or sum(range(number * 50)))
        except ProblemError as error:
            assert error.status == 503

    async def drive() -> None:
        desk = Desk(at_once=2, most_waiting=1000)
        await asyncio.gather(*(one(desk, number) for number in range(200)))
        assert (desk.present, desk.running) == (0, 0)
        assert await desk.ask(request_of(asyncio.Event()), lambda: "still here") == "still here"

    asyncio.run(drive())
    for thread in threading.enumerate():
        if thread.name == "question":
            thread.join(30)  # one that has just answered may still be on its way out
            assert not thread.is_alive()
