"""Small figures as inline SVG: stacked bars, an interval with what was measured, runs side by side.

Shapes carry CSS classes and no text that stretching could distort; numbers stand beside them as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from contracts.interval import Interval
from planner.advice import Part

SHADES = 10  # classes p0 to p9 of the style sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One bar of a comparison: what ran, and the number it got."""

    label: str  # "RDMA", "TCP on net1"
    value: float  # seconds, or bytes per second
    shown: str  # the number as people read it


def names_of(parts: Iterable[Sequence[Part]]) -> tuple[str, ...]:
    """Every part's name once, in order of first appearance: its place is its colour in every bar."""
    return tuple(dict.fromkeys(part.name for row in parts for part in row if part.value > 0))


def swatch(name: str, names: Sequence[str]) -> Markup:
    """The colour of a name, for a legend."""
    shade = names.index(name) % SHADES
    square = f'<rect class="p{shade}" width="10" height="10"/>'
    return _own(f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">{square}</svg>')


def stacked(parts: Sequence[Part], names: Sequence[str], *, full: float, limit: float | None = None) -> Markup:
    """Parts end to end on a scale that ends at `full`; a mark at `limit`, where there is one."""
    full = max(full, sum(part.value for part in parts), limit or 0.0) or 1.0
    drawn, x = [], 0.0
    for part in parts:
        wide = 1000.0 * part.value / full
        if wide <= 0:
            continue
        drawn.append(
            f'<rect class="p{names.index(part.name) % SHADES}" x="{x:.2f}" width="{wide:.2f}" height="24">'
            f"<title>{escape(part.name)}: {escape(part.detail)}</title></rect>"
        )
        x += wide
    if limit:
        drawn.append(f'<rect class="limit" x="{min(997.0, 1000.0 * limit / full):.1f}" width="3" height="24"/>')
    return _wide(drawn, _shares(parts))


def _shares(parts: Sequence[Part]) -> str:
    total = sum(part.value for part in parts) or 1.0
    return ", ".join(f"{part.name} {100 * part.value / total:.0f} %" for part in parts if part.value > 0)


def interval(forecast: Interval, measured: float | None) -> Markup:
    """The forecast's range as a band, its middle as a line, the measurement as a diamond."""
    full = 1.1 * max(forecast.high, measured or 0.0) or 1.0
    at = [1000.0 * value / full for value in (forecast.low, forecast.mid, forecast.high)]
    drawn = [
        f'<rect class="p0" x="{at[0]:.1f}" y="5" width="{max(3.0, at[2] - at[0]):.1f}" height="14"/>',
        f'<rect class="limit" x="{at[1]:.1f}" y="5" width="2" height="14"/>',
    ]
    words = "forecast range"
    if measured is not None:
        here = 1000.0 * measured / full
        inside = forecast.low <= measured <= forecast.high
        drawn.append(f'<rect class="{"in" if inside else "out"}" x="{here - 5:.1f}" width="10" height="24"/>')
        words += ", measured " + ("inside it" if inside else "outside it")
    return _wide(drawn, words)


def runs(title: str, rows: Sequence[Run], *, less_is_better: bool = True) -> Markup:
    """One horizontal bar per run, best to the eye: the shared scale starts at zero, and each says how far off it is."""
    if not rows:
        return Markup()
    full = max(run.value for run in rows) or 1.0
    best = min(run.value for run in rows) if less_is_better else full
    drawn = []
    for run in rows:
        bar = f'<rect class="p0" width="{max(2.0, 1000.0 * run.value / full):.1f}" height="24"/>'
        against = _against(run.value, best)
        figure = _wide([bar], f"{run.shown}{against}")
        drawn.append(
            f'<tr><th scope="row">{escape(run.label)}</th><td class="wide">{figure}</td>'
            f'<td class="number">{escape(run.shown)}{against}</td></tr>'
        )
    return _own(f'<table class="runs"><caption>{escape(title)}</caption><tbody>{"".join(drawn)}</tbody></table>')


def blocks(rows: Sequence[Run], width: int = 24) -> list[tuple[str, str, str]]:
    """Label, a bar of block characters and the number with its factor: the same figure where only text goes."""
    full, best = max((run.value for run in rows), default=1.0) or 1.0, min((run.value for run in rows), default=0.0)
    return [
        (run.label, "█" * max(1, round(width * run.value / full)), run.shown + _against(run.value, best))
        for run in rows
    ]


def _against(value: float, best: float) -> str:
    return "" if value == best or not best else f" ({value / best:.2f} x)"


def _wide(drawn: Iterable[str], label: str) -> Markup:
    return _own(
        f'<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label or "nothing")}">{"".join(drawn)}</svg>'
    )


def _own(svg: str) -> Markup:
    """Marked safe: every text that came from outside was escaped where it was put in."""
    return Markup(svg)  # noqa: S704
