"""Format bytes, rates, times and counts for people, and parse sizes. Rates have decimal units, memory binary ones."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardware.units import bits as bits, rate as rate, some as some

if TYPE_CHECKING:
    from contracts.finding import Interval
    from topology.graph import Expectation


SIZE_WORDS = "bytes, with or without a unit: 64GiB, 16G, 512Mi, 65536"
SIZES: dict[str, int] = {"B": 1} | {
    f"{prefix}{binary}{byte}": (1024 if binary else 1000) ** (power + 1)
    for power, prefix in enumerate("KMGT") for binary in ("i", "") for byte in ("", "B")
}  # fmt: skip
"""Units of bytes by their spelling: Ki and KiB are 1024, K and KB are 1000 (IEC 80000-13; Kubernetes quantities)."""
_SIZES_BY_LOWER = {unit.lower(): scale for unit, scale in SIZES.items()}
_COUNTED = {"fail": "failed", "warn": "warning", "unknown": "unknown", "pass": "passed"}  # worst first


def count(number: int, noun: str) -> str:
    """Format a number with its noun: "1 check", "2 checks"."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def tally(counts: Mapping[str, int]) -> str:
    """Format the counts of a gate, worst first, without zeros: "1 failed, 2 warnings, 121 passed"."""
    counted = [(counts.get(status, 0), word) for status, word in _COUNTED.items()]
    texts = [count(number, word) if word == "warning" else f"{number} {word}" for number, word in counted if number]
    return ", ".join(texts)


def rest(word: str, counts: Mapping[str, int]) -> str:
    """Format the counts without those that the verdict states itself: findings, or for a pass the unknown checks."""
    excluded = {"pass": ("unknown",), "fail": ("fail", "warn")}.get(word, (word,))
    return tally({status: number for status, number in counts.items() if status not in excluded})


def size(value: float | None) -> str:
    """Format bytes with a binary unit: 68719476736 -> "64.0 GiB"; None -> "unknown"."""
    if value is None:
        return "unknown"
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def parse_size(text: str) -> int | None:
    """Parse a size typed by a user: "64GiB", "1.5 T", "65536"; None if it is not a size. Case does not matter."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})", text.strip(), re.ASCII)
    scale = _SIZES_BY_LOWER.get(match[2].lower() or "b") if match else None
    if match is None or scale is None:
        return None
    return round(float(match[1]) * scale) if "." in match[1] else int(match[1]) * scale


def seconds(value: float | None) -> str:
    """Format seconds with three digits: 0.00123 -> "1.23 ms"; None -> "unknown"."""
    if value is None:
        return "unknown"
    if abs(value) < 0.9995e-3:
        return f"{value * 1e6:.3g} µs"
    if abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 999.5 else f"{value:,.0f} s"


def interval(value: Interval | None, unit: str) -> str:
    """Format an interval: "1.90 s (1.60 to 2.30)", "727 ms (528 ms to 1 s)", or bytes; None -> "unknown"."""
    if value is None:
        return "unknown"
    show = seconds if unit == "s" else size
    low, mid, high = (show(v).rsplit(" ", 1) for v in (value.low, value.mid, value.high))
    is_one_unit = low[1] == mid[1] == high[1]
    first, last = (end[0] if is_one_unit else " ".join(end) for end in (low, high))
    return f"{' '.join(mid)} ({first} to {last})"


def duration(value: float) -> str:
    """Format a duration or an age: "45 s", "12 min", "3 h 20 min", "2 d 4 h"."""
    minutes = round(value / 60)
    if minutes < 2:
        return f"{value:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def expected_rate(expected: Expectation) -> str:
    """Format the expected rate: "326 GB/s (276 GB/s to 423 GB/s)", or NCCL's planned rate if only that is known."""
    low, usual = expected.least_bytes_per_second, expected.usual_bytes_per_second
    if low is None:
        return rate(expected.busbw_bytes_per_second)
    bounds = f"{rate(low)} to {rate(expected.most_bytes_per_second)}"
    return bounds if usual is None else f"{rate(usual)} ({bounds})"


def clock(seconds: float) -> str:
    """Format a time as UTC, with the date unless it is today."""
    then, today = time.gmtime(seconds), time.gmtime()
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%d %b %H:%M", then)
