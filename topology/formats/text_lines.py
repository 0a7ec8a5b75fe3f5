"""Where in a text an `nvidia-smi topo -m` matrix stands, and its words as people paste them.

Lines without what editors, logs, mail and remote shells put before each; headers and rows, wrapped or not; cells,
glued and overwritten; and what stands after a row's cells: CPU list, NUMA list and GPU NUMA ID, any of them empty.

Specification: none is published; the shape is what nvidia-smi of drivers 361 to 580 prints, tabs between cells and
``ESC[4m`` around the header, and what terminals, logs, READMEs and mail make of it (`cat -n`, `srun -l`, mpirun,
pdsh, `kubectl logs`). nvidia-smi leaves a CPU list empty that its cpuset hides (Slurm), cuts long lists short, and
prints two tabs before the GPU NUMA ID.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from topology.graph import NVLINK, SELF, UNKNOWN

MOST_DEVICES = 256
"""A matrix with more columns is not believed: the largest node sold has 16 GPUs and 32 NICs."""

_ESCAPES = re.compile(
    r"(?:\x1b|\^\[|\\(?:033|e|x1[bB]|u001[bB]))\[[0-9;?]*[A-Za-z]"  # real, and the ways it is spelled out
    r"|\[\d{1,2}(?:;\d{1,2})*m"  # what is left where the escape character itself got lost
)
_JSON_TAIL = re.compile(r'(?:\\r)?\\n",?\s*"\w.*$')
_TAGS = re.compile(r"</?[A-Za-z][^<>]{0,200}>")  # <br>, </pre>, and mpirun's <stdout>
_DEVICE = re.compile(r"GPU\d{1,4}|NIC\d{1,4}|mlx\d_(?:bond_)?\d{1,4}")
_OTHER_DEVICE = re.compile(r"[A-Za-z][\w.\-]{0,40}\d[\w.\-]{0,40}(?!\S)")
COLUMN_WORDS = re.compile(
    r"(?P<cpu>(?i:CPU\s*Aff)[a-z]*)|(?P<gpu>(?i:GPU\s*NUMA\s*)(?:ID?)?)|(?P<numa>(?i:(?:NUMA|Node)\s*Aff)[a-z]*"
    r"|NUMA(?=\s*$))|Affinity"
)
_CELL = re.compile(r"X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC|N/A|ERR!")
_CUT_CELL = re.compile(r"(PH|PI|PX|SY|SO|NOD|NO)(?=\d)")
_CUT = {"PH": "PHB", "PI": "PIX", "PX": "PXB", "SY": "SYS", "SO": "SOC", "NOD": "NODE", "NO": "NODE"}
_ROW_START = re.compile(
    r"(?<![\w.\-])([A-Za-z][\w.\-]{0,40}?\d{1,6}\w{0,40}?)"
    r"(?=\s{1,64}(?:X|NV\d|PIX|PXB|PHB|NODE|SYS|SOC)(?![a-z]))"
)


def clean(line: str) -> str:
    """One line without escape codes, carriage returns and table bars; tabs stay."""
    line = _ESCAPES.sub("", line.replace("\xa0", " ").replace("&nbsp;", " ").rstrip("\r"))
    if "<" in line:
        line = _TAGS.sub("", line)
    # A container runtime's log holds each line as a JSON string: "...\n","stream":...
    line = _JSON_TAIL.sub("", line)
    return line.replace("\\t", "\t").replace("|", " ").replace("**", "")  # Markdown's table and its bold type


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The columns: devices in order, and which affinity columns follow."""

    devices: tuple[str, ...]
    cpu: bool = False
    numa: bool = False
    gpu_numa_id: bool = False

    @property
    def affinity_columns(self) -> int:
        """How many columns stand after the devices."""
        return self.cpu + self.numa + self.gpu_numa_id


