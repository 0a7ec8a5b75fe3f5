"""Measure collectives with real ranks: `run(BenchSpec(...))` returns a BenchResult, complete or partial.

The ranks are child processes under torchrun; this process does not import torch. Bandwidths are those of nccl-tests,
see docs/reference/bus-bandwidth.md.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from collectives.bench import processes, watch
from collectives.bench.ops import OPS
from collectives.bench.plan import BenchSpec, Case, Expect
from collectives.bench.results import BenchResult, Measurement, Straggler, spread_ratio
from collectives.bench.watch import OnEvent, Outcome
from collectives.nccl_log.transport import Evidence, rank_words
from contracts import plain


def detect_backend() -> str:
    """Return nccl if this host shows NVIDIA devices that are not hidden, else gloo."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles")
    return "nccl" if not hidden and any(Path("/dev").glob("nvidia[0-9]*")) else "gloo"


def run(spec: BenchSpec, on_event: OnEvent | None = None, stop: threading.Event | None = None) -> BenchResult:
    """Run the benchmark and always return a result; errors are in its problems, and `complete` is then False.

    Raises processes.BusyError before anything starts if the host is in use. `on_event` gets one dict for each event of
    a local rank: "start", "joined", "progress", "measured", "skipped", "error", "end".
    """
    from collectives.nccl_log import evidence  # not needed to read results

    processes.refuse_busy_gpus(spec.gpu_pids, spec.force)
    cases = spec.cases or tuple(Case(op=op, bytes=size) for op in spec.ops for size in spec.sizes_bytes)
    spec = replace(spec, backend=spec.backend or detect_backend(), cases=cases)
    with processes.lock_host(Path(spec.lock_path) if spec.lock_path else None), processes.run_folder() as directory:
        debug = directory / "nccl"
        debug.mkdir()
        environment = {**(evidence.environment(debug) if spec.backend == "nccl" else {}), **spec.environment}
        started, clock = time.time(), time.monotonic()
        outcome = watch.run_ranks(spec, directory, environment, on_event or (lambda _: None), stop or threading.Event())
        seconds = time.monotonic() - clock
        logs = sorted(path for path in debug.iterdir() if path.is_file())  # one per process; gloo writes none
        return assemble(spec, outcome, started, seconds, evidence.read_files(logs) if logs else None)


# The result: bandwidths and problems, from the events of the ranks.


def assemble(spec: BenchSpec, outcome: Outcome, started: float, seconds: float, proof: Evidence | None) -> BenchResult:
    """Build the result of a run, whole or partial."""
    backend = spec.backend or ""
    events: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in outcome.events:
        events[event["event"]].append(event)
    hello: list[Mapping[str, Any]] = next((event["ranks"] for event in events["joined"] if event["ranks"]), [])
    hosts = tuple(row["host"] for row in hello)
    measurements = tuple(_make_measurement(event, backend, hello, spec.expect) for event in events["measured"])
    spent = f"not measured, the time budget of {spec.budget_seconds:g} s was spent: "
    skipped = [spent + ", ".join(f"{op} of {size} bytes" for op, size in event["cases"]) for event in events["skipped"]]
    problems = (*outcome.problems, *skipped, *_find_wrong_data(events["measured"], hosts))
    # Times of all sizes together, because a late rank is late at every size.
    rows = [event["wait_seconds"] for event in events["measured"]]
    waits = [[wait for row in rows for wait in row[rank]] for rank in range(len(hosts))]
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
        stragglers=find_stragglers(hosts, waits),
        evidence=proof,
        complete=not outcome.problems and not skipped and all(m.verified for m in measurements) and bool(hello),
        problems=problems,
        stopped_by=outcome.stopped_by,
        nvlink_domains=tuple(sorted({str((row.get("links") or {}).get("nvlink_domain") or "") for row in hello})),
    )


