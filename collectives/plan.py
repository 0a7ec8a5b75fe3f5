"""What the starting process tells its ranks: one JSON file, read by each rank.

It is written and read by the same version of this package; nothing here comes from outside the host.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import cattrs

FAULT_VARIABLE = "TOPOFLIGHT_FAULT"  # test-only, see collectives/faults.py
RUN_VARIABLE = "TOPOFLIGHT_RUN"  # marks every process of one run, so that the end finds orphans as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective at one size, over the whole world or over disjoint groups that run at the same time."""

    op: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = ()  # global ranks; empty is one group of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The work of a run."""

    directory: str  # where ranks leave their events
    host: str | None  # what the ranks call this host; None is the host's own name
    backend: str
    cases: tuple[Case, ...]
    warmup: int
    min_iterations: int
    max_iterations: int
    precision: float | None
    budget_seconds: float
    limit_seconds: float  # after which the collective itself gives up
    silence_seconds: float


def write(plan: Plan, path: Path) -> None:
    """Write the plan for the ranks."""
    path.write_text(json.dumps(cattrs.unstructure(plan)), encoding="utf-8")


def read(path: Path) -> Plan:
    """Read the plan, in a rank."""
    plan: Plan = cattrs.structure(json.loads(path.read_text(encoding="utf-8")), Plan)
    return plan
