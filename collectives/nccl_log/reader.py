"""One pass over a log, in blocks, into ledgers.

Surface: NCCL and RCCL INFO logs on stdout or from NCCL_DEBUG_FILE. Fast because most lines repeat each other: a line
is looked at by its shape, that is without its digits, and a shape without any word of the tables is looked at once. A
channel line whose end was seen before is only counted.
"""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Final, Protocol

from collectives.nccl_log.codes import FACT_WORDS, SEARCHED
from collectives.nccl_log.ledger import Runs
from collectives.nccl_log.lines import DULL_BY_HEAD, INFO, LineReader
from contracts.bounded import Stream, utf16

# What launchers, terminals, pagers and log rotation do to a log, undone.
#
# Surface: physical lines of any training log, as bytes. Undone here: gzip, bzip2 and xz, colours (ECMA-48 SGR), HTML
# and JSON escapes, progress bars that share a line by carriage return, many messages in one JSON string, UTF-16 as
# PowerShell writes it.

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

WORDS: Final = tuple(dict.fromkeys((*FACT_WORDS, *SEARCHED)))
# One piece of each word: they decide which tokens of a text can be part of a word, and tokens repeat.
WORD_OF: Final = tuple((max(word.split(), key=len), word) for word in WORDS)
FRAGMENTS: Final = tuple(dict.fromkeys(fragment for fragment, _ in WORD_OF))


class LogFileError(ValueError):
    """The file cannot be read as a log; the message says why, and what helps."""


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
                raise LogFileError(f"packed with {tool}, which is not read: unpack it with {command} FILE")
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
    return packed or b"\0" not in start or utf16(start) is not None


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


# What a container runtime or journald made of a process's lines, undone block by block before anything is read.
#
# Surfaces: container logs of Kubernetes, where an entry that was cut is tagged P and goes on in the next one of its
# stream, up to one tagged F (k8s.io/cri-client, pkg/logs/logs.go); `journalctl -o json`, where text that is not
# printable, such as a colour or a carriage return, is an array of its bytes (systemd, JOURNAL_EXPORT_FORMATS.md), and
# of `-o json-pretty` a line for each byte (systemd, src/libsystemd/sd-json/sd-json.c). A block has as many lines
# afterwards as before.

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
        decoded = bytes(int(number) for number in field[2].split(b","))
    except ValueError:
        return field[0]
    return field[1] + b'"' + decoded.replace(b"\n", b"\\n") + b'"' + b"\n" * field[2].count(b"\n")


MAX_SHAPES: Final = 8_192  # remembered: what a program prints has few, and memory must stay flat
MAX_SHAPE_BYTES: Final = 400
MAX_TOKENS: Final = 32_768
MAX_TOKEN_BYTES: Final = 48
_DIGITS: Final = b"0123456789"


