"""Print the environment, layout and forecast of a recommendation; the pages use the same words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import Grid, make_table, mark, print_bullet, print_indented, print_properties
from contracts.layout import Layout
from planner.advice import RankedLayout, Recommendation

FIRST_SETTINGS = 3
FIRST_ROWS = ("speed", "time", "cost", "memory")
OPTIONS = ("--steps, --tokens, --epochs or --hours", "--price")
Rows = list[tuple[str, str]]
_SAME = 1.01  # times slower: less is not shown
MORE = "More: --explain (reasons, other layouts, pod needs), -o env, -o k8s (settings)"


def print_recommendation(out: Console, advice: Recommendation, *, brief: bool = False) -> None:
    """Print the layout with its forecast, then the settings; unless `brief`, also reasons and other layouts."""
    if advice.chosen is None and advice.model is not None:
        _print_no_layout(out, advice)
    elif brief:
        _print_brief(out, advice)
    elif advice.chosen is not None:
        _print_layout(out, advice, advice.chosen)
    if not brief:
        _print_environment(out, advice)


def _print_environment(out: Console, advice: Recommendation) -> None:
    """Print the settings with their reasons, and what the pod needs."""
    out.print("\n[bold]Environment[/bold]")
    for setting in advice.settings:
        out.print(f"[bold]{escape(f'{setting.name}={setting.value}')}[/bold]", overflow="fold")
        print_indented(out, escape(setting.reason.rule), 4)
        print_indented(out, f"[dim]{escape(setting.reason.evidence)}[/dim]", 4)
    if not advice.settings:
        out.print("No variable is recommended.")
    for note in advice.notes:
        print_bullet(out, "·", f"[bold]{escape(note.topic)}[/bold]: {escape(note.text)}")
    for need in advice.needs:
        text = f"the pod needs {describe_need(need.name, need.value)}: {need.reason.rule}"
        print_bullet(out, "·", escape(text))


def describe_need(name: str, value: str) -> str:
    """Describe a pod's requirement: "2.0 GiB of shared memory (/dev/shm)", "memlock = unlimited"."""
    if name == "shm_bytes" and value.isdigit():
        return f"{units.size(float(value))} of shared memory (/dev/shm)"
    if name == "compute_domain":
        return f"a ComputeDomain ({value})"
    return f"{name} {value}" if name in ("resource", "network", "capability") else f"{name} = {value}"


def _print_brief(out: Console, advice: Recommendation) -> None:
    """Print layout, speed, hours, cost, memory and the first settings."""
    rows = []
    if advice.chosen is not None:
        _print_title(out, advice, advice.chosen)
        rows = [row for row in list_layout_properties(advice, advice.chosen) if row[0] in FIRST_ROWS]
    else:
        sentence = f"set {units.count(len(advice.settings), 'variable')}" if advice.settings else "nothing to set"
        glyph = "?" if any(note.topic == "RCCL" for note in advice.notes) else "✓"
        out.print(f"Environment: {glyph} {sentence} → add --model for a layout, its speed and cost")
    shown = [f"{setting.name}={shlex.quote(setting.value)}" for setting in advice.settings]
    hidden = len(shown) - FIRST_SETTINGS
    if shown:
        rows.append(("set", " ".join(shown[:FIRST_SETTINGS]) + (f" and {hidden} more (-o env)" if hidden > 0 else "")))
    print_properties(out, rows)
    for note in advice.notes:
        if note.topic in ("platform", "RCCL"):  # the provider's script, or that nothing is known
            print_bullet(out, "!", escape(note.text.split(". ")[0].rstrip(".") + ". Reasons: --explain"))
    _print_remarks(out, advice)
    out.print(f"[dim]{MORE}[/dim]")


def _print_title(out: Console, advice: Recommendation, ranked: RankedLayout) -> None:
    model, train, job = advice.model, advice.train, "the model"
    if model and train:
        job = f"{model.name} (method {train.method}, sequence length {train.sequence_length:,})"
    if ranked.why:
        print_bullet(out, "!", escape(ranked.why))
    glyph = mark("unknown", "?") if ranked.forecast.may_not_fit else mark("pass", "✓")
    out.print(f"[bold]Layout[/bold] for {escape(job)}: {glyph} {format_layout(ranked.layout)}")