def read_header(line: str, row_names: tuple[str, ...] = ()) -> Header | None:
    """The header in a line, None where the line is none. `row_names` help to part glued names."""
    start = _DEVICE.search(line)
    if not start or not start[0].startswith("GPU"):
        return None
    devices: list[str] = []
    seen: set[str] = set()
    at = start.start()
    named = sorted((name for name in row_names if name), key=len, reverse=True)
    while at < len(line):
        if line[at].isspace():
            at += 1
        elif words := COLUMN_WORDS.match(line, at):
            seen.add(words.lastgroup or "")
            at = words.end()
        elif not seen and (name := _device_at(line, at, named)):
            devices.append(name)
            at += len(name)
        elif seen or not re.match(r"[\w.]", line[at:]):
            at += 1  # closing quotes, commas, a comment after the columns
        else:
            return None
    if len(devices) > MOST_DEVICES or len(set(devices)) != len(devices):
        return None
    return Header(devices=tuple(devices), cpu="cpu" in seen, numa="numa" in seen, gpu_numa_id="gpu" in seen)


def names_gpu_first(line: str) -> bool:
    """Whether the first device a line names is a GPU: a quick test before `read_header`."""
    start = _DEVICE.search(line)
    return start is not None and start[0].startswith("GPU")


def _device_at(line: str, at: int, row_names: list[str]) -> str | None:
    for name in row_names:
        after = line[at + len(name) : at + len(name) + 1]
        if line.startswith(name, at) and not (name[-1:].isdigit() and after.isdigit()):
            return name
    match = _DEVICE.match(line, at) or _OTHER_DEVICE.match(line, at)
    return match[0] if match else None


def row_name(line: str) -> str | None:
    """The device a line starts a row for, by its look alone."""
    match = _ROW_START.search(line)
    return match[1] if match and not NVLINK.fullmatch(match[1]) else None


