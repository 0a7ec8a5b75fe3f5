"""Host lists in Slurm's notation: "gpu[01-03,07],login1".

Specification: slurm.conf(5), NodeName; `scontrol show hostnames`. Slurm 22.05 src/common/hostlist.c: if a name has
several brackets, the last one varies fastest; numbers keep their leading zeros.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

MAX_HOSTS = 100_000  # Slurm's own limit for one list is 64,000 (MAX_SLURM_NODES)
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


class HostListError(ValueError):
    """The text is not a valid host list; the message quotes the invalid part."""


def compress_host_list(names: Iterable[str], separator: str = ",") -> str:
    """Join names in Slurm's notation, sorted by number; duplicates are dropped."""
    numbers: dict[tuple[str, str, bool], list[str]] = {}
    for name in sorted(set(names)):
        before, number, after = re.fullmatch(r"(.*?)(\d*)(\D*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        numbers.setdefault((before, after, bool(number)), []).append(number)
    return separator.join(f"{before}{_format_ranges(group)}{after}" for (before, after, _), group in numbers.items())


def list_names(names: Sequence[str], plain: int = 8) -> str:
    """Join names for a report: up to `plain` names in full, more in Slurm's notation, "gpu-[01-03,07]"."""
    return ", ".join(names) if len(names) <= plain else compress_host_list(names, ", ")


def _format_ranges(numbers: Sequence[str]) -> str:
    """Return "[01-03,07]". A range only has numbers of equal width, so that it expands to the same names."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (len(text), text)):
        if runs and len(number) == len(runs[-1][-1]) and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ranges if len(numbers) == 1 else f"[{ranges}]"


def expand_host_list(text: str) -> tuple[str, ...]:
    """Return each name of a list once, in order; whitespace separates parts too. Raises HostListError."""
    hosts: dict[str, None] = {}
    for part in re.split(r"[,\s]+(?![^\[]*\])", text.strip()):
        pieces = _BRACKET.split(part)  # alternately text and the content of a bracket
        choices = [_expand_numbers(piece, part) if position % 2 else (piece,) for position, piece in enumerate(pieces)]
        if len(hosts) + math.prod(map(len, choices)) > MAX_HOSTS:
            raise HostListError(f"{part[:80]!r}: more than {MAX_HOSTS:,} hosts")
        for choice in itertools.product(*choices):
            name = "".join(choice)
            if part and not _NAME.fullmatch(name):
                raise HostListError(f"{part[:80]!r} is no host name and no list such as node[01-04,07]")
            hosts.setdefault(name)
    hosts.pop("", None)
    return tuple(hosts)


def _expand_numbers(text: str, part: str) -> Sequence[str]:
    """Return the numbers of one bracket, each padded to the width of the first number of its range."""
    numbers: list[str] = []
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
            raise HostListError(f"{part[:80]!r}: {word[:20]!r} must be a number or a range such as 01-04")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def name_in_slurm(host: str) -> str:
    """Return Slurm's default node name of a host: without domain and "(file)". An IP address is returned unchanged."""
    return host if re.fullmatch(r"[\d.]+|.*:.*", host) else re.split(r"[. ]", host)[0]
