"""What to measure, as it is requested (`BenchSpec`) and as the starting process tells its ranks (`Plan`).

The plan is one JSON file, written and read by the same version of this package; nothing here comes from outside the
host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """What the ranks of a run do: the part of a request that every rank receives."""

    cases: tuple[Case, ...] = ()
    warmup: int = 5
    min_iterations: int = 10
    max_iterations: int = 100
    precision: float | None = 0.05  # stop a size when the interval's half width is within this part of the median
    budget_seconds: float = 60.0
    silence_seconds: float = 30.0  # longer than the longest single iteration
    distinct_hosts: bool = False  # each rank gets an NCCL_HOSTID of its own: NCCL's network between ranks of one host
    links: Mapping[str, Any] = field(default_factory=dict)  # of this host, sent to every rank: plain JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Work):
    """The work of a run, and what the starting process has settled."""

    directory: str  # where ranks leave their events
    host: str | None  # what the ranks call this host; None is the host's own name
    backend: str
    limit_seconds: float  # after which the collective itself gives up, and the run ends


def write(plan: Plan, path: Path) -> None:
    """Write the plan for the ranks."""
    path.write_text(json.dumps(plain.write(plan)), encoding="utf-8")


def read(path: Path) -> Plan:
    """Read the plan, in a rank."""
    return plain.read(json.loads(path.read_text(encoding="utf-8")), Plan)


# What to measure, where, and for how long; every setting is checked before anything starts.

BACKENDS = ("gloo", "nccl")
_ENDPOINT = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")


class SpecError(ValueError):
    """A setting of the benchmark is not possible; the text names it, its value and what is allowed."""


# Op, S in bytes, and the rows that all ranks of the run said of themselves when they joined.
Expect = Callable[[str, int, Sequence[Mapping[str, Any]]], tuple[Bar, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec(Work):
    """What to measure, where, and for how long.

    A run ends within startup + budget + silence seconds, and a few more to kill what does not end by itself. Explicit
    `cases` are measured instead of ops and sizes.
    """

    ops: tuple[str, ...] = ("all_gather", "reduce_scatter")
    sizes_bytes: tuple[int, ...] = ()
    backend: str | None = None  # None: nccl where this host shows CUDA GPUs, else gloo
    ranks_per_host: int = 2
    hosts: int = 1
    node_rank: int | None = None  # None: torchrun's rendezvous orders the hosts
    rendezvous: str | None = None  # "host:port", for several hosts
    host_name: str | None = None  # what results call this host; None is its own name
    environment: Mapping[str, str] = field(default_factory=dict)  # for the ranks, on top of this process's own
    startup_seconds: float = 120.0
    expect: Expect | None = None  # what each result is held against, by the caller, which knows the topology
    lock_path: str | None = None
    gpu_pids: tuple[int, ...] = ()  # other work on this host's GPUs, as the caller has seen it
    force: bool = False

    def __post_init__(self) -> None:
        """Check every setting."""
        for op in (*self.ops, *(case.op for case in self.cases)):
            _check("op", op, op in OPS, f"one of {', '.join(OPS)}")
        _check("backend", self.backend, self.backend in (None, *BACKENDS), "gloo, nccl or None")
        for name in ("ranks_per_host", "hosts", "min_iterations", "max_iterations"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("budget_seconds", "startup_seconds", "silence_seconds"):
            _check(name, getattr(self, name), 0 < getattr(self, name) < float("inf"), "a positive number of seconds")
        _check("warmup", self.warmup, self.warmup >= 0, "0 or more")
        _check("max_iterations", self.max_iterations, self.max_iterations >= self.min_iterations, ">= min_iterations")
        _check(
            "precision", self.precision, self.precision is None or 0 < self.precision < 1, "between 0 and 1, or None"
        )
        for size in (*self.sizes_bytes, *(case.bytes for case in self.cases)):
            _check("size in bytes", size, size >= 1, "at least 1")
        self._check_places()

    def _check_places(self) -> None:
        endpoint = _ENDPOINT.fullmatch(self.rendezvous or "")
        allowed = endpoint is not None and 0 < int(endpoint[1]) < 65536
        _check("rendezvous", self.rendezvous, allowed or self.hosts == 1, "host:port, for several hosts")
        inside = self.node_rank is None or 0 <= self.node_rank < self.hosts
        _check("node_rank", self.node_rank, inside, f"0 to {self.hosts - 1}, or None")

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.ranks_per_host * self.hosts

    def all_cases(self) -> tuple[Case, ...]:
        """Give the cases to measure: explicit ones, or each op at each size."""
        return self.cases or tuple(Case(op=op, bytes=size) for op in self.ops for size in self.sizes_bytes)


def _check(setting: str, value: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise SpecError(f"{setting}: {value!r} is not allowed; allowed: {allowed}")
