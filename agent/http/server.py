"""The HTTP agent. `docs/reference/http-api.md` lists the endpoints and who may use them."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi._compat import field_annotation_is_sequence
from fastapi.dependencies.utils import get_flat_params
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from prometheus_client.exposition import choose_encoder
from pydantic import Field, create_model
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Route

from agent import base, metrics
from agent.advice import advise
from agent.advice.request import Request as Question
from agent.base.options import RequestError
from agent.checks.groups import worst_first
from agent.checks.verdict import FailOn, View
from agent.cluster.publish import Publisher
from agent.http import answers, posted
from agent.http.access import Guard, ReadHosts, Tokens
from agent.http.answers import Gate, Rendered, Responses, problems, respond, texts
from agent.http.state import State, age_seconds
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

FormField = Annotated[str, Query(max_length=4096)]  # a form field; empty means omitted


class Recommendations(question.model()):  # type: ignore[misc]  # its members are the rows of contracts/question.toml
    """Query of GET /recommendations."""

    form: str = Field("json", alias="format", description="json, or an export.", max_length=32)


WhatIf: Any = create_model("WhatIf", **dict.fromkeys(advise.FORM, (FormField, "")))  # type: ignore[call-overload]

_FORM: Responses = problems(500)
_FORM[400]["content"]["text/html"] = {"schema": {"type": "string"}}  # the form again, with the error


def create(
    state: State, *, tokens: Tokens | None = None, publisher: Publisher | None = None, worker: Worker | None = None,
    hosts: Sequence[str] | None = None,
) -> FastAPI:  # fmt: skip
    """Create the application for one state; it starts and stops scanning and publishing.

    Without `tokens`, endpoints that need a token are closed; without `publisher`, the pages of the cluster show only
    this node. `worker` answers expensive questions (by default a new one). `hosts` are the names under which this agent
    is read.
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
        title="Topoflight", version=base.version(), lifespan=lifespan,
        max_body_size=MOST_BODY_BYTES, dependencies=[Depends(_refuse_unknown_parameters)],
        generate_unique_id_function=lambda route: route.name,  # operation id: the name of the handler
        docs_url=None, redoc_url=None,  # both load scripts from other hosts
        description="Topology-aware preflight for GPU training: devices, findings and recommendations for this node.",
    )  # fmt: skip
    answers.install(app)
    app.add_middleware(GZipMiddleware, minimum_size=WORTH_BYTES, compresslevel=GZIP_LEVEL)
    posts: set[str] = set()
    app.add_middleware(Guard, tokens=tokens, posts=posts)
    if hosts is not None:
        app.add_middleware(ReadHosts, allowed_hosts=hosts, www_redirect=False)
    rendered = Rendered()
    _health(app, state, rendered, {} if publisher is None else publisher.tally)
    _pages(app, state, source, worker, rendered)
    _facts(app, state, source, worker, rendered)
    _advice(app, state, worker, rendered)
    _gate(app, state, rendered)
    posted.install(app, state)
    posts.update(route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ()))
    return app


def _refuse_unknown_parameters(request: Request) -> None:
    """Reject a query parameter that the route does not declare, or one value of several; for every route."""
    known = {field.alias: field for field in get_flat_params(request.scope["route"].dependant)}
    for name in request.query_params:
        if name in known:
            if len(request.query_params.getlist(name)) > 1 and not field_annotation_is_sequence(
                known[name].field_info.annotation
            ):
                raise ProblemError(400, f"{name} is given more than once")
            continue
        close = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        allowed = f"must be one of {', '.join(known)}" if known else "this path takes none"
        raise ProblemError(400, f"unknown parameter {name[:64]!r}: {allowed}{hint}", allowed=list(known))


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
            from agent import pages

            others = source == "kubernetes"
            return page_of(pages.node_page(view, *_recommended(view), trouble=trouble, others=others))

        return await rendered.render(view, ("/", trouble), drawn)

    @app.get("/cluster", tags=["page"], response_class=HTMLResponse, responses=problems(404, 500))
    async def cluster_page(
        request: Request,
        node: Annotated[str | None, Query(max_length=253, description="One of the nodes.")] = None,
        search: Annotated[str, Query(max_length=200, description="Words of a row, all of them.")] = "",
        page: Annotated[int, Query(ge=1, le=100_000)] = 1,
    ) -> Response:
        """Every node that publishes: faults, the table, and which nodes are odd."""
        asked = {"source": source, "interval": state.interval_seconds, "node": node, "search": search, "page": page}
        return respond(await worker.ask(request, "cluster_page", view=state.current(), **asked))

    @app.get("/what-if", tags=["page"], response_class=HTMLResponse, responses=_FORM)
    async def what_if(request: Request, asked: Annotated[WhatIf, Query()]) -> Response:
        """Layouts for a model on this machine or one of the catalogue, side by side."""
        return await rendered.ask_worker(
            request, worker, state.current(), "what_if", fields=tuple(asked.model_dump().items())
        )


