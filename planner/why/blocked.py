"""Calls that do not move: who waits in which collective, for whom, and the rank, link or mismatch that is the cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, prod
from statistics import NormalDist

from collectives.traces.rank_files import UNNAMED, Call, RankTrace
from planner.why import limits
from planner.why.facts import Activity, Cause, RunFacts, Verdict, make_cause, make_open_verdict, ranks_of
from planner.why.words import ENDED, IN_CALL, WORK

NEWER_SECONDS = 3.0  # ranks asked for a dump write it within two polling intervals of each other
_SAME_CALL = "Make every rank of the group call the same collectives, in the same order."


@dataclass(slots=True, kw_only=True)
class Wait:
    """A rank that waits in a call, and the known state of the members of its group."""

    call: Call
    seconds: float  # so far, by its own clock
    ago: float  # seconds from its beginning to the newest file of any rank
    size: int | None = None  # of the group
    here: set[int] = field(default_factory=set)  # ranks that have entered the call, including this one
    missing: set[int] = field(default_factory=set)  # ranks that have not entered it
    unseen: set[int] = field(default_factory=set)  # ranks that no source shows

    @property
    def is_met(self) -> bool:
        """Return whether the whole group has entered the call and stays in it for as long as a stall."""
        is_long = self.call.created is None or self.seconds >= limits.STALL_SECONDS
        return len(self.here) == self.size and not self.missing and is_long


def describe(call: Call) -> str:
    """ "all_reduce of [8] Float, number 12 of group 0"."""
    number = f"number {call.number}" if call.number else "without a number"
    return f"{call.words}, {number} of group {call.group}" if call.group else f"{call.words}, {number}"


class BlockedCalls:
    """Each rank's oldest unfinished call, the ranks that others wait for there, and what these do."""

    def __init__(self, facts: RunFacts, traces: Mapping[int, RankTrace], source: str) -> None:
        self.facts, self.traces, self.source = facts, traces, source
        self.waits = {rank: self._wait(rank, call) for rank in traces if (call := self._find_open_call(rank))}
        self._shorten_waits_for_the_last()
        # seconds of the longest wait; dumps of one request are made within seconds, and a wait may end between them
        waits = [wait for rank, wait in self.waits.items() if not self._find_leavers(rank, wait.call)]
        self.age = max((wait.seconds for wait in waits), default=0.0)
        self.mismatches = [*self._find_unequal_messages(), *self._find_mismatches()]
        behind = self._find_late()
        # in a call that all ranks of the group have come to
        self.met = {rank for rank, wait in self.waits.items() if rank not in behind and wait.is_met
                    and not any(self._is_elsewhere(other, rank) for other in wait.here)}  # fmt: skip
        self.unbegun, inside = self._find_held_gpus()
        self.what = {rank: self._find_activity(rank) for rank in behind} | inside | self.unbegun
        self.roots = set(self.what)  # ranks that others wait for and that wait for no rank
        self.decisive = {rank for rank, one in self.what.items() if one.kind in ENDED and self.age >= one.grace}
        ended = [rank for rank in facts.states if facts.activity(rank).kind == "gone"]
        first = facts.find_first_to_end(ended) if any(facts.states[rank].error for rank in ended) else None
        self.first = first if self.decisive or first in self.waits else None
        if self.first is not None:  # the others ended after it, or were terminated
            self.decisive, self.what[self.first] = {self.first}, facts.end_of(self.first)
            self.roots.add(self.first)
        self.waiting = tuple(sorted(rank for rank in self.waits if rank not in self.roots))
        by_file = not facts.states and any(one.written and not one.taken for one in traces.values())
        age = f", for {self.age:.0f} s" + by_file * " by the dumps' file times" if self.age > 0 else ""
        self.wait = f"{source}: {'; '.join(self._describe(self.waiting))}{age}"

    # Who waits for whom ----------------------------------------------------------------------------------------------

    def _find_open_call(self, rank: int) -> Call | None:
        """Return the call that a rank waits in; None if there is none, or if another rank shows that it is over."""
        calls = self.traces[rank].calls
        # as a rank ended that had lost a peer, the recorder has retired the call that it was in
        last = calls[-1] if calls and rank in self.facts.lost_a_peer else None
        call = next((open_call for open_call in calls if not open_call.done), last)
        if call is None or self.facts.has_moved_on(rank):
            return None
        ages, leavers = self.facts.ages, self._find_leavers(rank, call)
        is_over = any(ages.get(rank, 0.0) > ages.get(other, 0.0) + NEWER_SECONDS for other in leavers)
        return None if is_over else call

    def _wait(self, rank: int, call: Call) -> Wait:
        """A rank's wait, with the members of its group sorted into those that have come, have not, and the unknown.

        The time is by the rank's own clock where its own file says when it last wrote. A dump by PyTorch alone is
        written once a call has timed out; the file's time is then the end of the wait.
        """
        trace, began = self.traces[rank], call.created or self._last_written(rank)
        wait = Wait(call=call, seconds=self._last_written(rank) - began, ago=self._ago(rank, began), here={rank})
        named = self._members(rank, call.group)
        inside = named or {other for other, one in self.traces.items() if call.group and one.has_called_in(call.group)}
        if call.p2p:
            inside = {rank, sorted(named)[call.peer]} if call.peer is not None and call.peer < len(named) else {rank}
        wait.size = 2 if call.p2p else len(named) if named else trace.sizes.get(call.group)
        for other in inside - {rank}:
            came = self._has_come(other, rank, wait)
            (wait.here if came else wait.unseen if came is None else wait.missing).add(other)
        return wait

    def _last_written(self, rank: int) -> float:
        """Return when a rank last wrote, by its own clock."""
        state, trace, facts = self.facts.states.get(rank), self.traces.get(rank), self.facts
        return state.written if state else trace.written if trace and trace.written and not facts.states else facts.now

    def _ago(self, rank: int, moment: float) -> float:
        """Return the seconds from a time by a rank's clock to the newest file of any rank."""
        return self.facts.ages.get(rank, 0.0) + self._last_written(rank) - moment

    def _members(self, rank: int, group: str) -> set[int]:
        """Return the ranks of a rank's group, if a source names them; the default group has all. Empty: unknown."""
        trace, state = self.traces[rank], self.facts.states.get(rank)
        if ranks := trace.groups.get(group) or (state.groups.get(group) if state else None):
            return set(ranks)
        world = self.facts.world or 0
        return set(range(world)) if trace.names.get(group) == "default_pg" and world <= limits.MAX_RANKS else set()

    def _has_come(self, other: int, rank: int, wait: Wait) -> bool | None:
        """Whether a rank has entered a rank's call; None if no source shows it. A log without it proves nothing."""
        call, facts, trace, state = wait.call, self.facts, self.traces.get(other), self.facts.states.get(other)
        # what a rank wrote before the wait began says nothing of the wait, nor does a rank of a later start
        is_old = rank in facts.states and state is not None and (facts.ages.get(other, 0.0) > wait.ago or (
            bool(state.marks) and self._ago(other, state.marks[0].at) < wait.ago - limits.STALE_SECONDS))  # fmt: skip
        if call.p2p:
            posted = self._find_other_end(rank, call, other) is not None
            return True if posted else None if trace is None or trace.partial or is_old else False
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
        if newest >= call.number:
            return not self._is_queued(trace, call)
        return None if is_old else False

    def _is_queued(self, trace: RankTrace, call: Call) -> bool:
        """Whether a rank has made a call only ahead of its GPU, which is still in an earlier call of another group."""
        still_open = [other for other in trace.calls if not (other.done or other.p2p)]
        is_in_other = bool(still_open) and still_open[0].started and still_open[0].group != call.group
        return is_in_other and any(
            (other.group, other.number, other.started) == (call.group, call.number, False) and other.is_ahead
            for other in still_open
        )

    def _find_other_end(self, rank: int, call: Call, other: int) -> Call | None:
        """Return the open receive or send of a peer that matches a rank's call.

        Each rank numbers its own sends and receives, so a pair is matched by its ends, first to first.
        """
        trace = self.traces.get(other, RankTrace(rank=other))
        inside = trace.groups.get(call.group, ())
        peer = inside.index(rank) if rank in inside else rank
        ends = (one for one in trace.calls if one.p2p and not one.done and one.group == call.group and one.peer == peer)
        return next((candidate for candidate in ends if candidate.op != call.op), None)

    def _find_leavers(self, rank: int, call: Call) -> list[int]:
        """Return the other ranks that are past a rank's call. If they wrote later, the rank may be past it, too."""
        return [other for other, trace in self.traces.items() if other != rank and not call.p2p
                and trace.newest_in(call.group) > call.number and trace.has_left(call)]  # fmt: skip

    def _shorten_waits_for_the_last(self) -> None:
        """A call that all have entered can proceed only after the last rank came: from then on its time counts."""
        complete = [wait for wait in self.waits.values() if len(wait.here) == wait.size and wait.call.created]
        keys = {wait.call.key for wait in complete}
        entered = {  # a rank may have left it
            (rank, call.key): self._ago(rank, call.created)
            for rank, trace in self.traces.items() for call in trace.calls
            if call.created and call.key in keys and not (call.p2p and call.done)
        }  # fmt: skip
        for wait in complete:
            wait.seconds = min(wait.seconds, *(entered.get((other, wait.call.key), inf) for other in wait.here))

    def _find_late(self) -> set[int]:
        """Return ranks that others wait for and that wait for nobody; none of a cycle.

        A rank that still waits in an earlier call of the same group, which the others have left, is behind them.
        """

        def is_earlier(rank: int) -> bool:
            call, others = self.waits[rank].call, (wait.call for wait in self._find_waiters(rank).values())
            return all(other.group == call.group and other.number > call.number for other in others)

        missing = {rank for wait in self.waits.values() for rank in wait.missing}
        ranks = {rank for rank in missing
                if rank not in self.waits or (not self.waits[rank].missing and is_earlier(rank))}  # fmt: skip
        if len(ranks & self.waits.keys()) > len(self.waits) / 2:  # most ranks are not behind: some are ahead
            ranks -= self.waits.keys()
        return set(filter(self._is_late_by_most, ranks))

    def _is_late_by_most(self, rank: int) -> bool:
        """Whether a rank still runs, or any failed; else whether most of a group wait for it in one call."""
        states, waits = self.facts.states, self._find_waiters(rank).values()
        failed = rank == self.facts.first or any(state.error for state in states.values())
        if rank not in states or not states[rank].ended or failed:
            return True
        waiting = Counter(wait.call.key for wait in waits)
        return any(wait.call.p2p or not wait.size or waiting[wait.call.key] > wait.size / 2 for wait in waits)

    def _find_held_gpus(self) -> tuple[dict[int, Activity], dict[int, Activity]]:
        """Return the ranks whose GPUs have not begun a call that others have, and those that have not finished it.

        Calls are made ahead of the GPU, so a rank whose GPU hangs has called what the others wait in.
        """
        waits = {rank: wait for rank, wait in self.waits.items() if not wait.call.p2p}
        begun = {wait.call.key for wait in waits.values() if wait.call.started}
        unbegun, inside = dict[int, Activity](), dict[int, Activity]()
        for rank, wait in waits.items():
            text = describe(wait.call)
            if not wait.call.started and wait.call.key in begun:
                unbegun[rank] = Activity(
                    "gpu", f"has called {text}, and its GPU has not begun it: work before it still runs"
                )
            elif wait.is_met and len(wait.here) > 1 and all(self._has_left(one, rank) for one in wait.here - {rank}):
                inside[rank] = Activity("gpu", f"is still in {text}, which the others have finished")
        most = len(self.waits) / 2  # a majority does not block itself
        return unbegun if len(unbegun) < most else {}, inside if len(inside) < most else {}

    def _find_waiters(self, rank: int) -> dict[int, Wait]:
        """Return the waits for a rank, by waiting rank."""
        return {waiter: wait for waiter, wait in self.waits.items() if rank in wait.missing}

    def _has_left(self, other: int, rank: int) -> bool:
        """Whether a rank has left a rank's call, by a dump that is not newer than that rank's."""
        trace, own_trace = self.traces.get(other), self.traces[rank]
        if trace is None or (trace.taken and own_trace.taken and trace.taken > own_trace.taken + 1):
            return False
        return trace.has_left(self.waits[rank].call)

    def _is_elsewhere(self, other: int, rank: int) -> bool:
        """Whether a rank has left a rank's call, or waits in another call of the group by a log."""
        call, wait = self.waits[rank].call, self.waits.get(other)
        if wait is None or not self.traces[other].partial:
            return not call.p2p and self._has_left(other, rank)
        return wait.call.group == call.group and wait.call.number != call.number

    def _find_activity(self, rank: int) -> Activity:
        """What a rank does that others wait for: by its calls if it waits itself, else by its own file or its calls."""
        facts = self.facts
        if rank in self.waits:
            return Activity("unknown", f"is still in {describe(self.waits[rank].call)}, which the others have finished")
        waits = self._find_waiters(rank)
        if rank in facts.states or rank in facts.processes or rank in facts.stacks:
            longest = max((wait.ago for wait in waits.values() if wait.call.created), default=None)
            begun = self._last_written(rank) + facts.ages.get(rank, 0.0) - longest if longest is not None else 0.0
            return facts.find_activity_since(rank, begun)
        call, trace = waits[min(waits)].call, self.traces[rank]
        last = next((earlier for earlier in reversed(trace.calls) if earlier.group == call.group), None)
        newest = trace.enqueued.get(call.group) or (last.number if last else 0)
        since = f"; its last call there is number {newest}" if newest else "; it has called nothing there"
        line = f", from {last.frames[0]}" if last and last.frames else ""
        return Activity("unknown", f"has not entered {describe(call)}{since}{line}")

    def _describe(self, waiting: Sequence[int], *, all_rows: bool = False) -> list[str]:
        """ "ranks 0, 1 wait in all_reduce of [8], number 12 of group 0, from train.py:31 step"; all_rows: for whom."""
        rows: dict[str, list[int]] = {}
        for rank in waiting:
            wait = self.waits[rank]
            of_whom = f" for {ranks_of(sorted(wait.missing))}" if all_rows else ""
            rows.setdefault(describe(wait.call) + of_whom + self._find_line(rank, wait.call), []).append(rank)
        largest = sorted(rows.items(), key=lambda row: -len(row[1]))[: 8 if all_rows else 4]
        return [f"{ranks_of(ranks)} wait{'s' * (len(ranks) == 1)} in {place}" for place, ranks in largest]

    # The verdict -----------------------------------------------------------------------------------------------------

    def verdict(self) -> Verdict | None:
        """Return the verdict; None if nothing is stuck, or if this source does not show why."""
        facts = self.facts
        if not self.waits or not (self.decisive or self.mismatches or self._has_stalled()):
            return None
        if self.mismatches and not any(activity.kind == "stopped" for activity in self.what.values()):
            failed = any(state.ended and state.error for state in facts.states.values())
            return facts.verdict("failed" if failed else "stuck", *self.mismatches, waiting=self.waiting)
        gone = {rank for rank, activity in self.what.items() if activity.kind == "gone"}
        if self.first is None and (len(gone) > 1 or gone & facts.lost_a_peer):
            return None  # the errors of these ranks decide which of them was first
        if not self.roots:
            return self._judge_without_root()
        if (early := self._judge_patience()) is not None:
            return early
        if not self.decisive and self.roots <= self.waits.keys() - self.unbegun.keys() and self._is_resending():
            behind = self.waits[min(self.roots)]  # all have come to the call that these are still in: not late
            message = f"{ranks_of(sorted(self.roots))}: still in {describe(behind.call)}"
            cause = network(facts, "transfers no data", self.wait, message, between=sorted(behind.here))
            return facts.verdict("stuck", cause, waiting=tuple(sorted(self.waits)))
        return self._named(self.decisive or self.roots)

    def _has_stalled(self) -> bool:
        """Whether the longest wait is a stall; a watchdog has waited before it wrote, and dumps may have no times."""
        usual = max((_longest_pause(self.traces[rank], wait.call) for rank, wait in self.waits.items()), default=0.0)
        untimed = not any(trace.taken or trace.written for trace in self.traces.values()) and not self.facts.states
        return (
            self.source != "flight recorder"
            or self.age >= max(limits.STALL_SECONDS, limits.LONGER * usual)
            or (untimed and any(wait.missing for wait in self.waits.values()))
        )

    def _named(self, ranks: set[int]) -> Verdict:
        """Return the verdict that names the ranks that others wait for, except those that may take longer.

        If all may, and the others gave up, the timeout was short; they are named as what was waited for.
        """
        facts, activities = self.facts, self.what
        accused = [rank for rank in sorted(ranks) if self.age >= activities[rank].grace] or sorted(ranks)
        causes = [facts.cause_of(rank, activities[rank], self.wait) for rank in accused]
        failed = any(cause.code == "rank.gone" for cause in causes) or any(facts.outlived(rank) for rank in accused)
        return facts.verdict("failed" if failed else "stuck", *causes, waiting=self.waiting)

    def _judge_patience(self) -> Verdict | None:
        """No fault yet: the others wait for ranks at work that may take as long, or their timeout was too short."""
        patient = {rank: one for rank, one in self.what.items() if self.age < one.grace and rank not in self.decisive}
        if not patient or len(patient) < len(self.what):
            return None
        if self.facts.gave_up:
            is_long = all(one.grace >= self.facts.limit for one in patient.values())
            return self.facts.blame_timeout(patient, self.wait, self.waiting) if is_long else None
        rows = [f"rank {rank} {one.words}; {self.wait}" for rank, one in sorted(patient.items())]
        return make_open_verdict(rows, max(one.grace for one in patient.values()), self.waiting)

    def _is_resending(self) -> bool:
        """Whether, since the calls stand still, a rank's bytes to another host wait, and some had to be sent again.

        Nothing answers there. For a rank that only does not read, its kernel still answers.
        """
        states = self.facts.states.values()
        owners = {address: state.host for state in states for address in state.addresses}
        return any(
            state.held[address] and state.resent.get(address) and owners.get(address, address) != state.host
            for state in states for address in state.held
        )  # fmt: skip

    def _judge_without_root(self) -> Verdict:
        """All of a group are in a call that does not move; groups wait for each other; or who is missing is unknown."""
        facts, waits = self.facts, self.waits
        self.what = {rank: facts.activity(rank) for rank in facts.states}
        if stopped := {rank for rank, activity in self.what.items() if activity.kind == "stopped"}:
            return self._named(stopped)
        # a count of calls does not show which call it is: the dumps of these ranks are about to come
        counted = sorted({member for wait in waits.values() for member in wait.here if facts.has_moved_on(member)})
        elsewhere = [member for member in counted if self.what[member].kind != "collective"]
        if elsewhere or (counted and self.age < 2 * limits.STALL_SECONDS):
            return make_open_verdict([f"{ranks_of(counted)} made calls that their dumps do not show yet; {self.wait}"],
                           facts.limit if elsewhere else 2 * limits.STALL_SECONDS, self.waiting)  # fmt: skip
        if circle := self._find_circle():
            return self._judge_circle(circle)
        if self.met:
            wait = waits[min(self.met)]
            inside = sorted(wait.here)
            if not facts.states and self.traces[inside[0]].partial:  # a log shows calls, and not what the GPUs run
                return facts.named("called", waiting=self.waiting, call=describe(wait.call), evidence=(self.wait,))
            message = f"{ranks_of(inside)} are all in {describe(wait.call)}, which does not progress"
            cause = network(facts, "transfers no data", self.wait, message, between=inside)
            return facts.verdict("stuck", cause, waiting=self.waiting)
        unseen = sorted({rank for wait in waits.values() for rank in wait.unseen} - set(waits))
        what = {rank: activity for rank, activity in self.what.items() if rank in unseen and activity.kind != "gone"}
        if mute := {rank for rank, one in what.items() if one.kind == "silent" and self.age >= one.grace}:
            return self._named(mute)
        unknown_part = f"whether {ranks_of(unseen)} entered is unknown"
        if unseen and len(what) == len(unseen) and self.age < facts.limit and not facts.gave_up:
            return make_open_verdict([f"{unknown_part}; {self.wait}"], facts.limit, self.waiting)
        unknown_part = unknown_part if unseen else "the rank that has not entered is unknown"
        return facts.named("rank_unknown", waiting=self.waiting, waits="; ".join(self._describe(self.waiting)),
                           evidence=(self.wait,), rest=unknown_part)  # fmt: skip

    def _find_circle(self) -> tuple[int, ...]:
        """Return the ranks of a cycle, each of which waits for another of them."""
        inside = {rank for rank, wait in self.waits.items() if wait.missing}
        while any(not self.waits[rank].missing & inside for rank in inside):
            inside = {rank for rank in inside if self.waits[rank].missing & inside}
        return tuple(sorted(inside))

    def _judge_circle(self, circle: tuple[int, ...]) -> Verdict:
        """Name the ranks of a circle that most others contradict; where there is no majority, show both sides.

        A rank is contradicted by those that wait for it in one call while it waits for them in another: they show that
        it went past their call. They must be more than half of the ranks that are in both groups.
        """
        facts, waits = self.facts, self.waits
        busy = [rank for rank in circle if rank in self.what and self.what[rank].kind in WORK]
        if busy and self.age < facts.limit:  # it has called ahead, and may yet come
            rows = [f"rank {rank} {self.what[rank].words}; {self.wait}" for rank in busy]
            return make_open_verdict(rows, facts.limit, self.waiting)
        unseen = sorted({other for rank in circle for other in waits[rank].unseen} - waits.keys())
        odd: dict[int, list[int]] = {}  # by rank: those that wait for it in their call
        for rank in circle if not busy and all(map(self._is_in_one_group, circle)) else ():
            own_wait, sides = waits[rank], dict[tuple[str, int, bool], list[int]]()
            for other in sorted(own_wait.missing & waits.keys()):
                if rank in waits[other].missing and not waits[other].call.p2p:
                    sides.setdefault(waits[other].call.key, []).append(other)
            for (group, *_), others in sides.items():
                both = self._members(rank, group) & self._members(rank, own_wait.call.group)
                if len(others) > len(both) / 2 > 0:
                    odd[rank] = others
        if unseen and not odd and self.age < 2 * limits.STALL_SECONDS:  # the dumps of these ranks are about to come
            rows = [f"whether {ranks_of(unseen)} entered is unknown; {self.wait}"]
            return make_open_verdict(rows, 2 * limits.STALL_SECONDS, self.waiting)
        rank, others = min(odd.items(), default=(circle[0], [circle[0]]))
        call = waits[others[0]].call
        is_reordered = any(entry.key == call.key for entry in self.traces[rank].calls)
        return facts.named(
            "circle_odd" if odd else "circle",
            state="failed" if any(state.ended and state.error for state in facts.states.values()) else "stuck",
            who=ranks_of(sorted(odd) or circle), others=ranks_of(others), call=describe(call),
            mine=describe(waits[rank].call), evidence=tuple(self._describe(circle, all_rows=True)),
            ranks=tuple(sorted(odd)), waiting=tuple(member for member in circle if member not in odd),
            how="the two calls are made in another order there" if is_reordered else (
                "that call was left out there, or the two calls are made in another order"),
        )  # fmt: skip

    def _is_in_one_group(self, rank: int) -> bool:
        """Whether a rank is in calls of one group only; a thread that writes a checkpoint calls in another."""
        calls = self.traces[rank].calls
        return len({call.group for call in calls if not call.done and (call.started or not call.is_ahead)}) < 2

    def _find_line(self, rank: int, call: Call) -> str:
        """The line of the user's code from which a rank has made a call, if a source shows it.

        The rank's file does if the rank waits in this call and was sampled since then, or ended there.
        """
        state, wait = self.facts.states.get(rank), self.waits.get(rank)
        is_there = state is not None and wait is not None and wait.call is call and (
            any(map(IN_CALL.search, state.where)) if state.error
            else state.phase == "collective" and wait.seconds >= 2 * limits.LOOK_SECONDS)  # fmt: skip
        frames = state.own if state is not None and is_there and state.own else call.frames
        return f", from {frames[0]}" if frames else ""

    def _find_unequal_messages(self) -> Iterator[Cause]:
        """The sends whose receives expect another size or type: which of the two is wrong is unknown."""
        for rank, wait in self.waits.items():
            for other in wait.here - {rank} if wait.call.p2p and wait.call.op == "send" else ():
                match = self._find_other_end(rank, wait.call, other)
                if match and wait.call.sizes and match.sizes and _lengths(wait.call) != _lengths(match):
                    yield make_cause("unequal", sender=rank, sent=wait.call.words, receiver=other, received=match.words)

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
            lines = {rank: self._find_line(rank, call) for rank, call in rows.items()}
            yield mismatch(rows, size=known if group else None, lines=lines)


