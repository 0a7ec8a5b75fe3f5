"""Limits of one connection that uvicorn's options do not give: deadlines, and places for health checks.

uvicorn's `limit_concurrency` answers 503 to every path, health checks included, and its keep-alive timer starts only
after the first response. Here a connection that waits for its client gives its place to a new one when all are taken.
"""

# ruff: noqa: D102 - each method extends what uvicorn does at that moment
from __future__ import annotations

import asyncio
import fcntl
import termios
from collections import Counter
from typing import Any

import h11
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent.http import problem
from agent.http.access import PROBES

HEAD_BYTES = 16384  # request line and headers; a bearer token may take the most of it
_ROOM_SECONDS = 0.05
KEEP_ALIVE_SECONDS = 65  # longer than the usual scrape interval of a minute


class LimitedProtocol(H11Protocol):
    """One connection. Every time that it waits for its client has an end."""

    most_connections = 512  # each costs some 20 KiB while it is open
    most_at_once = 192  # as many come within _ROOM_SECONDS before room is made without delay
    most_over_limit = 32  # further ones, which only health checks use
    # Longest wait for a first request's head, a later head, a body, and for the client to read what was written
    seconds = {"head": 20.0, "next head": KEEP_ALIVE_SECONDS + 20.0, "body": 20.0, "reader": 30.0}  # noqa: RUF012

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._application, self.app = self.app, self._answer_within_limits
        self.waits_for: str | None = None
        self.since = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that an answer that the client does not read is noticed
        self._update_deadline()
        over = len(self.connections) - self.most_connections
        if over > 0:  # only after what the others have sent is read, unless a flood comes
            self.loop.call_later(_ROOM_SECONDS if over < self.most_at_once else 0, self._make_room)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_deadline()

    def _awaited(self) -> str | None:
        """What the client has to do next; None while the application is at work."""
        if self.flow.write_paused:
            return "reader"
        if self.cycle is None or self.cycle.response_complete:
            return "next head" if self.cycle else "head"
        return "body" if self.conn.their_state is h11.SEND_BODY else None

    def _update_deadline(self) -> None:
        awaited = self._awaited()
        if awaited == self.waits_for or self.transport.is_closing():
            return
        self.waits_for, self.since = awaited, self.loop.time()
        if self._deadline:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.seconds[awaited], self._end) if awaited else None

    def _make_room(self) -> None:
        """End the longest idle connection of the address that has the most; where none is idle, this one at most."""
        if len(self.connections) <= self.most_connections:
            return
        waiting = [one for one in self._others() if one.is_idle()]
        counts = Counter(one.client and one.client[0] for one in self._others())
        if waiting:
            min(waiting, key=lambda one: (
                one.waits_for == "body", -counts[one.client and one.client[0]], one.since,
            ))._end()  # fmt: skip
        elif len(self.connections) > self.most_connections + self.most_over_limit:
            self._end()

    def is_idle(self) -> bool:
        """Whether it waits for its client; not where bytes have come that a busy loop has not read yet."""
        if self.waits_for in (None, "reader"):
            return self.waits_for is not None
        descriptor = self.transport.get_extra_info("socket").fileno()
        return descriptor < 0 or not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))

    def _others(self) -> list[LimitedProtocol]:
        return [one for one in self.connections if isinstance(one, LimitedProtocol) and one is not self]

    def _is_over_limit(self) -> bool:
        """Whether as many other connections as are allowed are at work."""
        if len(self.connections) <= self.most_connections:
            return False
        return sum(not one.waits_for for one in self._others()) >= self.most_connections

    def _end(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    async def _answer_within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request whose end is ambiguous, and all but health checks where every place is taken."""
        names = {name for name, _ in scope["headers"]}
        framed_twice = b"content-length" in names or scope["http_version"] == "1.0"  # RFC 9112, 6.1
        status = 0
        if b"transfer-encoding" in names and framed_twice:
            status = 400
            detail = "Transfer-Encoding with Content-Length, or in HTTP/1.0: where the body ends is ambiguous"
        elif sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES:  # h11 bounds what is parted
            status, detail = 400, f"the headers have more than {HEAD_BYTES} bytes"
        elif scope["path"] not in PROBES and self._is_over_limit():
            status, detail = 503, f"{self.most_connections} connections are in use"
        if status:
            headers = {"Connection": "close", **({"Retry-After": "5"} if status == 503 else {})}
            await problem.response(Request(scope), status, detail, headers)(scope, receive, send)
        else:
            await self._application(scope, receive, send)
