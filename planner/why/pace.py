"""The verdict on a run that moves: one rank for which the others always wait, or a pace that has dropped.

A rank is named as late only if it works longer than the others by more than OUTLIER, by more than their clocks can
differ, and by more than the margin, which is the sampling error for the number of samples or calls, with a confidence
that covers all ranks together. If only the margin prevents the accusation, the answer is "not distinguishable yet",
with the time until it will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, sqrt
from statistics import NormalDist, mean, median, median_low, stdev
from time import gmtime, strftime
from typing import NamedTuple

from collectives.traces.rank_files import Call, Mark, RankState
from planner.why import limits
from planner.why.blocked import network
from planner.why.facts import Activity, Cause, RunFacts, Verdict, find_main_phase
from planner.why.words import KINDS, LONG_PHASES, PHASES, WORK

# NCCL diagnostics report a rank more than 30 % away from the median (docs/userguide, troubleshooting/diagnostics)
OUTLIER = 1.3
BLOCKS = 16  # of consecutive calls; their means show the variance of lateness
WINDOWS = (0.0, 0.5, 0.75, 0.875)  # fractions of the run to skip: a rank may have become late only recently
MATTERS = 0.1  # minimum fraction of the time that the others lose
MAX_SECONDS_LEFT = 3600.0  # a difference that takes longer to prove is near the limit and not yet a suspicion
MIN_CALLS = 2 * BLOCKS  # calls that all ranks made
MIN_LOOKS = 30  # samples per rank: the standard error of a fraction is then below 0.1
# Other work of a host comes and goes within seconds. A rank that is late without a visible cause is named only by calls
# that span so long that each block can cover one polling interval of the monitor.
MIN_SECONDS = BLOCKS * limits.LOOK_SECONDS
AS_OTHERS = Activity("unknown", "is late; what it does longer than the others is not known")
# A free-running quartz oscillator is off by about 20 ppm (its usual specification); NTP slews by less
DRIFT = 2e-5
SAME_HOST_SECONDS = 1e-3  # ranks of one host share a clock; the rest is the time between reading and recording it
MIN_PIECES = 3  # of a pace on each side of a change: a median of fewer is one piece's word


# One rank that is late ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How much longer a rank works than the others, as fractions of the time."""

    rank: int
    work: float  # fraction of the time in which the rank does not wait for others
    usual: float  # the same, the median of the other ranks
    margin: float  # by which work - OUTLIER * usual must differ from zero; it decreases with more samples or calls
    seconds: float  # duration of the samples or calls used
    wait: str  # the sentence that reports it
    share: float = 1.0  # fraction of all waiting that this rank causes

    @property
    def excess(self) -> float:
        """Return by how much the rank exceeds the outlier limit."""
        return self.work - max(OUTLIER * self.usual, self.usual + MATTERS)

    @property
    def seconds_left(self) -> float:
        """Return the time until the margin is small enough."""
        return max(0.0, self.seconds * ((self.margin / self.excess) ** 2 - 1)) if self.excess > 0 else inf


