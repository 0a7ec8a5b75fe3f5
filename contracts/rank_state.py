"""Where one rank stands: the small file that each rank of a run keeps beside its work, and `topoflight why` reads.

Written every few seconds by a thread that only looks (finetune.rank_monitor); plain JSON, so that any job may write it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from contracts import bounded, codec, plain

RANKS_FOLDER = "ranks"  # of a run's folder
NAME = "state_rank_{rank}.json"
TRACE = "trace_rank_{rank}.json"  # the flight recorder's dump
ASK = "dump"  # touched by who wants a dump now
MOST_BYTES = 1 << 20
MOST_MARKS = 64  # every second goes when there are more: 4 KB


class StateError(ValueError):
    """A file that is none; names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far a rank had come at one time."""

    at: float = 0.0  # Unix seconds
    calls: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    moving: dict[str, int] = field(default_factory=dict)  # as of the state, so far
    unsent: dict[str, int] = field(default_factory=dict)  # as of the state, so far


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at one time; None and empty mean "not told"."""

    rank: int = -1
    world_size: int | None = None
    host: str | None = None
    gpu: int | None = None  # CUDA's number on this host
    pid: int | None = None
    started: int | None = None  # of the process, in clock ticks since the boot (proc(5)): a pid alone may be reused
    boot: str | None = None  # boot_id of the kernel
    pid_namespace: str | None = None  # that `pid` is of, as /proc/self/ns/pid names it
    written: float = 0.0  # Unix seconds
    phase: str | None = None  # by the main thread's stack: collective, compute, data, save, evaluate, compile
    since: float | None = None  # Unix seconds: in this phase without a break
    where: tuple[str, ...] = ()  # the main thread's stack, innermost first: "train.py:31 step"
    own: tuple[str, ...] = ()  # of these, the frames of the user's own code
    usual: tuple[str, ...] = ()  # lines of the user's in which ordinary steps are seen, or which call them
    cpu_share: float | None = None  # of a CPU, that the main thread has used since the last writing
    is_active: bool = False  # since then the process has read or written, or a child of it has computed
    samples: dict[str, int] = field(default_factory=dict)  # looks since the start, by phase
    moving: dict[str, int] = field(default_factory=dict)  # of these, looks since whose predecessor a collective began
    calls: int = 0  # collectives called so far, all groups
    marks: tuple[Mark, ...] = ()  # over the whole run, oldest first, MOST_MARKS at most
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()  # of this host's interfaces
    ends: tuple[str, ...] = ()  # own ends of this process's connections: "10.0.0.1:4711"
    unsent: dict[str, int] = field(default_factory=dict)  # looks in which bytes to this address waited to be sent
    resent: dict[str, int] = field(default_factory=dict)  # ... had to be sent again
    held: dict[str, int] = field(default_factory=dict)  # of either kind, since the last call
    ended: bool = False  # the process has come to its end and told
    error: str | None = None  # the exception that ended it


def read(path: Path) -> RankState:
    """The state in a file. Raises StateError."""
    try:
        found = plain.loads(bounded.read_text(path, MOST_BYTES), unknown_numbers=True)
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: {error}") from None
    state = codec.pick(found, RankState)
    if state.rank < 0:
        raise StateError(f"{path}: must hold `rank`")
    return replace(state, marks=state.marks[-MOST_MARKS:])


def dumps(state: RankState) -> str:
    """The document."""
    return json.dumps(codec.write(state))
