"""Reads the matrix that `nvidia-smi topo -m` (or `-mp`) prints.

Specification: `nvidia-smi topo --help` and the legend that it prints; drivers 361 to 580 print tabs between cells and
``ESC[4m`` around the header. The parser also accepts copies changed by terminals, logs and web pages: escape codes,
line prefixes, blanks instead of tabs, names or cells without a blank between them, Markdown and HTML, JSON and Python
strings, and truncated text. Lines of `nvidia-smi -L` or PyTorch's collect_env in the text give the models of the GPUs.

Rejected, with the line: lines wrapped by a terminal, empty cells, a header without all columns, interleaved lines of
several hosts. If a text contains several matrices, the first is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations

from contracts.tables import read_table, read_texts
from hardware.gpus import find_gpu, most_links
from hardware.units import some
from topology.derive import complete, find_rails
from topology.formats import TopologyFileError
from topology.graph import SELF, UNKNOWN, GpuNode, NicNode, NodeTopology, Pair, PathClass, nvlinks, path_class, rank

_text = read_texts(__file__, "texts.toml")

MAX_BYTES = 16 * 2**20
_MAX_LINE = 8_192  # 256 columns of up to 16 characters, plus the prefix of a log line
_MAX_DEVICES = 256  # the largest node on the market has 16 GPUs and 32 NICs
_WIDEST_GAP = 32  # unrelated log lines between two rows

_ESCAPES = re.compile(
    r"(?:\x1b|\^\[|\\(?:033|e|x1[bB]|u001[bB]))\[[0-9;?]*[A-Za-z]"  # the escape character, and its textual forms
    r"|\[\d{1,2}(?:;\d{1,2})*m"  # remains if the escape character itself was lost
)
_TAGS = re.compile(r"</?[A-Za-z][^<>]{0,200}>")  # <br>, </pre>, and mpirun's <stdout>
_NOTES = re.compile(r"[(\[][^()\[\]\"']*[)\]]")  # "NIC2 (vf0)"
_SPELLED_BREAK = re.compile(r"(?:\\r)?\\n|([\"'])\s*,\s*\1")  # in a JSON or Python string, and between two of them

_LABEL = r"(?:X(?!GMI)|NV\d{1,3}(?![\d,\-])|PIX|PXB|PHB|NODE|SYS|SOC|N/A|ERR!)"
_NAME = re.compile(rf"(?<![\w.\-])([A-Za-z][\w.\-]{{0,80}})(?=\s{{1,64}}{_LABEL}(?![a-z]))")
_CELL = re.compile(rf"\s*({_LABEL})")
_WHOLE_LABELS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_DEVICE = r"(?:GPU|NIC)\d{1,4}|mlx\d_(?:bond_)?\d{1,4}"
_WORD = re.compile(
    rf"(?P<device>(?:{_DEVICE})(?=[^\w.\-]|$|GPU|NIC|mlx|CPU|NUMA))"
    r"|(?P<cpu>(?i:CPU\s*Aff)[a-z]*)|(?P<gpu_numa_id>(?i:GPU\s*NUMA\s*)(?:ID?)?)"
    r"|(?P<numa>(?i:(?:NUMA|Node)\s*Aff)[a-z]*|NUMA(?=\s*$))|(?P<title>Affinity)|(?P<other>[\w.][\w.\-/:]*)"
)
_CUT_NAME = re.compile(r"GP?U?|NI?C?|ml?x?\d?_?")
_AFFINITY = re.compile(r"\d+(?:[-,]\d+)*|N/A")
_MODEL = re.compile(r"\W{0,8}GPU (\d{1,4}(?:,\d{1,4}){0,64}): +([\w./-]+(?: [\w./-]+)*)")  # GPU 0,1: NVIDIA GB10
_NO_NIC = re.compile(r"(?i:nvme|cpu)\d[\w.\-]*|CPU")


@dataclass(slots=True)
class _Row:
    """One row during parsing: its labels, and `rest`, the text after them."""

    name: str
    line: int
    text: str  # after the row's name
    below: str = ""  # the next line
    labels: list[str] = field(default_factory=list)
    rest: str = ""


@dataclass(slots=True)
class _Matrix:
    """One matrix during parsing."""

    source: str
    line: int  # line number of the header
    devices: list[str]
    columns: list[str]  # the affinity columns: "cpu", "numa", "gpu_numa_id"
    sure: bool  # every column is certainly a device name, not a word of prose
    rows: list[_Row] = field(default_factory=list)
    end: int = 0  # index of the line after the last row
    ends_text: bool = False  # whether only whitespace follows the last row
    warnings: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)  # the warnings about missing rows and cells

    def lacks(self, part: str) -> None:
        """Record that rows or cells named in the header are missing from the text."""
        self.warnings.append(part)
        self.lacking.append(part)

    def error(self, row: _Row, key: str, **values: object) -> TopologyFileError:
        """Return the exception for a row."""
        message = _text(key, header=self.line, count=len(self.devices), **values)
        return TopologyFileError(self.source, row.line, f"row {row.name} {message}")


_Lines = list[tuple[int, str]]


def parse(text: str, source: str = "text") -> NodeTopology:
    """Parse a matrix to a topology. Raises TopologyFileError."""
    if len(text) > MAX_BYTES:
        raise TopologyFileError(source, 1, _text("characters", count=len(text), most=MAX_BYTES))
    if text.lstrip("\ufeff \t\r\n").startswith(("<?xml", "<system", "<!--")):
        raise TopologyFileError(source, 1, _text("xml"))
    lines = list(_split_lines(text))
    matrix = _find_matrix(lines, 0, source)
    if matrix and matrix.rows:
        _drop_columns_without_labels(matrix, source)
    if not (matrix and matrix.rows):  # prose about "GPU2" and "GPU3"
        raise _make_no_matrix_error(lines, source)
    is_whole = text[-1:].isspace()
    for row in matrix.rows:
        _read_row(row, matrix, ends_text=matrix.ends_text and row is matrix.rows[-1], whole=is_whole)
    with suppress(TopologyFileError):
        if further := _find_matrix(lines, matrix.end, source):
            matrix.warnings.append(_text("further_matrix", line=further.line))
    return _mark_truncated_nics(_build_node(matrix, lines, cut=matrix.ends_text and not is_whole), text)


def _split_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) without decorations; line breaks inside a quoted string split its line."""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        for part in _SPELLED_BREAK.sub("\n", line).split("\n"):
            plain = part[:_MAX_LINE].replace("\xa0", " ").replace("&nbsp;", " ").rstrip("\r")
            plain = _TAGS.sub("", _ESCAPES.sub("", plain)).replace("\\t", "\t")
            yield number, _NOTES.sub("", plain.replace("|", " ").replace("**", ""))  # Markdown tables and bold text


