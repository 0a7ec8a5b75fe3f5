"""One pass over a log, in blocks, into ledgers: channels, messages, and text that other programs write between them.

Surface: NCCL and RCCL INFO logs on stdout or from NCCL_DEBUG_FILE, with what launchers, terminals, container runtimes
and log rotation do to them: gzip, bzip2 and xz, colours (ECMA-48 SGR), HTML and JSON escapes, progress bars that share
a line by carriage return, many messages in one JSON string. Container logs of Kubernetes split long entries: a part
that is tagged P continues in the next entry of its stream, until one is tagged F (k8s.io/cri-client, pkg/logs/logs.go).

Most lines repeat each other: a channel line whose end is known is only counted. A line without any word of the tables
is recognised by its shape: the line without digits.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from collectives.nccl_log.channels import MAX_HEAD_BYTES, TAG, Channel, direction_of, parse_channels
from collectives.nccl_log.codes import CODES, DIGITS, DULL_STARTS, FACT_WORDS, HARMLESS, SEARCHED, find_codes
from collectives.nccl_log.ledger import Ledger, Runs, Writer, host_name
from collectives.nccl_log.messages import END, STEP, CommunicatorRank, Firsts, Lasts
from contracts.bounded import open_regular, utf16
from contracts.tables import read_patterns, read_table

BLOCK_BYTES: Final = 1 << 20

# A longer line is cut. No NCCL message is near this length, and a file without newlines must not need more memory.
MAX_LINE_BYTES: Final = 16_384

_ESCAPES: Final = tuple(
    (mark.encode(), re.compile(row["pattern"].encode()), row["plain"].encode())
    for row in read_table(__file__, "facts.toml")["escapes"] for mark in row["marks"]
)  # fmt: skip
_MARKED: Final = re.compile(b"|".join(map(re.escape, (*(mark for mark, *_ in _ESCAPES), b"\r", b"\n"))))

_PACKED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "lzma"}  # modules, which most logs do not need
MAX_ANSWER_BYTES: Final = 64 << 20
_NOT_UNPACKED: Final = ((b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"), (b"PK\x03\x04", "zip", "unzip -p"))

WORDS: Final = tuple(dict.fromkeys((*FACT_WORDS, *SEARCHED)))

MAX_MESSAGE_BYTES: Final = 2_048  # a list of 32 devices takes 1 KiB; the time of the patterns must be limited
MAX_PREFIX_BYTES: Final = 300  # of the names of a host and a process, with what a launcher puts before them
MAX_SEEN: Final = 8_192  # stored texts: ranks repeat each other
MAX_DULL_BYTES: Final = 400
TRACEBACK_LINES: Final = 1_000  # other ranks write between a traceback and its exception
BELOW_EXCEPTION: Final = 3  # lines that may follow the last exception of a log
CAUSE_LINES: Final = 2  # the text of "Last error:" is below it, perhaps after an empty line

_TEXTS = read_patterns(__file__, "facts.toml", "lines", str.encode)
_TRACEBACK = b"Traceback (most recent call last)"
_AT_EXIT = (b", in _run_finalizers", b", in _exitfunc", b", in __del__")
_CAUSE = b"Last error:"
_ORDERS = (b"Channel ", b"Ring ")  # "Channel 00/16 : 0 7 6 5": the order of a ring
_INFO = b"NCCL INFO "
_HEADERS = (_INFO, b"NCCL WARN ", b"NCCL ATTN ")
# These messages are clear only with the name of their source file, which precedes the header.
_WITH_FILE = (b"hip", b"Call to bind", b"Call to listen")
_MAX_NAME_BYTES = 160  # "ip: 10.100.100.100", or "host : " and a name


class LogFileError(ValueError):
    """The file cannot be read as a log; the message says why, and what helps."""


class Unpacked:
    """A file as it is, decompressed, or the lines of an answer of Loki's API, as its first bytes say."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Any = file if hasattr(file, "peek") else io.BufferedReader(cast(io.RawIOBase, file))
        first = self._file.peek()
        for magic, tool, command in _NOT_UNPACKED:
            if first.startswith(magic):
                raise LogFileError(f"packed with {tool}, which is not read: unpack it with {command} FILE")
        is_answer = _TEXTS["answer"].match(first)
        self._lines = _read_answer(self._file.read(MAX_ANSWER_BYTES)) if is_answer else iter(())
        self._module = next((module for magic, module in _PACKED.items() if first.startswith(magic)), "")
        if self._module:
            self._file = importlib.import_module(self._module).open(self._file)

    def read(self, size: int = BLOCK_BYTES, /) -> bytes:
        """Return the next part; an empty one at the end. Raises LogFileError if the file is damaged."""
        if not self._module:
            return b"".join(islice(self._lines, 4_096)) or bytes(self._file.read(size))
        import lzma
        import zlib

        try:
            return bytes(self._file.read1(size))
        except EOFError:  # the file is cut; what could be read stays
            return b""
        except (zlib.error, lzma.LZMAError, OSError) as error:
            raise LogFileError(f"a packed file that is damaged: {error}") from None


