"""What a collective reaches over given links: an interval, with its source, by ranks, operation, bytes and algorithm.

One model for every fabric: t = W / (B x e) + start + steps x step, with W the bytes that each rank sends, B what the
slowest link on the way carries and e the part of it that healthy machines were measured to reach. bus bandwidth is W
/ t (nccl-tests doc/PERFORMANCE.md). The low end takes the least e and the slowest steps, the high end the other way
about. The figures of e stand first, with their sources; `make expect` holds them against results that they were not
made from, and says how often they are wrong. "aic" is ai-dynamo/aiconfigurator@095f58a51, nccl_perf.parquet, 2, 4 and
8 GPUs to 512 MiB; the other sources are named by repository.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hardware.units import GIGA

MICROSECOND = 1e-6
Three = tuple[float, float, float]  # least, usual, most


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Parts of NCCL's plan, and seconds of latency."""

    # 1 / e = a + b / (n - 1): b is the copy of a rank's own part, which a ring of two feels most.
    gather: tuple[float, float]
    reduce: tuple[float, float]
    ring_margin: tuple[float, float]  # of e: least, most
    volta: float  # NVLink 2 reaches more of NCCL's 20 GB/s than later ones do of theirs
    volta_least: float  # of e, as ring_margin's least: what operators of hybrid cube meshes accept
    nvls_hopper: Three
    nvls_blackwell: Three
    nvls_blackwell_large: Three  # the same of 8 GiB and more
    nvls_tree_least: float
    pcie: Three
    shared_memory: Three
    rdma: Three
    rdma_host: Three
    own_copy: float  # of all-gather and reduce-scatter over a wire, by 1 / (n - 1)
    sockets: tuple[tuple[float, float], tuple[float, float], float]  # (share, streams) least and usual; most
    start_seconds: tuple[float, float]  # slow, usual: kernel launch and first synchronisation
    step_seconds: tuple[float, float]  # slow, usual: of each step of a ring in one host
    step_seconds_between: tuple[float, float]  # the same where hosts are crossed
    nvls_rank_seconds: tuple[float, float]  # slow, usual: of NVLS, by rank
    source: str = "factors: topology/reach.py; `make expect` holds them against published results"

    def ring(self, op: str, ranks: int) -> float:
        """The usual part of NCCL's NVLink plan that a ring of so many ranks reaches."""
        a, b = self.reduce if op == "all_reduce" else self.gather
        return 1 / (a + b / (ranks - 1))

    def generation(self, capability: tuple[int, int] | None) -> float:
        """A generation of NVLink whose plan is further from the wire than the others'."""
        return self.volta if capability is not None and (7, 0) <= capability < (7, 5) else 1.0