def _longest_pause(trace: RankTrace, until: Call) -> float:
    """Return the longest pause in seconds between earlier calls, but the first: they wait for the last to start."""
    times = [call.created for call in trace.calls if until.created and call.created and call.record < until.record]
    return max((b - a for a, b in pairwise(times[limits.START_CALLS :])), default=0.0)


# The network ----------------------------------------------------------------------------------------------------------


def network(facts: RunFacts, symptom: str, *evidence: str, between: Sequence[int] = (), since: float = 0.0) -> Cause:
    """The cause if all ranks have entered the call: a link or a node, by the pairs of hosts whose bytes wait.

    `between` are in a call that does not move; for others the looks from `since` on count, Unix seconds: before it,
    the network was as it should be. A link or a node is named only where more looks saw bytes wait there than
    elsewhere, by more than looks differ by chance.
    """
    pairs = _count_backlog(facts, between, since)
    inside = set(between or range(facts.world or 0))
    here = {facts.host(rank) or "?" for rank in inside}
    if inside == set(facts.states) and len(here) == 1 and here != {"?"} and not pairs:
        return make_cause("one_host", what=symptom, host=min(here), nodes=tuple(here), evidence=evidence)
    hosts = sorted({facts.host(rank) or "?" for rank in between if rank in facts.states})
    if len(hosts) == 2:  # only these two are in the call that does not move
        pairs = Counter({pair: n for pair, n in pairs.items() if set(pair) == set(hosts)})
    rows = (*evidence, *(f"{a} to {b}: bytes wait to be sent in {n} samples" for (a, b), n in pairs.most_common(6)))
    links: Counter[frozenset[str]] = Counter()
    for pair, n in pairs.items():
        links[frozenset(pair)] += n
    if len(hosts) == 2:  # there is no other link, though it may be that no look saw bytes wait
        return _link(hosts, 1.0, symptom, rows)
    total, looks = links.total(), max(pairs.values(), default=0)
    if not total or len(facts.states) < 2:
        return make_cause("network", what=symptom, evidence=rows)
    (link, highest), *further = links.most_common(2)
    odds = _compare_counts(highest, further[0][1] if further else 0) if highest / total >= limits.EXPLAINS else 0.0
    if odds >= 1:
        return _link(sorted(link), highest / total, symptom, rows)
    by_host = Counter({host: sum(n for link, n in links.items() if host in link) for host in frozenset().union(*links)})
    (host, touched), (second, _) = by_host.most_common(2)
    others = sorted(frozenset().union(*(link for link in links if host in link)) - {host})
    elsewhere = sum(n for link, n in links.items() if second in link and host not in link)
    of_node = touched - links[frozenset((host, second))]
    odds_of_node = _compare_counts(of_node, elsewhere) if touched / total >= limits.EXPLAINS else 0.0
    if len(others) > 1 and odds_of_node >= 1:
        return make_cause("node", host=host, what=symptom, others=", ".join(others), nodes=(host,),
                           share=touched / total, evidence=rows)  # fmt: skip
    if 0 < (best := max(odds, odds_of_node)) < 1:
        rows = (*rows, "which link it is cannot be distinguished yet; if this continues, it can be in about "
                       f"{max(1.0, looks * limits.LOOK_SECONDS * (1 / best - 1)):.0f} s")  # fmt: skip
    return make_cause("network", what=symptom, evidence=rows)


