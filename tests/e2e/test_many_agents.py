"""Thousands of agents and one API server, in simulated time: after an outage they come back spread, and all of them."""

from __future__ import annotations

import heapq
import random
from collections import Counter

from rigs.tables import each_row

from agent.cluster.client import LONGEST_WAIT_SECONDS, backoff_seconds

AGENTS = 5000


@each_row("down_seconds", [60.0, 600.0])
def test_after_an_outage_no_second_sees_more_than_its_share(down_seconds: float) -> None:
    """All fail first at the same moment, the worst case; then the server is asked evenly over the longest pause."""
    random.seed(7)
    asked: Counter[int] = Counter()
    due = [(0.0, agent, 0) for agent in range(AGENTS)]
    while due:
        at, agent, failures = heapq.heappop(due)
        if at < down_seconds:
            heapq.heappush(due, (at + backoff_seconds(failures), agent, failures + 1))
        else:
            asked[int(at)] += 1
    assert asked.total() == AGENTS
    assert max(asked.values()) < 2 * AGENTS / LONGEST_WAIT_SECONDS, "a burst"
    assert max(asked) - down_seconds <= 1.5 * LONGEST_WAIT_SECONDS
