"""Score the forecast against published training runs, `make forecast` or `python bench/forecast.py [ROWS.csv ...]`.

Every source is forecast with itself left out: the fitted constants are fitted on the other sources alone, a stack of
which no other source has rows is a stack nobody knows, and the interval's width comes from the other sources' errors.
Printed per source and in total: rows that the reader could not place, the error of the step time without and with one
measured scalar per (framework, GPU, precision), how many measured times lie in the 80 % interval, how much slower the
layout ranked first is than the best one published, the error of the memory by method, out-of-memory rows that were
called safe, and rows that ran and were refused.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rows import Row, Unread, read_rows
from stacks import unknown_stack

from contracts.layout import Checkpointing, Layout, Precision
from planner.explain import SIGMA_CALIBRATED, Z80, sigma_of
from planner.forecast.compute import DEFAULT, Constants, gpu_rates
from planner.forecast.memory import DEFAULT_MEMORY, memory_parts
from planner.forecast.step_time import Job, StepParts, step_parts
from planner.search import search

CORPUS = Path(os.environ.get("TOPOFLIGHT_CORPUS", Path(__file__).resolve().parents[2] / "shared" / "corpus"))
FILES = ("published.csv", "published2.csv")

# Fitted on published rows; all others are read off data sheets, kernels or papers (docs/model.md).
FITTED = (
    "sustained_ampere", "sustained_hopper", "sustained_blackwell", "fp8_share", "attention_ampere", "attention_hopper",
    "attention_hopper_3", "attention_blackwell", "attention_flash1", "score_passes", "hidden_passes_fused",
    "hidden_passes_compiled", "hidden_passes_eager", "tp_hidden", "overlap_loss",
)  # fmt: skip

# Where a fit starts and what it is drawn to: round figures that rest on no published training run. One sustained share
# for every GPU; attention as the FlashAttention papers print it over the GPU's best multiplication.
PRIOR = replace(
    DEFAULT, sustained_ampere=0.85, sustained_hopper=0.85, sustained_blackwell=0.85, fp8_share=1.0,
    attention_ampere=0.65, attention_hopper=0.43, attention_hopper_3=0.65, attention_blackwell=0.60,
    attention_flash1=0.5, score_passes=5.0, hidden_passes_fused=10.0, hidden_passes_compiled=14.0,
    hidden_passes_eager=20.0, tp_hidden=0.5, overlap_loss=0.15,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the planner says about one row."""

    row: Row
    seconds: float
    sigma: float  # of log time
    memory_bytes: float
    safe: bool
    refused: bool  # it would not fit in any way that the row leaves open

    @property
    def ratio(self) -> float:
        """Forecast over measured time."""
        return self.seconds / (self.row.seconds or math.nan)

    @property
    def scored(self) -> bool:
        """Whether its time can be scored."""
        return bool(self.row.seconds) and not self.row.set_aside


# --- One row.


def _heavier(row: Row, layout: Layout) -> list[Layout]:
    """The layout, and the same with more recomputed, where the row does not say how much was."""
    if row.checkpointing is not None:
        return [layout]
    kinds: tuple[Checkpointing, ...] = ("none", "selective", "full")
    more = kinds[kinds.index(layout.checkpointing) :]
    return [replace(layout, checkpointing=kind) for kind in more if kind in row.stack.engine.checkpointing] or [layout]


def _needed(row: Row, layout: Layout) -> float:
    return memory_parts(row.model, row.train, layout, row.stack.engine).total


# A row that ran did not recompute more than its memory asked for; what is forecast to be this much larger than the card
# did not fit without.
CERTAINLY_TOO_LARGE = 1.3


def as_run(row: Row) -> Layout:
    """The row's layout; where recomputation was not published, what the stack does by itself, or the lightest that may
    have fitted."""
    if row.checkpointing is not None:
        return row.layout
    choice = row.stack.default_checkpointing
    if row.stack.engine.name == "litgpt" and row.layout.world_size > 1:
        choice = "full"  # its FSDP strategy checkpoints every block
    if row.stack.engine.name == "torchtune" and row.train.method != "qlora":
        choice = "none"  # its tables give the larger card the faster run without it; QLoRA's is for the least memory
    options = _heavier(row, replace(row.layout, checkpointing=choice))
    most = CERTAINLY_TOO_LARGE * row.gpu.memory_bytes
    return next((option for option in options if _needed(row, option) <= most), options[-1])


