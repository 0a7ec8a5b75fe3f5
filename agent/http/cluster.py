"""The cluster view: the records of all nodes, and the documents made from them.

The records come from a watch of the NodeTopology resources, or from the hosts that this agent serves. A watch lists
once, then follows the changes, and lists again only if the server has dropped the resource version. It starts with the
first request and ends some minutes after the last one. If every agent of a large cluster watched all the time, each
write would be sent once per node.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool

from agent.advice import advise
from agent.advice.request import Request
from agent.base import units
from agent.base.options import RequestError
from agent.checks.verdict import View
from agent.cluster.client import ApiError, Client, Tally, backoff_seconds, path_of, reason_of
from agent.cluster.gate import Places, published, read_places
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, NodeRecord, row
from agent.cluster.publish import record_of_view
from agent.http.state import State
from agent.http.worker import ProblemError
from contracts.layout import LayoutError
from planner.advice import Recommendation
from planner.forecast.machines import with_gpus
from planner.nccl_env.situation import Note
from topology.cluster import join
from topology.graph import NodeTopology

log = logging.getLogger(__name__)

Json = dict[str, Any]
Samples = list[tuple[tuple[str, ...], float]]
GONE = 410
SHORTEST_WATCH_SECONDS = 1.0
LOOK_SECONDS = 0.05
LIST_SECONDS = 20.0  # longest wait of the first request for the first list; a refusal ends it earlier
IDLE_SECONDS = 600.0
PLACES_SECONDS = 600.0  # Nodes get their labels when they join
MORE = "only the nodes that this agent itself scans; on Kubernetes, agents started with --publish show every node"
# Findings that the recommended settings correct: a node without other failures is included in the advice.
CORRECTED_BY_SETTINGS = {"interfaces.choice.wrong", "topology.gdr.path", "topology.gpu_nic.far"}


# The watch of the records, and metrics of watching and publishing.


class Watcher:
    """A thread that updates the records of a Fleet from the API server until it is stopped."""

    def __init__(
        self, client: Client, path: str, fleet: Fleet, *, seconds: int = 300, tally: Tally | None = None
    ) -> None:
        self.tally = Tally(float) if tally is None else tally
        # One attempt per call: this thread pauses between attempts and reports the first refusal immediately
        self._client, self._path, self._fleet, self._seconds = client.limited(tries=1), path, fleet, seconds
        self._stop = threading.Event()
        self.listed = False  # whether the first list has been read
        self.refused = False  # whether the last attempt failed before the first list, so that waiting is useless
        self.error: str | None = None

    def start(self) -> None:
        """Start the thread."""
        self.tally["watch_lists_total",] += 0
        name = f"watch {self._path.rsplit('/', 1)[-1]}"
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop at the next event; the thread is a daemon and is not joined."""
        self._stop.set()

    def _loop(self) -> None:
        version, failures = "", 0
        while not self._stop.is_set():
            try:
                if not version:
                    version = self._list()
                began, first = time.monotonic(), version
                for seen in self._events(version):
                    version, failures = seen, 0
                    self._heard()
                if version == first and time.monotonic() - began < SHORTEST_WATCH_SECONDS:
                    self._stop.wait(backoff_seconds(failures))  # avoids a busy loop if the server ends watches at once
                    failures += 1
            except ApiError as error:
                self.tally["watch_restarts_total", reason_of(error.status)] += 1
                if error.status == GONE:
                    version = ""
                    if failures == 0:  # the first one is normal
                        failures = 1
                        continue
                failures = self._pause(str(error), failures, error.retry_after)
            except Exception as error:  # noqa: BLE001 - whatever an object holds, the others are followed
                self.tally["watch_restarts_total", "invalid"] += 1
                version = ""
                failures = self._pause(f"an object that is none: {type(error).__name__}: {error}", failures)

    def _pause(self, error: str, failures: int, retry_after: float | None = None) -> int:
        """Log the error, wait before the next attempt, and return the increased number of failures."""
        self.error = error
        self.refused = not self.listed
        log.warning("watch of %s: %s", self._path, error)
        self._stop.wait(backoff_seconds(failures, retry_after))
        return failures + 1

    def _list(self) -> str:
        version = ""

        def each() -> Iterator[dict[str, Any]]:
            nonlocal version
            for items, version in self._client.pages(self._path):  # noqa: B007 - the last page's is kept
                yield from items

        self._fleet.replace(each())
        self.tally["watch_lists_total",] += 1
        self._heard()
        self.listed, self.refused = True, False
        return version

    def _events(self, version: str) -> Iterator[str]:
        for event in self._client.watch(self._path, version, seconds=self._seconds):
            if self._stop.is_set():
                return
            item = event["object"]
            version = str(item["metadata"]["resourceVersion"])
            if event["type"] == "DELETED":
                self._fleet.remove(item)
            elif event["type"] in ("ADDED", "MODIFIED"):
                self._fleet.put(item)
            yield version

    def _heard(self) -> None:
        self.error = None
        self.tally["watch_heard_timestamp_seconds",] = time.time()