def _read_answer(answer: bytes) -> Iterator[bytes]:
    """Yield the lines of Loki's answer, sorted by time, as `kubectl logs --prefix` prints them."""
    from contracts import plain

    try:
        entries = [(int(time), str(stream["stream"].get("pod", "-"))[:253], text.rstrip())
                   for stream in plain.loads(answer)["data"]["result"]
                   for time, text, *_ in stream["values"]]  # fmt: skip
    except (plain.PlainError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise LogFileError(f"an answer of Loki that is cut or damaged, or larger than 64 MiB: {error}") from None
    for _, pod, text in sorted(entries, key=itemgetter(0)):  # one entry may be millions of lines
        parts = (part.rstrip() for part in io.StringIO(text, None) if part.strip())
        yield from (f"[pod/{pod}/-] {part}\n".encode("utf-8", "replace") for part in parts)


def holds_text(file: Path) -> bool:
    """Return whether a file can be a log, compressed or not, by its first bytes."""
    with open_regular(file) as opened:
        start = opened.read(4096)
    return start.startswith(tuple(_PACKED)) or b"\0" not in start or utf16(start) is not None


def split_line(line: bytes) -> list[bytes]:
    """Return the logical lines of a line: of a collector's JSON entry as `kubectl logs --prefix` prints them."""
    start = b""
    if line.lstrip().startswith(b"{"):
        pods, entry = {*_TEXTS["pod"].findall(line)}, _TEXTS["text"].match(line)
        start = b"[pod/%s/-] " % pods.pop() if len(pods) == 1 else b""
        line = entry[1] if entry and not _TEXTS["mild"].search(line) else line
    pieces = [line] if len(line) <= MAX_LINE_BYTES else re.split(rb'\r|\\n|(?<=[\]}]), ?(?=[\[{]")', line)
    return [start + part for piece in pieces for part in _clean(piece[:MAX_LINE_BYTES])]


def _clean(line: bytes) -> list[bytes]:
    """Return the logical lines of one physical line, without colours, escapes and links of Markdown."""
    if not _MARKED.search(line):
        return [line]
    for mark, pattern, plain in _ESCAPES:
        if mark in line:
            line = pattern.sub(plain, line)
    return [part for part in re.split(rb"[\r\n]+", line.rstrip(b"\r\n")) if part] or [b""]


class Reader:
    """Reads blocks of lines into the ledgers of the runs that they belong to."""

    def __init__(self, runs: Runs | None = None, *, file: str = "") -> None:
        self.runs = runs or Runs()
        self.file = file
        self.ledger = Ledger(file=file)
        self.held: dict[bytes, bytes] = {}  # the parts of an entry that is not complete, by stream
        self.cut = False  # the current line has no end
        self._quiet: set[bytes] = set()  # shapes without any word of the tables
        self._dull: set[bytes] = set()  # messages without a fact or a problem
        self._writers: Firsts[bytes, Writer] = Firsts(MAX_SEEN)  # by the prefix of a line
        self._processes: Firsts[str, None] = Firsts(MAX_SEEN)
        self._ends: Firsts[tuple[str | None, bytes], Channel] = Firsts(MAX_SEEN)  # by direction and text after "via "
        self._tags_read = 0  # tags of the current line that belong to a channel
        self._traceback = 0  # number of the line with the start of an open traceback; -1: of one that ends no program
        self._bare = (0, b"")  # the last line that has an exception without a traceback, and its number
        self._ignored = -2  # number of the line that says that an exception is ignored
        self._step = b""  # the last step of training that a line reports
        self._sent: Firsts[tuple[bytes, bytes], None] = Firsts(1 << 16)  # that torchrun ended: label, number
        self._above = (0, b"", b"")  # last line with a host that belongs to the line below: number, end, its label
        self._raised: Lasts[bytes, str] = Lasts(MAX_SEEN)  # by label of lines: host whose exception Ray reports there
        self._tasks: Lasts[bytes, str] = Lasts(MAX_SEEN)  # host of each task of srun or mpirun; empty: of several
        self.cause_lines = 0  # lines that may still contain the text of "Last error:"

    def feed(self, block: bytes, *, cut: bool = False) -> None:
        """Read whole lines; the last newline of the block may be missing. `cut`: the log ends inside the last line."""
        block = block.removesuffix(b"\n")
        if self.held or any(mark in block for mark in (b" stdout P", b" stderr P")):
            block = b"\n".join(map(self._join_parts, block.split(b"\n")))
        lines = block.split(b"\n")
        shapes = block.translate(None, DIGITS).split(b"\n")
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
            start = text.find(word)
            while start >= 0:
                end = text.find(b"\n", start)
                end = len(text) if end < 0 else end
                new.discard(text[text.rfind(b"\n", 0, start) + 1 : end])
                start = text.find(word, end)
        self._quiet |= new

    def _join_parts(self, line: bytes) -> bytes:
        """Return the whole entry if this line completes it, nothing if it does not."""
        entry = _TEXTS["entry"].match(line)
        if entry is None:
            return line
        start, stream, tag, content = entry.groups()
        joined = self.held.pop(stream, b"") + content
        if tag == b"P" and len(joined) <= MAX_LINE_BYTES:
            self.held[stream] = joined
            return b""
        return start + b" F " + joined

    def _take_dirty(self, line: bytes, *, cut: bool = False) -> None:
        parts = split_line(line)
        for number, part in enumerate(parts, 1):
            self.cut = cut and number == len(parts)
            self.take_line(part)

    def finish(self) -> None:
        """Add what was read to the runs. An exception at the end of a log ended the program."""
        for part in self.held.values():
            self._take_dirty(part, cut=True)
        end, (number, bare) = self.ledger.lines, self._bare
        if bare and end <= number + BELOW_EXCEPTION and not find_codes(bare, foreign=True):
            self.ledger.writer, self.ledger.lines = _find_writer(bare), number
            self.ledger.count_code("python_traceback", bare)
            self.ledger.lines = end
        self.runs.lines += end
        self.runs.add(self.ledger)

    # --- a line

    def is_known(self, line: bytes) -> bool:
        """Return whether the line says nothing, or is a channel line like an earlier one, which is then counted."""
        prefix, _, message = line.partition(_INFO)
        if message.startswith(DULL_STARTS) and b"NCCL" not in message:
            return True
        head, via, end = message.rpartition(b"via ")
        # A longer head contains the message of another writer.
        if not via or len(head) > MAX_HEAD_BYTES or not head.startswith(b"Channel "):
            return False
        writer, channel = self._writers.get(prefix), self._ends.get((direction_of(head), end))
        if writer is None or channel is None:
            return False
        self.ledger.channels.add((writer.host, channel))
        self.ledger.facts.channel_heads.add(head[8:], writer.host)
        return True

    def take_line(self, line: bytes) -> None:
        """Read one line."""
        has_header = any(header in line for header in _HEADERS)
        self._tags_read = 0
        number, above, label = self._above
        is_near = number == self.ledger.lines - 1 or above.startswith(b"Name: ")
        above = above if is_near and _TEXTS["below"].search(line) and label == _label_of(line) else b""
        writer = Writer() if has_header else _find_writer(above + line)
        if match := _TEXTS["raised"].search(line):
            self._raised.add(_label_of(line), match[1].decode())
        elif self._raised and _TEXTS["exception"].match(_TEXTS["launcher"].sub(b"", line)):
            writer = Writer(self._raised.pop(_label_of(line), writer.host), rank=writer.rank)
        elif not (writer.host or has_header) and (task := _TEXTS["task"].match(line)):
            writer = Writer(self._tasks.get(task[1], ""), rank=writer.rank)
        self.ledger.writer = writer
        if writer.host and writer.rank is not None:
            self.ledger.rank_hosts.add((writer.rank, writer.host), None)
        if has_header:
            self._meet_process(line)
            self.ledger.began.add(self.file, self.ledger.lines)
        channels = self._take_channels(line) if b"via " in line else 0
        if has_header:
            self._take_messages(line)
        elif not channels:
            self._take_headless(line)
        if match := _TEXTS["above"].search(line[-_MAX_NAME_BYTES:]):
            self._above = self.ledger.lines, above + match[0] + b" ", _label_of(line)
        self.cause_lines = CAUSE_LINES if line.rstrip().endswith(_CAUSE) else max(0, self.cause_lines - 1)
        if TAG in line:
            # A tag that belongs to no channel of its line was torn from an earlier one.
            spare = len(_TEXTS["spare_tag"].findall(line)) - self._tags_read
            if spare > 0 and (has_header or _TEXTS["torn_tag"].match(_TEXTS["launcher"].sub(b"", line))):
                self.ledger.counts.add("orphan tags", spare)

    # --- processes

    def _meet_process(self, line: bytes) -> None:
        """Set the writer of the line. A new process after channels were made starts a new part."""
        mark = _TEXTS["header"].search(line)
        prefix = line[: mark.start()] if mark else line
        writer = self._writers.get(prefix) or _parse_writer(prefix)
        if not writer.process:
            return
        if writer.process not in self._processes and len(self._processes) < MAX_SEEN:
            if self.ledger.count_transports():
                self.runs.add(self.ledger)
                self.ledger = Ledger(file=self.file, line=self.ledger.lines, text=line)
                self._dull.clear()
                self._writers.clear()  # so that only hosts of the new part's lines are counted for it
            self._processes.add(writer.process, None)
        if prefix not in self._writers:
            self.ledger.hosts.add(writer.host)
            if task := _TEXTS["task"].match(prefix):
                self._tasks.add(task[1], writer.host if self._tasks.get(task[1], writer.host) == writer.host else "")
            self.ledger.facts.rccl |= b"/hipify/" in prefix
            if len(prefix) < MAX_PREFIX_BYTES:
                self._writers.add(prefix, writer)
        self.ledger.writer = writer
        if b" Channel " in line:
            self.ledger.marks.add(writer.process, None)
        # A process prints device 0 before it has chosen its device.
        if writer.device.isdigit() and (writer.device != "0" or b" Channel " in line):
            self.ledger.gpus.add((writer.host, f"device {writer.device}"), writer.process)
        if b"anks " in line and (init := _TEXTS["init"].search(line)):
            self._meet_rank(init, writer)

    def _meet_rank(self, init: re.Match[bytes], writer: Writer) -> None:
        """Record the rank, the GPU and the communicator in a line of communicator set-up."""
        rank, ranks, device_name, bus, communicator, state = (text.decode() if text else "" for text in init.groups())
        device = device_name or writer.device
        if bus:
            self.ledger.gpus.add((writer.host, bus), writer.process)
        if communicator:
            self.ledger.marks.add(communicator, None)
        gpu = bus or f"device {device}"
        member = CommunicatorRank(int(ranks), int(rank), writer.host, gpu, writer.process, device)
        self.ledger.facts.members.add(member, None)
        if state:
            self.ledger.facts.setups.add((member, state), None)

    # --- channels

    def _take_channels(self, text: bytes) -> int:
        channels = list(parse_channels(text, cut=self.cut))
        via, host = text.find(b"via "), self.ledger.writer.host
        for channel in channels:
            self.ledger.channels.add((host, channel))
            self.ledger.prove_channel(channel, text)
            self.ledger.facts.channel_heads.add(text[max(0, via - MAX_HEAD_BYTES) : via], host)
            self._tags_read += channel.gdrdma is True
        if len(channels) == 1 and text.count(TAG) == self._tags_read:
            self._remember_end(text, channels[0])
        return len(channels)

    def _remember_end(self, text: bytes, channel: Channel) -> None:
        end = text[text.find(b"via ") + 4 :]
        if b" comm 0x" in end and b" nRanks " in end:  # NCCL ends the line with the transport
            self.ledger.facts.rccl = True
        if not self.cut and len(end) < 120 and b"NCCL" not in end and text.count(b"via ") == 1:
            self._ends.add((channel.direction, end), channel)

    # --- messages

    def _take_messages(self, line: bytes) -> None:
        marks = list(_TEXTS["header"].finditer(line))
        before = line[: marks[0].start()] if marks else b""
        # Another message precedes the first header: NCCL's version, or one of a page that has joined lines.
        if b"CCL version" in before or len(before) > MAX_PREFIX_BYTES:
            self._take_message(before, warn=False, line=line, foreign=b"NCCL" not in before)
        for index, mark in enumerate(marks):
            host = self.ledger.writer.host if index == 0 else _parse_writer(line[: mark.start()]).host
            message = line[mark.end() :]
            if index + 1 < len(marks):
                message = _TEXTS["next_prefix"].sub(b"", line[mark.end() : marks[index + 1].start()])
            warn = mark[1] in (b"WARN", b"ATTN")  # 2.32 prints harmless warnings as ATTN
            if b" failure " in message or message.startswith(_WITH_FILE):
                message = b" ".join([*line[: mark.start()].split()[-2:], message])
            self._take_message(message, warn=warn, host=host, line=line)

    def _take_headless(self, line: bytes) -> None:
        """Read a line without a header of NCCL."""
        body = _TEXTS["launcher"].sub(b"", line)
        if b"closing signal" in body and (sent := _TEXTS["sent"].search(body)):
            self._sent.add((_label_of(line), sent[1]), None)
        elif b"failed (exitcode: " in body or b"error: *** " in body:  # what follows is of the next attempt
            self.ledger.attempts.add(self.file, self.ledger.lines + 1)
        ended = _TEXTS["ended"].search(body) if self._sent else None  # a row of torchrun's table
        if body.startswith(TAG) or (ended and (_label_of(line), ended[1] or ended[2]) in self._sent):
            return
        self._take_exception(body, line)
        before, cause, text = body.partition(_CAUSE)
        if cause and text.strip():
            body, self.cause_lines = before + text, 1
        unclear = _TEXTS["error_level"].search(body) is not None
        self._take_message(body, warn=unclear, line=body, foreign=b"NCCL" not in body and not self.cause_lines)

    def _take_exception(self, body: bytes, line: bytes) -> None:
        """A traceback and the exception below it, at the start of a line, prove that a program ended."""
        if _TRACEBACK in body:  # after other words it is a message about an exception that was caught
            is_caught = self.ledger.lines <= self._ignored + 2 or not body.startswith(_TRACEBACK)
            self._traceback = -1 if is_caught else self.ledger.lines
        elif body.startswith((b"Exception ignored in", b"Exception in thread ")):  # the program continues
            self._ignored = self.ledger.lines
        elif self._traceback > 0 and any(place in body for place in _AT_EXIT):
            self._traceback = -1  # of the clean-up after the end of a program
        elif self._traceback and _TEXTS["exception"].match(body):
            is_near = 0 < self._traceback >= self.ledger.lines - TRACEBACK_LINES
            if is_near and not any(CODES[code].ends for code in find_codes(body, foreign=True)):
                self.ledger.count_code("python_traceback", line)
            self._traceback = 0
        elif _TEXTS["bare"].match(body) and not _TEXTS["mild"].search(line):
            self._bare = self.ledger.lines, line

    def _take_message(self, message: bytes, *, warn: bool, line: bytes, host: str = "", foreign: bool = False) -> None:
        if message in self._dull or (not warn and message.startswith(DULL_STARTS + _ORDERS)):
            return
        ledger = self.ledger
        message = message[:MAX_MESSAGE_BYTES]
        facts = ledger.facts.take(message, host)
        for fact in facts:
            ledger.prove(fact, line)
        if END in facts:
            ledger.ended.add(self.file, ledger.lines)
        step = _TEXTS["step"].search(message) if STEP in facts else None
        if step is not None and step[0] != self._step:  # every rank or node may report the same step
            self._step = step[0]
            ledger.steps.add(self.file, (*ledger.steps.get(self.file, (0, 0, 0))[1:], ledger.lines))
        if ledger.facts.setting:
            ledger.record_variable(ledger.facts.setting, line)
        codes = find_codes(message, foreign=foreign)
        for code in codes:
            ledger.count_code(code, line)
        if warn and not codes and not HARMLESS.search(message):
            ledger.count_code("other_warnings", line)
        says = facts or codes or warn or ledger.facts.setting
        if not says and len(self._dull) < MAX_SEEN and len(message) < MAX_DULL_BYTES:
            self._dull.add(message)


def _parse_writer(prefix: bytes) -> Writer:
    """Return the process that a prefix of NCCL names: "2026-01-02T03:04:05Z host:pid:tid [0] "."""
    match = _TEXTS["process"].search(prefix[-MAX_PREFIX_BYTES:])
    if match is None:
        return Writer()
    host = host_name(match[1])
    return Writer(host, f"{host}:{match[2].decode()}", (match[3] or b"").decode())


def _label_of(line: bytes) -> bytes:
    """Return what launchers put before the line, without times: lines of two writers have different labels."""
    prefix = _TEXTS["launcher"].match(line)
    return b" ".join(word for word in prefix[0].split() if word.count(b":") < 2) if prefix else b""


def _find_writer(line: bytes) -> Writer:
    """Return the rank and the host that a line without a header of NCCL names."""
    matches = (_TEXTS[name].search(line[:600]) for name in ("rank", "host"))
    rank, host = (next(filter(None, match.groups()), b"") if match else b"" for match in matches)
    return Writer(host=host.decode(), rank=int(rank) if rank else None)
