"""Beside a rank's work: a thread that looks where the main thread is, and writes it into the run's folder.

Surface: this process's Python stack (sys._current_frames), /proc/self, the kernel's list of TCP connections, and
PyTorch's flight recorder, which records the last 2,000 collectives by itself. Every look costs some tens of
microseconds, nothing is exchanged between ranks, and a rank that is stuck in a collective still writes: the wait
releases Python's lock. A file of some hundred bytes every few seconds; a dump of the recorder when nothing has moved
for STALL_SECONDS, or when somebody asks.

    from finetune import beside
    beside.start(Path("run"))        # after init_process_group
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import ipaddress
import json
import os
import random
import re
import socket
import sys
import termios
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from contracts.rank_state import ASK, MOST_MARKS, NAME, RANKS_FOLDER, TRACE, Mark, RankState, dumps
from contracts.run_record import WHY

LOOK_SECONDS = 1.0
WRITE_LOOKS = 10  # looks between two writes
ENDS_SECONDS = 60.0  # between two lists of this process's connections
STALL_SECONDS = 15.0  # a dump; the verdict is another's, who knows what the rank does
_DEEPEST = 200
_LIBC = ctypes.CDLL(None)
_MOST_SOCKETS = 4096
_ESTABLISHED = 1  # first byte of tcp_info; the third counts what is sent again in vain
_SHOWN = 6

# First match from the innermost frame outward wins: a data loader's queue inside an evaluation is data.
_LIBRARIES: tuple[tuple[str, re.Pattern[str]], ...] = (
    # what a compiled step runs through has frames of torch._dynamo too; these are there only while it is compiled
    ("compile", re.compile(r"/torch/_dynamo/(?:convert_frame|symbolic_convert)\.py|/triton/compiler/")),
    (
        "save",
        re.compile(r"/torch/(?:serialization\.py|distributed/checkpoint/)|/safetensors/|/finetune/checkpoint\.py"),
    ),
    ("data", re.compile(r"/torch/utils/data/|/datasets/|/webdataset/|/finetune/(?:data|rows)\.py")),
    ("collective", re.compile(r"/torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional)\.py")),
)
_FUNCTIONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("save", re.compile(r"^_?(?:save|write)_(?:checkpoint|model|state|pretrained)|^save$")),
    ("evaluate", re.compile(r"(?:^|_)(?:eval|evaluate|evaluation|validate|validation)(?:_|$)")),
    ("data", re.compile(r"(?:^|_)(?:load|next|fetch|read)_(?:batch|data|rows|examples?)$")),
)


def phase_of(frames: list[tuple[str, str]]) -> str:
    """What a stack does: (file, function), innermost first. A library's frame tells more than a function's name."""
    outer = "compute"
    for file, function in frames:
        path = f"/{file}"
        for phase, pattern in _LIBRARIES:
            if pattern.search(path):
                return _meant(phase, frames)
        for phase, pattern in _FUNCTIONS:
            if pattern.search(function) and outer == "compute":
                outer = phase
    return outer


def _meant(phase: str, frames: list[tuple[str, str]]) -> str:
    """A collective or a loader inside a checkpoint or an evaluation belongs to it only where it waits for nobody."""
    if phase != "data":
        return phase
    within = [name for name, pattern in _FUNCTIONS for _, function in frames if pattern.search(function)]
    return "evaluate" if "evaluate" in within else phase


class Beside(threading.Thread):
    """The thread of one rank."""

    def __init__(self, folder: Path, rank: int, world_size: int, *, look_seconds: float = LOOK_SECONDS) -> None:
        super().__init__(name="topoflight-beside", daemon=True)
        self.folder, self.rank, self.world_size, self.look_seconds = (
            folder / RANKS_FOLDER,
            rank,
            world_size,
            look_seconds,
        )
        self.main = threading.main_thread().ident
        self.samples: Counter[str] = Counter()
        self.unsent: Counter[str] = Counter()
        self.resent: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.phase, self.since = "compute", time.time()
        self.where: tuple[str, ...] = ()
        self.calls, self.moved, self.dumped, self.last_request = 0, time.monotonic(), 0.0, time.time()
        self.marks: list[Mark] = []
        self.over = threading.Event()
        self.fixed = _fixed()
        self.ends: tuple[str, ...] = ()
        self.listed = -ENDS_SECONDS

    def run(self) -> None:
        """Look until the end; what cannot be read or written is left out, and the job goes on."""
        written = 0.0
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (self.folder / TRACE.format(rank=self.rank), self.folder.parent / WHY):
                old.unlink(missing_ok=True)  # of an earlier start
        # at uneven times: looks in step with the job's own steps would see the same phase each time
        while not self.over.wait(self.look_seconds * random.uniform(0.5, 1.5)):  # noqa: S311 - no secret
            self.look()
            now = time.monotonic()
            stalled = (
                now - self.moved >= STALL_SECONDS and now - self.dumped >= max(STALL_SECONDS, now - self.moved) / 2
            )
            if wanted := self.wanted():  # all at one time, since all wait for each that dumps
                most = 2 * self.look_seconds  # every rank has looked by then
                self.over.wait(min(max(0.0, self.last_request + most - time.time()), most))
            if stalled or wanted:
                self.dump()
                written = 0.0
            if now - written >= WRITE_LOOKS * self.look_seconds:
                self.write()
                written = now

    def look(self) -> None:
        """Where the main thread is now."""
        frame = sys._current_frames().get(self.main or 0)
        stack = _stack(frame)
        phase = phase_of([(file, function) for file, _, function in stack])
        if phase != self.phase:
            self.phase, self.since = phase, time.time()
        self.samples[phase] += 1
        self.where = tuple(f"{file.rpartition('/')[2]}:{line} {name}" for file, line, name in stack[:_SHOWN])
        calls = _calls_so_far()
        if calls != self.calls:
            self.calls, self.moved = calls, time.monotonic()
            self.held.clear()
        if phase == "collective":
            for address, waits, again in _sending():
                self.unsent[address] += waits
                self.resent[address] += again
                self.held[address] += waits or again

    def wanted(self) -> bool:
        """Whether somebody has asked for a dump since the last."""
        try:
            requested_at = (self.folder / ASK).stat().st_mtime
        except OSError:
            return False
        new, self.last_request = requested_at > self.last_request, max(requested_at, self.last_request)
        return new

    def dump(self) -> None:
        """The recorder's calls, as JSON."""
        self.dumped = time.monotonic()
        with contextlib.suppress(Exception):  # another torch, a full disk: what is told is told without it
            c10d: Any = importlib.import_module("torch._C._distributed_c10d")
            self._replace(TRACE.format(rank=self.rank), c10d._dump_fr_trace_json())

    def write(self, *, ended: bool = False) -> None:
        """Replace the rank's file."""
        if not ended and time.monotonic() - self.listed >= ENDS_SECONDS:
            self.ends = _ends()
            self.listed = time.monotonic() if self.calls > 8 else self.listed  # some connect late
        unsent = {address: looks for address, looks in self.unsent.items() if looks}
        mark = Mark(at=time.time(), calls=self.calls, samples=dict(self.samples), delayed=_delayed(), unsent=unsent)
        self.marks.append(mark)
        if len(self.marks) > MOST_MARKS:
            del self.marks[1::2]
        state = RankState(
            rank=self.rank, world_size=self.world_size, written=time.time(), phase=self.phase, since=self.since,
            where=self.where, samples=dict(self.samples), calls=self.calls, marks=tuple(self.marks),
            cpu_seconds=time.process_time(),
            groups=_groups(), unsent=unsent, resent=dict(self.resent),
            held=dict(self.held), ended=ended,
            error=_error() if ended else None, ends=self.ends,
            **self.fixed,
        )  # fmt: skip
        self._replace(NAME.format(rank=self.rank), dumps(state).encode())

    def end(self) -> None:
        """The process is done: the last look, the recorder's calls, and the error that ended it, if one did."""
        if self.over.is_set():
            return
        self.over.set()
        self.join(timeout=2 * self.look_seconds)
        self.dump()
        self.write(ended=True)

    def _replace(self, name: str, text: bytes) -> None:
        draft = self.folder / f".{name}.draft"
        with contextlib.suppress(OSError):
            draft.write_bytes(text)
            draft.replace(self.folder / name)


