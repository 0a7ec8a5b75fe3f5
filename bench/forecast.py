"""Compare the forecast with published training runs.

    make forecast                 score the shared corpus; each source is left out of the fit that forecasts it
    make forecast ROWS=FILE.csv   score the rows of a file with the shipped constants; nothing is fitted to them

A source that is left out is forecast with constants that were fitted to the other sources. A stack that no other source
uses is treated as unknown. The width of the interval comes from the errors of the other sources. Printed for each
source and in total: rows that could not be read ("not placed"), the error of the step time without and with a measured
scalar for each (framework, GPU, precision), the share of measured times in the 80 % interval (rows that are not placed
count as outside), how much slower the chosen layout is than the best published one, the error of the memory for each
method, out-of-memory rows that the forecast called safe, and rows that ran although the forecast refused them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import statistics
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, combinations
from pathlib import Path
from typing import TypeVar

from rows import Row, Unread, read_rows
from stacks import unknown_stack
from widths import Sample, inside, learn, width

from contracts.finding import Interval
from contracts.layout import EIGHT_BITS, Checkpointing, Layout, Precision
from contracts.tables import read_table
from hardware.gpus import Gpu
from planner.explain import over_unknown_network, sigmas_of_rates
from planner.forecast.calibration import FILE as INTERVALS, Widths, interval, kind_of, widths
from planner.forecast.compute import DEFAULT, Constants, Job, gpu_rates
from planner.forecast.engine import share_of
from planner.forecast.memory import FRAGMENTATION, MemoryParts, memory_parts
from planner.forecast.specs import weights
from planner.forecast.step_time import StepParts, forecast_step
from planner.search import TIGHT_SHARE, Candidate, Planned, choose_simplest, degrees_of, search

CORPUS = Path(os.environ.get("TOPOFLIGHT_CORPUS", Path(__file__).resolve().parents[2] / "shared" / "corpus"))
FILES = ("published.csv", "published2.csv", "published3.csv")
# No table has FP4 rates. The forecast takes the range from the FP8 rate to this multiple of it (Blackwell data sheet).
FOUR_BITS = 2.0
MIN_OF_A_SOURCE = 10  # rows that a source needs to count in the mean of sources
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

_TABLE = read_table(__file__, "forecast.toml")
FITTED: tuple[str, ...] = tuple(_TABLE["start"])
PRIOR: Constants = {**DEFAULT, **_TABLE["start"]}


def read_off_without(source: str) -> dict[str, float]:
    """Return the constants that were read off this source, with their values without it."""
    factors = {}
    for name, row in _TABLE["read_off"].items():
        others = [value for of, value in row["sources"].items() if of != source]
        if source in row["sources"]:
            factors[name] = statistics.geometric_mean(others) if others else row["without"]
    return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The forecast of one row."""

    row: Row
    job: Job
    candidate: Candidate  # as in the search, without a limit on memory
    extra: tuple[float, float]  # standard deviations of log time (below, above) from settings that the row leaves open
    kind: str  # of the job, which decides the width of the interval
    reach: tuple[float, float]  # log of the time with the fastest and the slowest network that the row leaves open
    memory_bytes: float
    least_bytes: float  # least memory of the settings that the row leaves open
    most_bytes: float

    @property
    def ratio(self) -> float:
        """Forecast over measured time."""
        return self.candidate.seconds / (self.row.seconds or math.nan)

    @property
    def sample(self) -> Sample:
        """The error from which a width is learned."""
        return Sample(
            source=self.row.source, kind=self.kind, error=math.log(self.ratio), extra=self.extra, reach=self.reach
        )

    @property
    def scored(self) -> bool:
        """Whether its time is scored."""
        return bool(self.row.seconds) and not self.row.set_aside

    @property
    def ran(self) -> bool:
        """Whether its layout is known and fitted into the memory of the GPU."""
        return not (self.row.out_of_memory or self.row.set_aside or "layout" in self.row.assumed)

    @property
    def memory_ratio(self) -> float:
        """Forecast over measured memory."""
        return self.memory_bytes / (self.row.memory_bytes or math.nan)

    def is_safe(self, table: Widths) -> bool:
        """Whether it fits with all settings that the row leaves open, without a note on tight memory."""
        high = interval(self.most_bytes, table.memory[self.row.train.method]).high
        return high <= TIGHT_SHARE * self.row.gpu.memory_bytes

    def is_refused(self, table: Widths) -> bool:
        """Whether it fits with none of the settings that the row leaves open."""
        low = interval(self.least_bytes, table.memory[self.row.train.method]).low
        return low > self.row.gpu.memory_bytes


