"""Blocked calls: which ranks wait in which collective, which ranks are missing there, and calls that do not match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, prod

from collectives.traces.calls import UNNAMED, Call, RankTrace
from planner.why.facts import MOST_RANKS, STALL_SECONDS, START_CALLS, Cause, RunFacts, cause_named, ranks_of

NEWER_SECONDS = 3.0  # ranks asked for a dump write it within two polling intervals of each other
_SAME_CALL = "Make every rank of the group call the same collectives, in the same order."


@dataclass(slots=True, kw_only=True)
class Wait:
    """A rank that waits in a call, and the known state of the members of its group."""

    call: Call
    seconds: float  # so far
    size: int | None = None  # of the group
    here: set[int] = field(default_factory=set)  # ranks that have entered the call, including this one
    missing: set[int] = field(default_factory=set)  # ranks that have not entered it
    unseen: set[int] = field(default_factory=set)  # ranks that no source shows

    @property
    def is_met(self) -> bool:
        """Return whether the whole group has entered the call and stays in it for as long as a stall."""
        is_long = self.call.created is None or self.seconds >= STALL_SECONDS
        return len(self.here) == self.size and not self.missing and is_long


def describe(call: Call) -> str:
    """ "all_reduce of [8] Float, number 12 of group 0"."""
    number = f"number {call.number}" if call.number else "without a number"
    return f"{call.words}, {number} of group {call.group}" if call.group else f"{call.words}, {number}"


class BlockedCalls:
    """Each rank's oldest unfinished call, the ranks that have not entered it, and those for which this is unknown."""

    def __init__(self, traces: Mapping[int, RankTrace], facts: RunFacts) -> None:
        self.traces, self.facts = traces, facts
        self.waits: dict[int, Wait] = {}
        self.mismatches: list[Cause] = []
        self.usual = 0.0  # seconds of the longest earlier pause
        failed = facts.lost_a_peer  # as they ended, the recorder has retired the call that they were in
        for rank, trace in traces.items():
            last = trace.calls[-1] if trace.calls and rank in failed else None
            call = next((one for one in trace.calls if not one.done), last)
            if call is None or facts.has_moved_on(rank) or self._is_over(rank, call):
                continue
            self.waits[rank] = self._wait(rank, call)
            if call.created:
                self.usual = max(self.usual, _longest_pause(trace, call))
        entered: dict[tuple[str, int, bool], dict[int, float]] = {}
        for wait in self.waits.values():
            if len(wait.here) == wait.size and wait.call.created:  # the call can proceed only after the last rank came
                key = wait.call.group, wait.call.number, wait.call.p2p
                entered[key] = entered.get(key) or self._entered(key)
                wait.seconds = min(wait.seconds, *(entered[key].get(other, inf) for other in wait.here))
        self.age = max((wait.seconds for wait in self.waits.values()), default=0.0)  # seconds of the longest wait
        self.mismatches += self._find_mismatches()
        late = self._find_late()
        # in a call that all ranks of the group have come to
        self.met = {rank for rank, wait in self.waits.items() if rank not in late and wait.is_met
                    and not any(self._is_elsewhere(other, wait.call) for other in wait.here)}  # fmt: skip
        begun = {(w.call.group, w.call.number) for w in self.waits.values() if w.call.started and not w.call.p2p}
        # in a call that the other GPUs have begun, and theirs have not
        self.held = self._few({rank for rank, wait in self.waits.items() if not wait.call.started
                               and (wait.call.group, wait.call.number) in begun and not wait.call.p2p})  # fmt: skip
        # in a call that all have come to, and all others have left: calls are made ahead of the GPU, so a rank whose
        # GPU fails has called what the others wait in
        self.left = self._few({rank for rank, wait in self.waits.items() if wait.is_met and not wait.call.p2p
                               and not traces[rank].partial and len(wait.here) > 1
                               and all(self._has_left_since(other, rank) for other in wait.here - {rank})})  # fmt: skip
        self.roots = late | self.held | self.left  # ranks that others wait for and that wait for no rank

    def waiting_for(self, rank: int) -> dict[int, Wait]:
        """Return the waits for a rank, by waiting rank."""
        return {one: wait for one, wait in self.waits.items() if rank in wait.missing}

    def begun(self, rank: int) -> float:
        """Return when the first wait for a rank began, in Unix seconds of that rank's clock; 0 if unknown."""
        ages = self.facts.ages
        waits = [ages.get(one, 0.0) + wait.seconds for one, wait in self.waiting_for(rank).items() if wait.call.created]
        return self._until(rank) + ages.get(rank, 0.0) - max(waits) if waits else 0.0

    def circle(self) -> tuple[int, ...]:
        """Return the ranks of a cycle, each of which waits for another of them."""
        inside = {rank for rank, wait in self.waits.items() if wait.missing}
        while any(not self.waits[rank].missing & inside for rank in inside):
            inside = {rank for rank in inside if self.waits[rank].missing & inside}
        return tuple(sorted(inside))

    def describe(self, waiting: Sequence[int]) -> str:
        """ "ranks 0, 1 wait in all_reduce of [8], number 12 of group 0; rank 3 waits in ..."."""
        rows: dict[str, list[int]] = {}
        for rank in waiting:
            rows.setdefault(describe(self.waits[rank].call), []).append(rank)
        most = sorted(rows.items(), key=lambda row: -len(row[1]))[:4]
        return "; ".join(f"{ranks_of(ranks)} wait{'s' if len(ranks) == 1 else ''} in {where}" for where, ranks in most)

    def _wait(self, rank: int, call: Call) -> Wait:
        """A rank's wait, with the members of its group sorted into those that have come, have not, and the unknown.

        The time is by the rank's own clock where its own file says when it last wrote. A dump by PyTorch alone is
        written once a call has timed out; the file's time is then the end of the wait.
        """
        trace, until = self.traces[rank], self._until(rank)
        wait = Wait(call=call, seconds=until - (call.created or until), here={rank})
        named = self._members(rank, call.group)
        callers = {other for other, one in self.traces.items() if call.group and one.has_called_in(call.group)}
        inside = named or callers
        if call.p2p:
            inside = {rank, sorted(named)[call.peer]} if call.peer is not None and call.peer < len(named) else {rank}
        wait.size = 2 if call.p2p else len(named) if named else trace.sizes.get(call.group)
        for other in inside - {rank}:
            came = self._has_come(other, rank, wait)
            (wait.here if came else wait.unseen if came is None else wait.missing).add(other)
            if came and call.p2p:
                self.mismatches += _unequal(rank, call, other, self._other_end(rank, call, other))
        return wait

    def _until(self, rank: int) -> float:
        """Return when a rank last wrote, by its own clock."""
        state, trace, facts = self.facts.states.get(rank), self.traces.get(rank), self.facts
        return state.written if state else trace.written if trace and trace.written and not facts.states else facts.now

    def _entered(self, key: tuple[str, int, bool]) -> dict[int, float]:
        """Return the seconds since each rank entered a call, which it may have left, where its dump shows that."""
        return {
            rank: self._until(rank) - one.created + self.facts.ages.get(rank, 0.0)
            for rank, trace in self.traces.items() for one in trace.calls
            if one.created and (one.group, one.number, one.p2p) == key and not (one.p2p and one.done)
        }  # fmt: skip

    def _members(self, rank: int, group: str) -> set[int]:
        """Return the ranks of a rank's group, if a source names them; the default group has all. Empty: unknown."""
        trace, state = self.traces[rank], self.facts.states.get(rank)
        if ranks := trace.groups.get(group) or (state.groups.get(group) if state else None):
            return set(ranks)
        world = self.facts.world or 0
        return set(range(world)) if trace.names.get(group) == "default_pg" and world <= MOST_RANKS else set()

    def _has_come(self, other: int, rank: int, wait: Wait) -> bool | None:
        """Whether a rank has entered a rank's call; None if no source shows it. A log without it proves nothing."""
        call, facts, trace, state = wait.call, self.facts, self.traces.get(other), self.facts.states.get(other)
        # what a rank wrote before the wait began says nothing of the wait
        is_old = rank in facts.states and state is not None and (
            facts.ages.get(other, 0.0) > wait.seconds + facts.ages.get(rank, 0.0))  # fmt: skip
        if call.p2p:
            pair = self._other_end(rank, call, other)
            return True if pair else None if trace is None or trace.partial or is_old else False
        # its file counts the calls of all groups: more of them say nothing where there are several groups
        if trace is None:
            if state is None or len(state.groups or {"": ()}) != 1 or is_old:
                return None
            return state.calls >= call.number if state.calls else False
        newest = trace.newest_in(call.group)
        if trace.partial and call.group not in trace.enqueued:
            return True if call.group and newest >= call.number else None
        if newest < call.number and state is not None and facts.has_moved_on(other):
            if [*trace.enqueued] != [call.group]:
                return None
            newest = state.calls
        return newest >= call.number or (None if is_old else False)

    def _is_over(self, rank: int, call: Call) -> bool:
        """Whether another rank, which has written since this one did, has left the call: this wait is an old one."""
        ages = self.facts.ages
        return not call.p2p and any(
            ages.get(rank, 0.0) > ages.get(other, 0.0) + NEWER_SECONDS and trace.newest_in(call.group) > call.number
            and trace.has_left(call)
            for other, trace in self.traces.items() if other != rank
        )  # fmt: skip

    def _has_left_since(self, other: int, rank: int) -> bool:
        """Whether a rank has left a rank's call, by a dump that is not newer than that rank's."""
        trace, mine = self.traces.get(other), self.traces[rank]
        if trace is None or (trace.taken and mine.taken and trace.taken > mine.taken + 1):
            return False
        return trace.has_left(self.waits[rank].call)

    def _is_elsewhere(self, other: int, call: Call) -> bool:
        """Whether a rank waits in another call of the group, before this one or past it, by a log."""
        if other not in self.waits or not self.traces[other].partial:
            return False
        its = self.waits[other].call
        return its.group == call.group and its.number != call.number

    def _other_end(self, rank: int, call: Call, other: int) -> Call | None:
        """Return the open receive or send of a peer that matches a rank's call.

        Each rank numbers its own sends and receives, so a pair is matched by its ends, first to first.
        """
        trace = self.traces.get(other, RankTrace(rank=other))
        inside = trace.groups.get(call.group, ())
        mine = inside.index(rank) if rank in inside else rank
        ends = (one for one in trace.calls if one.p2p and not one.done and one.group == call.group and one.peer == mine)
        return next((one for one in ends if one.op != call.op), None)

    def _find_late(self) -> set[int]:
        """Return ranks that others wait for and that wait for nobody; none of a cycle.

        A rank that still waits in an earlier call of the same group, which the others have left, is behind them.
        """

        def is_earlier(rank: int) -> bool:
            mine, others = self.waits[rank].call, (wait.call for wait in self.waiting_for(rank).values())
            return all(one.group == mine.group and one.number > mine.number for one in others)

        wanted = {rank for wait in self.waits.values() for rank in wait.missing}
        return {rank for rank in wanted
                if rank not in self.waits or (not self.waits[rank].missing and is_earlier(rank))}  # fmt: skip

    def _few(self, ranks: set[int]) -> set[int]:
        """Return the ranks if they are fewer than half of the waiting ones; a majority does not block itself."""
        return ranks if len(ranks) < len(self.waits) / 2 else set()

    def _find_mismatches(self) -> Iterator[Cause]:
        """The oldest call of each group that a rank waits in, and the ranks that called something else there.

        Logs of releases before 2.3 name no group: calls of one number that differ are shown, but no rank is named.
        """
        oldest: dict[tuple[str, tuple[int, ...]], int] = {}
        for rank, wait in self.waits.items():
            if not wait.call.p2p:
                key = wait.call.group, tuple(self.traces[rank].groups.get(wait.call.group, ()))
                oldest[key] = min(wait.call.number, oldest.get(key, wait.call.number))
        for (group, members), number in oldest.items():
            rows = {
                rank: call for rank, trace in self.traces.items() for call in trace.calls
                if call.group == group and call.number == number and not call.p2p and call.op != UNNAMED
                and tuple(trace.groups.get(group, ())) == members
            }  # fmt: skip
            kinds = {signature(call) for call in rows.values() if call.sizes}  # a line may be cut before its sizes
            if len(kinds) < 2 and len({call.op for call in rows.values()}) < 2:
                continue
            sizes = [size for rank in rows if rank in self.waits and (size := self.waits[rank].size)]
            known = max(sizes, default=len(members) or self.facts.world or len(rows))
            yield mismatch(rows, size=known if group else None)