def before() -> None:
    """Before the process group: NCCL's recorder is dumped on a timeout; it records by itself from PyTorch 2.13 on."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def start(folder: Path, *, look_seconds: float = LOOK_SECONDS) -> Beside:
    """Begin to look, in a rank that has joined its process group."""
    import torch.distributed as dist

    made = Beside(folder, dist.get_rank(), dist.get_world_size(), look_seconds=look_seconds)
    made.start()
    atexit.register(made.end)
    return made


def _stack(frame: FrameType | None) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _calls_so_far() -> int:
    """Collectives enqueued by this rank, over all groups, by the recorder's status."""
    try:
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        status = json.loads(c10d._dump_fr_trace_json(includeCollectives=False))["pg_status"]
        return sum(int(group["last_enqueued_collective"]) for group in status.values())
    except Exception:  # noqa: BLE001 - any release of torch, with or without a recorder
        return 0


def _groups() -> dict[str, tuple[int, ...]]:
    """Members of each group: gloo's recorder does not name them."""
    try:
        from torch.distributed import distributed_c10d as c10d

        world: Any = c10d._world
        return {name: tuple(sorted(world.pg_group_ranks[group])) for group, name in world.pg_names.items()}
    except Exception:  # noqa: BLE001 - no public name tells it
        return {}


