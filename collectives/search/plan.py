"""Plans the tests of a search for bad nodes, and judges nodes and links by their results. Pure: no torch, no clock.

A test is a group of nodes in which every node sends to every other one in turn, all at the same time, and each
receiver measures the time of its own transfer. One test therefore distinguishes a slow node (all its transfers are
slow) from a slow link (one transfer is slow). A transfer in which no byte moves is evidence about its two ends only.
Every node is tested alone first, then with nodes of its own domain, then with nodes of other domains. A node or link
that was slow or stuck once is tested again with partners that were not. It is accused if it was slow in three rounds,
or stuck in two.

The noise is measured as the median absolute deviation (MAD), which a minority of bad nodes does not change. Nodes are
compared only with each other, so no node is accused if the whole network is slow.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from statistics import median, median_low
from typing import Literal, NamedTuple

Link = tuple[int, int]  # from, to
Transfer = tuple[int, int, int, float]  # source, target, rail (local rank; -1: the slowest of all), seconds

KINDS = ("alone", "near", "far")
GROUP = 32  # most nodes of a test: a stuck node costs the other nodes of its group a round
MAX_ROUNDS = 16
# The smallest excess of time that counts, however small the noise. GPUs of one model differ by 8 % on average under a
# power limit (Sinha et al., "Not All GPUs Are Created Equal", SC 2022). For transfers no such figure is known.
LEAST: Mapping[str, float] = {"alone": 0.15, "near": 0.02, "far": 0.02}
MIN_LINK = 0.10
STUCK = 1e9  # excess that represents a transfer in which no byte moves
SIGMAS, SIGMAS_AGAIN = 5.0, 3.0  # 5: of 65,000 comparisons (16,384 nodes), 0.02 exceed it by chance
FEW = 20.0  # additional sigmas, divided by the number of nodes, because few nodes give a poor estimate of the noise
POWER = 2.5  # sigmas beyond the limit at which 99 of 100 slow nodes are found
QUARTILE = 1.36  # sigma of the lower quartile of n normal values, times sqrt(n) / sigma
MAD = 1.4826  # sigma of a normal distribution over its MAD
PARTNERS = 3  # of a confirmation
PLAIN = 1.0  # an excess this large is visible without repeats
REPEATS, MIN_REPEATS = 24, 4  # transfers of each node in a confirmation, and of each link
HALVED = 5  # a larger group that did not end is halved; the nodes of a smaller one are tested separately
TRIES = 5  # rounds of one kind of measure, after which a node without a clear result is undecided
DRAWN = 64  # most nodes of the picture; names of more rows and columns would not be readable
BLIND = 0.5  # if the noise hides a loss of this fraction, no node is called good


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Nodes to test together; the tests of one round have no node in common and run at the same time."""

    kind: str  # "alone", "near" (one domain), "far"
    nodes: tuple[int, ...]
    repeats: int = 1
    rails: bool = False  # test one local rank of each node after another, instead of all at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a test. All transfers have the same number of bytes."""

    transfers: tuple[Transfer, ...] = ()
    alone: tuple[tuple[int, str, float], ...] = ()  # node, part ("GPU3 matmul"), seconds
    stuck: tuple[Link, ...] = ()  # transfers in which no byte moved for longer than allowed
    lost: Mapping[int, str] = field(default_factory=dict)  # nodes without a heartbeat, each with the evidence
    ended: bool = True  # False: the group did not finish, and no transfer shows the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The result of a node or link in one round: excess of its time over the median, and the sigma of the excess."""

    round: int
    kind: str
    what: str  # "sends", "receives", "stuck", or a part of the node
    excess: float
    sigma: float
    links: tuple[Link, ...] = ()  # stuck links of the node; empty if a whole group was stuck

    def is_slow(self, sigmas: float, smallest: float) -> bool:
        """Whether the excess is larger than chance explains, and large enough to count."""
        return self.excess > max(smallest, sigmas * self.sigma)


