"""The question to the planner: machines, model and run. question.toml declares each field once.

The command line options (agent.base.options) and the pydantic model below are both built from that table. The HTTP
agent validates query parameters and bodies with the model. The model is built on first use, because importing pydantic
and building it take 0.1 s, and most verbs need neither (docs/decisions/0038).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import click

from agent.base.options import option_type
from contracts.tables import read_table

if TYPE_CHECKING:
    from pydantic import BaseModel


ROWS: dict[str, dict[str, Any]] = read_table(__file__, "question.toml")  # by command line option


def get_parameter(option: str) -> str:
    """Return the HTTP parameter of an option: "sequence_length" of "--sequence-length"."""
    return option.removeprefix("--").replace("-", "_")


FIELDS: Mapping[str, str] = {str(row.get("name", get_parameter(option))): option for option, row in ROWS.items()}
"""The command line option of each field, by field name."""


def most(name: str) -> int:
    """Return the upper bound of a field: the largest number, or the maximum text length in characters."""
    row = ROWS[FIELDS[name]]
    limits = option_type(row["type"]) if "type" in row else None
    return int(limits.max) if limits else int(row["most"])


@cache
def model() -> type[BaseModel]:
    """Return the pydantic model of a question, with every field of question.toml; unknown members are rejected."""
    from pydantic import ConfigDict, Field, create_model

    members: dict[str, Any] = {}
    for name, option in FIELDS.items():
        row, limits = ROWS[option], dict[str, Any]()
        kind: Any = bool if row.get("is_flag") else str
        if "choices" in row:
            kind = Literal[tuple(row["choices"])]
        elif "type" in row:
            number = option_type(row["type"])
            kind = float if isinstance(number, click.FloatRange) else int
            limits |= {"gt" if number.min_open else "ge": number.min, "le": number.max}
        elif kind is str:
            limits["max_length"] = row["most"]
        default = row.get("default", False if kind is bool else None)
        about = Field(default, description=row["help"], alias=get_parameter(option), **limits)
        members[name] = kind if default is not None else kind | None, about
    return create_model("Question", __config__=ConfigDict(extra="forbid", populate_by_name=True), **members)
