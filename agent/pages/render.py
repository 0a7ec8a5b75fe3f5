"""HTML: one set of sections serves the agent's pages and the report.

Everything is in the document itself: style, drawings, and on the agent's pages a small script for comfort. The report
has no script at all. `policy` is the Content Security Policy that holds them to it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from agent.advice.advise import EXPORTS
from agent.advice.whatif import FORM
from agent.base import units
from agent.base.tables import GLYPHS
from agent.base.version import VERSION
from agent.checks import history
from agent.checks.explain import UnknownCodeError, section
from agent.checks.groups import Group, grouped, passed_ids, reasons, unknown_ids
from agent.checks.verdict import judge
from agent.checks.view import View
from agent.cluster.gate import Places
from agent.cluster.records import records_of
from agent.pages import charts
from agent.pages import nodes as page_nodes
from agent.terminal.advice import OPTIONS, as_it_is, parts_grid, summary
from agent.terminal.hosts import outcome_lines
from agent.terminal.measured import results_grid
from collectives.bench.results import BenchResult
from contracts import question
from contracts.finding import Finding
from contracts.tables import read_table
from planner.advice import RankedLayout, Recommendation
from planner.forecast import machines, models
from planner.nccl_env.environment import render_k8s, render_shell
from planner.sweep import FrontierPoint, panels_svg, series
from probes.api import Absent, Failed, Ok, Snapshot
from probes.pci.facts import PciFacts
from topology import svg
from topology.cluster import join
from topology.graph import CLASSES, NodeTopology, Pairs, level, nvlinks
from topology.render import columns

if TYPE_CHECKING:
    from agent.cluster.nodes import Fleet, NodeRecord
    from agent.jobs.preflight import Report

_COMMANDS = ("modprobe", "sysctl", "kubectl", "ulimit", "mount", "dmesg", "topoflight")


def explained(code: str) -> Markup:
    """The entry of a code as a list; empty where there is none."""
    try:
        text = section(code)
    except UnknownCodeError:
        return Markup()
    points = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    html = "<ul>" + "".join(f"<li>{inline(point)}</li>" for point in points) + "</ul>"
    return Markup(html)  # noqa: S704 - every piece went through `inline`


def inline(text: str) -> Markup:
    """One line of prose: code between backticks, and strong words."""
    safe = str(escape(" ".join(text.split())))
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe))  # noqa: S704 - escaped above


def headline(group: Group) -> Markup:
    """What is wrong and with what: "GPU5: the driver cannot reach this GPU"."""
    message = group.message if group.alike else group.message.split(";")[0]
    first = group.checks[0].subject
    if first and (len(group.subjects) == 1 or not group.alike):
        return with_subject(first, message)
    return inline(sentence(message))


def with_subject(subject: str, message: str) -> Markup:
    """A message behind its subject, where it does not begin with it."""
    if not subject or re.match(rf"{re.escape(subject)}(?![\w.:])", message):
        return inline(sentence(message))
    return Markup("<code>{}</code>: {}").format(subject, inline(message))


def sentence(text: str) -> str:
    """A capital letter at the start, where a plain word stands there and not a name such as eth0 or a command."""
    plain = re.match(r"([a-z]+)(?:[ ,]|$)", text)
    return text[:1].upper() + text[1:] if plain and plain[1] not in _COMMANDS else text


_TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_LAYOUTS = 4  # the chosen one and three others fit side by side


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        expected_rate=units.expected_rate,
        size=units.size, rate=units.rate, seconds=units.seconds, duration=units.duration,
        interval=units.interval, kind=_kind, when=when,
        glyph=GLYPHS.__getitem__, outcome=_outcome, explained=explained, tilde=_round,
        headline=headline, inline=inline, sentence=sentence, rest=units.rest, counted=units.count, need=units.need,
        ago=units.ago, hostlist=units.hostlist, clock=history.clock, lines=page_nodes.lines,
        shell_lines=render_shell, k8s_lines=render_k8s,
    )  # fmt: skip
    made.globals.update(
        picture=picture,
        grouped=grouped,
        reasons=reasons,
        passed_ids=passed_ids,
        unknown_ids=unknown_ids,
        columns=columns,
        classes=CLASSES,
        pairs_of=Pairs,
        about=with_subject,
        glance=page_nodes.glance,
        charts=charts,
        layouts=_layouts,
        summary=summary,
        OPTIONS=OPTIONS,
        parts_grid=parts_grid,
        results_grid=results_grid,
        as_it_is=as_it_is,
        field=lambda name: question.rows()[question.fields()[name]],
        most=question.most,
        history_of=lambda lines: charts.bench_figures(lines, when),
        changed=history.changed,
        exports=EXPORTS,
    )
    return made


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
    found = page_nodes.rows(records_of(view), view.checks, view.made_at_seconds)
    rows = [replace(row, link=f"./?node={quote(row.name, safe='')}") for row in found]
    return _page("cluster", view, advice=advice, why_not=why_not, trouble=trouble, rows=rows)


def fleet_page(
    fleet: Fleet, *, source: str, behind: str | None, places: Places | None = None,
    asked: page_nodes.Asked | None = None,
) -> str:  # fmt: skip
    """The page of every node that publishes, from the records alone."""
    now = time.time()
    shown = page_nodes.console(fleet, places or Places(), asked or page_nodes.Asked(), now)
    return _rendered("fleet", c=shown, source=source, behind=behind, made_at=now, version=VERSION)


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


def report_page(report: Report) -> str:
    """The report as one self-contained HTML file."""
    rows = page_nodes.rows(report.nodes, report.checks, report.started_at_seconds)
    return _rendered("report", report=report, rows=rows, style_hash=_hash("style.css"))


def policy() -> str:
    """The Content Security Policy of the agent's pages: nothing from anywhere but this document and this agent."""
    return (
        f"default-src 'none'; style-src '{_hash('style.css')}'; script-src '{_hash('page.js')}'; img-src data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def headers() -> dict[str, str]:
    """What each of the agent's pages is sent with."""
    return {
        "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store", "Content-Security-Policy": policy(),
    }  # fmt: skip


def when(seconds: float) -> str:
    """A time as people compare it across machines."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _page(name: str, view: View, *, asked: Mapping[str, str] | None = None, **more: Any) -> str:
    asked = {**dict.fromkeys(FORM, ""), **(asked or {})}
    return _rendered(name, view=view, models=models.known_names(), machines=machines.names(), asked=asked, **more)


def _rendered(name: str, **values: Any) -> str:
    template = _environment().get_template(f"{name}.html.j2")
    return template.render(style=_file("style.css"), script=_file("page.js"), **values)


@cache
def _file(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


@cache
def _hash(name: str) -> str:
    """A source of the policy: the digest of an inline block's exact text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(_file(name).encode()).digest()).decode()


def _layouts(advice: Recommendation) -> dict[str, Any]:
    """The best layouts and the scales they share, so that bars can be compared by eye."""
    ranked: Sequence[RankedLayout] = [r for r in (advice.chosen, *advice.runners_up) if r is not None][:_SHOWN_LAYOUTS]
    forecasts = [r.forecast for r in ranked]
    capacity = max((f.capacity_bytes for f in forecasts if f.capacity_bytes), default=None)
    memory = [sum(p.value for p in f.memory_parts) for f in forecasts]
    return {
        "ranked": ranked,
        "time_names": charts.names_of(f.time_parts for f in forecasts),
        "memory_names": charts.names_of(f.memory_parts for f in forecasts),
        "time_full": max((sum(p.value for p in f.time_parts) for f in forecasts), default=1.0),
        "memory_full": max([*memory, capacity or 0.0], default=1.0),
    }


def _kind(label: str) -> str:
    """The style of a link's label: a darker or lighter cell beside the word itself."""
    word = "nv" if nvlinks(label) else level(label).lower()
    return f"k-{word}" if word in ("nv", "pix", "pxb", "phb", "node", "sys") else ""


def _round(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _outcome(outcome: Ok[object] | Absent | Failed) -> Markup:
    return Markup("<br>").join(outcome_lines(outcome))


# A node as the page draws it: topology's drawing, with glyphs where findings are and what a benchmark measured.


def picture(
    node: NodeTopology, *, snapshot: Snapshot | None = None, checks: Iterable[Finding] = (),
    bench: BenchResult | None = None,
) -> Markup:  # fmt: skip
    """The node as one inline `<svg>`; empty where there is nothing to join."""
    mine = [check for check in checks if not check.node or node.hostname in check.node.split(", ")]
    drawn = svg.picture(
        node, pci=snapshot.facts(PciFacts) if snapshot else None, status=partial(_status, mine),
        measured=_measured(node, bench), more=" The table below says the same.",
    )  # fmt: skip
    return Markup(drawn)  # noqa: S704 - every text from a host is escaped there


def _status(checks: Sequence[Finding], names: Iterable[str | None]) -> str:
    """The worst of the findings whose subject names the device."""
    patterns = [re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])") for name in names if name]
    statuses = {c.status for c in checks if c.subject and any(p.search(c.subject) for p in patterns)}
    return next((word for word in ("fail", "warn") if word in statuses), "")


def _measured(node: NodeTopology, bench: BenchResult | None) -> dict[tuple[str, ...], str]:
    """Of islands that a benchmark of one host ran on as a whole."""
    gathers = [m for m in bench.measurements if m.op == "all_gather" and m.verified] if bench else []
    if bench is None or not gathers or len(set(bench.hosts)) != 1:
        return {}
    best = max(gathers, key=lambda m: m.bytes)
    words = f"{units.rate(best.busbw_bytes_per_second)} bus bandwidth measured (all_gather)"
    return {island.gpus: words for island in node.islands if len(island.gpus) == bench.world_size}
