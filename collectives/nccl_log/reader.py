"""One pass over a log, in blocks, into ledgers.

Surface: NCCL and RCCL INFO logs on stdout or from NCCL_DEBUG_FILE. Fast because most lines repeat each other: a line
is looked at by its shape, that is without its digits, and a shape without any word of the tables is looked at once. A
channel line whose end was seen before is only counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Final

from collectives.nccl_log.clean import BLOCK_BYTES, FRAGMENTS, NEEDS_CLEANING, WORD_OF, WORDS, clean, pieces
from collectives.nccl_log.entries import Entries
from collectives.nccl_log.ledger import Ledger
from collectives.nccl_log.lines import DULL_BY_HEAD, INFO, LineReader
from collectives.nccl_log.runs import Runs

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

    def finish(self, *, cut: bool) -> Ledger:
        """As for lines; an entry without its end is a line that was cut."""
        if self._entries.open:
            self._line_dirty(self._entries.rest())
            cut = True
        return super().finish(cut=cut)

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
        told = self._with_words(texts)
        self._remember(texts - told)
        return [number for number in new if shapes[number] in told] if told else []

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
        """Whether no word of the tables stands in the line."""
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
        sends, receives, others = self._ends
        prefixes, tails, dull = self._prefixes, self._tails, self._dull
        for number in numbers:
            while done < number and self.is_open:
                self.ledger.lines = first + done + 1
                self._line_dirty(lines[done])
                done += 1
            done = number + 1
            line = lines[number]
            if self._bare is not None and not self._carry and b"NCCL" in line and b"DRDMA" not in line[:60]:
                # The usual case of a channel without a tag: the next line is a line of its own.
                self._bare = None
            if plain and not self._carry and self._bare is None:
                head, via, end = line.rpartition(b"via ")
                if via:
                    if head.endswith(b"[send] "):
                        seen = sends.get(end)
                    elif head.endswith(b"[receive] "):
                        seen = receives.get(end)
                    else:
                        seen = others.get(end)
                    if seen is not None:
                        prefix, channel, place = head.partition(b"NCCL INFO Channel ")
                        # The place is "00/0 : 0[0] -> 8[0] [send] ": longer, and another message stands in it.
                        if (
                            channel
                            and len(place) < 64
                            and (prefix in prefixes or prefix[self.stamp :] in tails or self.known(prefix))
                        ):
                            seen.again += 1
                            if self.places_left:
                                self.add_place(place)
                            self._half = None
                            self._bare = seen.bare
                            self._last = seen.channel
                            continue
                else:
                    prefix, info, message = line.partition(INFO)
                    if info:
                        starts = DULL_BY_HEAD.get(message[:5])
                        if (
                            (message.startswith(starts) and b"NCCL" not in message) if starts else message in dull
                        ) and (prefix in prefixes or prefix[self.stamp :] in tails or self.known(prefix)):
                            self._last = self._half = None
                            continue
                    elif b"NCCL" not in line and not self.is_open and self._is_quiet(line):
                        self._last = None
                        continue
            self.ledger.lines = first + number + 1
            self._line_dirty(line)
        while done < len(lines) and self.is_open:
            self.ledger.lines = first + done + 1
            self._line_dirty(lines[done])
            done += 1
        self.ledger.lines = first + len(lines)

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


def blocks(lines: Iterable[str] | Iterable[bytes]) -> Iterator[bytes]:
    """The lines joined to blocks; a line keeps or gets its newline."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        row = line if isinstance(line, bytes) else line.encode("utf-8", "surrogateescape")
        batch.append(row)
        size += len(row)
        if size >= BLOCK_BYTES:
            yield _joined(batch)
            batch, size = [], 0
    if batch:
        yield _joined(batch)


def _joined(batch: list[bytes]) -> bytes:
    if all(row.endswith(b"\n") for row in batch[:-1]):
        return b"".join(batch)
    return b"\n".join(row.rstrip(b"\r\n") for row in batch) + b"\n"
