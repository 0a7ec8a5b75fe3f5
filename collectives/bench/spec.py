"""What to measure, where, and for how long; every setting is checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.bench.ops import OPS
from collectives.bench.plan import Case, SearchPlan, StepPlan
from collectives.bench.results import Bar

BACKENDS = ("gloo", "nccl")
_ENDPOINT = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")


class SpecError(ValueError):
    """A setting of the benchmark is not possible; the text names it, its value and what is allowed."""


# Op, S in bytes, global ranks of the group, and the rows that all ranks of the run said of themselves when they joined.
Expect = Callable[[str, int, tuple[int, ...], Sequence[Mapping[str, Any]]], tuple[Bar, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """What to measure, where, and for how long.

    A run ends within startup + budget + silence seconds (and the budget of a step to be replayed), and a few more to
    kill what does not end by itself.
    """

    ops: tuple[str, ...] = ("all_gather", "reduce_scatter")
    sizes_bytes: tuple[int, ...] = ()  # explicit; empty is the sweep
    min_bytes: int = 64 * 1024
    max_bytes: int = 16 * 1024 * 1024
    step_factor: int = 4
    cases: tuple[Case, ...] = ()  # explicit cases instead of ops and sizes: see model_cases
    backend: str | None = None  # None: nccl where this host shows CUDA GPUs, else gloo
    ranks_per_host: int = 2
    hosts: int = 1
    node_rank: int | None = None  # None: torchrun's rendezvous orders the hosts
    rendezvous: str | None = None  # "host:port", for several hosts
    host_name: str | None = None  # what results call this host; None is its own name
    distinct_hosts: bool = False  # each rank gets an NCCL_HOSTID of its own: NCCL's network between ranks of one host
    environment: Mapping[str, str] = field(default_factory=dict)  # for the ranks, on top of this process's own
    warmup: int = 5
    min_iterations: int = 10
    max_iterations: int = 100
    precision: float | None = 0.05  # stop a size when the interval's half width is within this part of the median
    budget_seconds: float = 60.0
    startup_seconds: float = 120.0
    silence_seconds: float = 30.0  # longer than the longest single iteration
    step: StepPlan | None = None  # replay a job's step as well: shape.step_plan(...)
    search: SearchPlan | None = None  # search for slow ranks by pairs as well: one rank of each host
    expect: Expect | None = None  # what each result is held against, from whoever knows the topology
    links: Mapping[str, Any] = field(default_factory=dict)  # of this host, told to every rank: plain JSON values
    lock_path: str | None = None
    gpu_pids: tuple[int, ...] = ()  # other work on this host's GPUs, as the caller has seen it
    force: bool = False

    def __post_init__(self) -> None:
        """Check every setting."""
        for op in (*self.ops, *(case.op for case in self.cases)):
            _check("op", op, op in OPS, f"one of {', '.join(OPS)}")
        _check("backend", self.backend, self.backend in (None, *BACKENDS), "gloo, nccl or None")
        for name in ("ranks_per_host", "hosts", "min_iterations", "max_iterations", "min_bytes"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("budget_seconds", "startup_seconds", "silence_seconds"):
            _check(name, getattr(self, name), 0 < getattr(self, name) < float("inf"), "a positive number of seconds")
        _check("warmup", self.warmup, self.warmup >= 0, "0 or more")
        _check("max_iterations", self.max_iterations, self.max_iterations >= self.min_iterations, ">= min_iterations")
        _check("max_bytes", self.max_bytes, self.max_bytes >= self.min_bytes, "at least min_bytes")
        _check("step_factor", self.step_factor, self.step_factor >= 2, "at least 2")
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
        parts = self.step.parts if self.step is not None else ()
        for groups in (*(case.groups for case in self.cases), *(part.groups for part in parts)):
            members = [rank for group in groups for rank in group]
            disjoint = len(set(members)) == len(members) and all(0 <= rank < self.world_size for rank in members)
            _check("groups", groups, disjoint, f"disjoint groups of ranks 0 to {self.world_size - 1}")
            _check("groups", groups, all(groups), "groups of at least one rank")
        _check("search", self.search, self.search is None or self.world_size > 1, "only with two ranks or more")

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.ranks_per_host * self.hosts

    def all_cases(self) -> tuple[Case, ...]:
        """Give the cases to measure: explicit ones, or each op at each size."""
        if self.cases:
            return self.cases
        sizes = self.sizes_bytes or sweep(self.min_bytes, self.max_bytes, self.step_factor)
        return tuple(Case(op=op, bytes=size) for op in self.ops for size in sizes)


def _check(setting: str, value: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise SpecError(f"{setting}: {value!r} is not allowed; allowed: {allowed}")


def sweep(min_bytes: int, max_bytes: int, step_factor: int) -> tuple[int, ...]:
    """Give the sizes from min to max, each step_factor times the one before."""
    sizes = [min_bytes]
    while sizes[-1] * step_factor <= max_bytes:
        sizes.append(sizes[-1] * step_factor)
    return tuple(sizes)


def model_cases(
    *,
    fsdp_bucket_bytes: Iterable[int],
    tp_activation_bytes: Iterable[int] = (),
    fsdp_groups: tuple[tuple[int, ...], ...] = (),
    tp_groups: tuple[tuple[int, ...], ...] = (),
) -> tuple[Case, ...]:
    """Give the cases of a model: FSDP gathers and scatters each bucket, TP reduces each activation."""
    sharded = [
        Case(op=op, bytes=size, groups=fsdp_groups)
        for size in sorted(set(fsdp_bucket_bytes))
        for op in ("all_gather", "reduce_scatter")
    ]
    reduced = [Case(op="all_reduce", bytes=size, groups=tp_groups) for size in sorted(set(tp_activation_bytes))]
    return (*sharded, *reduced)