def _make_measurement(
    event: Mapping[str, Any], backend: str, hello: Sequence[Mapping[str, Any]], expect: Expect | None
) -> Measurement:
    from statistics import median  # also imports random, which a process that measures nothing does not need

    op, seconds = OPS[event["op"]], tuple(event["iteration_seconds"])
    middle = median(seconds)
    algbw = event["bytes"] / middle if middle > 0 else 0.0
    bars = expect(op.name, event["bytes"], hello) if expect else ()
    first = next((bar for bar in bars if bar.typical is not None), None)
    values = {
        **event, "backend": backend, "ranks": range(len(hello)), "hosts": [row["host"] for row in hello],
        "median_seconds": middle, "spread_ratio": spread_ratio(seconds), "algbw_bytes_per_second": algbw,
        "busbw_bytes_per_second": algbw * op.factor(len(hello)),
        "verified": event["rounds"] > 0 and not event["wrong"],
    }  # fmt: skip
    return replace(
        plain.read(values, Measurement), bars=bars, expectation=first.why if first else (),
        expected_busbw_bytes_per_second=first.typical if first else None,
    )  # fmt: skip


def _find_wrong_data(measured: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Name the ranks whose data was wrong. A sum does not show which rank's data it is."""
    problems = []
    for event in measured:
        sources: dict[int, set[int]] = {}
        for seer, source in event["wrong"]:
            sources.setdefault(source, set()).add(seer)
        test = f"{event['op']} of {event['bytes']} bytes is not verified"
        for source, seers in sources.items():
            witnesses = rank_words(seers)
            if source >= 0:
                problems.append(f"{test}: rank {source} on {hosts[source]} gave wrong data, seen by {witnesses}")
            else:
                problems.append(f"{test}: the sum is wrong on {witnesses}; all_gather shows which rank's data is wrong")
    return problems


# Stragglers: ranks for which the others wait.
#
# Every iteration starts with a synchronization of the group. The rank that arrives last waits least, so no clocks of
# different ranks are compared: the lateness of a rank is how much longer the median rank waits.

# Equally fast ranks arrive last in 1 / n of the iterations each. A rank is named if it arrives last more often than
# chance explains at this level (one-sided binomial, divided by the number of ranks that are tested) ...
SIGNIFICANCE = 0.001
# ... and if its lateness exceeds the time that the median rank needs for a synchronization of healthy ranks. A smaller
# lateness costs the job nothing that can be measured.
MIN_ITERATIONS = 5


def find_stragglers(hosts: Sequence[str], wait_seconds: Sequence[Sequence[float]]) -> tuple[Straggler, ...]:
    """Name the ranks that the others wait for; `hosts` and `wait_seconds` are by rank, then by iteration."""
    from statistics import median

    iterations = len(wait_seconds[0]) if wait_seconds else 0
    if len(hosts) < 2 or iterations < MIN_ITERATIONS:
        return ()
    columns = list(zip(*wait_seconds, strict=True))
    delays = [[median(column) - column[place] for column in columns] for place in range(len(hosts))]
    if len(hosts) == 2:  # the median of two is their mean, so a late rank is late by twice the difference to it
        delays = [[2 * seconds for seconds in row] for row in delays]
    last = [column.index(min(column)) for column in columns]
    stragglers = []
    for rank, host in enumerate(hosts):
        times = last.count(rank)
        lateness, floor = median(delays[rank]), min(median(row) for row in wait_seconds)
        # P(Binomial(iterations, 1 / ranks) >= times)
        p = 1 / len(hosts)
        chance = math.fsum(
            math.comb(iterations, k) * p**k * (1 - p) ** (iterations - k) for k in range(times, iterations + 1)
        )
        if lateness > floor and chance * len(hosts) <= SIGNIFICANCE:
            reason = f"arrived last in {times} of {iterations} collectives; the others waited {lateness:.6f} s for it"
            stragglers.append(Straggler(
                rank=rank, host=host, late_seconds=lateness, iterations=iterations, share=times / iterations, why=reason
            ))  # fmt: skip
    return tuple(sorted(stragglers, key=lambda straggler: -straggler.late_seconds))
