"""Runs and benchmarks as the pages and the terminal show them: those of one job side by side, each with its network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agent.base import units
from agent.base.result_store import Line
from contracts.run_record import RunRecord

_GLOO = re.compile(r"gloo: TCP over (.+) \(")  # "gloo: TCP over net1 (10.0.0.1)" (docs/reference/finetune-job.md)
LEAST_STEPS = 3  # a median of fewer is one of the values, or the mean of two: no typical step
SHOWN_BARS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One bar of a comparison: what ran, and the number it got."""

    label: str  # "RDMA", "TCP on net1"
    value: float  # seconds, or bytes per second
    shown: str  # the number as people read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Runs side by side."""

    title: str
    runs: tuple[Run, ...]
    less_is_better: bool = True

    def rows(self) -> list[tuple[str, float, str]]:
        """Of each run its label, its share of the longest bar, and its number with the factor to the best."""
        values = [run.value for run in self.runs]
        full = max(values, default=1.0) or 1.0
        best = min(values, default=0.0) if self.less_is_better else full
        return [
            (run.label, run.value / full,
             run.shown + ("" if run.value == best or not best else f" ({run.value / best:.2f} x)"))
            for run in self.runs
        ]  # fmt: skip


def division(record: RunRecord) -> str:
    """What the step waits for longest, and seconds of each part; empty where nothing was profiled."""
    by_part = ", ".join(
        f"{part.words} {units.seconds(record.seconds_of(part))}"
        + (f" (forecast {units.seconds(part.forecast_seconds)})" if part.forecast_seconds is not None else "")
        for part in record.parts
    )
    overlap = "these parts overlap" if record.parts_overlap else ""
    return "; ".join(text for text in (record.worst, by_part, overlap) if text)


def transport_of(record: RunRecord) -> str:
    """The networks NCCL logged, without device numbers, or the backend; with the interface where it was TCP.

    "TCP over net1 (NET/Socket)", "RDMA (NET/IB/GDRDMA)", or "" where it was not reported.
    """
    seen = record.transports
    networks = ", ".join(sorted({re.sub(r"/\d+(?=/|$)", "", name) for name in seen if name.startswith("NET")}))
    if networks.startswith("NET/IB"):
        return f"RDMA ({networks})"
    backend = (record.layout.effective.backend if record.layout.effective else None) or ""
    if networks and networks != "NET/Socket":
        return networks
    if networks or backend == "gloo":
        return f"TCP over {_interface(record, networks)} ({networks or backend})"
    return backend


def _interface(record: RunRecord, networks: str) -> str:
    """Those that gloo's or NCCL's TCP was seen to take; what the environment set only where none was seen."""
    if networks:
        seen = record.nccl.interfaces if record.nccl else []
    else:
        seen = [found[1] for name in record.transports if (found := _GLOO.match(name))]
    if seen:
        return ", ".join(sorted(set(seen)))[:64]
    chosen = record.plan.environment.get("NCCL_SOCKET_IFNAME" if networks else "GLOO_SOCKET_IFNAME")
    return chosen[:64] if chosen else "the default network"


def by_network(records: Iterable[RunRecord]) -> tuple[Bars, ...]:
    """What the wire costs, as measured: complete runs of one model, layout and number of ranks, a bar per network.

    The newest run of each network counts that is long enough; none where fewer than two networks differ. What is left
    out, and why, is `not_drawn`.
    """
    newest: dict[str, dict[str, Run]] = {}  # by job and network
    for record in records:
        step = record.measured.step_seconds
        if step and not why_not_drawn(record):
            run = Run(label=transport_of(record), value=step, shown=f"{units.seconds(step)} a step")
            newest.setdefault(_job(record), {}).setdefault(run.label, run)
    return tuple(
        Bars(title=f"{job}: step time by network, measured",
             runs=tuple(sorted(runs.values(), key=lambda run: -run.value)))
        for job, runs in newest.items() if len(runs) > 1
    )  # fmt: skip


def _job(record: RunRecord) -> str:
    """What must be alike for two runs to be compared."""
    ranks = record.layout.effective.world_size if record.layout.effective else None
    named = (record.model.name, record.layout.family, f"{ranks} ranks" if ranks else None)
    return ", ".join(word for word in named if word)


def why_not_drawn(run: RunRecord) -> str:
    """What keeps a run from standing for its network; empty where nothing does."""
    if run.status != "complete":
        return f"its status is {run.status}, not complete"
    if not run.model.name or not run.measured.step_seconds:
        return "its record names no model or no step time"
    if not transport_of(run):
        return "its record names no transport"
    if run.counted_steps is not None and run.counted_steps < LEAST_STEPS:
        return (
            f"{run.counted_steps} of its {run.steps_done} steps count (warm-up and profiled steps do not), "
            f"{LEAST_STEPS} are needed"
        )
    return ""


def not_drawn(records: Iterable[RunRecord]) -> tuple[str, ...]:
    """Runs that are in no comparison by network, each with the reason."""
    rows = []
    networks: dict[str, set[str]] = {}
    for run in records:
        if why := why_not_drawn(run):
            name, started = run.model.name or "a run", run.started_at or "unknown time"
            rows.append(f"{name} of {started} is in no comparison: {why}")
        else:
            networks.setdefault(_job(run), set()).add(transport_of(run))
    for job, names in networks.items():
        if len(names) == 1:
            rows.append(f"{job}: all runs took one network, {min(names)}; a comparison needs two")
    return tuple(rows)


def bench_bars(lines: Sequence[Line], when: Callable[[float], str]) -> list[Bars]:
    """What the newest benchmark measured, over the earlier ones of the same job; `when` formats their times."""
    made = []
    for now in lines[0].largest if lines else ():
        bars = [
            Run(label=when(line.started_at_seconds), value=one.busbw_bytes_per_second,
                shown=units.rate(one.busbw_bytes_per_second))
            for line in lines if line.job == lines[0].job
            for one in line.largest if (one.op, one.size_bytes) == (now.op, now.size_bytes)
        ]  # fmt: skip
        if len(bars) > 1:
            title = f"{now.op} of {units.size(now.size_bytes)}, {lines[0].job}: bus bandwidth, newest first"
            made.append(Bars(title=title, runs=tuple(bars[:SHOWN_BARS]), less_is_better=False))
    return made
