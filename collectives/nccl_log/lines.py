"""Lines of a log: channels, messages, and the pieces that launchers and interleaving writers made of them.

Surface: one logical line at a time. What a line may leave open is held for the next one only: a channel cut before
its tag, a channel line cut inside, a message that a terminal wrapped.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from collectives.nccl_log.codes import DULL_STARTS, HARMLESS, codes_of
from collectives.nccl_log.ledger import Channel, Hosts, Identity, Ledger, Runs, Writer, is_fragment, parse_channels
from collectives.nccl_log.messages import END
from contracts.tables import read_patterns

MAX_MESSAGE_BYTES: Final = 2_048  # a list of 32 devices takes 1 KiB; patterns must not run away on more
MOST_PREFIX_BYTES: Final = 300  # of a host's name, a process and what a launcher puts before them
MAX_SEEN: Final = 8_192  # remembered texts: ranks repeat each other

_TEXTS = read_patterns(__file__, "facts.toml", "lines", str.encode)
# By their first five bytes, which no two kinds share in vain: a look-up in place of a comparison with each.
DULL_BY_HEAD: Final = {
    start[:5]: tuple(other for other in DULL_STARTS if other[:5] == start[:5]) for start in DULL_STARTS
}
MAX_PLACES: Final = 4_096  # remembered ends of channels: "00/0 : 0[0] -> 8[0] [send] "
TRACEBACK_LINES: Final = 1_000  # other ranks write in between
_TRACEBACK = b"Traceback (most recent call last)"
_AT_EXIT = (b", in _run_finalizers", b", in _exitfunc", b", in __del__")
CAUSE_LINES: Final = 2  # below "Last error:" stands its text, perhaps behind an empty line
_CAUSE = b"Last error:"
_ORDERS = (b"Channel ", b"Ring ")  # "Channel 00/16 : 0 7 6 5": the order of a ring
INFO = b"NCCL INFO "
_TAG_END = b"/GDRDMA"


class Seen:
    """The end of a channel line, the channel it stands for, and how often each host printed it again."""

    __slots__ = ("again", "bare", "channel")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.bare = channel if channel.bare_end else None
        self.again: Counter[bytes] = Counter()


class LineReader:
    """Understands one line at a time, with what the line before left open."""

    def __init__(self, runs: Runs, *, file: str = "") -> None:
        self.runs = runs
        self.file = file
        self.hosts = Hosts()  # of the whole log, and what a search put before their names
        self.ledger = Ledger(file=file)
        self.ledger.hosts = self.hosts.part()
        self.identity = Identity()
        self.places_left = MAX_PLACES
        self._dull: set[bytes] = set()  # messages that said nothing
        self._prefixes: dict[bytes, bytes] = {}  # prefix of a line: host
        self._tags_read = 0  # tags of the line in hand that belong to a channel
        self._last: Channel | None = None  # of the line before, within a node
        self._half: tuple[bytes, bytes] | None = None  # message and host of the line before: wrapped, perhaps
        self._writers: dict[bytes, bytes] = {}  # "host:pid:tid" met: host
        self._tails: dict[bytes, bytes] = {}  # "host:pid:tid [0] " met behind a time stamp: host
        self.stamp = 0  # length of the last time stamp
        self._processes: set[bytes] = set()  # "host:pid" met
        # By direction: the end of a channel line, the channel it stands for, and how often it was met again.
        self._ends: tuple[dict[bytes, Seen], ...] = ({}, {}, {})
        self._carry = b""  # the end of a line that broke inside a channel
        self._bare: Channel | None = None  # a channel at the very end of the last line
        self._bare_host = b""  # that printed it
        self._traceback = 0  # number of the line that a traceback began in, 0 where none is open
        self._ignored = 0  # of the line that says that an exception is ignored
        self._cause_lines = 0  # lines that may still hold the text of "Last error:"

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to what was read, whatever it says itself."""
        return bool(self._carry or self._cause_lines or self._bare is not None or self._half is not None)

    def finish(self, *, cut: bool) -> None:
        """No more lines; ``cut`` says that the log ended inside a line."""
        self._count_again()
        if cut and self._bare is not None:
            self.ledger.doubt(self._bare, self._bare_host)
        self._bare, self._carry = None, b""
        self.runs.lines += self.ledger.lines
        self.runs.add(self.ledger, self.identity)

    def _count_again(self) -> None:
        for table in self._ends:
            for seen in table.values():
                for host, times in seen.again.items():
                    self.ledger.add_channel(seen.channel, host, times)
            table.clear()

    def _begin_piece(self, text: bytes) -> None:
        """A process is new after channels were made: what follows may be another run."""
        self._count_again()
        last = self.ledger
        self.ledger = Ledger(file=self.file, line=last.lines, text=text)
        self.ledger.hosts = self.hosts.part()
        self.runs.add(last, self.identity)
        self.identity = Identity()
        self.places_left = MAX_PLACES
        for memory in (self._dull, self._prefixes, self._writers, self._tails):
            memory.clear()  # the next lines name their writer again

    def add_place(self, place: bytes) -> None:
        """Keep which ranks and devices a channel joins: "00/0 : 0[0] -> 8[0] [send] "."""
        self.places_left -= 1
        self.ledger.facts.add_place(place)

    def take_line(self, line: bytes) -> None:
        """Read one clean line."""
        has_header = b"NCCL INFO " in line or b"NCCL WARN " in line or b"NCCL ATTN " in line
        if not has_header:
            self._continue_message(line)
            self._continue_read(line)
        self._last = self._half = None
        self._tags_read = 0
        self.ledger.writer = Writer() if has_header else _writer_of(line)
        if self._bare is not None:
            self._continue_tag(line)
        if not (self._carry and not has_header and self._continue_channel(line)):
            self._carry = b""
            if has_header:
                self._meet_process(line)
                self.ledger.began.setdefault(self.file, self.ledger.lines)
            found = self._channels(line, line) if b"via " in line else 0
            if has_header:
                self._messages(line)
                if not found or line.rfind(INFO) > line.rfind(b"via "):
                    self._carry_broken_channel(line)
            elif not found:
                self._headless(line)
        self._cause_lines = CAUSE_LINES if line.rstrip().endswith(_CAUSE) else max(0, self._cause_lines - 1)
        if _TAG_END in line:
            # A tag that belongs to no channel of its line was torn from an earlier one.
            spare = len(_TEXTS["spare_tag"].findall(line)) - self._tags_read
            if spare > 0 and (has_header or _TEXTS["launcher"].sub(b"", line).startswith(_TAG_END)):
                self.ledger.orphan_tags += spare

    def _meet_process(self, line: bytes) -> None:
        """The process that wrote the line; a new one behind channels begins a piece of its own."""
        mark = _TEXTS["header"].search(line)
        prefix = line[: mark.start() if mark else line.find(b"NCCL ")]
        match = _TEXTS["process"].search(prefix[-300:])
        if match is None:
            return
        process = match[1]
        if process not in self._processes and len(self._processes) < MAX_SEEN:
            if self.ledger.transports or any(self._ends):
                self._begin_piece(line)
            self._processes.add(process)
        host = process.rpartition(b":")[0]
        self.ledger.writer = Writer(self._prefixes.get(prefix) or self.hosts.name_in(prefix), process, match[2] or b"")
        if b" Channel " in line and len(self.identity.marks) < MAX_SEEN:
            self.identity.marks.add(process)
        # Before a process has chosen its device it prints 0.
        if match[2] and match[2].isdigit() and (match[2] != b"0" or b" Channel " in line):
            self.identity.hold(host, b"device " + match[2], process)
        if b"anks " in line and (init := _TEXTS["init"].search(line)):
            rank, ranks, named, bus, communicator = init.groups()
            device = named or match[2] or b""
            if bus:
                self.identity.hold(host, bus, process)
            if communicator:
                self.identity.marks.add(communicator)
            self.ledger.facts.add_rank(int(rank), int(ranks), host, bus or b"device " + device)
            self.ledger.record_rank(int(rank), int(ranks), process, device)

    def _continue_channel(self, line: bytes) -> bool:
        """Join the broken channel line that came before with this line."""
        carry, self._carry = self._carry, b""
        body = _TEXTS["launcher"].sub(b"", line)
        return bool(self._channels(carry + body, line) or self._channels(carry + b" " + body.lstrip(), line))

    def _headless(self, line: bytes) -> None:
        body = _TEXTS["launcher"].sub(b"", line)
        if body.startswith(b"NET/") and is_fragment(body):
            self._channels(b"via " + body, line)
        elif not body.startswith(_TAG_END):
            self._exception(body, line)
            before, cause, text = body.partition(_CAUSE)
            if cause and text.strip():
                body, self._cause_lines = before + text, 1
            self._message(body, warn=False, foreign=b"NCCL" not in body and not self._cause_lines)
            if b"NCCL version" in body and b"+" not in body:
                self._half = (body, b"")

    def _exception(self, body: bytes, line: bytes) -> None:
        """A traceback proves the end of a program together with the exception below it, at the line's start."""
        if body.startswith(_TRACEBACK):  # behind other words it is a message of one that was caught
            self._traceback = self.ledger.lines if self.ledger.lines > self._ignored + 2 else 0
        elif body.startswith((b"Exception ignored in", b"Exception in thread ")):  # the program goes on
            self._ignored = self.ledger.lines
        elif self._traceback and any(place in body for place in _AT_EXIT):
            self._traceback = 0  # of what cleans up when a program has ended
        elif self._traceback and _TEXTS["exception"].match(body):
            if self.ledger.lines - self._traceback <= TRACEBACK_LINES:
                self.ledger.blame("python_traceback", line)
            self._traceback = 0

    def _carry_broken_channel(self, line: bytes) -> None:
        start = max(line.rfind(b"Channel "), line.rfind(b"Ring "), line.rfind(b"CollNet "))
        # Ring orders ("Channel 00/16 : 0 7 6 5") have neither.
        if start >= 0 and (b" -> " in line[start:] or b" : " not in line[start:]):
            self._carry = line[start : start + 200]

    # --- channels

    def _channels(self, text: bytes, shown: bytes) -> int:
        count = 0
        self._bare = None
        host = self.ledger.writer.host
        for channel in parse_channels(text):
            count += 1
            self.ledger.add_channel(channel, host)
            self.ledger.prove_channel(channel, shown)
            if self.places_left:
                self.add_place(text[max(0, text.find(b"via ") - 72) : text.find(b"via ")])
            self._tags_read += channel.gdrdma is True
            if channel.network is None and not channel.torn:
                self._last = channel
            if channel.bare_end:
                self._bare, self._bare_host = channel, host
        if count == 1 and text.count(_TAG_END) == self._tags_read:
            self._remember_end(text, channel)
        return count

    def _remember_end(self, text: bytes, channel: Channel) -> None:
        end = text[text.find(b"via ") + 4 :]
        if b" comm 0x" in end and b" nRanks " in end:  # NCCL ends the line with the transport
            self.ledger.facts.rccl = True
        table = self._ends[{"send": 0, "receive": 1, None: 2}[channel.direction]]
        # What was counted for an end that is known must stay: a new writer may print it too.
        if (
            end not in table
            and len(table) < MAX_SEEN
            and len(end) < 120
            and b"NCCL" not in end
            and text.count(b"via ") == 1
        ):
            table[end] = Seen(channel)

    def _continue_tag(self, line: bytes) -> None:
        """The tag of the last line's channel may have been torn to the start of this one."""
        channel, self._bare = self._bare, None
        if channel is not None and _TEXTS["continued"].match(_TEXTS["launcher"].sub(b"", line)):
            self.ledger.repair_line(channel, self._bare_host)
            self._tags_read += 1

    def _continue_read(self, line: bytes) -> None:
        if self._last is not None and self._last.transport.startswith("P2P/") and b"/read" in line:
            match = _TEXTS["read"].match(_TEXTS["launcher"].sub(b"", line))
            if match and not self._last.transport.endswith("/read"):
                self.ledger.repair_local(self._last, match[1].decode())

    def _continue_message(self, line: bytes) -> None:
        """A terminal wrapped the message of the last line: "nNode", "s 2 localRanks 8"."""
        half, self._half = self._half, None
        if half is not None and line:
            message, host = half
            joined = (message + _TEXTS["launcher"].sub(b"", line[:MAX_MESSAGE_BYTES]))[:MAX_MESSAGE_BYTES]
            self.ledger.facts.take_wrapped(joined, host)
            alone = codes_of(line[:MAX_MESSAGE_BYTES])
            for code in codes_of(joined):
                if code not in self.ledger.codes and code not in alone:
                    self.ledger.blame(code, joined)

    # --- messages

    def _messages(self, line: bytes) -> None:
        marks = list(_TEXTS["header"].finditer(line))
        before = line[: marks[0].start()] if marks else b""
        if b"CCL version" in before:
            # The version's own pattern ends it, unless the name of the next host begins with a digit.
            named = bool(self.hosts.names)
            self._message(self._without_next_prefix(before) if named else before, warn=False, shown=line)
        elif len(before) > MOST_PREFIX_BYTES:  # a page that has joined lines
            self._message(before, warn=False, shown=line, foreign=b"NCCL" not in before)
        for index, mark in enumerate(marks):
            last = index + 1 == len(marks)
            message = line[mark.end() : len(line) if last else marks[index + 1].start()]
            if not last:
                message = self._without_next_prefix(message)
            host = self._host(line[marks[index - 1].end() if index else 0 : mark.start()], first=index == 0)
            warn = mark[1] in (b"WARN", b"ATTN")  # 2.32 gives what was a warning and harms nothing the second
            self._message(message, warn=warn, host=host, shown=line)
            # The message says what failed; only the name of the source says for what.
            if warn and b"Cuda failure" in message and b"nvls.cc" in line[: mark.start()]:
                self.ledger.blame("nvls_bind_failed", line)
            if last and (warn or message.startswith((b"comm ", b"NET/"))):
                self._half = (message, host)

    def _without_next_prefix(self, message: bytes) -> bytes:
        """The message without the prefix of the one glued to it: "PIX" of "PIXnode-1:10:20 [0] "."""
        start = max(0, len(message) - 300)
        match = _TEXTS["next_prefix"].search(message, start)
        if match is None:
            return message
        name = match[1]
        names = self.hosts.names
        known = max((len(host) for host in names if name.endswith(host)), default=0) if len(names) <= 256 else 0
        return message[: match.end(1) - known] if 0 < known < len(name) else message[: match.start()]

    def _host(self, prefix: bytes, *, first: bool = True) -> bytes:
        host = self._prefixes.get(prefix)
        if host is None:
            host = self.hosts.name_in(prefix)
            if len(self._prefixes) < MAX_SEEN and len(prefix) < 200:
                self._prefixes[prefix] = host
            if host and len(self._writers) < MAX_SEEN:
                self._writers[_writer(prefix)] = host
            # Behind another message the name may have the end of that message glued to it.
            if host and first:
                self.hosts.add(host)
                self.ledger.hosts.add(host)
        return host

    def host_of(self, prefix: bytes) -> bytes | None:
        """The host of a process that was met before, perhaps behind another time stamp; None where it is new."""
        host = self._prefixes.get(prefix)
        if host is None:
            host = self._tails.get(prefix[self.stamp :])
        if host is None and (writer := _writer(prefix)) in self._writers:
            host = self._writers[writer]
            self.stamp = prefix.rfind(writer)
            if len(self._tails) < MAX_SEEN:
                self._tails[prefix[self.stamp :]] = host
        return host

    def _message(
        self, message: bytes, *, warn: bool, host: bytes = b"", shown: bytes | None = None, foreign: bool = False
    ) -> None:
        if message in self._dull or (not warn and message.startswith(DULL_STARTS + _ORDERS)):
            return
        ledger = self.ledger
        message = message[:MAX_MESSAGE_BYTES]
        shown = message if shown is None else shown
        facts = ledger.facts.take(message, self.hosts.bare(host))
        for fact in facts:
            ledger.prove(fact, shown, fact)
        if END in facts:
            ledger.ended[self.file] = ledger.lines
        if ledger.facts.variable:
            ledger.record_variable(ledger.facts.variable, shown)
        codes = codes_of(message, foreign=foreign)
        for code in codes:
            ledger.blame(code, shown)
        if warn and not codes and not HARMLESS.search(message):
            ledger.blame("other_warnings", shown)
        if not facts and not codes and not warn and len(self._dull) < MAX_SEEN and len(message) < 400:
            self._dull.add(message)


def _writer_of(line: bytes) -> Writer:
    match = _TEXTS["writer"].search(line[:400])
    if match is None:
        return Writer()
    *ranks, host, host_2, host_3, host_4 = match.groups()
    rank = next(filter(None, ranks), None)
    return Writer(host=host or host_2 or host_3 or host_4 or b"", rank=int(rank) if rank else None)


def _writer(prefix: bytes) -> bytes:
    """ "host:pid:tid" of "2026-01-02T03:04:05Z host:pid:tid [0] "."""
    parts = prefix.rsplit(b" ", 3)
    return parts[-3][-200:] if len(parts) > 2 else prefix[-200:]