def _parse_header(number: int, line: str, source: str) -> _Matrix | None:
    """Parse the columns of a header line; None if the line is not a header."""
    first = re.search(_DEVICE, line)
    if first is None or not first[0].startswith("GPU"):
        return None
    matrix = _Matrix(source, number, [], [], sure=True)
    for word in _WORD.finditer(line, first.start()):
        if word.lastgroup in ("cpu", "numa", "gpu_numa_id"):
            matrix.columns.append(word.lastgroup)
        elif matrix.columns or word.lastgroup == "title":
            continue  # a comment after the columns
        elif re.fullmatch(_LABEL, word[0]):
            return None
        else:
            matrix.devices.append(word[0])
            matrix.sure = matrix.sure and _is_surely_a_device(word[0])
    names = matrix.devices
    return matrix if len(names) <= _MAX_DEVICES and len(set(names)) == len(names) else None


def _is_surely_a_device(word: str) -> bool:
    return word[0].isalpha() and any(map(str.isdigit, word))


def _find_matrix(lines: _Lines, start: int, source: str) -> _Matrix | None:
    """Find the next header with rows, and split its rows. Raises TopologyFileError if the rows do not match it."""
    header, place = None, 0
    for position in range(start, len(lines)):
        number, line = lines[position]
        if header is not None and position - place <= _WIDEST_GAP and _parse_row(line, number, header):
            _collect_rows(lines, position, header)
            return header
        candidate = _parse_header(number, line, source) if "GPU" in line else None
        if candidate and (header is None or candidate.sure or not header.sure or position - place > _WIDEST_GAP):
            header, place = candidate, position
    return None


