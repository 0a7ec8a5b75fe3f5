"""Tables in the common style of all views, and rows without borders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MANY_COLUMNS = 6  # beyond these the gaps between columns are one character instead of three


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as data, created once and used by the terminal and the pages."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(made: Grid) -> Table:
    """Convert a grid to the table that the terminal prints."""
    found = table(*made.columns)
    for row in made.rows:
        found.add_row(*map(escape, row))
    return found


def table(*columns: str) -> Table:
    """Return an empty table in the common style; one with many columns has narrow gaps, to fit 80 characters."""
    gap = 0 if len(columns) > MANY_COLUMNS else 1
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False, padding=(0, gap))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def grid(gap: int = 1, columns: int = 2) -> Table:
    """Return a table without borders whose long words wrap and are never cut."""
    made = Table.grid(padding=(0, gap))
    for _ in range(columns):
        made.add_column(overflow="fold")
    return made


def point(out: Console, mark: str, text: str) -> None:
    """Print a line with a mark before it, and indent its further lines."""
    row = grid()
    row.add_row(mark, text)
    out.print(row)


def pairs(out: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print the properties of one object: a name and a value per line."""
    shown = grid()
    for word, text in rows:
        shown.add_row(f"  [bold]{word}[/bold]", escape(text))
    out.print(shown)
