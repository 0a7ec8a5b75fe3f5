"""The child that asks the drivers: `python -m probes.worker ROOT`, one JSON request and one JSON answer per line.

A driver call may hang or crash this process; the parent (probes.scanner) then kills it and starts another. It ends by
itself as soon as the pipe from the parent closes, even while a call hangs, because a thread of its own reads the pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from typing import IO, Any, cast

from contracts.redaction import without_secrets
from probes.host.live import LiveHost
from probes.host.protocol import Host, Json
from probes.host.recording import RecordingHost
from probes.registry import BY_NAME
from probes.scan import run
from probes.wire import outcome_to_json

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def answer(host: LiveHost, request: dict[str, Json]) -> dict[str, Json]:
    """Run the probe that is asked for.

    With "record", every answer of the host comes back as well; with "begin" it is a scan's first.
    """
    probe = BY_NAME[request["probe"]]
    if request.get("begin"):
        host.begin_scan()
    if not request.get("record"):
        return {"id": request["id"], "outcome": without_secrets(outcome_to_json(run(probe, host)))}
    recorder = RecordingHost(host)
    outcome = run(probe, cast("Host", recorder))
    return {"id": request["id"], "outcome": without_secrets(outcome_to_json(outcome)), "answers": recorder.answers}


def _listen(requests: queue.Queue[dict[str, Json]]) -> None:
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    os._exit(0)  # the parent is gone: end now, a hung driver call would keep the interpreter from ending


def _private_stdout() -> IO[bytes]:
    """The pipe to the parent; whatever a library prints goes to stderr instead."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "wb")


def _send(pipe: IO[bytes], message: dict[str, Json]) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends; one that is stopped (SIGSTOP) reads no closed pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def main(root: str, call_file: int, parent: int) -> None:
    """Answer requests until the parent goes; `call_file` is the descriptor for `LiveHost.name_driver_calls_in`."""
    _die_with(parent)
    pipe = _private_stdout()
    host = LiveHost(root)
    host.name_driver_calls_in(call_file)
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    _send(pipe, {"ready": True})
    while True:
        _send(pipe, answer(host, requests.get()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
