"""Measure collectives with real ranks: `run(BenchSpec(...))` gives a BenchResult, whole or partial.

The ranks are child processes under torchrun; this process imports no torch. Bandwidths are those of nccl-tests,
see docs/busbw.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collectives.bench import engine, lock, scratch
from collectives.bench.assemble import assemble
from collectives.bench.plan import Case, Plan, SearchPlan
from collectives.bench.results import BenchResult
from collectives.bench.spec import BenchSpec, SpecError, model_cases, sweep
from collectives.bench.watch import Where
from collectives.nccl_log.transport import Evidence

OVERRUN_SECONDS = 15.0  # of the budget, for one transfer that nothing foretold

__all__ = ["BenchSpec", "Case", "SearchPlan", "SpecError", "model_cases", "run", "sweep"]


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
    replay = spec.step.budget_seconds if spec.step else 0.0
    total = spec.startup_seconds + replay + spec.budget_seconds + spec.silence_seconds
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
        distinct_hosts=spec.distinct_hosts,
        step=spec.step,
        search=spec.search,
        links=dict(spec.links),
    )
    where = Where(
        ranks_per_host=spec.ranks_per_host,
        hosts=spec.hosts,
        node_rank=spec.node_rank,
        rendezvous=spec.rendezvous,
        startup_seconds=spec.startup_seconds,
        total_seconds=total,
        measuring_seconds=None if spec.step or spec.search else spec.budget_seconds + OVERRUN_SECONDS,
    )
    debug = directory / "nccl"
    debug.mkdir()
    asked = _evidence_environment(debug) if backend == "nccl" else {}
    started, clock = time.time(), time.monotonic()
    outcome = engine.fly(plan, where, {**asked, **spec.environment}, on_event, stop)
    return assemble(spec, backend, outcome, started, time.monotonic() - clock, _read_evidence(debug))


def _evidence_environment(debug: Path) -> Mapping[str, str]:
    from collectives.nccl_log import evidence

    return evidence.environment(debug)


def _read_evidence(debug: Path) -> Evidence | None:
    """Read what NCCL wrote, one file for each process; a gloo run leaves none."""
    logs = sorted(path for path in debug.iterdir() if path.is_file())
    if not logs:
        return None
    from collectives.nccl_log import evidence

    return evidence.read_files(logs)
