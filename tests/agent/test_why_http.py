"""POST /why: the verdict on posted sources, and its bounds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rigs.agents import agent, bearer, tokens
from rigs.recorded import path_of, snapshot
from rigs.tables import each_row
from starlette.testclient import TestClient

from agent.cli.why import why
from collectives.traces.states import RankState, dumps

MACHINE = "titan-rtx-2x-nv2"
HEADERS = bearer()
WATCHDOG = (
    "[rank0]: [PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
)


def stalled() -> tuple[list[Any], dict[str, Any]]:
    """States and traces of four ranks of which one has not come to call 26 for 70 s."""
    now = time.time()
    states, traces = [], {}
    for rank in range(4):
        late = rank == 2
        state = RankState(rank=rank, world_size=4, host=f"node-{rank}", written=now,
                          phase="compute" if late else "collective", since=now - 70, calls=25 + (not late))  # fmt: skip
        states.append(json.loads(dumps(state)))
        traces[str(rank)] = {"version": "2.10", "entries": [
            {"record_id": n, "process_group": ["0", "default_pg"], "collective_seq_id": n + 20, "p2p_seq_id": 0,
             "profiling_name": "gloo:all_reduce", "time_created_ns": int((now - 76 + n) * 1e9), "input_sizes": [[8]],
             "state": "scheduled", "retired": n < 6, "is_p2p": False}
            for n in range(1, 6 if late else 7)
        ]}  # fmt: skip
    return states, traces


@pytest.fixture
def http(tmp_path: Path) -> TestClient:
    return agent(MACHINE, tokens=tokens(tmp_path))


def test_a_browser_gets_a_page_that_says_how_to_diagnose_a_run(http: TestClient) -> None:
    """Without a token; every option that the page shows is one of the command."""
    answer = http.get("/why", headers={"Accept": "text/html,*/*;q=0.8"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    shown = answer.text.split('<pre id="why">')[1].split("</pre>")[0].splitlines()
    known = {name for option in why.params for name in option.opts}
    assert len(shown) == 4 and all(line.startswith("topoflight why ") for line in shown)
    assert {word for line in shown for word in line.split() if word.startswith("--")} <= known
    assert "Runs on this node" in answer.text and 'href="why"' in http.get("/").text


def test_posted_sources_are_judged_as_files_are(http: TestClient, tmp_path: Path) -> None:
    assert http.post("/why", json={}).status_code == 401
    told = http.post("/why", json={"logs": [WATCHDOG]}, headers=HEADERS).json()
    assert told["state"] in ("stuck", "failed")
    assert told["sources"]
    states, traces = stalled()
    told = http.post("/why", json={"states": states, "traces": traces}, headers=HEADERS).json()
    assert (told["state"], told["ranks"]) == ("stuck", [2])


def test_posted_recordings_tell_what_is_wrong_on_the_node_behind(http: TestClient) -> None:
    """As --host FILE does; a document that is no recording is named, without a path of the agent's."""
    states, traces = stalled()
    name = snapshot(MACHINE).hostname
    states = [{**one, "host": name} if one["rank"] == 2 else one for one in states]
    body = {"states": states, "traces": traces}
    told = http.post("/why", json=body, headers=HEADERS).json()
    assert "nodes: 1" not in told["sources"]
    told = http.post(
        "/why", json={**body, "recordings": [json.loads(path_of(MACHINE).read_text())]}, headers=HEADERS
    ).json()
    assert (told["state"], told["nodes"]) == ("stuck", [name])
    assert "nodes: 1" in told["sources"]
    assert not any("what is wrong on" in one["what"] for one in told["unknown"])
    answer = http.post("/why", json={"recordings": [{"kind": "x"}]}, headers=HEADERS)
    assert answer.status_code == 400
    assert "recordings-0.json" in answer.json()["detail"]
    assert "/tmp" not in answer.text


@each_row(
    ("body", "words"),
    [
        ({"log": ["x"]}, "log"),
        ({"ras": ["no answer of RAS"]}, "RAS"),
        ({"traces": {"0": {"entries": []}}}, ""),
        ({"traces": {"zero": {}}}, "traces"),
        ([], "body"),
    ],
)
def test_what_is_wrong_is_named(http: TestClient, body: Any, words: str) -> None:
    answer = http.post("/why", json=body, headers=HEADERS)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert words in answer.json()["detail"]
        assert "/tmp" not in answer.text
    else:
        assert answer.json()["unknown"]


def test_a_deep_body_is_refused(http: TestClient) -> None:
    deep = b'{"traces": {"0": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    assert http.post("/why", content=deep, headers=HEADERS).status_code == 400


def test_a_posted_manifest_is_answered(http: TestClient, tmp_path: Path) -> None:
    manifest = (
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j}\nspec:\n  template:\n    spec:\n      containers:\n"
        "        - name: t\n          env:\n            - {name: NCCL_IB_DISABLE, value: '1'}\n"
        "            - {name: NCCL_DEBUG, value: INFO}\n"
    )
    told = http.post("/why", json={"manifest": manifest, "machine": "dgx-h100"}, headers=HEADERS).json()
    assert told["state"] == "slow"
    assert told["change"][0].startswith("manifest-0: ") and "NCCL_IB_DISABLE" in told["change"][0]
    assert str(tmp_path) not in json.dumps(told)
    assert "/why-" not in json.dumps(told)
