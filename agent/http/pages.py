"""Endpoints for people: the page, the what-if form and the list of endpoints.

Specification: Content Security Policy level 3. Every page works without scripts and asks no other host for anything;
with scripts an open page asks for itself anew every half minute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, Response

from agent.advice import advise
from agent.advice.request import Request as Question
from agent.base.inputs import RequestError
from agent.checks.view import View, only
from agent.http.answers import Rendered, respond
from agent.http.cluster import Cluster
from agent.http.models import Responses, problems
from agent.http.problem import ProblemError
from agent.http.state import State
from agent.http.worker import Answer, Worker
from planner.advice import Recommendation

Field = Annotated[str, Query(max_length=4096)]  # of a form, where an empty one is one left out

_FORM: Responses = problems(500)
_FORM[400]["content"]["text/html"] = {"schema": {"type": "string"}}  # the form again, with what is wrong


def install(
    app: FastAPI, state: State, current: Callable[[State], View], cluster: Cluster, worker: Worker, rendered: Rendered
) -> None:  # fmt: skip
    """Add the endpoints; `current` hands out the newest view or raises.

    What draws a page is imported with the first one: a node that only a scraper asks does not pay for it.
    """

    @app.get("/", tags=["page"], operation_id="page", response_class=HTMLResponse, responses=problems(404))
    async def page(
        node: Annotated[str | None, Query(max_length=253, description="One of the nodes, where several are served.")]
        = None,
    ) -> Response:  # fmt: skip
        """The page: verdict, findings with remedies, topology, measurements, recommendation, flights."""
        view, trouble = current(state), state.error
        names = [snapshot.hostname for snapshot in view.snapshots]
        if node is not None and node not in names:
            raise ProblemError(404, f"node={node}: not among the nodes served here", allowed=names)

        def drawn() -> Answer:
            from agent.pages import render as pages

            if node is None and len(names) != 1:
                return _answer(pages.cluster_page(view, *_advice(view), trouble=trouble))
            mine, others = only(view, node or names[0]), cluster.source != "hosts"
            return _answer(pages.node_page(mine, *_advice(mine), trouble=trouble, fleet=len(names), others=others))

        return respond(await rendered.answer(view, ("/", node, trouble), drawn))

    @app.get(
        "/cluster",
        tags=["page"],
        operation_id="cluster_page",
        response_class=HTMLResponse,
        responses=problems(404, 500),
    )
    async def whole(
        request: Request,
        node: Annotated[str | None, Query(max_length=253, description="One of the nodes.")] = None,
        search: Annotated[str, Query(max_length=200, description="Words of a row, all of them.")] = "",
        verdict: Annotated[str, Query(pattern="^(|fail|unknown|warn|pass)$")] = "",
        fault: Annotated[str, Query(max_length=128, description="Finding code.")] = "",
        kind: Field = "", version: Field = "", place: Field = "",
        group: Annotated[str, Query(pattern="^(|fault|kind|version|place)$")] = "",
        sort: Annotated[str, Query(pattern="^(|name|since|age)$")] = "",
        page: Annotated[int, Query(ge=1, le=100_000)] = 1,
    ) -> Response:  # fmt: skip
        """Every node that publishes: map, faults, what changed in a day, which nodes are odd, and the table."""
        filters = {"search": search, "verdict": verdict, "fault": fault, "kind": kind, "version": version,
                   "place": place, "group": group, "sort": sort, "page": page}  # fmt: skip
        records = await cluster.records()
        return respond(await worker.ask(
            request, "cluster_page", view=current(state), records=records, source=cluster.source, node=node,
            behind=cluster.watch_error(), more=cluster.more, own=cluster.scanned, filters=tuple(filters.items()),
            places=await cluster.places(),
        ))  # fmt: skip

    @app.get("/what-if", tags=["page"], operation_id="what_if", response_class=HTMLResponse, responses=_FORM)
    async def what_if(
        request: Request, model: Field = "", method: Field = "", machine: Field = "", nodes: Field = "",
        network: Field = "", transport: Field = "", sequence_length: Field = "", global_batch: Field = "",
        price: Field = "",
    ) -> Response:  # fmt: skip
        """Layouts for a model on this machine or one of the catalogue, side by side."""
        fields = {"model": model, "method": method, "machine": machine, "nodes": nodes, "network": network,
                  "transport": transport, "sequence_length": sequence_length, "global_batch": global_batch,
                  "price": price}  # fmt: skip
        view, query = current(state), tuple(fields.items())
        answer = rendered.get(view, ("/what-if", query))
        if answer is None:
            answer = await worker.ask(request, "what_if", view=view, fields=query)
            rendered.put(view, ("/what-if", query), answer)
        return respond(answer)

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def docs() -> Response:
        """Every endpoint with its parameters, from the OpenAPI document."""
        from agent.pages import render as pages

        return respond(_answer(pages.endpoints_page(app.openapi())))


def _answer(html: str) -> Answer:
    from agent.pages import render as pages

    return Answer(body=html.encode(), media_type="text/html", headers=pages.headers())


def _advice(view: View) -> tuple[Recommendation | None, str]:
    """The environment to run with, or why there is none."""
    try:
        return advise.for_view(view, Question()), ""
    except RequestError as error:
        return None, str(error)
