"""Training stacks, one file each: supported features, terms of the forecast, and configuration formats.

This module lists the known stacks: engines by name, and export formats for a layout.
"""

from __future__ import annotations

from planner.advice import ExportError, ExportRequest, Formats
from planner.forecast.engine import Engine
from planner.stacks import deepspeed, megatron, topoflight, torchtitan, trl

_STACKS = (topoflight, trl, deepspeed, torchtitan, megatron)
ENGINES: dict[str, Engine] = {stack.ENGINE.name: stack.ENGINE for stack in _STACKS}
_FORMATS: Formats = {name: each for stack in _STACKS for name, each in stack.FORMATS.items()}
FORMATS: dict[str, str] = {name: text for name, (text, _) in _FORMATS.items()}  # format -> description


def engine_named(name: str) -> Engine:
    """Return the engine for `TrainSpec.engine`; an unknown name raises an error with the known names."""
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: allowed are {', '.join(ENGINES)}")
    return ENGINES[name]


def export(name: str, request: ExportRequest) -> str:
    """Export the layout in one format."""
    if name not in _FORMATS:
        raise ExportError(f"format={name!r}: allowed are {', '.join(_FORMATS)}")
    return _FORMATS[name][1](request)
