"""Acknowledging a finding over HTTP, with the stand-in for the API server as judge and store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from e2e_client import MACHINES, client_of
from rigs.fleet import labelled, resources
from rigs.waiting import eventually
from starlette.testclient import TestClient

from agent.cluster import acknowledged
from agent.http.access import Tokens
from agent.http.cluster import Cluster
from agent.http.server import create
from agent.http.state import State
from probes.host.recording import load
from probes.scan import scan

NODES = "/apis/topoflight.io/v1alpha1/nodetopologies"
SICK = "gpu-0020"
ANN = {"Authorization": "Bearer ann-token"}


@pytest.fixture
def http(api: ApiServer) -> Iterator[TestClient]:
    """An agent of a cluster of 64 nodes, one of them sick; ann may acknowledge."""
    for item in resources(64, sick=True):
        api.put(NODES, "", item)
    for item in labelled(64):
        api.put("/api/v1/nodes", "", item)
    for user in ("ann", "bob"):
        api.reviewed[f"{user}-token"] = {
            "authenticated": True, "audiences": ["topoflight"], "user": {"username": user},
        }  # fmt: skip
    api.allowed.add(("ann", "post", "/acknowledgements"))
    state = State(lambda: (scan(load(MACHINES / "cpu-only-vm.json")),), interval_seconds=3600)
    state.refresh()
    client = client_of(api)
    with TestClient(create(state, tokens=Tokens(client=client), cluster=Cluster(state, client=client))) as made:
        yield made


def until(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def body(http: TestClient, **changed: Any) -> dict[str, Any]:
    (node,) = [each for each in http.get("/nodes").json()["nodes"] if each["name"] == SICK]
    found = node["findings"][0]
    return {"node": SICK, "code": found["code"], "subject": found["subject"], "reason": "RMA 1234",
            "until": until(7200), **changed}  # fmt: skip


def test_it_is_kept_on_the_object_with_who_why_and_until_when(http: TestClient, api: ApiServer) -> None:
    """The annotation holds it, the page shows it, the count of failures stays; a second one replaces the first."""
    before = http.get("/cluster").text
    assert "FAIL: 1 node" in before and "By <code>example.com/rack</code>" in before
    given = body(http)
    assert http.post("/acknowledgements", json=given, headers=ANN).status_code == 201
    (told,) = acknowledged.read(api.objects[NODES, "", SICK]["metadata"]["annotations"])
    assert (told["who"], told["reason"], told["until"]) == ("ann", "RMA 1234", given["until"])
    eventually(lambda: "cknowledged by ann" in http.get("/cluster?verdict=acknowledged").text, "the page shows it")
    eventually(lambda: "1 acknowledged" in http.get("/cluster").text, "equal questions share an answer for a moment")
    assert "FAIL: 1 node" in http.get("/cluster").text
    assert "RMA 1234" in http.get(f"/cluster?node={SICK}").text
    assert http.post("/acknowledgements", json=given | {"reason": "RMA 5678"}, headers=ANN).status_code == 201
    (told,) = acknowledged.read(api.objects[NODES, "", SICK]["metadata"]["annotations"])
    assert told["reason"] == "RMA 5678"


@pytest.mark.parametrize(
    ("headers", "change", "status", "said"),
    [
        ({}, {}, 401, "needs a bearer token"),
        ({"Authorization": "Bearer bob-token"}, {}, 403, "bob may not post /acknowledgements"),
        (ANN, {"node": "gpu-9999"}, 404, "no agent publishes a node gpu-9999"),
        (ANN, {"code": "gpu.made.up"}, 404, "has no finding gpu.made.up"),
        (ANN, {"until": "2001-01-01T00:00:00Z"}, 422, "until: must lie ahead, by 90 days at most"),
        (ANN, {"until": "2199-01-01T00:00:00Z"}, 422, "until: must lie ahead, by 90 days at most"),
        (ANN, {"reason": ""}, 422, "reason"),
        (ANN, {"until": None}, 422, "until"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    http: TestClient, api: ApiServer, headers: dict[str, str], change: dict[str, Any], status: int, said: str
) -> None:
    """No token, no right, no such node or finding, no end ahead, no reason."""
    answer = http.post("/acknowledgements", json=body(http, **change), headers=headers)
    assert answer.status_code == status and said in answer.text
    assert not any("annotations" in item["metadata"] for item in api.of_kind("NodeTopology"))


def test_without_a_cluster_there_is_no_place_to_keep_it(tmp_path: Path) -> None:
    """An agent of one host says how to have one."""
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    state = State(lambda: (scan(load(MACHINES / "cpu-only-vm.json")),), interval_seconds=3600)
    state.refresh()
    with TestClient(create(state, tokens=Tokens(token_file=tokens))) as http:
        given = {"node": "vm", "code": "a", "reason": "b", "until": until(60)}
        answer = http.post("/acknowledgements", json=given, headers={"Authorization": "Bearer 0123456789abcdef"})
    assert answer.status_code == 409 and "--publish" in answer.text


def test_without_the_right_to_list_nodes_the_map_says_so(http: TestClient, api: ApiServer) -> None:
    """The page is whole all the same."""
    api.forbidden.add("/api/v1/nodes")
    page = http.get("/cluster").text
    assert "In plain order: the labels of the Nodes could not be read: HTTP 403" in page and "64 nodes" in page