def _parse_row(line: str, number: int, matrix: _Matrix) -> _Row | None:
    """Parse a row after any line prefix; None if there is none. Raises TopologyFileError if it has no column."""
    for name in _NAME.finditer(line):
        row = _Row(name[1], number, line[name.end() :])
        if row.name in matrix.devices:
            return row
        if re.fullmatch(_DEVICE, row.name) and matrix.sure:
            raise matrix.error(row, "no_column", columns=" ".join(matrix.devices))
    return None


def _collect_rows(lines: _Lines, start: int, matrix: _Matrix) -> None:
    """Add rows from line `start` to the matrix, up to the legend, the next header, or a repeated row."""
    names: set[str] = set()
    last = start
    for position in range(start, len(lines)):
        number, line = lines[position]
        if "Legend" in line or position - last > _WIDEST_GAP:
            break
        other = _parse_header(number, line, matrix.source) if "GPU" in line else None
        if other is not None and other.sure and len(other.devices) > 1:
            break
        row = _parse_row(line, number, matrix)
        if row is None:
            continue
        if row.name in names and len(names) == len(matrix.devices):
            break
        if row.name in names:
            raise matrix.error(row, "row_again")
        names.add(row.name)
        row.below = lines[position + 1][1] if position + 1 < len(lines) else ""
        matrix.rows.append(row)
        last = position
    matrix.end = last + 1
    matrix.ends_text = not any(line.strip() for _, line in lines[matrix.end :])


def _make_no_matrix_error(lines: _Lines, source: str) -> TopologyFileError:
    """Return the exception if no header has rows. It names the tool that wrote the text, if that is known."""
    for other in read_table(__file__, "others.toml")["output"]:
        for number, line in lines[:1024]:
            if re.search(other["pattern"], line):
                return TopologyFileError(source, number, _text(other.get("text", "other_output"), **other))
    return TopologyFileError(source, 1, _text("no_matrix"))


def _parse_cells(text: str, count: int) -> tuple[list[str], str]:
    """Return up to `count` labels after a row's name, and the text after them."""
    labels: list[str] = []
    offset = 0
    while len(labels) < count and (cell := _CELL.match(text, offset)):
        labels.append(UNKNOWN if cell[1] == "ERR!" else cell[1])
        offset = cell.end()
    return labels, text[offset:]


def _drop_columns_without_labels(matrix: _Matrix, source: str) -> None:
    """Drop trailing header words for which no row has a label, such as "Model" in a hand-made table."""
    widest = max(len(_parse_cells(row.text, len(matrix.devices))[0]) for row in matrix.rows)
    while len(matrix.devices) > widest and not _is_surely_a_device(matrix.devices[-1]):
        name = matrix.devices.pop()[:40]
        if _CUT_NAME.fullmatch(name):
            raise TopologyFileError(source, matrix.line, _text("cut_header", name=name))
        matrix.warnings.append(_text("no_labels", line=matrix.line, name=name))
    matrix.rows = [row for row in matrix.rows if row.name in matrix.devices]