def _fixed() -> dict[str, Any]:
    """What does not change: host, process, addresses."""
    found: dict[str, Any] = {"host": os.uname().nodename, "pid": os.getpid()}
    if (gpu := os.environ.get("LOCAL_RANK")) is not None and gpu.isdecimal():
        found["gpu"] = int(gpu)
    with contextlib.suppress(OSError, ValueError, IndexError):
        found["started"] = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(ImportError, OSError):
        import psutil

        found["addresses"] = tuple(
            one.address for rows in psutil.net_if_addrs().values() for one in rows
            if one.family.name == "AF_INET" and not one.address.startswith("127.")
        )  # fmt: skip
    return found


def _ends() -> tuple[str, ...]:
    """Own ends of this process's connections: a peer that loses one names it in its error."""
    with contextlib.suppress(Exception):  # psutil's own errors, or no psutil
        import psutil

        rows = psutil.Process().net_connections("tcp")
        return tuple(sorted(f"{row.laddr.ip.removeprefix('::ffff:')}:{row.laddr.port}" for row in rows if row.raddr))
    return ()


def _error() -> str | None:
    """The exception that nobody caught."""
    error = getattr(sys, "last_value", None)
    return f"{type(error).__name__}: {str(error)[:500]}" if error is not None else None


def _delayed() -> float | None:
    """Seconds that the main thread was ready and had no CPU: throttled, or others ran (proc(5), schedstat)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return None


def _sending() -> list[tuple[str, bool, bool]]:
    """Other hosts' addresses: whether bytes to them wait to be sent, and whether some are sent again (tcp(7)).

    Asks this process's own sockets, by libc: for /proc/net/tcp the kernel walks the whole host's table (5 ms), and a
    socket object of Python's may change how the job's own one blocks.
    """
    found: dict[str, tuple[bool, bool]] = {}
    info, peer = (ctypes.c_ubyte * 3)(), (ctypes.c_ubyte * 128)()
    with contextlib.suppress(OSError):
        for fd in sorted(int(one.name) for one in Path("/proc/self/fd").iterdir())[:_MOST_SOCKETS]:
            long, length = ctypes.c_uint32(len(info)), ctypes.c_uint32(len(peer))
            if _LIBC.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(long)):
                continue  # no TCP
            if info[0] != _ESTABLISHED or _LIBC.getpeername(fd, peer, ctypes.byref(length)):
                continue
            six = int.from_bytes(bytes(peer[:2]), sys.byteorder) == socket.AF_INET6
            address = ipaddress.ip_address(bytes(peer[8:24] if six else peer[4:8]))
            address = getattr(address, "ipv4_mapped", None) or address
            if address.is_loopback:
                continue
            with contextlib.suppress(OSError):  # closed meanwhile
                queued = int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
                waits, again = found.get(str(address), (False, False))
                found[str(address)] = (waits or queued > 0, again or info[2] > 0)
    return [(address, *flags) for address, flags in found.items()]