# --- One row.


def _heavier(row: Row, layout: Layout) -> list[Layout]:
    """Return the layout; if the row does not state the recomputation, also the layouts with more of it."""
    if row.checkpointing is not None:
        return [layout]
    kinds: tuple[Checkpointing, ...] = ("none", "selective", "full")
    more = kinds[kinds.index(layout.checkpointing) :]
    return [replace(layout, checkpointing=kind) for kind in more if kind in row.stack.engine.checkpointing] or [layout]


def _sum_tensors(parts: MemoryParts) -> float:
    """Return the value that torch.cuda.max_memory_allocated would return."""
    return parts.total - parts.fragmentation - parts.reserved - parts.context


def _memory(row: Row, layout: Layout, *, first_stage: bool = False) -> MemoryParts:
    """Return the memory at the peak of the fullest rank: in a micro-batch, in loading, or in the optimizer's step."""
    parts = memory_parts(row.model, row.train, layout, row.stack.engine, first_stage=first_stage)
    loaded = parts.weights + row.stack.bytes_outside_passes(share_of(row.model, row.train, layout))
    if loaded + parts.gathered <= _sum_tensors(parts):
        return parts
    fragmentation = (loaded + parts.gathered) * (FRAGMENTATION - 1.0)
    return MemoryParts(weights=loaded, gathered=parts.gathered, fragmentation=fragmentation, reserved=parts.reserved,
                       context=parts.context)  # fmt: skip


def _needed(row: Row, layout: Layout) -> float:
    return _memory(row, layout).total


def _ways(row: Row, layout: Layout) -> list[float]:
    """Return the memory in bytes for each setting that the row leaves open: recomputation; whether frozen weights are
    stored in FP8 (Transformer Engine's fp8_model_init); whether each rank holds all 4-bit weights until they are
    sharded; for an unknown stack, whether the loss is fused and whether each rank holds the whole model while it loads
    its shard."""
    layouts = _heavier(row, layout)
    if row.stack.known:
        engine = row.stack.engine
        whole = replace(row, stack=replace(row.stack, engine=replace(engine, quantises_whole=engine.loads_quantised)))
        sizes = [_needed(each, option) for each in (row, whole) for option in layouts]
        return sizes + [needed - _saved_by_few_bits(row, layout) for needed in sizes]
    fused = [_needed(row, replace(each, fused_cross_entropy=True)) for each in layouts]
    return fused + [
        max(_loading(row, layout), _needed(row, replace(each, fused_cross_entropy=False))) for each in layouts
    ]


def _loading(row: Row, layout: Layout) -> float:
    """Return the bytes while each rank holds the whole model to load its shard, as FSDP without meta tensors does."""
    model = 2.0 * weights(row.model).total / (layout.tp * layout.pp)
    return model + _memory(row, layout).weights


def _saved_by_few_bits(row: Row, layout: Layout) -> float:
    """Return the bytes saved if frozen weights are stored in the 8 or 4 bits of their multiplications.

    Transformer Engine's fp8_model_init stores no other copy. NVFP4 has one byte of scale for 16 weights.
    """
    if row.train.method != "lora" or not (row.four_bits or set(EIGHT_BITS) & set(row.precisions)):
        return 0.0
    frozen = _memory(row, layout).weights
    stored = (0.5 + 1.0 / 16.0) / 2.0 if row.four_bits else 0.5
    return FRAGMENTATION * frozen * (1.0 - stored)


# A row that ran is assumed to recompute no more than necessary. If its forecast memory is this many times that of the
# GPU, it is assumed not to have fitted without recomputation.
CERTAINLY_TOO_LARGE = 1.3