def _read_row(row: _Row, matrix: _Matrix, *, ends_text: bool, whole: bool) -> None:
    """Parse labels and rest of a row; `whole`: its last word is complete. Raises TopologyFileError."""
    devices, count = matrix.devices, len(matrix.devices)
    labels, row.rest = _parse_cells(row.text, count)
    column = devices.index(row.name)
    word = row.rest.split()[:1]
    short = len(labels) < count
    cut = ends_text and short and any(label.startswith("".join(row.rest.split())) for label in ("NV#", *_WHOLE_LABELS))
    if ends_text and not row.rest and not whole and labels[-1].startswith("NV") and (short or len(matrix.rows) < count):
        labels.pop()  # "NV1" at the end of a truncated text may have been NV18
    if short and not cut and word and not re.match(r"[\d\"'`]", word[0]):
        raise matrix.error(row, "no_label", column=devices[len(labels)], word=word[0][:40])
    if SELF in labels[:column] + labels[column + 1 :] or labels[column : column + 1] not in ([], [SELF]):
        place = devices[labels.index(SELF)] if SELF in labels else "no column"
        raise matrix.error(row, "misplaced_self", where=place, own=row.name)
    if short and not cut:
        raise matrix.error(row, "short_row", found=len(labels))
    if len(labels) < count:
        matrix.lacks(_text("cut_row", line=row.line, row=row.name, found=len(labels), count=count))
        row.rest = ""
    if word and word[0] != UNKNOWN and re.fullmatch(_LABEL, word[0]):
        raise matrix.error(row, "long_row", word=word[0])
    row.labels = labels


def _build_node(matrix: _Matrix, lines: _Lines, *, cut: bool) -> NodeTopology:
    """Build the node from a matrix. If `cut`, the text is truncated and its last word may be incomplete."""
    below = "\n".join(line for _, line in lines[matrix.end : matrix.end + 2048])
    below = re.split(r"\n(?=[^\n=]*GPU0\s+(?:GPU1|CPU))", below)[0]  # the next matrix has its own legends
    legend = dict(re.findall(r"(?<![\w.])(NIC\d{1,4})\s*:\s*([\w.\-]+)", below))
    rows = {row.name: row for row in matrix.rows}
    last = matrix.rows[-1]
    if cut and last.rest.strip() and (len(rows) < len(matrix.devices) or len(_split_lists(last)) < len(matrix.columns)):
        matrix.lacks(_text("cut_word", line=last.line, row=last.name))
        last.rest = last.rest[: last.rest.rindex(last.rest.split()[-1])]
    others = [name for name in matrix.devices if _NO_NIC.fullmatch(name)]
    if others:
        matrix.warnings.append(_text("no_nics", names=", ".join(others)))
    models = {f"GPU{i}": m[2] for _, line in reversed(lines) if (m := _MODEL.match(line)) for i in m[1].split(",")}
    gpu_names = [name for name in matrix.devices if re.fullmatch(r"GPU\d+", name)]
    gpus = tuple(_build_gpu(name, rows.get(name), matrix, models.get(name)) for name in gpu_names)
    nics = _build_nics([name for name in matrix.devices if name not in (*gpu_names, *others)], legend)
    # A GPU whose memory is a NUMA node is attached to a Grace CPU by C2C.
    coherent = {gpu.name for gpu in gpus if gpu.c2c}
    nic_names = {nic.label or nic.name: nic.name for nic in nics}
    pairs = _build_pairs(matrix, rows, nic_names, coherent, others)
    kind = _guess_kind([line for _, line in lines[: matrix.end]], below, pairs)
    if kind == "-mp":
        matrix.warnings.append(_text("hidden_nvlink"))
    matrix.warnings += _list_affinity_warnings(gpus)
    linked = [pair.nvlinks for pair in pairs if pair.a in gpu_names and pair.b in gpu_names]
    if linked and min(linked) * (len(gpus) - 1) > most_links() and len(gpus) not in (4, 8, 16):  # joined by an NVSwitch
        matrix.warnings.append(_text("few_gpus", count=len(gpus)))
    return complete(
        NodeTopology(
            hostname=matrix.source,
            gpus=gpus,
            nics=nics,
            pairs=pairs,
            numa_nodes=len({gpu.numa_node for gpu in gpus} - {None}) or None,
            source=f"nvidia-smi topo {kind}",
            nvlink_known=kind != "-mp",
            warnings=tuple(matrix.warnings),
            lacking=tuple(matrix.lacking),
        )
    )


