"""Ranks without the seconds that each would take to import torch: one process imports, and forks them where they run.

`python -m agent.jobs.forked MODULE ...` imports the modules and waits. A line of JSON on its standard input starts one
group of ranks: {"ranks": [{"module", "words", "env", "pid", "host", "log"}], "seconds"}; each enters the network
namespace of process `pid` (setns(2)), calls itself `host`, writes to `log` and is the module's `main(words)`. The line
that comes back holds their exit codes. Where one fails, the others have a few seconds, as torchrun gives them. The
ranks die with this process, and this process with the one that started it. Linux, root.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.bench.processes import POLL_SECONDS, die_with_parent

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h
GRACE_SECONDS = 5.0  # for the others, once one has failed


def run(request: Mapping[str, Any]) -> list[int]:
    """Fork the ranks and wait for all; a code below 0 is the signal that ended it."""
    started = [_fork(rank) for rank in request["ranks"]]
    codes: dict[int, int] = {}
    until = time.monotonic() + request["seconds"]
    while len(codes) < len(started):
        for pid in started:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
                if codes[pid]:
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > until:
            for pid in started:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return [codes[pid] for pid in started]


def _fork(rank: Mapping[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        die_with_parent(parent)
        os.environ.update(rank["env"])
        _enter(rank["pid"], rank["host"])
        ended = importlib.import_module(rank["module"]).main(rank["words"])
        code = int(ended or 0)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the rank's last words; it must not go on as a second server
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _enter(pid: int, host: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open("rb") as network:
        if libc.setns(network.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"network namespace of process {pid}")
    socket.sethostname(host)


def main(modules: Sequence[str]) -> int:
    """Serve until standard input ends."""
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
