"""Sweeps: the best layout for each machine, number of nodes and network, and the points with best time and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from contracts.finding import Interval
from planner.advice import RankedLayout
from planner.forecast import machines
from planner.forecast.specs import ModelSpec, TrainSpec
from planner.recommend import best_layout, plan, unjudged
from planner.search import search
from topology.graph import ClusterTopology


def compare(first: RankedLayout, second: RankedLayout) -> tuple[tuple[str, float, float], ...]:
    """Compare two forecasts by component: (name, seconds of the first, seconds of the second)."""
    left = {part.name: part.value for part in first.forecast.time_parts}
    right = {part.name: part.value for part in second.forecast.time_parts}
    names = dict.fromkeys([*left, *right])
    rows = [(name, left.get(name, 0.0), right.get(name, 0.0)) for name in names]
    return (*rows, ("step", first.forecast.step_seconds.mid, second.forecast.step_seconds.mid))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Machines of one type over one network: time and cost of the training run."""

    machine: str
    nodes: int
    network: str  # "catalogue", "100G tcp"
    ranks: int
    layout: str = ""  # "" if no layout fits
    global_batch: int = 0  # sequences per step
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None
    seconds: Interval | None = None  # of the whole run
    gpu_hours: float | None = None
    cost: Interval | None = None  # None without a price
    best: bool = False  # no other point is both faster and cheaper (without prices: with fewer GPU-hours)
    reason: str = ""  # why no layout fits


def frontier(
    names: Sequence[str], nodes: Sequence[int], networks: Sequence[str | None], model: ModelSpec,
    train: TrainSpec, *, tokens: float, prices: float | Mapping[str, float] | None = None,
    transport: str | None = None, gpus_per_node: int | None = None,
) -> tuple[FrontierPoint, ...]:  # fmt: skip
    """Return the best layout for every machine, number of nodes and network; `tokens` are those of the whole run.

    `prices` are per node-hour, for all machines or by machine; `networks` as for `machines.over_network`, None: the
    machine's own network. Single nodes have no network and appear once. Raises MachineError for an invalid network.
    """
    for network in filter(None, networks):
        machines.network_bytes_per_second(network)
    points = [
        _make_point(machines.cluster(name, count, gpus_per_node=gpus_per_node), machines.machine(name).name,
               (network, transport), model, train, tokens, prices)
        for name in names
        for count in nodes
        for network in (networks if count > 1 else networks[:1])
    ]  # fmt: skip
    spent = {id(p): p.cost.mid if p.cost else p.gpu_hours or math.inf for p in points}
    fits = [p for p in points if p.seconds is not None]
    priced = all(p.cost for p in fits)
    beaten = {
        id(p) for p in fits for q in fits
        if q is not p and q.seconds and p.seconds and q.seconds.mid <= p.seconds.mid
        and spent[id(q)] <= spent[id(p)] and (q.seconds.mid, spent[id(q)]) != (p.seconds.mid, spent[id(p)])
    }  # fmt: skip
    comparable = priced or not any(p.cost for p in fits)
    return tuple(replace(p, best=comparable and p.seconds is not None and id(p) not in beaten) for p in points)


def _make_point(
    cluster: ClusterTopology, name: str, network: tuple[str | None, str | None], model: ModelSpec, train: TrainSpec,
    tokens: float, prices: float | Mapping[str, float] | None,
) -> FrontierPoint:  # fmt: skip
    count, (speed, transport) = len(cluster.nodes), network
    over = "-" if count == 1 else " ".join(filter(None, network)) if speed else "catalogue"
    here = FrontierPoint(machine=name, nodes=count, network=over, ranks=cluster.world_size)
    if speed and count > 1:
        try:
            cluster = machines.over_network(cluster, speed, transport)
        except machines.MachineError as error:
            return replace(here, reason=str(error))
    if reason := unjudged(cluster):
        return replace(here, reason=reason)
    planned = plan(cluster, (), model, train)
    best = best_layout(planned)
    if best is None:
        misses = (row.reason for row in search(planned).rejected if row.rule == "memory-fits")
        return replace(here, reason=next(misses, "no layout is allowed"))  # the smallest excess comes first
    forecast = best.forecast
    step = forecast.step_seconds
    mid = tokens / forecast.tokens_per_second
    seconds = step.scaled(mid / step.mid)
    price = prices.get(name) if isinstance(prices, Mapping) else prices
    cost = None if price is None else seconds.scaled(price * count / 3600.0)
    return replace(
        here, layout=best.layout.family, global_batch=planned.global_batch,
        tokens_per_second=forecast.tokens_per_second, mfu=forecast.mfu,
        memory_bytes=forecast.memory_bytes.mid, seconds=seconds, gpu_hours=mid / 3600.0 * cluster.world_size,
        cost=cost,
    )  # fmt: skip
