"""A node's record shows what changed and since when; thousands of agents come back spread after an outage."""

import heapq
import json
import random
import time
from collections import Counter
from dataclasses import replace

from rigs.recorded import snapshot, with_ports
from rigs.tables import each_row

from agent.checks.history import Event, History
from agent.checks.verdict import build_view
from agent.cluster.client import LONGEST_WAIT_SECONDS, backoff_seconds
from agent.cluster.nodes import MOST_CHANGES, make_record, to_resource

CODE = "rdma.port.down"
START = float(int(time.time()) - 7200)


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def test_a_raised_finding_has_its_start_in_the_record() -> None:
    """It is raised by the second scan and keeps the time of the first; one that no history has raised has no time."""
    down, history = with_ports(snapshot("gb200-nvl72-tray"), "mlx5_2", state="DOWN"), History()
    for scan in range(3):
        view = history.update(build_view((replace(down, taken_at_seconds=START + 30 * scan),)))
        found = [one.get("since") for one in make_record(view, name="n1").findings if one["code"] == CODE]
        assert found == ([] if scan == 0 else [_time(START)])
    alone = [one for one in make_record(build_view((down,)), name="n1").findings if one["code"] == CODE]
    assert [one.get("since") for one in alone] == [None]


def test_the_record_holds_the_newest_and_says_so_by_its_schema() -> None:
    """As many as the definition admits, and no more bytes than fit with every finding."""
    tray = snapshot("gb200-nvl72-tray")
    events = tuple(Event(at_seconds=START + i, kind="raised", text="t" * 300, code="c" * 128, subject="s" * 128)
                   for i in range(100))  # fmt: skip
    made = make_record(replace(build_view((tray,)), events=events), name="n1")
    assert [one["at"] for one in made.changes] == [_time(START + i) for i in range(100)][-MOST_CHANGES:]
    assert len(json.dumps(made.changes)) < 24 << 10
    assert len(json.dumps(to_resource(made)[1])) < 64 << 10


AGENTS = 5000


@each_row("down_seconds", [60.0, 600.0])
def test_after_an_outage_no_second_sees_more_than_its_share(down_seconds: float) -> None:
    """All fail first at the same moment, the worst case; then requests are spread evenly over the longest pause."""
    random.seed(7)
    requests: Counter[int] = Counter()
    due = [(0.0, agent, 0) for agent in range(AGENTS)]
    while due:
        at, agent, failures = heapq.heappop(due)
        if at < down_seconds:
            heapq.heappush(due, (at + backoff_seconds(failures), agent, failures + 1))
        else:
            requests[int(at)] += 1
    assert requests.total() == AGENTS
    assert max(requests.values()) < 2 * AGENTS / LONGEST_WAIT_SECONDS, "a burst"
    assert max(requests) - down_seconds <= 1.5 * LONGEST_WAIT_SECONDS