def _recommended(view: View) -> tuple[Recommendation | None, str]:
    """Return the recommended environment, or why there is none."""
    try:
        return advise.for_view(view, Question()), ""
    except RequestError as error:
        return None, str(error)


def _facts(app: FastAPI, state: State, source: str, worker: Worker, rendered: Rendered) -> None:
    async def of_view(request: Request, make: Callable[[View], Any]) -> Response:
        """Return a response that depends only on the newest view."""
        view = state.current()
        return await rendered.render(view, request.url.path, lambda: document(make(view)))

    @app.get("/snapshot", tags=["facts"], responses=problems())
    async def snapshot(request: Request) -> Response:
        """What every probe read."""
        return await of_view(request, lambda view: view.snapshots[0])

    @app.get("/topology", tags=["facts"], responses=problems())
    async def topology(request: Request) -> Response:
        """Links, islands, nearest NICs, expectations."""
        return await of_view(request, lambda view: json_document(view.topologies[0]))

    @app.get("/findings", tags=["facts"], response_model=list[Finding], responses=problems())
    async def findings(request: Request) -> Response:
        """Every check that did not pass, worst first."""
        return await of_view(request, lambda view: [c for c in worst_first(view.checks) if c.status != "pass"])

    @app.get("/measurements", tags=["facts"], response_model=BenchResult,
             responses=problems(404))  # fmt: skip
    async def measurements(request: Request) -> Response:
        """The last benchmark; 404 where none has been run."""
        if state.current().bench is None:
            raise ProblemError(404, "no benchmark has been run on this host; `topoflight bench` runs one")
        return await of_view(request, lambda view: view.bench)

    @app.get("/runs", tags=["facts"], response_model=list[dict[str, Any]], responses=problems())
    async def runs(request: Request) -> Response:
        """Records of fine-tune jobs, newest first: forecast against measurement."""
        return await of_view(request, lambda view: list(view.runs))

    @app.get("/nodes", tags=["facts"], responses=problems())
    async def nodes(request: Request) -> Response:
        """Every node at a glance: GPUs, links, HCAs, RDMA, memlock, verdict, age."""
        asked = {"source": source, "interval": state.interval_seconds}
        return respond(await worker.ask(request, "nodes", view=state.current(), **asked))


def _advice(app: FastAPI, state: State, worker: Worker, rendered: Rendered) -> None:
    @app.get("/recommendations", tags=["advice"], response_model=Recommendation,
             responses={**problems(500), **texts("text/plain")})  # fmt: skip
    async def recommendations(request: Request, asked: Annotated[Recommendations, Query()]) -> Response:
        """NCCL environment and layout with reasons; `format` also takes env, shell, k8s and the exports."""
        view, allowed = state.current(), ["json", *advise.EXPORTS]
        if asked.form not in allowed:
            raise ProblemError(400, f"format={asked.form}: must be one of {', '.join(allowed)}", allowed=allowed)
        options = tuple((name, getattr(asked, name)) for name in question.fields())
        return await rendered.ask_worker(request, worker, view, "recommendations", options=options, form=asked.form)


def _gate(app: FastAPI, state: State, rendered: Rendered) -> None:
    @app.get("/preflight", tags=["gate"], response_model=Gate, responses=problems())
    async def preflight(
        require: Annotated[list[str] | None, Query(description="Checks that must be measured.")] = None,
        skip: Annotated[list[str] | None, Query()] = None,
        fail_on: Annotated[str, Query(pattern="^(fail|warn|unknown)$")] = "fail",
    ) -> Response:
        """The gate over the last scan: verdict, exit code, checks. Makes no load."""
        view = state.current()
        checked: FailOn = fail_on  # type: ignore[assignment]
        required, skipped = tuple(require or ()), tuple(skip or ())
        key = "/preflight", required, skipped, fail_on
        return await rendered.render(view, key, lambda: document(posted.gate(view.checks, required, skipped, checked)))
