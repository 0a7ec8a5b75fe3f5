"""Publishing and listing: the same promises against a real API server (KUBECONFIG) and against the stand-in."""

import base64
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from api_server import CRD, ApiServer, configuration, write_kubeconfig
from e2e_client import client_of
from rigs.recorded import H100, NAMES, snapshot, view
from rigs.tables import each_row
from rigs.waiting import eventually
from starlette.testclient import TestClient

from agent.cluster import gate, nodes
from agent.cluster.client import ApiError, Client, connect, make_path
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, NodeRecord, from_resource, make_record, make_row
from agent.http import worker
from agent.http.server import create
from agent.http.state import Publisher, State
from agent.http.worker import WorkerData

NODES = make_path(API_VERSION, PLURAL)


def record_of(name: str, node: str) -> NodeRecord:
    return make_record(view(name), name=node)


@pytest.fixture
def node(client: Client) -> Iterator[str]:
    """A name nobody else uses; removed afterwards."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    yield name
    try:
        client.request("DELETE", make_path(API_VERSION, PLURAL, name))
    except ApiError as error:
        assert error.status in (404, 0)


@each_row("machine", NAMES)
def test_every_machine_is_a_valid_resource_and_comes_back_whole(client: Client, node: str, machine: str) -> None:
    """What the CRD admits, the printer columns show and other agents read is what was scanned."""
    record = record_of(machine, node)
    publisher = Publisher(client, lambda: record)
    publisher.write(record)
    stored = client.get(make_path(API_VERSION, PLURAL, node))
    assert stored["spec"] == {"nodeName": node}
    back = from_resource(stored)
    assert back == replace(record, scanned_at_seconds=float(int(record.scanned_at_seconds)))
    publisher.write(replace(record, verdict="fail", links=None))
    changed = from_resource(client.get(make_path(API_VERSION, PLURAL, node)))
    assert changed.verdict == "fail"


def schemas() -> Iterator[tuple[str, dict]]:
    """Every schema of the definition, with its path."""

    def within(schema: dict, path: str) -> Iterator[tuple[str, dict]]:
        yield path, schema
        for name, each in schema.get("properties", {}).items():
            yield from within(each, f"{path}.{name}")
        for name in ("items", "additionalProperties"):
            if name in schema:
                yield from within(schema[name], f"{path}[]")

    (version,) = CRD["spec"]["versions"]
    yield from within(version["schema"]["openAPIV3Schema"], "")


def test_the_definition_bounds_every_field() -> None:
    """Lengths, counts, no negative number, no control character; structural, nothing unknown is stored."""
    for path, schema in schemas():
        kind = schema["type"]
        if path in ("", ".apiVersion", ".kind", ".metadata"):  # the API server's own
            continue
        assert not {"x-kubernetes-preserve-unknown-fields", "oneOf", "anyOf", "$ref"} & set(schema), path
        if kind == "string" and "enum" not in schema and schema.get("format") != "date-time":
            assert schema["maxLength"] <= 65536, path
            for text in ("a\x1b[31m", "\x00", "a\x7fb", "tab\tbed"):
                assert not re.search(schema["pattern"].replace("$", "\\Z"), text), (path, text)
        elif kind in ("integer", "number"):
            assert schema["minimum"] >= 0, path
        elif kind == "array":
            assert schema["maxItems"] <= 512 and "items" in schema, path
        elif kind == "object":
            assert "properties" in schema or schema["maxProperties"] <= 512, path


def test_the_largest_record_is_admitted_and_a_larger_one_is_not(client: Client, node: str) -> None:
    """The definition bounds every field; the agent stays within, so that a sick node is never too sick to be shown."""
    finding = {"code": "c" * 128, "severity": "fail", "subject": "s" * 128, "message": "m" * 512}
    largest = replace(
        record_of(H100, node), findings=(finding,) * nodes.MAX_FINDINGS, facts="f" * nodes.MAX_FACTS_LETTERS
    )
    publisher = Publisher(client, lambda: largest)
    publisher.write(largest)
    assert from_resource(client.get(make_path(API_VERSION, PLURAL, node))).findings == largest.findings
    for more in (
        replace(largest, findings=(finding,) * (nodes.MAX_FINDINGS + 1)), replace(largest, driver="d" * 65),
        replace(largest, findings=({**finding, "message": "\x1b[31m"},)), replace(largest, facts="f" * 65537),
        replace(largest, facts="{}"),
        replace(largest, verdict="good"), replace(largest, links="l" * 65), replace(largest, gpus=-1),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            publisher.write(more)
        # a field that no schema declares is a 500 of server-side apply itself, on a real server
        assert caught.value.status == 422 or "field not declared in schema" in str(caught.value)


# what a real server does not do on demand


def publish_in(api: ApiServer, name: str, machine: str = H100) -> NodeRecord:
    record = record_of(machine, name)
    Publisher(client_of(api), lambda: record).write(record)
    return record


def test_publisher_writes_changes_at_once_and_silence_seldom(api: ApiServer) -> None:
    """A new scan with the same facts costs the API server nothing until the interval is over."""
    record = record_of(H100, "n1")
    held = [record]
    publisher = Publisher(client_of(api), lambda: held[0], look_seconds=0.01)
    publisher.start()
    written = ("publish_success_timestamp_seconds",)
    eventually(lambda: written in publisher.tally, "the first write")
    held[0] = replace(record, scanned_at_seconds=record.scanned_at_seconds + 30)
    time.sleep(0.3)
    assert publisher.tally["publish_attempts_total",] == 1
    held[0] = replace(record, verdict="fail")
    eventually(lambda: publisher.tally["publish_attempts_total",] == 2, "the change")
    publisher.stop()


def test_a_deleted_resource_is_made_anew(api: ApiServer) -> None:
    """Somebody cleans up by hand: the next write but one brings it back."""
    record = record_of(H100, "n1")
    publisher = Publisher(client_of(api), lambda: record)
    publisher.write(record)
    api.delete(NODES, "", "n1")
    with pytest.raises(ApiError):
        publisher.write(record)
    publisher.write(record)
    assert len(api.of_kind("NodeTopology")) == 1


def claims_token(node: str, uid: str) -> str:
    """As the kubelet mounts it into a pod since Kubernetes 1.30, with a signature that only the API server reads."""
    claims = {"sub": "system:serviceaccount:topoflight:topoflight",
              "kubernetes.io": {"namespace": "topoflight", "node": {"name": node, "uid": uid}}}  # fmt: skip
    words = (json.dumps({"alg": "RS256"}), json.dumps(claims), "signature")
    return ".".join(base64.urlsafe_b64encode(word.encode()).decode().rstrip("=") for word in words)


@each_row(
    ("token", "uid"), [(claims_token("n1", "u-7"), "u-7"), (claims_token("n2", "u-8"), None), ("agent-token", None)]
)
def test_a_record_ends_with_its_node(token: str, uid: str | None) -> None:
    """The Node owns the record where the pod's own token names it; Nodes are never read."""
    with ApiServer() as api:
        api.tokens = {token}
        api.forbidden = {"/api/v1/nodes"}
        record = record_of(H100, "n1")
        Publisher(Client(configuration(api.url, token)), lambda: record).write(record)
        (made,) = api.of_kind("NodeTopology")
        owners = made["metadata"].get("ownerReferences", [])
        assert owners == ([{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": uid}] if uid else [])
        assert not [path for _, path in api.requests if "/api/v1/nodes" in path]


def test_an_agent_that_ends_says_so_and_one_that_starts_again_takes_it_back(api: ApiServer) -> None:
    """What kubectl prints, /nodes and the gate agree: nothing is known of a node that nothing watches."""

    def agent_runs(scanned_at_seconds: float) -> Publisher:
        record = replace(record_of(H100, "n1"), verdict="warn", scanned_at_seconds=scanned_at_seconds)
        publisher = Publisher(client_of(api), lambda: record, look_seconds=0.01)
        publisher.start()
        eventually(lambda: ("publish_success_timestamp_seconds",) in publisher.tally, "the first write")
        return publisher

    publisher = agent_runs(time.time())
    publisher.stop()
    (made,) = api.of_kind("NodeTopology")
    assert (made["status"]["verdict"], made["status"]["lastVerdict"]) == ("unknown", "warn")
    assert made["status"]["stoppedAt"] >= made["status"]["scannedAt"]
    (version,) = CRD["spec"]["versions"]
    printed = {column["name"]: column for column in version["additionalPrinterColumns"]}
    assert (printed["Scanned"]["type"], printed["Ended"]["jsonPath"]) == ("date", ".status.stoppedAt")
    back = from_resource(made)
    told = make_row(back, time.time())
    assert told["silent"] and (told["verdict"], told["last_verdict"]) == ("unknown", "warn")
    (check,) = gate.check_nodes(["n1"], Fleet([back]))
    assert check.status == "fail" and "its agent ended" in check.message
    agent_runs(time.time() + 5)
    (again,) = api.of_kind("NodeTopology")
    assert again["status"]["verdict"] == "warn" and from_resource(again).stopped_at_seconds is None


@each_row(("status", "headers"), [(429, {"Retry-After": "1"}), (500, {}), (503, {}), (504, {})])
def test_a_busy_server_is_asked_again(status: int, headers: dict[str, str]) -> None:
    """And not before it said."""
    with ApiServer() as api:
        api.faults = [(status, headers)] * 2
        before = time.monotonic()
        assert client_of(api).get(NODES)["items"] == []
        assert len(api.requests) == 3
        assert not headers or time.monotonic() - before >= 1.99


def test_what_was_refused_or_may_have_happened_is_not_asked_again(api: ApiServer) -> None:
    """403 will be 403; a POST that ended in 500 may have been done."""
    api.faults = [(403, {}), (500, {})]
    with pytest.raises(ApiError) as caught:
        client_of(api).get(NODES)
    assert caught.value.status == 403
    with pytest.raises(ApiError):
        client_of(api).create("/api/v1/namespaces/a/configmaps", {"metadata": {"name": "x"}})
    assert len(api.requests) == 2


def test_a_rotated_token_is_read_anew(api: ApiServer, tmp_path: Path) -> None:
    """The kubelet replaces the file; the next request carries the new token."""
    token = tmp_path / "token"
    token.write_text("agent-token\n")
    config = write_kubeconfig(tmp_path / "config", api.url, user="{tokenFile: token}", namespace="team")
    client = connect(environment={"KUBECONFIG": str(config)})
    assert client.namespace == "team"
    client.get(NODES)
    api.tokens = {"new"}
    with pytest.raises(ApiError) as caught:
        client.get(NODES)
    assert caught.value.status == 401
    token.write_text("new\n")
    client.get(NODES)


def agent(api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """An agent that publishes; its worker process finds the API server as the pod does, by its environment."""
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(folder / "kubeconfig", api.url)))
    state = State(lambda: (snapshot(),), interval_seconds=3600)
    state.refresh()
    publisher = Publisher(client_of(api), lambda: record_of(H100, "n1"))
    return TestClient(create(state, publisher=publisher))


def test_any_agent_answers_for_the_cluster(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes, one of them silent, from an agent on one; if the list fails later, the older records are shown."""
    for name in ("n1", "n2"):
        publish_in(api, name)
    old = replace(record_of(H100, "n3"), scanned_at_seconds=time.time() - 7200)
    Publisher(client_of(api), lambda: old).write(old)
    http = agent(api, tmp_path, monkeypatch)
    nodes = {made["name"]: made for made in http.get("/nodes").json()["nodes"]}
    assert [made["silent"] for made in nodes.values()] == [False, False, True]
    assert nodes["n3"]["verdict"] == "unknown" and nodes["n3"]["age_seconds"] >= 7200
    assert "hgx-h100" not in http.get("/cluster").text and http.get("/cluster?node=n2").status_code == 200
    assert http.get("/cluster?node=n9").status_code == 404


def test_a_server_that_refuses_connections_is_said(api, tmp_path, monkeypatch):
    http = agent(api, tmp_path, monkeypatch)
    api.down()
    for path in ("/nodes", "/cluster"):
        answer = http.get(path)
        assert answer.status_code == 503 and "cannot be reached" in answer.json()["detail"], answer.text
        assert answer.headers["Retry-After"]


def test_a_list_serves_for_some_seconds_and_reads_only_what_changed(api, tmp_path, monkeypatch):
    """Unchanged records are the same objects; where the server is away, the records of the last list stay."""
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", api.url)))
    for name in ("n1", "n2"):
        publish_in(api, name)
    held = WorkerData()
    before = {one.name: one for one in held.fleet("kubernetes", 30.0).records()}
    publish_in(api, "n2", NAMES[0])
    publish_in(api, "n3")
    assert len(held.fleet("kubernetes", 30.0).records()) == 2, "the list is a few seconds old"
    monkeypatch.setattr(worker, "LIST_SECONDS", 0.0)
    after = {one.name: one for one in held.fleet("kubernetes", 30.0).records()}
    assert sorted(after) == ["n1", "n2", "n3"] and after["n2"] != before["n2"]
    assert after["n1"].facts is before["n1"].facts and after["n1"] == before["n1"]
    api.down()
    assert len(held.fleet("kubernetes", 30.0).records()) == 3 and "cannot be reached" in str(held.error)
    api.up()
    api.delete(NODES, "", "n1")
    assert [one.name for one in held.fleet("kubernetes", 30.0).records()] == ["n2", "n3"] and held.error is None


def test_a_server_that_hangs_stalls_no_other_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More questions about the cluster than there are threads: page, gate, metrics and health answer meanwhile."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", url)))
        state = State(lambda: (snapshot(),), interval_seconds=3600)
        state.refresh()
        client = Client(configuration(url), tries=1, timeout_seconds=0.1)
        publisher = Publisher(client, lambda: None)
        statuses: list[int] = []

        def ask(path: str) -> None:
            statuses.append(http.get(path).status_code)

        with TestClient(create(state, publisher=publisher)) as http:
            asking = [threading.Thread(target=ask, args=(path,)) for path in ("/nodes", "/cluster") * 20]
            for one in asking:
                one.start()
            held = [silent.accept()[0]]  # the worker lists
            for path in ("/", "/preflight", "/metrics", "/readyz", "/findings"):
                assert http.get(path).status_code == 200, path
            assert statuses == [], "they were answered before: nothing was shown"
            for one in asking:
                one.join(60)
            assert statuses == [503] * len(asking) and held


@each_row("late_seconds", [86400, -86400], ids=["old", "in the future"])
def test_a_stale_record_is_never_a_pass(late_seconds: float) -> None:
    """Whatever it said last; a scan that is yet to come would never grow old."""
    record = replace(record_of(H100, "n"), verdict="pass", scanned_at_seconds=time.time() - late_seconds)
    made = make_row(record, time.time())
    assert made["verdict"] == "unknown" and made["last_verdict"] == "pass"


def test_metrics_say_how_publishing_goes(api: ApiServer) -> None:
    """Attempts, failures by reason, the last success."""
    state = State(lambda: (snapshot(),), interval_seconds=3600)
    state.refresh()
    publisher = Publisher(client_of(api).limited(tries=1), lambda: record_of(H100, "n1"), look_seconds=0.01)
    http = TestClient(create(state, publisher=publisher))

    def exported() -> dict[str, float]:
        state.refresh()
        lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines()]
        return {name.removeprefix("topoflight_"): float(value) for name, _, value in lines
                if name.startswith("topoflight_publish")}  # fmt: skip

    assert exported() == {"publish_interval_seconds": 300.0, "publish_attempts_total": 0.0}
    api.faults = [(403, {}), (503, {}), (403, {})]
    publisher.start()
    eventually(lambda: ("publish_success_timestamp_seconds",) in publisher.tally, "written after all")
    found = exported()
    assert found.pop("publish_success_timestamp_seconds") > time.time() - 60
    assert found == {
        "publish_interval_seconds": 300.0, "publish_attempts_total": 4.0,
        'publish_failures_total{reason="forbidden"}': 2.0, 'publish_failures_total{reason="server"}': 1.0,
    }  # fmt: skip
    publisher.stop()
