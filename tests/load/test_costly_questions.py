"""Costly questions go to one worker process: a bounded queue, a time limit, killed and replaced, gone when idle."""

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import resident
from load_served import H100, Served, connect, get_of, read
from rigs.waiting import eventually
from starlette.requests import Request

from agent.http.worker import ProblemError, Worker

pytestmark = pytest.mark.long

MAX_WAITING = 8
LONGEST_SECONDS = 20.0  # a busy machine takes its time to start the process, which is scheduled last
IDLE_SECONDS = 6.0
# The agent with two endpoints and its worker with two questions more: one that has no end, and one that has an error.
ASKED_TOO = """
import time
from agent.http import worker
def endless(known, number):
    while True:  # a quarter of a core
        sum(range(1_000_000))
        time.sleep(0.05)
def wrong(known):
    raise ZeroDivisionError
worker.QUESTIONS.update(endless=endless, wrong=wrong)
worker.main()
"""
AGENT = f"""
import sys
from pathlib import Path
from fastapi import Request
from agent.http import serve
from agent.base.options import read_snapshots
from probes.registry import ALL
from agent.http import server, state, worker
worker.COMMAND = sys.executable, "-P", "-c", {ASKED_TOO!r}
worker.MAX_WAITING, worker.MAX_SECONDS, worker.IDLE_SECONDS = {MAX_WAITING}, {LONGEST_SECONDS}, {IDLE_SECONDS}
shared = worker.Worker()
view = state.State(lambda: read_snapshots((Path(sys.argv[2]),), ALL), interval_seconds=3600)
app = server.create(view, worker=shared)
@app.get("/endless")
async def endless(request: Request, number: int = 0):
    return server.respond(await shared.ask(request, "endless", view=view.view, number=number))
@app.get("/wrong")
async def wrong(request: Request):
    return server.respond(await shared.ask(request, "wrong", view=view.view))
serve.listen(app, serve.bind("127.0.0.1", int(sys.argv[1])))
"""
CHEAP = "/recommendations?model=Llama-3.1-8B&nodes={}"


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    port, log = resident.free_port(), tmp_path_factory.mktemp("agent") / "log"
    with resident.process([sys.executable, "-c", AGENT, str(port), str(H100)], log=log) as one:
        resident.wait(port, "/readyz", one)
        yield Served(one.pid, port, log)


def ask(agent: Served, path: str) -> socket.socket:
    return connect(agent.port, get_of(path, "Connection: close"))


