"""Starts the ranks with torchrun, and sees to it that they end.

One host: `torchrun --standalone`. Several hosts: torchrun with a rendezvous, started on each of them (a
Kubernetes Indexed Job does that). This process never imports torch.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from collectives.bench import plan as plans
from collectives.bench import processes
from collectives.bench.plan import Plan
from collectives.bench.watch import Event, Outcome, Watch, Where

POLL_SECONDS = 0.05
TERM_SECONDS = 3.0  # from SIGTERM to SIGKILL
LOG_LIMIT_BYTES = 64 << 20  # torch with every debug variable prints some 100 KiB a rank before it works


def command(where: Where, plan_path: Path) -> list[str]:
    """Build the torchrun command line."""
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={where.ranks_per_host}"]
    if where.hosts == 1:
        argv += ["--standalone"]
    else:
        assert where.rendezvous is not None  # noqa: S101 - BenchSpec has checked it
        argv += [f"--nnodes={where.hosts}"]
        if where.node_rank is None:
            argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint={where.rendezvous}", "--rdzv-id=topoflight"]
            argv += [f"--rdzv-conf=join_timeout={math.ceil(where.startup_seconds)}"]
        else:
            address, _, port = where.rendezvous.rpartition(":")
            # torchrun's own patience with hosts that come later, by default less than ours may be
            argv += [f"--rdzv-conf=timeout={math.ceil(where.startup_seconds)}"]
            argv += [f"--node-rank={where.node_rank}", f"--master-addr={address.strip('[]')}", f"--master-port={port}"]
    return [*argv, "-m", "collectives.bench.rank", str(plan_path)]


def fly(
    plan: Plan,
    where: Where,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    stop: threading.Event | None = None,
) -> Outcome:
    """Run the plan to its end, whichever end it is; all processes of the run are gone afterwards."""
    directory = Path(plan.directory)
    plans.write(plan, directory / "plan.json")
    mark = uuid.uuid4().hex
    # Temporary files of torchrun, which leaves them when it is killed, go with the run's folder; the 1 is what torchrun
    # would set itself, with a banner that is no news of the run.
    inherited = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "TMPDIR": plan.directory,
        **environment,
        plans.RUN_VARIABLE: mark,
    }
    inherited["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), *filter(None, [inherited.get("PYTHONPATH")])]
    )
    watch = Watch(plan, where, on_event)
    with _stop_signals(stop or threading.Event()) as stopped, (directory / "launcher.log").open("wb") as log:
        launcher = processes.start(command(where, directory / "plan.json"), inherited, log)
        try:
            verdict = None
            while launcher.poll() is None and verdict is None:
                verdict = watch.look(stopped) or _flood(log.fileno())
                time.sleep(POLL_SECONDS)
        finally:
            watch.read()
            watch.ending()
            before = {state.rank: state.last for state in watch.states.values()}
            watch.outcome.problems += _end(mark)
            launcher.wait()
    watch.read()
    watch.outcome.problems += watch.explain(verdict, launcher.returncode, before, _tail(directory / "launcher.log"))
    return watch.outcome


def _end(mark: str) -> list[str]:
    """End every process of the run; says which ones even SIGKILL does not end."""
    for _ in range(3):  # the launcher may start a rank while its processes are listed
        left = processes.marked(plans.RUN_VARIABLE, mark)
        if not left:
            return []
        processes.end_all(left, TERM_SECONDS)
    left = processes.marked(plans.RUN_VARIABLE, mark)
    return [f"could not be killed, it hangs in the kernel: pid {process.pid}" for process in left]


def _flood(descriptor: int) -> str | None:
    """Why to stop: a library that fails in a loop would fill the host's disk with its complaint."""
    size = os.fstat(descriptor).st_size
    return f"the ranks printed more than {LOG_LIMIT_BYTES >> 20} MiB" if size > LOG_LIMIT_BYTES else None


def _tail(path: Path, size: int = 16_384) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size).decode(errors="replace").strip()


@contextmanager
def _stop_signals(stop: threading.Event) -> Iterator[Callable[[], str | None]]:
    """Turn SIGTERM and SIGINT into a word to stop; only a main thread may ask for signals."""
    got: list[str] = []

    def stopped() -> str | None:
        return got[0] if got else ("its caller" if stop.is_set() else None)

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    former = {n: signal.signal(n, lambda number, _frame: got.append(signal.Signals(number).name)) for n in numbers}
    try:
        yield stopped
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