# `bench/expect.py --fit` prints these from the rows; what is not fitted says where it is from.
FACTORS = Factors(
    # aic: A100, H100, H200, B200, B300, GB200, GB300, by 2, 4, 8 ranks: all-gather 0.64, 0.82, 0.90 of plan.
    gather=(1.05, 0.56),
    # aic: 0.79, 0.93, 0.93; Blackwell and Hopper with 8 ranks take NVLS and are not counted.
    reduce=(0.99, 0.34),
    ring_margin=(0.85, 1.29),
    volta=1.18,  # Panlichen/nccl-tests v100_8card_para: 126 to 135 of 120
    volta_least=0.80,  # not fitted. Azure/azurehpc-health-checks accepts 110 of 8 x V100 (ND40rs_v2); usual is 136
    # aic 445 to 461 at 512 MiB, NVIDIA/nccl#2140 480, #1221 430, of 370.8; without NVLS 330 to 370.
    nvls_hopper=(1.13, 1.27, 1.43),
    # aic 684 to 704 at 512 MiB; NVIDIA/nccl#2140 845; cluster-readiness-engine 838 to 923, of 721.8; without 695.
    nvls_blackwell=(0.98, 1.11, 1.32),
    # Not fitted. At 8 GiB and more every source has 835 and more of 721.8: NVIDIA/nccl#2140, coreweave/nccl-tests,
    # cluster-readiness-engine, stas00/ml-engineering, whose sweep on one node reads 723, 741, 846 at 1, 4, 16 GiB.
    nvls_blackwell_large=(1.03, 1.17, 1.32),
    # Not fitted. Two nodes of 8 x H100: 430 to 488 (aws-do-eks, NVIDIA/nccl#1221), without NVLS 330.
    nvls_tree_least=1.04,
    # Panlichen/nccl-tests a100_8card, aic rtx_pro_6000_server, JingchaoZhang NC96ads, l40s with 2 GPUs.
    pcie=(0.45, 0.67, 1.35),
    # GeForce without peer access: Panlichen/nccl-tests 4090_2card_para 0.37, NVIDIA/nccl#1639 0.58 and 0.73.
    shared_memory=(0.30, 0.51, 0.92),
    # cluster-readiness-engine 191 of 200 and 376 of 400; 80 % is what AICR and others ask for (facts of peers).
    rdma=(0.80, 0.95, 1.03),
    # Not fitted. NVIDIA/nccl#412: 16 GB/s of 24 with the NIC at the CPU; g4dn.metal (aws-do-eks) 3.1 of 12.5.
    rdma_host=(0.20, 0.45, 1.00),
    own_copy=0.30,  # not fitted: A4, one GPU and NIC a pod (kubernetes-sigs/dranet): 36.7 out of place, 45.1 in place
    # Not fitted. One stream of TCP carries 2 GB/s and more on servers of today; NVIDIA/nccl#209: 60 % of 32 Gb/s.
    sockets=((0.60, 2.0 * GIGA), (0.92, 10.0 * GIGA), 0.98),
    # Not fitted: aic, the difference between 8 MiB and 512 MiB: 12 us and 5 us a step; NVIDIA/nccl#1218 (256 GPUs):
    # 19 us a step.
    start_seconds=(20 * MICROSECOND, 12 * MICROSECOND),
    step_seconds=(8 * MICROSECOND, 5 * MICROSECOND),
    step_seconds_between=(16 * MICROSECOND, 8 * MICROSECOND),
    nvls_rank_seconds=(20 * MICROSECOND, 11 * MICROSECOND),  # aic; coreweave/nccl-tests, 72 and 144 GPUs
)


OPS = ("all_gather", "reduce_scatter", "all_reduce")
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # times that a ring passes every byte on
NVLS_LEAST_RANKS = 5  # four GPUs of a tray and fewer take the ring: 0.86 to 0.94 of it, aiconfigurator, 4 ranks
_LARGE_NVLS = 8 << 30  # bytes
_CLOSE = 0.95  # the slower of ring and NVLS over the faster one: nearer than this, tuners take either
_WAITS = 2 / 3  # of a ring's rate: below this latency takes so much that NCCL's own model leaves the ring
_ENDLESS = 1 << 60  # bytes, of which latency takes no part


