"""Sweeps: the best layout over a range of nodes, as a table of points and as an SVG plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.advice import RankedLayout
from planner.forecast import machines
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.recommend import plan, search_planned, unjudged
from topology.svg import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """The best layout on so many nodes."""

    nodes: int
    ranks: int
    family: str  # "" where nothing fits
    step_seconds: float | None
    tokens_per_second: float | None
    efficiency: float | None  # tokens per second and rank over those of the first point that fits
    reason: str = ""  # why nothing fits


def sweep(
    machine: str, nodes: Sequence[int], model: ModelSpec, train: TrainSpec, *, gpus_per_node: int | None = None
) -> tuple[SweepPoint, ...]:
    """Recommend for each number of nodes, with the same global batch where it is given; by default with all GPUs."""
    points: list[SweepPoint] = []
    base: float | None = None
    for count in nodes:
        cluster = machines.cluster(machine, count, gpus_per_node=gpus_per_node)
        if reason := unjudged(cluster):
            points.append(SweepPoint(nodes=count, ranks=cluster.world_size, family="", step_seconds=None,
                                     tokens_per_second=None, efficiency=None, reason=reason))  # fmt: skip
            continue
        planned = plan(cluster, (), model, train)
        found = search_planned(planned)
        if not found.best:
            misses = [r.reason for r in found.rejected if r.rule == "memory-fits"]
            reason = min(misses, key=lambda text: float(text.split()[0]), default="no layout is allowed")
            points.append(SweepPoint(nodes=count, ranks=planned.world, family="", step_seconds=None,
                                     tokens_per_second=None, efficiency=None, reason=reason))  # fmt: skip
            continue
        best = found.best[0]
        rate = best.layout.global_batch * planned.job.real_tokens(best.layout.micro_batch) / best.seconds
        base = base if base is not None else rate / planned.world
        points.append(SweepPoint(nodes=count, ranks=planned.world, family=best.layout.family,
                                 step_seconds=best.seconds, tokens_per_second=rate,
                                 efficiency=rate / planned.world / base))  # fmt: skip
    return tuple(points)


def compare(first: RankedLayout, second: RankedLayout) -> tuple[tuple[str, float, float], ...]:
    """Two forecasts side by side, part by part: name, seconds of the first, seconds of the second."""
    left = {part.name: part.value for part in first.forecast.time_parts}
    right = {part.name: part.value for part in second.forecast.time_parts}
    names = dict.fromkeys([*left, *right])
    rows = [(name, left.get(name, 0.0), right.get(name, 0.0)) for name in names]
    return (*rows, ("step", first.forecast.step_seconds.mid, second.forecast.step_seconds.mid))


_WIDTH, _HEIGHT, _MARGIN = 640, 360, 56


def sweep_svg(points: Sequence[SweepPoint], title: str) -> str:
    """Tokens per second over nodes, with the line of perfect scaling; self-contained."""
    good = [p for p in points if p.tokens_per_second is not None]
    if not good:
        return _frame(title, '<text x="320" y="180" text-anchor="middle">nothing fits on any of these</text>')
    first = good[0]
    ideal = [(p.nodes, (first.tokens_per_second or 0.0) * p.ranks / first.ranks) for p in good]
    top = max(max(y for _, y in ideal), max(p.tokens_per_second or 0.0 for p in good))
    right = max(p.nodes for p in good)

    def at(nodes: float, rate: float) -> tuple[float, float]:
        x = _MARGIN + nodes / right * (_WIDTH - 2 * _MARGIN)
        return x, _HEIGHT - _MARGIN - rate / top * (_HEIGHT - 2 * _MARGIN)

    dashed = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(n, r) for n, r in ideal))
    solid = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p.nodes, p.tokens_per_second or 0.0) for p in good))
    body = [
        f'<polyline points="{dashed}" fill="none" stroke="#999" stroke-dasharray="5 4"/>',
        f'<polyline points="{solid}" fill="none" stroke="#1f6feb" stroke-width="2"/>',
    ]
    for p in good:
        x, y = at(p.nodes, p.tokens_per_second or 0.0)
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f6feb"/>')
        label = f"{p.family} {p.efficiency:.0%}"
        anchor = "end" if x > _WIDTH / 2 else "start"
        body.append(f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="{anchor}">{escape(label)}</text>')
        body.append(f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{p.nodes}</text>')
    return _frame(title, "\n".join(body))


def _frame(title: str, body: str) -> str:
    bottom, left, end = _HEIGHT - _MARGIN, _MARGIN, _WIDTH - _MARGIN
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"
 font-family="sans-serif" font-size="12">
<title>{escape(title)}</title>
<rect width="100%" height="100%" fill="#fff"/>
<text x="{_WIDTH / 2}" y="24" text-anchor="middle" font-size="14">{escape(title)}</text>
<line x1="{left}" y1="{bottom}" x2="{end}" y2="{bottom}" stroke="#333"/>
<line x1="{left}" y1="{_MARGIN}" x2="{left}" y2="{bottom}" stroke="#333"/>
<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">nodes (dashed: perfect scaling of tokens/s)</text>
{body}
</svg>
"""
