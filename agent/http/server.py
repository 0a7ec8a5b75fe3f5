"""The HTTP agent. `docs/reference/http-api.md` lists the endpoints and who may use them.

Handlers return complete responses: documents rendered once per view, and problem documents for errors. The response
models only describe them in the OpenAPI document; the tests send valid and invalid requests to every endpoint and
compare. Specification: OpenAPI 3.1; RFC 9457 for problems.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect

from agent import base, metrics
from agent.advice import advise
from agent.advice.request import Request as AdviceRequest
from agent.base import raise_as
from agent.base.options import FIELDS, RequestError, question_model
from agent.checks.findings import sort_worst_first
from agent.checks.host_checks import ALL_CODES
from agent.checks.verdict import FailOn, GateError, Verdict, judge, select
from agent.checks.view import View
from agent.http.access import PROBLEM_TYPE, TokenChecker, TokenMiddleware, make_problem
from agent.http.state import Publisher, State
from agent.http.worker import Answer, ProblemError, Worker, make_document, make_page
from collectives.bench.results import BenchResult
from contracts import plain
from contracts.finding import Finding
from contracts.run_record import RunRecord, dumps, record_of
from contracts.tables import read_table
from planner.advice import Recommendation
from topology.render import json_document

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 65536
MAX_WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.1
WORTH_BYTES = 1024  # gzip on a smaller response saves less than one packet
GZIP_LEVEL = 4
STALE_SCANS = 4  # not ready after this many missed scans in a row
MAX_ANSWERS = 64
MAX_BYTES = 16 << 20
PIECE_BYTES = 128 << 10  # held by a slow reader of a large response; Starlette compresses such pieces in a thread
Responses = dict[int | str, dict[str, Any]]

COMMON = (400, 401, 403, 422, 503)
_PROBLEMS = read_table(__file__, "problems.toml")
_REFERENCE = {"$ref": "#/components/schemas/Problem"}
_TEXT = {"schema": {"type": "string"}}
TOKEN = [Security(HTTPBearer(auto_error=False, scheme_name="bearer"))]  # for the document; agent.http.access checks it

# Query parameters. An unknown one is rejected: a parameter with a typing error must not look like an answer.
FORBID_UNKNOWN = ConfigDict(extra="forbid")
FormField = Annotated[str, Query(max_length=4096)]  # a form field; empty means omitted
_OPTIONS = read_table(base.__file__, "verbs/recommend.toml")  # which fields need a model is the same as for the verb
NEED_MODEL = {name for name, option in FIELDS.items() if "--model" in _OPTIONS.get(option, {}).get("requires", ())}
CodePattern = Annotated[str, Field(max_length=128)]


class Recommendations(question_model()):  # type: ignore[misc]  # its members are the rows of agent/base/question.toml
    """Query of GET /recommendations."""

    form: str = Field("json", alias="format", description="json, env, shell, k8s or an export.", max_length=32)


WhatIf: Any = create_model(  # type: ignore[call-overload]
    "WhatIf", __config__=FORBID_UNKNOWN, **dict.fromkeys(advise.WHAT_IF_FIELDS, (FormField, ""))
)


class GateOptions(BaseModel):
    """Query of GET /preflight, and body of POST /preflight."""

    model_config = FORBID_UNKNOWN

    require: list[CodePattern] = Field(default=[], max_length=256, description="Checks that must be measured.")
    skip: list[CodePattern] = Field(default=[], max_length=256)
    fail_on: FailOn = "fail"


class ClusterPage(BaseModel):
    """Query of GET /cluster."""

    model_config = FORBID_UNKNOWN

    node: str | None = Field(None, max_length=253, description="Name of the node to show.")
    search: str = Field("", max_length=200, description="Show only rows that contain all these words.")
    page: int = Field(1, ge=1, le=100_000)


# Response models, and responses.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gate's answer."""

    verdict: Verdict
    checks: tuple[Finding, ...]


