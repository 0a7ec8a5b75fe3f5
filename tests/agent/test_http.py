"""Every endpoint of the agent on recorded machines, a start that is ready, and who may use which endpoint.

Formats; errors as problem documents; token files, TokenReview and SubjectAccessReview; what a refusal says.
"""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from agent_pod import OVERLAYS, agent_of
from anyio import to_thread
from api_server import ApiServer, configuration
from resident import free_port
from rigs.agents import TOKEN, agent, bearer, list_readable_paths, tokens
from rigs.command import topoflight
from rigs.recorded import NAMES, path_of, snapshot
from rigs.tables import each_row, rows_of
from rigs.waiting import eventually
from starlette.requests import Request
from starlette.testclient import TestClient

from agent.base import version
from agent.cluster.client import Client
from agent.http.access import TokenChecker, describe_grant
from agent.http.serve import bind
from agent.http.server import MAX_BODY_BYTES, MAX_RECORD_BYTES, MAX_WAIT_SECONDS, create
from agent.http.state import State

rows = rows_of(__file__)


def scanning(look: Callable, every: float = 3600) -> TestClient:
    """An agent whose first scan begins with `with`."""
    return TestClient(create(State(look, interval_seconds=every)))


def ready(client: TestClient) -> TestClient:
    """Wait for the first scan; a generous bound, as the machine may be busy."""
    eventually(lambda: client.get("/readyz").status_code == 200, "the first scan is done")
    return client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with scanning(lambda: (snapshot(),)) as running:
        yield ready(running)


WHOLE = ("hgx-h100-8xH100-8hca", "cpu-only-vm", "sick-h100-gpu-lost")  # TOPOFLIGHT_PAIRS=all: every machine


@each_row("name", NAMES)
def test_every_machine_is_served(name: str) -> None:
    """Page, metrics and findings of each recording; of three machines, every endpoint. There is no benchmark."""
    whole = name in WHOLE or os.environ.get("TOPOFLIGHT_PAIRS") == "all"
    running = agent(name)
    paths = list_readable_paths(running) if whole else ("/", "/metrics", "/findings")
    answers = {path: running.get(path) for path in paths}
    failed = {path for path, answer in answers.items() if answer.status_code != 200}
    assert failed == {"/measurements"} & {*paths}, answers
    assert snapshot(name).hostname in answers["/"].text


def test_recommendations_as_environment_files(client: TestClient) -> None:
    """env, shell and k8s carry the settings of the JSON, and nothing for a machine that needs nothing."""
    settings = {s["name"]: s["value"] for s in client.get("/recommendations").json()["settings"]}
    env = dict(
        line.split("=", 1) for line in client.get("/recommendations?format=env").text.splitlines() if "=" in line
    )
    assert env == settings
    k8s = yaml.safe_load(client.get("/recommendations?format=k8s").text) or []
    assert {e["name"]: e["value"] for e in k8s} == settings


@each_row(("endpoint", "status", "detail"), rows("problems"))
def test_errors_are_problem_documents_that_name_what_is_allowed(client, endpoint, status, detail):
    """RFC 9457, with the offending value."""
    response = client.get(endpoint)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status and problem["detail"] and re.search(detail, problem["detail"])


def test_a_later_scan_that_fails_is_said_on_the_page() -> None:
    """The older view stays, and says that it is one."""
    left = [(snapshot("cpu-only-vm"),)]
    state = State(lambda: left.pop(), interval_seconds=3600)
    state.refresh()
    with pytest.raises(IndexError), TestClient(create(state)) as running:
        eventually(lambda: state.error is not None, "the scan at the start has failed")
        page = running.get("/").text
        assert 'role="alert"' in page and "<h1>vm" in page
        raise IndexError


def test_version_names_the_release_before_the_first_scan() -> None:
    """The one that the command line prints; it rests on no scan, and is closed where reads are."""
    client = TestClient(create(State(tuple, interval_seconds=3600)))
    told = client.get("/openapi.json")
    assert told.status_code == 200 and told.json()["info"]["version"] == version()
    closed = TestClient(create(State(tuple, interval_seconds=3600), tokens=TokenChecker(reads_open=False)))
    assert closed.get("/openapi.json").status_code == 403


