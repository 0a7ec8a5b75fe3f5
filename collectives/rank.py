"""What each rank of a benchmark runs: `python -m torch.distributed.run ... -m collectives.rank PLAN`.

A gloo group carries the control traffic, so that it never mixes with what is measured; each measured group is
its own process group of the plan's backend. Every rank sees the same gathered times and so takes the same
decisions; nothing is broadcast.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from collectives import ops
from collectives.faults import Fault, lies, parse_faults, strike
from collectives.interval import spread_ratio
from collectives.plan import FAULT_VARIABLE, Case, Plan, read
from collectives.processes import die_with_parent
from collectives.pulse import BEAT_SECONDS, MISSED_BEATS, Journal, Pulse, block_sigterm

BATCH = 5  # iterations between two looks at the interval
ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "RCCL_", "FI_", "OFI_NCCL_")


@dataclass(slots=True, kw_only=True)
class Rank:
    """What one rank knows of itself."""

    rank: int
    world: int
    plan: Plan
    journal: Journal
    pulse: Pulse
    device: str
    faults: tuple[Fault, ...]
    control: Any = None  # process group of the control traffic
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    turn: int = 0  # rounds of fresh data so far


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds of one case so far: by rank, then by iteration."""

    runs: list[list[float]]
    waits: list[list[float]]
    wrong: set[tuple[int, int]] = field(default_factory=set)  # (seen by rank, given by rank or -1)
    rounds: int = 0  # verified


def main(path: str) -> None:
    """Run the plan as the rank that the launcher's environment names."""
    die_with_parent()
    block_sigterm()
    plan = read(Path(path))
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = plan.host or socket.gethostname()
    journal = Journal(Path(plan.directory), number)
    pulse = Pulse(journal, number, world, host, reports=os.environ.get("LOCAL_RANK") == "0")
    journal.write("start", rank=number, world=world, host=host, pid=os.getpid())
    import torch.distributed  # noqa: F401 - whole before the thread asks for it: imports of two threads trip

    pulse.start()
    faults = tuple(fault for fault in parse_faults(os.environ.get(FAULT_VARIABLE, "")) if fault.rank == number)
    me = Rank(rank=number, world=world, plan=plan, journal=journal, pulse=pulse, device="cpu", faults=faults)
    try:
        _join(me, host)
        _work(me)
    except BaseException as error:
        journal.write("error", why=f"{type(error).__name__}: {error}"[:2000], arrived=pulse.arrived, where=pulse.where)
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            # The rank that died may be on another host: stay long enough to see whose beat has stopped.
            time.sleep(2 * MISSED_BEATS * BEAT_SECONDS)
        raise
    journal.write("end")


def _join(me: Rank, host: str) -> None:
    """Join the job and tell every rank who is there and with which versions."""
    import torch
    import torch.distributed as dist

    if me.plan.backend == "nccl":
        local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        me.device = f"cuda:{local}"
    dist.init_process_group("gloo", timeout=timedelta(seconds=me.plan.limit_seconds))
    me.control = dist.group.WORLD
    hello = {"rank": me.rank, "host": host, "versions": _versions(me), "environment": _environment()}
    hello["shm_free_bytes"] = _shm_free_bytes()
    everyone: list[Any] = [None] * me.world
    dist.all_gather_object(everyone, hello, group=me.control)
    me.journal.write("joined", ranks=everyone if _speaks() else [])


def _work(me: Rank) -> None:
    import torch.distributed as dist

    started = time.monotonic()
    for index, case in enumerate(me.plan.cases):
        left = me.plan.budget_seconds - _slowest(me, time.monotonic() - started)
        if left <= 0:
            if _speaks():
                me.journal.write("skipped", cases=[[c.op, c.bytes] for c in me.plan.cases[index:]])
            break
        run_case(me, case, left / (len(me.plan.cases) - index))
    dist.barrier(group=me.control)
    dist.destroy_process_group()