def as_run(row: Row) -> Layout:
    """Return the row's layout. Unpublished recomputation is the default of the stack, or the least that may have
    fitted."""
    if row.checkpointing is not None:
        return row.layout
    choice = row.stack.default_checkpointing
    if row.layout.offload == "all":
        choice = "full"  # as in the search: recomputation costs less than the transfer of the weights
    if row.stack.engine.name == "litgpt" and row.layout.world_size > 1:
        choice = "full"  # its FSDP strategy checkpoints every block
    if row.stack.engine.name == "torchtune" and row.train.method != "qlora":
        # Its tables show runs without recomputation on larger GPUs. Its QLoRA recipes aim at the least memory.
        light = replace(row.layout, checkpointing="none")
        choice = "none" if _needed(row, light) <= row.gpu.memory_bytes else choice
    options = _heavier(row, replace(row.layout, checkpointing=choice))
    largest = CERTAINLY_TOO_LARGE * row.gpu.memory_bytes
    return next(
        (option for option in options if _needed(row, option) - _saved_by_few_bits(row, option) <= largest), options[-1]
    )


def _job(row: Row, precision: Precision, constants: Constants, gpu: Gpu | None = None) -> Job:
    engine = row.stack.engine
    rates = gpu_rates(gpu or row.gpu, row.train, engine, precision, constants)
    return Job(model=row.model, train=row.train, links=row.links, rates=rates, engine=engine, constants=constants)


def searched(row: Row, constants: Constants = DEFAULT) -> Layout:
    """Return the layout of a row that states none: the planner's choice for this batch."""
    engine = row.stack.engine
    able = replace(row, stack=replace(row.stack, engine=replace(engine, methods=frozenset({"full", "lora", "qlora"}))))
    result = search(Planned(
        job=_job(able, row.precision, constants), world=row.layout.world_size, global_batch=row.layout.global_batch,
        precision=row.precision, capacity=row.gpu.memory_bytes,
    ))  # fmt: skip
    return result.best[0].layout if result.best else row.layout


Reading = tuple[Job, Layout, StepParts]


def seconds_of(row: Row, layout: Layout, constants: Constants) -> tuple[float, list[Reading]]:
    """Return the step time in seconds, and one forecast for each precision that the row leaves open."""
    readings: list[Reading] = []
    variants: list[tuple[Precision, Gpu]] = [(precision, row.gpu) for precision in row.precisions]
    if row.four_bits and row.gpu.matmul_fp8:
        variants.append(("fp8", replace(row.gpu, matmul_fp8=FOUR_BITS * row.gpu.matmul_fp8)))
    for precision, gpu in variants:
        variant = layout if precision == layout.precision else replace(layout, precision=precision)
        job = _job(row, precision, constants, gpu)
        readings.append((job, variant, forecast_step(job, variant)))
    times = [parts.total for _, _, parts in readings]
    return math.sqrt(min(times) * max(times)), readings


def left_open(readings: Sequence[Reading]) -> tuple[float, float]:
    """Return what assumed rates and an unstated precision add to sigma (below, above)."""
    times = [parts.total for _, _, parts in readings]
    between = math.log(max(times) / min(times)) / 2.0
    below, above = zip(*(sigmas_of_rates(*reading) for reading in readings), strict=True)
    return math.hypot(max(below), between), math.hypot(max(above), between)


def answer(row: Row, layout: Layout, constants: Constants = DEFAULT) -> Answer:
    """Forecast one row."""
    seconds, readings = seconds_of(row, layout, constants)
    printed = _memory(row, layout, first_stage=row.first_stage)
    memory = _sum_tensors(printed) if row.memory_kind == "tensors" else printed.total
    if row.train.method == "lora" and not row.stack.known and layout.dp_shard > 1 and layout.sharding == "zero3":
        loading = _loading(row, layout)
        memory = max(memory, loading if loading <= row.gpu.memory_bytes else 0.0)
    if row.memory_kind == "reserved":
        memory -= printed.context
    job = _job(row, row.precision, constants)
    ends = over_unknown_network(job, layout, Interval(low=1.0, mid=1.0, high=1.0))
    ways = _ways(row, layout)
    return Answer(
        row=row,
        job=job,
        candidate=Candidate(layout=layout, parts=readings[0][2], memory=printed, seconds=seconds),
        extra=left_open(readings),
        kind=kind_of(job),
        reach=(math.log(ends.low), math.log(ends.high)),
        memory_bytes=memory,
        least_bytes=min(ways),
        most_bytes=max(ways),
    )


# --- The fit.


