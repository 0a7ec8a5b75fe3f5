"""Costly questions are answered in a process of their own: recommendations, what-if, and whatever is about the cluster.

The event loop and /metrics share no interpreter with the planner. One worker process (agent.http.questions) is started
when something is first asked, answers one question at a time, is killed and replaced when a question takes too long or
no client waits for it any more, and ends after some idle minutes. What it knows is sent once: each view whole, of
the cluster's records those that have changed. Why a process, and what it costs: docs/decisions/0010.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base.output import document as plain
from agent.base.output import render
from agent.checks.verdict import View
from agent.cluster.nodes import NodeRecord
from collectives.bench import processes
from contracts.redaction import without_secrets

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger(__name__)

MOST_WAITING = 256  # questions that differ; who asks what another has asked shares the answer
LONGEST_SECONDS = 60.0  # of one question, and for Python to start and to import: a node in trouble is slow
LEFT_SECONDS = 1.0  # a question that no client waits for may take so much longer before its process is killed
IDLE_SECONDS = 600.0
RECORDS_AT_ONCE = 250  # packing them holds the interpreter for some milliseconds
COMMAND = (sys.executable, "-P", "-m", "agent.http.questions")
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent, whole."""

    body: bytes
    media_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class ProblemError(Exception):
    """A request that cannot be answered; becomes a problem document."""

    def __init__(self, status: int, detail: str, *, headers: dict[str, str] | None = None, **more: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.more = more


def _busy(detail: str) -> ProblemError:
    return ProblemError(503, detail, headers={"Retry-After": "5"})


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One question, and how many wait for its answer."""

    name: str
    given: Mapping[str, Any]
    view: View | None
    records: Mapping[str, NodeRecord] | None
    answered: Future[Answer] = field(default_factory=Future)
    waiting: int = 0


def document(value: Any) -> Answer:
    """`value` as a JSON document, without secrets."""
    return Answer(body=render(without_secrets(plain(value)), "json").encode(), media_type="application/json")


def page_of(html: str, status: int = 200) -> Answer:
    """A page, with the policy that holds its scripts."""
    from agent.pages import render as pages

    return Answer(body=html.encode(), media_type="text/html", status=status, headers=pages.headers())


class _Process:
    """The worker process, and what it has been told. Belongs to one thread, and dies with it."""

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                processes.tethered([*command, str(theirs.fileno())]), pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
        self._pipe = Connection(ours.detach())
        if not self._pipe.poll(LONGEST_SECONDS):
            self.kill()
            raise TimeoutError(f"the worker process has not started within {LONGEST_SECONDS:.0f} s")
        self._pipe.recv_bytes()
        self._view: View | None = None
        self._records: Mapping[str, NodeRecord] = {}

    def ask(self, job: _Job, longest: float) -> Answer:
        """Raises ProblemError where it refuses, TimeoutError where it is too slow or no client waits any more.

        Raises EOFError or OSError where the process has ended. What comes back is text and bytes, and never unpacked.
        """
        until = time.monotonic() + longest
        self._send_news(job)
        self._pipe.send((job.name, dict(job.given)))
        while not self._pipe.poll(_LOOK_SECONDS):
            if not job.waiting:
                until = min(until, time.monotonic() + LEFT_SECONDS)
            if time.monotonic() > until:
                raise TimeoutError(f"the question takes longer than {longest:.0f} s: request less")
        header, body = json.loads(self._pipe.recv_bytes()), self._pipe.recv_bytes()
        if "detail" in header:
            raise ProblemError(**header)
        return Answer(body=body, **header)

    def _send_news(self, job: _Job) -> None:
        """Hand over what has changed since the last question."""
        if job.view is not None and job.view is not self._view:
            self._pipe.send(("view", replace(job.view, runs=())))
            self._view = job.view
        if job.records is not None and job.records is not self._records:
            before, now = self._records, job.records
            changed = [record for name, record in now.items() if before.get(name) is not record]
            for first in range(0, len(changed), RECORDS_AT_ONCE):
                self._pipe.send(("records", (changed[first : first + RECORDS_AT_ONCE], ())))
            self._pipe.send(("records", ((), [name for name in before if name not in now])))
            self._records = now

    def kill(self) -> None:
        """End it now; the thread that asks it hears EOFError."""
        self._process.kill()
        self._process.wait()


class Worker:
    """Where costly questions are asked, from one event loop. They wait for the one thread, which starts the process."""

    def __init__(
        self, *, command: Sequence[str] = COMMAND, most_waiting: int = MOST_WAITING,
        longest_seconds: float = LONGEST_SECONDS, idle_seconds: float = IDLE_SECONDS,
    ) -> None:  # fmt: skip
        self._command, self._most, self._longest, self._idle = command, most_waiting, longest_seconds, idle_seconds
        self._jobs: dict[Hashable, _Job] = {}  # not answered yet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._process: _Process | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stopping = False

    async def ask(
        self, request: Request, name: str, *, view: View | None = None,
        records: Mapping[str, NodeRecord] | None = None, **given: Any,
    ) -> Answer:  # fmt: skip
        """The answer of agent.http.questions to `name`, whose arguments are plain and hashable.

        ProblemError: 503 where too many wait, it takes too long or the client leaves; else as the worker refuses it.
        """
        key = name, tuple(sorted(given.items())), id(view)
        job = self._jobs.get(key)
        if job is None:
            if self._stopping or len(self._jobs) >= self._most:
                raise _busy(f"{self._most} such requests are already waiting")
            job = self._jobs[key] = _Job(name=name, given=given, view=view, records=records)
            job.answered = self._thread.submit(self._serve, job)
            job.answered.add_done_callback(lambda _: self._jobs.pop(key, None))
        job.waiting += 1
        answered, until = asyncio.wrap_future(job.answered), time.monotonic() + 2 * self._longest
        # An error that comes after the client has left is read here, or asyncio logs it with a traceback.
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not (await asyncio.wait((answered,), timeout=_LOOK_SECONDS))[0]:
                if await request.is_disconnected() or time.monotonic() > until:
                    raise _busy("the requests before this one took too long")
            if answered.cancelled():
                raise _busy("the agent ends")
            return answered.result()
        finally:
            job.waiting -= 1
            if not job.waiting:
                job.answered.cancel()  # where it is not begun; `_Process.ask` sees to the one that is
            self._end_later()

    def stop(self) -> None:
        """End the process and the thread; clients that wait are refused."""
        self._stopping = True
        if (process := self._process) is not None:
            process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _end_later(self) -> None:
        """End the process after some idle minutes."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if not self._stopping:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self._idle, self._thread.submit, self._end_process)

    def _serve(self, job: _Job) -> Answer:
        """Answer in the worker's thread. Whatever ends a process, another takes its place."""
        try:
            if self._process is None:
                self._process = _Process(self._command)
            if self._stopping:
                raise _busy("the agent ends")
            return self._process.ask(job, self._longest)
        except ProblemError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the next question gets another process
            self._end_process()
            if isinstance(error, TimeoutError):
                raise _busy(str(error)) from None
            log.warning("the worker process has ended: %r", error)
            raise _busy("the worker process has ended: send the request again") from None

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