def _print_remarks(out: Console, advice: Recommendation) -> None:
    remarks = {"!": describe_cost_of_faults(advice), "→": advice.helps_most, "?": advice.unknowns}
    for glyph, lines in remarks.items():
        for line in lines:
            print_bullet(out, glyph, escape(line))


def parts_grid(layouts: Sequence[RankedLayout]) -> Grid:
    """Return the parts of step time and memory; for several layouts each part has the layout's name."""
    rows = [
        (*([ranked.layout.family] if len(layouts) > 1 else []), part.name, show(part.value), part.detail)
        for ranked in layouts
        for parts, show in ((ranked.forecast.time_parts, units.seconds), (ranked.forecast.memory_parts, units.size))
        for part in parts
    ]
    return Grid(columns=(*(["layout"] if len(layouts) > 1 else []), "part", "value", "how"), rows=tuple(rows))


def device_of(advice: Recommendation) -> str:
    """Return the device whose memory a rank uses: its GPU, or without a GPU the rank's share of the host."""
    return "rank" if advice.backend == "gloo" else "GPU"


def _print_no_layout(out: Console, advice: Recommendation) -> None:
    """Print why no layout fits or is forecast, and what would help."""
    unsupported = f"[bold]? No layout: {advice.unsupported} are not supported[/bold]"
    out.print(unsupported if advice.unsupported else "[bold red]No layout fits[/bold red]")
    print_rejected(out, advice)
    if advice.backend == "gloo":
        print_bullet(out, "?", "no GPU was found: the layouts are for CPUs. --machine names another machine")
    for help_ in advice.helps_most:
        print_bullet(out, "→", escape(help_))


def _print_layout(out: Console, advice: Recommendation, chosen: RankedLayout) -> None:
    """Print the chosen layout, the next best ones, the rejected ones, and the parts of the forecast."""
    out.print()
    _print_title(out, advice, chosen)
    print_properties(out, list_layout_properties(advice, chosen))
    for ranked in advice.runners_up[:3]:
        out.print(f"  {format_layout(ranked.layout)}")
        memory = units.interval(ranked.forecast.memory_bytes, "B")
        step = units.interval(ranked.forecast.step_seconds, "s")
        print_bullet(out, "   ", f"step {step}, memory {memory} per {device_of(advice)}; {escape(ranked.why)}")
    print_rejected(out, advice)
    _print_remarks(out, advice)
    out.print(make_table(parts_grid([chosen])))
    for line in chosen.forecast.inputs:
        out.print(f"· {escape(line)}")


def list_layout_properties(advice: Recommendation, ranked: RankedLayout, options: tuple[str, str] = OPTIONS) -> Rows:
    """Return speed, time, cost and memory, then the batch and the bottleneck, each with its name.

    `options` name what the user adds to get run time and cost: the length of the run, and the price.
    """
    forecast, device = ranked.forecast, device_of(advice)
    lines = [("speed", f"step {units.interval(forecast.step_seconds, 's')}: {describe_speed(advice, ranked)}")]
    if advice.total_seconds is not None:
        total = advice.total_seconds
        low, mid, high = (units.duration(value) for value in (total.low, total.mid, total.high))
        lines.append(("time", f"{mid} ({low} to {high}) for {advice.total_steps:,} steps"))
    else:
        lines.append(("time", f"not estimated. Add {options[0]}."))
    if advice.total_cost is not None:
        cost = advice.total_cost
        range_ = f"({cost.low:,.2f} to {cost.high:,.2f})"
        lines.append(("cost", f"{cost.mid:,.2f} {range_} at {advice.node_hour_price:,.2f} a node-hour"))
    else:
        missing = [options[1]] if advice.node_hour_price is None else []
        missing += [options[0]] if advice.total_seconds is None else []
        lines.append(("cost", f"not estimated. Add {' and '.join(missing)}."))
    lines.append(("memory", f"{describe_memory(ranked)} per {device}"))
    lines.append(("batch", describe_batch(ranked.layout)))
    lines.append(("bottleneck", forecast.dominant))
    return lines