class Fit:
    """Rows to fit constants to. Forecasts are cached by the values of the constants that a row depends on."""

    def __init__(self, pairs: Sequence[tuple[Row, Layout]]) -> None:
        self.pairs = [
            (row, layout) for row, layout in pairs if row.seconds and not row.set_aside and not row.assumed_much
        ]
        self.sources = [row.source for row, _ in self.pairs]
        self.start = [self._error(i, PRIOR) for i in range(len(self.pairs))]
        self.touched = {name: self._touched(name) for name in FITTED}
        members = {name: set(rows) for name, rows in self.touched.items()}
        self.names = [[name for name in FITTED if i in members[name]] for i in range(len(self.pairs))]
        self.known: dict[tuple[int, *tuple[float, ...]], float] = {}

    def _once(self, i: int, constants: Constants) -> float:
        key = (i, *(constants[name] for name in self.names[i]))
        if key not in self.known:
            self.known[key] = self._error(i, constants)
        return self.known[key]

    def _error(self, i: int, constants: Constants) -> float:
        row, layout = self.pairs[i]
        return math.log(seconds_of(row, layout, constants)[0] / (row.seconds or math.nan))

    def _touched(self, name: str) -> list[int]:
        trials = [{**PRIOR, name: PRIOR[name] * factor} for factor in (0.6, 1.0 / 0.6)]
        return [i for i, was in enumerate(self.start) if any(abs(self._error(i, t) - was) > 1e-9 for t in trials)]

    def without(self, rows: Collection[str], passes: int = 5) -> Constants:
        """Fit the constants to all rows except those of these names, by coordinate descent from `PRIOR`."""
        used = [i for i, (row, _) in enumerate(self.pairs) if row.name not in rows]
        members = groups_of(used, lambda i: self.sources[i])
        shares = {s: math.sqrt(len(m)) for s, m in members.items()}
        total = sum(shares.values())
        weight = {i: shares[self.sources[i]] / total / len(members[self.sources[i]]) for i in used}
        in_use = set(used)
        touched = {name: [i for i in rows if i in in_use] for name, rows in self.touched.items()}

        def cost(i: int, error: float) -> float:  # grows with the logarithm of the error, so that outliers count less
            return weight[i] * 0.2 * math.log1p(abs(error) / 0.2)

        best, errors = PRIOR, {i: self.start[i] for i in used}
        step = 0.15
        for _ in range(passes):
            for name in FITTED:
                for factor in (1.0 + step, 1.0 / (1.0 + step)):
                    value = best[name] * factor
                    if name in ("tp_hidden", "overlap_loss", "overlap_loss_network") and value > 0.95:
                        continue
                    trial = {**best, name: value}
                    new = {i: self._once(i, trial) for i in touched[name]}
                    gain = sum(cost(i, errors[i]) - cost(i, new[i]) for i in new)
                    # penalty for the distance from the starting values
                    gain += 0.02 * (_moved(best, name) - _moved(trial, name))
                    if gain > 1e-6:
                        best, errors = trial, errors | new
                        break
            step *= 0.6
        return best


def _moved(constants: Constants, name: str) -> float:
    return float(math.log(constants[name] / PRIOR[name]) ** 2)


# --- Forecasts without a source.


