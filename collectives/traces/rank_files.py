"""The files that each rank of a job writes: its state, and the collectives that it has called.

finetune.rank_monitor writes the state every few seconds. It is plain JSON, so that any job may write it.

Calls are those of PyTorch's flight recorder. Specification: torch/csrc/distributed/c10d/FlightRecorder.hpp, dumps of
version 2, as pickle (TORCH_NCCL_DUMP_ON_TIMEOUT writes `nccl_trace_rank_N`) and as JSON (`_dump_fr_trace_json`). The
recorder of gloo leaves a call in the state "scheduled" and retires it when it is over. That of NCCL also retires calls
that have timed out.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from contracts import bounded, plain
from contracts.tables import read_table

RANKS_FOLDER = "ranks"  # of a run's folder
NAME = "state_rank_{rank}.json"
NODE = "state_node_{rank}.json"  # of torchrun on a node, until its ranks start
FIRST = "first.json"  # of torchrun on the one node of a job: the rank that failed first, or the signal that it received
TRACE = "trace_rank_{rank}.json"  # the flight recorder's dump
ASK = "dump"  # touching this file requests a dump
MAX_STATE_BYTES = 1 << 20
MAX_MARKS = 64  # 4 KB; if there are more, every second one is dropped


class RankFileError(ValueError):
    """A file of a rank cannot be read; the message names the file and the reason."""


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
    """The state of a rank at one time; None and empty mean "not reported"."""

    rank: int = -1
    world_size: int | None = None
    host: str | None = None
    gpu: int | None = None  # CUDA's number on this host
    pid: int | None = None
    started: int | None = None  # of the process, in clock ticks since the boot (proc(5)): a pid alone may be reused
    boot: str | None = None  # boot_id of the kernel
    pid_namespace: str | None = None  # that `pid` is of, as /proc/self/ns/pid names it
    restarts_left: int = 0  # how often torchrun starts the ranks again after a failure
    written: float = 0.0  # Unix seconds
    asked: str = ""  # address of the rendezvous, while the rank has not met the others there
    answer: str = ""  # "connected" to its port, "closed": no longer, "unresolved": unknown name, "pending": not read
    phase: str | None = None  # by the main thread's stack: collective, compute, data, save, evaluate, compile
    since: float | None = None  # Unix seconds: in this phase without a break
    where: tuple[str, ...] = ()  # the main thread's stack, innermost first: "train.py:31 step"
    own: tuple[str, ...] = ()  # of these, the frames of the user's own code
    usual: tuple[str, ...] = ()  # lines of the user's code that are seen in ordinary steps, or that call those
    cpu_share: float | None = None  # share of one CPU that the main thread has used since the last write
    is_active: bool = False  # since then the process has moved data (files, sockets), or a child of it has used the CPU
    samples: dict[str, int] = field(default_factory=dict)  # number of samples since the start, by phase
    moving: dict[str, int] = field(default_factory=dict)  # of these, with a new collective since the previous one
    calls: int = 0  # collectives called so far, all groups
    marks: tuple[Mark, ...] = ()  # over the whole run, oldest first, MAX_MARKS at most
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()  # of this host's interfaces
    ends: tuple[str, ...] = ()  # local ends of this process's connections: "10.0.0.1:4711"
    unsent: dict[str, int] = field(default_factory=dict)  # samples in which bytes to this address waited to be sent
    resent: dict[str, int] = field(default_factory=dict)  # ... had to be sent again
    held: dict[str, int] = field(default_factory=dict)  # of either kind, since the last call
    ended: bool = False  # the process has ended, and has written that
    error: str | None = None  # the exception that ended it


def read_state(path: Path) -> RankState:
    """Read the state in a file. Raises RankFileError."""
    try:
        state = plain.read(plain.loads(bounded.read_text(path, MAX_STATE_BYTES), unknown_numbers=True), RankState)
    except (OSError, ValueError) as error:
        raise RankFileError(f"{path}: {error}") from None
    if state.rank < 0:
        raise RankFileError(f"{path}: must hold `rank`")
    return replace(state, marks=state.marks[-MAX_MARKS:])


# The flight recorder -------------------------------------------------------------------------------------------------

MAX_BYTES = 64 << 20  # of one rank; 2,000 calls with stacks are some 2 MB
MAX_CALLS = 20_000  # of one rank; only the newest are read
MAX_RANKS = 4096  # of a group that are named
MAX_FILES = 8192
UNNAMED = "a collective"  # a call whose kind is not known
R = TypeVar("R", "RankTrace", RankState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective, send or receive that a rank called."""

    group: str
    number: int  # collective_seq_id, the same on each rank of the group
    op: str  # "all_reduce"
    record: int = 0  # order of calls within the rank
    p2p: bool = False
    peer: int | None = None  # of a send or receive, within the group
    sizes: tuple[tuple[int, ...], ...] = ()  # of the inputs
    dtypes: tuple[str, ...] = ()
    done: bool = False
    started: bool = False  # the GPU has started it; always False if the recorder does not report it
    created: float | None = None  # Unix seconds
    is_ahead: bool = False  # called ahead of the GPU, as NCCL's are: `created` does not show when the rank entered it
    seconds: float | None = None  # from its start to its end on the rank's GPU
    frames: tuple[str, ...] = ()  # of the caller, innermost first: "train.py:31 step"

    @property
    def key(self) -> tuple[str, int, bool]:
        """Return what is the same on all ranks that make this call."""
        return self.group, self.number, self.p2p

    @property
    def words(self) -> str:
        """Return a description: "all_reduce of [1000] Float"."""
        sizes = ", ".join(str(list(size)) for size in self.sizes[:3])
        return f"{self.op} of {sizes} {self.dtypes[0] if self.dtypes else ''}".strip() if sizes else self.op


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The flight recorder's dump of a rank, or the calls of a rank that a log reports."""

    rank: int
    calls: tuple[Call, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # members, where the dump names them
    names: Mapping[str, str] = field(default_factory=dict)  # what the program calls a group: "default_pg"
    enqueued: Mapping[str, int] = field(default_factory=dict)  # by group, the newest number that was called
    taken: float | None = None  # Unix seconds, None if unknown; the dump has no later call
    written: float | None = None  # of the file, which a copy may have made later
    partial: bool = False  # from a log: the rank may have made further calls
    sizes: Mapping[str, int] = field(default_factory=dict)  # by group: its number of members, where they are not named

    def has_called_in(self, group: str) -> bool:
        """Whether the rank has called something in a group."""
        return group in self.enqueued or any(call.group == group for call in self.calls)

    def newest_in(self, group: str) -> int:
        """Return the number of the rank's newest collective in a group; 0 if there is none."""
        numbers = [call.number for call in self.calls if call.group == group and not call.p2p] if self.partial else []
        return max([self.enqueued.get(group, 0), *numbers])

    def has_left(self, call: Call) -> bool:
        """Whether a dump has no open collective of the group of this call, up to this call."""
        pending = (one for one in self.calls if one.group == call.group and not one.p2p and not one.done)
        return not self.partial and all(one.number > call.number for one in pending)


_PEER = re.compile(r"^(send|recv) (\d+)(?:->|<-)(\d+)")
_RANK = re.compile(r"(?<!\d)(\d{1,6})(?:\.\w{1,8})?$")


def read(raw: bytes, *, rank: int, source: str = "") -> RankTrace:
    """Read a dump. Raises RankFileError."""
    origin = source or f"rank {rank}"
    try:
        dump = plain.loads(raw, unknown_numbers=True) if raw.lstrip()[:1] == b"{" else unpickle(raw)
    except (plain.PlainError, RankFileError, UnicodeDecodeError) as error:
        raise RankFileError(f"{origin}: no dump of a flight recorder: {error}") from None
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list) or "version" not in dump:
        raise RankFileError(f"{origin}: no dump of a flight recorder: must hold `version` and `entries`")
    version = str(dump["version"]) if isinstance(dump["version"], str | float) else ""
    if not version.startswith("2."):
        raise RankFileError(f"{origin}: a dump of version {version[:20] or '?'}: 2 is read")
    entries = [entry for entry in dump.get("entries", [])[-MAX_CALLS:] if isinstance(entry, dict)]
    config = dump.get("pg_config")
    rows = {str(name): row for name, row in config.items() if isinstance(row, dict)} if isinstance(config, dict) else {}
    members = {name: ranks for name, row in rows.items() if (ranks := _read_ranks(row.get("ranks")))}
    names = dict(entry["process_group"] for entry in entries if _is_pair(entry.get("process_group")))
    calls = _settle(sorted(filter(None, map(_read_call, entries)), key=lambda call: call.record))
    newest: dict[str, int] = {}
    for call in calls:
        if not call.p2p:
            newest[call.group] = max(call.number, newest.get(call.group, 0))
    status = dump.get("pg_status")  # what the ring has lost by now counts, too
    for name, row in status.items() if isinstance(status, dict) else ():
        if isinstance(row, dict) and (last := read_whole(row.get("last_enqueued_collective"))) is not None:
            newest[str(name)] = max(last, newest.get(str(name), 0))
    return RankTrace(rank=rank, calls=calls, groups=members, names=names, enqueued=newest)


