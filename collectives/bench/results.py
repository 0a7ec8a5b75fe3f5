"""The results of a benchmark.

A result counts as a measurement only if it was verified element by element. Bandwidths follow nccl-tests
(doc/PERFORMANCE.md): algbw = S / t, busbw = algbw x factor; see docs/reference/bus-bandwidth.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from collectives.nccl_log.transport import Evidence
from contracts import bounded, plain

SCHEMA_VERSION = 1
MAX_RESULT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The reference value of a measurement: the bus bandwidth of a healthy run, in bytes per second."""

    name: str  # "when healthy", "with current links"
    low: float | None = None  # None: unknown, `why` has the reason
    typical: float | None = None
    high: float | None = None
    algorithm: str = ""  # "ring", "NVLS"
    ring_high: float | None = None  # highest rate of the ring algorithm, if another algorithm is expected
    why: tuple[str, ...] = ()  # derivation with its sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One collective at one size over one group."""

    op: str  # "all_gather", "reduce_scatter", ...
    backend: str  # "nccl", "gloo"
    ranks: tuple[int, ...]  # of the group
    hosts: tuple[str, ...]  # by rank
    bytes: int  # S as nccl-tests counts it: total for all_gather and reduce_scatter
    iteration_seconds: tuple[float, ...]  # slowest rank of each iteration, without warm-up
    median_seconds: float
    spread_ratio: float | None  # half width of the 95 % interval of the median, divided by the median
    algbw_bytes_per_second: float
    busbw_bytes_per_second: float
    verified: bool
    expected_busbw_bytes_per_second: float | None = None
    expectation: tuple[str, ...] = ()  # derivation of the expected value
    bars: tuple[Bar, ...] = ()  # the first gives the expected value


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank for which the others wait."""

    rank: int
    host: str
    late_seconds: float  # median of its arrival time after the median rank
    iterations: int
    share: float  # fraction of the iterations in which it arrived last
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All results of one run of the benchmark, complete or partial."""

    measurements: tuple[Measurement, ...]
    world_size: int
    backend: str
    hosts: tuple[str, ...]
    environment: dict[str, str]  # NCCL_* and GLOO_* of the ranks
    versions: dict[str, str]  # torch, nccl, python
    started_at_seconds: float
    seconds: float
    stragglers: tuple[Straggler, ...] = ()
    evidence: Evidence | None = None
    complete: bool = True
    problems: tuple[str, ...] = ()  # "rank 1 on node-b: no answer for 30 s (killed)"
    nvlink_domains: tuple[str, ...] = ()  # of the hosts, each once; "" for a host without shared NVLink
    stopped_by: str | None = None  # "SIGTERM", "its caller": stopped from outside, not a fault of the hardware
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaWrite:
    """The writes from one port to the peer."""

    port: str  # "mlx5_0:1"
    bytes: int  # of one write
    writes: int
    seconds: float
    bytes_per_second: float
    mtu_bytes: int | None = None  # negotiated by both ends
    rate_bytes_per_second: float | None = None  # of the port
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaResult:
    """The perftest measurements of the writing host."""

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
        """Return whether every port was measured."""
        return bool(self.writes) and not self.problems


# Statistics of repeated measurements: the 95 % interval of their median.


def spread_ratio(seconds: Sequence[float]) -> float | None:
    """Half width of the 95 % interval of the median over the median, from order statistics.

    The interval that leaves out the k lowest and the k highest values holds the median with probability
    1 - 2 x P(Binomial(n, 1/2) <= k); no interval of five values or fewer reaches 95 %: None.
    """
    n = len(seconds)
    tails = accumulate(math.comb(n, k) / 2**n for k in range(math.ceil(n / 2)))
    left_out: int = sum(tail <= 0.025 for tail in tails) - 1
    from statistics import median  # also imports decimal and random, which a reader of results does not need

    middle = median(seconds) if n else 0.0
    if left_out < 0 or middle <= 0:
        return None
    ordered = sorted(seconds)
    return (ordered[n - 1 - left_out] - ordered[left_out]) / 2 / middle


# Results as plain JSON values, and back; the input is validated completely.

T = TypeVar("T", BenchResult, RdmaResult)


class ResultError(ValueError):
    """The input is not the JSON of a benchmark result."""


def read_result(path: Path) -> BenchResult:
    """Read a stored result of collectives. Raises OSError or ValueError with the reason."""
    return read_as(plain.loads(bounded.read_text(path, MAX_RESULT_BYTES), unknown_numbers=True), BenchResult)


def read_as(data: object, kind: type[T]) -> T:
    """Parse a result of this kind. Raises ResultError that names the invalid part."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultError(f"schema_version: {version!r} is not allowed; allowed: {SCHEMA_VERSION}")
    try:
        return plain.read(data, kind)
    except plain.MisfitError as error:
        raise ResultError(f"not a benchmark result: {error}"[:500]) from error
