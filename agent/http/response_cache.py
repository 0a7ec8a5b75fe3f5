"""HTTP answers kept as long as the view they were made from: a scan is read more often than it is made.

A door that answers from one view alone says so with `repeatable(request, view)`. The answer is then given again,
without asking the application, to whoever asks the same with the same Accept headers. Compressed once for those who
take gzip (RFC 9110, section 12.5.3). What stays on disk is agent.jobs.result_store's.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent.view import View

MOST_ANSWERS = 64
MOST_BYTES = 4 << 20
LONGEST_KEY = 2048  # of query and Accept headers together; what is longer is not kept
WORTH_BYTES = 1024  # below it gzip saves less than a packet
_MARK = "topoflight.view"

Key = tuple[bytes, bytes, bytes, bool]


def repeatable(request: Request, view: View) -> None:
    """This answer follows from `view` and the question alone."""
    request.scope[_MARK] = view


def takes_gzip(accept_encoding: bytes) -> bool:
    """Whether gzip is among the encodings taken; one with q=0 is not."""
    for word in accept_encoding.lower().split(b","):
        name, _, weight = word.strip().partition(b";")
        if name.strip() == b"gzip":
            return weight.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
    return False


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: what is sent."""

    start: Message
    body: bytes


class Kept:
    """ASGI middleware: gives again what was answered, until the next scan."""

    def __init__(self, app: ASGIApp, current: Callable[[], View | None]) -> None:
        self._app, self._current = app, current
        self._view: View | None = None
        self._answers: OrderedDict[Key, Answer] = OrderedDict()
        self._bytes = 0
        self._doors: set[str] = set()  # paths of which an answer was kept before
        self._asking: dict[Key, asyncio.Future[None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from what is kept, or ask the application and keep what it says."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        view = self._current()
        if view is not self._view:
            self._view, self._bytes = view, 0
            self._answers.clear()
        key = _key(scope)
        if key not in self._answers and key in self._asking:
            await asyncio.wait((self._asking[key],))  # many ask the same after a scan: one answer will do
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        else:
            answer = await self._first(scope, receive, send, key)
            if answer is None:
                return
        await send(answer.start)
        await send({"type": "http.response.body", "body": answer.body})

    async def _first(self, scope: Scope, receive: Receive, send: Send, key: Key) -> Answer | None:
        """As `_asked`; whoever asks the same meanwhile waits, where such answers were kept before."""
        if scope["path"] not in self._doors or key in self._asking:
            return await self._asked(scope, receive, send, key)
        done = self._asking[key] = asyncio.get_running_loop().create_future()
        try:
            return await self._asked(scope, receive, send, key)
        finally:
            del self._asking[key]
            done.set_result(None)

    async def _asked(self, scope: Scope, receive: Receive, send: Send, key: Key) -> Answer | None:
        """The application's answer; None where it is not to be kept and has been sent."""
        begun: Message | None = None
        parts: list[bytes] = []

        async def hear(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and message["status"] == 200 and _MARK in scope:
                begun = message
            elif begun is None:
                await send(message)
            else:
                parts.append(bytes(message.get("body", b"")))

        await self._app(scope, receive, hear)
        if begun is None:
            return None
        answer = _whole(begun, b"".join(parts), zipped=key[3])
        if scope[_MARK] is self._view and sum(map(len, key[:3])) <= LONGEST_KEY:
            self._doors.add(scope["path"])
            self._store(key, answer)
        return answer

    def _store(self, key: Key, answer: Answer) -> None:
        if key not in self._answers:
            self._answers[key] = answer
            self._bytes += len(answer.body)
        while self._bytes > MOST_BYTES or len(self._answers) > MOST_ANSWERS:
            self._bytes -= len(self._answers.popitem(last=False)[1].body)


def _key(scope: Scope) -> Key:
    accept, zipped = b"", False
    for name, value in scope["headers"]:
        if name == b"accept":
            accept += value + b","
        elif name == b"accept-encoding":
            zipped = zipped or takes_gzip(value)
    return scope["path"].encode(), scope["query_string"], accept, zipped


def _whole(begun: Message, body: bytes, *, zipped: bool) -> Answer:
    """With the headers that follow from keeping and compressing."""
    headers = [(name, value) for name, value in begun["headers"] if name not in (b"content-length", b"vary")]
    encoded = any(name == b"content-encoding" for name, _ in headers)
    if zipped and not encoded and len(body) >= WORTH_BYTES:
        body = gzip.compress(body, compresslevel=6, mtime=0)
        headers.append((b"content-encoding", b"gzip"))
    headers += [(b"vary", b"Accept, Accept-Encoding"), (b"content-length", str(len(body)).encode())]
    return Answer({**begun, "headers": headers}, body)
