"""How results leave: one document in one of three formats on stdout, progress and notes on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent.base import streams
from agent.base.documents import render as render  # for the verbs
from agent.base.documents import write_atomic_bytes
from contracts.plain import printable

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Where tables go; rich is imported with the first of them."""
    from agent.base.tables import console as made

    return made()


def say(text: str, *, nl: bool = True, err: bool = False) -> None:
    """A line, or the whole of a result, without what steers a terminal; a line may end as in DOS."""
    shown = "\r\n".join(map(printable, text.split("\r\n")))
    stream = sys.stderr if err else sys.stdout
    try:
        click.echo(streams.printable_in(shown, stream.encoding), nl=nl, err=err)
    except BrokenPipeError:
        if not err:
            streams.discard_output()


def emit(value: Any, form: str, table: Callable[[Console], None]) -> None:
    """Print `value` as JSON or YAML, or have `table` draw it."""
    if form == "table":
        table(console())
        return
    say(render(value, form), nl=False)


def write_result(path: Path, content: str | bytes, mode: int = 0o644, *, named: str = "") -> None:
    """Write a file that the user asked for, whole or not at all. ClickException names `named`, or the path, and why."""
    try:
        write_atomic_bytes(path, content.encode() if isinstance(content, str) else content, mode)
    except OSError as error:
        raise click.ClickException(f"{named or path}: {error.strerror or error}") from None


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
            say(f"-- {text}", err=True)

    def note(self, text: str) -> None:
        """Something happened within the stage; replaces the live line's words."""
        if self._live and self._status is not None:
            self._status.update(text)
        elif not self._quiet:
            say(f"   {text}", err=True)

    def done(self) -> None:
        """The last stage is over."""
        if self._status is not None:
            self._status.stop()
            self._status = None
