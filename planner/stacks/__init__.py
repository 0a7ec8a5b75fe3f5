"""Training stacks, one file each: supported features, terms of the forecast, and configuration formats.

This module lists the known stacks: engines by name, and export formats for a layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from contracts.tables import read_table
from planner.advice import ExportError, ExportRequest
from planner.forecast.engine import Engine, StateBytes
from planner.stacks import deepspeed, megatron, topoflight, torchtitan, trl

_STACKS = (topoflight, trl, deepspeed, torchtitan, megatron)
ENGINES: dict[str, Engine] = {stack.ENGINE.name: stack.ENGINE for stack in _STACKS}


def make_engine(base: Engine, traits: Mapping[str, Any]) -> Engine:
    """Return an engine that differs from another in the traits of a TOML table."""
    made: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in traits.items()}
    if "states" in made:
        made["states"] = StateBytes(*made["states"])
    return replace(base, **made)


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
