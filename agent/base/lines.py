"""Lines and consoles that every view of the terminal shares: words with glyphs, and text indented under its line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from agent.base import streams
from contracts.plain import printable

GLYPHS = {"pass": "✓ pass", "info": "· info", "unknown": "? unknown", "warn": "! warn", "fail": "✗ FAIL"}
SHOWN = 8  # names in a row before the rest is a number
COLOURS = {"pass": "green", "info": "cyan", "unknown": "magenta", "warn": "yellow", "fail": "bold red"}


def mark(word: str, text: str = "") -> str:
    """The glyph and word of a status, or `text` instead of them, in its colour."""
    return f"[{COLOURS[word]}]{text or GLYPHS[word]}[/{COLOURS[word]}]"


def headline(out: Console, word: str, line: str, todo: str, glyph: str = "") -> None:
    """The first line of a view: a verdict, its reason, and what to do about it."""
    out.print(f"{mark(word, glyph)} {escape(line)}" + (f". [bold]→ {escape(todo)}[/bold]" if todo else ""))


def block(out: Console, word: str, code: str, where: str, message: str, proof: Iterable[str], remedy: str) -> None:
    """One thing that was found, where, the lines that prove it, and what to do."""
    out.print(f"{mark(word)} [bold]{escape(code)}[/bold]{escape(where)}")
    indented(out, escape(message))
    for line in proof:
        indented(out, f"[dim]{escape(line)}[/dim]")
    indented(out, f"[bold]→ {escape(remedy)}[/bold]")


def indented(out: Console, text: str, by: int = 7) -> None:
    """Text that hangs under its line; nothing where there is none."""
    if text:
        out.print(Padding(text, (0, 0, 0, by), expand=False))


class _Plain:
    """A pipe without the blanks that tables pad their lines with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Lines come whole from rich: what is blank before a line's end is padding."""
        self._stream.write(re.sub(r"[ \t]+(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Console(Console):
    """A console that a closed pipe silences: the verb goes on to its verdict and its files."""

    def render_str(self, text: str, **options: Any) -> Text:
        """All text comes this way, that of records and recordings too; rich lets escape sequences pass."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Called by rich where the reader has left."""
        self.quiet = True
        streams.discard_output()


def console() -> Console:
    """Where tables go: colours on a terminal, plain lines of at most the terminal's width in a pipe.

    Without rich's emoji: `gpu-a:100:130` of a log is evidence, and its middle is not replaced by a picture.
    """
    if sys.stdout.isatty():
        return _Console(file=sys.stdout, highlight=False, soft_wrap=False, emoji=False)
    return plain_console(sys.stdout)


def plain_console(stream: TextIO) -> Console:
    """For a pipe or a file: plain lines of at most COLUMNS characters, 80 where that variable is not set."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) > 0 else 80
    plain: Any = _Plain(stream)
    return _Console(file=plain, width=width, highlight=False, soft_wrap=False, emoji=False)
