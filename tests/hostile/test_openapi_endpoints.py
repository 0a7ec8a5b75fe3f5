"""Every endpoint of the OpenAPI, asked for what its schema allows and what it forbids, over a real connection.

schemathesis makes the questions. No answer may be a 5xx, a status that the document does not name, a media type or a
document that it does not describe. TOPOFLIGHT_DOORS_EXAMPLES asks more of each endpoint than CI has time for.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import schemathesis
import urllib3
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rigs.tables import each_row
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from agent.http.access import Tokens
from agent.http.server import create
from agent.http.state import State
from probes.host.recording import load
from probes.scan import scan

MACHINE = Path(__file__).parent.parent / "machines" / "titan-rtx-2x-nv2.json"
TOKEN = "a-token-of-24-characters"  # noqa: S105 - of this test
EXAMPLES = int(os.environ.get("TOPOFLIGHT_DOORS_EXAMPLES", "12"))
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    response_headers_conformance,
]  # fmt: skip


@contextlib.contextmanager
def agent(tokens: Tokens) -> Iterator[str]:
    """An agent on a free port of the loopback, with a folder to keep flights in; its address."""
    snapshot = scan(load(MACHINE))
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    app = create(State(lambda: (snapshot,), interval_seconds=3600, folder=Path(folder.name)), tokens=tokens)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    while urllib3.request("GET", f"{url}/readyz").status != 200:
        time.sleep(0.01)
    yield url
    server.should_exit = True
    thread.join(60)
    folder.cleanup()


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def open_agent() -> Iterator[str]:
    with agent(Tokens()) as url:
        yield url


@pytest.fixture(scope="module")
def closed_agent(token_file: Path) -> Iterator[str]:
    with agent(Tokens(token_file=token_file, reads_open=False)) as url:
        yield url


def endpoints() -> list[str]:
    """Every operation of the document."""
    paths = create(State(lambda: (), interval_seconds=3600)).openapi()["paths"]
    return sorted(operation["operationId"] for methods in paths.values() for operation in methods.values())


def ask(
    url: str, endpoint: str, headers: dict[str, str], judge: Callable[[schemathesis.Case, schemathesis.Response], None]
) -> None:
    """Questions that the endpoint's schema allows, and as many that it forbids; it describes every answer."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
    operation = schema.find_operation_by_id(endpoint)
    anything = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=anything)
    def every(case: schemathesis.Case) -> None:
        answer = case.call(headers=headers)
        case.validate_response(answer, checks=CHECKS)
        judge(case, answer)

    every()


@each_row("endpoint", endpoints)
def test_an_endpoint_with_open_reads(open_agent: str, endpoint: str) -> None:
    """What makes load is closed to all, with and without a token; nothing is a 5xx."""

    def judge(case: schemathesis.Case, answer: schemathesis.Response) -> None:
        assert case.method == "GET" or answer.status_code in (400, 403, 413, 422)

    ask(open_agent, endpoint, {}, judge)


@each_row("endpoint", endpoints)
def test_an_endpoint_with_a_token(closed_agent: str, endpoint: str) -> None:
    """Everything is behind a token, and this one opens it."""

    def judge(case: schemathesis.Case, answer: schemathesis.Response) -> None:
        sent = answer.request.headers.get("Authorization")  # a question may be to leave it out
        assert answer.status_code not in (401, 403) or sent != f"Bearer {TOKEN}", case.path

    ask(closed_agent, endpoint, {"Authorization": f"Bearer {TOKEN}"}, judge)


@each_row("endpoint", endpoints)
@each_row("token", ["", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}"], ids=["none", "empty", "wrong", "basic"])
def test_an_endpoint_without_the_token(closed_agent: str, endpoint: str, token: str) -> None:
    """Nothing but the kubelet's two probes answers."""

    def judge(case: schemathesis.Case, answer: schemathesis.Response) -> None:
        assert answer.status_code in (400, 401, 413, 422) or case.path in ("/healthz", "/readyz"), case.path

    ask(closed_agent, endpoint, {"Authorization": token} if token else {}, judge)
