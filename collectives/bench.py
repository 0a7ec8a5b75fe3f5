"""Measure collectives with real ranks: `run(BenchSpec(...))` gives a BenchResult, whole or partial.

The ranks are child processes under torchrun; this process imports no torch. Bandwidths are those of nccl-tests,
see docs/busbw.md.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from collectives import engine, interval, lock, scratch, stragglers
from collectives.ops import OPS
from collectives.plan import Case, Plan
from collectives.results import BenchResult, Latency, Measurement, Straggler
from collectives.transport import Evidence

BACKENDS = ("gloo", "nccl")
# One NCCL_BUFFSIZE (4 MiB by default, NCCL user guide, environment variables) per rank is the least that a
# shared-memory connection takes.
SHM_BYTES_PER_RANK = 4 * 1024 * 1024
_ENDPOINT = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")


class SpecError(ValueError):
    """A setting of the benchmark is not possible; the text names it, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What one op should reach, from whoever knows the topology; small sizes follow from the latency."""

    op: str
    busbw_bytes_per_second: float
    latency_seconds: float = 0.0
    derivation: tuple[str, ...] = ()

    def busbw_at(self, size_bytes: int, ranks: int) -> float | None:
        """Give the bus bandwidth expected at one size: t = latency + S x factor / bandwidth."""
        moved = size_bytes * OPS[self.op].factor(ranks)
        return moved / (self.latency_seconds + moved / self.busbw_bytes_per_second) if moved else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """What to measure, where, and for how long. A run ends within startup + budget + silence seconds."""

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
    environment: Mapping[str, str] = field(default_factory=dict)  # for the ranks, on top of this process's own
    warmup: int = 5
    min_iterations: int = 10
    max_iterations: int = 100
    precision: float | None = 0.05  # stop a size when the interval's half width is within this part of the median
    budget_seconds: float = 60.0
    startup_seconds: float = 120.0
    silence_seconds: float = 30.0  # longer than the longest single iteration
    expectations: tuple[Expectation, ...] = ()
    lock_path: str | None = None
    gpu_pids: tuple[int, ...] = ()  # other work on this host's GPUs, as the caller has seen it
    force: bool = False

    def __post_init__(self) -> None:
        """Check every setting."""
        for op in (*self.ops, *(case.op for case in self.cases), *(e.op for e in self.expectations)):
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
        for case in self.cases:
            members = [rank for group in case.groups for rank in group]
            disjoint = len(set(members)) == len(members) and all(0 <= rank < self.world_size for rank in members)
            _check("groups", case.groups, disjoint, f"disjoint groups of ranks 0 to {self.world_size - 1}")
            _check("groups", case.groups, all(case.groups), "groups of at least one rank")

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


def visible_backend() -> str:
    """Choose nccl where this host shows NVIDIA devices that are not hidden, else gloo."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles")
    return "nccl" if not hidden and any(Path("/dev").glob("nvidia[0-9]*")) else "gloo"


def run(
    spec: BenchSpec,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    stop: threading.Event | None = None,
) -> BenchResult:
    """Measure. Always gives a result: what broke is in its problems, and `complete` is then False.

    Raises lock.BusyError before anything starts when the host is in use. `on_event` gets one dict for each event
    of a local rank: "start", "joined", "progress", "measured", "skipped", "error", "end".
    """
    lock.refuse_busy_gpus(spec.gpu_pids, spec.force)
    backend = spec.backend or visible_backend()
    with (
        lock.hold(Path(spec.lock_path) if spec.lock_path else None),
        scratch.folder() as directory,
    ):
        return _run_in(directory, spec, backend, on_event or (lambda _event: None), stop)


def _run_in(
    directory: Path,
    spec: BenchSpec,
    backend: str,
    on_event: Callable[[dict[str, Any]], None],
    stop: threading.Event | None,
) -> BenchResult:
    total = spec.startup_seconds + spec.budget_seconds + spec.silence_seconds
    plan = Plan(
        directory=str(directory),
        host=spec.host_name,
        backend=backend,
        cases=spec.all_cases(),
        warmup=spec.warmup,
        min_iterations=spec.min_iterations,
        max_iterations=spec.max_iterations,
        precision=spec.precision,
        budget_seconds=spec.budget_seconds,
        limit_seconds=total,
        silence_seconds=spec.silence_seconds,
    )
    where = engine.Where(
        ranks_per_host=spec.ranks_per_host,
        hosts=spec.hosts,
        node_rank=spec.node_rank,
        rendezvous=spec.rendezvous,
        startup_seconds=spec.startup_seconds,
        total_seconds=total,
    )
    debug = directory / "nccl"
    debug.mkdir()
    asked = _evidence_environment(debug) if backend == "nccl" else {}
    started, clock = time.time(), time.monotonic()
    outcome = engine.fly(plan, where, {**asked, **spec.environment}, on_event, stop)
    return _assemble(spec, backend, outcome, started, time.monotonic() - clock, _read_evidence(debug))


def _evidence_environment(debug: Path) -> Mapping[str, str]:
    from collectives import evidence

    return evidence.environment(debug)


def _read_evidence(debug: Path) -> Evidence | None:
    """Read what NCCL wrote, one file for each process; a gloo run leaves none."""
    logs = sorted(path for path in debug.iterdir() if path.is_file())
    if not logs:
        return None
    from collectives import evidence

    return evidence.read_files(logs)