class StoredRun(BaseModel):
    """Answer of POST /runs."""

    created: bool = Field(description="Whether the record is new; false if the same record was stored before.")


def problem_responses(*statuses: int, common: tuple[int, ...] = COMMON) -> Responses:
    """Return the problem documents of an endpoint, including those that all endpoints have."""
    responses: Responses = {
        status: {"description": _PROBLEMS["statuses"][str(status)], "content": {PROBLEM_TYPE: {"schema": _REFERENCE}}}
        for status in sorted({*common, *statuses})
    }
    if 413 in responses:  # Starlette rejects it before any handler runs
        responses[413]["content"] = {"text/plain": _TEXT}
    return responses


def text_responses(*media_types: str) -> Responses:
    """Return the text responses of an endpoint."""
    return {200: {"content": dict.fromkeys(media_types, _TEXT)}}


class ResponseCache:
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
        size = sum(len(cached.body) for cached in self._answers.values()) + len(answer.body)
        if view is not self._view or size > MAX_BYTES or len(self._answers) >= MAX_ANSWERS:
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

    async def ask_worker(self, request: Request, worker: Worker, view: View, name: str, **arguments: Any) -> Response:
        """Return the stored response, or the worker's answer to the question `name`."""
        key = name, *arguments.items()
        answer = self.get(view, key) or self.put(view, key, await worker.ask(request, name, view=view, **arguments))
        return respond(answer)


def respond(answer: Answer) -> Response:
    """Return the response; a large one is sent in pieces, so that slow readers share its bytes."""
    size = len(answer.body)
    headers = {"Cache-Control": "no-store", **answer.headers}
    if size <= PIECE_BYTES:
        return Response(answer.body, answer.status, headers, answer.media_type)
    headers["Content-Length"] = str(size)
    return StreamingResponse(_send_pieces(answer), answer.status, headers, answer.media_type)


async def _send_pieces(answer: Answer) -> AsyncIterator[bytes]:
    for first in range(0, len(answer.body), PIECE_BYTES):
        yield answer.body[first : first + PIECE_BYTES]


def describe_errors(error: ValidationError | RequestValidationError, limit: int | None = None) -> tuple[list[Any], str]:
    """Return the invalid parts of a body or query with reasons, at most `limit`; and the same in one line."""
    texts, raw = _PROBLEMS["messages"], error.errors()[:limit]
    errors = [{"where": ".".join(map(str, e["loc"])) or "body", "message": texts.get(e["type"], e["msg"])} for e in raw]
    return errors, "; ".join(f"{each['where'][:64]}: {each['message']}" for each in errors)