class Reader(LineReader):
    """Feeds blocks of lines to the ledgers of the runs that it finds."""

    def __init__(self, runs: Runs | None = None, *, file: str = "") -> None:
        super().__init__(runs or Runs(), file=file)
        self._entries = Entries()
        self._quiet: set[bytes] = set()  # shapes without any word of the tables
        self._quiet_tokens: set[bytes] = set()  # between blanks, without any piece of a word

    def finish(self, *, cut: bool) -> None:
        """As for lines; an entry without its end is a line that was cut."""
        if self._entries.open:
            self._line_dirty(self._entries.rest())
            cut = True
        super().finish(cut=cut)

    def feed(self, block: bytes) -> None:
        """Read whole lines; the last newline of the block may be missing."""
        if block.endswith(b"\n"):
            block = block[:-1]
        block = self._entries.whole(block)
        lines = block.split(b"\n")
        # A good part of the lines is NCCL's: look at each. Else find those that are.
        dense = block.count(b"NCCL") * 400 > len(block)
        if dense:
            self._read(lines, range(len(lines)), plain=_is_plain(block))
        else:
            numbers = self._worth_reading(block)
            self._read(lines, numbers, plain=all(_is_plain(lines[number]) for number in numbers))

    def _worth_reading(self, block: bytes) -> list[int]:
        """Numbers of the block's lines in which a word of the tables stands."""
        shapes = block.translate(None, _DIGITS).split(b"\n")
        quiet = self._quiet
        new = [number for number, shape in enumerate(shapes) if shape not in quiet]
        if not new:
            return new
        texts = {shapes[number] for number in new}
        matching = self._with_words(texts)
        self._remember(texts - matching)
        return [number for number in new if shapes[number] in matching] if matching else []

    def _with_words(self, texts: set[bytes]) -> set[bytes]:
        """The texts in which a word stands. Only words of which a token of the texts may be a part are looked for."""
        tokens = set(b"\n".join(texts).split()) - self._quiet_tokens
        suspects = _with_any(FRAGMENTS, tokens)
        if len(self._quiet_tokens) >= MAX_TOKENS:
            self._quiet_tokens.clear()
        short = (token for token in tokens - suspects if len(token) <= MAX_TOKEN_BYTES)
        self._quiet_tokens.update(islice(short, MAX_TOKENS - len(self._quiet_tokens)))
        return _with_any({word for token in suspects for word in _words_of(token)}, texts)

    def _remember(self, shapes: Iterable[bytes]) -> None:
        if len(self._quiet) >= MAX_SHAPES:
            self._quiet.clear()
        short = (shape for shape in shapes if len(shape) < MAX_SHAPE_BYTES)
        self._quiet.update(islice(short, MAX_SHAPES - len(self._quiet)))

    def _is_quiet(self, line: bytes) -> bool:
        """Whether the line contains no word of the tables."""
        shape = line.translate(None, _DIGITS)
        if shape in self._quiet:
            return True
        if any(word in shape for word in WORDS):
            return False
        self._remember((shape,))
        return True

    def _read(self, lines: list[bytes], numbers: Iterable[int], *, plain: bool) -> None:
        """Read the lines of these numbers, and behind each those that it goes on in."""
        first = self.ledger.lines
        done = 0
        for number in numbers:
            self._read_while_open(lines, done, number, first)
            done = number + 1
            line = lines[number]
            if self._bare is not None and not self._carry and b"NCCL" in line and b"DRDMA" not in line[:60]:
                # The usual case of a channel without a tag: the next line is a line of its own.
                self._bare = None
            if plain and not self._carry and self._bare is None:
                head, via, end = line.rpartition(b"via ")
                if self._is_counted(head, end) if via else self._is_dull(line):
                    continue
            self.ledger.lines = first + number + 1
            self._line_dirty(line)
        self._read_while_open(lines, done, len(lines), first)
        self.ledger.lines = first + len(lines)

    def _read_while_open(self, lines: list[bytes], done: int, until: int, first: int) -> None:
        """Read on from line `done` while what was read goes on; `first` lines stand before the block."""
        while done < until and self.is_open:
            self.ledger.lines = first + done + 1
            self._line_dirty(lines[done])
            done += 1

    def _is_counted(self, head: bytes, end: bytes) -> bool:
        """Whether a line "HEAD via END" is a channel like one seen before: then it is counted with that."""
        sends, receives, others = self._ends
        if head.endswith(b"[send] "):
            seen = sends.get(end)
        elif head.endswith(b"[receive] "):
            seen = receives.get(end)
        else:
            seen = others.get(end)
        if seen is None:
            return False
        prefix, channel, place = head.partition(b"NCCL INFO Channel ")
        # The place is "00/0 : 0[0] -> 8[0] [send] ": longer, and another message was written into it.
        host = self.host_of(prefix) if channel and len(place) < 64 else None
        if host is None:
            return False
        seen.again[host] += 1
        if self.places_left:
            self.add_place(place)
        self._half = None
        self._bare, self._bare_host = seen.bare, host
        self._last = seen.channel
        return True

    def _is_dull(self, line: bytes) -> bool:
        """Whether a line is a message that says nothing here, or none of NCCL's and without a word of the tables."""
        prefix, info, message = line.partition(INFO)
        if info:
            starts = DULL_BY_HEAD.get(message[:5])
            dull = (message.startswith(starts) and b"NCCL" not in message) if starts else message in self._dull
            if dull and self.host_of(prefix) is not None:
                self._last = self._half = None
                return True
        elif b"NCCL" not in line and not self.is_open and self._is_quiet(line):
            self._last = None
            return True
        return False

    def _line_dirty(self, line: bytes) -> None:
        for piece in pieces(line):
            for part in clean(piece):
                self.take_line(part)


@lru_cache(maxsize=8_192)
def _words_of(token: bytes) -> tuple[bytes, ...]:
    """Words that the token may be a part of."""
    return tuple(word for fragment, word in WORD_OF if fragment in token)


def _is_plain(text: bytes) -> bool:
    return not any(mark in text for mark in NEEDS_CLEANING)


def _with_any(words: Iterable[bytes], texts: set[bytes]) -> set[bytes]:
    """The texts in which one of the words stands: each word is looked for once, in all of them."""
    joined = b"\n".join(texts)
    found: set[bytes] = set()
    for word in words:
        at = joined.find(word)
        while at >= 0:
            end = joined.find(b"\n", at)
            end = len(joined) if end < 0 else end
            found.add(joined[joined.rfind(b"\n", 0, at) + 1 : end])
            at = joined.find(word, end)
    return found
