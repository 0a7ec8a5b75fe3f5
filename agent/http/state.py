"""The view of the agent's own node, which each scan replaces as a whole, and the record of it in the cluster."""

from __future__ import annotations

import base64
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.base import result_store
from agent.checks.expect import NodeExpectation
from agent.checks.history import History
from agent.checks.measured import with_bench
from agent.checks.verdict import GateError
from agent.checks.view import View, build_view
from agent.cluster.client import ApiError, Client, Tally, choose_backoff, make_path
from agent.cluster.nodes import API_VERSION, PLURAL, NodeRecord, to_resource
from agent.http.worker import ProblemError
from contracts.run_record import RunRecord
from probes.api import Snapshot
from probes.increases import EarlierScans

log = logging.getLogger(__name__)

END_SECONDS = 2.0  # for the final write of the record, within the pod's grace period
MISSING_SECONDS = 300.0  # until a missing CRD is looked for again


class State:
    """Scans in its own thread every `interval_seconds`, and holds the newest view.

    `scan` returns the snapshot of this host, or of a recording. `folder` contains benchmarks and runs. `expected`
    returns each host's expectations. `history` decides which findings are raised; None raises each at once.
    """

    def __init__(
        self, scan: Callable[[], tuple[Snapshot, ...]], *, interval_seconds: float, folder: Path | None = None,
        expected: Callable[[], Sequence[NodeExpectation]] = tuple, history: History | None = None,
    ) -> None:  # fmt: skip
        self._scan, self._expected = scan, expected
        self.interval_seconds, self.folder, self.history = interval_seconds, folder, history
        self.view: View | None = None  # None until the first scan is done
        self.error: str | None = None  # why the last scan failed as a whole; None if it succeeded
        self._past = EarlierScans()
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
            bench, bench_at = result_store.read_last_benchmark(self.folder) if self.folder else (None, None)
            snapshots, (expected, unread) = self._scan(), self._read_expectation()
            scanned = build_view(
                snapshots, runs=self._runs(), earlier=self._past.snapshots, expected=expected, unread=unread,
                search=result_store.read_last_search(self.folder) if self.folder else None,
            )  # fmt: skip
            view = with_bench(scanned, bench, bench_at)
            if self.history is not None:
                view = self.history.update(view)
            self._past.add(view.snapshots)
            with self._handing:
                self.view = view
            self.error = None
            return view

    def _read_expectation(self) -> tuple[Sequence[NodeExpectation], str]:
        """Read the expectations for each scan, because a ConfigMap may have changed; return also why that failed."""
        try:
            return self._expected(), ""
        except GateError as error:
            return (), str(error)

    def store_run(self, record: RunRecord, who: str) -> bool:
        """Store the record that `who` posted, once, and show it in the view; return whether it is new.

        Raises ProblemError 409 if it conflicts with a stored record, 507 if there is no space.
        """
        if self.folder is None or not self.folder.is_dir():
            raise ProblemError(409, "this agent stores nothing, because it has no state folder",
                               grant="start it with --state FOLDER, one that it may write into")  # fmt: skip
        with self._storing:
            for stored in self._runs():
                if (stored.host, stored.started_at) == (record.host, record.started_at):  # one job at a time on a host
                    if replace(stored, posted_by=None) == replace(record, posted_by=None):
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

    def _runs(self) -> tuple[RunRecord, ...]:
        return result_store.read_runs(self.folder) if self.folder else ()


# Write the record of this node to the cluster (server-side apply).


class Publisher:
    """A thread that writes a node's record when it changes, and at least every `interval_seconds`."""

    def __init__(
        self, client: Client, latest: Callable[[], NodeRecord | None], *, interval_seconds: float = 300.0,
        look_seconds: float = 5.0,
    ) -> None:  # fmt: skip
        self._shared, self._latest = client, latest
        self._client = client.limited(tries=1)  # this thread backs off: retries of thousands add load
        self._interval, self._look = interval_seconds, look_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="publish", daemon=True)
        self._last: NodeRecord | None = None
        self._due = 0.0
        self._exists = False
        # the interval is the maximum time between writes of an unchanged record
        self.tally = Tally(float, {("publish_interval_seconds",): interval_seconds, ("publish_attempts_total",): 0.0})

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; a write in progress gets a short time to finish."""
        self._stop.set()
        self._client.close()
        self._shared.close()
        self._thread.join(timeout=2)
        if self._last is None or self._thread.is_alive():
            return
        # no agent watches the node any more; without an API server only the record's age shows this
        self._client = self._client.limited(tries=1, timeout_seconds=END_SECONDS)
        try:
            self.write(replace(self._last, stopped_at_seconds=time.time()))
        except ApiError as error:
            log.warning("publish: the end was not written: %s", error)
        finally:
            self._client.close()

    def _loop(self) -> None:
        failures, logged, repeat_at = 0, "", 0.0
        self._stop.wait(random.uniform(0.0, self._look))  # noqa: S311 - a rollout starts all agents at once
        while not self._stop.is_set():
            pause = self._look
            try:
                record = self._latest()
                last = record and self._last and replace(self._last, scanned_at_seconds=record.scanned_at_seconds)
                if record is not None and (record != last or time.monotonic() >= self._due):
                    self.write(record)
                    if failures:
                        log.warning("publish: the record is written again")
                    failures, logged = 0, ""
            except ApiError as error:
                self.tally["publish_failures_total", error.reason] += 1
                if error.reason != logged or time.monotonic() >= repeat_at:  # attempts follow each other closely
                    log.warning("publish: %s", error)
                    logged, repeat_at = error.reason, time.monotonic() + MISSING_SECONDS
                pause = MISSING_SECONDS if error.status == 404 else choose_backoff(failures, error.retry_after)
                failures += 1
            except Exception:
                log.exception("publish: a record could not be made")
                pause = MISSING_SECONDS
            self._stop.wait(pause)

    def write(self, record: NodeRecord) -> None:
        """Write the object and its status once. Raises ApiError."""
        self.tally["publish_attempts_total",] += 1
        resource, status = to_resource(record)
        if not self._exists:
            if owner := read_owner(self._client.token(), record.name):
                resource["metadata"] = {**resource["metadata"], "ownerReferences": [owner]}  # `status` has the old one
            self._client.apply(make_path(API_VERSION, PLURAL, record.name), resource)
            self._exists = True
        try:
            self._client.apply(make_path(API_VERSION, PLURAL, record.name, sub="status"), status)
        except ApiError as error:
            if error.status == 404:
                self._exists = False  # it was deleted: create it again at the next attempt
            raise
        self.tally["publish_success_timestamp_seconds",] = time.time()
        self._last = record
        # with jitter, so that thousands of agents that started together do not keep writing at the same time
        self._due = time.monotonic() + self._interval * random.uniform(0.8, 1.0)  # noqa: S311 - no secret


def read_owner(token: str, node: str) -> dict[str, Any] | None:
    """Return the Node as an owner reference, so that the object is deleted with it; None if the token has no Node.

    Since Kubernetes 1.30 a pod's own token contains its node's name and uid (bound service account tokens, claim
    kubernetes.io), so the agent needs no permission to get Nodes. In an older cluster the record outlives the Node.
    """
    try:
        claims = token.split(".")[1]
        node_claim = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["kubernetes.io"]["node"]
        if node_claim["name"] == node and node_claim["uid"]:  # signed by the API server; no decision depends on them
            return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": str(node_claim["uid"])}
    except (IndexError, KeyError, TypeError, ValueError):
        pass
    log.info("the record of %s gets no owner: the token does not name the Node, so the record outlives it", node)
    return None