class Judgement(NamedTuple):
    """What measures say about a node: "clean", "open" (it is measured again), "bad" or "undecided"."""

    state: str
    slow: Sequence[Measure] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one node."""

    node: int
    state: Literal["good", "bad", "not judged"]
    reason: str = ""  # "lost", "stuck", "part", "slow"; or why it was not judged
    seen: str = ""  # evidence that the node is lost, or why it could not join or be judged
    loss: float = 0.0  # lost fraction of the median node's rate; 1.0: no byte moves
    what: tuple[str, ...] = ()  # "sends", "receives", or the parts of the node
    rails: tuple[int, ...] = ()  # the slow rails, if not all are slow
    measures: tuple[Measure, ...] = ()  # the slow ones
    turn: int = 0  # number of the pass with this result


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLink:
    """A link on which transfers are slow or stuck, between two nodes whose other transfers are fine."""

    source: int
    target: int
    loss: float
    measures: tuple[Measure, ...]
    turn: int = 0  # number of the pass with this result


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search. Nodes are positions in `hosts`."""

    hosts: tuple[str, ...]
    domains: tuple[str, ...]  # by node, "" is unknown
    began: float  # Unix time
    seconds: float
    verdicts: tuple[Verdict, ...]  # by node
    links: tuple[BadLink, ...]
    rounds: int
    tests: int
    node_minutes: float
    visible_loss: float | None  # the smallest loss of rate that the search detects in a node
    tested_pairs: int
    drawn: tuple[int, ...]  # nodes of the picture
    pairs: tuple[tuple[int, int, float], ...]  # from, to, excess of the time, for the nodes of the picture
    passes: int = 1  # 2: the second one without NVLink between nodes
    uplinks: tuple[tuple[str, float], ...] = ()  # domain with slow uplinks, lost fraction of the fastest domain's rate

    def __post_init__(self) -> None:
        """Raise ValueError if verdicts do not cover all hosts, or if a link or pair has an unknown node."""
        nodes = list(range(len(self.hosts)))
        ends = {end for link in self.links for end in (link.source, link.target)}.union(self.drawn)
        paired = {end for pair in self.pairs for end in pair[:2]}
        if [v.node for v in self.verdicts] != nodes or not ends <= set(nodes) or not paired <= set(self.drawn):
            raise ValueError("verdicts, links or pairs are not of the hosts")