def find_late_rank(facts: RunFacts) -> Verdict | None:
    """Return the verdict if the others always wait for one rank, or if a rank looks late and is not at fault."""
    windows = WINDOWS[:1] if facts.is_over else WINDOWS  # nothing is recent in a run that has ended
    by_looks = [row for since in windows for row in _compare_samples(facts, since)]
    has_joined = any("join" in state.samples for state in facts.states.values())  # such a rank makes calls at once
    rows = [] if has_joined else _compare_calls(facts, windows)
    refuted = {row.rank for row in by_looks if row.usual < 1 - MATTERS and row.work <= row.usual}
    rows = [row for row in rows if row.rank not in refuted] + by_looks
    late_rows = sorted((row for row in rows if row.excess > 0), key=lambda row: -row.excess)
    habits = {row.rank: _find_habit(row.rank, facts) for row in late_rows}
    lacking = {row: MIN_SECONDS - row.seconds if habits[row.rank] == AS_OTHERS else 0.0 for row in late_rows}
    proven = {row.rank: row for row in reversed(late_rows) if row.excess > row.margin and lacking[row] <= 0}
    causes, not_at_fault = [], []
    for one in sorted(proven.values(), key=lambda row: -row.excess):
        habit = habits[one.rank]
        if habit.kind in (*LONG_PHASES, "turns"):
            not_at_fault.append(f"rank {one.rank} {habit.words}; {one.wait}")
        else:
            causes.append(facts.cause_of(one.rank, habit, one.wait, _describe_change(one.rank, facts), share=one.share))
    if causes:
        alone = (causes[0].share or 0.0) >= limits.EXPLAINS
        ranks = tuple(cause.ranks[0] for cause in causes[: 1 if alone else None])
        others = tuple(sorted({row.rank for row in rows} - set(ranks)))
        return facts.verdict("slow", *causes, ranks=ranks, waiting=others)
    if not_at_fault:
        return Verdict(state="fine", line=f"no fault: {not_at_fault[0]}", not_at_fault=tuple(not_at_fault))
    row = min(late_rows, key=lambda late: late.seconds_left, default=None)
    if row is None or row.seconds_left >= MAX_SECONDS_LEFT:
        return None
    line = (f"not distinguishable yet: rank {row.rank} works in {row.work:.0%} of the time, the others in "
            f"{max(0.0, row.usual):.0%}, and the margin is {row.margin:.0%}; if this continues, it will be in about "
            f"{max(1.0, row.seconds_left, lacking[row]):.0f} s")  # fmt: skip
    return Verdict(state="fine", line=line)


def _describe_change(rank: int, facts: RunFacts) -> str:
    """Return since when a rank has been late, if its pace has changed in this run; else an empty text."""
    growth = _find_growth(facts.states[rank]) if rank in facts.states else None
    if growth is None or growth.since <= OUTLIER * growth.before:
        return ""
    time = strftime("%H:%M:%S", gmtime(growth.began))
    return (f"late since about {time} UTC, after some {growth.calls} collectives: {growth.since:.3g} s from call to "
            f"call, {growth.before:.3g} s before")  # fmt: skip


def _get_quantile(ranks: int) -> float:
    """Return how many standard errors a difference must exceed for this number of compared ranks (Bonferroni)."""
    return NormalDist().inv_cdf(1 - (1 - limits.CONFIDENCE) / (max(1, ranks) * len(WINDOWS)))


class Waits(NamedTuple):
    """How long each rank waited for others in each call that all ranks made."""

    rows: list[dict[int, float]]  # seconds by rank, one row per call
    elapsed: float  # seconds from the first call to the last
    errors: Mapping[int, float]  # error of each rank's clock in seconds; 0 if no clocks are compared


def _compare_calls(facts: RunFacts, windows: tuple[float, ...]) -> list[Lateness]:
    """Compare how long the ranks waited in their calls; empty if that cannot be compared.

    A window is the fraction of the calls to skip, from the first on.
    """
    calls = _find_shared_calls(facts)
    rows = []
    for since in windows:
        waits = _measure_on_gpus(calls, since) or _measure_by_arrival(calls, facts, since)
        if waits is None or len(waits.rows) < MIN_CALLS or waits.elapsed <= 0:
            continue
        total = {rank: sum(row[rank] for row in waits.rows) for rank in waits.rows[0]}
        caused = dict.fromkeys(total, 0.0)
        for row in waits.rows:
            caused[min(row, key=lambda rank: row[rank])] += sum(row.values())
        rows += [_measure_lateness(rank, waits, total, caused) for rank in total]
    return rows


