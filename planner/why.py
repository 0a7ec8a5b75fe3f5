"""Why a run is stuck, slow or failed: the rules that turn what its ranks left into one verdict.

A rank that waits is never blamed: whoever is missing in a collective is, and where that rank waits too, whom it waits
for. What the missing rank does says the rest: gone, stopped, loading data, computing; one that saves, evaluates or
compiles is innocent. A cause is named alone only where it explains EXPLAINS of the wait, else all shares are given.
Unknown stays unknown, with the command that would tell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from collectives.traces.calls import UNNAMED, Call, RankTrace
from collectives.traces.watchdog import Join
from contracts.rank_state import RankState
from contracts.tables import read_table

SCHEMA_VERSION = 1
EXPLAINS = 0.8  # of the wait: below it the shares are listed, and nobody is named alone
# NCCL's own diagnostics name a rank that is more than 30 % off the median (docs/userguide, troubleshooting/diagnostics)
OUTLIER = 1.3
STALL_SECONDS = 15.0  # as long as finetune.beside waits before it dumps
LONGER = 2.0  # than anything that this run has had before: what was seen once is a sample of one
MIN_LOOKS = 30  # at a rank, before it is said what it does: of a share the standard error is then below 0.1
MIN_PIECES = 3  # of a pace on each side of a change: a median of fewer is one piece's word
MIN_CALLS = 8  # of a collective that all ranks called, before its arrivals say anything
MOST_RANKS = 1 << 17  # of a job that may be true
STALE_SECONDS = 30.0  # three of the intervals at which a rank writes
_WORDS = read_table(__file__, "why.toml")
INNOCENT, DOING, ACTIONS, TRUST = (_WORDS[part] for part in ("innocent", "doing", "action", "trust"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause, the strongest first."""

    code: str  # "rank.gone", "call.size", "link", or a code of the log's reader
    message: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    share: float | None = None  # of the wait that it explains; None: it explains all, or that cannot be measured
    evidence: tuple[str, ...] = ()
    action: str = ""
    cost: float | None = None  # share of the run's time that it takes, while it lasts
    price: str = ""  # the same in words, and in hours and money where steps and prices are known


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """What no source tells, and the command that would."""

    what: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer."""

    state: str  # "stuck", "slow", "failed", "fine", or "unknown" where no source told anything
    line: str
    ranks: tuple[int, ...] = ()  # behind it, never those that wait
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    waiting: tuple[int, ...] = ()
    innocent: tuple[str, ...] = ()  # what looks like a fault and is none
    disagree: tuple[str, ...] = ()  # sources that differ, and which was believed
    unknown: tuple[Unknown, ...] = ()
    sources: tuple[str, ...] = ()
    change: tuple[str, ...] = ()  # lines of an environment, or of a manifest
    forecast: str = ""  # after the change
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that is known of a run's ranks."""

    traces: Mapping[int, RankTrace] = field(default_factory=dict)  # of the flight recorder
    states: Mapping[int, RankState] = field(default_factory=dict)
    processes: Mapping[int, str] = field(default_factory=dict)  # "runs", "stopped", "gone", where this host has them
    reported: Mapping[str, Mapping[int, RankTrace]] = field(default_factory=dict)  # by other sources: "watchdog", "RAS"
    errors: Mapping[int, str] = field(default_factory=dict)  # by rank, from a log: the exception that ended it
    clash: Mapping[int, Call] = field(default_factory=dict)  # by rank: calls that torch itself found not to match
    hung: Mapping[int, str] = field(default_factory=dict)  # ranks whose own watchdog stood still, and its words
    idle: frozenset[int] = frozenset()  # of these, the ranks that were in no collective
    late: Mapping[int, str] = field(default_factory=dict)  # ranks that a monitored barrier has missed, and its words
    lost: Mapping[int, str] = field(default_factory=dict)  # by rank: the host of a peer that closed its connection
    joins: Mapping[str, Join] = field(default_factory=dict)  # by key: process groups that not all have come to
    first: int | None = None  # rank that torchrun saw end first
    cut_short: str = ""  # the line by which gloo ended a rank that was sent more than its call takes
    cut_rank: int | None = None  # that rank: the only one that SIGABRT ended, by torchrun
    world: int | None = None
    now: float = 0.0


# Who waits for whom ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Jam:
    """Ranks that wait in calls, and those they wait for."""

    waits: dict[int, Call] = field(default_factory=dict)
    missing: dict[int, set[int]] = field(default_factory=dict)  # by who waits: of these a source tells it
    unseen: dict[int, set[int]] = field(default_factory=dict)  # by who waits: whether these came, no source tells
    here: dict[int, set[int]] = field(default_factory=dict)  # by who waits: who has come, itself included
    sizes: dict[int, int | None] = field(default_factory=dict)  # by who waits: how many its group has
    roots: set[int] = field(default_factory=set)  # waited for, and waiting for nobody
    met: set[int] = field(default_factory=set)  # in a call that all of its group are seen to have come to
    odd: list[Cause] = field(default_factory=list)  # calls that do not match
    held: set[int] = field(default_factory=set)  # in a call that the others' GPUs have begun, and theirs have not
    left: set[int] = field(default_factory=set)  # in a call that all have come to, and all others have left
    stale: set[int] = field(default_factory=set)  # of the missing: their dump is older than the call
    age: float = 0.0  # seconds of the longest wait
    usual: float = 0.0  # seconds of the longest pause before it


def jam(traces: Mapping[int, RankTrace], seen: Seen) -> Jam:
    """Each rank's oldest call that is not over, who has not come to it, and of whom that is not known."""
    found = Jam()
    for rank, trace in traces.items():
        state = seen.states.get(rank)
        failed = state is not None and state.ended and state.error and _HEARD.search(state.error)
        last = trace.calls[-1] if trace.calls and failed else None  # given up: the recorder has retired it
        call = next((one for one in trace.calls if not one.done), last)
        if call is None:
            continue
        found.waits[rank] = call
        named = _members(trace, call, seen)
        inside = _peers(rank, call, named) if call.p2p else named or _callers(call, traces)
        found.sizes[rank] = 2 if call.p2p else len(inside) if named else trace.sizes.get(call.group)
        found.here[rank] = {rank}
        for other in inside - {rank}:
            came = _came(other, rank, call, traces, seen)
            if came:
                found.here[rank].add(other)
                if call.p2p:
                    found.odd += _unequal(rank, call, other, _other_end(rank, call, traces[other]))
            elif came is None:
                found.unseen.setdefault(rank, set()).add(other)
            else:
                found.missing.setdefault(rank, set()).add(other)
                taken = traces[other].taken if other in traces else None
                if taken and call.created and taken < call.created:
                    found.stale.add(other)
        if call.created:
            found.age = max(found.age, _until(trace, seen) - call.created)
            found.usual = max(found.usual, _longest_pause(trace, call))
    found.odd += _mismatches(traces, found.waits)
    # a rank that stands in a collective by now, which its dump does not hold, has dumped before it came
    old = {rank for rank, state in seen.states.items() if state.phase == "collective" and rank not in found.waits}
    roots = _roots(found)
    found.met = {
        rank for rank, call in found.waits.items()
        if rank not in roots and len(found.here[rank]) == found.sizes[rank] and rank not in found.stale
        and not any(_elsewhere(other, call, found, traces) for other in found.here[rank])
        and (call.created is None or _until(traces[rank], seen) - call.created >= STALL_SECONDS)
    }  # fmt: skip
    found.held, found.left = _held_up(found), _left_behind(found, traces, seen)
    found.roots = (roots - old) | found.held | found.left
    return found


def _elsewhere(other: int, call: Call, found: Jam, traces: Mapping[int, RankTrace]) -> bool:
    """Whether a rank, of which a log tells, waits in another call of the group: before this one, or past it."""
    its = found.waits.get(other)
    return traces[other].partial and its is not None and its.group == call.group and its.number != call.number


def _until(trace: RankTrace, seen: Seen) -> float:
    """When a dump was taken, Unix seconds; of one by PyTorch alone, which writes it once a call has timed out, at most.

    Such a dump does not say when it was made, and a copy of the file is younger.
    """
    return trace.taken or (trace.written if trace.written and not seen.states else seen.now)


def _members(trace: RankTrace, call: Call, seen: Seen) -> set[int]:
    """The ranks of a call's group as its caller names them; the default group is everyone. Empty: nobody tells."""
    state = seen.states.get(trace.rank)
    ranks = trace.groups.get(call.group) or (state.groups.get(call.group) if state else None)
    if ranks:
        return set(ranks)
    everyone = trace.names.get(call.group) == "default_pg" and (seen.world or 0) <= MOST_RANKS
    return set(range(seen.world or 0)) if everyone else set()


