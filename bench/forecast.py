"""Score the planner's forecast on published training runs: `python bench/forecast.py [ROWS.csv]`.

Prints, per source: error of the step time without and with one scalar per (framework, GPU, precision), how many
measured times fall in the 80 % interval, how much slower the layout ranked first is than the best one published,
error of the memory, and out-of-memory rows that were called safe. `--fit` refits the constants with each source left
out in turn and scores it with constants that never saw it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rows import Row, read_rows

from contracts.layout import Layout
from planner.explain import SIGMA_CALIBRATED, Z80, sigma_of
from planner.forecast.compute import DEFAULT, Constants, gpu_rates
from planner.forecast.memory import DEFAULT_MEMORY, memory_parts
from planner.forecast.step_time import Job, StepParts, step_parts

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
    sigma: float
    memory_bytes: float
    safe: bool

    @property
    def ratio(self) -> float:
        """Forecast over measured time."""
        return self.seconds / (self.row.seconds or math.nan)


def _layout(row: Row) -> Layout:
    """The row's layout; where recomputation was not published, what the stack does by itself."""
    if row.raw.get("act_recompute"):
        return row.layout
    choice = row.stack.default_checkpointing
    if row.stack.engine.name == "litgpt" and row.layout.world_size > 1:
        choice = "full"  # its FSDP strategy checkpoints every block
    if row.stack.engine.name == "torchtune" and row.train.method != "qlora":
        # Its tables give the larger card the faster run without it; QLoRA's recipe is for the least memory.
        light = replace(row.layout, checkpointing="none")
        fits = memory_parts(row.model, row.train, light, row.stack.engine).total <= row.gpu.memory_bytes
        choice = "none" if fits else choice
    layout = replace(row.layout, checkpointing=choice)
    needed = memory_parts(row.model, row.train, layout, row.stack.engine).total
    if choice == "none" and row.stack.engine.name not in ("megatron", "litgpt") and needed > 1.3 * row.gpu.memory_bytes:
        return replace(row.layout, checkpointing="full")
    return layout


def _parts(job: Job, row: Row, layout: Layout) -> StepParts:
    if row.recompute_share is None:
        return step_parts(job, layout)
    none = step_parts(job, replace(layout, checkpointing="none"))
    full = step_parts(job, replace(layout, checkpointing="full"))
    return StepParts(*(a + (b - a) * row.recompute_share for a, b in zip(none, full, strict=True)))


def answer(row: Row, layout: Layout, constants: Constants = DEFAULT) -> Answer:
    """Forecast one row."""
    engine = row.stack.engine
    rates = gpu_rates(row.gpu, row.train, engine, row.precision, constants)
    job = Job(model=row.model, train=row.train, links=row.links, rates=rates, engine=engine, constants=constants)
    parts = _parts(job, row, layout)
    fullest = memory_parts(row.model, row.train, layout, engine)
    printed = fullest
    if "as printed" in (row.raw.get("mem_kind") or ""):  # a log line of rank 0
        printed = memory_parts(row.model, row.train, layout, engine, first_stage=True)
    memory = printed.tensors if row.memory_kind == "tensors" else printed.total
    if row.memory_kind == "reserved":
        memory -= printed.context
    return Answer(
        row=row,
        seconds=parts.total,
        sigma=sigma_of(job, layout, parts, calibrated=False),
        memory_bytes=memory,
        safe=fullest.total <= DEFAULT_MEMORY.safe_share * row.gpu.memory_bytes,
    )


def timed(rows: Iterable[Row]) -> list[Row]:
    """Rows whose time can be scored."""
    return [row for row in rows if row.seconds and not row.doubtful]


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


