"""Where no layout fits: the nearest questions that have one, each as a command that is ready to run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from agent.advice.request import Request, cluster_of, default_ranks, model_of
from agent.base import units
from contracts.layout import LayoutError
from planner.forecast.machines import MachineError
from planner.recommend import best_layout, plan
from planner.stacks import ENGINES
from probes.api import Snapshot

_SHORTEST = 512  # tokens: a shorter sequence is another job
_MOST_TIMES = 64  # as many nodes
_WIDER = {"mxfp8": ("fp8", "bf16"), "fp8": ("bf16",)}
_OPTIONS = {"nccl_version": "nccl", "bench_file": "bench"}  # where the command line says it otherwise
_UNSAID = {
    "hosts", "transport", "shape", "train", "allow_files", "unmeasured", "tokenizer", "saved_modules", "mean_tokens",
    "optimizer_in_backward", "measured_step", "lora_targets", "length_histogram", "attention", "fused_cross_entropy",
    "asked", "host_threads", "dtype",
}  # fmt: skip


def questions(request: Request, snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """For each thing that could be otherwise the least of it that fits; where no one thing does, the method and nodes.

    Tried are adapters, a shorter sequence, 8-bit optimizer states, more bits in products, more nodes, another engine.
    """
    nodes = request.nodes or max(1, len(snapshots))
    several = [{"nodes": nodes * times} for times in _powers(_MOST_TIMES)] if len(snapshots) < 2 else []
    train = request.train
    methods = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[train.method]
    lengths = [train.sequence_length >> n for n in range(1, 16) if train.sequence_length >> n >= _SHORTEST]
    kinds: list[list[dict[str, Any]]] = [
        [{"method": method} for method in methods],
        [{"sequence_length": length} for length in lengths],
        [{"optimizer": "adamw8bit"}] if (train.method, train.optimizer) == ("full", "adamw") else [],
        [{"precision": wider} for wider in _WIDER.get(train.precision, ())],
        several,
        [{"engine": engine} for engine in ENGINES if engine != train.engine],
    ]
    found = [line for kind in kinds if (line := _first(request, kind, snapshots))]
    if not found:
        both = [{**method, **more} for method in kinds[0][-1:] for more in several]
        both += [{**engine, **shorter} for engine in kinds[-1] for shorter in kinds[1]]
        found = [line for line in (_first(request, both, snapshots),) if line]
    return tuple(found)


def _powers(most: int) -> Iterator[int]:
    times = 2
    while times <= most:
        yield times
        times *= 2


def _first(request: Request, changes: Sequence[dict[str, Any]], snapshots: Sequence[Snapshot]) -> str:
    """The first of these changes with which a layout fits, its step, and the command; "" for none."""
    for changed in changes:
        other = request.changed(**changed)
        model = model_of(other)
        try:
            cluster = cluster_of(other, snapshots, other.ranks_per_node)
            ranks = other.ranks_per_node or default_ranks(other, cluster)
            best = best_layout(plan(cluster, snapshots, model, other.train, ranks_per_node=ranks)) if model else None
        except (LayoutError, MachineError, ValueError):
            continue
        if best is not None:
            changed_names = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changed.items())
            step = units.seconds(best.forecast.step_seconds.mid)
            how = best.layout.family + (", offloading" if best.layout.offload != "none" else "")
            return f"{changed_names} fits ({how}, {step} a step): {command(other)}"
    return ""


def command(request: Request) -> str:
    """The question as a command line."""
    words = ["topoflight", "recommend"]
    words += [word for path in request.hosts for word in ("--host", str(path))]
    if request.train.length_histogram:
        words += ["--lengths", ",".join(f"{tokens}:{rows}" for tokens, rows in request.train.length_histogram)]
    parts = (request, request.train)
    for field, value in ((field, getattr(part, field.name)) for part in parts for field in fields(part)):
        if field.name in _UNSAID or value == field.default:
            continue
        name = f"--{_OPTIONS.get(field.name, field.name).replace('_', '-')}"
        words += [name] if value is True else [name, str(value)]
    words += [f"--{request.transport}"] if request.transport else []
    return shlex.join(words)
