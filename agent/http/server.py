"""The HTTP agent: what is known, in the formats people use. `docs/http.md` lists the endpoints and who may use them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from agent import advise
from agent.cluster.publish import Publisher
from agent.gate.codes import ALL_CODES
from agent.gate.report import render
from agent.gate.verdict import FailOn, GateError, judge, select, worst_first
from agent.http import cluster as server_cluster
from agent.http import load as server_load
from agent.http import openapi as answers
from agent.http import pages as page_routes
from agent.http import problem
from agent.http import runs as server_flights
from agent.http.access import Guard, Tokens
from agent.http.cluster import Cluster, advise_cluster, topology_document
from agent.http.desk import Desk
from agent.http.problem import ProblemError
from agent.http.response_cache import Kept, repeatable, takes_gzip
from agent.http.state import State, age_seconds
from agent.metrics import counters as tallies
from agent.metrics import families as metrics
from agent.version import VERSION
from agent.view import View
from topology.render import json_document

MOST_WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.1
STALE_SCANS = 4  # not ready once this many scans in a row have been missed

Format = Annotated[str | None, Query(alias="format", description="Overrides the Accept header.", max_length=32)]
Scope = Annotated[str, Query(pattern="^(node|cluster)$", description="This node, or every node that publishes.")]


def create(
    state: State, *, tokens: Tokens | None = None, cluster: Cluster | None = None, publisher: Publisher | None = None,
    desk: Desk | None = None,
) -> FastAPI:  # fmt: skip
    """The application around one state; scanning and publishing start and end with it.

    Without `tokens` whatever needs a token is closed; without `cluster` the cluster is what this agent scans. Costly
    questions are asked at `desk`, by default one of their own.
    """
    tokens, cluster, desk = tokens or Tokens(), cluster or Cluster(state), desk or Desk()

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        state.start()
        if publisher is not None:
            publisher.start()
        yield
        await run_in_threadpool(bencher.stop)
        cluster.stop()
        if publisher is not None:
            await run_in_threadpool(publisher.stop)
        await run_in_threadpool(state.stop)

    app = FastAPI(
        title="Topoflight", version=VERSION, lifespan=lifespan,
        max_body_size=server_load.MOST_BODY_BYTES, dependencies=[Depends(problem.refuse_unknown_parameters)],
        docs_url=None, redoc_url=None,  # both load scripts from elsewhere; page_routes has a page of our own
        description="Topology-aware preflight for GPU training: what this node is, and what to run on it.",
    )  # fmt: skip
    problem.install(app)
    answers.install(app)
    app.add_middleware(Kept, current=lambda: state.view)
    posts: set[str] = set()
    app.add_middleware(Guard, tokens=tokens, posts=posts)
    _health(app, state, lambda: tallies.samples(publisher.tally if publisher else None, cluster.tally))
    page_routes.install(app, state, _current, cluster, desk)
    _facts(app, state, cluster, desk)
    _advice(app, state, cluster, desk)
    server_cluster.install(app, cluster)
    server_flights.install(app, state)
    bencher = server_load.install(app, state, tokens)
    posts.update(route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ()))
    return app


def _current(state: State) -> View:
    view = state.view
    if view is None:
        detail = state.error or "the first scan is not done yet"
        raise ProblemError(503, detail, headers={"Retry-After": "2"})
    return view


def _answer(request: Request, value: Any, form: str | None) -> Response:
    """`value` as JSON or YAML, by `?format=` or the Accept header."""
    wanted = form or ("yaml" if "yaml" in request.headers.get("accept", "") else "json")
    if wanted not in ("json", "yaml"):
        raise ProblemError(400, f"format={wanted}: must be json or yaml here", allowed=["json", "yaml"])
    return Response(render(value, wanted), media_type=f"application/{wanted}", headers={"Cache-Control": "no-store"})


def _health(app: FastAPI, state: State, more: Callable[[], metrics.More]) -> None:
    @app.get("/healthz", tags=["health"], operation_id="healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """The process answers; touches no driver."""
        return "ok\n"

    @app.get("/readyz", tags=["health"], operation_id="readyz", response_class=PlainTextResponse)
    async def readyz(
        wait: Annotated[float, Query(ge=0, le=MOST_WAIT_SECONDS, description="Seconds, for the first scan.")] = 0.0,
    ) -> str:
        """The first scan is done and the last one is recent."""
        until = time.monotonic() + wait
        while state.view is None and state.error is None and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)  # a start that is only young is not told as a failed probe
        view = _current(state)
        oldest = max(60.0, STALE_SCANS * state.interval_seconds)
        if age_seconds(view) > oldest:
            raise ProblemError(503, f"the last scan is {age_seconds(view):.0f} s old, more than {oldest:.0f} s")
        return "ok\n"

    rendered = metrics.Rendered(more)
    state.before.append(rendered.prepare)

    @app.get("/metrics", tags=["health"], operation_id="metrics", response_class=PlainTextResponse)
    async def prometheus(request: Request) -> Response:
        """Prometheus exposition; OpenMetrics where the scraper asks for it."""
        view, zipped = _current(state), takes_gzip(request.headers.get("accept-encoding", "").encode("latin-1"))
        body, content_type = rendered(view, request.headers.get("accept", ""), zipped=zipped)
        repeatable(request, view)
        encoding = {"Content-Encoding": "gzip"} if zipped else {}
        return Response(body, headers={"Content-Type": content_type, **encoding})


def _facts(app: FastAPI, state: State, cluster: Cluster, desk: Desk) -> None:
    @app.get("/snapshot", tags=["facts"], operation_id="snapshot")
    def snapshot(request: Request, form: Format = None) -> Response:
        """What every probe read, per host."""
        view = _current(state)
        repeatable(request, view)
        return _answer(request, _one_or_all(view.snapshots), form)

    @app.get("/topology", tags=["facts"], operation_id="topology")
    async def topology(request: Request, form: Format = None, scope: Scope = "node") -> Response:
        """Links, islands, nearest NICs, expectations, per host; with scope=cluster each kind of node once."""
        if scope == "cluster":
            fleet = await run_in_threadpool(cluster.fleet)
            return await desk.ask(request, lambda: _answer(request, topology_document(fleet), form))
        view = _current(state)
        repeatable(request, view)
        return await run_in_threadpool(
            lambda: _answer(request, _one_or_all([json_document(n) for n in view.topologies]), form)
        )

    @app.get("/findings", tags=["facts"], operation_id="findings")
    def findings(request: Request, form: Format = None) -> Response:
        """Every check that did not pass, worst first."""
        view = _current(state)
        repeatable(request, view)
        return _answer(request, [c for c in worst_first(view.checks) if c.status != "pass"], form)

    @app.get("/measurements", tags=["facts"], operation_id="measurements")
    def measurements(request: Request, form: Format = None) -> Response:
        """The last benchmark; 404 where none has been run."""
        view = _current(state)
        if view.bench is None:
            raise ProblemError(404, "no benchmark has been run on this host; `topoflight bench` runs one")
        return _answer(request, view.bench, form)

    @app.get("/flights", tags=["facts"], operation_id="flights")
    def flights(request: Request, form: Format = None) -> Response:
        """Records of fine-tune jobs, newest first: forecast against measurement."""
        return _answer(request, list(_current(state).flights), form)


def _advice(app: FastAPI, state: State, cluster: Cluster, desk: Desk) -> None:
    @app.get("/recommendations", tags=["advice"], operation_id="recommendations")
    async def recommendations(
        request: Request,
        form: Format = None,
        model: Annotated[str | None, Query(max_length=200, description="Known model name.")] = None,
        method: Annotated[str, Query(pattern="^(full|lora|qlora)$")] = "lora",
        sequence_length: Annotated[int, Query(ge=1, le=10_000_000)] = 2048,
        global_batch: Annotated[int | None, Query(ge=1, le=10_000_000)] = None,
        engine: Annotated[str, Query(max_length=32)] = "topoflight",
        precision: Annotated[str, Query(pattern="^(fp32|bf16|fp16|fp8)$")] = "bf16",
        optimizer: Annotated[str, Query(max_length=32, pattern="^[a-z0-9_]+$")] = "adamw",
        packing: bool = False,
        lengths: Annotated[str | None, Query(max_length=10_000, description="TOKENS:ROWS,...")] = None,
        lora_rank: Annotated[int, Query(ge=1, le=4096)] = 16,
        steps: Annotated[int | None, Query(ge=1, le=10**9)] = None,
        tokens: Annotated[int | None, Query(ge=1, le=10**18)] = None,
        hours: Annotated[float | None, Query(gt=0, le=1e6)] = None,
        machine: Annotated[str | None, Query(max_length=64, description="Catalogue machine: what if.")] = None,
        nodes: Annotated[int | None, Query(ge=1, le=100_000)] = None,
        ranks_per_node: Annotated[int | None, Query(ge=1, le=1024, description="Default: one per GPU.")] = None,
        nccl: Annotated[str | None, Query(max_length=32, description="NCCL version in use.")] = None,
        scope: Scope = "node",
    ) -> Response:
        """NCCL environment and layout with reasons; `format` also takes env, shell, k8s and the exports."""
        wanted = advise.Request(
            model=model, method=method, sequence_length=sequence_length, global_batch=global_batch, engine=engine,
            precision=precision, optimizer=optimizer, packing=packing, lengths=lengths, lora_rank=lora_rank,
            steps=steps, tokens=tokens, hours=hours, machine=machine, nodes=nodes, nccl_version=nccl,
            ranks_per_node=ranks_per_node, allow_files=False,
        )  # fmt: skip
        view = _current(state)
        if form is not None and form not in advise.FORMATS:
            raise ProblemError(
                400, f"format={form}: must be one of {', '.join(advise.FORMATS)}", allowed=list(advise.FORMATS)
            )
        whole = scope == "cluster" and machine is None
        fleet = await run_in_threadpool(cluster.fleet) if whole else None

        def answer() -> Response:
            if fleet is not None:
                advice, hosts = advise_cluster(fleet, wanted)
            else:
                advice = advise.for_view(view, wanted)
                hosts = nodes or (1 if machine else len(view.snapshots))
            if form in advise.EXPORTS:
                text = advise.export(advice, form, nodes=hosts)
                return PlainTextResponse(text, headers={"Cache-Control": "no-store"})
            return _answer(request, advice, form)

        try:
            response = await desk.ask(request, answer)
        except advise.RequestError as error:
            raise ProblemError(400, str(error)) from None
        if not whole:
            repeatable(request, view)
        return response

    @app.get("/preflight", tags=["gate"], operation_id="preflight")
    def preflight(
        request: Request,
        form: Format = None,
        require: Annotated[list[str] | None, Query(description="Checks that must be measured.")] = None,
        skip: Annotated[list[str] | None, Query()] = None,
        fail_on: Annotated[str, Query(pattern="^(fail|warn|unknown)$")] = "fail",
    ) -> Response:
        """The gate over the last scan: verdict, exit code, checks. Makes no load."""
        view = _current(state)
        checked: FailOn = fail_on  # type: ignore[assignment]
        try:
            checks = select(view.checks, require=require or (), skip=skip or (), known=ALL_CODES)
        except GateError as error:
            raise ProblemError(400, str(error)) from None
        verdict = judge(checks, fail_on=checked)
        repeatable(request, view)
        return _answer(request, {"verdict": verdict, "checks": worst_first(checks)}, form)


def _one_or_all(values: Any) -> Any:
    return values[0] if len(values) == 1 else list(values)
