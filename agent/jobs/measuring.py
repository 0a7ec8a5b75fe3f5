"""Starts the measurements of this host in a process of their own, and hands on what they found.

The child is agent.jobs.benchmark. It holds the host's lock, starts the ranks and reads NCCL's log, so that a verb which
only needs the result loads none of that. It reads one JSON document from standard input and answers in JSON lines:
{"note": words} while it measures, and at the end one of {"answer": value}, {"busy": words} and {"error": words}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agent.base import units
from agent.base.output import Progress
from agent.base.result_store import keep_bench
from agent.checks.judged import JUDGED_OPS
from collectives.bench.processes import BusyError
from collectives.bench.results import BenchResult, result_from_json
from planner.forecast.calibration import Calibration, parse_calibration
from planner.forecast.models import model_named
from probes import wire
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.paths import Due

BENCH_SECONDS, QUICK_SECONDS = 20.0, 6.0
PASSED_ON = (signal.SIGTERM, signal.SIGINT)  # blocked in the child until it has its handlers


def default_ranks(found: Sequence[Snapshot]) -> int:
    """One rank per usable GPU of this host; 2 where there is none."""
    for snapshot in found:
        facts = snapshot.facts(GpuFacts)
        if facts and facts.gpus:
            return max(1, sum(1 for gpu in facts.gpus if not gpu.error))
    return 2


def has_gpu(found: Sequence[Snapshot]) -> bool:
    """Whether any of these hosts shows a GPU."""
    return any((facts := snapshot.facts(GpuFacts)) and facts.gpus for snapshot in found)


def measure(
    host: Snapshot, ranks: int, progress: Progress, stop: threading.Event, *, budget_seconds: float | None = None,
    quick: bool = False, force: bool = False, due: Due | None = None, environment: Mapping[str, str] | None = None,
) -> BenchResult:  # fmt: skip
    """Benchmark collectives on this host under a line of progress, and store the result. Raises BusyError.

    `quick` leaves out the sizes that nothing judges; `environment` is added to that of the ranks.
    """
    seconds = budget_seconds or (QUICK_SECONDS if quick else BENCH_SECONDS)
    progress.step(f"measure: {', '.join(JUDGED_OPS)} with {units.count(ranks, 'rank')}, up to {units.seconds(seconds)}")
    request = {
        "task": "measure", "snapshot": wire.to_json(host), "ranks": ranks, "budget_seconds": seconds, "quick": quick,
        "force": force, "due": asdict(due) if due else None, "environment": dict(environment or {}),
    }  # fmt: skip
    found, signals = _ask(request, progress, stop)
    result = result_from_json(found)
    if result.stopped_by is not None and signals:
        result = replace(result, stopped_by=signals[0])
    keep_bench(result)
    return result


def calibration(
    model: str, *, sequence_length: int, tokens: int, budget_seconds: float, ranks: int, method: str, gpu: bool,
    progress: Progress, stop: threading.Event | None = None,
) -> Calibration:  # fmt: skip
    """Measure GEMMs and a layer of the model as so many ranks of this host at once run them.

    `tokens` is one micro-batch. Raises RuntimeError with the children's words, ModelError for an unknown model.
    """
    shape = model_named(model)
    wanted = {
        "hidden": shape.hidden, "ffn": shape.ffn, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "tokens": tokens, "sequence": min(sequence_length, tokens),
        "precision": "bf16" if gpu else "fp32", "device": "cuda" if gpu else "cpu", "copies": ranks,
        "method": "full" if method == "full" else "lora", "budget_seconds": budget_seconds,
    }  # fmt: skip
    return parse_calibration(_ask({"task": "calibrate", **wanted}, progress, stop or threading.Event())[0])


def _ask(request: Mapping[str, Any], progress: Progress, stop: threading.Event) -> tuple[Any, Sequence[str]]:
    """The answer of the child, and the signals that came. Raises BusyError, RuntimeError, KeyboardInterrupt."""
    last: dict[str, Any] = {}
    with _child(stop) as (child, signals):
        assert child.stdin is not None and child.stdout is not None  # noqa: S101 - opened for it
        with contextlib.suppress(BrokenPipeError), child.stdin:  # of a child that has died: its exit code tells
            child.stdin.write(json.dumps(request))
        for line in child.stdout:
            last = json.loads(line)
            if "note" in last:
                progress.note(last["note"])
    if "answer" in last:
        return last["answer"], signals
    if "busy" in last:
        raise BusyError(last["busy"])
    if signal.SIGINT.name in signals:
        raise KeyboardInterrupt
    raise RuntimeError(last.get("error") or f"the measurement ended with exit code {child.returncode} and no answer")


@contextlib.contextmanager
def _child(stop: threading.Event) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The child, which has ended when the block is left, and the names of the signals that were passed on to it.

    SIGTERM and Ctrl-C wait until the child is ready for them. It then answers with what it has.
    """
    came: list[str] = []
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    former: dict[int, Any] = {}
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.jobs.benchmark", str(os.getpid())], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": path},
        ) as child:  # fmt: skip

            def pass_on(number: int, _frame: object) -> None:
                came.append(signal.Signals(number).name)
                if number == signal.SIGTERM:
                    stop.set()
                child.send_signal(number)

            if threading.current_thread() is threading.main_thread():
                former = {number: signal.signal(number, pass_on) for number in PASSED_ON}
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            try:
                if stop.is_set():
                    child.terminate()
                yield child, came
            except BaseException:
                child.kill()
                raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
