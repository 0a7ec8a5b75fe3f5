"""Doors for people: the page, the what-if form, the list of doors, and the stream that keeps an open page fresh.

Specifications: HTML server-sent events (text/event-stream); Content Security Policy level 3. Every page works
without scripts and asks no other host for anything; the stream is comfort.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from agent import advise
from agent.http.cluster import Cluster
from agent.http.desk import Desk
from agent.http.problem import ProblemError
from agent.http.state import State
from agent.view import View, digest, only
from planner.advice import Recommendation

MOST_STREAMS = 64  # open pages that are kept fresh; one more is told to come back later
LOOK_SECONDS = 0.5  # how often a stream looks whether there is a newer view
QUIET_SECONDS = 15.0  # a comment is sent after so long, so that proxies keep the connection
_METHODS = ("full", "lora", "qlora")
FORM = ("model", "method", "machine", "nodes", "sequence_length", "global_batch")  # what the what-if page asks
_SECURITY = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def install(app: FastAPI, state: State, current: Callable[[State], View], cluster: Cluster, desk: Desk) -> None:
    """Add the doors; `current` hands out the newest view or raises.

    What draws a page is imported with the first one: a node that only a scraper asks does not pay for it.
    """
    _pages(app, state, current, cluster, desk)
    _fleet(app, cluster)
    _events(app, state)


def _answer(html: str, status: int = 200) -> HTMLResponse:
    from agent.pages import render as pages

    return HTMLResponse(html, status, headers={**_SECURITY, "Content-Security-Policy": pages.policy()})


def _fleet(app: FastAPI, cluster: Cluster) -> None:
    @app.get("/cluster", tags=["page"], operation_id="cluster_page", response_class=HTMLResponse)
    def whole() -> HTMLResponse:
        """Every node that publishes: verdict, first thing to read, age, and which nodes are alike."""
        from agent.pages import render as pages

        fleet = cluster.fleet()
        page = pages.fleet_page(fleet, source=cluster.source, behind=cluster.watch_error(), more=cluster.more)
        return _answer(page)


def _pages(
    app: FastAPI, state: State, current: Callable[[State], View], cluster: Cluster, desk: Desk
) -> None:  # fmt: skip
    @app.get("/", tags=["page"], operation_id="page", response_class=HTMLResponse)
    def page(
        node: Annotated[str | None, Query(max_length=253, description="One of the nodes, where several are served.")]
        = None,
    ) -> HTMLResponse:  # fmt: skip
        """The page: verdict, findings with remedies, topology, measurements, recommendation, flights."""
        from agent.pages import render as pages

        view = current(state)
        names = [snapshot.hostname for snapshot in view.snapshots]
        if node is not None and node not in names:
            raise ProblemError(404, f"node={node}: not among the nodes served here", allowed=names)
        now: dict[str, Any] = {"digest": digest(view), "trouble": state.error}
        if node is None and len(names) != 1:
            return _answer(pages.cluster_page(view, *_advice(view), **now))
        mine, others = only(view, node or names[0]), cluster.source != "hosts"
        return _answer(pages.node_page(mine, *_advice(mine), **now, fleet=len(names), others=others))

    @app.get("/what-if", tags=["page"], operation_id="what_if", response_class=HTMLResponse)
    async def what_if(request: Request) -> HTMLResponse:
        """Layouts for a model on this machine or one of the catalogue, side by side."""
        view, asked = current(state), dict(request.query_params)

        def answer() -> HTMLResponse:
            from agent.pages import render as pages

            if not asked.get("model"):
                return _answer(pages.what_if_page(view, asked, None, ""))
            try:
                return _answer(pages.what_if_page(view, asked, advise.for_view(view, question(asked)), ""))
            except advise.RequestError as error:
                return _answer(pages.what_if_page(view, asked, None, str(error)), 400)

        return await desk.ask(request, answer)

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def docs() -> HTMLResponse:
        """Every door with its parameters, from the OpenAPI document."""
        from agent.pages import render as pages

        return _answer(pages.doors_page(app.openapi()))


def _advice(view: View) -> tuple[Recommendation | None, str]:
    """The environment to run with, or why there is none."""
    try:
        return advise.for_view(view, advise.Request()), ""
    except advise.RequestError as error:
        return None, str(error)


def question(asked: Mapping[str, str]) -> advise.Request:
    """What the form asks; an empty field is one left out, and a wrong one is named with what is allowed."""
    method = asked.get("method") or "lora"
    if method not in _METHODS:
        raise advise.RequestError(f"method={method[:40]}: must be one of {', '.join(_METHODS)}")
    return advise.Request(
        model=(asked.get("model") or "")[:200] or None,
        method=method,
        machine=(asked.get("machine") or "")[:64] or None,
        nodes=_whole(asked, "nodes", 100_000),
        sequence_length=_whole(asked, "sequence_length", 10_000_000) or 2048,
        global_batch=_whole(asked, "global_batch", 10_000_000),
        allow_files=False,
    )


def _whole(asked: Mapping[str, str], name: str, most: int) -> int | None:
    text = (asked.get(name) or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= most):
        raise advise.RequestError(f"{name}={text[:40]}: must be a whole number from 1 to {most}")
    return int(text)


def _events(app: FastAPI, state: State) -> None:
    open_streams = 0

    async def stream(request: Request) -> AsyncIterator[str]:
        nonlocal open_streams
        open_streams += 1
        try:
            seen, spoken = None, time.monotonic()
            yield "retry: 5000\n\n"
            while not await request.is_disconnected():
                view = state.view
                if view is not None and view is not seen:
                    seen, spoken = view, time.monotonic()
                    yield f"event: view\ndata: {json.dumps(_news(view))}\n\n"
                elif time.monotonic() - spoken > QUIET_SECONDS:
                    spoken = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            open_streams -= 1

    @app.get("/events", include_in_schema=False)
    async def events(request: Request) -> StreamingResponse:
        """Server-sent events: one after each scan, with a digest that changes when a verdict does."""
        if open_streams >= MOST_STREAMS:
            raise ProblemError(503, f"{MOST_STREAMS} pages are open already", headers={"Retry-After": "60"})
        return StreamingResponse(
            stream(request), media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )  # fmt: skip


def _news(view: View) -> dict[str, str]:
    from agent.pages import render as pages

    return {"digest": digest(view), "verdict": view.verdict.word, "scanned": pages.when(view.made_at_seconds)}