def _job(row: Row, precision: Precision, constants: Constants) -> Job:
    engine = row.stack.engine
    rates = gpu_rates(row.gpu, row.train, engine, precision, constants)
    return Job(model=row.model, train=row.train, links=row.links, rates=rates, engine=engine, constants=constants)


def searched(row: Row, constants: Constants = DEFAULT) -> Layout:
    """The layout of a row that publishes none: what the planner would run with this batch."""
    engine = row.stack.engine
    able = replace(row, stack=replace(row.stack, engine=replace(engine, methods=frozenset({"full", "lora", "qlora"}))))
    found = search(
        _job(able, row.precision, constants), world=row.layout.world_size, global_batch=row.layout.global_batch,
        precision=row.precision, capacity=row.gpu.memory_bytes,
    )  # fmt: skip
    return found.best[0].layout if found.best else row.layout


def _parts(job: Job, row: Row, layout: Layout) -> StepParts:
    if row.recompute_share is None:
        return step_parts(job, layout)
    none = step_parts(job, replace(layout, checkpointing="none"))
    full = step_parts(job, replace(layout, checkpointing="full"))
    return StepParts(*(a + (b - a) * row.recompute_share for a, b in zip(none, full, strict=True)))


def seconds_of(row: Row, layout: Layout, constants: Constants) -> tuple[float, float, float]:
    """Seconds, the links' part of sigma with that of the device, and half the distance of the precisions left open."""
    times, sigma = [], 0.0
    for precision in row.precisions:
        at = layout if precision == layout.precision else replace(layout, precision=precision)
        job = _job(row, precision, constants)
        parts = _parts(job, row, at)
        times.append(parts.total)
        sigma = max(sigma, sigma_of(job, at, parts, calibrated=False))
    return math.sqrt(min(times) * max(times)), sigma, math.log(max(times) / min(times)) / 2.0


def answer(row: Row, layout: Layout, constants: Constants = DEFAULT) -> Answer:
    """Forecast one row."""
    engine = row.stack.engine
    seconds, sigma, apart = seconds_of(row, layout, constants)
    printed = fullest = memory_parts(row.model, row.train, layout, engine)
    if row.first_stage:
        printed = memory_parts(row.model, row.train, layout, engine, first_stage=True)
    memory = printed.tensors if row.memory_kind == "tensors" else printed.total
    if row.memory_kind == "reserved":
        memory -= printed.context
    safe = DEFAULT_MEMORY.safe_share * row.gpu.memory_bytes
    return Answer(
        row=row,
        seconds=seconds,
        sigma=math.hypot(sigma, apart),
        memory_bytes=memory,
        safe=fullest.total <= safe,
        refused=all(_needed(row, option) > safe for option in _heavier(row, layout)),
    )


# --- The fit.


