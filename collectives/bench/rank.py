"""What each rank of a benchmark runs: `python -m torch.distributed.run ... -m collectives.bench.rank PLAN`.

Each collective is run for some iterations and verified on fresh data, and all ranks exchange their times. A separate
gloo group carries the control traffic, so that it is not part of the measurement. Every rank sees the same gathered
times and so takes the same decisions; nothing is broadcast.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from collectives.bench import ops
from collectives.bench.plan import Case, Work, read
from collectives.bench.processes import die_with_parent
from collectives.bench.pulse import Journal
from collectives.bench.results import spread_ratio

PREDICTS_UP_TO = 64  # times its own size: the time of a smaller size is mostly latency
ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "RCCL_", "FI_", "OFI_NCCL_")
BATCH = 5  # iterations between two checks of the interval
WARMUP_SHARE = 0.2  # fraction of a size's budget; the first iteration sets up connections and takes longest
MIN_ITERATIONS = 3  # per measurement: one that connects, one verified on fresh data, one that is timed


@dataclass(slots=True, kw_only=True)
class Rank:
    """The state of one rank."""

    rank: int
    world: int
    plan: Work
    journal: Journal
    device: str
    control: Any = None  # process group of the control traffic
    group: Any = None  # process group to measure
    turn: int = 0  # number of rounds with fresh data so far


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds measured for one case so far: by rank, then by iteration."""

    runs: list[list[float]]
    waits: list[list[float]]
    wrong: set[tuple[int, int]] = field(default_factory=set)  # (detecting rank, sending rank or -1)
    rounds: int = 0  # verified


def run_case(me: Rank, case: Case, budget_seconds: float, left_seconds: float) -> float:
    """Measure one case; return the seconds of one iteration, which are equal on all ranks.

    The first iteration shows how many fit into `budget_seconds`. If one verified and one timed round do not fit into
    `left_seconds` of the whole run, nothing is measured.
    """
    op = ops.OPS[case.op]
    side = ops.allocate(op, case.bytes, me.group, tuple(range(me.world)), me.rank, me.device)
    times = Times(runs=[[] for _ in range(me.world)], waits=[[] for _ in range(me.world)])
    name = f"{case.op} of {case.bytes} bytes"
    arrived_at = record_time(me)
    wait_for_group(me, side)  # not counted, because NCCL connects in the first collective of a group
    measure_seconds(me, arrived_at, record_time(me))  # waits for the GPU
    started = time.monotonic()
    me.journal.write("case", op=case.op, bytes=case.bytes, where=name)
    _iterate(me, op, side, 1, name)
    first = each = find_slowest(me, time.monotonic() - started)
    if left_seconds < MIN_ITERATIONS * first:
        return first
    warm = budget_seconds * WARMUP_SHARE / first if first > 0 else me.plan.warmup
    _iterate(me, op, side, max(0, min(me.plan.warmup - 1, int(warm))), name)
    spent = find_slowest(me, time.monotonic() - started)
    while True:
        wrong = verify_round(me, op, side, name)
        # The last round used a part of the budget, and with a large size or a slow network less than a batch is left.
        fits = (budget_seconds - spent) / each - 1 if each > 0 else BATCH
        runs, waits = _iterate(me, op, side, max(1, min(BATCH, int(fits))), name)
        share_times(me, times, runs, waits, wrong)
        each = max(row[-1] for row in times.runs)
        spent = find_slowest(me, time.monotonic() - started)
        me.journal.write("progress", op=case.op, bytes=case.bytes, iterations=len(times.runs[0]), seconds=runs[-1:])
        if _is_measured(me.plan, times, spent + (MIN_ITERATIONS - 1) * each, budget_seconds):
            break
    if reports_for_host():
        me.journal.write(
            "measured",
            op=op.name,
            bytes=ops.moved_bytes(op, case.bytes, me.world),
            iteration_seconds=find_slowest_iterations(times),
            wait_seconds=times.waits,
            rounds=times.rounds,
            wrong=sorted(times.wrong),
        )
    return first


def _iterate(me: Rank, op: ops.Op, side: ops.Side, count: int, name: str) -> tuple[list[float], list[float]]:
    """Run the collective `count` times; return seconds of the runs, and seconds waited for the last rank."""
    runs, waits = [], []
    for _ in range(count):
        me.journal.arrive(name)
        arrived_at = record_time(me)
        wait_for_group(me, side)
        began = record_time(me)
        op.run(side)
        ended = record_time(me)
        waits.append(measure_seconds(me, arrived_at, began))
        runs.append(measure_seconds(me, began, ended))
    return runs, waits


def wait_for_group(me: Rank, side: ops.Side) -> None:
    """Synchronize the group with an all-reduce of one element, which on a GPU stays in the stream."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=me.device), group=side.group)


def record_time(me: Rank) -> Any:
    """Record a time: of this host, or an event in the GPU's stream."""
    if me.device == "cpu":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure_seconds(me: Rank, first: Any, second: Any) -> float:
    """Return the seconds between two recorded times."""
    if me.device == "cpu":
        return float(second - first)
    second.synchronize()
    return float(first.elapsed_time(second)) / 1000


