"""How publishing and watching have gone since this agent started: counters for /metrics, kept by who counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

Samples = list[tuple[tuple[str, ...], float]]

# Why a call failed, by the API server's status; a closed set, as the label's bound needs.
REASONS = {
    0: "unreachable", 400: "invalid", 401: "unauthorized", 403: "forbidden", 404: "missing", 409: "conflict",
    410: "expired", 422: "invalid", 429: "busy",
}  # fmt: skip


def reason_of(status: int) -> str:
    """The word for a status; what is not listed is the server's own trouble."""
    return REASONS.get(status, "server")


@dataclass(slots=True, kw_only=True)
class PublishTally:
    """Of one publisher; written by its thread alone."""

    interval_seconds: float  # a record is written this often though nothing changed
    attempts: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by reason
    succeeded_at_seconds: float | None = None  # Unix time

    def failed(self, status: int) -> None:
        """One attempt ended in this status."""
        self.failures[reason_of(status)] += 1

    def succeeded(self) -> None:
        """One attempt wrote everything."""
        self.succeeded_at_seconds = time.time()


@dataclass(slots=True, kw_only=True)
class WatchTally:
    """Of all watches of one agent, one after another; written by the thread of the one that runs."""

    lists: int = 0
    restarts: Counter[str] = field(default_factory=Counter)  # by reason
    heard_at_seconds: float | None = None  # Unix time of the last list, event or bookmark


def samples(publish: PublishTally | None, watch: WatchTally) -> Iterator[tuple[str, Samples]]:
    """Pairs of family name and its samples, as of now. An agent that does neither exports neither."""
    if publish is not None:
        yield "publish_interval_seconds", [((), publish.interval_seconds)]
        yield "publish_attempts_total", [((), float(publish.attempts))]
        yield (
            "publish_failures_total",
            [((why,), float(count)) for why, count in sorted(dict(publish.failures).items())],
        )
        if publish.succeeded_at_seconds is not None:
            yield "publish_success_timestamp_seconds", [((), publish.succeeded_at_seconds)]
    if watch.heard_at_seconds is not None or watch.restarts:
        yield "watch_lists_total", [((), float(watch.lists))]
        yield "watch_restarts_total", [((why,), float(count)) for why, count in sorted(dict(watch.restarts).items())]
    if watch.heard_at_seconds is not None:
        yield "watch_heard_timestamp_seconds", [((), watch.heard_at_seconds)]
