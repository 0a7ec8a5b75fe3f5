"""What if: more nodes (--sweep), or another layout (--compare)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from agent import terminal, units
from agent.advise import Request, RequestError, cluster_of, model_of, train_of
from agent.hosts import snapshots
from agent.output import emit, waiting
from agent.report import write_atomic
from planner import machines
from planner.layout import Layout, LayoutError
from planner.machines import MachineError
from planner.recommend import forecast_layout, plan
from planner.sweep import compare, sweep, sweep_svg

MOST_POINTS = 64
_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
_COUNTS = (*_DEGREES, "micro_batch", "gradient_accumulation", "virtual_stages")
_WORDS = ("sharding", "checkpointing", "schedule", "precision", "offload")


def run(request: Request, options: Mapping[str, Any], form: str) -> None:
    """Answer a sweep or a comparison on stdout."""
    if form not in ("table", "json", "yaml"):
        raise click.UsageError(f"-o {form}: a what-if is shown as table, json or yaml")
    if request.model is None:
        raise click.UsageError("--sweep and --compare need --model")
    if options["sweep"]:
        _sweep(request, str(options["sweep"]), options["plot"], form)
    else:
        _compare(request, tuple(options["compare"]), form)


def _sweep(request: Request, text: str, plot: Path | None, form: str) -> None:
    name, _, numbers = text.partition("=")
    words = numbers.split(",")
    if name != "nodes" or not all(w.isdecimal() and 1 <= int(w) <= 100_000 for w in words) or len(words) > MOST_POINTS:
        raise click.UsageError(f"--sweep {text}: must be nodes=1,2,4 with at most {MOST_POINTS} numbers up to 100000")
    if request.machine is None:
        raise click.UsageError("--sweep needs --machine: a sweep is over nodes of one kind")
    model = model_of(request)
    assert model is not None  # noqa: S101 - `run` has refused otherwise
    nodes, train = [int(word) for word in words], train_of(request)
    try:
        if train.global_batch is None:  # one batch for all points, or the curve would compare different jobs
            batch = plan(machines.cluster(request.machine, max(nodes)), (), model, train).global_batch
            train = replace(train, global_batch=batch)
        with waiting(f"recommend: forecasting layouts for {text}"):
            points = sweep(request.machine, nodes, model, train)
    except (MachineError, ValueError) as error:
        raise RequestError(str(error)) from None
    if plot is not None:
        write_atomic(plot, sweep_svg(points, f"{model.name} on {request.machine}"))

    def show(out: Console) -> None:
        rows = terminal.table("nodes", "ranks", "layout", "step", "tokens/s", "efficiency")
        for point in points:
            efficiency = f"{point.efficiency:.0%}" if point.efficiency is not None else "-"
            rate = f"{point.tokens_per_second:,.0f}" if point.tokens_per_second is not None else "-"
            step = units.seconds(point.step_seconds) if point.step_seconds is not None else point.reason
            rows.add_row(str(point.nodes), str(point.ranks), point.family or "nothing fits", step, rate, efficiency)
        out.print(rows)

    emit([asdict(point) for point in points], form, show)


def _compare(request: Request, texts: tuple[str, ...], form: str) -> None:
    model = model_of(request)
    assert model is not None  # noqa: S101 - `run` has refused otherwise
    found = () if request.machine else snapshots(request.hosts, root=request.root)
    try:
        planned = plan(
            cluster_of(request, found), found, model, train_of(request), ranks_per_node=request.ranks_per_node
        )
        first, second = (forecast_layout(planned, layout_of(text, planned.world)) for text in texts)
    except (LayoutError, MachineError, ValueError) as error:
        raise RequestError(str(error)) from None
    rows = compare(first, second)

    def show(out: Console) -> None:
        shown = terminal.table("part", *(ranked.layout.family for ranked in (first, second)))
        for name, left, right in rows:
            shown.add_row(name.replace("_", " "), *(units.seconds(value) if value else "-" for value in (left, right)))
        memory = (units.interval(ranked.forecast.memory_bytes, "B") for ranked in (first, second))
        shown.add_row("memory per GPU", *memory)
        shown.add_row("allowed", *((ranked.why or "yes") for ranked in (first, second)))
        out.print(shown)

    emit({"layouts": [first, second], "parts": rows}, form, show)


def layout_of(text: str, world: int) -> Layout:
    """ "dp_shard=4,tp=2,micro_batch=2" as a layout of `world` ranks; LayoutError names what is wrong."""
    given: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name in _COUNTS and value.isdecimal() and len(value) < 7:
            given[name] = int(value)
        elif name in _WORDS and value:
            given[name] = value
        else:
            allowed = ", ".join((*_COUNTS, *_WORDS))
            raise LayoutError(f"{word!r}: must be NAME=VALUE with NAME one of {allowed}")
    if "dp_shard" not in given and "sharding" not in given:
        given["sharding"] = "ddp"
    return Layout(world_size=world, **given)
