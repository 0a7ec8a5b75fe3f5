"""Lines and cells of an `nvidia-smi topo -m` matrix as people paste them: escape codes, glued and overwritten cells.

Specification: none is published; the shape is what nvidia-smi of drivers 361 to 580 prints, tabs between cells and
``ESC[4m`` around the header, and what terminals, logs, READMEs and mail make of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topology.labels import NVLINK, SELF, UNKNOWN

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