def run_case(me: Rank, case: Case, budget_seconds: float) -> dict[tuple[int, ...], Times]:
    """Measure one case in all its groups at once; every rank gets the times of all ranks."""
    op = ops.OPS[case.op]
    groups = case.groups or (tuple(range(me.world)),)
    for ranks in groups:  # torch asks that every rank creates every group, in the same order
        _group(me, ranks)
    mine = next((ranks for ranks in groups if me.rank in ranks), None)
    side = ops.allocate(op, case.bytes, me.groups[mine], mine, me.rank, me.device) if mine else None
    times = Times(runs=[[] for _ in range(me.world)], waits=[[] for _ in range(me.world)])
    name = f"{case.op} of {case.bytes} bytes"
    started = time.monotonic()
    me.journal.write("case", op=case.op, bytes=case.bytes, where=name)
    _iterate(me, op, side, me.plan.warmup, name)
    while True:
        wrong = _verified_round(me, op, side, name)
        runs, waits = _iterate(me, op, side, BATCH, name)
        _share(me, times, runs, waits, wrong)
        _name_liars(me, op, side, times)
        spent = _slowest(me, time.monotonic() - started)
        me.journal.write("progress", op=case.op, bytes=case.bytes, iterations=len(times.runs[0]), seconds=runs[-1:])
        if _enough(me.plan, times, groups, spent, budget_seconds):
            break
    if _speaks():
        for ranks in groups:
            _write_measured(me, op, case, ranks, times)
    return dict.fromkeys(groups, times)


def _group(me: Rank, ranks: tuple[int, ...]) -> Any:
    import torch.distributed as dist

    if ranks not in me.groups:
        limit = timedelta(seconds=me.plan.limit_seconds)
        me.groups[ranks] = dist.new_group(list(ranks), backend=me.plan.backend, timeout=limit)
    return me.groups[ranks]


def _iterate(me: Rank, op: ops.Op, side: ops.Side | None, count: int, name: str) -> tuple[list[float], list[float]]:
    """Run the collective `count` times; returns seconds of the run, and seconds waited for the last to arrive."""
    runs, waits = [], []
    for _ in range(count):
        _arrive(me, name)
        if side is None:
            continue
        came = _mark(me)
        _meet(me, side)
        began = _mark(me)
        op.run(side)
        ended = _mark(me)
        waits.append(_between(me, came, began))
        runs.append(_between(me, began, ended))
    return runs or [0.0] * count, waits or [0.0] * count


def _arrive(me: Rank, name: str) -> None:
    """Come to the next meeting, unless a fault keeps this rank from it."""
    strike(me.faults, me.pulse.arrived)
    me.pulse.arrive(name)