def _measure_lateness(rank: int, waits: Waits, total: Mapping[int, float], caused: Mapping[int, float]) -> Lateness:
    """Return how late a rank is, from its waiting time and that of the median of the other ranks."""
    others = [other for other in total if other != rank]
    middle = median_low(total[other] for other in others)
    usual = next(other for other in others if total[other] == middle)
    count, elapsed = len(waits.rows), waits.elapsed
    size, clocks = count // BLOCKS, waits.errors[rank] + waits.errors[usual]
    differences = [row[usual] - row[rank] for row in waits.rows]
    blocks = [mean(differences[n * size : (n + 1) * size]) for n in range(BLOCKS)]
    # A few long pauses are no habit: the sum of waits that come at random times scatters by the root of their squares.
    error = max(stdev(blocks) / sqrt(BLOCKS), sqrt(sum(difference * difference for difference in differences)) / count)
    margin, all_waiting = _get_quantile(len(total)) * error * count / elapsed, sum(caused.values())
    share = caused[rank] / all_waiting if all_waiting > 0 else 0.0
    wait = (f"flight recorder: the others waited {caused[rank] / len(others):.1f} s of {elapsed:.1f} s for it, "
            f"{share:.0%} of all waiting, over {count} collectives (margin {margin * elapsed:.1f} s"
            f"{f', clocks within {clocks * 1e3:.1f} ms' if clocks else ''})")  # fmt: skip
    work = 1 - (total[rank] + clocks * count) / elapsed
    return Lateness(rank=rank, work=work, usual=1 - total[usual] / elapsed, share=share, margin=margin, seconds=elapsed,
                    wait=wait)  # fmt: skip


def _measure_on_gpus(calls: list[dict[int, Call]], since: float) -> Waits | None:
    """Use the duration of each call on each GPU: all GPUs leave it together, so the last to enter has the shortest.

    Returns None if the recorder has not measured these durations.
    """
    rows = [{rank: call.seconds for rank, call in row.items() if call.seconds is not None} for row in calls]
    complete = [n for n, row in enumerate(rows) if len(row) == len(calls[n])]
    complete = complete[max(1, int(since * len(complete))) :]
    if not complete:
        return None
    first, last = calls[complete[0]], calls[complete[-1]]
    elapsed = median((last[rank].created or 0.0) - (first[rank].created or 0.0) for rank in first)
    waits = [{rank: seconds - min(rows[n].values()) for rank, seconds in rows[n].items()} for n in complete]
    return Waits(waits, elapsed, dict.fromkeys(first, 0.0))


def _measure_by_arrival(calls: list[dict[int, Call]], facts: RunFacts, since: float) -> Waits | None:
    """Use the time at which each rank made its calls, on aligned clocks; None if that is impossible or useless.

    Calls enqueued ahead of the GPU, such as NCCL's, do not show when a rank reached them.
    """
    rows = [{rank: call.created or 0.0 for rank, call in row.items()} for row in calls]
    if not rows or any(call.is_ahead for call in calls[0].values()):
        return None
    clocks = align(rows, {rank: f"{s.boot} {s.host}" for rank, s in facts.states.items() if s.host})
    rows = rows[max(1, int(since * len(rows))) :]
    if not rows or len(clocks) < len(rows[0]):
        return None
    true = [{rank: arrival - clocks[rank][0] for rank, arrival in row.items()} for row in rows]
    # a call that a rank makes before the last one could begin waits only from then on: no second counts twice
    waits = [{rank: max(row.values()) - max(arrival, *old.values()) for rank, arrival in row.items()}
             for old, row in pairwise(true)]  # fmt: skip
    elapsed = max(true[-1].values()) - max(true[0].values())
    return Waits(waits, elapsed, {rank: error for rank, (_, error) in clocks.items()})


def align(rows: Sequence[Mapping[int, float]], hosts: Mapping[int, str]) -> dict[int, tuple[float, float]]:
    """Return the offset of each rank's clock from that of the lowest rank, and its error, by what their calls bound.

    A rank leaves a collective only after every other rank has entered it. So the next call of a rank comes after each
    other rank's present one, in true time. Each pair of calls bounds the difference of two clocks from one side; calls
    that follow each other quickly, as the broadcasts with which a model is wrapped and the reduction of a loss after
    that of the gradients, bound it to a few milliseconds. Calls that are made before the last one is over bound it
    wrongly, but only towards less lateness, or leave no room at all: such a rank is left out. `rows` has the time at
    which each rank made one call, for consecutive calls of one group, oldest first.
    """
    if len(rows) < 2:
        return {}
    reference, elapsed = min(rows[0]), max(rows[-1].values()) - max(rows[0].values())
    offsets = {reference: (0.0, 0.0)}
    for rank in sorted(set(rows[0]) - {reference}):
        low = max(now[rank] - after[reference] for now, after in pairwise(rows))
        high = min(after[rank] - now[reference] for now, after in pairwise(rows))
        if hosts.get(rank, rank) == hosts.get(reference) and (low <= 0 <= high or low > high):
            low, high = -SAME_HOST_SECONDS, SAME_HOST_SECONDS  # one clock, whatever calls that overlap seem to say
        elif low <= high:
            low, high = low - DRIFT * elapsed, high + DRIFT * elapsed
        if low <= high:
            offsets[rank] = (low + high) / 2, (high - low) / 2
    return offsets


