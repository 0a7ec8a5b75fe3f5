"""What stands after the cells of a GPU's row: CPU list, NUMA list and GPU NUMA ID, any of them empty.

Specification: none is published. nvidia-smi leaves a CPU list empty that its cpuset hides (Slurm), cuts long lists
short, and prints two tabs before the GPU NUMA ID.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topology.formats.text_cells import COLUMN_WORDS, Header
from topology.labels import UNKNOWN

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
    fields = [field.strip() for field in rest.removeprefix("\t").split("\t")]
    named = []
    for position, field in enumerate(fields):
        if field:
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
