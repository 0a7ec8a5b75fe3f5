"""What the lines of a log said, counted: never the lines themselves.

Memory is bounded by the distinct hosts, variables, devices and codes, each with a cap, not by the length of the log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from collectives.nccl_log import messages as nccl_messages
from collectives.nccl_log.transport import ProofLine

# Channel lines: which transport joins two ranks, and whether the NIC reads GPU memory directly.
#
# Surface: NCCL src/transport/net.cc, p2p.cc, shm.cc, coll_net.cc from 2.4 to 2.32, and RCCL: ``Channel 00/0 : 7[7] ->
# 8[0] [send] via NET/IB/0(6)/GDRDMA``; tags in the order ``/GDRDMA``, ``(PCI)``, ``/Shared``, ``/flush=``. A line
# cut before its tag proves the transport and says nothing about GPUDirect RDMA.

# Everything up to a blank, a quote or a table edge belongs to the tags; a glued neighbour shows as an odd start.
_RUN = rb"(?P<run>[^\s\"'`<>|,;\\]*)"
_NAME = rb"[A-Za-z][\w.+-]*(?: [A-Za-z][\w.+-]*){0,2}"
_TAIL = re.compile(
    rb"via (?:"
    rb"(?P<net>NET|COLLNET)/(?P<name>" + _NAME + rb")/(?P<dev>\d+)(?P<proxy>\(\d+\))?" + _RUN + rb"|"
    rb"P2P/(?P<p2p>direct pointer|IPC|CUMEM|MNNVL|indirect)(?:/\d+\[[^\]\s]*\])?(?P<p2prun>(?:/(?:read|CE))*)"
    rb"(?P<p2pglue>[^\s\"'`<>|,;\\]?)|"
    rb"(?P<shm>SHM|direct shared memory)"
    rb")"
)
_FRAGMENT = re.compile(rb"NET/(?:" + _NAME + rb")/\d+(?:\(\d+\))?(?:/\S*)?\s*$")
_PEER = re.compile(rb"-> \d+|\d+\[[0-9a-f]+\] +$")  # also where "0[0] -" was torn away
_TAG = b"/GDRDMA"
_OTHER_TAG = re.compile(rb"/(?:Shared|flush=\w|[A-Za-z]{2,20}(?:=\w*)?(?:/|$))")


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of one channel."""

    transport: str  # "NET/IB", "COLLNET/SHARP", "P2P/CUMEM/read", "SHM"
    direction: str | None = None  # "send", "receive"; None where the line does not say
    gdrdma: bool | None = None  # None: not a network channel, or cut before the tag
    device: int | None = None  # of the network
    proxied: bool = False  # sent through the GPU of another rank (PXN)
    torn: bool = False
    bare_end: bool = False  # nothing follows on the line: a continuation may

    @property
    def network(self) -> str | None:
        """Name of the network, None for a channel within a node."""
        family, _, name = self.transport.partition("/")
        return name if family in ("NET", "COLLNET") else None


def _tagged(run: bytes) -> tuple[bool | None, bool]:
    """Whether GDRDMA is on, and whether the line was torn here."""
    if not run or run in (b".", b")", b"`", b"*", b"**"):
        return False, False
    if run.startswith(b"/"):
        if _TAG in run:
            return True, False
        # No other tag begins so: what is left of "/GDRDMA" still proves it.
        if run.startswith(b"/GD"):
            return True, True
        # "/Shared", "/flush=None" or a tag of a later version; with anything else in it a neighbour is glued on.
        return (False, False) if _OTHER_TAG.match(run) else (None, True)
    return None, True


def _direction(head: bytes) -> str | None:
    head = head.rstrip()
    if head.endswith(b"[send]"):
        return "send"
    return "receive" if head.endswith(b"[receive]") else None


def parse_channels(line: bytes) -> Iterator[Channel]:
    """Every channel named in the line: interleaved writers leave several."""
    start = line.find(b"via ")
    while start >= 0:
        match = _TAIL.match(line, start)
        if match is not None:
            head = line[max(0, start - 72) : start]
            direction = _direction(head)
            if direction is not None or _PEER.search(head) or not head.strip(b"> \t*-`"):
                yield _channel(match, direction, end=len(line))
        start = line.find(b"via ", start + 4)