def _guess_kind(above: list[str], below: str, pairs: tuple[Pair, ...]) -> str:
    """Return "-m" or "-mp", from the labels, the command above, or the legend (which has no NV# with -mp)."""
    options = re.findall(r"nvidia-smi\s+topo\s+(-mp|-m|--matrix)\b", "\n".join(above))
    is_hidden = options[-1] == "-mp" if options else re.search(r"\bPIX\s*=", below) and "NV#" not in below
    return "-mp" if is_hidden and not any(pair.nvlinks for pair in pairs) else "-m"


def _build_gpu(name: str, row: _Row | None, matrix: _Matrix, model: str | None) -> GpuNode:
    """Build a GPU; `model` is its name in lines as those of `nvidia-smi -L` next to the matrix."""
    affinity, gpu = _assign_affinity(row, matrix.columns) if row else {}, find_gpu(model)
    numa = affinity.get("numa")
    return GpuNode(
        name=name,
        index=int(name[3:]),
        model=model if gpu else None,
        compute_capability=gpu.compute_capability if gpu else None,
        numa_node=int(numa) if numa and numa.isdecimal() and len(numa) < 6 else None,
        cpu_affinity=affinity.get("cpu"),
        numa_affinity=numa,
        gpu_numa_id=affinity.get("gpu_numa_id"),
        c2c=True if (affinity.get("gpu_numa_id") or "").isdigit() else None,
    )


def _split_lists(row: _Row) -> list[str]:
    """Return the CPU and NUMA lists after a row's cells, up to the first other word."""
    cells: list[str] = []
    for word in re.sub(r",\s+", ",", row.rest).split():
        stripped = word.strip("\"'`,;]})")
        if not _AFFINITY.fullmatch(stripped):
            break
        cells.append(stripped)
    return cells


def _assign_affinity(row: _Row, columns: list[str]) -> dict[str, str]:
    """Assign the words after a row's cells to columns: "cpu", "numa", "gpu_numa_id".

    nvidia-smi leaves a CPU list empty if its cpuset hides the CPUs (Slurm). If words are missing, tabs show which ones.
    Without tabs, the first columns are assumed empty, unless the first word can only be a CPU list.
    """
    cells_given = _split_lists(row)
    missing = len(columns) - len(cells_given)
    if missing > 0 and cells_given and re.fullmatch(r"[\s\d,\-]*\d[\s\d,\-]*(?:N/A\s*)?", row.below):
        return {}  # a terminal wrapped the row, so its last word may be incomplete
    tail = row.rest.lstrip(" ")  # the last cell may be " X "
    if missing > 0 and tail.startswith("\t") and not re.search(r"\t *\t", row.text.removesuffix(row.rest)):
        cells = [cell.strip() for cell in tail.split("\t")[1:]]
        last = len(columns) - 1
        return {columns[min(index, last)]: cell for index, cell in enumerate(cells) if _AFFINITY.fullmatch(cell)}
    if missing > 0 and cells_given and columns[0] == "cpu" and _is_cpu_list(cells_given[0]):
        return dict(zip([columns[0], *columns[1 + missing :]], cells_given, strict=True))
    return dict(zip(columns[max(missing, 0) :], cells_given, strict=False))


def _is_cpu_list(word: str) -> bool:
    """Whether a single word is a CPU list and not a NUMA list.

    NUMA lists in real output: single nodes up to 8 (POWER9), ranges up to 0-7, and "0,2-17" on GB200, where GPU
    memories and MIG partitions are also NUMA nodes.
    """
    highest = max(map(int, re.findall(r"\d{1,9}", word)[:64]), default=0)
    return highest > 34 or (highest > 8 and re.fullmatch(r"\d+,\d+-\d+", word) is None)


