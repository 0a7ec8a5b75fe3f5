"""The expected bus bandwidth of a collective on healthy machines over given paths: an interval with its sources.

One model covers every fabric: t = W / (B x e) + start + steps x step. W: bytes that each rank sends. B: rate of the
slowest link on the path. e: fraction of B that healthy machines were measured to reach. Bus bandwidth is W / t
(nccl-tests doc/PERFORMANCE.md). The low end uses the smallest e and the slowest steps, the high end the opposite.
`factors.toml` has the values of e with their sources. `make expect` compares the model with results that were not used
to fit it, and reports its error rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from contracts.finding import Interval
from contracts.tables import read_table
from hardware.units import GIGA

Range = tuple[float, float, float]  # least, usual, most


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Fractions of NCCL's planned rate, and latencies in seconds.

    `factors.toml` describes each factor and its source.
    """

    gather: tuple[float, float]
    reduce: tuple[float, float]
    ring_margin: tuple[float, float]
    volta: float
    volta_least: float
    nvls_hopper: Range
    nvls_blackwell: Range
    nvls_blackwell_large: Range
    nvls_tree_least: float
    pcie: Range
    shared_memory: Range
    rdma: Range
    rdma_host: Range
    own_copy: float
    sockets: tuple[tuple[float, float], tuple[float, float], float]
    start_seconds: tuple[float, float]
    step_seconds: tuple[float, float]
    step_seconds_between: tuple[float, float]
    nvls_rank_seconds: tuple[float, float]
    source: str = "factors: topology/expected.py; `make expect` holds them against published results"

    def ring(self, op: str, ranks: int) -> float:
        """Return the typical fraction of NCCL's planned NVLink rate that a ring of `ranks` reaches."""
        a, b = self.reduce if op == "all_reduce" else self.gather
        return 1 / (a + b / (ranks - 1))

    def generation(self, capability: tuple[int, int] | None) -> float:
        """Return the correction for an NVLink generation (Volta) whose planned rate differs more from the real rate."""
        return self.volta if capability is not None and (7, 0) <= capability < (7, 5) else 1.0


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


FACTORS = Factors(**{name: _to_tuples(value) for name, value in read_table(__file__, "factors.toml").items()})
OPS = ("all_gather", "reduce_scatter", "all_reduce")  # collectives that can be compared with a bar
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # how often a ring transfers all data
NVLS_LEAST_RANKS = 5  # NCCL uses the ring for up to four GPUs per tray: 0.86 to 0.94 of it, aiconfigurator, 4 ranks
_LARGE_NVLS = 8 << 30  # bytes
_CLOSE = 0.95  # if the slower of ring and NVLS reaches this fraction of the faster, NCCL may select either
_WAITS = 2 / 3  # below this fraction of a ring's rate, latency dominates and NCCL's own model rejects the ring
_ENDLESS = 1 << 60  # bytes; so large that latency does not matter
_LOOSEST = 1.2  # relative uncertainty of a link above which no typical value is given: NVLink 4 and 5 differ by 1.9
FAILS_BELOW = 0.5  # of the low end: the job would take twice as long as on the slowest healthy machine


def nvls_share(ranks: int) -> float:
    """Return the bus bandwidth of NVLS with `ranks` GPUs, as a fraction of that with eight.

    Each GPU sends its data S to the switch, and sends the sum of its part, S / n, back to all: S (n + 1) / n over its
    links. Bus bandwidth counts 2 S (n - 1) / n. NVIDIA's measurements on H200 confirm this: 414, 436, 460 and 480 GB/s
    for 5, 6, 7 and 8 GPUs (stas00/ml-engineering). There is no gain beyond eight (coreweave/nccl-tests, 72).
    """
    return min(1.0, (2 * (ranks - 1) / (ranks + 1)) / (2 * 7 / 9))


def rate_between(low: float, high: float) -> Interval:
    """Return the interval of a rate with known bounds, in bytes per second; the middle is their geometric mean."""
    return Interval(low=low, mid=math.sqrt(low * high), high=high)