def row_of(line: str, names: tuple[str, ...]) -> tuple[str, str] | None:
    """(device, text after it) where the line is a row of one of `names`, whatever stands before the name."""
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    match = re.search(rf"(?<![\w.\-])({alternatives})(?=\s|X|NV\d|PIX|PXB|PHB|NODE|SYS|SOC|$)(.*)$", line)
    if not match or not match[2].strip():
        return None
    return match[1], match[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The cells of one row, what follows them, and where reading stopped."""

    labels: tuple[str, ...]
    rest: str  # text after the last cell
    stuck: str = ""  # first word that is no label, empty where the row is whole or merely short
    notes: tuple[str, ...] = ()


def read_cells(text: str, count: int, clean_nvlinks: frozenset[str] = frozenset()) -> Cells:
    """Up to `count` labels from the text after a row's name."""
    labels: list[str] = []
    notes: list[str] = []
    at = 0
    while len(labels) < count:
        while at < len(text) and text[at].isspace():
            at += 1
        match = _CELL.match(text, at)
        if match:
            label = _part_from_affinity(match[0], text[match.end() :], clean_nvlinks, last=len(labels) == count - 1)
            at += len(label)
            labels.append(UNKNOWN if label == "ERR!" else label)
        elif cut := _CUT_CELL.match(text, at):
            labels.append(_CUT[cut[1]])
            notes.append(f'"{cut[1]}" before a digit is read as {_CUT[cut[1]]}: a terminal wrote over the cell')
            at = cut.end()
        else:
            break
    stuck = re.match(r"\S*", text[at:])
    short = len(labels) < count
    return Cells(labels=tuple(labels), rest=text[at:], stuck=stuck[0] if short and stuck else "", notes=tuple(notes))


def _part_from_affinity(label: str, after: str, clean_nvlinks: frozenset[str], *, last: bool) -> str:
    """NV18 and 0-55 glued are "NV180-55": give back as many digits as the clean labels of this matrix say."""
    if not (last and label.startswith("NV") and re.match(r"[\d,\-]", after)):
        return label
    digits = label[2:] + (re.match(r"\d*", after) or [""])[0]
    fitting = [known for known in clean_nvlinks if digits.startswith(known[2:])]
    return max(fitting, key=len) if fitting else label


def tab_cells(text: str, count: int) -> tuple[tuple[str, ...], str] | None:
    """Cells by tabs alone, empty ones as "N/A", and what follows: for a row where a cell was left empty."""
    fields = [field.strip() for field in text.lstrip(" ").removeprefix("\t").split("\t")]
    if len(fields) < count or SELF not in fields[:count]:
        return None
    if any(field and not _CELL.fullmatch(field) for field in fields[:count]):
        return None
    rest = "".join("\t" + field for field in fields[count:])
    return tuple(field if field not in ("", "ERR!") else UNKNOWN for field in fields[:count]), rest


MOST_LINE = 8_192  # 256 columns of up to 16 characters, and what a log puts before them
_MOST_HOSTS = 256  # more words before headers than that are no hosts
_LINE_NUMBER = re.compile(r"[ \t]*(\d{1,6})(?:[ \t]*[|:\u2502]|[ \t]|$)")


def lines_of(text: str) -> tuple[list[str], str]:
    """The lines without what was put before them, as many as there were; and a warning where some are left out."""
    lines = _without_numbers([clean(line[:MOST_LINE]) for line in text.removeprefix("\ufeff").split("\n")])
    lines, others = _of_one_host(lines)
    prefix = _common_prefix(lines)
    if prefix:
        lines = [line.removeprefix(prefix) if line.startswith(prefix) else "" for line in lines]
    return lines, others


def _of_one_host(lines: list[str]) -> tuple[list[str], str]:
    """Only the first host's lines where pdsh, mpirun or `kubectl logs` names the host before each line of several.

    That is so where different words stand before several headers, and every row begins with one of them.
    """
    headers = [(line, start) for line in lines if (start := line.find("GPU0")) > 0 and read_header(line)]
    hosts = tuple(dict.fromkeys(line[:start].strip() for line, start in headers if row_name(line) is None))
    rows = [line.strip() for line in lines if row_name(line)]
    if len(hosts) < 2 or "" in hosts or len(hosts) > _MOST_HOSTS:
        return lines, ""
    words = "|".join(re.escape(host) for host in sorted(hosts, key=len, reverse=True))
    mark = re.compile(rf"({words})(?:(?<!\w)|(?![\w.\-]))")
    if {found[1] if (found := mark.match(row)) else "" for row in rows} != set(hosts):
        return lines, ""
    of_first = [(found := mark.match(line.strip())) is not None and found[1] == hosts[0] for line in lines]
    kept = [line if own else "" for line, own in zip(lines, of_first, strict=True)]
    return kept, f"lines of {len(hosts)} hosts: those that begin with {hosts[0]} are read, the others are not"


def _without_numbers(lines: list[str]) -> list[str]:
    """What an editor or `cat -n` puts before every line, where it does count the lines."""
    numbered = [_LINE_NUMBER.match(line) for line in lines]
    numbers = [int(found[1]) for found in numbered if found]
    counted = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if len(numbers) > 2 else False
    if not counted or any(line.strip() and not found for line, found in zip(lines, numbered, strict=True)):
        return lines
    return [line[found.end() :] if found else line for line, found in zip(lines, numbered, strict=True)]


def _common_prefix(lines: list[str]) -> str:
    """What a log, a comment or a quotation puts before every line, where that is the same before all of them."""
    full = [line for line in lines if len(line.strip()) > 3]
    first, last = min(full, default=""), max(full, default="")
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:same].partition("GPU")[0]


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
    lacking: list[str] = field(default_factory=list)  # of the warnings, those of rows and cells that are not there

    def lacks(self, what: str) -> None:
        """Note a row, or cells, that the header promises and the text does not hold."""
        self.warnings.append(what)
        self.lacking.append(what)


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


