"""From the text of each row to its labels; what cannot be read is refused with the line's number."""

from __future__ import annotations

import re

from topology.formats.text_cells import Cells, Header, read_cells, tab_cells
from topology.formats.text_find import WRAPPED_LINES, Matrix, Row
from topology.labels import NVLINK, SELF

_P2P = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
_OTHER_VENDORS = (
    (re.compile(r"MX\d*"), "MetaX mx-smi"),
    (re.compile(r"ICN\d*"), "Alibaba PPU"),
    (re.compile(r"XGMI|PCIE"), "AMD rocm-smi"),
    (re.compile(r"HCCS\w*|HCS"), "Huawei npu-smi"),
    (re.compile(r"XL\d*"), "Intel xpu-smi"),
    (re.compile(r"MTL\w*"), "Moore Threads mthreads-gmi"),
    (re.compile(r"PSB"), "DCGM's topology sample"),
)

_WORDS = ("NV#", "PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "N/A")
_LABEL = re.compile(r"\s*(X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC)(?=\s|$)")
_AFFINITY_LINE = re.compile(r"[\s\d,\-]*(?:N/A|/A|A)?\s*")  # a wrap may cut N/A itself


class TopologyTextError(ValueError):
    """The text holds no matrix that can be read; says in which line and what was expected."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.source = source
        self.line = line
        self.message = message


def check_names(matrix: Matrix, source: str) -> None:
    """Rows the header does not name mean that the header is cut: the rows then are the columns."""
    strangers = [row for row in matrix.rows if row.name not in matrix.header.devices]
    if not strangers:
        return
    names = tuple(row.name for row in matrix.rows)
    whole = all(len(read_cells(row.text, len(names)).labels) == len(names) for row in matrix.rows)
    if not whole or names[: len(matrix.header.devices)] != matrix.header.devices:
        row = strangers[0]
        columns = " ".join(matrix.header.devices)
        raise TopologyTextError(
            source, row.line, f"row {row.name} has no column: the header in line {matrix.line} names {columns}"
        )
    header = matrix.header
    matrix.header = Header(devices=names, cpu=header.cpu, numa=header.numa, gpu_numa_id=header.gpu_numa_id)
    matrix.warnings.append(f"line {matrix.line}: the header is cut; the rows name the columns {' '.join(names)}")


def read_row(row: Row, matrix: Matrix, clean_nvlinks: frozenset[str], source: str) -> None:
    """Fill in the labels and the rest of one row. Raises TopologyTextError."""
    devices = matrix.header.devices
    count, own = len(devices), devices.index(row.name)
    cells, used = _best_cells(row.text, count, own, clean_nvlinks)
    labels = cells.labels
    diagonal = labels[own] if own < len(labels) else None
    cut = _cut_off(row, cells, matrix)
    if (len(labels) < count or diagonal != SELF) and not cut and _tabbed(matrix):
        by_tabs = tab_cells(row.text.split("\n")[0], count)
        if by_tabs and by_tabs[0][own] == SELF:
            row.labels, row.rest = by_tabs
            matrix.warnings.append(f"line {row.line}: row {row.name} has empty cells; the opposite rows fill them")
            return
    if cut and labels and NVLINK.fullmatch(labels[-1]) and not cells.stuck:
        labels = labels[:-1]  # "NV1" at the very end may have been NV18
    if cells.stuck and not cut and (not labels or not re.match(r"[\d\"'`]", cells.stuck)):
        _refuse(row, devices[len(labels)], cells.stuck, source)
    if diagonal not in (SELF, None) or SELF in labels[:own] or SELF in labels[own + 1 :]:
        where = devices[labels.index(SELF)] if SELF in labels else "no column"
        raise TopologyTextError(
            source, row.line, f"row {row.name}: X stands under {where}, expected under {row.name} (cells are missing?)"
        )
    if len(labels) < count:
        _short_row(row, labels, matrix, source, cut=cut)
    row.cells = row.text.split("\n")[0].removesuffix(cells.rest)
    row.labels, row.rest = labels, _rest(cells, row.text.split("\n")[used:]) if len(labels) == count else ""
    matrix.warnings.extend(f"line {row.line}: row {row.name}: {note}" for note in cells.notes)
    if row.rest and (surplus := _LABEL.match(row.rest)):
        _surplus(row, surplus[1], matrix, source)


def _tabbed(matrix: Matrix) -> bool:
    """Whether one tab parts two cells, as nvidia-smi prints: a whole row read by tabs alone is the same."""
    count = len(matrix.header.devices)
    for row in matrix.rows:
        labels, by_tabs = read_cells(row.text, count).labels, tab_cells(row.text.split("\n")[0], count)
        if by_tabs and len(labels) == count:
            return by_tabs[0] == labels
    return False


def _cut_off(row: Row, cells: Cells, matrix: Matrix) -> bool:
    """Whether the text itself ends within this row: what stands there may be the beginning of a cell."""
    ends = row is matrix.rows[-1] and matrix.at_end and not cells.rest.removeprefix(cells.stuck).strip()
    if len(cells.labels) == len(matrix.header.devices):
        return ends and matrix.unfinished and NVLINK.fullmatch(cells.labels[-1]) is not None
    return ends and any(word.startswith(cells.stuck) for word in _WORDS)


def _surplus(row: Row, word: str, matrix: Matrix, source: str) -> None:
    """A row with more cells than the header has columns: without NICs X proves which column is which."""
    devices = matrix.header.devices
    message = f'row {row.name} goes on with "{word}" after its {len(devices)} cells'
    if any(not name.startswith("GPU") for name in devices):
        raise TopologyTextError(
            source, row.line, f"{message}: the header in line {matrix.line} misses a column, which one is not known"
        )
    matrix.warnings.append(f"line {row.line}: {message}: the header misses columns, which are not read")


def _best_cells(text: str, count: int, own: int, clean_nvlinks: frozenset[str]) -> tuple[Cells, int]:
    """The cells of the first line, or of that line and those it was wrapped into, and how many lines that took."""
    first, *following = text.split("\n")
    best, used = read_cells(first, count, clean_nvlinks), 1
    tight = loose = first
    for number, line in enumerate(following[: WRAPPED_LINES - 1], 2):
        if len(best.labels) == count:
            break
        tight, loose = tight + line, loose + " " + line
        for joined in (tight, loose):
            tried = read_cells(joined, count, clean_nvlinks)
            if len(tried.labels) > len(best.labels) and (own >= len(tried.labels) or tried.labels[own] == SELF):
                best, used = tried, number
    return best, used


def _rest(cells: Cells, following: list[str]) -> str:
    """What follows the cells, with the lines below where a terminal wrapped the affinity columns onto them."""
    rest = cells.rest
    for line in following:
        if not _AFFINITY_LINE.fullmatch(line):
            break
        rest += line
    return rest


def _refuse(row: Row, column: str, word: str, source: str) -> None:
    where = f"row {row.name} under {column}"
    if word in _P2P:
        raise TopologyTextError(
            source,
            row.line,
            f'{where}: "{word}" is a P2P status: this is `nvidia-smi topo -p2p`, which says what peers may do and '
            "not how they are linked; expected the output of `nvidia-smi topo -m`",
        )
    words = row.text.split()
    vendor = next((name for pattern, name in _OTHER_VENDORS if any(map(pattern.fullmatch, words))), None)
    raise TopologyTextError(
        source,
        row.line,
        f'{where}: "{word[:40]}" is no label of `nvidia-smi topo -m`'
        + (f"; this looks like {vendor}" if vendor else "")
        + "; expected X, NV#, PIX, PXB, PHB, NODE, SYS or SOC",
    )


def _short_row(row: Row, labels: tuple[str, ...], matrix: Matrix, source: str, *, cut: bool) -> None:
    """A row that ends early is bearable where the text ends with it, or every missing pair has its opposite cell."""
    devices = matrix.header.devices
    whole = {other.name for other in matrix.rows if len(read_cells(other.text, len(devices)).labels) == len(devices)}
    missing = [name for name in devices[len(labels) :] if name != row.name and name not in whole]
    if missing and not cut:
        raise TopologyTextError(
            source,
            row.line,
            f"row {row.name} has {len(labels)} cells, expected {len(devices)} as the header in line {matrix.line}",
        )
    matrix.warnings.append(f"line {row.line}: row {row.name} ends after {len(labels)} of {len(devices)} cells")
