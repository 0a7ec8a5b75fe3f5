"""Scans the live machine and recordings through a child process, which alone imports what reads (probes.worker).

A driver call that hangs or crashes costs one probe. The child is kept between scans: the driver stays open and a scan
costs only its questions. A child that does not answer in time is killed with its process group and never waited for
longer than a moment: a process stuck in the kernel cannot be killed, and must not take the agent with it.
"""

from __future__ import annotations

import contextlib
import errno
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

from probes.api import Failed, Outcome, Snapshot, Source, host_name, snapshot_of
from probes.wire import Json, OutcomeError, RecordingError, archive, from_json, outcome_from_json

Probes = Sequence[Source[Any]]

START_SECONDS = 60.0  # to start Python and import; generous, a node in trouble is slow
ANSWER_LIMIT_BYTES = 64 << 20
_REAP_SECONDS = 1.0
_CALL_BYTES = 4096  # more than the name of a driver call takes
REPLAY_SECONDS = 300.0  # for one recording, the largest of which takes seconds
_END_SECONDS = 0.05  # a wait for the child looks this often whether the scan was ended
_OWN_FILE = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(\d+)")  # another file in the child
RETRY_SECONDS = 600.0
"""How long a probe rests whose driver call hung or crashed: each attempt costs the probe's whole time limit."""


class WorkerError(Exception):
    """The child did not answer; the words say what it did instead."""


class HangError(WorkerError):
    """The child gave no answer in time."""


class EndedError(WorkerError):
    """The scan was ended before the child answered."""


class _Worker:
    """One child and the pipe to it; one without a root replays recordings.

    A wait for the child raises EndedError soon after `is_ended` returns true.
    """

    def __init__(self, root: str, is_ended: Callable[[], bool]) -> None:
        self.is_ended = is_ended
        package_parent = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(p for p in (package_parent, os.environ.get("PYTHONPATH")) if p)
        self._ended = threading.Event()
        try:
            self._call_file = os.memfd_create("topoflight-driver-call")
        except OSError as error:  # no file left
            raise WorkerError(f"{type(error).__name__}: {error}") from None

        def start() -> None:
            """Start the child in a thread that lives as long: the kernel kills the child when this thread ends."""
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
        except (OSError, RuntimeError) as error:  # no process, no thread, no memory, no file left
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
        """Send a request; `answer` gives its answers. Raises WorkerError."""
        self._requests += 1
        assert self.process.stdin is not None  # noqa: S101 - opened above
        try:
            self.process.stdin.write(json.dumps({"id": self._requests, **request}).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerError(self._death()) from None

    def answer(self, seconds: float) -> dict[str, Json]:
        """The next answer to the last request. Raises WorkerError."""
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
                raise WorkerError(self._death())
            self._buffer += chunk
            if len(self._buffer) > ANSWER_LIMIT_BYTES:
                raise WorkerError(f"the probe process answered more than {ANSWER_LIMIT_BYTES >> 20} MiB")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerError("the probe process answered something that is not JSON") from None

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP_SECONDS)
        code = self.process.returncode
        if code is None:
            return "the probe process closed its pipe"
        if code < 0:
            return f"the probe process crashed: {signal.Signals(-code).name}"
        return f"the probe process ended with exit code {code}"

    def driver_call(self) -> str:
        """The NVML call that has not returned: "nvmlDeviceGetName of GPU3"; empty where there is none."""
        return os.pread(self._call_file, _CALL_BYTES, 0).rstrip(b"\0").decode(errors="replace")

    def kill(self) -> bool:
        """Kill the child's process group; False where it is stuck in the kernel and lingers."""
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