_AFFINITY = re.compile(r"\d+(?:[-,]\d+)*,?|N/A")
_CUT_LIST = re.compile(r"[\d,\-]*\d[\d,\-]*")
"""A list that lost its beginning or its end, as "-31,64-95": kept out of the column, but holding its place."""
_COLUMNS = ("cpu", "numa", "gpu_numa_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """As printed; None where the cell is empty or the column is missing."""

    cpu: str | None = None
    numa: str | None = None
    gpu_numa_id: str | None = None
    unread: str = ""  # a word of digits that is no list: its column stays None


def read_affinity(cells: str, rest: str, header: Header) -> Affinity:
    """Sort the words after a row's cells into columns; `cells` is the text before them.

    With as many words as columns the order decides. With fewer, single tabs between the cells say which are empty.
    Where tabs became spaces the NUMA value stands below the CPU header: then the first columns are taken to be the
    empty ones, unless the first word can only be a CPU list.
    """
    there = (header.cpu, header.numa, header.gpu_numa_id)
    words = _words(rest)
    columns = [name for name, wanted in zip(_COLUMNS, there, strict=True) if wanted] or list(_COLUMNS[: len(words)])
    missing = len(columns) - len(words)
    if missing > 0 and words:
        after = rest.lstrip(" ")  # the last cell may be " X "
        if _one_tab_each(cells) and after.startswith("\t"):
            columns = _columns_by_tabs(after, columns)
        elif columns[0] == "cpu" and _is_cpu_list(words[0]):
            columns = [columns[0], *columns[1 + missing :]]
        else:
            columns = columns[missing:]
    found = dict(zip(columns, words, strict=False))
    unread = " ".join(word for word in words if not _AFFINITY.fullmatch(word))
    return Affinity(**{name: word for name, word in found.items() if _AFFINITY.fullmatch(word)}, unread=unread)


def leading_columns(header: str) -> tuple[str, ...]:
    """The affinity columns that a table somebody made by hand has left of the devices."""
    found = (match.lastgroup for match in COLUMN_WORDS.finditer(header.partition("GPU0")[0]))
    names = {"cpu": "cpu", "numa": "numa", "gpu": "gpu_numa_id"}
    return tuple(names[group] for group in found if group)


def read_leading(before: str, columns: tuple[str, ...]) -> Affinity:
    """What stands before a row's name, where each of the columns has its word."""
    words = [word for word in _words(before) if _AFFINITY.fullmatch(word)]
    return Affinity(**dict(zip(columns, words, strict=True))) if len(words) == len(columns) else Affinity()


def _words(rest: str) -> list[str]:
    words: list[str] = []
    for word in re.split(r"\s+", rest.strip()):
        stripped = word.strip("\"'`,;")
        if words and words[-1].endswith(",") and stripped:
            words[-1] += stripped
        elif _AFFINITY.fullmatch(stripped) or _CUT_LIST.fullmatch(stripped):
            words.append(stripped + ("," if word.endswith(",") and stripped != UNKNOWN else ""))
        elif word:
            break
    return [word.rstrip(",") for word in words]


def _one_tab_each(cells: str) -> bool:
    """Whether the row's cells are parted by exactly one tab, as nvidia-smi prints: then an extra tab means empty."""
    return "\t" in cells and not re.search(r"\t[ ]*\t", cells)


def _columns_by_tabs(rest: str, columns: list[str]) -> list[str]:
    """Names of the columns that hold a word; whatever stands after the first two tabs is the last column."""
    cells = [cell.strip() for cell in rest.removeprefix("\t").split("\t")]
    named = []
    for position, cell in enumerate(cells):
        if cell:
            named.append(columns[min(position, len(columns) - 1)])
    return list(dict.fromkeys(named))


def _is_cpu_list(word: str) -> bool:
    """Whether a lone word is a CPU list rather than a NUMA list.

    NUMA lists seen in the wild: single nodes up to 8 (POWER9), ranges up to 0-7, and "0,2-17" on GB200, whose GPU
    memories and MIG partitions are nodes too.
    """
    numbers = [int(number) for number in re.findall(r"\d+", word)[:64]]
    if not numbers or max(numbers) <= 8:
        return False
    return max(numbers) > 34 or re.fullmatch(r"\d+,\d+-\d+", word) is None