class Search:
    """The measurements of one pass, from which the tests of the next round are planned."""

    def __init__(self, domains: Sequence[str], models: Sequence[str] = (), rails: int = 1) -> None:
        """`domains` and `models` (of the GPUs) are by node, "" is unknown; `rails`: local ranks of each node."""
        self.nodes = len(domains)
        self.round = self.tests = self.phase = 0
        self.lost: dict[int, str] = {}
        self.unreached: dict[int, str] = {}  # lost nodes that are not judged -> reason
        self.excess: dict[Link, float] = {}  # excess of each transfer over the median in its last test
        self.sigma: dict[str, float] = {}  # noise of a node in the groups, by kind
        self.domains, self._models, self._rails = list(domains), list(models or [""] * len(domains)), rails
        self._members: dict[str, list[int]] = defaultdict(list)
        for node, domain in enumerate(domains):
            self._members[domain].append(node)
        self._measures: dict[int, list[Measure]] = defaultdict(list)
        self._links: dict[Link, list[Measure]] = defaultdict(list)  # of links that were slow or stuck once
        self._middles: dict[str, tuple[float, float]] = {}  # by kind or part: median seconds, sigma
        self._times: dict[str, list[float]] = defaultdict(list)  # seconds of all transfers in groups, by kind
        self._centers: dict[tuple[str, str], tuple[float, float]] = {}  # median and sigma of the nodes' scores
        self._slow_rails: dict[int, tuple[int, ...]] = {}
        self._queue: list[Test] = []  # halves of groups that did not end
        self._broken: list[Test] = []  # groups that ended early
        self._running: tuple[Test, ...] = ()
        self._busy: set[int] = set()  # nodes with a test in the round that is planned
        self._open_links: list[Link] = []  # when the round was planned
        self._partners: list[int] = []  # clean nodes, for tests of suspects
        self._judgements: dict[tuple[int, tuple[str, ...]], Judgement] = {}  # since the last report, by node and kinds
        self._sigmas = SIGMAS + FEW / max(self.nodes, 1)  # from which an excess counts

    # Planning

    def plan_round(self) -> tuple[Test, ...]:
        """Return the tests to run at the same time; empty if the search has ended."""
        while self.round < MAX_ROUNDS:
            self.phase = min(self.phase + 1, 4)
            planned = [*self._queue, *self._plan_phase()]
            self._queue = []
            busy, tests = set[int](), list[Test]()
            for test in planned:
                nodes = tuple(node for node in test.nodes if node not in self.lost)
                if busy.intersection(nodes):
                    self._queue.append(test)
                elif len(nodes) > (test.kind != "alone"):
                    busy.update(nodes)
                    tests.append(replace(test, nodes=nodes))
            if tests:
                self.round += 1
                self.tests += sum(test.kind != "alone" for test in tests)
                self._running = tuple(tests)
                return self._running
            if self.phase == 4:
                break
        return ()

    def _plan_phase(self) -> list[Test]:
        """Plan the three rounds that every search has, then tests of open suspects, then the rails of slow nodes."""
        living = [node for node in range(self.nodes) if node not in self.lost]
        if self.phase == 1:
            return [Test(kind="alone", nodes=(node,)) for node in living]
        broken = {node for node in living if self._judge_node(node, ("alone",)).state == "bad" or self._was_stuck(node)}
        waiting = {node for test in self._queue for node in test.nodes}
        free = [node for node in living if node not in broken and node not in waiting]
        if self.phase == 2:
            return [Test(kind="near", nodes=group) for group in self._group_near(free)]
        if self.phase == 3 and self.nodes > 2:
            # Across domains: one node of each near group after another
            near = self._group_near(free)
            nodes = [group[place] for place in range(GROUP) for group in near if place < len(group)]
            return [Test(kind="far", nodes=group) for group in _split_evenly(nodes)]
        self._busy = self._find_alone_retests()
        alone = [Test(kind="alone", nodes=(node,)) for node in sorted(self._busy)]
        return alone + self._plan_confirmations() or self._plan_rail_tests()

    def _find_alone_retests(self) -> set[int]:
        """Return nodes with a slow part, and for each of their GPU models some nodes without one for comparison.

        Anything that slows all nodes at that moment, such as other work on the hosts, is not a fault of the suspect.
        """
        suspects = self._find_open_nodes(("alone",))
        clean: dict[str, list[int]] = defaultdict(list)
        for node in filter(self._is_clean, range(self.nodes if suspects else 0)):
            clean[self._models[node]].append(node)
        return {*suspects, *(mate for node in suspects for mate in clean[self._models[node]][:PARTNERS])}

    def _group_near(self, nodes: Iterable[int]) -> list[tuple[int, ...]]:
        """Group nodes by domain, and split large domains into equal parts."""
        free = set(nodes)
        return [part for members in self._members.values() for part in _split_evenly([n for n in members if n in free])]

    def _plan_confirmations(self) -> list[Test]:
        """Plan tests of suspects with clean partners, tests of nodes without a result, and broken groups again."""
        self._open_links = self._find_open_links()
        # Nodes that were never stuck are better partners.
        self._partners = sorted(filter(self._is_clean, range(self.nodes)), key=self._was_stuck)
        return [*self._confirm_nodes(), *self._confirm_links(), *self._test_unmeasured(), *self._repeat_broken_groups()]

    def _confirm(self, kind: str, suspects: Sequence[int], partners: Iterable[int], count: int) -> Iterator[Test]:
        """Yield a test of suspects with the first `count` free partners, if no suspect has a test in this round."""
        free = dict.fromkeys(node for node in partners if node not in self._busy and node not in suspects)
        group = (*suspects, *list(free)[:count])
        if len(group) > 1 and self._busy.isdisjoint(group):
            self._busy.update(group)
            repeats = 1 if self._is_plain(group) else max(MIN_REPEATS, REPEATS // (len(group) - 1))
            yield Test(kind=kind, nodes=group, repeats=repeats)

    def _confirm_nodes(self) -> Iterator[Test]:
        """Test each stuck node separately, and slow nodes together. The kind is the one that was made least often."""
        slow: dict[tuple[str, str], list[int]] = defaultdict(list)  # by kind and, if near, by domain
        for node in self._find_open_nodes(("near", "far")):
            counts = Counter(measure.kind for measure in self._measures[node])
            slow_kinds = [measure.kind for measure in self._judge_node(node, ("near", "far")).slow]
            kind = min(slow_kinds, key=counts.__getitem__)
            if not self._was_stuck(node):
                slow[kind, self.domains[node] if kind == "near" else ""].append(node)
                continue
            tried = {end for link in self._find_stuck_links(node) for end in link}
            of_kind = [mate for mate in self._partners if self._classify_pair(node, mate) == kind and mate not in tried]
            yield from self._confirm(kind, [node], [*of_kind, *self._partners], PARTNERS)
        for (kind, domain), nodes in slow.items():
            for group in _split_evenly([node for node in nodes if node not in self._busy], GROUP // 2):
                homes = {self.domains[node] for node in group}
                mates = [node for node in self._partners if (self.domains[node] in homes) == (kind == "near")]
                # In a domain without a clean node, the times of earlier rounds are the reference.
                others = self._members[domain] if kind == "near" else self._partners
                yield from self._confirm(kind, group, mates or others, max(PARTNERS, len(group)))

    def _confirm_links(self) -> Iterator[Test]:
        """Test each stuck link separately, with one partner, and the ends of all slow links together."""
        slow: dict[int, None] = {}  # ends of slow links, each once
        for link in self._open_links:
            if any(measure.what == "stuck" for measure in self._links[link]):
                yield from self._confirm(self._classify_pair(*link), link, self._partners, 1)
            elif self._busy.isdisjoint(link):
                slow |= dict.fromkeys(link)
        for group in _split_evenly(list(slow)):
            yield from self._confirm("far", group, self._partners, 1 if len(group) == 2 else 0)

    def _test_unmeasured(self) -> Iterator[Test]:
        """Test the nodes of which no transfer was measured, for example because their group did not end."""
        if self.nodes <= 2 or self.round >= 2 * TRIES:
            return
        in_use = self._busy.union(*(test.nodes for test in (*self._queue, *self._broken)), self.lost)
        free = [node for node in range(self.nodes) if node not in in_use and not self._is_measured(node)]
        for group in _split_evenly([n for n in free if self._judge_node(n, KINDS).state == "clean"], GROUP // 2):
            yield from self._confirm("far", group, self._partners, max(PARTNERS, len(group)))

    def _is_plain(self, nodes: Iterable[int]) -> bool:
        """Whether each suspect among these nodes and their links has an excess that one transfer shows.

        One such excess of a node is enough, because it decides the verdict.
        """
        inside = set(nodes)
        measured = [self._judge_node(node, ("near", "far")).slow for node in inside]
        measured += [self._links[link] for link in self._open_links if inside.issuperset(link)]
        return all(any(m.excess > PLAIN for m in measures) for measures in measured if measures)

    def _repeat_broken_groups(self) -> list[Test]:
        """Repeat groups that ended early, without the nodes that caused it, once these nodes are known."""
        tests, self._broken, left = list[Test](), list[Test](), self._broken
        waiting = {node for test in self._queue for node in test.nodes} | self._busy
        bad = [link for link in self._links if self._judge_link(link) == "bad"]
        cut = [link for link in bad if any(m.what == "stuck" for m in self._links[link])]
        for test in left:
            states = {node: self._judge_node(node, KINDS).state for node in test.nodes if node not in self.lost}
            stuck = {link[1] for link in cut if states.keys() >= set(link)}
            nodes = tuple(node for node, state in states.items() if state == "clean" and node not in stuck)
            if waiting.intersection(test.nodes) or "open" in states.values():
                self._broken.append(test)
            elif len(nodes) > 1:
                waiting.update(nodes)
                tests.append(Test(kind=test.kind, nodes=nodes))
        return tests

    def _plan_rail_tests(self) -> list[Test]:
        slow = [v.node for v in self.verdicts() if v.reason == "slow" and v.node not in self._slow_rails]
        spare = [node for node in range(self.nodes) if self._is_clean(node)]
        pairs = zip(slow, spare, strict=False) if self._rails > 1 else ()
        return [Test(kind=self._classify_pair(*pair), nodes=pair, repeats=MIN_REPEATS, rails=True) for pair in pairs]

    def _classify_pair(self, first: int, other: int) -> str:
        return "near" if self.domains[first] == self.domains[other] else "far"

    # Results

    def report(self, outcomes: Sequence[Outcome]) -> None:
        """Record the outcomes of the tests of this round, in the order of the tests."""
        for outcome in outcomes:
            self.lost.update(outcome.lost)
        self._learn_alone([row for outcome in outcomes for row in outcome.alone])
        by_kind: dict[str, list[Transfer]] = defaultdict(list)
        for test, outcome in zip(self._running, outcomes, strict=True):
            if test.rails:
                self._learn_rails(test, outcome)
                continue
            for transfer in outcome.transfers:
                by_kind[self._classify_pair(*transfer[:2])].append(transfer)
            self._learn_stuck(test, outcome)
            is_half = any(set(test.nodes) < set(other.nodes) for other in self._broken)
            is_whole = outcome.ended and not outcome.stuck and not outcome.lost
            if test.kind != "alone" and test.repeats == 1 and not is_half and not is_whole:
                self._broken.append(test)
        scores: dict[tuple[str, int], float] = {}
        for kind, transfers in by_kind.items():
            for end, score in self._learn_transfers(kind, transfers).items():
                scores[end] = max(score, scores.get(end, 1.0))
        for kind, transfers in by_kind.items():
            self._learn_links(kind, transfers, scores)
        self._running = ()
        self._judgements.clear()

    def _measure(self, kind: str, what: str, excess: float, sigma: float = 0.0, links: Iterable[Link] = ()) -> Measure:
        return Measure(round=self.round, kind=kind, what=what, excess=excess, sigma=sigma, links=tuple(links))

    def _learn_alone(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Compare each part ("GPU3 matmul") with the same part ("matmul") of all nodes with the same GPU model.

        A suspect is compared with the slower of two medians: of all nodes in the first round, and of its partners now.
        """
        suspects = set(self._find_open_nodes(("alone",))) if rows else set[int]()
        parts: dict[str, list[tuple[int, str, float]]] = defaultdict(list)
        for node, part, seconds in rows:
            parts[f"{self._models[node]} {part.rpartition(' ')[2]}"].append((node, part, seconds))
        for name, timed in parts.items():
            middle, sigma = self._middles.setdefault(name, _estimate_spread([seconds for *_, seconds in timed]))
            mates = [seconds for node, _, seconds in timed if node not in suspects]
            middle = max(middle, median(mates or [0.0]))
            for node, part, seconds in timed:
                self._measures[node].append(self._measure("alone", part, seconds / middle - 1, sigma / middle))

    def _learn_transfers(self, kind: str, transfers: Sequence[Transfer]) -> dict[tuple[str, int], float]:
        """Score what each node sends and receives, relative to the median transfer.

        The score is the lower quartile of its times, which a few slow partners or links do not change.
        """
        is_group = self.phase < 4 or kind not in self._middles
        if is_group:
            self._times[kind] += [seconds for *_, seconds in transfers]
            self._middles[kind] = _estimate_spread(self._times[kind])
        middle, sigma = self._middles[kind]
        times: dict[tuple[str, int], list[float]] = defaultdict(list)  # by direction and node
        partners: dict[tuple[str, int], set[int]] = defaultdict(set)
        for source, target, _, seconds in transfers:
            for end, partner in ((("sends", source), target), (("receives", target), source)):
                times[end].append(seconds / middle)
                partners[end].add(partner)
        # A score needs two partners that are not suspects, because a good node with suspects only would look slow.
        nodes = {node for _, node in times}
        good = {node for node in nodes if is_group or self._is_clean(node)} or nodes
        scores = {end: sorted(row)[(len(row) - 1) // 4] for end, row in times.items() if len(partners[end] & good) > 1}
        sigmas = []
        for direction in ("sends", "receives"):
            by_node = {node: score for (side, node), score in scores.items() if side == direction}
            if by_node and (is_group or (kind, direction) not in self._centers):
                self._centers[kind, direction] = _estimate_spread([*by_node.values()])
            center, spread = self._centers.get((kind, direction), (1.0, 0.0))
            for node, score in by_node.items():
                error = QUARTILE * sigma / middle / math.sqrt(len(times[direction, node]))
                sigmas.append(max(error, spread) / center)
                self._measures[node].append(self._measure(kind, direction, score / center - 1, sigmas[-1]))
        if sigmas and (is_group or kind not in self.sigma):
            self.sigma[kind] = median(sigmas)
        return scores

    def _learn_links(self, kind: str, transfers: Sequence[Transfer], scores: Mapping[tuple[str, int], float]) -> None:
        """Compare each transfer with the scores of its two ends."""
        middle, sigma = self._middles[kind]
        times: dict[Link, list[float]] = defaultdict(list)
        for source, target, _, seconds in transfers:
            times[source, target].append(seconds / middle)
        for link, values in times.items():
            self.excess[link] = median(values) - 1
            ends = max(scores.get(("sends", link[0]), 1.0), scores.get(("receives", link[1]), 1.0))
            excess, error = median(values) / ends - 1, sigma / middle / math.sqrt(len(values))
            if link in self._links or excess > max(MIN_LINK, self._sigmas * error):
                self._links[link].append(self._measure(kind, "transfer", excess, error))

    def _learn_stuck(self, test: Test, outcome: Outcome) -> None:
        """Suspect the nodes with the most stuck transfers; halve a group that ended without a known reason.

        In a confirmation only the node that is tested again is suspected. A link that is stuck again is no new evidence
        against its ends, and no link is evidence against a node that sent or received before in the same test.
        """
        links = [link for link in outcome.stuck if self.lost.keys().isdisjoint(link)]
        repeated = {link for link in links if any(m.what == "stuck" for m in self._links[link])}
        known = {link for link in repeated if all(len(self._find_stuck_links(end)) < 2 for end in link)}
        fresh = [link for link in links if link not in known]
        for link in links:
            self.excess[link] = STUCK
            self._links[link].append(self._measure(test.kind, "stuck", STUCK))
        sent = {source for source, *_ in outcome.transfers}
        received = {target for _, target, *_ in outcome.transfers}
        ends = Counter(source for source, _ in fresh if source not in sent)
        ends.update(target for _, target in fresh if target not in received)
        suspects = {node for node, count in ends.items() if count == max(ends.values())}
        if not outcome.ended and not links and not outcome.lost:
            suspects = set(test.nodes)
        before = {node for node in test.nodes if self._was_stuck(node)}
        suspects = {node for node in suspects & before if self._judge_node(node, KINDS).state != "clean"} or suspects
        if len(suspects) > HALVED and not links:
            half = len(test.nodes) // 2
            self._queue += [Test(kind=test.kind, nodes=nodes) for nodes in (test.nodes[:half], test.nodes[half:])]
            return
        for node in test.nodes:
            if node in suspects or (node in sent | received and node in before):
                stuck = [link for link in fresh if node in link]
                excess = STUCK if node in suspects else 0.0
                self._measures[node].append(self._measure(test.kind, "stuck", excess, links=stuck))

    def _find_stuck_links(self, node: int) -> set[Link]:
        """Return the links of a node that were stuck since it last moved a byte."""
        common: set[Link] = set()
        for measure in self._measures[node]:
            if measure.what == "stuck":
                common = common.union(measure.links) if measure.excess else set()
        return common

    def _count_stuck_peers(self, node: int) -> int:
        """Return to how many nodes a node cannot send, or from how many it cannot receive, whichever is more.

        Nodes that are stuck with further nodes do not count, because they may be the cause themselves.
        """
        by_side: Counter[int] = Counter()  # 0: the node sends, 1: it receives
        for link in self._find_stuck_links(node):
            side = link.index(node)
            peer = link[1 - side]
            by_side[side] += all(link == other or other[1 - side] != peer for other in self._find_stuck_links(peer))
        return max(by_side.values(), default=0)

    def _learn_rails(self, test: Test, outcome: Outcome) -> None:
        """Find the rails of the first node that are slower than the median of the faster half of its rails."""
        times: dict[int, list[float]] = defaultdict(list)
        for *_, rail, seconds in outcome.transfers:
            times[rail].append(seconds)
        middles = {rail: median(values) for rail, values in times.items()}
        fast = median(sorted(middles.values())[: (len(middles) + 1) // 2] or [0.0])
        loss = self._make_verdict(test.nodes[0]).loss
        slow = [rail for rail, seconds in middles.items() if seconds > fast * (1 + max(MIN_LINK, loss / 2))]
        self._slow_rails[test.nodes[0]] = tuple(sorted(slow)) if len(slow) < len(middles) else ()

    # Judgement

    def _judge_node(self, node: int, kinds: tuple[str, ...]) -> Judgement:
        """Judge a node by its measures of these kinds."""
        if not self._running and (node, kinds) in self._judgements:  # while a round is reported, measures are added
            return self._judgements[node, kinds]
        groups: dict[tuple[str, bool], list[Measure]] = defaultdict(list)
        for measure in self._measures[node]:
            if measure.what == "stuck" and not measure.excess:
                groups.pop(("stuck", False), None)  # the node has moved bytes since then
            elif measure.kind in kinds:
                groups[measure.what, measure.kind == "alone"].append(measure)
        stuck_peers = self._count_stuck_peers(node) if ("stuck", False) in groups else 0
        judgements = [self._judge_measures(group, stuck_peers) for group in groups.values()]
        worst = next((s for s in ("bad", "open", "undecided") if s in {each.state for each in judgements}), "clean")
        slow = [measure for each in judgements if each.state == worst for measure in each.slow]
        self._judgements[node, kinds] = Judgement(worst, slow)
        return self._judgements[node, kinds]

    def _judge_measures(self, measures: Sequence[Measure], stuck_peers: int) -> Judgement:
        """Judge the measures of one property of a node; `stuck_peers` is the result of `_count_stuck_peers`.

        It is bad if it was slow in three rounds (stuck: in two), in more of them than not, and by similar amounts.
        """
        slow = [m for m in measures if m.is_slow(self._sigmas, LEAST[m.kind])]
        if not slow:
            return Judgement("clean")
        worst = max(slow, key=lambda m: m.excess)
        slow = [m for m in measures if m.is_slow(SIGMAS_AGAIN, LEAST[m.kind] / 2)]
        usual = median_low(m.excess for m in slow)
        slow = [m for m in slow if m.excess >= usual / 2]
        others = [m for m in measures if m not in slow and m.kind == worst.kind]
        normal = [m for m in others if usual > (SIGMAS_AGAIN + 1) * m.sigma]  # would show such an excess
        rounds = len({m.round for m in slow})
        if worst.what == "stuck":  # with two nodes, or in two whole groups: one stuck transfer may be a bad link
            is_bad = rounds >= 2 and max(stuck_peers, sum(not m.links for m in slow)) >= 2
        else:
            is_bad = rounds >= 3 and len(slow) > len(normal)
        if not is_bad and len(normal) >= len(slow):
            return Judgement("clean")
        if not is_bad and len({m.round for m in measures}) < TRIES:
            return Judgement("open", slow)
        # The usual excess must be visible in the noise of the groups: a chance event in one round and small deviations
        # in the others are no fault, and repeats do not reveal noise that lasts for a whole test.
        noise = self._sigmas * max(self.sigma.get(worst.kind, 0.0), worst.sigma)
        if worst.what != "stuck" and usual <= max(LEAST[worst.kind], noise):
            return Judgement("clean")
        return Judgement("bad" if is_bad else "undecided", slow)

    def _find_open_nodes(self, kinds: tuple[str, ...]) -> list[int]:
        """Return the nodes that need more measurements, without nodes that are bad for another reason."""
        living = (node for node in sorted(self._measures) if node not in self.lost)
        suspects = [node for node in living if self._judge_node(node, kinds).state == "open"]
        others = ("near", "far") if kinds == ("alone",) else ("alone",)
        return [node for node in suspects if self._judge_node(node, others).state != "bad"]

    def _was_stuck(self, node: int) -> bool:
        return any(m.what == "stuck" and m.excess > 0 for m in self._measures[node])

    def _is_measured(self, node: int) -> bool:
        return any(m.kind != "alone" and m.what != "stuck" for m in self._measures[node])

    def _is_clean(self, node: int) -> bool:
        """Whether the node may be the partner of a suspect."""
        return node not in self.lost and self._is_measured(node) and self._judge_node(node, KINDS).state == "clean"

    def _judge_link(self, link: Link) -> str:
        """Judge a link: "clean", "open" or "bad". Unlike a node, a link is clean after one measure that is not slow.

        A round measures so many links that some are slow in several rounds by chance. With the rule for nodes,
        simulated searches accuse links without a fault.
        """
        measures = self._links[link]
        slow = [measure for measure in measures if measure.is_slow(SIGMAS, MIN_LINK)]
        if len(slow) < len(measures):
            return "clean"
        if len(slow) < 3 and sum(measure.what == "stuck" for measure in slow) < 2:
            return "open"
        # As for nodes, the usual excess must exceed the noise of one transfer, because repeats share their noise.
        usual = median_low(measure.excess for measure in measures)
        return "bad" if usual > self._sigmas * measures[0].sigma else "clean"

    def _find_open_links(self) -> list[Link]:
        """Return the links to test again, at most two for each pair of domains."""
        counts: Counter[tuple[str, str]] = Counter()
        links = []
        for link in list(self._links):
            if self._judge_link(link) == "open" and all(map(self._is_clean, link)):
                pair = (self.domains[link[0]], self.domains[link[1]])
                counts[pair] += 1
                if counts[pair] <= 2 or pair[0] == pair[1]:
                    links.append(link)
        return links

    def visible_loss(self) -> float | None:
        """Return the smallest loss of a node that 99 of 100 searches with this noise find; None if unmeasured."""
        if not self.sigma:
            return None
        excess = max(max(LEAST[kind], self._sigmas * sigma) + POWER * sigma for kind, sigma in self.sigma.items())
        return excess / (1 + excess)

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on all nodes, in their order."""
        return [self._make_verdict(node) for node in range(self.nodes)]

    def _may_be_uplink(self, verdict: Verdict) -> bool:
        """Whether a node is slow only between domains, and all nodes of its domain are about as slow."""
        members = self._members[self.domains[verdict.node]]
        if verdict.reason != "slow" or len(members) < 2 or self._judge_node(verdict.node, ("near",)).state != "clean":
            return False
        measures = [m for node in members for m in self._measures[node] if m.kind == "far" and m.what in verdict.what]
        common = min(measure.excess for measure in measures)
        return common / (1 + common) > verdict.loss / 2

    def _make_verdict(self, node: int) -> Verdict:
        if node in self.unreached:
            return Verdict(node=node, state="not judged", reason="unreached", seen=self.unreached[node])
        if node in self.lost:
            return Verdict(node=node, state="bad", reason="lost", seen=self.lost[node], loss=1.0)
        for kinds, reason in ((("alone",), "part"), (("near", "far"), "slow")):
            state, slow = self._judge_node(node, kinds)
            if state == "clean":
                continue
            parts = tuple(dict.fromkeys(measure.what for measure in slow))
            is_bad = state == "bad"
            cause = "stuck" if "stuck" in parts else reason
            verdict = Verdict(
                node=node, state="bad" if is_bad else "not judged", loss=compute_loss(slow), what=parts,
                measures=tuple(slow), rails=self._slow_rails.get(node, ()), reason=cause if is_bad else state,
            )  # fmt: skip
            return replace(verdict, state="not judged", reason="uplink") if self._may_be_uplink(verdict) else verdict
        if self.nodes < 3:
            return Verdict(node=node, state="not judged", reason="few")
        if not self._is_measured(node):
            return Verdict(node=node, state="not judged", reason="unmeasured")
        visible_loss = self.visible_loss()
        if visible_loss is None or visible_loss > BLIND:
            return Verdict(node=node, state="not judged", reason="noise", seen=self._compare_domains())
        return Verdict(node=node, state="good")

    def _compare_domains(self) -> str:
        """Describe slow transfers between domains, which hide slow nodes as noise does; "" if they are not slow."""
        near, far = self._middles.get("near", (math.inf,))[0], self._middles.get("far", (0.0,))[0]
        text = f"transfers between domains take {far / near:.1f} times as long as within one, which hides slow nodes"
        return f"{text}. Check the switches between the domains" if far > (1 + PLAIN) * near else ""

    def find_slow_uplinks(self) -> dict[str, float]:
        """Return the domains that are fast inside and slow to all others, and the lost rate, without stuck nodes.

        Of two domains either can be the slow one, so one of the others must be fast to a third.
        """
        working = {node for node in range(self.nodes) if self._make_verdict(node).reason not in ("lost", "stuck")}
        times: dict[str, dict[str, float]] = {"near": {}, "far": {}}  # of the fastest transfer, by domain
        peers: dict[str, set[str]] = defaultdict(set)  # the other domains of its transfers, by domain
        for link in filter(working.issuperset, self.excess):
            by_domain, time = times[self._classify_pair(*link)], 1 + self.excess[link]
            for domain, peer in permutations(self.domains[end] for end in link):
                by_domain[domain] = min(time, by_domain.get(domain, time))
                peers[domain].add(peer)
        near, far = ({d: 1 - min(of_kind.values()) / time for d, time in of_kind.items()} for of_kind in times.values())
        return {
            domain: loss for domain, loss in sorted(far.items())
            if domain and loss > BLIND and near.get(domain, 1.0) <= BLIND
            and any(far.get(peer, 1.0) <= BLIND for peer in peers[domain])
        }  # fmt: skip

    def bad_links(self) -> list[BadLink]:
        """Return the bad links between nodes that are not bad themselves."""
        good = {v.node for v in self.verdicts() if v.state != "bad" and v.reason != "uplink"}
        return [
            BadLink(source=link[0], target=link[1], loss=compute_loss(measures), measures=tuple(measures))
            for link, measures in self._links.items() if self._judge_link(link) == "bad" and good.issuperset(link)
        ]  # fmt: skip


def combine_passes(
    passes: Sequence[Search], hosts: Sequence[str], began: float, seconds: float, node_minutes: float
) -> SearchResult:
    """Combine the passes of a search: the worst verdict on a node counts, from the first pass that has it.

    The nodes of the picture are the bad ones, then their partners, then others.
    """
    by_pass = [[replace(verdict, turn=turn) for verdict in search.verdicts()] for turn, search in enumerate(passes)]
    states = ("bad", "not judged", "good")
    verdicts = [min(of, key=lambda verdict: states.index(verdict.state)) for of in zip(*by_pass, strict=True)]
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
        visible_loss=max(filter(None, (search.visible_loss() for search in passes)), default=None),
        tested_pairs=len({tuple(sorted(pair)) for pair in excess}),
        pairs=tuple((a, b, excess[a, b]) for a in drawn for b in drawn if (a, b) in excess),
        uplinks=tuple({domain: loss for one in passes for domain, loss in one.find_slow_uplinks().items()}.items()),
    )  # fmt: skip


def compute_loss(measures: Iterable[Measure]) -> float:
    """Return the lost fraction of the median rate, from the median excess of time."""
    excess = median(measure.excess for measure in measures if measure.excess > 0)
    return excess / (1 + excess)


def _split_evenly(nodes: Sequence[int], limit: int = GROUP) -> list[tuple[int, ...]]:
    """Split nodes into as few groups of at most `limit` nodes as possible, of similar size."""
    count = math.ceil(len(nodes) / limit)
    ends = [len(nodes) * part // count for part in range(count + 1)] if count else []
    return [tuple(nodes[start:end]) for start, end in pairwise(ends)]


def _estimate_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and a sigma: the larger of that of all values and that of the faster half.

    Slow nodes do not widen the faster half.
    """
    middle, fast = median(values), sorted(values)[round(0.16 * (len(values) - 1))]
    return middle, max(MAD * median(abs(value - middle) for value in values), middle - fast)