def _channel(match: re.Match[bytes], direction: str | None, *, end: int) -> Channel:
    if match["net"]:
        gdrdma, torn = _tagged(match["run"])
        return Channel(
            transport=f"{match['net'].decode()}/{match['name'].decode()}",
            direction=direction,
            gdrdma=gdrdma,
            device=int(match["dev"][:6]),
            proxied=match["proxy"] is not None,
            torn=torn,
            bare_end=gdrdma is not True and match.end() == end,
        )
    if match["shm"]:
        return Channel(transport="SHM")
    kind = match["p2p"].decode()
    tags, rest = match["p2prun"].decode(), match.string[match.start("p2pglue") :]
    if rest in (b"/r", b"/re", b"/rea"):
        return Channel(transport=f"P2P/{kind}{tags}/read")
    # Glued to the next writer before a possible "/read": the family is proven, its tags are not.
    torn = bool(match["p2pglue"]) and match["p2pglue"] not in b".)*`" and not tags
    return Channel(transport=f"P2P/{kind}{tags}", torn=torn)


def is_fragment(line: bytes) -> bool:
    """Whether the line is the lost end of a channel line."""
    return _FRAGMENT.match(line) is not None


# Which hosts wrote a log: the name before ":pid:tid", without what a search through the log put before it.
#
# Surface: the prefix of NCCL's lines, "host:pid:tid [device] " (src/debug.cc), and the marks of ``grep -H``, ``-n`` and
# ``-C`` (POSIX grep, "CONTEXT LINE CONTROL" of GNU grep): "file:" and "12:" before a line that matched, "file-" and
# "12-" before a line of its context. A dash may be part of a host's name, so a mark is taken off only where the same
# file or the same numbering stands before a line that matched, or where the file's name ends as names of logs do.

MAX_HOSTS: Final = 20_000
MAX_MARKED_FILES: Final = 20_000

_HOST = re.compile(rb"([A-Za-z0-9][\w.-]*):\d+:\d+ ?(?:\[-?\w*\])? *(?:[^\s:]+:\d+ )?(?:\(\w+\) )?$")
_MATCHED = re.compile(rb"(?:([A-Za-z0-9][\w.-]*):)?(\d+:)?$")
_LOG_NAME = re.compile(rb"[\w.-]*\.(?:log|txt|out|err|stdout|stderr)(?:\.\d+)?-(?:\d+-(?=[A-Za-z]))?(?=\w)")


class _Marks:
    """What a search put before the lines of a log."""

    def __init__(self) -> None:
        self.files: dict[bytes, bool] = {}  # file named before a line that matched: whether the line is numbered
        self.numbered = False  # lines that matched carry a number and no file
        self.plain: set[bytes] = set()  # hosts of lines that matched: their names carry no mark


class Hosts:
    """The hosts met so far, and the marks of a search that stood before them."""

    def __init__(self, marks: _Marks | None = None) -> None:
        self.names: Counter[bytes] = Counter()  # host: prefixes of processes met
        self._marks = marks or _Marks()

    def part(self) -> Hosts:
        """For a part of the same log: the same marks of a search, and no host yet."""
        return Hosts(self._marks)

    def same_log(self, other: Hosts) -> bool:
        """Whether the other one is of a part of the same log, so that a search put the same marks there."""
        return other._marks is self._marks

    def merge(self, other: Hosts) -> None:
        """Add the hosts of a further piece."""
        for name, times in other.names.items():
            bare = name if self.same_log(other) else other.bare(name)
            if bare in self.names or len(self.names) < MAX_HOSTS:
                self.names[bare] += times

    def name_in(self, prefix: bytes) -> bytes:
        """The host that wrote the line with this prefix, as it stands there; empty where none is named."""
        text = prefix[-300:]
        match = _HOST.search(text)
        if match is None:
            return b""
        mark = _MATCHED.search(text[: match.start()])
        if mark is not None:
            if mark[1] and not mark[1].isdigit() and len(self._marks.files) < MAX_MARKED_FILES:
                self._marks.files[mark[1]] = self._marks.files.get(mark[1], False) or mark[2] is not None
            elif mark.start() == 0 and (mark[1] or mark[2]):
                self._marks.numbered = True
            if mark[0] and len(self._marks.plain) < MAX_HOSTS:
                self._marks.plain.add(match[1])
        return match[1]

    def add(self, name: bytes) -> None:
        """Count a process of this host."""
        if len(self.names) < MAX_HOSTS:
            self.names[name[:128]] += 1

    def count(self) -> int:
        """How many hosts wrote, without the pieces that torn lines made of a name."""
        return len(set(self.whole_names().values()))

    def whole_names(self) -> dict[bytes, bytes]:
        """Find the host by its name in the log, also where a torn line has only a piece of the name."""
        # The first line of a context comes before the line that defines its marks.
        names: Counter[bytes] = Counter()
        for name, times in self.names.items():
            names[self.bare(name)] += times
        pieces = {
            name: other
            for name, times in names.items()
            for other, more in names.items()
            if more > times and name != other and (other.endswith(name) or name.endswith(other))
        } if len(names) <= 256 else {}  # fmt: skip
        return {name: pieces.get(self.bare(name), self.bare(name)) for name in self.names}

    def bare(self, name: bytes) -> bytes:
        """The name without the file and the number of a context line."""
        dash = -1 if name in self._marks.plain else name.find(b"-")
        while dash >= 0 and (self._marks.files or self._marks.numbered):
            head, tail = name[:dash], name[dash + 1 :]
            if head in self._marks.files:
                number, found, rest = tail.partition(b"-")
                return rest if found and self._marks.files[head] and number.isdigit() else tail
            if self._marks.numbered and head.isdigit():
                return tail
            dash = name.find(b"-", dash + 1)
        return name if name in self._marks.plain else _LOG_NAME.sub(b"", name, count=1)


