"""What a container runtime or journald made of a process's lines, undone block by block before anything is read.

Surfaces: container logs of Kubernetes, where an entry that was cut is tagged P and goes on in the next one of its
stream, up to one tagged F (k8s.io/cri-client, pkg/logs/logs.go); `journalctl -o json`, where text that is not
printable, such as a colour or a carriage return, is an array of its bytes (systemd, JOURNAL_EXPORT_FORMATS.md), and of
`-o json-pretty` a line for each byte (systemd, src/libsystemd/sd-json/sd-json.c). A block has as many lines afterwards
as before.
"""

from __future__ import annotations

import re
from typing import Final

from collectives.nccl_log.clean import MAX_LINE_BYTES

_PARTIAL: Final = (b" stdout P", b" stderr P")
_ENTRY = re.compile(
    rb"^(\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:\d\d) (stdout|stderr)) ([A-Z])((?::[^ \n]*)?) ([^\n]*)$",
    re.MULTILINE,
)
_FIELD: Final = b'"MESSAGE"'
# journald takes lines of 48 KiB from a stream (LineMax= of journald.conf), each byte up to three digits and a comma,
# and on a line of its own two tabs and the line's end.
_ARRAY: Final = rb'("MESSAGE"\s{0,4}:\s{0,4})\[([\d,\s]{0,524288})'
_BYTES = re.compile(_ARRAY + rb"\]")
_BYTES_YET = re.compile(_ARRAY + rb"\Z")


class Entries:
    """The entries of one log; an entry that is cut is held until it is whole."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}  # by stream, one line's length each at most
        self.array = b""  # of bytes, that the next block goes on with, without its blanks

    @property
    def open(self) -> bool:
        """Whether an entry waits for its rest."""
        return bool(self.held or self.array)

    def whole(self, block: bytes) -> bytes:
        """The block with its entries joined, an empty line for each that is held, and arrays of bytes as text."""
        if self.held or any(mark in block for mark in _PARTIAL):
            block = _ENTRY.sub(self._join, block)
        block, self.array = self.array + block, b""
        if _FIELD in block:
            block = _BYTES.sub(_text, block)
            if yet := _BYTES_YET.search(block):
                self.array = bytes(yet[0].translate(None, b" \t\r\n"))
                block = block[: yet.start()] + b"\n" * yet[0].count(b"\n")
        return block

    def rest(self) -> bytes:
        """What no further entry completed."""
        rest = b"\n".join(filter(None, (*self.held.values(), self.array)))
        self.held.clear()
        self.array = b""
        return rest

    def _join(self, entry: re.Match[bytes]) -> bytes:
        start, stream, tag, more, content = entry.groups()
        held = self.held.pop(stream, None)
        if held is None and tag != b"P":
            return entry[0]
        front, tail = _within(held or b"", content)
        if tag == b"P":
            self.held[stream] = tail
            return b"%s F %s" % (start, front) if front else b""
        return b"%s F%s %s" % (start, more, front + b"\r" + tail if front else tail)


def _within(held: bytes, content: bytes) -> tuple[bytes, bytes]:
    """What need not be held any longer, and the rest, which is no longer than a line is read.

    Beyond that length a line is cut at its inner ends, where it has them, else where the runtime did.
    """
    joined = held + content
    if len(joined) <= MAX_LINE_BYTES:
        return b"", joined
    front, end, tail = joined.rpartition(b"\r" if b"\r" in joined else b"\\n")
    if end and len(tail) <= MAX_LINE_BYTES:
        return front, tail
    return held, content[:MAX_LINE_BYTES]


def _text(field: re.Match[bytes]) -> bytes:
    """A JSON string in the place of an array of bytes; what is none stays as it is."""
    try:
        told = bytes(int(number) for number in field[2].split(b","))
    except ValueError:
        return field[0]
    return field[1] + b'"' + told.replace(b"\n", b"\\n") + b'"' + b"\n" * field[2].count(b"\n")
