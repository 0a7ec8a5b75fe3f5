"""Thousands of agents and one API server, in simulated time: after an outage they come back spread, and all of them."""

from __future__ import annotations

import heapq
import random
from collections import Counter

from rigs.tables import each_row

from agent.cluster.client import LONGEST_WAIT_SECONDS, backoff_seconds

AGENTS = 5000


def come_back(*, down_seconds: float, per_second: int, retry_after: float | None) -> tuple[Counter[int], float]:
    """Requests per second of simulated time once the server is up, and when the last agent was served.

    All agents fail first at the same moment, the worst case; a server that is full answers 429.
    """
    random.seed(7)
    asked: Counter[int] = Counter()
    served: Counter[int] = Counter()
    due = [(0.0, agent, 0) for agent in range(AGENTS)]
    last = 0.0
    while due:
        at, agent, failures = heapq.heappop(due)
        second = int(at)
        if at < down_seconds:
            heapq.heappush(due, (at + backoff_seconds(failures), agent, failures + 1))
            continue
        asked[second] += 1
        if served[second] < per_second:
            served[second] += 1
            last = at
        else:
            heapq.heappush(due, (at + backoff_seconds(failures, retry_after), agent, failures + 1))
    return asked, last - down_seconds


@each_row("down_seconds", [60.0, 600.0])
def test_after_an_outage_no_second_sees_more_than_its_share(down_seconds: float) -> None:
    """A server that takes them all is asked evenly over the longest pause: nobody has to be turned away."""
    asked, took = come_back(down_seconds=down_seconds, per_second=AGENTS, retry_after=None)
    mean = AGENTS / LONGEST_WAIT_SECONDS
    assert max(asked.values()) < 2 * mean, "a burst"
    assert took <= 1.5 * LONGEST_WAIT_SECONDS


def test_a_server_that_takes_a_few_serves_all() -> None:
    """50 a second at most, Retry-After 1 s: 5,000 need 100 s at least, and are done within thrice that."""
    asked, took = come_back(down_seconds=60.0, per_second=50, retry_after=1.0)
    assert took < 300
    assert sum(asked.values()) < 5 * AGENTS, "asking in vain is rare"