def _callers(call: Call, traces: Mapping[int, RankTrace]) -> set[int]:
    """Ranks that have called something in the group: members of it, though not all of them."""
    return {
        rank for rank, trace in traces.items()
        if call.group and (call.group in trace.enqueued or any(one.group == call.group for one in trace.calls))
    }  # fmt: skip


def _peers(rank: int, call: Call, members: set[int]) -> set[int]:
    """Of a send or receive: the two ranks; itself alone where the other is not told."""
    inside = sorted(members)
    return {rank, inside[call.peer]} if call.peer is not None and call.peer < len(inside) else {rank}


def _other_end(rank: int, call: Call, trace: RankTrace) -> Call | None:
    """The receive or send that belongs to a rank's call, as its peer has called it, where it is not over.

    Numbers of sends and receives are each rank's own, so a pair is matched by its ends, first to first.
    """
    inside = trace.groups.get(call.group, ())
    mine = inside.index(rank) if rank in inside else rank
    return next(
        (one for one in trace.calls if one.p2p and not one.done and one.group == call.group and one.peer == mine
         and one.op != call.op), None,
    )  # fmt: skip


def _unequal(rank: int, call: Call, other: int, match: Call | None) -> list[Cause]:
    """A send and its receive that differ."""
    if match is None or call.op != "send" or not call.sizes or not match.sizes or _lengths(call) == _lengths(match):
        return []
    words = f"rank {rank} sends {call.words}, rank {other} receives {match.words}"
    return [Cause(code="call.size", message=f"{words}: not the same", ranks=tuple(sorted((rank, other))),
                  action="send and receive tensors of one size and type")]  # fmt: skip


def _lengths(call: Call) -> tuple[object, ...]:
    return (*(_product(one) for one in call.sizes), call.dtypes)


def _came(other: int, rank: int, call: Call, traces: Mapping[int, RankTrace], seen: Seen) -> bool | None:
    """Whether a rank has come to another's call; None where no source tells. A log that lacks it says nothing."""
    trace = traces.get(other)
    if trace is None:
        return None if other not in seen.states else False
    if call.p2p:
        return True if _other_end(rank, call, trace) else None if trace.partial else False
    newest = max((one.number for one in trace.calls if one.group == call.group and not one.p2p), default=0)
    if trace.partial and call.group not in trace.enqueued:
        return True if call.group and newest >= call.number else None
    return max(newest, trace.enqueued.get(call.group, 0)) >= call.number


def _longest_pause(trace: RankTrace, until: Call) -> float:
    """Seconds of the longest pause between two calls before this one; without the first, which connects."""
    times = [call.created for call in trace.calls if call.created and call.record < until.record]
    return max((b - a for a, b in pairwise(times[1:])), default=0.0)


def _roots(jammed: Jam) -> set[int]:
    """Ranks waited for that wait for nobody; of a circle none, and none that waits for somebody whom no source tells.

    Who still waits in an earlier call of the same group, which the others have left, is behind them.
    """
    wanted = set().union(*jammed.missing.values()) if jammed.missing else set()
    waits = jammed.waits

    def earlier(rank: int) -> bool:
        return all(
            waits[one].group == waits[rank].group and waits[one].number > waits[rank].number
            for one, them in jammed.missing.items() if rank in them
        )  # fmt: skip

    return {rank for rank in wanted if not jammed.missing.get(rank) and (rank not in waits or earlier(rank))}


def _held_up(jammed: Jam) -> set[int]:
    """Ranks that have called what the others have begun, and whose GPU has not come to it."""
    begun = {(call.group, call.number) for call in jammed.waits.values() if call.started and not call.p2p}
    late = {r for r, c in jammed.waits.items() if not c.started and (c.group, c.number) in begun and not c.p2p}
    return late if len(late) < len(jammed.waits) / 2 else set()


def _left_behind(jammed: Jam, traces: Mapping[int, RankTrace], seen: Seen) -> set[int]:
    """Ranks in a call that all of its group have come to, and all others of it have left: few, and by dumps as new.

    Calls are made ahead of the GPU, so that a rank whose GPU fails has called what the others wait in.
    """

    def over(other: int, rank: int, call: Call) -> bool:
        trace, mine = traces[other], traces[rank].taken
        fresh = trace.taken is None if mine is None else trace.taken is not None and trace.taken <= mine
        return fresh and not trace.partial and not any(
            one.group == call.group and one.number <= call.number and not one.p2p and not one.done
            for one in trace.calls
        )  # fmt: skip

    late = {
        rank for rank, call in jammed.waits.items()
        if not call.p2p and not traces[rank].partial and len(jammed.here[rank]) == jammed.sizes[rank]
        and len(jammed.here[rank]) > 1 and all(over(other, rank, call) for other in jammed.here[rank] - {rank})
        and (call.created is None or _until(traces[rank], seen) - call.created >= STALL_SECONDS)
    }  # fmt: skip
    return late if len(late) < len(jammed.waits) / 2 else set()


_ALIKE = ("all_reduce", "allreduce", "_allgather_base", "_all_gather_base", "all_gather", "reduce_scatter", "broadcast",
          "_reduce_scatter_base", "reduce", "allgather", "coalesced all_gather")  # fmt: skip


def _signature(call: Call) -> tuple[object, ...]:
    """What must be the same on each rank of a group."""
    alike = call.op.lower() in _ALIKE
    return (call.op, *((tuple(_product(one) for one in call.sizes), call.dtypes) if alike else ()))


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for one in sizes:
        found *= one
    return found


def _mismatches(traces: Mapping[int, RankTrace], waits: Mapping[int, Call]) -> list[Cause]:
    """The oldest call of each group that somebody waits in, and the ranks that called something else there."""
    oldest: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, call in waits.items():
        if not call.p2p and call.group:
            key = call.group, tuple(traces[rank].groups.get(call.group, ()))
            oldest[key] = min(call.number, oldest.get(key, call.number))
    causes = []
    for (group, members), number in oldest.items():
        rows = {
            rank: call for rank, trace in traces.items() for call in trace.calls
            if call.group == group and call.number == number and not call.p2p and call.op != UNNAMED
            and tuple(trace.groups.get(group, ())) == members
        }  # fmt: skip
        kinds = Counter(_signature(call) for call in rows.values())
        if len(kinds) < 2:
            continue
        (usual, most), (_, second) = kinds.most_common(2)
        tied = most == second
        if tied:  # what has been called before is the usual one
            earlier = {_signature(c) for trace in traces.values() for c in trace.calls if c.number < number}
            known = [kind for kind in kinds if kind in earlier]
            tied, usual = len(known) != 1, known[0] if len(known) == 1 else usual
        odd = sorted(rank for rank, call in rows.items() if tied or _signature(call) != usual)
        causes.append(_mismatch(rows, odd, usual, traces, tied=tied))
    return causes


def _mismatch(
    rows: Mapping[int, Call], odd: list[int], usual: tuple[object, ...], traces: Mapping[int, RankTrace], *, tied: bool
) -> Cause:
    other = next((call for call in rows.values() if _signature(call) == usual), rows[odd[0]])
    mine = next(rows[rank] for rank in reversed(odd) if _signature(rows[rank]) != _signature(other))
    code, what = "call.other", "another collective"
    if any(_swapped(traces[rank], rows[rank], other) for rank in odd if rank in traces):
        code, what = "call.order", "its collectives in another order"
    elif mine.op == other.op:
        code, what = "call.size", "other sizes"
    who = ranks_of(odd) + f" call{'s' if len(odd) == 1 else ''} {what}: "
    evidence = tuple(
        f"rank {rank}: {call.words}, {_place(call)}" + (f", from {call.frames[0]}" if call.frames else "")
        for rank, call in sorted(rows.items())
    )[:8]
    message = f"{who}{mine.words}, where the others call {other.words}"
    if tied:
        by_kind: dict[str, list[int]] = {}
        for rank, call in sorted(rows.items()):
            by_kind.setdefault(call.words, []).append(rank)
        each = ", ".join(f"{ranks_of(ranks)} call{'s' if len(ranks) == 1 else ''} {k}" for k, ranks in by_kind.items())
        message = f"{ranks_of(odd)} disagree: {each}"
    return Cause(code=code, message=message, ranks=tuple(odd), evidence=evidence,
                 action="make every rank of the group call the same, in the same order")  # fmt: skip


