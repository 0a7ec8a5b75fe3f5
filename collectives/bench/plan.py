"""The requested benchmark (`BenchSpec`), and the part of it that the starting process sends to its ranks (`Work`).

That part is one JSON file, written and read by the same version of this package on the same host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from collectives.bench.ops import OPS
from collectives.bench.results import Bar
from contracts import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective at one size."""

    op: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The part of a request that every rank receives."""

    cases: tuple[Case, ...] = ()
    warmup: int = 5
    min_iterations: int = 10
    max_iterations: int = 100
    precision: float | None = 0.05  # a size ends when the interval's half width is within this fraction of the median
    budget_seconds: float = 60.0
    silence_seconds: float = 30.0  # longer than the longest single iteration
    startup_seconds: float = 120.0
    backend: str | None = None  # None: nccl if this host shows CUDA GPUs, else gloo
    host_name: str | None = None  # name of this host in results; None: its own name
    distinct_hosts: bool = False  # each rank gets its own NCCL_HOSTID: NCCL uses the network between ranks of one host
    links: Mapping[str, Any] = field(default_factory=dict)  # of this host, sent to every rank: plain JSON values

    @property
    def limit_seconds(self) -> float:
        """Return the time after which a collective fails and the run ends."""
        return self.startup_seconds + self.budget_seconds + self.silence_seconds


def write(spec: Work, path: Path) -> None:
    """Write the work for the ranks."""
    work = Work(**{field.name: getattr(spec, field.name) for field in fields(Work)})
    path.write_text(json.dumps(plain.write(work)), encoding="utf-8")


def read(path: Path) -> Work:
    """Read the work, in a rank."""
    return plain.read(json.loads(path.read_text(encoding="utf-8")), Work)


# What to measure, where, and for how long.

_ENDPOINT = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")


class SpecError(ValueError):
    """An invalid setting of the benchmark; the message names it, its value and what is allowed."""


# Op, S in bytes, and the rows that all ranks reported when they joined.
Expect = Callable[[str, int, Sequence[Mapping[str, Any]]], tuple[Bar, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec(Work):
    """What to measure, where, and for how long.

    A run ends within startup + budget + silence seconds, and a few more to kill processes that do not exit. Explicit
    `cases` are measured instead of ops and sizes.
    """

    ops: tuple[str, ...] = ("all_gather", "reduce_scatter")
    sizes_bytes: tuple[int, ...] = ()
    ranks_per_host: int = 2
    hosts: int = 1
    node_rank: int | None = None  # None: torchrun's rendezvous orders the hosts
    rendezvous: str | None = None  # "host:port", for several hosts
    environment: Mapping[str, str] = field(default_factory=dict)  # for the ranks, on top of this process's own
    expect: Expect | None = None  # returns the expected value of a result; set by the caller, which knows the topology
    lock_path: str | None = None
    gpu_pids: tuple[int, ...] = ()  # other processes on this host's GPUs, as seen by the caller
    force: bool = False

    def __post_init__(self) -> None:
        """Validate what the type of a command line option does not validate."""
        for op in (*self.ops, *(case.op for case in self.cases)):
            _check("op", op, op in OPS, f"one of {', '.join(OPS)}")
        for name in ("budget_seconds", "startup_seconds"):  # click takes nan for a number of any range
            _check(name, getattr(self, name), getattr(self, name) > 0, "a positive number of seconds")
        _check("precision", self.precision, self.precision is None or 0 < self.precision < 1, "between 0 and 1")
        endpoint = _ENDPOINT.fullmatch(self.rendezvous or "")
        allowed = endpoint is not None and 0 < int(endpoint[1]) < 65536
        _check("rendezvous", self.rendezvous, allowed or self.hosts == 1, "host:port, for several hosts")
        inside = self.node_rank is None or 0 <= self.node_rank < self.hosts
        _check("node_rank", self.node_rank, inside, f"from 0 to {self.hosts - 1}")

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.ranks_per_host * self.hosts


def _check(setting: str, value: object, is_valid: bool, allowed: str) -> None:
    if not is_valid:
        raise SpecError(f"{setting}{'' if value is None else f'={value!r}'}: must be {allowed}")
