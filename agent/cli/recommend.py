"""The verb recommend: print or export environment and layout, or compare machines, numbers of nodes and layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from agent.base import raise_as, units
from agent.base.options import NothingFitsError, RequestError, command, find_most
from agent.base.output import emit, print_notes, print_text

if TYPE_CHECKING:
    from rich.console import Console

    from agent.advice.request import Request
    from planner.advice import FrontierPoint, Recommendation
    from probes.api import Snapshot


@command("recommend")
def recommend(
    form: str, rdma: bool, tcp: bool, sweep: str | None, compare: tuple[str, str] | None, explain: bool,
    list_exports: bool, **options: Any,
) -> None:  # fmt: skip
    """Ask the planner and print the answer in the requested format."""
    from agent.advice.advise import ENVIRONMENTS, FORMAT_TEXTS, FORMATS, adapt_to_pods, advise, export
    from agent.advice.request import Request
    from planner.forecast.models import KNOWN

    if list_exports or options["model"] == "list":
        formats = (f"{name:11} {FORMAT_TEXTS[name]}" for name in FORMATS)
        print_text("\n".join(formats if list_exports else (model.name for model in KNOWN)))
        return
    if form not in ("table", *FORMATS):
        raise click.UsageError(f"-o {form}: must be one of table, {', '.join(FORMATS)}")
    request = Request.of(**options, transport="rdma" if rdma else "tcp" if tcp else None)
    if (sweep or compare) and form not in ("table", "json", "yaml"):
        raise click.UsageError(f"-o {form}: a what-if is shown as table, json or yaml")
    if sweep:
        from agent.advice.advise import forecast_frontier

        points = forecast_frontier(request, _parse_numbers(sweep))
        emit([asdict(point) for point in points], form, lambda out: _print_sweep(out, request, points))
        return
    snapshots = request.read_hosts()
    if compare:
        _compare(request, snapshots, compare, form)
        return
    advice = advise(request, snapshots) if request.config is None else _advise_on_file(request, snapshots)
    if form == "k8s":
        advice, left_out = adapt_to_pods(advice, snapshots, here=not request.hosts)
        print_notes(left_out)
    if form in ("table", "json", "yaml"):
        from agent.terminal.advice import print_recommendation

        emit(advice, form, lambda out: print_recommendation(out, advice, brief=not explain))
    elif form in ENVIRONMENTS or advice.chosen is not None or advice.model is None:
        print_text(export(advice, form, nodes=request.nodes or max(1, len(request.hosts))), nl=False)
    if advice.model is not None and advice.chosen is None:
        verb = f"is forecast for {advice.unsupported}" if advice.unsupported else "fits"
        reasons = "" if form == "table" else _explain_no_layout(advice)  # the table has shown them
        raise NothingFitsError(f"no layout of {advice.model.name} {verb}{reasons}")


def _explain_no_layout(advice: Recommendation) -> str:
    """Return why the nearest layouts were rejected, and the change that helps most; too little memory comes first."""
    misses = sorted(advice.rejected, key=lambda row: row.rule != "memory-fits")[:3]
    nearest = "; ".join(f"{row.what}: {row.reason}" for row in misses)
    return "\n".join([f" ({nearest})", *advice.helps_most[:1]]) if nearest else ""


def _advise_on_file(request: Request, snapshots: Sequence[Snapshot]) -> Recommendation:
    """Return the advice for a file of job settings, with a line that names the trainer that would run it."""
    from agent.advice.job_plan import choose_trainer

    typed = click.get_current_context().get_parameter_source("engine") is ParameterSource.COMMANDLINE
    advice, reason = choose_trainer(request, request.train.engine if typed else "auto", snapshots)
    if reason:
        print_text(reason, err=True)
    return advice


# Tables of what-if alternatives.


def _parse_numbers(text: str) -> list[int]:
    """Parse "nodes=1,2,4" as numbers."""
    from agent.advice.advise import MAX_POINTS

    name, _, numbers = text.partition("=")
    entries = numbers.split(",")
    wrong = [word for word in entries if not word.isdecimal() or not 1 <= int(word) <= find_most("nodes")]
    if name != "nodes" or wrong or len(entries) > MAX_POINTS:
        allowed = f"nodes=1,2,4 with at most {MAX_POINTS} numbers up to {find_most('nodes')}"
        raise click.UsageError(f"--sweep {text}: must be {allowed}")
    return [int(word) for word in entries]


def _print_sweep(out: Console, request: Request, points: Sequence[FrontierPoint]) -> None:
    """Print a row for each point, the fastest first, and below the table what the rows have in common."""
    from agent.base.lines import table

    priced = ["cost"] if any(p.cost for p in points) else []
    over = ["network"] if request.network else []  # else it is that of each machine
    rows = table("", "machine", "nodes", *over, "layout", "tokens/s", "time", "interval", "GPU-hours", *priced)
    for p in sorted(points, key=lambda point: point.seconds.mid if point.seconds else math.inf):
        first = ["✓" if p.best else "", p.machine, str(p.nodes), *(p.network for _ in over)]
        if (time := p.seconds) is None:
            rows.add_row(*first, p.reason, *["-"] * (4 + len(priced)))
            continue
        rows.add_row(
            *first, p.layout, f"{p.tokens_per_second:,.0f}",
            units.duration(time.mid), f"{time.low / time.mid - 1:.0%}/{time.high / time.mid - 1:+.0%}",
            f"{p.gpu_hours:,.1f}", *(f"{p.cost.mid:,.2f}" if p.cost else "-" for _ in priced),
        )  # fmt: skip
    out.print(rows)
    assumed = "" if request.train.global_batch else " (assumed: give --global-batch to choose it)"
    trained = {(p.seconds.mid * (p.tokens_per_second or 0.0), p.global_batch) for p in points if p.seconds}
    for tokens, batch in sorted(trained)[:1]:  # all are equal except for rounding
        out.print(f"every row trains {tokens:,.0f} tokens in steps of {batch} sequences{assumed}")
    spent = "cost" if all(p.cost for p in points if p.seconds) else "GPU-hours"
    out.print(f"✓ no other row has a shorter time and lower {spent} for the same tokens")


def _compare(request: Request, snapshots: Sequence[Snapshot], texts: tuple[str, str], form: str) -> None:
    from rich.markup import escape

    from agent.advice.advise import PLAN_ERRORS
    from agent.base.lines import print_bullet, table
    from agent.terminal.advice import format_layout
    from contracts.job_config import ConfigError, parse_layout_text
    from planner.forecast.calibration import load_calibration
    from planner.recommend import compare, estimate_difference, explain_unsupported, forecast_named, plan, rescale

    with raise_as(RequestError, PLAN_ERRORS):
        model = request.required_model()
        cluster = request.cluster(snapshots)
        if reason := explain_unsupported(cluster):
            raise NothingFitsError(reason)
        calibration = load_calibration(request.calibration) if request.calibration else None
        measured, ranks = request.measurements(), request.ranks(cluster)
        planned = plan(cluster, snapshots, model, request.train, measured, calibration, ranks_per_node=ranks)
        if step := request.measured_layout():
            planned = rescale(planned, step)
        with raise_as(RequestError, ConfigError, "--compare: "):
            layouts = [parse_layout_text(text) for text in texts]
        first, second = (forecast_named(planned, layout) for layout in layouts)
    rows = compare(first, second)

    def show(out: Console) -> None:
        result = table("part", *(format_layout(ranked.layout) for ranked in (first, second)))
        for name, left, right in rows[:-1]:
            result.add_row(name.replace("_", " "), *(units.seconds(value) if value else "-" for value in (left, right)))
        steps = [ranked.forecast.step_seconds for ranked in (first, second)]
        result.add_row("step", *(units.interval(step, "s") for step in steps))
        memory = (units.interval(ranked.forecast.memory_bytes, "B") for ranked in (first, second))
        result.add_row("memory per GPU" if planned.job.has_gpu else "memory per rank", *memory)
        result.add_row("allowed", *(ranked.why or "yes" for ranked in (first, second)))
        out.print(result)
        fast, slow = sorted(step.mid for step in steps)
        apart, error = slow / fast - 1, estimate_difference(planned, first, second)
        alike = f"not distinguishable: the steps differ by {apart:.1%}, within the error of {error:.0%}"
        for text in (*planned.unknowns, *[alike] * (apart <= error)):
            print_bullet(out, "?", escape(text))

    emit({"layouts": [first, second], "parts": rows}, form, show)
