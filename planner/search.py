"""The search: forecasts every layout that the rules allow, and returns the best of each family.

A rule is arithmetic or a limit of an engine. It has a name, and a reason if it forbids a layout. Preferences are not
rules; they follow from the forecast.

Degrees are enumerated, not sampled. Three prunings make it fast without changing the answer: memory is forecast before
time; only the lightest checkpointing that fits is timed, because more recomputation is never faster; a larger
micro-batch, or more chunks, never fits with less checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.layout import Checkpointing, Layout, Precision, Schedule
from hardware.gpus import find_gpu
from hardware.units import GIB, GIGA
from planner.advice import Rejected
from planner.forecast.calibration import SIGMAS, bytes_that_fit, memory_interval, widths
from planner.forecast.compute import Job
from planner.forecast.engine import NF4_BYTES, uneven_stages
from planner.forecast.links import Links
from planner.forecast.memory import MemoryParts, memory_of
from planner.forecast.specs import weights
from planner.forecast.step_time import StepParts, forecast_step
from planner.stacks.limits import Violation, check_split, check_stages, check_weights, explain_lack, most_chunks

# -- rules


def list_broken(job: Job, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that a layout violates."""
    yield from list_broken_by_degrees(job, layout)
    yield from list_broken_by_batch(job, layout)


def list_broken_by_degrees(job: Job, layout: Layout) -> Iterator[Violation]:
    """Yield the violated rules that need no whole layout, so they can already reject a degree."""
    yield from check_split(job.engine, job.model, layout)
    if layout.tp > job.links.island_size and (leaves := _leaves_island(job, layout)):
        yield Violation("tp-inside-island", leaves)
    yield from _check_rows(job, layout)
    yield from _check_model(job, layout)
    if lacks := explain_lack(job.engine, job.model, job.train, layout, has_gpu=job.has_gpu):
        yield Violation("engine-runs", lacks)
    if exceeds := _exceeds_host_memory(job, layout):
        yield Violation("host-memory-holds", exceeds)


def list_broken_by_batch(job: Job, at: Layout) -> Iterator[Violation]:
    """Yield the violated rules about pipeline chunks and micro-batches. The global batch is divided evenly."""
    yield from check_stages(job.engine, job.model, at)
    batch = job.train.global_batch
    if batch is not None and at.global_batch != batch:
        times = f"{at.micro_batch} x {at.gradient_accumulation} x {at.data_parallel} ranks"
        yield Violation("batch-divides", f"{times} is not the global batch {batch}")


def _leaves_island(job: Job, layout: Layout) -> str | None:
    """Return why TP must not leave an NVLink island: it waits for its links several times per layer."""
    slow = job.links.crosses(layout.tp, 1)
    if layout.tp > job.links.ranks_per_node and job.links.network is not None:
        return f"TP={layout.tp} would cross the {slow.bytes_per_second / GIGA:.3g} GB/s {slow.link} between nodes"
    if not job.has_gpu and layout.tp <= job.links.ranks_per_node:
        return None  # host memory is the only link
    if job.links.island_size == 1:
        return f"TP={layout.tp} would cross the {slow.bytes_per_second / GIGA:.3g} GB/s {slow.link} (no NVLink)"
    return f"TP={layout.tp} needs more GPUs than the {job.links.island_size} that NVLink connects"


def _check_rows(job: Job, layout: Layout) -> Iterator[Violation]:
    """Sequences and experts are divided evenly.

    Ring attention divides a sequence into 2 x CP parts. Expert parallelism gives each rank whole experts, within one
    pipeline stage (docs/decisions/0138).
    """
    model, length, ranks = job.model, job.train.sequence_length, layout.world_size // layout.pp
    if layout.cp > 1 and length % (2 * layout.cp):
        yield Violation("sequence-divides", f"sequence length {length} does not divide by 2 x CP={layout.cp}")
    if layout.ep > 1 and not model.experts:
        yield Violation("experts-divide", f"EP={layout.ep}: {model.name} has no experts")
    elif model.experts % layout.ep:
        yield Violation("experts-divide", f"{model.experts} experts do not divide by EP={layout.ep}")
    elif ranks % layout.ep:
        yield Violation("experts-divide", f"EP={layout.ep} does not divide the {ranks} ranks of a pipeline stage")