def samples(*tallies: Tally) -> Iterable[tuple[str, Samples]]:
    """Return pairs of metric family and samples. An agent that does not publish or watch has no such families."""
    found: dict[str, Samples] = {}
    for tally in tallies:
        for (family, *labels), value in sorted(dict(tally).items()):
            found.setdefault(family, []).append((tuple(labels), value))
    return found.items()


class Cluster:
    """Records of all nodes, from Kubernetes or from this agent's own scans."""

    def __init__(
        self, state: State, *, name: str | None = None, client: Client | None = None,
        interval_seconds: float = 300.0, idle_seconds: float = IDLE_SECONDS,
    ) -> None:  # fmt: skip
        self._state, self._name = state, name
        self.client = client  # of the API server with the records; None: they are this agent's own scans
        self._interval, self._idle = interval_seconds, idle_seconds
        self._fleet = Fleet()
        self._lock = threading.Lock()
        self._watcher: Watcher | None = None
        self.tally = Tally(float)
        self._own: Mapping[str, NodeRecord] = {}
        self._of_view: View | None = None
        self._timer: threading.Timer | None = None
        self._requested = 0.0
        self._places, self._places_at = Places(why="a single agent does not know racks and switches"), -PLACES_SECONDS

    @property
    def source(self) -> str:
        """Return where the records come from."""
        return "kubernetes" if self.client else "hosts"

    def own(self) -> Mapping[str, NodeRecord]:
        """Return the record of this agent's own scan by name, created once per view; empty before the first scan."""
        view = self._state.view
        with self._lock:
            if view is not None and view is not self._of_view:
                record = record_of_view(view, name=self._name, interval_seconds=self._interval)
                self._own, self._of_view = {record.name: record}, view
            return self._own

    async def records(self) -> Mapping[str, NodeRecord]:
        """Return the current records by name. The wait for the API server does not block a thread.

        Raises ProblemError 503 before the first scan, and if the API server does not answer.
        """
        self._state.current()
        if self.client is None:
            return await run_in_threadpool(self.own)
        await self._listed(self._follow(self.client))
        return {record.name: record for record in self._fleet.records()}

    async def places(self) -> Places:
        """Return the rack or switch of each node from the labels of the Nodes; cached for ten minutes."""
        if self.client is not None and time.monotonic() - self._places_at > PLACES_SECONDS:
            self._places_at = time.monotonic()
            self._places = await run_in_threadpool(read_places, self.client.brief())
        return self._places

    def stop(self) -> None:
        """Stop the watch."""
        with self._lock:
            if self._timer:
                self._timer.cancel()
            if self._watcher:
                self._watcher.stop()
            self._watcher = self._timer = None

    def watch_error(self) -> str | None:
        """Return why the records may be outdated; None if they are current."""
        return self._watcher.error if self._watcher else None

    def _follow(self, client: Client) -> Watcher:
        with self._lock:
            self._requested = time.monotonic()
            if self._watcher is None:
                self._watcher = Watcher(client, path_of(API_VERSION, PLURAL), self._fleet, tally=self.tally)
                self._watcher.start()
                self._arm(self._idle)
            return self._watcher

    async def _listed(self, watcher: Watcher) -> None:
        """Wait for the first list or the first refusal."""
        until = time.monotonic() + LIST_SECONDS
        while not watcher.listed:
            if watcher.refused or time.monotonic() > until:
                detail = watcher.error or f"the API server has not answered within {LIST_SECONDS:.0f} s"
                detail = f"the cluster's records cannot be read: {detail}"
                raise ProblemError(503, detail, headers={"Retry-After": "10"})
            await asyncio.sleep(LOOK_SECONDS)

    def _arm(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._rest)
        self._timer.daemon = True
        self._timer.start()

    def _rest(self) -> None:
        """Stop the watch if there were no requests for a while; otherwise check again later."""
        with self._lock:
            left = self._requested + self._idle - time.monotonic()
            if left > 0:
                self._arm(left)
            elif self._watcher is not None:
                self._watcher.stop()
                self._watcher = self._timer = None


