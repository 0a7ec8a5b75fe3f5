"""Tables in the common style of all views, and rows without borders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table

LONGEST_WORD = 24  # characters that a column keeps unbroken; longer text, such as a path, may wrap


class _Worded(Table):
    """A table that wraps between words: it reduces gaps, then prints one block per row, before it breaks a word.

    A `no_wrap` column (a number with its unit) is never broken; the rows become blocks instead.
    """

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> RenderResult:
        """Make each column as wide as its longest word, and give the remaining width to the widest columns."""
        spans = [[Measurement.get(out, options, cell) for cell in (c.header, *c.cells)] for c in self.columns]
        widths = [max(span.maximum for span in column) for column in spans]
        least = [
            widest if column.no_wrap else max(min(span.minimum, LONGEST_WORD) for span in mine)
            for column, mine, widest in zip(self.columns, spans, widths, strict=True)
        ]
        gap = next((gap for gap in (3, 2, 1) if sum(least) + gap * len(least) - 1 <= options.max_width), None)
        if gap is None:
            yield from self._stacked()
            return
        self.padding = (0, min(1, gap - 1), 0, max(0, gap - 2))
        room = options.max_width - gap * len(least) + 1
        while sum(widths) > room:
            spare = [width - least_width and width for width, least_width in zip(widths, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(out, options)

    def _stacked(self) -> Iterable[RenderableType]:
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            block = grid()
            for column, cell in zip(self.columns, cells, strict=True):
                block.add_row(column.header, cell)
            yield Padding(block, (0, 0, 1, 0), expand=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as data, created once and used by the terminal and the pages."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    long: tuple[str, ...] = ()  # columns whose cells may wrap; empty: all columns


def table_of(made: Grid) -> Table:
    """Convert a grid to the table that the terminal prints."""
    found = table(*made.columns)
    for column in found.columns:
        column.no_wrap = bool(made.long) and column.header not in made.long
    for row in made.rows:
        found.add_row(*map(escape, row))
    return found


def table(*columns: str) -> Table:
    """Return an empty table in the common style."""
    made = _Worded(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
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