def exact_rate(value: float) -> Interval:
    """Return the interval of an exactly known rate, in bytes per second."""
    return Interval(low=value, mid=value, high=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The links between the ranks of a collective, or of one host; rates are in bytes per second per direction.

    A group is a set of GPUs connected by `inside`: those of one host, or of an NVLink domain across hosts.
    """

    groups: int = 1
    inside: str | None = None  # "NVSwitch", "NVLink", "PCIe", "shared memory", "PCIe or shared memory"; None: unknown
    link: Interval | None = None  # per GPU into its group: NCCL's planned NVLink rate, or PCIe link rate
    capability: tuple[int, int] | None = None
    nvls: bool | None = False  # whether the switch can reduce: capability 9.0 and NCCL 2.17; None: unknown
    between: str | None = None  # "RDMA", "RDMA without GPUDirect", "sockets"; None: one group, or unknown
    wire: Interval | None = None  # from one group to the others: all NICs of its ranks together
    domain: str | None = None  # per host: the NVLink domain that its GPUs share with other hosts
    sources: tuple[str, ...] = ()  # of these values

    def ranks_per_group(self, ranks: int) -> int:
        """Number of ranks in the largest group."""
        return -(-ranks // self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBandwidth:
    """Expected bus bandwidth of a healthy run in bytes per second, with its derivation."""

    interval: Interval
    algorithm: str  # "ring", "NVLS", "NVLS tree or ring"
    derivation: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return "332 GB/s (278 to 385)"."""
        rate = self.interval
        return f"{rate.mid / GIGA:.4g} GB/s ({rate.low / GIGA:.4g} to {rate.high / GIGA:.4g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownBandwidth:
    """The reason that there is no expected value; with the range that the links allow, if known."""

    why: str
    range: Interval | None = None

    def describe(self) -> str:
        """Return "unknown, between 9 and 53 GB/s: the speed of one NVLink is not known"."""
        between = f", between {self.range.low / GIGA:.3g} and {self.range.high / GIGA:.3g} GB/s" if self.range else ""
        return f"unknown{between}: {self.why}"


@dataclass(frozen=True, slots=True)
class _Run:
    """One collective, with everything that determines its bandwidth."""

    paths: Paths
    op: str
    size_bytes: int
    ranks: int
    factors: Factors

    @property
    def per_group(self) -> int:
        return self.paths.ranks_per_group(self.ranks)


def expect_bandwidth(
    paths: Paths, operation: str, size_bytes: int, ranks: int, *, factors: Factors = FACTORS, ring: bool = False
) -> ExpectedBandwidth | UnknownBandwidth:
    """Return the expected bandwidth of `operation` with `ranks` ranks over these paths.

    `paths` contains the link rates of NCCL's plan; `size_bytes` is S as in nccl-tests. If `ring` is set, the result is
    for the ring algorithm, even if NCCL might select another.
    """
    if operation not in _PASSES:
        return UnknownBandwidth(why=f"no model for {operation}")
    if ranks < 2:
        return UnknownBandwidth(why="one rank alone sends nothing")
    run = _Run(paths, operation, size_bytes, ranks, factors)
    if run.per_group > 1 and (paths.link is None or paths.link.low <= 0):
        return UnknownBandwidth(why="what the GPUs of a host carry among themselves is not known")
    if paths.groups > 1 and (paths.between is None or paths.wire is None or paths.wire.low <= 0):
        return UnknownBandwidth(why="what joins the hosts is not known")
    result = _expect_ring(run) if ring or operation != "all_reduce" else _expect_all_reduce(run)
    if any(rate is not None and rate.high > _LOOSEST * rate.low for rate in (paths.link, paths.wire)):
        return UnknownBandwidth(why="; ".join(paths.sources), range=result.interval)
    return result


def _expect_all_reduce(run: _Run) -> ExpectedBandwidth:
    paths, ring = run.paths, _expect_ring(run)
    switch = paths.nvls is not False and run.per_group >= NVLS_LEAST_RANKS
    if paths.groups == 1 and not switch:
        return ring
    if paths.groups == 1:
        slow, fast = (run.ranks * seconds for seconds in run.factors.nvls_rank_seconds)
        other = _add_latency(run, [_bound_nvls(run)], "NVLS", (slow, fast))
    else:
        other = _expect_tree(run, switch=switch)
    # Two nodes with NVLS: all published Hopper results use the NVLS tree; none is known for Blackwell.
    alone = paths.groups == 1 and ring.interval.mid < _CLOSE * other.interval.mid
    sure = alone or (paths.groups == 2 and switch and (paths.capability or (0, 0)) < (10, 0))
    if sure and (not switch or paths.nvls):
        return other
    # NCCL selects an algorithm with its own cost model, whose result is unknown here. Only one fact is certain: latency
    # slows down a ring of hundreds of ranks but not a tree, and the model knows this (src/graph/tuning.cc).
    options = [ring, other]
    if paths.groups > 1 and switch and not paths.nvls:
        options.append(_expect_tree(run, switch=False))
    unhurried = _expect_ring(_Run(paths, run.op, _ENDLESS, run.ranks, run.factors))
    if paths.groups > 1 and ring.interval.mid < min(_WAITS * unhurried.interval.mid, other.interval.mid):
        del options[0]
    usual = [each.interval.mid for each in options]
    return ExpectedBandwidth(
        interval=Interval(
            low=min(each.interval.low for each in options),
            mid=max(usual) if sure else usual[0],
            high=max(each.interval.high for each in options),
        ),
        algorithm=" or ".join(each.algorithm for each in options),
        derivation=tuple(dict.fromkeys(line for each in options for line in each.derivation)),
    )


@dataclass(frozen=True, slots=True)
class _Bound:
    """The rate limit of one part of the path, without latency."""

    rate: Interval
    text: str  # how it follows from the link's rate


def _bound_by_part(name: str, rate: Interval, lowest: float, usual: float, highest: float) -> _Bound:
    """Multiply a link rate by the fractions that healthy machines were measured to reach."""
    return _Bound(
        Interval(low=rate.low * lowest, mid=rate.mid * usual, high=rate.high * highest),
        f"{name}: {_format_rate(rate)} x {lowest:.2f} to {highest:.2f}, usually {usual:.2f}",
    )


def _format_rate(rate: Interval) -> str:
    return f"{rate.low / GIGA:.4g}" + (f" to {rate.high / GIGA:.4g}" if rate.high > rate.low else "") + " GB/s"


def _expect_ring(run: _Run) -> ExpectedBandwidth:
    bounds = []
    if run.per_group > 1 and run.paths.link:
        bounds.append(_bound_inside(run, run.paths.link))
    if run.paths.groups > 1 and run.paths.wire:
        bounds.append(_bound_between(run, run.paths.wire))
    slow, usual = run.factors.step_seconds if run.paths.groups == 1 else run.factors.step_seconds_between
    start, steps = run.factors.start_seconds, _PASSES[run.op] * (run.ranks - 1)
    return _add_latency(run, bounds, "ring", (start[0] + steps * slow, start[1] + steps * usual))


def _bound_inside(run: _Run, link: Interval) -> _Bound:
    factors, inside = run.factors, run.paths.inside
    if inside in ("NVSwitch", "NVLink"):
        generation = factors.generation(run.paths.capability)
        usual = factors.ring(run.op, run.ranks) * generation
        lowest, highest = factors.ring_margin
        lowest = lowest if generation == 1.0 else min(lowest, factors.volta_least)
        return _bound_by_part(inside, link, usual * lowest, usual, usual * highest)
    if inside in ("PCIe", "shared memory"):
        return _bound_by_part(inside, link, *(factors.pcie if inside == "PCIe" else factors.shared_memory))
    (lowest, slow, _), (_, fast, highest) = factors.shared_memory, factors.pcie  # unknown which of the two is used
    return _bound_by_part(str(inside), link, lowest, math.sqrt(slow * fast), highest)


def _bound_between(run: _Run, wire: Interval) -> _Bound:
    if run.paths.between == "sockets":
        return _bound_sockets(wire, run.factors)
    without_gdr = run.paths.between == "RDMA without GPUDirect"
    lowest, usual, highest = run.factors.rdma_host if without_gdr else run.factors.rdma
    if run.op != "all_reduce":  # out of place, each rank also copies its own part
        lowest /= 1 + run.factors.own_copy / (run.ranks - 1)
    return _bound_by_part(str(run.paths.between), wire, lowest, usual, highest)


def _bound_sockets(wire: Interval, factors: Factors) -> _Bound:
    """Return the limit of TCP: a few streams saturate a slow network, but not a fast one."""

    def carried(line: float, share: float, streams: float) -> float:
        return 1 / (1 / (share * line) + 1 / streams)

    lowest, usual, highest = factors.sockets
    return _Bound(
        Interval(low=carried(wire.low, *lowest), mid=carried(wire.mid, *usual), high=wire.high * highest),
        f"sockets: {_format_rate(wire)} of wire, streams carry {lowest[1] / GIGA:.2g} to {usual[1] / GIGA:.2g} GB/s",
    )


def _bound_nvls(run: _Run) -> _Bound:
    share = nvls_share(run.per_group)
    fractions = run.factors.nvls_hopper
    if (run.paths.capability or (0, 0)) >= (10, 0):
        large = run.size_bytes >= _LARGE_NVLS
        fractions = run.factors.nvls_blackwell_large if large else run.factors.nvls_blackwell
    lowest, usual, highest = (fraction * share for fraction in fractions)
    return _bound_by_part("NVLS", run.paths.link or exact_rate(0.0), lowest, usual, highest)


def _expect_tree(run: _Run, *, switch: bool) -> ExpectedBandwidth:
    """All-reduce by a tree over the groups: S crosses the network once per direction for two groups, twice for more."""
    paths, factors, bounds = run.paths, run.factors, []
    link = paths.link or exact_rate(0.0)
    if switch:
        bound = _bound_nvls(run)
        low = min(bound.rate.low, link.low * factors.nvls_tree_least)
        bounds.append(replace(bound, rate=replace(bound.rate, low=low)))
    elif run.per_group > 1 and paths.link:
        bounds.append(_bound_inside(run, link))
    wire = _bound_between(run, paths.wire or exact_rate(0.0))
    once = 2 * (run.ranks - 1) / run.ranks if paths.groups == 2 else 1.0
    text = f"{wire.text}; a tree sends S over the wire, the formula counts {once:.2f} S"
    bounds.append(_Bound(wire.rate.scaled(once), text))
    # up and down the tree over the groups, and along the ranks of one group
    depth, along = 2 * math.ceil(math.log2(paths.groups)), 2 * (run.per_group - 1)
    slow, typical = (
        factors.start_seconds[index] + depth * factors.step_seconds_between[index] + along * factors.step_seconds[index]
        for index in (0, 1)
    )
    return _add_latency(run, bounds, "NVLS tree" if switch else "tree", (slow, typical))


def _add_latency(run: _Run, bounds: list[_Bound], algorithm: str, latency: tuple[float, float]) -> ExpectedBandwidth:
    """Combine the lowest rate limit with the latency (slow, typical), in seconds, of the start and all steps."""
    moved = run.size_bytes * _PASSES[run.op] * (run.ranks - 1) / run.ranks
    (slow, typical), rates = latency, [bound.rate for bound in bounds]

    def reached(rate: float, seconds: float) -> float:
        return moved / (moved / rate + seconds) if rate > 0 and moved else 0.0

    usual = min(rate.mid for rate in rates)
    low, high = reached(min(rate.low for rate in rates), slow), min(rate.high for rate in rates)
    result = ExpectedBandwidth(interval=Interval(low=low, mid=reached(usual, typical), high=high), algorithm=algorithm)
    waits = f"latency {typical * 1e6:.0f} to {slow * 1e6:.0f} us of {moved / usual * 1e6:.0f} us"
    derivation = (*run.paths.sources, *(bound.text for bound in bounds), waits, f"by {algorithm}: {result.describe()}")
    return replace(result, derivation=(*derivation, run.factors.source))
