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
import io
import math
import os
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from rows import Row, Unread, read_rows
from stacks import unknown_stack
from widths import LEAST_ROWS, Sample, inside, learn, write

from contracts.layout import EIGHT_BITS, Checkpointing, Layout, Precision
from hardware.gpus import Gpu
from planner.explain import FILE as INTERVALS
from planner.explain import SIGMA_MEMORY, Widths, interval, key_of, kinds_of, sigma_of_links, widths
from planner.forecast.compute import DEFAULT, Constants, gpu_rates
from planner.forecast.memory import DEFAULT_MEMORY, memory_parts
from planner.forecast.specs import weights
from planner.forecast.step_time import Job, StepParts, step_parts
from planner.search import SIGMA_PAIR, SIGMA_PAIR_SAME, TIGHT_SHARE, degrees_of, search
from planner.stacks import ENGINES

CORPUS = Path(os.environ.get("TOPOFLIGHT_CORPUS", Path(__file__).resolve().parents[2] / "shared" / "corpus"))
FILES = ("published.csv", "published2.csv")
# Multiplications in four bits are in no table: no faster than in eight, or as much as Blackwell's data sheet says.
FOUR_BITS = 2.0
LEAST_OF_A_SOURCE = 10  # rows, for its error to count in the mean of sources

# Fitted on published rows; all others are read off data sheets, kernels or papers (docs/explanation/forecast.md).
FITTED = (
    "sustained_ampere", "sustained_hopper", "sustained_blackwell", "attention_ampere", "attention_hopper",
    "attention_hopper_3", "attention_blackwell", "attention_flash1", "score_passes", "hidden_passes_fused",
    "hidden_passes_compiled", "hidden_passes_eager", "tp_hidden", "overlap_loss",
)  # fmt: skip

# Where a fit starts and what it is drawn to: round figures that rest on no published training run. One sustained share
# for every GPU; attention as the FlashAttention papers print it over the GPU's best multiplication.
PRIOR = replace(
    DEFAULT, sustained_ampere=0.85, sustained_hopper=0.85, sustained_blackwell=0.85,
    attention_ampere=0.65, attention_hopper=0.43, attention_hopper_3=0.65, attention_blackwell=0.60,
    attention_flash1=0.5, score_passes=5.0, hidden_passes_fused=10.0, hidden_passes_compiled=14.0,
    hidden_passes_eager=20.0, tp_hidden=0.5, overlap_loss=0.15,
)  # fmt: skip

# Read off published rows and not fitted: what each source says by itself, and what was taken without any of them. Left
# out, a source leaves the geometric mean of the others.
READ_OFF: dict[str, tuple[dict[str, float], float]] = {
    "dequantize_share": ({"litgpt": 0.24, "torchtune": 0.16, "Qwen README": 0.10}, 0.25),
    "misaligned": ({"BLOOM prequel (bigscience)": 1.25}, 1.0),
    # accounts of an eager operator's way from Python to the GPU sum to 5 to 25 us: the middle
    "launch_seconds": ({"Qwen README": 12e-6}, 11e-6),
}