_Key = TypeVar("_Key")

MAX_NAMES: Final = 512
MAX_DEVICES: Final = 32_768  # 4,096 hosts with eight each
MAX_PROOF_PER_FACT: Final = 3
MAX_PROOF_HOSTS: Final = 32  # hosts of which a fact keeps one line each beyond that
MAX_WRITERS: Final = 1_024  # processes that a problem is known of
MAX_FILES: Final = 8_192


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote the line in hand; empty where the line does not say."""

    host: bytes = b""
    process: bytes = b""  # "host:pid"
    device: bytes = b""  # "[0]" of the prefix: the CUDA device of the thread that wrote
    rank: int | None = None  # where a launcher or PyTorch puts it before the line


def _add_counts(
    table: dict[_Key, list[int]], key: _Key, channels: int, with_gdrdma: int, most: int = MAX_NAMES
) -> None:
    """Add to [channels, with GDRDMA], unless the table is full of made-up names."""
    if key in table or len(table) < most:
        row = table.setdefault(key, [0, 0])
        row[0] += channels
        row[1] += with_gdrdma


def _add_proof(rows: list[ProofLine], row: ProofLine) -> None:
    """Add a line that proves a fact: the first few, and the first of each further host."""
    several = len(rows) < MAX_PROOF_PER_FACT + MAX_PROOF_HOSTS and all(row.host != other.host for other in rows)
    if len(rows) < MAX_PROOF_PER_FACT or several:
        rows.append(row)


def _add_latest(table: dict[str, int], other: dict[str, int]) -> None:
    """Keep the greatest line number of each file."""
    for file, number in other.items():
        if file in table or len(table) < MAX_FILES:
            table[file] = max(number, table.get(file, 0))


class Ledger:
    """Counters of one log, or of the logs of one run."""

    def __init__(self, *, file: str = "", line: int = 0, text: bytes = b"") -> None:
        self.file = file
        self.writer = Writer()  # of the line in hand
        self.lines = max(1, line)
        self.first = self._proof_line(text, "the first line of a run")
        self.lines = line  # number of the line in hand
        self.transports: Counter[str] = Counter()
        self.torn_transports: Counter[str] = Counter()
        self.channels: Counter[tuple[str | None, bool]] = Counter()  # (direction, gdrdma) of network channels
        # (host, network, device): [channels, with GDRDMA]; host empty where the line does not say
        self.devices: dict[tuple[bytes, str, int], list[int]] = {}
        self.networks: dict[str, list[int]] = {}  # network: [channels, with GDRDMA]
        self.proxied_sends = 0
        self.direct_sends = 0
        self.orphan_tags = 0  # "/GDRDMA" that belongs to no channel of its line
        self.torn_network = 0
        self.codes: Counter[str] = Counter()
        self.code_lines: dict[str, list[ProofLine]] = {}
        self.code_writers: dict[str, dict[Writer, None]] = {}
        self.rank_of: dict[tuple[bytes, bytes], tuple[int, int]] = {}  # (process, device): ranks of the job, own rank
        # By file, for only within one does the order of the lines tell what came first.
        self.began: dict[str, int] = {}  # first line of NCCL
        self.ended: dict[str, int] = {}  # last line that says that the job finished
        self.last_lines: dict[str, dict[str, int]] = {}  # code: file: last line
        self.proof: dict[str, list[ProofLine]] = {}
        self.variable_lines: dict[str, ProofLine] = {}  # the first line that shows each
        self.hosts = Hosts()
        self.facts = nccl_messages.Facts()

    def merge(self, other: Ledger) -> None:
        """Add what a further piece of the same run said: a file of another rank, or a later part of the log."""
        for name in ("transports", "torn_transports", "channels", "codes"):
            getattr(self, name).update(getattr(other, name))
        for (host, network, device), (total, on) in other.devices.items():
            host = host if self.hosts.same_log(other.hosts) else other.hosts.bare(host)
            _add_counts(self.devices, (host, network, device), total, on, MAX_DEVICES)
        for network, (total, on) in other.networks.items():
            _add_counts(self.networks, network, total, on)
        for name in ("proxied_sends", "direct_sends", "orphan_tags", "torn_network"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.code_lines, other.code_lines), (self.proof, other.proof)):
            for fact, rows in theirs.items():
                if fact in mine or len(mine) < MAX_NAMES:
                    for row in rows:
                        _add_proof(mine.setdefault(fact, []), row)
        for code, writers in other.code_writers.items():
            for writer in writers:
                self._add_writer(code, writer)
        for (process, gpu), (ranks, rank) in other.rank_of.items():
            self.record_rank(rank, ranks, process, gpu)
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
        """Whether the job finished after every line with this code.

        Lines of files that state no end are outlived by the end that another file states. With ``before_nccl`` the
        code must also stand before NCCL's first line, in the file that states the end: it is of an earlier step.
        """
        if not self.facts.finished:
            return False
        rows = self.last_lines.get(code, {})
        if before_nccl:
            return all(row < min(self.ended.get(file, 0), self.began.get(file, 0)) for file, row in rows.items())
        return all(row < self.ended.get(file, row + 1) for file, row in rows.items())

    def record_rank(self, rank: int, ranks: int, process: bytes, device: bytes) -> None:
        """Record the rank that a process has with this GPU in the largest communicator."""
        key = process, device
        if (key in self.rank_of or len(self.rank_of) < MAX_DEVICES) and ranks >= self.rank_of.get(key, (0, 0))[0]:
            self.rank_of[key] = ranks, rank

    def ranks_of(self, writers: Iterable[Writer]) -> tuple[int, ...]:
        """Ranks of the processes; of one with several GPUs, those of the device that it named."""
        by_process: dict[bytes, dict[bytes, int]] = {}
        for (process, device), (_, rank) in self.rank_of.items():
            by_process.setdefault(process, {})[device] = rank
        found: set[int] = set()
        for writer in writers:
            if writer.rank is not None:
                found.add(writer.rank)
            ranks = by_process.get(writer.process, {})
            found |= (
                set(ranks.values())
                if len(ranks) == 1
                else {ranks[writer.device]} & set(ranks.values())
                if writer.device in ranks
                else set()
            )
        return tuple(sorted(found))

    def is_of_another_job(self, other: Ledger) -> bool:
        """Whether two files have no host in common and largest communicators of different size."""
        sizes = self.facts.ranks, other.facts.ranks
        differ = sizes[0] != sizes[1]
        if differ and not all(sizes):  # one states no size, but has at least the ranks of its channels
            silent = other if sizes[0] else self
            differ = any(rank >= max(sizes) for rank, _ in silent.facts.rank_devices())
        if self.file == other.file or not differ:
            return False
        mine, theirs = (set(each.hosts.whole_names().values()) for each in (self, other))
        return bool(mine and theirs) and mine.isdisjoint(theirs)

    def ranks_on(self, host: bytes) -> tuple[int, ...]:
        """Ranks that the processes of a host have."""
        start = host + b":"
        return tuple(sorted(rank for (process, _), (_, rank) in self.rank_of.items() if process.startswith(start)))

    def _add_writer(self, code: str, writer: Writer) -> None:
        writers = self.code_writers.setdefault(code, {})
        if (writer.host or writer.rank is not None) and len(writers) < MAX_WRITERS:
            writers[writer] = None

    def add_channel(self, channel: Channel, host: bytes, by: int = 1) -> None:
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
            self._count(channel, host, channel.gdrdma, by)
            if channel.direction == "send":
                self.proxied_sends += by * channel.proxied
                self.direct_sends += by * (not channel.proxied)

    def repair_line(self, channel: Channel, host: bytes) -> None:
        """Count a channel with GPUDirect RDMA, whose tag was found on the next line."""
        self._retract(channel, host)
        self._count(channel, host, True, 1)

    def repair_local(self, channel: Channel, tags: str) -> None:
        """Add tags that were found on the next line to a channel within a node."""
        self.transports[channel.transport] -= 1
        self.transports[channel.transport + tags] += 1

    def doubt(self, channel: Channel, host: bytes) -> None:
        """The log ends right behind this channel, inside a line: its tag may be lost."""
        if channel.gdrdma is False:
            self._retract(channel, host)
            self.torn_network += 1
            self.torn_transports[channel.transport] += 1

    def _retract(self, channel: Channel, host: bytes) -> None:
        if channel.gdrdma is False:
            self._count(channel, host, False, -1)
        else:
            self.torn_network -= 1
            self.torn_transports[channel.transport] -= 1

    def _count(self, channel: Channel, host: bytes, gdrdma: bool, by: int) -> None:
        self.transports[channel.transport] += by
        self.channels[(channel.direction, gdrdma)] += by
        name = channel.network or ""
        _add_counts(self.networks, name, by, by * gdrdma)
        _add_counts(self.devices, (host, name, channel.device or 0), by, by * gdrdma, MAX_DEVICES)

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
        elif len(rows) < MAX_PROOF_PER_FACT + MAX_PROOF_HOSTS:
            _add_proof(rows, self._proof_line(shown, proves))

    def record_variable(self, name: str, shown: bytes) -> None:
        """Record the line that shows a variable of the environment."""
        if name not in self.variable_lines and len(self.variable_lines) < MAX_NAMES:
            self.variable_lines[name] = self._proof_line(shown, name)

    def blame(self, code: str, shown: bytes) -> None:
        """Count a code, and keep its first lines."""
        self.codes[code] += 1
        _add_latest(self.last_lines.setdefault(code, {}), {self.file: self.lines})
        self._add_writer(code, self.writer)
        rows = self.code_lines.setdefault(code, [])
        if len(rows) < MAX_PROOF_PER_FACT + MAX_PROOF_HOSTS:
            _add_proof(rows, self._proof_line(shown, code))

    def _proof_line(self, shown: bytes, proves: str) -> ProofLine:
        return ProofLine(
            line=self.lines, file=self.file, text=shown.strip()[:300].decode("utf-8", "replace"), proves=proves,
            host=self.writer.host.decode("utf-8", "replace"),
        )  # fmt: skip


# Which run of a job wrote what: a log that was appended to, or a folder, may hold several.
#
# Two runs are distinguished by their GPUs: a process that takes a GPU which another process of the same host had, after
# that one's channels were made, belongs to a later run. Communicators with one id (``commId``, 2.18 on) are of one run,
# wherever they stand, and so are pieces in which one process makes channels.

MAX_RUNS: Final = 32
MAX_GPUS: Final = 8_192


class Identity:
    """By what a piece of a log is known again: its communicators and processes, and who held which GPU."""

    def __init__(self) -> None:
        self.marks: set[bytes] = set()  # ids of communicators, and processes that make channels
        self.gpus: dict[tuple[bytes, bytes], bytes] = {}  # (host, bus id or device): process

    def hold(self, host: bytes, gpu: bytes, process: bytes) -> None:
        """The process holds this GPU."""
        if len(self.gpus) < MAX_GPUS:
            self.gpus.setdefault((host, gpu), process)

    def contradicts(self, other: Identity) -> bool:
        """Whether a GPU has another process here than there."""
        if len(self.gpus) > len(other.gpus):
            return other.contradicts(self)
        return any(other.gpus.get(gpu, process) != process for gpu, process in self.gpus.items())

    def take(self, other: Identity) -> None:
        """Add what is known of a further piece of the same run."""
        for (host, gpu), process in other.gpus.items():
            self.hold(host, gpu, process)
        if len(self.marks) < MAX_GPUS:
            self.marks |= other.marks


class Runs:
    """Runs in the order in which they were met."""

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []
        self._identities: list[Identity] = []
        self.texts: list[tuple[str, str, bytearray]] = []  # (kind, file, text) of what is no log (other_texts.py)
        self.lines = 0

    def add(self, ledger: Ledger, identity: Identity) -> None:
        """Add a piece of a log to the run that it belongs to, the latest that fits, or as a run of its own."""
        at = self._of(ledger, identity)
        if at is None and len(self.ledgers) < MAX_RUNS:
            self.ledgers.append(ledger)
            self._identities.append(identity)
            return
        at = len(self.ledgers) - 1 if at is None else at
        self.ledgers[at].merge(ledger)
        self._identities[at].take(identity)

    def join(self, other: Runs) -> None:
        """Add the runs of a further file, which was read to its end."""
        for ledger, identity in zip(other.ledgers, other._identities, strict=True):
            self.add(ledger, identity)
        self.texts += other.texts
        self.lines += other.lines

    def _of(self, ledger: Ledger, identity: Identity) -> int | None:
        latest_first = range(len(self.ledgers) - 1, -1, -1)
        for at in latest_first:
            if self._identities[at].marks & identity.marks:
                return at
        return next((at for at in latest_first if not self._identities[at].contradicts(identity)
                     and not self.ledgers[at].is_of_another_job(ledger)), None)  # fmt: skip
