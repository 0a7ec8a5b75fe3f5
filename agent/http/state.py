"""What the agent knows: the view of its own node, replaced as a whole after each scan, and the records of all nodes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base import result_store
from agent.checks.history import History
from agent.checks.measured import with_bench
from agent.checks.verdict import GateError, View, build_view
from agent.cluster.client import AccessError, ApiError, Client, connect, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, row
from agent.cluster.publish import record_of_view
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

LIST_SECONDS = 10.0  # the page asks again every 30 s; a list of 1,000 GPU servers has 20 MB
MORE = "only the node of this agent; on Kubernetes, agents started with --publish show every node"


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
        self._storing = threading.Lock()  # held while a run is compared with the stored ones and written
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

    def store_run(self, record: RunRecord, who: str) -> bool:
        """Store the record that `who` posted, once, and show it in the view; return whether it is new.

        Raises ProblemError 409 if it conflicts with a stored record, 507 if there is no space.
        """
        if self.folder is None or not self.folder.is_dir():
            raise ProblemError(409, "this agent stores nothing, because it has no state folder",
                               grant="start it with --state FOLDER, one that it may write into")  # fmt: skip
        with self._storing:
            for known in self._runs():
                if result_store.start_of(known) == result_store.start_of(record):
                    if replace(known, posted_by=None) == replace(record, posted_by=None):
                        return False
                    raise ProblemError(409, f"another record of {str(record.host)[:64]}, started at "
                                            f"{record.started_at}, is stored here")  # fmt: skip
            if result_store.store_run(replace(record, posted_by=who), self.folder) is None:
                detail = "the record could not be written into the state folder; the agent's log says why"
                raise ProblemError(507, detail)
        with self._handing:
            if self.view is not None:
                self.view = replace(self.view, runs=self._runs())
        return True

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
        if self.folder is None or not (path := self.folder / result_store.SEARCH_FILE).exists():
            return None
        from collectives.search.plan import SearchResult

        try:
            return plain.read(plain.loads(bounded.read_text(path, MOST_RESULT_BYTES)), SearchResult)
        except (OSError, ValueError) as error:
            result_store.log_unusable_file(path, error)
            return None

    def _runs(self) -> tuple[RunRecord, ...]:
        return result_store.read_runs(self.folder) if self.folder else ()


def age_seconds(view: View) -> float:
    """Return the age of the newest view, independent of changes of the clock."""
    return time.monotonic() - view.made_at_monotonic


class Records:
    """The records of the cluster, and why the last list failed."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._fleet: Fleet | None = None
        self._listed_at = -math.inf
        self.error: str | None = None

    def fleet(self) -> Fleet:
        """Return the records of all nodes. Raises ProblemError 503 if they have never been listed."""
        if time.monotonic() - self._listed_at > LIST_SECONDS:
            self._list()
        if self._fleet is None:
            detail = f"the cluster's records cannot be read: {self.error}"
            raise ProblemError(503, detail, headers={"Retry-After": "10"})
        return self._fleet

    def _list(self) -> None:
        fleet = self._fleet or Fleet()
        try:
            self._client = self._client or connect().brief()
            fleet.replace(self._client.items(path_of(API_VERSION, PLURAL)))
            self._fleet, self.error = fleet, None
        except (AccessError, ApiError) as error:
            self.error = str(error)
        self._listed_at = time.monotonic()


def own_fleet(view: View, interval_seconds: float) -> Fleet:
    """Return the record of this agent's node alone, for an agent that does not publish."""
    return Fleet([record_of_view(view, interval_seconds=interval_seconds)])


def nodes_document(fleet: Fleet, source: str, behind: str | None = None) -> dict[str, Any]:
    """Return every node as a row, and the number of nodes per verdict; `behind` says why the rows may be outdated."""
    now = time.time()
    rows = [row(record, now) for record in fleet.records()]
    counts = dict(sorted(Counter(made["verdict"] for made in rows).items()))
    more = {"note": MORE} if source != "kubernetes" else {"behind": behind} if behind else {}
    return {"schema_version": 1, "source": source, "counts": counts, "nodes": rows, **more}
