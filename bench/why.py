"""Faults made for real on gloo ranks, and what `topoflight why` says: python bench/why.py [--times N] [FAULT ...]

Each fault starts its own ranks (tests/why/ranks.py); the verdict is asked for again and again, as `--watch` asks, until
it names a cause or the time is over. A case without a fault passes only where no cause was named at any time. With
--page the table is written to docs/measurements/why.md.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from agent.jobs.script import monitored  # noqa: E402
from agent.why import diagnosis as why  # noqa: E402
from agent.why import ranks  # noqa: E402
from collectives.bench.processes import Tree  # noqa: E402
from contracts.tables import read_table  # noqa: E402
from planner.why import Verdict  # noqa: E402

PAGE = ROOT / "docs" / "measurements" / "why.md"
RANKS = ROOT / "tests" / "why" / "ranks.py"
TRAINING = ROOT / "tests" / "why" / "training.py"
CULPRIT = 2
ASK_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is made, and the answer that is right."""

    name: str  # as tests/why/ranks.py knows it
    words: str
    states: tuple[str, ...]  # any of these
    code: str = ""  # of the first cause; empty for a case without a fault
    ranks: tuple[int, ...] = (CULPRIT,)
    also: tuple[tuple[int, ...], ...] = ()  # other answers that are right: nobody named, where no dump is left
    nodes: tuple[str, ...] = ()  # that must be named, for a fault of the network
    limit: float = 60.0  # seconds until the verdict must be there; without a fault, how long it is watched
    act: str = ""  # done from outside: a signal's name, "cgroup", "cut", "shape"
    calls: int = 20  # that each rank has made before it is looked at
    hosts: int = 0  # namespaces; 0: one host, four ranks
    kind: str = ""  # "ddp", "fsdp": tests/why/training.py with the monitor's default settings; else tests/why/ranks.py
    env: dict[str, str] = field(default_factory=dict)


def _fault(row: dict[str, Any]) -> Fault:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Fault(**values | {"also": tuple(map(tuple, row.get("also", ())))})


FAULTS = tuple(map(_fault, read_table(__file__, "why_faults.toml")["fault"]))


@dataclass(slots=True)
class Result:
    """One run of one fault."""

    right: bool
    seconds: float  # from the fault, or the run's first step where it begins with it, to the verdict
    verdict: Verdict


def torchrun(fault: Fault, folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
    """Four ranks on this host, which end with the stack, and with this process."""
    log = stack.enter_context((folder / "log").open("wb"))
    port = str(random.randint(20000, 55000))
    script = [str(TRAINING), fault.kind, fault.name.partition("-")[2]] if fault.kind else [
        str(RANKS), str(folder), fault.name]  # fmt: skip
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", port,
             *script, str(CULPRIT)]  # fmt: skip
    if fault.kind:
        environment = monitored({"WHY_AT": "500", **environment, "PYTHONPATH": ""}, folder)
    stack.callback(Tree(words, environment, log).end, 0.0)