def _meet(me: Rank, side: ops.Side) -> None:
    """Wait for the group: an all-reduce of one element, which on a GPU stays in the stream."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=me.device), group=side.group)


def _mark(me: Rank) -> Any:
    if me.device == "cpu":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(me: Rank, first: Any, second: Any) -> float:
    if me.device == "cpu":
        return float(second - first)
    second.synchronize()
    return float(first.elapsed_time(second)) / 1000


def _verified_round(me: Rank, op: ops.Op, side: ops.Side | None, name: str) -> tuple[int, ...]:
    """Run once on fresh data and compare every element; returns the global ranks whose data is wrong."""
    me.turn += 1
    _arrive(me, f"verified round of {name}")
    if side is None:
        return ()
    _fill(me, op, side)
    op.run(side)
    return tuple(side.ranks[place] if place >= 0 else ops.UNKNOWN_SOURCE for place in op.wrong(side, me.turn))


def _fill(me: Rank, op: ops.Op, side: ops.Side) -> None:
    ops.fill(op, side, me.turn)
    if lies(me.faults) and op.gives(side):
        side.given[side.given.numel() // 2] += 1


def _share(me: Rank, times: Times, runs: list[float], waits: list[float], wrong: tuple[int, ...]) -> None:
    """Give every rank the times and the verdicts of all."""
    import torch
    import torch.distributed as dist

    mine = torch.tensor([float(len(wrong)), *runs, *waits], dtype=torch.float64)
    rows = [torch.zeros_like(mine) for _ in range(me.world)]
    dist.all_gather(rows, mine, group=me.control)
    for rank, row in enumerate(rows):
        times.runs[rank] += row[1 : 1 + len(runs)].tolist()
        times.waits[rank] += row[1 + len(runs) :].tolist()
    times.rounds += 1
    if any(row[0] > 0 for row in rows):
        everyone: list[Any] = [None] * me.world
        dist.all_gather_object(everyone, wrong, group=me.control)
        times.wrong |= {(seer, source) for seer, sources in enumerate(everyone) for source in sources}


def _name_liars(me: Rank, op: ops.Op, side: ops.Side | None, times: Times) -> None:
    """Find whose part made a sum wrong: each rank in turn shows what it gives."""
    import torch
    import torch.distributed as dist

    unnamed = {pair for pair in times.wrong if pair[1] == ops.UNKNOWN_SOURCE}
    if not unnamed or any(source >= 0 for _, source in times.wrong):
        return
    me.turn += 1
    found: list[int] = []
    if side is not None:
        _fill(me, op, side)
        for place, source in enumerate(side.ranks):
            shown = side.given.clone() if place == side.me else torch.zeros_like(side.given)
            dist.broadcast(shown, src=source, group=side.group)
            found += [] if ops.matches(shown, (source,), me.turn) else [source]
    everyone: list[Any] = [None] * me.world
    dist.all_gather_object(everyone, found, group=me.control)
    times.wrong |= {(seer, source) for seer, sources in enumerate(everyone) for source in sources}


def _slowest(me: Rank, seconds: float) -> float:
    """Find the largest of all ranks' seconds, so that all ranks decide alike."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=me.control)
    return float(value.item())


def slowest_of_iteration(times: Times, ranks: tuple[int, ...]) -> list[float]:
    """Give the seconds of the slowest rank of each iteration."""
    return [max(seconds) for seconds in zip(*(times.runs[rank] for rank in ranks), strict=True)]


def _enough(plan: Plan, times: Times, groups: tuple[tuple[int, ...], ...], spent: float, budget_seconds: float) -> bool:
    iterations = len(times.runs[0])
    if iterations >= plan.max_iterations or spent >= budget_seconds:
        return True
    if plan.precision is None or iterations < plan.min_iterations:
        return False
    spreads = [spread_ratio(slowest_of_iteration(times, ranks)) for ranks in groups]
    return all(spread is not None and spread <= plan.precision for spread in spreads)


def _write_measured(me: Rank, op: ops.Op, case: Case, ranks: tuple[int, ...], times: Times) -> None:
    members = set(ranks)
    me.journal.write(
        "measured",
        op=op.name,
        bytes=ops.moved_bytes(op, case.bytes, len(ranks)),
        ranks=ranks,
        iteration_seconds=slowest_of_iteration(times, ranks),
        rank_median_seconds=[median(times.runs[rank]) for rank in ranks],
        wait_seconds=[times.waits[rank] for rank in ranks],
        rounds=times.rounds,
        wrong=sorted(pair for pair in times.wrong if pair[0] in members),
    )


def _speaks() -> bool:
    """One rank of each host writes down what all know."""
    return os.environ.get("LOCAL_RANK") == "0"


def _versions(me: Rank) -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if me.plan.backend == "nccl":
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    if any(fault.kind == "version" for fault in me.faults):
        found["torch"] = "0.0.0"
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT_PREFIXES)}


def _shm_free_bytes() -> int | None:
    """Free bytes of /dev/shm, which NCCL's shared-memory transport lives in; None where there is none."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - asked about, not written to
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


if __name__ == "__main__":
    main(sys.argv[1])
