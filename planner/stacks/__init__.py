"""Training stacks, a file for each: what it can run, its terms of the forecast, and its configuration.

Here the stacks that are known: engines by name, and the formats that a layout can be written in.
"""

from __future__ import annotations

from planner.advice import ExportError, ExportRequest, Formats
from planner.forecast.engine import Engine
from planner.stacks import deepspeed, megatron, topoflight, torchtitan, trl

_STACKS = (topoflight, trl, deepspeed, torchtitan, megatron)
ENGINES: dict[str, Engine] = {stack.ENGINE.name: stack.ENGINE for stack in _STACKS}
_FORMATS: Formats = {name: each for stack in _STACKS for name, each in stack.FORMATS.items()}
FORMATS: dict[str, str] = {name: text for name, (text, _) in _FORMATS.items()}  # and what each is


def engine_named(name: str) -> Engine:
    """The engine of a `TrainSpec.engine`; an unknown name is an error that lists the known ones."""
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: allowed are {', '.join(ENGINES)}")
    return ENGINES[name]


def export(name: str, request: ExportRequest) -> str:
    """The layout in one format."""
    if name not in _FORMATS:
        raise ExportError(f"format={name!r}: allowed are {', '.join(_FORMATS)}")
    try:
        return _FORMATS[name][1](request)
    except ExportError as error:
        engine, train = next(stack.ENGINE for stack in _STACKS if name in stack.FORMATS), request.train
        if engine.name == train.engine:
            raise
        method = "" if train.method in engine.methods else " --method full"
        raise ExportError(f"{error}. Add --engine {engine.name}{method} to get a layout that it can run") from None