class Scanner:
    """Scans a live machine again and again; safe to share between threads."""

    def __init__(
        self, root: str = "/", *, probes: Probes, timeout_seconds: float | None = None,
        retry_seconds: float = RETRY_SECONDS, stop: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """`timeout_seconds` replaces every probe's own time limit; a probe that hung rests for `retry_seconds`.

        Soon after `stop` is set a scan under way ends: the probes that have not answered are `Failed`.
        """
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}; it must be greater than 0")
        if not Path(root).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the host's root is not a folder", root)
        self._root = str(Path(root).resolve())
        self._probes = tuple(probes)
        self._timeout_seconds = timeout_seconds
        self._worker: _Worker | None = None
        self._retry_seconds = retry_seconds
        self._resting: dict[str, tuple[str, float]] = {}  # probe -> its error, and until when (time.monotonic)
        self._lingering: list[tuple[str, _Worker]] = []  # the probe that was asked, and who hangs in the kernel with it
        self._stop = stop or threading.Event()
        self._closing = False
        self._start_error: str | None = None  # of the scan under way: do not wait for the same failure six times
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child ahead of the first scan, which tells if that fails."""
        with self._lock, contextlib.suppress(WorkerError):
            self._started()

    def scan(self) -> Snapshot:
        """Ask every probe; one that hangs, crashes or talks nonsense is `Failed`, the others answer."""
        with self._lock:
            began, self._start_error = time.time(), None
            return snapshot_of(host_name(), began, {probe.name: self._run(probe, {}) for probe in self._probes})

    def capture(self, source: str = "") -> tuple[Snapshot, dict[str, Json]]:
        """A scan and the recording of all that the host answered to it (see probes.wire)."""
        with self._lock:
            name, began, self._start_error = host_name(), time.time(), None
            answers: dict[str, dict[str, Json]] = {}
            outcomes = {probe.name: self._run(probe, answers, record=True) for probe in self._probes}
        return snapshot_of(name, began, outcomes), archive({"hostname": name, "time": began}, answers, source)

    @property
    def child_pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._worker.process.pid if self._worker else None

    def close(self) -> None:
        """End the child; a scan under way ends with it."""
        self._closing = True
        with self._lock:
            self._drop()
            self._closing = False

    def __enter__(self) -> Scanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, probe: Source[Any], answers: dict[str, dict[str, Json]], *, record: bool = False) -> Outcome:
        start = time.perf_counter()
        stuck = next(
            (w.process for name, w in self._lingering if name == probe.name and w.process.poll() is None), None
        )
        if stuck is not None:  # the next child would join it there
            return Failed(error=f"not asked again: process {stuck.pid} still hangs in the kernel with this question")
        error, until = self._resting.get(probe.name, ("", 0.0))
        if time.monotonic() < until:
            return Failed(error=error)
        worker: _Worker | None = None
        try:
            worker = self._started()
            seconds, begin = self._timeout_seconds or probe.timeout_seconds, probe is self._probes[0]
            worker.request(probe=probe.name, record=record, begin=begin)
            answer = worker.answer(seconds)
            outcome = outcome_from_json(probe, answer.get("outcome"))
            for method, answered in answer["answers"].items() if record else ():
                _merge(answers.setdefault(method, {}), answered)
            return outcome
        except (WorkerError, OutcomeError) as caught:
            words = self._failure(probe.name, caught, worker.driver_call() if worker else "")
            self._drop(probe.name)
            return Failed(error=words, seconds=time.perf_counter() - start)

    def _failure(self, probe: str, error: Exception, call: str) -> str:
        """What a failed probe says; one whose driver call hung or crashed rests before it is asked again."""
        if isinstance(error, EndedError) or not (call or isinstance(error, HangError)):
            return str(error)
        in_call = f" in {call}" if call else ""
        words = f"{error}{in_call}; the next attempt is made after {self._retry_seconds / 60:.0f} minutes"
        self._resting[probe] = words, time.monotonic() + self._retry_seconds
        return words

    def _started(self) -> _Worker:
        if self._start_error is not None:
            raise WorkerError(self._start_error)
        if self._is_ended():
            raise EndedError("the scan was ended")
        if self._worker is None:
            try:
                self._worker = _Worker(self._root, self._is_ended)
            except WorkerError as error:
                self._start_error = f"the probe process does not start: {error}"
                raise WorkerError(self._start_error) from None
        return self._worker

    def _is_ended(self) -> bool:
        return self._closing or self._stop.is_set()

    def _drop(self, probe_name: str = "") -> None:
        """Kill the child, and look again at those that could not be killed before."""
        worker, self._worker = self._worker, None
        if worker is not None and not worker.kill():
            self._lingering.append((probe_name, worker))
        self._lingering = [(name, old) for name, old in self._lingering if old.process.poll() is None]


def _merge(into: dict[str, Json], answers: dict[str, Json]) -> None:
    """NVML answers lie one level deeper than the others: two probes may ask the same symbol."""
    for key, answer in answers.items():
        if isinstance(answer, dict) and isinstance(into.get(key), dict) and key.startswith("nvml"):
            into[key].update(answer)
        else:
            into[key] = answer


_replaying = threading.Lock()
_replayers: dict[int, _Worker] = {}  # the child for recordings, by the process that started it: a fork has none


def replay(path: Path, probes: Probes, stop: threading.Event | None = None) -> tuple[Snapshot, ...]:
    """Scan each recording of a file in a child process, which later calls use again. After `stop` the rest is left out.

    Raises RecordingError that names the file and what is wrong with it.
    """
    found: list[Snapshot] = []
    folder = "/" if path.is_absolute() else str(Path.cwd())  # which another user, or nobody, may be able to enter
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
            worker = worker or _Worker("", is_ended)
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
