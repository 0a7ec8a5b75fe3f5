"""What holds, since when, and what changed outlive the agent's pod: the next one reads them in its node's record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from e2e_client import client_of
from rigs.recorded import changed, snapshot
from rigs.waiting import eventually
from starlette.testclient import TestClient

from agent.checks import history
from agent.checks.history import Event, History, HistoryState, since_words
from agent.checks.verdict import View, build_view
from agent.cluster.client import ApiError, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, from_resource
from agent.cluster.publish import MOST_CHANGES, PreviousRecord, history_of_record, records_of, to_resource
from agent.http import serve
from agent.http.state import State
from agent.metrics import agent_values
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.rdma.facts import RdmaFacts

NODES = path_of(API_VERSION, PLURAL)
CODE, PORT = "rdma.port.down", "mlx5_2:1"
START = float(int(time.time()) - 7200)
STEP = 30.0


@pytest.fixture(scope="module")
def tray() -> Snapshot:
    return snapshot("gb200-nvl72-tray")


def sick(found: Snapshot) -> Snapshot:
    rdma = found.facts(RdmaFacts)
    assert rdma is not None
    devices = tuple(
        replace(each, ports=tuple(replace(port, state="DOWN") for port in each.ports))
        if each.name == PORT.partition(":")[0] else each
        for each in rdma.devices
    )  # fmt: skip
    return changed(found, RdmaFacts, devices=devices)


class Agent:
    """What `topoflight serve --publish` runs, of a node that shows these snapshots, then the last of them."""

    def __init__(self, folder: Path, snapshots: Sequence[Snapshot], first: float) -> None:
        folder.mkdir()
        self._script = [replace(each, taken_at_seconds=first + STEP * i) for i, each in enumerate(snapshots)]
        self.state = State(self._scan, interval_seconds=3600, folder=folder, history=History())
        options = {**serve.serve.make_context("serve", []).params, "hosts": None}
        options |= {"publish": True, "node_name": "n1", "nfd": False}
        self.app = serve.application(self.state, options, serve.connected(options))

    def _scan(self) -> tuple[Snapshot, ...]:
        return (self._script.pop(0) if len(self._script) > 1 else self._script[0],)

    def run(self, scans: int) -> View:
        """The view after so many more scans."""
        view = self.state.view
        for _ in range(scans):
            view = self.state.refresh()
        assert view is not None
        return view


@pytest.fixture
def agents(kubeconfig: ApiServer, tmp_path: Path) -> Iterator[Any]:
    count = iter(range(9))
    yield lambda snapshots, first: Agent(tmp_path / f"pod-{next(count)}", snapshots, first)


def record(api: ApiServer) -> dict[str, Any]:
    """The status as it is now; before it is written it reads as that of an agent that has ended."""
    status: dict[str, Any] = api.objects.get((NODES, "", "n1"), {}).get("status", {"stoppedAt": ""})
    return status


def told_of(events: Iterable[tuple[str, str]]) -> list[str]:
    """Kinds of what concerns the port's finding or a version, of pairs of kind and code."""
    return [kind for kind, code in events if kind == "version" or code == CODE]


def kinds(api: ApiServer) -> list[str]:
    """The same of the record."""
    return told_of((one["kind"], one.get("code", "")) for one in record(api).get("changes", ()))


def began(api: ApiServer) -> set[str]:
    """When the finding was raised, by the record."""
    return {one["at"] for one in record(api)["changes"] if (one["kind"], one.get("code")) == ("raised", CODE)}


def published(api: ApiServer, agent: Agent, told: Sequence[str]) -> None:
    """Run the application until the record tells these changes, then end it as a pod ends."""
    with TestClient(agent.app):
        eventually(lambda: "stoppedAt" not in record(api) and kinds(api) == list(told), "it is published")
    assert "stoppedAt" in record(api)


def test_the_third_time_this_week_is_the_third_for_the_pod_after(api: ApiServer, agents: Any, tray: Snapshot) -> None:
    """Since when, after what and how often are as if it were one agent."""
    down, twice = sick(tray), ["raised", "cleared", "raised", "cleared"]
    one = agents([tray, tray, down, down, tray, tray, tray, down, down, tray, tray, tray], START)
    one.run(12)
    published(api, one, twice)
    newer = changed(down, GpuFacts, driver_version="580.65.06")
    two = agents([tray, *[newer] * 20], START + 3600)
    view = two.run(21)
    began = history.clock(START + 3600 + STEP)
    words = f"since {began}, after driver 570.124.06 -> 580.65.06 ({began}); third time this week"
    assert since_words(view, CODE, PORT) == words
    published(api, two, [*twice, "version", "raised"])
    three = agents([newer], START + 5400)
    first = three.run(1)
    assert since_words(first, CODE, PORT) == words, "it holds with the first scan already"
    assert CODE in {check.code for check in first.checks if check.status in ("fail", "warn")}
    assert told_of((e.kind, e.code) for e in first.events) == [*twice, "version", "raised"]
    told = [one for one in record(api)["findings"] if one["code"] == CODE]
    assert [one["since"] for one in told] == [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(START + 3600 + STEP))]


