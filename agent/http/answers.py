"""Responses of endpoints: documents rendered once per view, errors as problem documents, and the models of both.

Handlers return complete responses. The models only describe them in the OpenAPI document; the tests send valid and
invalid requests to every endpoint and compare. Specification: OpenAPI 3.1; RFC 9457 for problems.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agent.checks.verdict import Verdict, View
from agent.http.worker import Answer, ProblemError, Worker
from contracts.finding import Finding
from contracts.redaction import without_secrets
from contracts.tables import read_table

MOST_ANSWERS = 64
MOST_BYTES = 16 << 20
PIECE_BYTES = 128 << 10  # held by a slow reader of a large response; Starlette compresses such pieces in a thread
PROBLEM_TYPE = "application/problem+json"
Responses = dict[int | str, dict[str, Any]]

COMMON = (400, 401, 403, 422, 503)
_WORDS: dict[str, str] = read_table(__file__, "problems.toml")
_REFERENCE = {"$ref": "#/components/schemas/Problem"}
_TEXT = {"schema": {"type": "string"}}
TOKEN = [Security(HTTPBearer(auto_error=False, scheme_name="bearer"))]  # for the document; agent.http.access checks it


class Problem(BaseModel):
    """RFC 9457, with members of our own."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    grant: str = Field(default="", description="How to be let in.")
    allowed: list[str] = []
    errors: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gate's answer."""

    verdict: Verdict
    checks: tuple[Finding, ...]


class StoreAnswer(BaseModel):
    """Whether a record is new here."""

    kept: Literal["now", "before"]


def problems(*more: int, common: tuple[int, ...] = COMMON) -> Responses:
    """Return the problem documents of an endpoint, including those that all endpoints have."""
    found: Responses = {
        status: {"description": _WORDS[str(status)], "content": {PROBLEM_TYPE: {"schema": _REFERENCE}}}
        for status in sorted({*common, *more})
    }
    if 413 in found:  # Starlette rejects it before any handler runs
        found[413]["content"] = {"text/plain": _TEXT}
    return found


def texts(*media_types: str) -> Responses:
    """Return the text responses of an endpoint."""
    return {200: {"content": dict.fromkeys(media_types, _TEXT)}}


class Rendered:
    """Responses that depend only on one view and the request: rendered once, and discarded with the view."""

    def __init__(self) -> None:
        # Replaced as a whole: the event loop and a thread that renders may store at the same time.
        self._held: tuple[View | None, dict[Hashable, Answer]] = None, {}
        self._rendering = threading.Lock()

    def get(self, view: View, key: Hashable) -> Answer | None:
        """Return the response rendered for this request; None if there is none."""
        rendered_view, answers = self._held
        return answers.get(key) if view is rendered_view else None

    def put(self, view: View, key: Hashable, answer: Answer) -> None:
        """Store a response. Those of another view are discarded, and all of them once they take too much memory."""
        rendered_view, answers = self._held
        size = sum(len(one.body) for one in answers.values()) + len(answer.body)
        fits = view is rendered_view and size <= MOST_BYTES and len(answers) < MOST_ANSWERS
        self._held = view, {**answers, key: answer} if fits else {key: answer}

    async def render(self, view: View, key: Hashable, make: Callable[[], Answer]) -> Response:
        """Return the stored response, or compute it with `make` in a thread; one request is rendered at a time."""

        def compute() -> Answer:
            with self._rendering:
                answer = self.get(view, key)
                if answer is None:
                    answer = make()
                    self.put(view, key, answer)
                return answer

        answer = self.get(view, key)
        return respond(await run_in_threadpool(compute) if answer is None else answer)

    async def ask_worker(self, request: Request, worker: Worker, view: View, name: str, **given: Any) -> Response:
        """Return the stored response, or the worker's answer to the question `name`."""
        key = name, *given.items()
        answer = self.get(view, key)
        if answer is None:
            answer = await worker.ask(request, name, view=view, **given)
            self.put(view, key, answer)
        return respond(answer)


def respond(answer: Answer) -> Response:
    """Return the response; a large one is sent in pieces, so that slow readers share its bytes."""
    size = len(answer.body)
    headers = {"Cache-Control": "no-store", **answer.headers}
    if size <= PIECE_BYTES:
        return Response(answer.body, answer.status, headers, answer.media_type)
    return StreamingResponse(
        _pieces(answer), answer.status, {**headers, "Content-Length": str(size)}, answer.media_type
    )


async def _pieces(answer: Answer) -> AsyncIterator[bytes]:
    for first in range(0, len(answer.body), PIECE_BYTES):
        yield answer.body[first : first + PIECE_BYTES]


def complaints(error: ValidationError | RequestValidationError, most: int | None = None) -> tuple[list[Any], str]:
    """Return the invalid parts of a body or query with reasons, at most `most`; and the same in one line."""
    found = [{"where": ".".join(map(str, e["loc"])) or "body", "message": e["msg"]} for e in error.errors()[:most]]
    return found, "; ".join(f"{each['where'][:64]}: {each['message']}" for each in found)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Describe, for the OpenAPI document, a body that the endpoint parses itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def problem(
    request: Request, status: int, detail: str, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    """Create one problem document."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": request.url.path,
        **more,
    }
    return JSONResponse(without_secrets(body), status_code=status, media_type=PROBLEM_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Convert every error of the application to a problem document, and add their schema, which no route returns."""

    @app.exception_handler(ProblemError)
    async def refused(request: Request, error: ProblemError) -> JSONResponse:
        return problem(request, error.status, error.detail, error.headers, **error.more)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers) if error.headers else None
        return problem(request, error.status_code, str(error.detail), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors, detail = complaints(error)
        return problem(request, 422, detail, errors=errors)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = Problem.model_json_schema()
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
