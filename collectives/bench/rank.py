"""What each rank of a benchmark runs: `python -m torch.distributed.run ... -m collectives.bench.rank PLAN`."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from collectives.bench import measure
from collectives.bench.measure import Rank
from collectives.bench.plan import Case, read
from collectives.bench.processes import die_with_parent
from collectives.bench.pulse import BEAT_SECONDS, MISSED_BEATS, Journal, Pulse, block_sigterm, carried, store_port

PREDICTS_UP_TO = 64  # times its own size: the time of a smaller size is latency more than bandwidth
ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "RCCL_", "FI_", "OFI_NCCL_")


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
    if plan.distinct_hosts:
        os.environ["NCCL_HOSTID"] = f"topoflight-{number}"
    import torch.distributed  # noqa: F401 - whole before the thread asks for it: imports of two threads trip

    pulse.start()
    me = Rank(rank=number, world=world, plan=plan, journal=journal, pulse=pulse, device="cpu")
    try:
        _join(me, host)
        _work(me)
    except BaseException as error:  # noqa: BLE001 - told in the journal and on stderr, and ends the process
        journal.write("error", why=f"{type(error).__name__}: {error}"[:2000], arrived=pulse.arrived, where=pulse.where)
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            # The rank that died may be on another host: stay long enough to see whose beat has stopped.
            time.sleep(2 * MISSED_BEATS * BEAT_SECONDS)
        traceback.print_exc()
        _exit(1)
    journal.write("end")
    _exit(0)


def _exit(code: int) -> NoReturn:
    """Leave at once: a thread that is inside torch's store while the interpreter is torn down aborts the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(me: Rank, host: str) -> None:
    """Join the job and tell every rank who is there and with which versions."""
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
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)  # memory this rank may lock, which RDMA needs
    hello = {
        "rank": me.rank, "host": host, "versions": _versions(me), "environment": environment, "links": me.plan.links,
        "shm_free_bytes": _shm_free_bytes(), "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "rdma": sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))[:64],
    }  # fmt: skip
    everyone = measure.gather(me, hello)
    me.journal.write("joined", ranks=everyone if measure.speaks() else [])


def _work(me: Rank) -> None:
    import torch.distributed as dist

    started = time.monotonic()
    singles: dict[Case, float] = {}  # seconds of one iteration of what was run, alike on every rank
    skipped: list[Case] = []
    for index, case in enumerate(me.plan.cases):
        left = me.plan.budget_seconds - measure.slowest(me, time.monotonic() - started)
        if left <= 0 or (predict_seconds(case, singles) or 0.0) * measure.LEAST_ITERATIONS > left:
            skipped.append(case)
            continue
        share = left / (len(me.plan.cases) - index)
        singles[case] = measure.run_case(me, case, share, left)
        if singles[case] * measure.LEAST_ITERATIONS > left:
            skipped.append(case)
    if skipped and measure.speaks():
        me.journal.write("skipped", cases=[[c.op, c.bytes] for c in skipped])
    everyone = measure.gather(me, carried(me.rank, store_port()))
    if measure.speaks():
        me.journal.write("carried", rows=[asdict(row) for rows in everyone for row in rows])
    dist.barrier(group=me.control)
    dist.destroy_process_group()


def predict_seconds(case: Case, singles: Mapping[Case, float]) -> float | None:
    """Seconds of one iteration, from the largest size that was run; None if no run size is large enough."""
    known = [other for other in singles if other.bytes * PREDICTS_UP_TO >= case.bytes]
    alike = [other for other in known if other.op == case.op] or known
    if not alike:
        return None
    largest = max(alike, key=lambda other: other.bytes)
    return singles[largest] * case.bytes / largest.bytes


def _versions(me: Rank) -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if me.plan.backend == "nccl":
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def _shm_free_bytes() -> int | None:
    """Free bytes of /dev/shm, which NCCL's shared-memory transport lives in; None where there is none."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - asked about, not written to
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


if __name__ == "__main__":
    main(sys.argv[1])