def _find_shared_calls(facts: RunFacts) -> list[dict[int, Call]]:
    """Each rank's call, for the collectives that all ranks made of the one group that most calls are of."""
    rows: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, trace in facts.traces.items():
        for call in trace.calls:
            if call.created and not call.p2p:
                rows.setdefault((call.group, call.number), {})[rank] = call
    full = {key: row for key, row in rows.items() if len(row) == (facts.world or len(facts.traces)) > 1}
    calls = Counter(group for group, _ in full)
    busiest = calls.most_common(1)[0][0] if calls else ""
    return [row for (group, _), row in sorted(full.items(), key=lambda item: item[0][1]) if group == busiest]


def _compare_samples(facts: RunFacts, since: float) -> list[Lateness]:
    """By how often a look at each rank found it in a collective: no clocks are compared.

    Only looks count between which a collective began: a long pause for other work is one event, however often it is
    looked at. Looks at long work (a checkpoint, an evaluation) are left out. `since` is the share of the run left out.
    """
    works: dict[int, tuple[float, int]] = {}
    spans: dict[int, float] = {}  # marks are thinned out as a run grows, so their number does not show its time
    for rank, state in facts.states.items():
        start = state.marks[int(since * len(state.marks))] if state.marks else Mark()
        old = start.moving  # a file of a job's own may count otherwise
        looks = {kind: max(0, n - old.get(kind, 0)) for kind, n in state.moving.items() if kind not in LONG_PHASES}
        count = sum(looks.values())
        if count < MIN_LOOKS:
            return []
        works[rank], spans[rank] = (1 - looks.get("collective", 0) / count, count), state.written - start.at
    if len(works) < max(2, facts.world or 0):
        return []
    rows = []
    for rank, (work, count) in works.items():
        others = [works[other] for other in works if other != rank]
        usual, fewest = median(share for share, _ in others), min(n for _, n in others)
        margin = _get_quantile(len(works)) * sqrt(_variance(work, count) + OUTLIER**2 * _variance(usual, fewest))
        wait = (f"rank states: it is outside collectives in {work:.0%} of {count} samples, the others in {usual:.0%} "
                f"(margin {margin:.0%})")  # fmt: skip
        rows.append(Lateness(rank=rank, work=work, usual=usual, margin=margin, seconds=spans[rank], wait=wait))
    return rows


def _variance(share: float, looks: int) -> float:
    """Return the variance of a fraction of `looks` samples, with one sample of each kind added: 0 of 30 is no proof."""
    smoothed = (share * looks + 1) / (looks + 2)
    return smoothed * (1 - smoothed) / looks


def _find_habit(rank: int, facts: RunFacts) -> Activity:
    """Return what a rank that is always late does more often than the others."""
    state = facts.states.get(rank)
    if facts.processes.get(rank) == "stopped" or state is None or not state.samples:
        return facts.activity(rank)
    other_samples: Counter[str] = Counter()
    for other, other_state in facts.states.items():
        if other != rank:
            other_samples.update(other_state.samples)
    looks, of_rest = sum(state.samples.values()), max(1, other_samples.total())
    mine, theirs = ({kind: row.get(kind, 0) / total for kind in WORK}
                    for row, total in ((state.samples, looks), (other_samples, of_rest)))  # fmt: skip
    excess = {kind: mine[kind] - theirs[kind] for kind in mine}
    kind = max(excess, key=lambda name: excess[name])
    workers = mine["workers"], theirs["workers"]
    if min(workers) > MATTERS / 2 and (kind == "workers" or excess[kind] <= MATTERS):
        shares = f"{workers[0]:.0%} of its samples, {workers[1]:.0%} of those of the others"
        return Activity("turns", f"{KINDS['workers'].does} in {shares}: equally fast loaders take turns in being last")
    # a difference within the sampling error is not a difference
    if excess[kind] <= 2 * sqrt(0.25 / looks + 0.25 / of_rest):
        return AS_OTHERS
    now = find_main_phase(replace(state, is_active=False), kind) or kind  # the collectives themselves read and write
    return Activity(
        now, f"{KINDS[now].does} in {mine[kind]:.0%} of its samples, {theirs[kind]:.0%} of those of the others"
    )