def nodes_document(fleet: Fleet, source: str, *, now: float | None = None) -> Json:
    """Return every node as a row, and the number of nodes per verdict."""
    now = time.time() if now is None else now
    rows = [row(record, now) for record in fleet.records()]
    counts = Counter(made["verdict"] for made in rows)
    document = {"schema_version": 1, "source": source, "counts": dict(sorted(counts.items())), "nodes": rows}
    return document if source == "kubernetes" else document | {"note": MORE}


def advise_cluster(fleet: Fleet, request: Request, *, now: float | None = None) -> tuple[Recommendation, int]:
    """Return one recommendation for all nodes that report and did not fail, or `request.nodes` of them; and how many.

    It uses only the records, also for this agent's own node, so that every agent gives the same answer. Of equal nodes,
    only one is evaluated.
    """
    now = time.time() if now is None else now
    used: list[NodeRecord] = []
    left_out: dict[str, list[str]] = {}
    for record in fleet.records():
        known = fleet.topology(record) is not None
        why = "silent" if record.silent(now) else "failed" if _fails_jobs(record) else "" if known else "no graph"
        if why:
            left_out.setdefault(why, []).append(record.name)
        else:
            used.append(record)
    if not used:
        raise RequestError("scope=cluster: no node is known that did not fail")
    if request.nodes is not None:
        if request.nodes > len(used):
            raise RequestError(f"nodes={request.nodes}: {len(used)} nodes are known that did not fail")
        used = used[: request.nodes]
    kinds: dict[str | None, NodeRecord] = {}
    for record in used:
        kinds.setdefault(record.facts, record)
    snapshots = tuple(fleet.snapshot(record) for record in kinds.values())
    cluster = join(_topologies(fleet, used, request.ranks_per_node))
    try:
        checks = [check for record in used for check in published(record.name, record)]
        advice = advise.of_cluster(request, cluster, snapshots, ranks=request.ranks_per_node, checks=checks)
    except (LayoutError, ValueError) as error:
        raise RequestError(str(error)) from None
    notes = [Note(topic="cluster", text=f"planned for {units.count(len(used), 'node')}")]
    for why, names in sorted(left_out.items()):
        notes.append(Note(topic="cluster", text=units.some(names, f"left out as {why}: ", 5)))
    return replace(advice, notes=(*advice.notes, *notes)), len(used)


def _fails_jobs(record: NodeRecord) -> bool:
    """Return whether a node has a failure that job settings do not correct."""
    if record.verdict != "fail":
        return False
    failed = {str(found.get("code")) for found in record.findings if found.get("severity") == "fail"}
    return not failed or bool(failed - CORRECTED_BY_SETTINGS)


def _topologies(fleet: Fleet, used: Sequence[NodeRecord], ranks: int | None) -> list[NodeTopology]:
    """Return the topology of each node; equal nodes share objects, by which the planner detects that they are equal."""
    cut: dict[str | None, NodeTopology] = {}
    found = []
    for record in used:
        node = fleet.topology(record)
        assert node is not None  # noqa: S101 - only such records are used
        if ranks is not None and node.gpus:
            kind = fleet.kind(record)
            if kind not in cut:
                try:
                    cut[kind] = with_gpus(node, ranks)
                except ValueError as error:
                    raise RequestError(str(error)) from None
            node = replace(cut[kind], hostname=record.name)
        found.append(node)
    return found