def _swapped(trace: RankTrace, mine: Call, other: Call) -> bool:
    """Whether this rank calls now what it has called right after the others' call until now, or the other after it."""
    calls = [call for call in trace.calls if call.group == mine.group and not call.p2p]
    kinds = [(_signature(call), call.number) for call in calls]
    for (first, _), (second, number) in pairwise(kinds):
        if number < mine.number and (first, second) == (_signature(other), _signature(mine)):
            return True
    return any(kind == _signature(other) and number == mine.number + 1 for kind, number in kinds)


# What the suspects do -------------------------------------------------------------------------------------------------


def position(rank: int, seen: Seen) -> tuple[str, str]:
    """(kind, words) of where a rank is: "gone", "stopped", "silent", a phase, or "unknown"."""
    state, process = seen.states.get(rank), seen.processes.get(rank)
    ended = state is not None and state.ended
    if ended and state is not None:
        return "gone", f"ended with {state.error}" if state.error else "has ended by itself"
    if process == "gone" and not outlived(rank, seen):
        return "gone", "its process is gone, without an end of its own"
    if process == "stopped":
        return "stopped", "its process is stopped (state T: a signal or a debugger)"
    if state is None:
        return "unknown", "where it is, no source tells"
    newest = max(one.written for one in seen.states.values())
    if newest - state.written > STALE_SECONDS and not outlived(rank, seen):
        return "silent", f"has written nothing for {newest - state.written:.0f} s, while others have"
    until = state.written if process == "gone" else seen.now
    since = f" for {until - state.since:.0f} s" if state.since and until > state.since else ""
    where = f", at {state.where[0]}" if state.where else ""
    return state.phase or "unknown", f"{DOING.get(state.phase or '', 'is at work')}{since}{where}"


def meanwhile(rank: int, seen: Seen, begun: float | None) -> tuple[str, str]:
    """position(), but for a rank that began what it is at only after the others' wait: what it did until then counts.

    Who has just come back from a checkpoint computes by now; the wait is the checkpoint's.
    """
    kind, words = position(rank, seen)
    state = seen.states.get(rank)
    if state is None or kind not in ("data", "compute") or not begun or not state.since or state.since <= begun:
        return kind, words
    old = next((mark.samples for mark in reversed(state.marks) if mark.at <= begun), {})
    looks = {one: n - old.get(one, 0) for one, n in state.samples.items() if one != "collective"}
    total, innocent = sum(looks.values()), {one: n for one, n in looks.items() if one in INNOCENT}
    if total <= 0 or sum(innocent.values()) / total <= 1 - EXPLAINS:
        return kind, words
    busy = max(innocent, key=lambda one: innocent[one])
    return busy, f"{DOING[busy]} in {innocent[busy] / total:.0%} of the looks at it since then; now it {DOING[kind]}"


def outlived(rank: int, seen: Seen) -> bool:
    """Whether a rank without an end of its own still wrote when the first of the others gave up waiting.

    Then it is the launcher that ended it, and what it was at counts. A rank that is killed is noticed at once by those
    that are connected to it: they lose a peer, they do not wait in vain; and torchrun sees it end first.
    """
    state, gave_up = seen.states.get(rank), _gave_up(seen)
    if state is None or state.ended or rank in gave_up or rank == seen.first or not gave_up:
        return False
    return state.written >= min(gave_up.values()) - STALE_SECONDS


def _gave_up(seen: Seen) -> dict[int, float]:
    """When those ranks last wrote that ended because they had waited for as long as their group allows."""
    waited = seen.reported.get("watchdog", {})
    return {
        rank: state.written for rank, state in seen.states.items()
        if rank in waited or (state.ended and state.error and _IN_VAIN.search(state.error))
    }  # fmt: skip


def _suspect(rank: int, kind: str, words: str, seen: Seen, wait: str, share: float | None = None) -> Cause:
    code = _WORDS["code"].get(kind, "rank.behind")
    state = seen.states.get(rank)
    host = (state.host,) if state and state.host else ()
    evidence = [wait] if wait else []
    if state and state.where:
        evidence.append(f"its stack: {' < '.join(state.where[:4])}")
    return Cause(code=code, message=f"rank {rank} {words}" if not words.startswith(("its ", "where ")) else
                 f"rank {rank}: {words}", ranks=(rank,), nodes=host, share=share, evidence=tuple(evidence),
                 action=ACTIONS.get(kind, ACTIONS["unknown"]))  # fmt: skip


# Stuck ----------------------------------------------------------------------------------------------------------------


def stuck(seen: Seen, traces: Mapping[int, RankTrace], source: str) -> Verdict | None:
    """The verdict where calls do not move; None where this source shows no such thing."""
    jammed = jam(traces, seen)
    begun = {
        rank: min(
            (jammed.waits[one].created or 0.0 for one, them in jammed.missing.items() if rank in them), default=0.0
        )
        for rank in jammed.roots
    }
    kinds = {rank: _by_calls(rank, jammed, traces, seen) or meanwhile(rank, seen, begun[rank]) for rank in jammed.roots}
    ended = [rank for rank in seen.states if position(rank, seen)[0] == "gone"]
    first = _first_to_end(ended, seen) if any(seen.states[rank].error for rank in ended) else None
    decisive = {rank for rank, (kind, _) in kinds.items() if kind in ("gone", "stopped")}
    if first is not None and (decisive or first in jammed.waits):  # the others ended after it, or were ended
        decisive = {first}
        kinds[first] = position(first, seen)
        jammed.roots.add(first)
    timed_out = source != "flight recorder"  # a watchdog has waited before it spoke
    untimed = not any(trace.taken or trace.written for trace in traces.values()) and not seen.states
    stalled = timed_out or jammed.age >= max(STALL_SECONDS, LONGER * jammed.usual) or (untimed and jammed.missing)
    if not jammed.waits or not (decisive or stalled or jammed.odd):
        return None
    if any(jammed.missing.values()) and not jammed.roots | jammed.met and not jammed.odd and _old(jammed, seen):
        return None  # they have dumped before that call: a newer dump tells
    waiting = tuple(sorted(rank for rank in jammed.waits if rank not in jammed.roots))
    wait = f"{source}: {waits_of(jammed, waiting)}" + _age(jammed, seen, traces)
    if jammed.odd and not any(kind == "stopped" for kind, _ in kinds.values()):
        ranks = tuple(sorted({rank for cause in jammed.odd for rank in cause.ranks}))
        failed = any(state.ended and state.error for state in seen.states.values())
        return _verdict("failed" if failed else "stuck", tuple(jammed.odd), seen, ranks, waiting)
    silent = [rank for rank in jammed.roots if kinds[rank][0] == "gone"]
    if first is None and len(silent) > 1:
        return None  # which of them was first is for their errors to tell
    innocent = tuple(f"rank {r} {words}; {wait}" for r, (kind, words) in sorted(kinds.items()) if kind in INNOCENT)
    if innocent and len(innocent) == len(kinds):
        if _gave_up(seen):
            return _too_short(kinds, seen, wait, waiting)
        return Verdict(state="fine", line=f"nothing is stuck: {innocent[0]}", innocent=innocent, waiting=waiting)
    if not jammed.roots:
        return _no_root(jammed, seen, wait, waiting)
    if not decisive and jammed.roots <= set(jammed.waits) - jammed.held and _sent_again(seen):
        behind = min(jammed.roots)  # all have come to the call that these are still in: it is not they who are late
        call = jammed.waits[behind]
        message = f"{ranks_of(sorted(jammed.roots))}: still in {call.words}, {_place(call)}"
        cause = network(seen, "carries nothing", wait, message, between=sorted(jammed.here[behind]))
        return _verdict("stuck", (cause,), seen, (), tuple(sorted(jammed.waits)))
    order = sorted(decisive or jammed.roots, key=lambda rank: (rank not in decisive, kinds[rank][0] in INNOCENT, rank))
    causes = tuple(
        _suspect(rank, *kinds[rank], seen, wait) for rank in order
        if (not decisive or rank in decisive) and kinds[rank][0] not in INNOCENT
    )  # fmt: skip
    gone = any(cause.code == "rank.gone" for cause in causes)
    ranks = tuple(sorted(rank for cause in causes for rank in cause.ranks))
    if gone and seen.cut_short:
        return _sizes(ranks, seen, waiting)
    failed = gone or any(outlived(rank, seen) for rank in ranks)
    return _verdict("failed" if failed else "stuck", causes, seen, ranks, waiting)


def _sent_again(seen: Seen) -> bool:
    """Whether, since the calls stand still, a rank's bytes to another host wait, and some had to be sent again.

    Nothing answers there. Of a rank that only does not read, the kernel still does.
    """
    owners = {address: state.host for state in seen.states.values() for address in state.addresses}
    return any(
        state.held[address] and state.resent.get(address) and owners.get(address, address) != state.host
        for state in seen.states.values() for address in state.held
    )  # fmt: skip


