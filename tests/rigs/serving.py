"""Servers on ports that the kernel chooses as they are bound: one that was only looked for is taken by another test."""

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

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append(Asked(self.command, self.path, sent, list(self.headers.items())))
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer  # noqa: N815 - the standard library's names

        def log_message(self, *_: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
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
