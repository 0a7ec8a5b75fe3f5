"""Training stacks: supported features (one TOML file each), terms of the forecast, and configuration formats.

This module lists the known stacks: engines by name, and export formats for a layout.
"""

from __future__ import annotations

from contracts.tables import read_table
from planner.advice import ExportError, ExportRequest
from planner.forecast.engine import Engine, make_engine
from planner.stacks import deepspeed, megatron, topoflight, torchtitan, trl

_STACKS = (topoflight, trl, deepspeed, torchtitan, megatron)
ENGINES: dict[str, Engine] = {stack.ENGINE.name: stack.ENGINE for stack in _STACKS}
ENGINES["automodel"] = make_engine(torchtitan.ENGINE, read_table(__file__, "automodel.toml"))
_STACK_OF = {name: stack for stack in _STACKS for name in stack.FORMATS}
FORMATS = tuple(_STACK_OF)


def engine_named(name: str) -> Engine:
    """Return the engine for `TrainSpec.engine`; an unknown name raises an error with the known names."""
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: allowed are {', '.join(ENGINES)}")
    return ENGINES[name]


def export(name: str, request: ExportRequest) -> str:
    """Export the layout in one format."""
    if name not in FORMATS:
        raise ExportError(f"format={name!r}: allowed are {', '.join(FORMATS)}")
    try:
        text: str = _STACK_OF[name].FORMATS[name](request)
    except ExportError as error:
        engine, train = _STACK_OF[name].ENGINE, request.train
        if engine.name == train.engine:
            raise
        can = train.method in engine.methods and f"{train.method}:" not in str(error)
        method = "" if can else " --method full"
        raise ExportError(f"{error}. Add --engine {engine.name}{method} to get a layout that it can run") from None
    return text
