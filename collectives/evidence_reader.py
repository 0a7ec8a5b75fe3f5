"""One pass over the lines of a log: counters and first lines, never the lines themselves.

Surface: NCCL and RCCL INFO logs on stdout or from NCCL_DEBUG_FILE. Memory is bounded by the distinct hosts,
variables, devices and codes (each with a cap), not by the length of the log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final, TypeVar

from collectives import nccl_messages
from collectives.evidence_channels import Channel, is_fragment, parse_channels
from collectives.evidence_clean import MAX_LINE_BYTES, clean, matters
from collectives.nccl_warnings import HARMLESS, codes_of
from collectives.transport import ProofLine

_Key = TypeVar("_Key")

MAX_HOSTS: Final = 20_000
MAX_NAMES: Final = 512
MAX_DULL: Final = 8_192  # remembered texts that said nothing: ranks repeat each other
MAX_PROOF_PER_FACT: Final = 3

_HEADER = re.compile(rb"NCCL (INFO|WARN|TRACE|ERROR|VERSION) ")
_HOST = re.compile(rb"([A-Za-z0-9][\w.-]*):\d+:\d+ ?(?:\[-?\w*\])? *(?:[^\s:]+:\d+ )?(?:\(\w+\) )?$")
_NEXT_PREFIX = re.compile(rb"(?:\[[\d,]+\]<std\w+>:)?[A-Za-z0-9][\w.-]*:\d+:\d+ ?(?:\[-?\w*\] ?)?(?:\S+:\d+ )?$")
_LAUNCHER = re.compile(
    rb"^(?:\s*(?:\d+: |\[\d+,\d+\]<std\w+>: ?|\[rank\d+\]: ?|\([^()]{1,80}\) |"
    rb"\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? ?|> ?|\* |\| ))+"
)
_DULL_STARTS = (
    *(b"Channel ", b"Trees", b"Tree ", b"Ring "),
    *(b"Connected all", b"Setting affinity", b"P2P Chunksize", b"threadThresholds"),
)
_CONTINUED = re.compile(rb"\s*\d{0,3}/?GDRDMA")


def as_bytes(line: str | bytes) -> bytes:
    """The line as bytes; text that came through surrogateescape is given back unharmed."""
    return line if isinstance(line, bytes) else line.encode("utf-8", "surrogateescape")


def _add_row(table: dict[_Key, list[int]], key: _Key, gdrdma: bool, by: int) -> None:
    """Add to [channels, with GDRDMA], unless the table is full of made-up names."""
    if key in table or len(table) < MAX_NAMES:
        row = table.setdefault(key, [0, 0])
        row[0] += by
        row[1] += by * gdrdma


class Ledger:
    """What the lines said, counted."""

    def __init__(self) -> None:
        self.lines = 0
        self.nccl_lines = 0
        self.transports: Counter[str] = Counter()
        self.torn_transports: Counter[str] = Counter()
        self.channels: dict[tuple[str | None, bool], int] = Counter()  # (direction, gdrdma) of network channels
        self.devices: dict[tuple[str, int], list[int]] = {}  # (network, device): [channels, with GDRDMA]
        self.networks: dict[str, list[int]] = {}  # network: [channels, with GDRDMA]
        self.proxied_sends = 0
        self.direct_sends = 0
        self.orphan_tags = 0  # "/GDRDMA" at the start of a line, torn from an earlier one
        self.torn_network = 0
        self.codes: Counter[str] = Counter()
        self.code_lines: dict[str, list[ProofLine]] = {}
        self.proof: dict[str, list[ProofLine]] = {}
        self.hosts: set[bytes] = set()
        self.facts = nccl_messages.Facts()
        self._dull: set[bytes] = set()
        self._prefixes: dict[bytes, bytes] = {}
        self._carry = b""  # the end of a line that broke inside a channel
        self._bare: tuple[Channel, int] | None = None  # a channel at the very end of the last line

    def read(self, lines: Iterable[str | bytes]) -> None:
        """Take in all lines; several calls add up."""
        last_ended, newlines = True, False
        for raw in lines:
            self.lines += 1
            line = raw if isinstance(raw, bytes) else as_bytes(raw)
            if self._bare is not None or self._carry or matters(line):
                if len(line) > MAX_LINE_BYTES:
                    line = line[:MAX_LINE_BYTES]
                for part in clean(line):
                    self._line(part)
            last_ended = line.endswith(b"\n")
            newlines = newlines or last_ended
        if not last_ended and newlines:
            self._doubt_last()
        self._bare, self._carry = None, b""

    # --- one line

    def _line(self, line: bytes) -> None:
        has_header = b"NCCL INFO " in line or b"NCCL WARN " in line
        if self._bare is not None:
            self._continue_tag(line)
        if self._carry:
            carry, self._carry = self._carry, b""
            if not has_header:
                body = _LAUNCHER.sub(b"", line)
                if self._channels(carry + body, line) or self._channels(carry + b" " + body.lstrip(), line):
                    return
        found = self._channels(line, line) if b"via " in line else 0
        if has_header:
            self.nccl_lines += 1
            self._messages(line)
            if not found or line.rfind(b"NCCL INFO ") > line.rfind(b"via "):
                self._keep_broken(line)
        elif not found:
            self._headless(line)

    def _headless(self, line: bytes) -> None:
        body = _LAUNCHER.sub(b"", line)
        if body.startswith((b"NET/", b"/GDR")):
            if body.startswith(b"/GDRDMA"):
                self.orphan_tags += 1
                return
            if is_fragment(body):
                self._channels(b"-> via " + body, line)
                return
        self._message(body, warn=False)

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
            self._add(channel, shown)
        return count

    def _add(self, channel: Channel, shown: bytes) -> None:
        if channel.bare_end:
            self._bare = (channel, self.lines)
        if channel.network is None:
            if channel.torn:
                self.torn_transports[channel.transport] += 1
            else:
                self.transports[channel.transport] += 1
                self.prove(f"transport {channel.transport}", shown, channel.transport)
            return
        if channel.gdrdma is None:
            self.torn_network += 1
            self.torn_transports[channel.transport] += 1
            return
        self._count(channel, channel.gdrdma, 1)
        if channel.direction == "send":
            if channel.proxied:
                self.proxied_sends += 1
            else:
                self.direct_sends += 1
        key = f"{channel.direction or 'a channel'} {'with' if channel.gdrdma else 'without'} GDRDMA"
        self.prove(f"{channel.transport} {key}", shown, f"{channel.transport}: {key}")

    def _count(self, channel: Channel, gdrdma: bool, by: int) -> None:
        self.transports[channel.transport] += by
        self.channels[(channel.direction, gdrdma)] += by
        name = channel.network or ""
        _add_row(self.networks, name, gdrdma, by)
        _add_row(self.devices, (name, channel.device or 0), gdrdma, by)

    def _continue_tag(self, line: bytes) -> None:
        """The tag of the last line's channel may have been torn to the start of this one."""
        assert self._bare is not None  # noqa: S101 - narrows for the type checker
        (channel, _), self._bare = self._bare, None
        if not _CONTINUED.match(_LAUNCHER.sub(b"", line)):
            return
        if channel.gdrdma is False:
            self._count(channel, False, -1)
        else:
            self.torn_network -= 1
            self.torn_transports[channel.transport] -= 1
        self._count(channel, True, 1)
        self.orphan_tags -= 1  # counted again when the line itself is read

    def _doubt_last(self) -> None:
        """A file that ends inside a line: its last channel may have lost its tag."""
        if self._bare is not None and self._bare[0].gdrdma is False:
            channel = self._bare[0]
            self._count(channel, False, -1)
            self.torn_network += 1
            self.torn_transports[channel.transport] += 1

    # --- messages

    def _messages(self, line: bytes) -> None:
        marks = list(_HEADER.finditer(line))
        for index, mark in enumerate(marks):
            after = marks[index + 1].start() if index + 1 < len(marks) else len(line)
            message = line[mark.end() : after]
            if index + 1 < len(marks):
                message = _NEXT_PREFIX.sub(b"", message)
            begin = marks[index - 1].end() if index else 0
            host = self._host(line[begin : mark.start()])
            self._message(message, warn=mark[1] == b"WARN", host=host, shown=line)

    def _host(self, prefix: bytes) -> bytes:
        host = self._prefixes.get(prefix)
        if host is None:
            match = _HOST.search(prefix[-400:])
            host = match[1] if match else b""
            if len(self._prefixes) < MAX_DULL:
                self._prefixes[prefix] = host
            if host and len(self.hosts) < MAX_HOSTS:
                self.hosts.add(host)
        return host

    def _message(self, message: bytes, *, warn: bool, host: bytes = b"", shown: bytes | None = None) -> None:
        if message in self._dull or message.startswith(_DULL_STARTS):
            return
        shown = message if shown is None else shown
        facts = self.facts.take(message, host)
        for fact in facts:
            self.prove(fact, shown, fact)
        codes = codes_of(message)
        for code in codes:
            self.blame(code, shown)
        if warn and not codes and not HARMLESS.search(message):
            self.blame("other_warnings", shown)
        if not facts and not codes and not warn and len(self._dull) < MAX_DULL:
            self._dull.add(message)

    # --- proof

    def _proof_line(self, shown: bytes, proves: str) -> ProofLine:
        return ProofLine(line=self.lines, text=shown.strip()[:300].decode("utf-8", "replace"), proves=proves)

    def prove(self, fact: str, shown: bytes, proves: str) -> None:
        """Keep the line as proof if the fact has few."""
        rows = self.proof.get(fact)
        if rows is None:
            if len(self.proof) < MAX_NAMES:
                self.proof[fact] = [self._proof_line(shown, proves)]
        elif len(rows) < MAX_PROOF_PER_FACT:
            rows.append(self._proof_line(shown, proves))

    def blame(self, code: str, shown: bytes) -> None:
        """Count a code, and keep its first lines."""
        self.codes[code] += 1
        rows = self.code_lines.setdefault(code, [])
        if len(rows) < MAX_PROOF_PER_FACT:
            rows.append(self._proof_line(shown, code))
