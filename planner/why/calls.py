"""Blocked calls: which ranks wait in which collective, which ranks are missing there, and calls that do not match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from collectives.traces.calls import UNNAMED, Call, RankTrace
from planner.why.facts import MOST_RANKS, STALL_SECONDS, Cause, RunFacts, cause_named, ranks_of

NEWER_SECONDS = 3.0  # ranks that are asked for their calls write within two looks of each other
_SAME_CALL = "Make every rank of the group call the same collectives, in the same order."


@dataclass(slots=True, kw_only=True)
class BlockedCalls:
    """Ranks that wait in calls, and those that they wait for."""

    waits: dict[int, Call] = field(default_factory=dict)
    missing: dict[int, set[int]] = field(default_factory=dict)  # by waiting rank: ranks that have not come
    unseen: dict[int, set[int]] = field(default_factory=dict)  # by waiting rank: ranks that no source shows
    here: dict[int, set[int]] = field(default_factory=dict)  # by waiting rank: ranks that have come, itself included
    sizes: dict[int, int | None] = field(default_factory=dict)  # by waiting rank: how many ranks its group has
    roots: set[int] = field(default_factory=set)  # waited for, and waiting for no other rank
    met: set[int] = field(default_factory=set)  # in a call that all ranks of the group have come to
    mismatches: list[Cause] = field(default_factory=list)
    held: set[int] = field(default_factory=set)  # in a call that the other GPUs have begun, and theirs have not
    left: set[int] = field(default_factory=set)  # in a call that all have come to, and all others have left
    begun: dict[int, float] = field(default_factory=dict)  # by root: when the first wait for it began, Unix seconds
    age: float = 0.0  # seconds of the longest wait
    usual: float = 0.0  # seconds of the longest pause before it

    def circle(self) -> tuple[int, ...]:
        """Ranks each of which waits for another of them."""
        inside = {rank for rank, others in self.missing.items() if others}
        while any(not self.missing[rank] & inside for rank in inside):
            inside = {rank for rank in inside if self.missing[rank] & inside}
        return tuple(sorted(inside))

    def describe(self, waiting: Sequence[int]) -> str:
        """ "ranks 0, 1 wait in all_reduce of [8], number 12 of group 0; rank 3 waits in ..."."""
        rows: dict[str, list[int]] = {}
        for rank in waiting:
            rows.setdefault(describe(self.waits[rank]), []).append(rank)
        most = sorted(rows.items(), key=lambda row: -len(row[1]))[:4]
        return "; ".join(f"{ranks_of(ranks)} wait{'s' if len(ranks) == 1 else ''} in {where}" for where, ranks in most)


def describe(call: Call) -> str:
    """ "all_reduce of [8] Float, number 12 of group 0"."""
    number = f"number {call.number}" if call.number else "without a number"
    return f"{call.words}, {number} of group {call.group}" if call.group else f"{call.words}, {number}"


def find_blocked(traces: Mapping[int, RankTrace], facts: RunFacts, *, failed: frozenset[int]) -> BlockedCalls:
    """Each rank's oldest call that is not over, which ranks have not come to it, and of which that is not known.

    `failed` are ranks that ended as they lost a peer: the recorder has retired the call that they were in.
    """
    found = BlockedCalls()
    for rank, trace in traces.items():
        last = trace.calls[-1] if trace.calls and rank in failed else None
        call = next((one for one in trace.calls if not one.done), last)
        if call is None or facts.has_moved_on(rank) or _is_over_since(rank, call, traces, facts):
            continue
        found.waits[rank] = call
        _add_members(found, rank, call, traces, facts)
        if call.created:
            found.age = max(found.age, waited(trace, call, facts))
            found.usual = max(found.usual, _longest_pause(trace, call))
    found.mismatches += _mismatches(traces, found, facts)
    roots = _roots(found)
    found.met = {
        rank for rank, call in found.waits.items()
        if rank not in roots and len(found.here[rank]) == found.sizes[rank] and not found.missing.get(rank)
        and not any(_is_elsewhere(other, call, found, traces) for other in found.here[rank])
        and (call.created is None or waited(traces[rank], call, facts) >= STALL_SECONDS)
    }  # fmt: skip
    found.held, found.left = _held_up(found), _left_behind(found, traces, facts)
    found.roots = roots | found.held | found.left
    found.begun = {
        root: min((found.waits[r].created or 0.0 for r, others in found.missing.items() if root in others), default=0.0)
        for root in found.roots
    }
    return found


def _is_over_since(rank: int, call: Call, traces: Mapping[int, RankTrace], facts: RunFacts) -> bool:
    """Whether another rank, which has written since this one did, has left the call: then this wait is an old one."""
    return any(
        facts.ages.get(rank, 0.0) > facts.ages.get(other, 0.0) + NEWER_SECONDS and not trace.partial
        and trace.enqueued.get(call.group, 0) > call.number
        and not any(one.group == call.group and one.number <= call.number and not one.done for one in trace.calls)
        for other, trace in traces.items() if other != rank and not call.p2p
    )  # fmt: skip


def _add_members(found: BlockedCalls, rank: int, call: Call, traces: Mapping[int, RankTrace], facts: RunFacts) -> None:
    """Sort the members of a rank's call into those that have come, those that have not, and the unknown."""
    named = _members(traces[rank], call, facts)
    inside = _peers(rank, call, named) if call.p2p else named or _callers(call, traces)
    found.sizes[rank] = 2 if call.p2p else len(inside) if named else traces[rank].sizes.get(call.group)
    found.here[rank] = {rank}
    for other in inside - {rank}:
        came = _has_come(other, rank, call, traces, facts)
        if came:
            found.here[rank].add(other)
            if call.p2p:
                found.mismatches += _unequal(rank, call, other, _other_end(rank, call, traces[other]))
        else:
            (found.unseen if came is None else found.missing).setdefault(rank, set()).add(other)


