"""HTML and Markdown: one set of sections serves the agent's page and the report. No script, nothing from elsewhere."""

from __future__ import annotations

import shlex
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agent import units
from agent.gate import worst_first
from agent.terminal import GLYPHS, facts_lines
from planner.advice import Recommendation
from probes.api import Absent, Failed, Ok

if TYPE_CHECKING:
    from agent.report import Report
    from agent.view import View

_TEMPLATES = Path(__file__).parent / "templates"


@cache
def _environment(*, html: bool) -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=html,  # noqa: S701 - Markdown has no HTML escaping; `cell` escapes its cells
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        size=units.size, rate=units.rate, seconds=units.seconds, interval=units.interval, kind=_kind, when=_when,
        glyph=GLYPHS.__getitem__, shell=shlex.quote, outcome=_outcome, cell=_cell,
    )  # fmt: skip
    return made


def node_page(view: View, advice: Recommendation) -> str:
    """The agent's page."""
    template = _environment(html=True).get_template("node.html.j2")
    return template.render(view=view, advice=advice, checks=worst_first(view.checks), style=_style())


def report_page(report: Report) -> str:
    """The report as one self-contained HTML file."""
    template = _environment(html=True).get_template("report.html.j2")
    return template.render(report=report, checks=worst_first(report.checks), style=_style())


def report_markdown(report: Report) -> str:
    """The report's summary, for a CI job's page."""
    template = _environment(html=False).get_template("report.md.j2")
    return template.render(report=report, checks=worst_first(report.checks))


@cache
def _style() -> Markup:
    return Markup((_TEMPLATES / "style.css").read_text(encoding="utf-8"))  # noqa: S704 - our own file


def _kind(label: str) -> str:
    word = "nv" if label.startswith("NV") else {"soc": "sys"}.get(label.lower(), label.lower())
    return f"k-{word}" if word in ("nv", "pix", "pxb", "phb", "node", "sys") else ""


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _outcome(outcome: Ok[object] | Absent | Failed) -> str:
    if isinstance(outcome, Absent):
        return f"absent: {outcome.why}"
    if isinstance(outcome, Failed):
        return f"failed: {outcome.error}"
    return Markup("<br>").join(facts_lines(outcome.facts))


def _cell(text: str) -> str:
    """Text inside a Markdown table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
