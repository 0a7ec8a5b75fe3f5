"""Limits of one connection to the HTTP agent: every wait for its client has an end, and health checks get through.

uvicorn's `limit_concurrency` answers 503 to every path, health checks included, and its keep-alive timer starts only
after the first response. Here a connection that waits for its client gives its place to a new one when all are taken.
Who may connect at all is the matter of the NetworkPolicy in deploy/daemonset.
"""

from __future__ import annotations

import asyncio
import fcntl
import termios
from typing import Any

import h11
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent.http.answers import problem

PROBES = ("/healthz", "/readyz")  # the kubelet's, which brings no token
HEAD_BYTES = 16384  # request line and headers; a bearer token may take the most of it
KEEP_ALIVE_SECONDS = 65  # longer than the usual scrape interval of a minute
_CHECK_SECONDS = 1.0
_ROOM_SECONDS = 0.05


class LimitedProtocol(H11Protocol):
    """One connection."""

    most_connections = 512  # each costs some 20 KiB while it is open
    most_at_once = 192  # as many come within _ROOM_SECONDS before room is made without delay
    most_over_limit = 32  # further ones while all of those are at work, which only health checks use
    # Longest wait for a first request's head, a later head, a body, and for the client to read what was written
    seconds = {"head": 20.0, "next head": KEEP_ALIVE_SECONDS + 20.0, "body": 20.0, "reader": 30.0}  # noqa: RUF012

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._application, self.app = self.app, self._answer_within_limits
        self._wait: tuple[str | None, object] = "", None
        self.since = 0.0  # when the present wait began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; where all places are taken, make room for it."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that an answer that the client does not read is noticed
        self._check_wait()
        over = len(self.connections) - self.most_connections
        if over > 0:  # only after what the others have sent is read, unless a flood comes
            self.loop.call_later(_ROOM_SECONDS if over < self.most_at_once else 0, self._make_room)

    def _make_room(self) -> None:
        """End the connection that has waited longest for its client; where none waits, this one at most."""
        over = len(self.connections) - self.most_connections
        if over > 0:
            waiting = [one for one in self._others() if one.is_idle()]
            if waiting:
                min(waiting, key=lambda one: one.since).end()
            elif over > self.most_over_limit:
                self.end()

    def _others(self) -> list[LimitedProtocol]:
        return [one for one in self.connections if isinstance(one, LimitedProtocol) and one is not self]

    def _is_over_limit(self) -> bool:
        """Whether as many other connections as are allowed are at work."""
        over = len(self.connections) > self.most_connections
        return over and sum(not one.awaited() for one in self._others()) >= self.most_connections

    def awaited(self) -> str | None:
        """What the client has to do next; None while the application is at work."""
        if self.flow.write_paused:
            return "reader"
        if self.cycle is None or self.cycle.response_complete:
            return "next head" if self.cycle else "head"
        return "body" if self.conn.their_state is h11.SEND_BODY else None

    def is_idle(self) -> bool:
        """Whether it waits for its client; not where bytes have come that a busy loop has not read yet."""
        if self.awaited() in (None, "reader"):
            return self.awaited() is not None
        descriptor = self.transport.get_extra_info("socket").fileno()
        return descriptor < 0 or not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))

    def _check_wait(self) -> None:
        """Each second: end the connection where one wait, of one request, has taken too long."""
        if self.transport.is_closing():
            return
        wait, now = (self.awaited(), self.cycle), self.loop.time()
        if wait != self._wait:
            self._wait, self.since = wait, now
        elif wait[0] is not None and now - self.since > self.seconds[wait[0]]:
            self.end()
            return
        self.loop.call_later(_CHECK_SECONDS, self._check_wait)

    def end(self) -> None:
        """End the connection now."""
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
            await problem(Request(scope), status, detail, headers)(scope, receive, send)
        else:
            await self._application(scope, receive, send)
