"""The state of each rank, from the small file that its monitor writes, and from Python stacks in texts.

finetune.rank_monitor writes the file every few seconds. It is plain JSON, so that any job may write it. `topoflight
why` reads both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from contracts import bounded, plain
from contracts.tables import read_patterns

RANKS_FOLDER = "ranks"  # of a run's folder
NAME = "state_rank_{rank}.json"
NODE = "state_node_{rank}.json"  # of torchrun on a node, until its ranks start
FIRST = "first.json"  # of torchrun on the one node of a job: the rank that failed first
TRACE = "trace_rank_{rank}.json"  # the flight recorder's dump
ASK = "dump"  # touching this file requests a dump
MOST_BYTES = 1 << 20
MOST_MARKS = 64  # 4 KB; if there are more, every second one is dropped


class StateError(ValueError):
    """A file is not a state; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The progress of a rank at one time."""

    at: float = 0.0  # Unix seconds
    calls: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    moving: dict[str, int] = field(default_factory=dict)  # as of the state, so far
    unsent: dict[str, int] = field(default_factory=dict)  # as of the state, so far


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at one time; None and empty mean "not reported"."""

    rank: int = -1
    world_size: int | None = None
    host: str | None = None
    gpu: int | None = None  # CUDA's number on this host
    pid: int | None = None
    started: int | None = None  # of the process, in clock ticks since the boot (proc(5)): a pid alone may be reused
    boot: str | None = None  # boot_id of the kernel
    pid_namespace: str | None = None  # that `pid` is of, as /proc/self/ns/pid names it
    written: float = 0.0  # Unix seconds
    asked: str = ""  # address of the rendezvous, while the rank has not met the others there
    answer: str = ""  # "connected" to its port, "closed": no longer, "unresolved" where its name is not known
    phase: str | None = None  # by the main thread's stack: collective, compute, data, save, evaluate, compile
    since: float | None = None  # Unix seconds: in this phase without a break
    where: tuple[str, ...] = ()  # the main thread's stack, innermost first: "train.py:31 step"
    own: tuple[str, ...] = ()  # of these, the frames of the user's own code
    usual: tuple[str, ...] = ()  # lines of the user's code that are seen in ordinary steps, or that call those
    cpu_share: float | None = None  # share of one CPU that the main thread has used since the last write
    is_active: bool = False  # since then the process has read or written, or a child of it has used the CPU
    samples: dict[str, int] = field(default_factory=dict)  # number of samples since the start, by phase
    moving: dict[str, int] = field(default_factory=dict)  # of these, with a new collective since the previous one
    calls: int = 0  # collectives called so far, all groups
    marks: tuple[Mark, ...] = ()  # over the whole run, oldest first, MOST_MARKS at most
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()  # of this host's interfaces
    ends: tuple[str, ...] = ()  # local ends of this process's connections: "10.0.0.1:4711"
    unsent: dict[str, int] = field(default_factory=dict)  # samples in which bytes to this address waited to be sent
    resent: dict[str, int] = field(default_factory=dict)  # ... had to be sent again
    held: dict[str, int] = field(default_factory=dict)  # of either kind, since the last call
    ended: bool = False  # the process has ended, and has written that
    error: str | None = None  # the exception that ended it


def read_state(path: Path) -> RankState:
    """Read the state in a file. Raises StateError."""
    try:
        state = plain.read(plain.loads(bounded.read_text(path, MOST_BYTES), unknown_numbers=True), RankState)
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: {error}") from None
    if state.rank < 0:
        raise StateError(f"{path}: must hold `rank`")
    return replace(state, marks=state.marks[-MOST_MARKS:])


# Python stacks of ranks in texts: `py-spy dump`, faulthandler, and the dumps of torch.distributed.debug.
#
# Specification: py-spy 0.4 (src/dump.rs), Python's Lib/test/test_faulthandler.py, and torch/distributed/debug/
# _debug_handlers.py of 2.13, which writes "=== Rank N: ADDRESS ===" before one of the two. Only the main thread counts,
# because it is the one that trains.

_TEXTS = read_patterns(__file__, "texts.toml", "stacks", str)
MOST_FRAMES = 64
MOST_STACKS = 1 << 16


@dataclass(slots=True, kw_only=True)
class Stack:
    """The main thread of one process."""

    rank: int | None = None  # where the text names it
    pid: int | None = None
    frames: tuple[str, ...] = ()  # innermost first: "train.py:31 step"


class _StackReader:
    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.found: list[Stack] = []
        self.frames: list[tuple[str, str]] = []  # (frame, its function) of the thread that is read
        self.is_main = False
        self.best: tuple[bool, tuple[str, ...]] = (False, ())  # whether the main thread is certain, and its frames

    def line(self, line: str) -> None:
        if (rank := _TEXTS["rank"].match(line)) and int(rank[1] or rank[2]) != self.rank:
            self.end_process()
            self.rank, self.pid = int(rank[1] or rank[2]), None
        text = re.sub(r"^\[rank\d{1,7}\]: ?", "", line)
        if process := _TEXTS["process"].match(text):
            self.end_process()
            self.pid = int(process[1])
        elif (thread := _TEXTS["py_spy"].match(text)) or _TEXTS["fault"].match(text):
            self.end_thread()
            self.is_main = bool(thread and thread[1] == "MainThread")
        elif frame := _TEXTS["py_spy_frame"].match(text):
            self.add(frame[2], frame[3], frame[1])
        elif frame := _TEXTS["fault_frame"].match(text):
            self.add(*frame.groups())

    def add(self, file: str, line: str, function: str) -> None:
        if len(self.frames) < MOST_FRAMES:
            self.frames.append((f"{file.rpartition('/')[2]}:{line} {function}", function))

    def end_thread(self) -> None:
        # the main thread runs the module of the script; otherwise it is the last one that faulthandler lists
        is_main = self.is_main or any(function == "<module>" for _, function in self.frames)
        if self.frames and (is_main or not self.best[0]):
            self.best = is_main, tuple(frame for frame, _ in self.frames)
        self.frames, self.is_main = [], False

    def end_process(self) -> None:
        self.end_thread()
        if self.best[1] and len(self.found) < MOST_STACKS:
            self.found.append(Stack(rank=self.rank, pid=self.pid, frames=self.best[1]))
        self.best, self.pid = (False, ()), None


def read_stacks(lines: Iterable[str], *, rank: int | None = None) -> list[Stack]:
    """Return the stacks of the main threads in a text; `rank` is that of the text, if the name of its file has one."""
    reader = _StackReader(rank)
    for line in lines:
        reader.line(line.rstrip()[:1000])
    reader.end_process()
    return reader.found
