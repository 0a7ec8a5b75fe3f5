"""One pass over a log, in blocks, into a ledger.

Surface: NCCL and RCCL INFO logs on stdout or from NCCL_DEBUG_FILE. Fast because most bytes are never looked at one
by one: a block without any marker is skipped whole, and a channel line whose end was seen before is only counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from collectives.evidence_clean import BLOCK_BYTES, MARKERS, NEEDS_CLEANING, clean, pieces
from collectives.evidence_entries import Entries
from collectives.evidence_ledger import Ledger
from collectives.evidence_lines import DULL_STARTS, INFO, LineReader


class Reader(LineReader):
    """Feeds blocks of lines to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._entries = Entries()

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
        # A good part of the lines is NCCL's: look at each. Else find those that are.
        if block.count(b"NCCL") * 400 > len(block):
            self._dense(block)
        else:
            self._sparse(block)

    # --- blocks

    def _sparse(self, block: bytes) -> None:
        ledger = self.ledger
        spans: dict[int, int] = {}
        if self._carry or self._bare is not None:
            spans[0] = _line_end(block, 0)
        for marker in MARKERS:
            at = block.find(marker)
            while at >= 0:
                end = _line_end(block, at)
                spans[block.rfind(b"\n", 0, at) + 1] = end
                at = block.find(marker, end)
        first_line = ledger.lines
        counted = done = 0  # up to here lines were counted, and read
        for start, end in _runs(spans):
            if end <= done and done:
                continue
            start = max(start, done)
            ledger.lines += block.count(b"\n", counted, start)
            self._dense(block[start:end])
            # A torn line goes on in the next one, marked or not.
            while (self._carry or self._bare is not None) and end < len(block):
                start, end = end + 1, _line_end(block, end + 1)
                self._dense(block[start:end])
            counted, done = end + 1, end + 1
        ledger.lines = first_line + block.count(b"\n") + 1

    def _dense(self, block: bytes) -> None:
        ledger = self.ledger
        plain = not any(mark in block for mark in NEEDS_CLEANING)
        rest = [marker for marker in MARKERS[2:] if marker in block]
        sends, receives, others = self._ends
        prefixes, dull = self._prefixes, self._dull
        bare, last = self._bare, self._last
        for line in block.split(b"\n"):
            ledger.lines += 1
            head, via, end = line.rpartition(b"via ")
            if bare is not None and b"DRDMA" not in line[:60] and b"NCCL" in line:
                # The usual case of a channel without a tag: the next line is a line of its own.
                bare = None
            if plain and bare is None and not self._carry:
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
                        if channel and len(place) < 64 and (prefix in prefixes or self.known(prefix)):
                            seen.again += 1
                            bare = seen.bare
                            last = seen.channel
                            continue
                else:
                    prefix, info, message = line.partition(INFO)
                    if (
                        info
                        and (message in dull or (message.startswith(DULL_STARTS) and b"NCCL" not in message))
                        and (prefix in prefixes or self.known(prefix))
                    ):
                        continue
            if via or bare is not None or self._carry or b"NCCL" in line or any(mark in line for mark in rest):
                self._bare, self._last = bare, last
                self._line_dirty(line)
                bare, last = self._bare, self._last
            elif self._half is not None:
                self._continue_message(line)
        self._bare, self._last = bare, last

    def _line_dirty(self, line: bytes) -> None:
        for piece in pieces(line):
            for part in clean(piece):
                self.take_line(part)


def _runs(spans: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Neighbouring lines as one piece."""
    first, last = -1, -2
    for start in sorted(spans):
        if start == last + 1:
            last = spans[start]
            continue
        if first >= 0:
            yield first, last
        first, last = start, spans[start]
    if first >= 0:
        yield first, last


def _line_end(block: bytes, at: int) -> int:
    end = block.find(b"\n", at)
    return len(block) if end < 0 else end


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
