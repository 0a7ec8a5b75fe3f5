"""Faults made for real on gloo ranks, and what `topoflight why` says: python bench/why.py [--times N] [FAULT ...]

Each fault starts its own ranks (tests/why/training.py). The ranks are diagnosed again and again, as by `--watch`, until
the verdict names a cause or the time is over. A case without a fault passes only where no cause was named at any time.
At the end the table of all runs is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from agent.jobs.script import add_monitor  # noqa: E402
from agent.why import diagnosis as why, ranks  # noqa: E402
from collectives.bench.processes import Tree  # noqa: E402
from contracts.tables import read_table  # noqa: E402
from planner.why import Verdict, limits  # noqa: E402

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"  # Debian's package
TRAINING = ROOT / "tests" / "why" / "training.py"
CULPRIT = 2
ASK_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is made, and the answer that is right."""

    name: str  # KIND-FAULT[.VARIANT], as tests/why/training.py knows both
    words: str
    states: tuple[str, ...]  # any of these
    code: str = ""  # of the first cause; empty for a case without a fault
    ranks: tuple[int, ...] = (CULPRIT,)
    also: tuple[tuple[int, ...], ...] = ()  # other answers that are right: nobody named, where no dump is left
    nodes: tuple[str, ...] = ()  # that must be named, for a fault of the network
    limit: float = 60.0  # seconds until the verdict must be there; without a fault, how long it is watched
    act: str = ""  # done from outside: a signal's name, "cut", "pair", "shape"
    calls: int = 20  # that each rank has made before it is looked at
    hosts: int = 0  # namespaces; 0: one host, four ranks
    world: int = 4  # ranks on one host
    clocks: tuple[str, ...] = ()  # by host: how much its clock is ahead, as faketime takes it
    rates: tuple[str, ...] = ()  # by host: what its port sends from the start of the run on
    patience: float = limits.BUSY_SECONDS  # --limit
    env: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The script of each rank, with its arguments: the kind of its loop, and what happens in it."""
        kind, _, variant = self.name.partition("-")
        return [str(TRAINING), kind, variant.partition(".")[0], str(self.culprit)]

    @property
    def culprit(self) -> int:
        """The rank that it happens on."""
        return self.ranks[0] if self.ranks else 1 if self.world == 2 else CULPRIT


def _fault(row: dict[str, Any]) -> Fault:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Fault(**values | {"also": tuple(map(tuple, row.get("also", ())))})


_TABLE = read_table(__file__, "why_faults.toml")
_HARMLESS = {"states": ["fine"], "ranks": [], "limit": 35.0}
FAULTS = tuple(map(_fault, (*_TABLE["faults"], *(_HARMLESS | row for row in _TABLE["harmless"]))))


@dataclass(slots=True)
class Result:
    """One run of one fault."""

    right: bool
    seconds: float  # from the fault, or the run's first step where it begins with it, to the verdict
    verdict: Verdict


def torchrun(fault: Fault, folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
    """Ranks on this host, which end with the stack, and with this process."""
    log = stack.enter_context((folder / "log").open("wb"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(fault.world), "--master-port",
             port, *fault.command]  # fmt: skip
    stack.callback(Tree(command, environment, log).end, 0.0)


def on_hosts(fault: Fault, folder: Path, environment: dict[str, str], stack: ExitStack) -> Any:
    """A rank in each namespace. Returns the rig.

    Each rank runs in its own PID namespace, so that no rank sees the others' processes, as on real hosts.
    """
    from rigs import netns

    rig = stack.enter_context(netns.hosts(fault.hosts, default_rate="200mbit"))
    for host, rate in enumerate(fault.rates):
        rig.shape(host, "eth0", rate)
    for host in range(fault.hosts):
        env = {**environment, "RANK": str(host), "WORLD_SIZE": str(fault.hosts), "LOCAL_RANK": "0",
               "MASTER_ADDR": rig.address(0), "MASTER_PORT": "29512", "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
        if fault.clocks and fault.clocks[host]:
            env |= {"LD_PRELOAD": FAKETIME, "FAKETIME": fault.clocks[host], "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        log = stack.enter_context((folder / f"log{host}").open("wb"))
        # the first process of a namespace ignores its own signals, so the rank is the second
        namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@" & wait $!', "sh"]
        command = [*namespace, sys.executable, *fault.command]
        job = rig.popen(host, command, env, stdout=log, stderr=log, start_new_session=True)
        stack.callback(_end, job)
    return rig


@contextmanager
def started(fault: Fault, folder: Path) -> Iterator[Any]:
    """The ranks, and how a fault is made from outside; all of it is gone at the end."""
    variables = {"WHY_AT": "300", "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **fault.env}
    environment = add_monitor({**os.environ, **variables}, folder)
    with ExitStack() as stack:
        start = on_hosts if fault.hosts else torchrun
        yield start(fault, folder, environment, stack)


def _end(job: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def run_fault(fault: Fault) -> Result:
    """Make it once, and ask until a cause is named."""
    with tempfile.TemporaryDirectory(prefix="why-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with started(fault, folder) as rig:
            _wait_for_ranks(fault, folder)
            if fault.act:
                time.sleep(2)
                make_fault(fault, folder, rig)
            result = _diagnose(fault, folder)
            if (happened := folder / "happened").exists():
                result.seconds = max(0.0, time.time() - happened.stat().st_mtime)
        return result


def _wait_for_ranks(fault: Fault, folder: Path) -> None:
    """Wait until each rank has made its calls. Raises TimeoutError."""
    until = time.monotonic() + 150
    while fault.calls >= 0:
        states = ranks.read_run(folder, ranks.Heartbeats())[0].states
        begun = len(states) >= (fault.hosts or fault.world)
        if begun and min(state.calls for state in states.values()) >= fault.calls:
            return
        if any(state.ended for state in states.values()) or (folder / "happened").exists():
            return
        if time.monotonic() > until:
            said = (folder / "log").read_bytes()[-2000:].decode(errors="replace") if not fault.hosts else ""
            raise TimeoutError(f"the ranks did not begin: {said}")
        time.sleep(0.5)


def _diagnose(fault: Fault, folder: Path) -> Result:
    began = time.monotonic()
    verdict, requested_at, limit = Verdict(state="fine", line=""), 0.0, fault.limit
    limit += float(fault.env.get("WHY_TIMEOUT", 0)) * bool(fault.code)
    while (now := time.monotonic()) - began < limit:
        if fault.code and not fault.act and not (folder / "happened").exists():
            limit = min(limit + ASK_SECONDS, fault.limit + 120)  # the steps before the fault take long on a busy host
        if now - requested_at > ranks.ASK_SECONDS:
            ranks.request_dumps(folder)
            requested_at = now
        time.sleep(ASK_SECONDS)
        logs = tuple(map(str, sorted(folder.glob("log*"))))
        sources = why.WhySources(run=folder, logs=logs, limit=fault.patience)
        verdict = why.answer(sources)
        if verdict.state == "failed":
            time.sleep(ranks.SETTLED_SECONDS)
            verdict = why.answer(sources)
        if verdict.state not in ("fine", "unknown"):
            break
    expected = fault.ranks if fault.code else ()  # nobody is named where nothing is wrong
    right = verdict.state in fault.states and verdict.ranks in (expected, *fault.also)
    if fault.code and right:
        right = verdict.causes[0].code.startswith(tuple(fault.code.split("|")))
    right = right and set(fault.nodes) <= set(verdict.nodes)
    return Result(right, time.monotonic() - began, verdict)


def make_fault(fault: Fault, folder: Path, rig: Any) -> None:
    """What is done to the culprit from outside."""
    state = ranks.read_run(folder, ranks.Heartbeats())[0].states[CULPRIT]
    if fault.act.startswith("SIG"):
        os.kill(state.pid or 0, getattr(signal, fault.act))
    elif fault.act == "cut":
        rig.cut(CULPRIT, "eth0")
    elif fault.act == "shape":
        rig.shape(CULPRIT, "eth0", "2mbit")
    elif fault.act == "pair":
        for a, b in ((1, 2), (2, 1)):
            rig.run(a, ["ip", "route", "add", "blackhole", f"{rig.address(b)}/32"])


def main() -> int:
    """Run them, print a line each, and at the end the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAULT")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    results: dict[str, list[Result]] = defaultdict(list)
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {pool.submit(run_fault, fault): fault for _ in range(options.times) for fault in faults}
        for job in as_completed(jobs):
            fault = jobs[job]
            if job.exception() is not None:  # it was not made: the ranks did not meet, say
                print(f"----- {fault.name:20} not made: {job.exception()!r}"[:200], flush=True)
                continue
            result = job.result()
            results[fault.name].append(result)
            mark = "ok   " if result.right else "WRONG"
            print(f"{mark} {fault.name:20} {result.seconds:5.1f} s  {result.verdict.line[:150]}", flush=True)
            for cause in result.verdict.causes[:3] if not result.right else ():
                print(f"        {cause.code} {cause.ranks} {cause.nodes} {cause.evidence[:4]}", flush=True)
    print("| case | right | median seconds to the verdict |\n|---|---|---:|")
    for fault in sorted(faults, key=lambda fault: not fault.code):  # the harmless ones last
        if runs := results[fault.name]:
            seconds = f"{statistics.median(run.seconds for run in runs):.0f}" if fault.code else ""
            title = f"{fault.name.partition('-')[0].upper()}: {fault.words} (`{fault.name}`)"
            print(f"| {title} | {sum(run.right for run in runs)} of {len(runs)} | {seconds} |")
    return int(not all(run.right for runs in results.values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
