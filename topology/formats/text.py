"""Read what `nvidia-smi topo -m` (or `-mp`) printed, in whatever state it reached us.

Specification: `nvidia-smi topo --help` and the legend it prints. The rules on broken cells are in `text_lines`. The
first matrix of the text is taken. Whatever cannot be read raises `TopologyTextError`, which names the line.
"""

from __future__ import annotations

import re
from dataclasses import replace

from topology.derive import complete, rails
from topology.formats.matrix import render
from topology.formats.text_lines import (
    WRAPPED_LINES,
    Affinity,
    Cells,
    Header,
    Matrix,
    Row,
    find,
    leading_columns,
    lines_of,
    names_gpu_first,
    read_affinity,
    read_cells,
    read_header,
    read_leading,
    row_name,
    tab_cells,
)
from topology.graph import (
    NVLINK,
    SELF,
    UNKNOWN,
    GpuNode,
    NicNode,
    NodeTopology,
    Pair,
    PathClass,
    lower,
    nvlinks,
    path_class,
)

__all__ = ["TopologyTextError", "parse", "render"]

MOST_BYTES = 16 * 2**20


def parse(text: str, source: str = "text") -> NodeTopology:
    """The topology a matrix shows. Raises TopologyTextError."""
    try:
        return _parse(text, source)
    except TopologyTextError:
        if "\\n" not in text:
            raise
        # A matrix inside a JSON or Python string: its line breaks are spelled out.
        return _parse(text.replace("\\r", "").replace("\\n", "\n"), source)


def _parse(text: str, source: str) -> NodeTopology:
    if len(text) > MOST_BYTES:
        raise TopologyTextError(source, 1, f"{len(text)} characters are more than the {MOST_BYTES} that are read")
    lines, others = lines_of(text)
    if text.lstrip("\ufeff \t\r\n").startswith(("<?xml", "<system", "<!--")):
        raise TopologyTextError(source, 1, "this is XML, not `nvidia-smi topo -m` text")
    first_error: TopologyTextError | None = None
    found: NodeTopology | None = None
    at = 0
    while at < len(lines):
        matrix = find(lines, at)
        if matrix is None:
            break
        at = max(matrix.end, matrix.line)
        if found is not None:
            found = _not_all_nics(found, text)
            return _with_warning(found, f"line {matrix.line}: a further matrix follows and is not read")
        try:
            found = _finish(matrix, lines, source)
            found = _with_warning(found, others) if others else found
        except TopologyTextError as error:
            first_error = first_error or error
    if found is not None:
        found = _not_all_nics(found, text)
        if first_error:
            return _with_warning(found, f"line {first_error.line}: passed over: {first_error.message}")
        return found
    raise first_error or _no_matrix(lines, source)


_NO_NIC = re.compile(r"(?i:nvme|cpu)\d[\w.\-]*")
_OTHER_DEVICES = (  # what begins the header of a matrix of devices that are not called GPU0
    (re.compile(r"[\s|]*NPU\s?\d"), "Huawei npu-smi"),
    (re.compile(r"[\s|]*(DCU|HCU)\s?\d"), "Hygon hy-smi"),
    (re.compile(r"[\s|]*GPU \d+/\d"), "Intel xpu-smi"),
    (re.compile(r"[\s|]*PPU\s?\d"), "Alibaba ppu-smi"),
)


def _with_warning(node: NodeTopology, warning: str) -> NodeTopology:
    return replace(node, warnings=(*node.warnings, warning))


_CUT_NICS = re.compile(r"\b(\d{1,6}) NICs found, only displaying (\d{1,6})\b")


