"""POST /runs: who may, what is accepted, stored and shown."""

import json
import os
from pathlib import Path

import click
import pytest
import yaml
from kustomization import render
from rigs.agents import agent, bearer, tokens as tokens_in
from rigs.pods import templates
from rigs.results import RUN
from rigs.tables import ROOT, each_row
from starlette.testclient import TestClient

from agent.base import result_store
from agent.cli.launch import launch
from agent.http.access import AUDIENCE, TokenChecker
from agent.http.server import MAX_VALUES, PostedRecord
from agent.http.state import State
from contracts.run_record import RECORD_VERSION, record_of
from planner.kubernetes import manifests

MACHINE = "titan-rtx-2x-nv2"
HEADERS = bearer()
AGENT = next(str(one.flag_value) for one in launch.params if isinstance(one, click.Option) and one.name == "agent")
STEPS = PostedRecord.model_json_schema()["properties"]["step_seconds"]["maxItems"]
RECORD: dict = {
    **RUN, "model": {"name": "a-model-of-ours"}, "measured": {"step_seconds": 0.25}, "step_seconds": [0.25] * 20,
    "layout": {"family": "FSDP", "effective": {"world_size": 2, "placements": {"dp_shard:S(0)": 97}}},
    "transports": ["NET/Socket/0"], "nccl": {"interfaces": ["net1"]},
}  # fmt: skip


