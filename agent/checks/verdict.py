"""The gate, which turns findings into a verdict and an exit code: docs/reference/exit-codes.md has the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from agent.base import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PASS, EXIT_STOPPED, EXIT_UNKNOWN, EXIT_WARNED, units
from agent.checks.findings import MANY_CODES, ORDER, group_findings, sort_worst_first
from contracts.finding import Finding, Status

FailOn = Literal["fail", "warn", "unknown"]
IN_BASELINE = "also in the baseline: "  # a failure or warning that --baseline turned into info


class GateError(ValueError):
    """A `--require`, `--skip` or expectation is invalid; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of all checks together."""

    word: Literal["pass", "warn", "fail", "unknown"]
    exit_code: int
    counts: dict[str, int]  # results by status: a check on ten devices counts ten times
    why: str
    listed: dict[str, int] = field(default_factory=dict)  # failures and warnings as grouped in lists; other checks


def select(
    checks: Iterable[Finding], *, require: Sequence[str] = (), skip: Sequence[str] = (), codes: Iterable[str] = ()
) -> tuple[Finding, ...]:
    """Remove skipped checks and mark required ones; patterns are shell-style: "rdma.*".

    Raises GateError if a pattern matches none of `codes` and no check, because a typing error must not look like a
    pass. A required check without any result is added as unknown.
    """
    checks = tuple(checks)
    names = {check.code for check in checks} | set(codes)

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    for option, patterns in (("--require", require), ("--skip", skip)):
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in names):
                from difflib import get_close_matches

                close = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0.4))
                raise GateError(f"{option} {pattern}: no such check; try {close or '`topoflight explain --list`'}")
    selected = [
        replace(check, required=check.required or matches(check.code, require))
        for check in checks if not matches(check.code, skip)
    ]  # fmt: skip
    without = names - {check.code for check in selected}
    return (*selected, *(
        Finding(code=name, status=Status.UNKNOWN, node="", message="not measured in this run", required=True)
        for name in sorted(without) if matches(name, require) and not matches(name, skip)
    ))  # fmt: skip


def judge(checks: Iterable[Finding], *, fail_on: FailOn = "fail", stopped: str = "") -> Verdict:
    """Return the verdict and the exit code; a failure outweighs an unknown, an unknown outweighs a warning.

    `stopped` is the signal that ended the run before all checks were done. The verdict is then not a pass, and after
    Ctrl-C the exit code is the shell's code for it, whatever was found before.
    """
    checks = tuple(checks)
    results = {status: [check for check in checks if check.status == status] for status in ORDER}
    listed = _count_listed(checks)
    prefix = f"{aside}; " if (aside := describe_unchecked_gpus(checks)) else ""

    def verdict(word: Literal["pass", "warn", "fail", "unknown"], exit_code: int, summary: str) -> Verdict:
        code = EXIT_INTERRUPTED if stopped == "SIGINT" else exit_code
        counts: dict[str, int] = {status: len(checks) for status, checks in results.items()}
        return Verdict(word=word, exit_code=code, why=summary, counts=counts, listed=listed)

    if results[Status.FAIL]:
        reason = units.tally({status: listed[status] for status in (Status.FAIL, Status.WARN)})
        return verdict("fail", EXIT_FAILED, reason)
    if stopped:
        return verdict("unknown", EXIT_STOPPED, f"stopped by {stopped} before it was done")
    if required := [check for check in results[Status.UNKNOWN] if check.required]:
        return verdict("unknown", EXIT_UNKNOWN, f"required but not measured: {_name_unmeasured(required)}")
    if pending := sorted({check.code for check in checks if check.pending}):
        return verdict("unknown", EXIT_UNKNOWN, f"seen once, not confirmed by a second scan yet: {', '.join(pending)}")
    if fail_on == "unknown" and results[Status.UNKNOWN]:
        unknown = len({check.code for check in results[Status.UNKNOWN]})
        reason = f"{units.count(unknown, 'check')} could not be measured, and --fail-on unknown"
        return verdict("unknown", EXIT_UNKNOWN, reason)
    if results[Status.WARN]:
        code = EXIT_WARNED if fail_on in ("warn", "unknown") else EXIT_PASS
        return verdict("warn", code, prefix + units.count(listed["warn"], "warning"))
    if not results[Status.PASS] and not results[Status.INFO]:  # no check, no node, or only unknowns
        return verdict("unknown", EXIT_UNKNOWN, "nothing was measured")
    unrun = f"; {units.count(listed['unknown'], 'check')} could not run" if listed["unknown"] else ""
    old = sum(check.message.startswith(IN_BASELINE) for check in results[Status.INFO])
    summary = f"no new problems; {units.count(old, 'problem')} of the baseline remain" if old else "no problems found"
    return verdict("pass", EXIT_PASS, f"{prefix}{summary}{unrun}")


def describe_unchecked_gpus(checks: Iterable[Finding]) -> str:
    """Return a warning if hosts were checked without their GPUs, because a pass then does not cover them; else ""."""
    judged_by_node: dict[str, bool] = {}
    for check in checks:
        if check.code.startswith("gpu.") and not check.code.endswith(".probe.failed") and check.node:
            judged_by_node[check.node] = judged_by_node.get(check.node, False) or check.status != "unknown"
    without = [node for node, judged in judged_by_node.items() if not judged]
    if without and len(without) == len(judged_by_node):
        return "no GPU was checked"
    return units.some(without, "no GPU was checked on ", 4)


def _name_unmeasured(checks: Sequence[Finding]) -> str:
    """Return the codes that were not measured; many codes of one family with one reason are written "gpu.* (why)"."""
    by_reason: dict[tuple[str, str], set[str]] = {}
    for check in checks:
        by_reason.setdefault((check.code.split(".")[0], check.message.rstrip(".")), set()).add(check.code)
    return ", ".join(sorted({
        f"{family}.* ({reason})" if len(codes) > MANY_CODES else ", ".join(sorted(codes))
        for (family, reason), codes in by_reason.items()
    }))  # fmt: skip


def _count_listed(checks: Sequence[Finding]) -> dict[str, int]:
    """Count failures and warnings as every list groups them, and the other checks by their worst result."""
    worst: dict[str, Status] = {}
    for check in sort_worst_first(checks):
        worst.setdefault(check.code, check.status)
    groups, codes = Counter(group.status for group in group_findings(checks)), Counter(worst.values())
    return {status: (groups if status in ("fail", "warn") else codes)[status] for status in ORDER}
