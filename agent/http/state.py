"""The agent's state: one `View` at a time, replaced as a whole after each scan."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agent.base import result_store
from agent.base.result_store import SEARCH_FILE
from agent.checks.history import History
from agent.checks.measured import with_bench
from agent.checks.verdict import GateError, View, build_view
from agent.http.worker import ProblemError
from collectives.bench.results import MOST_RESULT_BYTES
from contracts import bounded, plain
from contracts.run_record import RunRecord
from probes.api import Snapshot
from probes.increases import Past

if TYPE_CHECKING:
    from agent.checks.expect import Expected
    from collectives.search.plan import SearchResult

log = logging.getLogger(__name__)


class State:
    """Scans in its own thread every `interval_seconds`, and holds the newest view.

    `scan` returns the snapshot of this host, or of a recording. `folder` contains benchmarks and runs. `expected`
    returns each host's expectations. `history` decides which findings are raised; None raises each at once.
    """

    def __init__(
        self, scan: Callable[[], tuple[Snapshot, ...]], *, interval_seconds: float, folder: Path | None = None,
        expected: Callable[[], Sequence[Expected]] = tuple, history: History | None = None,
    ) -> None:  # fmt: skip
        self._scan, self._expected = scan, expected
        self.interval_seconds, self.folder, self.history = interval_seconds, folder, history
        self.view: View | None = None  # None until the first scan is done
        self.error: str | None = None  # why the last scan failed as a whole; None if it succeeded
        self._past = Past()
        self._stop = threading.Event()
        self._scanning = threading.Lock()
        self._handing = threading.Lock()  # held while the published view is replaced
        self._thread = threading.Thread(target=self._loop, name="scan", daemon=True)

    def current(self) -> View:
        """Return the newest view. Raises ProblemError 503 before the first scan, because nothing is known yet."""
        if self.view is None:
            raise ProblemError(503, self.error or "the first scan is not done yet", headers={"Retry-After": "2"})
        return self.view

    def start(self) -> None:
        """Start scanning."""
        if self.folder is not None:
            result_store.sweep(self.folder)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current scan; waits only briefly."""
        self._stop.set()
        self._thread.join(timeout=2)

    def refresh(self) -> View:
        """Scan now; concurrent callers scan one after another, never two at once."""
        with self._scanning:
            bench, bench_at = result_store.last_benchmark(self.folder) if self.folder else (None, None)
            scanned = build_view(
                self._scan(), runs=self._runs(), earlier=self._past.snapshots,
                expected=self._read_expectation(), search=self._last_search(),
            )  # fmt: skip
            view = with_bench(scanned, bench, bench_at)
            if self.history is not None:
                view = self.history.seen(view)
            self._past.add(view.snapshots)
            with self._handing:
                self.view = view
            self.error = None
            return view

    def _read_expectation(self) -> Sequence[Expected] | str:
        """Read the expectations for each scan, because a ConfigMap may have changed; return a text if that fails."""
        try:
            return self._expected()
        except GateError as error:
            return str(error)

    def reread_runs(self) -> None:
        """Create a view of the last scan with the runs that are stored now."""
        with self._handing:
            if self.view is not None:
                self.view = replace(self.view, runs=self._runs())

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                log.exception("scan failed")
            self._stop.wait(self.interval_seconds)

    def _last_search(self) -> SearchResult | None:
        """Return the latest search for bad nodes that this host planned; None if there is no readable one."""
        if self.folder is None or not (path := self.folder / SEARCH_FILE).exists():
            return None
        from collectives.search.plan import SearchResult

        try:
            return plain.read(plain.loads(bounded.read_text(path, MOST_RESULT_BYTES)), SearchResult)
        except (OSError, ValueError) as error:
            result_store.left_out(path, error)
            return None

    def _runs(self) -> tuple[RunRecord, ...]:
        return result_store.read_runs(self.folder) if self.folder else ()


def age_seconds(view: View) -> float:
    """Return the age of the newest view, independent of changes of the clock."""
    return time.monotonic() - view.made_at_monotonic
