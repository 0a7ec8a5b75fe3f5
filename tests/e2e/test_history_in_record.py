"""A node's record shows what changed on the node, and since when each finding holds."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from rigs.recorded import changed, snapshot

from agent.checks.history import Event, History
from agent.checks.verdict import build_view
from agent.cluster.publish import MOST_CHANGES, record_of_view, to_resource
from probes.rdma.facts import RdmaFacts

CODE, PORT = "rdma.port.down", "mlx5_2:1"
START = float(int(time.time()) - 7200)


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def test_a_raised_finding_has_its_start_in_the_record() -> None:
    """It is raised by the second scan and keeps the time of the first; one that no history has raised has no time."""
    tray = snapshot("gb200-nvl72-tray")
    rdma = tray.facts(RdmaFacts)
    assert rdma is not None
    devices = tuple(
        replace(each, ports=tuple(replace(port, state="DOWN") for port in each.ports))
        if each.name == PORT.partition(":")[0] else each
        for each in rdma.devices
    )  # fmt: skip
    down, history = changed(tray, RdmaFacts, devices=devices), History()
    for scan in range(3):
        view = history.seen(build_view((replace(down, taken_at_seconds=START + 30 * scan),)))
        found = [one.get("since") for one in record_of_view(view, name="n1").findings if one["code"] == CODE]
        assert found == ([] if scan == 0 else [_time(START)])
    alone = [one for one in record_of_view(build_view((down,)), name="n1").findings if one["code"] == CODE]
    assert [one.get("since") for one in alone] == [None]


def test_the_record_holds_the_newest_and_says_so_by_its_schema() -> None:
    """As many as the definition admits, and no more bytes than fit beside every finding."""
    tray = snapshot("gb200-nvl72-tray")
    events = tuple(Event(at_seconds=START + i, kind="raised", text="t" * 300, code="c" * 128, subject="s" * 128)
                   for i in range(100))  # fmt: skip
    made = record_of_view(replace(build_view((tray,)), events=events), name="n1")
    assert [one["at"] for one in made.changes] == [_time(START + i) for i in range(100)][-MOST_CHANGES:]
    assert len(json.dumps(made.changes)) < 24 << 10
    assert len(json.dumps(to_resource(made)[1])) < 64 << 10
