"""Responses of endpoints: documents rendered once per view, errors as problem documents, and the models of both.

The record that a job posts is checked here too (specification: run.json in docs/reference/finetune-job.md).

Handlers return complete responses. The models only describe them in the OpenAPI document; the tests send valid and
invalid requests to every endpoint and compare. Specification: OpenAPI 3.1; RFC 9457 for problems.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

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
from contracts import plain
from contracts.finding import Finding
from contracts.redaction import without_secrets
from contracts.run_record import RunRecord, dumps, record_of
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
    grant: str = Field(default="", description="How to get access.")
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
    """Responses that depend only on one view and the request: rendered once, and discarded with the view.

    Only the event loop reads and stores responses; a thread renders them, one at a time.
    """

    def __init__(self) -> None:
        self._view: View | None = None
        self._answers: dict[Hashable, Answer] = {}
        self._rendering = asyncio.Lock()

    def get(self, view: View, key: Hashable) -> Answer | None:
        """Return the response rendered for this request; None if there is none."""
        return self._answers.get(key) if view is self._view else None

    def put(self, view: View, key: Hashable, answer: Answer) -> Answer:
        """Store a response. Those of another view are discarded, and all of them once they take too much memory."""
        size = sum(len(one.body) for one in self._answers.values()) + len(answer.body)
        if view is not self._view or size > MOST_BYTES or len(self._answers) >= MOST_ANSWERS:
            self._view, self._answers = view, {}
        self._answers[key] = answer
        return answer

    async def render(self, view: View, key: Hashable, make: Callable[[], Answer]) -> Response:
        """Return the stored response, or compute it with `make` in a thread; one request is rendered at a time."""
        answer = self.get(view, key)
        if answer is None:
            async with self._rendering:
                answer = self.get(view, key) or self.put(view, key, await run_in_threadpool(make))
        return respond(answer)

    async def ask_worker(self, request: Request, worker: Worker, view: View, name: str, **given: Any) -> Response:
        """Return the stored response, or the worker's answer to the question `name`."""
        key = name, *given.items()
        answer = self.get(view, key) or self.put(view, key, await worker.ask(request, name, view=view, **given))
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
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail,
            "instance": request.url.path, **more}  # fmt: skip
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


# The record of a run (POST /runs). A job posts it, not an administrator, and every reader gets it from memory.

# 50 of these are stored in the 64 MiB that deploy/daemonset gives the state folder; 4096 steps take 60 KiB
MOST_RECORD_BYTES = 512 << 10
MOST_VALUES = 16384  # 4096 steps and evaluations; each value uses about 100 bytes of memory

_Time = Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$", max_length=20)]
_Text = Annotated[str, Field(max_length=4096)]
_Members = dict[str, Any]


class PostedRecord(BaseModel):
    """What POST /runs takes: a job's run.json. Members that RunRecord does not have are dropped."""

    model_config = ConfigDict(extra="allow", strict=True)

    schema_version: Literal[1]  # contracts.run_record.RECORD_VERSION
    status: str = Field(pattern="^[a-z]{1,32}$")
    host: str = Field(min_length=1, max_length=253)
    started_at: _Time
    ended_at: _Time | None = None
    exit_code: int | None = Field(default=None, ge=0, le=255)
    reason: _Text | None = None
    notes: list[_Text] = Field(default=[], max_length=256)
    layout: _Members = {}
    forecast: _Members = {}
    measured: _Members = {}
    loss: _Members = {}
    model: _Members = {}
    communication: _Members | None = None
    parts: list[_Members] = Field(default=[], max_length=64)
    comparison: list[_Members] = Field(default=[], max_length=64)
    steps_done: int | None = Field(default=None, ge=0)
    step_seconds: list[float | None] = Field(default=[], max_length=4096)


def read_record(body: bytes) -> RunRecord:
    """Parse the record. Raises ProblemError 400 if it is not such JSON, 422 if a member is invalid."""
    if (values := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > MOST_VALUES:  # counted before parsing
        raise ProblemError(422, f"the record holds {values} values: {MOST_VALUES} are taken")
    try:
        record = plain.loads(body, unknown_numbers=True)  # a loss may be NaN
    except (plain.PlainError, UnicodeDecodeError) as error:
        raise ProblemError(400, f"the body is no record of a run: {error}") from None
    try:
        PostedRecord.model_validate(record)
    except ValidationError as error:
        found, detail = complaints(error, 16)
        raise ProblemError(422, detail, errors=found) from None
    try:
        made = record_of(record)
    except plain.MisfitError as error:
        raise ProblemError(422, f"the body is no record of a run: {error}") from None
    if len(dumps(made)) > MOST_RECORD_BYTES:  # as stored, which may be larger than received
        raise ProblemError(422, f"the record takes more than {MOST_RECORD_BYTES} bytes to keep")
    return made
