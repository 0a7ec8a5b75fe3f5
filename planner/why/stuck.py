"""The verdict on calls that do not move: the rank, link or mismatch that keeps the others waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from collectives.traces.calls import RankTrace
from planner.why.calls import BlockedCalls, describe
from planner.why.facts import (
    CONFIDENCE,
    ENDED,
    EXPLAINS,
    LONGER,
    LOOK_SECONDS,
    STALL_SECONDS,
    Activity,
    Cause,
    RunFacts,
    Verdict,
    cause_named,
    not_yet,
    ranks_of,
)


def stuck(facts: RunFacts, traces: Mapping[int, RankTrace], source: str) -> Verdict | None:
    """Return the verdict if calls do not move; None if this source does not show that."""
    return _Stuck(facts, traces, source).verdict()


class _Stuck:
    """Blocked calls, the state of the ranks that others wait for, and the rules that name some of these ranks."""

    def __init__(self, facts: RunFacts, traces: Mapping[int, RankTrace], source: str) -> None:
        self.facts, self.traces, self.source = facts, traces, source
        self.blocked = blocked = BlockedCalls(traces, facts)
        self.what = {
            rank: self._by_calls(rank) or facts.since_wait_began(rank, blocked.begun(rank)) for rank in blocked.roots
        }
        self.decisive = {rank for rank, one in self.what.items() if one.kind in ENDED}
        ended = [rank for rank in facts.states if facts.activity(rank).kind == "gone"]
        self.first = facts.first_to_end(ended) if any(facts.states[rank].error for rank in ended) else None
        if self.first is not None and not (self.decisive or self.first in blocked.waits):
            self.first = None
        if self.first is not None:  # the others ended after it, or were terminated
            self.decisive, self.what[self.first] = {self.first}, facts.end_of(self.first)
            blocked.roots.add(self.first)
        self.waiting = tuple(sorted(rank for rank in blocked.waits if rank not in blocked.roots))
        self.wait = f"{source}: {blocked.describe(self.waiting)}{self._age()}"

    def verdict(self) -> Verdict | None:
        """Return the verdict; None if nothing is stuck."""
        facts, blocked = self.facts, self.blocked
        if not blocked.waits or not (self.decisive or blocked.mismatches or self._has_stalled()):
            return None
        if blocked.mismatches and not any(one.kind == "stopped" for one in self.what.values()):
            failed = any(state.ended and state.error for state in facts.states.values())
            return facts.verdict("failed" if failed else "stuck", *blocked.mismatches, waiting=self.waiting)
        gone = {rank for rank, one in self.what.items() if one.kind == "gone"}
        if self.first is None and (len(gone) > 1 or gone & facts.lost_a_peer):
            return None  # the errors of these ranks decide which of them was first
        if not blocked.roots:
            return self._without_root()
        if (early := self._too_early()) is not None:
            return early
        if not self.decisive and blocked.roots <= set(blocked.waits) - blocked.held and self._resends():
            behind = blocked.waits[min(blocked.roots)]  # all have come to the call that these are still in: not late
            message = f"{ranks_of(sorted(blocked.roots))}: still in {describe(behind.call)}"
            cause = network(facts, "transfers no data", self.wait, message, between=sorted(behind.here))
            return facts.verdict("stuck", cause, waiting=tuple(sorted(blocked.waits)))
        return self._named(self.decisive or blocked.roots)

    def _named(self, ranks: set[int]) -> Verdict:
        """Return the verdict that names the ranks that others wait for, except those that may take longer."""
        facts, what = self.facts, self.what
        named = sorted(rank for rank in ranks if self.blocked.age >= what[rank].grace or what[rank].kind in ENDED)
        causes = [facts.cause_of(rank, what[rank], self.wait) for rank in named]
        failed = any(cause.code == "rank.gone" for cause in causes) or any(facts.outlived(rank) for rank in named)
        return facts.verdict("failed" if failed else "stuck", *causes, waiting=self.waiting)

    def _has_stalled(self) -> bool:
        """Whether the longest wait is a stall; a watchdog has waited before it wrote, and dumps may tell no time."""
        blocked = self.blocked
        untimed = not any(trace.taken or trace.written for trace in self.traces.values()) and not self.facts.states
        return (
            self.source != "flight recorder"
            or blocked.age >= max(STALL_SECONDS, LONGER * blocked.usual)
            or (untimed and any(wait.missing for wait in blocked.waits.values()))
        )

    def _too_early(self) -> Verdict | None:
        """No fault yet: the others wait for ranks at work that may take as long, or their timeout was too short."""
        patient = {
            rank: one for rank, one in self.what.items()
            if self.blocked.age < one.grace and one.kind not in ENDED and rank not in self.decisive
        }  # fmt: skip
        if not patient or len(patient) < len(self.what):
            return None
        if self.facts.gave_up:
            is_long = all(one.grace >= self.facts.limit for one in patient.values())
            return self.facts.timeout_too_short(patient, self.wait, self.waiting) if is_long else None
        rows = [f"rank {rank} {one.words}; {self.wait}" for rank, one in sorted(patient.items())]
        return not_yet(rows, max(one.grace for one in patient.values()), self.waiting)

    def _resends(self) -> bool:
        """Whether, since the calls stand still, a rank's bytes to another host wait, and some had to be sent again.

        Nothing answers there. For a rank that only does not read, its kernel still answers.
        """
        states = self.facts.states.values()
        owners = {address: state.host for state in states for address in state.addresses}
        return any(
            state.held[address] and state.resent.get(address) and owners.get(address, address) != state.host
            for state in states for address in state.held
        )  # fmt: skip

    def _without_root(self) -> Verdict:
        """All of a group are in a call that does not move; groups wait for each other; or who is missing is unknown."""
        facts, blocked, waits = self.facts, self.blocked, self.blocked.waits
        self.what = {rank: facts.activity(rank) for rank in facts.states}
        if stopped := {rank for rank, one in self.what.items() if one.kind == "stopped"}:
            return self._named(stopped)
        # a count of calls does not tell which call it is: the dumps of these ranks are about to come
        counted = sorted({one for wait in waits.values() for one in wait.here if facts.has_moved_on(one)})
        elsewhere = [one for one in counted if self.what[one].kind != "collective"]
        if elsewhere or (counted and blocked.age < 2 * STALL_SECONDS):
            return not_yet([f"{ranks_of(counted)} have called more than their dumps show; {self.wait}"],
                           facts.limit if elsewhere else 2 * STALL_SECONDS, self.waiting)  # fmt: skip
        if blocked.met:
            wait = waits[min(blocked.met)]
            inside = sorted(wait.here)
            message = f"{ranks_of(inside)} are all in {describe(wait.call)}, which does not progress"
            cause = network(facts, "transfers no data", self.wait, message, between=inside)
            return facts.verdict("stuck", cause, waiting=self.waiting)
        if circle := blocked.circle():
            lines = tuple(
                f"rank {rank} waits in {waits[rank].call.words} of group {waits[rank].call.group} for "
                f"{ranks_of(sorted(waits[rank].missing))}"
                for rank in circle
            )
            return facts.named("circle", who=ranks_of(circle), ranks=circle, evidence=lines)
        unseen = sorted({rank for wait in waits.values() for rank in wait.unseen} - set(waits))
        what = {rank: one for rank, one in self.what.items() if rank in unseen and one.kind != "gone"}
        if mute := {rank for rank, one in what.items() if one.kind == "silent" and blocked.age >= one.grace}:
            return self._named(mute)
        if unseen and len(what) == len(unseen) and blocked.age < facts.limit and not facts.gave_up:
            moving = [rank for rank in unseen if facts.has_called(rank, within=blocked.age)]
            rows = [f"{ranks_of(moving)} {'works' if len(moving) == 1 else 'work'} in another group"] if moving else []
            rows += [f"rank {rank} has not written since the others wait" for rank in unseen if rank not in moving]
            return not_yet([f"{row}; {self.wait}" for row in rows], facts.limit, self.waiting)
        rest = (
            f"whether {ranks_of(unseen)} entered is unknown" if unseen else "the rank that has not entered is unknown"
        )
        numbers: dict[str, set[int]] = {}
        for wait in waits.values():
            if wait.call.group and not wait.call.p2p:
                numbers.setdefault(wait.call.group, set()).add(wait.call.number)
        apart = [
            f"some have left number {min(here)} of group {group}, and wait in number {max(here)}: calls that do not "
            f"match, or a GPU that hangs in number {min(here)}"
            for group, here in numbers.items() if len(here) > 1
        ]  # fmt: skip
        evidence = tuple(dict.fromkeys((self.wait, *apart)))[:4]
        return facts.named("rank_unknown", waiting=self.waiting, waits=blocked.describe(self.waiting), rest=rest,
                           evidence=evidence)  # fmt: skip

    def _age(self) -> str:
        """Return the length of the wait, and whether only file times of dumps show it as no rank state was read."""
        if self.blocked.age <= 0:
            return ""
        by_file = not self.facts.states and any(one.written and not one.taken for one in self.traces.values())
        return f", for {self.blocked.age:.0f} s" + (" by the dumps' file times" if by_file else "")

    def _by_calls(self, rank: int) -> Activity | None:
        """What a rank does by its calls alone; None where its own file tells it."""
        facts, blocked = self.facts, self.blocked
        if rank in blocked.waits:
            mine = describe(blocked.waits[rank].call)
            if rank in blocked.held:
                return Activity("gpu", f"has called {mine}, and its GPU has not begun it: work before it still runs")
            return Activity("gpu" if rank in blocked.left else "unknown",
                            f"is still in {mine}, which the others have finished")  # fmt: skip
        if rank in facts.states or rank in facts.processes or rank in facts.stacks:
            return None
        waits, trace = blocked.waiting_for(rank), self.traces[rank]
        call = waits[min(waits)].call
        last = next((one for one in reversed(trace.calls) if one.group == call.group), None)
        newest = trace.enqueued.get(call.group) or (last.number if last else 0)
        since = f"; its last call there is number {newest}" if newest else "; it has called nothing there"
        where = f", from {last.frames[0]}" if last and last.frames else ""
        return Activity("unknown", f"has not entered {describe(call)}{since}{where}")


def network(facts: RunFacts, what: str, *evidence: str, between: Sequence[int] = (), since: float = 0.0) -> Cause:
    """The cause if all ranks have entered the call: a link or a node, by the pairs of hosts whose bytes wait.

    `between` are in a call that does not move; for others the looks from `since` on count, Unix seconds: before it,
    the network was as it should be. A link or a node is named only where more looks saw bytes wait there than
    elsewhere, by more than looks differ by chance.
    """
    pairs = _backlog(facts, between, since)
    inside = set(between or range(facts.world or 0))
    here = {facts.host(rank) or "?" for rank in inside}
    if inside == set(facts.states) and len(here) == 1 and here != {"?"} and not pairs:
        return cause_named("one_host", what=what, host=min(here), nodes=tuple(here), evidence=evidence)
    hosts = sorted({facts.host(rank) or "?" for rank in between if rank in facts.states})
    if len(hosts) == 2:  # only these two are in the call that does not move
        pairs = Counter({pair: n for pair, n in pairs.items() if set(pair) == set(hosts)})
    rows = (*evidence, *(f"{a} to {b}: bytes wait to be sent in {n} samples" for (a, b), n in pairs.most_common(6)))
    links: Counter[frozenset[str]] = Counter()
    for pair, n in pairs.items():
        links[frozenset(pair)] += n
    if len(hosts) == 2:  # there is no other link, though it may be that no look saw bytes wait
        return _link(hosts, 1.0, what, rows)
    total, looks = sum(links.values()), max(pairs.values(), default=0)
    if not total or len(facts.states) < 2:
        return cause_named("network", what=what, evidence=rows)
    (link, most), *rest = links.most_common(2)
    odds = _odds(most, rest[0][1] if rest else 0)
    if most / total >= EXPLAINS and odds >= 1:
        return _link(sorted(link), most / total, what, rows)
    by_host = Counter({host: sum(n for link, n in links.items() if host in link) for host in frozenset().union(*links)})
    (host, touched), (second, _) = by_host.most_common(2)
    others = sorted(frozenset().union(*(link for link in links if host in link)) - {host})
    elsewhere = sum(n for link, n in links.items() if second in link and host not in link)
    odds_of_node = _odds(touched - links[frozenset((host, second))], elsewhere)
    if touched / total >= EXPLAINS and len(others) > 1 and odds_of_node >= 1:
        return cause_named("node", host=host, what=what, others=", ".join(others), nodes=(host,),
                           share=touched / total, evidence=rows)  # fmt: skip
    best = max(odds if most / total >= EXPLAINS else 0.0, odds_of_node if touched / total >= EXPLAINS else 0.0)
    if 0 < best < 1:
        rows = (*rows, "which link it is cannot be distinguished yet; if this goes on, it can be in about "
                       f"{max(1.0, looks * LOOK_SECONDS * (1 / best - 1)):.0f} s")  # fmt: skip
    return cause_named("network", what=what, evidence=rows)


def _link(hosts: Sequence[str], share: float, what: str, rows: tuple[str, ...]) -> Cause:
    return cause_named("link", one=hosts[0], other=hosts[1], what=what, nodes=tuple(hosts), share=share, evidence=rows)


def _backlog(facts: RunFacts, between: Sequence[int], since: float) -> Counter[tuple[str, str]]:
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


def _odds(looks: int, others: int) -> float:
    """How far two counts of looks differ, as the square of the share of the margin: 1 is distinguishable.

    Counts of rare looks scatter by their square root (Poisson); the margin holds for a run with CONFIDENCE.
    """
    if looks <= others:
        return 0.0
    return (looks - others) ** 2 / (NormalDist().inv_cdf(CONFIDENCE) ** 2 * (looks + others))
