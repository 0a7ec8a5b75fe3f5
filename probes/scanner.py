"""Scans of the live machine and replays of recordings, both with a child process (`probes.worker`).

Only the child imports the readers, so a driver call that hangs or crashes fails one probe only. A child that does not
answer in time is killed with its process group. The wait for its end is short, because a process that is blocked in the
kernel cannot be killed and must not block the agent. The child keeps running between scans, so that the driver remains
open.
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

from probes.api import Failed, Outcome, Snapshot, Source, read_host_name
from probes.wire import KIND, METHODS, SCHEMA_VERSION, Json, OutcomeError, RecordingError, from_json, outcome_from_json

Probes = Sequence[Source[Any]]

START_SECONDS = 60.0  # to start Python and import modules; generous, because a faulty node may be slow
ANSWER_LIMIT_BYTES = 64 << 20
_REAP_SECONDS = 1.0
_CALL_BYTES = 4096  # upper bound for the name of a driver call
REPLAY_SECONDS = 300.0  # for one recording; the largest one takes seconds
_END_SECONDS = 0.05  # while waiting for the child, check this often whether the scan was ended
_OWN_FILE = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(\d+)")  # these paths name another file in the child process


class ProbeProcessError(Exception):
    """The child did not answer; the message describes what happened."""


class HangError(ProbeProcessError):
    """The child did not answer in time."""


class ScanEndedError(ProbeProcessError):
    """The scan was ended before the child answered."""


class ProbeProcess:
    """A child process and the pipe to it. With an empty `root` the child only replays recordings.

    If `is_ended` returns true while this process waits for the child, ScanEndedError is raised shortly afterwards.
    """

    def __init__(self, root: str, is_ended: Callable[[], bool]) -> None:
        self.is_ended = is_ended
        package_parent = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(p for p in (package_parent, os.environ.get("PYTHONPATH")) if p)
        self._ended = threading.Event()
        try:
            self._call_file = os.memfd_create("topoflight-driver-call")
        except OSError as error:  # out of file descriptors
            raise ProbeProcessError(f"{type(error).__name__}: {error}") from None

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
            raise ProbeProcessError(f"{type(error).__name__}: {error}") from None
        self._requests = 0
        self._buffer = bytearray()
        try:
            if self._receive(time.monotonic() + START_SECONDS) != {"ready": True}:
                raise ProbeProcessError("the probe process did not say that it is ready")
        except ProbeProcessError:
            self.kill()
            raise

    def request(self, **request: Json) -> None:
        """Send a request; call `answer` to receive its answers. Raises ProbeProcessError."""
        self._requests += 1
        assert self.process.stdin is not None  # noqa: S101 - opened above
        try:
            self.process.stdin.write(json.dumps({"id": self._requests, **request}).encode() + b"\n")
        except BrokenPipeError:
            raise ProbeProcessError(self._describe_exit()) from None

    def answer(self, seconds: float) -> dict[str, Json]:
        """Receive the next answer to the last request. Raises ProbeProcessError."""
        answer = self._receive(time.monotonic() + seconds)
        if not isinstance(answer, dict) or answer.get("id") != self._requests:
            raise ProbeProcessError("the probe process sent an answer to another request")
        return answer

    def _receive(self, deadline: float) -> Json:
        assert self.process.stdout is not None  # noqa: S101 - opened above
        descriptor, started = self.process.stdout.fileno(), time.monotonic()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while (end := self._buffer.find(b"\n")) < 0:
            if self.is_ended():
                raise ScanEndedError("the scan was ended")
            left = deadline - time.monotonic()
            if not poll.poll(max(0.0, min(left, _END_SECONDS)) * 1000):
                if left > _END_SECONDS:
                    continue
                raise HangError(f"no answer after {time.monotonic() - started:.1f} s")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise ProbeProcessError(self._describe_exit())
            self._buffer += chunk
            if len(self._buffer) > ANSWER_LIMIT_BYTES:
                raise ProbeProcessError(f"the probe process answered more than {ANSWER_LIMIT_BYTES >> 20} MiB")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ProbeProcessError("the probe process answered something that is not JSON") from None

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


# Scans of the live machine

RETRY_SECONDS = 600.0
"""Delay before a probe is retried after its driver call hung or crashed: each attempt takes its whole time limit."""


class Scanner:
    """Scans a live machine repeatedly. It can be shared between threads."""

    def __init__(
        self, root: str = "/", *, probes: Probes, timeout_seconds: float | None = None,
        retry_seconds: float = RETRY_SECONDS, stop: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """`timeout_seconds` overrides every probe's time limit; a probe that hung is retried after `retry_seconds`.

        Setting `stop` soon ends a scan in progress: probes that have not answered yet are `Failed`.
        """
        if not Path(root).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the host's root is not a folder", root)
        self._root = str(Path(root).resolve())
        self._probes = tuple(probes)
        self._timeout_seconds = timeout_seconds
        self._child: ProbeProcess | None = None
        self._retry_seconds = retry_seconds
        self._resting: dict[str, tuple[str, float]] = {}  # probe -> (error, time.monotonic of next attempt)
        self._lingering: list[tuple[str, ProbeProcess]] = []  # (probe, child) for children that hang in the kernel
        self._stop = stop or threading.Event()
        self._closing = False
        self._start_error: str | None = None  # of the current scan: probes do not all wait for the same failure
        self._begin = True  # the child has no request of the current scan yet
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child before the first scan. If that fails, the scan reports the error."""
        with self._lock, contextlib.suppress(ProbeProcessError):
            self._start_child()

    def scan(self, answers: dict[str, dict[str, Json]] | None = None) -> Snapshot:
        """Run every probe. A probe that hangs, crashes or sends invalid data is `Failed`; others are unaffected.

        The answers of the host are added to `answers`, if given.
        """
        with self._lock:
            began, self._start_error, self._begin = time.time(), None, True
            outcomes = {probe.name: self._run_probe(probe, answers) for probe in self._probes}
            return Snapshot(hostname=read_host_name(), taken_at_seconds=began, outcomes=outcomes)

    def capture(self) -> tuple[Snapshot, dict[str, Json]]:
        """Run a scan, and record all answers of the host (see probes.wire)."""
        answers: dict[str, dict[str, Json]] = {}
        snapshot = self.scan(answers)
        return snapshot, pack_archive({"hostname": snapshot.hostname, "time": snapshot.taken_at_seconds}, answers, "")

    @property
    def child_pid(self) -> int | None:
        """The process id of the child; None if it is not running."""
        return self._child.process.pid if self._child else None

    def close(self) -> None:
        """Stop the child; a scan in progress ends too."""
        self._closing = True
        with self._lock:
            self._drop_child()
            self._closing = False

    def __enter__(self) -> Scanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_probe(self, probe: Source[Any], answers: dict[str, dict[str, Json]] | None) -> Outcome:
        start = time.perf_counter()
        hanging = [old.process for name, old in self._lingering if name == probe.name and old.process.poll() is None]
        if hanging:  # a new child would hang in the kernel as well
            text = f"process {hanging[0].pid} still hangs in the kernel while it reads this probe"
            return Failed(error=f"not read again: {text}")
        error, until = self._resting.get(probe.name, ("", 0.0))
        if time.monotonic() < until:
            return Failed(error=error)
        child: ProbeProcess | None = None
        try:
            child = self._start_child()
            child.request(probe=probe.name, record=answers is not None, begin=self._begin)
            self._begin = False
            answer = child.answer(self._timeout_seconds or probe.timeout_seconds)
            outcome = outcome_from_json(probe, answer.get("outcome"))
            if answers is not None:
                for method, answered in answer["answers"].items():
                    _merge(answers.setdefault(method, {}), answered)
            return outcome
        except (ProbeProcessError, OutcomeError) as caught:
            error_text = self._describe_failure(probe.name, caught, child.driver_call() if child else "")
            self._drop_child(probe.name)
            return Failed(error=error_text, seconds=time.perf_counter() - start)

    def _describe_failure(self, probe: str, error: Exception, call: str) -> str:
        """Return a failed probe's error. If a driver call hung or crashed, the next attempt is delayed."""
        if isinstance(error, ScanEndedError) or not (call or isinstance(error, HangError)):
            return str(error)
        in_call = f" in {call}" if call else ""
        message = f"{error}{in_call}; the next attempt is made after {self._retry_seconds / 60:.0f} minutes"
        self._resting[probe] = message, time.monotonic() + self._retry_seconds
        return message

    def _start_child(self) -> ProbeProcess:
        if self._start_error is not None:
            raise ProbeProcessError(self._start_error)
        if self._is_ended():
            raise ScanEndedError("the scan was ended")
        if self._child is None:
            try:
                self._child = ProbeProcess(self._root, self._is_ended)
            except ProbeProcessError as error:
                self._start_error = f"the probe process does not start: {error}"
                raise ProbeProcessError(self._start_error) from None
        return self._child

    def _is_ended(self) -> bool:
        return self._closing or self._stop.is_set()

    def _drop_child(self, probe_name: str = "") -> None:
        """Kill the child, and check whether children that could not be killed before have ended."""
        child, self._child = self._child, None
        if child is not None and not child.kill():
            self._lingering.append((probe_name, child))
        self._lingering = [(name, old) for name, old in self._lingering if old.process.poll() is None]