def read_off_without(source: str) -> dict[str, float]:
    """Constants that were read off a source, as they are without it."""
    found = {}
    for name, (by_source, unseen) in READ_OFF.items():
        others = [value for of, value in by_source.items() if of != source]
        if source in by_source:
            found[name] = statistics.geometric_mean(others) if others else unseen
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the planner says about one row."""

    row: Row
    seconds: float
    extra: float  # standard deviation of log time by what nobody measured and the row leaves open
    kinds: tuple[str, ...]  # what its width goes by
    memory_bytes: float
    safe: bool  # it fits in every way that the row leaves open, and nothing is said of tight memory
    refused: bool  # it would not fit in any

    @property
    def ratio(self) -> float:
        """Forecast over measured time."""
        return self.seconds / (self.row.seconds or math.nan)

    @property
    def sample(self) -> Sample:
        """What a width is learned from."""
        return Sample(source=self.row.source, kinds=self.kinds, error=math.log(self.ratio), extra=self.extra)

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


def _ways(row: Row, layout: Layout) -> list[float]:
    """Bytes in each way that the row leaves open: what is recomputed; of frozen weights whether FP8's are stored so
    (Transformer Engine's fp8_model_init); of an unknown stack how the loss is made, and whether each rank holds the
    whole model while it loads its part."""
    layouts = _heavier(row, layout)
    if row.stack.known:
        found = [_needed(row, each) for each in layouts]
        if row.precision in EIGHT_BITS and row.train.method == "lora":
            frozen = memory_parts(row.model, row.train, layout, row.stack.engine).weights
            found += [needed - DEFAULT_MEMORY.fragmentation * frozen / 2.0 for needed in found]
        return found
    whole = 2.0 * weights(row.model).total / (layout.tp * layout.pp)
    loading = whole + memory_parts(row.model, row.train, layout, row.stack.engine).weights
    fused = [_needed(row, replace(each, fused_cross_entropy=True)) for each in layouts]
    return fused + [max(loading, _needed(row, replace(each, fused_cross_entropy=False))) for each in layouts]


# A row that ran did not recompute more than its memory asked for; what is forecast to be this much larger than the card
# did not fit without.
CERTAINLY_TOO_LARGE = 1.3


def as_run(row: Row) -> Layout:
    """The row's layout; where recomputation was not published, what the stack does by itself, or the lightest that may
    have fitted."""
    if row.checkpointing is not None:
        return row.layout
    choice = row.stack.default_checkpointing
    if row.layout.offload == "all":
        choice = "full"  # whoever moves the weights out, which costs more, has recomputed first: as the search does
    if row.stack.engine.name == "litgpt" and row.layout.world_size > 1:
        choice = "full"  # its FSDP strategy checkpoints every block
    if row.stack.engine.name == "torchtune" and row.train.method != "qlora":
        # Its tables give the larger card the faster run without it; QLoRA's is for the least memory.
        light = replace(row.layout, checkpointing="none")
        choice = "none" if _needed(row, light) <= row.gpu.memory_bytes else choice
    options = _heavier(row, replace(row.layout, checkpointing=choice))
    most = CERTAINLY_TOO_LARGE * row.gpu.memory_bytes
    return next((option for option in options if _needed(row, option) <= most), options[-1])


def _job(row: Row, precision: Precision, constants: Constants, gpu: Gpu | None = None) -> Job:
    engine = row.stack.engine
    rates = gpu_rates(gpu or row.gpu, row.train, engine, precision, constants)
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


def seconds_of(row: Row, layout: Layout, constants: Constants) -> tuple[float, float]:
    """Seconds, and what assumed links and a precision that the row leaves open add to sigma."""
    times, links = [], 0.0
    variants: list[tuple[Precision, Gpu]] = [(precision, row.gpu) for precision in row.precisions]
    if row.four_bits and row.gpu.matmul_fp8:
        variants.append(("fp8", replace(row.gpu, matmul_fp8=FOUR_BITS * row.gpu.matmul_fp8)))
    for precision, gpu in variants:
        at = layout if precision == layout.precision else replace(layout, precision=precision)
        job = _job(row, precision, constants, gpu)
        parts = _parts(job, row, at)
        times.append(parts.total)
        links = max(links, sigma_of_links(job, at, parts))
    return math.sqrt(min(times) * max(times)), math.hypot(links, math.log(max(times) / min(times)) / 2.0)


def answer(row: Row, layout: Layout, constants: Constants = DEFAULT, *, seen_gpu: bool = True) -> Answer:
    """Forecast one row."""
    engine = row.stack.engine
    seconds, extra = seconds_of(row, layout, constants)
    printed = memory_parts(row.model, row.train, layout, engine, first_stage=row.first_stage)
    memory = printed.tensors if row.memory_kind == "tensors" else printed.total
    if row.memory_kind == "reserved":
        memory -= printed.context
    ways, card = _ways(row, layout), row.gpu.memory_bytes
    return Answer(
        row=row,
        seconds=seconds,
        extra=extra,
        kinds=kinds_of(_job(row, row.precision, constants), seen_engine=row.stack.known, seen_gpu=seen_gpu),
        memory_bytes=memory,
        safe=interval(max(ways), SIGMA_MEMORY).high <= TIGHT_SHARE * card,
        refused=min(ways) > DEFAULT_MEMORY.safe_share * card,
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

    def without(self, rows: Collection[str], passes: int = 5) -> Constants:
        """The constants fitted on all rows but those of these names: coordinate descent from `PRIOR`."""
        used = [i for i, (row, _) in enumerate(self.pairs) if row.name not in rows]
        members: dict[str, list[int]] = defaultdict(list)
        for i in used:
            members[self.sources[i]].append(i)
        shares = {s: math.sqrt(len(m)) for s, m in members.items()}
        whole = sum(shares.values())
        weight = {i: shares[self.sources[i]] / whole / len(members[self.sources[i]]) for i in used}
        kept = set(used)
        touched = {name: [i for i in rows if i in kept] for name, rows in self.touched.items()}

        def cost(i: int, error: float) -> float:  # the further off, the less another step counts: robust to what is odd
            return weight[i] * 0.2 * math.log1p(abs(error) / 0.2)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Every source, and every generation of GPUs, forecast by what never saw it."""

    answers: list[Answer]
    engines: dict[str, str]  # of each row, by its name
    unseen_gpu: list[Answer]  # the same rows again, by constants fitted without any row of such a GPU


def left_out(rows: Sequence[Row], say: Callable[[str], None]) -> LeftOut:
    """Forecast each row by constants and stacks that never saw its source, and again that never saw its GPU."""
    engines = tied(rows)
    fit = Fit([(row, as_run(row)) for row in rows])
    apart = [unknown_to_others(row, engines.get(row.source, ())) for row in rows]

    def forecast(members: Iterable[Row], constants: Constants, *, seen_gpu: bool) -> list[Answer]:
        return [
            answer(row, searched(row, constants) if "layout" in row.assumed else as_run(row), constants,
                   seen_gpu=seen_gpu)
            for row in members
        ]  # fmt: skip

    everything = fit.without(())
    sources: list[Answer] = []
    for source in dict.fromkeys(row.source for row in rows):
        constants = everything
        if source in fit.sources:
            constants = fit.without({row.name for row in rows if row.source == source})
        constants = replace(constants, **read_off_without(source))
        sources += forecast((row for row in apart if row.source == source), constants, seen_gpu=True)
        say(f"left out {source}")
    gpus: list[Answer] = []
    for capability in dict.fromkeys(row.gpu.compute_capability for row in rows):
        constants = fit.without({row.name for row in rows if row.gpu.compute_capability == capability})
        gpus += forecast((row for row in apart if row.gpu.compute_capability == capability), constants, seen_gpu=False)
        say(f"left out GPUs of compute capability {capability}")
    return LeftOut(answers=sources, unseen_gpu=gpus, engines={row.name: row.stack.engine.name for row in rows})


def samples_of(answers: Iterable[Answer]) -> list[Sample]:
    """What widths are learned from: no row whose time depends on what the reader filled in."""
    return [a.sample for a in answers if a.scored and not a.row.assumed_much]


def learned(result: LeftOut, without: str | None = None) -> Widths:
    """The widths, of all sources or of all but one."""
    answers = [a for a in result.answers if a.scored and a.row.source != without]
    again = [a for a in result.unseen_gpu if a.scored and a.row.source != without]
    seen = Counter(result.engines[a.row.name] for a in answers)
    gpus = Counter(a.row.gpu.compute_capability for a in answers if a.row.gpu.compute_capability)
    known = [a for a in answers if not a.row.assumed_much]
    scaled = [
        Sample(source=a.row.source, kinds=(), error=math.log(ratio), extra=0.0) for a, ratio in with_scalar(known)
    ]
    return learn(
        samples_of([*answers, *again]), scaled,
        engines={name for name, count in seen.items() if name in ENGINES and count >= LEAST_OF_A_SOURCE},
        capabilities={capability for capability, count in gpus.items() if count >= LEAST_OF_A_SOURCE},
    )  # fmt: skip


def as_shipped(rows: Sequence[Row]) -> list[Answer]:
    """Every row by the constants and stacks that the planner ships."""
    return [answer(row, searched(row) if "layout" in row.assumed else as_run(row)) for row in rows]


# --- Scores.


def _family(row: Row) -> tuple[str, str, str]:
    return row.framework, row.gpu.name, row.precision


def with_scalar(answers: Sequence[Answer]) -> list[tuple[Answer, float]]:
    """Rows with their ratio after one scalar per family, learnt on the family's others (never on the row itself)."""
    families: dict[tuple[str, str, str], list[Answer]] = defaultdict(list)
    for one in answers:
        families[_family(one.row)].append(one)
    out = []
    for members in families.values():
        logs = [math.log(m.ratio) for m in members]
        for i, log in enumerate(logs):
            others = logs[:i] + logs[i + 1 :]
            if others:
                out.append((members[i], math.exp(log - statistics.median(others))))
    return out


def error(ratios: Sequence[float]) -> float:
    """Mean absolute relative error."""
    return statistics.mean(abs(r - 1.0) for r in ratios) if ratios else math.nan


Table = Callable[[str], Widths]  # by source


def covers(one: Answer, table: Table) -> bool:
    """Whether the measured time lies in its 80 % interval."""
    return inside(one.sample, table(one.row.source).sigma(one.kinds))


def coverage(answers: Sequence[Answer], table: Table) -> float:
    """Share of measured times inside the 80 % interval."""
    return statistics.mean(covers(a, table) for a in answers) if answers else math.nan


def coverage_with_scalar(scaled: Sequence[tuple[Answer, float]], table: Table) -> float:
    """The same for the calibrated interval."""
    held = [
        inside(Sample(source="", kinds=(), error=math.log(r), extra=0.0), table(a.row.source).calibrated)
        for a, r in scaled
    ]
    return statistics.mean(held) if held else math.nan


_SAME = ("source", "framework", "model", "params_b", "kind", "seq", "gpu", "world", "gbs", "precision", "compile",
         "lora_rank", "layers", "hidden", "heads")  # fmt: skip


def same_job(row: Row) -> tuple[str, ...]:
    """What rows have in common that differ in their layout only."""
    return tuple(row.raw.get(name) or "" for name in _SAME)


def regrets(answers: Sequence[Answer]) -> list[tuple[float, str, int]]:
    """Per group of rows that differ only in their layout: how much slower the one ranked first is than the best."""
    groups: dict[tuple[str, ...], list[Answer]] = defaultdict(list)
    for one in answers:
        groups[same_job(one.row)].append(one)
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


def mean_of_sources(answers: Sequence[Answer], score: Callable[[Sequence[Answer]], float]) -> float:
    """A score of each source with at least so many rows, averaged."""
    scores = [score(members) for members in _by_source(answers).values() if len(members) >= LEAST_OF_A_SOURCE]
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
    for why, count in Counter(re.sub(r"^model '.*?': ", "", u.why) for u in unread).most_common():
        print(f"- not placed {count}: {why}")
    for why, count in Counter(a.row.set_aside for a in answers if a.row.seconds and a.row.set_aside).most_common():
        print(f"- time set aside {count}: {why}")
    for gap, count in Counter(gap for a in answers for gap in a.row.assumed).most_common():
        print(f"- assumed in {count}: {gap}")


def _ratios(members: Sequence[Answer]) -> list[float]:
    return [m.ratio for m in members]


def print_times(title: str, answers: Sequence[Answer], table: Table) -> None:
    """The table of step times."""
    groups = _by_source(answers)
    lines = [("source", "rows", "error", "median ratio", "in 80 %", "error, one scalar", "in 80 %, one scalar")]
    scores: list[Callable[[Sequence[Answer]], float]] = [
        lambda m: error(_ratios(m)), lambda m: coverage(m, table), lambda m: error([r for _, r in with_scalar(m)]),
        lambda m: coverage_with_scalar(with_scalar(m), table),
    ]  # fmt: skip
    for source, members in [*groups.items(), ("all", list(answers))]:
        off, held, scaled, held_scaled = (_percent(score(members)) for score in scores)
        middle = f"{statistics.median(_ratios(members)):.3f}"
        lines.append((source, str(len(members)), off, middle, held, scaled, held_scaled))
    large = str(sum(len(members) >= LEAST_OF_A_SOURCE for members in groups.values()))
    off, held, scaled, held_scaled = (_percent(mean_of_sources(answers, score)) for score in scores)
    lines.append((f"mean of sources of {LEAST_OF_A_SOURCE} rows", large, off, "-", held, scaled, held_scaled))
    _print_table(title, lines)


def print_kinds(result: LeftOut, shipped: Widths, table: Table) -> None:
    """The table of widths: each combination, and each single mark, of enough rows."""
    answers = [a for a in (*result.answers, *result.unseen_gpu) if a.scored and not a.row.assumed_much]
    marks = sorted({kind for a in answers for kind in a.kinds})
    groups = {key_of(kinds): [a for a in answers if a.kinds == kinds] for kinds in sorted({a.kinds for a in answers})}
    groups |= {f"any: {mark}": [a for a in answers if mark in a.kinds] for mark in marks}
    lines = [("kind of job", "rows", "sources", "sigma", "in 80 %", "in 80 %, width of the other sources")]
    for name, members in groups.items():
        if len(members) >= LEAST_ROWS:
            sigma = shipped.kinds.get(name) or shipped.any_with.get(name.removeprefix("any: "))
            lines.append((
                name, str(len(members)), str(len(_by_source(members))), f"{sigma:.3f}" if sigma else "-",
                _percent(coverage(members, lambda _: shipped)), _percent(coverage(members, table)),
            ))  # fmt: skip
    lines.append(("one step of the stack measured", "", "", f"{shipped.calibrated:.3f}", "", ""))
    _print_table("Width of the interval by the kind of job", lines)


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


def print_memory(answers: Sequence[Answer], known: Sequence[Answer]) -> None:
    """The table of memory, by source and method, and what is called safe or refused.

    `known` are the same rows with the traits of their own stacks: no memory is fitted, so these are all that is left
    out.
    """
    by_traits = {a.row.name: a.memory_bytes for a in known}
    groups: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for one in answers:
        for source in (one.row.source, "all"):
            for method in (one.row.train.method, "all"):
                groups[source, method].append(one)
    lines = [("source", "method", "rows", "error", "median ratio", "error, stack known", "ran", "of them refused",
              "OOM rows", "called safe")]  # fmt: skip
    order = [*_by_source(answers), "all"]
    for source in order:
        for method in ("full", "lora", "qlora", "all"):
            members = groups.get((source, method), [])
            held = [a for a in members if a.row.memory_bytes]
            oom = [a for a in members if a.row.out_of_memory]
            if not (held or oom or source == "all") or (method == "all" and source != "all"):
                continue
            ratios = [a.memory_bytes / (a.row.memory_bytes or math.nan) for a in held]
            own = [by_traits[a.row.name] / (a.row.memory_bytes or math.nan) for a in held]
            middle = f"{statistics.median(ratios):.3f}" if ratios else "-"
            ran = [a for a in members if not (a.row.out_of_memory or a.row.set_aside or "layout" in a.row.assumed)]
            lines.append((
                source, method, str(len(ratios)), _percent(error(ratios)), middle, _percent(error(own)), str(len(ran)),
                str(sum(a.refused for a in ran)), str(len(oom)), str(sum(a.safe for a in oom)),
            ))  # fmt: skip
    _print_table("Memory", lines)


NORMAL_MEDIAN = 0.6745  # median of |x| over its standard deviation


def print_pairs(answers: Iterable[Answer]) -> None:
    """The error in the difference of two forecasts of one job that differs in its layout only (SIGMA_PAIR).

    It is what a gain must exceed before a less simple layout is chosen.
    """
    groups: dict[tuple[str, ...], list[Answer]] = defaultdict(list)
    for one in answers:
        if one.scored:
            groups[same_job(one.row)].append(one)
    errors: dict[bool, list[float]] = {False: [], True: []}
    jobs: Counter[bool] = Counter()
    for members in groups.values():
        differ = [(a, b) for a, b in combinations(members, 2) if a.row.layout != b.row.layout]
        alike = [degrees_of(a.row.layout) == degrees_of(b.row.layout) for a, b in differ]
        for same, (a, b) in zip(alike, differ, strict=True):
            errors[same].append(abs(math.log(a.ratio / b.ratio)))
        jobs.update(set(alike))
    lines = [("differ in", "jobs", "pairs", "standard deviation, by the median", "all", "shipped")]
    for same, name, shipped in ((False, "degrees", SIGMA_PAIR), (True, "batch or recomputation", SIGMA_PAIR_SAME)):
        if found := errors[same]:
            spread, median = math.sqrt(statistics.mean(x * x for x in found)), statistics.median(found) / NORMAL_MEDIAN
            lines.append((name, str(jobs[same]), str(len(found)), f"{median:.3f}", f"{spread:.3f}", str(shipped)))
    _print_table("Layouts of one job", lines)


def print_constants(fitted: Constants) -> None:
    """Where the fit starts, what it gives on all sources, and what the planner ships."""
    lines = [("constant", "start", "fitted on all", "shipped")]
    for name in FITTED:
        start, found, shipped = (f"{getattr(c, name):.3g}" for c in (PRIOR, fitted, DEFAULT))
        lines.append((name, start, found, shipped))
    _print_table("Constants", lines)


def print_scores(title: str, answers: Sequence[Answer], table: Table) -> None:
    """Step times and ranking."""
    scored = [a for a in answers if a.scored]
    if not scored:
        print("\nNo row has a time to score.")
        return
    print_times(title, scored, table)
    print_regret(scored)
    mixtures = [a for a in scored if a.row.model.experts]
    if mixtures:
        print_times(f"{title}: mixtures of experts", mixtures, table)


def print_summary(answers: Sequence[Answer], known: Sequence[Answer], unread: Sequence[Unread], table: Table) -> None:
    """The figures that docs/explanation/forecast.md cites: means over the sources of enough rows, and counts."""
    scored = [a for a in answers if a.scored]
    found = [regret for regret, _, _ in regrets(scored)]
    oom = [a for a in answers if a.row.out_of_memory]
    ran = [a for a in answers if not (a.row.out_of_memory or a.row.set_aside or "layout" in a.row.assumed)]
    own = {a.row.name: a for a in known}

    def memory(rows: Sequence[Answer], method: str) -> str:
        held = [a for a in rows if a.row.memory_bytes and a.row.train.method == method]
        return _percent(
            mean_of_sources(held, lambda m: error([a.memory_bytes / (a.row.memory_bytes or math.nan) for a in m]))
        )

    figures = {
        "step time": _percent(mean_of_sources(scored, lambda m: error(_ratios(m)))),
        "step time, mixtures of experts": _percent(
            mean_of_sources([a for a in scored if a.row.model.experts], lambda m: error(_ratios(m)))
        ),
        "step time, one scalar": _percent(mean_of_sources(scored, lambda m: error([r for _, r in with_scalar(m)]))),
        "in the 80 % interval": _percent(mean_of_sources(scored, lambda m: coverage(m, table))),
        "regret, mean": _percent(statistics.mean(found)),
        "regret, worst": _percent(max(found)),
        **{f"memory, {method}": memory(answers, method) for method in ("full", "lora", "qlora")},
        **{
            f"memory, {method}, stack known": memory([own[a.row.name] for a in answers], method)
            for method in ("full", "lora", "qlora")
        },
        "out of memory, called safe": f"{sum(a.safe for a in oom)} of {len(oom)}",
        "the same, stack known": f"{sum(own[a.row.name].safe for a in oom)} of {len(oom)}",
        "ran, refused": f"{sum(a.refused for a in ran)} of {len(ran)}",
        "the same, of known stacks": f"{sum(own[a.row.name].refused for a in ran)} of {len(ran)}",
        "ran, called tight": f"{sum(not (a.safe or a.refused) for a in ran)} of {len(ran)}",
        "rows not placed": f"{len(unread)} of {len(unread) + len(answers)}",
    }
    _print_table("Summary", [("figure", "left out"), *figures.items()])


PAGE = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "forecast.md"
HEADER = """# Forecast accuracy

Published runs of other stacks, 2026-11-23, as `make forecast` prints them. `python bench/forecast.py --write` writes
this page, and the widths in `planner/forecast/intervals.json`.
"""


def report(rows: Sequence[Row], unread: Sequence[Unread], shipped: bool, save: bool) -> None:
    """Print every table."""
    if shipped or len({row.source for row in rows}) < 2:  # with one source nothing is left to fit on
        answers = as_shipped(rows)
        print_rows(answers, unread)
        print_scores("Step time, constants and stacks as shipped (in sample)", answers, lambda _: widths())
        print_memory(answers, answers)
        return
    result = left_out(rows, lambda text: print(text, file=sys.stderr))
    answers = result.answers
    others = {source: learned(result, source) for source in {row.source for row in rows}}
    print_rows(answers, unread)
    print_scores("Step time, each source left out", answers, others.__getitem__)
    print()
    for source in dict.fromkeys(row.source for row in rows):
        if gone := read_off_without(source):
            print(f"- left out with {source}: {', '.join(gone)}")
    print_kinds(result, learned(result), others.__getitem__)
    known = as_shipped(rows)
    print_memory(answers, known)
    print_summary(answers, known, unread, others.__getitem__)
    if save:
        write(learned(result), INTERVALS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", type=Path, default=[CORPUS / "layouts" / name for name in FILES])
    parser.add_argument("--as-shipped", action="store_true", help="in sample: shipped constants, nothing left out")
    parser.add_argument("--fit", action="store_true", help="print the constants fitted on every source, and no score")
    parser.add_argument(
        "--write", action="store_true", help="write the planner's widths and docs/measurements/forecast.md"
    )
    parser.add_argument(
        "--pairs", action="store_true", help="print the error in the difference of two forecasts, alone"
    )
    options = parser.parse_args(arguments)
    for file in options.rows:
        if not file.is_file():
            print(f"{file}: no such file (set TOPOFLIGHT_CORPUS or name a CSV)", file=sys.stderr)
            return 2
    started = time.perf_counter()
    rows, unread = read_rows(options.rows)
    if options.fit:
        print_constants(Fit([(row, as_run(row)) for row in rows]).without(()))
        return 0
    if options.pairs:
        print_pairs(as_shipped(rows))
        return 0
    text = io.StringIO()
    with redirect_stdout(text):
        report(rows, unread, options.as_shipped, options.write)
    print(text.getvalue())
    if options.write:
        tables = re.sub(r"^\|.*$", lambda line: re.sub(r" *\| *", "|", line[0]), text.getvalue(), flags=re.MULTILINE)
        PAGE.write_text(HEADER + re.sub(r"\|-[-|]*\|", lambda m: re.sub(r"-+", "-", m[0]), tables), encoding="utf-8")
    print(f"\n{time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