def _settle(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Mark calls as done that a later call proves: the collectives of a group end in their order.

    The parts of a coalesced call end with the entry that closes it. In the recorder they stay "scheduled".
    """
    ended: set[str] = set()  # groups with a later collective that is over
    closed: set[str] = set()  # groups whose next collective is a coalesced one that is over
    settled = []
    for call in reversed(calls):
        over = call.done or (call.group in closed if call.p2p else call.group in ended)
        if not call.p2p:
            (closed.add if over and call.op == "coalesced" else closed.discard)(call.group)
            if over:
                ended.add(call.group)
        settled.append(call if over == call.done else replace(call, done=over))
    return tuple(reversed(settled))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(item, str) for item in value)


def _read_ranks(value: Any) -> tuple[int, ...]:
    """Return the ranks of a list, or of its text "[0, 1]"."""
    text = str(value)[:1_000_000] if isinstance(value, str | list | tuple) else ""
    return tuple(sorted({int(number) for number in re.findall(r"(?<![-\w])\d{1,6}\b", text)}))[:MAX_RANKS]


def _read_call(entry: Mapping[str, Any]) -> Call | None:
    name, group = entry.get("profiling_name"), entry.get("process_group")
    p2p, created = entry.get("is_p2p") is True, read_whole(entry.get("time_created_ns"))
    number = read_whole(entry.get("p2p_seq_id" if p2p else "collective_seq_id"))
    if not isinstance(name, str) or not _is_pair(group) or number is None:
        return None
    backend, _, op = name[:200].rpartition(":")
    peer = _PEER.match(op)
    over = entry.get("state") == "completed" or (entry.get("retired") is True and backend != "nccl")
    return Call(
        group=group[0][:200] if group else "", number=number, op=peer[1] if peer else op,
        record=read_whole(entry.get("record_id")) or 0, p2p=p2p,
        peer=int(peer[3][:9]) if peer else None,
        sizes=tuple(tuple(n for n in row[:8] if read_whole(n) is not None)
                    for row in _list(entry.get("input_sizes"))[:8] if isinstance(row, list | tuple)),
        dtypes=tuple(str(dtype)[:20] for dtype in _list(entry.get("input_dtypes"))[:8] if isinstance(dtype, str)),
        done=over, started=entry.get("state") == "started", is_ahead=backend == "nccl", seconds=_read_duration(entry),
        created=created / 1e9 if created else None,
        frames=_read_frames(entry),
    )  # fmt: skip


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def read_whole(value: Any) -> int | None:
    """Return a value that is a whole number of 63 bits, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _read_duration(entry: Mapping[str, Any]) -> float | None:
    """Return the seconds on the GPU, by its events (TORCH_NCCL_ENABLE_TIMING) or by polls of the watchdog (0.1 s)."""
    measured = entry.get("duration_ms")
    if isinstance(measured, int | float) and not isinstance(measured, bool) and 0 <= measured < 1e9:
        return measured / 1e3
    began, over = (read_whole(entry.get(f"time_discovered_{event}_ns")) or 0 for event in ("started", "completed"))
    return (over - began) / 1e9 if over >= began > 0 else None


def _read_frames(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the frames of the caller, innermost first. Those of torch itself are used only if there is no other."""
    rows = [frame for frame in _list(entry.get("frames")) if isinstance(frame, dict)]
    rows = [frame for frame in rows if "-packages/torch/" not in str(frame.get("filename"))] or rows
    parts = ([str(row.get(name, ""))[-120:] for name in ("filename", "line", "name")] for row in rows[:8])
    return tuple(f"{file.rpartition('/')[2]}:{line} {name}" for file, line, name in parts)


def read_file(path: Path) -> RankTrace:
    """Read the dump in a file whose name ends with the number of the rank. Raises RankFileError and OSError."""
    rank = int(_RANK.findall(path.name)[0])
    try:
        trace = read(bounded.read(path, MAX_BYTES), rank=rank, source=str(path))
    except bounded.TooLargeError as error:
        raise RankFileError(f"{path}: {error}") from None
    # the time of a file that the running job updates; the time of a copied file has no meaning
    written = path.stat().st_mtime
    return replace(trace, taken=written if path.name == TRACE.format(rank=rank) else None, written=written)


def read_ranks(paths: Iterable[Path], read_rank: Callable[[Path], R]) -> tuple[dict[int, R], list[str]]:
    """Read the files of ranks. Return what they contain by rank, and an error for each file that cannot be read."""
    ranks: dict[int, R] = {}
    wrong = []
    for path in [file for file in sorted(paths) if _RANK.search(file.name)][:MAX_FILES]:
        try:
            rank_file = read_rank(path)
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
        except ValueError as error:
            wrong.append(str(error))
        else:
            ranks[rank_file.rank] = rank_file
    return ranks, wrong


# Pickles of plain values: numbers, texts, lists, tuples and dicts. No name is imported and nothing is called.
#
# Specification: Lib/pickletools.py of CPython; PyTorch's flight recorder writes protocol 2
# (torch/csrc/jit/serialization/pickler.cpp). Every opcode is checked before Python's own reader gets the bytes, because
# a few bytes of a pickle can cost much time and memory.

MAX_OPCODES = 2_000_000  # 2,000 calls with stacks take some 200,000; the largest, an empty dict, takes 72 bytes
MAX_TUPLES = MAX_CALLS  # hashing deeply nested tuples overflows the stack of the process
MAX_SECONDS = 20.0  # of CPU; what is allowed above takes some 4
_PLAIN = read_table(__file__, "texts.toml")["pickle"]["opcodes"].split()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> Any:
        """Refuse every name."""
        raise RankFileError("names a class or a function")


def _check(raw: bytes) -> None:
    """Raise RankFileError if the bytes contain more than plain values, or too many of them."""
    until, tuples = time.thread_time() + MAX_SECONDS, 0
    for number, (opcode, value, _) in enumerate(pickletools.genops(raw)):
        tuples += "TUPLE" in opcode.name
        if opcode.name not in _PLAIN:
            raise RankFileError(f"an opcode {opcode.name} that plain values do not take")
        if number >= MAX_OPCODES or tuples > MAX_TUPLES:
            raise RankFileError(f"more than {MAX_OPCODES} values, or {MAX_TUPLES} tuples")
        if isinstance(value, int) and (value.bit_length() > 64 or ("BINPUT" in opcode.name and value > number)):
            raise RankFileError("a whole number of more than 64 bits, or a place for a value beyond all values")
        if number % 4096 == 0 and time.thread_time() > until:
            raise RankFileError(f"reading it takes more than {MAX_SECONDS:.0f} s of CPU")


def unpickle(raw: bytes) -> Any:
    """Return the value. Raises RankFileError; nothing that the pickle names is ever run."""
    try:
        _check(raw)
        return _PlainUnpickler(io.BytesIO(raw), encoding="utf-8", errors="replace").load()
    except RankFileError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of Python's reader for bytes that are no pickle
        raise RankFileError(f"no pickle: {type(error).__name__}: {error}") from None
