"""Simulate `topoflight search`: `python bench/search.py` prints the table of docs/measurements/search.md.

The decisions are those of the product (collectives.search.plan); only transfers are simulated. A transfer takes the
time of its slower end, times a deviation of each node (sigma 0.4 %), times noise. Noise is log-normal (sigma 0.5, 1.5
or 5 %), or in some fleets drawn from measured times (search.toml). 0.5 % of transfers take up to twice as long, and in
0.2 % of its rounds a node is slower by 30 %. The rates of these two events are assumptions: for their causes (a job
that ends late, a re-routed flow) no rates are published, and no GPU network was available to measure them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from collectives.search.plan import Outcome, Search, Test
from contracts.tables import read_table

NODE_SIGMA, RARE_TRANSFER, RARE_NODE = 0.004, 0.005, 0.002
TABLE = read_table(__file__, "search.toml")
MEASURED: list[float] = TABLE["measured"]
KINDS = ("slow", "slow", "slow", "stuck", "dies", "part", "opaque")


class Fault(NamedTuple):
    """A fault of a node."""

    kind: str  # one of KINDS
    excess: float  # of the time, relative to that of a good node
    side: str  # "sends", "receives", "both"


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Nodes with their faults."""

    domains: list[str]
    sigma: float  # of the log of a transfer's time; 0: drawn from measured times
    draw: random.Random
    faults: dict[int, Fault] = field(default_factory=dict)  # by node
    links: dict[tuple[int, int], float] = field(default_factory=dict)  # relative excess time; infinite: stuck
    own: list[float] = field(default_factory=list)  # deviation of each node from the usual time

    def run(self, test: Test, rare: set[int]) -> Outcome:
        """Simulate a test. The nodes in `rare` are slower in this round."""
        kinds = {node: self.faults[node].kind for node in test.nodes if node in self.faults}
        if test.kind == "alone":
            return Outcome(alone=tuple((node, "GPU0 matmul", self.time_alone(node)) for node in test.nodes))
        lost = {node: "dead" for node, kind in kinds.items() if kind == "dies"}
        if "opaque" in kinds.values():
            return Outcome(lost=lost, ended=bool(lost))
        size, transfers, stuck = len(test.nodes), [], []
        for stride in range(1, size):
            for place, source in enumerate(test.nodes):
                target = test.nodes[(place + stride) % size]
                usual = self.time_transfer(source, target, rare)
                if usual == math.inf:
                    stuck.append((source, target))
                else:
                    transfers += [(source, target, -1, usual * self.noise()) for _ in range(test.repeats)]
            if stuck:
                break
        return Outcome(transfers=tuple(transfers), stuck=tuple(stuck), lost=lost)

    def time_alone(self, node: int) -> float:
        """Draw the time of a matrix product."""
        fault = self.faults.get(node)
        return self.draw.gauss(1, 0.02) * (1 + (fault.excess if fault and fault.kind == "part" else 0.0))

    def time_transfer(self, source: int, target: int, rare: set[int]) -> float:
        """Return the usual time of a transfer, which its slower end determines; infinite if no byte moves."""
        ends = (self.excess(source, "sends"), self.excess(target, "receives"))
        excess = max(*ends, self.links.get((source, target), 0.0))
        return (1 + excess) * max(self.own[node] * (1.3 if node in rare else 1.0) for node in (source, target))

    def noise(self) -> float:
        """Draw the time of a transfer as a multiple of its usual time."""
        seconds = math.exp(self.draw.gauss(0, self.sigma)) if self.sigma else self.draw.choice(MEASURED)
        return seconds * (1 + self.draw.random() if self.draw.random() < RARE_TRANSFER else 1.0)

    def excess(self, node: int, side: str) -> float:
        """Return the excess time of a node's transfers on one side (sends or receives)."""
        fault = self.faults.get(node)
        if fault is None or (fault.kind != "dies" and fault.side not in ("both", side)):
            return 0.0
        if fault.kind in ("dies", "stuck"):
            return math.inf
        return fault.excess if fault.kind == "slow" else 0.0


