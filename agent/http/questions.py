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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agent.advice import advise, whatif
from agent.advice.request import Request
from agent.base.inputs import RequestError
from agent.base.streams import log_to_stderr
from agent.checks.view import View
from agent.cluster.nodes import Fleet, NodeRecord, records_of
from agent.cluster.places import Places
from agent.http import cluster
from agent.http.worker import Answer, ProblemError, document, page_of, send

# What the page opens with, so that one sees what may be asked and what an answer looks like.
EXAMPLES: tuple[dict[str, str], ...] = (
    {"model": "Llama-3.1-8B", "method": "lora", "machine": "4xl40s", "nodes": "1", "sequence_length": "2048"},
    {"model": "Llama-3.1-70B", "method": "full", "machine": "p5.48xlarge", "nodes": "8", "sequence_length": "8192"},
    {"model": "Qwen2.5-32B", "method": "full", "machine": "p5en.48xlarge", "nodes": "4", "sequence_length": "4096"},
)
FRONTIER_NODES = (1, 2, 4, 8)

log = logging.getLogger(__name__)

_NICENESS = 10  # scrapes go before plans


@dataclass(slots=True)
class Known:
    """What was handed over."""

    view: View | None = None
    records: dict[str, NodeRecord] = field(default_factory=dict)
    fleet: Fleet | None = None  # of the records; None where they have changed

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

    def nodes(self, own: tuple[str | None, float] | None) -> Fleet:
        """The cluster: what was published, or with `own` (name, seconds between scans) what this agent scans."""
        if own is not None:
            fleet = Fleet()
            fleet.set(records_of(self.current(), name=own[0], interval_seconds=own[1]))
            return fleet
        if self.fleet is None:
            self.fleet = Fleet()
            self.fleet.set(self.records.values())
        return self.fleet

    def current(self) -> View:
        """The newest view."""
        assert self.view is not None  # noqa: S101 - handed over with every question
        return self.view


def recommendations(
    known: Known, *, options: tuple[tuple[str, Any], ...], form: str, cluster_wide: bool = False,
    own: tuple[str | None, float] | None = None,
) -> Answer:  # fmt: skip
    """Environment and layout, in any format."""
    wanted, view = Request.of(**dict(options)), known.current()
    if cluster_wide:
        advice, hosts = cluster.advise_cluster(known.nodes(own), wanted)
    else:
        advice = advise.for_view(view, wanted)
        hosts = wanted.nodes or (1 if wanted.machine else len(view.snapshots))
    if form in advise.EXPORTS:
        return Answer(body=advise.export(advice, form, nodes=hosts).encode(), media_type="text/plain")
    return document(advice, form)


def what_if(known: Known, *, fields: tuple[tuple[str, str], ...]) -> Answer:
    """The page of layouts; its form is read here, so that a wrong field is told on the page."""
    from agent.pages import render as pages

    form, view = dict(fields), known.current()
    if not form.get("model"):
        worked = [(one, advise.for_view(view, question(one))) for one in EXAMPLES]
        return page_of(pages.what_if_page(view, form, None, "", examples=worked))
    try:
        wanted = question(form)
        advice = advise.for_view(view, wanted)
        points = whatif.frontier_of(wanted, FRONTIER_NODES) if wanted.machine else ()
        return page_of(pages.what_if_page(view, form, advice, "", points=points))
    except RequestError as error:
        return page_of(pages.what_if_page(view, form, None, str(error)), 400)


def nodes(
    known: Known, *, source: str, form: str, behind: str | None,
    own: tuple[str | None, float] | None = None,
) -> Answer:  # fmt: skip
    """Every node as a row."""
    rows = cluster.nodes_document(known.nodes(own), source)
    return document({**rows, "behind": behind} if behind else rows, form)


def topology(known: Known, *, form: str, own: tuple[str | None, float] | None = None) -> Answer:
    """The cluster, each kind of node once."""
    return document(cluster.topology_document(known.nodes(own)), form)


def cluster_page(
    known: Known, *, source: str, behind: str | None, more: str, places: Places, filters: tuple[tuple[str, Any], ...],
    node: str | None = None, own: tuple[str | None, float] | None = None,
) -> Answer:  # fmt: skip
    """Every node that publishes, for people, or one of them by name. ProblemError where there is none of that name."""
    from agent.pages import render as pages
    from agent.pages.console import Asked

    fleet = known.nodes(own)
    if node is not None:
        record = fleet.record(node)
        if record is None:
            raise ProblemError(404, f"node={node}: no agent publishes a node of that name")
        return page_of(pages.published_page(fleet, record, source=source))
    return page_of(
        pages.fleet_page(fleet, source=source, behind=behind, more=more, places=places, asked=Asked(**dict(filters)))
    )


def why(known: Known, *, body: bytes) -> Answer:  # noqa: ARG001 - of what was posted alone
    """The verdict on posted sources."""
    from agent.http.posted import judged

    return document(judged(body), "json")


def as_yaml(known: Known, *, text: bytes) -> Answer:  # noqa: ARG001 - of what was asked alone
    """A JSON document as YAML."""
    return document(json.loads(text), "yaml")


QUESTIONS: dict[str, Callable[..., Answer]] = {
    one.__name__: one for one in (recommendations, what_if, nodes, topology, cluster_page, why, as_yaml)
}


def question(form: Mapping[str, str]) -> Request:
    """What the form asks; an empty field is one left out, and a wrong one is named with what is allowed."""
    method, methods = form.get("method") or "lora", ("full", "lora", "qlora")
    if method not in methods:
        raise RequestError(f"method={method[:40]}: must be one of {', '.join(methods)}")
    return Request.of(
        model=(form.get("model") or "")[:200] or None,
        method=method,
        machine=(form.get("machine") or "")[:64] or None,
        nodes=_whole(form, "nodes", 100_000),
        network=(form.get("network") or "").strip()[:32] or None,
        transport=(form.get("transport") or "")[:32] or None,
        sequence_length=_whole(form, "sequence_length", 10_000_000) or 2048,
        global_batch=_whole(form, "global_batch", 10_000_000),
        price=(form.get("price") or "").strip()[:16] or None,
        allow_files=False,
    )


def _whole(form: Mapping[str, str], name: str, most: int) -> int | None:
    text = (form.get(name) or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= most):
        raise RequestError(f"{name}={text[:40]}: must be a whole number from 1 to {most}")
    return int(text)


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
