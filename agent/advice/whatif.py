"""The question put otherwise: the same job on other machines and networks, and what would fit where nothing does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent.advice.request import Request, cluster_of, default_ranks, model_of, prices_of, rows_of
from agent.base import units
from agent.base.inputs import RequestError
from contracts import question
from contracts.layout import LayoutError
from planner.forecast import machines
from planner.forecast.machines import MachineError
from planner.forecast.specs import TrainSpec, mean_length
from planner.recommend import best_layout, plan
from planner.stacks import ENGINES
from planner.sweep import FrontierPoint, frontier
from probes.api import Snapshot

MOST_POINTS = 64
FORM = ("model", "method", "machine", "nodes", "sequence_length", "global_batch", "network", "transport", "steps",
        "price")  # fmt: skip
"""The fields of a question that the what-if page asks for."""


def frontier_of(request: Request, nodes: Sequence[int]) -> tuple[FrontierPoint, ...]:
    """Machines, nodes and networks of a question with the same batch and the same tokens for all.

    Without a budget the run is a billion tokens. Raises RequestError.
    """
    model, train = model_of(request), request.train
    assert model is not None  # noqa: S101 - asked before
    prices = prices_of(request.price, files=request.allow_files) if request.price else None
    named = [word for word in (request.machine or "").split(",") if word]
    names = named or list(prices if isinstance(prices, dict) else ())
    if not names:
        raise RequestError("sweep: name the machines (--machine A,B,...), or give their prices in a file")
    networks = [None, *(word for word in (request.network or "").split(",") if word)]
    if len(names) * len(nodes) * len(networks) > MOST_POINTS:
        count = f"{len(names)} machines x {len(nodes)} numbers of nodes x {len(networks)} networks"
        raise RequestError(f"sweep: {count} are more than {MOST_POINTS} points")
    try:
        if train.global_batch is None:  # one batch for all points, or they would do different jobs
            sizes = [machines.cluster(name, max(nodes), gpus_per_node=request.ranks_per_node) for name in names]
            largest = max(sizes, key=lambda cluster: cluster.world_size)
            train = replace(train, global_batch=plan(largest, (), model, train).global_batch)
        return frontier(
            names,
            nodes,
            networks,
            model,
            train,
            tokens=tokens_of(request, train),
            prices=prices,
            transport=request.transport,
            gpus_per_node=request.ranks_per_node,
        )
    except (MachineError, ValueError) as error:
        raise RequestError(str(error)) from None


PER_TOKENS = 1e9


def tokens_of(request: Request, train: TrainSpec) -> float:
    """Real tokens of the whole run, a billion where no budget is given."""
    histogram = train.length_histogram
    mean = mean_length(histogram, train.sequence_length) if histogram else float(train.sequence_length)
    if request.tokens is not None:
        return float(request.tokens)
    if request.epochs is not None and (rows := rows_of(request)):
        return request.epochs * rows * mean
    if train.steps is not None:
        return train.steps * (train.global_batch or 1) * mean
    return PER_TOKENS


# Where no layout fits: the nearest questions that have one, each as a command that is ready to run.

_SHORTEST = 512  # tokens: a shorter sequence is another job
_TIMES = (2, 4, 8, 16, 32, 64)  # as many nodes
_WIDER = {"mxfp8": ("fp8", "bf16"), "fp8": ("bf16",)}


def nearest(request: Request, snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """For each thing that could be otherwise the least of it that fits; where no one thing does, the method and nodes.

    Tried are adapters, a shorter sequence, 8-bit optimizer states, more bits in products, more nodes, another engine.
    """
    nodes = request.nodes or max(1, len(snapshots))
    several = [{"nodes": nodes * times} for times in _TIMES] if len(snapshots) < 2 else []
    train = request.train
    methods = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[train.method]
    lengths = [train.sequence_length >> n for n in range(1, 16) if train.sequence_length >> n >= _SHORTEST]
    batch = train.global_batch or 0
    ranks = sum(len(node.gpus) for node in cluster_of(request, snapshots, request.ranks_per_node).nodes) if batch else 0
    kinds: list[list[dict[str, Any]]] = [
        [{"global_batch": batch << n} for n in range(1, 24) if batch << n <= ranks],
        [{"method": method} for method in methods],
        [{"sequence_length": length} for length in lengths],
        [{"optimizer": "adamw8bit"}] if (train.method, train.optimizer) == ("full", "adamw") else [],
        [{"precision": wider} for wider in _WIDER.get(train.precision, ())],
        several,
        [{"engine": engine} for engine in ENGINES if engine != train.engine],
    ]
    found = [line for kind in kinds if (line := _first(request, kind, snapshots))]
    if not found:
        both = [{**method, **more} for method in kinds[1][-1:] for more in several]
        both += [{**engine, **shorter} for engine in kinds[-1] for shorter in kinds[2]]
        found = [line for line in (_first(request, both, snapshots),) if line]
    return tuple(found)


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
    said = {"root": "--root", **question.fields(), "bench_file": "--bench", "calibration": "--calibration"}
    for name, option in said.items():
        value = _member(request, name)
        if value not in (None, False, _member(Request(), name)):
            words += [f"--{value}"] if name == "transport" else [option] if value is True else [option, str(value)]
    return shlex.join(words)


def _member(request: Request, name: str) -> Any:
    """Return a field of the question by its name; `lengths` is the only one that has another form here: None."""
    return getattr(request, name, getattr(request.train, name, None))