def _not_all_nics(node: NodeTopology, text: str) -> NodeTopology:
    """nvidia-smi leaves NICs out where it finds too many: a nearer one than those shown cannot be ruled out.

    PIX stays: nothing is nearer.
    """
    match = _CUT_NICS.search(text)
    if match is None or int(match[1]) <= int(match[2]):
        return node
    why = f"nvidia-smi shows {match[2]} of {match[1]} NICs"
    nearest = tuple(
        near if near.path is not None and near.path <= PathClass.PIX else replace(near, decidable=False, why=why)
        for near in node.nearest_nic
    )
    warning = f"{why}: those left out are in no verdict; virtual functions count, so fewer of them show all"
    return _with_warning(replace(node, nearest_nic=nearest, rails=rails(nearest)), warning)


def _no_matrix(lines: list[str], source: str) -> TopologyTextError:
    for number, line in enumerate(lines, 1):
        name = row_name(line)
        if name and name.startswith("GPU") and SELF in line.split():
            return TopologyTextError(
                source, number, f"row {name} without a header line above that names GPU0 and the other columns"
            )
    for number, line in enumerate(lines, 1):
        header = read_header(line) if names_gpu_first(line) else None
        below = next((other.split() for other in lines[number : number + 3] if other.split()), [""])
        if header and len(header.devices) > 1 and below[0] == header.devices[0]:
            words = " ".join(below[1:4])[:60]
            return TopologyTextError(
                source,
                number + 1,
                f'row {below[0]} begins with "{words}": expected X, NV#, PIX, PXB, PHB, NODE, SYS or SOC',
            )
    number, tool = next(
        ((number, tool) for number, line in enumerate(lines, 1) for mark, tool in _OTHER_DEVICES if mark.match(line)),
        (1, ""),
    )
    return TopologyTextError(
        source,
        number,
        "no header line with GPU0 and rows below it"
        + (f"; this looks like {tool}" if tool else "")
        + ": expected the output of `nvidia-smi topo -m`",
    )


def _finish(matrix: Matrix, lines: list[str], source: str) -> NodeTopology:
    check_names(matrix, source)
    clean_nvlinks = frozenset(
        word for row in matrix.rows for word in row.text.split() if NVLINK.fullmatch(word) and len(word) < 6
    )
    for row in matrix.rows:
        read_row(row, matrix, clean_nvlinks, source)
    devices = matrix.header.devices
    below = _below(lines, matrix)
    legend = dict(re.findall(r"(?<![\w.])(NIC\d{1,4})\s*:\s*([\w.\-]+)", "\n".join(below)))
    affinities = _affinities(matrix, lines)
    if cut := _cut_affinity(matrix, lines, affinities):
        affinities[matrix.rows[-1].name] = cut
    gpus = tuple(_gpu(name, affinities.get(name, Affinity())) for name in devices if _is_gpu(name))
    no_nics = tuple(name for name in devices if _NO_NIC.fullmatch(name))
    if no_nics:
        matrix.warnings.append(f"{', '.join(no_nics)}: no network devices; their cells are not read")
    nics = _nics(tuple(name for name in devices if not _is_gpu(name) and name not in no_nics), legend)
    pairs = _pairs(matrix, {nic.label or nic.name: nic.name for nic in nics}, source)
    kind = _kind(lines[: matrix.line], below, pairs)
    if kind == "-mp":
        matrix.warnings.append("`topo -mp` hides NVLink: no NV# here says nothing about NVLink")
    matrix.warnings.extend(_affinity_warnings(gpus))
    for row in matrix.rows:
        if unread := affinities[row.name].unread:
            matrix.warnings.append(f'line {row.line}: row {row.name}: "{unread[:60]}" is no list of CPUs or NUMA nodes')
    numa = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    return complete(
        NodeTopology(
            hostname=source,
            gpus=gpus,
            nics=nics,
            pairs=pairs,
            numa_nodes=len(numa) or None,
            source=f"nvidia-smi topo {kind}",
            nvlink_known=kind != "-mp",
            warnings=tuple(matrix.warnings),
            lacking=tuple(matrix.lacking),
        )
    )


