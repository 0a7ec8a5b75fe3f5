"""Lists of host names as Slurm writes them: "gpu[01-03,07],login1".

Specification: slurm.conf(5), NodeName; `scontrol show hostnames`. Slurm 22.05 src/common/hostlist.c: a name may have
several brackets, of which the last varies fastest; numbers keep their width.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

MOST_HOSTS = 100_000  # Slurm's own bound of one list is 64,000 (MAX_SLURM_NODES)
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


class HostListError(ValueError):
    """A text that is no list of hosts; the message quotes the part that is wrong."""


def compress_host_list(names: Iterable[str], separator: str = ",") -> str:
    """Join names in the form that Slurm reads, in the order of their numbers; each name is written once."""
    numbers: dict[tuple[str, str, bool], list[str]] = {}
    for name in sorted(set(names)):
        before, number, after = re.fullmatch(r"(.*?)(\d*)(\D*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        numbers.setdefault((before, after, bool(number)), []).append(number)
    return separator.join(f"{before}{_ranges(found)}{after}" for (before, after, _), found in numbers.items())


def list_names(names: Sequence[str], plain: int = 8) -> str:
    """Join all names for people: up to `plain` of them as they are, more as Slurm writes hosts, "gpu-[01-03,07]"."""
    return ", ".join(names) if len(names) <= plain else compress_host_list(names, ", ")


def _ranges(numbers: Sequence[str]) -> str:
    """ "[01-03,07]"; a run is of numbers as wide as each other, so that it can be written out again."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (len(text), text)):
        if runs and len(number) == len(runs[-1][-1]) and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ranges if len(numbers) == 1 else f"[{ranges}]"


def expand_host_list(text: str) -> tuple[str, ...]:
    """Every name of a list, once, in its order; line breaks and blanks separate parts too. Raises HostListError."""
    found: dict[str, None] = {}
    for part in re.split(r"[,\s]+(?![^\[]*\])", text.strip()):
        pieces = _BRACKET.split(part)  # text and the inside of a bracket, by turns
        choices = [_numbers(piece, part) if at % 2 else (piece,) for at, piece in enumerate(pieces)]
        if len(found) + math.prod(map(len, choices)) > MOST_HOSTS:
            raise HostListError(f"{part[:80]!r}: more than {MOST_HOSTS:,} hosts")
        for words in itertools.product(*choices):
            name = "".join(words)
            if part and not _NAME.fullmatch(name):
                raise HostListError(f"{part[:80]!r} is no host name and no list such as node[01-04,07]")
            found.setdefault(name)
    found.pop("", None)
    return tuple(found)


def _numbers(text: str, part: str) -> Sequence[str]:
    """The numbers of one bracket, as wide as the first of their range."""
    made: list[str] = []
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) >= MOST_HOSTS:
            raise HostListError(f"{part[:80]!r}: {word[:20]!r} must be a number or a range such as 01-04")
        made += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return made


def slurm_name(host: str) -> str:
    """The name that Slurm has for a host by default, without domain and "(file)"; an address stays as it is."""
    return host if re.fullmatch(r"[\d.]+|.*:.*", host) else re.split(r"[. ]", host)[0]


def cluster_name(text: str) -> str:
    """ClusterName of slurm.conf; empty where it has none."""
    found = re.search(r"^[ \t]*ClusterName[ \t]*=[ \t]*([^\s#]+)", text, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else ""
