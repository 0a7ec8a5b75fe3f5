"""The child process (probes.worker), which reads hosts and replays recordings; only it imports the readers.

If a driver call hangs or crashes, only one probe fails. A child that does not answer in time is killed with its process
group. The wait for its end is short, because a process that is blocked in the kernel cannot be killed and must not
block the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from probes.api import Snapshot, Source
from probes.wire import Json, RecordingError, from_json

Probes = Sequence[Source[Any]]

START_SECONDS = 60.0  # to start Python and import modules; generous, because a faulty node may be slow
ANSWER_LIMIT_BYTES = 64 << 20
_REAP_SECONDS = 1.0
_CALL_BYTES = 4096  # upper bound for the name of a driver call
REPLAY_SECONDS = 300.0  # for one recording; the largest one takes seconds
_END_SECONDS = 0.05  # while waiting for the child, check this often whether the scan was ended
_OWN_FILE = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(\d+)")  # these paths name another file in the child process


class WorkerError(Exception):
    """The child did not answer; the message describes what happened."""


class HangError(WorkerError):
    """The child did not answer in time."""


class EndedError(WorkerError):
    """The scan was ended before the child answered."""


class Worker:
    """A child process and the pipe to it. With an empty `root` the child only replays recordings.

    If `is_ended` returns true while this process waits for the child, EndedError is raised shortly afterwards.
    """

    def __init__(self, root: str, is_ended: Callable[[], bool]) -> None:
        self.is_ended = is_ended
        package_parent = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(p for p in (package_parent, os.environ.get("PYTHONPATH")) if p)
        self._ended = threading.Event()
        try:
            self._call_file = os.memfd_create("topoflight-driver-call")
        except OSError as error:  # out of file descriptors
            raise WorkerError(f"{type(error).__name__}: {error}") from None

        def start() -> None:
            """Start the child in a thread that lives as long as the child; the kernel kills the child with it."""
            try:
                started.set_result(subprocess.Popen(
                    [sys.executable, "-P", "-m", "probes.worker", root, str(self._call_file), str(os.getpid())],
                    pass_fds=(self._call_file,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                    start_new_session=True, env=os.environ | {"PYTHONPATH": path},
                ))  # fmt: skip
            except OSError as error:
                started.set_exception(error)
            else:
                self._ended.wait()

        started: Future[subprocess.Popen[bytes]] = Future()
        try:
            threading.Thread(target=start, name="probe child", daemon=True).start()
            self.process = started.result()
        except (OSError, RuntimeError) as error:  # out of processes, threads, memory or file descriptors
            os.close(self._call_file)
            raise WorkerError(f"{type(error).__name__}: {error}") from None
        self._requests = 0
        self._buffer = bytearray()
        try:
            if self._receive(time.monotonic() + START_SECONDS) != {"ready": True}:
                raise WorkerError("the probe process did not say that it is ready")
        except WorkerError:
            self.kill()
            raise

    def request(self, **request: Json) -> None:
        """Send a request; call `answer` to receive its answers. Raises WorkerError."""
        self._requests += 1
        assert self.process.stdin is not None  # noqa: S101 - opened above
        try:
            self.process.stdin.write(json.dumps({"id": self._requests, **request}).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerError(self._describe_exit()) from None

    def answer(self, seconds: float) -> dict[str, Json]:
        """Receive the next answer to the last request. Raises WorkerError."""
        answer = self._receive(time.monotonic() + seconds)
        if not isinstance(answer, dict) or answer.get("id") != self._requests:
            raise WorkerError("the probe process answered something else than it was asked")
        return answer

    def _receive(self, deadline: float) -> Json:
        assert self.process.stdout is not None  # noqa: S101 - opened above
        descriptor, started = self.process.stdout.fileno(), time.monotonic()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while (end := self._buffer.find(b"\n")) < 0:
            if self.is_ended():
                raise EndedError("the scan was ended")
            left = deadline - time.monotonic()
            if not poll.poll(max(0.0, min(left, _END_SECONDS)) * 1000):
                if left > _END_SECONDS:
                    continue
                raise HangError(f"no answer after {time.monotonic() - started:.1f} s")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise WorkerError(self._describe_exit())
            self._buffer += chunk
            if len(self._buffer) > ANSWER_LIMIT_BYTES:
                raise WorkerError(f"the probe process answered more than {ANSWER_LIMIT_BYTES >> 20} MiB")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerError("the probe process answered something that is not JSON") from None

    def _describe_exit(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP_SECONDS)
        code = self.process.returncode
        if code is None:
            return "the probe process closed its pipe"
        if code < 0:
            return f"the probe process crashed: {signal.Signals(-code).name}"
        return f"the probe process ended with exit code {code}"

    def driver_call(self) -> str:
        """Return the NVML call in progress, such as "nvmlDeviceGetName of GPU3"; empty if there is none."""
        return os.pread(self._call_file, _CALL_BYTES, 0).rstrip(b"\0").decode(errors="replace")

    def kill(self) -> bool:
        """Kill the child's process group. Returns False if the child is blocked in the kernel and does not end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        os.close(self._call_file)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP_SECONDS)
        self._ended.set()
        return self.process.returncode is not None


_replaying = threading.Lock()
_replayers: dict[int, Worker] = {}  # pid of this process -> child that replays recordings


def replay(path: Path, probes: Probes, stop: threading.Event | None = None) -> tuple[Snapshot, ...]:
    """Scan each recording in a file with a child process, which later calls reuse. Setting `stop` ends the scan.

    Raises RecordingError, which names the file and the error.
    """
    found: list[Snapshot] = []
    folder = "/" if path.is_absolute() else str(Path.cwd())  # so that messages show the path as given
    own = _OWN_FILE.fullmatch(str(path))
    name = f"/proc/{os.getpid()}/fd/{own[1] or 0}" if own else str(path)
    request = {"recording": name, "folder": folder, "probes": [probe.name for probe in probes]}
    is_ended = (stop or threading.Event()).is_set
    with _replaying:
        worker = _replayers.pop(os.getpid(), None)
        try:
            if worker is not None and worker.process.poll() is not None:
                worker.kill()
                worker = None
            worker = worker or Worker("", is_ended)
            worker.is_ended = is_ended
            worker.request(**request)
            while "outcomes" in (answer := worker.answer(REPLAY_SECONDS)):
                found.append(from_json(answer, probes))
            _replayers[os.getpid()] = worker
        except EndedError:
            return tuple(found)
        except WorkerError as error:
            raise RecordingError(f"{path}: {error}") from None
        finally:
            if worker is not None and os.getpid() not in _replayers:
                worker.kill()
    if "error" in answer:
        raise RecordingError(answer["error"].replace(name, str(path)))
    return tuple(found)
