"""Benchmarks whose ranks are killed, stopped, fork or print without end; two at once; beside training; told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
from drill_ground import ROOT, SMALL_BENCH, Ground, eventually
from drill_register import drill
from drills_scan import gpu_environment

from agent.jobs.launch import RESUMABLE
from collectives.bench import lock

# Longer than any drill: what ends it is the fault. A result comes out whatever happens.
_LONG_RUN = """
import json, sys
from collectives.bench import run as bench
from collectives.bench import results
spec = bench.BenchSpec(
    sizes_bytes=(1024,), ops=("all_gather",), precision=None, min_iterations=1_000_000, max_iterations=1_000_000,
    budget_seconds=60, silence_seconds=float(sys.argv[2]), startup_seconds=240, backend="gloo", lock_path=sys.argv[1],
)
told = lambda event: print(event["event"], flush=True) if event["event"] == "joined" else None
print(json.dumps(results.result_to_json(bench.run(spec, told))), flush=True)
"""


def _long_run(ground: Ground, silence_seconds: float = 30.0, **environment: str) -> subprocess.Popen[str]:
    """A benchmark in a process of its own, back once its ranks have joined."""
    place = ground.folder / "lock" / lock.FILE_NAME
    process = subprocess.Popen(
        [sys.executable, "-c", _LONG_RUN, str(place), str(silence_seconds)], env=ground.environment(environment),
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if (first := process.stdout.readline().strip()) != "joined":
        _, err = process.communicate(timeout=240)
        raise RuntimeError(f"the ranks do not join: {first} {err[-2000:]}")
    return process


def _rank(ground: Ground, number: int) -> psutil.Process:
    """The process of one rank."""
    for process in ground.ours():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "collectives.bench.rank" in process.cmdline() and process.environ().get("RANK") == str(number):
                return process
    raise RuntimeError(f"no process of rank {number}")


def _result(process: subprocess.Popen[str], *words: str) -> list[str]:
    """What the partial result fails to say."""
    out, err = process.communicate(timeout=240)
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return [f"no result: {out[-300:]} {err[-500:]}"]
    told = "\n".join(found["problems"])
    lost = [f"the result does not say {word!r}: {told}" for word in words if word not in told]
    return ["the result claims to be complete", *lost] if found["complete"] else lost


@drill("Benchmark: a rank is killed", short=0, long=5, marks=("ranks",))
def bench_rank_killed(ground: Ground) -> list[str]:
    """The result names it and its signal."""
    process = _long_run(ground)
    time.sleep(ground.random.uniform(0, 1))
    _rank(ground, 1).kill()
    return [*_result(process, "rank 1 on", "killed by SIGKILL"), *ground.after()]


@drill("Benchmark: a rank is stopped (SIGSTOP)", short=0, long=5, marks=("ranks",))
def bench_rank_stopped(ground: Ground) -> list[str]:
    """The result names it; it is killed."""
    process = _long_run(ground, silence_seconds=4.0)
    time.sleep(ground.random.uniform(0, 1))
    _rank(ground, 1).suspend()
    return [*_result(process, "rank 1 on", "gave no answer, not even to SIGTERM"), *ground.after()]


_FORKS = """
import os, signal, time
if os.environ.get("RANK") == "1":
    for daemon in (False, True):
        if os.fork() == 0:
            if daemon:
                os.setsid()
                if os.fork():
                    os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
            os._exit(0)
"""

_PRINTS = """
import os, threading
def forever():
    line = b"NET/IB : complaint of a library\\n" * 32768
    while True:
        os.write(2, line)
if os.environ.get("RANK") == "0":
    threading.Thread(target=forever, daemon=True).start()