def fleet(row: Mapping[str, Any], seed: int) -> Fleet:
    """Draw a fleet for a row of search.toml."""
    nodes, domain, kinds = row["nodes"], row["domain"], tuple(row.get("kinds", KINDS))
    draw = random.Random(f"{nodes} {row['bad']} {row['links']} {seed} {domain} {kinds}")
    names = [f"rack-{node // domain}" if domain else "" for node in range(nodes)]
    drawn = Fleet(domains=names, sigma=0.0 if row.get("measured") else draw.choice((0.005, 0.015, 0.05)),
                  draw=draw)  # fmt: skip
    drawn.own = [max(0.9, draw.gauss(1, NODE_SIGMA)) for _ in range(nodes)]
    for node in draw.sample(range(nodes), row["bad"]):
        kind = draw.choice(kinds)
        excess = 10 ** draw.uniform(-1.5, 1) if kind == "slow" else draw.uniform(0.3, 2)  # 3 % to 10 times
        drawn.faults[node] = Fault(kind, excess, draw.choice(("both", "sends", "receives")))
    groups = [group for group in Search(names)._group_near(range(nodes)) if len(group) > 2]
    while len(drawn.links) < row["links"]:
        pair = tuple(draw.sample(draw.choice(groups), 2))
        if drawn.faults.keys().isdisjoint(pair):
            drawn.links[pair[0], pair[1]] = draw.choice((float("inf"), draw.uniform(0.5, 5)))
    return drawn


@dataclass(slots=True, kw_only=True)
class Score:
    """The results of all searches of one row."""

    tests: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    accused: list[str] = field(default_factory=list)  # nodes and links without a fault that were called bad
    faults: int = 0
    missed: list[str] = field(default_factory=list)
    hidden: int = 0  # faults below the smallest loss that the search reports as visible
    links: int = 0
    links_missed: list[str] = field(default_factory=list)


def search(fleet: Fleet, name: str, score: Score) -> None:
    """Search a fleet, and add the result to the score."""
    searched = Search(fleet.domains)
    while tests := searched.plan_round():
        rare = {node for node in range(searched.nodes) if fleet.draw.random() < RARE_NODE}
        searched.report([fleet.run(test, rare) for test in tests])
    verdicts = searched.verdicts()
    score.tests.append(searched.tests)
    score.rounds.append(searched.round)
    bad = {verdict.node for verdict in verdicts if verdict.state == "bad"}
    visible = searched.visible_loss() or 1.0
    for node, fault in fleet.faults.items():
        hidden = fault.kind == "slow" and fault.excess / (1 + fault.excess) < visible
        score.faults += not hidden
        score.hidden += hidden
        if node not in bad and not hidden:
            score.missed.append(f"{name}: node {node} {fault} {verdicts[node].state} {verdicts[node].reason}")
    score.accused += [f"{name}: node {n} {verdicts[n]}" for n in sorted(bad - set(fleet.faults))]
    links = {(link.source, link.target) for link in searched.bad_links()}
    score.accused += [f"{name}: link {link}" for link in sorted(links - set(fleet.links))]
    score.links += len(fleet.links)
    score.links_missed += [f"{name}: link {link} {fleet.links[link]}" for link in set(fleet.links) - links]


def simulate(share: float) -> Iterator[tuple[str, Score]]:
    """Run each fleet of search.toml for a share of its runs. A small share leaves out the largest fleets."""
    for name, row in TABLE["fleets"].items():
        score = Score()
        for seed in range(round(row["runs"] * share)):
            search(fleet(row, seed), f"{name} #{seed}", score)
        yield name, score


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the runs of each row (default: 1.0)")
    share = parser.parse_args().share
    columns = ("runs", "tests: median, max", "rounds", "wrongly accused", "missed", "not visible", "links missed")
    print(f"| fleet | {' | '.join(columns)} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row, score in simulate(share):
        if not score.tests:
            continue
        tests, rounds = sorted(score.tests), sorted(score.rounds)
        middles = f"{tests[len(tests) // 2]}, {tests[-1]} | {rounds[len(rounds) // 2]}, {rounds[-1]}"
        print(f"| {row} | {len(tests)} | {middles} "
              f"| {len(score.accused)} | {len(score.missed)} of {score.faults} | {score.hidden} "
              f"| {len(score.links_missed)} of {score.links} |", flush=True)  # fmt: skip
        for line in (*score.accused[:5], *score.missed[:8], *score.links_missed[:5]):
            print(f"  {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
