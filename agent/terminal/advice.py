"""Environment, layout and forecast on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from agent import units
from agent.terminal.tables import indented, point, table
from contracts.layout import Layout
from planner.advice import RankedLayout, Recommendation


def recommendation(out: Console, advice: Recommendation, *, explain: bool = False) -> None:
    """The layout with its forecast, then the settings with their reasons."""
    layout(out, advice)
    if explain and advice.chosen is not None:
        parts(out, advice.chosen)
    out.print("\n[bold]Environment[/bold]")
    if advice.settings:
        for setting in advice.settings:
            out.print(f"[bold]{escape(f'{setting.name}={setting.value}')}[/bold]", overflow="fold")
            indented(out, escape(setting.reason.rule), 4)
            indented(out, f"[dim]{escape(setting.reason.evidence)}[/dim]", 4)
    else:
        out.print("set nothing: NCCL finds by itself what this machine has")
    for note in advice.notes:
        point(out, "·", f"[bold]{escape(note.topic)}[/bold]: {escape(note.text)}")
    for need in advice.needs:
        point(out, "·", f"the pod needs {escape(units.need(need.name, need.value))}: {escape(need.reason.rule)}")


def parts(out: Console, ranked: RankedLayout) -> None:
    """The forecast part by part, and every number it rests on."""
    rows = table("part", "value", "how")
    for part in ranked.forecast.time_parts:
        rows.add_row(part.name, units.seconds(part.value), escape(part.detail))
    for part in ranked.forecast.memory_parts:
        rows.add_row(part.name, units.size(part.value), escape(part.detail))
    out.print(rows)
    for line in ranked.forecast.inputs:
        out.print(f"· {escape(line)}")


def device_of(advice: Recommendation) -> str:
    """What holds a rank's memory: its GPU, or the host's share of a rank where there is none."""
    return "rank" if advice.backend == "gloo" else "GPU"


def layout(out: Console, advice: Recommendation) -> None:
    """The chosen layout, the runners-up and what was turned down."""
    if advice.chosen is None:
        if advice.model is not None:
            out.print("\n[bold red]No layout fits[/bold red]")
            rejected(out, advice)
        return
    chosen = advice.chosen
    out.print(f"\n[bold]Layout[/bold] for {advice.model.name if advice.model else 'the model'}")
    for ranked in (chosen, *advice.runners_up[:3]):
        mark = "[green]✓[/green]" if ranked is chosen else " "
        out.print(f"{mark} {layout_title(ranked.layout)}")
        memory = units.interval(ranked.forecast.memory_bytes, "B")
        point(
            out,
            "   ",
            f"step {units.interval(ranked.forecast.step_seconds, 's')}, memory {memory} per {device_of(advice)}",
        )
        point(out, "   ", escape(ranked.forecast.dominant if ranked is chosen else ranked.why))
    for line in as_it_is(advice):
        point(out, "!", escape(line))
    if advice.total_seconds is not None:
        out.print(f"the whole run: {advice.total_steps} steps, {units.hours(advice.total_seconds)}")
    rejected(out, advice)
    for help_ in advice.helps_most:
        point(out, "→", escape(help_))
    for unknown in advice.unknowns:
        point(out, "?", escape(unknown))


def as_it_is(advice: Recommendation) -> tuple[str, ...]:
    """What these nodes lose against sound ones: "as it is 3.0 times slower: +3 h 20 min", and by which findings."""
    chosen, sound = advice.chosen, advice.sound
    if chosen is None or not advice.slowed:
        return ()
    if sound is None:
        return ("as it is; what sound nodes do is not known: no rate of their RDMA can be read", *advice.slowed)
    rate = sound.forecast.tokens_per_second
    times = rate / chosen.forecast.tokens_per_second
    words = f"as it is {slower(times)} than sound nodes"
    if advice.total_seconds is not None and times >= _SAME:
        words += f": +{units.duration(advice.total_seconds.mid * (1.0 - 1.0 / times))}"
    words += f"; mended {sound.layout.family} takes {units.seconds(sound.forecast.step_seconds.mid)} a step"
    if advice.sound_here is not None and advice.sound_here.layout != chosen.layout:
        words += f", here {slower(rate / advice.sound_here.forecast.tokens_per_second)}"
    return (words, *advice.slowed)


_SAME = 1.01


def slower(times: float) -> str:
    """ "3.0 times slower", "12% slower", "no slower"."""
    if times < _SAME:
        return "no slower"
    return f"{times:.1f} times slower" if times >= 1.5 else f"{times - 1.0:.0%} slower"


def layout_title(shape: Layout) -> str:
    """Everything that tells one layout from another, in a line of markup."""
    recompute = {"none": "no recompute"}.get(shape.checkpointing, f"{shape.checkpointing} recompute")
    offload = "" if shape.offload == "none" else f", {shape.offload} offloaded to the CPU"
    return (
        f"[bold]{shape.family}[/bold], {shape.world_size} ranks, micro-batch {shape.micro_batch} x "
        f"{shape.gradient_accumulation}, {recompute}, {shape.precision}{offload}"
    )


def rejected(out: Console, advice: Recommendation) -> None:
    """Families that were turned down, with the rule that did it."""
    if advice.rejected:
        rows = table("turned down", "because")
        for item in advice.rejected[:12]:
            rows.add_row(escape(item.what), escape(item.reason))
        out.print(rows)
