"""One pass over the lines of a log, in blocks, into a ledger.

Surface: NCCL and RCCL INFO logs on stdout or from NCCL_DEBUG_FILE. Fast because most bytes are never looked at one
by one: a block without any marker is skipped whole, and a channel line whose end was seen before is only counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from collectives.evidence_channels import Channel, is_fragment, parse_channels
from collectives.evidence_clean import MARKERS, MAX_LINE_BYTES, NEEDS_CLEANING, clean
from collectives.evidence_ledger import MAX_HOSTS, Ledger
from collectives.nccl_warnings import HARMLESS, codes_of

BLOCK_BYTES: Final = 1 << 20
MAX_SEEN: Final = 8_192  # remembered texts: ranks repeat each other

_HEADER = re.compile(rb"NCCL (INFO|WARN|TRACE|ERROR|VERSION) ")
_HOST = re.compile(rb"([A-Za-z0-9][\w.-]*):\d+:\d+ ?(?:\[-?\w*\])? *(?:[^\s:]+:\d+ )?(?:\(\w+\) )?$")
_NEXT_PREFIX = re.compile(
    rb"(?:\[[\d,]+\]<std\w+>:| ?\d{1,5}: )?([A-Za-z0-9][\w.-]*):\d+:\d+ ?(?:\[-?\w*\] ?)?(?:\S+:\d+ )?$"
)
_LAUNCHER = re.compile(
    rb"^(?:\s*(?:\d+: |\[\d+(?:,\d+)?\]<std\w+>: ?|\[rank\d+\]: ?|\([^()]{1,80}\) |"
    rb"\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? ?|> ?|\* |\| ))+"
)
# Messages that come in millions (every collective with NCCL_DEBUG_SUBSYS=COLL or TUNING) and say nothing here.
_DULL_STARTS = (
    *(b"Trees", b"Tree ", b"Connected all", b"Setting affinity", b"P2P Chunksize", b"threadThresholds"),
    *(b"AllReduce: ", b"AllGather: ", b"ReduceScatter: ", b"Broadcast: ", b"Reduce: ", b"Send: ", b"Recv: "),
    *(b"AllToAll: ", b"Gather: ", b"Scatter: ", b"New proxy ", b"Connection to proxy ", b"Connected to proxy "),
    *(b"[Proxy Progress]", b"Allocated ", b"MemManager", b"rank ", b"register comm "),
)
_ORDERS = (b"Channel ", b"Ring ")  # "Channel 00/16 : 0 7 6 5": the order of a ring
_CONTINUED = re.compile(rb"\s*\d{0,3}/?G?DRDMA")
_READ = re.compile(rb"(/read(?:/CE)?)\s*$")
_INFO = b"NCCL INFO "
_TAG_END = b"/GDRDMA"
# At the end of a line, or glued to the next writer's: in a script's "grep /GDRDMA log" it is neither.
_SPARE_TAG = re.compile(rb"/GDRDMA(?:\(PCI\))?(?:/[\w=]*)?(?=\s*$|[\w.-]+:\d+:\d+ \[)")


class _Seen:
    __slots__ = ("again", "bare", "channel")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.bare = channel if channel.bare_end else None
        self.again = 0


class Reader:
    """Feeds blocks of lines to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._dull: set[bytes] = set()  # messages that said nothing
        self._prefixes: dict[bytes, bytes] = {}  # prefix of a line: host
        self._tags_read = 0  # tags of the line in hand that belong to a channel
        self._last: Channel | None = None  # of the line before, within a node
        self._half: tuple[bytes, bytes] | None = None  # message and host of the line before: wrapped, perhaps
        self._writers: set[bytes] = set()  # "host:pid:tid" met
        # By direction: the end of a channel line, the channel it stands for, and how often it was met again.
        self._ends: tuple[dict[bytes, _Seen], ...] = ({}, {}, {})
        self._carry = b""  # the end of a line that broke inside a channel
        self._bare: Channel | None = None  # a channel at the very end of the last line

    def feed(self, block: bytes) -> None:
        """Read whole lines; the last newline of the block may be missing."""
        if block.endswith(b"\n"):
            block = block[:-1]
        # A good part of the lines is NCCL's: look at each. Else find those that are.
        if block.count(b"NCCL") * 400 > len(block):
            self._dense(block)
        else:
            self._sparse(block)

    def finish(self, *, cut: bool) -> Ledger:
        """No more lines; ``cut`` says that the log ended inside a line."""
        for table in self._ends:
            for seen in table.values():
                self.ledger.add_channel(seen.channel, seen.again)
            table.clear()
        if cut and self._bare is not None:
            self.ledger.doubt(self._bare)
        self._bare, self._carry = None, b""
        return self.ledger

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
                        if channel and len(place) < 64 and (prefix in prefixes or self._known(prefix)):
                            seen.again += 1
                            bare = seen.bare
                            last = seen.channel
                            continue
                else:
                    prefix, info, message = line.partition(_INFO)
                    if (
                        info
                        and (message in dull or (message.startswith(_DULL_STARTS) and b"NCCL" not in message))
                        and (prefix in prefixes or self._known(prefix))
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
        for part in clean(line[:MAX_LINE_BYTES]):
            self._line(part)

    # --- one line

    def _line(self, line: bytes) -> None:
        has_header = b"NCCL INFO " in line or b"NCCL WARN " in line
        if not has_header:
            self._continue_message(line)
            self._continue_read(line)
        self._last = self._half = None
        self._tags_read = 0
        if self._bare is not None:
            self._continue_tag(line)
        if not (self._carry and not has_header and self._continue_channel(line)):
            self._carry = b""
            found = self._channels(line, line) if b"via " in line else 0
            if has_header:
                self._messages(line)
                if not found or line.rfind(_INFO) > line.rfind(b"via "):
                    self._keep_broken(line)
            elif not found:
                self._headless(line)
        if _TAG_END in line:
            # A tag that belongs to no channel of its line was torn from an earlier one.
            spare = len(_SPARE_TAG.findall(line)) - self._tags_read
            if spare > 0 and (has_header or _LAUNCHER.sub(b"", line).startswith(_TAG_END)):
                self.ledger.orphan_tags += spare

    def _continue_channel(self, line: bytes) -> bool:
        """Join the broken channel line that came before with this line."""
        carry, self._carry = self._carry, b""
        body = _LAUNCHER.sub(b"", line)
        return bool(self._channels(carry + body, line) or self._channels(carry + b" " + body.lstrip(), line))

    def _headless(self, line: bytes) -> None:
        body = _LAUNCHER.sub(b"", line)
        if body.startswith(b"NET/") and is_fragment(body):
            self._channels(b"via " + body, line)
        elif not body.startswith(_TAG_END):
            self._message(body, warn=False)
            if b"NCCL version" in body and b"+" not in body:
                self._half = (body, b"")

    def _keep_broken(self, line: bytes) -> None:
        start = max(line.rfind(b"Channel "), line.rfind(b"Ring "), line.rfind(b"CollNet "))
        # Ring orders ("Channel 00/16 : 0 7 6 5") have neither.
        if start >= 0 and (b" -> " in line[start:] or b" : " not in line[start:]):
            self._carry = line[start : start + 200]

    # --- channels

    def _channels(self, text: bytes, shown: bytes) -> int:
        count = 0
        self._bare = None
        for channel in parse_channels(text):
            count += 1
            self.ledger.add_channel(channel)
            self.ledger.prove_channel(channel, shown)
            self._tags_read += channel.gdrdma is True
            if channel.network is None and not channel.torn:
                self._last = channel
            if channel.bare_end:
                self._bare = channel
        if count == 1 and text.count(_TAG_END) == self._tags_read:
            self._remember_end(text, channel)
        return count

    def _remember_end(self, text: bytes, channel: Channel) -> None:
        end = text[text.find(b"via ") + 4 :]
        table = self._ends[{"send": 0, "receive": 1, None: 2}[channel.direction]]
        if len(table) < MAX_SEEN and len(end) < 120 and b"NCCL" not in end and text.count(b"via ") == 1:
            table[end] = _Seen(channel)

    def _continue_tag(self, line: bytes) -> None:
        """The tag of the last line's channel may have been torn to the start of this one."""
        channel, self._bare = self._bare, None
        if channel is not None and _CONTINUED.match(_LAUNCHER.sub(b"", line)):
            self.ledger.mend(channel)
            self._tags_read += 1

    def _continue_read(self, line: bytes) -> None:
        if self._last is not None and self._last.transport.startswith("P2P/") and b"/read" in line:
            match = _READ.match(_LAUNCHER.sub(b"", line))
            if match and not self._last.transport.endswith("/read"):
                self.ledger.mend_local(self._last, match[1].decode())

    def _continue_message(self, line: bytes) -> None:
        """A terminal wrapped the message of the last line: "nNode", "s 2 localRanks 8"."""
        half, self._half = self._half, None
        if half is not None and line:
            message, host = half
            joined = message + _LAUNCHER.sub(b"", line[:MAX_LINE_BYTES])
            self.ledger.facts.take_wrapped(joined, host)
            for code in codes_of(joined):
                if code not in self.ledger.codes:
                    self.ledger.blame(code, joined)

    # --- messages

    def _messages(self, line: bytes) -> None:
        marks = list(_HEADER.finditer(line))
        before = line[: marks[0].start()] if marks else b""
        if b"CCL version" in before:
            # The version's own pattern ends it, unless the name of the next host begins with a digit.
            self._message(self._without_next_prefix(before) if self.ledger.hosts else before, warn=False, shown=line)
        for index, mark in enumerate(marks):
            last = index + 1 == len(marks)
            message = line[mark.end() : len(line) if last else marks[index + 1].start()]
            if not last:
                message = self._without_next_prefix(message)
            host = self._host(line[marks[index - 1].end() if index else 0 : mark.start()], first=index == 0)
            warn = mark[1] == b"WARN"
            self._message(message, warn=warn, host=host, shown=line)
            if last and (warn or message.startswith((b"comm ", b"NET/"))):
                self._half = (message, host)

    def _without_next_prefix(self, message: bytes) -> bytes:
        """The message without the prefix of the one glued to it: "PIX" of "PIXnode-1:10:20 [0] "."""
        match = _NEXT_PREFIX.search(message)
        if match is None:
            return message
        name = match[1]
        hosts = self.ledger.hosts if len(self.ledger.hosts) <= 256 else ()
        known = max((len(host) for host in hosts if name.endswith(host)), default=0)
        return message[: match.end(1) - known] if 0 < known < len(name) else message[: match.start()]

    def _host(self, prefix: bytes, *, first: bool = True) -> bytes:
        host = self._prefixes.get(prefix)
        if host is None:
            match = _HOST.search(prefix[-400:])
            host = match[1] if match else b""
            if len(self._prefixes) < MAX_SEEN and len(prefix) < 200:
                self._prefixes[prefix] = host
            if match and len(self._writers) < MAX_SEEN:
                self._writers.add(_writer(prefix))
            # Behind another message the name may have the end of that message glued to it.
            if host and first and len(self.ledger.hosts) < MAX_HOSTS:
                self.ledger.hosts[host[:128]] += 1
        return host

    def _known(self, prefix: bytes) -> bool:
        """Whether the process was met before, behind another time stamp."""
        return _writer(prefix) in self._writers

    def _message(self, message: bytes, *, warn: bool, host: bytes = b"", shown: bytes | None = None) -> None:
        if message in self._dull or (not warn and message.startswith(_DULL_STARTS + _ORDERS)):
            return
        ledger = self.ledger
        shown = message if shown is None else shown
        facts = ledger.facts.take(message, host)
        for fact in facts:
            ledger.prove(fact, shown, fact)
        codes = codes_of(message)
        for code in codes:
            ledger.blame(code, shown)
        if warn and not codes and not HARMLESS.search(message):
            ledger.blame("other_warnings", shown)
        if not facts and not codes and not warn and len(self._dull) < MAX_SEEN and len(message) < 400:
            self._dull.add(message)


def _writer(prefix: bytes) -> bytes:
    """ "host:pid:tid" of "2026-01-02T03:04:05Z host:pid:tid [0] "."""
    parts = prefix.rsplit(b" ", 3)
    return parts[-3][-200:] if len(parts) > 2 else prefix[-200:]


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
