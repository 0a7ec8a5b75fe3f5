"""What a benchmark leaves behind.

A result that was not verified element by element is not a measurement. Bandwidths follow nccl-tests
(doc/PERFORMANCE.md): algbw = S / t, busbw = algbw x factor; see docs/reference/bus-bandwidth.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from collectives.nccl_log.transport import Evidence
from contracts import bounded, plain

SCHEMA_VERSION = 1
MOST_RESULT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a measurement is held against: the bus bandwidth of a healthy run, in bytes per second."""

    name: str  # "as it should be", "as it is"
    low: float | None = None  # None: unknown, `why` says the reason
    typical: float | None = None
    high: float | None = None
    algorithm: str = ""  # "ring", "NVLS"
    ring_high: float | None = None  # the most that the ring reaches, where another algorithm is expected
    why: tuple[str, ...] = ()  # derivation with its sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One collective at one size over one group."""

    op: str  # "all_gather", "reduce_scatter", ...
    backend: str  # "nccl", "gloo"
    ranks: tuple[int, ...]  # of the group
    hosts: tuple[str, ...]  # by rank
    bytes: int  # S as nccl-tests counts it: total for all_gather and reduce_scatter
    iteration_seconds: tuple[float, ...]  # slowest rank of each iteration, warm-up left out
    median_seconds: float
    spread_ratio: float | None  # half width of the 95 % interval of the median over the median
    algbw_bytes_per_second: float
    busbw_bytes_per_second: float
    verified: bool
    rank_median_seconds: tuple[float, ...] = ()  # by rank: who is slow
    expected_busbw_bytes_per_second: float | None = None
    expectation: tuple[str, ...] = ()  # derivation of the expected value
    bars: tuple[Bar, ...] = ()  # the first gives the expected value


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Alpha-beta fit over the sizes of one op: t = alpha + bytes / beta."""

    op: str
    alpha_seconds: float
    beta_bytes_per_second: float
    points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank the others wait for."""

    rank: int
    host: str
    late_seconds: float  # median time it arrives after the median rank
    iterations: int
    share: float  # part of the iterations in which it came last
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What one rank's TCP connections moved over one of its addresses; RDMA and shared memory are not in it."""

    rank: int
    interface: str  # "net1"; "" where no interface had the address
    address: str
    bytes: int  # sent and received


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All that one run of the benchmark established, whole or partial."""

    measurements: tuple[Measurement, ...]
    world_size: int
    backend: str
    hosts: tuple[str, ...]
    environment: dict[str, str]  # NCCL_* and GLOO_* the ranks ran with
    versions: dict[str, str]  # torch, nccl, python
    started_at_seconds: float
    seconds: float
    latencies: tuple[Latency, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    evidence: Evidence | None = None
    complete: bool = True
    problems: tuple[str, ...] = ()  # "rank 1 on node-b: no answer for 30 s (killed)"
    carried: tuple[Carried, ...] = ()  # what the ranks' TCP connections moved, by interface
    nvlink_domains: tuple[str, ...] = ()  # of the hosts, each once; "" of a host that shares NVLink with no other
    stopped_by: str | None = None  # "SIGTERM", "its caller": cut short from outside, no fault of what was measured
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaWrite:
    """One port's writes to the peer."""

    port: str  # "mlx5_0:1"
    bytes: int  # of one write
    writes: int
    seconds: float
    bytes_per_second: float
    mtu_bytes: int | None = None  # that both ends agreed on
    rate_bytes_per_second: float | None = None  # of the port
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaResult:
    """What the host that writes measured with perftest."""

    host: str
    peer: str
    writes: tuple[RdmaWrite, ...]
    started_at_seconds: float
    seconds: float
    problems: tuple[str, ...] = ()
    stopped_by: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def complete(self) -> bool:
        """Whether every port was measured."""
        return bool(self.writes) and not self.problems


# The arithmetic of repeated measurements: the 95 % interval of their median.


def spread_ratio(seconds: Sequence[float]) -> float | None:
    """Half width of the 95 % interval of the median over the median, from order statistics.

    The interval that leaves out the k lowest and the k highest values holds the median with probability
    1 - 2 x P(Binomial(n, 1/2) <= k); no interval of five values or fewer reaches 95 %: None.
    """
    n = len(seconds)
    left_out, tail = -1, 0.0
    while left_out + 1 < n / 2:
        tail += math.comb(n, left_out + 1) / 2**n
        if tail > 0.025:
            break
        left_out += 1
    from statistics import median  # and with it decimal and random, which a reader of results does not need

    middle = median(seconds) if n else 0.0
    if left_out < 0 or middle <= 0:
        return None
    ordered = sorted(seconds)
    return (ordered[n - 1 - left_out] - ordered[left_out]) / 2 / middle


# Results as plain JSON values, and back; the reader trusts nothing it is given.

T = TypeVar("T", BenchResult, RdmaResult)


class ResultError(ValueError):
    """What was given is not the JSON of a benchmark's result."""


def result_from_json(data: object) -> BenchResult:
    """Read a result of collectives back; raises ResultError that says where it does not fit."""
    return read_as(data, BenchResult)


def read_result(path: Path) -> BenchResult:
    """Read a stored result of collectives. Raises OSError or ValueError with the reason."""
    return result_from_json(plain.loads(bounded.read_text(path, MOST_RESULT_BYTES), unknown_numbers=True))


def read_as(data: object, kind: type[T]) -> T:
    """Read a result of this kind back; raises ResultError that says where it does not fit."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultError(f"schema_version: {version!r} is not allowed; allowed: {SCHEMA_VERSION}")
    try:
        return plain.read(data, kind)
    except plain.MisfitError as error:
        raise ResultError(f"not a benchmark result: {error}"[:500]) from error
