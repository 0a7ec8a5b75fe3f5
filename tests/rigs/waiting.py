"""Patience: tests wait for a condition, never for a time."""

import time
from collections.abc import Callable


def eventually(true: Callable[[], object], what: str, seconds: float = 300.0) -> None:
    """Wait until it holds; a generous bound, as the machine may be busy."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"never came true: {what}"
        time.sleep(0.02)
