"""Numbers as people read them: bytes, rates, seconds. Decimal for rates, binary for memory, as the field does."""

from __future__ import annotations

from planner.advice import Interval


def size(value: float | None) -> str:
    """Bytes with a binary unit: 68719476736 -> "64.0 GiB"; None -> "unknown"."""
    if value is None:
        return "unknown"
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def rate(value: float | None) -> str:
    """Bytes per second with a decimal unit: 5e10 -> "50.0 GB/s"; None -> "unknown"."""
    if value is None:
        return "unknown"
    number = float(value)
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB/s"


def seconds(value: float | None) -> str:
    """Seconds with the unit that keeps three digits: 0.00123 -> "1.23 ms"; None -> "unknown"."""
    if value is None:
        return "unknown"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


def interval(value: Interval | None, unit: str) -> str:
    """ "1.90 s (1.60 to 2.30)", or bytes alike; None -> "unknown"."""
    if value is None:
        return "unknown"
    show = seconds if unit == "s" else size
    low, mid, high = (show(v).rsplit(" ", 1) for v in (value.low, value.mid, value.high))
    first = low[0] if low[1] == mid[1] else " ".join(low)
    last = high[0] if high[1] == mid[1] else " ".join(high)
    return f"{' '.join(mid)} ({first} to {last})"


def hours(value: Interval) -> str:
    """A long interval: "2.5 h (2.1 to 3.0)"."""
    return f"{value.mid / 3600:.3g} h ({value.low / 3600:.3g} to {value.high / 3600:.3g})"