def _check_model(job: Job, layout: Layout) -> Iterator[Violation]:
    """The model can be trained with rows of this length, and the GPU supports the number format.

    A learned position table has a maximum length.
    """
    model, cc = job.model, job.compute_capability
    if model.family == "gpt2" and model.max_positions and job.train.sequence_length > model.max_positions:
        reason = f"sequence length {job.train.sequence_length} is beyond the model's {model.max_positions} positions"
        yield Violation("positions-reach", reason)
    yield from check_weights(job.engine, model, job.train)
    needed = {"fp8": (8, 9), "mxfp8": (10, 0)}.get(layout.precision)
    if needed and cc is not None and cc < needed:
        reason = f"{layout.precision} needs compute capability {needed[0]}.{needed[1]}, the GPU has {cc[0]}.{cc[1]}"
        yield Violation("precision-exists", reason)
    elif layout.precision == "mxfp8" and cc is not None and cc >= (12, 0):
        yield Violation("precision-exists", "mxfp8 needs compute capability 10.0 or 10.3 (Transformer Engine)")


def _exceeds_host_memory(job: Job, at: Layout) -> str | None:
    """Return why offloaded data, or loading the model, needs more than 80 % of the nodes' memory.

    If the host memory is unknown, offloading is rejected.
    """
    load, in_4_bits = 0.0, job.train.method == "qlora"
    if not (in_4_bits and job.engine.quantises_whole):  # else each weight goes to the GPU as it is read
        load = job.engine.host_load(2.0 * weights(job.model).total, at, min(at.world_size, job.links.ranks_per_node))
    usable = None if job.host_memory_bytes is None else 0.8 * job.host_memory_bytes
    if job.has_gpu and usable is not None and load > usable:
        return f"loading needs {load / GIB:.0f} GiB of host memory per node, {usable / GIB:.0f} GiB are usable"
    if at.offload == "none" or not job.has_gpu:
        return None
    if (gpu := find_gpu(job.rates.device)) and gpu.unified:
        return f"offloading frees nothing: {gpu.name} and its host share one memory"
    if usable is None:
        return "offloading needs host memory, and the memory of the nodes is unknown"
    frozen = NF4_BYTES if in_4_bits else 2.0
    each = (12.0 if at.offload == "optimizer" else 16.0) if job.train.method == "full" else frozen
    needed = each * weights(job.model).total * at.dp_replicate / max(1, job.links.nodes)
    if needed > usable:
        return f"offloading needs {needed / GIB:.0f} GiB of host memory per node, {usable / GIB:.0f} GiB are usable"
    return None


# -- candidates

_FITTED = ("checkpointing", "offload")  # determined by memory, after the degrees
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_MAX_PP = 64
_MIN_TOKENS = 1024  # tokens of a sequence per context-parallel rank; no published run uses fewer
# If forecasts of two layouts differ by less than this factor, they are equal, and `Candidate.risk` decides. It is a
# third of the error in the difference of layouts that only differ in batch or recomputation.
TIE = 1.02
TIGHT_SHARE = 0.85  # of the GPU memory: above it, memory of allocator and libraries may not fit