def _too_short(
    busy: Mapping[int, tuple[str, str]], seen: Seen, wait: str, waiting: tuple[int, ...]
) -> Verdict:  # fmt: skip
    """The others gave up waiting for ranks at work that may take long: no rank is at fault, the timeout is."""
    errors = [state.error or "" for state in seen.states.values()]
    limit = next((int(found[1]) / 1000 for error in errors if (found := _LIMIT.search(error))), None)
    words = [f"rank {rank} {activity}" for rank, (_, activity) in sorted(busy.items())]
    shorter = f"the group's timeout{f' of {limit:.0f} s' if limit else ''} is shorter than what is waited for"
    kind = busy[min(busy)][0]
    action = "init_process_group(timeout=...) longer than that" + _WORDS["action_of_busy"].get(kind, "")
    evidence = (*([wait] if wait else []), *words[1:4], *(error[:200] for error in errors if _IN_VAIN.search(error)))
    cause = Cause(code="timeout.short", message=f"{shorter}: {words[0]}", evidence=evidence[:6], action=action)
    return replace(_verdict("failed", (cause,), seen, (), waiting), innocent=tuple(words))


_CUT = re.compile(r"(\d{1,18}) vs (\d{1,18})")
_GLOO_SEGMENT = 1 << 20  # bytes that gloo sends at once, at most (gloo/allreduce.h, kMaxSegmentSize)
_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Short": 2, "Char": 1, "Byte": 1}