class Fit:
    """Rows to fit on, each forecast anew only for constants that it depends on."""

    def __init__(self, pairs: Sequence[tuple[Row, Layout]]) -> None:
        self.pairs = [
            (row, layout) for row, layout in pairs if row.seconds and not row.set_aside and not row.assumed_much
        ]
        self.sources = [row.source for row, _ in self.pairs]
        self.start = [self._error(i, PRIOR) for i in range(len(self.pairs))]
        self.touched = {name: self._touched(name) for name in FITTED}

    def _error(self, i: int, constants: Constants) -> float:
        row, layout = self.pairs[i]
        return math.log(seconds_of(row, layout, constants)[0] / (row.seconds or math.nan))

    def _touched(self, name: str) -> list[int]:
        value = getattr(PRIOR, name)
        trials = [replace(PRIOR, **{name: value * factor}) for factor in (0.6, 1.0 / 0.6)]
        return [i for i, was in enumerate(self.start) if any(abs(self._error(i, t) - was) > 1e-9 for t in trials)]

    def without(self, source: str | None, passes: int = 5) -> Constants:
        """The constants fitted on all sources but one: coordinate descent from `PRIOR`."""
        used = [i for i, s in enumerate(self.sources) if s != source]
        members: dict[str, list[int]] = defaultdict(list)
        for i in used:
            members[self.sources[i]].append(i)
        shares = {s: math.sqrt(len(m)) for s, m in members.items()}
        whole = sum(shares.values())
        weight = {i: shares[self.sources[i]] / whole / len(members[self.sources[i]]) for i in used}
        kept = set(used)
        touched = {name: [i for i in rows if i in kept] for name, rows in self.touched.items()}

        def cost(i: int, error: float) -> float:  # each row's share is capped: one that is not understood moves nothing
            return weight[i] * min(abs(error), 0.35)

        best, errors = PRIOR, {i: self.start[i] for i in used}
        step = 0.15
        for _ in range(passes):
            for name in FITTED:
                for factor in (1.0 + step, 1.0 / (1.0 + step)):
                    value = getattr(best, name) * factor
                    if name in ("tp_hidden", "overlap_loss") and value > 0.95:
                        continue
                    trial = replace(best, **{name: value})
                    new = {i: self._error(i, trial) for i in touched[name]}
                    gain = sum(cost(i, errors[i]) - cost(i, new[i]) for i in new)
                    # drawn to the starting values
                    gain += 0.02 * (_moved(best, name) - _moved(trial, name))
                    if gain > 1e-6:
                        best, errors = trial, errors | new
                        break
            step *= 0.6
        return best


def _moved(constants: Constants, name: str) -> float:
    return float(math.log(getattr(constants, name) / getattr(PRIOR, name)) ** 2)


# --- Left out.


