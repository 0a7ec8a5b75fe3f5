"""The verdict on a run that moves: a rank that the others always wait for, or a pace that has fallen.

A rank is named as late only where it works longer than the others by more than OUTLIER, and by more than the margin:
the sampling error at the number of looks or calls taken, with a confidence that holds for all ranks together, and the
error of the aligned clocks. Where only the margin forbids it, the answer is "not distinguishable yet", with the time
until it will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, sqrt
from statistics import NormalDist, mean, median, median_low, stdev
from typing import Any, NamedTuple

from collectives.traces.calls import RankTrace
from collectives.traces.states import Mark, RankState
from planner.why.facts import (
    ACTIONS,
    DOING,
    EXPLAINS,
    LONG_PHASES,
    LONGER,
    Activity,
    Cause,
    RunFacts,
    Verdict,
    activity,
    cause_of,
    open_verdict,
    verdict_of,
)
from planner.why.stuck import network

# NCCL's own diagnostics name a rank that is more than 30 % off the median (docs/userguide, troubleshooting/diagnostics)
OUTLIER = 1.3
CONFIDENCE = 0.999  # that no rank of a run is named by chance: one false alarm in a thousand verdicts
BLOCKS = 16  # of consecutive calls, whose means show how much lateness scatters
WINDOWS = (0.0, 0.5, 0.75, 0.875)  # shares of the run that are left out: a rank may have become late only now
MATTERS = 0.1  # of the time, that the others must lose
MOST_SECONDS_LEFT = 3600.0  # a difference that would take longer to prove is near the bar, not yet a suspicion
MIN_CALLS = 2 * BLOCKS  # that all ranks made
MIN_LOOKS = 30  # at a rank: of a share the standard error is then below 0.1
MIN_PIECES = 3  # of a pace on each side of a change: a median of fewer is one piece's word

# A quartz oscillator without discipline is off by some 20 ppm (its usual specification); NTP slews by less
DRIFT = 2e-5
SAME_HOST_SECONDS = 1e-3  # ranks of one host read one clock; what is left is the time between read and record


def slow(facts: RunFacts) -> Verdict | None:
    """The verdict where ranks wait for one that is always late, or where all have become slower together."""
    return _late(facts) or _slower(facts)


# One rank that is late ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How much longer a rank works than the others, as shares of the time."""

    rank: int
    work: float  # share of the time in which the rank does not wait for others
    usual: float  # the same, the median of the other ranks
    margin: float  # by which work - OUTLIER * usual must differ from zero
    sampling: float  # the part of the margin that falls with more looks or calls
    seconds: float  # of looks or calls that this rests on
    wait: str  # the sentence that shows it
    share: float = 1.0  # of all waiting that this rank causes

    @property
    def excess(self) -> float:
        """By how much the rank is beyond what is still no outlier."""
        return self.work - max(OUTLIER * self.usual, self.usual + MATTERS)

    @property
    def is_proven(self) -> bool:
        """Whether the difference exceeds its margin."""
        return self.excess > self.margin

    @property
    def seconds_left(self) -> float:
        """Until the sampling error will be small enough; infinite where the clocks' error alone forbids it."""
        room = self.excess - (self.margin - self.sampling)
        return max(0.0, self.seconds * ((self.sampling / room) ** 2 - 1)) if room > 0 else inf


def _quantile(ranks: int) -> float:
    """How many standard errors a difference must exceed, for as many ranks as are compared (Bonferroni)."""
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (max(1, ranks) * len(WINDOWS)))


def _late(facts: RunFacts) -> Verdict | None:
    by_looks = [row for since in WINDOWS for row in _by_looks(facts, since)]
    rows = [row for since in WINDOWS for row in _by_arrivals(facts, since)]
    refuted = {one.rank for one in by_looks if one.usual < 1 - MATTERS and one.work <= one.usual}
    rows = [one for one in rows if one.rank not in refuted] + by_looks
    late = sorted((one for one in rows if one.excess > 0), key=lambda one: -one.excess)
    proven = {one.rank: one for one in reversed(late) if one.is_proven}
    causes, not_at_fault = [], []
    for one in sorted(proven.values(), key=lambda one: -one.excess):
        what = _habit(one.rank, facts)
        if what.kind in LONG_PHASES:
            not_at_fault.append(f"rank {one.rank} {what.words}; {one.wait}")
        else:
            cost = min(1.0, one.work - one.usual)
            causes.append(replace(cause_of(one.rank, what, facts, one.wait, share=one.share), cost=cost,
                                  price=f"{cost:.0%} of the time of every other rank"))  # fmt: skip
    if causes:
        alone = causes[0].share is not None and causes[0].share >= EXPLAINS
        ranks = tuple(c.ranks[0] for c in causes[: 1 if alone else None])
        others = tuple(sorted({one.rank for one in rows} - set(ranks)))
        return verdict_of("slow", tuple(causes), facts, ranks, others)
    if not_at_fault:
        return Verdict(state="fine", line=f"no fault: {not_at_fault[0]}", not_at_fault=tuple(not_at_fault))
    open_rows = [one for one in late if one.seconds_left < MOST_SECONDS_LEFT]
    if not open_rows:
        return None
    one = open_rows[0]
    line = (f"not distinguishable yet: rank {one.rank} works in {one.work:.0%} of the time, the others in "
            f"{one.usual:.0%}, and the margin is {one.margin:.0%}; if this goes on, it will be in about "
            f"{max(1.0, one.seconds_left):.0f} s")  # fmt: skip
    return Verdict(state="fine", line=line)