def _is_elsewhere(other: int, call: Call, found: BlockedCalls, traces: Mapping[int, RankTrace]) -> bool:
    """Whether a rank waits in another call of the group, before this one or past it, by a log."""
    its = found.waits.get(other)
    return other in traces and traces[other].partial and its is not None and its.group == call.group and (
        its.number != call.number
    )  # fmt: skip


def waited(trace: RankTrace, call: Call, facts: RunFacts) -> float:
    """Seconds that a rank has waited in a call: by its own clock where its own file says when it last wrote.

    A dump by PyTorch alone is written once a call has timed out; the file's time is then the end of the wait.
    """
    state = facts.states.get(trace.rank)
    until = state.written if state else trace.written if trace.written and not facts.states else facts.now
    return until - (call.created or until)


def _members(trace: RankTrace, call: Call, facts: RunFacts) -> set[int]:
    """The ranks of a call's group where a source names them; the default group is everyone. Empty: not known."""
    state = facts.states.get(trace.rank)
    ranks = trace.groups.get(call.group) or (state.groups.get(call.group) if state else None)
    if ranks:
        return set(ranks)
    everyone = trace.names.get(call.group) == "default_pg" and (facts.world or 0) <= MOST_RANKS
    return set(range(facts.world or 0)) if everyone else set()


def _callers(call: Call, traces: Mapping[int, RankTrace]) -> set[int]:
    """Ranks that have called something in the group: members of it, though not all of them."""
    return {
        rank for rank, trace in traces.items()
        if call.group and (call.group in trace.enqueued or any(one.group == call.group for one in trace.calls))
    }  # fmt: skip


def _peers(rank: int, call: Call, members: set[int]) -> set[int]:
    """The two ranks of a send or receive; the rank itself alone where its peer is not known."""
    inside = sorted(members)
    return {rank, inside[call.peer]} if call.peer is not None and call.peer < len(inside) else {rank}


def _other_end(rank: int, call: Call, trace: RankTrace) -> Call | None:
    """The open receive or send of a peer that belongs to a rank's call.

    Numbers of sends and receives are each rank's own, so a pair is matched by its ends, first to first.
    """
    inside = trace.groups.get(call.group, ())
    mine = inside.index(rank) if rank in inside else rank
    return next(
        (one for one in trace.calls if one.p2p and not one.done and one.group == call.group and one.peer == mine
         and one.op != call.op), None,
    )  # fmt: skip


