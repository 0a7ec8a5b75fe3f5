"""Training stacks, a file for each: what it can run, its terms of the forecast, and its configuration.

Here the stacks that are known: engines by name, and the formats that a layout can be written in.
"""

from __future__ import annotations

from planner.advice import ExportError, ExportRequest
from planner.forecast.engine import Engine
from planner.stacks import deepspeed, megatron, topoflight, torchtitan, trl

_STACKS = (topoflight, trl, deepspeed, torchtitan, megatron)
ENGINES: dict[str, Engine] = {stack.ENGINE.name: stack.ENGINE for stack in _STACKS}
_STACK_OF = {name: stack for stack in _STACKS for name in stack.FORMATS}
FORMATS: dict[str, str] = {name: stack.FORMATS[name][0] for name, stack in _STACK_OF.items()}  # and what each is


def engine_named(name: str) -> Engine:
    """The engine of a `TrainSpec.engine`; an unknown name is an error that lists the known ones."""
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: allowed are {', '.join(ENGINES)}")
    return ENGINES[name]


def export(name: str, request: ExportRequest) -> str:
    """The layout in one format."""
    if name not in FORMATS:
        raise ExportError(f"format={name!r}: allowed are {', '.join(FORMATS)}")
    try:
        text: str = _STACK_OF[name].FORMATS[name][1](request)
    except ExportError as error:
        engine, train = _STACK_OF[name].ENGINE, request.train
        if engine.name == train.engine:
            raise
        method = "" if train.method in engine.methods else " --method full"
        raise ExportError(f"{error}. Add --engine {engine.name}{method} to get a layout that it can run") from None
    return text