def _by_arrivals(facts: RunFacts, since: float) -> list[Lateness]:
    """By when each rank made its calls, on aligned clocks; empty where the clocks cannot be compared.

    `since` is the share of the calls that is left out, from the first on.
    """
    rows = _arrivals(facts.traces, facts.world)
    clocks = align(rows, {rank: f"{s.boot} {s.host}" if s.host else None for rank, s in facts.states.items()})
    rows = rows[max(1, int(since * len(rows))) :]
    size = len(rows) // BLOCKS
    if len(rows) < MIN_CALLS or len(clocks) < len(rows[0]):
        return []
    true = [{rank: at - clocks[rank].seconds for rank, at in row.items()} for row in rows]
    elapsed = max(true[-1].values()) - max(true[0].values())
    if elapsed <= 0:
        return []
    waits = [{rank: max(row.values()) - at for rank, at in row.items()} for row in true]
    blocks = [waits[n * size : (n + 1) * size] for n in range(BLOCKS)]
    total = {rank: sum(row[rank] for row in waits) for rank in waits[0]}
    caused = dict.fromkeys(total, 0.0)
    for row in waits:
        caused[min(row, key=lambda rank: row[rank])] += sum(row.values())
    per_second, all_waiting = len(waits) / elapsed, sum(caused.values())
    found = []
    for rank in total:
        others = [one for one in total if one != rank]
        middle = median_low(total[one] for one in others)
        usual = next(one for one in others if total[one] == middle)
        differences = [mean(row[usual] - row[rank] for row in block) for block in blocks]
        sampling = _quantile(len(total)) * stdev(differences) / sqrt(BLOCKS) * per_second
        clock = (clocks[rank].error + clocks[usual].error) * per_second
        share = caused[rank] / all_waiting if all_waiting > 0 else 0.0
        wait = (f"flight recorder: the others waited {caused[rank] / len(others):.1f} s of {elapsed:.1f} s for it, "
                f"{share:.0%} of all waiting, over {len(rows)} collectives (margin "
                f"{(sampling + clock) * elapsed:.1f} s, clocks within {clock / per_second * 1e3:.1f} ms)")  # fmt: skip
        found.append(Lateness(rank=rank, work=1 - total[rank] / elapsed, usual=1 - total[usual] / elapsed, share=share,
                              margin=sampling + clock, sampling=sampling, seconds=elapsed, wait=wait))  # fmt: skip
    return found


def _arrivals(traces: Mapping[int, RankTrace], world: int | None) -> list[dict[int, float]]:
    """When each rank made each collective of the one group that most calls are of; only calls that all ranks made."""
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for rank, trace in traces.items():
        for call in trace.calls:
            if call.created and not call.p2p:
                rows.setdefault((call.group, call.number), {})[rank] = call.created
    full = {key: row for key, row in rows.items() if len(row) == (world or len(traces)) > 1}
    calls = Counter(group for group, _ in full)
    busiest = calls.most_common(1)[0][0] if calls else ""
    return [row for (group, _), row in sorted(full.items(), key=lambda one: one[0][1]) if group == busiest]


def _by_looks(facts: RunFacts, since: float) -> list[Lateness]:
    """By how often a look at each rank found it in a collective: no clocks are compared.

    Only looks count between which a collective began: a long pause for other work is one event, however often it is
    looked at. Looks at long work (a checkpoint, an evaluation) are left out. `since` is the share of the run left out.
    """
    works: dict[int, tuple[float, int]] = {}
    for rank, state in facts.states.items():
        start = state.marks[int(since * len(state.marks))] if state.marks else Mark()
        looks = {kind: n - start.moving.get(kind, 0) for kind, n in state.moving.items() if kind not in LONG_PHASES}
        taken = sum(looks.values())
        if taken < MIN_LOOKS:
            return []
        works[rank] = 1 - looks.get("collective", 0) / taken, taken
    if len(works) < max(2, facts.world or 0):
        return []
    found = []
    for rank, (work, taken) in works.items():
        others = [works[one] for one in works if one != rank]
        usual, least = median(share for share, _ in others), min(n for _, n in others)
        error = sqrt(_variance(work, taken) + OUTLIER**2 * _variance(usual, least))
        margin = _quantile(len(works)) * error
        state = facts.states[rank]
        wait = (f"rank states: it is outside of collectives in {work:.0%} of {taken} looks, the others in {usual:.0%} "
                f"(margin {margin:.0%})")  # fmt: skip
        found.append(Lateness(rank=rank, work=work, usual=usual, margin=margin, sampling=margin,
                              seconds=(1 - since) * (state.written - (state.marks[0].at if state.marks else 0.0)),
                              wait=wait))  # fmt: skip
    return found