def _link(hosts: Sequence[str], share: float, what: str, rows: tuple[str, ...]) -> Cause:
    return make_cause("link", one=hosts[0], other=hosts[1], what=what, nodes=tuple(hosts), share=share, evidence=rows)


def _count_backlog(facts: RunFacts, between: Sequence[int], since: float) -> Counter[tuple[str, str]]:
    """By pair of hosts, from and to: looks at which bytes waited to be sent."""
    pairs: Counter[tuple[str, str]] = Counter()
    owners = {address: state.host or "?" for state in facts.states.values() for address in state.addresses}
    for state in facts.states.values():
        old = next((mark.unsent for mark in reversed(state.marks) if mark.at <= since), {})
        looks = state.held if between else {one: n - old.get(one, 0) for one, n in state.unsent.items()}
        for address, times in looks.items():
            if times > 0 and state.host and (there := owners.get(address, address)) != state.host:
                pairs[state.host, there] += times
    return pairs


def _compare_counts(looks: int, others: int) -> float:
    """How far two counts of looks differ, as the square of the share of the margin: 1 is distinguishable.

    Counts of rare looks scatter by their square root (Poisson); the margin holds for a run with limits.CONFIDENCE.
    """
    if looks <= others:
        return 0.0
    return (looks - others) ** 2 / (NormalDist().inv_cdf(limits.CONFIDENCE) ** 2 * (looks + others))