def _unequal(rank: int, call: Call, other: int, match: Call | None) -> Iterator[Cause]:
    """A send and its receive that differ; which of the two is wrong is not known."""
    if match is None or call.op != "send" or not call.sizes or not match.sizes or _lengths(call) == _lengths(match):
        return
    yield cause_named("unequal", sender=rank, sent=call.words, receiver=other, received=match.words)


def _lengths(call: Call) -> tuple[object, ...]:
    return (*(prod(one) for one in call.sizes), call.dtypes)


def _longest_pause(trace: RankTrace, until: Call) -> float:
    """Return the longest pause in seconds between earlier calls, but the first: they wait for the last to start."""
    times = [call.created for call in trace.calls if call.created and call.record < until.record]
    return max((b - a for a, b in pairwise(times[START_CALLS:])), default=0.0)


# Calls that do not match ----------------------------------------------------------------------------------------------

_ALIKE = ("all_reduce", "allreduce", "_allgather_base", "_all_gather_base", "all_gather", "reduce_scatter", "broadcast",
          "_reduce_scatter_base", "reduce", "allgather", "coalesced all_gather", "gather")  # fmt: skip


def signature(call: Call) -> tuple[object, ...]:
    """Return the properties of a call that must be equal on all ranks of a group."""
    return (call.op, *(_lengths(call) if call.op.lower() in _ALIKE else ()))


def odd_of_all(facts: RunFacts, ranks: tuple[int, ...]) -> Cause | None:
    """The one rank that gloo ended by the sizes of its call, if all others of the job were alike in their last call."""
    last = {rank: trace.calls[-1] for rank, trace in facts.traces.items() if trace.calls and rank not in ranks}
    alike = {(call.group, call.number, signature(call)) for call in last.values()}
    if len(ranks) != 1 or len(alike) != 1 or not 1 < len(last) == (facts.world or 0) - 1:
        return None
    evidence = tuple(f"rank {rank}: {describe(call)}" for rank, call in sorted(last.items()))[:8]
    others, call = ranks_of(sorted(last)), next(iter(last.values()))
    words = f"{ranks_of(ranks)} calls another size or another collective than {others} in {describe(call)}"
    return Cause(code="call.size", message=words, ranks=ranks, evidence=(*evidence, facts.log.cut_short),
                 action=_SAME_CALL)  # fmt: skip


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