def nvls_share(ranks: int) -> float:
    """Bus bandwidth of NVLS with so many GPUs, as a part of what eight reach.

    Each GPU sends its S to the switch, and the sum of its own part, S / n, back to all: S (n + 1) / n through its
    links, for which bus bandwidth counts 2 S (n - 1) / n. NVIDIA's measurements on H200 follow it: 414, 436, 460 and
    480 GB/s of 5, 6, 7 and 8 GPUs (stas00/ml-engineering). Beyond eight no more is seen (coreweave/nccl-tests, 72).
    """
    return min(1.0, (2 * (ranks - 1) / (ranks + 1)) / (2 * 7 / 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A rate that is known within bounds; both ends alike where it is known. Bytes per second, each way."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Between the two ends, by ratio."""
        return math.sqrt(self.low * self.high)


def span(value: float) -> Span:
    """A rate that is known."""
    return Span(low=value, high=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """What joins the ranks of one collective.

    A group is what `inside` joins: the GPUs of a host, or of an NVLink domain that spans hosts.
    """

    ranks: int
    groups: int = 1
    inside: str | None = None  # "NVSwitch", "NVLink", "PCIe", "shared memory", "PCIe or shared memory"; None: unknown
    link: Span | None = None  # of each GPU into its group: NCCL's plan of its NVLinks, or of its PCIe link
    capability: tuple[int, int] | None = None
    nvls: bool | None = False  # the switch can reduce: capability 9.0 and NCCL 2.17; None: not known
    between: str | None = None  # "RDMA", "RDMA without GPUDirect", "sockets"; None: one group, or unknown
    wire: Span | None = None  # one group to the others, all NICs of its ranks together
    words: tuple[str, ...] = ()  # where these come from

    @property
    def ranks_per_group(self) -> int:
        """Of the fullest group."""
        return -(-self.ranks // self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The bus bandwidth of a healthy run: bytes per second."""

    low: float
    typical: float
    high: float
    algorithm: str  # "ring", "NVLS", "NVLS tree or ring"
    derivation: tuple[str, ...]

    def words(self) -> str:
        """ "332 GB/s (278 to 385)"."""
        return f"{self.typical / GIGA:.4g} GB/s ({self.low / GIGA:.4g} to {self.high / GIGA:.4g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """No interval, and why; with the range that the links leave, where there is one."""

    why: str
    range: Span | None = None

    def words(self) -> str:
        """ "unknown, between 9 and 53 GB/s: the speed of one NVLink is not known"."""
        between = f", between {self.range.low / GIGA:.3g} and {self.range.high / GIGA:.3g} GB/s" if self.range else ""
        return f"unknown{between}: {self.why}"


def expect(paths: Paths, op: str, size_bytes: int, factors: Factors = FACTORS) -> Interval | Unknown:
    """What `op` with S = `size_bytes` (as nccl-tests counts it) reaches over these paths."""
    if op not in _PASSES:
        return Unknown(why=f"no model for {op}")
    if paths.ranks < 2:
        return Unknown(why="one rank alone sends nothing")
    missing = _missing(paths)
    if missing:
        return Unknown(why=missing)
    found = _all_reduce(paths, size_bytes, factors) if op == "all_reduce" else _ring(paths, op, size_bytes, factors)
    loosest = max(each.high / each.low for each in (paths.link, paths.wire) if each) if _loose(paths) else 1.0
    if loosest > _LOOSEST:
        return Unknown(why="; ".join(paths.words), range=Span(low=found.low, high=found.high))
    return found


_LOOSEST = 1.2  # a link known less well than this gives no typical value: NVLink 4 or 5 differ by 1.9


def _loose(paths: Paths) -> bool:
    return any(each is not None and each.high > each.low for each in (paths.link, paths.wire))


def _missing(paths: Paths) -> str:
    if paths.ranks_per_group > 1 and (paths.link is None or paths.link.low <= 0):
        return "what the GPUs of a host carry among themselves is not known"
    if paths.groups > 1 and (paths.between is None or paths.wire is None or paths.wire.low <= 0):
        return "what joins the hosts is not known"
    return ""


def ring(paths: Paths, op: str, size_bytes: int, factors: Factors = FACTORS) -> Interval:
    """The interval where NCCL takes the ring, whatever else it might take."""
    return _ring(paths, op, size_bytes, factors)


def _all_reduce(paths: Paths, size_bytes: int, factors: Factors) -> Interval:
    plain = _ring(paths, "all_reduce", size_bytes, factors)
    switch = paths.nvls is not False and paths.ranks_per_group >= NVLS_LEAST_RANKS
    if paths.groups == 1 and not switch:
        return plain
    other = _nvls(paths, size_bytes, factors) if paths.groups == 1 else _tree(paths, size_bytes, factors, switch=switch)
    # Two nodes with NVLS: every published pair of Hopper takes its tree; of Blackwell none is known.
    alone = paths.groups == 1 and plain.typical < _CLOSE * other.typical
    sure = alone or (paths.groups == 2 and switch and (paths.capability or (0, 0)) < (10, 0))
    if sure and (not switch or paths.nvls):
        return other
    # NCCL chooses by its own model of all; which one it takes is in no fact that we have. A ring of hundreds of ranks
    # waits for its latency and a tree does not: that much the model sees (src/graph/tuning.cc).
    found = [plain, other]
    if paths.groups > 1 and switch and not paths.nvls:
        found.append(_tree(paths, size_bytes, factors, switch=False))
    waits = plain.typical < _WAITS * _ring(paths, "all_reduce", _ENDLESS, factors).typical
    if paths.groups > 1 and waits and plain.typical < other.typical:
        del found[0]
    return Interval(
        low=min(each.low for each in found),
        typical=max(each.typical for each in found) if sure else found[0].typical,
        high=max(each.high for each in found),
        algorithm=" or ".join(each.algorithm for each in found),
        derivation=tuple(dict.fromkeys(words for each in found for words in each.derivation)),
    )


def _ring(paths: Paths, op: str, size_bytes: int, factors: Factors) -> Interval:
    bounds = []
    if paths.ranks_per_group > 1 and paths.link:
        bounds.append(_inside(paths, op, paths.link, factors))
    if paths.groups > 1 and paths.wire:
        bounds.append(_between(paths, op, paths.wire, factors))
    return _timed(paths, op, size_bytes, bounds, factors, algorithm="ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """What one stretch of the way lets through, before latency."""

    low: float
    typical: float
    high: float
    words: str


def _inside(paths: Paths, op: str, link: Span, factors: Factors) -> _Bound:
    if paths.inside in ("NVSwitch", "NVLink"):
        e = factors.ring(op, paths.ranks) * factors.generation(paths.capability)
        least, most = factors.ring_margin
        if factors.generation(paths.capability) != 1.0:
            least = min(least, factors.volta_least)
    else:
        least_e, e, most_e = _through_hosts(paths.inside, factors)
        least, most = least_e / e, most_e / e
    words = f"{paths.inside}: {_rate(link)} x {e * least:.2f} to {e * most:.2f}, usually {e:.2f}"
    return _Bound(low=link.low * e * least, typical=link.middle * e, high=link.high * e * most, words=words)


def _through_hosts(inside: str | None, factors: Factors) -> tuple[float, float, float]:
    if inside == "PCIe":
        return factors.pcie
    if inside == "shared memory":
        return factors.shared_memory
    (least, slow, _), (_, fast, most) = factors.shared_memory, factors.pcie  # either of them
    return least, math.sqrt(slow * fast), most


def _between(paths: Paths, op: str, wire: Span, factors: Factors) -> _Bound:
    if paths.between == "sockets":
        return _sockets(wire, factors)
    least, e, most = factors.rdma_host if paths.between == "RDMA without GPUDirect" else factors.rdma
    if op != "all_reduce":  # out of place, each rank copies its own part as well
        least /= 1 + factors.own_copy / (paths.ranks - 1)
    words = f"{paths.between}: {_rate(wire)} x {least:.2f} to {most:.2f}, usually {e:.2f}"
    return _Bound(low=wire.low * least, typical=wire.middle * e, high=wire.high * most, words=words)


def _sockets(wire: Span, factors: Factors) -> _Bound:
    """By what one or several streams of TCP carry: few of them fill a slow wire and not a fast one."""

    def carried(line: float, share: float, streams: float) -> float:
        return 1 / (1 / (share * line) + 1 / streams)

    (low_share, low_streams), (share, streams), most = factors.sockets
    return _Bound(
        low=carried(wire.low, low_share, low_streams),
        typical=carried(wire.middle, share, streams),
        high=wire.high * most,
        words=f"sockets: {_rate(wire)} of wire, streams carry {low_streams / GIGA:.2g} to {streams / GIGA:.2g} GB/s",
    )


def _nvls(paths: Paths, size_bytes: int, factors: Factors) -> Interval:
    bound = _nvls_bound(paths, factors, size_bytes)
    start = tuple(paths.ranks * each for each in factors.nvls_rank_seconds)
    return _timed(paths, "all_reduce", size_bytes, [bound], factors, algorithm="NVLS", start=start)


def _nvls_bound(paths: Paths, factors: Factors, size_bytes: int) -> _Bound:
    link = paths.link or span(0.0)
    share = nvls_share(paths.ranks_per_group)
    three = factors.nvls_hopper
    if (paths.capability or (0, 0)) >= (10, 0):
        three = factors.nvls_blackwell_large if size_bytes >= _LARGE_NVLS else factors.nvls_blackwell
    least, e, most = (each * share for each in three)
    words = f"NVLS: {_rate(link)} x {least:.2f} to {most:.2f}, usually {e:.2f}"
    return _Bound(low=link.low * least, typical=link.middle * e, high=link.high * most, words=words)


def _tree(paths: Paths, size_bytes: int, factors: Factors, *, switch: bool) -> Interval:
    """All-reduce by a tree over the groups: the wire carries S each way once for two groups, twice for more."""
    bounds = []
    if switch:
        inside = _nvls_bound(paths, factors, size_bytes)
        least = min(inside.low, (paths.link or span(0.0)).low * factors.nvls_tree_least)
        bounds.append(replace(inside, low=least))
    elif paths.ranks_per_group > 1 and paths.link:
        bounds.append(_inside(paths, "all_reduce", paths.link, factors))
    wire = _between(paths, "all_reduce", paths.wire or span(0.0), factors)
    once = 2 * (paths.ranks - 1) / paths.ranks if paths.groups == 2 else 1.0
    bounds.append(
        replace(
            wire,
            low=wire.low * once,
            typical=wire.typical * once,
            high=wire.high * once,
            words=f"{wire.words}; a tree sends S over the wire, the formula counts {once:.2f} S",
        )
    )
    name = "NVLS tree" if switch else "tree"
    return _timed(paths, "all_reduce", size_bytes, bounds, factors, algorithm=name, start=_tree_start(paths, factors))


def _tree_start(paths: Paths, factors: Factors) -> tuple[float, float]:
    """Seconds of latency, slow and usual: up and down the tree over the groups, and along the ranks of a group."""
    depth = 2 * math.ceil(math.log2(paths.groups))
    along = 2 * (paths.ranks_per_group - 1)

    def seconds(at: int) -> float:
        return factors.start_seconds[at] + depth * factors.step_seconds_between[at] + along * factors.step_seconds[at]

    return seconds(0), seconds(1)


def _timed(
    paths: Paths,
    op: str,
    size_bytes: int,
    bounds: list[_Bound],
    factors: Factors,
    *,
    algorithm: str,
    start: tuple[float, ...] | None = None,
) -> Interval:
    """The weakest of the bounds, with the latency of the start and of every step of the ring."""
    moved = size_bytes * _PASSES[op] * (paths.ranks - 1) / paths.ranks
    steps = _PASSES[op] * (paths.ranks - 1)
    slow, usual = factors.step_seconds if paths.groups == 1 else factors.step_seconds_between
    late, soon = start or (factors.start_seconds[0] + steps * slow, factors.start_seconds[1] + steps * usual)

    def reached(pick: Callable[[_Bound], float], latency: float) -> float:
        rate = min(map(pick, bounds))
        return moved / (moved / rate + latency) if rate > 0 and moved else 0.0

    weakest = min(bounds, key=lambda bound: bound.typical)
    made = Interval(
        low=reached(lambda bound: bound.low, late),
        typical=reached(lambda bound: bound.typical, soon),
        high=max(bound.high for bound in bounds) if len(bounds) == 1 else min(bound.high for bound in bounds),
        algorithm=algorithm,
        derivation=(),
    )
    latency = f"latency {soon * 1e6:.0f} to {late * 1e6:.0f} us of {moved / weakest.typical * 1e6:.0f} us"
    bound_words = tuple(bound.words for bound in bounds)
    return replace(
        made, derivation=(*paths.words, *bound_words, latency, f"by {algorithm}: {made.words()}", factors.source)
    )


def _rate(rate: Span) -> str:
    if rate.low == rate.high:
        return f"{rate.low / GIGA:.4g} GB/s"
    return f"{rate.low / GIGA:.4g} to {rate.high / GIGA:.4g} GB/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a measured value stands to an interval."""

    status: str  # "pass", "warn", "fail"
    ratio: float  # of the low end; 1.0 and more is within


def judge(busbw: float, interval: Interval) -> Verdict:
    """By cost: under the low end warns, under half of it fails."""
    ratio = busbw / interval.low if interval.low > 0 else 1.0
    return Verdict(status="pass" if ratio >= 1 else "warn" if ratio >= FAILS_BELOW else "fail", ratio=ratio)


FAILS_BELOW = 0.5  # of the low end: the job waits twice as long as the slowest healthy machine makes it