def tied(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """Return, for each source, the stacks that no other source uses. They are left out together with it."""
    users = groups_of(((row.stack.engine.name, row.source) for row in rows if row.stack.known), lambda pair: pair[0])
    single = {engine: pairs[0][1] for engine, pairs in users.items() if len({source for _, source in pairs}) == 1}
    return {source: tuple(engine for engine in single if single[engine] == source) for source in single.values()}


def unknown_to_others(row: Row, engines: Collection[str]) -> Row:
    """Return the row as a reader that does not know these engines reads it."""
    if row.stack.engine.name not in engines:
        return row
    stack = unknown_stack(row.raw)
    return replace(row, stack=stack, layout=stack.engine.as_run(row.layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Forecasts of every source without the source itself, and with the shipped constants."""

    answers: list[Answer]
    # Memory has no fitted constants: the memory of `answers` and of `shipped` differs only where a stack is unknown.
    shipped: list[Answer]


def left_out(rows: Sequence[Row]) -> LeftOut:
    """Forecast each row with constants and stacks of the other sources. Prints its progress on stderr."""
    engines = tied(rows)
    fit = Fit([(row, as_run(row)) for row in rows])
    apart = [unknown_to_others(row, engines.get(row.source, ())) for row in rows]
    everything = fit.without(())
    answers: list[Answer] = []
    for source in dict.fromkeys(row.source for row in rows):
        constants = everything
        if source in fit.sources:
            constants = fit.without({row.name for row in rows if row.source == source})
        constants = {**constants, **read_off_without(source)}
        answers += [
            answer(row, searched(row, constants) if "layout" in row.assumed else as_run(row), constants)
            for row in apart
            if row.source == source
        ]
        print(f"left out {source}", file=sys.stderr)
    return LeftOut(answers=answers, shipped=as_shipped(rows))


def learned(result: LeftOut, without: str | None = None) -> Widths:
    """Learn the widths of intervals from all sources, or from all except one."""
    answers = [a for a in result.answers if a.scored and a.row.source != without]
    shipped = [a for a in result.shipped if a.row.source != without]
    certain = [a for a in answers if not a.row.assumed_much]  # whose times do not depend on assumed settings
    scaled = [Sample(source=a.row.source, error=math.log(ratio)) for a, ratio in with_scalar(certain)]
    by_method = groups_of((a for a in shipped if a.row.memory_bytes), lambda a: a.row.train.method)
    memory = {
        method: width([Sample(source=a.row.source, error=math.log(a.memory_ratio)) for a in members])
        for method, members in sorted(by_method.items())
    }
    pair, same = (spread(samples) for samples in pairs(answers))
    return Widths(
        kinds=learn([a.sample for a in certain]), calibrated=width(scaled), memory=memory, pair=pair, pair_same=same,
    )  # fmt: skip


def as_shipped(rows: Sequence[Row]) -> list[Answer]:
    """Forecast every row with the shipped constants and all stacks."""
    return [answer(row, searched(row) if "layout" in row.assumed else as_run(row)) for row in rows]


# --- Scores.


def groups_of(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group the items by their key, in their order."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def with_scalar(answers: Sequence[Answer]) -> list[tuple[Answer, float]]:
    """Return the rows with their ratio after one scalar per family, which comes from the family's other rows."""
    out = []
    for members in groups_of(answers, lambda a: (a.row.framework, a.row.gpu.name, a.row.precision)).values():
        logs = [math.log(m.ratio) for m in members]
        for i, log in enumerate(logs):
            if others := logs[:i] + logs[i + 1 :]:
                out.append((members[i], math.exp(log - statistics.median(others))))
    return out


def error(ratios: Sequence[float]) -> float:
    """Return the mean absolute relative error."""
    return statistics.mean(abs(r - 1.0) for r in ratios) if ratios else math.nan


Table = Callable[[str], Widths]  # by source


def coverage(answers: Sequence[Answer], table: Table, missed: int = 0) -> float:
    """Return the share of measured times in the 80 % interval. `missed` further rows count as outside."""
    count = len(answers) + missed
    covered = sum(inside(a.sample, table(a.row.source).kinds[a.kind]) for a in answers)
    return covered / count if count else math.nan


_SAME = ("source", "framework", "model", "params_b", "kind", "seq", "gpu", "world", "gbs", "precision", "compile",
         "lora_rank", "layers", "hidden", "heads")  # fmt: skip


def same_job(row: Row) -> tuple[str, ...]:
    """Return the columns that are equal in rows of one job with different layouts."""
    return tuple(row.raw.get(name) or "" for name in _SAME)


def regrets(answers: Sequence[Answer]) -> list[tuple[float, str]]:
    """Return how much slower the planner's choice is than the fastest layout, for each job with several layouts."""
    out = []
    for key, members in groups_of(answers, lambda a: same_job(a.row)).items():
        if len({m.row.layout for m in members}) > 1:
            simple = choose_simplest(members[0].job, [m.candidate for m in members])
            first = next(m for m in members if m.candidate is simple)
            best = min(m.row.seconds or math.inf for m in members)
            out.append(((first.row.seconds or math.inf) / best - 1.0, f"{key[0]}: {key[2]} on {key[7]} {key[6]}"))
    return out


NORMAL_MEDIAN = 0.6745  # median of |x| over its standard deviation


def pairs(answers: Iterable[Answer]) -> tuple[list[Sample], list[Sample]]:
    """Return errors of the ratio of two forecasts of one job: for layouts of different and of the same degrees."""
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    jobs = groups_of(answers, lambda a: same_job(a.row)).values()
    for a, b in (pair for members in jobs for pair in combinations(members, 2)):
        if a.row.layout != b.row.layout:
            same = degrees_of(a.row.layout) == degrees_of(b.row.layout)
            samples[same].append(Sample(source=a.row.source, error=abs(math.log(a.ratio / b.ratio))))
    return samples


def spread(samples: Sequence[Sample]) -> float:
    """Estimate the standard deviation from the median. Each source has the weight of the root of its pairs."""
    if not samples:
        return math.nan
    count = Counter(sample.source for sample in samples)
    ordered = sorted((sample.error, 1.0 / math.sqrt(count[sample.source])) for sample in samples)
    below = list(accumulate(weight for _, weight in ordered))
    return round(ordered[bisect_left(below, below[-1] / 2.0)][0] / NORMAL_MEDIAN, 3)


# --- Tables.


def _print_table(title: str, lines: Sequence[tuple[str, ...]]) -> None:
    print(f"\n## {title}\n")
    widest = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for n, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widest, strict=True)) + " |")
        if n == 0:
            print("|" + "|".join("-" * (w + 2) for w in widest) + "|")


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _by_source(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    return groups_of(answers, lambda a: a.row.source)


def mean_of_sources(answers: Sequence[Answer], score: Callable[[Sequence[Answer]], float]) -> float:
    """Return the mean of a score over the sources with at least MIN_OF_A_SOURCE rows."""
    scores = [score(members) for members in _by_source(answers).values() if len(members) >= MIN_OF_A_SOURCE]
    values = [value for value in scores if not math.isnan(value)]
    return statistics.mean(values) if values else math.nan


def print_rows(answers: Sequence[Answer], unread: Sequence[Unread]) -> None:
    """Print the number of rows for each source, the reasons of rows that were not placed, and what was assumed."""
    missed, groups = Counter(u.source for u in unread), _by_source(answers)
    lines = [("source", "rows", "not placed", "time scored", "time set aside", "memory", "out of memory")]
    parts = [(source, groups.get(source, []), missed[source]) for source in dict.fromkeys([*groups, *missed])]
    for source, members, failed in [*parts, ("all", answers, len(unread))]:
        lines.append((
            source, str(len(members) + failed), str(failed), str(sum(a.scored for a in members)),
            str(sum(bool(a.row.seconds and a.row.set_aside) for a in members)),
            str(sum(a.row.memory_bytes is not None for a in members)), str(sum(a.row.out_of_memory for a in members)),
        ))  # fmt: skip
    _print_table("Rows", lines)
    print()
    for kind, reasons in (
        ("not placed", [re.sub(r"^model '.*?': ", "", u.why) for u in unread]),
        ("time set aside", [a.row.set_aside for a in answers if a.row.seconds and a.row.set_aside]),
        ("assumed in", [gap for a in answers for gap in a.row.assumed]),
    ):
        for reason, count in Counter(reasons).most_common():
            print(f"- {kind} {count}: {reason}")


def _time_error(members: Sequence[Answer]) -> float:
    return error([m.ratio for m in members])


def _scaled_error(members: Sequence[Answer]) -> float:
    return error([ratio for _, ratio in with_scalar(members)])


def print_times(title: str, answers: Sequence[Answer], unread: Sequence[Unread], table: Table) -> None:
    """Print the table of step times."""
    groups, missed = _by_source(answers), Counter(u.source for u in unread)
    lines = [("source", "rows", "not placed", "error", "median ratio", "in 80 %", "error, one scalar")]
    parts = [(source, members, missed[source]) for source, members in groups.items()]
    for source, members, failed in [*parts, ("all", answers, len(unread))]:
        middle = f"{statistics.median([m.ratio for m in members]):.3f}"
        lines.append((source, str(len(members)), str(failed), _percent(_time_error(members)), middle,
                      _percent(coverage(members, table, failed)), _percent(_scaled_error(members))))  # fmt: skip
    large = str(sum(len(members) >= MIN_OF_A_SOURCE for members in groups.values()))
    lines.append((
        f"mean of sources of {MIN_OF_A_SOURCE} rows", large, "", _percent(mean_of_sources(answers, _time_error)), "-",
        _percent(mean_of_sources(answers, lambda m: coverage(m, table, missed[m[0].row.source]))),
        _percent(mean_of_sources(answers, _scaled_error)),
    ))  # fmt: skip
    _print_table(title, lines)


def print_kinds(result: LeftOut, shipped: Widths, table: Table) -> None:
    """Print the widths of each kind of job, of memory and of pairs."""
    answers = [a for a in result.answers if a.scored and not a.row.assumed_much]
    lines = [("kind of job", "rows", "sources", "sigma", "in 80 %", "in 80 %, width of the other sources")]
    for kind, sigma in shipped.kinds.items():
        members = [a for a in answers if a.kind == kind]
        lines.append((
            kind, str(len(members)), str(len(_by_source(members))), f"{sigma:.3f}",
            _percent(coverage(members, lambda _: shipped)), _percent(coverage(members, table)),
        ))  # fmt: skip
    for name, sigma in (
        ("one step of the stack measured", shipped.calibrated),
        *((f"memory: {method}", sigma) for method, sigma in shipped.memory.items()),
        ("difference of two layouts of one job", shipped.pair), ("the same, of the same degrees", shipped.pair_same),
    ):  # fmt: skip
        lines.append((name, "", "", f"{sigma:.3f}", "", ""))
    _print_table("Width of the interval by the kind of job", lines)


def print_memory(answers: Sequence[Answer], of_known_stack: Sequence[Answer], table: Table) -> None:
    """Print the memory by source and method. `known` are the same rows with their stacks known."""
    by_name = {a.row.name: a for a in of_known_stack}
    lines = [("source", "method", "rows", "error", "median ratio", "error, stack known", "ran", "of them refused",
              "OOM rows", "called safe")]  # fmt: skip
    for source in [*_by_source(answers), "all"]:
        for method in ("full", "lora", "qlora", "all"):
            members = [a for a in answers if source in (a.row.source, "all") and method in (a.row.train.method, "all")]
            measured = [a for a in members if a.row.memory_bytes]
            oom = [a for a in members if a.row.out_of_memory]
            if not (measured or oom or source == "all") or (method == "all" and source != "all"):
                continue
            ratios = [a.memory_ratio for a in measured]
            middle = f"{statistics.median(ratios):.3f}" if ratios else "-"
            ran = [a for a in members if a.ran]
            lines.append((
                source, method, str(len(ratios)), _percent(error(ratios)), middle,
                _percent(error([by_name[a.row.name].memory_ratio for a in measured])), str(len(ran)),
                str(sum(a.is_refused(table(a.row.source)) for a in ran)), str(len(oom)),
                str(sum(a.is_safe(table(a.row.source)) for a in oom)),
            ))  # fmt: skip
    _print_table("Memory", lines)


def print_constants(fitted: Constants) -> None:
    """Print each constant: start of the fit, value fitted to all sources, shipped value."""
    lines = [("constant", "start", "fitted on all", "shipped")]
    for name in FITTED:
        start, fitted_value, shipped = (f"{c[name]:.3g}" for c in (PRIOR, fitted, DEFAULT))
        lines.append((name, start, fitted_value, shipped))
    _print_table("Constants", lines)


def print_summary(
    how: str, answers: Sequence[Answer], shipped: Sequence[Answer], unread: Sequence[Unread], table: Table
) -> None:
    """Print the figures that docs/explanation/forecast.md cites: means over sources with enough rows, and counts."""
    scored = [a for a in answers if a.scored]
    mixtures = [a for a in scored if a.row.model.experts]
    missed, lost = Counter(u.source for u in unread if u.timed), sum(u.mixture for u in unread)
    regret = regrets(scored)
    oom, ran = [a for a in answers if a.row.out_of_memory], [a for a in answers if a.ran]
    by_name = {a.row.name: a for a in shipped}

    def memory(rows: Sequence[Answer], method: str) -> str:
        measured = [a for a in rows if a.row.memory_bytes and a.row.train.method == method]
        return _percent(mean_of_sources(measured, lambda m: error([a.memory_ratio for a in m])))

    def count(rows: Sequence[Answer], is_true: Callable[[Answer, Widths], bool]) -> str:
        return f"{sum(is_true(a, table(a.row.source)) for a in rows)} of {len(rows)}"

    figures = {
        "step time": _percent(mean_of_sources(scored, _time_error)),
        "step time, mixtures of experts": _percent(mean_of_sources(mixtures, _time_error)),
        "mixtures of experts not placed": f"{lost} of {lost + sum(a.row.model.experts > 0 for a in answers)}",
        "step time, one scalar": _percent(mean_of_sources(scored, _scaled_error)),
        "in the 80 % interval": _percent(
            mean_of_sources(scored, lambda m: coverage(m, table, missed[m[0].row.source]))
        ),
        "regret, mean": _percent(statistics.mean(r for r, _ in regret)) if regret else "-",
        "regret, worst": _percent(max(regret)[0]) if regret else "-",
        **{f"memory, {method}": memory(answers, method) for method in ("full", "lora", "qlora")},
        **{
            f"memory, {method}, stack known": memory([by_name[a.row.name] for a in answers], method)
            for method in ("full", "lora", "qlora")
        },
        "out of memory, called safe": count(oom, Answer.is_safe),
        "the same, stack known": count([by_name[a.row.name] for a in oom], Answer.is_safe),
        "ran, refused": count(ran, Answer.is_refused),
        "the same, of known stacks": count([by_name[a.row.name] for a in ran], Answer.is_refused),
        "ran, called tight": count(ran, lambda a, w: not (a.is_safe(w) or a.is_refused(w))),
        "rows not placed": f"{len(unread)} of {len(unread) + len(answers)}",
    }  # fmt: skip
    _print_table("Summary", [("figure", how), *figures.items()])
    if regret:
        print(f"\n- regret of {len(regret)} groups of layouts of one job; worst: {max(regret)[1]}")


PAGE = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "forecast.md"
HEADER = """# Forecast accuracy

Forecasts of published runs, 2026-11-29. `python bench/forecast.py --write` writes this page and the widths in
`planner/forecast/intervals.json`; `--help` explains the figures. Left out: fitted to the other sources.
"""


def report(rows: Sequence[Row], unread: Sequence[Unread], result: LeftOut | None) -> None:
    """Print every table: with each source left out, or with the shipped constants if `result` is None."""
    if result:
        answers, shipped, how = result.answers, result.shipped, "left out"
        table = {source: learned(result, source) for source in {row.source for row in rows}}.__getitem__
    else:
        answers = shipped = as_shipped(rows)
        how, table = "as shipped", lambda _: widths()
    print_rows(answers, unread)
    scored = [a for a in answers if a.scored]
    if scored:
        missed = [u for u in unread if u.timed]
        print_times(f"Step time, {how}", scored, missed, table)
    if mixtures := [a for a in scored if a.row.model.experts]:
        print_times(f"Step time, {how}: mixtures of experts", mixtures, [u for u in missed if u.mixture], table)
    if result:
        print()
        for source in dict.fromkeys(row.source for row in rows):
            if gone := read_off_without(source):
                print(f"- left out with {source}: {', '.join(gone)}")
        print_kinds(result, learned(result), table)
    print_memory(answers, shipped, table)
    print_summary(how, answers, shipped, unread, table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, help="CSV files to score as shipped; default: the shared corpus")
    parser.add_argument("--fit", action="store_true", help="print the constants fitted to all sources, without scores")
    parser.add_argument(
        "--write", action="store_true", help="write planner/forecast/intervals.json and docs/measurements/forecast.md"
    )
    options = parser.parse_args(arguments)
    files = options.rows or [CORPUS / "layouts" / name for name in FILES]
    if missing := [file for file in files if not file.is_file()]:
        parser.error(f"{missing[0]}: no such file (set TOPOFLIGHT_CORPUS or name a CSV)")
    rows, unread = read_rows(files)
    if options.fit:
        print_constants(Fit([(row, as_run(row)) for row in rows]).without(()))
        return 0
    result = None if options.rows else left_out(rows)
    text = io.StringIO()
    with redirect_stdout(text):
        report(rows, unread, result)
    print(text.getvalue())
    if options.write and result:
        table = learned(result)
        INTERVALS.write_text(json.dumps(asdict(table), indent=2) + "\n", encoding="utf-8")
        tables = re.sub(r"^\|.*$", lambda line: re.sub(r" *\| *", "|", line[0]), text.getvalue(), flags=re.MULTILINE)
        PAGE.write_text(HEADER + re.sub(r"\|-[-|]*\|", lambda m: re.sub(r"-+", "-", m[0]), tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
