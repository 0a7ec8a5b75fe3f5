"""Which of many nodes, or which link between two of them, is slow: a schedule of disjoint pairs.

A slow node slows every pair it is in. All nodes are tested at once, two by two; after each round the nodes of slow
pairs meet nodes that passed, and everybody else meets somebody new. Each test moves a node's log-odds of being
slow by the likelihood of what was seen (Bayes' rule, given what is believed of its partner); a node is decided when
the odds reach what `error` over all nodes asks for (Wald's sequential test), which takes O(log N) rounds.

A link is found only when its two ends are paired: one search pairs a node with about log2(N) others. A link that
failed between two nodes that pass elsewhere is tested again until it is decided. Everything follows from the seed
and the results, so that every rank can hold the same Search.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low

from collectives.bench import measure, ops
from collectives.bench.measure import Rank
from collectives.bench.plan import SearchPlan

Pair = tuple[int, int]
LOOK_AHEAD = 64  # candidates looked at for one that was not met: rounds are far fewer, so one is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What is assumed of the tests and of the nodes; all are probabilities above 0 and below a half."""

    false_alarm: float = 0.01  # a good pair looks slow
    miss: float = 0.05  # a slow pair looks good
    slow_node: float = 0.01  # before any test
    slow_link: float = 0.001  # before any test
    error: float = 0.01  # that a whole search accuses anybody wrongly


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a search found."""

    slow_nodes: tuple[int, ...]
    slow_links: tuple[Pair, ...]
    undecided: tuple[int, ...]  # nodes that neither failed nor passed clearly
    rounds: int
    tests: int


class Search:
    """Holds what is believed of every node and link, and gives the next round of pairs."""

    def __init__(self, nodes: int, rates: Rates | None = None, seed: int = 0) -> None:
        if nodes < 2:
            raise ValueError(f"nodes: {nodes} is not allowed; allowed: at least 2")
        self.rates = rates or Rates()
        self.rounds = self.tests = 0
        self.limit = 2 * math.ceil(math.log2(nodes)) + 12  # few nodes have few partners
        self._random = random.Random(seed)  # noqa: S311 - a schedule that all ranks share, not a secret
        self._odds = [_log_odds(self.rates.slow_node)] * nodes
        self._met: list[set[int]] = [set() for _ in range(nodes)]
        self._links: dict[Pair, float] = {}  # log-odds of links that failed at least once
        self._round: tuple[Pair, ...] = ()
        self._node_bound = math.log(nodes / self.rates.error)

    def next_round(self) -> tuple[Pair, ...]:
        """Give disjoint pairs to test at the same time; empty when the search is over."""
        if self.rounds >= self.limit:
            return ()
        free = [node for node in range(len(self._odds)) if not self._slow(node)]
        self._random.shuffle(free)
        wanted = [node for node in free if not self._cleared(node)]
        links = self._open_links()
        if not wanted and not links:
            return ()
        self._round = self._pair(free, wanted, links)
        self.rounds += 1 if self._round else 0
        return self._round

    def report(self, slow: Collection[Pair]) -> None:
        """Take in which pairs of the round were slow."""
        failed = set(slow)
        unknown = failed - set(self._round)
        if unknown:
            raise ValueError(f"slow: {sorted(unknown)[:3]} are not pairs of this round")
        for pair in self._round:
            self._learn(pair, pair in failed)
        self.tests += len(self._round)
        self._round = ()

    def verdict(self) -> Verdict:
        """Say what is known so far."""
        nodes = range(len(self._odds))
        return Verdict(
            slow_nodes=tuple(node for node in nodes if self._slow(node)),
            slow_links=tuple(sorted(link for link in self._links if self._link_slow(link))),
            undecided=tuple(node for node in nodes if not self._slow(node) and not self._cleared(node)),
            rounds=self.rounds,
            tests=self.tests,
        )

    def _learn(self, pair: Pair, failed: bool) -> None:
        """Move what is believed of both nodes and of the link, each given what is believed of the other two."""
        one, other = pair
        link = self._links.get(pair, _log_odds(self.rates.slow_link))
        slow_link, slow_one, slow_other = (_probability(odds) for odds in (link, self._odds[one], self._odds[other]))
        self._odds[one] += self._weight(failed, _either(slow_other, slow_link))
        self._odds[other] += self._weight(failed, _either(slow_one, slow_link))
        if failed or pair in self._links:
            self._links[pair] = link + self._weight(failed, _either(slow_one, slow_other))
        self._met[one].add(other)
        self._met[other].add(one)

    def _weight(self, failed: bool, else_slow: float) -> float:
        """Log of the likelihood ratio: this one is slow, against this one is fine and the rest is slow by chance."""
        miss, false_alarm = self.rates.miss, self.rates.false_alarm
        fails_if_fine = else_slow * (1 - miss) + (1 - else_slow) * false_alarm
        return math.log((1 - miss) / fails_if_fine) if failed else math.log(miss / (1 - fails_if_fine))

    def _slow(self, node: int) -> bool:
        return self._odds[node] > self._node_bound

    def _cleared(self, node: int) -> bool:
        """Clear a node by its tests alone: where faults are commoner than assumed, the prior must not clear it."""
        return self._odds[node] - _log_odds(self.rates.slow_node) < -self._node_bound

    def _trusted(self, node: int) -> bool:
        return self._odds[node] < _log_odds(self.rates.slow_node)

    def _link_slow(self, link: Pair) -> bool:
        """A link is to blame only when both its ends are not."""
        bound = math.log(max(self.tests, 1) / self.rates.error)
        return self._links[link] > bound and self._trusted(link[0]) and self._trusted(link[1])

    def _may_meet(self, one: int, other: int) -> bool:
        link = (min(one, other), max(one, other))
        return one != other and not (link in self._links and self._link_slow(link))

    def _open_links(self) -> list[Pair]:
        """Links that failed, between nodes that pass elsewhere, and that are not decided."""
        return [
            link
            for link, odds in self._links.items()
            if self._trusted(link[0])
            and self._trusted(link[1])
            and odds > _log_odds(self.rates.slow_link) + math.log(self.rates.error)
            and not self._link_slow(link)
        ]

    def _pair(self, free: Sequence[int], wanted: Sequence[int], links: Sequence[Pair]) -> tuple[Pair, ...]:
        """Pair suspects with nodes that are none, open links once more, and the undecided among themselves."""
        left = set(free)
        pairs: list[Pair] = []

        def take(one: int, other: int | None) -> None:
            if other is not None:
                left.difference_update((one, other))
                pairs.append((min(one, other), max(one, other)))

        neutral = _log_odds(self.rates.slow_node)
        suspects = sorted((node for node in wanted if self._odds[node] > neutral), key=lambda node: -self._odds[node])
        beyond_doubt = [node for node in free if self._odds[node] <= neutral]
        for node in suspects:
            take(node, self._partner(node, beyond_doubt, left))
        for one, other in links:
            if one in left and other in left:
                take(one, other)
        # Two suspects that fail again teach nothing new of either: they meet only as strangers.
        doubted = [node for node in suspects if node in left]
        for node in doubted:
            if node in left:
                take(node, self._partner(node, doubted, left, strangers=True))
        undecided = [node for node in wanted if self._odds[node] <= neutral and node in left]
        others = [node for node in free if self._odds[node] <= neutral and node in left]
        for node in undecided:
            if node in left:
                take(node, self._first(node, undecided, others, left))
        return tuple(pairs)

    def _first(self, node: int, undecided: list[int], others: list[int], left: set[int]) -> int | None:
        """Find a stranger among those who need a test as well, then among all, then anybody."""
        for pool, strangers in ((undecided, True), (others, True), (others, False)):
            partner = self._partner(node, pool, left, strangers)
            if partner is not None:
                return partner
        return None

    def _partner(self, node: int, pool: list[int], left: set[int], strangers: bool = False) -> int | None:
        """Find one that is still free, best one not met before; `pool` is used up from its end."""
        while pool and pool[-1] not in left:
            pool.pop()
        near = [other for other in pool[: -LOOK_AHEAD - 1 : -1] if other in left and self._may_meet(node, other)]
        stranger = next((other for other in near if other not in self._met[node]), None)
        return stranger if stranger is not None or strangers or not near else near[0]


def _either(one: float, other: float) -> float:
    return 1 - (1 - one) * (1 - other)


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _probability(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds)) if log_odds > -700 else 0.0


# Runs the search by pairs on one rank: every rank holds the same schedule and sees the same times.


def search(me: Rank, plan: SearchPlan) -> None:
    """Search until all ranks are decided or the time budget is spent; one rank of each host writes what was found."""
    schedule = Search(me.world, seed=plan.seed)
    everyone = tuple(range(me.world))
    world = measure.side_of(me, ops.OPS["all_reduce"], 4, (everyone,))
    assert world is not None  # noqa: S101 - every rank is in the group of all
    measure.meet(me, world)  # NCCL asks that all ranks open a group before two of them use it alone
    best, seen = [float("inf")] * me.world, list[float]()
    started = time.monotonic()
    while measure.slowest(me, time.monotonic() - started) < me.plan.budget_seconds and (pairs := schedule.next_round()):
        seconds = _round(me, plan, pairs)
        for pair, taken in seconds.items():
            seen.append(taken)
            for rank in pair:
                best[rank] = min(best[rank], taken)
        # The lower middle: of two pairs the faster one says what is normal.
        schedule.report([pair for pair, taken in seconds.items() if taken > plan.slower_than * median_low(seen)])
    found = schedule.verdict()
    if measure.speaks():
        me.journal.write(
            "searched",
            slow_ranks=found.slow_nodes,
            **asdict(found),
            bytes=ops.moved_bytes(ops.OPS["send_recv"], plan.bytes, 2),
            pair_seconds=median_low(seen),
            rank_seconds=[seconds if seconds < float("inf") else 0.0 for seconds in best],
        )


def _round(me: Rank, plan: SearchPlan, pairs: tuple[Pair, ...]) -> dict[Pair, float]:
    """Test all pairs at once; gives the seconds of each pair's slower side."""
    op, mine = ops.OPS["send_recv"], next((pair for pair in pairs if me.rank in pair), None)
    me.pulse.arrive(f"pairs of {plan.bytes} bytes")
    taken: list[float] = [0.0] * plan.iterations
    if mine is not None:
        group = measure.group_of(me, tuple(range(me.world)))
        side = ops.allocate(op, plan.bytes, group, mine, me.rank, me.device)
        op.run(side)
        for index in range(plan.iterations):
            began = measure.mark(me)
            op.run(side)
            taken[index] = measure.between(me, began, measure.mark(me))
    times = measure.no_times(me)
    measure.share(me, times, taken, [0.0] * plan.iterations, ())
    return {pair: max(median(times.runs[rank]) for rank in pair) for pair in pairs}
