"""The worker process (agent.http.worker): answers costly questions, one at a time, from what it was handed.

Each question is a function of what is known and of plain arguments, under the name by which it is asked. Whatever is
wrong with a question is a ProblemError; an error of ours is logged and refused with 500.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.advice import advise
from agent.advice.request import Request
from agent.base.options import RequestError
from agent.base.streams import log_to_stderr
from agent.checks.verdict import View
from agent.cluster.gate import Places
from agent.cluster.nodes import Fleet, NodeRecord
from agent.http import cluster
from agent.http.worker import Answer, ProblemError, document, page_of
from contracts import question
from contracts.tables import bounds
from planner.advice import Recommendation
from planner.sweep import FrontierPoint

FRONTIER_NODES = (1, 2, 4, 8)

log = logging.getLogger(__name__)

_NICENESS = 10  # scrapes go before plans


class Known:
    """What was handed over."""

    view: View  # handed over with every question that asks for it

    def __init__(self) -> None:
        self.records: dict[str, NodeRecord] = {}
        self.fleet: Fleet | None = None  # of the records; None where they have changed

    def take(self, kind: str, payload: Any) -> bool:
        """Whether this was something to know, and not a question."""
        if kind == "view":
            self.view = payload
        elif kind == "records":
            changed, removed = payload
            self.records.update((record.name, record) for record in changed)
            for name in removed:
                del self.records[name]
            self.fleet = None
        return kind in ("view", "records")

    def nodes(self) -> Fleet:
        """The cluster."""
        if self.fleet is None:
            self.fleet = Fleet()
            self.fleet.set(self.records.values())
        return self.fleet


def recommendations(known: Known, *, options: tuple[tuple[str, Any], ...], form: str) -> Answer:
    """Environment and layout, as JSON or as an export."""
    wanted, view = Request.of(**dict(options), allow_files=False), known.view
    hosts = wanted.nodes or (1 if wanted.machine else len(view.snapshots))
    return _advice(advise.for_view(view, wanted), form, hosts)


def recommendations_of_all(known: Known, *, options: tuple[tuple[str, Any], ...], form: str) -> Answer:
    """The same for all nodes of the cluster."""
    advice, hosts = cluster.advise_cluster(known.nodes(), Request.of(**dict(options), allow_files=False))
    return _advice(advice, form, hosts)


def _advice(advice: Recommendation, form: str, hosts: int) -> Answer:
    if form in advise.EXPORTS:
        return Answer(body=advise.export(advice, form, nodes=hosts).encode(), media_type="text/plain")
    return document(advice)


def what_if(known: Known, *, fields: tuple[tuple[str, str], ...]) -> Answer:
    """The page of layouts; its form is read here, so that the page names a wrong field."""
    from agent.pages import render as pages

    form, view = dict(fields), known.view
    if not form.get("model"):
        worked = [(one, advise.for_view(view, read_form(one))) for one in pages.examples()]
        return page_of(pages.what_if_page(view, form, None, "", examples=worked))
    try:
        wanted = read_form(form)
        advice = advise.for_view(view, wanted)
        points = _frontier(wanted, advice) if wanted.machine else ()
        return page_of(pages.what_if_page(view, form, advice, "", points=points))
    except RequestError as error:
        return page_of(pages.what_if_page(view, form, None, str(error)), 400)


def _frontier(wanted: Request, advice: Recommendation) -> tuple[FrontierPoint, ...]:
    """Other numbers of nodes, by the batch of the recommended layout wherever it is large enough for their ranks."""
    here = wanted.nodes or 1
    counts = sorted({*FRONTIER_NODES, here})
    if advice.chosen is not None:
        shape = advice.chosen.layout
        if shape.world_size // here * counts[-1] <= shape.global_batch:
            wanted = wanted.changed(global_batch=shape.global_batch)
    return advise.frontier_of(wanted, counts)


def nodes(known: Known, *, source: str, behind: str | None) -> Answer:
    """Every node as a row."""
    rows = cluster.nodes_document(known.nodes(), source)
    return document({**rows, "behind": behind} if behind else rows)


def cluster_page(
    known: Known, *, source: str, behind: str | None, places: Places, filters: tuple[tuple[str, Any], ...],
    node: str | None = None,
) -> Answer:  # fmt: skip
    """Every node that publishes, for people, or one of them by name. ProblemError where there is none of that name."""
    from agent.pages import render as pages

    fleet = known.nodes()
    if node is not None:
        record = fleet.record(node)
        if record is None:
            raise ProblemError(404, f"node={node}: no agent publishes a node of that name")
        return page_of(pages.published_page(fleet, record, source=source))
    return page_of(
        pages.fleet_page(fleet, source=source, behind=behind, places=places, asked=pages.NodeFilter(**dict(filters)))
    )


QUESTIONS: dict[str, Callable[..., Answer]] = {
    one.__name__: one for one in (recommendations, recommendations_of_all, what_if, nodes, cluster_page)
}


def read_form(form: Mapping[str, str]) -> Request:
    """The question of a form, where an empty field is one left out. Raises RequestError that names a wrong field."""
    given = {name: text.strip() for name, text in form.items() if text.strip()}
    try:
        return Request.of(**dict(question.model().model_validate(given)), allow_files=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        limits = bounds(str(question.rows()[f"--{name.replace('_', '-')}"].get("type", "")))
        allowed = first["msg"].replace("Input should", "must").replace("String should", "must")
        if limits is not None:
            allowed = f"must be a {'whole ' * (limits[0] == 'int')}number from {limits[1]:g} to {limits[2]:.0f}"
        raise RequestError(f"{name}={given[name][:40]}: {allowed}") from None


def answer(known: Known, name: str, payload: Mapping[str, Any]) -> Answer | ProblemError:
    """One question, whatever becomes of it."""
    try:
        return QUESTIONS[name](known, **payload)
    except ProblemError as error:
        return error
    except RequestError as error:
        return ProblemError(400, str(error))
    except Exception:
        log.exception("a question could not be answered: %s", name)
        return ProblemError(500, "the question could not be answered; the agent's log says why")


def send(pipe: Connection, found: Answer | ProblemError) -> None:
    """Send texts and bytes only: nothing that the agent would unpack into objects."""
    header: dict[str, Any] = {"status": found.status}
    if isinstance(found, ProblemError):
        header["detail"] = found.detail
    else:
        header |= {"media_type": found.media_type, "headers": dict(found.headers)}
    pipe.send_bytes(json.dumps(header).encode())
    pipe.send_bytes(found.body if isinstance(found, Answer) else b"")


def main() -> None:
    """Serve the descriptor named on the command line until the other side closes it."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends, this goes and not the agent
    log_to_stderr(logging.WARNING)
    pipe, known = Connection(int(sys.argv[1])), Known()
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            kind, payload = pipe.recv()
            if not known.take(kind, payload):
                send(pipe, answer(known, kind, payload))


if __name__ == "__main__":
    main()
