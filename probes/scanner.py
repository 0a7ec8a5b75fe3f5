"""Scans the live machine with a child process (probes.child).

The child keeps running between scans, so that the driver remains open.
"""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

from probes.api import Failed, Outcome, Snapshot, Source, host_name
from probes.child import EndedError, HangError, Probes, Worker, WorkerError
from probes.wire import KIND, METHODS, SCHEMA_VERSION, Json, OutcomeError, outcome_from_json

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
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}; it must be greater than 0")
        if not Path(root).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the host's root is not a folder", root)
        self._root = str(Path(root).resolve())
        self._probes = tuple(probes)
        self._timeout_seconds = timeout_seconds
        self._worker: Worker | None = None
        self._retry_seconds = retry_seconds
        self._resting: dict[str, tuple[str, float]] = {}  # probe -> (error, time.monotonic of next attempt)
        self._lingering: list[tuple[str, Worker]] = []  # (probe, child) for children that hang in the kernel
        self._stop = stop or threading.Event()
        self._closing = False
        self._start_error: str | None = None  # of the current scan: probes do not all wait for the same failure
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child before the first scan. If that fails, the scan reports the error."""
        with self._lock, contextlib.suppress(WorkerError):
            self._start_worker()

    def scan(self) -> Snapshot:
        """Run every probe. A probe that hangs, crashes or sends invalid data is `Failed`; others are unaffected."""
        with self._lock:
            began, self._start_error = time.time(), None
            outcomes = {probe.name: self._run_probe(probe, {}) for probe in self._probes}
            return Snapshot(hostname=host_name(), taken_at_seconds=began, outcomes=outcomes)

    def capture(self, source: str = "") -> tuple[Snapshot, dict[str, Json]]:
        """Run a scan, and record all answers of the host (see probes.wire)."""
        with self._lock:
            name, began, self._start_error = host_name(), time.time(), None
            answers: dict[str, dict[str, Json]] = {}
            outcomes = {probe.name: self._run_probe(probe, answers, record=True) for probe in self._probes}
        snapshot = Snapshot(hostname=name, taken_at_seconds=began, outcomes=outcomes)
        return snapshot, archive({"hostname": name, "time": began}, answers, source)

    @property
    def child_pid(self) -> int | None:
        """The process id of the child; None if it is not running."""
        return self._worker.process.pid if self._worker else None

    def close(self) -> None:
        """Stop the child; a scan in progress ends too."""
        self._closing = True
        with self._lock:
            self._drop_worker()
            self._closing = False

    def __enter__(self) -> Scanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_probe(self, probe: Source[Any], answers: dict[str, dict[str, Json]], *, record: bool = False) -> Outcome:
        start = time.perf_counter()
        stuck = next(
            (w.process for name, w in self._lingering if name == probe.name and w.process.poll() is None), None
        )
        if stuck is not None:  # a new child would hang in the kernel as well
            return Failed(error=f"not asked again: process {stuck.pid} still hangs in the kernel with this question")
        error, until = self._resting.get(probe.name, ("", 0.0))
        if time.monotonic() < until:
            return Failed(error=error)
        worker: Worker | None = None
        try:
            worker = self._start_worker()
            seconds, begin = self._timeout_seconds or probe.timeout_seconds, probe is self._probes[0]
            worker.request(probe=probe.name, record=record, begin=begin)
            answer = worker.answer(seconds)
            outcome = outcome_from_json(probe, answer.get("outcome"))
            for method, answered in answer["answers"].items() if record else ():
                _merge(answers.setdefault(method, {}), answered)
            return outcome
        except (WorkerError, OutcomeError) as caught:
            words = self._describe_failure(probe.name, caught, worker.driver_call() if worker else "")
            self._drop_worker(probe.name)
            return Failed(error=words, seconds=time.perf_counter() - start)

    def _describe_failure(self, probe: str, error: Exception, call: str) -> str:
        """Return a failed probe's error. If a driver call hung or crashed, the next attempt is delayed."""
        if isinstance(error, EndedError) or not (call or isinstance(error, HangError)):
            return str(error)
        in_call = f" in {call}" if call else ""
        words = f"{error}{in_call}; the next attempt is made after {self._retry_seconds / 60:.0f} minutes"
        self._resting[probe] = words, time.monotonic() + self._retry_seconds
        return words

    def _start_worker(self) -> Worker:
        if self._start_error is not None:
            raise WorkerError(self._start_error)
        if self._is_ended():
            raise EndedError("the scan was ended")
        if self._worker is None:
            try:
                self._worker = Worker(self._root, self._is_ended)
            except WorkerError as error:
                self._start_error = f"the probe process does not start: {error}"
                raise WorkerError(self._start_error) from None
        return self._worker

    def _is_ended(self) -> bool:
        return self._closing or self._stop.is_set()

    def _drop_worker(self, probe_name: str = "") -> None:
        """Kill the child, and check whether children that could not be killed before have ended."""
        worker, self._worker = self._worker, None
        if worker is not None and not worker.kill():
            self._lingering.append((probe_name, worker))
        self._lingering = [(name, old) for name, old in self._lingering if old.process.poll() is None]


def _merge(into: dict[str, Json], answers: dict[str, Json]) -> None:
    """Merge recorded answers. NVML answers are nested one level deeper: two probes may call the same function."""
    for key, answer in answers.items():
        if isinstance(answer, dict) and isinstance(into.get(key), dict) and key.startswith("nvml"):
            into[key].update(answer)
        else:
            into[key] = answer


def archive(identity: dict[str, Json], answers: dict[str, dict[str, Json]], source: str) -> dict[str, Json]:
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