def _variance(share: float, looks: int) -> float:
    """Of a share of so many looks, with one look of each kind added, so that 0 of 30 is not taken for certain."""
    smoothed = (share * looks + 1) / (looks + 2)
    return smoothed * (1 - smoothed) / looks


def _habit(rank: int, facts: RunFacts) -> Activity:
    """What a rank that is always late does more than the others do."""
    state = facts.states.get(rank)
    if facts.processes.get(rank) in ("stopped", "gone") or state is None or not state.samples:
        return activity(rank, facts)
    mine, total = state.samples, sum(state.samples.values())
    rest: dict[str, int] = {}
    for other, one in facts.states.items():
        if other != rank:
            for kind, looks in one.samples.items():
                rest[kind] = rest.get(kind, 0) + looks
    theirs = max(1, sum(rest.values()))
    more = {kind: mine.get(kind, 0) / total - rest.get(kind, 0) / theirs for kind in DOING if kind != "collective"}
    kind = max(more, key=lambda one: more[one])
    # a difference that looks by chance differ by is none
    if more[kind] <= 2 * sqrt(0.25 / total + 0.25 / theirs):
        return Activity("unknown", "is late; what it does longer than the others is not known")
    share = mine.get(kind, 0) / total
    return Activity(kind, f"{DOING[kind]} in {share:.0%} of the looks at it, {rest.get(kind, 0) / theirs:.0%} at the "
                    "others")  # fmt: skip


# Clocks of ranks, aligned by what both ends of a collective observed --------------------------------------------------
#
# A rank leaves a collective only after every other rank has entered it. So the next call of a rank comes after each
# other rank's present one, in true time. Each pair of calls bounds the difference of two clocks from one side; calls
# that follow each other quickly, as the broadcasts with which a model is wrapped and the reduction of a loss after that
# of the gradients, bound it to a few milliseconds. Calls that are made before the last one is over bound it wrongly,
# but only towards less lateness, or leave no room at all: then the clocks are not compared.


class Offset(NamedTuple):
    """By how much a rank's clock is ahead of the reference's: seconds, and how much that may be off."""

    seconds: float
    error: float


def align(rows: Sequence[Mapping[int, float]], hosts: Mapping[int, str | None]) -> dict[int, Offset]:
    """The clock of each rank against that of the lowest one; a rank whose clock no bounds fit is left out.

    `rows` has the time at which each rank made one call, for consecutive calls of one group, oldest first.
    """
    if len(rows) < 2:
        return {}
    reference = min(rows[0])
    elapsed = max(rows[-1].values()) - max(rows[0].values())
    found = {reference: Offset(0.0, 0.0)}
    for rank in rows[0]:
        if rank == reference:
            continue
        low = max(now[rank] - after[reference] for now, after in pairwise(rows))
        high = min(after[rank] - now[reference] for now, after in pairwise(rows))
        if hosts.get(rank) is not None and hosts.get(rank) == hosts.get(reference) and (low <= 0 <= high or low > high):
            low, high = -SAME_HOST_SECONDS, SAME_HOST_SECONDS  # one clock, whatever calls that overlap seem to say
        elif low <= high:
            low, high = low - DRIFT * elapsed, high + DRIFT * elapsed
        if low <= high:
            found[rank] = Offset((low + high) / 2, (high - low) / 2)
    return found


# A pace that falls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """When a pace changed for good: the pieces before it and since."""

    at: int  # pieces before it
    before: float  # seconds a call, median of the pieces
    since: float


def find_change(pieces: Sequence[tuple[float, int]]) -> Change | None:
    """The one change that fits (seconds, calls) of consecutive pieces best, by least absolute deviations from medians.

    None with fewer than MIN_PIECES on a side. A pause in one piece moves no median, and so is no change.
    """
    paces = [seconds / calls for seconds, calls in pieces if calls > 0]
    best: tuple[float, Change] | None = None
    for at in range(MIN_PIECES, len(paces) - MIN_PIECES + 1):
        left, right = median(paces[:at]), median(paces[at:])
        off = sum(abs(one - left) for one in paces[:at]) + sum(abs(one - right) for one in paces[at:])
        if best is None or off < best[0]:
            best = off, Change(at=at, before=left, since=right)
    return best[1] if best else None


