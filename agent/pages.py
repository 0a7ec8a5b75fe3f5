"""The report as one HTML document, and the sections that it shares with the agent's pages (agent/http/pages.py).

Style and drawings are in the document itself. The report has no script.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from agent.base import units
from agent.base.lines import GLYPHS
from agent.checks.findings import (
    FindingGroup,
    UnknownCodeError,
    find_entry,
    group_by_reason,
    group_findings,
    is_problem,
    list_codes,
)
from agent.cluster.nodes import NodeRecord, parse_time
from agent.terminal import advice as plan_words, measured
from agent.terminal.hosts import describe_outcome, list_hardware_properties
from collectives.bench.results import BenchResult
from contracts.finding import Finding
from contracts.host_list import list_names
from planner.advice import RankedLayout, Recommendation
from planner.nccl_env.environment import render_settings
from probes.api import Snapshot
from topology import svg
from topology.check import describe_departures
from topology.graph import CLASSES, NodeTopology, Pairs, level, nvlinks
from topology.render import label_columns

if TYPE_CHECKING:
    from agent.jobs.preflight import Report

ORDER = ("fail", "unknown", "warn", "pass")
_TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_LAYOUTS = 4  # the chosen one and three others fit on the page


def render_entry(code: str) -> Markup:
    """Return the entry of a code as a list; empty if there is none."""
    try:
        text = find_entry(code)
    except UnknownCodeError:
        return Markup()
    points = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    html = "<ul>" + "".join(f"<li>{inline(point)}</li>" for point in points) + "</ul>"
    return Markup(html)  # noqa: S704 - every piece went through `inline`


def inline(text: str) -> Markup:
    """Render one line of prose: code between backticks, and strong words."""
    safe = str(escape(" ".join(text.split())))
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe))  # noqa: S704 - escaped above


def render_headline(group: FindingGroup) -> Markup:
    """Return the device and the fault: "GPU5: the driver cannot reach this GPU"."""
    message = group.message if group.alike else group.message.split(";")[0]
    return with_subject(group.checks[0].subject if len(group.subjects) == 1 or not group.alike else "", message)


def with_subject(subject: str, message: str) -> Markup:
    """Put the subject before a message, unless the message begins with it."""
    if not subject or re.match(rf"{re.escape(subject)}(?![\w.:])", message):
        return inline(message)
    return Markup("<code>{}</code>: {}").format(subject, inline(message))


@cache
def environment() -> Environment:
    """Return the templates with the functions that the pages and the report use."""
    result = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plain = (units.expected_rate, units.size, units.rate, units.seconds, units.duration, units.interval, units.rest,
             units.tally, list_names, units.clock, format_utc, render_entry, render_headline, inline,
             group_rows)  # fmt: skip
    result.filters.update({function.__name__: function for function in plain})
    result.filters.update(
        kind=lambda label: f"k-{'nv' if nvlinks(label) else level(label).lower()}",  # style class of a link's label
        glyph=GLYPHS.__getitem__, outcome=lambda outcome: Markup("<br>").join(describe_outcome(outcome)),
        tilde=lambda value: "unknown" if value is None else f"{value:,.0f}", counted=units.count,
        need=plan_words.describe_need, settings_as=render_settings,
    )  # fmt: skip
    shared = (draw_node, group_findings, is_problem, group_by_reason, list_codes, label_columns, summarise_node)
    result.globals.update({function.__name__: function for function in shared})
    result.globals.update(
        classes=CLASSES, pairs_of=Pairs, about=with_subject, charts=measured, plans=plan_words, layouts=_layouts,
    )  # fmt: skip
    return result


def render_report(report: Report) -> str:
    """Return the report as one self-contained HTML file."""
    rows = make_rows(report.nodes, report.checks, report.started_at_seconds)
    return render("report", report=report, rows=rows, style_hash=digest("style.css"))


def format_utc(seconds: float) -> str:
    """Format a time so that it can be compared across machines."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def render(name: str, **values: Any) -> str:
    """Render one page from its template."""
    template = environment().get_template(f"{name}.html.j2")
    return template.render(style=asset("style.css"), script=asset("page.js"), **values)


@cache
def asset(name: str) -> Markup:
    """Return the text of one of the project's style sheets or scripts."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


@cache
def digest(name: str) -> str:
    """Return a CSP source: the digest of an inline block's exact text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()


def _layouts(advice: Recommendation) -> dict[str, Any]:
    """Return the best layouts and their common scales, so that bars can be compared visually."""
    ranked: Sequence[RankedLayout] = [r for r in (advice.chosen, *advice.runners_up) if r is not None][:_SHOWN_LAYOUTS]
    forecasts = [r.forecast for r in ranked]
    memory = [max(sum(p.value for p in f.memory_parts), f.capacity_bytes or 0.0) for f in forecasts]
    return {
        "ranked": ranked,
        # every name once, in order of first appearance, because its position determines its color in every bar
        "time_names": tuple(dict.fromkeys(p.name for f in forecasts for p in f.time_parts if p.value > 0)),
        "memory_names": tuple(dict.fromkeys(p.name for f in forecasts for p in f.memory_parts if p.value > 0)),
        "time_full": max((sum(p.value for p in f.time_parts) for f in forecasts), default=1.0),
        "memory_full": max(memory, default=1.0),
    }


