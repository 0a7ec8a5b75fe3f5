"""The benchmarks of a host as bars: what the newest one measured, over the earlier ones of the same job."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from agent.base import units
from agent.base.bench_history import Largest, Line
from agent.pages import charts

SHOWN_BARS = 12


def figures(lines: Sequence[Line], when: Mapping[float, str]) -> Markup:
    """Bars of what the newest benchmark measured, over the earlier ones of the same job; empty without any."""
    if not lines:
        return Markup()
    drawn = []
    for now in lines[0].largest:
        runs = list(itertools.islice(_runs(lines, now, when), SHOWN_BARS))
        if len(runs) > 1:
            title = f"{now.op} of {units.size(now.size_bytes)}, {lines[0].job}: bus bandwidth, newest first"
            drawn.append(charts.runs(title, runs, less_is_better=False))
    return Markup().join(drawn)


def _runs(lines: Sequence[Line], now: Largest, when: Mapping[float, str]) -> Iterable[charts.Run]:
    for line in lines:
        same = next((one for one in line.largest if (one.op, one.size_bytes) == (now.op, now.size_bytes)), None)
        if line.job == lines[0].job and same:
            rate = same.busbw_bytes_per_second
            yield charts.Run(label=when[line.started_at_seconds], value=rate, shown=units.rate(rate))