class Piece(NamedTuple):
    """What a rank did between two of its marks."""

    at: float  # Unix seconds, of the earlier
    calls: int
    spent: dict[str, float]  # seconds by phase


def _pieces(state: RankState) -> list[Piece]:
    """The pieces of a rank's run without the first, which connects and compiles."""
    found: list[Piece] = []
    for old, new in pairwise(state.marks[1:]):
        looks = {kind: new.samples.get(kind, 0) - old.samples.get(kind, 0) for kind in new.samples}
        total = sum(looks.values())
        if new.calls > old.calls and total > 0 and new.at > old.at:
            spent = {kind: n / total * (new.at - old.at) for kind, n in looks.items()}
            found.append(Piece(old.at, new.calls - old.calls, spent))
    return found


@dataclass(slots=True, kw_only=True)
class Growth:
    """What the ranks do longer since their pace fell."""

    before: float
    since: float
    began: float  # Unix seconds
    more: dict[int, dict[str, float]]  # by rank: seconds a call by phase


def _growth(facts: RunFacts) -> Growth | None:
    found = Growth(before=0.0, since=0.0, began=0.0, more={})
    changes: list[Change] = []
    for rank, state in facts.states.items():
        pieces = _pieces(state)
        at_work = [(sum(s for k, s in one.spent.items() if k not in LONG_PHASES), one.calls) for one in pieces]
        if (changed := find_change(at_work)) is None:
            return None
        changes.append(changed)
        found.began = max(found.began, pieces[changed.at].at)
        each = {kind: [one.spent.get(kind, 0.0) / one.calls for one in pieces] for kind in DOING}
        found.more[rank] = {
            kind: max(0.0, median(rows[changed.at :]) - median(rows[: changed.at]))
            for kind, rows in each.items() if kind not in LONG_PHASES
        }  # fmt: skip
    if not changes:
        return None
    found.before, found.since = (median(getattr(one, name) for one in changes) for name in ("before", "since"))
    return found if found.since > LONGER * found.before > 0 else None


def _slower(facts: RunFacts) -> Verdict | None:
    """All ranks take longer from call to call than earlier in this run: by what they do more of since then.

    None where a few ranks do: whether they are late is for _late to say, with its margin.
    """
    growth = _growth(facts)
    if growth is None:
        return None
    timing = f"rank states: {growth.since:.3g} s from call to call, {growth.before:.3g} s before"
    work = [_most(row) for row in growth.more.values()]
    busy = sum(kind != "collective" and share >= EXPLAINS for kind, share in work)
    if 0 < busy < len(work) / 2:
        return None
    return _all_alike(growth, facts, network(facts, "has become slow", timing, since=growth.began), timing)


def _all_alike(growth: Growth, facts: RunFacts, slower: Cause, timing: str) -> Verdict:
    """The verdict where all ranks have become slower alike."""
    more, times, cost = growth.more, growth.since / growth.before, _cost(growth.before, growth.since)
    kind, share = _most({kind: median(row[kind] for row in more.values()) for kind in next(iter(more.values()))})
    message = f"all ranks alike have become {times:.1f} times slower, in"
    if share < EXPLAINS:
        cause = Cause(code="all", message=f"{message} {kind} and others", share=share, evidence=(timing,))
    elif kind == "collective" and len(slower.evidence) > 1:
        cause = slower
    elif kind == "collective":  # no byte was seen waiting: a rank that is not let run looks the same
        cause = Cause(code="all.collective", message=f"{message} their collectives", evidence=(timing,), **cost)
        how = "topoflight search on all nodes; cpu.stat of each rank's cgroup"
        return open_verdict("slow", cause, facts, (), "whether the network or a rank without CPU time", how)
    else:
        cause = Cause(code=f"all.{kind}", message=f"all ranks alike: each {DOING[kind]} longer", share=share,
                      evidence=(timing,), action=ACTIONS.get(kind, ""))  # fmt: skip
    return verdict_of("slow", (replace(cause, **cost),), facts)


def _cost(before: float, since: float) -> dict[str, Any]:
    """Of a pace in seconds a call that was better before."""
    cost = 1 - before / since if since > 0 else 0.0
    return {"cost": cost, "price": f"{cost:.0%} of the time since then"}


def _most(row: Mapping[str, float]) -> tuple[str, float]:
    """The largest, and its share of all."""
    kind, total = max(row, key=lambda one: row[one]), sum(row.values())
    return kind, row[kind] / total if total > 0 else 0.0