def _segment(call: Call, ranks: int) -> int | None:
    """Bytes of each message of an all-reduce by gloo's ring (gloo/allreduce.cc); None for anything else."""
    size = _BYTES.get(call.dtypes[0]) if len(call.dtypes) == len(call.sizes) == 1 else None
    if size is None or call.op != "all_reduce" or ranks < 2:
        return None
    elements, most = _product(call.sizes[0]), _GLOO_SEGMENT // size
    rounds = max(-(-elements // (most * ranks)), 2)  # each in as many messages as there are ranks
    return -(-elements // (rounds * ranks)) * size


def _odd_size(seen: Seen) -> tuple[int, dict[int, Call]] | None:
    """The rank whose size was the odd one, and the others' calls, as far as they dumped them.

    gloo's ring sends from rank + 1 to rank. The rank that was cut short called less than the others where it was sent
    what a call like theirs sends; where it could take just that, the one that sent it more is odd.
    """
    ended = {rank for rank, state in seen.states.items() if state.ended}  # they have dumped since: others may not have
    calls = {rank: trace.calls[-1] for rank, trace in seen.traces.items() if trace.calls and rank in ended}
    lengths = _CUT.search(seen.cut_short)
    if seen.cut_rank is None or lengths is None or len({(_signature(c), _place(c)) for c in calls.values()}) != 1:
        return None
    call, ranks = next(iter(calls.values())), seen.world or 0
    usual, (sent, taken) = _segment(call, ranks), (int(lengths[1]), int(lengths[2]))
    members = {len(trace.groups.get(call.group, ())) for trace in seen.traces.values()} - {0}
    if usual is None or (usual == sent) == (usual == taken) or members - {ranks} or 2 * len(calls) < max(ranks, 3):
        return None
    odd = seen.cut_rank if usual == sent else (seen.cut_rank + 1) % ranks
    return None if odd in calls else (odd, calls)


def _sizes(ended: Sequence[int], seen: Seen, waiting: tuple[int, ...]) -> Verdict:
    """gloo ends the rank that is sent too much, which may be the victim: the messages' sizes tell, where they do."""
    ended = (seen.cut_rank,) if seen.cut_rank is not None else tuple(ended)
    words = f"calls of different sizes met: {ranks_of(ended) or 'a rank'} was sent more than its call takes"
    action = "make every rank of the group call the same sizes"
    if (found := _odd_size(seen)) is not None:
        odd, calls = found
        call = next(iter(calls.values()))
        verb = "calls" if len(calls) == 1 else "call"
        words = f"rank {odd} calls another size where {ranks_of(sorted(calls))} {verb} {call.words}, {_place(call)}"
        cause = Cause(code="call.size", message=words, ranks=(odd,), evidence=(seen.cut_short,), action=action)
        return _verdict("failed", (cause,), seen, (odd,), waiting)
    cause = Cause(code="call.size", message=words, evidence=(seen.cut_short,), action=action)
    hint = Unknown(what="which rank's size is the odd one", command="TORCH_DISTRIBUTED_DEBUG=DETAIL on the next run")
    return replace(_verdict("failed", (cause,), seen, (), waiting), unknown=(hint,))


def _old(jammed: Jam, seen: Seen) -> bool:
    """Whether some that are missing have come since they dumped."""
    wanted = set().union(*jammed.missing.values())
    return any(rank in seen.states and seen.states[rank].phase == "collective" for rank in wanted - set(jammed.waits))


def _no_root(jammed: Jam, seen: Seen, wait: str, waiting: tuple[int, ...]) -> Verdict:
    """All of a group are in a call and nothing moves; groups wait for each other; or nobody tells who is missing."""
    if jammed.met:
        first = min(jammed.met)
        call, inside = jammed.waits[first], sorted(jammed.here[first])
        message = f"{ranks_of(inside)} are all in {call.words}, {_place(call)}: it does not move"
        return _verdict("stuck", (network(seen, "carries nothing", wait, message, between=inside),), seen, (), waiting)
    circle = _circle(jammed)
    if not circle:
        return _open(jammed, seen, wait, waiting)
    lines = tuple(
        f"rank {rank} waits in {jammed.waits[rank].words} of group {jammed.waits[rank].group} for "
        f"{ranks_of(sorted(jammed.missing[rank]))}"
        for rank in circle
    )
    cause = Cause(code="call.circle", message=f"{ranks_of(circle)} wait for each other in different groups",
                  ranks=circle, evidence=lines, action="call groups in one order on every rank")  # fmt: skip
    return _verdict("stuck", (cause,), seen, circle, ())


def _circle(jammed: Jam) -> tuple[int, ...]:
    """Ranks each of which waits for another of them."""
    inside = {rank for rank, others in jammed.missing.items() if others}
    while any(not jammed.missing[rank] & inside for rank in inside):
        inside = {rank for rank in inside if jammed.missing[rank] & inside}
    return tuple(sorted(inside))


def _open(jammed: Jam, seen: Seen, wait: str, waiting: tuple[int, ...]) -> Verdict:
    """Calls that nobody ended, and no source that tells who has not come."""
    unseen = sorted(set().union(*jammed.unseen.values()) - set(jammed.waits)) if jammed.unseen else []
    rest = f"; whether {ranks_of(unseen)} came, no source tells" if unseen else "; who has not come, no source tells"
    counts = tuple(
        f"{len(jammed.here[rank])} of the {size} ranks of group {jammed.waits[rank].group} are seen in number "
        f"{jammed.waits[rank].number}"
        for rank, size in sorted(jammed.sizes.items()) if size and len(jammed.here[rank]) < size
    )  # fmt: skip
    numbers: dict[str, set[int]] = {}
    for call in jammed.waits.values():
        if call.group and not call.p2p:
            numbers.setdefault(call.group, set()).add(call.number)
    apart = tuple(
        f"some have left number {min(here)} of group {group}, and wait in number {max(here)}: calls that do not match, "
        f"or a GPU that hangs in number {min(here)}"
        for group, here in numbers.items() if len(here) > 1
    )  # fmt: skip
    cause = Cause(code="call.timeout", message=waits_of(jammed, waiting) + rest,
                  evidence=tuple(dict.fromkeys((wait, *apart, *counts)))[:4],
                  action="collect the logs and dumps of every rank")  # fmt: skip
    hint = Unknown(what="which rank has not come to the call",
                   command="topoflight why LOG_OF_EVERY_RANK --flight-recorder DIR; on the next run "
                           "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1")  # fmt: skip
    return replace(_verdict("stuck", (cause,), seen, (), waiting), unknown=(hint,))


def _place(call: Call) -> str:
    """ "number 12 of group 0"."""
    number = f"number {call.number}" if call.number else "without a number"
    return f"{number} of group {call.group}" if call.group else number


def waits_of(jammed: Jam, waiting: Sequence[int]) -> str:
    """ "ranks 0, 1 wait in all_reduce of [8], number 12 of group 0; rank 3 waits in ..."."""
    rows: dict[str, list[int]] = {}
    for rank in waiting:
        call = jammed.waits[rank]
        rows.setdefault(f"{call.words}, {_place(call)}", []).append(rank)
    most = sorted(rows.items(), key=lambda row: -len(row[1]))[:4]
    return "; ".join(f"{ranks_of(ranks)} wait{'s' if len(ranks) == 1 else ''} in {where}" for where, ranks in most)


def _age(jammed: Jam, seen: Seen, traces: Mapping[int, RankTrace]) -> str:
    """How long, and how that is known: of dumps without a run beside them the file's time is all there is."""
    if jammed.age <= 0:
        return ""
    by_file = not seen.states and any(trace.written and not trace.taken for trace in traces.values())
    return f", for {jammed.age:.0f} s" + (" by the dumps' file times" if by_file else "")


def _by_calls(
    rank: int, jammed: Jam, traces: Mapping[int, RankTrace], seen: Seen
) -> tuple[str, str] | None:  # fmt: skip
    """(kind, words) of a rank of which its calls alone tell; None where its own file tells what it does."""
    mine = jammed.waits.get(rank)
    if mine is not None and rank in jammed.held:
        words = f"has called {mine.words}, {_place(mine)}, and its GPU has not begun it: work before it still runs"
        return "gpu", words
    if mine is not None:
        kind = "gpu" if rank in jammed.left else "unknown"
        return kind, f"is still in {mine.words}, {_place(mine)}, which the others have left"
    if rank in seen.states or rank in seen.processes:
        return None
    call = next(jammed.waits[one] for one, them in sorted(jammed.missing.items()) if rank in them)
    trace = traces[rank]
    last = next((one for one in reversed(trace.calls) if one.group == call.group), None)
    newest = trace.enqueued.get(call.group) or (last.number if last else 0)
    since = f"; its last there is number {newest}" if newest else "; it has called nothing there"
    where = f", from {last.frames[0]}" if last and last.frames else ""
    return "unknown", f"has not come to {call.words}, {_place(call)}{since}{where}"


def network(seen: Seen, what: str, *evidence: str, between: Sequence[int] = (), since: float = 0.0) -> Cause:
    """The cause between ranks that have all come: by pairs of hosts whether a link or a node.

    `between` are in a call that does not move; of others the looks count from `since` on, Unix seconds: before it, the
    network was as it should be.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    owners = {address: state.host or "?" for state in seen.states.values() for address in state.addresses}
    for state in seen.states.values():
        old = next((mark.unsent for mark in reversed(state.marks) if mark.at <= since), {})
        looks = state.held if between else {one: n - old.get(one, 0) for one, n in state.unsent.items()}
        for address, times in looks.items():
            if times > 0 and state.host and (there := owners.get(address, address)) != state.host:
                pairs[state.host, there] += times
    hosts = sorted({seen.states[rank].host or "?" for rank in between if rank in seen.states})
    if len(hosts) == 2:  # only these two are in the call that does not move
        pairs = Counter({pair: n for pair, n in pairs.items() if set(pair) == set(hosts)} or {(hosts[0], hosts[1]): 1})
    total = sum(pairs.values())
    backlog = tuple(f"{a} to {b}: bytes wait to be sent in {n} looks" for (a, b), n in pairs.most_common(6))
    by_host: Counter[str] = Counter()
    for (a, b), n in pairs.items():
        by_host[a] += n
        by_host[b] += n
    if total and len(by_host) > 1:
        (host, touched), (pair, most) = by_host.most_common(1)[0], pairs.most_common(1)[0]
        others = {a if b == host else b for a, b in pairs if host in (a, b)}
        reverse = pairs.get((pair[1], pair[0]), 0)
        if (most + reverse) / total >= EXPLAINS and len(owners) > 0:
            return Cause(code="link", nodes=pair,
                         message=f"the link between {pair[0]} and {pair[1]}, or the network of one of them, {what}",
                         share=(most + reverse) / total, evidence=(*evidence, *backlog),
                         action=f"on both: topoflight bench --nodes 2 --rendezvous {pair[0]}:1234")  # fmt: skip
        if touched / total >= EXPLAINS and len(others) > 1:
            return Cause(code="link.node", message=f"the network of {host} {what}: towards {', '.join(sorted(others))}",
                         nodes=(host,), share=touched / total, evidence=(*evidence, *backlog),
                         action=f"look at its NIC, cable and port: topoflight scan on {host}")  # fmt: skip
    return Cause(code="network", message=f"the network {what}: every rank of the group has come to the call",
                 evidence=(*evidence, *backlog), action="measure it by pairs: on each node "
                        "topoflight bench --search --nodes N --rendezvous HOST:PORT")  # fmt: skip


# Slow -----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Pace:
    """What the arrivals at collectives say, seconds."""

    elapsed: float = 0.0
    waited: dict[int, float] = field(default_factory=dict)  # by rank: for others
    caused: dict[int, float] = field(default_factory=dict)  # by rank: of the others, a mean, as the last to come
    quarters: dict[int, int] = field(default_factory=dict)  # of the time, in which it caused most of the wait
    calls: int = 0
    gaps: tuple[tuple[float, int], ...] = ()  # seconds and calls of blocks of calls, in their order
    begins: tuple[float, ...] = ()  # of these blocks, Unix seconds


def pace(traces: Mapping[int, RankTrace], world: int | None) -> Pace:
    """Arrivals of all ranks at the calls that all of them made; the first call, which connects, is left out."""
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for rank, trace in traces.items():
        for call in trace.calls:
            if call.created and not call.p2p:
                rows.setdefault((call.group, call.number), {})[rank] = call.created
    full = sorted(
        (row for row in rows.values() if len(row) == (world or len(traces)) > 1), key=lambda r: max(r.values())
    )
    found = Pace(calls=len(full))
    full = full[1:]
    if len(full) < MIN_CALLS:
        return found
    first, last = max(full[0].values()), max(full[-1].values())
    found.elapsed = last - first
    by_quarter: list[Counter[int]] = [Counter() for _ in range(4)]
    for row in full:
        late = max(row, key=lambda rank: row[rank])
        wait = (len(row) * row[late] - sum(row.values())) / (len(row) - 1)
        found.caused[late] = found.caused.get(late, 0.0) + wait
        quarter = min(3, int(4 * (row[late] - first) / found.elapsed)) if found.elapsed > 0 else 0
        by_quarter[quarter][late] += wait  # type: ignore[assignment]
        for rank, at in row.items():
            found.waited[rank] = found.waited.get(rank, 0.0) + row[late] - at
    for counts in by_quarter:
        total = sum(counts.values())
        for rank, wait in counts.items():
            found.quarters[rank] = found.quarters.get(rank, 0) + (wait > total / 2)
    times = [max(row.values()) for row in full]
    if len(times) > 4 * MIN_CALLS:  # in sixteen blocks, longer than a step's calls
        size = (len(times) - 1) // 16
        first_of = range(0, len(times) - size, size)
        found.gaps = tuple((times[at + size] - times[at], size) for at in first_of)
        found.begins = tuple(times[at] for at in first_of)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """When a pace changed for good: the pieces before it and since."""

    at: int  # pieces before it
    before: float  # seconds a call, median of the pieces
    since: float


def change(pieces: Sequence[tuple[float, int]]) -> Change | None:
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


def slow(seen: Seen) -> Verdict | None:
    """The verdict where ranks wait for one that is always late, or where all have become slower together."""
    found = pace(seen.traces, seen.world)
    return _one_late(found, seen) or _grown(seen) or _slower_together(found, seen)


def _one_late(found: Pace, seen: Seen) -> Verdict | None:
    """The ranks that the others always wait for."""
    if found.calls < MIN_CALLS or found.elapsed <= 0:
        return None
    total = sum(found.caused.values())
    work = {rank: found.elapsed - wait for rank, wait in found.waited.items()}
    usual = median(work.values())
    late = sorted(found.caused, key=lambda rank: -found.caused[rank])
    shares = {rank: found.caused[rank] / total for rank in late} if total > 0 else {}
    chronic = [rank for rank in late if found.quarters.get(rank, 0) >= 2]
    slowest = [
        rank for rank in chronic if _looked_at(rank, seen) and work[rank] > OUTLIER * min(usual, _rest(work, rank))
    ]
    if slowest:
        causes, innocent = [], []
        for rank in slowest:
            kind, words = _habit(rank, seen)
            state = seen.states.get(rank)
            if kind == "unknown" and state is not None and state.samples:
                continue  # it was looked at, and does nothing more than the others: what made it late is not its own
            wait = (f"flight recorder: the others waited {found.caused[rank]:.1f} s of {found.elapsed:.1f} s for it, "
                    f"{shares[rank]:.0%} of all waiting, over {found.calls} collectives")  # fmt: skip
            if kind in INNOCENT:
                innocent.append(f"rank {rank} {words}; {wait}")
            else:
                cause = _suspect(rank, kind, words, seen, wait, shares[rank])
                cost = min(1.0, found.caused[rank] / found.elapsed)
                causes.append(replace(cause, cost=cost, price=f"{cost:.0%} of the time of every other rank"))
        if not causes:
            words = next(iter(innocent), "")
            return Verdict(state="fine", line=f"no fault: {words}", innocent=tuple(innocent)) if words else None
        alone = causes[0].share is not None and causes[0].share >= EXPLAINS
        ranks = tuple(c.ranks[0] for c in causes[: 1 if alone else None])
        others = tuple(sorted(set(seen.traces) - set(ranks)))
        return _verdict("slow", tuple(causes), seen, ranks, others)
    return None


def _looked_at(rank: int, seen: Seen) -> bool:
    """Whether what it does can be said by now; of a rank that is not looked at, or has ended, no more will come."""
    state = seen.states.get(rank)
    return state is None or state.ended or not state.samples or sum(state.samples.values()) >= MIN_LOOKS


def _rest(work: Mapping[int, float], rank: int) -> float:
    """The median of the other ranks; 0 where there are none."""
    return median([value for other, value in work.items() if other != rank] or [0.0])


def _slower_together(found: Pace, seen: Seen) -> Verdict | None:
    """All arrive together and later than before; the recorder does not tell what they do between the calls.

    Where rank states were looked at too few times before the change, they still tell where the ranks' time goes now.
    """
    changed = change(found.gaps)
    if changed is None or changed.since <= LONGER * changed.before:
        return None
    times = changed.since / changed.before if changed.before > 0 else 0.0
    timing = f"flight recorder: {changed.since:.3g} s from call to call, {changed.before:.3g} s before"
    cost = _cost(changed.before, changed.since)
    if _all_in_collectives(seen):
        cause = network(seen, "has become slow", timing, since=found.begins[changed.at])
        if len(cause.evidence) > 1:
            return _verdict("slow", (replace(cause, **cost),), seen, (), ())
    cause = Cause(
        code="all", message=f"all ranks alike have become {times:.1f} times slower", evidence=(timing,), **cost
    )
    hint = Unknown(what="what the ranks do longer", command="topoflight why --run DIR, of a job with finetune.beside")
    return replace(_verdict("slow", (cause,), Seen(), (), ()), unknown=(hint,))


def _all_in_collectives(seen: Seen) -> bool:
    """Whether every rank's latest looks found it in its collectives, and none waited for a CPU instead."""
    latest = [_pieces(state)[-MIN_PIECES:] for state in seen.states.values()]
    for pieces in latest:
        spent = {kind: sum(piece.spent.get(kind, 0.0) for piece in pieces) for kind in DOING}
        kind, share = _most(spent)
        waited = sum(piece.delayed for piece in pieces)
        if len(pieces) < MIN_PIECES or kind != "collective" or share < EXPLAINS or waited > 0.5 * sum(spent.values()):
            return False
    return bool(latest)


class Piece(NamedTuple):
    """What a rank did between two of its marks."""

    at: float  # Unix seconds, of the earlier
    calls: int
    spent: dict[str, float]  # seconds by phase
    delayed: float  # seconds of waiting for a CPU


def _pieces(state: RankState) -> list[Piece]:
    """The pieces of a rank's run without the first, which connects and compiles."""
    found: list[Piece] = []
    marks = state.marks[1:]
    for old, new in pairwise(marks):
        looks = {kind: new.samples.get(kind, 0) - old.samples.get(kind, 0) for kind in new.samples}
        total = sum(looks.values())
        if new.calls > old.calls and total > 0 and new.at > old.at:
            spent = {kind: n / total * (new.at - old.at) for kind, n in looks.items()}
            delayed = max(0.0, (new.delayed or 0.0) - (old.delayed or 0.0))
            found.append(Piece(old.at, new.calls - old.calls, spent, delayed))
    return found


_NOT_RUN = "look at its cgroup's cpu.max and cpu.stat, and at what else runs on its CPUs"


def _grown(seen: Seen) -> Verdict | None:
    """The ranks take longer from call to call than earlier in this run: by what each does more of since then."""
    more: dict[int, dict[str, float]] = {}
    delays: dict[int, float] = {}  # share of what calls take longer that a rank waits for a CPU
    changes: list[Change] = []
    began = 0.0
    for rank, state in seen.states.items():
        pieces = _pieces(state)
        changed = change([(sum(s for k, s in one.spent.items() if k not in INNOCENT), one.calls) for one in pieces])
        if changed is None:
            return None
        changes.append(changed)
        began = max(began, pieces[changed.at].at)
        late = [one.delayed / one.calls for one in pieces]
        delays[rank] = (median(late[changed.at :]) - median(late[: changed.at])) / max(
            changed.since - changed.before, 1e-9
        )
        each = {kind: [one.spent.get(kind, 0.0) / one.calls for one in pieces] for kind in DOING}
        more[rank] = {
            kind: max(0.0, median(rows[changed.at :]) - median(rows[: changed.at]))
            for kind, rows in each.items() if kind not in INNOCENT
        }  # fmt: skip
    if not changes:
        return None
    before, since = (median(getattr(one, name) for one in changes) for name in ("before", "since"))
    if since <= LONGER * before or before <= 0:
        return None
    timing = f"rank states: {since:.3g} s from call to call, {before:.3g} s before: {since / before:.1f} times slower"
    slower = network(seen, "has become slow", timing, since=began)
    least = EXPLAINS if len(slower.evidence) > 1 else 0.5  # where bytes wait, too, most of it must be the CPU
    held = [rank for rank, share in sorted(delays.items()) if share - _rest(delays, rank) > least]
    if 0 < len(held) < len(delays) / 2:
        causes = [
            replace(
                _suspect(rank, "compute", "is not let run: it waits for a CPU", seen, timing, min(1.0, delays[rank])),
                **_cost(before, since), action=_NOT_RUN,
            )
            for rank in held
        ]  # fmt: skip
        return _verdict("slow", tuple(causes), seen, tuple(held), tuple(sorted(set(delays) - set(held))))
    work = {rank: _most(row) for rank, row in sorted(more.items())}
    busy = [rank for rank, (kind, share) in work.items() if kind != "collective" and share >= EXPLAINS]
    if 0 < len(busy) < len(work) / 2:  # the others wait for these
        grew = "longer than earlier in this run"
        causes = [
            replace(_suspect(rank, kind, f"{DOING[kind]} {grew}", seen, timing), **_cost(before, since))
            for rank in busy if (kind := work[rank][0])
        ]  # fmt: skip
        return _verdict("slow", tuple(causes), seen, tuple(busy), tuple(set(work) - set(busy)))
    kind, share = _most({kind: median(row[kind] for row in more.values()) for kind in next(iter(more.values()))})
    if share < EXPLAINS:
        message = f"all ranks alike have become {since / before:.1f} times slower, in {kind} and others"
        cause = Cause(code="all", message=message, share=share, evidence=(timing,))
    elif kind == "collective":
        cause = slower
        if len(cause.evidence) < 2:  # no byte was seen waiting: a rank that is not let run looks the same
            message = f"all ranks alike have become {since / before:.1f} times slower, in their collectives"
            cause = Cause(code="all.collective", message=message, evidence=(timing,))
            hint = Unknown(what="whether the network or a rank without CPU time",
                           command="topoflight bench --search --nodes N; cpu.stat of each rank's cgroup")  # fmt: skip
            verdict = _verdict("slow", (replace(cause, **_cost(before, since)),), seen, (), ())
            return replace(verdict, unknown=(hint,))
    else:
        cause = Cause(code=f"all.{kind}", message=f"all ranks alike: each {DOING[kind]} longer", share=share,
                      evidence=(timing,), action=ACTIONS.get(kind, ""))  # fmt: skip
    return _verdict("slow", (replace(cause, **_cost(before, since)),), seen, (), ())


def _cost(before: float, since: float) -> dict[str, Any]:
    """Of a pace in seconds a call that was better before."""
    cost = 1 - before / since if since > 0 else 0.0
    return {"cost": cost, "price": f"{cost:.0%} of the time since then"}


def _most(row: Mapping[str, float]) -> tuple[str, float]:
    """The largest, and its share of all."""
    kind, total = max(row, key=lambda one: row[one]), sum(row.values())
    return kind, row[kind] / total if total > 0 else 0.0


def _habit(rank: int, seen: Seen) -> tuple[str, str]:
    """What a rank that is always late does more than the others do."""
    state = seen.states.get(rank)
    if seen.processes.get(rank) in ("stopped", "gone") or state is None or not state.samples:
        return position(rank, seen)
    mine, total = state.samples, sum(state.samples.values())
    rest: Counter[str] = Counter()
    for other, one in seen.states.items():
        if other != rank:
            rest.update(one.samples)
    theirs = max(1, sum(rest.values()))
    more = {kind: mine.get(kind, 0) / total - rest[kind] / theirs for kind in DOING if kind != "collective"}
    kind = max(more, key=lambda one: more[one])
    if more[kind] <= 0:
        return "unknown", "is late; what it does more than the others, no source tells"
    share = mine.get(kind, 0) / total
    return kind, f"{DOING[kind]} in {share:.0%} of the looks at it, {rest[kind] / theirs:.0%} at the others"


# The verdict ----------------------------------------------------------------------------------------------------------


def ranks_of(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 1, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:16]))}{' ...' if len(ranks) > 16 else ''}"


