"""Read what `nvidia-smi topo -m` (or `-mp`) printed, in whatever state it reached us.

Specification: `nvidia-smi topo --help` and the legend it prints. The rules on broken cells are in `text_cells`. The
first matrix of the text is taken. Whatever cannot be read raises `TopologyTextError`, which names the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from topology.complete import complete
from topology.graph import GpuNode, NicNode, NodeTopology, Pair
from topology.labels import NVLINK, SELF, UNKNOWN, lower, nvlinks, path_class
from topology.matrix import render
from topology.text_cells import (
    Affinity,
    Cells,
    Header,
    clean,
    read_affinity,
    read_cells,
    read_header,
    row_name,
    row_of,
    tab_cells,
)

__all__ = ["TopologyTextError", "parse", "render"]

MOST_BYTES = 16 * 2**20
MOST_LINE = 65_536
_WRAPPED_LINES = 6  # a row of 48 columns at 80 characters takes five lines

_P2P = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
_OTHER_VENDORS = (
    (re.compile(r"MX\d*"), "MetaX mx-smi"),
    (re.compile(r"ICN\d*"), "Alibaba PPU"),
    (re.compile(r"XGMI|PCIE"), "AMD rocm-smi"),
    (re.compile(r"HCCS\w*|HCS"), "Huawei npu-smi"),
    (re.compile(r"XL\d*"), "Intel xpu-smi"),
    (re.compile(r"MTL\w*"), "Moore Threads mthreads-gmi"),
)


class TopologyTextError(ValueError):
    """The text holds no matrix that can be read; says in which line and what was expected."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.source = source
        self.line = line
        self.message = message


@dataclass(slots=True)
class _Row:
    name: str
    line: int
    text: str
    labels: tuple[str, ...] = ()
    rest: str = ""


@dataclass(slots=True)
class _Matrix:
    """One matrix while it is read."""

    header: Header
    line: int
    rows: list[_Row]
    end: int  # line number after the last row
    warnings: list[str] = field(default_factory=list)


def parse(text: str, source: str = "text") -> NodeTopology:
    """The topology a matrix shows. Raises TopologyTextError."""
    if len(text) > MOST_BYTES:
        raise TopologyTextError(source, 1, f"{len(text)} characters are more than the {MOST_BYTES} that are read")
    lines = _lines(text)
    if text.lstrip("\ufeff \t\r\n").startswith(("<?xml", "<system", "<!--")):
        raise TopologyTextError(source, 1, "this is XML, not `nvidia-smi topo -m` text")
    first_error: TopologyTextError | None = None
    found: NodeTopology | None = None
    at = 0
    while at < len(lines):
        matrix = _find(lines, at)
        if matrix is None:
            break
        at = max(matrix.end, matrix.line)
        if found is not None:
            return _with_warning(found, f"line {matrix.line}: a further matrix follows and is not read")
        try:
            found = _finish(matrix, lines, source)
        except TopologyTextError as error:
            first_error = first_error or error
    if found is not None:
        if first_error:
            return _with_warning(found, f"line {first_error.line}: passed over: {first_error.message}")
        return found
    raise first_error or _no_matrix(lines, source)


def _lines(text: str) -> list[str]:
    lines = [clean(line[:MOST_LINE]) for line in text.removeprefix("\ufeff").split("\n")]
    if not any(read_header(line) for line in lines) and "\\n" in text:  # a matrix inside a JSON or Python string
        lines = [clean(line[:MOST_LINE]) for line in text.replace("\\n", "\n").split("\n")]
    return lines


def _with_warning(node: NodeTopology, warning: str) -> NodeTopology:
    return replace(node, warnings=(*node.warnings, warning))


def _no_matrix(lines: list[str], source: str) -> TopologyTextError:
    for number, line in enumerate(lines, 1):
        name = row_name(line)
        if name and name.startswith("GPU") and SELF in line.split():
            return TopologyTextError(
                source, number, f"row {name} without a header line above that names GPU0 and the other columns"
            )
    return TopologyTextError(
        source, 1, "no header line with GPU0 and rows below it: expected the output of `nvidia-smi topo -m`"
    )


def _find(lines: list[str], start: int) -> _Matrix | None:
    """The next header that has rows, with its rows as text."""
    for index in range(start, len(lines)):
        line = lines[index]
        if "GPU" not in line or (read_header(line) is None and not _glued_header(lines, index)):
            continue
        names = _row_names(lines, index + 1)
        header = read_header(line, names)
        if header is None:
            continue
        header, used = _unwrap_header(lines, index, header, names)
        matrix = _collect(lines, index, used, header, names)
        if matrix is not None:
            return matrix
    return None


def _glued_header(lines: list[str], index: int) -> bool:
    return read_header(lines[index], _row_names(lines, index + 1)) is not None


def _row_names(lines: list[str], start: int) -> tuple[str, ...]:
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
    while used < _WRAPPED_LINES and index + used < len(lines):
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


