"""Counters of what the lines of a log say. The lines themselves are not stored, except the first ones of each fact.

The number of distinct hosts, variables, devices and codes limits the memory, and each of them has a maximum.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

from collectives.nccl_log import messages as nccl_messages
from collectives.nccl_log.channels import Channel
from collectives.nccl_log.codes import cut_to_sign
from collectives.nccl_log.messages import Firsts, Lasts, Tally, merge_attributes
from collectives.nccl_log.transport import ChannelCount, ProofLine

MAX_HOSTS: Final = 20_000
MAX_DEVICES: Final = 65_536  # 4,096 hosts with eight each, in both directions
MAX_PROOF_PER_FACT: Final = 3
MAX_PROOF_HOSTS: Final = 32  # further hosts of which a fact stores one line each
MAX_WRITERS: Final = 16_384  # pairs of a code and a process that printed it
MAX_FILES: Final = 8_192
MAX_GPUS: Final = 8_192
MAX_RUNS: Final = 32

_PEER = re.compile(rb"(?:(?:\bpeer|onnect to) (?=\S{1,255}?<\d+>)|\bPeer host id: )([^\s<),]{1,255})")
# `grep -C` puts "train.log-12-" before a line of the context.
_LOG_NAME = re.compile(rb"[\w.-]*\.(?:log|txt|out|err|stdout|stderr)(?:\.\d+)?-(?:\d+-(?=[A-Za-z]))?(?=\w)")


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a line; a member is empty if the line does not name it."""

    host: str = ""
    process: str = ""  # "host:pid"
    device: str = ""  # "0" of "[0]": the CUDA device of the thread that wrote
    rank: int | None = None  # as a launcher or PyTorch puts it before the line


def host_name(name: bytes) -> str:
    """Return a host's name without the file name that `grep -C` puts before it."""
    return _LOG_NAME.sub(b"", name, count=1)[:128].decode()


class Proofs(Firsts[str, list[ProofLine]]):
    """The lines that prove each fact: the first few, and the first of each further host or device."""

    def add(self, key: str, value: list[ProofLine]) -> None:
        """Store those of the lines for which the fact has room."""
        super().add(key, [])
        rows = self.get(key, [])  # a new list if there are too many facts
        for line in value:
            is_new = len(rows) < MAX_PROOF_PER_FACT or all(line.origin != other.origin for other in rows)
            if is_new and len(rows) < MAX_PROOF_PER_FACT + MAX_PROOF_HOSTS:
                rows.append(line)