def tied(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """The stacks of which one source alone has rows, by source: its structural choices, left out with it."""
    sources: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.stack.known:
            sources[row.stack.engine.name].add(row.source)
    alone: dict[str, list[str]] = defaultdict(list)
    for engine, of in sources.items():
        if len(of) == 1:
            alone[next(iter(of))].append(engine)
    return {source: tuple(engines) for source, engines in alone.items()}


def unknown_to_others(row: Row, engines: Collection[str]) -> Row:
    """The row as a planner reads it that never heard of its stack."""
    if row.stack.engine.name not in engines:
        return row
    stack = unknown_stack(row.raw)
    return replace(row, stack=stack, layout=stack.engine.as_run(row.layout))


def left_out(rows: Sequence[Row], say: Callable[[str], None]) -> list[Answer]:
    """Each source forecast by constants and stacks that never saw it."""
    engines = tied(rows)
    fit = Fit([(row, as_run(row)) for row in rows])
    out = []
    for source in dict.fromkeys(row.source for row in rows):
        constants = fit.without(source) if source in fit.sources else fit.without(None)
        for row in (unknown_to_others(r, engines.get(source, ())) for r in rows if r.source == source):
            out.append(answer(row, searched(row, constants) if "layout" in row.assumed else as_run(row), constants))
        say(f"left out {source}")
    return out


def as_shipped(rows: Sequence[Row]) -> list[Answer]:
    """Every row by the constants and stacks that the planner ships."""
    return [answer(row, searched(row) if "layout" in row.assumed else as_run(row)) for row in rows]


# --- Scores.


def _family(row: Row) -> tuple[str, str, str]:
    return row.framework, row.gpu.name, row.precision


def with_scalar(answers: Sequence[Answer]) -> list[float]:
    """Ratios after one scalar per family, learnt on the family's other rows (never on the row itself)."""
    families: dict[tuple[str, str, str], list[Answer]] = defaultdict(list)
    for one in answers:
        families[_family(one.row)].append(one)
    out = []
    for members in families.values():
        logs = [math.log(m.ratio) for m in members]
        for i, log in enumerate(logs):
            others = logs[:i] + logs[i + 1 :]
            if others:
                out.append(math.exp(log - statistics.median(others)))
    return out


def error(ratios: Sequence[float]) -> float:
    """Mean absolute relative error."""
    return statistics.mean(abs(r - 1.0) for r in ratios) if ratios else math.nan


def coverage(answers: Sequence[Answer]) -> float:
    """Share of measured times inside the 80 % interval."""
    inside = [abs(math.log(a.ratio)) <= Z80 * a.sigma for a in answers]
    return statistics.mean(inside) if inside else math.nan


def coverage_with_scalar(ratios: Sequence[float]) -> float:
    """The same for the calibrated interval."""
    inside = [abs(math.log(r)) <= Z80 * SIGMA_CALIBRATED for r in ratios]
    return statistics.mean(inside) if inside else math.nan


_SAME = ("source", "framework", "model", "params_b", "kind", "seq", "gpu", "world", "gbs", "precision", "compile",
         "lora_rank", "layers", "hidden", "heads")  # fmt: skip


def regrets(answers: Sequence[Answer]) -> list[tuple[float, str, int]]:
    """Per group of rows that differ only in their layout: how much slower the one ranked first is than the best."""
    groups: dict[tuple[str, ...], list[Answer]] = defaultdict(list)
    for one in answers:
        groups[tuple(one.row.raw.get(name) or "" for name in _SAME)].append(one)
    out = []
    for key, members in groups.items():
        if len({m.row.layout for m in members}) < 2 or len(members) < 2:
            continue
        first = min(members, key=lambda m: m.seconds)
        best = min(m.row.seconds or math.inf for m in members)
        out.append(
            ((first.row.seconds or math.inf) / best - 1.0, f"{key[0]}: {key[2]} on {key[7]} {key[6]}", len(members))
        )
    return out


# --- Tables.


def _print_table(title: str, lines: Sequence[tuple[str, ...]]) -> None:
    print(f"\n## {title}\n")
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for n, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |")
        if n == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _by_source(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = defaultdict(list)
    for one in answers:
        found[one.row.source].append(one)
    return found


def mean_of_sources(answers: Sequence[Answer], score: Callable[[Sequence[Answer]], float], least: int = 10) -> float:
    """A score of each source with at least so many rows, averaged."""
    scores = [score(members) for members in _by_source(answers).values() if len(members) >= least]
    known = [value for value in scores if not math.isnan(value)]
    return statistics.mean(known) if known else math.nan


def print_rows(answers: Sequence[Answer], unread: Sequence[Unread]) -> None:
    """What was read, and what was not and why."""
    missed = Counter(u.source for u in unread)
    groups = _by_source(answers)
    lines = [("source", "rows", "not placed", "time scored", "time set aside", "memory", "out of memory")]
    for source in [*dict.fromkeys([*groups, *missed]), "all"]:
        members = groups.get(source, []) if source != "all" else list(answers)
        failed = missed[source] if source != "all" else len(unread)
        lines.append((
            source, str(len(members) + failed), str(failed), str(sum(a.scored for a in members)),
            str(sum(bool(a.row.seconds and a.row.set_aside) for a in members)),
            str(sum(a.row.memory_bytes is not None for a in members)), str(sum(a.row.out_of_memory for a in members)),
        ))  # fmt: skip
    _print_table("Rows", lines)
    print()
    for (source, why), count in Counter((u.source, u.why) for u in unread).most_common():
        print(f"not placed {count}: {source}: {why}")
    for why, count in Counter(a.row.set_aside for a in answers if a.row.seconds and a.row.set_aside).most_common():
        print(f"time set aside {count}: {why}")
    for gap, count in Counter(gap for a in answers for gap in a.row.assumed).most_common():
        print(f"assumed in {count}: {gap}")


def print_times(title: str, answers: Sequence[Answer]) -> None:
    """The table of step times."""
    groups = _by_source(answers)
    lines = [("source", "rows", "error", "median ratio", "in 80 %", "error, one scalar", "in 80 %, one scalar")]

    def ratios(members: Sequence[Answer]) -> list[float]:
        return [m.ratio for m in members]

    for source, members in [*groups.items(), ("all", list(answers))]:
        scaled = with_scalar(members)
        lines.append((
            source, str(len(members)), _percent(error(ratios(members))), f"{statistics.median(ratios(members)):.3f}",
            _percent(coverage(members)), _percent(error(scaled)), _percent(coverage_with_scalar(scaled)),
        ))  # fmt: skip
    large = sum(len(members) >= 10 for members in groups.values())
    scores: list[Callable[[Sequence[Answer]], float]] = [
        lambda m: error(ratios(m)), coverage, lambda m: error(with_scalar(m)),
        lambda m: coverage_with_scalar(with_scalar(m)),
    ]  # fmt: skip
    one, two, three, four = (_percent(mean_of_sources(answers, score)) for score in scores)
    lines.append(("mean of sources of 10 rows", str(large), one, "-", two, three, four))
    _print_table(title, lines)


def print_regret(answers: Sequence[Answer]) -> None:
    """The table of ranking regret."""
    found = regrets(answers)
    if not found:
        print("\nNo two rows differ only in their layout: no ranking to score.")
        return
    lines = [("groups", "rows", "mean regret", "worst", "worst group")]
    worst = max(found)
    lines.append((str(len(found)), str(sum(n for _, _, n in found)), _percent(statistics.mean(r for r, _, _ in found)),
                  _percent(worst[0]), worst[1]))  # fmt: skip
    _print_table("Ranking: layouts of the same job", lines)


def print_memory(answers: Sequence[Answer]) -> None:
    """The table of memory, by source and method, and what is called safe or refused."""
    groups: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for one in answers:
        for source in (one.row.source, "all"):
            for method in (one.row.train.method, "all"):
                groups[source, method].append(one)
    lines = [("source", "method", "rows", "error", "median ratio", "ran", "of them refused", "OOM rows", "called safe")]
    order = [*_by_source(answers), "all"]
    for source in order:
        for method in ("full", "lora", "qlora", "all"):
            members = groups.get((source, method), [])
            held = [a for a in members if a.row.memory_bytes]
            oom = [a for a in members if a.row.out_of_memory]
            if not members or (method == "all" and source != "all"):
                continue
            ratios = [a.memory_bytes / (a.row.memory_bytes or math.nan) for a in held]
            ran = [
                a for a in members if not a.row.out_of_memory and not a.row.set_aside and "layout" not in a.row.assumed
            ]
            lines.append((
                source, method, str(len(ratios)), _percent(error(ratios)),
                f"{statistics.median(ratios):.3f}" if ratios else "-", str(len(ran)), str(sum(a.refused for a in ran)),
                str(len(oom)), str(sum(a.safe for a in oom)),
            ))  # fmt: skip
    _print_table("Memory", lines)


def print_worst(answers: Sequence[Answer], count: int) -> None:
    """The rows that are furthest off."""
    lines = [("row", "source", "forecast / measured", "model", "GPUs", "layout", "method", "engine", "assumed")]
    for a in sorted(answers, key=lambda a: -abs(math.log(a.ratio)))[:count]:
        row, at = a.row, a.row.layout
        lines.append((
            row.row_id, row.source, f"{a.ratio:.2f}", row.model.name, f"{at.world_size} {row.gpu.name}",
            f"{at.family} mbs {at.micro_batch} s {row.train.sequence_length} {row.precision} {row.checkpointing}",
            row.train.method, row.stack.engine.name, " ".join(row.assumed),
        ))  # fmt: skip
    _print_table("Furthest off", lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", type=Path, default=[CORPUS / "layouts" / name for name in FILES])
    parser.add_argument("--as-shipped", action="store_true", help="in sample: shipped constants, nothing left out")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N rows furthest off")
    options = parser.parse_args(arguments)
    for file in options.rows:
        if not file.is_file():
            print(f"{file}: no such file (set TOPOFLIGHT_CORPUS or name a CSV)", file=sys.stderr)
            return 2
    started = time.perf_counter()
    rows, unread = read_rows(options.rows)
    alone = len({row.source for row in rows}) < 2  # nothing would be left to fit on
    answers = as_shipped(rows) if options.as_shipped or alone else left_out(rows, lambda s: print(s, file=sys.stderr))
    print_rows(answers, unread)
    scored = [a for a in answers if a.scored]
    if scored:
        if alone or options.as_shipped:
            print_times(
                "Step time, constants and stacks as shipped: in sample for the sources of docs/model.md", scored
            )
        else:
            print_times("Step time, each source left out", scored)
            for source, engines in tied(rows).items():
                print(f"left out with {source}: stack {', '.join(engines)}")
        print_regret(scored)
        mixtures = [a for a in scored if a.row.model.experts]
        if mixtures:
            print_times("Step time of mixtures of experts", mixtures)
    print_memory(answers)
    if options.worst:
        print_worst(scored, options.worst)
    print(f"\n{time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