def _unequal(rank: int, call: Call, other: int, match: Call | None) -> Iterator[Cause]:
    """A send and its receive that differ; which of the two is wrong is not known."""
    if match is None or call.op != "send" or not call.sizes or not match.sizes or _lengths(call) == _lengths(match):
        return
    yield cause_named("unequal", sender=rank, sent=call.words, receiver=other, received=match.words)


def _lengths(call: Call) -> tuple[object, ...]:
    return (*(prod(one) for one in call.sizes), call.dtypes)


def _has_come(other: int, rank: int, call: Call, traces: Mapping[int, RankTrace], facts: RunFacts) -> bool | None:
    """Whether a rank has entered another rank's call; None if no source shows it. A log without it proves nothing."""
    trace, state = traces.get(other), facts.states.get(other)
    # what a rank wrote before the wait began says nothing of the wait
    began_ago = waited(traces[rank], call, facts) + facts.ages.get(rank, 0.0) if rank in facts.states else None
    is_old = began_ago is not None and state is not None and facts.ages.get(other, 0.0) > began_ago
    if call.p2p:
        pair = _other_end(rank, call, trace) if trace else None
        return True if pair else None if trace is None or trace.partial or is_old else False
    if trace is None:
        # its file counts the calls of all groups: more of them say nothing where there are several groups
        one_group = state is not None and len(state.groups or {"": ()}) == 1
        if state is None or not one_group or is_old:
            return None
        return state.calls >= call.number if state.calls else False
    newest = trace.enqueued.get(call.group, 0)  # of a dump: all its calls count in it
    if trace.partial:
        newest = max([newest, *(one.number for one in trace.calls if one.group == call.group and not one.p2p)])
        if call.group not in trace.enqueued:
            return True if call.group and newest >= call.number else None
    if newest < call.number and state is not None and facts.has_moved_on(other):  # its file counts all groups' calls
        if len(trace.enqueued) != 1:
            return None
        newest = state.calls
    return newest >= call.number or (None if is_old else False)


def _longest_pause(trace: RankTrace, until: Call) -> float:
    """Seconds of the longest pause between two calls before this one; the first call, which connects, is left out."""
    times = [call.created for call in trace.calls if call.created and call.record < until.record]
    return max((b - a for a, b in pairwise(times[1:])), default=0.0)


def _roots(blocked: BlockedCalls) -> set[int]:
    """Ranks waited for that wait for nobody; of a circle none.

    A rank that still waits in an earlier call of the same group, which the others have left, is behind them.
    """
    wanted = set().union(*blocked.missing.values()) if blocked.missing else set()
    waits = blocked.waits

    def is_earlier(rank: int) -> bool:
        return all(
            waits[one].group == waits[rank].group and waits[one].number > waits[rank].number
            for one, others in blocked.missing.items() if rank in others
        )  # fmt: skip

    return {rank for rank in wanted if not blocked.missing.get(rank) and (rank not in waits or is_earlier(rank))}


def _held_up(blocked: BlockedCalls) -> set[int]:
    """Ranks that have called what the other GPUs have begun, and whose own GPU has not come to it."""
    begun = {(call.group, call.number) for call in blocked.waits.values() if call.started and not call.p2p}
    late = {r for r, c in blocked.waits.items() if not c.started and (c.group, c.number) in begun and not c.p2p}
    return late if len(late) < len(blocked.waits) / 2 else set()


def _left_behind(blocked: BlockedCalls, traces: Mapping[int, RankTrace], facts: RunFacts) -> set[int]:
    """Ranks in a call that all of its group have come to, and all others of it have left.

    Calls are made ahead of the GPU, so a rank whose GPU fails has called what the others wait in.
    """

    def is_over(other: int, rank: int, call: Call) -> bool:
        trace, mine = traces.get(other), traces[rank]
        if trace is None or trace.partial or (trace.taken and mine.taken and trace.taken > mine.taken + 1):
            return False
        return not any(
            one.group == call.group and one.number <= call.number and not one.p2p and not one.done
            for one in trace.calls
        )

    late = {
        rank for rank, call in blocked.waits.items()
        if not call.p2p and not traces[rank].partial and len(blocked.here[rank]) == blocked.sizes[rank]
        and len(blocked.here[rank]) > 1 and all(is_over(other, rank, call) for other in blocked.here[rank] - {rank})
        and (call.created is None or waited(traces[rank], call, facts) >= STALL_SECONDS)
    }  # fmt: skip
    return late if len(late) < len(blocked.waits) / 2 else set()


