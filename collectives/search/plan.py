"""Which nodes to test together next, and what the tests so far say of each node and link. Pure: no torch, no clock.

A test is a group of nodes in which every node sends to every other one in turn, all at the same time, and each
receiver takes the time of its own transfer. So one test tells a slow node (all its transfers are slow) from a slow
link (one is), and a transfer in which no byte moves names its two ends only. Every node is tested alone first, then
with nodes of its own domain, then with nodes of other domains. What was slow or stuck once is tested again with
partners that were not. A node or link is accused when it was slow in three rounds, or stuck in two.

The noise is measured, not assumed: as the median absolute deviation (MAD), which a minority of bad nodes does not move.
Nodes are compared only with each other, so a network that is slow everywhere accuses nobody.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, median_low
from typing import Literal

Link = tuple[int, int]  # from, to

KINDS = ("alone", "near", "far")
GROUP = 32  # nodes of a test at most: a node that is stuck costs the others of its group a round
MOST_ROUNDS = 16
# The least excess of time that counts, where the noise is smaller. GPUs of one model differ by 8 % on average under
# their power limit (Sinha et al., "Not All GPUs Are Created Equal", SC 2022); of transfers no such figure is known.
LEAST: Mapping[str, float] = {"alone": 0.15, "near": 0.02, "far": 0.02}
LEAST_LINK = 0.10
STUCK = 1e9  # the excess of a transfer in which nothing moves
SIGMAS, SIGMAS_AGAIN = 5.0, 3.0  # 5: of the 65,000 comparisons of 16,384 nodes in a round, 0.02 exceed it by chance
FEW = 20.0  # further sigmas, divided by the number of nodes: few nodes show their noise badly
POWER = 2.5  # sigmas beyond the limit at which 99 of 100 are found
QUARTILE = 1.36  # sigma of the lower quartile of n normal values, times sqrt(n) / sigma
MAD = 1.4826  # sigma of a normal distribution over its MAD
PARTNERS = 3  # of a confirmation
PLAIN = 1.0  # an excess that needs no repeats
REPEATS, LEAST_REPEATS = 24, 4  # transfers of each node in a confirmation, and of each link
HALVED = 5  # nodes of a group that did not end, from which on each is tested by itself
TRIES = 5  # rounds in which one kind of measure of a node is repeated before the node is left undecided
DRAWN = 64  # nodes of the picture at most: more rows and columns have no readable names
BLIND = 0.5  # where the noise hides a loss of so much, no node is called good


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Nodes to test together; the tests of one round have no node in common and run at the same time."""

    kind: str  # "alone", "near" (one domain), "far"
    nodes: tuple[int, ...]
    repeats: int = 1
    rails: bool = False  # one local rank of each node after the other, instead of all at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a test showed. All transfers are of the same number of bytes."""

    transfers: tuple[tuple[int, int, int, float], ...] = ()  # from, to, rail (-1: the slowest of all), seconds
    alone: tuple[tuple[int, str, float], ...] = ()  # node, part ("GPU3 matmul"), seconds
    stuck: tuple[Link, ...] = ()  # transfers in which no byte moved for as long as is allowed
    lost: Mapping[int, str] = field(default_factory=dict)  # nodes without a sign of life, and how that was seen
    ended: bool = True  # False: the group did not finish, and no transfer says why


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How a node or link did in one round: the excess of its time over the middle one, and one sigma of that."""

    round: int
    kind: str
    what: str  # "sends", "receives", "stuck", or a part of the node
    excess: float
    sigma: float
    links: tuple[Link, ...] = ()  # of the node that were stuck; none where a whole group was

    def is_slow(self, sigmas: float, least: float) -> bool:
        """Whether the excess is no chance, and large enough to count."""
        return self.excess > max(least, sigmas * self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one node ended."""

    node: int
    state: Literal["good", "bad", "not judged"]
    reason: str = ""  # "lost", "stuck", "part", "slow"; or why it was not judged
    seen: str = ""  # how it was seen that the node is lost, or why it could not join
    loss: float = 0.0  # of the rate of the middle node; 1.0: nothing moves
    what: tuple[str, ...] = ()  # "sends", "receives", or the parts of the node
    rails: tuple[int, ...] = ()  # the slow ones, where not all are
    measures: tuple[Measure, ...] = ()  # those that are slow
    turn: int = 0  # place of the pass in which this was found


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLink:
    """A transfer that is slow or stuck, between two nodes that do well with all others."""

    source: int
    target: int
    loss: float
    measures: tuple[Measure, ...]
    turn: int = 0  # place of the pass in which this was found


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """How a search ended. A node is a place in `hosts`."""

    hosts: tuple[str, ...]
    domains: tuple[str, ...]  # by node, "" is unknown
    began: float  # Unix time
    seconds: float
    verdicts: tuple[Verdict, ...]  # by node
    links: tuple[BadLink, ...]
    rounds: int
    tests: int
    node_minutes: float
    visible_loss: float | None  # smallest share of its rate whose loss by a node the search could have seen
    tested_pairs: int
    drawn: tuple[int, ...]  # nodes of the picture
    pairs: tuple[tuple[int, int, float], ...]  # from, to, excess of the time: what was measured between those
    passes: int = 1  # 2: the second one without NVLink between nodes

    def __post_init__(self) -> None:
        """Raise ValueError where the verdicts are not of all hosts, or a link or pair is of others."""
        nodes = list(range(len(self.hosts)))
        ends = {end for link in self.links for end in (link.source, link.target)}.union(self.drawn)
        paired = {end for pair in self.pairs for end in pair[:2]}
        if [v.node for v in self.verdicts] != nodes or not ends <= set(nodes) or not paired <= set(self.drawn):
            raise ValueError("verdicts, links or pairs are not of the hosts")


