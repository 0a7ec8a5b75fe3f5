"""The arithmetic of repeated measurements: median, its 95 % interval, and the alpha-beta fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import linear_regression, median

from collectives.bench.results import Latency, Measurement


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
    middle = median(seconds) if n else 0.0
    if left_out < 0 or middle <= 0:
        return None
    ordered = sorted(seconds)
    return (ordered[n - 1 - left_out] - ordered[left_out]) / 2 / middle


def fit_latency(op: str, measurements: Sequence[Measurement]) -> Latency | None:
    """Fit t = alpha + bytes / beta over the verified sizes of one op; None where it has no meaning.

    Weighted by 1 / t squared (relative errors count alike), else the largest size alone decides alpha.
    """
    points = [(m.bytes, m.median_seconds) for m in measurements if m.op == op and m.verified and m.median_seconds > 0]
    if len({size for size, _ in points}) < 2:
        return None
    weights = [1 / seconds**2 for _, seconds in points]
    total = math.fsum(weights)
    mean_x = math.fsum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = math.fsum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    # Weighted least squares is ordinary least squares through the weighted mean on scaled differences.
    scaled = [
        (math.sqrt(w) * (x - mean_x), math.sqrt(w) * (y - mean_y)) for w, (x, y) in zip(weights, points, strict=True)
    ]
    slope, _ = linear_regression([x for x, _ in scaled], [y for _, y in scaled], proportional=True)
    if slope <= 0:
        return None
    return Latency(
        op=op,
        alpha_seconds=max(0.0, mean_y - slope * mean_x),
        beta_bytes_per_second=1 / slope,
        points=len(points),
    )
