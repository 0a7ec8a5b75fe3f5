"""The HTTP agent. `docs/reference/http-api.md` lists the endpoints and who may use them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Annotated, Any

from fastapi import Body, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect

from agent import base, metrics
from agent.advice import advise
from agent.advice.request import Request as Question
from agent.base.options import RequestError
from agent.checks.findings import worst_first
from agent.checks.measured import ALL_CODES
from agent.checks.verdict import FailOn, GateError, View, judge, select
from agent.http import answers
from agent.http.access import Guard, Tokens
from agent.http.answers import (
    MOST_RECORD_BYTES,
    TOKEN,
    Gate,
    PostedRecord,
    Rendered,
    Responses,
    StoreAnswer,
    body_of,
    problems,
    read_record,
    respond,
    texts,
)
from agent.http.state import Publisher, State, age_seconds
from agent.http.worker import Answer, ProblemError, Worker, document, page_of
from collectives.bench.results import BenchResult
from contracts import question
from contracts.finding import Finding
from planner.advice import Recommendation
from topology.render import json_document

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 65536
MOST_WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.1
WORTH_BYTES = 1024  # gzip on a smaller response saves less than one packet
GZIP_LEVEL = 4
STALE_SCANS = 4  # not ready after this many missed scans in a row

# Query parameters. An unknown one is rejected: a parameter with a typing error must not look like an answer.
FORBID_UNKNOWN = ConfigDict(extra="forbid")
FormField = Annotated[str, Query(max_length=4096)]  # a form field; empty means omitted
CodePattern = Annotated[str, Field(max_length=128)]


class Recommendations(question.model()):  # type: ignore[misc]  # its members are the rows of contracts/question.toml
    """Query of GET /recommendations."""

    form: str = Field("json", alias="format", description="json, or an export.", max_length=32)


WhatIf: Any = create_model(  # type: ignore[call-overload]
    "WhatIf", __config__=FORBID_UNKNOWN, **dict.fromkeys(advise.FORM, (FormField, ""))
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

    node: str | None = Field(None, max_length=253, description="One of the nodes.")
    search: str = Field("", max_length=200, description="Words of a row, all of them.")
    page: int = Field(1, ge=1, le=100_000)


_FORM: Responses = problems(500)
_FORM[400]["content"]["text/html"] = {"schema": {"type": "string"}}  # the form again, with the error


def create(
    state: State, *, tokens: Tokens | None = None, publisher: Publisher | None = None, worker: Worker | None = None
) -> FastAPI:
    """Create the application for one state; it starts and stops scanning and publishing.

    Without `tokens`, endpoints that need a token are closed; without `publisher`, the pages of the cluster show only
    this node. `worker` answers expensive questions (by default a new one).
    """
    tokens, worker = tokens or Tokens(), worker or Worker()
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
        title="Topoflight", version=base.version(), lifespan=lifespan, max_body_size=MOST_BODY_BYTES,
        generate_unique_id_function=lambda route: route.name,  # operation id: the name of the handler
        docs_url=None, redoc_url=None,  # both load scripts from other hosts
        description="Topology-aware preflight for GPU training: devices, findings and recommendations for this node.",
    )  # fmt: skip
    answers.install(app)
    app.add_middleware(GZipMiddleware, minimum_size=WORTH_BYTES, compresslevel=GZIP_LEVEL)
    app.add_middleware(Guard, tokens=tokens)
    rendered = Rendered()
    _health(app, state, rendered, {} if publisher is None else publisher.tally)
    _pages(app, state, source, worker, rendered)
    _facts(app, state, rendered)
    _runs(app, state)
    _answers(app, state, source, worker, rendered)
    _gate(app, state, rendered)
    return app


def _health(app: FastAPI, state: State, rendered: Rendered, tally: Mapping[tuple[str, ...], float]) -> None:
    @app.get("/healthz", tags=["health"], response_class=PlainTextResponse,
             responses=problems(common=(400,)))  # fmt: skip
    async def healthz() -> str:
        """The process answers; touches no driver."""
        return "ok\n"

    @app.get("/readyz", tags=["health"], response_class=PlainTextResponse,
             responses=problems(common=(400, 422, 503)))  # fmt: skip
    async def readyz(
        wait: Annotated[float, Query(ge=0, le=MOST_WAIT_SECONDS, description="Seconds, for the first scan.")] = 0.0,
    ) -> str:
        """The first scan is done and the last one is recent."""
        until = time.monotonic() + wait
        while state.view is None and state.error is None and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)  # so that a new agent does not fail its probe
        view = state.current()
        oldest = max(60.0, STALE_SCANS * state.interval_seconds)
        if age_seconds(view) > oldest:
            raise ProblemError(503, f"the last scan is {age_seconds(view):.0f} s old, more than {oldest:.0f} s")
        return "ok\n"

    @app.get("/metrics", tags=["health"], operation_id="metrics", response_class=PlainTextResponse,
             responses={**problems(), **texts("application/openmetrics-text")})  # fmt: skip
    async def prometheus(request: Request) -> Response:
        """Prometheus exposition; OpenMetrics where the scraper asks for it."""
        view, accept = state.current(), request.headers.get("accept", "")

        def expose() -> Answer:
            body, content_type = metrics.exposition(view, accept, metrics.tally_samples(tally))
            return Answer(body=body, media_type=content_type, headers={"Vary": "Accept"})

        return await rendered.render(view, ("/metrics", choose_encoder(accept)[1]), expose)


def _pages(app: FastAPI, state: State, source: str, worker: Worker, rendered: Rendered) -> None:
    """Add endpoints for people: the page, the what-if form and the list of endpoints.

    Every page works without scripts and loads nothing from other hosts (Content Security Policy level 3). The code that
    renders pages is imported with the first page, so that a node that is only scraped does not use memory for it.
    """

    @app.get("/", tags=["page"], response_class=HTMLResponse, responses=problems())
    async def page() -> Response:
        """The page: verdict, findings with remedies, topology, measurements, recommendation, runs."""
        view, trouble = state.current(), state.error

        def drawn() -> Answer:
            from agent.http import pages

            others = source == "kubernetes"
            return page_of(pages.node_page(view, *_recommended(view), trouble=trouble, others=others))

        return await rendered.render(view, ("/", trouble), drawn)

    @app.get("/cluster", tags=["page"], response_class=HTMLResponse, responses=problems(404, 500))
    async def cluster_page(request: Request, query: Annotated[ClusterPage, Query()]) -> Response:
        """Every node that publishes: faults, the table, and which nodes are odd."""
        given = {"source": source, "interval": state.interval_seconds, **query.model_dump()}
        return respond(await worker.ask(request, "cluster_page", view=state.current(), **given))

    @app.get("/what-if", tags=["page"], response_class=HTMLResponse, responses=_FORM)
    async def what_if(request: Request, query: Annotated[WhatIf, Query()]) -> Response:
        """Layouts for a model on this machine or one of the catalogue, side by side."""
        return await rendered.ask_worker(
            request, worker, state.current(), "what_if", fields=tuple(query.model_dump().items())
        )


def _recommended(view: View) -> tuple[Recommendation | None, str]:
    """Return the recommended environment, or why there is none."""
    try:
        return advise.for_view(view, Question()), ""
    except RequestError as error:
        return None, str(error)


def _facts(app: FastAPI, state: State, rendered: Rendered) -> None:
    """Add the endpoints that return one part of the newest view."""

    def add(name: str, about: str, make: Callable[[View], Any], model: Any = None, *more: int) -> None:
        async def fact() -> Response:
            view = state.current()
            return await rendered.render(view, name, lambda: document(make(view)))

        app.add_api_route(f"/{name}", fact, name=name, description=about, tags=["facts"], response_model=model,
                          responses=problems(*more))  # fmt: skip

    def last_benchmark(view: View) -> BenchResult:
        if view.bench is None:
            raise ProblemError(404, "no benchmark has been run on this host; `topoflight bench` runs one")
        return view.bench

    def not_passed(view: View) -> list[Finding]:
        return [check for check in worst_first(view.checks) if check.status != "pass"]

    add("snapshot", "What every probe read.", lambda view: view.snapshots[0])
    add("topology", "Links, islands, nearest NICs, expectations.", lambda view: json_document(view.topologies[0]))
    add("findings", "Every check that did not pass, worst first.", not_passed, list[Finding])
    add("measurements", "The last benchmark; 404 where none has been run.", last_benchmark, BenchResult, 404)
    add("runs", "Records of fine-tune jobs, newest first: forecast against measurement.",
        lambda view: list(view.runs), list[dict[str, Any]])  # fmt: skip


def _runs(app: FastAPI, state: State) -> None:
    @app.post("/runs", tags=["facts"], status_code=201, max_body_size=MOST_RECORD_BYTES,
              openapi_extra=body_of(PostedRecord), dependencies=TOKEN, response_model=StoreAnswer,
              responses={200: {"model": StoreAnswer, "description": "Stored before."}, **problems(409, 413, 507)},
    )  # fmt: skip
    async def post_run(request: Request) -> JSONResponse:
        """Store the record of a fine-tune job that ran on this node. Needs a token. GET /runs shows it."""
        who = request.state.user
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ProblemError(400, "incomplete request body") from None
        kept = "now" if await run_in_threadpool(lambda: state.store_run(read_record(body), who)) else "before"
        log.info("POST /runs by %s: kept %s", who, kept)
        headers = {"Location": "/runs", "Cache-Control": "no-store"}
        return JSONResponse({"kept": kept}, status_code=201 if kept == "now" else 200, headers=headers)


def _answers(app: FastAPI, state: State, source: str, worker: Worker, rendered: Rendered) -> None:
    """Add the documents that the worker process computes."""

    @app.get("/nodes", tags=["facts"], responses=problems())
    async def nodes(request: Request) -> Response:
        """Every node at a glance: GPUs, links, HCAs, RDMA, memlock, verdict, age."""
        given = {"source": source, "interval": state.interval_seconds}
        return respond(await worker.ask(request, "nodes", view=state.current(), **given))

    @app.get("/recommendations", tags=["advice"], response_model=Recommendation,
             responses={**problems(500), **texts("text/plain")})  # fmt: skip
    async def recommendations(request: Request, query: Annotated[Recommendations, Query()]) -> Response:
        """NCCL environment and layout with reasons; `format` also takes env, shell, k8s and the exports."""
        view, allowed = state.current(), ["json", *advise.EXPORTS]
        if query.form not in allowed:
            raise ProblemError(400, f"format={query.form}: must be one of {', '.join(allowed)}", allowed=allowed)
        options = tuple((name, getattr(query, name)) for name in question.fields())
        return await rendered.ask_worker(request, worker, view, "recommendations", options=options, form=query.form)


def _gate(app: FastAPI, state: State, rendered: Rendered) -> None:
    def judged(checks: Iterable[Finding], options: GateOptions) -> Gate:
        """Return the gate's result for these checks. Raises ProblemError 400 for a check that does not exist."""
        try:
            found = select(checks, require=options.require, skip=options.skip, known=ALL_CODES)
        except GateError as error:
            raise ProblemError(400, str(error)) from None
        return Gate(verdict=judge(found, fail_on=options.fail_on), checks=worst_first(found))

    @app.get("/preflight", tags=["gate"], response_model=Gate, responses=problems())
    async def preflight(options: Annotated[GateOptions, Query()]) -> Response:
        """The gate over the last scan: verdict, exit code, checks. Makes no load."""
        view = state.current()
        key = "/preflight", options.model_dump_json()
        return await rendered.render(view, key, lambda: document(judged(view.checks, options)))

    @app.post("/preflight", tags=["gate"], response_model=Gate, dependencies=TOKEN,
              responses=problems(413))  # fmt: skip
    def preflight_now(request: Request, requested: Annotated[GateOptions | None, Body()] = None) -> Response:
        """The gate over a scan made now. Needs a token."""
        log.info("POST %s by %s", request.url.path, request.state.user)
        options = requested or GateOptions()
        judged((), options)  # reject invalid options before the scan
        return respond(document(judged(state.refresh().checks, options)))
