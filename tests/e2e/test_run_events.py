"""A run that stands still is told as an Event of Kubernetes: where it may be, once, and without harm where not."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.checks.view import View, look
from agent.cluster.client import Client
from agent.cluster.run_events import RunEvents, of_pod
from agent.why.ranks import Standing
from contracts.rank_state import NAME, RANKS_FOLDER, RankState, dumps
from planner.why import Cause, Verdict
from tests.e2e.api_server import ApiServer, configuration, write_kubeconfig

EVENTS, PODS = "/api/v1/events", "/api/v1/pods"
CAUSE = Cause(code="rank.data", message="rank 2 loads data for 16 s", ranks=(2,), nodes=("trainer-2",))
STUCK = Verdict(
    state="stuck", line="stuck: rank 2 loads data for 16 s", ranks=(2,), nodes=("trainer-2",), causes=(CAUSE,)
)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


def bound(claims: dict[str, object]) -> str:
    """A service account's token, as far as anything here reads it."""
    return "h." + base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claims}).encode()).decode().rstrip("=") + ".s"


def events(api: ApiServer, said: list[str], token: str = "agent-token") -> RunEvents:  # noqa: S107 - of the stand-in
    return RunEvents(Client(configuration(api.url, token)), "train", said.append)


def test_one_event_for_each_new_verdict_and_one_when_it_goes_on(api: ApiServer) -> None:
    said: list[str] = []
    one = events(api, said)
    one.tell("a", Verdict(state="fine", line="nothing found"))
    assert api.of_kind("Event") == []
    for seconds in (16, 21, 26):  # the line changes with each look, the verdict does not
        one.tell("a", Verdict(**{**vars_of(STUCK), "line": f"stuck: rank 2 loads data for {seconds} s"}))
    one.tell("a", Verdict(state="unknown", line="unknown"))
    one.tell("a", Verdict(state="fine", line="nothing found"))
    one.tell("a", Verdict(state="fine", line="nothing found"))
    first, last = sorted(api.of_kind("Event"), key=lambda event: str(event["metadata"]["name"]))
    assert (first["type"], first["reason"], last["type"], last["reason"]) == (
        "Warning", "RunStuck", "Normal", "RunGoesOn")  # fmt: skip
    assert first["message"] == "run a: stuck: rank 2 loads data for 16 s"
    assert first["involvedObject"]["name"] == os.uname().nodename
    assert first["metadata"]["namespace"] == first["involvedObject"]["namespace"] == "train"
    assert said == []


def vars_of(verdict: Verdict) -> dict[str, object]:
    return {name: getattr(verdict, name) for name in ("state", "line", "ranks", "nodes", "causes")}


def test_the_event_is_on_the_pod_behind_it_else_on_the_own_by_its_token(api: ApiServer) -> None:
    api.put(PODS, "train", {"kind": "Pod", "metadata": {"name": "trainer-2", "namespace": "train", "uid": "u-2"}})
    token = bound({"namespace": "train", "pod": {"name": "watcher-0", "uid": "u-w"}})
    api.tokens.add(token)
    events(api, [], token).tell("a", STUCK)
    api.forbidden.add(PODS)
    events(api, [], token).tell("b", STUCK)
    behind, own = (event["involvedObject"] for event in api.of_kind("Event"))
    assert (behind["name"], behind["uid"]) == ("trainer-2", "u-2")
    assert (own["name"], own["uid"]) == ("watcher-0", "u-w")


def test_a_refusal_is_said_once_and_survived(api: ApiServer) -> None:
    said: list[str] = []
    one = events(api, said)
    api.forbidden.add(EVENTS)
    for run in "abc":
        one.tell(run, STUCK)
    assert len(said) == 1
    assert "events is forbidden" in said[0] and "topoflight-run-events" in said[0]
    assert len([path for method, path in api.requests if method == "POST"]) == 1


def test_an_api_server_that_is_away_is_tried_again_with_the_next_verdict(api: ApiServer) -> None:
    said: list[str] = []
    one = events(api, said)
    api.faults = [(500, {})] * 4
    one.tell("a", STUCK)
    assert "was not written" in said[0]
    api.faults = []
    one.tell("b", STUCK)
    assert len(api.of_kind("Event")) == 1


def test_outside_a_cluster_no_event_is_written(api: ApiServer, tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "config", api.url)
    assert of_pod(print, {"KUBECONFIG": str(kubeconfig)}) is None
    said: list[str] = []
    assert of_pod(said.append, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": str(tmp_path)}) is None
    assert "no Events are written" in said[0]


def test_the_agent_tells_of_the_runs_that_it_watches(api: ApiServer) -> None:
    one = events(api, [])
    view: View = look(())
    for _ in range(2):
        one.of_view(
            View(**{**{n: getattr(view, n) for n in view.__slots__}, "runs": (Standing(run="a", verdict=STUCK),)})
        )
    until = time.monotonic() + 10
    while not api.of_kind("Event") and time.monotonic() < until:
        time.sleep(0.05)
    assert [event["reason"] for event in api.of_kind("Event")] == ["RunStuck"]


@pytest.mark.parametrize("allowed", [True, False])
def test_watch_in_a_pod(api: ApiServer, tmp_path: Path, allowed: bool) -> None:
    folder = tmp_path / "run" / RANKS_FOLDER
    folder.mkdir(parents=True)
    now = time.time()
    for rank in range(3):
        error = "ValueError: bad row" if rank == 2 else "RuntimeError: Connection closed by peer [10.0.0.2]:4"
        state = RankState(rank=rank, world_size=3, written=now, ended=True, error=error, host=f"trainer-{rank}")
        (folder / NAME.format(rank=rank)).write_text(dumps(state))
    if not allowed:
        api.forbidden.add(EVENTS)
    kubeconfig = write_kubeconfig(tmp_path / "config", api.url, namespace="train")
    ended = subprocess.run(
        [sys.executable, "-m", "agent.cli.main", "why", "--watch", "--run", str(tmp_path / "run")], check=False,
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "KUBERNETES_SERVICE_HOST": "127.0.0.1"},
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr
    assert "bad row" in ended.stdout
    made = [(event["reason"], event["metadata"]["namespace"]) for event in api.of_kind("Event")]
    assert made == ([("RunFailed", "train")] if allowed else [])
    assert ("was not written" in ended.stderr) is not allowed