"""


def _at_start_of_ranks(ground: Ground, code: str) -> str:
    """PYTHONPATH with something that each Python process does when it starts."""
    place = ground.folder / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(code)
    return os.pathsep.join((str(place), str(ROOT)))


@drill("Benchmark: a rank forks, and its children ignore SIGTERM", marks=("ranks",), long=5)
def bench_rank_forks(ground: Ground) -> list[str]:
    """A plain child and one that became a daemon: both end with the run."""
    process = _long_run(ground, PYTHONPATH=_at_start_of_ranks(ground, _FORKS))
    seen = sum("collectives.bench.rank" in line.split() for line in ground.commands())
    process.terminate()
    lost = [] if seen >= 4 else [f"only {seen} processes: the drill did not fork"]
    return [*lost, *_result(process, "stopped by SIGTERM"), *ground.after()]


@drill("Benchmark: a rank fills its output", marks=("ranks",), long=5)
def bench_rank_fills_its_output(ground: Ground) -> list[str]:
    """Printed without end: the run is ended before the disk is full, with what was measured."""
    try:
        process = _long_run(ground, PYTHONPATH=_at_start_of_ranks(ground, _PRINTS))
    except RuntimeError as error:  # ended before the ranks joined: the result stands in the error's words
        return [*([] if "MiB" in str(error) else [str(error)]), *ground.after()]
    return [*_result(process, "the ranks printed more than"), *ground.after()]


@drill("Two benchmarks at once", short=0, long=5, marks=("ranks",))
def two_benchmarks(ground: Ground) -> list[str]:
    """The second is refused and told who runs; the first goes on."""
    first = ground.start(*SMALL_BENCH)
    place = ground.folder / "lock" / lock.FILE_NAME
    eventually(lambda: (place.exists() and place.read_text() == f"pid {first.pid}") or None)
    second = ground.run(*SMALL_BENCH)
    out, err = first.communicate(timeout=120)
    lost = [] if second.returncode == 1 and f"pid {first.pid} holds" in second.stderr else [f"second: {second}"]
    whole = first.returncode == 0 and json.loads(out)["complete"]
    return [*lost, *([] if whole else [f"first: {first.returncode} {err[-500:]}"]), *ground.after()]


@drill("Host busy with training (processes on its GPUs)", marks=("ranks",))
def busy_host(ground: Ground) -> list[str]:
    """The verb and the endpoint both refuse, by the pid, and start no rank."""
    gpus = gpu_environment(ground, "polaris-4xA100-nv4")
    profile = ground.folder / "profile"
    busy = "nvmlDeviceGetComputeRunningProcesses\tgpu0"
    kept = [line for line in profile.read_text().splitlines() if not line.startswith(f"{busy}\t")]
    profile.write_text("\n".join([*kept, f"{busy}\t1 4242 1073741824", ""]))
    done = ground.run(*SMALL_BENCH, **gpus)
    lost = [] if done.returncode == 1 and "pid 4242" in done.stderr else [f"bench: {done.returncode} {done.stderr}"]
    return [*lost, *ground.after()]


@drill("SIGTERM in the middle of a benchmark", short=0, long=5, marks=("ranks",))
def sigterm_of_a_benchmark(ground: Ground) -> list[str]:
    """A partial result that says so."""
    process = _long_run(ground)
    time.sleep(ground.random.uniform(0, 1))
    process.terminate()
    return [*_result(process, "stopped by SIGTERM"), *ground.after()]


@drill("SIGTERM in the middle of a launch", marks=("ranks",), long=5)
def sigterm_of_a_launch(ground: Ground) -> list[str]:
    """The job saves and ends; its record, and the exit code of the launch, say that it can be resumed."""
    out = ground.folder / "out"
    words = ("launch", "--ranks=2", f"--output={out}", "--set=max_steps=5000", "--set=dataset_rows=64",
             "--set=eval_strategy=no", "--set=logging_steps=1", "--set=save_steps=5000")  # fmt: skip
    process = ground.start(*words)
    metrics = out / "metrics.jsonl"
    begun = eventually(lambda: (metrics.exists() and metrics.read_text().count("\n") > 2) or None, seconds=240)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    if begun is None:
        return [f"no step: {err[-800:]}", *ground.after(out)]
    record = json.loads((out / "flight.json").read_text())
    lost = [] if record["status"] == "interrupted" else [f"the record says {record['status']}: {record['reason']}"]
    if not list(out.glob("checkpoint-*")):
        lost.append("no checkpoint was saved")
    if process.returncode != RESUMABLE or "stopped by SIGTERM: the job saved" not in err:
        lost.append(f"exit code {process.returncode}: {err[-300:]}")
    return [*lost, *ground.after(out)]
