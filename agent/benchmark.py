"""Benchmarks as the agent asks for them: the command line's settings, the preflight's, and the embedded job's model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent import units
from agent.advise import Request
from agent.output import Progress
from collectives.bench import BenchSpec, Expectation
from planner.calibration import Calibration, parse_calibration
from probes.api import Snapshot
from probes.gpu import GpuFacts
from topology.build import build
from topology.cluster import join

# The job's own default (finetune/default.yaml): a Llama small enough for any host, on data that the job makes.
EMBEDDED_MODEL = "tiny-llama"
EMBEDDED_REQUEST: dict[str, Any] = {
    "model": EMBEDDED_MODEL,
    "method": "lora",
    "sequence_length": 128,
    "global_batch": 16,
}


def default_ranks(found: Sequence[Snapshot]) -> int:
    """One rank per usable GPU of this host; 2 where there is none."""
    for snapshot in found:
        facts = snapshot.facts(GpuFacts)
        if facts and facts.gpus:
            return max(1, sum(1 for gpu in facts.gpus if not gpu.error))
    return 2


def gpu_processes(found: Sequence[Snapshot]) -> tuple[int, ...]:
    """Process ids that hold this host's GPUs."""
    return tuple(
        process.pid
        for snapshot in found
        if (facts := snapshot.facts(GpuFacts))
        for gpu in facts.gpus
        for process in gpu.processes or ()
    )


def preflight_spec(found: Sequence[Snapshot], ranks: int, budget_seconds: float, *, force: bool) -> BenchSpec:
    """All-gather and reduce-scatter over a short sweep, judged against what the links promise."""
    return BenchSpec(
        ranks_per_host=ranks, budget_seconds=budget_seconds, gpu_pids=gpu_processes(found), force=force,
        expectations=expectations(found),
    )  # fmt: skip


def expectations(found: Sequence[Snapshot]) -> tuple[Expectation, ...]:
    """What the links of these hosts promise, for the ops that have a derivation."""
    if not found:
        return ()
    cluster = join(tuple(build(snapshot) for snapshot in found))
    from collectives.ops import OPS

    best: dict[str, Expectation] = {}
    for expected in (*cluster.nodes[0].expectations, *cluster.expectations):
        whole = expected.scope in ("node", "cluster") and expected.op in OPS
        if whole and expected.busbw_bytes_per_second:
            best[expected.op] = Expectation(
                op=expected.op, busbw_bytes_per_second=expected.busbw_bytes_per_second, derivation=expected.derivation
            )
    return tuple(best.values())


def spec_of(options: Mapping[str, Any]) -> BenchSpec:
    """The benchmark that the command line asks for, on this host."""
    from agent.hosts import snapshots

    found = snapshots(())
    spec = preflight_spec(found, options["ranks"] or default_ranks(found), options["budget"], force=options["force"])
    return replace(
        spec, ops=options["ops"] or spec.ops, sizes_bytes=options["sizes"], min_bytes=options["min_bytes"],
        max_bytes=max(options["max_bytes"], options["min_bytes"]), precision=percent(options["precision"]),
        hosts=options["hosts"], rendezvous=options["rendezvous"],
    )  # fmt: skip


def percent(text: str) -> float:
    """ "5%" or "0.05" as a ratio."""
    from collectives.bench import SpecError

    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise SpecError(f"precision: {text!r} is not allowed; allowed: a percentage such as 5%, or a ratio") from None


def watch(progress: Progress) -> Callable[[dict[str, Any]], None]:
    """Turn the ranks' events into words."""

    def event(happened: dict[str, Any]) -> None:
        if happened.get("event") == "measured" and happened.get("rank") in (0, None):
            progress.note(f"{happened.get('op')} {units.size(happened.get('bytes'))} done")

    return event


def calibration(model: str, *, sequence_length: int, budget_seconds: float, ranks: int | None = None) -> Calibration:
    """Measure in child processes (they import torch; this process must not). Raises RuntimeError with their words."""
    words = [sys.executable, "-m", "collectives.calibrate", "--shape", json.dumps(shape(model)),
             "--sequence-length", str(sequence_length), "--budget", str(budget_seconds),
             "--ranks", str(ranks or 1)]  # fmt: skip
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=budget_seconds + 120, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {budget_seconds + 120:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        )
    return parse_calibration(json.loads(done.stdout))


def shape(model: str) -> dict[str, int]:
    """The numbers of a known model that the measurement needs."""
    from planner.models import model_named

    found = model_named(model)
    return {
        "hidden": found.hidden, "ffn": found.ffn, "heads": found.heads, "kv_heads": found.kv_heads,
        "head_dim": found.head_dim, "vocab": found.vocab,
    }  # fmt: skip


def flight_request(given: Mapping[str, Any]) -> Request:
    """The question behind `launch`: the named model, or the embedded one."""
    names = ("hosts", "root", "model", "method", "global_batch")
    request = Request(**{name: given[name] for name in names})
    if given["sequence_length"]:
        request = replace(request, sequence_length=given["sequence_length"])
    return replace(request, **EMBEDDED_REQUEST) if request.model is None else request


def replay(form: str, options: Mapping[str, Any]) -> int:
    """Replay one training step's communication in its process groups."""
    raise NotImplementedError
