"""The lines of a text that holds a matrix, without what editors, logs, mail and remote shells put before each.

Specification: none; the shapes are those of `cat -n`, mail, comments, `srun -l`, mpirun, pdsh and `kubectl logs`.
"""

from __future__ import annotations

import re

from topology.formats.text_cells import clean, read_header, row_name

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