def worker(agent: Served) -> psutil.Process | None:
    """The process that answers questions; None where there is none."""
    found = []
    for one in psutil.Process(agent.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            if one.status() != psutil.STATUS_ZOMBIE and "probes.worker" not in one.cmdline():  # that one replays
                found.append(one)
    assert len(found) <= 1, "one worker process at a time"
    return found[0] if found else None


def cheap(agent: Served, number: int) -> int:
    return resident.get(agent.port, CHEAP.format(number))[0]


def works(agent: Served) -> bool:
    """Whether the worker computes: most of a second's time is its own, less where the machine is busy."""
    process = worker(agent)
    if process is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        before = sum(process.cpu_times()[:2])
        time.sleep(0.3)
        return bool(sum(process.cpu_times()[:2]) - before > 0.02)
    return False


def test_a_question_that_takes_too_long_is_ended_and_its_process_replaced(agent: Served) -> None:
    """The answer is 503. Another process answers the next question. All other requests are served in the meantime.

    Equal questions take one place in the queue, so that there may be more of them than there are places.
    """
    assert cheap(agent, 2) == 200
    before = worker(agent)
    asked = [ask(agent, "/endless?number=99") for _ in range(2 * MAX_WAITING)]
    agent.honest()
    for answer in map(read, asked):
        assert answer.startswith(b"HTTP/1.1 503 ") and b"longer than" in answer
        assert b"application/problem+json" in answer
    for one in asked:
        one.close()
    assert cheap(agent, 3) == 200
    assert before is not None and worker(agent) != before


def test_one_more_than_may_wait_is_told_to_come_back(agent: Served) -> None:
    """503 with Retry-After as a problem document; scrapes and probes do not wait behind questions."""
    asked = [ask(agent, f"/endless?number={number}") for number in range(MAX_WAITING + 1)]
    refused = select.select(asked, [], [], 60)[0]  # whichever came last: the others have no answer yet
    assert len(refused) == 1
    answer = read(refused[0])
    assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 5" in answer.lower()
    agent.honest()
    for one in asked:
        one.close()
    eventually(lambda: cheap(agent, 5) == 200, "the places are free again")


def test_who_leaves_stops_the_computing(agent: Served) -> None:
    """Those at work and those that wait; afterwards a question is answered."""
    asked = [ask(agent, f"/endless?number={number}") for number in range(3)]
    eventually(lambda: works(agent), "one of them is computed")
    for one in asked:
        one.close()
    eventually(lambda: not works(agent), "nothing is computed that nobody waits for")
    assert cheap(agent, 6) == 200


def test_an_error_of_ours_is_500_and_the_next_is_answered(agent: Served) -> None:
    status, body = resident.get(agent.port, "/wrong")
    assert status == 500 and json.loads(body)["detail"]
    assert cheap(agent, 7) == 200


def test_a_process_that_is_killed_is_replaced(agent: Served) -> None:
    """As where memory ends: who waits is told, and the next is answered."""
    with ask(agent, "/endless") as one:
        eventually(lambda: works(agent), "it is computed")
        process = worker(agent)
        process.kill()
        assert read(one).startswith(b"HTTP/1.1 503 ")
    assert cheap(agent, 8) == 200


def test_where_memory_ends_the_worker_goes_first(agent: Served) -> None:
    """And the scrape is scheduled before it."""
    assert cheap(agent, 9) == 200
    process = worker(agent)
    assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "1000\n"
    assert process.nice() > psutil.Process(agent.pid).nice()


def test_an_idle_process_ends_and_comes_back(agent: Served) -> None:
    assert cheap(agent, 10) == 200
    assert worker(agent) is not None
    eventually(lambda: worker(agent) is None, "it has ended")
    assert cheap(agent, 11) == 200


def test_it_ends_with_the_agent(tmp_path: Path) -> None:
    """In the middle of a question, whether the agent is told to end or killed."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        port = resident.free_port()
        with resident.process([sys.executable, "-c", AGENT, str(port), str(H100)], log=tmp_path / "log") as one:
            resident.wait(port, "/readyz", one)
            served = Served(one.pid, port)
            with ask(served, "/endless"):
                eventually(lambda served=served: works(served), "it is computed")
                process = worker(served)
                os.kill(one.pid, how)
                eventually(lambda process=process: not process.is_running(), "the worker has gone too")
                one.wait(60)


SILENT = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
pipe.send_bytes(b"ready")
while pipe.recv():
    pass
"""


async def leave_and_stop() -> tuple[list[str], list[object]]:
    """What asyncio logs of a question whose client has left, and what those get who wait when the agent stops."""
    logged: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
    asked = Worker()

    async def leaves() -> dict[str, str]:
        while asked._process is None:
            await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def stays() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    with contextlib.suppress(ProblemError):
        await asked.ask(Request({"type": "http"}, leaves), "left")
    while asked._process is not None:
        await asyncio.sleep(0.05)
    asked._questions.clear()
    await asyncio.sleep(0.05)
    gc.collect()
    waiting = [asyncio.ensure_future(asked.ask(Request({"type": "http"}, stays), name)) for name in ("one", "two")]
    while asked._process is None:
        await asyncio.sleep(0.05)
    asked.stop()
    return logged, await asyncio.gather(*waiting, return_exceptions=True)


def test_no_traceback_of_a_client_that_left_and_an_answer_for_those_that_wait_at_the_end(monkeypatch) -> None:
    """Asyncio logs an exception that nobody reads; a question that is cancelled would end its request without words."""
    monkeypatch.setattr("agent.http.worker.COMMAND", (sys.executable, "-P", "-c", SILENT))
    logged, refused = asyncio.run(leave_and_stop())
    assert not logged
    assert [getattr(error, "status", error) for error in refused] == [503, 503]