def describe_speed(advice: Recommendation, ranked: RankedLayout) -> str:
    """Return the tokens per second of a layout, also per device, and its MFU if that is known."""
    forecast = ranked.forecast
    mfu = f", MFU {forecast.mfu:.0%}" if forecast.mfu is not None else ""
    each = f"{forecast.tokens_per_second_per_rank:,.0f} per {device_of(advice)}"
    return f"{forecast.tokens_per_second:,.0f} tokens/s, {each}{mfu}"


def describe_memory(ranked: RankedLayout) -> str:
    """Return the memory that a layout needs on one device, and the capacity of the device if that is known."""
    capacity = ranked.forecast.capacity_bytes
    return units.interval(ranked.forecast.memory_bytes, "B") + (f" of {units.size(capacity)}" if capacity else "")


def describe_batch(shape: Layout) -> str:
    """Describe the batch: "64 sequences a step: micro-batch 4 on 16 data-parallel ranks"."""
    times = shape.gradient_accumulation
    often = "" if times == 1 else f", {times} times before each optimizer step (gradient accumulation)"
    ranks = units.count(shape.data_parallel, "data-parallel rank")
    return f"{units.count(shape.global_batch, 'sequence')} a step: micro-batch {shape.micro_batch} on {ranks}{often}"


def describe_cost_of_faults(advice: Recommendation) -> tuple[str, ...]:
    """Return the time these nodes lose compared with healthy ones, and the findings that cause it; empty if healthy."""
    ranked, healthy = advice.chosen, advice.healthy
    if ranked is None or not advice.slowed:
        return ()
    if healthy is None:
        text = "The forecast is for these nodes with their faults. `topoflight scan` says what they cost."
        return (text, *advice.slowed)
    times = healthy.forecast.tokens_per_second / ranked.forecast.tokens_per_second
    sentence = f"With their faults these nodes are {describe_slowdown(times)} than healthy nodes"
    if advice.total_seconds is not None and times >= _SAME:
        sentence += f": +{units.duration(advice.total_seconds.mid * (1.0 - 1.0 / times))}"
    step = units.seconds(healthy.forecast.step_seconds.mid)
    return (f"{sentence}. On healthy nodes {healthy.layout.family} takes {step} a step.", *advice.slowed)


def describe_slowdown(times: float) -> str:
    """Describe how much slower it is: "3.0 times slower", "12% slower", "no slower"."""
    if times < _SAME:
        return "no slower"
    return f"{times:.1f} times slower" if times >= 1.5 else f"{times - 1.0:.0%} slower"


def format_layout(shape: Layout) -> str:
    """Return all settings of a layout, in a line of markup."""
    return f"[bold]{shape.family}[/bold], {describe_layout(shape)}"


def describe_layout(shape: Layout) -> str:
    """Return all settings of a layout but its family: "16 ranks, micro-batch 2 x 4, no recompute, bf16"."""
    recompute = {"none": "no recompute"}.get(shape.checkpointing, f"{shape.checkpointing} recompute")
    not_resharded = shape.sharding == "zero3" and shape.dp_shard > 1 and not shape.reshard_after_forward
    offloaded = {"optimizer": ", optimizer offloaded to the CPU", "all": ", weights and optimizer offloaded to the CPU"}
    batch = f"micro-batch {shape.micro_batch} x {shape.gradient_accumulation}"
    how = f"{'no reshard, ' * not_resharded}{recompute}, {shape.precision}{offloaded.get(shape.offload, '')}"
    return f"{shape.world_size} ranks, {batch}, {how}"


def print_rejected(out: Console, advice: Recommendation) -> None:
    """Print the families that were rejected, with the rule that rejected them."""
    if advice.rejected:
        rows = tuple((item.what, item.reason) for item in advice.rejected[:12])
        out.print(make_table(Grid(columns=("rejected", "because"), rows=rows)))