def _verdict(
    state: str, causes: tuple[Cause, ...], seen: Seen, ranks: tuple[int, ...], waiting: tuple[int, ...]
) -> Verdict:
    hosts = {seen.states[r].host for r in ranks if r in seen.states} | {n for c in causes for n in c.nodes}
    gpus = [f"{s.host} GPU {s.gpu}" for r in ranks if (s := seen.states.get(r)) and s.gpu is not None and s.host]
    return Verdict(
        state=state, line=f"{state}: {causes[0].message}" if causes else state, ranks=ranks, causes=causes,
        nodes=tuple(sorted(host for host in hosts if host)), gpus=tuple(gpus), waiting=waiting,
    )  # fmt: skip


def judge(seen: Seen) -> Verdict:
    """The verdict of the ranks: the flight recorder first, as it is exact; then others; then where the ranks are."""
    by_source = {"flight recorder": seen.traces, **seen.reported}
    found = {name: verdict for name, traces in by_source.items() if traces and (verdict := stuck(seen, traces, name))}
    known = {name: verdict for name, verdict in found.items() if not is_open(verdict)}
    best = next(iter((known or found).values()), None)
    verdict = (
        _by_clash(seen)
        or _by_errors(seen)
        or best
        or _by_joins(seen)
        or _by_states(seen)
        or _by_torchrun(seen)
        or _by_hang(seen)
    )
    verdict = verdict or _by_peer(seen) or _in_vain(seen) or slow(seen) or _nothing(seen)
    return replace(verdict, disagree=(*verdict.disagree, *_differences(known)), sources=_sources(seen))