# Calls that do not match ----------------------------------------------------------------------------------------------

_ALIKE = ("all_reduce", "allreduce", "_allgather_base", "_all_gather_base", "all_gather", "reduce_scatter", "broadcast",
          "_reduce_scatter_base", "reduce", "allgather", "coalesced all_gather", "gather")  # fmt: skip


def _lengths(call: Call) -> tuple[object, ...]:
    return (*(prod(size) for size in call.sizes), call.dtypes)


def signature(call: Call) -> tuple[object, ...]:
    """Return the properties of a call that must be equal on all ranks of a group."""
    return (call.op, *(_lengths(call) if call.op.lower() in _ALIKE else ()))


def judge_odd_size(facts: RunFacts, ranks: tuple[int, ...]) -> Verdict | None:
    """Name the one rank that gloo ended by the size of its call, if the last calls of all others were alike."""
    last = {rank: trace.calls[-1] for rank, trace in facts.traces.items() if trace.calls and rank not in ranks}
    alike = {(call.group, call.number, signature(call)) for call in last.values()}
    if len(ranks) != 1 or len(alike) != 1 or not 1 < len(last) == (facts.world or 0) - 1:
        return None
    evidence = tuple(f"rank {rank}: {describe(call)}" for rank, call in sorted(last.items()))[:8]
    return facts.named("odd_size", ranks=ranks, evidence=(*evidence, facts.log.cut_short), who=ranks_of(ranks),
                       others=ranks_of(sorted(last)), call=describe(next(iter(last.values()))))  # fmt: skip


