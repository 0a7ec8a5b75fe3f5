"""Keeps a copy of a resource's objects current: list once, then watch, list again only when the server forgot.

Specification: Kubernetes API concepts, "Efficient detection of changes": a watch that is too old ends in 410 Gone,
bookmarks move the resource version on, and every watch ends after some minutes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from agent.base.counters import WatchTally, reason_of
from agent.cluster.client import AGAIN, ApiError, Client, backoff_seconds

log = logging.getLogger(__name__)

GONE = 410
SHORTEST_WATCH_SECONDS = 1.0
BUSY_TRIES = 3  # of a first list, each after a longer pause, before a busy server counts as one that does not answer


class Store(Protocol):
    """What follows the objects."""

    def replace(self, items: Iterable[dict[str, Any]]) -> None:
        """These are all there are; iterating asks for the next page, and may raise ApiError."""

    def put(self, item: dict[str, Any]) -> None:
        """One is new or has changed."""

    def remove(self, item: dict[str, Any]) -> None:
        """One is gone."""


class Watcher:
    """A thread that keeps a Store in step with the API server until it is stopped."""

    def __init__(
        self, client: Client, path: str, store: Store, *, seconds: int = 300, tally: WatchTally | None = None
    ) -> None:
        self._tally = tally or WatchTally()
        # one try a call: the pauses between them are this thread's, and who waits for the list hears the first refusal
        self._client, self._path, self._store, self._seconds = client.limited(tries=1), path, store, seconds
        self._stop = threading.Event()
        self._answered = threading.Event()  # the first list is there, or was refused
        self._listed = False
        self.refused = False  # the last try was, before any list was there, and more patience would not help
        self._thread = threading.Thread(target=self._loop, name=f"watch {path.rsplit('/', 1)[-1]}", daemon=True)
        self.error: str | None = None
        self.lists = 0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End at the next event; the thread is a daemon and is not waited for."""
        self._stop.set()

    def wait(self, seconds: float) -> bool:
        """Whether the first list is there, at the latest after `seconds`.

        False at once where the last try was refused (`error` says why): a server that is away answers no sooner for
        being waited for, and every question would wait anew. One that is only busy is waited for.
        """
        self._answered.wait(seconds)
        return self._listed

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
                    self._stop.wait(backoff_seconds(failures))  # a server that ends watches at once is not hammered
                    failures += 1
            except ApiError as error:
                self._tally.restarts[reason_of(error.status)] += 1
                if error.status == GONE:
                    version = ""
                    if failures == 0:  # the first time it is the rule, not a failure
                        failures = 1
                        continue
                busy = error.status in AGAIN and failures + 1 < BUSY_TRIES
                failures = self._pause(str(error), failures, error.retry_after, refused=not busy)
            except Exception as error:  # noqa: BLE001 - whatever an object holds, the others are followed
                self._tally.restarts["invalid"] += 1
                version = ""
                failures = self._pause(f"an object that is none: {type(error).__name__}: {error}", failures)

    def _pause(self, error: str, failures: int, retry_after: float | None = None, *, refused: bool = True) -> int:
        """Say what went wrong and wait before the next try; one failure more."""
        self.error = error
        self.refused = refused and not self._listed
        if self.refused:
            self._answered.set()
        elif not self._listed:
            self._answered.clear()
        log.warning("watch of %s: %s", self._path, error)
        self._stop.wait(backoff_seconds(failures, retry_after))
        return failures + 1

    def _list(self) -> str:
        version = ""

        def each() -> Iterator[dict[str, Any]]:
            nonlocal version
            for items, version in self._client.pages(self._path):  # noqa: B007 - the last page's is kept
                yield from items

        self._store.replace(each())
        self.lists += 1
        self._tally.lists += 1
        self._heard()
        self._listed, self.refused = True, False
        self._answered.set()
        return version

    def _events(self, version: str) -> Iterator[str]:
        for event in self._client.watch(self._path, version, seconds=self._seconds):
            if self._stop.is_set():
                return
            item = event["object"]
            version = str(item["metadata"]["resourceVersion"])
            if event["type"] == "DELETED":
                self._store.remove(item)
            elif event["type"] in ("ADDED", "MODIFIED"):
                self._store.put(item)
            yield version

    def _heard(self) -> None:
        self.error = None
        self._tally.heard_at_seconds = time.time()
