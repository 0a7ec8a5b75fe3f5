"""Where in a text a matrix stands: its header, wrapped or not, and the lines of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from topology.formats.text_cells import Header, names_gpu_first, read_header, row_name, row_of

WRAPPED_LINES = 6  # a row of 48 columns at 80 characters takes five lines
WIDEST_GAP = 32  # other lines that a log may put between two rows


@dataclass(slots=True)
class Row:
    """One row while it is read."""

    name: str
    line: int
    text: str  # after the name; wrapped lines below it
    labels: tuple[str, ...] = ()
    cells: str = ""  # the text its labels were read from
    rest: str = ""


@dataclass(slots=True)
class Matrix:
    """One matrix while it is read."""

    header: Header
    line: int
    rows: list[Row]
    end: int  # line number after the last row
    at_end: bool  # nothing but blanks follows the last row
    unfinished: bool  # nor does a line break, and rows are missing: the last word may be cut
    warnings: list[str] = field(default_factory=list)


def find(lines: list[str], start: int) -> Matrix | None:
    """The next header that has rows, with its rows as text."""
    for index in range(start, len(lines)):
        if not names_gpu_first(lines[index]) or not _row_soon(lines, index + 1):
            continue
        names = row_names(lines, index + 1)
        header, used = _read_header(lines, index, names)
        matrix = _collect(lines, index, used, header, names) if header else None
        if matrix is not None:
            return matrix
    return None


def _row_soon(lines: list[str], start: int) -> bool:
    return any(row_name(line) for line in lines[start : start + 2 * WRAPPED_LINES])


def _read_header(lines: list[str], index: int, names: tuple[str, ...]) -> tuple[Header | None, int]:
    """The header that starts in a line, and how many lines it takes."""
    header = read_header(lines[index], names)
    if header is not None:
        return _unwrap_header(lines, index, header, names)
    joined = lines[index]
    for used in range(2, WRAPPED_LINES + 1):  # a wrap may have cut a name
        following = lines[index + used - 1 : index + used]
        if not following or row_name(following[0]):
            break
        joined += following[0]
        header = read_header(joined, names)
        if header is not None:
            return header, used
    return None, 1


def row_names(lines: list[str], start: int) -> tuple[str, ...]:
    """Names that rows below a header start with, up to the legend, the next header or a name that comes again."""
    names: dict[str, int] = {}
    for number in range(start, len(lines)):
        line = lines[number]
        if number - max(names.values(), default=start) > WIDEST_GAP or "Legend" in line:
            break
        name = row_name(line)
        if name in names or (name is None and names and names_gpu_first(line) and read_header(line)):
            break
        if name:
            names[name] = number
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
        if number > (rows[-1].line if rows else index + used) + WIDEST_GAP:
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
    at_end = not any(map(str.strip, lines[end:]))
    unfinished = end == len(lines) and not {row.name for row in rows} >= set(header.devices)
    return Matrix(header=header, line=index + 1, rows=rows, end=end, at_end=at_end, unfinished=unfinished)
