"""Regressions: a run's checks against those of a recorded good state.

A baseline is the report.json of an earlier preflight, or a recording (`topoflight capture`), which is judged by this
release. What stood in the baseline already is told and does not fail; what passed there must be measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.gate import ORDER, Check, GateError, Status
from agent.report import SCHEMA_VERSION
from probes import bounded
from probes.plain import PlainError
from probes.plain import loads as plain

LIMIT_BYTES = 32 << 20  # as much as a recording may have
Key = tuple[str, str, str]  # code, node, subject
_BETTER: tuple[Status, ...] = tuple(reversed(ORDER))  # pass, info, unknown, warn, fail


def read(path: Path) -> dict[Key, Status]:
    """The statuses of a report or of a recording. Raises GateError."""
    try:
        raw = bounded.read(path, LIMIT_BYTES)
    except OSError as error:
        raise GateError(f"--baseline {path}: {error.strerror}") from None
    except bounded.TooLargeError as error:
        raise GateError(f"--baseline {path}: {error}") from None
    try:
        value = plain(raw)
    except PlainError:
        value = None
    if isinstance(value, dict) and isinstance(value.get("checks"), list):
        version = value.get("schema_version")
        if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
            raise GateError(
                f"--baseline {path}: schema_version is {version!r}; this release reads 1 to {SCHEMA_VERSION}"
            )
        return _of_report(path, value["checks"])
    from agent.view import look
    from probes.recording import RecordingError, load
    from probes.scan import scan

    try:
        view = look((scan(load(path)),))
    except RecordingError as error:
        raise GateError(f"--baseline {path}: neither a report.json nor a recording: {error}") from None
    return _worst((check.id, check.node, check.subject, check.status) for check in view.checks)


def _of_report(path: Path, checks: list[Any]) -> dict[Key, Status]:
    try:
        return _worst((str(c["id"]), str(c["node"]), str(c["subject"]), c["status"]) for c in checks)
    except (KeyError, TypeError, ValueError) as error:
        raise GateError(f"--baseline {path}: a check that is none: {error!r}") from None


def _worst(found: Iterable[tuple[str, str, str, Any]]) -> dict[Key, Status]:
    held: dict[Key, Status] = {}
    for code, node, subject, status in found:
        key = code, node, subject
        if status not in ORDER:
            raise ValueError(f"status {status!r}: must be one of {', '.join(ORDER)}")
        if key not in held or ORDER.index(status) < ORDER.index(held[key]):
            held[key] = status
    return held


def regressions(checks: Iterable[Check], baseline: Mapping[Key, Status]) -> tuple[Check, ...]:
    """The checks with what stood in the baseline made "info", and what can no longer be measured made "fail".

    Nodes are matched by name; a run and a baseline of one node each are taken for the same node.
    """
    checks = tuple(checks)
    then, now = {node for _, node, _ in baseline if node}, {check.node for check in checks if check.node}
    alias = {next(iter(now)): next(iter(then))} if len(then) == len(now) == 1 else {}
    passed = {(code, node) for (code, node, _), status in baseline.items() if status == "pass"}
    return tuple(_judged(check, alias.get(check.node, check.node), baseline, passed) for check in checks)


def _judged(check: Check, node: str, baseline: Mapping[Key, Status], passed: set[tuple[str, str]]) -> Check:
    if check.status == "unknown" and (check.id, node) in passed:
        return replace(check, status="fail", message=f"passed in the baseline, not measured now: {check.message}")
    before = baseline.get((check.id, node, check.subject))
    if check.status in ("fail", "warn") and before is not None and _BETTER.index(before) >= _BETTER.index(check.status):
        return replace(check, status="info", message=f"stands in the baseline too: {check.message}")
    return check