def _assemble(
    spec: BenchSpec, backend: str, outcome: engine.Outcome, started: float, seconds: float, proof: Evidence | None
) -> BenchResult:
    hello: list[Mapping[str, Any]] = next(
        (event["ranks"] for event in outcome.events if event["event"] == "joined" and event["ranks"]), []
    )
    hosts = tuple(row["host"] for row in hello)
    measured = [event for event in outcome.events if event["event"] == "measured"]
    measurements = tuple(_measurement(event, backend, hosts, spec.expectations) for event in measured)
    skipped = [
        f"not measured, the time budget of {spec.budget_seconds:g} s was spent: {_words(event)}"
        for event in outcome.events
        if event["event"] == "skipped"
    ]
    problems = (*outcome.problems, *skipped, *_lies(measured, hosts), *_odd_hosts(hello, backend))
    first = hello[0] if hello else {"environment": {}, "versions": {"python": platform.python_version()}}
    return BenchResult(
        measurements=measurements,
        world_size=spec.world_size,
        backend=backend,
        hosts=hosts,
        environment=first["environment"],
        versions=first["versions"],
        started_at_seconds=started,
        seconds=seconds,
        latencies=_latencies(measurements),
        stragglers=_stragglers(measured, hosts),
        evidence=proof,
        complete=not outcome.problems and not skipped and all(m.verified for m in measurements) and bool(measurements),
        problems=problems,
    )


def _measurement(
    event: Mapping[str, Any], backend: str, hosts: Sequence[str], expectations: Iterable[Expectation]
) -> Measurement:
    op, ranks, seconds = OPS[event["op"]], tuple(event["ranks"]), tuple(event["iteration_seconds"])
    middle = median(seconds)
    algbw = event["bytes"] / middle if middle > 0 else 0.0
    expected = next((e for e in expectations if e.op == op.name), None)
    return Measurement(
        op=op.name,
        backend=backend,
        ranks=ranks,
        hosts=tuple(hosts[rank] for rank in ranks),
        bytes=event["bytes"],
        iteration_seconds=seconds,
        median_seconds=middle,
        spread_ratio=interval.spread_ratio(seconds),
        algbw_bytes_per_second=algbw,
        busbw_bytes_per_second=algbw * op.factor(len(ranks)),
        verified=event["rounds"] > 0 and not event["wrong"],
        rank_median_seconds=tuple(event["rank_median_seconds"]),
        expected_busbw_bytes_per_second=expected.busbw_at(event["bytes"], len(ranks)) if expected else None,
        expectation=expected.derivation if expected else (),
    )


def _latencies(measurements: Sequence[Measurement]) -> tuple[Latency, ...]:
    """Fit each op, over the group that most of its sizes were measured in."""
    found = []
    for op in dict.fromkeys(m.op for m in measurements):
        groups = [m.ranks for m in measurements if m.op == op]
        group = max(groups, key=groups.count)
        found.append(interval.fit_latency(op, [m for m in measurements if m.ranks == group]))
    return tuple(latency for latency in found if latency is not None)


def _stragglers(measured: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> tuple[Straggler, ...]:
    """Look at the whole world's meetings together: a late rank is late at every size."""
    waits: dict[tuple[int, ...], list[list[float]]] = {}
    for event in measured:
        rows = waits.setdefault(tuple(event["ranks"]), [[] for _ in event["ranks"]])
        for row, seconds in zip(rows, event["wait_seconds"], strict=True):
            row.extend(seconds)
    return tuple(s for ranks, rows in waits.items() for s in stragglers.name(ranks, [hosts[r] for r in ranks], rows))


def _lies(measured: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Name the ranks whose data was wrong; a rank that alone sees every other one wrong receives wrongly."""
    told = []
    for event in measured:
        sources: dict[int, set[int]] = {}
        for seer, source in event["wrong"]:
            sources.setdefault(source, set()).add(seer)
        what = f"{event['op']} of {event['bytes']} bytes is not verified"
        for source, seers in sources.items():
            if source >= 0:
                told.append(f"{what}: rank {source} on {hosts[source]} gave wrong data, seen by {_ranks(seers)}")
            elif len(sources) == 1:
                told.append(f"{what}: the sum is wrong on {_ranks(seers)}; each rank's own part is right")
    return told


def _odd_hosts(hello: Sequence[Mapping[str, Any]], backend: str) -> list[str]:
    """Say where ranks differ in what must be alike, and where shared memory is too small for NCCL."""
    told = []
    names = sorted({name for row in hello for name in row["versions"]})
    for name in names:
        by_version: dict[str, list[int]] = {}
        for row in hello:
            by_version.setdefault(row["versions"].get(name, "none"), []).append(row["rank"])
        if len(by_version) > 1:
            listed = "; ".join(f"{version} on {_ranks(ranks, hello)}" for version, ranks in by_version.items())
            told.append(f"different versions of {name}: {listed}")
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for row in hello:
        by_host.setdefault(row["host"], []).append(row)
    for host, rows in by_host.items():
        free, least = rows[0]["shm_free_bytes"], SHM_BYTES_PER_RANK * len(rows)
        if free is not None and free < least:
            needs = (
                "NCCL's shared-memory transport needs" if backend == "nccl" else "gloo does without, NCCL would need"
            )
            told.append(f"{host}: /dev/shm has {free} bytes free; {needs} at least {least} for {len(rows)} ranks")
    return told


def _ranks(ranks: Iterable[int], hello: Sequence[Mapping[str, Any]] = ()) -> str:
    hosts = {row["rank"]: f" ({row['host']})" for row in hello}
    listed = sorted(ranks)
    return ", ".join(f"rank {rank}{hosts.get(rank, '')}" for rank in listed[:8]) + (" ..." if len(listed) > 8 else "")


def _words(event: Mapping[str, Any]) -> str:
    return ", ".join(f"{op} of {size} bytes" for op, size in event["cases"])
