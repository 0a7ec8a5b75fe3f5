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
import weakref
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base.documents import document as plain
from agent.base.documents import render
from agent.checks.view import View
from agent.cluster.nodes import NodeRecord
from collectives.bench import processes
from contracts.redaction import without_secrets

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger(__name__)

MOST_WAITING = 256  # questions that differ; who asks what another has asked shares the answer
LONGEST_SECONDS = 60.0  # of one question
START_SECONDS = 60.0  # to start Python and import; generous, a node in trouble is slow
LEFT_SECONDS = 1.0  # a question that no client waits for may take so much longer before its process is killed
IDLE_SECONDS = 600.0
FRESH_SECONDS = 1.0  # an answer about the cluster is given again for so long
MOST_HELD_BYTES = 64 << 20  # of answers that clients are still reading
RECORDS_AT_ONCE = 250  # packing them holds the interpreter for some milliseconds
COMMAND = (sys.executable, "-P", "-m", "agent.http.questions")
_LOOK_SECONDS = 0.1

_BUSY = {"Retry-After": "5"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
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


class _LateError(ProblemError):
    """The process was too slow, or no client waits any more: it is replaced."""


def _late(detail: str) -> _LateError:
    return _LateError(503, detail, headers=_BUSY)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One question, and how many wait for its answer."""

    name: str
    given: Mapping[str, Any]
    view: View | None
    records: Mapping[str, NodeRecord] | None
    answered: Future[Answer] = field(default_factory=Future)
    waiting: int = 0
    done_at: float | None = None


def document(value: Any, form: str) -> Answer:
    """`value` as a JSON or YAML document, without secrets."""
    return Answer(body=render(without_secrets(plain(value)), form).encode(), media_type=f"application/{form}")


def page_of(html: str, status: int = 200) -> Answer:
    """A page, with the policy that holds its scripts."""
    from agent.pages import render as pages

    return Answer(body=html.encode(), media_type="text/html", status=status, headers=pages.headers())


def send(pipe: Connection, answer: Answer | ProblemError) -> None:
    """From the worker to the agent go texts and bytes only: nothing that is unpacked into objects."""
    header: dict[str, Any] = {"status": answer.status}
    if isinstance(answer, ProblemError):
        header["detail"] = answer.detail
    else:
        header |= {"media_type": answer.media_type, "headers": dict(answer.headers)}
    pipe.send_bytes(json.dumps(header).encode())
    pipe.send_bytes(answer.body if isinstance(answer, Answer) else b"")


def received(pipe: Connection) -> Answer:
    """The other side of `send`. Raises ProblemError where the worker refuses."""
    header, body = json.loads(pipe.recv_bytes()), pipe.recv_bytes()
    if "detail" in header:
        raise ProblemError(**header)
    return Answer(body=body, **header)


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
        self._view: View | None = None
        self._records: Mapping[str, NodeRecord] = {}
        if not self._pipe.poll(START_SECONDS):
            self.kill()
            raise _late(f"the worker process has not started within {START_SECONDS:.0f} s")
        self._pipe.recv_bytes()

    def ask(self, job: _Job, longest: float) -> Answer:
        """Raises ProblemError where it refuses or is too slow, EOFError or OSError where the process has ended."""
        self._tell(job)
        self._pipe.send((job.name, dict(job.given)))
        until = time.monotonic() + longest
        while not self._pipe.poll(_LOOK_SECONDS):
            now = time.monotonic()
            if not job.waiting:
                until = min(until, now + LEFT_SECONDS)
            if now > until:
                raise _late(f"the question takes longer than {longest:.0f} s: ask for less")
        return received(self._pipe)

    def _tell(self, job: _Job) -> None:
        """Hand over what has changed since the last question."""
        if job.view is not None and job.view is not self._view:
            self._pipe.send(("view", replace(job.view, runs=(), benches=())))
            self._view = job.view
        if job.records is not None and job.records is not self._records:
            before, now = self._records, job.records
            changed = [record for name, record in now.items() if before.get(name) is not record]
            for first in range(0, len(changed), RECORDS_AT_ONCE):
                self._pipe.send(("records", (changed[first : first + RECORDS_AT_ONCE], ())))
            self._pipe.send(("records", ((), [name for name in before if name not in now])))
            self._records = now

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


class Worker:
    """Where costly questions are asked, from one event loop. They wait for the one thread, which starts the process."""

    def __init__(
        self, *, command: Sequence[str] = COMMAND, most_waiting: int = MOST_WAITING,
        longest_seconds: float = LONGEST_SECONDS, idle_seconds: float = IDLE_SECONDS,
    ) -> None:  # fmt: skip
        self._command, self._most, self._longest, self._idle = command, most_waiting, longest_seconds, idle_seconds
        self._jobs: dict[Hashable, _Job] = {}  # asked and not answered, or answered a moment ago
        self._held: weakref.WeakSet[Answer] = weakref.WeakSet()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._process: _Process | None = None
        self._end: asyncio.TimerHandle | None = None  # of a process that nobody asks
        self._stopping = False

    async def ask(
        self, request: Request, name: str, *, view: View | None = None,
        records: Mapping[str, NodeRecord] | None = None, **given: Any,
    ) -> Answer:  # fmt: skip
        """The answer of agent.http.questions to `name`, whose arguments are plain and hashable.

        ProblemError: 503 where too many wait, it takes too long or the client leaves; else as the worker refuses it.
        """
        job = self._job(name, given, view, records)
        gone = asyncio.ensure_future(_gone(request))
        answered = asyncio.wrap_future(job.answered)
        # An error that comes after the client has left is read here, or asyncio logs it with a traceback.
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait((answered, gone), timeout=2 * self._longest, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise _late("the client has gone" if gone.done() else "too much was asked before")
            if answered.cancelled():
                raise _late("the agent ends")
            self._held.add(answered.result())
            return answered.result()
        finally:
            gone.cancel()
            self._leave(job)

    def stop(self) -> None:
        """End the process and the thread; clients that wait are refused."""
        self._stopping = True
        if (process := self._process) is not None:
            process._process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _job(
        self, name: str, given: Mapping[str, Any], view: View | None, records: Mapping[str, NodeRecord] | None
    ) -> _Job:
        """The question, asked by one more."""
        if self._end is not None:
            self._end.cancel()
        key = name, tuple(sorted(given.items(), key=lambda pair: pair[0])), id(view), records is None
        fresh = time.monotonic() - FRESH_SECONDS
        self._jobs = {k: job for k, job in self._jobs.items() if job.done_at is None or job.done_at > fresh}
        job = self._jobs.get(key)
        if job is None or job.view is not view:
            if self._stopping or sum(job.done_at is None for job in self._jobs.values()) >= self._most:
                raise _late(f"{self._most} such questions wait already")
            if sum(len(answer.body) for answer in self._held) > MOST_HELD_BYTES:
                raise _late("answers of too many bytes are still being read")
            job = self._jobs[key] = _Job(name=name, given=given, view=view, records=records)
            job.answered = self._thread.submit(self._serve, job)
        job.waiting += 1
        return job

    def _leave(self, job: _Job) -> None:
        """One waits no more; a question that no client waits for, and that is not begun, gives its place back."""
        job.waiting -= 1
        if not job.waiting and job.answered.cancel():
            self._jobs = {key: other for key, other in self._jobs.items() if other is not job}
        if self._end is not None:
            self._end.cancel()
        if not self._stopping:
            loop = asyncio.get_running_loop()
            self._end = loop.call_later(self._idle, self._thread.submit, self._end_process)

    def _serve(self, job: _Job) -> Answer:
        """Answer in the worker's thread. Whatever ends a process, another takes its place."""
        try:
            if self._process is None:
                self._process = _Process(self._command)
            if self._stopping:
                raise _late("the agent ends")
            return self._process.ask(job, self._longest)
        except _LateError:
            self._end_process()
            raise
        except ProblemError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the next question gets another process
            self._end_process()
            log.warning("the worker process has ended: %r", error)
            raise _late("the worker process has ended: ask again") from None
        finally:
            job.done_at = time.monotonic()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()


async def _gone(request: Request) -> None:
    """Ends when the client does."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