def _collect(lines: list[str], index: int, used: int, header: Header, names: tuple[str, ...]) -> _Matrix | None:
    rows: list[_Row] = []
    end = index + used
    searched = tuple(dict.fromkeys((*header.devices, *names)))
    for number in range(index + used, len(lines)):
        line = lines[number]
        found = row_of(line, searched)
        if "Legend" in line or (found and found[0] in {row.name for row in rows}):
            break
        if found and read_header(line) is None:
            rows.append(_Row(name=found[0], line=number + 1, text=found[1]))
            end = number + 1
        elif read_header(line) is not None and _row_names(lines, number + 1):
            break
        elif rows and line.strip() and number < rows[-1].line + _WRAPPED_LINES and end == number:
            rows[-1].text += "\n" + line  # perhaps the rest of a wrapped row
            end = number + 1
        elif rows and not line.strip() and len(rows) >= len(header.devices):
            break
    if not rows:
        return None
    return _Matrix(header=header, line=index + 1, rows=rows, end=end)


def _finish(matrix: _Matrix, lines: list[str], source: str) -> NodeTopology:
    _check_names(matrix, source)
    clean_nvlinks = frozenset(
        word for row in matrix.rows for word in row.text.split() if NVLINK.fullmatch(word) and len(word) < 6
    )
    for row in matrix.rows:
        _read_row(row, matrix, clean_nvlinks, source)
    devices = matrix.header.devices
    below = _below(lines, matrix)
    legend = dict(re.findall(r"(?<![\w.])(NIC\d{1,4})\s*:\s*([\w.\-]+)", "\n".join(below)))
    affinities = {row.name: read_affinity(row.rest, matrix.header) for row in matrix.rows}
    gpus = tuple(_gpu(name, affinities.get(name, Affinity())) for name in devices if _is_gpu(name))
    nics = _nics(tuple(name for name in devices if not _is_gpu(name)), legend)
    pairs = _pairs(matrix, {nic.label or nic.name: nic.name for nic in nics}, source)
    kind = _kind(lines[: matrix.line], below, pairs)
    if kind == "-mp":
        matrix.warnings.append("`topo -mp` hides NVLink: no NV# here says nothing about NVLink")
    matrix.warnings.extend(_affinity_warnings(gpus))
    numa = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    return complete(
        NodeTopology(
            hostname=source,
            gpus=gpus,
            nics=nics,
            pairs=pairs,
            numa_nodes=len(numa) or None,
            source=f"nvidia-smi topo {kind}",
            warnings=tuple(matrix.warnings),
        )
    )


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name) is not None


def _check_names(matrix: _Matrix, source: str) -> None:
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


def _read_row(row: _Row, matrix: _Matrix, clean_nvlinks: frozenset[str], source: str) -> None:
    devices = matrix.header.devices
    count, own = len(devices), devices.index(row.name)
    cells = _best_cells(row.text, count, own, clean_nvlinks)
    labels = cells.labels
    diagonal = labels[own] if own < len(labels) else None
    if len(labels) < count or diagonal != SELF:
        by_tabs = tab_cells(row.text.split("\n")[0], count)
        if by_tabs and by_tabs[own] == SELF:
            row.labels, row.rest = by_tabs, ""
            matrix.warnings.append(f"line {row.line}: row {row.name} has empty cells; the opposite rows fill them")
            return
    if cells.stuck and not re.match(r"[\d\"'`]", cells.stuck):
        _refuse(row, devices[len(labels)], cells.stuck, source)
    if diagonal not in (SELF, None) or SELF in labels[:own] or SELF in labels[own + 1 :]:
        where = devices[labels.index(SELF)] if SELF in labels else "no column"
        raise TopologyTextError(
            source, row.line, f"row {row.name}: X stands under {where}, expected under {row.name} (cells are missing?)"
        )
    if len(labels) < count:
        _short_row(row, labels, matrix, source)
    row.labels, row.rest = labels, cells.rest.split("\n")[0] if len(labels) == count else ""
    matrix.warnings.extend(f"line {row.line}: row {row.name}: {note}" for note in cells.notes)


def _best_cells(text: str, count: int, own: int, clean_nvlinks: frozenset[str]) -> Cells:
    """The cells of the first line, or of that line and those it was wrapped into."""
    first, *following = text.split("\n")
    best = read_cells(first, count, clean_nvlinks)
    joined_tight = joined_loose = first
    for line in following[: _WRAPPED_LINES - 1]:
        if len(best.labels) == count:
            break
        joined_tight, joined_loose = joined_tight + line, joined_loose + " " + line
        for joined in (joined_tight, joined_loose):
            tried = read_cells(joined, count, clean_nvlinks)
            if len(tried.labels) > len(best.labels) and (own >= len(tried.labels) or tried.labels[own] == SELF):
                best = tried
    return best


def _refuse(row: _Row, column: str, word: str, source: str) -> None:
    where = f"row {row.name} under {column}"
    if word in _P2P:
        raise TopologyTextError(
            source,
            row.line,
            f'{where}: "{word}" is a P2P status: this is `nvidia-smi topo -p2p`, which says what peers may do and '
            "not how they are linked; expected the output of `nvidia-smi topo -m`",
        )
    vendor = next((name for pattern, name in _OTHER_VENDORS if pattern.fullmatch(word)), None)
    raise TopologyTextError(
        source,
        row.line,
        f'{where}: "{word[:40]}" is no label of `nvidia-smi topo -m`'
        + (f", it is one of {vendor}" if vendor else "")
        + "; expected X, NV#, PIX, PXB, PHB, NODE, SYS or SOC",
    )