# Calls that do not match ----------------------------------------------------------------------------------------------

_ALIKE = ("all_reduce", "allreduce", "_allgather_base", "_all_gather_base", "all_gather", "reduce_scatter", "broadcast",
          "_reduce_scatter_base", "reduce", "allgather", "coalesced all_gather")  # fmt: skip


def signature(call: Call) -> tuple[object, ...]:
    """What must be the same on each rank of a group."""
    alike = call.op.lower() in _ALIKE
    return (call.op, *((tuple(prod(one) for one in call.sizes), call.dtypes) if alike else ()))


def _mismatches(traces: Mapping[int, RankTrace], blocked: BlockedCalls, facts: RunFacts) -> Iterator[Cause]:
    """The oldest call of each group that a rank waits in, and the ranks that called something else there.

    Logs of releases before 2.3 name no group: calls of one number that differ are shown, but no rank is named.
    """
    oldest: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, call in blocked.waits.items():
        if not call.p2p:
            key = call.group, tuple(traces[rank].groups.get(call.group, ()))
            oldest[key] = min(call.number, oldest.get(key, call.number))
    for (group, members), number in oldest.items():
        rows = {
            rank: call for rank, trace in traces.items() for call in trace.calls
            if call.group == group and call.number == number and not call.p2p and call.op != UNNAMED
            and tuple(trace.groups.get(group, ())) == members
        }  # fmt: skip
        if len({signature(call) for call in rows.values()}) < 2:
            continue
        sizes = [size for rank in rows if (size := blocked.sizes.get(rank))]
        yield mismatch(rows, size=max(sizes, default=len(members) or facts.world or len(rows)) if group else None)


def mismatch(rows: Mapping[int, Call], *, size: int | None) -> Cause:
    """The ranks of a group of `size` whose calls differ; a rank is named only where most of the group differ from it.

    Without such a majority none is named. A size of None says that the group is not known.
    """
    usual, most = Counter(signature(call) for call in rows.values()).most_common(1)[0]
    decided = size is not None and most > size / 2
    odd = sorted(rank for rank, call in rows.items() if signature(call) != usual)
    other = next(call for call in rows.values() if signature(call) == usual)
    mine = rows[odd[-1]]
    code, what = ("call.size", "other sizes") if mine.op == other.op else ("call.other", "another collective")
    evidence = tuple(
        f"rank {rank}: {describe(call)}" + (f", from {call.frames[0]}" if call.frames else "")
        for rank, call in sorted(rows.items())
    )[:8]
    if decided:
        verb = f"call{'s' if len(odd) == 1 else ''}"
        words = f"{ranks_of(odd)} {verb} {what}: {mine.words}, where the others call {other.words}"
        return Cause(code=code, message=words, ranks=tuple(odd), evidence=evidence, action=_SAME_CALL)
    by_kind: dict[str, list[int]] = {}
    for rank, call in sorted(rows.items()):
        by_kind.setdefault(call.words, []).append(rank)
    each = ", ".join(f"{ranks_of(ranks)} call{'s' if len(ranks) == 1 else ''} {k}" for k, ranks in by_kind.items())
    rest = "; there is no majority, so it is unknown which of them is wrong"
    if size is None:
        rest = "; the log names no process group, so they may be of different groups"
    elif len(rows) < size <= MOST_RANKS:
        absent = [rank for rank in range(size) if rank not in rows] if size > max(rows) else []
        rest = f"; the calls of {ranks_of(absent) if absent else 'other ranks'} are not known"
    words = f"{ranks_of(sorted(rows))} disagree: {each}{rest}"
    return Cause(code=code, message=words, evidence=evidence, action=_SAME_CALL)