def mismatch(rows: Mapping[int, Call], *, size: int | None, lines: Mapping[int, str]) -> Cause:
    """The ranks of a group of `size` whose calls differ; a rank is named only where most of the group differ from it.

    Without such a majority none is named. A size of None says that the group is not known. `lines` are those of the
    user's code that the calls were made from.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, call in sorted(rows.items()):
        kinds.setdefault(signature(call), []).append(rank)
    usual = max(kinds.values(), key=len)
    odd = [rank for rank in sorted(rows) if rank not in usual]
    odd_call, other = rows[odd[-1]], rows[usual[0]]
    code, difference = ("call.size", "other sizes") if odd_call.op == other.op else ("call.other", "another collective")
    evidence = tuple(f"rank {rank}: {describe(rows[rank])}{lines.get(rank, '')}" for rank in sorted(rows))[:8]
    if size is not None and len(usual) > size / 2:
        verb = f"call{'s' if len(odd) == 1 else ''}"
        message = f"{ranks_of(odd)} {verb} {difference}: {odd_call.words}, where the others call {other.words}"
        return Cause(code=code, message=message, ranks=tuple(odd), evidence=evidence, action=_SAME_CALL)
    each = ", ".join(f"{ranks_of(ranks)} call{'s' if len(ranks) == 1 else ''} {rows[ranks[0]].words}"
                     for ranks in kinds.values())  # fmt: skip
    restriction = "; there is no majority, so it is unknown which of them is wrong"
    if size is None:
        restriction = "; the log names no process group, so they may be of different groups"
    elif len(rows) < size <= limits.MAX_RANKS:
        absent = [rank for rank in range(size) if rank not in rows] if size > max(rows) else []
        restriction = f"; the calls of {ranks_of(absent) if absent else 'other ranks'} are not known"
    message = f"{ranks_of(sorted(rows))} disagree: {each}{restriction}"
    return Cause(code=code, message=message, evidence=evidence, action=_SAME_CALL)