def is_open(verdict: Verdict) -> bool:
    """Whether it says that ranks wait, and not for whom."""
    return bool(verdict.causes) and verdict.causes[0].code == "call.timeout"


def _by_clash(seen: Seen) -> Verdict | None:
    """Calls that torch compared itself before they were made, with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    rows = seen.clash
    if len(rows) == 1:  # releases up to 1.12 have each rank name its own call, and only that
        ((rank, call),) = rows.items()
        cause = Cause(code="call.other", message=f"the ranks' calls do not match: rank {rank} calls {call.words}",
                      action="make every rank of the group call the same, in the same order")  # fmt: skip
        hint = Unknown(what="what the other ranks call there", command="topoflight why with the logs of every rank")
        return replace(_verdict("failed", (cause,), seen, (), ()), unknown=(hint,))
    kinds = Counter(_signature(call) for call in rows.values()).most_common()
    if len(kinds) < 2:
        return _by_number(seen)
    tied = kinds[0][1] == kinds[1][1]
    odd = sorted(rank for rank, call in rows.items() if tied or _signature(call) != kinds[0][0])
    cause = _mismatch(seen.clash, odd, _signature(seen.clash[odd[0]]) if tied else kinds[0][0], {}, tied=tied)
    return _verdict("failed", (cause,), seen, tuple(odd), ())


def _by_number(seen: Seen) -> Verdict | None:
    """The same call under different numbers: a rank has called one that the others have not."""
    rows = sorted(seen.clash.items())
    if len({call.number for _, call in rows}) < 2:
        return None
    ranks = tuple(rank for rank, _ in rows)
    each = tuple(f"rank {rank} calls {call.words}, number {call.number}" for rank, call in rows)
    cause = Cause(code="call.order", message=f"{ranks_of(ranks)} disagree: {'; '.join(each[:4])}", ranks=ranks,
                  evidence=each[:8], action="make every rank of the group call the same, as often")  # fmt: skip
    return _verdict("failed", (cause,), seen, ranks, ())


def _by_joins(seen: Seen) -> Verdict | None:
    """A process group that is being made, and the ranks that have not come to make it."""
    more = next((join for join in seen.joins.values() if join.joined > join.world > 0), None)
    if more is not None:
        message = f"{more.joined} ranks have joined a process group of {more.world}: some are of another run"
        cause = Cause(code="bootstrap_mismatch", message=message,
                      action="end processes that an earlier run left; the same world size on every node")  # fmt: skip
        return _verdict("failed" if more.over else "stuck", (cause,), seen, (), ())
    short = [join for join in seen.joins.values() if 0 < join.joined < join.world <= MOST_RANKS]
    if not short:
        return None
    join = short[0]
    state, count = "failed" if join.over else "stuck", f"{join.joined} of {join.world} ranks have joined"
    waiting = tuple(sorted(join.ranks))
    missing = tuple(rank for rank in range(join.world) if rank not in join.ranks)
    if len(missing) == join.world - join.joined:  # each that has joined says so
        cause = replace(_suspect(missing[0], "unknown", "", seen, ""), ranks=missing,
                        message=f"{ranks_of(missing)} did not join the process group; {count}")  # fmt: skip
        return _verdict(state, (cause,), seen, missing, waiting)
    cause = Cause(code="call.timeout", message=f"{count} the process group; who has not, no source tells",
                  action="collect the logs of every rank")  # fmt: skip
    hint = Unknown(what="which rank has not joined", command="topoflight why LOG_OF_EVERY_RANK")
    return replace(_verdict(state, (cause,), seen, (), waiting), unknown=(hint,))


def _by_errors(seen: Seen) -> Verdict | None:
    """What ranks wrote into the log: a barrier that names who has not come, else exceptions of their own."""
    if seen.late:
        ranks = tuple(sorted(seen.late))
        cause = _suspect(ranks[0], "unknown", seen.late[ranks[0]], seen, "monitored barrier")
        message = f"{ranks_of(ranks)} {seen.late[ranks[0]]}"
        return _verdict("failed", (replace(cause, message=message, ranks=ranks),), seen, ranks, ())
    own = {rank: error for rank, error in seen.errors.items() if not _HEARD.search(error)}
    if not own or seen.states or (seen.first is not None and seen.first not in seen.errors):
        return None
    waiting = tuple(
        sorted({rank for rows in seen.reported.values() for rank, row in rows.items() if row.calls} - set(own))
    )
    wait = (f"watchdog: {ranks_of(waiting)} waited in vain",) if waiting else ()
    kinds = {error.partition(":")[0] for error in own.values()}
    if len(own) > 1 and len(kinds) == 1 and seen.first not in own:  # none of them is the cause of the others'
        message = f"{ranks_of(sorted(own))} each ended with {next(iter(own.values()))}"
        return _verdict("failed", (Cause(code="ranks.gone", message=message, evidence=wait),), seen, (), waiting)
    first = seen.first if seen.first in own and seen.first is not None else next(iter(own))
    which = "torchrun saw it end first" if first == seen.first else "the first exception of the log"
    cause = _suspect(first, "gone", f"ended with {own[first]}", seen, which)
    return _verdict("failed", (replace(cause, evidence=(*cause.evidence, *wait)),), seen, (first,), waiting)


def _by_hang(seen: Seen) -> Verdict | None:
    """A rank whose own watchdog stood still; named where it waited for nobody: no collective was outstanding."""
    if not seen.hung:
        return None
    rows = sorted(seen.hung.items())
    idle = tuple(rank for rank, _ in rows if rank in seen.idle)
    who = ranks_of([rank for rank, _ in rows])
    no_call = f"; no collective was outstanding on {ranks_of(idle)}" if idle else ""
    cause = Cause(code="watchdog_hung", message=f"PyTorch's watchdog of {who} {rows[0][1]}{no_call}: a CUDA call hangs "
                  "or a thread holds Python's lock (GIL)", ranks=idle,
                  action="py-spy dump --native --pid of that rank, and the kernel's log for an Xid")  # fmt: skip
    return _verdict("failed", (cause,), seen, idle, ())


def _by_peer(seen: Seen) -> Verdict | None:
    """A peer that closed its connection, where nothing tells more: it ended first, or had lost another."""
    if not seen.lost:
        return None
    hosts = sorted(set(seen.lost.values()))
    message = f"{ranks_of(sorted(seen.lost))} lost a peer: {', '.join(hosts[:4])} closed the connection"
    cause = Cause(code="rank.lost", message=message, action=f"read the logs of the ranks on {', '.join(hosts[:4])}")
    hint = Unknown(what="why that peer closed it", command="topoflight why with the logs of every node")
    return replace(_verdict("failed", (cause,), seen, (), tuple(sorted(seen.lost))), unknown=(hint,))


def _in_vain(seen: Seen) -> Verdict | None:
    """Ranks that ended as they had waited for too long, where nothing tells more: gloo names neither call nor peer."""
    rows = {rank: error for rank, error in sorted(seen.errors.items()) if _IN_VAIN.search(error)}
    if not rows or seen.states:
        return None
    message = f"{ranks_of(list(rows))} waited in vain; who has not come, no source tells"
    cause = Cause(code="call.timeout", message=message, evidence=tuple(rows.values())[:2],
                  action="collect the logs of every rank")  # fmt: skip
    hint = Unknown(what="which rank has not come", command="topoflight why LOG_OF_EVERY_RANK, or --run DIR")
    return replace(_verdict("failed", (cause,), seen, (), tuple(rows)), unknown=(hint,))


def _differences(found: Mapping[str, Verdict]) -> tuple[str, ...]:
    """Sources that name others than the one that is believed."""
    if len(found) < 2:
        return ()
    (first, believed), *others = found.items()
    return tuple(
        f"{name} names {ranks_of(other.ranks) or 'nobody'}, {first} {ranks_of(believed.ranks) or 'nobody'}: {first} is "
        f"believed, as it {TRUST[first]}"
        for name, other in others if other.ranks != believed.ranks
    )  # fmt: skip


def _by_states(seen: Seen) -> Verdict | None:
    """Without calls: ranks that are gone or stopped while others still run."""
    kinds = {rank: position(rank, seen) for rank in seen.states}
    busy = [rank for rank, (kind, _) in sorted(kinds.items()) if kind != "collective" and outlived(rank, seen)]
    if busy:
        wait = f"rank states: {ranks_of(sorted(_gave_up(seen)))} waited in vain"
        if all(kinds[rank][0] in INNOCENT for rank in busy):
            return _too_short({rank: kinds[rank] for rank in busy}, seen, wait, tuple(sorted(_gave_up(seen))))
        busy = [rank for rank in busy if kinds[rank][0] not in INNOCENT]
        causes = tuple(_suspect(rank, *kinds[rank], seen, wait) for rank in busy)
        return _verdict("failed", causes, seen, tuple(busy), tuple(sorted(_gave_up(seen))))
    bad = [rank for rank, (kind, _) in kinds.items() if kind in ("gone", "stopped", "silent")]
    errors = [rank for rank in bad if seen.states[rank].error]
    clean = [rank for rank in bad if seen.states[rank].ended and not seen.states[rank].error]
    if errors and (first := _first_to_end(bad, seen)) is not None:
        bad = [first]
    elif errors and len(bad) == len(kinds):
        return _lost(bad, seen)
    elif len(clean) == len(kinds) or len(bad) == len(kinds):
        return None
    bad = [rank for rank in bad if rank not in clean] or bad
    if not bad:
        return None
    lost = [r for r, s in seen.states.items() if s.error and _HEARD.search(s.error) and r not in bad]
    wait = f"rank states: {ranks_of(lost)} lost a peer: {(seen.states[lost[0]].error or '')[-120:]}" if lost else ""
    causes = tuple(_suspect(rank, *kinds[rank], seen, wait) for rank in sorted(bad))
    gone = any(cause.code == "rank.gone" for cause in causes)
    if gone and seen.cut_short:
        return _sizes(sorted(bad), seen, ())
    others = tuple(sorted(set(seen.states) - set(bad)))
    return _verdict("failed" if gone else "stuck", causes, seen, tuple(sorted(bad)), others)


def _by_torchrun(seen: Seen) -> Verdict | None:
    """The rank that torchrun saw end first, where nothing else tells."""
    if seen.cut_short:
        return _sizes((), seen, ())
    if seen.first is None:
        return None
    cause = _suspect(seen.first, "gone", "ended first, by torchrun's log", seen, "")
    return _verdict("failed", (cause,), seen, (seen.first,), ())


def _lost(ranks: Sequence[int], seen: Seen) -> Verdict:
    """All have ended, each by the loss of another: which was first, no source tells."""
    if seen.cut_short:
        return _sizes((), seen, ())
    errors = [f"rank {rank}: {seen.states[rank].error}"[:200] for rank in ranks if seen.states[rank].error]
    silent = [rank for rank in ranks if not seen.states[rank].ended]
    cause = Cause(code="rank.lost", message="every rank has ended; those that told had lost another",
                  evidence=tuple(errors[:4]),
                  action=f"one of {ranks_of(silent)} was first: read their own logs" if silent else "")  # fmt: skip
    hint = Unknown(what="which rank ended first", command="topoflight why LOG --run DIR, with torchrun's log")
    return replace(_verdict("failed", (cause,), seen, (), ()), unknown=(hint,))


# errors of a rank that lost another, or waited for it in vain (gloo/transport/tcp, c10d/socket.cpp, ProcessGroupNCCL)
_HEARD = re.compile(r"closed by peer|Read error|Write error|onnection reset|Timed out waiting|Broken pipe|"
                    r"remote process exited|watchdog|DistNetworkError|onnection refused|store->get|DistStoreError|"
                    r"NCCL error|NCCL operation |NCCL Async Error|"
                    r"DistBackendError|collective operation timeout|Detected mismatch|wait timeout",
                    re.IGNORECASE)  # fmt: skip
# ... of these, what only those write that have waited for as long as their group allows (gloo, ProcessGroupNCCL)
_IN_VAIN = re.compile(
    r"Timed out waiting|watchdog.{0,40}timeout|collective operation timeout|NCCL operation timed out", re.IGNORECASE
)
_LIMIT = re.compile(r"(?:Timed out waiting |Timeout\(ms\)=)(\d{1,12})")
_PEER = re.compile(r"\[([0-9a-fA-F.:]{2,45})\]:(\d{1,5})")


def _first_to_end(ranks: Sequence[int], seen: Seen) -> int | None:
    """The rank whose error is its own; else the one that the others' errors lead to: a peer that was lost."""
    errors = {rank: seen.states[rank].error or "" for rank in ranks if seen.states[rank].error}
    if (
        seen.first is not None and seen.first in ranks and not _HEARD.search(errors.get(seen.first, ""))
    ):  # else it only lost another
        return seen.first
    own = [rank for rank, error in errors.items() if not _HEARD.search(error)]
    if own:
        return min(own, key=lambda rank: seen.states[rank].written)
    owner = {end: rank for rank, state in seen.states.items() for end in state.ends}
    ends = {rank: f"{p[1].removeprefix('::ffff:')}:{p[2]}" for rank, e in errors.items() if (p := _PEER.search(e))}
    lost = {rank: owner[end] for rank, end in ends.items() if end in owner}
    quiet = [rank for rank in ranks if not seen.states[rank].ended or not seen.states[rank].error]
    pointed = Counter(there for there in lost.values() if there in quiet)
    if pointed:
        return pointed.most_common(1)[0][0]
    return quiet[0] if len(quiet) == 1 else None


def _nothing(seen: Seen) -> Verdict:
    """Nothing found: an answer, with what it rests on."""
    unknown = []
    if not seen.traces:
        unknown.append(Unknown(what="which collectives the ranks are in", command="topoflight why --run DIR --watch"))
    if not seen.states:
        unknown.append(Unknown(what="what each rank does", command="py-spy dump --pid PID on each node"))
    line = "nothing found: no rank is missing, late or gone, no call waits for long"
    if not seen.traces and not seen.states:
        line = "nothing found in what was read"
    return Verdict(state="fine", line=line, unknown=tuple(unknown))


def _sources(seen: Seen) -> tuple[str, ...]:
    counts = {"flight recorder": seen.traces, "rank states": seen.states, "processes": seen.processes, **seen.reported}
    return tuple(f"{name}: {len(rows)} ranks" for name, rows in counts.items() if rows)
