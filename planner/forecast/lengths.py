"""Lengths of a data set: how many tokens a micro-batch really computes when it is padded to its longest sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Histogram = tuple[tuple[int, int], ...]

_MOST_BINS = 100_000


class LengthsError(ValueError):
    """A histogram that cannot be used; the message says why."""


def histogram_of(lengths: Sequence[int]) -> Histogram:
    """Count the samples of each length."""
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length] = counts.get(length, 0) + 1
    return check_histogram(tuple(sorted(counts.items())))


def check_histogram(histogram: Histogram) -> Histogram:
    """The histogram itself, if every length and count is a whole positive number."""
    if len(histogram) > _MOST_BINS:
        raise LengthsError(f"length_histogram has {len(histogram)} bins, {_MOST_BINS} at most are read")
    for row in histogram:
        if len(row) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in row):
            raise LengthsError(f"length_histogram: {row!r}: must be (tokens, samples), both at least 1")
    return tuple(sorted(histogram))


@lru_cache(maxsize=1024)
def expected_longest(histogram: Histogram, samples: int, limit: int) -> float:
    """Mean length of the longest of `samples` draws, each cut at `limit` tokens."""
    total = sum(count for _, count in histogram)
    below, mean, previous = 0, 0.0, 0.0
    for length, count in histogram:
        below += count
        share = (below / total) ** samples  # chance that the longest is at most this long
        mean += min(length, limit) * (share - previous)
        previous = share
    return mean


@lru_cache(maxsize=256)
def mean_length(histogram: Histogram, limit: int) -> float:
    """Mean length of one sample, cut at `limit`: what packing leaves."""
    return expected_longest(histogram, 1, limit)
