"""One pass over a log, in blocks, into ledgers.

Surface: NCCL and RCCL INFO logs on stdout or from NCCL_DEBUG_FILE, with what launchers, terminals, container runtimes
and log rotation do to them: gzip, bzip2 and xz, colours (ECMA-48 SGR), HTML and JSON escapes, progress bars that share
a line by carriage return, many messages in one JSON string. Container logs of Kubernetes split long entries: a part
that is tagged P continues in the next entry of its stream, until one is tagged F (k8s.io/cri-client, pkg/logs/logs.go).

Most lines repeat each other. A line without any word of the tables is recognised by its shape: the line without digits.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any, BinaryIO, Final

from collectives.nccl_log.codes import FACT_WORDS, SEARCHED
from collectives.nccl_log.ledger import Runs
from collectives.nccl_log.lines import MAX_SEEN, LineReader
from contracts.bounded import utf16
from contracts.tables import read_patterns, read_table

BLOCK_BYTES: Final = 1 << 20

# A longer line is cut. No NCCL message is near this length, and a file without newlines must not need more memory.
MAX_LINE_BYTES: Final = 16_384

_TEXTS = read_patterns(__file__, "facts.toml", "reader", str.encode)
_ESCAPES = read_table(__file__, "facts.toml")["escapes"]
_COLOUR_MARKS: Final = tuple(mark.encode() for mark in _ESCAPES["marks"])
_PLAIN_TEXTS: Final = tuple((escaped.encode(), plain.encode()) for escaped, plain in _ESCAPES["plain"])

_PACKED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "lzma"}  # modules, which most logs do not need
_NOT_UNPACKED: Final = ((b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"), (b"PK\x03\x04", "zip", "unzip -p"))

WORDS: Final = tuple(dict.fromkeys((*FACT_WORDS, *SEARCHED)))
_DIGITS: Final = b"0123456789"


class LogFileError(ValueError):
    """The file cannot be read as a log; the message says why, and what helps."""


class _Rest:
    """A stream whose first bytes were already read."""

    def __init__(self, first: bytes, file: BinaryIO) -> None:
        self._first, self._file = first, file

    def read(self, size: int = BLOCK_BYTES, /) -> bytes:
        """Return at most so many bytes; none at the end."""
        part, self._first = self._first[:size], self._first[size:]
        return part or self._file.read(size)


class Unpacked:
    """A file as it is, or decompressed if its first bytes are those of a compressed file."""

    def __init__(self, file: BinaryIO) -> None:
        first = file.read(BLOCK_BYTES)
        for magic, tool, command in _NOT_UNPACKED:
            if first.startswith(magic):
                raise LogFileError(f"packed with {tool}, which is not read: unpack it with {command} FILE")
        self._plain = _Rest(first, file)
        module = next((module for magic, module in _PACKED.items() if first.startswith(magic)), None)
        self._packed: Any = importlib.import_module(module).open(self._plain) if module else None

    def read(self, size: int = BLOCK_BYTES, /) -> bytes:
        """Return the next part; an empty one at the end. Raises LogFileError if the file is damaged."""
        if self._packed is None:
            return self._plain.read(size)
        import lzma
        import zlib

        try:
            return bytes(self._packed.read1(size))
        except EOFError:  # the file is cut; what could be read stays
            return b""
        except (zlib.error, lzma.LZMAError, OSError) as error:
            raise LogFileError(f"a packed file that is damaged: {error}") from None


def looks_like_text(start: bytes) -> bool:
    """Return whether a file with these first bytes can be a log, compressed or not."""
    return start.startswith(tuple(_PACKED)) or b"\0" not in start or utf16(start) is not None


def split_long(line: bytes) -> list[bytes]:
    """Split a line that is too long at its inner line ends, and cut the parts to the maximum length."""
    if len(line) <= MAX_LINE_BYTES:
        return [line]
    return [part[:MAX_LINE_BYTES] for part in re.split(rb"\r|\\n", line)]


def clean(line: bytes) -> list[bytes]:
    """Return the logical lines of one physical line, without colours and escapes."""
    if b"\x1b" in line:
        line = _TEXTS["escape"].sub(b"", _TEXTS["colour"].sub(b"", line))
    elif any(mark in line for mark in _COLOUR_MARKS):
        line = _TEXTS["colour"].sub(b"", line)
    for escaped, plain in _PLAIN_TEXTS:
        if escaped in line:
            line = line.replace(escaped, plain)
    line = line.rstrip(b"\r\n")
    return [part for part in re.split(rb"[\r\n]+", line) if part] if b"\r" in line or b"\n" in line else [line]


class Reader(LineReader):
    """Reads blocks of lines into the ledgers of the runs that they belong to."""

    def __init__(self, runs: Runs | None = None, *, file: str = "") -> None:
        super().__init__(runs or Runs(), file=file)
        self._quiet: set[bytes] = set()  # shapes without any word of the tables
        self.held: dict[bytes, bytes] = {}  # the parts of an entry that is not complete, by stream

    def feed(self, block: bytes, *, cut: bool = False) -> None:
        """Read whole lines; the last newline of the block may be missing. `cut`: the log ends inside the last line."""
        block = block.removesuffix(b"\n")
        if self.held or any(mark in block for mark in (b" stdout P", b" stderr P")):
            block = b"\n".join(map(self._join_parts, block.split(b"\n")))
        lines = block.split(b"\n")
        shapes = block.translate(None, _DIGITS).split(b"\n")
        self._remember_quiet(shapes)
        last = self.ledger.lines + len(lines)
        for line, shape in zip(lines, shapes, strict=True):
            self.ledger.lines += 1
            ends_here = cut and self.ledger.lines == last
            if ends_here or not ((shape in self._quiet and not self.cause_lines) or self.is_known(line)):
                self._take_dirty(line, cut=ends_here)

    def _remember_quiet(self, shapes: Iterable[bytes]) -> None:
        """Store the shapes without any word of the tables. Each word is searched once, in all new shapes together."""
        if len(self._quiet) > MAX_SEEN:
            self._quiet.clear()
        new = set(shapes) - self._quiet
        text = b"\n".join(new)
        for word in WORDS:
            at = text.find(word)
            while at >= 0:
                end = text.find(b"\n", at)
                end = len(text) if end < 0 else end
                new.discard(text[text.rfind(b"\n", 0, at) + 1 : end])
                at = text.find(word, end)
        self._quiet |= new

    def finish(self) -> None:
        """Add what was read to the runs."""
        for part in self.held.values():
            self._take_dirty(part, cut=True)
        super().finish()

    def _join_parts(self, line: bytes) -> bytes:
        """Return the whole entry if this line completes it, nothing if it does not."""
        entry = _TEXTS["entry"].match(line)
        if entry is None:
            return line
        start, stream, tag, content = entry.groups()
        whole = self.held.pop(stream, b"") + content
        if tag == b"P" and len(whole) <= MAX_LINE_BYTES:
            self.held[stream] = whole
            return b""
        return start + b" F " + whole

    def _take_dirty(self, line: bytes, *, cut: bool = False) -> None:
        parts = [part for piece in split_long(line) for part in clean(piece)]
        for number, part in enumerate(parts, 1):
            self.cut = cut and number == len(parts)
            self.take_line(part)
