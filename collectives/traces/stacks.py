"""Python stacks of ranks in texts: `py-spy dump`, faulthandler, and the dumps of torch.distributed.debug.

Specification: py-spy 0.4 (src/dump.rs), Python's Lib/test/test_faulthandler.py, and torch/distributed/debug/
_debug_handlers.py of 2.13, which writes "=== Rank N: ADDRESS ===" before one of the two. Only the main thread counts,
because it is the one that trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MOST_FRAMES = 64
MOST_STACKS = 1 << 16
_RANK = re.compile(r"^=== Rank (\d{1,7}): |^\[rank(\d{1,7})\]:")
_PROCESS = re.compile(r"^Process (\d{1,9}): ")
_PY_SPY = re.compile(r'^Thread \S{1,24} \((?:active|idle)[^)]{0,20}\)(?:: "([^"]{0,100})")?')
_PY_SPY_FRAME = re.compile(r"^    (\S{1,200}) \(([^)]{1,300}?):(\d{1,9})\)$")
_FAULT = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]{1,16} .{0,60}\(most recent call first\):")
_FAULT_FRAME = re.compile(r'^  File "([^"]{1,400})", line (\d{1,9}) in (\S{1,200})')


@dataclass(slots=True, kw_only=True)
class Stack:
    """The main thread of one process."""

    rank: int | None = None  # where the text names it
    pid: int | None = None
    frames: tuple[str, ...] = ()  # innermost first: "train.py:31 step"


class _Reader:
    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.found: list[Stack] = []
        self.frames: list[tuple[str, str]] = []  # (frame, its function) of the thread that is read
        self.is_main = False
        self.best: tuple[bool, tuple[str, ...]] = (False, ())  # the main thread so far, and whether that is certain

    def line(self, line: str) -> None:
        if (rank := _RANK.match(line)) and int(rank[1] or rank[2]) != self.rank:
            self.end_process()
            self.rank, self.pid = int(rank[1] or rank[2]), None
        text = re.sub(r"^\[rank\d{1,7}\]: ?", "", line)
        if process := _PROCESS.match(text):
            self.end_process()
            self.pid = int(process[1])
        elif (thread := _PY_SPY.match(text)) or _FAULT.match(text):
            self.end_thread()
            self.is_main = bool(thread and thread[1] == "MainThread")
        elif frame := _PY_SPY_FRAME.match(text):
            self.add(frame[2], frame[3], frame[1])
        elif frame := _FAULT_FRAME.match(text):
            self.add(*frame.groups())

    def add(self, file: str, line: str, function: str) -> None:
        if len(self.frames) < MOST_FRAMES:
            self.frames.append((f"{file.rpartition('/')[2]}:{line} {function}", function))

    def end_thread(self) -> None:
        # the thread that runs the script's module is the main one; else it is the last that faulthandler lists
        is_main = self.is_main or any(function == "<module>" for _, function in self.frames)
        if self.frames and (is_main or not self.best[0]):
            self.best = is_main, tuple(frame for frame, _ in self.frames)
        self.frames, self.is_main = [], False

    def end_process(self) -> None:
        self.end_thread()
        if self.best[1] and len(self.found) < MOST_STACKS:
            self.found.append(Stack(rank=self.rank, pid=self.pid, frames=self.best[1]))
        self.best, self.pid = (False, ()), None


def read(lines: Iterable[str], *, rank: int | None = None) -> list[Stack]:
    """The main threads in a text; `rank` is whose text it is, where its file's name tells. Empty: it has none."""
    reader = _Reader(rank)
    for line in lines:
        reader.line(line.rstrip()[:1000])
    reader.end_process()
    return reader.found