def loss(rows: Sequence[tuple[Row, Layout]], constants: Constants) -> float:
    """Mean over sources of the mean |log ratio|, each row's share capped; drawn to the starting values."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, layout in rows:
        ratio = answer(row, layout, constants).ratio
        by_source[row.source].append(min(abs(math.log(ratio)), 0.35))
    weights = {source: math.sqrt(len(v)) for source, v in by_source.items()}
    total = sum(weights[s] * statistics.mean(v) for s, v in by_source.items()) / sum(weights.values())
    moved = sum(math.log(getattr(constants, n) / getattr(PRIOR, n)) ** 2 for n in FITTED)
    return total + 0.02 * moved


def fit(rows: Sequence[tuple[Row, Layout]], start: Constants = PRIOR, passes: int = 5) -> Constants:
    """Coordinate descent on the fitted constants."""
    best, least = start, loss(rows, start)
    step = 0.15
    for _ in range(passes):
        for name in FITTED:
            for factor in (1.0 + step, 1.0 / (1.0 + step)):
                value = getattr(best, name) * factor
                if name in ("tp_hidden", "overlap_loss") and value > 0.95:
                    continue
                trial = replace(best, **{name: value})
                score = loss(rows, trial)
                if score < least - 1e-6:
                    best, least = trial, score
                    break
        step *= 0.6
    return best


def _print_table(title: str, lines: Sequence[tuple[str, ...]]) -> None:
    print(f"\n## {title}\n")
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for n, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |")
        if n == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def print_times(title: str, answers: Sequence[Answer]) -> None:
    """The table of step times."""
    by_source: dict[str, list[Answer]] = defaultdict(list)
    for one in answers:
        by_source[one.row.source].append(one)
    lines = [("source", "rows", "error", "median ratio", "in 80 %", "error, one scalar", "in 80 %, one scalar")]
    for source, members in [*by_source.items(), ("all", list(answers))]:
        scaled = with_scalar(members)
        ratios = [m.ratio for m in members]
        lines.append((
            source, str(len(members)), _percent(error(ratios)), f"{statistics.median(ratios):.3f}",
            _percent(coverage(members)), _percent(error(scaled)), _percent(coverage_with_scalar(scaled)),
        ))  # fmt: skip
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
    """The table of memory."""
    by_source: dict[str, list[Answer]] = defaultdict(list)
    for one in answers:
        if one.row.memory_bytes or one.row.out_of_memory:
            by_source[one.row.source].append(one)
    if not by_source:
        print("\nNo row has a memory.")
        return
    lines = [("source", "rows", "error", "median ratio", "OOM rows", "OOM called safe")]
    everyone = [a for members in by_source.values() for a in members]
    for source, members in [*by_source.items(), ("all", everyone)]:
        ratios = [a.memory_bytes / a.row.memory_bytes for a in members if a.row.memory_bytes]
        oom = [a for a in members if a.row.out_of_memory]
        lines.append((
            source, str(len(ratios)), _percent(error(ratios)), f"{statistics.median(ratios):.3f}" if ratios else "-",
            str(len(oom)), str(sum(a.safe for a in oom)),
        ))  # fmt: skip
    _print_table("Memory", lines)


def cross_validate(rows: Sequence[tuple[Row, Layout]], say: Callable[[str], None]) -> list[Answer]:
    """Each source scored with constants fitted on the others."""
    out = []
    for source in dict.fromkeys(row.source for row, _ in rows):
        seen = [pair for pair in rows if pair[0].source != source]
        if not seen:
            continue
        constants = fit(seen)
        out += [answer(row, layout, constants) for row, layout in rows if row.source == source]
        say(f"left out {source}")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    corpus = Path(os.environ.get("TOPOFLIGHT_CORPUS", Path(__file__).resolve().parents[2] / "shared" / "corpus"))
    parser.add_argument("rows", nargs="?", type=Path, default=corpus / "layouts" / "published.csv")
    parser.add_argument("--fit", action="store_true", help="cross-validate over sources, and print refitted constants")
    options = parser.parse_args(arguments)
    if not options.rows.is_file():
        print(f"{options.rows}: no such file (set TOPOFLIGHT_CORPUS or name a CSV)", file=sys.stderr)
        return 2
    started = time.perf_counter()
    rows, skipped = read_rows(options.rows)
    pairs = [(row, _layout(row)) for row in rows]
    answers = [answer(row, layout) for row, layout in pairs]
    good = {id(row) for row in timed(rows)}
    scored = [a for a in answers if id(a.row) in good]
    print(f"{len(rows)} rows read, {len(scored)} with a time to score, "
          f"{sum(1 for r in rows if r.doubtful and r.seconds)} set aside (their note, or more FLOP/s than the GPU "
          "reaches)")  # fmt: skip
    for reason, count in skipped.items():
        print(f"skipped {count}: {reason}")
    if scored:
        print_times("Step time, constants as shipped", scored)
        print_regret(scored)
    print_memory(answers)
    if options.fit:
        timed_pairs = [(row, layout) for row, layout in pairs if id(row) in good]
        print_times(
            "Step time, each source with constants fitted on the others",
            cross_validate(timed_pairs, lambda text: print(text, file=sys.stderr)),
        )
        refit = fit(timed_pairs)
        lines = [("constant", "before", "fitted on all", "shipped")]
        lines += [(f.name, *(f"{getattr(c, f.name):.3g}" for c in (PRIOR, refit, DEFAULT)))
                  for f in fields(Constants) if f.name in FITTED]  # fmt: skip
        _print_table("Constants", lines)
    print(f"\n{time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