def _list_affinity_warnings(gpus: tuple[GpuNode, ...]) -> list[str]:
    few = [gpu.name for gpu in gpus if (gpu.cpu_affinity or "").isdecimal() and set(gpu.numa_affinity or "") & {*"-,"}]
    cut = [gpu.name for gpu in gpus if re.fullmatch(r"\d+(,\d+){2,}", gpu.cpu_affinity or "")]
    none = [gpu.name for gpu in gpus if gpu.numa_affinity and gpu.cpu_affinity in (None, UNKNOWN)]
    names_by_text = {"one_cpu": few, "no_cpu_near": none if len(none) < len(gpus) else [], "cut_affinity": cut}
    return [_text(key, gpus=", ".join(names)) for key, names in names_by_text.items() if names]


def _build_nics(columns: list[str], legend: dict[str, str]) -> tuple[NicNode, ...]:
    names = [legend.get(column, column) for column in columns]
    return tuple(
        NicNode(
            name=name if names.count(name) == 1 else column,
            label=column,
            # also without a legend: nvidia-smi only lists devices of Mellanox drivers
            kind="hca" if re.match(r"mlx\d_|ib|roce|NIC\d+$", name) else "unknown",
        )
        for column, name in zip(columns, names, strict=True)
    )


def _build_pairs(
    matrix: _Matrix, rows: dict[str, _Row], nics: dict[str, str], coherent: set[str], others: list[str]
) -> tuple[Pair, ...]:
    """Return every pair with at least one cell, with NIC names from the legend; `coherent`: GPUs with C2C."""
    devices = matrix.devices
    missing = [device for device in devices if device not in rows and device not in others]
    if missing:
        lacks = matrix.lacks if any(name.startswith("GPU") for name in missing) else matrix.warnings.append
        lacks(_text("missing_rows", rows=some(missing)))
    pairs = []
    for (i, a), (j, b) in combinations(enumerate(devices), 2):
        labels = [(rows[x], rows[x].labels[k]) for x, k in ((a, j), (b, i)) if x in rows and k < len(rows[x].labels)]
        if labels and a not in others and b not in others:
            row, label = _choose_label(a, b, labels, matrix)
            pairs.append(
                Pair(
                    a=nics.get(a, a),
                    b=nics.get(b, b),
                    label=label,
                    path=path_class(label, c2c=a in coherent and b in nics),
                    nvlinks=nvlinks(label),
                    evidence=f"line {row.line} of {matrix.source}",
                )
            )
    return tuple(pairs)


def choose_worse_label(first: str, second: str) -> str:
    """Return the worse of the labels of a pair's two directions, because only that works both ways."""
    if UNKNOWN in (first, second):
        return second if first == UNKNOWN else first
    return max(first, second, key=lambda label: (rank(label), -nvlinks(label)))


def _choose_label(a: str, b: str, candidates: list[tuple[_Row, str]], matrix: _Matrix) -> tuple[_Row, str]:
    """Return the row and label of a pair; if its two directions differ, the worse one."""
    certain = [each for each in candidates if each[1] != UNKNOWN] or candidates
    labels = [label for _, label in certain]
    label = choose_worse_label(*labels) if len(labels) == 2 else labels[0]
    if len(set(labels)) == 2:
        matrix.warnings.append(_text("two_labels", a=a, b=b, labels=labels, taken=label))
    return certain[labels.index(label)][0], label


_CUT_NICS = re.compile(r"\b(\d{1,6}) NICs found\b[^\n.;]{0,80}\bonly displaying (\d{1,6})\b")


def _mark_truncated_nics(node: NodeTopology, text: str) -> NodeTopology:
    """Handle NIC lists that nvidia-smi truncated: a NIC that is not shown may be nearer than the shown ones.

    PIX is kept, because no label is nearer.
    """
    match = _CUT_NICS.search(text)
    if match is None or int(match[1]) <= int(match[2]):
        return node
    reason = _text("nics_left_out", shown=match[2], count=match[1])
    nearest = tuple(
        near if near.path is not None and near.path <= PathClass.PIX else replace(near, decidable=False, why=reason)
        for near in node.nearest_nic
    )
    warnings = (*node.warnings, f"{reason}: {_text('nics_unjudged')}")
    return replace(node, nearest_nic=nearest, rails=find_rails(nearest), warnings=warnings)
