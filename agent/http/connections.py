"""Connections of the HTTP agent: how many, how long a request may take to arrive, how long an answer may wait.

uvicorn bounds none of these. A protocol of its h11 kind that adds them; specification: RFC 9110 (408, 413, 414, 503),
RFC 6585 (431). Where all places are taken, the connection that has been without a whole request for longest gives
way, so that slow and silent clients cannot keep the others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 512  # each costs some 20 KiB while it is open
RESERVED_DESCRIPTORS = 64  # for the probes' child, state files, the API server and what libraries open
BACKLOG = 256  # connections that the kernel holds, and that asyncio takes at once before any of them is looked at
HEAD_BYTES = 16384  # request line and headers; a bearer token may take the most of it
REQUEST_SECONDS = 20.0  # from its first byte, or from the connection, to the end of its body
READER_SECONDS = 30.0  # for a client to take what is ready for it
KEEP_ALIVE_SECONDS = 65  # longer than the usual scrape interval of a minute
LOOK_SECONDS = 1.0
LINES_PER_MINUTE = 10.0  # of uvicorn's complaints about what clients send


class Crowd:
    """All connections of one listener, and the rules they share."""

    def __init__(
        self, *, most: int = MOST_CONNECTIONS, request_seconds: float = REQUEST_SECONDS,
        reader_seconds: float = READER_SECONDS,
    ) -> None:  # fmt: skip
        self.most, self.request_seconds, self.reader_seconds = most, request_seconds, reader_seconds
        self.waiting: OrderedDict[Guarded, None] = OrderedDict()  # without a whole request; longest wait first
        self.present: set[Guarded] = set()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, guest: Guarded) -> bool:
        """Let one in; another that waits may have to go. False where all places are busy."""
        if len(self.present) >= self.most:
            if not self.waiting:
                return False
            oldest, _ = self.waiting.popitem(last=False)
            self.present.discard(oldest)
            oldest.leave(503)
            if oldest.transport.get_write_buffer_size():
                oldest.transport.abort()  # it does not read either
        self.present.add(guest)
        self.waiting[guest] = None
        if self._timer is None:
            self._timer = guest.loop.call_later(LOOK_SECONDS, self._look, guest.loop)
        return True

    def exit(self, guest: Guarded) -> None:
        """One has gone."""
        self.present.discard(guest)
        self.waiting.pop(guest, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send away those who are late. One timer for all, and none while nobody is here."""
        now = time.monotonic()
        for guest in [guest for guest in self.present if guest.late(now)]:
            guest.leave(408)
        self._timer = loop.call_later(LOOK_SECONDS, self._look, loop) if self.present else None


class _Connection(h11.Connection):
    """Remembers which status h11 would answer to what it could not read."""

    hint = 400

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.hint = error.error_status_hint
            if self.hint == 431 and b"\n" not in self.trailing_data[0]:
                self.hint = 414  # not even the request line has come to its end
            raise


class Guarded(H11Protocol):
    """One connection."""

    def __init__(self, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self.crowd = crowd
        self.conn: _Connection = _Connection(h11.SERVER, HEAD_BYTES)
        self.since: float | None = None  # when the request under way began to arrive; None between requests
        self.stuck_since: float | None = None  # when the client stopped taking the answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Find a place, or answer 503."""
        super().connection_made(transport)
        self.since = time.monotonic()
        if not self.crowd.enter(self):
            self.leave(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self.crowd.exit(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count from the first byte of a request to its last."""
        if self.transport.is_closing():
            return
        if self.since is None and not self.busy():
            self.since = time.monotonic()
        super().data_received(data)
        if self.busy() and not self.cycle.more_body:
            self.since = None
            self.crowd.waiting.pop(self, None)

    def busy(self) -> bool:
        """Whether a request's head is here and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def late(self, now: float) -> bool:
        """Whether the request has not arrived, or the answer was not taken, in time."""
        if self.stuck_since is not None and now - self.stuck_since > self.crowd.reader_seconds:
            return True
        if self.transport.is_closing():  # closed with something unsent: the client does not read
            self.stuck_since = self.stuck_since or now
            return False
        return self.since is not None and now - self.since > self.crowd.request_seconds

    def leave(self, status: int) -> None:
        """Say why, where an answer can still be given, and close."""
        if self.stuck_since is not None:
            self.transport.abort()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and (status != 408 or self._has_spoken()):
            self._refuse(status)
        self.transport.close()

    def _has_spoken(self) -> bool:
        return self.busy() or bool(self.conn.trailing_data[0])

    def _refuse(self, status: int) -> None:
        phrase = HTTPStatus(status).phrase
        body = f"{status} {phrase}\n".encode()
        headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body))),
                   ("connection", "close"), *([("retry-after", "1")] if status == 503 else [])]  # fmt: skip
        head = h11.Response(status_code=status, headers=headers, reason=phrase.encode())
        with contextlib.suppress(h11.LocalProtocolError):  # to HEAD no body may be sent
            for part in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application may still be at work on it: nobody listens any more
            self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """What h11 could not read, with h11's own status."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(self.conn.hint)
        self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request; the end of this one's body may still be on its way."""
        if not self.cycle.more_body:
            self.since = None
        if self in self.crowd.present:
            self.crowd.waiting[self] = None
        super().on_response_complete()
        if self.busy() and not self.cycle.more_body:  # a request that was sent ahead of this answer
            self.crowd.waiting.pop(self, None)
        elif self.busy() or self.conn.trailing_data[0]:
            self.since = self.since or time.monotonic()

    def pause_writing(self) -> None:
        """The client does not take the answer as fast as it is made."""
        self.stuck_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """It does."""
        self.stuck_since = None
        super().resume_writing()


class Seldom(logging.Filter):
    """Lets some lines a minute through, so that hostile clients do not fill the log."""

    def __init__(self, per_minute: float = LINES_PER_MINUTE) -> None:
        super().__init__()
        self._room, self._per_minute, self._at = per_minute, per_minute, time.monotonic()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written; one that is written says how many were not."""
        now = time.monotonic()
        self._room = min(self._per_minute, self._room + (now - self._at) * self._per_minute / 60)
        self._at = now
        if self._room < 1:
            self._left_out += 1
            return False
        self._room -= 1
        if self._left_out:
            record.msg = f"{record.getMessage()} ({self._left_out} more lines were left out)"
            record.args, self._left_out = (), 0
        return True


def places() -> int:
    """How many connections this process has descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + BACKLOG + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_CONNECTIONS
    return max(8, min(MOST_CONNECTIONS, (soft - RESERVED_DESCRIPTORS) // 2))


def protocol(crowd: Crowd | None = None) -> Callable[..., asyncio.Protocol]:
    """What uvicorn takes as `http`."""
    shared = crowd or Crowd(most=places())

    class Placed(Guarded):
        def __init__(self, **given: Any) -> None:
            super().__init__(shared, **given)

    return Placed
