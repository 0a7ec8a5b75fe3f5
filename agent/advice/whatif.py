"""The question put otherwise: the same job on other machines, numbers of nodes and networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent.advice.request import Request, model_of, prices_of, rows_of
from agent.base.inputs import RequestError
from planner.forecast import machines
from planner.forecast.machines import MachineError
from planner.forecast.specs import TrainSpec, mean_length
from planner.recommend import plan
from planner.sweep import FrontierPoint, frontier

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