def _short_row(row: _Row, labels: tuple[str, ...], matrix: _Matrix, source: str) -> None:
    """A row that ends early is bearable where every missing pair has its opposite cell."""
    devices = matrix.header.devices
    whole = {other.name for other in matrix.rows if len(read_cells(other.text, len(devices)).labels) == len(devices)}
    missing = [name for name in devices[len(labels) :] if name != row.name and name not in whole]
    if missing:
        raise TopologyTextError(
            source,
            row.line,
            f"row {row.name} has {len(labels)} cells, expected {len(devices)} as the header in line {matrix.line}",
        )
    matrix.warnings.append(f"line {row.line}: row {row.name} ends after {len(labels)} of {len(devices)} cells")


def _below(lines: list[str], matrix: _Matrix) -> list[str]:
    """Lines after the matrix, up to the next one: its legends."""
    below: list[str] = []
    for line in lines[matrix.end :]:
        header = read_header(line)
        if header and len(header.devices) > 1 and below:
            break
        below.append(line)
    return below[:2048]


def _kind(above: list[str], below: list[str], pairs: tuple[Pair, ...]) -> str:
    if any(pair.nvlinks for pair in pairs):
        return "-m"
    said = re.findall(r"nvidia-smi\s+topo\s+(-mp|-m|--matrix)\b", "\n".join(above[-8:]))
    if said:
        return "-mp" if said[-1] == "-mp" else "-m"
    legend = "\n".join(below)
    # -mp prints the same legend without its last line.
    return "-mp" if re.search(r"\bPIX\s*=", legend) and "NV#" not in legend else "-m"


def _gpu(name: str, affinity: Affinity) -> GpuNode:
    numa = affinity.numa
    return GpuNode(
        name=name,
        index=int(name[3:]),
        numa_node=int(numa) if numa and numa.isdigit() and len(numa) < 6 else None,
        cpu_affinity=affinity.cpu,
        numa_affinity=numa,
        gpu_numa_id=affinity.gpu_numa_id,
    )


def _nics(columns: tuple[str, ...], legend: dict[str, str]) -> tuple[NicNode, ...]:
    named = [legend.get(column, column) for column in columns]
    return tuple(
        NicNode(
            name=name if named.count(name) == 1 else column,
            label=column,
            kind="hca" if re.match(r"mlx\d_|ib|roce", name) else "unknown",
        )
        for column, name in zip(columns, named, strict=True)
    )


def _pairs(matrix: _Matrix, names: dict[str, str], source: str) -> tuple[Pair, ...]:
    devices = matrix.header.devices
    rows = {row.name: row for row in matrix.rows}
    for device in devices:
        if device not in rows:
            matrix.warnings.append(f"row {device} is missing: its pairs are known from the other rows only")
    made = []
    for i, a in enumerate(devices):
        for j in range(i + 1, len(devices)):
            b = devices[j]
            seen = [(rows[x], rows[x].labels[k]) for x, k in ((a, j), (b, i)) if x in rows and k < len(rows[x].labels)]
            known = [(row, label) for row, label in seen if label != UNKNOWN] or seen
            if not known:
                continue
            made.append(_pair(a, b, known, matrix, names, source))
    return tuple(made)


def _pair(a: str, b: str, seen: list[tuple[_Row, str]], matrix: _Matrix, names: dict[str, str], source: str) -> Pair:
    row, label = seen[0]
    if len(seen) == 2 and seen[1][1] != label:
        other = seen[1][1]
        label = lower(label, other)
        matrix.warnings.append(f"{a} to {b} is {seen[0][1]}, {b} to {a} is {other}: {label} is taken, the lower one")
        row = seen[0][0] if seen[0][1] == label else seen[1][0]
    return Pair(
        a=names.get(a, a),
        b=names.get(b, b),
        label=label,
        path=path_class(label),
        nvlinks=nvlinks(label),
        evidence=f"line {row.line} of {source}",
    )


def _affinity_warnings(gpus: tuple[GpuNode, ...]) -> list[str]:
    warnings = []
    spans = [gpu for gpu in gpus if gpu.numa_affinity and re.search(r"[-,]", gpu.numa_affinity)]
    few = [gpu.name for gpu in spans if gpu.cpu_affinity and gpu.cpu_affinity.isdigit()]
    if few:
        warnings.append(
            f"CPU affinity of {', '.join(few)} is one CPU while NUMA affinity spans several nodes: not credible"
        )
    cut = [gpu.name for gpu in gpus if re.fullmatch(r"\d+(,\d+){2,}", gpu.cpu_affinity or "")]
    if cut:
        warnings.append(f"CPU affinity of {', '.join(cut)} is a list of single CPUs: nvidia-smi cuts such lists short")
    return warnings