def verify_round(me: Rank, op: ops.Op, side: ops.Side, name: str) -> tuple[int, ...]:
    """Run once on fresh data, compare every element, and return the global ranks whose data is wrong."""
    me.turn += 1
    me.journal.arrive(f"verified round of {name}")
    ops.fill(side, me.turn)
    op.run(side)
    return tuple(side.ranks[place] if place >= 0 else ops.UNKNOWN_SOURCE for place in op.find_wrong(side, me.turn))


def share_times(me: Rank, times: Times, runs: list[float], waits: list[float], wrong: tuple[int, ...]) -> None:
    """Exchange the times and verification results of all ranks."""
    for rank, (rank_runs, rank_waits, sources) in enumerate(gather(me, (runs, waits, wrong))):
        times.runs[rank] += rank_runs
        times.waits[rank] += rank_waits
        times.wrong |= {(rank, source) for source in sources}
    times.rounds += 1


def gather(me: Rank, value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * me.world
    dist.all_gather_object(everyone, value, group=me.control)
    return everyone


def find_slowest(me: Rank, seconds: float) -> float:
    """Return the largest of all ranks' seconds, so that all ranks decide alike."""
    return float(max(gather(me, seconds)))


def find_slowest_iterations(times: Times) -> list[float]:
    """Return the seconds of the slowest rank, for each iteration."""
    return [max(seconds) for seconds in zip(*times.runs, strict=True)]


def _is_measured(plan: Work, times: Times, spent: float, budget_seconds: float) -> bool:
    iterations = len(times.runs[0])
    if iterations >= plan.max_iterations or spent >= budget_seconds:
        return True
    if plan.precision is None or iterations < plan.min_iterations:
        return False
    spread = spread_ratio(find_slowest_iterations(times))
    return spread is not None and spread <= plan.precision


def reports_for_host() -> bool:
    """Return whether this rank writes the common results for its host."""
    return os.environ.get("LOCAL_RANK") == "0"


def main(path: str) -> None:
    """Run the plan as the rank defined by the launcher's environment."""
    die_with_parent()
    plan = read(Path(path))
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = plan.host_name or socket.gethostname()
    journal = Journal(Path(path).parent, number)
    journal.write("start", rank=number, world=world, host=host, pid=os.getpid())
    if plan.distinct_hosts:
        os.environ["NCCL_HOSTID"] = f"topoflight-{number}"
    threading.Thread(target=journal.beat, daemon=True).start()
    me = Rank(rank=number, world=world, plan=plan, journal=journal, device="cpu")
    try:
        _join(me, host)
        _run_plan(me)
    except BaseException as error:  # noqa: BLE001 - reported in the journal and on stderr; then the process ends
        journal.write("error", why=f"{type(error).__name__}: {error}"[:2000])
        traceback.print_exc()
        _exit(1)
    journal.write("end")
    _exit(0)


def _exit(code: int) -> NoReturn:
    """Exit immediately: a thread inside torch's store would abort the process during interpreter finalization."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(me: Rank, host: str) -> None:
    """Join the job and exchange hosts and versions with all ranks."""
    import torch
    import torch.distributed as dist

    if me.plan.backend == "nccl":
        if not torch.cuda.device_count():
            raise RuntimeError(f"backend: nccl is not possible, torch {torch.__version__} sees no CUDA GPU; use gloo")
        local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        me.device = f"cuda:{local}"
    dist.init_process_group("gloo", timeout=timedelta(seconds=me.plan.limit_seconds))
    me.control = dist.group.WORLD
    me.group = dist.new_group(backend=me.plan.backend, timeout=timedelta(seconds=me.plan.limit_seconds))
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT_PREFIXES)}
    hello = {
        "rank": me.rank, "host": host, "versions": _versions(me), "environment": environment, "links": me.plan.links,
    }  # fmt: skip
    everyone = gather(me, hello)
    me.journal.write("joined", ranks=everyone if reports_for_host() else [])


def _run_plan(me: Rank) -> None:
    import torch.distributed as dist

    started = time.monotonic()
    singles: dict[Case, float] = {}  # seconds of one iteration per case that was run, equal on all ranks
    skipped: list[Case] = []
    for index, case in enumerate(me.plan.cases):
        left = me.plan.budget_seconds - find_slowest(me, time.monotonic() - started)
        if left <= 0 or (predict_seconds(case, singles) or 0.0) * MIN_ITERATIONS > left:
            skipped.append(case)
            continue
        singles[case] = run_case(me, case, left / (len(me.plan.cases) - index), left)
        if singles[case] * MIN_ITERATIONS > left:
            skipped.append(case)
    if skipped and reports_for_host():
        me.journal.write("skipped", cases=[[c.op, c.bytes] for c in skipped])
    dist.barrier(group=me.control)
    dist.destroy_process_group()


def predict_seconds(case: Case, singles: Mapping[Case, float]) -> float | None:
    """Predict the seconds of one iteration from the largest measured size; None if no measured size is large enough."""
    measured = [other for other in singles if other.bytes * PREDICTS_UP_TO >= case.bytes]
    alike = [other for other in measured if other.op == case.op] or measured
    if not alike:
        return None
    largest = max(alike, key=lambda other: other.bytes)
    return singles[largest] * case.bytes / largest.bytes


def _versions(me: Rank) -> dict[str, str]:
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if me.plan.backend == "nccl":
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return versions


if __name__ == "__main__":
    main(sys.argv[1])
