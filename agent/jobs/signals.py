"""Signals that stop the current work early instead of ending the process, so that the results so far are saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stop_on(stop: threading.Event, *numbers: signal.Signals) -> Iterator[list[str]]:
    """Set `stop` on these signals; yield the names of those received. A second Ctrl-C raises KeyboardInterrupt."""
    received: list[str] = []

    def handle(number: int, _frame: object) -> None:
        received.append(signal.Signals(number).name)
        stop.set()
        if received.count(signal.SIGINT.name) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread has handlers
        yield received
        return
    former = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def sigterm(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """Set an event on SIGTERM."""
    stop = stop or threading.Event()
    with stop_on(stop, signal.SIGTERM):
        yield stop
