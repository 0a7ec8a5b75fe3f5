"""Every endpoint of the OpenAPI, asked for what its schema allows and what it forbids, over a real connection.

schemathesis makes the questions. No answer may be a 5xx, a status that the document does not name, a media type or a
document that it does not describe. TOPOFLIGHT_DOORS_EXAMPLES asks more of each endpoint than CI has time for.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from rigs.agents import TOKEN, agent, bearer, tokens
from rigs.serving import serving
from rigs.tables import each_row

from agent.http.access import TokenChecker
from agent.http.server import create
from agent.http.state import State

if TYPE_CHECKING:
    from schemathesis import Case, Response
    from schemathesis.schemas import BaseSchema

pytestmark = pytest.mark.long

EXAMPLES = int(os.environ.get("TOPOFLIGHT_DOORS_EXAMPLES", "12"))


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Addresses of two agents, each with a folder to keep runs in: with open reads, and closed without a token."""
    with contextlib.ExitStack() as running:
        found = {}
        closed = tokens(tmp_path_factory.mktemp("tokens"), reads_open=False)
        for name, of in (("open", TokenChecker()), ("closed", closed)):
            app = agent("titan-rtx-2x-nv2", tmp_path_factory.mktemp("state"), tokens=of).app
            found[name] = f"http://127.0.0.1:{running.enter_context(serving(app))}"
        yield found


def endpoints() -> list[str]:
    """Every operation of the document."""
    paths = create(State(lambda: (), interval_seconds=3600)).openapi()["paths"]
    return sorted(operation["operationId"] for methods in paths.values() for operation in methods.values())


@cache
def described(url: str) -> BaseSchema:
    """The document that an agent serves."""
    import schemathesis  # two seconds, which only who runs this pays

    return schemathesis.openapi.from_url(f"{url}/openapi.json", headers=bearer())


def of_open_reads(case: Case, answer: Response) -> None:
    """What makes load is closed to all, with and without a token."""
    assert case.method == "GET" or answer.status_code in (400, 403, 413, 422)


def of_the_token(case: Case, answer: Response) -> None:
    """Everything is behind a token, and this one opens it."""
    sent = answer.request.headers.get("Authorization")  # a question may be to leave it out
    assert answer.status_code not in (401, 403) or sent != bearer()["Authorization"], case.path


def of_no_token(case: Case, answer: Response) -> None:
    """Nothing but the kubelet's two probes answers."""
    assert answer.status_code in (400, 401, 413, 422) or case.path in ("/healthz", "/readyz"), case.path


@each_row("endpoint", endpoints)
@each_row(
    ("agent", "headers", "judge", "examples"),
    [("open", {}, of_open_reads, EXAMPLES), ("closed", bearer(), of_the_token, EXAMPLES),
     *(("closed", wrong, of_no_token, EXAMPLES // 4)
       for wrong in ({}, bearer(f"{TOKEN}x"), {"Authorization": f"Basic {TOKEN}"}))],
    ids=["open reads", "the token", "none", "wrong", "basic"],
)  # fmt: skip
def test_every_endpoint_answers_as_it_is_described(agents, endpoint, agent, headers, judge, examples):
    """Questions that the endpoint's schema allows, and as many that it forbids: no 5xx, and nothing undescribed."""
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    held = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
            checks.response_schema_conformance, checks.response_headers_conformance]  # fmt: skip
    operation = described(agents[agent]).find_operation_by_id(endpoint)
    anything = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=anything)
    def every(case: Case) -> None:
        answer = case.call(headers=headers)
        case.validate_response(answer, checks=held)
        judge(case, answer)

    every()