class Ledger:
    """Counters of one run, or of a part of its logs."""

    def __init__(self, *, file: str = "", line: int = 0, text: bytes = b"") -> None:
        self.file = file
        self.writer = Writer()  # of the current line
        self.lines = max(1, line)
        self.first = self._proof_line(text, "the first line of a run")
        self.lines = line  # number of the current line
        self.channels: Tally[tuple[str, Channel]] = Tally(MAX_DEVICES)  # (host, or empty; channel)
        self.counts: Tally[str] = Tally()  # "orphan tags" (of no channel of their line)
        self.codes: Tally[str] = Tally()
        self.code_lines = Proofs()
        self.code_writers: Firsts[tuple[str, Writer], None] = Firsts(MAX_WRITERS)
        self.code_peers: Firsts[tuple[str, str, str], None] = Firsts(MAX_WRITERS)  # (code, host, address of its peer)
        # Line numbers by file, because the order of lines says what came first only within one file.
        self.began: Firsts[str, int] = Firsts(MAX_FILES)  # first line of NCCL
        self.ended: Lasts[str, int] = Lasts(MAX_FILES)  # last line that says that the job finished
        self.attempts: Lasts[str, int] = Lasts(MAX_FILES)  # below the last end of all ranks (torchrun, Slurm)
        self.steps: Lasts[str, tuple[int, ...]] = Lasts(MAX_FILES)  # last three lines, each of another step of training
        self.last_lines: Lasts[tuple[str, str], int] = Lasts(MAX_FILES)  # last line of (code, file)
        self.proof = Proofs()
        self.variable_lines: Firsts[tuple[str, str], ProofLine] = Firsts(MAX_WRITERS)  # ("NAME=VALUE", host)
        self.hosts: Tally[str] = Tally(MAX_HOSTS)  # host: processes that were met
        self.rank_hosts: Firsts[tuple[int, str], None] = Firsts(MAX_WRITERS)  # in lines that are not NCCL's
        self.marks: Firsts[str, None] = Firsts(MAX_GPUS)  # ids of communicators, and processes that make channels
        self.gpus: Firsts[tuple[str, str], str] = Firsts(MAX_GPUS)  # (host, bus id or device): process
        self.facts = nccl_messages.Facts()

    def merge(self, other: Ledger) -> None:
        """Add another part of the same run: the file of another rank, or a later part of the log."""
        not_merged = ("file", "writer", "lines", "first")
        merge_attributes(self, other, (name for name in vars(self) if name not in not_merged))

    def outlived(self, code: str, *, before_nccl: bool = False) -> bool:
        """Return whether the job finished, or trained for three more steps, after every line with this code.

        The end that one file states counts for files that state none. Two steps are no proof: ranks that wait for a
        failed one may still report them. With ``before_nccl`` the code must also come before NCCL's first line, or
        before torchrun started its ranks again: then it is of an earlier step or attempt.
        """
        rows = [(file, row) for (other, file), row in self.last_lines.items() if other == code]
        unstated = float("inf") if self.facts.finished else 0
        ends = {file: max(self.ended.get(file, unstated), self.steps.get(file, (0,))[0]) for file, _ in rows}
        starts = self.began | self.attempts if before_nccl else ends
        return bool(rows) and all(row < min(ends[file], starts.get(file, 0)) for file, row in rows)

    # --- hosts and ranks

    def map_names(self) -> dict[str, str]:
        """Return the host of each name in the log. A torn line may have only a part of the name."""
        counts = self.hosts
        pairs = permutations(counts if len(counts) <= 256 else (), 2)
        rarer = ((part, name) for part, name in pairs if counts[name] > counts[part])
        parts = {part: name for part, name in rarer if name.endswith(part) or part.endswith(name)}
        return {name: parts.get(name, name) for name in counts}

    def host_count(self) -> int:
        """Return the number of hosts that wrote."""
        return len(set(self.map_names().values()))

    def writers_of(self, code: str) -> tuple[Writer, ...]:
        """Return the processes that printed a code."""
        return tuple(writer for other, writer in self.code_writers if other == code)

    def ranks_of(self, writers: Iterable[Writer]) -> tuple[int, ...]:
        """Return the ranks of the processes. Of a process with several GPUs only those of the named device count."""
        by_process: dict[str, dict[str, int]] = {}
        for member in sorted(self.facts.members):  # the rank in the largest communicator is last
            by_process.setdefault(member.process, {})[member.device] = member.rank
        result: set[int] = set()
        for writer in writers:
            if writer.rank is not None:
                result.add(writer.rank)
            ranks = by_process.get(writer.process, {})
            if len(ranks) == 1:
                result.update(ranks.values())
            elif writer.device in ranks:
                result.add(ranks[writer.device])
        return tuple(sorted(result))

    def hosts_of(self, writers: Iterable[Writer]) -> list[str]:
        """Return the hosts of the processes. Where their lines name only a rank, others may name its host."""
        hosts: dict[int | None, str] = {}
        for rank, host in self.rank_hosts:  # a rank that was started again on another host has none
            hosts[rank] = "" if rank in hosts else host
        hosts |= {rank: member.host for rank, member in self.facts.largest_communicator.items()}
        return [writer.host or hosts.get(writer.rank, "") for writer in writers]

    def ranks_on(self, hosts: Collection[str]) -> tuple[int, ...]:
        """Return the ranks of the processes of these hosts."""
        members = (member for member in self.facts.members if member.host in hosts)
        return self.ranks_of({Writer(process=member.process, device=member.device) for member in members})

    def is_of_another_job(self, other: Ledger) -> bool:
        """Return whether two files have no host in common and largest communicators of different size."""
        sizes = self.facts.ranks, other.facts.ranks
        differ = sizes[0] != sizes[1]
        if differ and not all(sizes):  # one file states no size, but has at least the ranks of its channels
            silent = other if sizes[0] else self
            differ = any(rank >= max(sizes) for rank, _ in silent.facts.rank_devices())
        if self.file == other.file or not differ:
            return False
        own_hosts, theirs = (set(each.map_names().values()) for each in (self, other))
        return bool(own_hosts and theirs) and own_hosts.isdisjoint(theirs)

    def contradicts(self, other: Ledger) -> bool:
        """Return whether a GPU has another process there, or a rank another host; no communicator is in both."""
        if len(self.gpus) > len(other.gpus):
            return other.contradicts(self)
        has_ids = self.facts.setups and other.facts.setups and self.facts.ranks == other.facts.ranks
        members, theirs = (each.facts.largest_communicator if has_ids else {} for each in (self, other))
        moved = any(members[rank].host != theirs[rank].host for rank in members.keys() & theirs.keys())
        return moved or any(other.gpus.get(gpu, process) != process for gpu, process in self.gpus.items())

    # --- channels

    def count_transports(self, *, cut: bool = False) -> Tally[str]:
        """Count the channels of each transport: those whose lines are whole, or those whose lines are cut."""
        tally: Tally[str] = Tally()
        for (_, channel), times in self.channels.items():
            if channel.is_cut == cut:
                tally.add(channel.transport, times)
        return tally

    def count_wires(self, *members: str) -> dict[tuple[Any, ...], ChannelCount]:
        """Count the whole network channels by "host" and members of `Channel`. Hosts have their whole names."""
        names = self.map_names()
        counts: dict[tuple[Any, ...], ChannelCount] = {}
        for (host, channel), times in self.channels.items():
            if channel.gdrdma is not None:
                full_name = names.get(host, host)
                key = tuple(full_name if member == "host" else getattr(channel, member) for member in members)
                counts[key] = counts.get(key, ChannelCount()) + ChannelCount(total=times, gdrdma=times * channel.gdrdma)
        return counts

    def cut_wires(self) -> int:
        """Return the number of network channels that were cut before their tag."""
        return sum(times for (_, channel), times in self.channels.items() if channel.network and channel.is_cut)

    def networks(self) -> dict[str, ChannelCount]:
        """Return the channels of each network."""
        return {network: count for (network,), count in self.count_wires("network").items()}

    def prove_channel(self, channel: Channel, line: bytes) -> None:
        """Store the line as proof of the channel's kind."""
        if channel.network is None and not channel.is_cut:
            self.prove(f"transport {channel.transport}", line, channel.transport)
        elif channel.gdrdma is not None:
            key = f"{channel.direction or 'a channel'} {'with' if channel.gdrdma else 'without'} GDRDMA"
            self.prove(f"{channel.transport} {key}", line, f"{channel.transport}: {key}")
        else:
            self.prove(f"cut {channel.transport}", line, f"{channel.transport}, cut before its tag")

    # --- lines

    def prove(self, fact: str, line: bytes, proves: str = "") -> None:
        """Store the line as proof of the fact if it has few."""
        if len(self.proof.get(fact, ())) < MAX_PROOF_PER_FACT + MAX_PROOF_HOSTS:
            self.proof.add(fact, [self._proof_line(line, proves or fact)])

    def record_variable(self, setting: str, line: bytes) -> None:
        """Store the first line of this host that shows this setting of an environment variable."""
        self.variable_lines.add((setting, self.writer.host), self._proof_line(line, setting.partition("=")[0]))

    def count_code(self, code: str, line: bytes) -> None:
        """Count a code, and store its first lines."""
        self.codes.add(code)
        self.last_lines.add((code, self.file), self.lines)
        if self.writer.host or self.writer.rank is not None:
            self.code_writers.add((code, self.writer), None)
        if match := _PEER.search(line):
            self.code_peers.add((code, self.writer.host, match[1].decode("utf-8", "replace")), None)
        if len(self.code_lines.get(code, ())) < MAX_PROOF_PER_FACT + MAX_PROOF_HOSTS:
            self.code_lines.add(code, [self._proof_line(line, code)])

    def _proof_line(self, line: bytes, proves: str) -> ProofLine:
        return ProofLine(
            line=self.lines, file=self.file, proves=proves, host=self.writer.host,
            text=cut_to_sign(line.strip(), proves).decode("utf-8", "replace"),
        )  # fmt: skip


class Runs:
    """The runs of a job, in the order in which they were met. An appended log, or a folder, may hold several.

    Two runs are distinguished by their GPUs: a process belongs to a later run if it takes a GPU that another process of
    the same host had when that process made its channels. Communicators with one id (``commId``, 2.18 on) belong to one
    run, wherever they are, and so do parts of a log in which one process makes channels. Without a common id, two jobs
    of one size on other hosts are two runs.
    """

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []
        self.lines = 0

    def add(self, ledger: Ledger) -> None:
        """Add a part of a log to the latest run that it fits, or as a new run."""
        latest_first = self.ledgers[::-1]
        same = (run for run in latest_first if run.marks.keys() & ledger.marks.keys())
        fits = (run for run in latest_first if not run.contradicts(ledger) and not run.is_of_another_job(ledger))
        run = next(same, None) or next(fits, None)
        if run is None and len(self.ledgers) < MAX_RUNS:
            self.ledgers.append(ledger)
        else:
            (run or self.ledgers[-1]).merge(ledger)

    def join(self, other: Runs) -> None:
        """Add the runs of another file, which was read to its end."""
        for ledger in other.ledgers:
            self.add(ledger)
        self.lines += other.lines
