"""Where in a text a matrix stands: its header, wrapped or not, and the lines of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from topology.text_cells import Header, read_header, row_name, row_of

WRAPPED_LINES = 6  # a row of 48 columns at 80 characters takes five lines


@dataclass(slots=True)
class Row:
    """One row while it is read."""

    name: str
    line: int
    text: str  # after the name; wrapped lines below it
    labels: tuple[str, ...] = ()
    rest: str = ""


@dataclass(slots=True)
class Matrix:
    """One matrix while it is read."""

    header: Header
    line: int
    rows: list[Row]
    end: int  # line number after the last row
    warnings: list[str] = field(default_factory=list)


def find(lines: list[str], start: int) -> Matrix | None:
    """The next header that has rows, with its rows as text."""
    for index in range(start, len(lines)):
        line = lines[index]
        if "GPU" not in line or (read_header(line) is None and not _glued_header(lines, index)):
            continue
        names = row_names(lines, index + 1)
        header = read_header(line, names)
        if header is None:
            continue
        header, used = _unwrap_header(lines, index, header, names)
        matrix = _collect(lines, index, used, header, names)
        if matrix is not None:
            return matrix
    return None


def _glued_header(lines: list[str], index: int) -> bool:
    return read_header(lines[index], row_names(lines, index + 1)) is not None


def row_names(lines: list[str], start: int) -> tuple[str, ...]:
    """Names that rows below a header start with, up to the legend or the next header."""
    names: list[str] = []
    for line in lines[start : start + 4 * 256]:
        if "Legend" in line or (names and read_header(line)):
            break
        name = row_name(line)
        if name and name not in names:
            names.append(name)
    return tuple(names)


def _unwrap_header(lines: list[str], index: int, header: Header, names: tuple[str, ...]) -> tuple[Header, int]:
    """Take following lines into the header where a terminal wrapped it."""
    used, joined = 1, lines[index]
    while used < WRAPPED_LINES and index + used < len(lines):
        following = lines[index + used]
        if not following.strip() or row_of(following, header.devices) or row_name(following):
            break
        for glue in ("", " "):
            longer = read_header(joined + glue + following, names)
            if longer and (longer.devices, longer.affinity_columns) != (header.devices, header.affinity_columns):
                joined, header = joined + glue + following, longer
                break
        else:
            break
        used += 1
    return header, used


def _collect(lines: list[str], index: int, used: int, header: Header, names: tuple[str, ...]) -> Matrix | None:
    rows: list[Row] = []
    end = index + used
    searched = tuple(dict.fromkeys((*header.devices, *names)))
    for number in range(index + used, len(lines)):
        line = lines[number]
        found = row_of(line, searched)
        if "Legend" in line or (found and found[0] in {row.name for row in rows}):
            break
        if found and read_header(line) is None:
            rows.append(Row(name=found[0], line=number + 1, text=found[1]))
            end = number + 1
        elif read_header(line) is not None and row_names(lines, number + 1):
            break
        elif rows and line.strip() and number < rows[-1].line + WRAPPED_LINES and end == number:
            rows[-1].text += "\n" + line  # perhaps the rest of a wrapped row
            end = number + 1
        elif rows and not line.strip() and len(rows) >= len(header.devices):
            break
    if not rows:
        return None
    return Matrix(header=header, line=index + 1, rows=rows, end=end)