def _affinities(matrix: Matrix, lines: list[str]) -> dict[str, Affinity]:
    columns = leading_columns(lines[matrix.line - 1])
    if columns and not matrix.header.affinity_columns:
        before = {row.name: lines[row.line - 1].partition(row.name)[0] for row in matrix.rows}
        return {name: read_leading(text, columns) for name, text in before.items()}
    return {row.name: read_affinity(row.cells, row.rest, matrix.header) for row in matrix.rows}


def _cut_affinity(matrix: Matrix, lines: list[str], affinities: dict[str, Affinity]) -> Affinity | None:
    """What the last row holds for sure where the text ends within its affinity; None where it does not."""
    row, columns = matrix.rows[-1], ("gpu_numa_id", "numa", "cpu")  # last first
    found = affinities[row.name]
    filled = [column for column in columns if getattr(found, column)]
    missing = matrix.unfinished or len(filled) < matrix.header.affinity_columns
    if not (filled and missing and matrix.end == len(lines) and row.rest[-1:].strip()):
        return None
    matrix.lacks(f"line {row.line}: the text ends within row {row.name}: its last word may be cut")
    return Affinity(
        cpu=None if filled[0] == "cpu" else found.cpu,
        numa=None if filled[0] == "numa" else found.numa,
        unread=found.unread,
    )


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name) is not None


def _below(lines: list[str], matrix: Matrix) -> list[str]:
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
    options = re.findall(r"nvidia-smi\s+topo\s+(-mp|-m|--matrix)\b", "\n".join(above[-8:]))
    if options:
        return "-mp" if options[-1] == "-mp" else "-m"
    legend = "\n".join(below)
    # -mp prints the same legend without its last line.
    return "-mp" if re.search(r"\bPIX\s*=", legend) and "NV#" not in legend else "-m"


def _gpu(name: str, affinity: Affinity) -> GpuNode:
    numa = affinity.numa
    return GpuNode(
        name=name,
        index=int(name[3:]),
        numa_node=int(numa) if numa and numa.isdecimal() and len(numa) < 6 else None,
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
            # Without a legend too: nvidia-smi gives columns to what a driver of Mellanox serves.
            kind="hca" if re.match(r"mlx\d_|ib|roce|NIC\d+$", name) else "unknown",
        )
        for column, name in zip(columns, named, strict=True)
    )


def _pairs(matrix: Matrix, names: dict[str, str], source: str) -> tuple[Pair, ...]:
    devices = matrix.header.devices
    rows = {row.name: row for row in matrix.rows}
    for device in devices:
        if device not in rows and not _NO_NIC.fullmatch(device):
            matrix.lacks(f"row {device} is missing: its pairs are known from the other rows only")
    made = []
    for i, a in enumerate(devices):
        for j in range(i + 1, len(devices)):
            b = devices[j]
            if _NO_NIC.fullmatch(a) or _NO_NIC.fullmatch(b):
                continue
            seen = [(rows[x], rows[x].labels[k]) for x, k in ((a, j), (b, i)) if x in rows and k < len(rows[x].labels)]
            known = [(row, label) for row, label in seen if label != UNKNOWN] or seen
            if not known:
                continue
            made.append(_pair(a, b, known, matrix, names, source))
    return tuple(made)


def _pair(a: str, b: str, seen: list[tuple[Row, str]], matrix: Matrix, names: dict[str, str], source: str) -> Pair:
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
    few = [gpu.name for gpu in spans if gpu.cpu_affinity and gpu.cpu_affinity.isdecimal()]
    if few:
        warnings.append(
            f"CPU affinity of {', '.join(few)} is one CPU while NUMA affinity spans several nodes: not credible"
        )
    cut = [gpu.name for gpu in gpus if re.fullmatch(r"\d+(,\d+){2,}", gpu.cpu_affinity or "")]
    if cut:
        warnings.append(f"CPU affinity of {', '.join(cut)} is a list of single CPUs: nvidia-smi cuts such lists short")
    return warnings


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
    matrix.lacks(f"line {row.line}: {message}: the header misses columns, which are not read")


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
    matrix.lacks(f"line {row.line}: row {row.name} ends after {len(labels)} of {len(devices)} cells")
