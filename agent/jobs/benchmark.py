"""Benchmarks as the agent asks for them: the command line's settings, the preflight's, and the embedded job's model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.base import units
from agent.base.output import Progress
from agent.base.result_store import keep_bench
from agent.checks import judged
from collectives.bench.calibrate import CalibrationRequest, calibrate
from collectives.bench.plan import AXES, BenchSpec, Case, SearchPlan, SpecError, StepShape, parts, sweep
from collectives.bench.results import BenchResult
from collectives.bench.run import run, visible_backend
from planner.forecast.calibration import Calibration, parse_calibration
from planner.forecast.models import model_named
from planner.forecast.specs import weights
from planner.nccl_env import environment as nccl_env
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.build import build
from topology.cluster import join
from topology.paths import Due

REPLAY_TOKENS = 2048  # of the micro-batch whose activations are replayed
MOST_DEGREE = 65536


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


SWEEP_BYTES = (64 << 10, 1 << 20, 16 << 20)  # for the curve: latency, and where the wire begins to count
STARTUP_SECONDS, HOSTS_SECONDS = 120.0, 900.0  # for ranks to meet; a pod may first have to fetch its image
BENCH_SECONDS, QUICK_SECONDS = 20.0, 6.0
ALONE_SECONDS = 60.0  # of the verb bench


def preflight_spec(
    found: Sequence[Snapshot], ranks: int, budget_seconds: float, *, force: bool, hosts: int = 1, quick: bool = False,
    backend: str | None = None, due: Due | None = None,
) -> BenchSpec:  # fmt: skip
    """A short sweep, then what can be judged: each op with 64 MiB and more of every rank. `quick` leaves the sweep out.

    Where no bar exists (no GPU, gloo) the sweep is all: a size that nothing judges would only cost time.
    """
    expect = judged.expected(found, ranks) if (backend or visible_backend()) == "nccl" else None
    large = (judged.judged_bytes(ranks * hosts),) if expect and ranks * hosts > 1 else ()
    sizes = large if quick and large else SWEEP_BYTES[:2] if quick else (*SWEEP_BYTES, *large)
    cases = tuple(Case(op=op, bytes=size) for size in sizes for op in judged.JUDGED_OPS)
    return BenchSpec(
        ops=judged.JUDGED_OPS, cases=cases, backend=backend, ranks_per_host=ranks, budget_seconds=budget_seconds,
        gpu_pids=gpu_processes(found), force=force, expect=expect, links=judged.links_of(found, ranks, due),
        host_name=found[0].hostname if found and hosts == 1 else None,
    )  # fmt: skip


def spec_of(options: Mapping[str, Any]) -> BenchSpec:
    """The benchmark that the command line asks for, on this host."""
    from agent.base.hosts import snapshots

    found = snapshots(())
    ranks = options["ranks"] or default_ranks(found)
    budget = options["budget"] or (QUICK_SECONDS if options["quick"] else ALONE_SECONDS)
    spec = preflight_spec(found, ranks, budget, force=options["force"], hosts=options["hosts"],
                          quick=options["quick"])  # fmt: skip
    named = options["sizes"] or options["min_bytes"] or options["max_bytes"]
    least = options["min_bytes"] or SWEEP_BYTES[0]
    most = max(options["max_bytes"] or SWEEP_BYTES[-1], least)
    ops = options["ops"] or spec.ops
    sizes = options["sizes"] or sweep(least, most, 4)
    if not named:
        sizes = tuple(dict.fromkeys(case.bytes for case in spec.cases))
    return replace(
        spec, ops=ops, cases=tuple(Case(op=op, bytes=size) for size in sizes for op in ops),
        sizes_bytes=options["sizes"], precision=percent(options["precision"]),
        hosts=options["hosts"], rendezvous=options["rendezvous"], host_name=options["host_name"],
        node_rank=options["node_rank"] if options["hosts"] > 1 else None,
        search=SearchPlan() if options["search"] else None,
        startup_seconds=options["startup"] or (STARTUP_SECONDS if options["hosts"] == 1 else HOSTS_SECONDS),
        environment=network_environment(found) if options["hosts"] > 1 and not options["no_advice"] else {},
    )  # fmt: skip


def network_environment(found: Sequence[Snapshot]) -> dict[str, str]:
    """What a job between hosts is advised to set on this one, less what is set already: its network is measured.

    In a pod with a secondary network that is the interface's name; without it the ranks would take the default network.
    """
    cluster = join([build(snapshot) for snapshot in found])
    advised = nccl_env.settings(found, cluster, multi_node=True).settings
    return {s.name: s.value for s in advised if s.name.startswith(("NCCL_", "GLOO_")) and s.name not in os.environ}


def percent(text: str) -> float:
    """ "5%" or "0.05" as a ratio."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise SpecError(f"precision: {text!r} is not allowed; allowed: a percentage such as 5%, or a ratio") from None


