"""The child process that reads a host: `python -m probes.worker ROOT CALL_FILE PARENT`. It exchanges JSON lines.

Only this process imports the readers (`probes/*/read.py`, `probes.host`). If a driver call hangs or crashes, the parent
(probes.scanner) starts another child. The child ends when the parent closes the pipe, even during a hung call, because
a separate thread reads the pipe. With an empty ROOT it only replays recordings.
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
    read_function: Callable[[Host], Any] = import_module(f"probes.{name}.read").read
    return read_function


def run(read_facts: Callable[[Host], Any], host: Host) -> Outcome:
    """Read the facts of one probe. An error is returned as outcome, not raised; UnavailableError becomes `Absent`."""
    start = time.perf_counter()
    try:
        facts = read_facts(host)
    except UnavailableError as error:
        return Absent(why=str(error), seconds=time.perf_counter() - start)
    except Exception as error:  # noqa: BLE001 - the only place: an error of a probe is an outcome
        text = f"{type(error).__name__}: {error}"
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else text
        return Failed(error=text, seconds=time.perf_counter() - start)
    return Ok(facts=facts, seconds=time.perf_counter() - start)


def scan(host: Host, probes: Sequence[Source[Any]]) -> Snapshot:
    """Scan a host in this process; for tests and measurements with hosts that cannot hang."""
    return from_json(_scan_to_json(host, [probe.name for probe in probes]), probes)


def _scan_to_json(host: Host, names: Sequence[str]) -> dict[str, Json]:
    """Scan a host, and return the result in the format of `wire.to_json`."""
    outcomes = {name: outcome_to_json(run(reader(name), host)) for name in names}
    identity = host.identity()
    return {"hostname": identity["hostname"], "taken_at_seconds": identity["time"], "outcomes": outcomes}


def answers(host: LiveHost | None, request: dict[str, Json]) -> Iterator[dict[str, Json]]:
    """Answer one request: one probe of the live host, or all probes for each recording in a file."""
    if host is None:
        yield from _replay(request)
        return
    if request["begin"]:  # the first request of a scan
        host.begin_scan()
    read_facts = reader(request["probe"])
    if not request["record"]:
        yield {"outcome": without_secrets(outcome_to_json(run(read_facts, host)))}
        return
    recorder = RecordingHost(host)  # the answers of the host are sent to the parent
    outcome = run(read_facts, cast("Host", recorder))
    yield {"outcome": without_secrets(outcome_to_json(outcome)), "answers": recorder.answers}


def _replay(request: dict[str, Json]) -> Iterator[dict[str, Json]]:
    try:
        os.chdir(request["folder"])
        for host in load_all(request["recording"]):
            yield _scan_to_json(host, request["probes"])
    except (OSError, RecordingError) as error:
        yield {"error": str(error)}
    else:
        yield {"end": True}


def _listen(requests: queue.Queue[dict[str, Json]]) -> None:
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    os._exit(0)  # the parent has ended; exit at once, because a hung driver call would block a normal exit


def _take_stdout() -> IO[bytes]:
    """Return the pipe to the parent, and redirect everything that a library prints to stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "wb")


def _send(pipe: IO[bytes], message: dict[str, Json]) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends; if stopped (SIGSTOP), it cannot see the closed pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def _make_live_host(root: str, call_file: int) -> LiveHost:
    from probes.host.live import LiveHost  # not needed to replay recordings, which works without NVML and netlink

    host = LiveHost(root)
    host.name_driver_calls_in(call_file)
    return host


def main(root: str, call_file: int, parent: int) -> None:
    """Answer requests until the parent ends; `call_file` is the file descriptor for `LiveHost.name_driver_calls_in`."""
    _die_with(parent)
    pipe = _take_stdout()
    host = _make_live_host(root, call_file) if root else None
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    _send(pipe, {"ready": True})
    while True:
        request = requests.get()
        for answer in answers(host, request):
            _send(pipe, {"id": request["id"], **answer})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