@contextmanager
def started(fault: Fault, folder: Path) -> Iterator[Any]:
    """The ranks, and how a fault is made from outside; all of it is gone at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **fault.env}
    with ExitStack() as stack:
        rig = None
        if fault.hosts:
            from rigs import netns

            rig = stack.enter_context(netns.hosts(fault.hosts, default_rate="200mbit"))
            for host in range(fault.hosts):
                env = {**environment, "RANK": str(host), "WORLD_SIZE": str(fault.hosts), "LOCAL_RANK": "0",
                       "MASTER_ADDR": rig.address(0), "MASTER_PORT": "29512", "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
                log = (folder / f"log{host}").open("wb")
                job = rig.popen(host, [sys.executable, str(RANKS), str(folder), fault.name, str(CULPRIT)], env,
                                stdout=log, stderr=log, start_new_session=True)  # fmt: skip
                stack.callback(_end, job)
        else:
            torchrun(fault, folder, environment, stack)
        yield rig


def _end(job: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def one(fault: Fault) -> Result:
    """Make it once, and ask until a cause is named."""
    with tempfile.TemporaryDirectory(prefix="why-") as name:
        folder = Path(name)
        with started(fault, folder) as rig:
            ready = time.monotonic() + 150
            while (
                len(states := ranks.states_of(folder / "ranks")[0]) < 4
                or min(state.calls for state in states.values()) < fault.calls
            ):
                if time.monotonic() > ready:
                    raise TimeoutError("the ranks did not begin")
                if any(state.ended for state in states.values()):
                    break
                time.sleep(0.5)
            if fault.act:
                time.sleep(2)
                act(fault, folder, rig)
            began = time.monotonic()
            result = _ask(fault, folder, began)
            _give_back(folder)
            if (happened := folder / "happened").exists():
                result.seconds = max(0.0, time.time() - happened.stat().st_mtime)
        shutil.rmtree(folder / "ranks", ignore_errors=True)
        return result


def _ask(fault: Fault, folder: Path, began: float) -> Result:
    verdict, requested_at = Verdict(state="fine", line=""), 0.0
    while (now := time.monotonic()) - began < fault.limit + float(fault.env.get("WHY_TIMEOUT", 0)) * bool(fault.code):
        if now - requested_at > ranks.ASK_SECONDS:
            ranks.request_dumps(folder)
            requested_at = now
        time.sleep(ASK_SECONDS)
        log = (str(folder / "log"),) if not fault.hosts else ()
        verdict = why.answer(why.WhySources(run=folder, logs=log))
        if verdict.state == "failed":
            time.sleep(ranks.SETTLED_SECONDS)
            verdict = why.answer(why.WhySources(run=folder, logs=log))
        if verdict.state != "fine":
            break
    right = verdict.state in fault.states and verdict.ranks in (fault.ranks, *fault.also)
    if fault.code:
        right = right and verdict.causes[0].code.startswith(tuple(fault.code.split("|")))
    if fault.nodes:
        right = right and set(fault.nodes) <= set(verdict.nodes)
    return Result(right, time.monotonic() - began, verdict)


def act(fault: Fault, folder: Path, rig: Any) -> None:
    """What is done to the culprit from outside."""
    state = ranks.states_of(folder / "ranks")[0][CULPRIT]
    if fault.act.startswith("SIG"):
        os.kill(state.pid or 0, getattr(signal, fault.act))
    elif fault.act == "cgroup":
        _throttle(state.pid or 0, folder)
    elif fault.act == "cut":
        rig.cut(CULPRIT, "eth0")
    elif fault.act == "shape":
        rig.shape(CULPRIT, "eth0", "2mbit")
    elif fault.act == "pair":
        for a, b in ((1, 2), (2, 1)):
            rig.run(a, ["ip", "route", "add", "blackhole", f"{rig.address(b)}/32"])


CGROUP = Path("/sys/fs/cgroup")


def _throttle(pid: int, folder: Path) -> None:
    """A tenth of a CPU (cgroup v2, cpu.max; v1, cfs_quota)."""
    v1 = CGROUP / "cpu"
    group = (v1 if v1.is_dir() else CGROUP) / f"why-{folder.name}"
    group.mkdir()
    if v1.is_dir():
        (group / "cpu.cfs_quota_us").write_text("10000")
    else:
        (CGROUP / "cgroup.subtree_control").write_text("+cpu")
        (group / "cpu.max").write_text("10000 100000")
    (group / "cgroup.procs").write_text(str(pid))


def _give_back(folder: Path) -> None:
    for parent in (CGROUP / "cpu", CGROUP):
        if (group := parent / f"why-{folder.name}").is_dir():
            for pid in (group / "cgroup.procs").read_text().split():
                (parent / "cgroup.procs").write_text(pid)
            group.rmdir()


def main() -> int:
    """Run them, print a line each, and write the page where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAULT")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    rows: dict[str, list[Result]] = {fault.name: [] for fault in chosen}
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {pool.submit(one, fault): fault for _ in range(options.times) for fault in chosen}
        for job in as_completed(jobs):
            fault = jobs[job]
            if job.exception() is not None:  # it was not made: the ranks did not meet, say
                print(f"----- {fault.name:20} not made: {job.exception()!r}"[:200], flush=True)
                continue
            result = job.result()
            rows[fault.name].append(result)
            if options.page:  # as far as it has come
                PAGE.write_text(page([one for one in chosen if rows[one.name]], rows), encoding="utf-8")
            mark = "ok   " if result.right else "WRONG"
            print(f"{mark} {fault.name:20} {result.seconds:5.1f} s  {result.verdict.line[:150]}", flush=True)
            if not result.right:
                for cause in result.verdict.causes[:3]:
                    print(f"        {cause.code} {cause.ranks} {cause.nodes} {cause.evidence[:4]}", flush=True)
    return int(any(not result.right for row in rows.values() for result in row))


def page(chosen: list[Fault], rows: dict[str, list[Result]]) -> str:
    """The table."""
    import torch

    runs = [result for row in rows.values() for result in row]
    faults = [f for f in chosen if f.code]
    lines = [
        "# Faults and verdicts", "",
        f"`python bench/why.py --page`: {len(faults)} faults of one of four gloo ranks, or of the network between four "
        f"namespaces, and {len(chosen) - len(faults)} cases without a fault, in which no cause may be named; "
        f"{sum(r.right for r in runs)} of {len(runs)} verdicts right. {time.strftime('%Y-%m-%d')}, {os.cpu_count()} "
        f"shared virtual cores, no GPU, torch {torch.__version__}. Right, and median seconds to the verdict:", "",
    ]  # fmt: skip
    for fault in chosen:
        row = rows[fault.name]
        seconds = f", {statistics.median(r.seconds for r in row):.0f}" if fault.code else ""
        lines.append(f"- {fault.words}: {sum(r.right for r in row)} of {len(row)}{seconds}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
