"""POST /why: the verdict on posted sources, and its bounds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

sys.path.insert(0, str(Path(__file__).parent))

from agent.http.access import Tokens
from agent.http.posted import MOST_SOURCES_BYTES
from agent.http.server import create
from agent.http.state import State
from contracts import run_record
from contracts.rank_state import RankState, dumps
from contracts.run_record import RunRecord
from probes.host.recording import load
from probes.scan import scan

MACHINE = Path(__file__).parent.parent / "machines" / "titan-rtx-2x-nv2.json"
TOKEN = "s3cret-" + "t" * 20
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
WATCHDOG = (
    "[rank0]: [PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
)


def stalled(runs: Path) -> Path:
    """A run of four ranks in which one has not come to the sixth call for 40 s."""
    folder, now = runs / "job-7", time.time()
    (folder / "ranks").mkdir(parents=True)
    run_record.save(folder / "flight.json", RunRecord(status="running", host="a"))
    for rank in range(4):
        late = rank == 2
        state = RankState(rank=rank, world_size=4, host=f"node-{rank}", written=now,
                          phase="compute" if late else "collective", since=now - 40)  # fmt: skip
        (folder / "ranks" / f"state_rank_{rank}.json").write_text(dumps(state))
        entries = [
            {"record_id": n, "process_group": ["0", "default_pg"], "collective_seq_id": n, "p2p_seq_id": 0,
             "profiling_name": "gloo:all_reduce", "time_created_ns": int((now - 46 + n) * 1e9), "input_sizes": [[8]],
             "state": "scheduled", "retired": n < 6, "is_p2p": False}
            for n in range(1, 6 if late else 7)
        ]  # fmt: skip
        trace = {"version": "2.10", "entries": entries}
        (folder / "ranks" / f"trace_rank_{rank}.json").write_text(json.dumps(trace))
    return folder


def agent(tmp_path: Path) -> TestClient:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    snapshot = scan(load(MACHINE))
    state = State(lambda: (snapshot,), interval_seconds=3600)
    app = create(state, tokens=Tokens(token_file=tokens))
    state.refresh()
    return TestClient(app)


def test_posted_sources_are_judged_as_files_are(tmp_path: Path) -> None:
    http = agent(tmp_path)
    assert http.post("/why", json={}).status_code == 401
    told = http.post("/why", json={"logs": [WATCHDOG]}, headers=HEADERS).json()
    assert told["state"] in ("stuck", "failed")
    assert told["sources"]
    folder = stalled(tmp_path / "runs")
    states = [json.loads(path.read_text()) for path in sorted((folder / "ranks").glob("state*"))]
    traces = {path.stem[-1]: json.loads(path.read_text()) for path in (folder / "ranks").glob("trace*")}
    told = http.post("/why", json={"states": states, "traces": traces}, headers=HEADERS).json()
    assert (told["state"], told["ranks"]) == ("stuck", [2])


def test_posted_recordings_tell_what_is_wrong_on_the_node_behind(tmp_path: Path) -> None:
    """As --host FILE does; a document that is no recording is named, without a path of the agent's."""
    http, folder = agent(tmp_path), stalled(tmp_path / "runs")
    states = [json.loads(path.read_text()) for path in sorted((folder / "ranks").glob("state*"))]
    traces = {path.stem[-1]: json.loads(path.read_text()) for path in (folder / "ranks").glob("trace*")}
    name = scan(load(MACHINE)).hostname
    states = [{**one, "host": name} if one["rank"] == 2 else one for one in states]
    body = {"states": states, "traces": traces}
    told = http.post("/why", json=body, headers=HEADERS).json()
    assert "nodes: 1" not in told["sources"]
    told = http.post("/why", json={**body, "recordings": [json.loads(MACHINE.read_text())]}, headers=HEADERS).json()
    assert (told["state"], told["nodes"]) == ("stuck", [name])
    assert "nodes: 1" in told["sources"]
    assert not any("what is wrong on" in one["what"] for one in told["unknown"])
    answer = http.post("/why", json={"recordings": [{"kind": "x"}]}, headers=HEADERS)
    assert answer.status_code == 400
    assert "recordings-0.json" in answer.json()["detail"]
    assert "/tmp" not in answer.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"log": ["x"]}, "log"),
        ({"ras": ["no answer of RAS"]}, "RAS"),
        ({"traces": {"0": {"entries": []}}}, ""),
        ({"traces": {"zero": {}}}, "traces"),
        ([], "body"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, body: Any, words: str) -> None:
    answer = agent(tmp_path).post("/why", json=body, headers=HEADERS)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert words in answer.json()["detail"]
        assert "/tmp" not in answer.text
    else:
        assert answer.json()["unknown"]


def test_bodies_and_posts_are_bounded(tmp_path: Path) -> None:
    http = agent(tmp_path)
    assert http.post("/why", content=b"x" * (MOST_SOURCES_BYTES + 1), headers=HEADERS).status_code == 413
    deep = b'{"traces": {"0": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    assert http.post("/why", content=deep, headers=HEADERS).status_code == 400
    assert 429 in {http.post("/why", json={}, headers=HEADERS).status_code for _ in range(14)}


def test_a_posted_manifest_is_answered(tmp_path: Path) -> None:
    manifest = (
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j}\nspec:\n  template:\n    spec:\n      containers:\n"
        "        - name: t\n          env:\n            - {name: NCCL_IB_DISABLE, value: '1'}\n"
        "            - {name: NCCL_DEBUG, value: INFO}\n"
    )
    told = agent(tmp_path).post("/why", json={"manifest": manifest, "machine": "dgx-h100"}, headers=HEADERS).json()
    assert told["state"] == "slow"
    assert told["change"][0].startswith("manifest-0: ") and "NCCL_IB_DISABLE" in told["change"][0]
    assert str(tmp_path) not in json.dumps(told)
    assert "/why-" not in json.dumps(told)
