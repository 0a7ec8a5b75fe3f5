"""What a drill is: one fault that happens for real, some times over, and what was lost each time (nothing).

A drill is a function that takes a `Ground` and returns what was lost, in words. `@drill(...)` puts it into DRILLS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
from drill_ground import Ground

FORM = os.environ.get("TOPOFLIGHT_DRILLS", "short")  # "long" is what `make drills` sets, "each" runs every one once
LONG = FORM == "long"
LONG_KILLS = int(os.environ.get("TOPOFLIGHT_DRILL_KILLS", "200"))  # of the agent, in the long form, over all stages

Run = Callable[[Ground], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One fault."""

    name: str
    fault: str  # as the table names it
    run: Run
    short: int  # 0 where the test suite already has this fault
    long: int
    marks: tuple[str, ...]

    @property
    def times(self) -> int:
        """How often it runs now."""
        return {"long": self.long, "each": 1}.get(FORM, self.short)


DRILLS: list[Drill] = []


def drill(fault: str, *, short: int = 1, long: int = 5, marks: tuple[str, ...] = ()) -> Callable[[Run], Run]:
    """Enter a function as the drill of `fault`."""

    def enter(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        DRILLS.append(Drill(name=name, fault=fault, run=run, short=short, long=long, marks=marks))
        return run

    return enter


def parameters(rooms: Sequence[ModuleType]) -> list[object]:
    """The drills of these modules, in their order, as pytest parametrises them."""
    now = [one for room in rooms for one in DRILLS if one.times and one.run.__module__ == room.__name__]
    return [pytest.param(one, id=one.name, marks=[getattr(pytest.mark, m) for m in one.marks]) for one in now]
