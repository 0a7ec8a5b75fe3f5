"""What all terminal output shares: consoles, status words with glyphs, indented text, and tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from agent.base import discard_output
from contracts.plain import printable

if TYPE_CHECKING:
    from rich.table import Table

GLYPHS = {"pass": "✓ pass", "info": "· info", "unknown": "? unknown", "warn": "! warn", "fail": "✗ FAIL"}
SHOWN = 8  # names printed in a row before the rest is given as a number
MANY_COLUMNS = 6  # beyond these the gaps between columns are one character instead of three
COLOURS = {"pass": "green", "info": "cyan", "unknown": "magenta", "warn": "yellow", "fail": "bold red"}


def mark(word: str, text: str = "") -> str:
    """Return the glyph and word of a status, or the glyph and `text`, in the color of the status."""
    return f"[{COLOURS[word]}]{text or GLYPHS[word]}[/{COLOURS[word]}]"


def print_headline(out: Console, word: str, line: str, todo: str, glyph: str = "") -> None:
    """Print the first lines of a view: the verdict, its reason, and the recommended action."""
    out.print(f"{mark(word, glyph)} {escape(line)}" + (f". [bold]→ {escape(todo)}[/bold]" if todo else ""))


def print_problem(out: Console, word: str, code: str, at: str, message: str, proof: Iterable[str], remedy: str) -> None:
    """Print one finding, its location, the lines that prove it, and the remedy."""
    out.print(f"{mark(word)} [bold]{escape(code)}[/bold]{escape(at)}")
    print_indented(out, escape(message))
    for line in proof:
        print_indented(out, f"[dim]{escape(line)}[/dim]")
    print_indented(out, f"[bold]→ {escape(remedy)}[/bold]")


def print_indented(out: Console, text: str, by: int = 7) -> None:
    """Print text indented below its line; print nothing if the text is empty."""
    if text:
        out.print(Padding(text, (0, 0, 0, by), expand=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as data, created once and used by the terminal and the pages."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def make_table(content: Grid) -> Table:
    """Convert a grid to the table that the terminal prints."""
    result = table(*content.columns)
    for row in content.rows:
        result.add_row(*map(escape, row))
    return result


def table(*columns: str) -> Table:
    """Return an empty table in the common style; one with many columns has narrow gaps, to fit 80 characters."""
    from rich import box
    from rich.table import Table  # not every view has a table

    gap = 0 if len(columns) > MANY_COLUMNS else 1
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False, padding=(0, gap))
    for column in columns:
        result.add_column(column, overflow="fold")
    return result


def grid(gap: int = 1, columns: int = 2) -> Table:
    """Return a table without borders whose long words wrap and are never cut."""
    from rich.table import Table

    result = Table.grid(padding=(0, gap))
    for _ in range(columns):
        result.add_column(overflow="fold")
    return result


def print_bullet(out: Console, mark: str, text: str) -> None:
    """Print a line with a mark before it, and indent its further lines."""
    row = grid()
    row.add_row(mark, text)
    out.print(row)


def print_properties(out: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print the properties of one object: a name and a value per line."""
    properties = grid()
    for word, text in rows:
        properties.add_row(f"  [bold]{word}[/bold]", escape(text))
    out.print(properties)


class _TrimmedStream:
    """A pipe that removes the trailing blanks with which tables pad their lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text without trailing blanks. rich writes whole lines, so blanks before a line end are padding."""
        self._stream.write(re.sub(r"[ \t]+(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Console(Console):
    """A console that stops printing when its pipe is closed, so that the verb still finishes its verdict and files."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render text without escape sequences, which rich does not remove; all text passes through this method."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Handle a closed pipe; rich calls this method."""
        self.quiet = True
        discard_output()


def console() -> Console:
    """Return the console for tables: colors on a terminal, plain lines of at most the terminal's width in a pipe.

    Emoji replacement is disabled: `gpu-a:100:130` in a log is evidence and must not be changed.
    """
    if sys.stdout.isatty():
        return _Console(file=sys.stdout, highlight=False, soft_wrap=False, emoji=False)
    return plain_console(sys.stdout)


def plain_console(stream: TextIO) -> Console:
    """Return a console for a pipe or file: plain lines of at most COLUMNS characters (default 80)."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) > 0 else 80
    plain: Any = _TrimmedStream(stream)
    return _Console(file=plain, width=width, highlight=False, soft_wrap=False, emoji=False)