# A pace that falls ----------------------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """By how much a rank has become permanently slower, and in which phases."""

    before: float  # seconds per call, median of the pieces of its run
    since: float
    began: float  # Unix seconds
    calls: int  # made until then
    more: dict[str, float]  # by phase: additional seconds per call


def _find_growth(state: RankState) -> Growth | None:
    """The one change of a rank's pace that fits best, by least absolute deviations from the medians before and since.

    None with fewer than MIN_PIECES on a side. A pause in one piece moves no median, and so is no change. The first
    piece is left out, because it connects and compiles.
    """
    pieces: list[tuple[Mark, dict[str, float]]] = []
    for old, new in pairwise(state.marks[1:]):
        looks = {kind: n - old.samples.get(kind, 0) for kind, n in new.samples.items()}
        total, calls = sum(looks.values()), new.calls - old.calls
        if calls > 0 and total > 0 and new.at > old.at:
            each = (new.at - old.at) / total / calls
            pieces.append((old, {kind: n * each for kind, n in looks.items() if kind not in LONG_PHASES}))
    paces = [sum(spent.values()) for _, spent in pieces]

    def misfit(index: int) -> float:
        return sum(abs(pace - median(part)) for part in (paces[:index], paces[index:]) for pace in part)

    at = min(range(MIN_PIECES, len(paces) - MIN_PIECES + 1), key=misfit, default=None)
    if at is None:
        return None
    kinds = {kind: [spent.get(kind, 0.0) for _, spent in pieces] for kind in PHASES if kind not in LONG_PHASES}
    grown = {kind: max(0.0, median(rows[at:]) - median(rows[:at])) for kind, rows in kinds.items()}
    change = pieces[at][0]
    return Growth(median(paces[:at]), median(paces[at:]), change.at, change.calls, grown)


def find_lower_pace(facts: RunFacts) -> Verdict | None:
    """All ranks take longer from call to call than earlier in this run: by what they do more of since then.

    None where a few ranks do: whether they are late is for find_late_rank to say, with its margin.
    """
    rows = [growth for state in facts.states.values() if (growth := _find_growth(state)) is not None]
    if not rows or len(rows) < len(facts.states):
        return None
    before, since = (median(getattr(growth, name) for growth in rows) for name in ("before", "since"))
    busy = sum(
        kind != "collective" and share >= limits.EXPLAINS for kind, share in (_most(growth.more) for growth in rows)
    )
    if not since > limits.LONGER * before > 0 or 0 < busy < len(rows) / 2:
        return None
    timing, times = f"rank states: {since:.3g} s from call to call, {before:.3g} s before", f"{since / before:.1f}"
    kind, share = _most({kind: median(growth.more[kind] for growth in rows) for kind in rows[0].more})
    if share < limits.EXPLAINS:
        return facts.named("all_mixed", times=times, kind=kind, share=share, evidence=(timing,))
    if kind == "collective":
        cause = network(facts, "has become slow", timing, since=max(growth.began for growth in rows))
        if len(cause.evidence) > 1:
            return facts.verdict("slow", cause)
        # no byte was seen waiting: a rank that is not let run looks the same
        key = "all_collective" if cause.code == "network" else "all_collective_here"
        return facts.named(key, times=times, evidence=(timing,))
    action = f"Expected if the batches or the sequences have become larger. Else: {KINDS[kind].action}"
    code, message = KINDS[kind].code.replace("rank.", "all."), f"all ranks alike: each {KINDS[kind].does} longer"
    cause = Cause(code=code, message=message, share=share, evidence=(timing,), action=action)
    return facts.verdict("slow", cause)


def _most(row: Mapping[str, float]) -> tuple[str, float]:
    """Return the largest value and its fraction of the total."""
    kind, total = max(row, key=lambda one: row[one]), sum(row.values())
    return kind, row[kind] / total if total > 0 else 0.0
