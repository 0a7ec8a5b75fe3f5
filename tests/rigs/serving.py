"""Servers on ports that the kernel chooses as they are bound: one that was only looked for is taken by another test."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import uvicorn

START_SECONDS = 300.0  # a busy machine is slow


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """The loopback port of an application in a thread of this process."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        end = time.monotonic() + START_SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the agent did not start"
            time.sleep(0.02)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(10)


def port_of(process: subprocess.Popen[bytes]) -> int | None:
    """Where a process that was told port 0 listens, once it does."""
    try:
        found = psutil.Process(process.pid).net_connections(kind="tcp")
    except psutil.Error:  # ended
        return None
    return next((one.laddr.port for one in found if one.status == psutil.CONN_LISTEN), None)
