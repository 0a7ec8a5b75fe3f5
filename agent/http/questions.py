"""The worker process of agent.http.worker: answers expensive questions one at a time, from data sent to it.

Each question is a function of the known data and plain arguments; its name is the name of the question. An invalid
question raises ProblemError. An internal error is logged and answered with 500.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.advice import advise
from agent.advice.request import Request
from agent.base import log_to_stderr
from agent.base.options import RequestError
from agent.checks.verdict import View
from agent.cluster.nodes import Fleet
from agent.http.state import Records, nodes_document, own_fleet
from agent.http.worker import Answer, ProblemError, document, page_of
from contracts import question

log = logging.getLogger(__name__)

_NICENESS = 10  # scrapes have priority over plans


class Known:
    """The data that the answers are made from: the agent's last scan, and the records of the cluster."""

    view: View  # sent with every question that needs it

    def __init__(self) -> None:
        self.records = Records()

    def fleet(self, source: str, interval: float) -> Fleet:
        """Return the records of all nodes of the cluster, or of this agent's node, scanned every `interval` seconds."""
        return self.records.fleet() if source == "kubernetes" else own_fleet(self.view, interval)


def recommendations(known: Known, *, options: tuple[tuple[str, Any], ...], form: str) -> Answer:
    """Return environment and layout of this node, as JSON or as an export."""
    wanted = Request.of(**dict(options), allow_files=False)
    advice = advise.for_view(known.view, wanted)
    if form in advise.EXPORTS:
        return Answer(body=advise.export(advice, form, nodes=wanted.nodes or 1).encode(), media_type="text/plain")
    return document(advice)


def what_if(known: Known, *, fields: tuple[tuple[str, str], ...]) -> Answer:
    """Return the page of layouts; the form is parsed here, so that the page can name an invalid field."""
    from agent.http import pages

    form, view = dict(fields), known.view
    if not form.get("model"):
        return page_of(pages.what_if_page(view, form, None, ""))
    try:
        advice = advise.for_view(view, read_form(form))
        return page_of(pages.what_if_page(view, form, advice, ""))
    except RequestError as error:
        return page_of(pages.what_if_page(view, form, None, str(error)), 400)


def nodes(known: Known, *, source: str, interval: float) -> Answer:
    """Return every node as a row."""
    return document(nodes_document(known.fleet(source, interval), source, known.records.error))


def cluster_page(known: Known, *, source: str, interval: float, node: str | None, search: str, page: int) -> Answer:
    """Return the page of all publishing nodes, or of one node by name. Raises ProblemError if the name is unknown."""
    from agent.http import pages

    fleet = known.fleet(source, interval)
    if node is None:
        made = pages.fleet_page(fleet, source=source, behind=known.records.error, search=search, page=page)
        return page_of(made)
    record = fleet.record(node)
    if record is None:
        raise ProblemError(404, f"node={node}: no agent publishes a node of that name")
    return page_of(pages.published_page(fleet, record, source=source))


QUESTIONS: dict[str, Callable[..., Answer]] = {
    one.__name__: one for one in (recommendations, what_if, nodes, cluster_page)
}


def read_form(form: Mapping[str, str]) -> Request:
    """Parse a form; an empty field counts as omitted. Raises RequestError that names an invalid field."""
    given = {name: text.strip() for name, text in form.items() if text.strip()}
    try:
        return Request.of(**dict(question.model().model_validate(given)), allow_files=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, allowed = str(first["loc"][0]), re.sub("^(Input|String) should", "must", first["msg"])
        raise RequestError(f"{name}={given[name][:40]}: {allowed}") from None


def answer(known: Known, name: str, payload: Mapping[str, Any]) -> Answer | ProblemError:
    """Answer one question; every exception becomes a ProblemError."""
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
    """Send only texts and bytes, so that the agent never unpickles objects from the worker."""
    header: dict[str, Any] = {"status": found.status}
    if isinstance(found, ProblemError):
        header |= {"detail": found.detail, "headers": found.headers}
    else:
        header |= {"media_type": found.media_type, "headers": dict(found.headers)}
    pipe.send_bytes(json.dumps(header).encode())
    pipe.send_bytes(found.body if isinstance(found, Answer) else b"")


def main() -> None:
    """Serve requests on the file descriptor given on the command line until the other side closes it."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # without memory, the kernel kills this and not the agent
    log_to_stderr()
    pipe, known = Connection(int(sys.argv[1])), Known()
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while pipe.poll(float(sys.argv[2])):  # longest idle time in seconds
            kind, payload = pipe.recv()
            if kind == "view":
                known.view = payload
            else:
                send(pipe, answer(known, kind, payload))


if __name__ == "__main__":
    main()
