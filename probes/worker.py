"""The child that reads a host: `python -m probes.worker ROOT CALL_FILE PARENT`. Requests and answers are lines of JSON.

It alone imports the readers (`probes/*/read.py`, `probes.host`): a driver call that hangs or crashes ends only this
process, and the parent (probes.scanner) starts another. It ends as soon as the pipe from the parent closes, even while
a call hangs, because a separate thread reads the pipe. With an empty ROOT it only replays recordings.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, cast

from contracts.redaction import without_secrets
from probes.api import Absent, Failed, Ok, Outcome, Snapshot, Source, UnavailableError
from probes.host.protocol import Host
from probes.host.recording import RecordingHost, load_all
from probes.wire import Json, RecordingError, from_json, outcome_to_json

if TYPE_CHECKING:
    from probes.host.live import LiveHost

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def reader(name: str) -> Callable[[Host], Any]:
    """Return the function that reads the facts of a probe: `read` of the module `read` in its folder."""
    found: Callable[[Host], Any] = import_module(f"probes.{name}.read").read
    return found


def run(read: Callable[[Host], Any], host: Host) -> Outcome:
    """Read the facts of one probe. An error is an outcome and never raised: UnavailableError is `Absent`."""
    start = time.perf_counter()
    try:
        facts = read(host)
    except UnavailableError as error:
        return Absent(why=str(error), seconds=time.perf_counter() - start)
    except Exception as error:  # noqa: BLE001 - the one place: a probe's error is an outcome
        return Failed(error=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - start)
    return Ok(facts=facts, seconds=time.perf_counter() - start)


def scan(host: Host, probes: Sequence[Source[Any]]) -> Snapshot:
    """Scan a host in this process: for tests and measurements of hosts that cannot hang."""
    return from_json(_scanned(host, [probe.name for probe in probes]), probes)


def _scanned(host: Host, names: Sequence[str]) -> dict[str, Json]:
    """A scan in the form of `wire.to_json`."""
    outcomes = {name: outcome_to_json(run(reader(name), host)) for name in names}
    identity = host.identity()
    return {"hostname": identity["hostname"], "taken_at_seconds": identity["time"], "outcomes": outcomes}


def answers(host: LiveHost | None, request: dict[str, Json]) -> Iterator[dict[str, Json]]:
    """Answer one request: of a probe of the live host, or of every probe for each recording in a file."""
    if host is None:
        yield from _replayed(request)
        return
    if request["begin"]:  # the first probe of a scan
        host.begin_scan()
    read = reader(request["probe"])
    if not request["record"]:
        yield {"outcome": without_secrets(outcome_to_json(run(read, host)))}
        return
    recorder = RecordingHost(host)  # the answers of the host are sent as well
    outcome = run(read, cast("Host", recorder))
    yield {"outcome": without_secrets(outcome_to_json(outcome)), "answers": recorder.answers}


def _replayed(request: dict[str, Json]) -> Iterator[dict[str, Json]]:
    try:
        os.chdir(request["folder"])
        for host in load_all(request["recording"]):
            yield _scanned(host, request["probes"])
    except (OSError, RecordingError) as error:
        yield {"error": str(error)}
    else:
        yield {"end": True}


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


def _live(root: str, call_file: int) -> LiveHost:
    from probes.host.live import LiveHost  # a recording is replayed without NVML and netlink

    host = LiveHost(root)
    host.name_driver_calls_in(call_file)
    return host


def main(root: str, call_file: int, parent: int) -> None:
    """Answer requests until the parent goes; `call_file` is the descriptor for `LiveHost.name_driver_calls_in`."""
    _die_with(parent)
    pipe = _private_stdout()
    host = _live(root, call_file) if root else None
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    _send(pipe, {"ready": True})
    while True:
        request = requests.get()
        for answer in answers(host, request):
            _send(pipe, {"id": request["id"], **answer})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
