"""Measure and calibrate on this host in a child process, and return its results.

The child is agent.jobs.benchmark. It holds the host's lock, starts the ranks, reads NCCL's log and ends all processes
that it started. A verb that only needs the result loads none of this code. The child reads one JSON document from stdin
and answers in JSON lines: {"note": text} during the work, and at the end {"answer": value} or {"error": text}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from agent.base import units
from agent.base.output import Progress
from agent.base.result_store import save_benchmark_result
from agent.checks.measured import JUDGED_OPS
from collectives.bench.results import BenchResult, read_as
from planner.forecast.calibration import Calibration, parse_calibration
from planner.forecast.models import model_named
from probes import wire
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.paths import Due

BENCH_SECONDS, QUICK_SECONDS = 20.0, 6.0
_PROGRAM = "agent.jobs.benchmark"
PASSED_ON = (signal.SIGTERM, signal.SIGINT)  # blocked in the child until its handlers are installed


class ChildError(click.ClickException):
    """The child process could not do its work; the message is the reason that it sent."""


def default_ranks(found: Sequence[Snapshot]) -> int:
    """Return one rank per usable GPU of this host; 2 if there is none."""
    for snapshot in found:
        facts = snapshot.facts(GpuFacts)
        if facts and facts.gpus:
            return max(1, sum(1 for gpu in facts.gpus if not gpu.error))
    return 2


def has_gpu(found: Sequence[Snapshot]) -> bool:
    """Return whether any of these hosts shows a GPU."""
    return any((facts := snapshot.facts(GpuFacts)) and facts.gpus for snapshot in found)


def measure(
    host: Snapshot, ranks: int, progress: Progress, stop: threading.Event, *, budget_seconds: float | None = None,
    quick: bool = False, force: bool = False, due: Due | None = None, environment: Mapping[str, str] | None = None,
) -> BenchResult:  # fmt: skip
    """Benchmark collectives on this host, show progress, and store the result. Raises ChildError.

    `quick` omits sizes that are not checked; `environment` is added to that of the ranks.
    """
    seconds = budget_seconds or (QUICK_SECONDS if quick else BENCH_SECONDS)
    progress.step(f"measure: {', '.join(JUDGED_OPS)} with {units.count(ranks, 'rank')}, up to {units.seconds(seconds)}")
    request = {
        "task": "measure", "snapshot": wire.to_json(host), "ranks": ranks, "budget_seconds": seconds, "quick": quick,
        "force": force, "due": asdict(due) if due else None, "environment": dict(environment or {}),
    }  # fmt: skip
    found, signals = _ask(request, progress.note, stop)
    result = read_as(found, BenchResult)
    if signals:  # also a signal received after the last measurement
        result = replace(result, stopped_by=signals[0])
    save_benchmark_result(result)
    return result


def calibration(
    model: str, *, sequence_length: int, tokens: int, budget_seconds: float, ranks: int, method: str, gpu: bool,
    stop: threading.Event | None = None,
) -> Calibration:  # fmt: skip
    """Measure GEMMs and a layer of the model with `ranks` processes at once on this host.

    `tokens` is one micro-batch. Raises ChildError, or ModelError for an unknown model.
    """
    shape = model_named(model)
    request = {
        "task": "calibrate", "hidden": shape.hidden, "ffn": shape.ffn, "heads": shape.heads,
        "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "tokens": tokens,
        "sequence": min(sequence_length, tokens), "precision": "bf16" if gpu else "fp32",
        "device": "cuda" if gpu else "cpu", "copies": ranks, "method": "full" if method == "full" else "lora",
        "budget_seconds": budget_seconds,
    }  # fmt: skip
    found, signals = _ask(request, lambda _words: None, stop or threading.Event())
    if signal.SIGINT.name in signals:
        raise KeyboardInterrupt
    return parse_calibration(found)


def _ask(
    request: Mapping[str, Any], on_note: Callable[[str], None], stop: threading.Event
) -> tuple[Any, Sequence[str]]:
    """Return the child's answer, and the signals received meanwhile. Raises ChildError, KeyboardInterrupt."""
    last: dict[str, Any] = {}
    with _child(stop) as (child, signals):
        assert child.stdin is not None and child.stdout is not None  # noqa: S101 - opened for it
        with contextlib.suppress(BrokenPipeError), child.stdin:  # the child has died; its exit code is reported below
            child.stdin.write(json.dumps(request))
        for line in child.stdout:
            last = json.loads(line) if line.endswith("\n") else {}  # a killed child may leave an incomplete line
            if "note" in last:
                on_note(last["note"])
    if "answer" in last:
        return last["answer"], signals
    if signal.SIGINT.name in signals:
        raise KeyboardInterrupt
    raise ChildError(last.get("error") or f"{_PROGRAM} ended with exit code {child.returncode} and gave no answer")


@contextlib.contextmanager
def _child(stop: threading.Event) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start the child; yield it and the names of the signals forwarded to it. It has ended when the block is left.

    SIGTERM and Ctrl-C are delayed until the child has its handlers. It then answers with the results it has. A second
    Ctrl-C raises KeyboardInterrupt, which kills the child. A SIGTERM that the caller does not handle ends this process
    after the child.
    """
    received: list[str] = []
    former: dict[int, Any] = {}
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        with subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, start_new_session=True,
        ) as child:  # fmt: skip

            def pass_on(number: int, _frame: object) -> None:
                received.append(signal.Signals(number).name)
                if number == signal.SIGTERM:
                    stop.set()
                if received.count(signal.SIGINT.name) > 1:
                    raise KeyboardInterrupt
                child.send_signal(number)

            if threading.current_thread() is threading.main_thread():
                former = {number: signal.signal(number, pass_on) for number in PASSED_ON}
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            try:
                if stop.is_set():
                    child.terminate()
                yield child, received
            except BaseException:
                child.kill()
                raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if signal.SIGTERM.name in received and former[signal.SIGTERM] is signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)


Work = Callable[[dict[str, Any], Callable[[str], None], threading.Event], Any]  # request, note, stop -> answer


def answer(work: Work) -> None:
    """In the child: do the requested work. The message of a RuntimeError or OSError is sent as the answer."""
    stop = threading.Event()
    for number in PASSED_ON:
        signal.signal(number, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # output of libraries goes to stderr

        def send(**words: object) -> None:
            answers.write(json.dumps(words) + "\n")
            answers.flush()

        try:
            send(answer=work(json.load(sys.stdin), lambda words: send(note=words), stop))
        except (RuntimeError, OSError) as error:
            send(error=str(error))


@contextlib.contextmanager
def sigterm(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """Set an event on SIGTERM instead of exiting, so that the current work can stop and save its results."""
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, former)
