"""Servers on ports that the kernel chooses as they are bound: one that was only looked for is taken by another test."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import psutil
from rigs.waiting import eventually

START_SECONDS = 300.0  # a busy machine is slow


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """The loopback port of an application in a thread of this process."""
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        eventually(lambda: server.started or not thread.is_alive(), "the agent listens", START_SECONDS)
        assert server.started, "the agent did not start"
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(10)


class Handler(BaseHTTPRequestHandler):
    """Gives each request to `respond`, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def respond(self) -> None:
        """Answer one request with `send`."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Every method is answered alike."""
        self.respond()

    do_HEAD = do_POST = do_PATCH = do_PUT = do_DELETE = do_GET  # noqa: N815 - the standard library's names

    def log_message(self, *_: object) -> None:
        """Silent."""

    @property
    def token(self) -> str:
        """The bearer's."""
        return str(self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def read_body(self) -> bytes:
        """What the client sent."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        """The answer: bytes as they are, all else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if isinstance(body, bytes) else {"Content-Type": "application/json"}
        self.send_response(status)
        for name, value in {**kind, **(headers or {}), "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


class Asked(NamedTuple):
    """One request that `answering` had."""

    method: str
    path: str
    body: bytes
    headers: list[tuple[str, str]]


@contextmanager
def answering(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, list[Asked]]]:
    """The URL of a server that gives these answers in turn, then the last again, and the requests that it had."""
    seen: list[Asked] = []
    left = list(answers or [(200, {}, b"{}")])

    class InTurn(Handler):
        protocol_version = "HTTP/1.0"

        def respond(self) -> None:
            seen.append(Asked(self.command, self.path, self.read_body(), list(self.headers.items())))
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send(status, body, headers)

    with ThreadingHTTPServer(("127.0.0.1", 0), InTurn) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def port_of(process: subprocess.Popen[bytes]) -> int | None:
    """Where a process that was told port 0 listens, once it does."""
    try:
        found = psutil.Process(process.pid).net_connections(kind="tcp")
    except psutil.Error:  # ended
        return None
    return next((one.laddr.port for one in found if one.status == psutil.CONN_LISTEN), None)