def test_a_replaced_pod_tells_the_same_changes_and_no_other(api: ApiServer, agents: Any, tray: Snapshot) -> None:
    """What an annotation in Grafana is drawn from: the kinds and their times, to the second."""
    rdma = tray.facts(RdmaFacts)
    assert rdma is not None
    less = changed(tray, RdmaFacts, devices=rdma.devices[1:])
    newer = changed(less, GpuFacts, driver_version="580.65.06")
    one = agents([tray, tray, less, less, newer], START + 0.7)
    before = one.run(5)
    published(api, one, ["version"])
    two = agents([newer] * 3, START + 3600)
    for view in (two.run(1), two.run(2)):
        assert _changes(view) == _changes(before) == {"hardware": START + 3 * STEP, "driver": START + 4 * STEP}
    published(api, two, ["version"])


def _changes(view: View) -> dict[str, float]:
    values = dict(agent_values(view))["change_timestamp_seconds"]
    return {labels[0]: at for labels, at in values}


def test_a_record_is_not_written_over_before_it_was_read(api: ApiServer, agents: Any, tray: Snapshot) -> None:
    """The API server is away when the pod starts: scans go on, and the record keeps what it holds until it is read."""
    down = sick(tray)
    one = agents([tray, tray, down, down], START)
    one.run(4)
    published(api, one, ["raised"])
    api.down()
    two = agents([down] * 9, START + 3600)
    alone = two.run(4)
    assert since_words(alone, CODE, PORT) == f"since {history.clock(START + 3600)}"
    api.up()
    with TestClient(two.app):
        eventually(lambda: "stoppedAt" not in record(api), "the record is written again")
        view = two.state.view
        assert view is not None and began(api) == {_time(START + 60)}
        assert since_words(view, CODE, PORT) == f"since {history.clock(START + 60)}", "once, as it had held"
        assert told_of((event.kind, event.code) for event in view.events) == ["raised"]


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


@pytest.mark.parametrize("status", [403, 404, 500])
def test_who_may_not_read_begins_anew_and_who_could_not_asks_again(api: ApiServer, status: int) -> None:
    handed_out: list[Any] = ["a view of before"]
    left = PreviousRecord(client_of(api), "n1", lambda: handed_out[0])
    api.faults.append((status, {}))
    assert not left.is_in_view(), "nothing is written before it was asked"
    found = left()
    assert found == (None if status == 500 else HistoryState())
    if status == 500:
        with pytest.raises(ApiError):
            left.is_in_view()
        assert left() == HistoryState()
    assert not left.is_in_view(), "nor while the newest view is without it"
    handed_out[0] = "the view of that scan"
    assert left.is_in_view()


def test_a_start_reads_the_record_once_though_there_is_none(api: ApiServer, agents: Any, tray: Snapshot) -> None:
    agents([tray, tray], START).run(2)
    assert [path for method, path in api.requests if method == "GET"] == [f"{NODES}/n1"]


def test_a_code_that_this_release_does_not_know_is_not_held(tray: Snapshot) -> None:
    """A record of another release may name a finding that no check of this one can clear."""
    (made,) = records_of(build_view((sick(tray),)), name="n1")
    gone = {"code": "gpu.nothing.knows", "severity": "fail", "subject": "GPU0", "message": "m", "remedy": ""}
    about, status = to_resource(replace(made, findings=(*made.findings, gone)))
    history = History()
    history.elsewhere = lambda: history_of_record(from_resource(json.loads(json.dumps({**about, **status}))))
    since = {code for code, _ in history.seen(build_view((sick(tray),))).since}
    assert CODE in since and "gpu.nothing.knows" not in since


def test_the_record_holds_the_newest_and_says_so_by_its_schema(tray: Snapshot) -> None:
    """As many as the definition admits, and no more bytes than fit beside every finding."""
    events = tuple(Event(at_seconds=START + i, kind="raised", text="t" * 300, code="c" * 128, subject="s" * 128)
                   for i in range(100))  # fmt: skip
    (made,) = records_of(replace(build_view((tray,)), events=events), name="n1")
    assert [one["at"] for one in made.changes] == [_time(START + i) for i in range(100)][-MOST_CHANGES:]
    assert len(json.dumps(made.changes)) < 24 << 10
    assert len(json.dumps(to_resource(made)[1])) < 64 << 10
