"""Who may use which endpoint: token files, TokenReview and SubjectAccessReview over HTTP, and what a refusal says."""

import asyncio
import contextlib
import re
import socket
import threading

import pytest
from anyio import to_thread
from api_server import ApiServer, configuration
from rigs.agents import TOKEN, agent, bearer, tokens
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row
from starlette.requests import Request
from starlette.testclient import TestClient

from agent.cluster.client import Client
from agent.http.access import TokenChecker, describe_grant
from agent.http.server import MOST_BODY_BYTES, MOST_RECORD_BYTES

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


@each_row(("content", "mode"), [("short\n", 0o600), ("x" * 20, 0o644)])
def test_a_weak_token_file_stops_the_agent(tmp_path, content, mode):
    """Short tokens, or a file that everyone may read."""
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
            raise AssertionError("the body was asked for")

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


@each_row(("path", "most"), [("/preflight", MOST_BODY_BYTES), ("/runs", MOST_RECORD_BYTES)])
def test_bodies_of_posts_are_bounded(path, most, tmp_path):
    """413, whatever length is announced."""
    http = agent(tokens=tokens(tmp_path))
    headers, body = {**bearer(), "Content-Type": "application/json"}, b" " * (most + 1)
    for content in (body, iter([body[:1000], body])):
        assert http.post(path, headers=headers, content=content).status_code == 413
