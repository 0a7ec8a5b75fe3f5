"""Lines of PyTorch in a log of the ranks: calls that timed out, and errors that ended ranks.

Specification: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and ProcessGroupWrapper.cpp, releases 1.13 to 2.13; the
backend nccl2 of what follows 2.13 (nccl2/WorkNCCL.cpp, nccl2/ProcessGroupNCCLUtils.cpp), which names no call; and the
excepthook of torch.distributed, which writes "[rankN]:" before each line. That number is the job's; "Rank N" within
the brackets is the group's own. Before 2.3 a line names no group, so its number cannot be held against another's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from collectives.traces.rank_files import UNNAMED, Call, RankTrace
from contracts.tables import read_patterns, read_table

_TEXTS = read_patterns(__file__, "texts.toml", "watchdog", str)
_GATHERS = ("allgather", "_allgather_base")
_SCATTERS = ("reduce_scatter", "_reduce_scatter_base")
_NEEDLES = tuple(read_table(__file__, "texts.toml")["needles"])
_MEETING = ("clients", "unresolved", "ipv6", "taken", "unreached")  # of ranks that do not meet
MAX_STORED = 1 << 16  # ranks, or calls, that are stored
MAX_ATTEMPTS = 4


@dataclass(slots=True)
class Join:
    """A process group that is being created, and that not all ranks of the job have joined."""

    world: int
    joined: int = 0
    ranks: set[int] = field(default_factory=set)  # that report that they wait in it
    over: bool = False  # timed out


@dataclass(slots=True)
class LogFacts:
    """The facts about ranks in the lines of a log."""

    traces: dict[int, RankTrace] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # by rank: the exception that ended it
    clash: dict[int, Call] = field(default_factory=dict)  # calls that did not match (TORCH_DISTRIBUTED_DEBUG=DETAIL)
    hung: dict[int, str] = field(default_factory=dict)  # by rank: seconds without progress of its watchdog thread
    idle: dict[int, str] = field(default_factory=dict)  # of these, the ranks without an outstanding collective
    late: dict[int, str] = field(default_factory=dict)  # by rank that missed a barrier: milliseconds, if they are known
    lost: dict[int, str] = field(default_factory=dict)  # by rank: the host whose connection was closed
    joins: dict[str, Join] = field(default_factory=dict)  # by the barrier's key: groups that are being made
    models: dict[int, str] = field(default_factory=dict)  # by rank: its parameters, where DDP found them to differ
    rendezvous: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by pattern: why the ranks did not meet
    attempts: list[str] = field(default_factory=list)  # the first of these lines
    terminated: set[int] = field(default_factory=set)  # processes that torchrun ended because another one failed
    unused: str = ""  # what DDP writes if parameters took no part in the loss
    stopped: str = ""  # the signal that torchrun received: "15", "2", or its name
    cut_short: str = ""  # the line of a rank that gloo ended because it received more than its call expects


class _TimedOutCall(NamedTuple):
    """A call that timed out, as one line reports it."""

    rank: int  # of the job if the line names it, else of the group
    own: int  # of the group
    prefixed: bool
    call: Call
    size: int | None  # of the group


class _Reader:
    def __init__(self) -> None:
        self.report = LogFacts()
        self.of_ranks = {"nccl2": self.report.errors, "hung": self.report.hung, "idle": self.report.idle,
                         "peer": self.report.lost}  # fmt: skip
        self.timed_out: list[_TimedOutCall] = []
        self.at: dict[tuple[int, int], str] = {}  # (rank, number of the call) -> group
        self.enqueued: dict[tuple[int, str], int] = {}
        self.own: dict[tuple[int, str], int] = {}
        self.default: set[str] = set()
        self.stacks: dict[tuple[int, int], list[str]] = {}  # by rank and number of its call that timed out: frames
        self.stack: list[str] | None = None  # that is being read
        self.absent: list[int] = []  # ranks that fr_trace misses in the first call that it describes
        self.before: tuple[int, str, int] | None = None  # rank, group, own rank of the line before: a line may be torn

    def line(self, line: str) -> None:
        named, group = _TEXTS["rank"].search(line), _TEXTS["group"].search(line)
        if error := _TEXTS["error"].search(line):
            self.report.errors.setdefault(int(error[1]), f"{error[2]}: {error[3]}" if error[3] else error[2])
        here = None  # rank of the job, name of its group, rank in the group
        if group:
            rank, name = int((named or group)[1 if named else 3]), group[1]
            here = rank, name, int(group[3])
            self.own[rank, name] = here[2]
            if group[2] == "default_pg" or (not group[2] and name == "0"):
                self.default.add(name)
        place = here or (None if named else self.before)  # the rest of a line that a terminal has wrapped has no prefix
        if work := _TEXTS["work"].search(line):
            self.work(work, here, named)
        elif place and (status := _TEXTS["status"].search(line)):
            key = place[0], place[1]
            self.enqueued[key] = max(int(status[1]), self.enqueued.get(key, 0))  # -1: none yet
            moment, done = _TEXTS["at"].search(line), _TEXTS["done"].search(line)
            if moment:
                self.at.setdefault((place[0], int(moment[1])), place[1])
            elif done and 0 <= int(done[1]) < int(status[1]):  # its calls end in their order: it is in the next
                self.at.setdefault((place[0], int(done[1]) + 1), place[1])
        elif "CollectiveFingerPrint(" in line and "Detected mismatch" in line:
            self.clash(line)
        else:
            self.barrier(line)
        self.end_of_run(line)
        if group or "Init COMPLETE" in line:  # the ranks have met: what was written before were attempts
            self.report.rendezvous.clear()
            self.report.attempts.clear()
        self.meeting(line)
        rank_of = int(named[1]) if named else place[0] if place else None
        if rank_of is not None:
            for name, facts in self.of_ranks.items():
                if match := _TEXTS[name].search(line):
                    facts[rank_of] = facts.get(rank_of) or next(filter(None, match.groups()), "")
        self.before = here

    def barrier(self, line: str) -> None:
        """Read a line about ranks that wait for others at a barrier: one in the store, or a monitored one."""
        if missed := _TEXTS["barrier"].search(line):
            self.report.late.update({int(rank): missed[2] for rank in missed[1].split(",") if rank.strip().isdecimal()})
        elif match := _TEXTS["absent"].search(line):
            ranks = [int(rank) for rank in re.findall(r"\b\d{1,7}\b", match[2])]
            if match[1] == "expected" and 2 * len(self.absent) < len(ranks) and not self.report.late:
                self.report.late.update(dict.fromkeys(self.absent, ""))  # those of a later call may wait for these
            self.absent = self.absent or ranks * (match[1] == "missing")
        elif match := _TEXTS["joins"].search(line):
            join = self.report.joins.setdefault(match[3], Join(world=int(match[4])))
            join.joined, join.over = max(join.joined, int(match[5])), join.over or match[1] == "Timed out"
            join.ranks.add(int(match[2]))
        elif match := _TEXTS["joined"].search(line):
            self.report.joins.pop(match[1], None)

    def end_of_run(self, line: str) -> None:
        """Read a line about the end: a signal to torchrun, a call that gloo refused, the stack of a late call."""
        if self.stack is not None and (frame := _TEXTS["frame"].search(line)):
            if "-packages/torch/" not in frame[2] and len(self.stack) < MAX_FRAMES:
                self.stack.append(f"{frame[3]} {frame[1]}")
        else:
            failed = _TEXTS["failed"].search(line) if self.timed_out else None
            key = failed and len(self.stacks) < MAX_STORED and (int(failed[1]), self.timed_out[-1].call.number)
            self.stack = self.stacks.setdefault(key, []) if key else None
        if ended := _TEXTS["terminated"].search(line):
            self.report.terminated.add(int(ended[1]))
        if (unused := _TEXTS["unused"].search(line)) and not self.report.unused.startswith("Parameters which"):
            self.report.unused = unused[0]
        if stopped := _TEXTS["stopped"].search(line):
            self.report.stopped = stopped[1]
        if "preamble.length" in line:  # gloo/transport/tcp/pair.cc, of a message longer than the call expects
            self.report.cut_short = self.report.cut_short or line[:300]

    def meeting(self, line: str) -> None:
        """Read a line about ranks that do not meet, or models that differ. The rank that writes it only waits."""
        rows = self.report.rendezvous
        for name in _MEETING:
            if match := _TEXTS[name].search(line):
                values = tuple(filter(None, match.groups())) or rows.get(name, ())
                if rows.get(name) != values and len(self.report.attempts) < MAX_ATTEMPTS:
                    self.report.attempts.append(line.strip()[:300])
                rows[name] = values
                break
        if counts := _TEXTS["parameters"].search(line):
            for rank, count in ((counts[1], counts[2]), (counts[3], counts[4])):
                self.report.models[int(rank)] = f"{count} parameters"
        elif shape := _TEXTS["shape"].search(line):
            self.report.models[int(shape[1])] = f"{shape[2]} of {shape[3]} {shape[4]}"
            self.report.models.setdefault(0, f"{shape[2]} of other {shape[3]}")

    def work(self, work: re.Match[str], here: tuple[int, str, int] | None, named: re.Match[str] | None) -> None:
        sequence, op = int(work[1]), work[3].lower()
        before = self.before if not here and not named and self.before and self.before[2] == sequence else None
        place = here or before
        rank = int(named[1]) if named else place[0] if place else sequence
        sizes = (int(work[4]), int(work[5])) if work[4] else ()
        call = Call(group=place[1] if place else "", number=int(work[2] or 0), op=_name_call(op, sizes),
                    sizes=(sizes[:1],) if sizes else (), p2p=op in ("send", "recv"))  # fmt: skip
        if len(self.timed_out) < MAX_STORED:
            self.timed_out.append(_TimedOutCall(rank, sequence, bool(named or before), call, _count_members(op, sizes)))

    def clash(self, line: str) -> None:
        for match in _TEXTS["print"].finditer(line):
            sizes = tuple(int(n) for n in (match[4] or "").replace(",", " ").split())
            self.report.clash[int(match[1])] = Call(
                group="", number=int(match[2] or 0), op=match[3].lower(), dtypes=(match[5],) if match[5] else (),
                sizes=(sizes,) if match[4] is not None else (),
            )  # fmt: skip

    def end(self) -> LogFacts:
        calls: dict[int, dict[str, Call]] = {}
        sizes: dict[str, int] = {}
        prefixed = {(one.own, one.call.number) for one in self.timed_out if one.prefixed}
        for entry in self.timed_out:
            if not entry.prefixed and (entry.own, entry.call.number) in prefixed:
                continue  # the exception says the same once more, without the prefix
            group = entry.call.group or self.at.get((entry.rank, entry.call.number), "")
            frames = tuple(self.stacks.get((entry.rank, entry.call.number), ()))
            call, groups = replace(entry.call, group=group, frames=frames), calls.setdefault(entry.rank, {})
            if group:
                self.own.setdefault((entry.rank, group), entry.own)
            # Of several calls, a rank waits in the first. A line without sizes was cut, so one with sizes is preferred.
            if group not in groups or (call.number, not call.sizes) < (groups[group].number, not groups[group].sizes):
                groups[group] = call
            if group and entry.size:
                sizes[group] = entry.size
        for (rank, number), group in self.at.items():  # the line that names the call itself is not there
            if all(call.number != number for call in calls.get(rank, {}).values()):
                calls.setdefault(rank, {}).setdefault(group, Call(group=group, number=number, op=UNNAMED))
        twice = self._shared()
        for rank in sorted({*calls, *(rank for rank, _ in self.enqueued)})[:MAX_STORED]:
            # a name of more than one group does not identify a group
            rows = tuple(replace(call, group="") if call.group in twice else call
                         for call in calls.get(rank, {}).values())  # fmt: skip
            self.report.traces[rank] = RankTrace(
                rank=rank, calls=rows, partial=True,
                enqueued={name: n for (r, name), n in self.enqueued.items() if r == rank and name not in twice},
                names={name: "default_pg" for r, name in self.own if r == rank and name in self.default},
                sizes={call.group: sizes[call.group] for call in rows if call.group in sizes},
            )  # fmt: skip
        return self.report

    def _shared(self) -> set[str]:
        """Return the names of more than one group: two ranks have the same number in such a group."""
        owners: dict[tuple[str, int], int] = {}
        return {name for (rank, name), number in self.own.items() if owners.setdefault((name, number), rank) != rank}


def read(lines: Iterable[str]) -> LogFacts:
    """Read the lines of a log."""
    reader, line = _Reader(), ""
    for text in map(str.strip, lines):
        line = line + text if len(line) < 1_000 and _TEXTS["wrapped"].search(line) and "ank" not in text else text
        if any(needle in line for needle in _NEEDLES):
            reader.line(line)
        else:
            reader.before = None
    return reader.end()


def _count_members(op: str, sizes: tuple[int, ...]) -> int | None:
    """Return the size of the group, from the input and output sizes of a gather or scatter; None for other calls."""
    if op not in (*_GATHERS, *_SCATTERS) or not sizes or 0 in sizes:
        return None
    small, large = sizes if op in _GATHERS else reversed(sizes)
    return large // small if large % small == 0 else None


def _name_call(op: str, sizes: tuple[int, ...]) -> str:
    """Return the name of a call. A "coalesced" call with a larger output than input is a coalesced all_gather."""
    if op == "coalesced" and sizes and 0 not in sizes and sizes[0] < sizes[1] and sizes[1] % sizes[0] == 0:
        return "coalesced all_gather"
    return op


# Python stacks of ranks: `py-spy dump`, faulthandler, and the dumps of torch.distributed.debug ------------------------
#
# Specification: py-spy 0.4 (src/dump.rs), Python's Lib/test/test_faulthandler.py, and torch/distributed/debug/
# _debug_handlers.py of 2.13, which writes "=== Rank N: ADDRESS ===" before one of the two. The main thread counts,
# because it is the one that trains, and while it waits for the backward pass also a thread that is in a collective.

_STACKS = read_patterns(__file__, "texts.toml", "stacks", str)
MAX_FRAMES = 64
MAX_STACKS = 1 << 16


class StackReader:
    """Finds the stacks of main threads in a text; `rank` is that of the text, if the name of its file has one."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        self.pid: int | None = None
        # by rank and process, as far as the text names them: frames, innermost first: "train.py:31 step"
        self.found: dict[tuple[int | None, int | None], tuple[str, ...]] = {}
        self.frames: list[str] = []  # of the thread that is read
        self.is_main = False
        self.best: tuple[bool, tuple[str, ...]] = (False, ())  # whether the main thread is certain, and its frames
        self.in_call: tuple[str, ...] = ()  # frames of a thread that is in torch.distributed

    def line(self, line: str) -> None:
        """Read a line."""
        line = line.rstrip()[:1000]
        if (rank := _STACKS["rank"].match(line)) and int(rank[1] or rank[2]) != self.rank:
            self.end_process()
            self.rank, self.pid = int(rank[1] or rank[2]), None
        text = re.sub(r"^\[rank\d{1,7}\]: ?", "", line)
        if process := _STACKS["process"].match(text):
            self.end_process()
            self.pid = int(process[1])
        elif (thread := _STACKS["py_spy"].match(text)) or _STACKS["fault"].match(text):
            self._end_thread()
            self.is_main = bool(thread and thread[1] == "MainThread")
        elif (frame := _STACKS["frame"].match(text)) and len(self.frames) < MAX_FRAMES:
            file, number, function = frame[2] or frame[4], frame[3] or frame[5], frame[1] or frame[6]
            self.frames.append(f"{file.rpartition('/')[2]}:{number} {function}")

    def _end_thread(self) -> None:
        # the main thread runs the module of the script; otherwise it is the last one that faulthandler lists
        is_main = self.is_main or any(frame.endswith(" <module>") for frame in self.frames)
        if self.frames and (is_main or not self.best[0]):
            self.best = is_main, tuple(self.frames)
        if any(frame.startswith("distributed_c10d.py:") for frame in self.frames):
            self.in_call = tuple(self.frames)
        self.frames, self.is_main = [], False

    def end_process(self) -> None:
        """Store the stack of the process that was read."""
        self._end_thread()
        if self.best[1] and len(self.found) < MAX_STACKS:
            is_backward = _STACKS["backward"].match(self.best[1][0])
            self.found[self.rank, self.pid] = (*(self.in_call if is_backward else ()), *self.best[1])
        self.best, self.in_call, self.pid = (False, ()), (), None
