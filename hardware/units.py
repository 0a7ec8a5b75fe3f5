"""Units of the tables and of those who read them."""

from __future__ import annotations

GIB = 1024.0**3
GIGA = 1e9
TERA = 1e12


def rate(value: float | None) -> str:
    """Bytes per second with a decimal unit: 5e10 -> "50.0 GB/s"; None -> "unknown"."""
    return "unknown" if value is None else _with_prefix(float(value), "B/s")


def gigabits(bytes_per_second: float) -> str:
    """A rate in the unit that NICs are sold by, in full: 1.25e8 -> "1 Gb/s"."""
    return f"{bytes_per_second * 8 / GIGA:g} Gb/s"


def bits(value: float | None) -> str:
    """Bytes per second as networks name their rates: 5e10 -> "400 Gb/s"; None -> "unknown"."""
    return "unknown" if value is None else _with_prefix(8 * float(value), "b/s")


def _with_prefix(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} T{unit}"