@pytest.fixture
def tokens(tmp_path: Path) -> TokenChecker:
    return tokens_in(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir()
    return made


@pytest.fixture
def http(tokens: TokenChecker, folder: Path) -> TestClient:
    return agent(MACHINE, folder, tokens=tokens)


def posted(http: TestClient, **change):
    """What the agent answers to the record, changed so."""
    return http.post("/runs", headers=HEADERS, json={**RECORD, **change})


def stored_runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/*.json"))


def test_a_record_is_shown_at_once_and_says_who_posted_it(http: TestClient, folder: Path) -> None:
    """Though the next scan is an hour away; a poster's own word for who posted is not taken."""
    answer = posted(http, posted_by="admin", more=[1])
    assert (answer.status_code, answer.json()) == (201, {"created": True})
    (shown,) = http.get("/runs").json()
    assert record_of(shown) == record_of({**RECORD, "posted_by": "token-file"}) and "more" not in shown
    page = http.get("/").text
    assert "a-model-of-ours" in page and "NET/Socket, net1" in page
    assert len(stored_runs(folder)) == 1


def test_the_same_record_twice_is_stored_once(http: TestClient, folder: Path) -> None:
    """A job that got no answer sends again; another record of the same start replaces nothing."""
    stored, again = (201, {"created": True}), (200, {"created": False})
    assert [(one.status_code, one.json()) for one in (posted(http) for _ in range(3))] == [stored, again, again]
    other = posted(http, loss={"last": 0.0})
    assert other.status_code == 409 and "sft-0, started at 2026-11-01T10:00:00Z" in other.json()["detail"]
    (shown,) = http.get("/runs").json()
    assert record_of(shown) == record_of({**RECORD, "posted_by": "token-file"})
    assert len(stored_runs(folder)) == 1


def test_only_the_newest_are_stored(tokens: TokenChecker, folder: Path) -> None:
    """The new one is, also where the clock was set back and the others' names look newer."""
    for number in range(result_store.STORED_RUNS + 5):
        result_store.store_run(record_of({**RECORD, "host": f"pod-{number}"}), folder)
    for path in stored_runs(folder):
        path.rename(path.with_name(f"2999{path.name[4:]}"))
    assert posted(agent(MACHINE, folder, tokens=tokens), host="z").status_code == 201
    assert len(stored_runs(folder)) == result_store.STORED_RUNS
    assert json.loads(stored_runs(folder)[0].read_text())["host"] == "z"


def test_a_corrupt_state_folder_is_served_without_its_bad_files(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The good part on the page and in JSON; the log names the rest."""
    result_store.store_run(record_of(RECORD), folder)
    (folder / result_store.BENCH_FILE).write_text("[" * 100_000)
    (folder / "runs/20260102T000000-1.json").write_text(json.dumps({**RUN, "schema_version": 99}))
    odd = {"schema_version": 1, "layout": 7, "comparison": [3, {"forecast": {"low": "x"}}], "model": [], "loss": "no"}
    (folder / "runs/20260103T000000-1.json").write_text(json.dumps(odd))
    http = agent(MACHINE, folder)
    assert record_of(RECORD) in map(record_of, http.get("/runs").json())
    assert http.get("/", headers={"Accept": "text/html"}).status_code == 200
    assert result_store.BENCH_FILE in caplog.text and "20260102T000000-1.json" in caplog.text


@each_row(
    ("change", "named"),
    [
        ({"schema_version": 2}, "schema_version: Input should be 1"), ({"status": "<b>"}, "status:"),
        ({"host": ""}, "host:"), ({"host": "h" * 254}, "host:"), ({"started_at": "yesterday"}, "started_at:"),
        ({"layout": []}, "layout:"), ({"notes": ["n" * 5000]}, "notes.0:"),
        ({"step_seconds": ["1"]}, "step_seconds.0:"), ({"step_seconds": [0.1] * (STEPS + 1)}, "step_seconds:"),
        ({"more": [0] * MAX_VALUES}, f"at most {MAX_VALUES} are allowed"),
        ({"data": {"name": "é" * 200_000}}, "the stored record would have more than"),
    ],
)  # fmt: skip
def test_a_wrong_record_is_refused_and_what_is_wrong_named(tokens, folder, change, named):
    """A problem document, and nothing is stored."""
    http = agent(MACHINE, folder, tokens=tokens)
    answer = posted(http, **change)
    assert answer.status_code == 422 and named in answer.json()["detail"], answer.text
    assert len(answer.text) < 4000
    assert stored_runs(folder) == [] and http.get("/runs").json() == []


@each_row("body", [b"", b"[]", b"7", b"\xff", b'{"schema_version": 1}', b"[" * 10_000, b'{"a": 1e999, "b": "\\ud800"}'])
def test_what_is_no_record_is_refused(http: TestClient, folder: Path, body: bytes) -> None:
    """No JSON, too deep, or not of ours; without a token it is not even read."""
    assert http.post("/runs", content=body).status_code == 401
    answer = http.post("/runs", headers=HEADERS, content=body)
    assert answer.status_code in (400, 422) and answer.json()["detail"], answer.text
    assert PostedRecord.__name__ not in answer.text
    assert stored_runs(folder) == []


def test_a_loss_that_is_no_number_is_unknown(http: TestClient) -> None:
    """A run that diverged: json of Python writes NaN."""
    text = json.dumps({**RECORD, "status": "failed", "loss": {"first": 5.0, "last": float("nan")}})
    assert http.post("/runs", headers=HEADERS, content=text).status_code == 201
    assert http.get("/runs").json()[0]["loss"] == {"first": 5.0, "last": None}


def test_the_largest_record_of_a_job_is_taken(http: TestClient) -> None:
    """As many steps as the recorder keeps."""
    assert posted(http, step_seconds=[1234.567891] * STEPS).status_code == 201


def test_an_agent_without_a_folder_says_so(tokens: TokenChecker, tmp_path: Path) -> None:
    """409, and what would help; 507 where the folder takes nothing more."""
    for missing in (None, tmp_path / "nowhere"):
        answer = posted(agent(MACHINE, missing, tokens=tokens))
        assert answer.status_code == 409 and "--state" in answer.json()["grant"]
    full = tmp_path / "full"
    full.mkdir()
    (full / "runs").write_text("a file where the folder would be")
    assert posted(agent(MACHINE, full, tokens=tokens)).status_code == 507


@pytest.mark.long
def test_the_schema_that_is_shown_is_the_one_that_is_held() -> None:
    """Version and number of steps are those of the job and of what is stored."""
    from finetune.recorder import MAX_STEPS  # and with it torch

    shown = PostedRecord.model_json_schema()["properties"]
    assert shown["schema_version"]["const"] == RECORD_VERSION
    assert shown["step_seconds"]["maxItems"] == MAX_STEPS


def test_a_jobs_url_and_role_are_those_that_the_manifests_deploy() -> None:
    """Service on the pod's own node under the name that jobs call, a role for this endpoint alone, one audience."""
    documents = render(ROOT / "deploy/daemonset/overlays/kubernetes")
    (service,) = [d for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == "topoflight-node"]
    (port,) = service["spec"]["ports"]
    where = service["metadata"]
    assert f"http://{where['name']}.{where['namespace']}:{port['port']}" == AGENT
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    (role,) = [d for d in documents if d["metadata"]["name"] == "topoflight-runs"]
    assert role["rules"] == [{"nonResourceURLs": ["/runs"], "verbs": ["post"]}]
    assert "topoflight-runs" not in [d["roleRef"]["name"] for d in documents if d["kind"].endswith("RoleBinding")]
    assert manifests.AGENT_AUDIENCE == AUDIENCE


def spec(**more) -> manifests.JobSpec:
    return manifests.JobSpec(name="sft", image="i", nodes=2, processes_per_node=1, command=("true",), **more)


@each_row("api_name", manifests.APIS)
def test_a_job_of_every_api_is_told_where_its_agent_is(api_name: str) -> None:
    """URL, token file and the volume that the file is in; none of them without the option, nor in the gate."""
    plain, told = (manifests.render(manifests.APIS[api_name](spec(preflight_image="g", **more)))
                   for more in ({}, {"agent": AGENT}))  # fmt: skip
    assert "TOPOFLIGHT_AGENT" not in plain
    documents = list(yaml.safe_load_all(told))
    pods = [template["spec"] for template in templates(documents)]
    assert len(pods) == (2 if api_name == "pytorchjob" else 1)
    trainer = next((d["spec"]["trainer"] for d in documents if d["kind"] == "TrainJob"), None)
    for pod in pods:
        (container,), (gate,) = pod["containers"], pod["initContainers"]
        environment = {each["name"]: each.get("value") for each in (trainer or container)["env"]}
        assert environment["TOPOFLIGHT_AGENT"] == AGENT
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "agent-token"]
        assert mount["readOnly"] and "agent-token" not in str(gate)
        (volume,) = [v for v in pod["volumes"] if v["name"] == "agent-token"]
        (source,) = volume["projected"]["sources"]
        token = source["serviceAccountToken"]
        assert token["audience"] == AUDIENCE
        assert environment["TOPOFLIGHT_AGENT_TOKEN_FILE"] == f"{mount['mountPath']}/{token['path']}"


def test_what_a_killed_writer_left_is_swept_at_start(folder: Path) -> None:
    """Temporary files that nobody writes any more; not one that is being written, and no record."""
    (folder / "runs").mkdir()
    for path in (folder, folder / "runs"):
        for name in (".bench.json.a1b2c3d4", "stored.json"):
            (path / name).write_text("{}")
            os.utime(path / name, (0, 0))
    (folder / "runs" / ".new.json.x").write_text("{")
    state = State(lambda: (), interval_seconds=3600, folder=folder)
    state.start()
    state.stop()
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json*"))
    assert left == ["runs/.new.json.x", "runs/stored.json", "stored.json"]


def test_what_is_held_in_memory_is_bounded_in_bytes(tokens, folder, monkeypatch):
    """The newest that the bound has room for are shown, from one rendered copy."""
    (folder / "runs").mkdir()
    for number in range(result_store.STORED_RUNS):
        (folder / "runs" / f"{number:03d}.json").write_text(json.dumps({**RECORD, "host": f"pod-{number:03d}"}))
    monkeypatch.setattr(result_store, "MAX_HELD_BYTES", 10 * (folder / "runs" / "000.json").stat().st_size)
    http = agent(MACHINE, folder, tokens=tokens)
    first, second = http.get("/runs"), http.get("/runs")
    shown = {record["host"] for record in first.json()}
    assert shown == {f"pod-{number:03d}" for number in range(result_store.STORED_RUNS - 10, result_store.STORED_RUNS)}
    assert first.content == second.content
    assert posted(http, host="z").status_code == 201
    assert "z" in {record["host"] for record in http.get("/runs").json()}
