"""The gate: findings in, a verdict and an exit code out.

A check passes only where its probe answered and raised nothing under that code; a probe that is absent or failed
leaves its checks "unknown", which is never a pass. The exit codes are a table in docs/exit-codes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from agent import units
from agent.exits import EXIT_FAILED, EXIT_PASS, EXIT_UNKNOWN, EXIT_WARNED
from probes.api import Absent, Failed, Finding, Ok, Snapshot
from probes.registry import ALL
from probes.scan import SCAN_CODES, failures

Status = Literal["pass", "info", "unknown", "warn", "fail"]
ORDER: tuple[Status, ...] = ("fail", "warn", "unknown", "info", "pass")  # worst first, as they are printed

FailOn = Literal["fail", "warn", "unknown"]


class GateError(ValueError):
    """A `--require` or `--skip` that names no check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verdict of the gate about one subject of one node."""

    id: str  # finding code
    status: Status
    node: str
    subject: str = ""
    message: str = ""
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The sum of all checks."""

    word: Literal["pass", "warn", "fail", "unknown"]
    exit_code: int
    counts: dict[str, int]
    why: str


def checks_of_snapshot(snapshot: Snapshot) -> tuple[Check, ...]:
    """Every code of every probe, judged on one host."""
    checks: list[Check] = []
    for probe in ALL:
        outcome = snapshot.outcomes.get(probe.name)
        if isinstance(outcome, Ok):
            found = tuple(probe.check(outcome.facts))
            checks.extend(checks_of_findings(snapshot.hostname, found, probe.codes))
            continue
        if isinstance(outcome, Absent):
            why = f"absent: {outcome.why}"
        elif isinstance(outcome, Failed):
            why = f"the {probe.name} probe failed: {outcome.error}"
        else:
            why = f"the {probe.name} probe did not run"
        checks.extend(Check(id=code, status="unknown", node=snapshot.hostname, message=why) for code in probe.codes)
    checks.extend(checks_of_findings(snapshot.hostname, failures(snapshot), SCAN_CODES))
    return tuple(checks)


def checks_of_findings(node: str, findings: Iterable[Finding], codes: Sequence[str]) -> tuple[Check, ...]:
    """Findings as checks, and a pass for each code that was judged and raised nothing."""
    raised: set[str] = set()
    checks: list[Check] = []
    for finding in findings:
        raised.add(finding.code)
        checks.append(
            Check(
                id=finding.code,
                status=finding.severity.value,
                node=node,
                subject=finding.subject,
                message=finding.message,
                evidence=finding.evidence,
                remedy=finding.remedy,
            )
        )
    checks.extend(Check(id=code, status="pass", node=node) for code in codes if code not in raised)
    return tuple(checks)


def select(
    checks: Iterable[Check], *, require: Sequence[str] = (), skip: Sequence[str] = (), known: Iterable[str] = ()
) -> tuple[Check, ...]:
    """Drop the skipped checks and mark the required ones; patterns are shell-style: "rdma.*".

    A pattern that matches none of `known` and none of the checks raises GateError: a typing error in a gate must
    not read as a pass. A required check that was never judged at all is added as unknown.
    """
    checks = tuple(checks)
    names = {check.id for check in checks} | set(known)
    for option, patterns in (("--require", require), ("--skip", skip)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise GateError(f"{option} {pattern}: no such check; `topoflight preflight --list-checks` lists them")
    kept = []
    for check in checks:
        if any(fnmatchcase(check.id, pattern) for pattern in skip):
            continue
        required = any(fnmatchcase(check.id, pattern) for pattern in require)
        kept.append(replace(check, required=required))
    judged = {check.id for check in kept}
    for pattern in require:
        for name in sorted(names - judged):
            if fnmatchcase(name, pattern) and not any(fnmatchcase(name, skipped) for skipped in skip):
                judged.add(name)
                kept.append(
                    Check(id=name, status="unknown", node="", message="not measured in this run", required=True)
                )
    return tuple(kept)


def judge(checks: Iterable[Check], *, fail_on: FailOn = "fail") -> Verdict:
    """The verdict and the exit code; a failure outweighs an unknown, an unknown outweighs a warning."""
    checks = tuple(checks)
    counts: dict[str, int] = dict.fromkeys(ORDER, 0)
    for check in checks:
        counts[check.status] += 1
    required_unknown = [check for check in checks if check.required and check.status == "unknown"]
    if counts["fail"]:
        return Verdict(
            word="fail", exit_code=EXIT_FAILED, counts=counts, why=units.count(counts["fail"], "check") + " failed"
        )
    if required_unknown:
        names = ", ".join(sorted({check.id for check in required_unknown}))
        return Verdict(word="unknown", exit_code=EXIT_UNKNOWN, counts=counts, why=f"required but not measured: {names}")
    if fail_on == "unknown" and counts["unknown"]:
        why = f"{counts['unknown']} checks could not be measured, and --fail-on unknown"
        return Verdict(word="unknown", exit_code=EXIT_UNKNOWN, counts=counts, why=why)
    if counts["warn"]:
        code = EXIT_WARNED if fail_on in ("warn", "unknown") else EXIT_PASS
        return Verdict(word="warn", exit_code=code, counts=counts, why=units.count(counts["warn"], "warning"))
    return Verdict(word="pass", exit_code=EXIT_PASS, counts=counts, why="no check failed")


def worst_first(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Failures first, then by code and subject."""
    return tuple(sorted(checks, key=lambda check: (ORDER.index(check.status), check.id, check.node, check.subject)))
