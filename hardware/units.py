"""Units of the hardware tables, and formatting of rates and lists of names."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 1024.0**3
GIGA = 1e9
TERA = 1e12


def rate(value: float | None) -> str:
    """Format bytes per second with a decimal prefix: 5e10 -> "50.0 GB/s"; None -> "unknown"."""
    return "unknown" if value is None else _with_prefix(float(value), "B/s")


def gigabits(bytes_per_second: float) -> str:
    """Format a rate in whole Gb/s, the unit on NIC data sheets: 1.25e8 -> "1 Gb/s"."""
    return f"{bytes_per_second * 8 / GIGA:g} Gb/s"


def bits(value: float | None) -> str:
    """Format bytes per second as a network rate: 5e10 -> "400 Gb/s"; None -> "unknown"."""
    return "unknown" if value is None else _with_prefix(8 * float(value), "b/s")


def some(names: Sequence[str], word: str = "", limit: int = 8) -> str:
    """Format a list of names: "on mlx5_0, mlx5_1 and 8 more"; empty if there are none."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{word}{', '.join(names[:limit])}{suffix}" if names else ""


def _with_prefix(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} T{unit}"