def convert_errors(app: FastAPI) -> None:
    """Convert every error of the application to a problem document, and add their schema, which no route returns."""

    @app.exception_handler(ProblemError)
    async def refused(request: Request, error: ProblemError) -> JSONResponse:
        return make_problem(request, error.status, error.detail, error.headers, **error.members)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return make_problem(request, error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors, detail = describe_errors(error)
        return make_problem(request, 422, detail, errors=errors)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = _PROBLEMS["schema"]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


# The record of a run (POST /runs). A job posts it, not an administrator, and every reader gets it from memory.

# 50 of these are stored in the 64 MiB that deploy/daemonset gives the state folder; 4096 steps take 60 KiB
MAX_RECORD_BYTES = 512 << 10
MAX_VALUES = 16384  # 4096 steps and evaluations; each value uses about 100 bytes of memory

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
    if (values := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > MAX_VALUES:  # counted before parsing
        raise ProblemError(422, f"the record has {values} values; at most {MAX_VALUES} are allowed")
    with raise_as(partial(ProblemError, 400), (plain.PlainError, UnicodeDecodeError), "the body is not a run record: "):
        record = plain.loads(body, unknown_numbers=True)  # a loss may be NaN
    try:
        PostedRecord.model_validate(record)
    except ValidationError as error:
        errors, detail = describe_errors(error, 16)
        raise ProblemError(422, detail, errors=errors) from None
    with raise_as(partial(ProblemError, 422), plain.MisfitError, "the body is not a run record: "):
        stored = record_of(record)
    if len(dumps(stored)) > MAX_RECORD_BYTES:  # as stored, which may be larger than received
        raise ProblemError(422, f"the stored record would have more than {MAX_RECORD_BYTES} bytes")
    return stored


# The application and its endpoints.

_FORM: Responses = problem_responses(500)
_FORM[400]["content"]["text/html"] = _TEXT  # the form again, with the error


def create(
    state: State, *, tokens: TokenChecker | None = None, publisher: Publisher | None = None,
    worker: Worker | None = None,
) -> FastAPI:  # fmt: skip
    """Create the application for one state; it starts and stops scanning and publishing.

    Without `tokens`, endpoints that need a token are closed; without `publisher`, the pages of the cluster show only
    this node. `worker` answers expensive questions (by default a new one).
    """
    tokens, worker = tokens or TokenChecker(), worker or Worker()
    source = "kubernetes" if publisher is not None else "hosts"

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        state.start()
        if publisher is not None:
            publisher.start()
        yield
        await run_in_threadpool(worker.stop)
        if publisher is not None:
            await run_in_threadpool(publisher.stop)
        await run_in_threadpool(state.stop)

    app = FastAPI(
        title="Topoflight", version=base.version(), lifespan=lifespan, max_body_size=MAX_BODY_BYTES,
        generate_unique_id_function=lambda route: route.name,  # operation id: the name of the handler
        docs_url=None, redoc_url=None,  # both load scripts from other hosts
        description="Topology-aware preflight for GPU training: devices, findings and recommendations for this node.",
    )  # fmt: skip
    convert_errors(app)
    app.add_middleware(GZipMiddleware, minimum_size=WORTH_BYTES, compresslevel=GZIP_LEVEL)
    app.add_middleware(TokenMiddleware, tokens=tokens)
    rendered = ResponseCache()
    _add_health(app, state, rendered, {} if publisher is None else publisher.tally)
    _add_pages(app, state, source, worker, rendered)
    _add_facts(app, state, rendered)
    _add_run_upload(app, state)
    _add_answers(app, state, source, worker, rendered)
    _add_gate(app, state, rendered)
    return app


def _add_health(app: FastAPI, state: State, rendered: ResponseCache, tally: Mapping[tuple[str, ...], float]) -> None:
    @app.get("/healthz", tags=["health"], response_class=PlainTextResponse,
             responses=problem_responses(common=(400,)))  # fmt: skip
    async def healthz() -> str:
        """Whether the process answers. Queries no driver."""
        return "ok\n"

    @app.get("/readyz", tags=["health"], response_class=PlainTextResponse,
             responses=problem_responses(common=(400, 422, 503)))  # fmt: skip
    async def readyz(
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds, for the first scan.")] = 0.0,
    ) -> str:
        """Whether the first scan is done and the last one is recent."""
        until = time.monotonic() + wait
        while state.view is None and state.error is None and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)  # so that a new agent does not fail its probe
        view = state.current()
        age = time.monotonic() - view.made_at_monotonic
        oldest = max(60.0, STALE_SCANS * state.interval_seconds)
        if age > oldest:
            raise ProblemError(503, f"the last scan is {age:.0f} s old, more than {oldest:.0f} s")
        return "ok\n"

    @app.get("/metrics", tags=["health"], operation_id="metrics", response_class=PlainTextResponse,
             responses={**problem_responses(), **text_responses("application/openmetrics-text")})  # fmt: skip
    async def prometheus(request: Request) -> Response:
        """Metrics for Prometheus, or OpenMetrics if the scraper accepts it."""
        view, accept = state.current(), request.headers.get("accept", "")

        def expose() -> Answer:
            body, content_type = metrics.expose(view, accept, tally)
            return Answer(body=body, media_type=content_type, headers={"Vary": "Accept"})

        return await rendered.render(view, ("/metrics", choose_encoder(accept)[1]), expose)


def _add_pages(app: FastAPI, state: State, source: str, worker: Worker, rendered: ResponseCache) -> None:
    """Add endpoints for people: the page, the what-if form and the list of endpoints.

    Every page works without scripts and loads nothing from other hosts (Content Security Policy level 3). The code that
    renders pages is imported with the first page, so that a node that is only scraped does not use memory for it.
    """

    @app.get("/", tags=["page"], response_class=HTMLResponse, responses=problem_responses())
    async def page() -> Response:
        """The page of this node: verdict, findings with remedies, topology, measurements, recommendation, runs."""
        view, trouble = state.current(), state.error

        def drawn() -> Answer:
            from agent.http import pages

            others = source == "kubernetes"
            return make_page(pages.render_node_page(view, *_get_recommendation(view), trouble=trouble, others=others))

        return await rendered.render(view, ("/", trouble), drawn)

    @app.get("/cluster", tags=["page"], response_class=HTMLResponse, responses=problem_responses(404, 500))
    async def cluster_page(request: Request, query: Annotated[ClusterPage, Query()]) -> Response:
        """The page of the cluster: all nodes that publish, their faults, and nodes that differ from the others."""
        arguments = {"source": source, "interval": state.interval_seconds, **query.model_dump()}
        return respond(await worker.ask(request, "cluster_page", view=state.current(), **arguments))

    @app.get("/what-if", tags=["page"], response_class=HTMLResponse, responses=_FORM)
    async def what_if(request: Request, query: Annotated[WhatIf, Query()]) -> Response:
        """Layouts for a model on this machine or one of the catalogue, side by side."""
        fields = tuple(query.model_dump().items())
        return await rendered.ask_worker(request, worker, state.current(), "what_if", fields=fields)


def _get_recommendation(view: View) -> tuple[Recommendation | None, str]:
    """Return the recommended environment, or why there is none."""
    try:
        return advise.advise_view(view, AdviceRequest()), ""
    except RequestError as error:
        return None, str(error)


def _add_facts(app: FastAPI, state: State, rendered: ResponseCache) -> None:
    """Add the endpoints that return one part of the newest view."""

    def add(name: str, about: str, make: Callable[[View], Any], model: Any = None, *statuses: int) -> None:
        async def fact() -> Response:
            view = state.current()
            return await rendered.render(view, name, lambda: make_document(make(view)))

        app.add_api_route(f"/{name}", fact, name=name, description=about, tags=["facts"], response_model=model,
                          responses=problem_responses(*statuses))  # fmt: skip

    def last_benchmark(view: View) -> BenchResult:
        if view.bench is None:
            raise ProblemError(404, "no benchmark has been run on this host; `topoflight bench` runs one")
        return view.bench

    add("snapshot", "What every probe read.", lambda view: view.snapshots[0])
    add("topology", "Links, islands, nearest NICs, expectations.", lambda view: json_document(view.topologies[0]))
    add("findings", "Every check that did not pass, worst first.",
        lambda view: [check for check in sort_worst_first(view.checks) if check.status != "pass"],
        list[Finding])  # fmt: skip
    add("measurements", "The last benchmark; 404 where none has been run.", last_benchmark, BenchResult, 404)
    add("runs", "Records of fine-tune jobs, newest first: forecast against measurement.",
        lambda view: list(view.runs), list[dict[str, Any]])  # fmt: skip


def _add_run_upload(app: FastAPI, state: State) -> None:
    posted = {"required": True, "content": {"application/json": {"schema": PostedRecord.model_json_schema()}}}

    @app.post("/runs", tags=["facts"], status_code=201, max_body_size=MAX_RECORD_BYTES,
              openapi_extra={"requestBody": posted}, dependencies=TOKEN, response_model=StoredRun,
              responses={200: {"model": StoredRun, "description": "Stored before."},
                         **problem_responses(409, 413, 507)})  # fmt: skip
    async def post_run(request: Request) -> JSONResponse:
        """Store the record of a fine-tune job that ran on this node. Needs a token. GET /runs shows it."""
        with raise_as(partial(ProblemError, 400), ClientDisconnect, "incomplete request body"):
            body = await request.body()
        is_new = await run_in_threadpool(lambda: state.store_run(read_record(body), request.state.user))
        log.info("POST /runs by %s: %s", request.state.user, "stored" if is_new else "was stored before")
        headers = {"Location": "/runs", "Cache-Control": "no-store"}
        return JSONResponse({"created": is_new}, 201 if is_new else 200, headers)


def _add_answers(app: FastAPI, state: State, source: str, worker: Worker, rendered: ResponseCache) -> None:
    """Add the documents that the worker process computes."""

    @app.get("/nodes", tags=["facts"], responses=problem_responses())
    async def nodes(request: Request) -> Response:
        """One row per node: GPUs, links, HCAs, RDMA, memlock, verdict, age."""
        arguments = {"source": source, "interval": state.interval_seconds}
        return respond(await worker.ask(request, "nodes", view=state.current(), **arguments))

    @app.get("/recommendations", tags=["advice"], response_model=Recommendation,
             responses={**problem_responses(500), **text_responses("text/plain")})  # fmt: skip
    async def recommendations(request: Request, query: Annotated[Recommendations, Query()]) -> Response:
        """NCCL environment and layout with reasons; `format` also takes env, shell, k8s and the exports."""
        view, allowed = state.current(), ["json", *advise.EXPORTS]
        if query.form not in allowed:
            raise ProblemError(400, f"format={query.form}: must be one of {', '.join(allowed)}", allowed=allowed)
        if query.method == "full" and "lora_rank" in query.model_fields_set:
            raise ProblemError(400, "lora_rank and method=full cannot be combined")
        if query.model is None and (unused := query.model_fields_set & NEED_MODEL):
            raise ProblemError(400, f"{' and '.join(sorted(unused))}: without model there is no layout to forecast")
        options = tuple((name, getattr(query, name)) for name in FIELDS)
        return await rendered.ask_worker(request, worker, view, "recommendations", options=options, form=query.form)


def _add_gate(app: FastAPI, state: State, rendered: ResponseCache) -> None:
    def judged(checks: Iterable[Finding], options: GateOptions) -> Gate:
        """Return the gate's result for these checks. Raises ProblemError 400 for a check that does not exist."""
        with raise_as(partial(ProblemError, 400), GateError):
            selected = select(checks, require=options.require, skip=options.skip, codes=ALL_CODES)
        return Gate(verdict=judge(selected, fail_on=options.fail_on), checks=sort_worst_first(selected))

    @app.get("/preflight", tags=["gate"], response_model=Gate, responses=problem_responses())
    async def preflight(options: Annotated[GateOptions, Query()]) -> Response:
        """The result of the gate for the last scan: verdict, exit code, checks. Generates no load."""
        view = state.current()
        key = "/preflight", options.model_dump_json()
        return await rendered.render(view, key, lambda: make_document(judged(view.checks, options)))

    @app.post("/preflight", tags=["gate"], response_model=Gate, dependencies=TOKEN,
              responses=problem_responses(413))  # fmt: skip
    def preflight_now(request: Request, query: Annotated[GateOptions, Query()],
                      requested: Annotated[GateOptions | None, Body()] = None) -> Response:  # fmt: skip
        """Scan now, and return the result of the gate with the options of the query and the body. Needs a token."""
        log.info("POST %s by %s", request.url.path, request.state.user)
        options = (requested or GateOptions()).model_copy(update=query.model_dump(exclude_unset=True))
        judged((), options)  # reject invalid options before the scan
        return respond(make_document(judged(state.refresh().checks, options)))
