"""Progress of a verb on standard error: a live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from agent.base.output import print_text


class Progress:
    """Words about what is going on: a live line on a terminal, plain lines in a pipe, nothing when quiet.

    One that begins while another shows its line changes the words of that line.
    """

    _shown: Any = None  # the live line, if there is one

    def __init__(self, *, quiet: bool = False, only_live: bool = False) -> None:
        self._live = sys.stderr.isatty() and not quiet
        self._silent = quiet or (only_live and not self._live)
        self._own: Any = None  # the live line, where this one has started it

    def step(self, text: str) -> None:
        """A new stage begins."""
        if self._live and Progress._shown is None:
            from rich.console import Console

            self._own = Progress._shown = Console(stderr=True, highlight=False, emoji=False).status(text)
            self._own.start()
        else:
            self._print("--", text)

    def note(self, text: str) -> None:
        """Something happened within the stage; replaces the live line's words."""
        self._print("  ", text)

    def _print(self, mark: str, text: str) -> None:
        if self._live and Progress._shown is not None:
            Progress._shown.update(text)
        elif not self._silent:
            print_text(f"{mark} {text}", err=True)

    def done(self) -> None:
        """The last stage is over."""
        if self._own is not None:
            self._own.stop()
            self._own = Progress._shown = None


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """A live line on a terminal for what takes a second or two; nothing in a pipe."""
    progress = Progress(only_live=True)
    progress.step(text)
    try:
        yield
    finally:
        progress.done()
