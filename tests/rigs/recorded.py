"""The recorded machines of tests/machines, each scanned and judged once in a process: tests only read what they get."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from agent.checks.view import View, build_view
from contracts.finding import Finding
from probes.api import Ok, Snapshot
from probes.host.recording import load
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL, BY_NAME, check_facts, report_failures
from probes.worker import scan

FOLDER = Path(__file__).parent.parent / "machines"
PATHS = tuple(sorted(FOLDER.glob("*.json")))
NAMES = tuple(path.stem for path in PATHS)
H100 = "hgx-h100-8xH100-8hca"
Facts = TypeVar("Facts")


def path_of(name: str = H100) -> Path:
    """The recording's file."""
    return FOLDER / f"{name}.json"


@cache
def snapshot(name: str = H100) -> Snapshot:
    """The scan of a recording."""
    return scan(load(path_of(name)), ALL)


@cache
def view(name: str = H100) -> View:
    """What the checks say of it."""
    return build_view((snapshot(name),))


def facts(kind: type[Facts], found: Snapshot | str = H100) -> Facts:
    """The facts of one probe, which has answered on this machine."""
    made = (snapshot(found) if isinstance(found, str) else found).facts(kind)  # type: ignore[type-var]
    assert made is not None, kind
    return made


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


def each(things: Iterable[Any], **changes: Any) -> tuple[Any, ...]:
    """Dataclasses of one kind, each with these fields replaced."""
    return tuple(replace(thing, **changes) for thing in things)


def with_ports(found: Snapshot, device: str = "", **changes: Any) -> Snapshot:
    """The same host with some fields of every RDMA port replaced, or of those of one device."""
    devices = facts(RdmaFacts, found).devices
    made = (replace(d, ports=each(d.ports, **changes)) if device in ("", d.name) else d for d in devices)
    return changed(found, RdmaFacts, devices=tuple(made))


def findings(found: Snapshot) -> tuple[Finding, ...]:
    """The findings of every probe, without the passes and the unknowns that a gate adds; a failed probe is one too."""
    answered = [(name, each.facts) for name, each in found.outcomes.items() if isinstance(each, Ok)]
    said = (finding for name, facts in answered for finding in check_facts(found, BY_NAME[name], facts))
    return (*report_failures(found), *said)


def of_code(seen: View, code: str) -> list[Finding]:
    """The checks of one code."""
    return [check for check in seen.checks if check.code == code]


def statuses(seen: View | Snapshot, code: str) -> set[str]:
    """What the checks of one code came to, on a view or on a host that is looked at now."""
    return {check.status for check in of_code(build_view((seen,)) if isinstance(seen, Snapshot) else seen, code)}


def raised(seen: View) -> set[str]:
    """The codes of what fails or warns."""
    return {check.code for check in seen.checks if check.status in ("fail", "warn")}
