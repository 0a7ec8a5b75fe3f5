"""What uvicorn's own limits do not reach: connections of one address, requests that never arrive, answers not taken."""

# ruff: noqa: D102 - each method extends what uvicorn does at that moment
import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_REFUSED = "HTTP/1.1 {}\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Limited(H11Protocol):
    """One connection, closed where its client is late, and at once where its address has too many."""

    most_per_address = 128  # a proxy in front is one address
    request_seconds = 20.0  # from the connection, or a request's first byte, to its last
    reader_seconds = 30.0  # for a client to take what is ready for it
    late: asyncio.TimerHandle | None = None
    stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that whatever is not taken is known
        self.address = self.client[0] if self.client else ""
        if sum(getattr(one, "address", "") == self.address for one in self.connections) > self.most_per_address:
            self._end("503 Service Unavailable")
        self.late = self.loop.call_later(self.request_seconds, self._end, "408 Request Timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in filter(None, (self.late, self.stalled)):
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._arriving()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._arriving()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.stalled or self.loop.call_later(self.reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled = self.stalled and self.stalled.cancel()  # type: ignore[func-returns-value]

    def _arriving(self) -> None:
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self.late = self.late or self.loop.call_later(self.request_seconds, self._end, "408 Request Timeout")
        elif self.conn.their_state is not h11.IDLE or self.cycle is not None:  # whole, or none of the next has come
            self.late = self.late and self.late.cancel()  # type: ignore[func-returns-value]

    def _end(self, status: str) -> None:
        begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]  # else there is nothing to answer
        if (begun or not self.late) and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_REFUSED.format(status).encode())
        self.transport.close()