def _merge(into: dict[str, Json], answers: dict[str, Json]) -> None:
    """Merge recorded answers. NVML answers are nested one level deeper: two probes may call the same function."""
    for key, answer in answers.items():
        if isinstance(answer, dict) and isinstance(into.get(key), dict) and key.startswith("nvml"):
            into[key].update(answer)
        else:
            into[key] = answer


def pack_archive(identity: dict[str, Json], answers: dict[str, dict[str, Json]], source: str) -> dict[str, Json]:
    """Return the content of a recording file."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "hostname": identity["hostname"],
        "captured_at": identity["time"],
        "source": source,
        "answers": {method: dict(sorted(answers[method].items())) for method in METHODS if method in answers},
    }


def dumps(content: dict[str, Json]) -> str:
    """Format a recording as JSON with one answer per line, so that two recordings can be compared with diff."""
    head = {k: v for k, v in content.items() if k != "answers"}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
    sections = [f"  {json.dumps(m)}: {_format_section(a)}" for m, a in content["answers"].items()]
    return "\n".join(["{", *lines, ' "answers": {', ",\n".join(sections), " }", "}", ""])


def _format_section(answers: dict[str, Json]) -> str:
    rows = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    return "{\n" + ",\n".join(rows) + "\n  }"


# Replays of recordings

_replaying = threading.Lock()
_replayers: dict[int, ProbeProcess] = {}  # pid of this process -> child that replays recordings


def replay(path: Path, probes: Probes, stop: threading.Event | None = None) -> tuple[Snapshot, ...]:
    """Scan each recording in a file with a child process, which later calls reuse. Setting `stop` ends the scan.

    Raises RecordingError, which names the file and the error.
    """
    snapshots: list[Snapshot] = []
    folder = "/" if path.is_absolute() else str(Path.cwd())  # so that messages show the path as given
    descriptor = _OWN_FILE.fullmatch(str(path))
    name = f"/proc/{os.getpid()}/fd/{descriptor[1] or 0}" if descriptor else str(path)
    request = {"recording": name, "folder": folder, "probes": [probe.name for probe in probes]}
    is_ended = (stop or threading.Event()).is_set
    with _replaying:
        child = _replayers.pop(os.getpid(), None)
        try:
            if child is not None and child.process.poll() is not None:
                child.kill()
                child = None
            child = child or ProbeProcess("", is_ended)
            child.is_ended = is_ended
            child.request(**request)
            while "outcomes" in (answer := child.answer(REPLAY_SECONDS)):
                snapshots.append(from_json(answer, probes))
            _replayers[os.getpid()] = child
        except ScanEndedError:
            return tuple(snapshots)
        except ProbeProcessError as error:
            raise RecordingError(f"{path}: {error}") from None
        finally:
            if child is not None and os.getpid() not in _replayers:
                child.kill()
    if "error" in answer:
        raise RecordingError(answer["error"].replace(name, str(path)))
    return tuple(snapshots)
