"""What the lines of a log said, counted: never the lines themselves.

Memory is bounded by the distinct hosts, variables, devices and codes, each with a cap, not by the length of the log.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, TypeVar

from collectives.nccl_log import messages as nccl_messages
from collectives.nccl_log.channels import Channel
from collectives.nccl_log.hosts import Hosts
from collectives.nccl_log.transport import ProofLine

_Key = TypeVar("_Key")

MAX_NAMES: Final = 512
MAX_PROOF_PER_FACT: Final = 3
MAX_FILES: Final = 8_192


def _add_counts(table: dict[_Key, list[int]], key: _Key, channels: int, with_gdrdma: int) -> None:
    """Add to [channels, with GDRDMA], unless the table is full of made-up names."""
    if key in table or len(table) < MAX_NAMES:
        row = table.setdefault(key, [0, 0])
        row[0] += channels
        row[1] += with_gdrdma


def _add_latest(table: dict[str, int], other: dict[str, int]) -> None:
    """Keep the greatest line number of each file."""
    for file, number in other.items():
        if file in table or len(table) < MAX_FILES:
            table[file] = max(number, table.get(file, 0))


class Ledger:
    """Counters of one log, or of the logs of one run."""

    def __init__(self, *, file: str = "", line: int = 0, text: bytes = b"") -> None:
        self.file = file
        self.lines = max(1, line)
        self.first = self._proof_line(text, "the first line of a run")
        self.lines = line  # number of the line in hand
        self.transports: Counter[str] = Counter()
        self.torn_transports: Counter[str] = Counter()
        self.channels: Counter[tuple[str | None, bool]] = Counter()  # (direction, gdrdma) of network channels
        self.devices: dict[tuple[str, int], list[int]] = {}  # (network, device): [channels, with GDRDMA]
        self.networks: dict[str, list[int]] = {}  # network: [channels, with GDRDMA]
        self.proxied_sends = 0
        self.direct_sends = 0
        self.orphan_tags = 0  # "/GDRDMA" that belongs to no channel of its line
        self.torn_network = 0
        self.codes: Counter[str] = Counter()
        self.code_lines: dict[str, list[ProofLine]] = {}
        # By file, for only within one does the order of the lines tell what came first.
        self.began: dict[str, int] = {}  # first line of NCCL
        self.ended: dict[str, int] = {}  # last line that says that the job came to its end
        self.last_lines: dict[str, dict[str, int]] = {}  # code: file: last line
        self.proof: dict[str, list[ProofLine]] = {}
        self.variable_lines: dict[str, ProofLine] = {}  # the first line that told each
        self.hosts = Hosts()
        self.facts = nccl_messages.Facts()

    def merge(self, other: Ledger) -> None:
        """Add what a further piece of the same run said: a file of another rank, or a later part of the log."""
        for name in ("transports", "torn_transports", "channels", "codes"):
            getattr(self, name).update(getattr(other, name))
        for key, (total, on) in other.devices.items():
            _add_counts(self.devices, key, total, on)
        for network, (total, on) in other.networks.items():
            _add_counts(self.networks, network, total, on)
        for name in ("proxied_sends", "direct_sends", "orphan_tags", "torn_network"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.code_lines, other.code_lines), (self.proof, other.proof)):
            for fact, rows in theirs.items():
                if fact in mine or len(mine) < MAX_NAMES:
                    kept = mine.setdefault(fact, [])
                    kept.extend(rows[: MAX_PROOF_PER_FACT - len(kept)])
        for name, number in other.began.items():
            if name in self.began or len(self.began) < MAX_FILES:
                self.began[name] = min(number, self.began.get(name, number))
        _add_latest(self.ended, other.ended)
        for code, last in other.last_lines.items():
            _add_latest(self.last_lines.setdefault(code, {}), last)
        for variable, line in other.variable_lines.items():
            if len(self.variable_lines) < MAX_NAMES:
                self.variable_lines.setdefault(variable, line)
        self.hosts.merge(other.hosts)
        self.facts.merge(other.facts)

    def outlived(self, code: str, *, before_nccl: bool = False) -> bool:
        """Whether the job came to its end after every line with this code.

        Lines of files that state no end are outlived by the end that another file states. With ``before_nccl`` the
        code must also stand before NCCL's first line, in the file that states the end: it is of an earlier step.
        """
        if not self.facts.finished:
            return False
        rows = self.last_lines.get(code, {})
        if before_nccl:
            return all(row < min(self.ended.get(file, 0), self.began.get(file, 0)) for file, row in rows.items())
        return all(row < self.ended.get(file, row + 1) for file, row in rows.items())

    def add_channel(self, channel: Channel, by: int = 1) -> None:
        """Count the channel so many times."""
        name = channel.transport
        if len(self.transports) + len(self.torn_transports) >= MAX_NAMES and name not in self.transports:
            return
        if channel.network is None:
            (self.torn_transports if channel.torn else self.transports)[name] += by
        elif channel.gdrdma is None:
            self.torn_network += by
            self.torn_transports[name] += by
        else:
            self._count(channel, channel.gdrdma, by)
            if channel.direction == "send":
                self.proxied_sends += by * channel.proxied
                self.direct_sends += by * (not channel.proxied)

    def mend(self, channel: Channel) -> None:
        """The tag that this channel seemed to lack was found on the next line."""
        self._retract(channel)
        self._count(channel, True, 1)

    def mend_local(self, channel: Channel, tags: str) -> None:
        """The tags of this channel within a node were found on the next line."""
        self.transports[channel.transport] -= 1
        self.transports[channel.transport + tags] += 1

    def doubt(self, channel: Channel) -> None:
        """The log ends right behind this channel, inside a line: its tag may be lost."""
        if channel.gdrdma is False:
            self._retract(channel)
            self.torn_network += 1
            self.torn_transports[channel.transport] += 1

    def _retract(self, channel: Channel) -> None:
        if channel.gdrdma is False:
            self._count(channel, False, -1)
        else:
            self.torn_network -= 1
            self.torn_transports[channel.transport] -= 1

    def _count(self, channel: Channel, gdrdma: bool, by: int) -> None:
        self.transports[channel.transport] += by
        self.channels[(channel.direction, gdrdma)] += by
        name = channel.network or ""
        _add_counts(self.networks, name, by, by * gdrdma)
        _add_counts(self.devices, (name, channel.device or 0), by, by * gdrdma)

    def prove_channel(self, channel: Channel, shown: bytes) -> None:
        """Keep the line as proof of the channel's kind."""
        if channel.network is None and not channel.torn:
            self.prove(f"transport {channel.transport}", shown, channel.transport)
        elif channel.gdrdma is not None:
            key = f"{channel.direction or 'a channel'} {'with' if channel.gdrdma else 'without'} GDRDMA"
            self.prove(f"{channel.transport} {key}", shown, f"{channel.transport}: {key}")
        else:
            self.prove(f"cut {channel.transport}", shown, f"{channel.transport}, cut before its tag")

    def prove(self, fact: str, shown: bytes, proves: str) -> None:
        """Keep the line as proof if the fact has few."""
        rows = self.proof.get(fact)
        if rows is None:
            if len(self.proof) < MAX_NAMES:
                self.proof[fact] = [self._proof_line(shown, proves)]
        elif len(rows) < MAX_PROOF_PER_FACT:
            rows.append(self._proof_line(shown, proves))

    def keep_variable(self, name: str, shown: bytes) -> None:
        """Keep the line that told a variable of the environment."""
        if name not in self.variable_lines and len(self.variable_lines) < MAX_NAMES:
            self.variable_lines[name] = self._proof_line(shown, name)

    def blame(self, code: str, shown: bytes) -> None:
        """Count a code, and keep its first lines."""
        self.codes[code] += 1
        _add_latest(self.last_lines.setdefault(code, {}), {self.file: self.lines})
        rows = self.code_lines.setdefault(code, [])
        if len(rows) < MAX_PROOF_PER_FACT:
            rows.append(self._proof_line(shown, code))

    def _proof_line(self, shown: bytes, proves: str) -> ProofLine:
        return ProofLine(
            line=self.lines, file=self.file, text=shown.strip()[:300].decode("utf-8", "replace"), proves=proves
        )
