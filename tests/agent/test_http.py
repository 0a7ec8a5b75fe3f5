"""Every endpoint of the agent on recorded machines: formats, errors as problem documents; none of them makes load."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rigs.agents import agent
from rigs.recorded import NAMES, snapshot
from rigs.tables import each_row
from rigs.waiting import eventually
from starlette.testclient import TestClient

from agent.base.version import VERSION
from agent.http.access import Tokens
from agent.http.server import create
from agent.http.state import State


def scanning(look: Callable[[], Any], every: float = 3600) -> TestClient:
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


ENDPOINTS = ("/", "/metrics", "/findings", "/snapshot", "/topology", "/recommendations", "/preflight", "/runs")
WHOLE = ("hgx-h100-8xH100-8hca", "cpu-only-vm", "sick-h100-gpu-lost")  # TOPOFLIGHT_PAIRS=all: every machine


@each_row("name", NAMES)
def test_every_machine_is_served(name: str) -> None:
    """Page, metrics and findings of each recording; of three machines, every endpoint."""
    whole = name in WHOLE or os.environ.get("TOPOFLIGHT_PAIRS") == "all"
    running = agent(name)
    answers = {endpoint: running.get(endpoint) for endpoint in (ENDPOINTS if whole else ENDPOINTS[:3])}
    assert {answer.status_code for answer in answers.values()} == {200}, answers
    assert snapshot(name).hostname in answers["/"].text


@each_row("endpoint", ["/snapshot", "/topology", "/findings", "/recommendations", "/preflight"])
def test_json_and_yaml_say_the_same(client: TestClient, endpoint: str) -> None:
    """`?format=yaml` and the Accept header give the JSON's content."""
    plain = client.get(endpoint).json()
    assert yaml.safe_load(client.get(endpoint, params={"format": "yaml"}).text) == plain
    assert yaml.safe_load(client.get(endpoint, headers={"Accept": "application/yaml"}).text) == plain


def test_recommendations_as_environment_files(client: TestClient) -> None:
    """env, shell and k8s carry the settings of the JSON, and nothing for a machine that needs nothing."""
    settings = {s["name"]: s["value"] for s in client.get("/recommendations").json()["settings"]}
    env = dict(
        line.split("=", 1) for line in client.get("/recommendations?format=env").text.splitlines() if "=" in line
    )
    assert env == settings
    k8s = yaml.safe_load(client.get("/recommendations?format=k8s").text) or []
    assert {e["name"]: e["value"] for e in k8s} == settings


@each_row(
    ("endpoint", "status"),
    [
        ("/recommendations?format=nonsense", 400),
        ("/recommendations?model=no-such-model", 400),
        ("/recommendations?model=/etc/passwd", 400),
        ("/recommendations?machine=p99.huge", 400),
        ("/recommendations?nodes=0", 422),
        ("/recommendations?method=magic", 422),
        ("/topology?format=env", 400),
        ("/preflight?require=no.such.check", 400),
        ("/preflight?fail_on=maybe", 422),
        ("/measurements", 404),
        ("/nowhere", 404),
    ],
)
def test_errors_are_problem_documents_that_name_what_is_allowed(client: TestClient, endpoint: str, status: int) -> None:
    """RFC 9457, with the offending value."""
    response = client.get(endpoint)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["detail"]


def test_a_scan_that_fails_is_said_and_survived() -> None:
    """The agent answers 503 with the reason, and goes on."""
    calls = iter([RuntimeError("driver gone")])

    def failing() -> Any:
        for error in calls:
            raise error
        return (snapshot(),)

    with scanning(failing, every=0.05) as running:
        ready(running)


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
    told = client.get("/version")
    assert told.status_code == 200 and told.json()["version"] == VERSION
    assert told.json()["architecture"] == os.uname().machine
    closed = TestClient(create(State(tuple, interval_seconds=3600), tokens=Tokens(reads_open=False)))
    assert closed.get("/version").status_code == 403


def test_metrics_negotiate_and_answer_without_redirect(client: TestClient) -> None:
    """Text by default, OpenMetrics where asked for."""
    plain = client.get("/metrics", follow_redirects=False)
    assert plain.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain")
    openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_whatever_needs_a_token_is_closed_unless_somebody_judges_tokens(client: TestClient) -> None:
    """Every endpoint but reading answers 403, with or without a token, and says how to open it."""
    paths = client.get("/openapi.json").json()["paths"]
    endpoints = {(method, path) for path, methods in paths.items() for method in methods if method != "get"}
    assert endpoints == {("post", "/preflight"), ("post", "/runs"), ("post", "/why")}
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


SERVE = """
import sys
from rigs.agents import agent
from probes.registry import ALL
from probes.scanner import Scanner
with Scanner(probes=ALL) as scanner:
    scraped = agent(scanner.scan())
scraped.get("/metrics")
print([name for name in ("rich", "jinja2", "pynvml", "psutil") if name in sys.modules])
asked = agent()
[asked.get(path) for path in ("/", "/topology", "/metrics", "/preflight", "/recommendations?model=Llama-3.1-8B")]
print([name for name in ("torch", "kubernetes", "transformers", "numpy") if name in sys.modules])
"""


@pytest.mark.long
def test_the_resident_process_imports_neither_torch_nor_kubernetes() -> None:
    """In a fresh interpreter that has served every endpoint; nothing that draws, and no driver, for a scrape alone."""
    paths = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=250, check=True,
                          env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
    assert done.stdout.split() == ["[]", "[]"]


def test_an_agent_that_nobody_has_asked_has_loaded_neither_pages_nor_drivers() -> None:
    """Drawing and page templates are loaded by the first question, drivers by the child process that scans."""
    code = "import agent.http.server, agent.http.serve, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    late = {"rich", "jinja2", "torch", "pynvml", "psutil", "kubernetes", "websockets", "agent.pages.render"}
    assert not late.intersection(done.stdout.split())


@each_row(
    ("path", "detail"),
    [
        ("/recommendations?modle=Llama-3.1-8B", "unknown parameter 'modle'.*did you mean model"),
        ("/preflight?requires=rdma.*", "unknown parameter 'requires'.*did you mean require"),
        ("/what-if?modell=x", "unknown parameter 'modell'.*did you mean model"),
        ("/nodes?scop=node", "unknown parameter 'scop'.*did you mean scope"),
        ("/healthz?verbose=1", "this path takes none"),
    ],
)
def test_an_unknown_parameter_is_refused(client: TestClient, path: str, detail: str) -> None:
    """It is named with what is allowed, never ignored: a misspelt question has no answer."""
    response = client.get(path)
    assert response.status_code == 400
    assert re.search(detail, response.json()["detail"])


def test_ranks_per_node_are_answered_for(client: TestClient) -> None:
    """As on the command line."""
    asked = {"machine": "p4d.24xlarge", "nodes": 4, "model": "tiny", "ranks_per_node": 1}
    assert client.get("/recommendations", params=asked).json()["chosen"]["layout"]["world_size"] == 4
    more = client.get("/recommendations", params={**asked, "ranks_per_node": 9})
    assert more.status_code == 400 and "from 1 to 8" in more.json()["detail"]
