"""The recorded machines of tests/machines, each scanned and judged once in a process: tests only read what they get."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from scanned import scan

from agent.checks.view import View, look
from contracts.finding import Finding
from probes.api import Ok, Snapshot
from probes.host.recording import load

FOLDER = Path(__file__).parent.parent / "machines"
PATHS = tuple(sorted(FOLDER.glob("*.json")))
NAMES = tuple(path.stem for path in PATHS)
H100 = "hgx-h100-8xH100-8hca"


def path_of(name: str = H100) -> Path:
    """The recording's file."""
    return FOLDER / f"{name}.json"


@cache
def snapshot(name: str = H100) -> Snapshot:
    """The scan of a recording."""
    return scan(load(path_of(name)))


@cache
def view(name: str = H100) -> View:
    """What the checks say of it."""
    return look((snapshot(name),))


def with_outcomes(found: Snapshot, **outcomes: Any) -> Snapshot:
    """The same host, of which some probes ended otherwise."""
    return replace(found, outcomes={**found.outcomes, **outcomes})


def with_facts(found: Snapshot, **facts: Any) -> Snapshot:
    """The same host with other facts, by the probe's name."""
    return with_outcomes(found, **{name: Ok(facts=each) for name, each in facts.items()})


def changed(found: Snapshot, kind: type, **changes: Any) -> Snapshot:
    """The same host with some fields of one probe's facts replaced."""
    ((name, facts),) = (
        (name, one.facts) for name, one in found.outcomes.items() if isinstance(getattr(one, "facts", None), kind)
    )
    return with_facts(found, **{name: replace(facts, **changes)})


def of_code(seen: View, code: str) -> list[Finding]:
    """The checks of one code."""
    return [check for check in seen.checks if check.code == code]


def statuses(seen: View, code: str) -> set[str]:
    """What the checks of one code came to."""
    return {check.status for check in of_code(seen, code)}


def raised(seen: View) -> set[str]:
    """The codes of what fails or warns."""
    return {check.code for check in seen.checks if check.status in ("fail", "warn")}