class Search:
    """Holds what was measured, and gives the tests of the next round."""

    def __init__(self, domains: Sequence[str], models: Sequence[str] = (), rails: int = 1) -> None:
        """`domains` and `models` (of the GPUs) are by node, "" is unknown; `rails`: local ranks of each node."""
        self.nodes = len(domains)
        self.round = self.tests = self.phase = 0
        self.lost: dict[int, str] = {}
        self.unreached: dict[int, str] = {}  # those of the lost that are not judged, and why
        self.excess: dict[Link, float] = {}  # of each transfer over the middle one, when it was last tested
        self.sigma: dict[str, float] = {}  # of a node in the groups, by kind: the noise
        self.domains, self._models, self._rails = list(domains), list(models or [""] * len(domains)), rails
        self._members: dict[str, list[int]] = defaultdict(list)
        for node, domain in enumerate(domains):
            self._members[domain].append(node)
        self._measures: dict[int, list[Measure]] = defaultdict(list)
        self._links: dict[Link, list[Measure]] = defaultdict(list)  # of those that were slow or stuck once
        self._middle: dict[str, tuple[float, float]] = {}  # of all transfers or parts of a kind: seconds, sigma
        self._times: dict[str, list[float]] = defaultdict(list)  # of all transfers of the groups
        self._center: dict[tuple[str, str], tuple[float, float]] = {}  # of the nodes' scores
        self._slow_rails: dict[int, tuple[int, ...]] = {}
        self._queue: list[Test] = []  # halves of groups that did not end
        self._broken: list[Test] = []  # groups that ended early
        self._now: tuple[Test, ...] = ()
        self._states: dict[tuple[int, tuple[str, ...]], tuple[str, list[Measure]]] = {}  # since the last report
        self._more = FEW / max(self.nodes, 1)

    # What to test next.

    def next_round(self) -> tuple[Test, ...]:
        """Give the tests to run at the same time; empty when the search is over."""
        while self.round < MOST_ROUNDS:
            self.phase = min(self.phase + 1, 4)
            planned = self._planned()
            planned, self._queue = [*self._queue, *planned], []
            taken: set[int] = set()
            tests = []
            for test in planned:
                nodes = tuple(node for node in test.nodes if node not in self.lost)
                if taken.intersection(nodes):
                    self._queue.append(test)
                elif len(nodes) > (test.kind != "alone"):
                    taken.update(nodes)
                    tests.append(replace(test, nodes=nodes))
            if tests:
                self.round += 1
                self.tests += sum(test.kind != "alone" for test in tests)
                self._now = tuple(tests)
                return self._now
            if self.phase == 4:
                break
        return ()

    def _planned(self) -> list[Test]:
        """Plan the three rounds that every search has, then what is open, and at last the rails of slow nodes."""
        living = [node for node in range(self.nodes) if node not in self.lost]
        if self.phase == 1:
            return [Test(kind="alone", nodes=(node,)) for node in living]
        broken = {node for node in living if self._bad_parts(node) or self._was_stuck(node)}
        waiting = {node for test in self._queue for node in test.nodes}
        free = [node for node in living if node not in broken and node not in waiting]
        if self.phase == 2:
            return [Test(kind="near", nodes=group) for group in self._near(free)]
        if self.phase == 3 and self.nodes > 2:
            return [Test(kind="far", nodes=group) for group in self._far(free)]
        again = self._alone_again()
        alone = [Test(kind="alone", nodes=(node,)) for node in sorted(again)]
        return alone + self._confirmations(again) or self._rail_tests()

    def _alone_again(self) -> set[int]:
        """The nodes with a slow part, and for each model of theirs some that were not slow, to compare them with.

        What slows every node at that moment, such as other work on the hosts, is no fault of the one that is suspected.
        """
        suspects = self._open(("alone",))
        clean: dict[str, list[int]] = defaultdict(list)
        for node in range(self.nodes) if suspects else ():
            if self._is_clean(node):
                clean[self._models[node]].append(node)
        return {*suspects, *(mate for node in suspects for mate in clean[self._models[node]][:PARTNERS])}

    def _near(self, nodes: Iterable[int]) -> list[tuple[int, ...]]:
        """Divide nodes along their domains, and large domains into equal parts."""
        free = set(nodes)
        return [part for members in self._members.values() for part in _parts([n for n in members if n in free])]

    def _far(self, nodes: Iterable[int]) -> list[tuple[int, ...]]:
        """Divide nodes across domains: one node of each group of `_near` after the other."""
        groups = self._near(nodes)
        return _parts([group[place] for place in range(GROUP) for group in groups if place < len(group)])

    def _confirmations(self, busy: set[int]) -> list[Test]:
        """Test again what was slow or stuck, with partners that were not: each stuck one apart, slow ones together."""
        tests: list[Test] = []
        clean = sorted((node for node in range(self.nodes) if self._is_clean(node)), key=self._was_stuck)
        pools: dict[tuple[str, str], list[int]] = defaultdict(list)
        open_links = self._open_links()

        def add(kind: str, nodes: Sequence[int], partners: Sequence[int], wanted: int) -> None:
            found = list(dict.fromkeys(node for node in partners if node not in busy and node not in nodes))[:wanted]
            group = tuple(dict.fromkeys((*nodes, *found)))
            if busy.isdisjoint(group) and len(group) > 1:
                busy.update(group)
                repeats = max(LEAST_REPEATS, REPEATS // (len(group) - 1))
                tests.append(Test(kind=kind, nodes=group, repeats=1 if self._is_plain(group, open_links) else repeats))

        for node in self._open(("near", "far")):
            kind = self._open_kind(node)
            if not self._was_stuck(node):
                pools[kind, self.domains[node] if kind == "near" else ""].append(node)
                continue
            tried = {end for link in self._stuck_links(node) for end in link}
            mates = [other for other in clean if self._kind(node, other) == kind and other not in tried]
            add(kind, [node], [*mates, *clean], PARTNERS)
        for (kind, domain), pool in pools.items():
            for group in _parts([node for node in pool if node not in busy], GROUP // 2):
                homes = {self.domains[node] for node in group}
                mates = [node for node in clean if (self.domains[node] in homes) == (kind == "near")]
                # Without a clean one in the domain, its nodes are compared with those of other domains.
                others = clean if kind == "far" else self._members[domain]
                add(kind, group, mates or others, max(PARTNERS, len(group)))
        links: list[int] = []
        for link in open_links:
            if any(measure.what == "stuck" for measure in self._links[link]):
                add(self._kind(*link), link, clean, 1)
            elif busy.isdisjoint(link):
                links += link
        for group in _parts(list(dict.fromkeys(links))):
            add("far", group, clean, 1 if len(group) == 2 else 0)
        held = busy.union(*(test.nodes for test in (*self._queue, *self._broken)), self.lost)
        late = [node for node in range(self.nodes) if node not in held and not self._is_measured(node)
                and self._state(node, KINDS)[0] == "clean"]  # fmt: skip
        for group in _parts(late, GROUP // 2) if self.nodes > 2 and self.round < 2 * TRIES else ():
            add("far", group, clean, max(PARTNERS, len(group)))
        return tests + self._again(busy)

    def _is_plain(self, nodes: Iterable[int], open_links: Iterable[Link]) -> bool:
        """Whether each suspect among these nodes and their links has an excess so large that one transfer shows it.

        One such excess of a node is enough: it decides the verdict, whatever else is suspected of the node.
        """
        inside = set(nodes)
        found = [self._state(node, ("near", "far"))[1] for node in inside]
        found += [self._links[link] for link in open_links if inside.issuperset(link)]
        return all(any(m.excess > PLAIN for m in measures) for measures in found if measures)

    def _again(self, busy: set[int]) -> list[Test]:
        """Repeat groups that ended early without the nodes that ended them, once these are known."""
        tests, self._broken, left = list[Test](), list[Test](), self._broken
        waiting = {node for test in self._queue for node in test.nodes} | busy
        for test in left:
            states = {node: self._state(node, KINDS)[0] for node in test.nodes if node not in self.lost}
            stuck = {link[1] for link in self._links if self._is_stuck(link) and states.keys() >= set(link)}
            nodes = tuple(node for node, state in states.items() if state == "clean" and node not in stuck)
            if waiting.intersection(test.nodes) or "open" in states.values():
                self._broken.append(test)
            elif len(nodes) > 1:
                waiting.update(nodes)
                tests.append(Test(kind=test.kind, nodes=nodes))
        return tests

    def _rail_tests(self) -> list[Test]:
        slow = [v.node for v in self.verdicts() if v.reason == "slow" and v.node not in self._slow_rails]
        spare = [node for node in range(self.nodes) if self._is_clean(node)]
        pairs = zip(slow, spare, strict=False) if self._rails > 1 else ()
        return [Test(kind=self._kind(*pair), nodes=pair, repeats=LEAST_REPEATS, rails=True) for pair in pairs]

    def _kind(self, one: int, other: int) -> str:
        return "near" if self.domains[one] == self.domains[other] else "far"

    # What the tests showed.

    def report(self, outcomes: Sequence[Outcome]) -> None:
        """Take in the outcomes of the round's tests, in their order."""
        for outcome in outcomes:
            self.lost.update(outcome.lost)
        self._learn_alone([row for outcome in outcomes for row in outcome.alone])
        rows: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        for test, outcome in zip(self._now, outcomes, strict=True):
            if test.rails:
                self._learn_rails(test, outcome)
                continue
            for source, target, _, seconds in outcome.transfers:
                rows[self._kind(source, target)].append((source, target, seconds))
            self._learn_stuck(test, outcome)
            is_half = any(set(test.nodes) < set(other.nodes) for other in self._broken)
            is_whole = outcome.ended and not outcome.stuck and not outcome.lost
            if test.kind != "alone" and test.repeats == 1 and not is_half and not is_whole:
                self._broken.append(test)
        scores: dict[tuple[str, int], float] = {}
        for kind, found in rows.items():
            for end, score in self._learn_transfers(kind, found).items():
                scores[end] = max(score, scores.get(end, 1.0))
        for kind, found in rows.items():
            self._learn_links(kind, found, scores)
        self._now = ()
        self._states.clear()

    def _measure(self, kind: str, what: str, excess: float, sigma: float = 0.0, links: Iterable[Link] = ()) -> Measure:
        return Measure(round=self.round, kind=kind, what=what, excess=excess, sigma=sigma, links=tuple(links))

    def _learn_alone(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Compare each part ("GPU3 matmul") with the same part ("matmul") of all nodes with the same model.

        A suspect is compared with the slower of the two: all nodes in the first round, its partners in this one.
        """
        suspects = set(self._open(("alone",))) if rows else set[int]()
        parts: dict[str, list[tuple[int, str, float]]] = defaultdict(list)
        for node, what, seconds in rows:
            parts[f"{self._models[node]} {what.rpartition(' ')[2]}"].append((node, what, seconds))
        for name, found in parts.items():
            middle, sigma = self._middle.setdefault(name, _spread([seconds for *_, seconds in found]))
            mates = [seconds for node, _, seconds in found if node not in suspects]
            middle = max(middle, median(mates or [0.0]))
            for node, what, seconds in found:
                self._measures[node].append(self._measure("alone", what, seconds / middle - 1, sigma / middle))

    def _learn_transfers(self, kind: str, rows: Sequence[tuple[int, int, float]]) -> dict[tuple[str, int], float]:
        """Score each node by the lower quartile of its times: a few slow partners or links do not move it."""
        is_group = self.phase < 4 or kind not in self._middle
        if is_group:
            self._times[kind] += [seconds for *_, seconds in rows]
            self._middle[kind] = _spread(self._times[kind])
        middle, sigma = self._middle[kind]
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for source, target, seconds in rows:
            times["sends", source].append(seconds / middle)
            times["receives", target].append(seconds / middle)
        # A score takes two others that are not suspected: a good node among suspects only is not slow.
        pairs = {row[:2] for row in rows}
        good = {end for pair in pairs for end in pair if is_group or self._is_clean(end)}
        partners = Counter(("sends", source) for source, target in pairs if target in good or not good)
        partners.update(("receives", target) for source, target in pairs if source in good or not good)
        scores = {key: sorted(values)[(len(values) - 1) // 4] for key, values in times.items() if partners[key] > 1}
        sigmas = []
        for what in ("sends", "receives"):
            found = [score for (side, _), score in scores.items() if side == what]
            if found and (is_group or (kind, what) not in self._center):
                self._center[kind, what] = _spread(found)
            center, spread = self._center.get((kind, what), (1.0, 0.0))
            for (side, node), score in scores.items():
                if side == what:
                    one = QUARTILE * sigma / middle / math.sqrt(len(times[side, node]))
                    sigmas.append(max(one, spread) / center)
                    self._measures[node].append(self._measure(kind, what, score / center - 1, sigmas[-1]))
        if sigmas and (is_group or kind not in self.sigma):
            self.sigma[kind] = median(sigmas)
        return scores

    def _learn_links(
        self, kind: str, rows: Sequence[tuple[int, int, float]], scores: Mapping[tuple[str, int], float]
    ) -> None:
        """Compare each transfer with what its two ends do with others."""
        middle, sigma = self._middle[kind]
        times: dict[Link, list[float]] = defaultdict(list)
        for source, target, seconds in rows:
            times[source, target].append(seconds / middle)
        for link, values in times.items():
            self.excess[link] = median(values) - 1
            ends = max(scores.get(("sends", link[0]), 1.0), scores.get(("receives", link[1]), 1.0))
            excess, one = median(values) / ends - 1, sigma / middle / math.sqrt(len(values))
            if link in self._links or excess > max(LEAST_LINK, (SIGMAS + self._more) * one):
                self._links[link].append(self._measure(kind, "transfer", excess, one))

    def _learn_stuck(self, test: Test, outcome: Outcome) -> None:
        """Suspect the nodes at an end of most stuck transfers; halve a group that ended without a known reason.

        In a confirmation only the node that is tested again is suspected. A link that is stuck once more says nothing
        new of its ends, and no link says anything of a node that sent, or received, in the same test before.
        """
        links = [link for link in outcome.stuck if self.lost.keys().isdisjoint(link)]
        known = {link for link in links if any(m.what == "stuck" for m in self._links[link])}
        fresh = [link for link in links if link not in known or any(len(self._stuck_links(end)) > 1 for end in link)]
        for link in links:
            self.excess[link] = STUCK
            self._links[link].append(self._measure(test.kind, "stuck", STUCK))
        sent, received = ({row[side] for row in outcome.transfers} for side in (0, 1))
        ends = Counter(
            end for link in fresh for end, moved in zip(link, (sent, received), strict=True) if end not in moved
        )
        suspects = {node for node, count in ends.items() if count == max(ends.values())}
        if not outcome.ended and not links and not outcome.lost:
            suspects = set(test.nodes)
        before = {node for node in test.nodes if self._was_stuck(node)}
        suspects = {node for node in suspects & before if self._state(node, KINDS)[0] != "clean"} or suspects
        if len(suspects) > HALVED and not links:
            half = len(test.nodes) // 2
            self._queue += [Test(kind=test.kind, nodes=nodes) for nodes in (test.nodes[:half], test.nodes[half:])]
            return
        for node in test.nodes:
            if node in suspects or (node in sent | received and node in before):
                stuck = [link for link in fresh if node in link]
                excess = STUCK if node in suspects else 0.0
                self._measures[node].append(self._measure(test.kind, "stuck", excess, links=stuck))

    def _stuck_links(self, node: int) -> set[Link]:
        """The links of a node that were stuck since it last moved a byte."""
        found: set[Link] = set()
        for measure in self._measures[node]:
            if measure.what == "stuck":
                found = found.union(measure.links) if measure.excess else set()
        return found

    def _ways(self, node: int) -> int:
        """To how many others a node cannot send, or from how many it cannot receive: the larger number of the two.

        Others that are stuck with further nodes do not count: they may be the cause themselves.
        """
        ways: Counter[int] = Counter()
        for link in self._stuck_links(node):
            side = link.index(node)
            other = link[1 - side]
            ways[side] += all(link == more or more[1 - side] != other for more in self._stuck_links(other))
        return max(ways.values(), default=0)

    def _learn_rails(self, test: Test, outcome: Outcome) -> None:
        """Find the rails of the first node that are slower than the faster half of them."""
        times: dict[int, list[float]] = defaultdict(list)
        for *_, rail, seconds in outcome.transfers:
            times[rail].append(seconds)
        middles = {rail: median(values) for rail, values in times.items()}
        fast = median(sorted(middles.values())[: (len(middles) + 1) // 2] or [0.0])
        loss = next(v.loss for v in self.verdicts() if v.node == test.nodes[0])
        slow = [rail for rail, seconds in middles.items() if seconds > fast * (1 + max(LEAST_LINK, loss / 2))]
        self._slow_rails[test.nodes[0]] = tuple(sorted(slow)) if len(slow) < len(middles) else ()

    # What follows for each node.

    def _state(self, node: int, kinds: tuple[str, ...]) -> tuple[str, list[Measure]]:
        """Judge a node by its measures of these kinds: "clean", "open", "bad" or "undecided", and the slow measures."""
        if self._now or (node, kinds) not in self._states:  # while a round is reported, what was found may change
            self._states[node, kinds] = self._judge(node, kinds)
        return self._states[node, kinds]

    def _judge(self, node: int, kinds: tuple[str, ...]) -> tuple[str, list[Measure]]:
        groups: dict[tuple[str, bool], list[Measure]] = defaultdict(list)
        for measure in self._measures[node]:
            if measure.what == "stuck" and not measure.excess:
                groups.pop(("stuck", False), None)  # it moved bytes since then
            elif measure.kind in kinds:
                groups[measure.what, measure.kind == "alone"].append(measure)
        ways = self._ways(node) if ("stuck", False) in groups else 0
        states = [_state_of(found, SIGMAS + self._more, self.sigma, ways) for found in groups.values()]
        for word in ("bad", "open", "undecided"):
            if slow := [measure for state, found in states if state == word for measure in found]:
                return word, slow
        return "clean", []

    def _open(self, kinds: tuple[str, ...]) -> list[int]:
        """Nodes of whose measures more are needed; not those that are bad for another reason."""
        return [
            node for node in sorted(self._measures)
            if node not in self.lost and self._state(node, kinds)[0] == "open"
            and (kinds == ("alone",) or not self._bad_parts(node))
            and self._state(node, ("near", "far"))[0] != "bad"
        ]  # fmt: skip

    def _open_kind(self, node: int) -> str:
        """The kind in which the node was slow, and measured least often since."""
        slow = [m.kind for m in self._state(node, ("near", "far"))[1]]
        done = Counter(m.kind for m in self._measures[node])
        return min(slow, key=lambda kind: done[kind])

    def _bad_parts(self, node: int) -> bool:
        return self._state(node, ("alone",))[0] == "bad"

    def _was_stuck(self, node: int) -> bool:
        return any(m.what == "stuck" and m.excess > 0 for m in self._measures[node])

    def _is_measured(self, node: int) -> bool:
        return any(m.kind != "alone" and m.what != "stuck" for m in self._measures[node])

    def _is_clean(self, node: int) -> bool:
        """Whether it may be the partner of a suspect."""
        return node not in self.lost and self._is_measured(node) and self._state(node, KINDS)[0] == "clean"

    def _link_state(self, link: Link) -> str:
        """Judge a link more strictly than a node: one measure that is not slow clears it.

        A round measures so many links that some are slow in several by chance: judged as nodes are, simulated searches
        accuse links without a fault.
        """
        measures = self._links[link]
        slow = [measure for measure in measures if measure.is_slow(SIGMAS, LEAST_LINK)]
        if len(slow) < len(measures):
            return "clean"
        if len(slow) < 3 and sum(measure.what == "stuck" for measure in slow) < 2:
            return "open"
        # As of nodes: what is usual must be visible in the noise of one transfer; repeats of one test share theirs.
        usual = median_low(measure.excess for measure in measures)
        return "bad" if usual > (SIGMAS + self._more) * measures[0].sigma else "clean"

    def _is_stuck(self, link: Link) -> bool:
        return self._link_state(link) == "bad" and any(m.what == "stuck" for m in self._links[link])

    def _open_links(self) -> list[Link]:
        """Links to test again, two of each pair of domains at most."""
        seen: Counter[tuple[str, str]] = Counter()
        found = []
        for link in list(self._links):
            if self._link_state(link) == "open" and all(map(self._is_clean, link)):
                pair = (self.domains[link[0]], self.domains[link[1]])
                seen[pair] += 1
                if seen[pair] <= 2 or pair[0] == pair[1]:
                    found.append(link)
        return found

    def visible_loss(self) -> float | None:
        """The smallest loss of a node that 99 of 100 searches with this noise find; None where nothing was measured."""
        if not self.sigma:
            return None
        excess = max(
            max(LEAST[kind], (SIGMAS + self._more) * sigma) + POWER * sigma for kind, sigma in self.sigma.items()
        )
        return excess / (1 + excess)

    def verdicts(self) -> list[Verdict]:
        """Give the verdict of each node, in the order of the nodes."""
        return [self._verdict(node) for node in range(self.nodes)]

    def _verdict(self, node: int) -> Verdict:
        if node in self.unreached:
            return Verdict(node=node, state="not judged", reason="unreached", seen=self.unreached[node])
        if node in self.lost:
            return Verdict(node=node, state="bad", reason="lost", seen=self.lost[node], loss=1.0)
        for kinds, reason in ((("alone",), "part"), (("near", "far"), "slow")):
            state, slow = self._state(node, kinds)
            if state == "clean":
                continue
            what = tuple(dict.fromkeys(measure.what for measure in slow))
            is_bad = state == "bad"
            return Verdict(
                node=node, state="bad" if is_bad else "not judged", loss=_loss(slow), what=what, measures=tuple(slow),
                reason="undecided" if not is_bad else "stuck" if "stuck" in what else reason,
                rails=self._slow_rails.get(node, ()),
            )  # fmt: skip
        if self.nodes < 3:
            return Verdict(node=node, state="not judged", reason="few")
        if not self._is_measured(node):
            return Verdict(node=node, state="not judged", reason="unmeasured")
        visible = self.visible_loss()
        if visible is None or visible > BLIND:
            return Verdict(node=node, state="not judged", reason="noise")
        return Verdict(node=node, state="good")

    def bad_links(self) -> list[BadLink]:
        """Links between nodes that are not bad themselves."""
        good = {v.node for v in self.verdicts() if v.state != "bad"}
        found = []
        for link, measures in self._links.items():
            if self._link_state(link) == "bad" and good.issuperset(link):
                found.append(BadLink(source=link[0], target=link[1], loss=_loss(measures), measures=tuple(measures)))
        return found


def sum_up(
    passes: Sequence[Search], hosts: Sequence[str], began: float, seconds: float, node_minutes: float
) -> SearchResult:
    """Sum a search up: of several passes the worst counts, and the first of those that are alike.

    The picture shows the nodes at fault first, then their partners, then others.
    """
    found = [[replace(verdict, turn=turn) for verdict in one.verdicts()] for turn, one in enumerate(passes)]
    states = ("bad", "not judged", "good")
    verdicts = [min(of, key=lambda verdict: states.index(verdict.state)) for of in zip(*found, strict=True)]
    links, excess = dict[Link, BadLink](), dict[Link, float]()
    for turn, one in enumerate(passes):
        for link in one.bad_links():
            links.setdefault((link.source, link.target), replace(link, turn=turn))
        for pair, value in one.excess.items():
            excess[pair] = max(value, excess.get(pair, value))
    faulty = {v.node for v in verdicts if v.state != "good"}.union(*links)
    partners = [end for pair in excess if not faulty.isdisjoint(pair) for end in pair]
    drawn = sorted(list(dict.fromkeys([*sorted(faulty), *partners, *range(len(hosts))]))[:DRAWN])
    return SearchResult(
        hosts=tuple(hosts), domains=tuple(passes[0].domains), began=began, seconds=seconds, verdicts=tuple(verdicts),
        links=tuple(links.values()), rounds=sum(one.round for one in passes), tests=sum(one.tests for one in passes),
        node_minutes=node_minutes, passes=len(passes), drawn=tuple(drawn),
        visible_loss=max(filter(None, (one.visible_loss() for one in passes)), default=None),
        tested_pairs=len({tuple(sorted(pair)) for pair in excess}),
        pairs=tuple((a, b, excess[a, b]) for a in drawn for b in drawn if (a, b) in excess),
    )  # fmt: skip


def _state_of(
    measures: Sequence[Measure], sigmas: float, noise: Mapping[str, float], ways: int
) -> tuple[str, list[Measure]]:
    """Judge the measures of one thing: slow in three rounds (stuck: in two), as often as not, and by alike amounts."""
    first = max((m for m in measures if m.is_slow(sigmas, LEAST[m.kind])), key=lambda m: m.excess, default=None)
    if first is None:
        return "clean", []
    slow = [m for m in measures if m.is_slow(SIGMAS_AGAIN, LEAST[m.kind] / 2)]
    usual = median_low(m.excess for m in slow)
    slow = [m for m in slow if m.excess >= usual / 2]
    fine = [m for m in measures if m not in slow and usual > (SIGMAS_AGAIN + 1) * m.sigma and m.kind == first.kind]
    rounds = len({m.round for m in slow})
    if first.what == "stuck":  # with two others, or two groups as a whole: one transfer may be the link's fault
        is_bad = rounds >= 2 and max(ways, sum(not m.links for m in slow)) >= 2
    else:
        is_bad = rounds >= 3 and len(slow) > len(fine)
    if not is_bad and len(fine) >= len(slow):
        return "clean", []
    if not is_bad and len({m.round for m in measures}) < TRIES:
        return "open", slow
    # What is usual must be visible in the noise of the groups: a chance event in one round and a small deviation in
    # the others are no fault, and repeats tell nothing of noise that lasts for a whole test.
    if first.what != "stuck" and usual <= max(LEAST[first.kind], sigmas * max(noise.get(first.kind, 0.0), first.sigma)):
        return "clean", []
    return ("bad" if is_bad else "undecided"), slow


def _loss(measures: Iterable[Measure]) -> float:
    """The share of the middle rate that is lost, from the middle excess of time."""
    excess = median(measure.excess for measure in measures if measure.excess > 0)
    return excess / (1 + excess)


def _parts(nodes: Sequence[int], most: int = GROUP) -> list[tuple[int, ...]]:
    """Divide into as few groups of at most `most` as there can be, alike in size."""
    count = math.ceil(len(nodes) / most)
    ends = [len(nodes) * part // count for part in range(count + 1)] if count else []
    return [tuple(nodes[start:end]) for start, end in pairwise(ends)]


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and sigma from the deviations: of all, and of the faster half, which no slow node widens."""
    middle, fast = median(values), sorted(values)[round(0.16 * (len(values) - 1))]
    return middle, max(MAD * median(abs(value - middle) for value in values), middle - fast)
