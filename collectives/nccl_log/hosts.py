"""Which hosts wrote a log: the name before ":pid:tid", without what a search through the log put before it.

Surface: the prefix of NCCL's lines, "host:pid:tid [device] " (src/debug.cc), and the marks of ``grep -H``, ``-n`` and
``-C`` (POSIX grep, "CONTEXT LINE CONTROL" of GNU grep): "file:" and "12:" before a line that matched, "file-" and "12-"
before a line of its context. A dash may be part of a host's name, so a mark is taken off only where the same file or
the same numbering stands before a line that matched, or where the file's name ends as names of logs do.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

MAX_HOSTS: Final = 20_000
MAX_FILES: Final = 20_000

_HOST = re.compile(rb"([A-Za-z0-9][\w.-]*):\d+:\d+ ?(?:\[-?\w*\])? *(?:[^\s:]+:\d+ )?(?:\(\w+\) )?$")
_MATCHED = re.compile(rb"(?:([A-Za-z0-9][\w.-]*):)?(\d+:)?$")
_LOG_NAME = re.compile(rb"[\w.-]*\.(?:log|txt|out|err|stdout|stderr)(?:\.\d+)?-(?:\d+-(?=[A-Za-z]))?(?=\w)")


class _Marks:
    """What a search put before the lines of a log."""

    def __init__(self) -> None:
        self.files: dict[bytes, bool] = {}  # file named before a line that matched: whether the line is numbered
        self.numbered = False  # lines that matched carry a number and no file


class Hosts:
    """The hosts met so far, and the marks of a search that stood before them."""

    def __init__(self, marks: _Marks | None = None) -> None:
        self.names: Counter[bytes] = Counter()  # host: prefixes of processes met
        self._marks = marks or _Marks()

    def part(self) -> Hosts:
        """For a part of the same log: the same marks of a search, and no host yet."""
        return Hosts(self._marks)

    def merge(self, other: Hosts) -> None:
        """Add the hosts of a further piece."""
        for name, times in other.names.items():
            bare = other._bare(name)
            if bare in self.names or len(self.names) < MAX_HOSTS:
                self.names[bare] += times

    def name_in(self, prefix: bytes) -> bytes:
        """The host that wrote the line with this prefix; empty where none is named."""
        text = prefix[-300:]
        match = _HOST.search(text)
        if match is None:
            return b""
        mark = _MATCHED.search(text[: match.start()])
        if mark is not None:
            if mark[1] and not mark[1].isdigit() and len(self._marks.files) < MAX_FILES:
                self._marks.files[mark[1]] = self._marks.files.get(mark[1], False) or mark[2] is not None
            elif mark.start() == 0 and (mark[1] or mark[2]):
                self._marks.numbered = True
        return self._bare(match[1])

    def add(self, name: bytes) -> None:
        """Count a process of this host."""
        if len(self.names) < MAX_HOSTS:
            self.names[name[:128]] += 1

    def count(self) -> int:
        """How many hosts wrote, without the pieces that torn lines made of a name."""
        # The first line of a context comes before the line that tells what its marks are.
        names: Counter[bytes] = Counter()
        for name, times in self.names.items():
            names[self._bare(name)] += times
        if len(names) > 256:
            return len(names)
        pieces = {
            name
            for name, times in names.items()
            for other, more in names.items()
            if more > times and name != other and (other.endswith(name) or name.endswith(other))
        }
        return len(names) - len(pieces)

    def _bare(self, name: bytes) -> bytes:
        """The name without the file and the number of a context line."""
        dash = name.find(b"-")
        while dash >= 0 and (self._marks.files or self._marks.numbered):
            head, tail = name[:dash], name[dash + 1 :]
            if head in self._marks.files:
                number, found, rest = tail.partition(b"-")
                return rest if found and self._marks.files[head] and number.isdigit() else tail
            if self._marks.numbered and head.isdigit():
                return tail
            dash = name.find(b"-", dash + 1)
        return _LOG_NAME.sub(b"", name, count=1)
