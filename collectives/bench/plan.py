"""What the starting process tells its ranks: one JSON file, read by each rank.

It is written and read by the same version of this package; nothing here comes from outside the host.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cattrs

FAULT_VARIABLE = "TOPOFLIGHT_FAULT"  # test-only, see collectives/bench/faults.py
RUN_VARIABLE = "TOPOFLIGHT_RUN"  # marks every process of one run, so that the end finds orphans as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective at one size, over the whole world or over disjoint groups that run at the same time."""

    op: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = ()  # global ranks; empty is one group of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of communication in a training step: the same collective some times over."""

    name: str  # "fsdp_gather", "tp_reduce", ...
    op: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int  # in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A training step's communication, to be replayed some times."""

    parts: tuple[Part, ...]
    warmup: int = 1
    iterations: int = 5
    budget_seconds: float = 30.0  # for the whole replay; each part runs once and is timed once whatever it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A search for slow ranks by pairs: send and receive both ways at once."""

    bytes: int = 16 * 1024 * 1024
    iterations: int = 3
    # A pair is slow when it takes so many times the middle pair's time. 1 / 0.8: published bus bandwidths of healthy
    # clusters lie between 0.88 and 0.98 of the wire (stas00/ml-engineering, oracle-quickstart, aws-samples).
    slower_than: float = 1.25
    seed: int = 0


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
    distinct_hosts: bool = False
    step: StepPlan | None = None
    search: SearchPlan | None = None
    links: dict[str, Any] = field(default_factory=dict)  # of this host, for the ranks to tell each other


def write(plan: Plan, path: Path) -> None:
    """Write the plan for the ranks."""
    path.write_text(json.dumps(cattrs.unstructure(plan)), encoding="utf-8")


def read(path: Path) -> Plan:
    """Read the plan, in a rank."""
    plan: Plan = cattrs.structure(json.loads(path.read_text(encoding="utf-8")), Plan)
    return plan
