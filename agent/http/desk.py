"""Questions that cost much: few at once, some waiting, and dropped when whoever asked has gone.

The planner computes in threads of this process. A question nobody waits for any more is ended where it stands, by an
exception raised in its thread (CPython's PyThreadState_SetAsyncExc); the planner holds no lock and writes nothing, so
it can be left anywhere. The same ends a question that takes too long.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from agent.http.problem import ProblemError

AT_ONCE = 2
MOST_WAITING = 16
LONGEST_SECONDS = 60.0
DROP_LOOK_SECONDS = 0.05

Answered = TypeVar("Answered")


class _DroppedError(BaseException):
    """Raised inside a question that is not wanted any more; no `except Exception` on its way swallows it."""


class _Work:
    """One question in one thread."""

    def __init__(self, question: Callable[[], object]) -> None:
        self._question = question
        self._lock = threading.Lock()
        self._thread: int | None = None  # while it may be interrupted
        self.value: object = None
        self.error: BaseException | None = None

    def run(self, done: Callable[[], None]) -> None:
        try:
            try:
                with self._lock:
                    self._thread = threading.get_ident()
                self.value = self._question()
            finally:
                with self._lock:
                    self._thread = None
        except BaseException as error:  # noqa: BLE001 - handed to whoever asked, or dropped with the question
            self.error = error
        done()

    def drop(self) -> None:
        """End it at its next step."""
        with self._lock:
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(_DroppedError)
                )
                self._thread = None


class Desk:
    """Where such questions are asked."""

    def __init__(
        self, *, at_once: int = AT_ONCE, most_waiting: int = MOST_WAITING, longest_seconds: float = LONGEST_SECONDS
    ) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._most, self._longest = at_once + most_waiting, longest_seconds
        self.present = 0  # at work or waiting
        self.running = 0
        self.dropped = 0

    async def ask(self, request: Request, question: Callable[[], Answered]) -> Answered:
        """`question()`, when its turn comes. ProblemError 503 where too many wait or it takes too long."""
        if self.present >= self._most:
            raise ProblemError(503, f"{self._most} such questions are being answered or wait already",
                               headers={"Retry-After": "5"})  # fmt: skip
        self.present += 1
        gone = asyncio.ensure_future(_gone(request))
        turn = asyncio.ensure_future(self._slots.acquire())
        try:
            await asyncio.wait((turn, gone), return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                self.dropped += 1
                raise ProblemError(503, "the client has gone")
            try:
                return await self._work(question, gone)
            finally:
                self._slots.release()
        finally:
            if not turn.done():
                turn.cancel()
            gone.cancel()
            self.present -= 1

    async def _work(self, question: Callable[[], Answered], gone: asyncio.Future[None]) -> Answered:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        work = _Work(question)
        # a thread for each: one that was interrupted is not used again, and none is kept while nobody asks
        thread = threading.Thread(
            target=work.run, args=(lambda: loop.call_soon_threadsafe(ended.set),), name="question", daemon=True
        )
        self.running += 1
        end = asyncio.ensure_future(ended.wait())
        try:
            thread.start()
            await asyncio.wait((end, gone), timeout=self._longest, return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                self.dropped += 1
                work.drop()
                while thread.is_alive():  # its slot is free when its work has really ended
                    await asyncio.sleep(DROP_LOOK_SECONDS)
                if not gone.done():
                    raise ProblemError(503, f"the question takes longer than {self._longest:.0f} s: ask for less")
                raise ProblemError(503, "the client has gone")
        finally:
            end.cancel()
            self.running -= 1
        if work.error is not None:
            raise work.error
        return work.value  # type: ignore[return-value]


async def _gone(request: Request) -> None:
    """Ends when the client does."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
