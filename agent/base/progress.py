"""Progress of a verb on standard error: a live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from agent.base.output import print_text

_waiting: list[Any] = []  # the live line that is shown, if one is


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """A live line on a terminal for what takes a second or two; nothing in a pipe. One inside another changes it."""
    if _waiting:
        _waiting[-1].update(text)
        yield
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True, highlight=False, emoji=False).status(text) as shown:
            _waiting.append(shown)
            try:
                yield
            finally:
                _waiting.pop()
    else:
        yield


class Progress:
    """Words about what is going on: a live line on a terminal, plain lines in a pipe, nothing when quiet."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, emoji=False)
        self._status: Any = None

    def step(self, text: str) -> None:
        """A new stage begins."""
        if self._live:
            self.done()
            self._status = self._console.status(text)
            self._status.start()
        elif not self._quiet:
            print_text(f"-- {text}", err=True)

    def note(self, text: str) -> None:
        """Something happened within the stage; replaces the live line's words."""
        if self._live and self._status is not None:
            self._status.update(text)
        elif not self._quiet:
            print_text(f"   {text}", err=True)

    def done(self) -> None:
        """The last stage is over."""
        if self._status is not None:
            self._status.stop()
            self._status = None