def measure(spec: BenchSpec, progress: Progress, stop: threading.Event) -> BenchResult:
    """Run a benchmark of this host under a line of progress, and store its result. Raises BusyError and SpecError."""
    progress.step(f"measure: {', '.join(spec.ops)} with {units.count(spec.ranks_per_host, 'rank')}, up to "
                  f"{units.seconds(spec.budget_seconds)}")  # fmt: skip
    result = run(spec, watch(progress), stop)
    keep_bench(result)
    return result


def watch(progress: Progress) -> Callable[[dict[str, Any]], None]:
    """Turn the ranks' events into words."""

    def event(happened: dict[str, Any]) -> None:
        if happened.get("event") == "measured" and happened.get("rank") in (0, None):
            progress.note(f"{happened.get('op')} {units.size(happened.get('bytes'))} done")

    return event


def calibration(
    model: str,
    *,
    sequence_length: int,
    tokens: int,
    budget_seconds: float,
    ranks: int,
    method: str,
    gpu: bool,
    stop: threading.Event | None = None,
) -> Calibration:
    """Measure in child processes (they import torch; this process must not).

    `tokens` is one micro-batch. Raises RuntimeError with the children's words, ModelError for an unknown model.
    """
    shape = model_named(model)
    request = CalibrationRequest(
        hidden=shape.hidden, ffn=shape.ffn, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        tokens=tokens, sequence=min(sequence_length, tokens), precision="bf16" if gpu else "fp32",
        device="cuda" if gpu else "cpu", copies=ranks, method="full" if method == "full" else "lora",
        budget_seconds=budget_seconds,
    )  # fmt: skip
    return parse_calibration(calibrate(request, stop=stop))


def has_gpu(found: Sequence[Snapshot]) -> bool:
    """Whether any of these hosts shows a GPU."""
    return any((facts := snapshot.facts(GpuFacts)) and facts.gpus for snapshot in found)


def step_shape(model: str, layout: str) -> StepShape:
    """What one training step of `model` moves under "dp_shard=2,tp=1,..."; bf16, one micro-batch of 2048 tokens."""
    degrees = parse_degrees(layout)
    shape = model_named(model)
    counts = weights(shape)
    tp, pp = degrees.get("tp", 1), degrees.get("pp", 1)
    activation = 2 * REPLAY_TOKENS * shape.hidden
    return StepShape(
        **{axis: degrees.get(axis, 1) for axis in AXES},
        layers=-(-counts.layers // pp),
        fsdp_layer_bytes=2 * counts.layer // tp if degrees.get("dp_shard", 1) > 1 else 0,
        replica_reduce_bytes=2 * counts.layer // tp // degrees.get("dp_shard", 1),
        tp_activation_bytes=activation if tp > 1 else 0,
        pp_activation_bytes=activation if pp > 1 else 0,
        micro_batches=degrees.get("micro_batches", 1),
    )


def parse_degrees(text: str) -> dict[str, int]:
    """ "dp_shard=2,tp=4" as numbers; SpecError names what is wrong."""
    degrees: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in (*AXES, "micro_batches") or not value.isdecimal() or not 1 <= int(value) <= MOST_DEGREE:
            allowed = ", ".join((*AXES, "micro_batches"))
            raise SpecError(f"layout: {word!r} is not allowed; allowed: NAME=NUMBER with NAME one of {allowed}")
        degrees[name] = int(value)
    return degrees


def replay_spec(spec: BenchSpec, model: str, layout: str) -> BenchSpec:
    """The benchmark of one step's communication in its own process groups, in place of a sweep."""
    shape = step_shape(model, layout)
    if shape.world_size != spec.world_size:
        raise SpecError(
            f"layout: {layout!r} has {shape.world_size} ranks, {spec.world_size} would run; "
            "allowed: degrees that multiply to --ranks x --nodes"
        )
    # The step is what was asked for; one size beside it is a check.
    sizes = spec.sizes_bytes or SWEEP_BYTES[:1]
    return replace(spec, cases=(*parts(shape), *(Case(op=op, bytes=size) for op in spec.ops for size in sizes)))
