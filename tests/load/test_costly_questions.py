"""What-ifs that cost much: few at once, some waiting, dropped when the client leaves or it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import resident
from load_served import H100, Served
from starlette.requests import Request

from agent.http.desk import AT_ONCE, MOST_WAITING, Desk
from agent.http.problem import ProblemError

AGENT = """
import sys
from pathlib import Path
from fastapi import Request
from agent import advise
from agent.cli import serve as cmd_serve
from agent.http.desk import Desk
from agent.cli.hosts import snapshots
from agent.http.server import create
from agent.http.state import State
desk, state = Desk(longest_seconds=3600), State(lambda: snapshots((Path(sys.argv[2]),)), interval_seconds=3600)
app = create(state, desk=desk)
@app.get("/endless")
async def endless(request: Request):
    def plan():
        while True:
            advise.for_view(state.view, advise.Request(model="Llama-3.1-405B", nodes=60000))
    return await desk.ask(request, plan)
@app.get("/taken")
async def taken():
    return [desk.present, desk.running]
cmd_serve.listen(app, "127.0.0.1", int(sys.argv[1]))
"""
CHEAP = b"GET /recommendations?model=Llama-3.1-8B&nodes=3 HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One with two doors more: a question that the planner answers again and again, and who is at the desk."""
    port, log = resident.free_port(), tmp_path_factory.mktemp("agent") / "log"
    with resident.process([sys.executable, "-c", AGENT, str(port), str(H100)], log=log) as one:
        resident.wait(port, "/readyz", one)
        yield Served(one.pid, port, log)


def ask(agent: Served, request: bytes = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", agent.port), timeout=120)
    one.sendall(request)
    return one


def taken(agent: Served) -> tuple[int, int]:
    """How many questions are at the desk, and how many of them are being computed."""
    present, running = json.loads(resident.get(agent.port, "/taken")[1])
    return present, running


def busy(agent: Served, seconds: float = 0.5) -> float:
    """The share of a core that the agent takes now."""
    process = psutil.Process(agent.pid)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    return float(sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)


@pytest.fixture
def crowd(agent: Served, eventually: Callable[..., None]) -> Iterator[list[socket.socket]]:
    """As many endless questions as are taken; gone afterwards."""
    asked = [ask(agent) for _ in range(AT_ONCE + MOST_WAITING)]
    eventually(lambda: taken(agent) == (AT_ONCE + MOST_WAITING, AT_ONCE), "every place is taken")
    yield asked
    for one in asked:
        one.close()
    eventually(lambda: taken(agent) == (0, 0), "the places are free again")


def test_one_more_is_told_to_come_back_and_others_are_served(agent: Served, crowd: list[socket.socket]) -> None:
    """503 with Retry-After as a problem document; scrapes and probes do not wait behind questions."""
    with ask(agent, CHEAP) as one:
        answer = one.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5" in answer.lower()
    assert b"application/problem+json" in answer
    agent.honest()


def test_who_leaves_stops_the_computing(
    agent: Served, crowd: list[socket.socket], eventually: Callable[..., None]
) -> None:
    """Those at work and those that wait; afterwards a question is answered and the process rests."""
    for one in crowd:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)  # not one of them is answered: they have no end
        one.close()
    eventually(lambda: taken(agent) == (0, 0), "nobody is at the desk")
    eventually(lambda: busy(agent) < 0.5, "nothing is computed that nobody waits for")
    assert resident.get(agent.port, "/recommendations?model=Llama-3.1-8B&nodes=2")[0] == 200


def test_the_next_in_line_is_answered_when_one_leaves(agent: Served, eventually: Callable[..., None]) -> None:
    """A cheap question behind costly ones waits for a slot, not for their end."""
    working = [ask(agent) for _ in range(AT_ONCE)]
    eventually(lambda: taken(agent) == (AT_ONCE, AT_ONCE), "they are being computed")
    waiting = ask(agent, CHEAP)
    eventually(lambda: taken(agent) == (AT_ONCE + 1, AT_ONCE), "it waits")
    waiting.settimeout(0.5)
    with pytest.raises(TimeoutError):
        waiting.recv(1)
    working[0].close()
    waiting.settimeout(120)
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
        before = threading.enumerate()  # one that has answered another test may still be on its way out
        desk = Desk(at_once=1, longest_seconds=0.2)
        with pytest.raises(ProblemError, match="longer than"):
            await desk.ask(request_of(asyncio.Event()), spin)
        assert (desk.present, desk.running, desk.dropped) == (0, 0, 1)
        assert not [thread for thread in threading.enumerate() if thread.name == "question" and thread not in before]
        for _ in range(300):  # a busy machine may take longer than that to start a thread
            with contextlib.suppress(ProblemError):
                assert await desk.ask(request_of(asyncio.Event()), lambda: 7) == 7
                return
        pytest.fail("the slot did not come back")

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