def degrees_of(layout: Layout) -> tuple[object, ...]:
    """Return the degrees of a layout. Forecasts of layouts with equal degrees have almost the same error."""
    parallel = layout.tp, layout.pp, layout.cp, layout.ep, layout.dp_shard, layout.dp_replicate
    return *parallel, layout.sharding, layout.offload


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    parts: StepParts
    memory: MemoryParts
    seconds: float  # per step
    tight: bool = False  # uses more of the memory than TIGHT_SHARE
    over: bool = False  # needs more memory than there is, if the forecast is right
    may_be_tight: bool = False  # uses more than TIGHT_SHARE if it needs as much as its interval allows

    @property
    def risk(self) -> tuple[bool, float, float]:
        """What decides between equal forecasts: tight memory, communication (forecast worst), and bytes."""
        return self.may_be_tight, self.parts.communication, self.memory.total

    def list_complications(self, links: Links) -> tuple[str, ...]:
        """Return the features that make a run harder to operate than data parallelism alone.

        TP and EP should stay within an NVLink domain, and PP comes first (megatron/core/transformer/moe/README.md).
        """
        layout = self.layout
        kinds = (
            ("TP", layout.tp > 1), ("PP", layout.pp > 1), ("CP", layout.cp > 1), ("EP", layout.ep > 1),
            ("EP between NVLink domains", layout.ep > links.domain_size),
            ("HSDP", layout.dp_shard > 1 and layout.dp_replicate > 1 and layout.sharding == "zero3"),
            ("offloading", layout.offload != "none"), (f"over {TIGHT_SHARE:.0%} of the memory", self.tight),
        )  # fmt: skip
        return tuple(name for name, there in kinds if there)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """All inputs of a search, collected from the facts."""

    job: Job
    world: int
    global_batch: int
    precision: Precision
    capacity: float | None  # bytes of a rank's device
    unknowns: tuple[str, ...] = ()
    calibrated: bool = False
    scale: float = 1.0  # measured step / its forecast
    slowed: tuple[str, ...] = ()  # effects of findings, as included in the forecast
    requested: Mapping[str, Any] = field(default_factory=dict)  # layout fields set by the job's settings

    @property
    def budget(self) -> float | None:
        """Limit for the forecast bytes of a rank; None: unknown."""
        return bytes_that_fit(self.job, self.capacity) if self.capacity else None

    @property
    def batch_is_assumed(self) -> bool:
        """Whether neither an option names the global batch nor the layout of the settings determines it."""
        return self.job.train.global_batch is None and "micro_batch" not in self.requested

    def candidate(self, layout: Layout, memory: MemoryParts | None = None) -> Candidate:
        """Return the forecast of one layout, whether or not it fits; `memory` if it was forecast before."""
        parts, memory = forecast_step(self.job, layout), memory or memory_of(self.job, layout)
        capacity = self.capacity or math.inf
        return Candidate(
            layout=layout, parts=parts, memory=memory, seconds=parts.total * self.scale,
            tight=memory.total > TIGHT_SHARE * capacity, over=memory.total > capacity,
            may_be_tight=memory_interval(self.job, memory.total).high > TIGHT_SHARE * capacity,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Ranking:
    """The layouts that a search ranked, and those that it rejected."""

    best: list[Candidate] = field(default_factory=list)  # one per family: the chosen layout, then fastest first
    rejected: list[Rejected] = field(default_factory=list)  # degrees first: "TP=16"
    rejected_families: list[Rejected] = field(default_factory=list)  # of these, what left a family without a layout
    forecast_count: int = 0  # layouts that were forecast


def _list_divisors(n: int) -> list[int]:
    """Return the divisors of n; for a large n, only up to the maximum number of pipeline stages."""
    return [d for d in range(1, (n if n <= 4096 else _MAX_PP) + 1) if n % d == 0]


def _list_powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _list_shardings(job: Job, dp: int, in_node: int, requested: object) -> Iterator[dict[str, Any]]:
    """Yield the values of a layout that say how it is sharded; with groups of the `requested` size if given."""
    can = job.engine.can
    if dp == 1:
        yield {"sharding": "zero3" if "zero3" in can else "ddp"}
        return
    if "ddp" in can:
        yield {"sharding": "ddp", "dp_replicate": dp}
    for zero in ("zero1", "zero2"):  # FSDP's follows below
        whole: dict[str, Any] = {"sharding": zero, "dp_shard": dp}
        if zero in can and job.engine.as_run(Layout(world_size=dp, **whole)).sharding == zero:
            yield whole
    reshards = (True, False) if job.engine.reshard else (True,)
    if "zero3" in can:
        yield from ({"sharding": "zero3", "dp_shard": dp, "reshard_after_forward": reshard} for reshard in reshards)
    if "hsdp" in can:
        group = requested if isinstance(requested, int) and requested > 1 else max(2, in_node)
        while group < dp:
            if dp % group == 0:
                hybrid = {"sharding": "zero3", "dp_shard": group, "dp_replicate": dp // group}
                for reshard in reshards if group in (in_node, requested) else (True,):
                    yield {**hybrid, "reshard_after_forward": reshard}
            group *= 2 if group * 2 <= 4 * in_node else 4


def _list_virtuals(job: Job, split: Layout, requested: object) -> Iterator[int]:
    yield 1
    if split.pp == 1 or split.gradient_accumulation % split.pp:
        return
    most = most_chunks(job.engine, job.model)
    for v in range(16, 1, -1):
        # Embedding and head count as one layer each, so the first and last chunk may have one layer less.
        if split.pp * v <= most and (-job.model.layers % (split.pp * v) <= 2 or v == requested):
            yield v


def _list_context_degrees(job: Job, ranks: int) -> list[int]:
    """Return context-parallel degrees that leave each rank enough of a sequence."""
    length = job.train.sequence_length
    largest = min(max(8, length // 4096), length // _MIN_TOKENS)
    return [cp for cp in _list_powers(min(ranks, max(1, largest))) if ranks % cp == 0]


def _list_degrees(job: Job, world: int, ranking: Ranking) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp, pp, cp, ep) that the rules allow; each rejected degree is recorded once."""

    def refuse(degrees: str, layout: Layout) -> bool:
        broken = next(list_broken_by_degrees(job, layout), None)
        if broken and all(row.what != degrees for row in ranking.rejected):
            ranking.rejected.append(Rejected(what=degrees, rule=broken.rule, reason=broken.reason))
        return broken is not None

    model, per_node = job.model, job.links.ranks_per_node
    for tp in _list_powers(min(world, 2 * per_node)):
        if world % tp:
            continue
        if tp > 1 and refuse(f"TP={tp}", Layout(world_size=tp, tp=tp)):
            continue
        for pp in _list_divisors(world // tp):
            if pp > min(_MAX_PP, model.layers):
                break
            if pp > 1 and refuse("PP", Layout(world_size=pp, pp=pp)):
                break
            for cp in _list_context_degrees(job, world // (tp * pp)):
                if cp > 1 and refuse("CP", Layout(world_size=cp, cp=cp)):
                    break
                dp = world // (tp * pp * cp)
                for ep in _list_divisors(math.gcd(model.experts or 1, dp * cp * tp)):
                    # replicas represent any sharding; whether the engine supports it is checked later
                    if ep > 1 and refuse("EP", Layout(world_size=dp * cp * tp, dp_replicate=dp, cp=cp, tp=tp, ep=ep)):
                        break
                    yield tp, pp, cp, ep


def usual_options(job: Job, tp: int, precision: Precision) -> dict[str, Any]:
    """Return the values of the members that every layout of this engine has, unless they are named."""
    train, engine = job.train, job.engine
    fused = train.fused_cross_entropy if train.fused_cross_entropy is not None else engine.fused_cross_entropy
    return {
        "sequence_parallel": tp > 1 and engine.splits_sequence(train), "fused_cross_entropy": fused,
        "compile": engine.compile, "precision": precision,
    }  # fmt: skip


def search(planned: Planned, fixed: Mapping[str, object] | None = None, *, surely: bool = True) -> Ranking:
    """Forecast every allowed layout among those with the field values in `fixed`; other fields are chosen as usual.

    By default these are the values in the job's settings. If `surely` is False, layouts are included whose memory only
    may fit.
    """
    job, capacity = planned.job, planned.capacity
    fixed = planned.requested if fixed is None else fixed
    if not surely:  # the options that save most memory
        batch = {} if "gradient_accumulation" in fixed else {"micro_batch": 1}
        fixed = {"checkpointing": job.engine.checkpointing[-1], **batch, **fixed}
    budget = bytes_that_fit(job, capacity, surely=surely) if capacity else None
    state = _Search(planned=planned, job=job, named=fixed, budget=budget)
    options: dict[str, Any] = {name: fixed[name] for name in ("checkpointing", "compile") if name in fixed}
    alone = Layout(world_size=1, precision=planned.precision, **options)
    if broken := next(list_broken_by_degrees(job, alone), None):  # due to model, precision or one of these options
        state.ranking.rejected.append(Rejected(what="every layout", rule=broken.rule, reason=broken.reason))
        return state.ranking
    for split in state.splits():
        state.attempt_batches(split)
    state.record_rejections()
    state.rank()
    return state.ranking


@dataclass(slots=True, kw_only=True)
class _Search:
    """One search with its state."""

    planned: Planned
    job: Job
    named: Mapping[str, object]
    budget: float | None  # limit for the forecast bytes of a rank
    ranking: Ranking = field(default_factory=Ranking)
    # By family, and by whether a layout is tight, needs too much memory, or offloads: the best of each.
    best: dict[tuple[object, ...], Candidate] = field(default_factory=dict)
    fastest: dict[tuple[object, ...], float] = field(default_factory=dict)  # seconds per step
    missing_bytes: dict[str, float] = field(default_factory=dict)  # by family, of the layout that needs least memory
    indivisible: dict[int, None] = field(default_factory=dict)  # data-parallel degrees that do not divide the batch
    forbidden: dict[str, Rejected] = field(default_factory=dict)  # by rule
    broken: Violation | None = None  # the first rule that the degrees of the current split violate
    fitted: Layout | None = None  # the last that fitted in this split, without interleaving: `after` of `fit_memory`

    def splits(self) -> Iterator[Layout]:
        """Yield every combination of degrees and sharding."""
        for tp, pp, cp, ep in _list_degrees(self.job, self.planned.world, self.ranking):
            degrees: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
            if any(self.named.get(name, degree) != degree for name, degree in degrees.items()):
                continue
            dp = self.planned.world // (tp * pp * cp)
            if self.planned.global_batch % dp:
                self.indivisible[dp] = None
                continue
            in_node = max(1, self.job.links.domain_size // (tp * cp))
            for sharding in _list_shardings(self.job, dp, in_node, self.named.get("dp_shard")):
                yield Layout(world_size=self.planned.world, **sharding, **degrees)

    def attempt_batches(self, split: Layout) -> None:
        """Forecast one split with increasing micro-batch, until one fits with no number of chunks."""
        free = usual_options(self.job, split.tp, self.planned.precision)
        free |= {name: value for name, value in self.named.items() if name in free and name != "precision"}
        split = replace(split, **free)
        fixed: dict[str, Any] = {name: self.named[name] for name in _FITTED if name in self.named}
        self.broken = next(list_broken_by_degrees(self.job, replace(split, **fixed)), None)
        per_rank = self.planned.global_batch // split.data_parallel
        self.fitted = None
        for micro in self._list_micro_batches(per_rank):
            if micro > per_rank or per_rank % micro:
                continue
            accumulation = per_rank // micro
            if split.pp > 1 and accumulation < split.pp:
                break
            if accumulation == 1:
                self.fitted = None  # without accumulation, gradients are freed at once and leave more memory
            batched = replace(split, micro_batch=micro, gradient_accumulation=accumulation)
            if not self._attempt_chunks(batched):
                break

    def _list_micro_batches(self, per_rank: int) -> tuple[int, ...]:
        micro, times = self.named.get("micro_batch"), self.named.get("gradient_accumulation")
        if isinstance(micro, int):
            return (micro,)
        return (per_rank // times,) if isinstance(times, int) and per_rank >= times else _MICRO_BATCHES

    def _attempt_chunks(self, split: Layout) -> bool:
        """Forecast without interleaving, then with most chunks first, until fewer are slower. False if none fits.

        The bubble shrinks with 1/v while sends grow with v, so the time has a single minimum.
        """
        fits, last = False, math.inf
        plain: Schedule = "gpipe" if self.named.get("schedule") == "gpipe" else "1f1b"
        for virtual in _list_virtuals(self.job, split, self.named.get("virtual_stages")):
            named = self.named.get("stage_layers")
            uneven = named if isinstance(named, tuple) else uneven_stages(self.job.model.layers, split.pp * virtual)
            if split.pp > 1 and uneven and len(uneven) != split.pp * virtual:
                continue
            base = replace(split, schedule="interleaved" if virtual > 1 else plain, virtual_stages=virtual,
                           stage_layers=uneven if split.pp > 1 else ())  # fmt: skip
            if not all(getattr(base, name) == value for name, value in self.named.items() if name not in _FITTED):
                fits = True  # was not tried
                continue
            seconds = self.attempt(base)
            if virtual == 1 and seconds is None:
                break  # with chunks, a stage has no fewer layers, and holds more micro-batches
            fits = fits or seconds is not None
            if virtual > 1 and seconds is not None:
                if seconds > last:
                    break
                last = seconds
        return fits

    def attempt(self, base: Layout) -> float | None:
        """Forecast one layout, and keep it if it is the best of its family. Returns its seconds, or None if invalid."""
        key = base.family
        if broken := self.broken or next(list_broken_by_batch(self.job, base), None):
            self.forbidden.setdefault(broken.rule, Rejected(what=key, rule=broken.rule, reason=broken.reason))
            return None
        self.ranking.forecast_count += 1
        fit = fit_memory(self.job, base, self.budget, fixed=self.named, after=self.fitted)
        if isinstance(fit, float):
            self.missing_bytes[key] = min(self.missing_bytes.get(key, fit), fit)
            for offloaded in (replace(base, offload=target) for target in self.job.engine.offloads):
                if base.dp_replicate == 1 and (exceeds := _exceeds_host_memory(self.job, offloaded)):
                    row = Rejected(what="offloading", rule="host-memory-holds", reason=exceeds)
                    self.forbidden.setdefault(row.what, row)
            return None
        candidate = self.planned.candidate(*fit)
        if candidate.layout.virtual_stages == 1:
            self.fitted = candidate.layout
        slot = key, candidate.tight, candidate.over, candidate.layout.offload != "none"
        self.fastest[slot] = min(candidate.seconds, self.fastest.get(slot, candidate.seconds))
        best = self.best.get(slot)
        is_equal = candidate.seconds <= TIE * self.fastest[slot]
        if best is None or candidate.seconds < best.seconds / TIE or (is_equal and candidate.risk < best.risk):
            self.best[slot] = candidate
        return candidate.seconds

    def record_rejections(self) -> None:
        """Record a reason for each rule, degree and family without a layout; missing memory in ascending order."""
        families = {candidate.layout.family for candidate in self.best.values()}
        listed = {row.rule for row in self.ranking.rejected}
        rejected = [row for rule, row in self.forbidden.items() if rule not in listed]
        for dp in self.indivisible:
            reason = f"global batch {self.planned.global_batch} does not divide by {dp}"
            rejected.append(Rejected(what=f"{dp} data-parallel ranks", rule="batch-divides", reason=reason))
        for family, missing in sorted(self.missing_bytes.items(), key=lambda item: item[1]):
            if family not in families:
                reason = f"needs {missing / GIB:.1f} GiB more memory per rank than is available"
                rejected.append(Rejected(what=family, rule="memory-fits", reason=reason))
        self.ranking.rejected_families = rejected
        self.ranking.rejected += rejected

    def rank(self) -> None:
        """Put the simplest layout first that no other beats by more than the forecast error; then the fastest."""
        families: dict[str, list[Candidate]] = {}
        for candidate in self.best.values():
            families.setdefault(candidate.layout.family, []).append(candidate)
        best = sorted((choose_simplest(self.job, members) for members in families.values()), key=lambda c: c.seconds)
        if best:
            winner = choose_simplest(self.job, best)
            best.sort(key=lambda c: c is not winner)
        self.ranking.best = best


def choose_simplest(job: Job, candidates: Sequence[Candidate]) -> Candidate:
    """Return, from layouts as fast as the fastest within the forecast error, the one with fewest complications.

    Of equally simple layouts, it is the fastest; of equally fast ones (within `TIE`), the one with the least risk.
    Layouts that need more memory than there is are left out; if all do, it is the one that needs least.
    """
    candidates = [each for each in candidates if not each.over] or [min(candidates, key=lambda c: c.memory.total)]
    first = min(candidates, key=lambda c: c.seconds)
    near = [c for c in candidates if math.log(c.seconds / first.seconds) <= difference_sigma(job, c, first)]
    fewest = min(len(c.list_complications(job.links)) for c in near)
    simple = [c for c in near if len(c.list_complications(job.links)) == fewest]
    fastest = min(c.seconds for c in simple)
    return min((c for c in simple if c.seconds <= TIE * fastest), key=lambda c: c.risk)


def difference_sigma(job: Job, first: Candidate, other: Candidate) -> float:
    """Return the standard deviation of the error in log(seconds of one / seconds of the other)."""
    if degrees_of(first.layout) == degrees_of(other.layout):
        return widths().pair_same
    assumed = job.links.network is not None and job.links.network.how == "assumed"
    shares = [c.parts.communication / c.parts.total for c in (first, other)]
    return math.hypot(widths().pair, SIGMAS["link_assumed"] * abs(shares[0] - shares[1]) if assumed else 0.0)


_CHOICES: tuple[Checkpointing, ...] = ("none", "selective", "full")


def fit_memory(
    job: Job, base: Layout, budget: float | None, *, fixed: Mapping[str, object], after: Layout | None = None,
) -> tuple[Layout, MemoryParts] | float:  # fmt: skip
    """Return the lightest checkpointing that fits, else offloading, else the bytes missing for full checkpointing.

    `after`: what fitted for a layout with no more data; choices lighter than its choice are skipped.
    """
    smallest = float("inf")
    for layout in _list_lighter(job, base, fixed, after):
        memory = memory_of(job, layout)
        if budget is None or memory.total <= budget:
            return layout, memory
        if layout.offload == fixed.get("offload", "none"):
            smallest = min(smallest, memory.total - budget)
    return smallest


def _list_lighter(job: Job, base: Layout, fixed: Mapping[str, object], after: Layout | None) -> Iterator[Layout]:
    """Yield a layout with more and more checkpointing, then with offloading, which is slow."""
    offloaded = fixed.get("offload", "none") != "none" or (after is not None and after.offload != "none")
    for choice in () if offloaded else _CHOICES[_CHOICES.index(after.checkpointing) if after else 0 :]:
        if choice in job.engine.checkpointing and fixed.get("checkpointing", choice) == choice:
            yield base if choice == "none" else replace(base, checkpointing=choice)
    recompute: Any = fixed.get("checkpointing", "full")
    if recompute != "full" and not offloaded:
        return
    for target in job.engine.offloads:
        layout = replace(base, checkpointing=recompute, offload=target)
        if fixed.get("offload", target) == target and not any(list_broken(job, layout)):
            yield layout