def test_metrics_negotiate_and_answer_without_redirect(client: TestClient) -> None:
    """Text by default, OpenMetrics where asked for."""
    plain = client.get("/metrics", follow_redirects=False)
    assert plain.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain")
    openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_endpoints_that_need_a_token_are_closed_if_the_agent_cannot_check_tokens(client: TestClient) -> None:
    """Every method except GET gets 403, with or without a token, and the answer says how to configure tokens."""
    paths = client.get("/openapi.json").json()["paths"]
    endpoints = {(method, path) for path, methods in paths.items() for method in methods if method != "get"}
    assert endpoints == {("post", "/preflight"), ("post", "/runs")}
    for method, path in endpoints:
        for headers in ({}, {"Authorization": "Bearer anything"}):
            response = client.request(method, path, headers=headers)
            assert response.status_code == 403
            assert "--token-file" in response.json()["grant"]


def test_openapi_is_the_committed_one(client: TestClient, golden: Callable[..., None]) -> None:
    """The surface changes on purpose only."""
    document = client.get("/openapi.json").json()
    document["info"]["version"] = "x"
    golden("openapi.json", document, digest=True)


HELD = """
import builtins, os, time
real = builtins.__import__
def held(name, *rest, **more):
    if name.partition('.')[0] in ('uvicorn', 'fastapi'):
        while not os.path.exists(os.environ['OPEN']):
            time.sleep(0.01)
    return real(name, *rest, **more)
builtins.__import__ = held
"""


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def test_who_asks_while_the_agent_is_loading_waits_and_is_answered(tmp_path):
    """On a slow disk the libraries take seconds: the kubelet's first question is not refused meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    opened, port = tmp_path / "open", free_port()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "OPEN": str(opened)}
    command = [sys.executable, "-m", "agent.cli", "serve", "--host", str(path_of()), "--port", str(port),
               "--state", str(tmp_path / "state")]  # fmt: skip
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as served:
        try:
            eventually(lambda: connects(port), "the port is there while the libraries are held back")
            answers: list[tuple[str, int]] = []

            def ask(path: str) -> None:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
                    answers.append((path, answer.status))

            asking = [threading.Thread(target=ask, args=(path,)) for path in ("/healthz", "/readyz?wait=60")]
            for thread in asking:
                thread.start()
            time.sleep(0.3)
            assert not answers and served.poll() is None
            opened.touch()
            for thread in asking:
                thread.join(300)
            assert sorted(answers) == [("/healthz", 200), ("/readyz?wait=60", 200)]
        finally:
            served.terminate()


def test_readiness_waits_for_the_first_scan() -> None:
    """A scan that takes a moment is not told as a failed probe; without waiting the answer is no at once."""
    gate = threading.Event()

    def slow():
        gate.wait()
        return (snapshot(),)

    with scanning(slow) as running:
        assert running.get("/readyz").status_code == 503
        assert running.get("/readyz?wait=0.2").status_code == 503
        threading.Timer(0.3, gate.set).start()
        assert running.get(f"/readyz?wait={MAX_WAIT_SECONDS}").status_code == 200
        assert running.get(f"/readyz?wait={MAX_WAIT_SECONDS + 1}").status_code in (400, 422)


def test_readiness_outlasts_a_jump_of_the_clock(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    for days in (1, -1):
        monkeypatch.setattr(time, "time", lambda days=days: now() + 86400 * days)
        assert [client.get(path).status_code for path in ("/readyz", "/metrics", "/")] == [200] * 3


def test_readiness_does_not_wait_for_a_scan_that_failed() -> None:
    """Its error is the answer, and the agent continues to scan."""
    repaired = threading.Event()

    def failing():
        if not repaired.is_set():
            raise RuntimeError("driver gone")
        return (snapshot(),)

    with scanning(failing, every=0.05) as running:
        eventually(lambda: "driver gone" in running.get("/readyz").text, "the scan has failed")
        assert running.get(f"/readyz?wait={MAX_WAIT_SECONDS}").status_code == 503
        repaired.set()
        ready(running)


@each_row("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_the_manifests_probes_leave_a_start_its_time(overlay: str) -> None:
    """The interpreter binds the port within the delay; then the kubelet waits longer than the agent takes to say no."""
    (container,) = agent_of(overlay)["spec"]["template"]["spec"]["containers"]
    startup, ready = container["startupProbe"], container["readinessProbe"]
    assert startup["httpGet"]["path"] == "/healthz" and startup["initialDelaySeconds"] >= 2
    assert startup["timeoutSeconds"] * startup["failureThreshold"] >= 120
    asked = urlsplit(ready["httpGet"]["path"])
    (wait,) = parse_qs(asked.query)["wait"]
    assert asked.path == "/readyz" and 30 <= float(wait) <= MAX_WAIT_SECONDS
    assert ready["timeoutSeconds"] > float(wait)


USER = "system:serviceaccount:ci:gate"


@pytest.fixture
def http(tmp_path):
    return agent(tokens=tokens(tmp_path))


@pytest.fixture
def api():
    with ApiServer() as server:
        server.reviewed[TOKEN] = {"authenticated": True, "audiences": ["topoflight"],
                                  "user": {"username": USER, "groups": ["system:authenticated"]}}  # fmt: skip
        yield server


def reviewing(api: ApiServer, **more) -> TestClient:
    return agent(tokens=TokenChecker(client=Client(configuration(api.url), tries=1), **more))


def status(http: TestClient, path: str = "/preflight") -> int:
    """What the token gets for a post to this endpoint."""
    return int(http.post(path, headers=bearer()).status_code)


def test_a_token_file_opens_the_gate(http: TestClient) -> None:
    """The right token gets the verdict of a fresh scan; others 401 and the way to get one."""
    posted = http.post("/preflight", headers=bearer())
    assert posted.status_code == 200
    assert posted.json() == http.get("/preflight").json(), "the same verdict"
    measuring = http.post("/preflight", headers=bearer(), json={"measure": True})
    assert measuring.status_code == 422, "nothing makes load from afar"
    for sent in ({"content": b'{"require": ["gpu.*"]}'}, {"json": ["gpu.*"]}):
        refused = http.post("/preflight", headers=bearer(), **sent)
        assert refused.status_code == 422 and "Content-Type: application/json" in refused.json()["detail"]
    for query, status in (("require=rmda.*", 400), ("expect=gpus=9", 422), ("fail_on=warn", 200)):
        assert http.post(f"/preflight?{query}", headers=bearer()).status_code == status, "no option is ignored"
    for headers in ({}, bearer("wrong" * 5), {"Authorization": f"Basic {TOKEN}"}, bearer(""), bearer("x" * 20000)):
        response = http.post("/preflight", headers=headers)
        assert response.status_code == 401, headers
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["www-authenticate"].startswith("Bearer")
        assert "Authorization: Bearer" in response.json()["grant"]


def test_a_token_added_to_the_file_is_in_at_once(tmp_path):
    """The file is read for each token that is not remembered; one taken out is out within seconds."""
    judge = tokens(tmp_path)
    for token in (TOKEN, "z" * 20):
        (tmp_path / "tokens").write_text(f"{token}\n")
        judged = judge.authorize(asking("10.0.0.1", token), path="/preflight", verb="post")
        assert asyncio.run(judged) == "token-file"


def test_every_address_includes_those_of_ipv4() -> None:
    """The agents of a cluster listen on `::`, with and without IPv4."""
    with bind("::", 0) as place:
        for address in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((address, place.getsockname()[1]), 5).close()


@each_row(("content", "mode"), [("short\n", 0o600), ("x" * 20, 0o644), ("", 0o600), ("# none\n", 0o600)])
def test_a_weak_token_file_stops_the_agent(tmp_path, content, mode):
    """Short tokens, no token, or a file that everyone may read."""
    path = tmp_path / "tokens"
    path.write_text(content)
    path.chmod(mode)
    done = topoflight("serve", "--token-file", path, "--host", path_of())
    assert done.exit_code == 2 and str(path) in done.output


def test_a_state_folder_that_is_named_is_made(tmp_path):
    """Before the agent listens; 192.0.2.1 is an address of no host (RFC 5737), so that the agent ends there."""
    state = tmp_path / "folder" / "state"
    done = topoflight("serve", "--state", state, "--address", "192.0.2.1", "--port", "0", "--host", path_of())
    assert done.exit_code == 1 and "--address 192.0.2.1" in " ".join(done.output.split()), done.output
    assert state.is_dir()


def test_a_state_folder_that_cannot_be_written_is_named_at_the_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "access", lambda _path, mode, **_more: not mode & os.W_OK)
    done = topoflight("serve", "--state", tmp_path, "--address", "192.0.2.1", "--port", "0", "--host", path_of())
    assert done.exit_code == 1 and f"the folder {tmp_path} cannot be written to; posted runs" in caplog.text


def test_the_api_server_judges(api: ApiServer) -> None:
    """403 with the two lines that grant it; then granted, the verdict."""
    http = reviewing(api)
    refused = http.post("/preflight", headers=bearer())
    assert refused.status_code == 403
    assert USER in refused.json()["detail"] and f"--user={USER}" in refused.json()["grant"]
    assert "--non-resource-url=/preflight" in refused.json()["grant"]
    api.allowed.add((USER, "post", "/preflight"))
    assert status(reviewing(api)) == 200
    judge = TokenChecker(client=Client(configuration(api.url), tries=1))
    assert asyncio.run(judge.authorize(asking("10.0.0.1", TOKEN), path="/preflight", verb="post")) == USER
    assert status(reviewing(api), "/runs") == 403, "each endpoint by itself"
    for audiences in (["https://kubernetes.default.svc"], []):  # another service's, and a server that names none
        api.reviewed[TOKEN]["audiences"] = audiences
        assert status(reviewing(api)) == 401, audiences


def test_answers_are_remembered_for_seconds_only_and_no_api_server_is_no_entry(api: ApiServer) -> None:
    """One review for many requests; 503 while the server is away, and open again when it is back."""
    http = reviewing(api)
    assert {status(http) for _ in range(5)} == {403}
    assert len([r for r in api.requests if "tokenreviews" in r[1]]) == 1
    http = reviewing(api)
    api.down()
    response = http.post("/preflight", headers=bearer())
    assert response.status_code == 503 and response.headers["retry-after"]
    api.allowed.add((USER, "post", "/preflight"))
    api.up()
    assert status(http) == 200


def test_no_two_hints_make_an_object_of_one_name() -> None:
    """A second user, or a second path, would else end in AlreadyExists; so would the name that the docs use."""
    users, paths = ("system:serviceaccount:ci:gate", "ann@example"), ("/preflight", "/runs")
    made = [describe_grant(user, "post", path) for user in users for path in paths]
    names = [re.findall(r"create clusterrole(?:binding)? (\S+)", text) for text in made]
    assert all(role == binding for role, binding in names)
    assert len({role for role, _ in names}) == len(made) and "topoflight-load" not in {role for role, _ in names}
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", role) for role, _ in names)
    assert describe_grant(users[0], "post", paths[0]) == made[0], "the same refusal says the same"


def asking(source: str, token: str) -> Request:
    scope = {"type": "http", "method": "POST", "path": "/preflight", "client": (source, 4711),
             "headers": [(b"authorization", f"Bearer {token}".encode())]}  # fmt: skip
    return Request(scope)


def test_the_token_is_judged_before_the_body_is_read(tmp_path):
    """A body that is announced and never comes keeps nobody busy."""
    for method, path in (("POST", "/preflight"), ("POST", "/runs")):
        app = agent(tokens=tokens(tmp_path)).app
        statuses: list[int] = []

        async def receive():
            raise AssertionError("the body was read")

        async def send(message, statuses: list[int] = statuses) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
                 "root_path": "", "headers": [(b"content-length", b"100")], "client": ("10.0.0.1", 1),
                 "server": ("10.0.0.2", 9402), "scheme": "http", "http_version": "1.1"}  # fmt: skip
        asyncio.run(app(scope, receive, send))
        assert statuses == [401], path


def test_an_api_server_that_hangs_stalls_only_who_brings_a_token() -> None:
    """More tokens than the pool for requests has threads, none of them judged: the rest is answered meanwhile."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=64)
    way = configuration(f"http://127.0.0.1:{silent.getsockname()[1]}")

    def post(number: int) -> None:
        with contextlib.suppress(RuntimeError):  # what waits at the end of the test is cancelled
            http.post("/preflight", headers=bearer(f"{number:020d}"))

    with agent(tokens=TokenChecker(client=Client(way, tries=1, timeout_seconds=30))) as http:
        http.portal.call(lambda: setattr(to_thread.current_default_thread_limiter(), "total_tokens", 4))
        posts = [threading.Thread(target=post, args=(number,)) for number in range(8)]
        for one in posts:
            one.start()
        held = silent.accept()[0]  # the first review has reached the server, which says nothing
        for path in ("/", "/preflight", "/metrics", "/healthz", "/readyz"):
            assert http.get(path).status_code == 200, path
        assert all(one.is_alive() for one in posts), "they were answered before: nothing was shown"
        held.close()
        silent.close()
        for one in posts:
            one.join()


@each_row(("path", "most"), [("/preflight", MAX_BODY_BYTES), ("/runs", MAX_RECORD_BYTES)])
def test_bodies_of_posts_are_bounded(path, most, tmp_path):
    """413, whatever length is announced."""
    http = agent(tokens=tokens(tmp_path))
    headers, body = {**bearer(), "Content-Type": "application/json"}, b" " * (most + 1)
    for content in (body, iter([body[:1000], body])):
        assert http.post(path, headers=headers, content=content).status_code == 413