# The drawing of a node: the topology, with glyphs for findings.


def draw_node(node: NodeTopology, *, checks: Iterable[Finding] = ()) -> Markup:
    """Draw the node as one inline `<svg>`; empty if there are no links to draw."""
    own_checks = [check for check in checks if not check.node or node.hostname in check.node.split(", ")]
    drawn = svg.picture(node, status=partial(_find_worst_status, own_checks), suffix=" The table below says the same.")
    return Markup(drawn)  # noqa: S704 - every text from a host is escaped there


def _find_worst_status(checks: Sequence[Finding], names: Iterable[str | None]) -> str:
    """Return the worst status of the findings whose subject names the device."""
    patterns = [re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])") for name in names if name]
    statuses = {c.status for c in checks if c.subject and any(p.search(c.subject) for p in patterns)}
    return next((word for word in ("fail", "warn") if word in statuses), "")


# Nodes as rows of a table, and the summary of one node.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node in a table."""

    record: NodeRecord
    word: str  # status word of its verdict
    groups: tuple[FindingGroup, ...]  # failures, warnings and required checks that could not run, worst first
    version: str
    age: float | None  # seconds since its scan; None: never scanned
    since: float  # Unix seconds of the start of its oldest finding; 0 if unknown

    @property
    def name(self) -> str:
        """Return the name of the node."""
        return self.record.name

    def shown(self) -> tuple[str, ...]:
        """Return what nodes of one line of the table have in common: hardware, versions and findings."""
        record = self.record
        hardware = (record.gpu_text, record.links or "unknown", record.rdma_text, record.memlock or "unknown")
        codes = (code for group in self.groups for code in group.codes)
        return (*hardware, self.version, self.word, *codes, *(group.message for group in self.groups[:1]))

    def matches(self, word: str) -> bool:
        """Return whether the node has this verdict, or shows this word if it is not a verdict."""
        return word == self.word if word in ORDER else word in " ".join((self.name, *self.shown())).lower()


def make_rows(records: Sequence[NodeRecord], checks: Sequence[Finding], now: float) -> tuple[NodeRow, ...]:
    """Return every node, failed ones first. A node that stopped reporting is unknown, whatever its last verdict was."""
    by_node: dict[str, list[Finding]] = defaultdict(list)
    for check in checks:
        if is_problem(check):
            by_node[check.node].append(check)
    agents = {record.agent_version for record in records}
    rows = (_make_row(record, by_node[record.name], now, agents=len(agents) > 1) for record in records)
    return tuple(sorted(rows, key=lambda row: (ORDER.index(row.word) if row.word in ORDER else 1, sort_key(row.name))))


def _make_row(record: NodeRecord, checks: Sequence[Finding], now: float, *, agents: bool) -> NodeRow:
    agent = f", agent {record.agent_version or 'unknown'}" if agents else ""
    return NodeRow(
        record=record, word="unknown" if record.silent(now) else record.verdict, groups=tuple(group_findings(checks)),
        version=f"driver {record.driver or 'unknown'}{agent}",
        age=record.age_seconds(now) if record.scanned_at_seconds > 0 else None,
        since=min(filter(None, (parse_time(each.get("since")) for each in record.findings)), default=0.0),
    )  # fmt: skip


def group_rows(rows: Iterable[NodeRow]) -> tuple[tuple[NodeRow, ...], ...]:
    """Return the lines of a table, in row order: one per failed node, and one per group of equal nodes."""
    groups: dict[tuple[str, ...], list[NodeRow]] = {}
    for row in rows:
        groups.setdefault((row.name,) if row.word == "fail" else row.shown(), []).append(row)
    return tuple(map(tuple, groups.values()))


def sort_key(text: str) -> list[tuple[int, str]]:
    """Return the key that sorts "r2" before "r10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


def summarise_node(node: NodeTopology, snapshot: Snapshot, bench: BenchResult | None) -> Iterator[tuple[str, str]]:
    """Return the main facts about a machine as the terminal shows them, and the newest measurement."""
    yield from list_hardware_properties(snapshot, node)
    gathers = [m for m in bench.measurements if m.op == "all_gather" and m.verified] if bench else []
    best = max(gathers, key=lambda m: m.bytes, default=None)
    rate = f"all_gather {units.rate(best.busbw_bytes_per_second)} bus bandwidth" if best else "no benchmark yet"
    yield "measured", rate + (f" at {units.size(best.bytes)}" if best else "")
    yield "recognised as", node.sku or "no known machine type"
    for text in describe_departures(node):
        yield "differs from the reference", text
