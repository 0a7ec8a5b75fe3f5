"""What launchers, terminals, pagers and log rotation do to a log, undone.

Surface: physical lines of any training log, as bytes. Undone here: gzip, bzip2 and xz, colours (ECMA-48 SGR), HTML and
JSON escapes, progress bars that share a line by carriage return, many messages in one JSON string, UTF-16 as PowerShell
writes it.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from collectives.nccl_log.warnings import SEARCHED

BLOCK_BYTES: Final = 1 << 20

# A line longer than this is cut: no NCCL message is near it, and memory must stay flat on a file without newlines.
MAX_LINE_BYTES = 16_384

# The escape character itself, as caret notation, as JSON and Python write it, or lost altogether.
_COLOUR = re.compile(
    rb"(?:\x1b|ESC|\xe2\x90\x9b|\^\[|\\u001[bB]|\\x1[bB]|\\033|\\e)?\[(?:[0-9]{1,3}(?:;[0-9]{1,3})*)?m"
)
_COLOUR_MARKS = (b"[0m", b"ESC[", b"\xe2\x90\x9b[", b"^[[", b"\\u001", b"\\x1", b"\\033")
_OTHER_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")

# A block without any of these needs no cleaning.
NEEDS_CLEANING = (b"\x1b", b"\r", b"&", b"\\", b"\x00", b"[0m", b"^[[", b"ESC[", b"\xe2\x90\x9b[")

# Words of facts: one of these, or of the texts that name a fault, stands in every line that can matter, also in lines
# that lost their prefix. None has a digit: lines are told apart without theirs.
FACT_WORDS: Final = (
    b"NCCL",
    b"via ",
    b"NET/",
    b"/GDR",
    b"RCCL version",
    b"Using network",
    b"GPU Direct",
    b"nNodes",
    b"MNNVL",
    b" Pid ",
    b"nccl==",
    b"Last error:",
    # What the job runs on, and how it ended.
    b"NVIDIA ",
    b"Tesla ",
    b"GeForce",
    b"Avg bus bandwidth",
    b"Out of bounds values",
    b"train_runtime",
    b"exits successfully",
    b"Successfully completed.",
    b"raysubmit_",
    b"Trainer.fit` stopped",
    b"exit code: ",
    b"exited with code ",
    b"Traceback (most recent call last)",
    b"Exception ignored in",
    b"Exception in thread ",
    b"KeyboardInterrupt",
    b", in _run_finalizers",
    b", in _exitfunc",
    b", in __del__",
    b"Error",
    b"Exception: ",
    b"type NVL/",
)
WORDS: Final = tuple(dict.fromkeys((*FACT_WORDS, *SEARCHED)))
# One piece of each word: which tokens of a text can be part of a word is told by these, and tokens repeat each other.
WORD_OF: Final = tuple((max(word.split(), key=len), word) for word in WORDS)
FRAGMENTS: Final = tuple(dict.fromkeys(fragment for fragment, _ in WORD_OF))


class LogFileError(ValueError):
    """The file cannot be read as a log; the message says why, and what helps."""


class Stream(Protocol):
    """What can be read from: an open file, or one that is unpacked on the way."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end only."""
        ...


class _Engine(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


_PACKED: Final[tuple[tuple[bytes, Callable[[], _Engine]], ...]] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(wbits=31)),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", lzma.LZMADecompressor),
)
_NOT_UNPACKED: Final = ((b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"), (b"PK\x03\x04", "zip", "unzip -p"))


class Unpacked:
    """A file as it is, or unpacked piece by piece where it begins as a packed one does."""

    def __init__(self, file: Stream) -> None:
        self._file = file
        self._first = file.read(BLOCK_BYTES)
        for magic, tool, command in _NOT_UNPACKED:
            if self._first.startswith(magic):
                raise LogFileError(f"packed with {tool}, which is not read: {command} FILE | topoflight evidence -")
        made = next(((magic, engine) for magic, engine in _PACKED if self._first.startswith(magic)), None)
        self._pieces = self._unpack(*made) if made else None

    def read(self, size: int, /) -> bytes:
        """The next piece, of no more than 1 MiB; none at the end. Raises LogFileError where it is damaged."""
        if self._pieces is not None:
            return next(self._pieces, b"")
        first, self._first = self._first, b""
        return first or self._file.read(size)

    def _unpack(self, magic: bytes, make: Callable[[], _Engine]) -> Iterator[bytes]:
        data, engine = self._first, make()
        self._first = b""
        while True:
            try:
                piece = engine.decompress(data, BLOCK_BYTES)
            except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
                raise LogFileError(f"a packed file that is damaged: {error}") from None
            if piece:
                yield piece
            if engine.eof:  # a further member may follow, and padding of zeros
                data = engine.unused_data.lstrip(b"\0") or self._file.read(BLOCK_BYTES).lstrip(b"\0")
                if not data.startswith(magic):
                    return
                engine = make()
                continue
            data = getattr(engine, "unconsumed_tail", b"")
            if not data and len(piece) < BLOCK_BYTES:  # nothing is left inside
                data = self._file.read(BLOCK_BYTES)
                if not data:  # cut short: what could be read stands
                    return


def looks_like_text(start: bytes) -> bool:
    """Whether a file that begins so can be a log, packed or not."""
    packed = any(start.startswith(magic) for magic, _ in _PACKED)
    return packed or b"\0" not in start or _utf16(start) is not None


def utf8_chunks(file: Stream) -> Iterator[bytes]:
    """The file in pieces of about 1 MiB; UTF-16, with or without byte order mark, becomes UTF-8."""
    chunk = file.read(BLOCK_BYTES)
    encoding = _utf16(chunk[:4096])
    if encoding is None:
        while chunk:
            yield chunk
            chunk = file.read(BLOCK_BYTES)
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace")
        chunk = file.read(BLOCK_BYTES)


def _utf16(start: bytes) -> str | None:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # Text in Latin letters has a zero in every second byte, and a log in UTF-8 has none.
    for encoding, zeros in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if len(start) >= 64 and zeros.count(0) * 4 > len(zeros) * 3 and start.count(0) < len(start) * 3 // 4:
            return encoding
    return None


def pieces(line: bytes) -> list[bytes]:
    """A physical line, cut to a length that no message reaches; a longer one at its inner ends first."""
    if len(line) <= MAX_LINE_BYTES:
        return [line]
    return [piece[:MAX_LINE_BYTES] for piece in re.split(rb"\r|\\n", line)]


def clean(line: bytes) -> list[bytes]:
    """The logical lines of one physical line, without colours and escapes."""
    if b"\x1b" in line:
        line = _OTHER_ESCAPE.sub(b"", _COLOUR.sub(b"", line))
    elif any(mark in line for mark in _COLOUR_MARKS):
        line = _COLOUR.sub(b"", line)
    if b"&" in line:
        line = line.replace(b"&gt;", b">").replace(b"&lt;", b"<").replace(b"&quot;", b'"').replace(b"&amp;", b"&")
    if b"\\" in line:
        line = line.replace(b"\\u003e", b">").replace(b"\\u003c", b"<").replace(b"\\r", b"").replace(b"\\n", b"\n")
    if b"\x00" in line:
        line = line.replace(b"\x00", b"")
    line = line.rstrip(b"\r\n")
    if b"\r" in line or b"\n" in line:
        return [part for part in re.split(rb"[\r\n]+", line) if part]
    return [line]
