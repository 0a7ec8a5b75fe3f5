"""The agent's pages: the sections of the report, and a small script for comfort.

`policy` is the Content Security Policy that holds them to what the document itself has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment
from markupsafe import Markup

from agent.advice.advise import EXPORTS, FORM
from agent.base import units, version
from agent.checks import history
from agent.checks.verdict import judge
from agent.checks.view import View
from agent.cluster.gate import Places
from agent.cluster.publish import records_of
from agent.pages import nodes as page_nodes
from agent.pages.report import digest, make_environment, rendered, rows
from contracts import question
from contracts.tables import read_table
from planner.advice import Recommendation
from planner.forecast import machines, models
from planner.sweep import FrontierPoint, panels_svg, series
from topology.cluster import join

if TYPE_CHECKING:
    from agent.cluster.nodes import Fleet, NodeRecord


def node_page(
    view: View, advice: Recommendation | None, why_not: str, *, trouble: str | None, fleet: int = 1,
    others: bool = False,
) -> str:  # fmt: skip
    """The page of one node; `fleet` is how many are served in all.

    `trouble` is why the newest scan failed, where this view is an older one; `others` says that a page of the whole
    cluster has something to show.
    """
    return _page("node", view, advice=advice, why_not=why_not, trouble=trouble, fleet=fleet, others=others)


def cluster_page(view: View, advice: Recommendation | None, why_not: str, *, trouble: str | None) -> str:
    """The page of several nodes: which is sick, and with what."""
    found = rows(records_of(view), view.checks, view.made_at_seconds)
    shown = [replace(row, link=f"./?node={quote(row.name, safe='')}") for row in found]
    return _page("cluster", view, advice=advice, why_not=why_not, trouble=trouble, rows=shown)


def fleet_page(
    fleet: Fleet, *, source: str, behind: str | None, places: Places | None = None,
    asked: page_nodes.Asked | None = None,
) -> str:  # fmt: skip
    """The page of every node that publishes, from the records alone."""
    now = time.time()
    shown = page_nodes.console(fleet, places or Places(), asked or page_nodes.Asked(), now)
    return _rendered("fleet", c=shown, source=source, behind=behind, made_at=now, version=version())


def published_page(fleet: Fleet, record: NodeRecord, *, source: str) -> str:
    """The page of one node of the cluster, by what its agent publishes."""
    now = time.time()
    snapshot, node = fleet.snapshot(record), fleet.topology(record)
    topologies = () if node is None else (node,)
    checks = page_nodes.checks_of_records(fleet, now, (record.name,))
    view = View(
        snapshots=(snapshot,), topologies=topologies, cluster=join(topologies), checks=checks, verdict=judge(checks),
        made_at_seconds=record.scanned_at_seconds,
    )  # fmt: skip
    age = units.ago(record.age_seconds(now))
    return _rendered("published", view=view, record=record, source=source, silent=record.silent(now), age=age)


def what_if_page(
    view: View, asked: Mapping[str, str], advice: Recommendation | None, error: str,
    examples: Sequence[tuple[Mapping[str, str], Recommendation]] = (), points: Sequence[FrontierPoint] = (),
) -> str:  # fmt: skip
    """The form and, where it was answered, layouts side by side and the frontier; without a question, examples."""
    given = {name: asked[name] for name in FORM if asked.get(name)}
    drawn = Markup("".join(panels_svg(points))) if points else ""  # noqa: S704 - escaped there
    return _page(
        "what_if", view, asked=given, query=given, advice=advice, error=error, examples=examples, points=points,
        drawn=drawn, series=series(points),
    )  # fmt: skip


def why_page(view: View) -> str:
    """How to diagnose a run, and the runs recorded on this node."""
    return _rendered("why", view=view)


def examples() -> list[dict[str, str]]:
    """Return the questions that the what-if page opens with."""
    found: list[dict[str, str]] = read_table(__file__, "examples.toml")["example"]
    return found


def endpoints_page(document: Mapping[str, Any]) -> str:
    """Every endpoint of the agent, from its OpenAPI document."""
    endpoints = [
        {"path": path, "method": method, "about": about.get("description", ""), "takes": about.get("parameters", [])}
        for path, methods in document["paths"].items()
        for method, about in methods.items()
    ]
    return _rendered("endpoints", endpoints=endpoints)


def policy() -> str:
    """The Content Security Policy of the agent's pages: nothing from anywhere but this document and this agent."""
    return (
        f"default-src 'none'; style-src '{digest('style.css')}'; script-src '{digest('page.js')}'; img-src data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def headers() -> dict[str, str]:
    """What each of the agent's pages is sent with."""
    return {
        "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store", "Content-Security-Policy": policy(),
    }  # fmt: skip


def _page(name: str, view: View, *, asked: Mapping[str, str] | None = None, **more: Any) -> str:
    asked = {**dict.fromkeys(FORM, ""), **(asked or {})}
    return _rendered(name, view=view, models=models.known_names(), machines=machines.names(), asked=asked, **more)


def _rendered(name: str, **values: Any) -> str:
    return rendered(name, _environment(), **values)


@cache
def _environment() -> Environment:
    """The templates with what only the agent's pages need."""
    made = make_environment()
    made.globals.update(
        field=lambda name: question.rows()[question.fields()[name]], most=question.most, changed=history.changed,
        exports=EXPORTS,
    )  # fmt: skip
    return made
